//! The soak run: mixed traffic for minutes or hours, and a look at what the server holds every few seconds.
//!
//! What it holds must return to where it was, and its memory must not grow once it is warm.

mod chart;
mod sample;
mod traffic;
mod verdict;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::error::LoadError;
use crate::http::Target;

pub use sample::Sample;
pub use traffic::{Kind, Tally};
pub use verdict::{Limits, Verdict};

/// What a soak run does.
#[derive(Debug, Clone)]
pub struct Options {
    /// Our server, with `--metrics`.
    pub target: Target,
    /// Its process.
    pub process: u32,
    /// How long traffic goes on.
    pub time: Duration,
    /// Between two looks.
    pub every: Duration,
    /// Clients at a time.
    pub clients: usize,
    /// Longest prompt, in tokens.
    pub long_tokens: usize,
    /// Makes the traffic.
    pub seed: u64,
    /// Where the samples go.
    pub csv: PathBuf,
    /// Where the curve goes, as Markdown.
    pub curve: PathBuf,
    /// What is still no growth.
    pub limits: Limits,
}

/// How long the server has to come to rest after the last request.
const REST: Duration = Duration::from_secs(60);

/// For connections that were just closed to be gone on the other side too.
const SETTLING: Duration = Duration::from_millis(500);

/// Runs the traffic, writes both files, and says whether all came back.
pub fn run(options: &Options) -> Result<(Verdict, Tally), LoadError> {
    let target = &options.target;
    let began = Instant::now();
    let look = || sample::take(target, options.process, began.elapsed());
    // One request of every kind first: what is made once in a process's life is in the baseline.
    let warm_up = traffic::each_once(options);
    rest(options)?;
    let baseline = look()?;
    let is_over = AtomicBool::new(false);
    let (samples, mut tally) = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..options.clients.max(1))
            .map(|client| {
                let is_over = &is_over;
                scope.spawn(move || traffic::client(options, client as u64, is_over))
            })
            .collect();
        let watched = watch(options, &look);
        is_over.store(true, Ordering::Relaxed);
        let mut tally = Tally::default();
        for client in clients {
            tally.add(client.join().map_err(|_| LoadError::Client)?);
        }
        Ok::<_, LoadError>((watched?, tally))
    })?;
    tally.add(warm_up);
    rest(options)?;
    let last = look()?;
    let verdict = Verdict::of(&baseline, &samples, &last, &tally, options.limits);
    let mut all = vec![baseline];
    all.extend(samples);
    all.push(last);
    write(&options.csv, &sample::csv(&all))?;
    write(
        &options.curve,
        &chart::markdown(&all, &verdict, &tally, options),
    )?;
    Ok((verdict, tally))
}

fn watch(
    options: &Options,
    look: &dyn Fn() -> Result<Sample, LoadError>,
) -> Result<Vec<Sample>, LoadError> {
    let began = Instant::now();
    let mut samples = Vec::new();
    while began.elapsed() < options.time {
        std::thread::sleep(
            options
                .every
                .min(options.time.saturating_sub(began.elapsed())),
        );
        samples.push(look()?);
    }
    Ok(samples)
}

/// Waits until nothing runs, and empties the prefix cache, which may keep pages for as long as it likes.
fn rest(options: &Options) -> Result<(), LoadError> {
    let deadline = Instant::now() + REST;
    loop {
        let sample = sample::take(&options.target, options.process, Duration::ZERO)?;
        if sample.is_at_rest() || Instant::now() > deadline {
            break;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    options.target.post("/v1/cache/reset", &json!({}))?;
    // What the engine holds is published after a step.
    traffic::one_token(&options.target)?;
    options.target.post("/v1/cache/reset", &json!({}))?;
    std::thread::sleep(SETTLING);
    Ok(())
}

fn write(path: &std::path::Path, text: &str) -> Result<(), LoadError> {
    std::fs::write(path, text).map_err(|source| LoadError::Write {
        path: path.to_path_buf(),
        source,
    })
}
