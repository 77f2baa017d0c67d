//! A thread with a deep stack for compiling and rendering.
//!
//! The engine parses, evaluates and frees by recursion. What a template can nest is bounded (tag size, number of tags,
//! namespaces, recursion limit), and the bounds are chosen so that the deepest allowed nesting fits this stack with
//! room to spare even without optimisation: about 2 kB for a level of an expression, 2.5 kB for a level of a value.

use std::thread;

use super::TemplateError;

/// Only touched pages cost memory.
const STACK_BYTES: usize = 64 << 20;

/// Runs `work` there. A panic becomes an error.
pub(super) fn on_deep_stack<T: Send>(
    work: impl FnOnce() -> Result<T, TemplateError> + Send,
) -> Result<T, TemplateError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name("chat-template".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work)
            .map_err(|source| TemplateError::Thread { source })?;
        thread.join().unwrap_or(Err(TemplateError::Panicked))
    })
}
