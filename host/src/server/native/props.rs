//! `/props` and `/slots`: what is served, and what it does at the moment.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::super::app::App;
use super::super::error::{ApiError, Kind};
use super::super::reply::json_response;
use super::super::served::Served;
use super::super::slots::Slot;
use super::settings::reduced;

/// Properties of the server and its model.
pub async fn props(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let served = app.served()?;
    let (text, defaults) = (&served.text, &served.defaults);
    let token = |name: &str| {
        text.tokenizer
            .named()
            .get(name)
            .cloned()
            .unwrap_or_default()
    };
    let template = served.template.as_ref();
    let mentions = |name: &str| template.is_some_and(|template| template.mentions(name));
    Ok(json_response(&json!({
        "default_generation_settings": {
            "n_ctx": served.facts.context_tokens,
            "params": reduced(&defaults.sampling, defaults.max_tokens),
        },
        "total_slots": app.options.limits.parallel,
        "prefill_chunk_size": served.facts.steps.rows,
        "prefill_beside_decode": served.facts.steps.prefill_rows_beside_decode,
        "model_alias": served.id,
        "model_path": served.path.display().to_string(),
        "modalities": {"vision": false, "audio": false, "video": false},
        "endpoint_slots": app.options.exposed.slots,
        "endpoint_props": false,
        "endpoint_metrics": app.options.exposed.metrics,
        "chat_template": template.map(|template| template.source()).unwrap_or_default(),
        "chat_template_caps": {
            "supports_string_content": template.is_some(),
            "supports_typed_content": false,
            "supports_system_role": mentions("system"),
            "supports_tools": false,
            "supports_tool_calls": mentions("tool_calls"),
            "supports_parallel_tool_calls": false,
            "supports_reasoning_effort": mentions("reasoning_effort"),
        },
        "bos_token": token("bos_token"),
        "eos_token": token("eos_token"),
        "kv_cache_mode": served.facts.kv_type.name(),
        "build_info": concat!("mlxcel-", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
        "ui": false,
    })))
}

/// Answers that run.
pub async fn slots(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    if !app.options.exposed.slots {
        return Err(ApiError::new(
            Kind::NotSupported,
            "this server does not show its slots: it was started with --no-slots",
        ));
    }
    let served = app.served()?;
    let slots = app.watched.slots.all();
    let query = request.uri().query().unwrap_or_default();
    let wants_room = query.split('&').any(|part| {
        part.strip_prefix("fail_on_no_slot=")
            .is_some_and(|value| !value.is_empty())
    });
    if wants_room && slots.iter().all(|slot| slot.is_processing) {
        return Err(ApiError::unavailable(
            "no_slot",
            "no slot is available",
            Some(1),
        ));
    }
    let list = slots
        .iter()
        .enumerate()
        .map(|(id, slot)| object(id, slot, served));
    Ok(json_response(&list.collect()))
}

fn object(id: usize, slot: &Slot, served: &Served) -> Value {
    let mut object = json!({
        "id": id,
        "n_ctx": served.facts.context_tokens,
        "speculative": false,
        "is_processing": slot.is_processing,
    });
    let (Some(task), Some(sampling), Some(map)) =
        (slot.task, &slot.sampling, object.as_object_mut())
    else {
        return object;
    };
    let limit = slot.max_tokens.map(|tokens| tokens as i64);
    let left = limit.map_or(-1, |limit| limit - slot.decoded_tokens as i64);
    for (name, value) in [
        ("id_task", json!(task)),
        ("n_prompt_tokens", json!(slot.prompt_tokens)),
        ("n_prompt_tokens_cache", json!(slot.cached_tokens)),
        ("n_prompt_tokens_processed", json!(slot.processed_tokens)),
        ("params", Value::Object(reduced(sampling, slot.max_tokens))),
        (
            "next_token",
            json!([{"has_next_token": slot.is_processing, "n_remain": left, "n_decoded": slot.decoded_tokens}]),
        ),
    ] {
        map.insert(name.to_owned(), value);
    }
    object
}
