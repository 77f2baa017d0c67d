//! Where the lines of a conversation come from: a terminal with editing and history, or a pipe.

use std::cell::Cell;
use std::io::{self, BufRead};
use std::path::PathBuf;
use std::rc::Rc;

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::Validator;
use rustyline::{Config, Context, Editor, Helper};

use super::super::error::CliError;

/// What was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A line, without its end.
    Line(String),
    /// A line that the user gave up.
    Abandoned,
    /// There is nothing more, or the user leaves.
    End,
}

/// A source of lines.
pub trait LineSource {
    /// The next line, asked for with `prompt` where somebody sees it.
    fn read(&mut self, prompt: &str) -> Result<Input, CliError>;

    /// Whether a person types.
    fn is_terminal(&self) -> bool;
}

/// Lines of a pipe or a file. No prompt is written.
pub struct PipedLines<R> {
    reader: R,
}

impl<R: BufRead> PipedLines<R> {
    /// Reads from `reader`.
    pub fn new(reader: R) -> Self {
        Self { reader }
    }
}

impl<R: BufRead> LineSource for PipedLines<R> {
    fn read(&mut self, _prompt: &str) -> Result<Input, CliError> {
        let mut line = String::new();
        match self.reader.read_line(&mut line).map_err(CliError::Stdin)? {
            0 => Ok(Input::End),
            _ => {
                let text = line.strip_suffix('\n').unwrap_or(&line);
                let text = text.strip_suffix('\r').unwrap_or(text);
                Ok(Input::Line(text.to_owned()))
            }
        }
    }

    fn is_terminal(&self) -> bool {
        false
    }
}

/// Lines of a terminal.
pub struct TerminalLines {
    editor: Editor<Watcher, DefaultHistory>,
    is_empty: Rc<Cell<bool>>,
    history: Option<PathBuf>,
}

impl TerminalLines {
    /// An editor that remembers lines in the file `history`.
    pub fn new(history: Option<PathBuf>) -> Result<Self, CliError> {
        let config = Config::builder().auto_add_history(false).build();
        let mut editor =
            Editor::with_config(config).map_err(|error| CliError::Terminal(error.to_string()))?;
        let is_empty = Rc::new(Cell::new(true));
        editor.set_helper(Some(Watcher {
            is_empty: Rc::clone(&is_empty),
        }));
        if let Some(file) = &history
            && let Err(error) = editor.load_history(file)
        {
            // Most often there is none yet.
            tracing::debug!(file = %file.display(), %error, "history is not read");
        }
        Ok(Self {
            editor,
            is_empty,
            history,
        })
    }

    /// A history that cannot be written is no reason to end a conversation.
    fn remember(&mut self, line: &str) {
        let added = self.editor.add_history_entry(line);
        let Some(file) = &self.history else { return };
        let written = added.map_err(|error| error.to_string()).and_then(|_| {
            let folder = file.parent().unwrap_or(file);
            std::fs::create_dir_all(folder).map_err(|error| error.to_string())?;
            self.editor
                .append_history(file)
                .map_err(|error| error.to_string())
        });
        if let Err(error) = written {
            tracing::warn!(file = %file.display(), %error, "history is not written");
        }
    }
}

impl LineSource for TerminalLines {
    fn read(&mut self, prompt: &str) -> Result<Input, CliError> {
        self.is_empty.set(true);
        match self.editor.readline(prompt) {
            Ok(line) => {
                if !line.trim().is_empty() {
                    self.remember(&line);
                }
                Ok(Input::Line(line))
            }
            Err(ReadlineError::Interrupted) if self.is_empty.get() => Ok(Input::End),
            Err(ReadlineError::Interrupted) => Ok(Input::Abandoned),
            Err(ReadlineError::Eof) => Ok(Input::End),
            Err(ReadlineError::Io(error)) => Err(CliError::Stdin(error)),
            Err(error) => Err(CliError::Terminal(error.to_string())),
        }
    }

    fn is_terminal(&self) -> bool {
        true
    }
}

/// Sees the line while it is edited, because the editor does not say what Ctrl-C dropped.
struct Watcher {
    is_empty: Rc<Cell<bool>>,
}

impl Hinter for Watcher {
    type Hint = String;

    fn hint(&self, line: &str, _position: usize, _context: &Context<'_>) -> Option<String> {
        self.is_empty.set(line.is_empty());
        None
    }
}

impl Completer for Watcher {
    type Candidate = String;
}

impl Highlighter for Watcher {}

impl Validator for Watcher {}

impl Helper for Watcher {}

/// The lines of this process's stdin.
pub fn piped_stdin() -> PipedLines<io::StdinLock<'static>> {
    PipedLines::new(io::stdin().lock())
}
