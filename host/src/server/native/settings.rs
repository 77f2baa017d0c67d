//! `generation_settings`: what a request's settings came to.
//!
//! Only settings that exist here are listed, so that the object never claims what is not true.

use serde_json::{Map, Value, json};

use crate::sampling::{LogprobStage, SamplingParams};

use super::super::ask::Settings;

/// The settings that `/props` and `/slots` show.
pub fn reduced(sampling: &SamplingParams, max_tokens: Option<usize>) -> Map<String, Value> {
    let limit = max_tokens.map_or(-1, |tokens| i64::try_from(tokens).unwrap_or(i64::MAX));
    let logprobs = sampling.logprobs;
    let samplers: Vec<&str> = sampling
        .samplers
        .kinds()
        .iter()
        .map(|kind| kind.name())
        .collect();
    let object = json!({
        // A seed that was not asked for is drawn anew for each answer.
        "seed": sampling.seed.map_or(json!(u32::MAX), |seed| json!(seed)),
        "temperature": short(sampling.temperature),
        "dynatemp_range": short(sampling.dynatemp_range),
        "dynatemp_exponent": short(sampling.dynatemp_exponent),
        "top_k": sampling.top_k,
        "top_p": short(sampling.top_p),
        "min_p": short(sampling.min_p),
        "typical_p": short(sampling.typical_p),
        "top_n_sigma": short(sampling.top_n_sigma),
        "xtc_probability": short(sampling.xtc_probability),
        "xtc_threshold": short(sampling.xtc_threshold),
        "min_keep": sampling.min_keep,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": short(sampling.repetition_penalty),
        "presence_penalty": short(sampling.presence_penalty),
        "frequency_penalty": short(sampling.frequency_penalty),
        "dry_multiplier": short(sampling.dry_multiplier),
        "dry_base": short(sampling.dry_base),
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_penalty_last_n,
        "mirostat": sampling.mirostat.number(),
        "mirostat_tau": short(sampling.mirostat_tau),
        "mirostat_eta": short(sampling.mirostat_eta),
        "adaptive_target": short(sampling.adaptive_target),
        "adaptive_decay": short(sampling.adaptive_decay),
        "n_predict": limit,
        "max_tokens": limit,
        "n_probs": logprobs.map_or(0, |request| request.top),
        "post_sampling_probs": logprobs.is_some_and(|request| request.stage == LogprobStage::Drawn),
        "samplers": samplers,
    });
    match object {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// The settings of a request.
pub fn full(settings: &Settings, sampling: &SamplingParams, max_tokens: Option<usize>) -> Value {
    let mut map = reduced(sampling, max_tokens);
    // Minus infinity, which forbids a token, is not a number in JSON.
    let bias = |bias: f32| {
        if bias.is_finite() {
            short(bias)
        } else {
            Value::Null
        }
    };
    let biases: Vec<Value> = sampling
        .logit_bias
        .iter()
        .map(|entry| json!({"token": entry.token, "bias": bias(entry.bias)}))
        .collect();
    for (name, value) in [
        ("stop", json!(settings.stops)),
        ("ignore_eos", json!(settings.ignore_eos)),
        ("stream", json!(settings.is_stream)),
        ("logit_bias", json!(biases)),
        (
            "dry_sequence_breakers",
            json!(sampling.dry_sequence_breakers.texts()),
        ),
        ("timings_per_token", json!(settings.timings_per_token)),
    ] {
        map.insert(name.to_owned(), value);
    }
    Value::Object(map)
}

/// A number as people write it: 0.95, not the nearest 32-bit float in 64 bits.
fn short(value: f32) -> Value {
    json!(value.to_string().parse::<f64>().unwrap_or(f64::from(value)))
}
