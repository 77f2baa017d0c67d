//! Sampling settings of a request, shared by all dialects: names, aliases, defaults, and what is refused.

use serde_json::Value;

use crate::sampling::{LogitBias, SamplingParams};
use crate::text::{Boundary, Tokenizer};

use super::error::ApiError;
use super::fields::{Fields, expected, whole};

/// Reads the settings over the server's defaults.
pub fn sampling(
    fields: &mut Fields,
    defaults: &SamplingParams,
    tokenizer: &Tokenizer,
) -> Result<SamplingParams, ApiError> {
    let mut params = defaults.clone();
    let number =
        |fields: &mut Fields, names: &[&'static str], place: &mut f32| -> Result<(), ApiError> {
            if let Some(value) = fields.number(names)? {
                *place = value;
            }
            Ok(())
        };
    number(fields, &["temperature"], &mut params.temperature)?;
    number(fields, &["top_p"], &mut params.top_p)?;
    number(fields, &["min_p"], &mut params.min_p)?;
    number(fields, &["typical_p", "typ_p"], &mut params.typical_p)?;
    number(fields, &["top_n_sigma"], &mut params.top_n_sigma)?;
    number(
        fields,
        &["repeat_penalty", "repetition_penalty"],
        &mut params.repetition_penalty,
    )?;
    number(
        fields,
        &["frequency_penalty"],
        &mut params.frequency_penalty,
    )?;
    number(fields, &["presence_penalty"], &mut params.presence_penalty)?;
    if let Some(top_k) = fields.integer_in(&["top_k"], -1, i64::from(u32::MAX))? {
        // Below one keeps all, as in llama-server.
        params.top_k = u32::try_from(top_k).unwrap_or(0);
    }
    if let Some(last_n) = fields.integer_in(&["repeat_last_n"], -1, i64::from(i32::MAX))? {
        params.repeat_last_n = last_n as i32;
    }
    if let Some(min_keep) = fields.integer_in(&["min_keep"], 0, i64::from(u32::MAX))? {
        params.min_keep = min_keep as usize;
    }
    if let Some(seed) = fields.integer(&["seed"])? {
        // -1 asks for a random one; other negative numbers are seeds like any.
        params.seed = (seed != -1).then_some(seed as u64);
    }
    if let Some(value) = fields.take("logit_bias") {
        params.logit_bias = logit_bias(&value, tokenizer)?;
    }
    off(fields)?;
    Ok(params)
}

/// Most entries of a bias list.
const MAX_BIASES: usize = 4096;

/// OpenAI's map from token to number, or llama-server's list of pairs. A text stands for its tokens, false forbids.
fn logit_bias(value: &Value, tokenizer: &Tokenizer) -> Result<Vec<LogitBias>, ApiError> {
    let wanted = "an object of token and number, or a list of such pairs";
    let pairs: Vec<(Value, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(key, bias)| (of_key(key), bias)).collect(),
        Value::Array(items) => items
            .iter()
            .map(|item| match item.as_array().map(Vec::as_slice) {
                Some([token, bias]) => Ok((token.clone(), bias)),
                _ => Err(expected("logit_bias", wanted, item)),
            })
            .collect::<Result<_, _>>()?,
        other => return Err(expected("logit_bias", wanted, other)),
    };
    if pairs.len() > MAX_BIASES {
        let message = format!(
            "logit_bias has {} entries, at most {MAX_BIASES} are possible",
            pairs.len()
        );
        return Err(ApiError::field("logit_bias", message));
    }
    let mut biases = Vec::new();
    for (token, bias) in pairs {
        let bias = match bias {
            Value::Bool(false) => f32::NEG_INFINITY,
            bias => bias
                .as_f64()
                .ok_or_else(|| expected("logit_bias", "a number or false for each token", bias))?
                as f32,
        };
        let tokens = match &token {
            Value::String(text) => tokenizer.encode_text(text, Boundary::Bare)?,
            token => vec![token_id("logit_bias", token)?],
        };
        biases.extend(tokens.into_iter().map(|token| LogitBias { token, bias }));
    }
    Ok(biases)
}

/// A key that is a number names a token id.
fn of_key(key: &str) -> Value {
    key.parse::<i64>()
        .map_or_else(|_| Value::from(key), Value::from)
}

/// A token id; whether the model has it is checked with the vocabulary.
pub fn token_id(name: &str, value: &Value) -> Result<u32, ApiError> {
    let id = whole(value).ok_or_else(|| expected(name, "token ids", value))?;
    u32::try_from(id)
        .map_err(|_| ApiError::field(name, format!("{name} has token {id}, which no model has")))
}

/// Whether a value switches a sampler off.
type IsOff = fn(&Value) -> bool;

/// Samplers that are not here, with the values that switch them off.
const OFF: [(&str, IsOff, &str); 9] = [
    ("mirostat", is_zero, "0"),
    ("xtc_probability", is_zero, "0"),
    ("dry_multiplier", is_zero, "0"),
    ("dynatemp_range", is_zero, "0"),
    ("adaptive_target", is_negative, "-1"),
    ("n_indent", is_zero, "0"),
    ("grammar", is_empty, "\"\""),
    ("lora", is_empty, "[]"),
    ("backend_sampling", is_false, "false"),
];

/// Details of those samplers: without them they say nothing.
const DETAILS: [&str; 10] = [
    "mirostat_tau",
    "mirostat_eta",
    "xtc_threshold",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "adaptive_decay",
    "grammar_lazy",
];

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_negative(value: &Value) -> bool {
    value.as_f64().is_some_and(|value| value < 0.0)
}

fn is_false(value: &Value) -> bool {
    value.as_bool() == Some(false)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Refuses samplers that are not here, unless they are switched off.
fn off(fields: &mut Fields) -> Result<(), ApiError> {
    for (name, is_off, off) in OFF {
        if let Some(value) = fields.take(name)
            && !is_off(&value)
        {
            let message =
                format!("{name} is not supported by this server: leave it out or set it to {off}");
            return Err(ApiError::unsupported(name, message));
        }
    }
    for name in DETAILS {
        fields.take(name);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::byte_level;

    fn read(text: &str) -> Result<SamplingParams, String> {
        let mut fields = Fields::parse(text.as_bytes()).unwrap();
        let params = sampling(&mut fields, &SamplingParams::server(), &byte_level())
            .map_err(|e| e.message().to_owned())?;
        fields.finish().map_err(|e| e.message().to_owned())?;
        Ok(params)
    }

    #[test]
    fn settings_replace_the_defaults() {
        assert_eq!(read("{}").unwrap(), SamplingParams::server());
        let params = read(
            r#"{"temperature": 0, "top_k": -1, "min_p": null, "repeat_penalty": 1.5, "seed": -1, "repeat_last_n": -1,
                "logit_bias": {"7": -100}, "mirostat": 0, "mirostat_tau": 5, "grammar": ""}"#,
        )
        .unwrap();
        assert_eq!(
            (params.temperature, params.top_k, params.min_p),
            (0.0, 0, 0.05)
        );
        assert_eq!(
            (params.repetition_penalty, params.seed, params.repeat_last_n),
            (1.5, None, -1)
        );
        assert_eq!(
            params.logit_bias,
            [LogitBias {
                token: 7,
                bias: -100.0
            }]
        );
        let forbidden = read(r#"{"logit_bias": [[3, false]]}"#).unwrap().logit_bias;
        assert_eq!(
            forbidden,
            [LogitBias {
                token: 3,
                bias: f32::NEG_INFINITY
            }]
        );
    }

    #[test]
    fn what_is_not_here_is_refused_by_name() {
        for (body, name) in [
            (r#"{"mirostat": 2}"#, "mirostat"),
            (r#"{"grammar": "root ::= x"}"#, "grammar"),
            (r#"{"top_k": 1.5}"#, "top_k"),
            (r#"{"top_k": "1"}"#, "top_k"),
            (r#"{"logit_bias": {"-1": 1}}"#, "logit_bias"),
            (r#"{"logit_bias": [[1, true]]}"#, "logit_bias"),
            (r#"{"logit_bias": 1}"#, "logit_bias"),
            (r#"{"best_of": 1}"#, "best_of"),
        ] {
            assert!(read(body).unwrap_err().contains(name), "{body}");
        }
    }
}
