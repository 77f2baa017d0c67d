//! Perplexity of a text, as llama-perplexity computes it, and how far two settings are from each other.
//!
//! The text is cut into chunks of one context. Each begins anew, with the tokenizer's first token in place of its own where
//! there is one, and the second half of its tokens is scored, so that each has at least half a context before it.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use crate::chat::ModelText;
use crate::engine::Failure;
use crate::engine::load::load_runner;
use crate::engine::{EngineError, EngineFacts, KvTypes, LoadOptions, OpenedModel, Precision};
use crate::plugin::{DType, SelectedBackend};
use crate::text::Boundary;

use super::super::console::Console;
use super::super::error::CliError;
use super::super::kv_type::known;
use super::distance::{Distance, log_sum_exp};

/// As the engine's own thread: graphs are built and freed by recursion in some backends.
const STACK_BYTES: usize = 64 << 20;

/// As llama-perplexity has it.
const CHUNK_TOKENS: u32 = 512;

/// Logits of the first setting that are held until the second has computed its own.
const HELD_BYTES: usize = 512 << 20;

/// Flags of the measure.
#[derive(Debug, Args)]
pub struct PerplexityArgs {
    /// Measure the perplexity of this text file, in place of speed
    #[arg(long, value_name = "FILE", conflicts_with_all = ["n_prompt", "n_gen", "n_depth", "batch", "repetitions"], help_heading = "Quality")]
    pub perplexity: Option<PathBuf>,
    /// Length of a chunk of the text, in tokens [default: 512]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(8..), requires = "perplexity", help_heading = "Quality")]
    perplexity_context: Option<u32>,
    /// Take so many chunks from the beginning [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), requires = "perplexity", help_heading = "Quality")]
    perplexity_chunks: Option<u32>,
    /// Rows of a step: 1 computes as answers do, many as prompts do [default: 512]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), requires = "perplexity", help_heading = "Quality")]
    step_rows: Option<u32>,
    /// Measure a second setting too, and its distance from the first: `precision=fast`, `dtype=f16`, `cache-type=f16`, `step-rows=1`; may be repeated
    #[arg(
        long,
        value_name = "KEY=VALUE",
        requires = "perplexity",
        help_heading = "Quality"
    )]
    against: Vec<String>,
}

impl PerplexityArgs {
    /// Refuses options of this measure where it is not made. The parser does not when a length of the other
    /// measures is there too: then it takes what is required for excluded.
    pub fn check(&self) -> Result<(), CliError> {
        let stray = [
            ("--perplexity-context", self.perplexity_context.is_some()),
            ("--perplexity-chunks", self.perplexity_chunks.is_some()),
            ("--step-rows", self.step_rows.is_some()),
            ("--against", !self.against.is_empty()),
        ]
        .into_iter()
        .find(|(_, is_given)| *is_given && self.perplexity.is_none());
        match stray {
            Some((name, _)) => Err(CliError::usage(format!(
                "{name} belongs to --perplexity FILE, which measures quality in place of speed"
            ))),
            None => Ok(()),
        }
    }
}

/// One way to compute.
#[derive(Debug, Clone)]
struct Setting {
    name: String,
    options: LoadOptions,
    step_rows: usize,
}

impl Setting {
    /// The same with one thing changed.
    fn changed(mut self, text: &str) -> Result<Self, CliError> {
        let wrong = || {
            CliError::usage(format!(
                "--against {text}: expected precision=exact, precision=high, precision=fast, dtype=f32, dtype=f16, dtype=bf16, cache-type=TYPE, cache_type_k=TYPE or cache_type_v=TYPE with f32, f16, bf16, q8_0 or q4_0, or step-rows=N with N from 1"
            ))
        };
        match text.split_once('=').ok_or_else(wrong)? {
            ("precision", "exact") => self.options.precision = Some(Precision::Exact),
            ("precision", "high") => self.options.precision = Some(Precision::High),
            ("precision", "fast") => self.options.precision = Some(Precision::Fast),
            ("dtype", "f32") => self.options.dtype = Some(DType::F32),
            ("dtype", "f16") => self.options.dtype = Some(DType::F16),
            ("dtype", "bf16") => self.options.dtype = Some(DType::BF16),
            ("cache-type", name) => {
                self.options.kv_types = KvTypes::both(known(name).map_err(|_| wrong())?);
            }
            // As the flags are spelt; the other half stays what it was.
            ("cache_type_k" | "cache-type-k", name) => {
                self.options.kv_types.keys = Some(known(name).map_err(|_| wrong())?);
            }
            ("cache_type_v" | "cache-type-v", name) => {
                self.options.kv_types.values = Some(known(name).map_err(|_| wrong())?);
            }
            ("step-rows", rows) => {
                let rows = rows.parse().ok().filter(|rows| *rows > 0);
                self.step_rows = rows.ok_or_else(wrong)?;
            }
            _ => return Err(wrong()),
        }
        Ok(self)
    }
}

/// What a setting is about.
fn key(text: &str) -> String {
    text.split('=').next().unwrap_or_default().replace('_', "-")
}

/// What two settings are both about, if anything: only one of them could be honoured there.
fn overlap(one: &str, other: &str) -> Option<String> {
    let both = "cache-type";
    let [one, other] = [one, other].map(key);
    let halves = |key: &str| {
        key.strip_prefix(both)
            .is_some_and(|end| ["-k", "-v"].contains(&end))
    };
    if one == other || (one == both && halves(&other)) {
        return Some(other);
    }
    (other == both && halves(&one)).then_some(one)
}

/// Refuses a setting of something that one before it sets.
fn check_apart(before: &[String], text: &str) -> Result<(), CliError> {
    let mut overlaps = before
        .iter()
        .filter_map(|before| Some((before, overlap(before, text)?)));
    match overlaps.next() {
        Some((before, what)) => Err(CliError::usage(format!(
            "--against {text}: {before} sets {what} already; all of --against is one setting, so measure the other in a run of its own"
        ))),
        None => Ok(()),
    }
}

/// What is measured, and on what.
pub struct Subject<'a> {
    /// The checkpoint.
    pub opened: &'a OpenedModel,
    /// The device.
    pub backend: &'a SelectedBackend,
    /// How the model is loaded.
    pub options: LoadOptions,
}

/// Sum of the negative log probabilities, and of their squares.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Score {
    count: usize,
    sum: f64,
    squares: f64,
}

impl Score {
    fn add(&mut self, logits: &[f32], token: u32) {
        let logit = logits.get(token as usize).copied().unwrap_or(f32::NAN);
        let loss = log_sum_exp(logits) - f64::from(logit);
        self.count += 1;
        self.sum += loss;
        self.squares += loss * loss;
    }

    /// Perplexity and its standard error.
    fn perplexity(&self) -> (f64, f64) {
        let count = self.count.max(1) as f64;
        let mean = self.sum / count;
        let variance = (self.squares / count - mean * mean).max(0.0);
        let perplexity = mean.exp();
        let error = perplexity * (variance / (count - 1.0).max(1.0)).sqrt();
        (perplexity, error)
    }
}

/// What a setting came to.
#[derive(Debug, Clone)]
pub struct Measured {
    name: String,
    dtype: &'static str,
    kv_dtype: &'static str,
    precision: Option<&'static str>,
    score: Score,
}

/// All that was found.
#[derive(Debug)]
pub struct Quality {
    text: String,
    context: usize,
    chunks: usize,
    settings: Vec<Measured>,
    distance: Option<Distance>,
}

/// Runs the measure.
pub fn measure(
    args: &PerplexityArgs,
    path: &std::path::Path,
    subject: &Subject<'_>,
    console: &Console,
) -> Result<Quality, CliError> {
    let context = args.perplexity_context.unwrap_or(CHUNK_TOKENS) as usize;
    let chunks = chunks(args, path, context, subject.opened)?;
    let base = Setting {
        name: "as asked for".to_owned(),
        options: subject.options.clone(),
        step_rows: args.step_rows.unwrap_or(CHUNK_TOKENS) as usize,
    };
    let mut settings = vec![base.clone()];
    if !args.against.is_empty() {
        let mut other = base;
        other.name = args.against.join(" ");
        for (place, text) in args.against.iter().enumerate() {
            let before = args.against.get(..place).unwrap_or_default();
            check_apart(before, text)?;
            other = other.changed(text)?;
        }
        settings.push(other);
    }
    let row_bytes = subject.opened.desc.vocab_size * size_of::<f32>();
    let held = (HELD_BYTES / (context * row_bytes / 2).max(1)).max(1);
    let group = if settings.len() > 1 {
        held
    } else {
        chunks.len()
    };
    let mut measured: Vec<Measured> = Vec::new();
    let mut distance = (settings.len() > 1).then(Distance::default);
    for (index, part) in chunks.chunks(group).enumerate() {
        console.note(format_args!(
            "scoring chunks {} to {} of {}",
            index * group + 1,
            index * group + part.len(),
            chunks.len()
        ));
        let mut held: Vec<f32> = Vec::new();
        for (number, setting) in settings.iter().enumerate() {
            let mut rows = 0;
            let mut score = Score::default();
            let mut take = |logits: &[f32], token: u32| {
                score.add(logits, token);
                if let Some(distance) = &mut distance {
                    if number == 0 {
                        held.extend_from_slice(logits);
                    } else if let Some(base) =
                        held.get(rows * logits.len()..(rows + 1) * logits.len())
                    {
                        distance.add(base, logits);
                    }
                }
                rows += 1;
            };
            let facts = score_chunks(subject, setting, part, &mut take)?;
            add(&mut measured, number, setting, &facts, score);
        }
    }
    Ok(Quality {
        text: path
            .file_name()
            .map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        context,
        chunks: chunks.len(),
        settings: measured,
        distance,
    })
}

fn add(
    measured: &mut Vec<Measured>,
    number: usize,
    setting: &Setting,
    facts: &EngineFacts,
    score: Score,
) {
    match measured.get_mut(number) {
        Some(known) => {
            known.score.count += score.count;
            known.score.sum += score.sum;
            known.score.squares += score.squares;
        }
        None => measured.push(Measured {
            name: setting.name.clone(),
            dtype: facts.dtype.name(),
            kv_dtype: facts.kv_type.name(),
            precision: facts.precision.map(Precision::name),
            score,
        }),
    }
}

/// The text as chunks of ids.
fn chunks(
    args: &PerplexityArgs,
    path: &std::path::Path,
    context: usize,
    opened: &OpenedModel,
) -> Result<Vec<Vec<u32>>, CliError> {
    let text = std::fs::read_to_string(path).map_err(|source| {
        CliError::usage(format!(
            "--perplexity {}: {source}; expected a file with UTF-8 text",
            path.display()
        ))
    })?;
    let tokenizer = ModelText::of(opened)?.tokenizer;
    let encode = |text: &str| {
        tokenizer
            .encode_text(text, Boundary::AsTrained)
            .map_err(|error| CliError::Chat(error.into()))
    };
    let tokens = encode(&text)?;
    let bos = tokenizer.bos_id().filter(|bos| tokens.first() == Some(bos));
    let mut chunks: Vec<Vec<u32>> = tokens.chunks_exact(context).map(<[u32]>::to_vec).collect();
    if let Some(most) = args.perplexity_chunks {
        chunks.truncate(most as usize);
    }
    if chunks.is_empty() {
        return Err(CliError::usage(format!(
            "the text of --perplexity has {} tokens, a chunk needs {context}; take a longer text or a smaller --perplexity-context",
            tokens.len()
        )));
    }
    if let Some(bos) = bos {
        for first in chunks.iter_mut().filter_map(|chunk| chunk.first_mut()) {
            *first = bos;
        }
    }
    Ok(chunks)
}

/// Loads the model with a setting, runs the chunks, and hands over each scored row with the token that follows it.
fn score_chunks(
    subject: &Subject<'_>,
    setting: &Setting,
    chunks: &[Vec<u32>],
    take: &mut (dyn FnMut(&[f32], u32) + Send),
) -> Result<EngineFacts, CliError> {
    let work = || -> Result<EngineFacts, EngineError> {
        let (mut runner, facts) = load_runner(
            subject.opened,
            subject.backend,
            &setting.options,
            Failure::default(),
            &|_, _| {},
        )?;
        for chunk in chunks {
            // The last token has nothing behind it to be compared with.
            let Some((_, scored)) = chunk.split_last() else {
                continue;
            };
            runner.score_rows(
                scored,
                chunk.len() / 2,
                setting.step_rows,
                &mut |at, logits| {
                    if let Some(next) = chunk.get(at + 1) {
                        take(logits, *next);
                    }
                },
            )?;
        }
        Ok(facts)
    };
    let outcome = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("mlxcel-engine".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work);
        let thread = thread.map_err(|source| CliError::System {
            action: "start a thread",
            source,
        })?;
        thread.join().map_err(|_| {
            CliError::Engine(EngineError::Internal {
                message: "the measurement panicked".to_owned(),
            })
        })
    })?;
    Ok(outcome?)
}

impl Quality {
    /// For people, and for Markdown.
    pub fn table(&self) -> String {
        let mut text = format!(
            "text {}, {} chunks of {} tokens\n\n| setting | activations | keys and values | precision | perplexity | +- |\n|---|---|---|---|---:|---:|\n",
            self.text, self.chunks, self.context
        );
        for setting in &self.settings {
            let (perplexity, error) = setting.score.perplexity();
            text.push_str(&format!(
                "| {} | {} | {} | {} | {perplexity:.4} | {error:.4} |\n",
                setting.name,
                setting.dtype,
                setting.kv_dtype,
                setting.precision.unwrap_or("not said")
            ));
        }
        if let Some(distance) = &self.distance {
            text.push_str(&format!("\n{}", distance.table()));
        }
        text
    }

    /// One line a setting.
    pub fn csv(&self) -> String {
        let mut text =
            "setting,dtype,kv_dtype,precision,tokens,perplexity,error,mean_kl,max_logit_difference\n"
                .to_owned();
        for (number, setting) in self.settings.iter().enumerate() {
            let (perplexity, error) = setting.score.perplexity();
            let distance = self.distance.as_ref().filter(|_| number > 0);
            let (kl, logit) = distance.map_or_else(Default::default, |distance| {
                (
                    format!("{:e}", distance.mean_kl()),
                    format!("{:e}", distance.max_logit()),
                )
            });
            text.push_str(&format!(
                "{},{},{},{},{},{perplexity:.6},{error:.6},{kl},{logit}\n",
                setting.name,
                setting.dtype,
                setting.kv_dtype,
                setting.precision.unwrap_or_default(),
                setting.score.count
            ));
        }
        text
    }

    /// Everything.
    pub fn json(&self) -> Value {
        let settings: Vec<Value> = self
            .settings
            .iter()
            .map(|setting| {
                let (perplexity, error) = setting.score.perplexity();
                json!({"setting": setting.name, "dtype": setting.dtype, "kv_dtype": setting.kv_dtype, "precision": setting.precision, "tokens": setting.score.count, "perplexity": perplexity, "error": error})
            })
            .collect();
        json!({
            "text": self.text,
            "context": self.context,
            "chunks": self.chunks,
            "settings": settings,
            "distance": self.distance.as_ref().map(Distance::json),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::KvType;

    #[test]
    fn perplexity_of_even_odds_is_the_size_of_the_vocabulary() {
        let mut score = Score::default();
        for token in 0..8 {
            score.add(&[3.0; 8], token);
        }
        let (perplexity, error) = score.perplexity();
        assert!(
            (perplexity - 8.0).abs() < 1e-9 && error < 1e-6,
            "{perplexity} {error}"
        );
    }

    #[test]
    fn what_another_setting_sets_already_is_refused_by_name() {
        let told = |against: &[&str]| {
            let against: Vec<String> = against.iter().map(|text| (*text).to_owned()).collect();
            let (text, before) = against.split_last().unwrap();
            check_apart(before, text).err().map(|error| {
                let text = error.to_string();
                let (told, rest) = text.split_once("; ").unwrap();
                assert_eq!(
                    rest,
                    "all of --against is one setting, so measure the other in a run of its own"
                );
                told.to_owned()
            })
        };
        let refused = [
            &["dtype=f16", "dtype=bf16"][..],
            &["cache-type=f16", "cache-type-k=f32"],
            &["cache_type_v=f32", "cache-type=f16"],
            &["cache-type-k=f32", "cache_type_k=f16"],
            &["dtype=f16", "step-rows=1", "step-rows=1"],
        ];
        let refused: Vec<String> = refused
            .into_iter()
            .map(|against| told(against).unwrap())
            .collect();
        insta::assert_snapshot!(refused.join("\n"), @r"
        --against dtype=bf16: dtype=f16 sets dtype already
        --against cache-type-k=f32: cache-type=f16 sets cache-type-k already
        --against cache-type=f16: cache_type_v=f32 sets cache-type-v already
        --against cache_type_k=f16: cache-type-k=f32 sets cache-type-k already
        --against step-rows=1: step-rows=1 sets step-rows already
        ");
        let apart = ["cache_type_k=f32", "cache_type_v=f32", "dtype=f16"];
        assert_eq!(told(&apart), None);
    }

    #[test]
    fn a_setting_changes_what_it_names_and_nothing_else() {
        let setting = Setting {
            name: String::new(),
            options: LoadOptions::default(),
            step_rows: 512,
        };
        let changed = setting.clone().changed("step-rows=1").unwrap();
        assert_eq!((changed.step_rows, changed.options.dtype), (1, None));
        let changed = setting.clone().changed("dtype=bf16").unwrap();
        assert_eq!(changed.options.dtype, Some(DType::BF16));
        let changed = setting.clone().changed("precision=fast").unwrap();
        assert_eq!(changed.options.precision, Some(Precision::Fast));
        let changed = setting.clone().changed("cache-type=f16").unwrap();
        assert_eq!(changed.options.kv_types, KvTypes::both(DType::F16));
        let keys = setting.clone().changed("cache_type_k=q8_0").unwrap();
        assert_eq!(keys.options.kv_types.keys, Some(KvType::Q8_0));
        let both = keys.changed("cache_type_v=q8_0").unwrap();
        assert_eq!(both.options.kv_types, KvTypes::both(KvType::Q8_0));
        for wrong in [
            "dtype",
            "dtype=f64",
            "cache-type=q5_1",
            "cache_type_k=8",
            "step-rows=0",
            "speed=2",
        ] {
            let error = setting.clone().changed(wrong).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
