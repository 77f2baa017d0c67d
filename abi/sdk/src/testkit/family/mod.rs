//! Checks that hold for every family, over tiny random models.
//!
//! ```ignore
//! #[test]
//! fn llama_keeps_the_rules_of_families() {
//!     let config = serde_json::json!({"model_type": "llama", "hidden_size": 64, ..});
//!     FamilyUnderTest::this_plugin(config).unwrap().filled(1).unwrap().verdict().unwrap();
//! }
//! ```
//!
//! Everything goes through the family's table, as a host would do it. The caches are this module's
//! own and dense. It must know no architecture.

mod caches;
mod checks;
mod encode;
mod fault_checks;
mod fill;
mod golden;
mod model;
mod safetensors;
mod states;
#[cfg(test)]
mod tests;
mod weight_checks;
mod weights;

use mlxcel_abi::family::FamilyTable;
use mlxcel_abi::{AbiError, DType, OwnedBytes, Str, Table};
use serde_json::Value as Json;

use crate::{Backend, Error, ModelDesc, Result};
pub use caches::Caches;
pub use checks::{CHECKS, Check};
pub use golden::{Golden, GoldenPrompt};
pub use model::{LoadedModel, Logits, Part, StepOptions};
pub use weights::MapWeights;

/// A family with one configuration and weights for it.
#[derive(Clone)]
pub struct FamilyUnderTest {
    table: FamilyTable,
    arch: String,
    config: String,
    desc: ModelDesc,
    context_length: u32,
    weights: MapWeights,
    /// Tensors that a checkpoint may lack.
    optional: Vec<String>,
}

impl core::fmt::Debug for FamilyUnderTest {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "FamilyUnderTest({}, {} tensors)",
            self.arch,
            self.weights.names().count()
        )
    }
}

/// Calls a slot that gives JSON.
macro_rules! json_of {
    ($table:expr, $slot:ident, $($arg:expr),*) => {{
        let mut out = OwnedBytes::EMPTY;
        command!($table, $slot, $($arg,)* &mut out).and_then(|()| {
            // SAFETY: given by the call just made, and used once.
            let bytes = unsafe { out.take() };
            serde_json::from_slice::<Json>(&bytes).map_err(|e| {
                Error::Other(format!("{} gave no JSON: {e}", stringify!($slot)))
            })
        })
    }};
}

impl FamilyUnderTest {
    /// The plugin that the test is linked with. The architecture is the best of its own probe.
    pub fn this_plugin(config: Json) -> Result<Self> {
        // SAFETY: the table lives as long as the process.
        unsafe { Self::from_table(crate::plugin::family_table(), config) }
    }

    /// A family by its table.
    ///
    /// # Safety
    /// `table` must point to a family table of this ABI major that lives as long as the value and
    /// the models loaded from it.
    pub unsafe fn from_table(table: *const FamilyTable, config: Json) -> Result<Self> {
        // SAFETY: forwarded to the caller.
        let table = unsafe { FamilyTable::import(table) };
        let config = config.to_string();
        let probe = json_of!(&table, probe, Str::new(&config))?;
        let best = probe
            .get(0)
            .filter(|best| best.get("score").and_then(Json::as_u64) > Some(0));
        let arch = best
            .and_then(|best| best.get("arch"))
            .and_then(Json::as_str);
        let arch = arch
            .ok_or_else(|| Error::Other(format!("no architecture fits, the probe says {probe}")))?
            .to_owned();
        let desc = json_of!(&table, describe, Str::new(&arch), Str::new(&config))?;
        let desc =
            serde_json::from_value(desc).map_err(|e| Error::Other(format!("description: {e}")))?;
        Ok(Self {
            table,
            arch,
            config,
            desc,
            context_length: 0,
            weights: MapWeights::new(),
            optional: Vec::new(),
        })
    }

    /// Sets the longest sequence the host says it will run.
    #[must_use]
    pub fn with_context_length(mut self, tokens: u32) -> Self {
        self.context_length = tokens;
        self
    }

    /// Adds a tensor that a checkpoint may have and need not, such as a bias. Before `filled`.
    #[must_use]
    pub fn with_tensor(mut self, name: &str, shape: &[i64]) -> Self {
        self.weights.declare(name, DType::F32, shape);
        self.optional.push(name.to_owned());
        self
    }

    /// Uses these weights instead of random ones.
    #[must_use]
    pub fn with_weights(mut self, weights: MapWeights) -> Self {
        self.weights = weights;
        self
    }

    /// Finds the tensors the model asks for and fills them with fixed random numbers.
    pub fn filled(mut self, salt: u64) -> Result<Self> {
        let mut weights = core::mem::take(&mut self.weights);
        fill::discover(&self, &mut weights, DType::F32)?;
        fill::fill(&mut weights, salt)?;
        self.weights = weights;
        Ok(self)
    }

    /// Finds the tensors the model asks for and gives them shapes only: configurations of any size
    /// fit. For [`FamilyUnderTest::check_shapes`].
    pub fn shaped(mut self) -> Result<Self> {
        let mut weights = core::mem::take(&mut self.weights);
        fill::discover(&self, &mut weights, DType::BF16)?;
        self.weights = weights;
        Ok(self)
    }

    /// Quantises every matrix that `spec` divides and `wanted` names by its module's path.
    pub fn quantized(
        mut self,
        spec: mlxcel_abi::ops_args::QuantSpec,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let paths: Vec<String> = self
            .weights
            .names()
            .filter_map(|name| name.strip_suffix(".weight"))
            .map(str::to_owned)
            .collect();
        for path in paths {
            let info = self.weights.info(&format!("{path}.weight"));
            let divides = info.is_some_and(|(dtype, shape)| {
                dtype.is_float()
                    && shape.len() >= 2
                    && shape[shape.len() - 1] % i64::from(spec.group_size) == 0
            });
            if divides && wanted(&path) {
                self.weights.quantize(&path, spec)?;
            }
        }
        Ok(self)
    }

    /// What the family says of the configuration.
    pub fn desc(&self) -> &ModelDesc {
        &self.desc
    }

    /// Architecture, as the probe named it.
    pub fn arch(&self) -> &str {
        &self.arch
    }

    /// The weights.
    pub fn weights(&self) -> &MapWeights {
        &self.weights
    }

    /// Loads a model.
    pub fn load(&self, backend: &Backend, compute_dtype: DType) -> Result<LoadedModel> {
        LoadedModel::load(self, &self.weights, backend, compute_dtype)
    }

    /// Runs every check; nothing when all hold, else a text with all that do not.
    pub fn verdict(&self) -> core::result::Result<(), String> {
        let failures: Vec<String> = CHECKS
            .iter()
            .filter_map(|check| Some(format!("{}: {}", check.name, check.run(self).err()?)))
            .collect();
        if failures.is_empty() {
            Ok(())
        } else {
            Err(format!("{}\n{}", self.arch, failures.join("\n")))
        }
    }
}

/// The text of an error for a check's verdict.
fn words<T>(result: Result<T>) -> core::result::Result<T, String> {
    result.map_err(|error| error.to_string())
}

/// The status of an error that came out of a family.
fn code_of(error: &Error) -> mlxcel_abi::Status {
    model::source_of(error).map_or_else(|| error.code(), |source: &AbiError| source.code)
}
