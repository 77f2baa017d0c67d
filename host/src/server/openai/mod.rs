//! OpenAI's dialect: chat, completions, models.
//!
//! Fields that OpenAI has and this server cannot honour are refused by name; those that could not change an answer
//! (labels for OpenAI's own accounts) are accepted.

pub mod chat;
mod chat_stream;
pub mod completions;
mod completions_stream;
mod messages;
pub mod models;

use serde_json::{Value, json};

use crate::sampling::random_seed;

use super::error::ApiError;
use super::fields::{Fields, expected, whole};
use super::served::unix_seconds;

/// What all objects of one response carry.
#[derive(Debug, Clone)]
pub struct Head {
    id: String,
    created_s: u64,
    model: String,
}

impl Head {
    /// For a new response.
    pub fn new(prefix: &str, model: &str) -> Self {
        Self {
            id: format!("{prefix}-{:016x}{:016x}", random_seed(), random_seed()),
            created_s: unix_seconds(),
            model: model.to_owned(),
        }
    }

    /// An object with these choices.
    pub fn object(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": concat!("mlxcel-", env!("CARGO_PKG_VERSION")),
            "choices": choices,
        })
    }
}

/// Adds a member to an object.
pub fn with(mut object: Value, name: &str, value: Value) -> Value {
    if let Some(map) = object.as_object_mut() {
        map.insert(name.to_owned(), value);
    }
    object
}

/// Whether the last chunk of a stream has the usage.
pub fn include_usage(fields: &mut Fields, is_stream: bool) -> Result<bool, ApiError> {
    let Some(options) = fields.object("stream_options")? else {
        return Ok(false);
    };
    if !is_stream {
        return Err(ApiError::field(
            "stream_options",
            "stream_options is given and stream is not true",
        ));
    }
    let mut options = Fields::of(options, "stream_options");
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    if options.boolean("include_obfuscation")? == Some(true) {
        let message = "stream_options.include_obfuscation is not supported";
        return Err(ApiError::unsupported("stream_options", message));
    }
    options.finish()?;
    Ok(include_usage)
}

/// What the most tokens of an answer may be.
const TOKENS: &str = "a whole number above 0, or -1 for no limit";

/// Most tokens of an answer: above zero, or -1 for no limit.
pub fn max_tokens(
    fields: &mut Fields,
    names: &[&'static str],
    default: Option<usize>,
) -> Result<Option<usize>, ApiError> {
    let Some((name, value)) = fields.take_any(names)? else {
        return Ok(default);
    };
    match whole(&value) {
        Some(-1) => Ok(None),
        Some(tokens) if tokens > 0 => Ok(usize::try_from(tokens).ok()),
        Some(tokens) => {
            let message = format!("{name} is {tokens}, expected {TOKENS}");
            Err(ApiError::field(name, message))
        }
        None => Err(expected(name, TOKENS, &value)),
    }
}

/// Takes what says something about the account, the bill or the log of the caller and nothing about the answer.
pub fn labels(fields: &mut Fields) -> Result<(), ApiError> {
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        fields.text(name)?;
    }
    fields.object("metadata")?;
    if fields.boolean("store")? == Some(true) {
        return Err(ApiError::unsupported(
            "store",
            "answers are not stored here: leave store out or set it to false",
        ));
    }
    match fields.text("service_tier")?.as_deref() {
        None | Some("auto" | "default") => Ok(()),
        Some(tier) => Err(ApiError::unsupported(
            "service_tier",
            format!("service_tier is {tier:?}, there is no such tier here"),
        )),
    }
}

/// Refuses fields that would change the answer if they were honoured, unless they ask for nothing.
pub fn refuse(fields: &mut Fields, names: &[&'static str]) -> Result<(), ApiError> {
    for name in names {
        let Some(value) = fields.take(name) else {
            continue;
        };
        let asks_nothing = match &value {
            Value::Array(items) => items.is_empty(),
            Value::String(text) => text.is_empty(),
            Value::Bool(flag) => !flag,
            _ => false,
        };
        if !asks_nothing {
            return Err(ApiError::unsupported(
                name,
                format!("{name} is not supported by this server"),
            ));
        }
    }
    Ok(())
}

/// A field whose words are known.
pub fn word(
    fields: &mut Fields,
    name: &'static str,
    allowed: &[&str],
) -> Result<Option<String>, ApiError> {
    match fields.take(name) {
        None => Ok(None),
        Some(Value::String(word)) if allowed.contains(&word.as_str()) => Ok(Some(word)),
        Some(Value::String(word)) => {
            let message = format!("{name} is {word:?}, supported here: {}", allowed.join(", "));
            Err(ApiError::unsupported(name, message))
        }
        Some(value) => Err(expected(name, "a text", &value)),
    }
}
