//! How much memory there is to use, and the guard that keeps a model from being loaded into too little.

use std::fs;

use crate::engine::estimate::{DEFAULT_HEADROOM_FACTOR, EstimateInputs, MemoryEstimate, estimate};
use crate::engine::load::prefill_rows;
use crate::engine::schedule::AskedBudget;
use crate::engine::{
    KvType, KvTypes, LoadOptions, OpenedModel, Precision, checkpoint_for, preferred_dtype,
};
use crate::plugin::{DType, SelectedBackend};

use super::error::CliError;
use super::table::bytes_text;

/// Variables with the budget, the product's own first.
const LIMITS: [&str; 2] = ["MLXCEL_MEMORY_LIMIT", "MEMORY_LIMIT"];

/// Variable with the factor of the headroom.
const FACTOR: &str = "MLXCEL_HEADROOM_FACTOR";

/// Tokens that are planned for when nobody says how long the conversation will be.
pub const PLANNED_TOKENS: u64 = 8192;

/// What may be used, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Budget {
    /// `None` when nothing on this system tells.
    pub bytes: Option<u64>,
    /// Where the figure comes from.
    pub origin: String,
}

/// Figures of the machine, from the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MachineMemory {
    /// All of it.
    pub total_bytes: Option<u64>,
    /// Free, or freed on demand.
    pub available_bytes: Option<u64>,
    /// What the control group still allows, where it has a limit.
    pub group_bytes: Option<u64>,
}

impl MachineMemory {
    /// Reads the figures; on systems without `/proc` there are none.
    pub fn read() -> Self {
        let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let group = |file: &str| {
            let text = fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?;
            text.trim().parse::<u64>().ok()
        };
        let group_bytes = group("memory.max")
            .map(|limit| limit.saturating_sub(group("memory.current").unwrap_or_default()));
        Self {
            total_bytes: meminfo(&info, "MemTotal:"),
            available_bytes: meminfo(&info, "MemAvailable:"),
            group_bytes,
        }
    }

    /// What of it may be used.
    pub fn budget(&self) -> Budget {
        match (self.available_bytes, self.group_bytes) {
            (Some(available), Some(group)) if group < available => Budget {
                bytes: Some(group),
                origin: "the control group's limit".to_owned(),
            },
            (Some(available), _) => Budget {
                bytes: Some(available),
                origin: "available memory".to_owned(),
            },
            (None, _) => Budget {
                bytes: None,
                origin: "this system does not tell".to_owned(),
            },
        }
    }
}

/// A line of `/proc/meminfo`, which counts in KiB.
fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(key))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The budget of this machine, or what a variable says.
pub fn host_budget() -> Result<Budget, CliError> {
    Ok(limit_from_environment()?.unwrap_or_else(|| MachineMemory::read().budget()))
}

/// The budget of the device that a model goes to, where the backend tells; else that of the machine. A model that is
/// split has one of several devices for each rank, where there are as many.
pub fn device_budget(backend: &SelectedBackend, ranks: usize) -> Result<Budget, CliError> {
    if let Some(limit) = limit_from_environment()? {
        return Ok(limit);
    }
    if let (2.., Some(devices)) = (ranks, backend.report.devices.get(..ranks)) {
        return Ok(Budget {
            bytes: Some(devices.iter().map(|device| device.free_bytes).sum()),
            origin: format!("free memory of {ranks} devices"),
        });
    }
    match backend
        .report
        .devices
        .first()
        .filter(|device| device.free_bytes > 0)
    {
        Some(device) => Ok(Budget {
            bytes: Some(device.free_bytes),
            origin: format!("free memory of device {}", device.name),
        }),
        None => Ok(MachineMemory::read().budget()),
    }
}

fn limit_from_environment() -> Result<Option<Budget>, CliError> {
    for variable in LIMITS {
        let Some(text) = std::env::var_os(variable).filter(|text| !text.is_empty()) else {
            continue;
        };
        let bytes = text.to_str().and_then(parse_bytes).ok_or_else(|| {
            CliError::usage(format!(
                "{variable} is {text:?}: expected bytes, or a number with K, M, G or T such as 12G"
            ))
        })?;
        return Ok(Some(Budget {
            bytes: Some(bytes),
            origin: variable.to_owned(),
        }));
    }
    Ok(None)
}

/// `1500`, `12G`, `1.5GiB`: suffixes are powers of 1024.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at_checked(digits)?;
    let power = match suffix.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 1,
        "m" | "mb" | "mib" => 2,
        "g" | "gb" | "gib" => 3,
        "t" | "tb" | "tib" => 4,
        _ => return None,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(1024_u64.checked_pow(power)?);
    }
    let value = number.parse::<f64>().ok()? * 1024_f64.powi(power as i32);
    (value.is_finite() && value >= 0.0 && value < u64::MAX as f64).then_some(value as u64)
}

/// The factor of the headroom.
pub fn headroom_factor() -> Result<f64, CliError> {
    match std::env::var(FACTOR) {
        Ok(text) if !text.is_empty() => match text.parse::<f64>() {
            Ok(factor) if factor.is_finite() && factor >= 1.0 => Ok(factor),
            _ => Err(CliError::usage(format!(
                "{FACTOR} is {text:?}: expected a number from 1, such as 1.2"
            ))),
        },
        Ok(_) | Err(std::env::VarError::NotPresent) => Ok(DEFAULT_HEADROOM_FACTOR),
        Err(error) => Err(CliError::usage(format!("{FACTOR}: {error}"))),
    }
}

/// What a verdict is asked about.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Type of activations; none is what the backend and the checkpoint prefer.
    pub dtype: Option<DType>,
    /// Types of keys and values.
    pub kv_types: KvTypes,
    /// How products are computed, on which the default of `kv_types` depends.
    pub precision: Option<Precision>,
    /// Tokens of each sequence; none is [`PLANNED_TOKENS`], or the model's context if that is less.
    pub tokens: Option<u64>,
    /// Sequences at once.
    pub batch: u64,
    /// Rows of a step.
    pub budget: AskedBudget,
    /// Processes that the model is split over.
    pub ranks: usize,
}

impl Plan {
    /// Of a model that is about to be loaded. Without `--ctx-size` the caches grow with the conversation, so
    /// only [`PLANNED_TOKENS`] of a longer context are counted.
    pub fn of(options: &LoadOptions) -> Self {
        Self {
            dtype: options.dtype,
            kv_types: options.kv_types,
            precision: options.precision,
            tokens: (options.ctx_size > 0).then_some(options.ctx_size as u64),
            batch: 1,
            budget: options.limits.budget,
            ranks: options.ranks.as_ref().map_or(1, |plan| plan.size),
        }
    }
}

/// The estimate for a model, beside what there is: what `inspect` shows and what the guard of `run`,
/// `generate` and `serve` goes by.
pub struct Verdict {
    /// The parts of the estimate.
    pub estimate: MemoryEstimate,
    /// What may be used.
    pub budget: Budget,
    /// Tokens that were counted.
    pub tokens: u64,
    /// Factor of the headroom.
    pub headroom_factor: f64,
    /// Type of activations.
    pub dtype: DType,
    /// Type of keys and values.
    pub kv_type: KvType,
}

impl Verdict {
    /// Estimates with the types that the engine would use. Without a backend, where none runs here, types are
    /// those that were asked for or f16, and the budget is the machine's.
    pub fn new(
        opened: &OpenedModel,
        backend: Option<&SelectedBackend>,
        plan: Plan,
    ) -> Result<Self, CliError> {
        let preferred = || backend.map_or(DType::F16, |backend| preferred_dtype(opened, backend));
        let dtype = plan.dtype.unwrap_or_else(preferred);
        let kv_type = match backend {
            Some(backend) => plan
                .kv_types
                .resolve(dtype, plan.precision, backend, &opened.desc)?,
            None => plan.kv_types.asked(dtype)?,
        };
        let packed = match backend {
            Some(backend) => checkpoint_for(opened, backend, dtype)?,
            None => None,
        };
        let checkpoint = packed.as_ref().unwrap_or(&opened.checkpoint);
        let context = opened.desc.context_length as u64;
        let tokens = plan.tokens.unwrap_or(PLANNED_TOKENS.min(context));
        let headroom_factor = headroom_factor()?;
        let inputs = EstimateInputs {
            weights_bytes: checkpoint.weights_bytes(),
            tokens,
            batch: plan.batch,
            step_rows: plan.budget.or(backend.and_then(prefill_rows)).rows as u64,
            kv_type,
            activation_element_bytes: dtype.size_bytes() as u64,
            headroom_factor,
        };
        Ok(Self {
            estimate: estimate(&opened.desc, inputs),
            budget: match backend {
                Some(backend) => device_budget(backend, plan.ranks)?,
                None => host_budget()?,
            },
            tokens,
            headroom_factor,
            dtype,
            kv_type,
        })
    }

    /// Whether it fits; none where the budget is unknown.
    pub fn fits(&self) -> Option<bool> {
        let need_bytes = self.estimate.total_bytes;
        self.budget.bytes.map(|budget| need_bytes <= budget)
    }

    /// Refuses what does not fit; lets through where the budget is unknown.
    pub fn check(&self) -> Result<(), CliError> {
        match (self.fits(), self.budget.bytes) {
            (Some(false), Some(budget_bytes)) => Err(CliError::DoesNotFit {
                need_bytes: self.estimate.total_bytes,
                budget_bytes,
                origin: self.budget.origin.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// What `--estimate-memory` writes: one line.
    pub fn text(&self) -> String {
        let budget = self
            .budget
            .bytes
            .map_or_else(|| "unknown".to_owned(), bytes_text);
        format!(
            "memory: {} for {} tokens in {}{} (weights {}, caches {}, activations {}, headroom {}); budget {budget} ({})",
            bytes_text(self.estimate.total_bytes),
            self.tokens,
            self.dtype.name(),
            beside(self.dtype, self.kv_type),
            bytes_text(self.estimate.weights_bytes),
            bytes_text(self.estimate.kv_bytes_total),
            bytes_text(self.estimate.activation_bytes),
            bytes_text(self.estimate.headroom_bytes),
            self.budget.origin
        )
    }
}

/// What is said of the type of keys and values behind that of the activations: nothing where it is the same.
pub fn beside(dtype: DType, kv_type: KvType) -> String {
    if kv_type == dtype.into() {
        return String::new();
    }
    format!(" with {} keys and values", kv_type.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_a_suffix() {
        let read = |text| parse_bytes(text);
        assert_eq!(read("1500"), Some(1500));
        assert_eq!(read("12G"), Some(12 << 30));
        assert_eq!(read("1.5 GiB"), Some(3 << 29));
        assert_eq!(read("2kb"), Some(2048));
        for wrong in ["", "G", "-1", "1e9", "12X", "99999999T", "1.2.3", "nan"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_smaller_of_machine_and_group_counts() {
        let info = "MemTotal:       16384 kB\nMemFree: 1 kB\nMemAvailable:    8192 kB\n";
        assert_eq!(meminfo(info, "MemAvailable:"), Some(8 << 20));
        let machine = |group_bytes| MachineMemory {
            total_bytes: Some(16 << 20),
            available_bytes: meminfo(info, "MemAvailable:"),
            group_bytes,
        };
        assert_eq!(machine(None).budget().bytes, Some(8 << 20));
        assert_eq!(machine(Some(9 << 20)).budget().bytes, Some(8 << 20));
        assert_eq!(machine(Some(1 << 20)).budget().bytes, Some(1 << 20));
        assert_eq!(MachineMemory::default().budget().bytes, None);
    }
}
