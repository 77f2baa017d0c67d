//! Flags of the commands that answer prompts: model, sampling, prompt and memory.
//!
//! Owns names, defaults and ranges. What they do is the engine's and the chat's business.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::chat::{ChatError, ChatOptions};
use crate::engine::{LoadOptions, Lookahead, Precision, RankPlan};
use crate::plugin::{BackendChoice, DType};
use crate::sampling::SamplingParams;
use crate::template::TemplateSet;
use crate::text::{StopMatcher, StopText};

use super::args::{FamilyArgs, LogArgs, PluginArgs, StoreArgs};
use super::error::CliError;
use super::kv_type::KvTypeArgs;
use super::sampling::SamplerArgs;

/// Float type of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DTypeArg {
    /// What backend and checkpoint prefer
    Auto,
    /// 32 bits
    F32,
    /// IEEE 16 bits
    F16,
    /// bfloat16
    Bf16,
}

impl DTypeArg {
    /// The type that was asked for, if one was.
    pub fn asked(self) -> Option<DType> {
        match self {
            Self::Auto => None,
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::Bf16 => Some(DType::BF16),
        }
    }
}

/// How products are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrecisionArg {
    /// What the backend prefers
    Auto,
    /// In the type of the activations
    Exact,
    /// With activations rounded to 16 bits in groups
    High,
    /// With activations rounded to what is fastest
    Fast,
}

/// Whether steps are submitted before the tokens of the ones before them are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LookaheadArg {
    /// On where the backend says that it goes on working meanwhile
    Auto,
    /// Wherever tokens are chosen on the device
    On,
    /// Never
    Off,
}

/// What a prompt is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptForm {
    /// A message of a conversation, which a chat template turns into a prompt.
    Message,
    /// The prompt itself.
    Raw,
}

/// Everything that `run` and `generate` share.
#[derive(Debug, Clone, Args)]
pub struct GenerationArgs {
    /// Most tokens of an answer; -1 is until the model ends it or the context is full
    #[arg(
        short = 'n',
        long = "max-tokens",
        alias = "n-predict",
        value_name = "N",
        default_value_t = -1,
        allow_negative_numbers = true,
        value_parser = max_tokens,
        help_heading = "Answer"
    )]
    pub max_tokens: i64,
    /// Randomness; 0 always takes the likeliest token
    #[arg(long, alias = "temperature", value_name = "T", default_value_t = 0.0, allow_negative_numbers = true, value_parser = non_negative, help_heading = "Sampling")]
    pub temp: f32,
    /// Keep the likeliest tokens up to this probability; 1 keeps all
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true, value_parser = probability, help_heading = "Sampling")]
    pub top_p: f32,
    /// Keep this many of the likeliest tokens; 0 keeps all
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true,
        help_heading = "Sampling"
    )]
    pub top_k: u32,
    /// Drop tokens below this share of the likeliest one's probability; 0 drops none
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true, value_parser = probability, help_heading = "Sampling")]
    pub min_p: f32,
    /// Divide the logits of tokens that occurred; 1 is off
    #[arg(long, alias = "repeat-penalty", value_name = "R", default_value_t = 1.0, allow_negative_numbers = true, value_parser = positive, help_heading = "Sampling")]
    pub repetition_penalty: f32,
    /// How many of the last tokens DRY looks at; 0 is none, -1 is all
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(i32).range(-1..),
        help_heading = "Sampling"
    )]
    pub dry_penalty_last_n: i32,
    /// Samplers.
    #[command(flatten, next_help_heading = "Sampling")]
    pub samplers: SamplerArgs,
    /// End the answer before this text; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = stop, help_heading = "Answer")]
    pub stop: Vec<String>,
    /// System message
    #[arg(long, value_name = "TEXT", help_heading = "Prompt")]
    pub system: Option<String>,
    /// Chat template in place of the model's
    #[arg(
        long,
        value_name = "TEXT",
        conflicts_with = "chat_template_file",
        help_heading = "Prompt"
    )]
    pub chat_template: Option<String>,
    /// File with a chat template in place of the model's
    #[arg(long, value_name = "FILE", help_heading = "Prompt")]
    pub chat_template_file: Option<PathBuf>,
    /// Write load time and speed to stderr
    #[arg(long, help_heading = "Answer")]
    pub profile: bool,
    /// Flags that say which model runs where.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Flags of stderr.
    #[command(flatten)]
    pub log: LogArgs,
}

/// Which model, which plugins, and how it is loaded.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// Branch, tag or commit of the model's repository
    #[arg(long, value_name = "REV", help_heading = "Model")]
    pub revision: Option<String>,
    /// The store.
    #[command(flatten)]
    pub store: StoreArgs,
    /// Longest conversation in tokens, prompt and answer; 0 is the model's own limit
    #[arg(
        short = 'c',
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true,
        value_parser = tokens,
        help_heading = "Model"
    )]
    pub ctx_size: usize,
    /// Float type of activations
    #[arg(long, value_enum, default_value_t = DTypeArg::Auto, help_heading = "Model")]
    pub dtype: DTypeArg,
    /// Types of keys and values.
    #[command(flatten)]
    pub kv_type: KvTypeArgs,
    /// Backend plugin: `auto` or a name
    #[arg(
        long,
        value_name = "NAME",
        default_value = "auto",
        help_heading = "Plugins"
    )]
    pub backend: BackendChoice,
    /// Compute threads of each process; 0 lets the backend decide
    #[arg(
        short = 't',
        long,
        value_name = "N",
        default_value_t = 0,
        help_heading = "Model"
    )]
    pub threads: usize,
    /// How products are computed, where the backend has a choice
    #[arg(long, value_enum, default_value_t = PrecisionArg::Auto, help_heading = "Model")]
    pub precision: PrecisionArg,
    /// Compute every row by itself, so that an answer depends on nothing but its request; slower, and refused where a backend cannot
    #[arg(long, help_heading = "Model")]
    pub deterministic: bool,
    /// Give the device its next step before the last one's tokens are read; answers are the same
    #[arg(long, value_enum, default_value_t = LookaheadArg::Auto, help_heading = "Model")]
    pub lookahead: LookaheadArg,
    /// Split the model over this many processes, each with a part of every layer; 1 keeps it whole
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64), help_heading = "Model")]
    pub tensor_parallel: u32,
    /// The family.
    #[command(flatten)]
    pub family: FamilyArgs,
    /// The plugins.
    #[command(flatten)]
    pub plugins: PluginArgs,
    /// Write the memory estimate and end
    #[arg(long, help_heading = "Memory")]
    pub estimate_memory: bool,
    /// Load the model even when the estimate says that it does not fit
    #[arg(long, visible_alias = "no-memory-check", help_heading = "Memory")]
    pub force: bool,
}

impl GenerationArgs {
    /// The chat's share. A template file that cannot be read is told now.
    pub fn chat_options(&self, prompt: PromptForm) -> Result<ChatOptions, CliError> {
        let template = match (&self.chat_template, &self.chat_template_file) {
            (Some(text), _) => Some(TemplateSet::from_text(text)),
            (None, Some(file)) => Some(TemplateSet::from_file(file).map_err(ChatError::from)?),
            (None, None) => None,
        };
        StopMatcher::new(self.stop.iter().cloned(), StopText::Exclude)
            .map_err(|error| CliError::usage(format!("--stop: {error}")))?;
        Ok(ChatOptions {
            system: self.system.clone(),
            sampling: self.samplers.over(SamplingParams {
                temperature: self.temp,
                top_p: self.top_p,
                top_k: self.top_k,
                min_p: self.min_p,
                repetition_penalty: self.repetition_penalty,
                dry_penalty_last_n: self.dry_penalty_last_n,
                ..SamplingParams::cli()
            })?,
            ignore_eos: self.samplers.ignore_eos(),
            max_new_tokens: usize::try_from(self.max_tokens).ok(),
            stops: self.stop.clone(),
            template,
            is_raw: prompt == PromptForm::Raw,
        })
    }
}

impl ModelArgs {
    /// The engine's share.
    pub fn load_options(&self) -> LoadOptions {
        LoadOptions {
            dtype: self.dtype.asked(),
            kv_types: self.kv_type.types(),
            ctx_size: self.ctx_size,
            threads: self.threads,
            precision: match self.precision {
                PrecisionArg::Auto => None,
                PrecisionArg::Exact => Some(Precision::Exact),
                PrecisionArg::High => Some(Precision::High),
                PrecisionArg::Fast => Some(Precision::Fast),
            },
            deterministic: self.deterministic,
            lookahead: match self.lookahead {
                LookaheadArg::Auto => Lookahead::Auto,
                LookaheadArg::On => Lookahead::On,
                LookaheadArg::Off => Lookahead::Off,
            },
            ranks: (self.tensor_parallel > 1).then(|| RankPlan {
                size: self.tensor_parallel as usize,
                plugins_dir: self.plugins.plugins_dir.clone(),
                plugin: self.plugins.plugin.clone(),
            }),
            ..LoadOptions::default()
        }
    }
}

fn tokens(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| {
        "expected a number of tokens; 0 is the model's own limit, there is no -1".to_owned()
    })
}

fn stop(text: &str) -> Result<String, String> {
    match text {
        "" => Err("expected a text: an empty one would end every answer at once".to_owned()),
        text => Ok(text.to_owned()),
    }
}

fn number(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if value.is_finite() {
        Ok(value)
    } else {
        Err("expected a finite number".to_owned())
    }
}

fn non_negative(text: &str) -> Result<f32, String> {
    let value = number(text)?;
    if value >= 0.0 {
        Ok(value)
    } else {
        Err("expected 0 or more".to_owned())
    }
}

fn positive(text: &str) -> Result<f32, String> {
    let value = number(text)?;
    if value > 0.0 {
        Ok(value)
    } else {
        Err("expected more than 0".to_owned())
    }
}

fn probability(text: &str) -> Result<f32, String> {
    let value = number(text)?;
    if (0.0..=1.0).contains(&value) {
        Ok(value)
    } else {
        Err("expected a number from 0 to 1".to_owned())
    }
}

fn max_tokens(text: &str) -> Result<i64, String> {
    match text.parse::<i64>() {
        Ok(value) if value == -1 || value > 0 => Ok(value),
        _ => Err("expected a whole number above 0, or -1 for no limit".to_owned()),
    }
}
