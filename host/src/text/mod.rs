//! Text pipeline: characters to token ids and back, and when an answer ends.
//!
//! Owns the tokenizer (from `tokenizer.json` or rebuilt from GGUF metadata), the set of end-of-sequence ids, the
//! incremental detokenizer and the stop-string matcher. It must not know about models, backends, HTTP or the request
//! that a text belongs to.
//!
//! Checkpoint files and prompts are untrusted here: files have size limits, panics of the `tokenizers` crate become
//! [`TextError::Panicked`], and text that merely spells a control token stays text (see [`Tokenizer::encode_text`]).

mod control;
mod detok;
mod directory;
mod encode;
mod eos;
mod error;
pub mod gguf;
mod guard;
mod piece;
mod prompt;
mod stop;
mod tokenizer;
mod trie;
mod utf8;

pub use control::{ControlTokens, Spelling};
pub use detok::{Detokenizer, DetokenizerOptions, StreamStart};
pub use eos::{EosEntry, EosSet, EosSource};
pub use error::TextError;
pub use gguf::GgufTokenizer;
pub use prompt::Prompt;
pub use stop::{StopError, StopMatch, StopMatcher, StopOutput, StopText};
pub use tokenizer::{BosRule, Boundary, NamedTokens, Tokenizer};
pub(crate) use trie::Trie;

#[cfg(test)]
mod fixtures;
#[cfg(test)]
pub(crate) use fixtures::{Lcg, byte_level, sentence};
#[cfg(test)]
mod tests;
