//! Which path is which function.

use std::sync::Arc;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{any, get, post};

use super::app::App;
use super::gate::{gate, note_route};
use super::native::{completion::completion, props, tokenize};
use super::openai::{chat, completions::completions, models};
use super::status;

/// Routes of other servers, which are told apart from typing mistakes.
const NOT_HERE: [&str; 22] = [
    "/v1/embeddings",
    "/embeddings",
    "/embedding",
    "/v1/rerank",
    "/v1/reranking",
    "/rerank",
    "/reranking",
    "/infill",
    "/v1/audio/transcriptions",
    "/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/responses",
    "/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/images/generations",
    "/lora-adapters",
    "/models/load",
    "/models/unload",
    "/slots/{id}",
    "/v1/chat/completions/control",
];

/// All routes, behind the gate.
pub fn router(app: Arc<App>) -> Router {
    let mut routes = Router::new()
        .route("/health", get(status::health))
        .route("/v1/health", get(status::health))
        .route("/metrics", get(status::metrics))
        .route("/v1/cache/stats", get(status::cache_stats))
        .route("/v1/cache/reset", post(status::cache_reset))
        .route("/models", get(models::list))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::one))
        .route("/v1/chat/completions", post(chat::chat))
        .route("/chat/completions", post(chat::chat))
        .route(
            "/v1/chat/completions/input_tokens",
            post(chat::input_tokens),
        )
        .route("/chat/completions/input_tokens", post(chat::input_tokens))
        .route("/apply-template", post(chat::apply_template))
        .route("/v1/completions", post(completions))
        .route("/completion", post(completion))
        .route("/completions", post(completion))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/props", get(props::props).post(status::not_supported))
        .route("/slots", get(props::slots));
    for path in NOT_HERE {
        routes = routes.route(path, any(status::not_supported));
    }
    let routes = routes
        .method_not_allowed_fallback(status::wrong_method)
        .route_layer(from_fn(note_route));
    let outer = match app.options.prefix.as_str() {
        "" => routes,
        prefix => Router::new().nest(prefix, routes),
    };
    outer
        .fallback(status::not_found)
        .layer(from_fn_with_state(Arc::clone(&app), gate))
        .with_state(app)
}
