//! Errors of loading a plugin and of calling one.

use std::path::PathBuf;

use mlxcel_abi::{AbiError, Status, status};
use mlxcel_registry::plugin::{PluginKind, Rejection};

/// A function of a plugin answered with an error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{subject}: {error}")]
pub struct CallError {
    /// Which function of which plugin, for instance `family llama: forward`.
    pub subject: String,
    /// What it said.
    pub error: AbiError,
}

impl CallError {
    pub(crate) fn new(subject: impl Into<String>, error: AbiError) -> Self {
        Self {
            subject: subject.into(),
            error,
        }
    }

    /// One of [`mlxcel_abi::status`].
    pub fn code(&self) -> Status {
        self.error.code
    }

    /// Memory or another budget is used up: free something and try again.
    pub fn is_exhausted(&self) -> bool {
        self.code() == status::RESOURCE_EXHAUSTED
    }

    /// The plugin does not have this function; a composition of others may do.
    pub fn is_unimplemented(&self) -> bool {
        self.code() == status::UNIMPLEMENTED
    }

    /// The plugin panicked.
    pub fn is_panic(&self) -> bool {
        // The text is that of `mlxcel_abi::guard`, which every entry of a plugin runs under.
        self.code() == status::INTERNAL && self.error.message.starts_with("panicked")
    }
}

impl From<CallError> for AbiError {
    fn from(error: CallError) -> Self {
        let message = format!("{}: {}", error.subject, error.error.message);
        Self {
            message,
            ..error.error
        }
    }
}

/// A plugin could not be loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// It was refused at some stage.
    #[error("plugin {}: {rejection}", path.display())]
    Rejected {
        /// The file.
        path: PathBuf,
        /// Stage, code and text.
        rejection: Rejection,
    },
    /// The catalogue says that it must not be used.
    #[error("plugin {}: {reason}", path.display())]
    NotUsable {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// It is of the other kind.
    #[error("plugin {} is a {found}, expected a {expected}", path.display())]
    WrongKind {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        expected: PluginKind,
        /// What it is.
        found: PluginKind,
    },
}

impl LoadError {
    /// The rejection behind the error, if it is one; for [`mlxcel_registry::plugin::State`].
    pub fn rejection(&self) -> Option<&Rejection> {
        match self {
            Self::Rejected { rejection, .. } => Some(rejection),
            _ => None,
        }
    }
}
