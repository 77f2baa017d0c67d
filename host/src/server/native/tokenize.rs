//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};

use crate::text::{Boundary, Tokenizer};

use super::super::app::App;
use super::super::ask::blocking;
use super::super::body::read_fields;
use super::super::error::ApiError;
use super::super::fields::expected;
use super::super::prompt::{Part, Prompt, mixed};
use super::super::reply::json_response;
use super::super::sampling_fields::token_id;

/// Text to ids.
pub async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let served = Arc::clone(app.served()?);
    let mut fields = read_fields(request, &app.options.limits).await?;
    let content: Prompt = match fields.take("content") {
        None => Vec::new(),
        Some(Value::String(text)) => vec![Part::Text(text)],
        Some(Value::Array(items)) => mixed("content", items)?,
        Some(other) => {
            return Err(expected(
                "content",
                "a text, or a list of texts and token ids",
                &other,
            ));
        }
    };
    let adds_special = fields.boolean("add_special")?.unwrap_or(false);
    let parses_special = fields.boolean("parse_special")?.unwrap_or(true);
    let with_pieces = fields.boolean("with_pieces")?.unwrap_or(false);
    fields.finish()?;
    let tokens = blocking(move || {
        let tokenizer = &served.text.tokenizer;
        let ids = ids(&content, tokenizer, adds_special, parses_special)?;
        Ok(match with_pieces {
            true => ids
                .iter()
                .map(|id| json!({"id": id, "piece": piece(tokenizer, *id)}))
                .collect(),
            false => json!(ids),
        })
    })
    .await?;
    Ok(json_response(&json!({"tokens": tokens})))
}

fn ids(
    content: &Prompt,
    tokenizer: &Tokenizer,
    adds_special: bool,
    parses_special: bool,
) -> Result<Vec<u32>, ApiError> {
    let mut ids = Vec::new();
    for (index, part) in content.iter().enumerate() {
        let boundary = if adds_special && index == 0 {
            Boundary::AsTrained
        } else {
            Boundary::Bare
        };
        match part {
            Part::Tokens(tokens) => ids.extend_from_slice(tokens),
            Part::Text(text) if parses_special => {
                ids.extend(tokenizer.encode_markup(text, boundary)?)
            }
            Part::Text(text) => ids.extend(tokenizer.encode_text(text, boundary)?),
        }
    }
    Ok(ids)
}

/// A piece as text, or as bytes where it is a part of a character.
fn piece(tokenizer: &Tokenizer, id: u32) -> Value {
    match String::from_utf8(tokenizer.token_bytes(id)) {
        Ok(text) => json!(text),
        Err(error) => json!(error.as_bytes()),
    }
}

/// Ids to text, control tokens spelled out.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let served = Arc::clone(app.served()?);
    let mut fields = read_fields(request, &app.options.limits).await?;
    let tokens = fields.list("tokens")?.unwrap_or_default();
    fields.finish()?;
    let vocabulary = served.facts.vocab_size;
    let ids = tokens.iter().map(|token| match token_id("tokens", token)? {
        id if (id as usize) < vocabulary => Ok(id),
        id => Err(ApiError::field(
            "tokens",
            format!("tokens has {id}, the model has {vocabulary}"),
        )),
    });
    let ids: Vec<u32> = ids.collect::<Result<_, _>>()?;
    let content = blocking(move || Ok(served.text.tokenizer.decode_verbatim(&ids))).await?;
    Ok(json_response(&json!({"content": content})))
}
