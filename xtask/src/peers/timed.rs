//! Running a program with a clock beside it: first byte, end, largest resident size.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::Error;
use crate::process::Run;

const SCRIPT: &str = include_str!("python/timed.py");

/// Runs programs and keeps what they wrote for a moment.
#[derive(Debug)]
pub struct Stopwatch {
    python: PathBuf,
    dir: PathBuf,
}

/// What a run came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Timed {
    /// Seconds from the start of the process to its first byte on stdout.
    pub first_byte_s: Option<f64>,
    /// Largest resident size.
    pub max_rss_bytes: u64,
    pub stdout: String,
    pub stderr: String,
}

#[derive(Debug, Deserialize)]
struct Report {
    status: i32,
    first_byte_s: Option<f64>,
    max_rss_bytes: u64,
}

impl Stopwatch {
    /// With the interpreter of the scratch environment, and a folder for what programs write.
    pub fn new(python: &Path, dir: &Path) -> Result<Self, Error> {
        std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
        let script = dir.join("timed.py");
        std::fs::write(&script, SCRIPT).map_err(Error::io("write", &script))?;
        Ok(Self {
            python: python.to_path_buf(),
            dir: dir.to_path_buf(),
        })
    }

    /// Runs a program to its end; anything but success is an error with the end of what it said.
    pub fn run(&self, program: &Path, args: &[String]) -> Result<Timed, Error> {
        let (out, err) = (self.dir.join("stdout"), self.dir.join("stderr"));
        let text = Run::new(&self.python)
            .arg(self.dir.join("timed.py"))
            .arg(&out)
            .arg(&err)
            .arg(program)
            .args(args)
            .without_cargo_library_path()
            .stdout()?;
        let report: Report = serde_json::from_str(text.trim()).map_err(|error| {
            Error::measurement(
                program.display(),
                format!("the clock said {text:?}: {error}"),
            )
        })?;
        let read = |path: &Path| {
            std::fs::read(path)
                .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
                .map_err(Error::io("read", path))
        };
        let (stdout, stderr) = (read(&out)?, read(&err)?);
        if report.status != 0 {
            let last: Vec<&str> = stderr.lines().rev().take(5).collect();
            let said = last.into_iter().rev().collect::<Vec<_>>().join("\n  ");
            let command = format!("{} {}", program.display(), args.join(" "));
            return Err(Error::measurement(
                command,
                format!("status {}; it said\n  {said}", report.status),
            ));
        }
        Ok(Timed {
            first_byte_s: report.first_byte_s,
            max_rss_bytes: report.max_rss_bytes,
            stdout,
            stderr,
        })
    }
}
