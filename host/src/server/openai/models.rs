//! `/v1/models`: the one model that is served.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::super::app::App;
use super::super::error::ApiError;
use super::super::reply::json_response;
use super::super::served::Served;

/// The list.
pub async fn list(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let served = app.served()?;
    Ok(json_response(
        &json!({"object": "list", "data": [model(served)]}),
    ))
}

/// The model by its name.
pub async fn one(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let served = app.served()?;
    let Path(name) =
        name.map_err(|error| ApiError::invalid(format!("the model's name in the path: {error}")))?;
    served.check_name(Some(&name))?;
    Ok(json_response(&model(served)))
}

fn model(served: &Served) -> Value {
    let facts = &served.facts;
    json!({
        "id": served.id,
        "object": "model",
        "created": served.created_s,
        "owned_by": "mlxcel",
        "aliases": served.aliases,
        "meta": {
            "architecture": facts.arch,
            "family": facts.family.0,
            "backend": facts.backend.0,
            "device": facts.device,
            "dtype": facts.dtype.name(),
            "n_vocab": facts.vocab_size,
            "n_ctx": facts.context_tokens,
            "n_ctx_train": served.trained_context_tokens,
            "n_embd": served.hidden_size,
            "size": facts.weights_bytes,
        },
    })
}
