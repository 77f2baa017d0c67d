//! The Jinja environment that `transformers` gives to chat templates.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};

use super::error::{Raised, TemplateError};
use super::scan::Tag;
use super::{filters, methods, plain, syntax};

/// The name under which the one template is stored.
pub(super) const NAME: &str = "chat_template";

/// How deep loops, macros and blocks may nest at run time. A macro counts four; real templates stay below 40.
const RECURSION_LIMIT: usize = 200;

/// Compiles `source`, whose tags are `tags`, in a fresh environment with `fuel` for each render.
pub(super) fn compile(
    source: &str,
    tags: &[Tag],
    fuel: u64,
) -> Result<Environment<'static>, TemplateError> {
    let config = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|error| TemplateError::from_engine(&error, fuel))?;
    let mut env = Environment::new();
    env.set_syntax(config);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    // Jinja2's default `Undefined`: prints nothing and is false, but has no attributes.
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_unknown_method_callback(methods::unknown_method);
    env.set_recursion_limit(RECURSION_LIMIT);
    env.set_fuel(Some(fuel));
    // Errors then say which variable was undefined.
    env.set_debug(true);
    filters::register(&mut env);
    env.add_filter(syntax::PLAIN_DATA, plain::plain_data);
    env.add_function("raise_exception", raise_exception);
    env.remove_global("debug");
    env.add_template_owned(NAME, syntax::rewrite(source, tags))
        .map_err(|error| TemplateError::from_engine(&error, fuel))?;
    Ok(env)
}

fn raise_exception(message: Value) -> Result<Value, Error> {
    let text = message.to_string();
    Err(Error::new(ErrorKind::InvalidOperation, text.clone()).with_source(Raised(text)))
}
