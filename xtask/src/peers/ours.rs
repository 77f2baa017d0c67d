//! Our own program, as a user has it: a release build with its plugins.

use std::path::PathBuf;

use serde::Deserialize;

use super::table::Measure;
use super::timed::Stopwatch;
use crate::backend::Backend;
use crate::error::Error;
use crate::mlx::whole::Depth;
use crate::plugins::{self, Content, Request};
use crate::process::Run;
use crate::workspace::Workspace;

/// Programs and plugins of one profile.
#[derive(Debug, Clone)]
pub struct Ours {
    pub program: PathBuf,
    pub plugins: PathBuf,
    /// The load generator.
    pub load: PathBuf,
    pub threads: u32,
    /// Options that a person adds to every run.
    pub extra: Vec<String>,
}

impl Ours {
    /// Builds what is needed, unless it is taken as it is.
    pub fn prepare(
        workspace: &Workspace,
        build: bool,
        threads: u32,
        extra: &[String],
    ) -> Result<Self, Error> {
        if build {
            plugins::build_and_assemble(
                workspace,
                &Request {
                    release: true,
                    out: None,
                    backends: vec![Backend::Cpu],
                    content: Content::PluginsAndHost,
                    depth: Depth::Sizes,
                },
            )?;
            Run::cargo("build")
                .args(["--release", "-p", "mlxcel-load"])
                .dir(&workspace.root)
                .run()?;
        }
        let program = workspace.host_binary(true);
        let name = format!("mlxcel-load{}", std::env::consts::EXE_SUFFIX);
        // The load generator does next to nothing: with --no-build one of the other profile is good enough.
        let load = [true, false]
            .map(|release| workspace.profile_dir(release).join(&name))
            .into_iter()
            .find(|path| path.is_file())
            .unwrap_or_else(|| workspace.profile_dir(true).join(&name));
        let ours = Self {
            program,
            plugins: plugins::default_dir(workspace, true),
            load,
            threads,
            extra: extra.to_vec(),
        };
        for path in [&ours.program, &ours.plugins] {
            if !path.exists() {
                return Err(Error::Missing {
                    path: path.clone(),
                    remedy: "leave out --no-build".to_owned(),
                });
            }
        }
        Ok(ours)
    }

    /// The same with further options, separated by spaces.
    pub fn also(&self, options: &str) -> Self {
        let mut also = self.clone();
        also.extra
            .extend(options.split_whitespace().map(str::to_owned));
        also
    }

    /// Arguments that every command of ours gets.
    pub fn common(&self) -> Vec<String> {
        let mut args = vec![
            "--threads".to_owned(),
            self.threads.to_string(),
            "--plugins-dir".to_owned(),
            self.plugins.display().to_string(),
        ];
        args.extend(self.extra.iter().cloned());
        args
    }

    /// Runs `bench`; gives its figures, and the size of the process where that is asked for.
    pub fn bench(
        &self,
        clock: &Stopwatch,
        model: &str,
        cases: &[String],
    ) -> Result<BenchFigures, Error> {
        let mut args: Vec<String> = ["bench", "-m", model, "-r", "1", "-o", "json", "--quiet"]
            .map(str::to_owned)
            .to_vec();
        args.extend(cases.iter().cloned());
        args.extend(self.common());
        let timed = clock.run(&self.program, &args)?;
        let report: Report = serde_json::from_str(&timed.stdout)
            .map_err(|error| Error::measurement("mlxcel bench", error))?;
        let mut figures = BenchFigures {
            load_s: report.load_seconds,
            max_rss_bytes: timed.max_rss_bytes,
            rates: Vec::new(),
        };
        for result in report.results {
            let measure = measure(&result.test).ok_or_else(|| {
                Error::measurement(
                    "mlxcel bench",
                    format!("no case is called {:?}", result.test),
                )
            })?;
            figures.rates.push((measure, result.tokens_per_second));
        }
        Ok(figures)
    }

    /// Seconds from the start of the process to the first token.
    pub fn first_token(&self, clock: &Stopwatch, model: &str, prompt: &str) -> Result<f64, Error> {
        let mut args: Vec<String> = ["generate", "-m", model, "-p", prompt, "-n", "2"]
            .map(str::to_owned)
            .to_vec();
        args.extend(["--no-chat-template", "--quiet"].map(str::to_owned));
        args.extend(self.common());
        let timed = clock.run(&self.program, &args)?;
        timed
            .first_byte_s
            .ok_or_else(|| Error::measurement("mlxcel generate", "it wrote no token"))
    }
}

/// Figures of one run of `bench`.
#[derive(Debug, Clone)]
pub struct BenchFigures {
    pub load_s: f64,
    pub max_rss_bytes: u64,
    pub rates: Vec<(Measure, f64)>,
}

#[derive(Debug, Deserialize)]
struct Report {
    load_seconds: f64,
    results: Vec<CaseResult>,
}

#[derive(Debug, Deserialize)]
struct CaseResult {
    test: String,
    tokens_per_second: f64,
}

/// `pp512`, `tg128`, `tg32@d2048`, `tg32 x8`.
fn measure(name: &str) -> Option<Measure> {
    if let Some(tokens) = name.strip_prefix("pp") {
        return Some(Measure::Prefill {
            tokens: tokens.parse().ok()?,
        });
    }
    let rest = name.strip_prefix("tg")?;
    if let Some((tokens, streams)) = rest.split_once(" x") {
        return Some(Measure::Batch {
            tokens: tokens.parse().ok()?,
            streams: streams.parse().ok()?,
        });
    }
    let (tokens, depth) = rest.split_once("@d").unwrap_or((rest, "0"));
    Some(Measure::Decode {
        tokens: tokens.parse().ok()?,
        depth: depth.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_cases_are_understood() {
        assert_eq!(measure("pp512"), Some(Measure::Prefill { tokens: 512 }));
        let decode = |tokens, depth| Some(Measure::Decode { tokens, depth });
        assert_eq!(measure("tg128"), decode(128, 0));
        assert_eq!(measure("tg32@d2048"), decode(32, 2048));
        let batch = Measure::Batch {
            tokens: 32,
            streams: 8,
        };
        assert_eq!(measure("tg32 x8"), Some(batch));
        assert_eq!(measure("tg32 x8@d5"), None);
        assert_eq!(measure("x"), None);
    }
}
