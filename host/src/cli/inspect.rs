//! `mlxcel inspect`: whether a model fits, from its headers alone. No weight is read, unless its values are to be checked
//! (`inspect_values`). The backend that would run the model
//! is asked for the type of activations and caches and for its memory, so that the verdict is that of `run`.

use std::path::Path;

use clap::Args;
use mlxcel_registry::store::Revision;
use serde_json::{Value, json};

use crate::engine::schedule::AskedBudget;
use crate::engine::{CacheDesc, KvType, OpenedModel, open_model};
use crate::plugin::{BackendChoice, DType, SelectError};

use super::args::{FamilyArgs, LogArgs, PluginArgs, StoreArgs, VERSION};
use super::console::Console;
use super::error::CliError;
use super::exit::Exit;
use super::generation::DTypeArg;
use super::inspect_values;
use super::kv_type::KvTypeArgs;
use super::memory::{Plan, Verdict};
use super::place::{loader, open_store, usable_catalogue};
use super::table::{bytes_text, counted};

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
    /// Float type of activations
    #[arg(long, value_enum, default_value_t = DTypeArg::Auto)]
    dtype: DTypeArg,
    #[command(flatten)]
    kv_type: KvTypeArgs,
    /// Backend plugin that would run it: `auto` or a name
    #[arg(long, value_name = "NAME", default_value = "auto")]
    backend: BackendChoice,
    /// Read all weights and name the tensors that hold NaN or infinity, in place of the estimate
    #[arg(long)]
    check_values: bool,
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
    batch: u64,
    verdict: Verdict,
}

/// Runs the command.
pub fn run(args: &InspectArgs, console: &Console) -> Result<Exit, CliError> {
    let store = open_store(&args.store)?;
    let revision = args.revision.as_deref().map(Revision::parse).transpose()?;
    let path = store
        .resolve(&store.parse(&args.model)?, revision.as_ref())?
        .path;
    let catalogue = usable_catalogue(&args.plugins, console)?;
    let loader = loader()?;
    let opened = open_model(&path, &catalogue, &loader, args.family.family.as_deref())?;
    if args.check_values {
        return inspect_values::check(&opened, &path, args.json, console);
    }
    let backend = match loader.select_backend(&catalogue, &args.backend) {
        Ok(backend) => Some(backend),
        // The headers tell enough without; a backend that was named has to be there.
        Err(SelectError::NoneRuns { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let context = opened.desc.context_length as u64;
    if let Some(asked) = args.max_tokens.filter(|&asked| asked > context) {
        console.note(format_args!(
            "{asked} tokens are more than the model's context: the estimate is for {context}"
        ));
    }
    let plan = Plan {
        dtype: args.dtype.asked(),
        kv_types: args.kv_type.types(),
        precision: None,
        tokens: args.max_tokens.map(|asked| asked.min(context)),
        batch: args.batch,
        budget: AskedBudget::default(),
        ranks: 1,
    };
    let report = Report {
        model: &args.model,
        opened: &opened,
        batch: args.batch,
        verdict: Verdict::new(&opened, backend.as_ref(), plan)?,
    };
    match args.json {
        true => console.json(&report.document())?,
        false => console.block(&report.text(&path))?,
    }
    Ok(Exit::Success)
}

impl Report<'_> {
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
        let Verdict {
            estimate,
            budget,
            kv_type,
            ..
        } = &self.verdict;
        let a_token = |kind: KvType| self.opened.desc.kv_bytes_per_token(kind);
        json!({
            "mlxcel_version": VERSION,
            "model": self.model,
            "model_type": self.model_type(),
            "family": self.opened.decision.arch,
            "plugin": { "name": self.opened.family.name(), "version": self.opened.family.version() },
            "inputs": {
                "max_tokens": self.verdict.tokens,
                "batch": self.batch,
                "kv_cache_mode": match kv_type {
                    KvType::Float(DType::F32) => "fp32",
                    KvType::Float(_) => "fp16",
                    quantised => quantised.name(),
                },
                "quant": "default",
                "dtype": self.verdict.dtype.name(),
                "kv_dtype": kv_type.name(),
            },
            "context_length": self.opened.desc.context_length,
            "weights_bytes": estimate.weights_bytes,
            "weights_source": self.weights_source(),
            "kv_bytes_per_token": {
                "fp16": a_token(DType::F16.into()),
                "fp32": a_token(DType::F32.into()),
                "q8_0": a_token(KvType::Q8_0),
                "q4_0": a_token(KvType::Q4_0),
                "int8": null,
                "turbo4": null,
            },
            "kv_bytes_total": estimate.kv_bytes_total,
            "kv_detail": self.kv_detail(),
            "per_slot_overhead_bytes": self.state_bytes(),
            "activation_bytes": estimate.activation_bytes,
            "backend_inflight_bytes": null,
            "headroom_bytes": estimate.headroom_bytes,
            "headroom_factor": self.verdict.headroom_factor,
            "budget_bytes": budget.bytes,
            "total_bytes": estimate.total_bytes,
            "fits": self.verdict.fits(),
            "tensors_checked": false,
        })
    }

    /// What one sequence takes whatever its length; none where that is nothing.
    fn state_bytes(&self) -> Option<u64> {
        let bytes = self.verdict.estimate.state_bytes / self.batch.max(1);
        (bytes > 0).then_some(bytes)
    }

    fn kv_detail(&self) -> String {
        let layers = &self.opened.desc.layers;
        let count =
            |kind: fn(&CacheDesc) -> bool| layers.iter().filter(|layer| kind(layer)).count();
        let dense = count(|layer| matches!(layer, CacheDesc::Dense { .. }));
        let window = count(|layer| matches!(layer, CacheDesc::Window { .. }));
        let latent = count(|layer| matches!(layer, CacheDesc::Latent { .. }));
        let states = count(|layer| matches!(layer, CacheDesc::Recurrent { .. }));
        let cross = count(|layer| matches!(layer, CacheDesc::Cross { .. }));
        let none = layers.len() - dense - window - latent - states - cross;
        let mut parts = vec![counted(dense, "dense layer")];
        parts.extend(
            (window > 0).then(|| format!("{} (kept in full)", counted(window, "windowed layer"))),
        );
        parts.extend((latent > 0).then(|| counted(latent, "latent layer")));
        parts.extend(self.state_bytes().map(|bytes| {
            let layers = counted(states, "layer");
            format!("{layers} with states of {} a sequence", bytes_text(bytes))
        }));
        parts.extend((cross > 0).then(|| format!("{} to an encoder", counted(cross, "layer"))));
        parts.extend((none > 0).then(|| format!("{} without a cache", counted(none, "layer"))));
        parts.join(", ")
    }

    fn text(&self, path: &Path) -> String {
        let Verdict {
            estimate,
            budget,
            kv_type,
            ..
        } = &self.verdict;
        let plugin = format!(
            "{} {}",
            self.opened.family.name(),
            self.opened.family.version()
        );
        let percent = (self.verdict.headroom_factor - 1.0) * 100.0;
        let budget = match budget.bytes {
            Some(bytes) => format!("{} ({})", bytes_text(bytes), budget.origin),
            None => budget.origin.clone(),
        };
        let verdict = match self.verdict.fits() {
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
                    "{} for {} x {} tokens in {}, {} a token: {}",
                    bytes_text(estimate.kv_bytes_total),
                    self.batch,
                    self.verdict.tokens,
                    kv_type.name(),
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
            (
                "tensors",
                "not compared with the configuration: loading does that".to_owned(),
            ),
        ];
        rows.iter()
            .map(|(key, value)| format!("{key:<13} {value}\n"))
            .collect()
    }
}
