//! Running other programs: what was run can always be shown and repeated, and a failure says so in one line.
//!
//! Knows nothing of what the programs do.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("`{command}` failed: {status}{output}")]
    Exit {
        command: String,
        status: ExitStatus,
        /// What it said, where that was not already on the screen; starts with a line break if there is any.
        output: String,
    },
    #[error("cannot run `{program}`: {source}{hint}")]
    Start {
        program: String,
        source: io::Error,
        hint: &'static str,
    },
}

/// A command about to be run in the workspace root or where `dir` says.
#[derive(Debug, Clone)]
pub struct Run {
    program: OsString,
    args: Vec<OsString>,
    envs: Vec<(OsString, OsString)>,
    unset: Vec<OsString>,
    dir: Option<PathBuf>,
    hint: &'static str,
}

impl Run {
    pub fn new(program: impl Into<OsString>) -> Self {
        Run {
            program: program.into(),
            args: Vec::new(),
            envs: Vec::new(),
            unset: Vec::new(),
            dir: None,
            hint: "",
        }
    }

    /// The cargo that started us, so that a `+toolchain` on the outside is kept inside.
    pub fn cargo(subcommand: &str) -> Self {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        Run::new(cargo).arg(subcommand)
    }

    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    pub fn args<I, S>(mut self, args: I) -> Self
    where
        I: IntoIterator<Item = S>,
        S: Into<OsString>,
    {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.envs.push((name.into(), value.into()));
        self
    }

    pub fn dir(mut self, dir: &Path) -> Self {
        self.dir = Some(dir.to_path_buf());
        self
    }

    /// What to do when the program is not there; shown after a semicolon.
    pub fn hint(mut self, hint: &'static str) -> Self {
        self.hint = hint;
        self
    }

    /// `cargo run` adds build folders to the library search path; a program that must behave as on a user's machine
    /// is run without them.
    pub fn without_cargo_library_path(mut self) -> Self {
        for name in ["LD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"] {
            let Some(value) = std::env::var_os(name) else {
                continue;
            };
            match without_build_folders(&value) {
                Some(kept) => self.envs.push((name.into(), kept)),
                None => self.unset.push(name.into()),
            }
        }
        self
    }

    /// As a person would type it.
    pub fn shown(&self) -> String {
        let path = Path::new(&self.program);
        let program = match path.file_name() {
            // The toolchain's own path to cargo is of no use to a reader.
            Some(name) if name == "cargo" => name,
            _ => &self.program,
        };
        std::iter::once(program)
            .chain(self.args.iter().map(OsString::as_os_str))
            .map(quoted)
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// Runs with our own standard streams.
    pub fn run(self) -> Result<(), Failure> {
        let status = self
            .command()
            .stdin(Stdio::null())
            .status()
            .map_err(|source| self.not_started(source))?;
        self.checked(status, String::new())
    }

    /// As `run`, with the person's keyboard connected.
    pub fn run_interactive(self) -> Result<(), Failure> {
        let status = self
            .command()
            .status()
            .map_err(|source| self.not_started(source))?;
        self.checked(status, String::new())
    }

    /// Standard output as text; standard error goes to the screen.
    pub fn stdout(self) -> Result<String, Failure> {
        let output = self
            .command()
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .map_err(|source| self.not_started(source))?;
        self.checked(output.status, String::new())?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Both streams taken, whatever the exit status.
    pub fn capture(self) -> Result<Captured, Failure> {
        let output = self
            .command()
            .stdin(Stdio::null())
            .output()
            .map_err(|source| self.not_started(source))?;
        Ok(Captured {
            command: self.shown(),
            status: output.status,
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Standard error taken, standard output on the screen (for programs that draw progress there).
    pub fn capture_stderr(self) -> Result<Captured, Failure> {
        let output = self
            .command()
            .stdin(Stdio::null())
            .stdout(Stdio::inherit())
            .output()
            .map_err(|source| self.not_started(source))?;
        Ok(Captured {
            command: self.shown(),
            status: output.status,
            stdout: String::new(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        command.envs(self.envs.iter().map(|(name, value)| (name, value)));
        for name in &self.unset {
            command.env_remove(name);
        }
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
        command
    }

    fn checked(&self, status: ExitStatus, output: String) -> Result<(), Failure> {
        if status.success() {
            return Ok(());
        }
        Err(Failure::Exit {
            command: self.shown(),
            status,
            output,
        })
    }

    fn not_started(&self, source: io::Error) -> Failure {
        Failure::Start {
            program: self.program.to_string_lossy().into_owned(),
            source,
            hint: self.hint,
        }
    }
}

/// What a program said, and how it ended.
#[derive(Debug)]
pub struct Captured {
    command: String,
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Captured {
    pub fn ok(self) -> Result<Captured, Failure> {
        if self.status.success() {
            return Ok(self);
        }
        let said = [self.stdout.trim(), self.stderr.trim()]
            .into_iter()
            .filter(|text| !text.is_empty())
            .map(|text| format!("\n{text}"))
            .collect();
        Err(Failure::Exit {
            command: self.command,
            status: self.status,
            output: said,
        })
    }
}

fn quoted(arg: &OsStr) -> String {
    let text = arg.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.into_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// A search path less what cargo put there: cargo's target folders and the toolchain's own libraries.
fn without_build_folders(value: &OsStr) -> Option<OsString> {
    let kept: Vec<PathBuf> = std::env::split_paths(value)
        .filter(|path| {
            let mut parts = path.iter();
            !parts.any(|part| part == "target" || part == ".rustup" || part == "rustlib")
                && !has_toolchain_library(path)
        })
        .collect();
    if kept.is_empty() {
        return None;
    }
    std::env::join_paths(kept).ok()
}

fn has_toolchain_library(dir: &Path) -> bool {
    std::fs::read_dir(dir).is_ok_and(|entries| {
        entries.flatten().any(|entry| {
            entry
                .file_name()
                .to_string_lossy()
                .starts_with("librustc_driver-")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_a_command_that_can_be_pasted() {
        let run = Run::new("/some/bin/cargo")
            .arg("test")
            .args(["-p", "it's", "a b", ""]);
        assert_eq!(run.shown(), r"cargo test -p 'it'\''s' 'a b' ''");
    }

    #[test]
    fn library_path_keeps_what_the_person_set() {
        let before = std::env::join_paths(["/x/target/debug", "/opt/cuda/lib"]).expect("joins");
        assert_eq!(without_build_folders(&before), Some("/opt/cuda/lib".into()));
        assert_eq!(without_build_folders(OsStr::new("/x/target/debug")), None);
    }

    #[test]
    fn a_missing_program_says_its_name_and_the_hint() {
        let failure = Run::new("no-such-program-here")
            .hint("; install it")
            .run()
            .expect_err("it is not there");
        let text = failure.to_string();
        assert!(text.contains("no-such-program-here"), "{text}");
        assert!(text.ends_with("; install it"), "{text}");
    }

    #[test]
    fn a_failure_carries_what_was_said() {
        let captured = Run::new("sh")
            .args(["-c", "echo out; echo err >&2; exit 3"])
            .capture()
            .expect("sh runs");
        let text = captured.ok().expect_err("exit 3").to_string();
        assert!(text.contains("out\nerr") && text.contains('3'), "{text}");
    }
}
