//! On what machine, when and at which commit something was measured.

use std::path::Path;

use serde_json::{Value, json};

use crate::process::Run;

/// Facts that belong beside every figure.
#[derive(Debug, Clone)]
pub struct Machine {
    pub date: String,
    commit: String,
    is_clean: bool,
    processor: String,
    cores: usize,
    memory_gib: u64,
    load_before: String,
}

impl Machine {
    pub fn now(root: &Path) -> Self {
        let word = |run: Run| {
            run.capture()
                .ok()
                .map(|outcome| outcome.stdout.trim().to_owned())
                .unwrap_or_default()
        };
        let git = |args: &[&str]| word(Run::new("git").args(args.iter().copied()).dir(root));
        Self {
            date: word(Run::new("date").arg("+%Y-%m-%d")),
            commit: git(&["rev-parse", "--short", "HEAD"]),
            is_clean: git(&["status", "--porcelain", "--untracked-files=no"]).is_empty(),
            processor: line_of("/proc/cpuinfo", "model name")
                .unwrap_or_else(|| "unknown".to_owned()),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_gib: line_of("/proc/meminfo", "MemTotal")
                .and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok())
                .unwrap_or(0)
                >> 20,
            load_before: load(),
        }
    }

    /// For the head of a table; says what else the machine was doing.
    pub fn text(&self) -> String {
        format!(
            "{}, {} cores, {} GiB, {} {}; commit {}{}; load average {} before, {} after",
            self.processor,
            self.cores,
            self.memory_gib,
            std::env::consts::OS,
            std::env::consts::ARCH,
            self.commit,
            if self.is_clean { "" } else { " with changes" },
            self.load_before,
            load()
        )
    }

    pub fn json(&self) -> Value {
        json!({
            "date": self.date,
            "commit": self.commit,
            "is_clean": self.is_clean,
            "processor": self.processor,
            "cores": self.cores,
            "memory_gib": self.memory_gib,
            "load_before": self.load_before,
            "load_after": load(),
        })
    }
}

/// What stands behind the colon of a line that begins so.
fn line_of(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Of the last minute.
fn load() -> String {
    std::fs::read_to_string("/proc/loadavg")
        .ok()
        .and_then(|text| text.split(' ').next().map(str::to_owned))
        .unwrap_or_else(|| "unknown".to_owned())
}
