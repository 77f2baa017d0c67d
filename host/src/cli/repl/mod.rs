//! The conversation on a terminal or a pipe: turns, commands, blocks of several lines, and Ctrl-C.
//!
//! Knows a chat only as something that can be asked, so that the rules here are tested without a model.

mod command;
mod lines;
#[cfg(test)]
mod tests;

use super::console::Console;
use super::error::CliError;
use super::interrupt::Interrupts;
use command::Command;

#[cfg(test)]
use lines::PipedLines;
pub use lines::{Input, LineSource, TerminalLines, piped_stdin};

/// Mark that opens and closes a block of several lines.
const BLOCK: &str = "\"\"\"";

/// What can be asked.
pub trait Chat {
    /// Answers, handing out text as it comes.
    fn ask(&mut self, text: &str, on_text: &mut dyn FnMut(&str)) -> Result<(), CliError>;

    /// Forgets the conversation.
    fn clear(&mut self);

    /// What ends the answer to the next [`Chat::ask`] early, from another thread.
    fn stopper(&self) -> Box<dyn Fn() + Send>;
}

/// A running conversation.
pub struct Repl<'a> {
    /// Who answers.
    pub chat: &'a mut dyn Chat,
    /// Who asks.
    pub lines: &'a mut dyn LineSource,
    /// Where the words go.
    pub console: &'a Console,
    /// What Ctrl-C does.
    pub interrupts: &'a Interrupts,
}

/// What the next turn is.
enum Turn {
    Ask(String),
    Run(Command),
    /// A block that was not finished before Ctrl-C.
    Dropped,
    End,
}

impl Repl<'_> {
    /// Runs until the user leaves. On a terminal a failed turn is told and the next one is waited for; so it is on a
    /// pipe, but there the end says that something failed.
    pub fn run(&mut self) -> Result<(), CliError> {
        let (mut turns, mut failed) = (0, 0);
        loop {
            match self.next_turn()? {
                Turn::End => break,
                Turn::Dropped => {}
                Turn::Run(Command::Bye) => break,
                Turn::Run(Command::Clear) => {
                    self.chat.clear();
                    self.console.note("the conversation is forgotten");
                }
                Turn::Run(Command::Help) => self.console.report_lines(command::HELP),
                Turn::Run(Command::Unknown(name)) => {
                    self.console
                        .warning(format_args!("there is no command {name}: /? lists them"));
                }
                Turn::Ask(text) => {
                    turns += 1;
                    match answer(self.chat, &text, self.console, self.interrupts) {
                        Ok(_) => {}
                        Err(error @ (CliError::Stdout(_) | CliError::Stdin(_))) => {
                            return Err(error);
                        }
                        Err(error) => {
                            failed += 1;
                            self.console.error(&error);
                        }
                    }
                }
            }
        }
        match failed {
            0 => Ok(()),
            _ if self.lines.is_terminal() => Ok(()),
            failed => Err(CliError::Turns { failed, turns }),
        }
    }

    fn next_turn(&mut self) -> Result<Turn, CliError> {
        loop {
            let line = match self.lines.read(">>> ")? {
                Input::Line(line) => line,
                Input::Abandoned => continue,
                Input::End => return Ok(Turn::End),
            };
            let trimmed = line.trim();
            if trimmed.is_empty() {
                continue;
            }
            let text = match trimmed.strip_prefix(BLOCK) {
                Some(first) => match self.block(first)? {
                    Some(text) if text.trim().is_empty() => continue,
                    Some(text) => text,
                    None => return Ok(Turn::Dropped),
                },
                None => match Command::parse(trimmed) {
                    Some(command) => return Ok(Turn::Run(command)),
                    None => line,
                },
            };
            return Ok(Turn::Ask(text));
        }
    }

    /// The text of a block whose first line, less the mark, is `first`. `None` when the user gave it up.
    fn block(&mut self, first: &str) -> Result<Option<String>, CliError> {
        if let Some(text) = first.strip_suffix(BLOCK) {
            return Ok(Some(text.to_owned()));
        }
        let mut lines: Vec<String> = Vec::new();
        lines.extend((!first.is_empty()).then(|| first.to_owned()));
        loop {
            let line = match self.lines.read("... ")? {
                Input::Line(line) => line,
                Input::Abandoned => return Ok(None),
                Input::End if self.lines.is_terminal() => return Ok(None),
                Input::End => {
                    return Err(CliError::usage(format!(
                        "the input ends inside a block that {BLOCK} opened"
                    )));
                }
            };
            if let Some(last) = line.trim_end().strip_suffix(BLOCK) {
                lines.extend((!last.is_empty()).then(|| last.to_owned()));
                return Ok(Some(lines.join("\n")));
            }
            lines.push(line);
        }
    }
}

/// One answer, streamed to stdout and ended by a line break. Whether Ctrl-C cut it short.
pub fn answer(
    chat: &mut dyn Chat,
    text: &str,
    console: &Console,
    interrupts: &Interrupts,
) -> Result<bool, CliError> {
    let stop = chat.stopper();
    let cut = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let on_ctrl_c = {
        let (stop, cut) = (chat.stopper(), std::sync::Arc::clone(&cut));
        move || {
            cut.store(true, std::sync::atomic::Ordering::Release);
            stop();
        }
    };
    let _guard = interrupts.during(on_ctrl_c);
    let mut failure = None;
    let mut wrote = false;
    let outcome = chat.ask(text, &mut |piece| {
        if failure.is_none() {
            wrote |= !piece.is_empty();
            failure = console.stream(piece).err();
            if failure.is_some() {
                // Nobody reads any more.
                stop();
            }
        }
    });
    if let Some(failure) = failure {
        return Err(failure);
    }
    if wrote || outcome.is_ok() {
        console.stream("\n")?;
    }
    outcome.map(|()| cut.load(std::sync::atomic::Ordering::Acquire))
}
