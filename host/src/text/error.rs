//! What can go wrong between text and token ids.

use std::path::PathBuf;

/// An error of the text pipeline. Every variant carries what was expected and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A checkpoint file exists but cannot be read.
    #[error("cannot read `{path}`: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is larger than any honest one of its kind.
    #[error("`{what}` has {bytes} bytes, the limit is {limit_bytes}")]
    TooLarge {
        /// The file or text.
        what: String,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The checkpoint has no tokenizer that can be read.
    #[error("no `tokenizer.json` in `{dir}`{hint}")]
    NoTokenizer {
        /// The checkpoint directory.
        dir: PathBuf,
        /// Names another format that was found instead, or nothing.
        hint: String,
    },
    /// A tokenizer file or a GGUF field has content that makes no sense.
    #[error("`{what}` is not valid: {detail}")]
    Invalid {
        /// File or metadata key.
        what: String,
        /// What was expected and what was found.
        detail: String,
    },
    /// The id that a file declares for a token is not the id that the tokenizer gives it.
    #[error(
        "`{what}` declares id {declared} for token `{token}`, but the vocabulary gives {actual}"
    )]
    TokenId {
        /// The file.
        what: String,
        /// The token's text.
        token: String,
        /// The id in the file.
        declared: u64,
        /// The id in the vocabulary, or `none`.
        actual: String,
    },
    /// `tokenizer.ggml.model` names a kind that cannot be rebuilt.
    #[error("GGUF tokenizer model `{name}` is not supported, expected one of: {known}")]
    UnknownTokenizerModel {
        /// The name found.
        name: String,
        /// The names that work.
        known: String,
    },
    /// `tokenizer.ggml.pre` names a pre-tokenizer that is not known. Guessing one would give wrong ids silently.
    #[error("GGUF pre-tokenizer `{name}` is not supported, expected one of: {known}")]
    UnknownPreTokenizer {
        /// The name found.
        name: String,
        /// The names that work.
        known: String,
    },
    /// Text that only spells a control token would have become one, and there was no other way to encode it.
    #[error("the text spells control token `{token}` and cannot be encoded as plain text")]
    ControlFromText {
        /// The token's text.
        token: String,
    },
    /// The `tokenizers` crate refused.
    #[error("cannot {stage}: {detail}")]
    Tokenizers {
        /// What was being done.
        stage: &'static str,
        /// The library's message.
        detail: String,
    },
    /// The `tokenizers` crate panicked; the panic was caught.
    #[error("the tokenizer library panicked while trying to {stage}: {detail}")]
    Panicked {
        /// What was being done.
        stage: &'static str,
        /// The panic's message.
        detail: String,
    },
}

impl TextError {
    pub(crate) fn invalid(what: impl Into<String>, detail: impl Into<String>) -> Self {
        TextError::Invalid {
            what: what.into(),
            detail: detail.into(),
        }
    }
}
