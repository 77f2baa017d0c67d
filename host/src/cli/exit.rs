//! Exit codes of `mlxcel`, in one place. `docs/CLI.md` has the same table, and a test compares the two.

use std::process::ExitCode;

/// How the program ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done.
    Success = 0,
    /// Any failure without a code of its own.
    Failure = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The model is nowhere to be found.
    ModelNotFound = 3,
    /// No plugin or backend can do what was asked.
    Plugin = 4,
    /// The model's files cannot be used.
    Checkpoint = 5,
    /// A download did not succeed; what arrived is kept.
    Download = 6,
    /// The model does not fit into memory.
    Memory = 7,
    /// Ctrl-C.
    Interrupted = 130,
}

impl Exit {
    /// Every code with its meaning for people.
    pub const ALL: &'static [(Self, &'static str)] = &[
        (Self::Success, "done"),
        (Self::Failure, "any failure without a code of its own"),
        (Self::Usage, "the command line is wrong"),
        (Self::ModelNotFound, "the model was not found"),
        (Self::Plugin, "no plugin or backend can do what was asked"),
        (Self::Checkpoint, "the model's files cannot be used"),
        (
            Self::Download,
            "a download did not succeed; what arrived is kept",
        ),
        (Self::Memory, "the model does not fit into memory"),
        (Self::Interrupted, "stopped by Ctrl-C"),
    ];

    /// The number.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_on_the_command_line_has_the_same_codes() {
        let page = include_str!("../../../docs/CLI.md");
        for (exit, meaning) in Exit::ALL {
            let row = format!("| {} | {meaning} |", exit.code());
            assert!(page.contains(&row), "docs/CLI.md lacks the row: {row}");
        }
    }
}
