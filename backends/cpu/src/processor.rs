//! What the processor is: cores and instruction sets.

use std::collections::BTreeSet;

use mlxcel_abi::Result;
use mlxcel_backend_mlx::{DeviceKind, properties};

/// Numbers of cores.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Cores {
    /// Without hyper-threads; the logical number where the system does not tell.
    pub(crate) physical: usize,
    /// That this process may use.
    pub(crate) logical: usize,
}

/// Name and model, as the system has it.
pub(crate) fn name() -> Result<String> {
    let facts = properties(DeviceKind::Cpu, 0)?;
    let name = facts.get("device_name").and_then(|name| name.as_str());
    Ok(name.unwrap_or("processor").to_owned())
}

pub(crate) fn cores() -> Cores {
    let logical = std::thread::available_parallelism().map_or(1, usize::from);
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let physical = physical_cores(&cpuinfo).unwrap_or(logical).min(logical);
    Cores { physical, logical }
}

/// Distinct pairs of package and core, of Linux' table of processors.
fn physical_cores(cpuinfo: &str) -> Option<usize> {
    let mut cores = BTreeSet::new();
    let mut package = "";
    for line in cpuinfo.lines() {
        let Some((key, value)) = line.split_once(':') else {
            continue;
        };
        match key.trim() {
            "physical id" => package = value.trim(),
            "core id" => {
                cores.insert((package, value.trim()));
            }
            _ => {}
        }
    }
    (!cores.is_empty()).then_some(cores.len())
}

macro_rules! detected {
    ($detect:ident: $($feature:tt),*) => {
        [$(($feature, std::arch::$detect!($feature))),*]
            .into_iter()
            .filter_map(|(name, found)| found.then_some(name))
            .collect()
    };
}

/// Instruction sets that matter to numeric code.
#[cfg(target_arch = "x86_64")]
pub(crate) fn features() -> Vec<&'static str> {
    detected!(is_x86_feature_detected: "sse4.2", "avx", "f16c", "fma", "avx2", "avxvnni", "avx512f", "avx512bw", "avx512vnni", "avx512bf16", "avx512fp16")
}

/// Instruction sets that matter to numeric code.
#[cfg(target_arch = "aarch64")]
pub(crate) fn features() -> Vec<&'static str> {
    detected!(is_aarch64_feature_detected: "neon", "fp16", "dotprod", "i8mm", "bf16", "sve", "sve2")
}

/// Instruction sets that matter to numeric code.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) fn features() -> Vec<&'static str> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hyper_threads_are_not_counted_twice() {
        let cpuinfo = "physical id : 0\ncore id : 0\n\nphysical id : 0\ncore id : 1\n\nphysical id : 0\ncore id : 0\n\nphysical id : 1\ncore id : 0\n";
        assert_eq!(physical_cores(cpuinfo), Some(3));
        assert_eq!(physical_cores("processor : 0\n"), None);
    }

    #[test]
    fn there_is_at_least_one_core() {
        let cores = cores();
        assert!(cores.physical >= 1 && cores.physical <= cores.logical);
    }
}
