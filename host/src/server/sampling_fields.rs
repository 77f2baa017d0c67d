//! Sampling settings of a request, shared by all dialects: names, aliases, defaults, and what is refused.

use serde_json::Value;

use crate::sampling::{
    LogitBias, LogprobStage, Mirostat, ParamError, SamplerOrder, SamplingParams, SequenceBreakers,
};
use crate::text::{Boundary, Tokenizer};

use super::error::ApiError;
use super::fields::{Fields, expected, whole};

/// Names of a number, and its place among the settings.
type Number = (&'static [&'static str], fn(&mut SamplingParams) -> &mut f32);

/// Numbers, each with all its names.
const NUMBERS: [Number; 18] = [
    (&["temperature"], |p| &mut p.temperature),
    (&["dynatemp_range"], |p| &mut p.dynatemp_range),
    (&["dynatemp_exponent"], |p| &mut p.dynatemp_exponent),
    (&["top_p"], |p| &mut p.top_p),
    (&["min_p"], |p| &mut p.min_p),
    (&["typical_p", "typ_p"], |p| &mut p.typical_p),
    (&["top_n_sigma"], |p| &mut p.top_n_sigma),
    (&["xtc_probability"], |p| &mut p.xtc_probability),
    (&["xtc_threshold"], |p| &mut p.xtc_threshold),
    (&["repeat_penalty", "repetition_penalty"], |p| {
        &mut p.repetition_penalty
    }),
    (&["frequency_penalty"], |p| &mut p.frequency_penalty),
    (&["presence_penalty"], |p| &mut p.presence_penalty),
    (&["dry_multiplier"], |p| &mut p.dry_multiplier),
    (&["dry_base"], |p| &mut p.dry_base),
    (&["mirostat_tau"], |p| &mut p.mirostat_tau),
    (&["mirostat_eta"], |p| &mut p.mirostat_eta),
    (&["adaptive_target"], |p| &mut p.adaptive_target),
    (&["adaptive_decay"], |p| &mut p.adaptive_decay),
];

/// Reads the settings over the server's defaults.
pub fn sampling(
    fields: &mut Fields,
    defaults: &SamplingParams,
    tokenizer: &Tokenizer,
) -> Result<SamplingParams, ApiError> {
    let mut params = defaults.clone();
    for (names, place) in NUMBERS {
        if let Some(value) = fields.number(names)? {
            *place(&mut params) = value;
        }
    }
    if let Some(top_k) = fields.integer_in(&["top_k"], -1, i64::from(u32::MAX))? {
        // Below one keeps all, as in llama-server.
        params.top_k = u32::try_from(top_k).unwrap_or(0);
    }
    if let Some(last_n) = fields.integer_in(&["repeat_last_n"], -1, i64::from(i32::MAX))? {
        params.repeat_last_n = last_n as i32;
    }
    if let Some(last_n) = fields.integer_in(&["dry_penalty_last_n"], -1, i64::from(i32::MAX))? {
        params.dry_penalty_last_n = last_n as i32;
    }
    if let Some(length) = fields.integer_in(&["dry_allowed_length"], 0, i64::from(i32::MAX))? {
        params.dry_allowed_length = length as u32;
    }
    if let Some(min_keep) = fields.integer_in(&["min_keep"], 0, i64::from(u32::MAX))? {
        params.min_keep = min_keep as usize;
    }
    if let Some(number) = fields.integer_in(&["mirostat"], 0, 2)? {
        params.mirostat = Mirostat::of(number).unwrap_or_default();
    }
    if let Some(seed) = fields.integer(&["seed"])? {
        // -1 asks for a random one; other negative numbers are seeds like any.
        params.seed = (seed != -1).then_some(seed as u64);
    }
    if let Some(value) = fields.take("samplers") {
        params.samplers = samplers(&value)?;
    }
    if let Some(value) = fields.take("dry_sequence_breakers") {
        params.dry_sequence_breakers = breakers(&value)?;
    }
    if let Some(value) = fields.take("logit_bias") {
        params.logit_bias = logit_bias(&value, tokenizer)?;
    }
    off(fields)?;
    Ok(params)
}

/// Names of the number of alternatives.
const TOP: [&str; 3] = ["top_logprobs", "n_probs", "logprobs"];

/// Checks settings for a model with so many tokens. What is wrong is said of the name that the request has.
pub fn check(params: &SamplingParams, vocab_size: usize, fields: &Fields) -> Result<(), ApiError> {
    let Err(error) = params.validate(vocab_size) else {
        return Ok(());
    };
    let (name, message) = match error {
        ParamError::Range {
            name,
            value,
            expected,
        } => {
            let names = NUMBERS.iter().find(|(names, _)| names.contains(&name));
            let name = names.map_or(name, |(names, _)| fields.spelling(names));
            // As it is kept, so that it reads as it was sent.
            let value = value as f32;
            (name, format!("{name} is {value}, expected {expected}"))
        }
        ParamError::TopLogprobs { wanted, vocab_size } => {
            let name = fields.spelling(&TOP);
            let message = format!("{name} is {wanted}, the vocabulary has {vocab_size} tokens");
            (name, message)
        }
        error => return Err(error.into()),
    };
    Err(ApiError::field(name, message))
}

/// Whether probabilities are the model's or those after the samplers.
pub fn probability_stage(fields: &mut Fields) -> Result<LogprobStage, ApiError> {
    Ok(match fields.boolean("post_sampling_probs")? {
        Some(true) => LogprobStage::Drawn,
        _ => LogprobStage::Model,
    })
}

/// A list of names, names with `;` between them, or letters.
fn samplers(value: &Value) -> Result<SamplerOrder, ApiError> {
    let wrong = || expected("samplers", "a list of names, or a text", value);
    let order = match value {
        Value::String(text) => text.parse(),
        Value::Array(items) => {
            let names: Option<Vec<&str>> = items.iter().map(Value::as_str).collect();
            SamplerOrder::from_names(names.ok_or_else(wrong)?)
        }
        _ => return Err(wrong()),
    };
    order.map_err(|error| ApiError::field("samplers", format!("samplers: {error}")))
}

fn breakers(value: &Value) -> Result<SequenceBreakers, ApiError> {
    let name = "dry_sequence_breakers";
    let wrong = || expected(name, "a list of texts", value);
    let texts = value.as_array().ok_or_else(wrong)?.iter();
    let texts: Option<Vec<String>> = texts.map(|text| text.as_str().map(str::to_owned)).collect();
    SequenceBreakers::checked(texts.ok_or_else(wrong)?)
        .map_err(|error| ApiError::field(name, format!("{name}: {error}")))
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

/// Whether a value asks for nothing.
type IsOff = fn(&Value) -> bool;

/// Constraints that are not here, with the values that ask for nothing.
const OFF: [(&str, IsOff, &str); 5] = [
    ("n_indent", is_zero, "0"),
    ("grammar", is_empty, "\"\""),
    ("grammar_lazy", is_false, "false"),
    ("lora", is_empty, "[]"),
    ("backend_sampling", is_false, "false"),
];

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
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

/// Refuses constraints that are not here, unless they ask for nothing.
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
        params.validate(1000).map_err(|e| e.to_string())?;
        Ok(params)
    }

    #[test]
    fn settings_replace_the_defaults() {
        assert_eq!(read("{}").unwrap(), SamplingParams::server());
        let params = read(
            r#"{"temperature": 0, "top_k": -1, "min_p": null, "repeat_penalty": 1.5, "seed": -1, "repeat_last_n": -1,
                "logit_bias": {"7": -100}, "grammar": "", "grammar_lazy": false, "backend_sampling": false}"#,
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
    fn every_setting_arrives_where_it_belongs() {
        let params = read(
            r#"{"temperature": 0.01, "dynatemp_range": 0.02, "dynatemp_exponent": 0.03, "top_p": 0.04, "min_p": 0.05, "typ_p": 0.06,
                "top_n_sigma": 0.07, "xtc_probability": 0.08, "xtc_threshold": 0.09, "repetition_penalty": 0.1,
                "frequency_penalty": 0.11, "presence_penalty": 0.12, "dry_multiplier": 0.13, "dry_base": 1.14, "mirostat_tau": 0.15,
                "mirostat_eta": 0.16, "adaptive_target": 0.17, "adaptive_decay": 0.18, "top_k": 19, "repeat_last_n": 20,
                "dry_penalty_last_n": 21, "dry_allowed_length": 22, "min_keep": 23, "mirostat": 2, "seed": 25,
                "samplers": ["temperature", "top-k"], "dry_sequence_breakers": ["x", "yz"]}"#,
        )
        .unwrap();
        insta::assert_debug_snapshot!(params, @r#"
        SamplingParams {
            temperature: 0.01,
            dynatemp_range: 0.02,
            dynatemp_exponent: 0.03,
            top_k: 19,
            top_p: 0.04,
            min_p: 0.05,
            typical_p: 0.06,
            top_n_sigma: 0.07,
            xtc_probability: 0.08,
            xtc_threshold: 0.09,
            min_keep: 23,
            repetition_penalty: 0.1,
            frequency_penalty: 0.11,
            presence_penalty: 0.12,
            repeat_last_n: 20,
            dry_multiplier: 0.13,
            dry_base: 1.14,
            dry_allowed_length: 22,
            dry_penalty_last_n: 21,
            dry_sequence_breakers: SequenceBreakers {
                texts: [
                    "x",
                    "yz",
                ],
                tokens: None,
            },
            mirostat: V2,
            mirostat_tau: 0.15,
            mirostat_eta: 0.16,
            adaptive_target: 0.17,
            adaptive_decay: 0.18,
            samplers: SamplerOrder(
                [
                    Temperature,
                    TopK,
                ],
            ),
            logit_bias: [],
            seed: Some(
                25,
            ),
            logprobs: None,
        }
        "#);
    }

    #[test]
    fn an_order_is_a_list_or_a_text() {
        let order = |text: &str| read(text).unwrap().samplers.to_string();
        assert_eq!(order(r#"{"samplers": "kt"}"#), "top_k;temperature");
        assert_eq!(order(r#"{"samplers": "top_k;temp"}"#), "top_k;temperature");
        assert_eq!(order(r#"{"samplers": ["typical", "dry"]}"#), "typ_p;dry");
        assert_eq!(order(r#"{"samplers": []}"#), "");
    }

    #[test]
    fn what_is_not_here_is_refused_by_name() {
        for (body, name) in [
            (r#"{"mirostat": 3}"#, "mirostat"),
            (r#"{"mirostat_tau": -1}"#, "mirostat_tau"),
            (r#"{"grammar": "root ::= x"}"#, "grammar"),
            (r#"{"top_k": 1.5}"#, "top_k"),
            (r#"{"top_k": "1"}"#, "top_k"),
            (r#"{"logit_bias": {"-1": 1}}"#, "logit_bias"),
            (r#"{"logit_bias": [[1, true]]}"#, "logit_bias"),
            (r#"{"logit_bias": 1}"#, "logit_bias"),
            (r#"{"best_of": 1}"#, "best_of"),
            (r#"{"samplers": ["top_k", "infill"]}"#, "samplers"),
            (r#"{"samplers": ["top_k", "top_k"]}"#, "samplers"),
            (r#"{"samplers": [1]}"#, "samplers"),
            (r#"{"samplers": "z"}"#, "samplers"),
            (r#"{"dry_base": 0.5}"#, "dry_base"),
            (r#"{"dry_allowed_length": -1}"#, "dry_allowed_length"),
            (r#"{"dry_penalty_last_n": -2}"#, "dry_penalty_last_n"),
            (r#"{"dry_sequence_breakers": "x"}"#, "dry_sequence_breakers"),
            (
                r#"{"dry_sequence_breakers": [""]}"#,
                "dry_sequence_breakers",
            ),
            (r#"{"dry_sequence_breakers": [1]}"#, "dry_sequence_breakers"),
            (r#"{"xtc_probability": 1.5}"#, "xtc_probability"),
            (r#"{"adaptive_decay": 1}"#, "adaptive_decay"),
            (r#"{"dynatemp_range": -1}"#, "dynatemp_range"),
        ] {
            assert!(read(body).unwrap_err().contains(name), "{body}");
        }
    }
}
