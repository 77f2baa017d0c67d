//! `mlxcel-load`: traffic for a server that listens already.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "printing is what this program is for"
)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use mlxcel_load::http::Target;
use mlxcel_load::load::Until;
use mlxcel_load::soak::Limits;
use mlxcel_load::{LoadError, chat, load, soak};

/// Traffic for a server: ours or llama.cpp's.
#[derive(Debug, Parser)]
#[command(name = "mlxcel-load")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Clients that ask again as soon as they have their answer: throughput and latencies
    Run {
        /// Address, such as http://127.0.0.1:8080
        #[arg(long)]
        url: String,
        /// Clients at a time
        #[arg(long, default_value_t = 1)]
        clients: usize,
        /// End after so many requests
        #[arg(
            long,
            value_name = "N",
            required_unless_present = "seconds",
            conflicts_with = "seconds"
        )]
        requests: Option<usize>,
        /// Begin no request later than this
        #[arg(long, value_name = "S")]
        seconds: Option<u64>,
        /// Length of every prompt, in tokens
        #[arg(long, value_name = "N", default_value_t = 190)]
        prompt_tokens: usize,
        /// Length of every answer, in tokens
        #[arg(long, value_name = "N", default_value_t = 64)]
        max_tokens: usize,
        /// Makes the prompts; another seed makes others
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// One JSON object on stdout
        #[arg(long)]
        json: bool,
    },
    /// Times to the first token of the first and the second turn of chats with a long history
    Chat {
        /// Address
        #[arg(long)]
        url: String,
        /// About how long the first message is, in tokens
        #[arg(long, value_name = "N", default_value_t = 2048)]
        history_tokens: usize,
        /// Length of every answer, in tokens
        #[arg(long, value_name = "N", default_value_t = 16)]
        max_tokens: usize,
        /// Chats, one after another
        #[arg(long, value_name = "N", default_value_t = 3)]
        rounds: usize,
        /// Makes the texts
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Mixed traffic for a long time, and whether the server holds nothing more afterwards
    Soak {
        /// Address of our server, started with --metrics
        #[arg(long)]
        url: String,
        /// Its process
        #[arg(long, value_name = "PID")]
        process: u32,
        /// How long
        #[arg(long, value_name = "S")]
        seconds: u64,
        /// Time between two looks
        #[arg(long, value_name = "MS", default_value_t = 5000)]
        every_ms: u64,
        /// Clients at a time
        #[arg(long, default_value_t = 6)]
        clients: usize,
        /// Longest prompt, in tokens
        #[arg(long, value_name = "N", default_value_t = 1500)]
        long_tokens: usize,
        /// Makes the traffic
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// File for the samples
        #[arg(long, value_name = "FILE", default_value = "soak.csv")]
        csv: PathBuf,
        /// File for the curve, Markdown
        #[arg(long, value_name = "FILE", default_value = "soak.md")]
        curve: PathBuf,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(is_good) if is_good => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<bool, LoadError> {
    match command {
        Command::Run {
            url,
            clients,
            requests,
            seconds,
            prompt_tokens,
            max_tokens,
            seed,
            json,
        } => {
            let until = match (requests, seconds) {
                (Some(count), _) => Until::Requests(count),
                (None, Some(seconds)) => Until::Time(Duration::from_secs(seconds)),
                (None, None) => {
                    return Err(LoadError::Usage {
                        message: "either --requests or --seconds is needed".to_owned(),
                    });
                }
            };
            let options = load::Options {
                target: Target::parse(&url)?,
                clients,
                until,
                prompt_tokens,
                max_tokens,
                seed,
            };
            let outcome = load::run(&options)?;
            if json {
                println!("{}", outcome.json(&options));
            } else {
                print!("{}", outcome.text(&options));
            }
            Ok(outcome.failures.is_empty())
        }
        Command::Chat {
            url,
            history_tokens,
            max_tokens,
            rounds,
            seed,
        } => {
            let options = chat::Options {
                target: Target::parse(&url)?,
                history_tokens,
                max_tokens,
                rounds,
                seed,
            };
            println!("{}", chat::run(&options)?);
            Ok(true)
        }
        Command::Soak {
            url,
            process,
            seconds,
            every_ms,
            clients,
            long_tokens,
            seed,
            csv,
            curve,
        } => {
            let options = soak::Options {
                target: Target::parse(&url)?,
                process,
                time: Duration::from_secs(seconds),
                every: Duration::from_millis(every_ms),
                clients,
                long_tokens: long_tokens.max(2),
                seed,
                csv,
                curve,
                limits: Limits::default(),
            };
            let (verdict, tally) = soak::run(&options)?;
            println!(
                "{} requests; resident memory {} MiB in the second quarter, {} MiB in the last",
                tally.total(),
                verdict.early_rss_bytes >> 20,
                verdict.late_rss_bytes >> 20
            );
            for problem in &verdict.problems {
                println!("PROBLEM: {problem}");
            }
            Ok(verdict.problems.is_empty())
        }
    }
}
