//! Health, metrics and the prefix cache: what operators and their machines ask.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};

use super::app::App;
use super::ask::blocking;
use super::body::read;
use super::error::{ApiError, Kind};
use super::metrics::{Scrape, page};
use super::reply::{json_response, text_response};

/// Steps that may fail one after another before that is more than bad luck.
const FAILURES: u64 = 3;

/// `/health`: 200 only when a request could be answered now. Requests are still tried while steps fail, so that a
/// device that comes back is noticed.
pub async fn health(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    app.check_condition()?;
    let failed = app.served()?.engine.figures().failed_in_a_row;
    if failed >= FAILURES {
        let message = format!("the last {failed} steps of the engine failed");
        return Err(ApiError::unavailable("engine_failing", message, Some(1)));
    }
    Ok(json_response(&json!({"status": "ok"})))
}

/// `/metrics`.
pub async fn metrics(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    if !app.options.exposed.metrics {
        let message = "this server does not show metrics: start it with --metrics";
        return Err(ApiError::new(Kind::NotSupported, message));
    }
    let served = app.served()?;
    let text = page(
        &app.watched.metrics,
        &Scrape {
            model: &served.id,
            figures: served.engine.figures(),
            health: served.engine.health(),
            parallel: app.options.limits.parallel,
            page_bytes: served.page_bytes(),
            connections: app.crowd.count(),
            displaced_connections: app.crowd.displaced_count(),
        },
    );
    let mut response = text_response(text, "text/plain; version=0.0.4");
    let name = HeaderName::from_static("process-start-time-unix");
    response
        .headers_mut()
        .insert(name, HeaderValue::from(app.started_s));
    Ok(response)
}

/// `/v1/cache/stats`.
pub async fn cache_stats(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    Ok(json_response(&stats(&app)?))
}

fn stats(app: &App) -> Result<Value, ApiError> {
    let served = app.served()?;
    let figures = served.engine.figures();
    let page_bytes = served.page_bytes();
    let disk = figures.disk;
    Ok(json!({
        "enabled": figures.prefix_max_pages > 0,
        "page_tokens": figures.page_tokens,
        "pages": figures.prefix_pages,
        "bytes": figures.prefix_pages * page_bytes,
        "pool_pages_in_use": figures.pages_in_use,
        "pool_pages_total": figures.pages_total,
        "pool_bytes_total": figures.pages_total * page_bytes,
        "hits": figures.prefix.hits,
        "misses": figures.prefix.misses,
        "tokens_reused": figures.prefix.reused_tokens,
        "pages_evicted": figures.prefix.evicted_pages,
        "pages_expired": figures.prefix.expired_pages,
        "pages_over_limit": figures.prefix.capped_pages,
        "pages_limit": figures.prefix_max_pages,
        "disk": {
            "enabled": disk.is_on,
            "files": disk.files,
            "bytes": disk.bytes,
            "pages_read": disk.read_pages,
            "pages_written": disk.written_pages,
            "writes_failed": disk.failed_writes,
            "files_damaged": disk.damaged_files,
            "files_evicted": disk.evicted_files,
        },
    }))
}

/// `/v1/cache/reset`: empties the prefix cache. Answers that run are not touched.
pub async fn cache_reset(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = read(request, &app.options.limits).await?;
    if !body.iter().all(u8::is_ascii_whitespace) && body != b"{}" {
        return Err(ApiError::invalid("this route takes no fields"));
    }
    app.check_condition()?;
    let served = Arc::clone(app.served()?);
    blocking(move || Ok(served.engine.clear_prefix_cache()?)).await?;
    Ok(json_response(&json!({"status": "ok"})))
}

/// Routes that other servers have and this one does not.
pub async fn not_supported(request: Request) -> ApiError {
    let message = format!("{} is not supported by this server", request.uri().path());
    ApiError::new(Kind::NotSupported, message)
}

/// Paths that lead nowhere.
pub async fn not_found(request: Request) -> ApiError {
    ApiError::new(
        Kind::NotFound,
        format!("there is no {} {}", request.method(), request.uri().path()),
    )
}

/// Paths that have other methods.
pub async fn wrong_method(request: Request) -> ApiError {
    ApiError::new(
        Kind::Method,
        format!(
            "{} does not take {}",
            request.uri().path(),
            request.method()
        ),
    )
}

/// The answer to a browser that asks what it may send.
pub fn preflight() -> Response {
    let mut response = Response::default();
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}
