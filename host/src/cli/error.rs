//! What ends a command: the error of a lower layer, or one of the command line's own; with exit code and hint.

use std::error::Error as _;
use std::io;

use mlxcel_registry::arch::DetectError;
use mlxcel_registry::plugin::CatalogueError;
use mlxcel_registry::store::{EnvError, NameError, StoreError};

use crate::chat::ChatError;
use crate::engine::EngineError;
use crate::plugin::{DetectFailure, LoadError, SelectError};
use crate::template::TemplateError;
use crate::text::TextError;

use super::exit::Exit;
use super::table::bytes_text;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The model store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The engine, or the way to it.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The plugins that the command line names.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    /// A plugin.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The backends.
    #[error(transparent)]
    Backend(#[from] SelectError),
    /// The conversation: template, tokenizer, or the engine below.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// The command line does not make sense as a whole.
    #[error("{message}")]
    Usage {
        /// What is wrong and what to do.
        message: String,
    },
    /// `run` without a model, and the default one is not here.
    #[error("no model was named, and the default {model} is not on this machine")]
    NoDefaultModel {
        /// The default.
        model: String,
    },
    /// Nothing called so.
    #[error("no plugin is called {name:?}{}", among(known))]
    NoSuchPlugin {
        /// The name given.
        name: String,
        /// Names there are.
        known: Vec<String>,
    },
    /// Plugins that were to be verified are not in order.
    #[error("{bad} of {total} plugins cannot be used")]
    Unverified {
        /// How many.
        bad: usize,
        /// Of how many.
        total: usize,
    },
    /// The estimate is above the budget.
    #[error(
        "the model needs about {} and {} may be used ({origin})",
        bytes_text(*need_bytes),
        bytes_text(*budget_bytes)
    )]
    DoesNotFit {
        /// Estimate.
        need_bytes: u64,
        /// Budget.
        budget_bytes: u64,
        /// Where the budget comes from.
        origin: String,
    },
    /// Some turns of a conversation that was read from a pipe or file failed; each was reported.
    #[error("{failed} of {turns} turns failed")]
    Turns {
        /// How many failed.
        failed: usize,
        /// Of how many.
        turns: usize,
    },
    /// Stdout cannot be written.
    #[error("cannot write to stdout: {0}")]
    Stdout(io::Error),
    /// Stdin cannot be read.
    #[error("cannot read stdin: {0}")]
    Stdin(io::Error),
    /// Line editing failed.
    #[error("the terminal cannot be used for editing: {0}")]
    Terminal(String),
    /// Something of the system that commands need.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Why not.
        source: io::Error,
    },
}

fn among(known: &[String]) -> String {
    match known.is_empty() {
        true => ", and none was found at all".to_owned(),
        false => format!("; there are {}", known.join(", ")),
    }
}

impl From<EnvError> for CliError {
    fn from(error: EnvError) -> Self {
        Self::Store(error.into())
    }
}

impl From<NameError> for CliError {
    fn from(error: NameError) -> Self {
        Self::Store(error.into())
    }
}

impl CliError {
    /// A usage error.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Usage {
            message: message.into(),
        }
    }

    /// Whether it needs no word: the reader of our output has what it wanted.
    pub fn is_silent(&self) -> bool {
        matches!(self, Self::Stdout(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The message with those of its causes that it does not quote itself.
    pub fn one_line(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            let part = error.to_string();
            if !text.contains(&part) {
                text.push_str(": ");
                text.push_str(&part);
            }
            cause = error.source();
        }
        text
    }

    /// The code to end with.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Store(error) => of_store(error),
            Self::Engine(error) => of_engine(error),
            Self::Chat(error) => of_chat(error),
            Self::Catalogue(_)
            | Self::Load(_)
            | Self::Backend(_)
            | Self::NoSuchPlugin { .. }
            | Self::Unverified { .. } => Exit::Plugin,
            Self::Usage { .. } => Exit::Usage,
            Self::NoDefaultModel { .. } => Exit::ModelNotFound,
            Self::DoesNotFit { .. } => Exit::Memory,
            Self::Stdout(_) if self.is_silent() => Exit::Success,
            Self::Turns { .. }
            | Self::Stdout(_)
            | Self::Stdin(_)
            | Self::Terminal(_)
            | Self::System { .. } => Exit::Failure,
        }
    }

    /// What can be done, where the message does not say it.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::NoDefaultModel { model } => format!(
                "`mlxcel run {model}` downloads and runs it; `mlxcel run PATH` runs a local directory or .gguf file"
            ),
            Self::DoesNotFit { .. } => "lower --ctx-size, take a smaller quantisation, or load it anyway with --force".to_owned(),
            Self::NoSuchPlugin { .. } | Self::Catalogue(_) => {
                "`mlxcel plugin list` shows every plugin, `mlxcel doctor` where they are looked for".to_owned()
            }
            Self::Backend(error) | Self::Engine(EngineError::Backend(error)) => backend_hint(error),
            Self::Engine(EngineError::Decide(error)) => return detect_hint(error),
            Self::Engine(EngineError::Detect(DetectFailure::Undecided { error, .. })) => return detect_hint(error),
            Self::Engine(EngineError::Detect(_)) => "`mlxcel plugin list` shows the state of every plugin".to_owned(),
            Self::Chat(ChatError::Template(TemplateError::None)) => {
                "--chat-template-file gives one, and `mlxcel generate --no-chat-template` continues a text without any".to_owned()
            }
            Self::Store(StoreError::PathNotFound { .. }) => {
                "a model of a repository is written `owner/name`; `mlxcel list` shows what is in the store".to_owned()
            }
            _ => return None,
        })
    }
}

fn backend_hint(error: &SelectError) -> String {
    match error {
        SelectError::Unusable { .. } => {
            "`mlxcel doctor` shows what each backend finds; --backend auto takes the best one that runs here".to_owned()
        }
        _ => no_plugins_hint(),
    }
}

fn no_plugins_hint() -> String {
    "`mlxcel doctor` shows where plugins are looked for and why each backend cannot run; name a folder with --plugins-dir"
        .to_owned()
}

fn detect_hint(error: &DetectError) -> Option<String> {
    match error {
        DetectError::NoFamilies { .. } => Some(no_plugins_hint()),
        DetectError::Unknown { rejected, .. } if rejected.is_empty() => Some(
            "--plugins-dir names a folder with more plugins; `mlxcel doctor` shows where they are looked for"
                .to_owned(),
        ),
        DetectError::Unknown { cures, .. } => Some(cures.join("; ")),
        _ => None,
    }
}

fn of_store(error: &StoreError) -> Exit {
    use StoreError as E;
    match error {
        E::Name(_)
        | E::Env(_)
        | E::RevisionOfPath { .. }
        | E::BadEndpoint { .. }
        | E::Insecure { .. } => Exit::Usage,
        E::NotFound { .. }
        | E::PathNotFound { .. }
        | E::NotStored { .. }
        | E::OnlyInHfCache { .. }
        | E::RevisionConflict { .. }
        | E::RepoNotFound { .. }
        | E::RevisionNotFound { .. }
        | E::NoSuchGguf { .. }
        | E::AmbiguousGguf { .. }
        | E::Offline { .. } => Exit::ModelNotFound,
        E::NotAModel { .. } | E::Unfinished { .. } | E::Damaged { .. } | E::NoWeights { .. } => {
            Exit::Checkpoint
        }
        E::Cancelled => Exit::Interrupted,
        E::Io { .. } | E::SymlinkEscape { .. } | E::TargetOccupied { .. } | E::Locked { .. } => {
            Exit::Failure
        }
        // What is left arises only in downloads; the type is open to additions.
        _ => Exit::Download,
    }
}

fn of_engine(error: &EngineError) -> Exit {
    use EngineError as E;
    match error {
        E::Detect(_)
        | E::Decide(_)
        | E::Backend(_)
        | E::Stopped { .. }
        | E::Ranks { .. }
        | E::Description { .. } => Exit::Plugin,
        E::Gguf { .. } | E::Checkpoint(_) | E::TokenOutOfRange { .. } | E::WrongTask { .. } => {
            Exit::Checkpoint
        }
        E::ContextTooLong { .. }
        | E::KvBudgetTooSmall { .. }
        | E::KvTypesDiffer { .. }
        | E::KvTypeUnsupported { .. }
        | E::KvTypeQuantised { .. }
        | E::KvTypeForModel { .. }
        | E::CannotSplit { .. }
        | E::NotWithRanks { .. } => Exit::Usage,
        E::NoRoomForKv { .. } => Exit::Memory,
        // A family says of a configuration or a tensor that it is not what it should be.
        E::Call(call) => match call.code() {
            mlxcel_abi::status::INVALID_ARGUMENT
            | mlxcel_abi::status::NOT_FOUND
            | mlxcel_abi::status::DATA_LOSS => Exit::Checkpoint,
            _ if call.is_exhausted() => Exit::Memory,
            _ => Exit::Plugin,
        },
        _ => Exit::Failure,
    }
}

fn of_chat(error: &ChatError) -> Exit {
    match error {
        ChatError::Engine(error) => of_engine(error),
        ChatError::Stop(_) | ChatError::Template(TemplateError::Read { .. }) => Exit::Usage,
        // The model's files are in order; what was typed is not possible with them.
        ChatError::Text(TextError::ControlFromText { .. })
        | ChatError::Template(TemplateError::Raised { .. }) => Exit::Failure,
        _ => Exit::Checkpoint,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_that_cannot_be_used_has_a_hint_however_it_was_asked_for() {
        let (name, reason) = ("cuda".to_owned(), "no device".to_owned());
        for error in [
            SelectError::Unusable { name, reason },
            SelectError::NoneRuns {
                rejected: Vec::new(),
            },
        ] {
            let hint = CliError::Engine(EngineError::Backend(error)).hint();
            assert!(hint.is_some_and(|hint| hint.contains("mlxcel doctor")));
        }
    }
}
