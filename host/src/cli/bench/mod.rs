//! `mlxcel bench`: speed of a model on this machine, in the manner of llama-bench.
//!
//! Every figure comes from the engine that serves: prompts are random tokens that no cache knows,
//! answers go on whatever the model says. A warm-up run comes first and is not counted.

mod distance;
mod measure;
mod perplexity;
mod report;

use std::collections::BTreeSet;

use clap::{Args, ValueEnum};
use mlxcel_registry::store::Revision;

use crate::engine::batch::BatchLimits;
use crate::engine::{LoadOptions, check_options, open_model, start_engine};

use super::args::LogArgs;
use super::console::Console;
use super::error::CliError;
use super::exit::Exit;
use super::generation::ModelArgs;
use super::memory::{Plan, Verdict};
use super::place::{loader, open_store, usable_catalogue};
use super::progress::LoadProgress;
use measure::{Bench, Case};
use perplexity::{PerplexityArgs, Subject};
use report::Report;

/// Form of the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// Table for people
    Table,
    /// One object with everything
    Json,
    /// One line a case
    Csv,
}

/// Flags of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Model: a path, `owner/name` or `name`
    #[arg(short = 'm', long)]
    model: String,
    /// Prompt lengths to measure, in tokens; 0 measures none
    #[arg(short = 'p', long, value_name = "N,..", value_delimiter = ',', default_value = "512", value_parser = clap::value_parser!(u32).range(0..))]
    n_prompt: Vec<u32>,
    /// Answer lengths to measure, in tokens; 0 measures none
    #[arg(short = 'n', long, value_name = "N,..", value_delimiter = ',', default_value = "128", value_parser = clap::value_parser!(u32).range(0..))]
    n_gen: Vec<u32>,
    /// Tokens in the context before an answer is measured
    #[arg(
        short = 'd',
        long,
        value_name = "N,..",
        value_delimiter = ',',
        default_value = "0"
    )]
    n_depth: Vec<u32>,
    /// Answers that run at a time
    #[arg(short = 'b', long, value_name = "N,..", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..=256))]
    batch: Vec<u32>,
    /// Runs of each case that are counted; one more comes first and is not
    #[arg(short, long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Form of the results
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    quality: PerplexityArgs,
    #[command(flatten)]
    model_args: ModelArgs,
    #[command(flatten)]
    pub(super) log: LogArgs,
}

/// Runs the command.
pub fn run(args: &BenchArgs, console: &Console) -> Result<Exit, CliError> {
    args.quality.check()?;
    once(args)?;
    let cases = cases(args);
    if cases.is_empty() && args.quality.perplexity.is_none() {
        return Err(CliError::usage(
            "nothing to measure: every length in -p and -n is 0; give one of them a length above 0",
        ));
    }
    if args.quality.perplexity.is_some() && args.model_args.tensor_parallel > 1 {
        return Err(CliError::usage(
            "--perplexity measures a model that is whole: leave out --tensor-parallel",
        ));
    }
    let store = open_store(&args.model_args.store)?;
    let revision = args
        .model_args
        .revision
        .as_deref()
        .map(Revision::parse)
        .transpose()?;
    let resolved = store.resolve(&store.parse(&args.model)?, revision.as_ref())?;
    let catalogue = usable_catalogue(&args.model_args.plugins, console)?;
    let loader = loader()?;
    let opened = open_model(
        &resolved.path,
        &catalogue,
        &loader,
        args.model_args.family.family.as_deref(),
    )?;
    let backend = loader.select_backend(&catalogue, &args.model_args.backend)?;
    let parallel = args.batch.iter().copied().max().unwrap_or(1) as usize;
    let options = LoadOptions {
        limits: BatchLimits {
            parallel,
            ..BatchLimits::default()
        },
        ..args.model_args.load_options()
    };
    check_options(&opened, &backend, &options)?;
    let guard = Verdict::new(&opened, Some(&backend), Plan::of(&options))?;
    if args.model_args.estimate_memory {
        console.line(guard.text())?;
        return Ok(Exit::Success);
    }
    if !args.model_args.force {
        guard.check()?;
    }
    if let Some(text) = &args.quality.perplexity {
        let subject = Subject {
            opened: &opened,
            backend: &backend,
            options: args.model_args.load_options(),
        };
        let quality = perplexity::measure(&args.quality, text, &subject, console)?;
        match args.output {
            Output::Table => console.block(&quality.table())?,
            Output::Json => console.json(&quality.json())?,
            Output::Csv => console.block(&quality.csv())?,
        }
        return Ok(Exit::Success);
    }
    let context = match options.ctx_size {
        0 => opened.desc.context_length,
        asked => asked,
    };
    fits(&cases, context)?;
    let progress = LoadProgress::new(console);
    let started = start_engine(opened, backend, options, progress.reporter());
    progress.finish();
    let (engine, facts) = started?;
    let bench = Bench::new(&engine, facts.vocab_size, args.repetitions);
    let mut report = Report::new(&resolved.path, &facts, args.repetitions, &args.model_args);
    for case in cases {
        console.note(format_args!("measuring {}", case.name()));
        report.add(case, bench.measure(case)?);
    }
    match args.output {
        Output::Table => console.block(&report.table())?,
        Output::Json => console.json(&report.json())?,
        Output::Csv => console.block(&report.csv())?,
    }
    Ok(Exit::Success)
}

/// Refuses values that a list has twice, as `--against` does: a case is measured once.
fn once(args: &BenchArgs) -> Result<(), CliError> {
    let lists = [
        ("-p", &args.n_prompt),
        ("-n", &args.n_gen),
        ("-d", &args.n_depth),
        ("-b", &args.batch),
    ];
    for (flag, list) in lists {
        let mut seen = BTreeSet::new();
        if let Some(value) = list.iter().find(|value| !seen.insert(**value)) {
            return Err(CliError::usage(format!(
                "{flag} {value} is given twice: each case is measured once, and -r says in how many runs"
            )));
        }
    }
    Ok(())
}

/// Refuses what the context does not hold before anything is measured.
fn fits(cases: &[Case], context: usize) -> Result<(), CliError> {
    match cases.iter().find(|case| case.context_tokens() > context) {
        None => Ok(()),
        Some(case) => Err(CliError::usage(format!(
            "{} takes {} tokens of context and there are {context}: lower -p, -n or -d, or raise --ctx-size up to the model's own",
            case.name(),
            case.context_tokens()
        ))),
    }
}

fn cases(args: &BenchArgs) -> Vec<Case> {
    let prompts = args
        .n_prompt
        .iter()
        .filter(|n| **n > 0)
        .map(|&tokens| Case::Prefill {
            tokens: tokens as usize,
        });
    let answers = args.n_gen.iter().filter(|n| **n > 0).flat_map(|&tokens| {
        args.batch.iter().flat_map(move |&batch| {
            args.n_depth.iter().map(move |&depth| Case::Decode {
                tokens: tokens as usize,
                batch: batch as usize,
                depth: depth as usize,
            })
        })
    });
    prompts.chain(answers).collect()
}
