//! `mlxcel inspect`: whether a model fits, from its headers alone. No weight is read and no backend is started.

use std::path::Path;

use clap::Args;
use mlxcel_registry::store::Revision;
use serde_json::{Value, json};

use crate::engine::batch::BatchLimits;
use crate::engine::estimate::{EstimateInputs, MemoryEstimate, estimate};
use crate::engine::{CacheDesc, OpenedModel, open_model};

use super::args::{FamilyArgs, LogArgs, PluginArgs, StoreArgs, VERSION};
use super::console::Console;
use super::error::CliError;
use super::exit::Exit;
use super::memory::{Budget, PLANNED_TOKENS, headroom_factor, host_budget};
use super::place::{loader, open_store, usable_catalogue};
use super::table::{bytes_text, counted};

/// Keys and values are kept in 16 bits unless `--dtype f32` asks for more.
const KV_ELEMENT_BYTES: u64 = 2;

/// Flags of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Model: a path, `owner/name` or `name`
    #[arg(short, long)]
    model: String,
    /// Branch, tag or commit of the model's repository
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// Tokens of each sequence; without it 8192, or the model's context if that is less
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_tokens: Option<u64>,
    /// Sequences at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Write JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    family: FamilyArgs,
    #[command(flatten)]
    plugins: PluginArgs,
    #[command(flatten)]
    pub(super) log: LogArgs,
}

/// What was found.
struct Report<'a> {
    model: &'a str,
    opened: &'a OpenedModel,
    tokens: u64,
    batch: u64,
    estimate: MemoryEstimate,
    headroom_factor: f64,
    budget: Budget,
}

/// Runs the command.
pub fn run(args: &InspectArgs, console: &Console) -> Result<Exit, CliError> {
    let store = open_store(&args.store)?;
    let revision = args.revision.as_deref().map(Revision::parse).transpose()?;
    let path = store
        .resolve(&store.parse(&args.model)?, revision.as_ref())?
        .path;
    let catalogue = usable_catalogue(&args.plugins)?;
    let opened = open_model(&path, &catalogue, &loader()?, args.family.family.as_deref())?;
    let context = opened.desc.context_length as u64;
    if let Some(asked) = args.max_tokens.filter(|&asked| asked > context) {
        console.note(format_args!(
            "{asked} tokens are more than the model's context: the estimate is for {context}"
        ));
    }
    let tokens = args.max_tokens.unwrap_or(PLANNED_TOKENS).min(context);
    let headroom_factor = headroom_factor()?;
    let inputs = EstimateInputs {
        weights_bytes: opened.checkpoint.weights_bytes(),
        tokens,
        batch: args.batch,
        step_rows: BatchLimits::default().budget.rows as u64,
        kv_element_bytes: KV_ELEMENT_BYTES,
        activation_element_bytes: KV_ELEMENT_BYTES,
        headroom_factor,
    };
    let report = Report {
        model: &args.model,
        opened: &opened,
        tokens,
        batch: args.batch,
        estimate: estimate(&opened.desc, inputs),
        headroom_factor,
        budget: host_budget()?,
    };
    match args.json {
        true => console.json(&report.document())?,
        false => console.block(&report.text(&path))?,
    }
    Ok(Exit::Success)
}

impl Report<'_> {
    fn fits(&self) -> Option<bool> {
        self.budget
            .bytes
            .map(|budget| self.estimate.total_bytes <= budget)
    }

    fn weights_source(&self) -> &'static str {
        match self.opened.checkpoint.gguf() {
            Some(_) => "gguf_header",
            None => "safetensors_header",
        }
    }

    fn model_type(&self) -> Value {
        self.opened
            .checkpoint
            .config()
            .get("model_type")
            .cloned()
            .unwrap_or(Value::Null)
    }

    /// The keys of the established format; `null` is a figure that there is none of here.
    fn document(&self) -> Value {
        let estimate = &self.estimate;
        json!({
            "mlxcel_version": VERSION,
            "model": self.model,
            "model_type": self.model_type(),
            "family": self.opened.decision.arch,
            "plugin": { "name": self.opened.family.name(), "version": self.opened.family.version() },
            "inputs": {
                "max_tokens": self.tokens,
                "batch": self.batch,
                "kv_cache_mode": "fp16",
                "quant": "default",
            },
            "context_length": self.opened.desc.context_length,
            "weights_bytes": estimate.weights_bytes,
            "weights_source": self.weights_source(),
            "kv_bytes_per_token": { "fp16": estimate.kv_bytes_per_token, "int8": null, "turbo4": null },
            "kv_bytes_total": estimate.kv_bytes_total,
            "kv_detail": self.kv_detail(),
            "per_slot_overhead_bytes": null,
            "activation_bytes": estimate.activation_bytes,
            "backend_inflight_bytes": null,
            "headroom_bytes": estimate.headroom_bytes,
            "headroom_factor": self.headroom_factor,
            "budget_bytes": self.budget.bytes,
            "total_bytes": estimate.total_bytes,
            "fits": self.fits(),
        })
    }

    fn kv_detail(&self) -> String {
        let layers = &self.opened.desc.layers;
        let count =
            |kind: fn(&CacheDesc) -> bool| layers.iter().filter(|layer| kind(layer)).count();
        let dense = count(|layer| matches!(layer, CacheDesc::Dense { .. }));
        let window = count(|layer| matches!(layer, CacheDesc::Window { .. }));
        let none = layers.len() - dense - window;
        let mut parts = vec![counted(dense, "dense layer")];
        parts.extend(
            (window > 0).then(|| format!("{} (kept in full)", counted(window, "windowed layer"))),
        );
        parts.extend((none > 0).then(|| format!("{} without a cache", counted(none, "layer"))));
        parts.join(", ")
    }

    fn text(&self, path: &Path) -> String {
        let estimate = &self.estimate;
        let plugin = format!(
            "{} {}",
            self.opened.family.name(),
            self.opened.family.version()
        );
        let percent = (self.headroom_factor - 1.0) * 100.0;
        let budget = match self.budget.bytes {
            Some(bytes) => format!("{} ({})", bytes_text(bytes), self.budget.origin),
            None => self.budget.origin.clone(),
        };
        let verdict = match self.fits() {
            Some(true) => "yes",
            Some(false) => "no",
            None => "unknown",
        };
        let rows = [
            ("model", path.display().to_string()),
            (
                "architecture",
                format!("{} (plugin {plugin})", self.opened.decision.arch),
            ),
            (
                "context",
                format!("{} tokens", self.opened.desc.context_length),
            ),
            ("weights", bytes_text(estimate.weights_bytes)),
            (
                "caches",
                format!(
                    "{} for {} x {} tokens, {} a token: {}",
                    bytes_text(estimate.kv_bytes_total),
                    self.batch,
                    self.tokens,
                    bytes_text(estimate.kv_bytes_per_token),
                    self.kv_detail()
                ),
            ),
            ("activations", bytes_text(estimate.activation_bytes)),
            (
                "headroom",
                format!("{} ({percent:.0} %)", bytes_text(estimate.headroom_bytes)),
            ),
            ("total", bytes_text(estimate.total_bytes)),
            ("budget", budget),
            ("fits", verdict.to_owned()),
        ];
        rows.iter()
            .map(|(key, value)| format!("{key:<13} {value}\n"))
            .collect()
    }
}
