//! Reading the body of a request: bounded in bytes and time.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use tokio::sync::OwnedSemaphorePermit;

use super::app::App;
use super::ask::blocking;
use super::error::{ApiError, Kind};
use super::fields::Fields;
use super::options::Limits;

/// Bytes of a body that are read where they arrive; what is longer would keep other requests waiting.
const INLINE_BYTES: usize = 64 << 10;

/// How long a body that is refused is still read.
const PASS_OVER: Duration = Duration::from_secs(5);

/// Long bodies that are worked on at a time: they leave threads to short ones, and are many times longer in memory.
pub const LONG_AT_A_TIME: usize = 2;

/// The turn of a long body, to be kept until the costly work on it is done.
pub type Turn = Option<OwnedSemaphorePermit>;

/// What the fields of a JSON body say.
pub async fn read_fields<T: Send + 'static>(
    request: Request,
    app: &App,
    understand: impl FnOnce(Fields) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, Turn), ApiError> {
    let body = read(request, &app.options.limits).await?;
    if body.len() <= INLINE_BYTES {
        return Ok((understand(Fields::parse(&body)?)?, None));
    }
    // Never closed.
    let turn = Arc::clone(&app.long_bodies).acquire_owned().await.ok();
    blocking(move || Ok((understand(Fields::parse(&body)?)?, turn))).await
}

/// The bytes of a body.
pub async fn read(request: Request, limits: &Limits) -> Result<Vec<u8>, ApiError> {
    let headers = request.headers();
    let encoding = headers
        .get(header::CONTENT_ENCODING)
        .map(|value| value.to_str().unwrap_or("?").trim());
    if let Some(encoding) =
        encoding.filter(|encoding| !encoding.is_empty() && *encoding != "identity")
    {
        let message = format!("bodies packed as {encoding:?} are not read: send it unpacked");
        return Err(ApiError::new(Kind::Encoding, message));
    }
    // Chunks are undone below; what else is in this header would have to be undone here (RFC 9112, 6.1).
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let is_chunks = |value: &HeaderValue| {
        let value = value.to_str().unwrap_or("?").trim();
        value.eq_ignore_ascii_case("chunked")
    };
    if let Some(coding) = codings.find(|coding| !is_chunks(coding)) {
        let message =
            format!("bodies sent as {coding:?} are not read: send it whole or in plain chunks");
        return Err(ApiError::new(Kind::Encoding, message));
    }
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    let waits = headers.contains_key(header::EXPECT);
    let mut body = pin!(request.into_body());
    if let Some(bytes) = announced.filter(|bytes| *bytes > limits.body_bytes) {
        // Who asks before it sends has not sent anything, and what is far too large is not worth reading.
        if !waits && bytes / 2 <= limits.body_bytes {
            pass_over(body, bytes).await;
        }
        return Err(too_large(limits.body_bytes));
    }
    let outcome = tokio::time::timeout(limits.body, collect(body.as_mut(), limits.body_bytes));
    match outcome.await {
        Ok(Ok(Some(bytes))) => Ok(bytes),
        Ok(Ok(None)) => {
            pass_over(body, limits.body_bytes).await;
            Err(too_large(limits.body_bytes))
        }
        Ok(Err(error)) => Err(error),
        Err(_) => {
            let message = format!("the body did not arrive within {} s", limits.body.as_secs());
            Err(ApiError::new(Kind::SlowRequest, message))
        }
    }
}

/// The bytes of a body, or none where they are more than the limit.
async fn collect(
    mut body: Pin<&mut Body>,
    limit_bytes: usize,
) -> Result<Option<Vec<u8>>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|context| body.as_mut().poll_frame(context)).await {
        let frame = frame
            .map_err(|error| ApiError::invalid(format!("the body cannot be read: {error}")))?;
        if let Some(data) = frame.data_ref() {
            if bytes.len() + data.len() > limit_bytes {
                return Ok(None);
            }
            bytes.extend_from_slice(data);
        }
    }
    Ok(Some(bytes))
}

/// Reads and drops up to so many bytes. Clients that write all before they read would not see an answer that comes
/// sooner: the connection is closed after it, and they fail at writing.
async fn pass_over(mut body: Pin<&mut Body>, most_bytes: usize) {
    let reading = async {
        let mut bytes = 0;
        while let Some(Ok(frame)) = poll_fn(|context| body.as_mut().poll_frame(context)).await {
            bytes += frame.data_ref().map_or(0, |data| data.len());
            if bytes > most_bytes {
                return;
            }
        }
    };
    // Who is slower than that has time to see the answer.
    let _ = tokio::time::timeout(PASS_OVER, reading).await;
}

fn too_large(limit_bytes: usize) -> ApiError {
    ApiError::new(
        Kind::TooLarge,
        format!("the body has more than {limit_bytes} bytes"),
    )
    .with_code("body_too_large")
}
