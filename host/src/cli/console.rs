//! The one place that writes to the terminal.
//!
//! Owns the rule that results go to stdout and everything else to stderr, what happens when a stream is gone, and
//! that text from models, plugins and servers cannot steer a terminal. Knows no command.

use std::cell::RefCell;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};

use serde_json::Value;

use super::error::CliError;

/// Both output streams of a command.
pub struct Console {
    out: RefCell<Box<dyn Write>>,
    err: RefCell<Box<dyn Write>>,
    /// Whether control characters in streamed text have to be kept from a terminal.
    out_is_terminal: bool,
    err_has_color: bool,
    is_quiet: bool,
}

impl Console {
    /// The streams of this process. With `is_quiet`, notes are dropped; warnings and errors are not.
    pub fn new(is_quiet: bool) -> Self {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            out: RefCell::new(Box::new(io::stdout())),
            err: RefCell::new(Box::new(io::stderr())),
            out_is_terminal: io::stdout().is_terminal(),
            err_has_color: io::stderr().is_terminal() && !no_color,
            is_quiet,
        }
    }

    /// One line of the command's result.
    pub fn line(&self, text: impl Display) -> Result<(), CliError> {
        writeln!(self.out.borrow_mut(), "{text}").map_err(CliError::Stdout)
    }

    /// Several lines of the command's result, each ended by a line break already.
    pub fn block(&self, text: &str) -> Result<(), CliError> {
        self.out
            .borrow_mut()
            .write_all(text.as_bytes())
            .map_err(CliError::Stdout)
    }

    /// The command's result as indented JSON.
    pub fn json(&self, value: &Value) -> Result<(), CliError> {
        self.line(format_args!("{value:#}"))
    }

    /// A piece of a model's answer, shown at once.
    pub fn stream(&self, text: &str) -> Result<(), CliError> {
        let mut out = self.out.borrow_mut();
        let written = match self.out_is_terminal {
            true => out.write_all(harmless(text).as_bytes()),
            false => out.write_all(text.as_bytes()),
        };
        written.and_then(|()| out.flush()).map_err(CliError::Stdout)
    }

    /// Something good to know, on stderr, unless the user wants quiet.
    pub fn note(&self, text: impl Display) {
        if !self.is_quiet {
            self.tell("", "", &text.to_string());
        }
    }

    /// Text that was asked for by a flag and is not the result, on stderr.
    pub fn report(&self, text: impl Display) {
        self.tell("", "", &text.to_string());
    }

    /// Several lines of such text.
    pub fn report_lines(&self, lines: &[&str]) {
        lines.iter().for_each(|line| self.report(line));
    }

    /// Something that is probably not what the user wants, on stderr.
    pub fn warning(&self, text: impl Display) {
        self.tell("warning: ", "\x1b[1;33m", &text.to_string());
    }

    /// What went wrong and, where there is something to do, what.
    pub fn error(&self, error: &CliError) {
        self.tell("error: ", "\x1b[1;31m", &error.one_line());
        if let Some(hint) = error.hint() {
            self.tell("hint: ", "\x1b[1;36m", &hint);
        }
    }

    /// A question on stderr; the answer is read from stdin.
    pub fn ask(&self, question: &str) -> Result<String, CliError> {
        {
            let mut err = self.err.borrow_mut();
            // Without stderr there is nobody to read the question, and the answer will be the end of the input.
            let _ = write!(err, "{question} ").and_then(|()| err.flush());
        }
        let mut answer = String::new();
        io::stdin()
            .read_line(&mut answer)
            .map_err(CliError::Stdin)?;
        Ok(answer)
    }

    fn tell(&self, label: &str, color: &str, text: &str) {
        let text = one_line(text);
        let mut err = self.err.borrow_mut();
        // There is no place left to complain to when stderr is gone.
        let _ = match self.err_has_color && !label.is_empty() {
            true => writeln!(err, "{color}{label}\x1b[0m{text}"),
            false => writeln!(err, "{label}{text}"),
        };
    }

    /// Whether the user wants quiet.
    pub fn is_quiet(&self) -> bool {
        self.is_quiet
    }
}

/// Control characters other than line break and tab become the replacement character: a model could otherwise move
/// the cursor, change the window's title or fill the clipboard.
fn harmless(text: &str) -> String {
    text.chars()
        .map(|c| {
            if c.is_control() && !matches!(c, '\n' | '\t') {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}

/// Most characters of a message. Ours are shorter; what they quote need not be.
const LINE_CHARACTERS: usize = 4096;

/// Messages may quote files, plugins and servers.
fn one_line(text: &str) -> String {
    let mut characters = text.trim_end().chars();
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    let line: String = characters
        .by_ref()
        .take(LINE_CHARACTERS)
        .map(plain)
        .collect();
    match characters.count() {
        0 => line,
        rest => format!("{line}... ({rest} more characters)"),
    }
}

#[cfg(test)]
pub mod testing {
    //! A console whose output a test can read.

    use std::cell::RefCell;
    use std::io::{self, Write};
    use std::rc::Rc;

    use super::Console;

    /// What was written to a stream.
    #[derive(Clone, Default)]
    pub struct Captured(Rc<RefCell<Vec<u8>>>);

    impl Captured {
        /// All of it.
        pub fn text(&self) -> String {
            String::from_utf8(self.0.borrow().clone()).expect("UTF-8")
        }
    }

    impl Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.borrow_mut().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A console and what goes to its stdout and stderr.
    pub fn console(out_is_terminal: bool) -> (Console, Captured, Captured) {
        let (out, err) = (Captured::default(), Captured::default());
        let console = Console {
            out: RefCell::new(Box::new(out.clone())),
            err: RefCell::new(Box::new(err.clone())),
            out_is_terminal,
            err_has_color: false,
            is_quiet: false,
        };
        (console, out, err)
    }
}

#[cfg(test)]
mod tests {
    use super::testing::console;

    const TRICK: &str = "a\x1b]0;title\x07\u{9b}31mb\r\n\tc";

    #[test]
    fn a_model_cannot_steer_the_terminal_and_files_get_its_exact_words() {
        let (terminal, out, _) = console(true);
        terminal.stream(TRICK).expect("written");
        assert_eq!(
            out.text(),
            "a\u{fffd}]0;title\u{fffd}\u{fffd}31mb\u{fffd}\n\tc"
        );
        let (file, out, _) = console(false);
        file.stream(TRICK).expect("written");
        assert_eq!(out.text(), TRICK);
    }

    #[test]
    fn messages_are_one_line_and_on_stderr() {
        let (console, out, err) = console(false);
        console.note("a\nb\x1b[2Jc\n");
        console.warning("d");
        assert_eq!(
            (out.text().as_str(), err.text().as_str()),
            ("", "a b [2Jc\nwarning: d\n")
        );
    }

    #[test]
    fn a_message_has_an_end() {
        let (console, _, err) = console(false);
        console.note("é".repeat(4096));
        console.note("é".repeat(5000));
        let shown = "é".repeat(4096);
        assert_eq!(
            err.text(),
            format!("{shown}\n{shown}... (904 more characters)\n")
        );
    }
}
