//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::text::{Boundary, Tokenizer};

use super::super::app::App;
use super::super::ask::blocking;
use super::super::body::read_fields;
use super::super::error::{ApiError, Kind};
use super::super::fields::{Fields, expected};
use super::super::prompt::{Part, Prompt, mixed};
use super::super::reply::{JSON, json_response, text_response};
use super::super::sampling_fields::token_id;

/// Text to ids.
pub async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let served = Arc::clone(app.served()?);
    let (ask, turn) = read_fields(request, &app, Ask::read).await?;
    blocking(move || {
        let _turn = turn;
        let tokenizer = &served.text.tokenizer;
        let ids = ids(
            &ask.content,
            tokenizer,
            ask.adds_special,
            ask.parses_special,
        )?;
        let text = match ask.with_pieces {
            true => serde_json::to_string(&Tokens {
                tokens: Pieces(&ids, tokenizer),
            }),
            false => serde_json::to_string(&Tokens { tokens: ids }),
        };
        let text = text.map_err(|error| ApiError::new(Kind::Internal, error.to_string()))?;
        Ok(text_response(text, JSON))
    })
    .await
}

struct Ask {
    content: Prompt,
    adds_special: bool,
    parses_special: bool,
    with_pieces: bool,
}

impl Ask {
    fn read(mut fields: Fields) -> Result<Self, ApiError> {
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
        let ask = Self {
            content,
            adds_special: fields.boolean("add_special")?.unwrap_or(false),
            parses_special: fields.boolean("parse_special")?.unwrap_or(true),
            with_pieces: fields.boolean("with_pieces")?.unwrap_or(false),
        };
        fields.finish()?;
        Ok(ask)
    }
}

#[derive(Serialize)]
struct Tokens<T> {
    tokens: T,
}

/// Tokens with their pieces, made while they are written: many tokens are no reason for much memory.
struct Pieces<'a>(&'a [u32], &'a Tokenizer);

impl Serialize for Pieces<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(ids, tokenizer) = self;
        let items = ids.iter();
        serializer.collect_seq(items.map(|id| json!({"id": id, "piece": piece(tokenizer, *id)})))
    }
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
    let vocabulary = served.facts.vocab_size;
    let read = move |fields: Fields| token_list(fields, vocabulary);
    let (ids, turn) = read_fields(request, &app, read).await?;
    let work = move || {
        let _turn = turn;
        Ok(served.text.tokenizer.decode_verbatim(&ids))
    };
    let content = blocking(work).await?;
    Ok(json_response(&json!({"content": content})))
}

fn token_list(mut fields: Fields, vocabulary: usize) -> Result<Vec<u32>, ApiError> {
    let tokens = fields.list("tokens")?.unwrap_or_default();
    fields.finish()?;
    let ids = tokens.iter().map(|token| match token_id("tokens", token)? {
        id if (id as usize) < vocabulary => Ok(id),
        id => Err(ApiError::field(
            "tokens",
            format!("tokens has {id}, the model has {vocabulary}"),
        )),
    });
    ids.collect()
}
