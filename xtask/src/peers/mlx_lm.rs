//! mlx-lm on MLX's CPU build.

use std::path::PathBuf;

use serde::Deserialize;

use super::install::Scratch;
use super::table::Measure;
use super::timed::Stopwatch;
use crate::error::Error;

const RATES: &str = include_str!("python/mlx_lm_rates.py");

/// The installed package with its script.
#[derive(Debug)]
pub struct MlxLm {
    python: PathBuf,
    script: PathBuf,
    pub version: String,
}

#[derive(Debug, Deserialize)]
struct Rates {
    prefill_tokens_per_second: f64,
    decode_tokens_per_second: f64,
    max_rss_bytes: u64,
}

impl MlxLm {
    pub fn install(scratch: &Scratch) -> Result<Self, Error> {
        scratch.mlx_lm()?;
        let script = scratch.dir.join("mlx_lm_rates.py");
        std::fs::write(&script, RATES).map_err(Error::io("write", &script))?;
        Ok(Self {
            python: scratch.python()?,
            script,
            version: scratch.version("mlx-lm")?,
        })
    }

    /// Its rates stand in the rows of longer prompts and answers: it is too slow for those, and its rates hardly change with them.
    pub fn rates(
        &self,
        clock: &Stopwatch,
        shape: &str,
        tokens: (u32, u32),
        rows: (Measure, Measure),
    ) -> Result<Vec<(Measure, f64)>, Error> {
        let args = [
            self.script.display().to_string(),
            shape.to_owned(),
            tokens.0.to_string(),
            tokens.1.to_string(),
        ];
        let timed = clock.run(&self.python, &args)?;
        let rates: Rates = serde_json::from_str(timed.stdout.trim())
            .map_err(|error| Error::measurement("mlx-lm", error))?;
        Ok(vec![
            (rows.0, rates.prefill_tokens_per_second),
            (rows.1, rates.decode_tokens_per_second),
            (Measure::Memory, mib(rates.max_rss_bytes)),
        ])
    }
}

pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
