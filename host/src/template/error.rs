//! What can go wrong between messages and a prompt.

use std::path::PathBuf;

/// An error of template loading or rendering.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The checkpoint has no chat template; plain completion still works.
    #[error("the checkpoint has no chat template, give one or use plain completion")]
    None,
    /// The checkpoint has several templates and none of them is the one asked for.
    #[error("no chat template `{wanted}`, the checkpoint has: {available}")]
    NoSuchName {
        /// The name.
        wanted: String,
        /// The names that exist.
        available: String,
    },
    /// A template file cannot be read.
    #[error("cannot read `{path}`: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A template file has the wrong form.
    #[error("`{what}` is not valid: {detail}")]
    Invalid {
        /// File or metadata key.
        what: String,
        /// What was expected and what was found.
        detail: String,
    },
    /// The template is not Jinja.
    #[error("chat template, line {line}: {detail}")]
    Syntax {
        /// Where.
        line: usize,
        /// What the parser says.
        detail: String,
    },
    /// The template refused the messages with `raise_exception`. The text is the template's own.
    #[error("the chat template refused the messages: {message}")]
    Raised {
        /// The template's text.
        message: String,
    },
    /// The template failed while it ran.
    #[error("chat template, line {line}: {detail}")]
    Failed {
        /// Where.
        line: usize,
        /// What went wrong.
        detail: String,
    },
    /// The template ran longer than any honest one.
    #[error("the chat template used its budget of {fuel} steps, it may not end")]
    OutOfFuel {
        /// The budget.
        fuel: u64,
    },
    /// The template has more tags than any honest one.
    #[error("the chat template has {tags} tags, the limit is {limit}")]
    TooManyTags {
        /// How many.
        tags: usize,
        /// The limit.
        limit: usize,
    },
    /// Something is larger than the limit.
    #[error("{what} has more than {limit_bytes} bytes")]
    TooLarge {
        /// The template, one tag of it, or its output.
        what: &'static str,
        /// The limit.
        limit_bytes: usize,
    },
    /// The thread that templates run on cannot be started.
    #[error("cannot start the chat template's thread: {source}")]
    Thread {
        /// Why.
        source: std::io::Error,
    },
    /// The template engine panicked; the panic was caught.
    #[error("the template engine panicked")]
    Panicked,
    /// A template variable of this name is set by the renderer and cannot be given.
    #[error("template variable `{name}` is reserved")]
    ReservedVariable {
        /// The name.
        name: String,
    },
    /// Messages that no template can be given.
    #[error("{detail}")]
    Messages {
        /// What was expected and what was found.
        detail: String,
    },
    /// The template would join request text into a control token.
    #[error("the chat template would build control token `{token}` from request text")]
    ControlFromInput {
        /// The token.
        token: String,
    },
}

/// Carried by the engine's error so that [`TemplateError::Raised`] can be told from a failure.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

impl TemplateError {
    /// Reads an error of the template engine.
    pub(super) fn from_engine(error: &minijinja::Error, fuel: u64) -> Self {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(current) = cause {
            if let Some(raised) = current.downcast_ref::<Raised>() {
                return TemplateError::Raised {
                    message: raised.0.clone(),
                };
            }
            cause = current.source();
        }
        let line = error.line().unwrap_or(0);
        let detail = match error.detail() {
            Some(detail) => format!("{}: {detail}", error.kind()),
            None => error.kind().to_string(),
        };
        match error.kind() {
            minijinja::ErrorKind::OutOfFuel => TemplateError::OutOfFuel { fuel },
            minijinja::ErrorKind::SyntaxError | minijinja::ErrorKind::BadEscape => {
                TemplateError::Syntax { line, detail }
            }
            _ => TemplateError::Failed { line, detail },
        }
    }
}
