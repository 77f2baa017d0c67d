//! Why a plugin is not usable: a stage, a stable code and one line for people.
//!
//! The codes appear in `--json` output and in scripts, so they never change meaning. The host's loader
//! uses the same type for the stages that run code.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Step of the loading pipeline, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Reading the file; none of its code ran.
    Peek,
    /// Trying the file in a child process.
    Probe,
    /// The dynamic linker.
    Link,
    /// The layout-checked root module.
    Header,
    /// The plugin's own `open`.
    Open,
}

impl Stage {
    /// The stage's name as in JSON output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Peek => "peek",
            Self::Probe => "probe",
            Self::Link => "link",
            Self::Header => "header",
            Self::Open => "open",
        }
    }
}

macro_rules! reason_codes {
    ($($(#[$meta:meta])* $name:ident = $text:literal;)*) => {
        /// Stable code of a reason.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[non_exhaustive]
        pub enum ReasonCode { $($(#[$meta])* $name,)* }

        impl ReasonCode {
            /// Every code.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The code as in JSON output.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

reason_codes! {
    /// The file could not be read.
    Unreadable = "unreadable";
    /// A directory, a pipe or something else that is not a plain file.
    NotAFile = "not_a_file";
    /// Zero bytes.
    Empty = "empty";
    /// Not an object file of any kind.
    NotAnObject = "not_an_object";
    /// Headers point behind the end of the file.
    Truncated = "truncated";
    /// Headers contradict themselves.
    Malformed = "malformed";
    /// Built for another operating system.
    WrongOs = "wrong_os";
    /// Built for another processor.
    WrongArch = "wrong_arch";
    /// An object file, but not a shared library.
    NotALibrary = "not_a_library";
    /// A shared library without plugin metadata.
    NotAPlugin = "not_a_plugin";
    /// The metadata cannot be understood.
    BadMetadata = "bad_metadata";
    /// The ABI versions do not fit together.
    AbiMismatch = "abi_mismatch";
    /// A kind of plugin that this host does not know.
    UnknownKind = "unknown_kind";
    /// Built so that a panic would end the process.
    PanicAbort = "panic_abort";
    /// The child process that tried the plugin died of a signal or exited.
    Crashed = "crashed";
    /// The child process that tried the plugin did not answer in time.
    TimedOut = "timed_out";
    /// The child process could not be started.
    ProbeFailed = "probe_failed";
    /// A library that the plugin needs is not installed.
    MissingLibrary = "missing_library";
    /// A symbol that the plugin needs is in none of its libraries.
    UndefinedSymbol = "undefined_symbol";
    /// The operating system refused the file because of its code signature.
    Signature = "signature";
    /// Any other complaint of the dynamic linker.
    LinkError = "link_error";
    /// The library exports no root module.
    NoRootModule = "no_root_module";
    /// The root module's header or layout is not the one of this ABI major.
    LayoutMismatch = "layout_mismatch";
    /// What the running plugin says contradicts what its file says.
    HelloMismatch = "hello_mismatch";
    /// `open` answered with an error.
    OpenFailed = "open_failed";
    /// An entry of the plugin panicked while it was being loaded.
    Panicked = "panicked";
    /// The function table is missing or its size is impossible.
    BadTable = "bad_table";
}

impl fmt::Display for ReasonCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A plugin was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub struct Rejection {
    /// Where in the pipeline.
    pub stage: Stage,
    /// What kind of reason.
    pub code: ReasonCode,
    /// One line: what is wrong and what to do.
    pub text: String,
}

impl Rejection {
    /// A rejection. Line breaks and control characters in `text` become spaces: parts of it come
    /// from the plugin, and it is shown on terminals.
    pub fn new(stage: Stage, code: ReasonCode, text: impl AsRef<str>) -> Self {
        Self {
            stage,
            code,
            text: one_line(text.as_ref()),
        }
    }

    /// A rejection by [`Stage::Peek`].
    pub fn peek(code: ReasonCode, text: impl AsRef<str>) -> Self {
        Self::new(Stage::Peek, code, text)
    }
}

/// Longest text of a reason, in characters.
const TEXT_CAP_CHARS: usize = 2000;

fn one_line(text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(TEXT_CAP_CHARS));
    for word in text.split(|c: char| c.is_whitespace() || c.is_control()) {
        if word.is_empty() {
            continue;
        }
        if !out.is_empty() {
            out.push(' ');
        }
        out.push_str(word);
    }
    match out.char_indices().nth(TEXT_CAP_CHARS) {
        Some((at, _)) => format!("{}...", out.get(..at).unwrap_or_default()),
        None => out,
    }
}
