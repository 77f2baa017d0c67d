//! What a client is told when something goes wrong: status, body and headers, in one place.
//!
//! Handlers return an [`ApiError`]; [`render`] writes it in the dialect of the route, with the request's id.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::chat::ChatError;
use crate::engine::EngineError;
use crate::sampling::{ParamError, SamplingError};
use crate::template::TemplateError;
use crate::text::{StopError, TextError};

/// Longest message of an error, which may quote what the client sent.
const MOST_MESSAGE_CHARS: usize = 2000;

/// Longest name of a field in an error.
const MOST_PARAM_CHARS: usize = 200;

/// How errors of a route are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's: `code` is a word or null.
    OpenAi,
    /// llama-server's: `code` is the status.
    Native,
}

impl Dialect {
    /// The dialect of a path without the server's prefix.
    pub fn of(path: &str) -> Self {
        match path.starts_with("/v1/") || path.starts_with("/chat/") {
            true => Self::OpenAi,
            false => Self::Native,
        }
    }
}

/// What kind of failure it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request is wrong.
    Invalid,
    /// The prompt does not fit.
    ContextExceeded,
    /// No valid key.
    Authentication,
    /// The key, host or origin does not allow it.
    Forbidden,
    /// No such route or model.
    NotFound,
    /// The route has other methods.
    Method,
    /// The client was too slow to send its request.
    SlowRequest,
    /// The body is too large.
    TooLarge,
    /// The body is packed in a way that is not read.
    Encoding,
    /// The server broke.
    Internal,
    /// The route exists elsewhere, not here.
    NotSupported,
    /// Not now: loading, full, draining, or the engine is gone.
    Unavailable,
    /// The key has as many requests as it may.
    TooMany,
    /// The answer took too long.
    Timeout,
}

impl Kind {
    fn status(self) -> StatusCode {
        match self {
            Self::Invalid | Self::ContextExceeded => StatusCode::BAD_REQUEST,
            Self::Authentication => StatusCode::UNAUTHORIZED,
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::SlowRequest => StatusCode::REQUEST_TIMEOUT,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Encoding => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Self::NotSupported => StatusCode::NOT_IMPLEMENTED,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::TooMany => StatusCode::TOO_MANY_REQUESTS,
            Self::Timeout => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    fn name(self, dialect: Dialect) -> &'static str {
        match self {
            Self::ContextExceeded if dialect == Dialect::Native => "exceed_context_size_error",
            Self::Invalid
            | Self::ContextExceeded
            | Self::Method
            | Self::TooLarge
            | Self::Encoding
            | Self::SlowRequest => "invalid_request_error",
            Self::Authentication => "authentication_error",
            Self::Forbidden => "permission_error",
            Self::NotFound => "not_found_error",
            Self::Internal => "server_error",
            Self::NotSupported => "not_supported_error",
            Self::Unavailable => "unavailable_error",
            Self::TooMany => "rate_limit_error",
            Self::Timeout => "timeout_error",
        }
    }
}

/// A failure of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    kind: Kind,
    message: String,
    /// The field at fault.
    param: Option<String>,
    /// A word for programs.
    code: Option<&'static str>,
    /// Tokens of the prompt and of the context.
    context: Option<(usize, usize)>,
    retry_after_s: Option<u32>,
}

impl ApiError {
    /// A failure of some kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            param: None,
            code: None,
            context: None,
            retry_after_s: None,
        }
    }

    /// The request is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, message)
    }

    /// A field is wrong.
    pub fn field(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(name.into()),
            ..Self::invalid(message)
        }
    }

    /// A field that this server does not have.
    pub fn unsupported(name: &str, message: impl Into<String>) -> Self {
        Self {
            code: Some("unsupported_parameter"),
            ..Self::field(name, message)
        }
    }

    /// The prompt does not fit into the context.
    pub fn too_long(prompt_tokens: usize, context_tokens: usize) -> Self {
        let message = format!(
            "the prompt has {prompt_tokens} tokens and the context holds {context_tokens}: shorten the prompt"
        );
        Self {
            context: Some((prompt_tokens, context_tokens)),
            code: Some("context_length_exceeded"),
            ..Self::new(Kind::ContextExceeded, message)
        }
    }

    /// The key has as many requests as it may; one of them ends sooner or later.
    pub fn too_many(most: usize) -> Self {
        let message =
            format!("this key has {most} requests that run or wait, and may have no more");
        Self {
            retry_after_s: Some(1),
            ..Self::new(Kind::TooMany, message).with_code("too_many_requests")
        }
    }

    /// The answer was not complete in its time.
    pub fn answer_timeout(limit: Duration) -> Self {
        let message = format!("the answer took longer than {} s", limit.as_secs_f64());
        Self::new(Kind::Timeout, message).with_code("answer_timeout")
    }

    /// Not now; clients may try again after so many seconds.
    pub fn unavailable(
        code: &'static str,
        message: impl Into<String>,
        retry_after_s: Option<u32>,
    ) -> Self {
        Self {
            code: Some(code),
            retry_after_s,
            ..Self::new(Kind::Unavailable, message)
        }
    }

    /// With a word for programs.
    #[must_use]
    pub fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// With the field at fault.
    #[must_use]
    pub fn with_param(mut self, name: impl Into<String>) -> Self {
        self.param = Some(name.into());
        self
    }

    /// The status.
    pub fn status(&self) -> StatusCode {
        self.kind.status()
    }

    /// The text for people.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The body.
    pub fn body(&self, dialect: Dialect) -> Value {
        let mut error = Map::new();
        let param = self.param.as_deref();
        let param = param.map(|param| bounded(param, MOST_PARAM_CHARS));
        error.insert(
            "message".to_owned(),
            json!(bounded(&self.message, MOST_MESSAGE_CHARS)),
        );
        error.insert("type".to_owned(), json!(self.kind.name(dialect)));
        match dialect {
            Dialect::OpenAi => {
                error.insert("param".to_owned(), json!(param));
                error.insert("code".to_owned(), json!(self.code));
            }
            Dialect::Native => {
                error.insert("code".to_owned(), json!(self.status().as_u16()));
            }
        }
        if let Some((prompt_tokens, context_tokens)) = self.context {
            error.insert("n_prompt_tokens".to_owned(), json!(prompt_tokens));
            error.insert("n_ctx".to_owned(), json!(context_tokens));
        }
        json!({ "error": error })
    }
}

/// A text, or its beginning: what a client sent is not sent back at any length.
fn bounded(text: &str, most_chars: usize) -> Cow<'_, str> {
    match text.char_indices().nth(most_chars) {
        None => Cow::Borrowed(text),
        Some((end, _)) => Cow::Owned(format!("{}…", text.get(..end).unwrap_or_default())),
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = self.status();
        response.extensions_mut().insert(Arc::new(self));
        response
    }
}

/// Writes the body of a response that a handler left to its error.
pub fn render(response: &mut Response, dialect: Dialect) {
    let Some(error) = response.extensions_mut().remove::<Arc<ApiError>>() else {
        return;
    };
    *response.body_mut() = Body::from(error.body(dialect).to_string());
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json; charset=utf-8"),
    );
    if let Some(seconds) = error.retry_after_s {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if error.kind == Kind::Authentication {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    // What is left of such a request is not read, so the connection cannot carry another.
    if matches!(error.kind, Kind::TooLarge | Kind::SlowRequest) {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        if error.is_exhausted() {
            return Self::unavailable("device_memory", error.to_string(), Some(1));
        }
        match error {
            EngineError::PromptTooLong {
                prompt_tokens,
                context_tokens,
            } => Self::too_long(prompt_tokens, context_tokens),
            EngineError::EmptyPrompt | EngineError::TokenOutOfRange { .. } => {
                Self::field("prompt", error.to_string())
            }
            EngineError::Sampling(SamplingError::Params(error)) => error.into(),
            EngineError::KvPoolFull { .. } => {
                Self::unavailable("kv_pool_full", error.to_string(), Some(1))
            }
            EngineError::DeadlineExceeded { .. } => {
                Self::new(Kind::Timeout, error.to_string()).with_code("answer_timeout")
            }
            EngineError::Stopped { .. } | EngineError::Ranks { .. } => {
                Self::unavailable("engine_stopped", error.to_string(), None)
            }
            error => Self::new(Kind::Internal, error.to_string()),
        }
    }
}

impl From<ParamError> for ApiError {
    fn from(error: ParamError) -> Self {
        let name = match &error {
            ParamError::Range { name, .. } => name,
            ParamError::BiasToken { .. } | ParamError::BiasValue { .. } => "logit_bias",
            ParamError::TopLogprobs { .. } => "top_logprobs",
            ParamError::Breakers => "dry_sequence_breakers",
        };
        Self::field(name, error.to_string())
    }
}

impl From<StopError> for ApiError {
    fn from(error: StopError) -> Self {
        Self::field("stop", error.to_string())
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        match error {
            TextError::ControlFromText { .. } | TextError::TooLarge { .. } => {
                Self::invalid(error.to_string())
            }
            error => Self::new(Kind::Internal, error.to_string()),
        }
    }
}

impl From<TemplateError> for ApiError {
    fn from(error: TemplateError) -> Self {
        match error {
            TemplateError::Thread { .. } | TemplateError::Panicked => {
                Self::new(Kind::Internal, error.to_string())
            }
            TemplateError::ReservedVariable { .. } => {
                Self::field("chat_template_kwargs", error.to_string())
            }
            // Templates are programs over the messages: what they refuse or stumble over came with the request.
            error => Self::field("messages", error.to_string()),
        }
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        match error {
            ChatError::Engine(error) => error.into(),
            ChatError::Template(error) => error.into(),
            ChatError::Text(error) => error.into(),
            ChatError::Stop(error) => error.into(),
            error => Self::new(Kind::Internal, error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_by_dialect() {
        let field = ApiError::field("temperature", "temperature is -1, expected 0 to 100");
        let long = ApiError::too_long(900, 512);
        insta::assert_snapshot!(
            [field.body(Dialect::OpenAi), field.body(Dialect::Native), long.body(Dialect::OpenAi), long.body(Dialect::Native)]
                .map(|body| body.to_string())
                .join("\n"),
            @r#"
        {"error":{"message":"temperature is -1, expected 0 to 100","type":"invalid_request_error","param":"temperature","code":null}}
        {"error":{"message":"temperature is -1, expected 0 to 100","type":"invalid_request_error","code":400}}
        {"error":{"message":"the prompt has 900 tokens and the context holds 512: shorten the prompt","type":"invalid_request_error","param":null,"code":"context_length_exceeded","n_prompt_tokens":900,"n_ctx":512}}
        {"error":{"message":"the prompt has 900 tokens and the context holds 512: shorten the prompt","type":"exceed_context_size_error","code":400,"n_prompt_tokens":900,"n_ctx":512}}
        "#
        );
    }
}
