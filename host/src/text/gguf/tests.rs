//! Rebuilding from metadata: names, merges from scores, refusals.

use super::*;
use crate::text::Boundary;
use crate::text::fixtures::{byte_level_gguf, sentence, sentence_gguf};

fn ids(pre: &str, text: &str) -> Vec<u32> {
    let gguf = GgufTokenizer {
        pre: Some(pre.into()),
        ..byte_level_gguf()
    };
    Tokenizer::from_gguf(&gguf)
        .unwrap()
        .encode_text(text, Boundary::Bare)
        .unwrap()
}

#[test]
fn every_name_builds_and_encodes() {
    let names = known_pre_tokenizers();
    assert!(names.len() > 40, "{} dialects registered", names.len());
    for name in names {
        let text = "Hello  they'LL 1234 한글漢字\r\n\n ÉCOLE école x\u{301} <think>  \t!?  ";
        let gguf = GgufTokenizer {
            pre: Some(name.into()),
            ..byte_level_gguf()
        };
        let tokenizer =
            Tokenizer::from_gguf(&gguf).unwrap_or_else(|error| panic!("{name}: {error}"));
        let ids = tokenizer.encode_text(text, Boundary::Bare).unwrap();
        let back = tokenizer.decode_verbatim(&ids);
        // NFC joins the last accent, nothing else may change.
        assert!(
            back == text || back == text.replace("E\u{301}", "É"),
            "{name}: {back:?}"
        );
    }
}

#[test]
fn names_are_unique() {
    let mut names = known_pre_tokenizers();
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count);
}

#[test]
fn an_unknown_name_is_an_error_that_lists_the_known_ones() {
    let error = Tokenizer::from_gguf(&GgufTokenizer {
        pre: Some("nope".into()),
        ..byte_level_gguf()
    })
    .unwrap_err();
    let message = error.to_string();
    assert!(
        message.starts_with("GGUF pre-tokenizer `nope` is not supported, expected one of: "),
        "{message}"
    );
    assert!(message.contains("llama-bpe"));
    let error = Tokenizer::from_gguf(&GgufTokenizer {
        model: "rwkv".into(),
        ..byte_level_gguf()
    })
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "GGUF tokenizer model `rwkv` is not supported, expected one of: gpt2, llama, gemma4"
    );
}

#[test]
fn words_bound_merges() {
    // "or" merges inside a word; GPT-2 cuts "o r" never, but a digit dialect cuts around digits.
    assert_eq!(ids("gpt-2", "or").len(), 1);
    assert_eq!(ids("gpt-2", "the the").len(), 3);
    let the = byte_level_gguf()
        .tokens
        .iter()
        .position(|token| token == "Ġthe")
        .unwrap() as u32;
    assert_eq!(*ids("smollm", "the the").last().unwrap(), the);
}

#[test]
fn merges_follow_scores() {
    let tokenizer = sentence();
    let pieces = |text: &str| -> Vec<String> {
        let ids = tokenizer.encode_text(text, Boundary::Bare).unwrap();
        ids.into_iter()
            .map(|id| tokenizer.piece(id).unwrap())
            .collect()
    };
    // "▁t" outranks "he", and "▁the" is then reached through "▁t" + "he".
    assert_eq!(pieces("the"), ["▁the"]);
    assert_eq!(pieces("there in"), ["▁the", "r", "e", "▁in"]);
    assert_eq!(pieces("a  in"), ["▁", "a", "▁▁", "in"]);
    // Characters without a piece are bytes.
    assert_eq!(pieces("ø"), ["▁", "<0xC3>", "<0xB8>"]);
    assert_eq!(pieces("<0x0A>"), ["▁", "<", "0", "x", "0", "A", ">"]);
    assert_eq!(
        tokenizer.encode_text("s", Boundary::AsTrained).unwrap()[0],
        1
    );
}

#[test]
fn the_space_prefix_is_a_setting() {
    let gguf = GgufTokenizer {
        add_space_prefix: Some(false),
        add_bos: Some(false),
        ..sentence_gguf()
    };
    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    let ids = tokenizer
        .encode_text("the in", Boundary::AsTrained)
        .unwrap();
    let pieces: Vec<String> = ids.iter().map(|&id| tokenizer.piece(id).unwrap()).collect();
    assert_eq!(pieces, ["t", "he", "▁in"]);
    assert_eq!(tokenizer.decode(&ids, Default::default()), "the in");
}

#[test]
fn stored_merges_of_a_sentence_model_are_used() {
    let gguf = GgufTokenizer {
        model: "gemma4".into(),
        merges: vec!["h e".into(), "▁ i".into(), "i n".into()],
        ..sentence_gguf()
    };
    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    let ids = tokenizer.encode_text("he in", Boundary::Bare).unwrap();
    let pieces: Vec<String> = ids.iter().map(|&id| tokenizer.piece(id).unwrap()).collect();
    assert_eq!(pieces, ["he", "▁", "in"]);
}

#[test]
fn contradictions_are_named() {
    let refuse = |gguf: GgufTokenizer| Tokenizer::from_gguf(&gguf).unwrap_err().to_string();
    let base = byte_level_gguf;
    let lists = [
        refuse(GgufTokenizer {
            tokens: Vec::new(),
            ..base()
        }),
        refuse(GgufTokenizer {
            token_types: vec![1],
            ..base()
        }),
        refuse(GgufTokenizer {
            token_types: vec![9; base().tokens.len()],
            ..base()
        }),
        refuse(GgufTokenizer {
            eos: Some(5000),
            ..base()
        }),
        refuse(GgufTokenizer {
            tokens: {
                let mut t = base().tokens;
                t[7] = t[6].clone();
                t
            },
            ..base()
        }),
        refuse(GgufTokenizer {
            merges: vec!["ab".into()],
            ..base()
        }),
        refuse(GgufTokenizer {
            merges: vec!["가 나".into()],
            ..base()
        }),
        refuse(GgufTokenizer {
            scores: vec![0.0],
            ..sentence_gguf()
        }),
        refuse(GgufTokenizer {
            scores: vec![f32::NAN; sentence_gguf().tokens.len()],
            ..sentence_gguf()
        }),
    ];
    insta::assert_snapshot!(lists.join("\n"), @r"
    `tokenizer.ggml.tokens` is not valid: 0 tokens, expected 1 to 4194304
    `tokenizer.ggml.token_type` is not valid: 1 types for 273 tokens
    `tokenizer.ggml.token_type` is not valid: token 0 has type 9, expected 0 to 6
    `tokenizer.ggml.eos_token_id` is not valid: 5000, expected less than the 273 tokens
    `tokenizer.ggml.tokens` is not valid: token `ā` occurs twice, the second time as id 7
    `tokenizer.ggml.merges` is not valid: merge 0 is `ab`, expected two pieces with a blank between
    `tokenizer.ggml.merges` is not valid: none of 1 merges has its pieces in the vocabulary
    `tokenizer.ggml.scores` is not valid: 1 scores for 366 tokens
    `tokenizer.ggml.scores` is not valid: the score of token 0 is not a number
    ");
}
