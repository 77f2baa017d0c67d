//! Failures inside an operation, before they get its name: those of this crate and C++ exceptions.

use mlxcel_abi::{AbiError, Status, status};

/// What a slot's body fails with.
#[derive(Debug)]
pub(crate) enum Fault {
    /// Found on the Rust side.
    Abi(AbiError),
    /// Thrown in the shim; its text is `<code>|<message>` (cpp/error.h).
    Thrown(cxx::Exception),
}

impl From<AbiError> for Fault {
    fn from(error: AbiError) -> Self {
        Self::Abi(error)
    }
}

impl From<cxx::Exception> for Fault {
    fn from(error: cxx::Exception) -> Self {
        Self::Thrown(error)
    }
}

impl Fault {
    /// An argument is wrong.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Abi(AbiError::invalid(message))
    }

    /// The error as the caller sees it: with the operation's name in front.
    pub(crate) fn named(self, op: &str) -> AbiError {
        match self {
            Self::Abi(mut error) => {
                error.message = format!("{op}: {}", error.message);
                error
            }
            Self::Thrown(error) => {
                let (code, text) = split(error.what());
                AbiError::new(code, format!("{op}: {}", tidy(text, op)))
            }
        }
    }
}

fn split(what: &str) -> (Status, &str) {
    what.split_once('|')
        .and_then(|(code, text)| Some((code.parse().ok()?, text)))
        .unwrap_or((status::INTERNAL, what))
}

/// MLX starts messages with its own operation's name in brackets and ends them with a full stop.
fn tidy<'a>(text: &'a str, op: &str) -> &'a str {
    let text = text.trim().trim_end_matches('.');
    text.strip_prefix('[')
        .and_then(|rest| rest.split_once("] "))
        .filter(|(name, _)| *name == op)
        .map_or(text, |(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_and_text_are_taken_apart() {
        assert_eq!(
            split("8|no memory"),
            (status::RESOURCE_EXHAUSTED, "no memory")
        );
        assert_eq!(split("no code"), (status::INTERNAL, "no code"));
        assert_eq!(split("x|y"), (status::INTERNAL, "x|y"));
    }

    #[test]
    fn names_are_not_said_twice() {
        assert_eq!(tidy("[matmul] shapes differ.", "matmul"), "shapes differ");
        assert_eq!(
            tidy("[broadcast_shapes] differ", "add"),
            "[broadcast_shapes] differ"
        );
        let fault = Fault::invalid("expected 2 dims");
        assert_eq!(fault.named("fft").message, "fft: expected 2 dims");
    }
}
