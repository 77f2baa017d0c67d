//! The token list of a GGUF file, checked.

use std::collections::HashSet;

use tokenizers::AddedToken;

use super::GgufTokenizer;
use crate::text::TextError;

/// Far above any published vocabulary (Gemma has 262,144).
const MAX_TOKENS: usize = 4 << 20;

/// `tokenizer.ggml.token_type` values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// Tokens with their kinds. Every text occurs once.
#[derive(Debug)]
pub(super) struct Vocabulary {
    tokens: Vec<String>,
    kinds: Vec<TokenKind>,
}

impl Vocabulary {
    pub(super) fn new(gguf: &GgufTokenizer) -> Result<Self, TextError> {
        let count = gguf.tokens.len();
        if count == 0 || count > MAX_TOKENS {
            let detail = format!("{count} tokens, expected 1 to {MAX_TOKENS}");
            return Err(TextError::invalid("tokenizer.ggml.tokens", detail));
        }
        if !gguf.token_types.is_empty() && gguf.token_types.len() != count {
            let detail = format!("{} types for {count} tokens", gguf.token_types.len());
            return Err(TextError::invalid("tokenizer.ggml.token_type", detail));
        }
        let mut kinds = Vec::with_capacity(count);
        for id in 0..count {
            kinds.push(kind(gguf.token_types.get(id).copied(), id)?);
        }
        let ends = [
            ("bos", gguf.bos),
            ("eos", gguf.eos),
            ("eot", gguf.eot),
            ("eom", gguf.eom),
        ];
        let others = [("unknown", gguf.unk), ("padding", gguf.pad)];
        for (index, (name, id)) in ends.into_iter().chain(others).enumerate() {
            let Some(id) = id else { continue };
            let place = kinds.get_mut(id as usize).ok_or_else(|| {
                let key = format!("tokenizer.ggml.{name}_token_id");
                TextError::invalid(key, format!("{id}, expected less than the {count} tokens"))
            })?;
            // Some files mark their ends as normal pieces; and without types, the named ids are all that is known.
            if index < ends.len() || gguf.token_types.is_empty() {
                *place = TokenKind::Control;
            }
        }
        Ok(Vocabulary {
            tokens: unique(&gguf.tokens)?,
            kinds,
        })
    }

    pub(super) fn token(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize).map(String::as_str)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &str, TokenKind)> {
        self.tokens
            .iter()
            .zip(&self.kinds)
            .enumerate()
            .map(|(id, (token, kind))| (id as u32, token.as_str(), *kind))
    }

    /// Control, unknown and user-defined tokens, which are found in a text before anything else is done to it.
    pub(super) fn added(&self) -> Vec<AddedToken> {
        self.iter()
            .filter_map(|(_, token, kind)| match kind {
                TokenKind::Control | TokenKind::Unknown => Some(AddedToken::from(token, true)),
                TokenKind::UserDefined => Some(AddedToken::from(token, false).normalized(false)),
                TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => None,
            })
            .collect()
    }
}

fn kind(value: Option<i32>, id: usize) -> Result<TokenKind, TextError> {
    Ok(match value {
        None | Some(1) => TokenKind::Normal,
        Some(2) => TokenKind::Unknown,
        Some(3) => TokenKind::Control,
        Some(4) => TokenKind::UserDefined,
        // 0 is "undefined": kept, never produced.
        Some(0 | 5) => TokenKind::Unused,
        Some(6) => TokenKind::Byte,
        Some(other) => {
            let detail = format!("token {id} has type {other}, expected 0 to 6");
            return Err(TextError::invalid("tokenizer.ggml.token_type", detail));
        }
    })
}

/// An empty text would be found everywhere, so it gets a name that no text spells by accident; a text that occurs
/// twice would lose an id.
fn unique(tokens: &[String]) -> Result<Vec<String>, TextError> {
    let mut seen: HashSet<&str> = HashSet::with_capacity(tokens.len());
    let mut out = Vec::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        if token.is_empty() {
            out.push(format!("[empty {id}]"));
        } else if seen.insert(token) {
            out.push(token.clone());
        } else {
            let detail = format!("token `{token}` occurs twice, the second time as id {id}");
            return Err(TextError::invalid("tokenizer.ggml.tokens", detail));
        }
    }
    Ok(out)
}
