//! The hidden command that a rank other than 0 is.

use std::process::ExitCode;

use crate::engine::rank_main;

use super::place::loader;

/// Runs the command. Its orders and answers are a protocol with the parent and nothing for people.
pub fn run() -> ExitCode {
    let ready = super::logging::start(false);
    rank_main(move || {
        ready.map_err(|error| error.to_string())?;
        loader().map_err(|error| error.to_string())
    })
}
