//! Chat templates: messages to a prompt, as `transformers` renders them.
//!
//! Owns where a template comes from, the Jinja environment that behaves as Python's, the limits on hostile templates,
//! and the knowledge of which control tokens in a rendered prompt were written by the template. It must not know about
//! models, HTTP or the engine; it knows the tokenizer only as a set of control tokens.
//!
//! Templates are untrusted code: they have no file access, a fuel budget, an output limit and no way to reach
//! anything but the values given to them. Messages are untrusted text: see `trust`.

mod arguments;
mod clock;
mod environment;
mod error;
mod filters;
mod messages;
mod methods;
mod plain;
mod render;
mod scan;
mod source;
mod spellings;
mod stack;
mod syntax;
mod tojson;
mod trust;
mod value;

pub use clock::WallClock;
pub use error::TemplateError;
pub use messages::{ContinueFinal, MessageField};
pub use render::{ChatTemplate, Limits, RenderInput};
pub use source::{TemplateOrigin, TemplateSet};

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trust_tests;
