//! Raw prompts: texts, token ids, or both, one or many.

use serde_json::Value;

use crate::text::{Boundary, Tokenizer};

use super::error::ApiError;
use super::fields::expected;
use super::sampling_fields::token_id;

/// Most prompts in a request.
const MAX_PROMPTS: usize = 128;

/// A part of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// Text, whose spelled control tokens are meant: who sends a raw prompt writes the model's own markup.
    Text(String),
    /// Ids.
    Tokens(Vec<u32>),
}

/// One prompt.
pub type Prompt = Vec<Part>;

/// Reads the field: a text, a list of ids, a mixed list, or a list of such prompts.
pub fn prompts(name: &str, value: Value) -> Result<Vec<Prompt>, ApiError> {
    let wanted = "a text, token ids, or a list of such prompts";
    let prompts: Vec<Prompt> = match value {
        Value::String(text) => vec![vec![Part::Text(text)]],
        Value::Array(items) if items.iter().any(Value::is_number) => vec![mixed(name, items)?],
        Value::Array(items) => items
            .into_iter()
            .map(|item| match item {
                Value::String(text) => Ok(vec![Part::Text(text)]),
                Value::Array(items) => mixed(name, items),
                other => Err(expected(name, wanted, &other)),
            })
            .collect::<Result<_, _>>()?,
        other => return Err(expected(name, wanted, &other)),
    };
    match prompts.len() {
        0 => Err(ApiError::field(name, format!("{name} is an empty list"))),
        count if count > MAX_PROMPTS => Err(ApiError::field(
            name,
            format!("{name} has {count} prompts, at most {MAX_PROMPTS} are possible"),
        )),
        _ => Ok(prompts),
    }
}

/// Texts and ids in a row.
pub fn mixed(name: &str, items: Vec<Value>) -> Result<Prompt, ApiError> {
    let mut parts: Prompt = Vec::new();
    for item in items {
        match (item, parts.last_mut()) {
            (Value::String(text), _) => parts.push(Part::Text(text)),
            (item, Some(Part::Tokens(tokens))) => tokens.push(token_id(name, &item)?),
            (item, _) => parts.push(Part::Tokens(vec![token_id(name, &item)?])),
        }
    }
    Ok(parts)
}

/// The ids of a prompt. Only text at its beginning is framed as the model was trained.
pub fn encode(prompt: &Prompt, tokenizer: &Tokenizer) -> Result<Vec<u32>, ApiError> {
    let mut ids = Vec::new();
    for (index, part) in prompt.iter().enumerate() {
        match part {
            Part::Tokens(tokens) => ids.extend_from_slice(tokens),
            Part::Text(text) => {
                let boundary = if index == 0 {
                    Boundary::AsTrained
                } else {
                    Boundary::Bare
                };
                ids.extend(tokenizer.encode_markup(text, boundary)?);
            }
        }
    }
    Ok(ids)
}

/// A prompt as text.
pub fn spell(prompt: &Prompt, tokenizer: &Tokenizer) -> String {
    prompt
        .iter()
        .map(|part| match part {
            Part::Text(text) => text.clone(),
            Part::Tokens(tokens) => tokenizer.decode_verbatim(tokens),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::text::byte_level;

    #[test]
    fn all_forms_are_read() {
        let text = |text: &str| Part::Text(text.to_owned());
        let read = |value| prompts("prompt", value).unwrap();
        assert_eq!(read(json!("a")), [[text("a")]]);
        assert_eq!(read(json!(["a", "b"])), [[text("a")], [text("b")]]);
        assert_eq!(read(json!([1, 2])), [[Part::Tokens(vec![1, 2])]]);
        assert_eq!(
            read(json!([[1], [2, 3]])),
            [[Part::Tokens(vec![1])], [Part::Tokens(vec![2, 3])]]
        );
        assert_eq!(
            read(json!([7, "a", 8, 9])),
            [[Part::Tokens(vec![7]), text("a"), Part::Tokens(vec![8, 9])]]
        );
        for wrong in [
            json!([]),
            json!({}),
            json!(1),
            json!([-1]),
            json!([1.5]),
            json!([[true]]),
            json!([5_000_000_000u64]),
        ] {
            assert!(prompts("prompt", wrong.clone()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ids_and_text_meet_without_a_frame_between_them() {
        let tokenizer = byte_level();
        let ids = encode(
            &vec![
                Part::Text("he".to_owned()),
                Part::Tokens(vec![2]),
                Part::Text("he".to_owned()),
            ],
            &tokenizer,
        )
        .unwrap();
        let alone = encode(&vec![Part::Text("he".to_owned())], &tokenizer).unwrap();
        assert_eq!(ids, [alone.clone(), vec![2], alone].concat());
    }
}
