//! Tokenizers rebuilt from the metadata of a GGUF file.
//!
//! GGUF stores the vocabulary and, for byte-level BPE, the merges. What it does not store is code: the pre-tokenizer
//! is only named (see `dialect`), and SentencePiece merges must be recovered from scores (see `sentence`).

mod byte_level;
mod dialect;
mod sentence;
mod vocabulary;

pub use dialect::known_pre_tokenizers;

use super::TextError;
use super::tokenizer::{Framing, NamedTokens, Tokenizer};
use vocabulary::Vocabulary;

/// The `tokenizer.ggml.*` metadata of a GGUF file, as plain data.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GgufTokenizer {
    /// `tokenizer.ggml.model`: `gpt2`, `llama` or `gemma4`.
    pub model: String,
    /// `tokenizer.ggml.pre`.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores`, for SentencePiece.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.merges`, for BPE.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`.
    pub eot: Option<u32>,
    /// `tokenizer.ggml.eom_token_id`.
    pub eom: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`.
    pub add_space_prefix: Option<bool>,
}

impl Tokenizer {
    /// Rebuilds the tokenizer of a GGUF file.
    pub fn from_gguf(gguf: &GgufTokenizer) -> Result<Self, TextError> {
        let vocabulary = Vocabulary::new(gguf)?;
        let (library, defaults) = match gguf.model.as_str() {
            "gpt2" => byte_level::build(gguf, &vocabulary)?,
            "llama" => sentence::build(gguf, &vocabulary)?,
            "gemma4" => sentence::build_with_merges(gguf, &vocabulary)?,
            other => {
                return Err(TextError::UnknownTokenizerModel {
                    name: other.to_owned(),
                    known: "gpt2, llama, gemma4".to_owned(),
                });
            }
        };
        let ids = [
            ("bos_token", gguf.bos.or(defaults.bos)),
            ("eos_token", gguf.eos.or(defaults.eos)),
            ("unk_token", gguf.unk.or(defaults.unk)),
            ("pad_token", gguf.pad),
        ];
        let named: NamedTokens = ids
            .into_iter()
            .filter_map(|(name, id)| Some((name.to_owned(), vocabulary.token(id?)?.to_owned())))
            .collect();
        let framing = Framing {
            add_bos: Some(gguf.add_bos.unwrap_or(defaults.add_bos)),
            add_eos: Some(gguf.add_eos.unwrap_or(false)),
        };
        Tokenizer::assemble(library, named, framing)
    }
}

/// What the format leaves to the kind of tokenizer where the file is silent.
#[derive(Debug, Clone, Copy, Default)]
struct Defaults {
    bos: Option<u32>,
    eos: Option<u32>,
    unk: Option<u32>,
    add_bos: bool,
}

#[cfg(test)]
mod tests;
