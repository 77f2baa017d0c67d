//! What every request passes, in this order: name and origin, preflight, model there, key, route.
//!
//! The response gets the request's id and the CORS headers here, errors get their body, and both are counted and logged.
//! The log has no text of a request, no header and no query.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Instrument;

use crate::sampling::random_seed;

use super::app::App;
use super::auth::Tenant;
use super::error::{ApiError, Dialect, render};
use super::options::Bind;
use super::origin::check_host_header;
use super::status::preflight;

/// Paths that need neither key nor model.
const PUBLIC: [&str; 2] = ["/health", "/v1/health"];

/// The name under which unknown paths are counted: clients cannot make more series than there are routes.
const NO_ROUTE: &str = "none";

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The gate.
pub async fn gate(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = format!("req_{:016x}", random_seed());
    let method = request.method().clone();
    let own_path = request.uri().path();
    let path = own_path
        .strip_prefix(app.options.prefix.as_str())
        .unwrap_or(own_path)
        .to_owned();
    let origin = origin(&app, &request);
    let span = tracing::info_span!("request", id = %id, method = known(&method));
    let outcome = match &origin {
        Err(error) => Err(error.clone()),
        Ok(_) => admit(&app, &path, &method, request.headers()),
    };
    let mut response = match outcome {
        Ok(Passed::Preflight) => preflight(),
        Ok(Passed::Route(tenant)) => {
            request.extensions_mut().insert(tenant);
            next.run(request).instrument(span.clone()).await
        }
        Err(error) => error.into_response(),
    };
    render(&mut response, Dialect::of(&path));
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert(REQUEST_ID, id);
    }
    if let Ok(Some(origin)) = origin {
        allow(headers, origin, method == Method::OPTIONS);
    }
    let route = response
        .extensions()
        .get::<Route>()
        .map_or(NO_ROUTE, |route| route.0.as_str());
    let status = response.status().as_u16();
    app.watched.metrics.responded(route, status);
    tracing::info!(parent: &span, route, status, ms = started.elapsed().as_millis() as u64, "answered");
    response
}

/// A method as it is logged: clients may make up others, of any length.
fn known(method: &Method) -> &str {
    match *method {
        Method::GET | Method::POST | Method::OPTIONS | Method::HEAD => method.as_str(),
        Method::PUT | Method::DELETE | Method::PATCH | Method::CONNECT | Method::TRACE => {
            method.as_str()
        }
        _ => "other",
    }
}

/// The route of a response, for counting.
#[derive(Debug, Clone)]
struct Route(String);

/// Notes which route a request took; runs inside of the router, where that is known.
pub async fn note_route(request: Request, next: Next) -> Response {
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map(|path| Route(path.as_str().to_owned()));
    let mut response = next.run(request).await;
    if let Some(route) = route {
        response.extensions_mut().insert(route);
    }
    response
}

enum Passed {
    /// A browser asks what it may send.
    Preflight,
    /// To the route, on behalf of somebody.
    Route(Tenant),
}

/// Name and origin. The value to allow when a page sent the request.
fn origin(app: &App, request: &Request) -> Result<Option<HeaderValue>, ApiError> {
    let headers = request.headers();
    check_host_header(request.version(), headers)?;
    if matches!(app.options.bind, Bind::Tcp { .. }) {
        app.options.hosts.check(request.uri(), headers)?;
    }
    app.options.origins.check(headers)
}

fn admit(app: &App, path: &str, method: &Method, headers: &HeaderMap) -> Result<Passed, ApiError> {
    if method == Method::OPTIONS {
        return Ok(Passed::Preflight);
    }
    if PUBLIC.contains(&path) {
        return Ok(Passed::Route(Tenant::default()));
    }
    app.served()?;
    Ok(Passed::Route(app.options.keys.check(headers)?))
}

fn allow(headers: &mut HeaderMap, origin: HeaderValue, is_preflight: bool) {
    if origin != "*" {
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(
        header::ACCESS_CONTROL_EXPOSE_HEADERS,
        HeaderValue::from_static("x-request-id, retry-after"),
    );
    if is_preflight {
        headers.insert(
            header::ACCESS_CONTROL_ALLOW_METHODS,
            HeaderValue::from_static("GET, POST, OPTIONS"),
        );
        headers.insert(
            header::ACCESS_CONTROL_ALLOW_HEADERS,
            HeaderValue::from_static("authorization, content-type, x-api-key, *"),
        );
        headers.insert(
            header::ACCESS_CONTROL_MAX_AGE,
            HeaderValue::from_static("600"),
        );
    }
}
