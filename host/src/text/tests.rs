//! Encoding, decoding, loading and hostile files, over one tiny tokenizer of each kind.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::fixtures::{
    byte_level, byte_level_gguf, byte_level_json, from_json, sentence, sentence_gguf, unigram_json,
    word_piece_json,
};
use super::*;

const VERBATIM: DetokenizerOptions = DetokenizerOptions {
    skip_control: false,
    start: StreamStart::Text,
};

fn text(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_text(text, Boundary::Bare).unwrap()
}

fn markup(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_markup(text, Boundary::Bare).unwrap()
}

fn whole(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer
        .inner
        .library
        .encode_fast(text, false)
        .unwrap()
        .get_ids()
        .to_vec()
}

#[test]
fn spelled_control_tokens_are_text_in_text_and_tokens_in_markup() {
    let tokenizer = byte_level();
    let spelled = "hello<|im_end|>the <|im_start|>";
    let ids = text(&tokenizer, spelled);
    assert!(
        ids.iter().all(|&id| !tokenizer.control().contains(id)),
        "{ids:?}"
    );
    assert_eq!(tokenizer.decode(&ids, VERBATIM), spelled);
    let ids = markup(&tokenizer, spelled);
    assert_eq!(
        ids.iter()
            .filter(|&&id| tokenizer.control().contains(id))
            .count(),
        2
    );
    // User-defined tokens are not control tokens: they match in any text.
    assert!(text(&tokenizer, "a<think>b").contains(&4));
}

#[test]
fn only_marked_spellings_of_a_template_are_text() {
    let tokenizer = byte_level();
    let rendered = "<|im_start|>user\nhi<|im_end|>there<|im_end|>";
    let mark = 19..29;
    assert_eq!(&rendered[mark.clone()], "<|im_end|>");
    let ids = tokenizer
        .encode_template(
            &Prompt::with_literal(rendered, [mark]),
            BosRule::FromTemplate,
        )
        .unwrap();
    let control: Vec<u32> = ids
        .iter()
        .copied()
        .filter(|&id| tokenizer.control().contains(id))
        .collect();
    assert_eq!(control, [1, 2]);
    assert_eq!(tokenizer.decode(&ids, VERBATIM), rendered);
    let unmarked = tokenizer
        .encode_template(&Prompt::trusted(rendered), BosRule::FromTemplate)
        .unwrap();
    assert_eq!(unmarked, whole(&tokenizer, rendered));
}

#[test]
fn overlapping_spellings_do_not_hide_each_other() {
    // Cutting "<|im_end|>" could uncover "|im_end|><" if that were a token; take one that does overlap.
    let mut json = byte_level_json();
    json["added_tokens"].as_array_mut().unwrap().push(
        json!({"id": 273, "content": "|im_end|>X", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true}),
    );
    let tokenizer = from_json(&json);
    let spelled = "<|im_end|>X";
    let ids = text(&tokenizer, spelled);
    assert!(
        ids.iter().all(|&id| !tokenizer.control().contains(id)),
        "{ids:?}"
    );
    assert_eq!(tokenizer.decode(&ids, VERBATIM), spelled);
    let prompt = Prompt::with_literal(spelled, std::iter::once(0..10));
    let ids = tokenizer
        .encode_template(&prompt, BosRule::FromTemplate)
        .unwrap();
    assert!(
        ids.iter().all(|&id| !tokenizer.control().contains(id)),
        "{ids:?}"
    );
}

#[test]
fn sentence_pieces_keep_their_blanks_around_a_cut() {
    let tokenizer = sentence();
    for spelled in [
        "the</s>the",
        "</s>",
        "  in</s> the",
        "한é</s>\n",
        "</s></s> s",
    ] {
        let ids = text(&tokenizer, spelled);
        assert!(ids.iter().all(|&id| id > 2), "{spelled}: {ids:?}");
        assert_eq!(tokenizer.decode(&ids, VERBATIM), spelled);
    }
    assert_eq!(markup(&tokenizer, "the</s>")[1], 2);
}

#[test]
fn a_normalizer_cannot_forge_a_control_token() {
    let tokenizer = from_json(&unigram_json());
    assert!(tokenizer.control().contains(1));
    for spelled in ["a</s>a", "a＜/s＞a", "＜/ｓ＞", "</s></s>"] {
        let ids = text(&tokenizer, spelled);
        assert!(!ids.contains(&1), "{spelled}: {ids:?}");
        let prompt = Prompt::with_literal(
            spelled,
            tokenizer
                .control()
                .find_in(spelled)
                .into_iter()
                .map(|s| s.range),
        );
        let ids = tokenizer
            .encode_template(&prompt, BosRule::FromTemplate)
            .unwrap();
        assert!(!ids.contains(&1), "template, {spelled}: {ids:?}");
    }
    assert!(markup(&tokenizer, "a</s>").contains(&1));
}

#[test]
fn a_one_character_control_token_is_refused_rather_than_smuggled() {
    let mut json = byte_level_json();
    json["added_tokens"]
        .as_array_mut()
        .unwrap()
        .push(json!({"id": 273, "content": "☃", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true}));
    let error = from_json(&json)
        .encode_text("a☃", Boundary::Bare)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the text spells control token `☃` and cannot be encoded as plain text"
    );
}

#[test]
fn bos_is_added_once() {
    let tokenizer = Tokenizer::from_gguf(&GgufTokenizer {
        add_bos: Some(true),
        ..byte_level_gguf()
    })
    .unwrap();
    let bos = tokenizer.bos_id().unwrap();
    assert_eq!(
        tokenizer.encode_text("the", Boundary::AsTrained).unwrap()[..1],
        [bos]
    );
    let template = Prompt::trusted("<|im_start|>the");
    for rule in [BosRule::FromTemplate, BosRule::IfMissing] {
        let ids = tokenizer.encode_template(&template, rule).unwrap();
        assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 1, "{rule:?}");
    }
    let bare = Prompt::trusted("the");
    assert!(
        !tokenizer
            .encode_template(&bare, BosRule::FromTemplate)
            .unwrap()
            .contains(&bos)
    );
    assert_eq!(
        tokenizer
            .encode_template(&bare, BosRule::IfMissing)
            .unwrap()[0],
        bos
    );
    let markup = tokenizer
        .encode_markup("<|im_start|>the", Boundary::AsTrained)
        .unwrap();
    assert_eq!(markup.iter().filter(|&&id| id == bos).count(), 1);
    // A person who types the BOS gets it as text behind the real one.
    let ids = tokenizer
        .encode_text("<|im_start|>the", Boundary::AsTrained)
        .unwrap();
    assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 1);
    assert_eq!(tokenizer.decode(&ids[1..], VERBATIM), "<|im_start|>the");
}

#[test]
fn the_frame_comes_from_the_post_processor_and_truncation_is_off() {
    let tokenizer = from_json(&word_piece_json());
    let ids = tokenizer
        .encode_text("ab a b ab aab.", Boundary::AsTrained)
        .unwrap();
    assert_eq!(ids, [1, 3, 4, 3, 6, 3, 4, 3, 5, 4, 7, 2]);
    assert_eq!(
        tokenizer.decode(&ids, DetokenizerOptions::default()),
        "ab a b ab aab."
    );
    let spelled = text(&tokenizer, "a [SEP] b");
    assert!(!spelled.contains(&2), "{spelled:?}");
}

#[test]
fn side_files_add_tokens_names_and_framing() {
    let mut json = byte_level_json();
    json["added_tokens"].as_array_mut().unwrap().pop();
    let load = |config: &Value, map: &Value, added: &Value| {
        Tokenizer::from_files(json.to_string().as_bytes(), config, map, added)
    };
    let config = json!({
        "bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": false}, "pad_token": "<|nowhere|>",
        "add_bos_token": true,
        "added_tokens_decoder": {"273": {"content": "<|new|>", "special": true}},
        "additional_special_tokens": ["<think>"]
    });
    let tokenizer = load(&config, &json!({"unk_token": "<|pad|>"}), &Value::Null).unwrap();
    assert_eq!(tokenizer.id_of("<|new|>"), Some(273));
    assert_eq!(tokenizer.named_id("eos_token"), Some(2));
    assert_eq!(tokenizer.named_id("pad_token"), None);
    assert_eq!(tokenizer.named_id("unk_token"), Some(3));
    assert!(
        tokenizer.control().contains(4),
        "listed special tokens are control tokens"
    );
    assert_eq!(
        tokenizer.encode_text("the", Boundary::AsTrained).unwrap()[0],
        1
    );

    let wrong = json!({"added_tokens_decoder": {"300": {"content": "<|new|>", "special": true}}});
    insta::assert_snapshot!(
        load(&wrong, &Value::Null, &Value::Null).unwrap_err(),
        @"`tokenizer_config.json` declares id 300 for token `<|new|>`, but the vocabulary gives 273"
    );
    let added = load(&Value::Null, &Value::Null, &json!({"<|more|>": 273})).unwrap();
    assert_eq!(added.id_of("<|more|>"), Some(273));
}

#[test]
fn bad_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("tokenizer.json")).unwrap();
    let error = Tokenizer::from_directory(dir.path()).unwrap_err();
    assert!(
        std::error::Error::source(&error)
            .is_some_and(|e| e.to_string() == "expected a regular file")
    );
    std::fs::remove_dir(dir.path().join("tokenizer.json")).unwrap();
    let error = Tokenizer::from_directory(dir.path()).unwrap_err();
    assert!(matches!(error, TextError::NoTokenizer { .. }), "{error}");
    std::fs::write(dir.path().join("tokenizer.model"), b"x").unwrap();
    let error = Tokenizer::from_directory(dir.path())
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with("found tokenizer.model, which must be converted to `tokenizer.json` first"),
        "{error}"
    );

    let mut json = byte_level_json();
    json["model"]["dropout"] = json!(0.1);
    let load = |json: &Value| {
        Tokenizer::from_files(
            json.to_string().as_bytes(),
            &Value::Null,
            &Value::Null,
            &Value::Null,
        )
        .unwrap_err()
    };
    assert!(
        load(&json)
            .to_string()
            .contains("model.dropout is 0.1, expected none")
    );
    let mut json = byte_level_json();
    json["added_tokens"][1]["id"] = json!(7);
    assert!(matches!(
        load(&json),
        TextError::TokenId { declared: 7, .. }
    ));
}

#[test]
fn directory_loads_like_its_parts() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(
        dir.path().join("tokenizer.json"),
        byte_level_json().to_string(),
    )
    .unwrap();
    std::fs::write(
        dir.path().join("tokenizer_config.json"),
        json!({"eos_token": "<|im_end|>"}).to_string(),
    )
    .unwrap();
    std::fs::write(
        dir.path().join("generation_config.json"),
        json!({"eos_token_id": [0, 2]}).to_string(),
    )
    .unwrap();
    let tokenizer = Tokenizer::from_directory(dir.path()).unwrap();
    assert_eq!(
        text(&tokenizer, "the hello"),
        text(&byte_level(), "the hello")
    );
    let eos = EosSet::from_directory(dir.path(), &tokenizer).unwrap();
    assert_eq!(eos.ids().collect::<Vec<_>>(), [0, 2]);
}

#[test]
fn eos_is_the_union_of_all_sources() {
    let tokenizer = byte_level();
    let eos = EosSet::from_configs(
        &json!({"eos_token_id": [2, 0]}),
        &json!({"eos_token_id": 0, "text_config": {"eos_token_id": 3}}),
        &json!({"eos_token": {"content": "<|im_end|>"}}),
        &tokenizer,
    )
    .unwrap();
    let lines: Vec<String> = eos
        .entries()
        .iter()
        .map(|entry| {
            let sources: Vec<String> = entry.sources.iter().map(ToString::to_string).collect();
            format!(
                "{} {} ({})",
                entry.id,
                entry.token.as_deref().unwrap_or("-"),
                sources.join(", ")
            )
        })
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    0 <|endoftext|> (generation_config.json eos_token_id, config.json eos_token_id)
    2 <|im_end|> (generation_config.json eos_token_id, tokenizer eos_token)
    3 <|pad|> (config.json text_config.eos_token_id)
    ");
    let bad = EosSet::from_configs(
        &json!({"eos_token_id": -1}),
        &Value::Null,
        &Value::Null,
        &tokenizer,
    )
    .unwrap_err();
    assert_eq!(
        bad.to_string(),
        "`generation_config.json` is not valid: eos_token_id has -1, expected a token id or a list of them"
    );
    let bos = json!({"bos_token_id": "1"});
    let bad = EosSet::from_configs(&Value::Null, &bos, &Value::Null, &tokenizer).unwrap_err();
    assert_eq!(
        bad.to_string(),
        "`config.json` is not valid: bos_token_id has \"1\", expected a token id"
    );
    let gguf = GgufTokenizer {
        eos: Some(0),
        eom: Some(3),
        ..byte_level_gguf()
    };
    let eos = EosSet::from_gguf(&gguf, &tokenizer);
    assert_eq!(eos.ids().collect::<Vec<_>>(), [0, 2, 3]);
    assert_eq!(eos.entries()[1].sources, [EosSource::UsualName]);
}

#[test]
fn ids_that_a_model_does_not_have_are_taken_out_with_their_sources() {
    let mut eos = EosSet::from_configs(
        &json!({"eos_token_id": [0, 1_000_000_000]}),
        &json!({"eos_token_id": 1_000_000_000}),
        &Value::Null,
        &sentence(),
    )
    .unwrap();
    let taken: Vec<String> = eos
        .take_beyond(64)
        .iter()
        .map(ToString::to_string)
        .collect();
    insta::assert_snapshot!(taken.join("; "), @"1000000000 (generation_config.json eos_token_id, config.json eos_token_id)");
    assert!(!eos.is_empty() && eos.ids().all(|id| id < 64));
}

#[test]
fn a_stream_start_decides_over_the_first_blank() {
    let tokenizer = sentence();
    let ids = text(&tokenizer, "the s");
    let continued = DetokenizerOptions {
        start: StreamStart::Continuation,
        ..VERBATIM
    };
    assert_eq!(tokenizer.decode(&ids, VERBATIM), "the s");
    assert_eq!(tokenizer.decode(&ids, continued), " the s");
}

#[test]
fn control_tokens_are_left_out_on_request() {
    let tokenizer = byte_level();
    let ids = markup(&tokenizer, "<|im_start|>hello<|im_end|>");
    assert_eq!(
        tokenizer.decode(&ids, DetokenizerOptions::default()),
        "hello"
    );
    assert_eq!(
        tokenizer.decode_verbatim(&ids),
        "<|im_start|>hello<|im_end|>"
    );
    assert_eq!(tokenizer.decode(&[9999], VERBATIM), "");
}

#[test]
fn an_unknown_decoder_is_streamed_by_window() {
    let mut json = byte_level_json();
    json["decoder"] = json!({"type": "Sequence", "decoders": [{"type": "ByteLevel", "add_prefix_space": true,
        "trim_offsets": true, "use_regex": true}, {"type": "Fuse"}]});
    let tokenizer = from_json(&json);
    assert_eq!(*tokenizer.piece_style(), super::piece::PieceStyle::Window);
    let sample = "hello 😀 한글 the\u{301} <think> end";
    let ids = text(&tokenizer, sample);
    assert_eq!(tokenizer.decode(&ids, VERBATIM), sample);
    let mut stream = tokenizer.detokenizer(VERBATIM);
    for &id in &ids {
        assert!(!stream.push(id).contains(char::REPLACEMENT_CHARACTER));
    }
}

/// Text with the characters that the tiny vocabularies and the control spellings are made of.
fn spelled_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        "[a-z ]{0,6}",
        "\\PC{0,4}",
        Just("<|im_end|>".to_owned()),
        Just("<|im_".to_owned()),
        Just("end|>".to_owned()),
        Just("</s>".to_owned()),
        Just("  the".to_owned()),
        Just("\n".to_owned()),
        Just("😀한".to_owned()),
    ];
    prop::collection::vec(part, 0..8).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn text_never_yields_control_tokens_and_loses_nothing(sample in spelled_text()) {
        for tokenizer in [byte_level(), sentence()] {
            let ids = text(&tokenizer, &sample);
            prop_assert!(ids.iter().all(|&id| !tokenizer.control().contains(id)));
            prop_assert_eq!(tokenizer.decode(&ids, VERBATIM), sample.clone());
            if tokenizer.control().find_in(&sample).is_empty() {
                prop_assert_eq!(ids, whole(&tokenizer, &sample));
            }
            let trusted = tokenizer.encode_template(&Prompt::trusted(sample.clone()), BosRule::FromTemplate).unwrap();
            prop_assert_eq!(trusted, whole(&tokenizer, &sample));
        }
    }

    #[test]
    fn marks_elsewhere_change_nothing_and_marks_here_leave_only_trusted_tokens(
        parts in prop::collection::vec((spelled_text(), any::<bool>()), 0..5),
    ) {
        let tokenizer = byte_level();
        let mut rendered = String::new();
        let mut literal = Vec::new();
        let mut trusted = 0;
        for (user, end_turn) in parts {
            let base = rendered.len();
            literal.extend(tokenizer.control().find_in(&user).into_iter().map(|s| base + s.range.start..base + s.range.end));
            rendered.push_str(&user);
            // A blank keeps a user's "<|im_" from joining the template's token: the renderer's task, not ours.
            rendered.push(' ');
            if end_turn {
                rendered.push_str("<|im_end|>");
                trusted += 1;
            }
        }
        let prompt = Prompt::with_literal(rendered.clone(), literal.clone());
        let ids = tokenizer.encode_template(&prompt, BosRule::FromTemplate).unwrap();
        prop_assert_eq!(ids.iter().filter(|&&id| tokenizer.control().contains(id)).count(), trusted);
        prop_assert_eq!(tokenizer.decode(&ids, VERBATIM), rendered.clone());
        if literal.is_empty() {
            prop_assert_eq!(ids, whole(&tokenizer, &rendered));
        }
    }

    #[test]
    fn joined_stream_is_the_full_decode(picks in prop::collection::vec(0u32..400, 0..40), skip in any::<bool>()) {
        for tokenizer in [byte_level(), sentence(), from_json(&word_piece_json()), from_json(&unigram_json())] {
            let ids: Vec<u32> = picks.iter().map(|pick| pick % tokenizer.vocab_size() as u32).collect();
            let mut stream = tokenizer.detokenizer(DetokenizerOptions { skip_control: skip, ..VERBATIM });
            let mut joined = String::new();
            for &id in &ids {
                joined.push_str(&stream.push(id));
            }
            joined.push_str(&stream.finish());
            prop_assert!(!stream.is_pending());
            let reference = tokenizer.inner.library.decode(&ids, skip).unwrap();
            // The reference replaces every byte of a run with one bad byte; see the module's documentation.
            if !reference.contains(char::REPLACEMENT_CHARACTER) || *tokenizer.piece_style() == super::piece::PieceStyle::ByteLevel {
                prop_assert_eq!(joined, reference);
            }
        }
    }

    #[test]
    fn no_delta_breaks_a_character(sample in "[a😀한é\u{200d}👩🏽]{0,12}") {
        for tokenizer in [byte_level(), sentence()] {
            let mut stream = tokenizer.detokenizer(VERBATIM);
            let mut joined = String::new();
            for id in text(&tokenizer, &sample) {
                joined.push_str(&stream.push(id));
                prop_assert!(sample.starts_with(&joined), "{joined:?}");
            }
            joined.push_str(&stream.finish());
            prop_assert_eq!(joined, sample.clone());
        }
    }
}

/// Seeded mutations of a `tokenizer.json`: errors are fine, panics are not.
#[test]
fn mutated_tokenizer_files_never_panic() {
    let seeds = [byte_level_json(), word_piece_json(), unigram_json()].map(|json| json.to_string());
    let mut random = super::fixtures::Lcg(7);
    for round in 0..600 {
        let bytes = random.mutate(seeds[round % seeds.len()].as_bytes());
        if let Ok(tokenizer) =
            Tokenizer::from_files(&bytes, &Value::Null, &Value::Null, &Value::Null)
        {
            let _ = tokenizer.encode_text("the hello </s> <|im_end|>", Boundary::AsTrained);
            let _ = tokenizer.decode(&[0, 1, 2, 50, 9000], VERBATIM);
        }
    }
}

#[test]
fn mutated_gguf_metadata_never_panics() {
    let mut random = super::fixtures::Lcg(11);
    for round in 0..200 {
        let mut gguf = if round % 2 == 0 {
            byte_level_gguf()
        } else {
            sentence_gguf()
        };
        match random.below(8) {
            0 => gguf.tokens.truncate(random.below(300)),
            1 => gguf
                .merges
                .push(["", " ", "a", "a  b", "x y z"][random.below(5)].into()),
            2 => gguf.scores.push(f32::NAN),
            3 => gguf.token_types.iter_mut().for_each(|kind| *kind = 3),
            4 => gguf.bos = Some(u32::MAX),
            5 => gguf.pre = Some("nobody-knows".into()),
            6 => gguf.tokens[random.below(200)] = String::new(),
            _ => gguf.token_types.clear(),
        }
        if let Ok(tokenizer) = Tokenizer::from_gguf(&gguf) {
            let _ = tokenizer.encode_text("the hello", Boundary::AsTrained);
        }
    }
}
