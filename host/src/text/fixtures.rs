//! Tiny tokenizers for tests, one of each kind that checkpoints use.

use serde_json::{Value, json};

use super::{GgufTokenizer, Tokenizer};

/// GPT-2's 256 byte characters in byte order.
fn byte_alphabet() -> Vec<String> {
    let mut out = vec![String::new(); 256];
    for character in (0..0x144).filter_map(char::from_u32) {
        if let Some(byte) = super::piece::byte_of(character) {
            out[usize::from(byte)] = character.to_string();
        }
    }
    out
}

const MERGES: [&str; 12] = [
    "h e", "Ġ t", "Ġt he", "l l", "he ll", "hell o", "Ġ w", "o r", "| >", "< |", "i m", "Ã ©",
];

/// Byte-level BPE as a GGUF file describes it. Ids 0 to 3 are control tokens, 4 is user defined.
pub(crate) fn byte_level_gguf() -> GgufTokenizer {
    let mut tokens: Vec<String> = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|pad|>",
        "<think>",
    ]
    .map(String::from)
    .to_vec();
    let mut token_types = vec![3, 3, 3, 3, 4];
    tokens.extend(byte_alphabet());
    tokens.extend(MERGES.map(|merge| merge.replace(' ', "")));
    token_types.resize(tokens.len(), 1);
    GgufTokenizer {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens,
        token_types,
        merges: MERGES.map(String::from).to_vec(),
        bos: Some(1),
        eos: Some(2),
        add_bos: Some(false),
        ..GgufTokenizer::default()
    }
}

pub(crate) fn byte_level() -> Tokenizer {
    Tokenizer::from_gguf(&byte_level_gguf()).unwrap()
}

/// SentencePiece as a GGUF file describes it: bytes, letters and a few longer pieces with scores.
pub(crate) fn sentence_gguf() -> GgufTokenizer {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    let mut token_types = vec![2, 3, 3];
    for byte in 0..=255u8 {
        tokens.push(format!("<0x{byte:02X}>"));
        token_types.push(6);
    }
    let long = [
        "▁t", "he", "▁the", "in", "▁▁", "er", "▁s", "</", "s>", "▁in", "é", "한",
    ];
    tokens.extend(long.map(String::from));
    tokens.extend((b'!'..=b'~').map(|byte| char::from(byte).to_string()));
    tokens.push("▁".into());
    token_types.resize(tokens.len(), 1);
    let blanks = tokens.iter().position(|token| token == "▁▁").unwrap();
    token_types[blanks] = 4;
    let scores = (0..tokens.len())
        .map(|id| if id < 259 { 0.0 } else { 258.0 - id as f32 })
        .collect();
    GgufTokenizer {
        model: "llama".into(),
        tokens,
        scores,
        token_types,
        ..GgufTokenizer::default()
    }
}

pub(crate) fn sentence() -> Tokenizer {
    Tokenizer::from_gguf(&sentence_gguf()).unwrap()
}

/// A WordPiece `tokenizer.json` with `[CLS]` and `[SEP]` around the text.
pub(crate) fn word_piece_json() -> Value {
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [special(0, "[UNK]"), special(1, "[CLS]"), special(2, "[SEP]")],
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                       "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                       {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [1], "tokens": ["[CLS]"]},
                               "[SEP]": {"id": "[SEP]", "ids": [2], "tokens": ["[SEP]"]}}},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100,
                  "vocab": {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "##b": 4, "##a": 5, "b": 6, ".": 7, "[": 8,
                            "]": 9, "sep": 10, "cls": 11, "'": 12, "s": 13, "unk": 14}}
    })
}

/// A Unigram `tokenizer.json` whose lattice holds `</s>` and whose normalizer folds wide characters: text can turn
/// into a control token without spelling it.
pub(crate) fn unigram_json() -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 1, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "normalizer": {"type": "NFKC"},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "post_processor": null,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false,
                  "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["▁", -2.0], ["<", -3.0], ["/", -3.0], ["s", -3.0],
                            [">", -3.0], ["a", -1.0], ["▁a", -1.0], ["/s>", -4.0]]}
    })
}

pub(crate) fn from_json(json: &Value) -> Tokenizer {
    Tokenizer::from_files(
        json.to_string().as_bytes(),
        &Value::Null,
        &Value::Null,
        &Value::Null,
    )
    .unwrap()
}

/// A `tokenizer.json` with the vocabulary of [`byte_level_gguf`].
pub(crate) fn byte_level_json() -> Value {
    let gguf = byte_level_gguf();
    let vocab: serde_json::Map<String, Value> = gguf
        .tokens
        .iter()
        .enumerate()
        .map(|(id, token)| (token.clone(), id.into()))
        .collect();
    let added: Vec<Value> = gguf.tokens[..5]
        .iter()
        .enumerate()
        .map(|(id, token)| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": id < 4})
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocab, "merges": MERGES}
    })
}

/// A small seeded generator for mutations.
pub(crate) struct Lcg(pub(crate) u64);

impl Lcg {
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        // Constants of Knuth's MMIX generator.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % limit.max(1)
    }

    /// Changes, removes, doubles or splices a few places of `seed`.
    pub(crate) fn mutate(&mut self, seed: &[u8]) -> Vec<u8> {
        let mut bytes = seed.to_vec();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            let length = self.below(24).min(bytes.len() - at);
            match self.below(5) {
                0 => bytes[at] = self.below(256) as u8,
                1 => drop(bytes.drain(at..at + length)),
                2 => {
                    let part = bytes[at..at + length].to_vec();
                    let to = self.below(bytes.len());
                    bytes.splice(to..to, part);
                }
                3 => {
                    const WORDS: [&str; 8] = [
                        "null",
                        "-1",
                        "99999999999",
                        "\"\"",
                        "[]",
                        "{}",
                        "\"type\"",
                        "\"[\\\\p{L}]*+(\"",
                    ];
                    bytes.splice(at..at + length, WORDS[self.below(8)].bytes());
                }
                _ => {
                    // Digits are the interesting part of these files.
                    if let Some(digit) = bytes[at..].iter().position(u8::is_ascii_digit) {
                        bytes[at + digit] = b'0' + self.below(10) as u8;
                    }
                }
            }
            if bytes.is_empty() {
                bytes.push(b'{');
            }
        }
        bytes
    }
}
