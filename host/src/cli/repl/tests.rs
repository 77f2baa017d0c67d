use std::io::Cursor;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::console::testing::console;
use super::*;

/// Repeats what it is asked, word by word; `fail` fails, and `stop` presses Ctrl-C after its first word.
#[derive(Default)]
struct Parrot {
    asked: Vec<String>,
    interrupts: Interrupts,
    stop: Arc<AtomicBool>,
}

impl Chat for Parrot {
    fn ask(&mut self, text: &str, on_text: &mut dyn FnMut(&str)) -> Result<(), CliError> {
        self.asked.push(text.to_owned());
        self.stop.store(false, Ordering::Relaxed);
        if text == "fail" {
            return Err(CliError::usage("told to fail"));
        }
        for word in text.split_inclusive(' ') {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            on_text(word);
            if word.trim() == "stop" {
                assert!(self.interrupts.press(), "an answer can be stopped");
            }
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.asked.push("(cleared)".to_owned());
    }

    fn stopper(&self) -> Box<dyn Fn() + Send> {
        let stop = Arc::clone(&self.stop);
        Box::new(move || stop.store(true, Ordering::Relaxed))
    }
}

struct Outcome {
    result: Result<(), CliError>,
    asked: Vec<String>,
    out: String,
    err: String,
}

fn converse_with(lines: &mut dyn LineSource) -> Outcome {
    let (console, out, err) = console(false);
    let mut chat = Parrot::default();
    let interrupts = chat.interrupts.clone();
    let result = Repl {
        chat: &mut chat,
        lines,
        console: &console,
        interrupts: &interrupts,
    }
    .run();
    assert!(!interrupts.press(), "nothing is left to stop");
    Outcome {
        result,
        asked: chat.asked,
        out: out.text(),
        err: err.text(),
    }
}

fn converse(input: &str) -> Outcome {
    converse_with(&mut PipedLines::new(Cursor::new(input.as_bytes().to_vec())))
}

/// A person: what the editor reports, key by key.
struct Typed(Vec<Input>);

impl LineSource for Typed {
    fn read(&mut self, _prompt: &str) -> Result<Input, CliError> {
        Ok(if self.0.is_empty() {
            Input::End
        } else {
            self.0.remove(0)
        })
    }

    fn is_terminal(&self) -> bool {
        true
    }
}

fn typed(line: &str) -> Input {
    Input::Line(line.to_owned())
}

#[test]
fn each_line_is_a_turn_and_blank_ones_are_not() {
    let done = converse("hello\n\n   \r\nhow are you\r\n/bye\nnever asked\n");
    assert!(done.result.is_ok());
    assert_eq!(done.asked, ["hello", "how are you"]);
    assert_eq!(
        (done.out.as_str(), done.err.as_str()),
        ("hello\nhow are you\n", "")
    );
}

#[test]
fn commands_are_not_sent_and_unknown_ones_are_told() {
    let done = converse("a\n/clear\n/claer\n/etc/hosts\n/?\n");
    assert_eq!(done.asked, ["a", "(cleared)", "/etc/hosts"]);
    assert_eq!(done.out, "a\n/etc/hosts\n");
    insta::assert_snapshot!(done.err, @r#"
    the conversation is forgotten
    warning: there is no command /claer: /? lists them
    /bye     leave (Ctrl-D does it too)
    /clear   forget the conversation so far
    /?       this list
    """      begin and end a message of several lines
    Ctrl-C   stop an answer; at an empty prompt, leave
    "#);
}

#[test]
fn a_block_is_one_turn_with_its_line_breaks() {
    let done = converse(
        "\"\"\"\none\n\n  two\n/bye\n\"\"\"\n\"\"\"short\"\"\"\n\"\"\"from here\nto there\"\"\"\n\"\"\"\n\"\"\"\n",
    );
    assert_eq!(
        done.asked,
        ["one\n\n  two\n/bye", "short", "from here\nto there"]
    );
    assert!(done.result.is_ok());
}

#[test]
fn a_block_that_a_pipe_does_not_end_is_an_error_and_is_not_sent() {
    let done = converse("\"\"\"\nhalf\n");
    assert!(done.asked.is_empty());
    insta::assert_snapshot!(done.result.unwrap_err(), @r#"the input ends inside a block that """ opened"#);
    // A person who presses Ctrl-C or Ctrl-D inside a block gives up the block.
    for key in [Input::Abandoned, Input::End] {
        let done = converse_with(&mut Typed(vec![typed("\"\"\"half"), key, typed("whole")]));
        assert_eq!(done.asked, ["whole"]);
        assert!(done.result.is_ok());
    }
}

#[test]
fn ctrl_c_stops_the_answer_and_not_the_conversation() {
    let done = converse("go stop never said\nnext\n");
    assert_eq!(done.out, "go stop \nnext\n");
    assert_eq!(done.asked, ["go stop never said", "next"]);
    assert!(done.result.is_ok());
}

#[test]
fn a_failed_turn_is_told_and_the_conversation_goes_on() {
    let done = converse("fail\nok\n");
    assert_eq!(done.out, "ok\n");
    assert_eq!(done.err, "error: told to fail\n");
    assert!(matches!(
        done.result,
        Err(CliError::Turns {
            failed: 1,
            turns: 2
        })
    ));
    // A person has seen it.
    assert!(
        converse_with(&mut Typed(vec![typed("fail")]))
            .result
            .is_ok()
    );
}

#[test]
fn an_abandoned_line_is_not_sent_and_an_empty_prompt_leaves() {
    let done = converse_with(&mut Typed(vec![
        Input::Abandoned,
        typed("a"),
        Input::End,
        typed("never"),
    ]));
    assert_eq!(done.asked, ["a"]);
}
