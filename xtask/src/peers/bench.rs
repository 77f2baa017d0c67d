//! `cargo xtask bench-peers`: one model after another, everybody in turn, one table for each.

use std::path::Path;

use serde_json::{Value, json};

use super::args::{Common, PeersArgs, typed};
use super::install::{Llama, Scratch};
use super::llama::Peer;
use super::machine::Machine;
use super::mlx_lm::{MlxLm, mib};
use super::models::Subject;
use super::ours::Ours;
use super::table::{Measure, Table};
use super::timed::Stopwatch;
use crate::error::Error;
use crate::workspace::Workspace;

// Programs of a table.
const OURS: usize = 0;
const LLAMA: usize = 1;
const MLX_LM: usize = 2;

/// Tokens of the prompt whose first token is awaited.
const FIRST_PROMPT: u32 = 32;

/// Its beginning is the prompt of the measurement from the start of the process.
const PROSE: &str = "The ferry left the harbour before the sun had risen, and the few people on deck kept their coats \
    closed against the wind. Nobody spoke. A boy counted the lights along the shore until they could no longer be told \
    from the stars, and then he fell asleep on a coil of rope while the engine went on under him.";

struct Session<'a> {
    args: &'a PeersArgs,
    /// With the options of every run, then with those of each `--also`.
    ours: Vec<Ours>,
    llama: Llama,
    mlx_lm: Option<MlxLm>,
    clock: Stopwatch,
}

pub fn run(workspace: &Workspace, args: &PeersArgs) -> Result<(), Error> {
    let scratch = Scratch::of(workspace)?;
    let llama = scratch.llama()?;
    let mlx_lm = match args.no_mlx_lm {
        true => None,
        false => Some(MlxLm::install(&scratch)?),
    };
    let common = &args.common;
    let ours = Ours::prepare(workspace, !common.no_build, common.threads, &common.ours)?;
    let also = args.also.iter().map(|options| ours.also(options));
    let ours = std::iter::once(ours.clone()).chain(also).collect();
    let mut subjects = Vec::new();
    for model in &args.models {
        subjects.push(Subject::of(*model, workspace, &scratch, &llama)?);
    }
    for path in &args.gguf {
        subjects.push(Subject::file(path)?);
    }
    let session = Session {
        args,
        ours,
        llama,
        mlx_lm,
        clock: Stopwatch::new(&scratch.python()?, &scratch.dir.join("runs"))?,
    };
    let machine = Machine::now(&workspace.root);
    let mut text = session.head();
    let mut results = Vec::new();
    for subject in &subjects {
        let tables = session.measure(subject)?;
        let size = mib(subject.bytes());
        let mut section = format!("\n## {}, {size:.0} MiB\n", subject.name);
        for (ours, table) in session.ours.iter().zip(&tables) {
            if tables.len() > 1 {
                section.push_str(&format!("\n{}:\n", options(ours)));
            }
            section.push_str(&format!("\n{}", table.markdown()));
            results.push(json!({
                "model": subject.name,
                "bytes": subject.bytes(),
                "options": ours.extra,
                "rows": table.json(),
            }));
        }
        // What is measured is not lost when the rest is not waited for; the whole page comes at the end.
        eprintln!("{section}");
        text.push_str(&section);
    }
    let json = json!({
        "machine": machine.json(),
        "threads": common.threads,
        "rounds": common.rounds,
        "options": common.ours,
        "llama_cpp": session.llama.version,
        "mlx_lm": session.mlx_lm.as_ref().map(|mlx_lm| mlx_lm.version.clone()),
        "results": results,
    });
    publish(workspace, common, &machine, "peers", &text, &json)
}

/// Prints the table, and writes what was asked for.
pub fn publish(
    workspace: &Workspace,
    common: &Common,
    machine: &Machine,
    name: &str,
    text: &str,
    json: &Value,
) -> Result<(), Error> {
    let page = format!(
        "# {}, {name}\n\n{}.\n\n{text}",
        machine.date,
        machine.text()
    );
    println!("{page}");
    let write = |path: &Path, text: &str| {
        std::fs::write(path, text).map_err(Error::io("write", path))?;
        eprintln!("{} written", path.display());
        Ok::<_, Error>(())
    };
    if let Some(path) = &common.json {
        write(path, &format!("{json:#}\n"))?;
    }
    if common.write {
        let file = format!("docs/benchmarks/{}-{name}.md", machine.date);
        write(&workspace.root.join(file), &page)?;
    }
    Ok(())
}

impl Session<'_> {
    fn head(&self) -> String {
        let common = &self.args.common;
        let mut text = format!(
            "`{}`, {} threads, {} rounds in turn; median (least to largest). llama.cpp as in llama-cpp-python {}, built here.",
            typed(std::env::args().skip(1)),
            common.threads,
            common.rounds,
            self.llama.version
        );
        if let Some(mlx_lm) = &self.mlx_lm {
            let tokens = &self.args.mlx_lm_tokens;
            text.push_str(&format!(
                " mlx-lm {} with random weights of the shape in 4 bits, a prompt of {} and an answer of {} tokens, all cores.",
                mlx_lm.version,
                tokens.first().unwrap_or(&0),
                tokens.get(1).unwrap_or(&0)
            ));
        }
        if !common.ours.is_empty() {
            text.push_str(&format!(" Our options: `{}`.", common.ours.join(" ")));
        }
        text.push_str(" \"better by\" above 1 is in our favour, whatever the measure.\n");
        text
    }

    /// A table for each of ours, of the same runs of others.
    fn measure(&self, subject: &Subject) -> Result<Vec<Table>, Error> {
        let path = subject.path.display().to_string();
        let prompt = self
            .peer()
            .text_of_tokens(&path, PROSE, FIRST_PROMPT as usize)?;
        let mut names = vec!["mlxcel", "llama.cpp"];
        if self.mlx_lm.is_some() && subject.shape.is_some() {
            names.push("mlx-lm");
        }
        let mut tables = vec![Table::new(&names); self.ours.len()];
        for round in 0..self.args.common.rounds.max(1) {
            eprintln!("{}: round {}", subject.name, round + 1);
            // Who goes first changes, so that a machine that gets slower or faster favours nobody.
            let mut order: Vec<Option<usize>> = (0..self.ours.len()).map(Some).collect();
            order.push(None);
            if round % 2 == 1 {
                order.reverse();
            }
            for who in order {
                match who.and_then(|who| self.ours.get(who).zip(tables.get_mut(who))) {
                    Some((ours, table)) => {
                        table.add_all(OURS, &self.our_round(ours, &path, &prompt)?);
                    }
                    None => {
                        let figures = self.llama_round(&path, &prompt)?;
                        tables
                            .iter_mut()
                            .for_each(|table| table.add_all(LLAMA, &figures));
                    }
                }
            }
            if let (Some(mlx_lm), Some(shape)) = (&self.mlx_lm, subject.shape) {
                let figures = self.mlx_lm_round(mlx_lm, shape)?;
                tables
                    .iter_mut()
                    .for_each(|table| table.add_all(MLX_LM, &figures));
            }
        }
        Ok(tables)
    }

    fn peer(&self) -> Peer<'_> {
        Peer {
            llama: &self.llama,
            clock: &self.clock,
            threads: self.args.common.threads,
        }
    }

    fn our_round(
        &self,
        ours: &Ours,
        model: &str,
        prompt: &str,
    ) -> Result<Vec<(Measure, f64)>, Error> {
        let args = self.args;
        let case = |list: &[(&str, String)]| -> Vec<String> {
            list.iter()
                .flat_map(|(flag, value)| [(*flag).to_owned(), value.clone()])
                .collect()
        };
        let main = case(&[
            ("-p", args.prompt.to_string()),
            ("-n", args.answer.to_string()),
        ]);
        let main = ours.bench(&self.clock, model, &main)?;
        let mut figures = main.rates;
        figures.push((Measure::Load, main.load_s));
        figures.push((Measure::Memory, mib(main.max_rss_bytes)));
        let first = ours.first_token(&self.clock, model, prompt)?;
        figures.push((first_token(), first));
        let short = args.short_answer.to_string();
        for (flag, list) in [("-d", depths(args)), ("-b", batches(args))] {
            if !list.is_empty() {
                let list: Vec<String> = list.iter().map(u32::to_string).collect();
                let cases = case(&[
                    ("-p", "0".to_owned()),
                    ("-n", short.clone()),
                    (flag, list.join(",")),
                ]);
                figures.extend(ours.bench(&self.clock, model, &cases)?.rates);
            }
        }
        Ok(figures)
    }

    fn llama_round(&self, model: &str, prompt: &str) -> Result<Vec<(Measure, f64)>, Error> {
        let (args, peer) = (self.args, self.peer());
        let (mut figures, max_rss_bytes) = peer.bench(model, args.prompt, args.answer, &[0])?;
        figures.push((Measure::Memory, mib(max_rss_bytes)));
        let (first, load) = peer.first_token(model, prompt)?;
        figures.push((first_token(), first));
        figures.extend(load.map(|load| (Measure::Load, load)));
        let depths = depths(args);
        if !depths.is_empty() {
            figures.extend(peer.bench(model, 0, args.short_answer, &depths)?.0);
        }
        let batches = batches(args);
        if !batches.is_empty() {
            figures.extend(peer.batches(model, args.short_answer, &batches)?);
        }
        Ok(figures)
    }

    fn mlx_lm_round(&self, mlx_lm: &MlxLm, shape: &str) -> Result<Vec<(Measure, f64)>, Error> {
        let args = self.args;
        let tokens = |at: usize, default| args.mlx_lm_tokens.get(at).copied().unwrap_or(default);
        let rows = (
            Measure::Prefill {
                tokens: args.prompt,
            },
            Measure::Decode {
                tokens: args.answer,
                depth: 0,
            },
        );
        mlx_lm.rates(&self.clock, shape, (tokens(0, 64), tokens(1, 12)), rows)
    }
}

fn options(ours: &Ours) -> String {
    match ours.extra.as_slice() {
        [] => "With defaults".to_owned(),
        options => format!("With `{}`", options.join(" ")),
    }
}

fn first_token() -> Measure {
    Measure::FirstToken {
        prompt: FIRST_PROMPT,
    }
}

fn depths(args: &PeersArgs) -> Vec<u32> {
    args.depths
        .iter()
        .copied()
        .filter(|depth| *depth > 0)
        .collect()
}

fn batches(args: &PeersArgs) -> Vec<u32> {
    args.batches
        .iter()
        .copied()
        .filter(|streams| *streams > 0)
        .collect()
}
