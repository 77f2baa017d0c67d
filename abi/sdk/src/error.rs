//! Errors of a family: what the checkpoint, its configuration or the backend did not allow.

use mlxcel_abi::{AbiError, status};

/// Result of everything in this crate.
pub type Result<T> = core::result::Result<T, Error>;

/// Why a family cannot go on. Every variant names what it is about.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The backend refused or failed an operation.
    #[error("{op}: {source}")]
    Backend {
        /// Operation, or the path of the layer that ran it.
        op: String,
        /// The backend's own words.
        source: AbiError,
    },
    /// A configuration key is missing, of the wrong type or out of range.
    #[error("config key \"{key}\" is {found}: expected {expected}")]
    Config {
        /// Full path of the key.
        key: String,
        /// What was there.
        found: String,
        /// What is allowed.
        expected: String,
    },
    /// The configuration asks for a variant this family does not implement.
    #[error("{what} is not supported by this plugin: {supported}")]
    Unsupported {
        /// The variant, with the key that asks for it.
        what: String,
        /// What is supported instead.
        supported: String,
    },
    /// The checkpoint lacks a tensor.
    #[error("tensor \"{name}\" is missing from the checkpoint (expected shape {expected})")]
    MissingTensor {
        /// Full name.
        name: String,
        /// Shape that was wanted.
        expected: String,
    },
    /// A tensor has another shape than the configuration implies.
    #[error("tensor \"{name}\" has shape {found}, the config implies {expected}")]
    TensorShape {
        /// Full name.
        name: String,
        /// Shape in the checkpoint.
        found: String,
        /// Shape that was wanted.
        expected: String,
    },
    /// A tensor's bits and group size do not fit its stored size.
    #[error("tensor \"{name}\": {message}")]
    Quantization {
        /// Full name.
        name: String,
        /// What does not fit.
        message: String,
    },
    /// Tensors are left over that no layer asked for.
    #[error("the checkpoint holds {count} tensor(s) this architecture does not use: {names}")]
    ExtraTensors {
        /// How many.
        count: usize,
        /// The first of them.
        names: String,
    },
    /// Anything else, in words.
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// Puts the path of a layer in front of a backend error.
    #[must_use]
    pub fn at(self, path: &str) -> Self {
        match self {
            Self::Backend { op, source } => Self::Backend {
                op: format!("{path}: {op}"),
                source,
            },
            other => other,
        }
    }

    /// Whether the backend lacks the operation, so that a fallback may be taken.
    pub fn is_unimplemented(&self) -> bool {
        matches!(self, Self::Backend { source, .. } if source.code == status::UNIMPLEMENTED)
    }

    /// The status code that crosses the boundary.
    pub fn code(&self) -> status::Status {
        match self {
            Self::Backend { source, .. } => source.code,
            Self::Unsupported { .. } => status::UNIMPLEMENTED,
            Self::MissingTensor { .. } => status::NOT_FOUND,
            Self::Other(_) => status::INTERNAL,
            _ => status::INVALID_ARGUMENT,
        }
    }
}

impl From<Error> for AbiError {
    fn from(error: Error) -> Self {
        let location = match &error {
            Error::Backend { source, .. } => source.location.clone(),
            _ => String::new(),
        };
        let message = match &error {
            Error::Backend { op, source } => format!("{op}: {}", source.message),
            other => other.to_string(),
        };
        Self {
            code: error.code(),
            message,
            location,
        }
    }
}
