//! Commands inside a conversation: lines that begin with a slash.

/// A command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Leave.
    Bye,
    /// Forget the conversation.
    Clear,
    /// Say what there is.
    Help,
    /// Something else, as it was typed.
    Unknown(String),
}

/// What `/?` writes.
pub const HELP: &[&str] = &[
    "/bye     leave (Ctrl-D does it too)",
    "/clear   forget the conversation so far",
    "/?       this list",
    "\"\"\"      begin and end a message of several lines",
    "Ctrl-C   stop an answer; at an empty prompt, leave",
];

impl Command {
    /// The command on a line; `None` for a line that is a message. A path or a regular expression such as `/etc/hosts`
    /// is a message: only a slash with one word after it is a command.
    pub fn parse(line: &str) -> Option<Self> {
        let word = line.strip_prefix('/')?;
        Some(match word {
            "bye" | "exit" | "quit" => Self::Bye,
            "clear" => Self::Clear,
            "?" | "help" => Self::Help,
            word if word.is_empty() || word.contains(['/', ' ', '\n']) => return None,
            _ => Self::Unknown(line.to_owned()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_and_one_word_is_a_command() {
        assert_eq!(Command::parse("/bye"), Some(Command::Bye));
        assert_eq!(Command::parse("/?"), Some(Command::Help));
        assert_eq!(
            Command::parse("/claer"),
            Some(Command::Unknown("/claer".to_owned()))
        );
        for message in ["bye", "/", "/etc/hosts", "/usr is what?", "a /bye"] {
            assert_eq!(Command::parse(message), None, "{message}");
        }
    }
}
