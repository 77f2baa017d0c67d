//! What a probe finds: devices, their memory and properties. Never creates a stream.

use std::path::Path;

use mlxcel_abi::Result;
use serde_json::{Map, Value, json};

use crate::bridge;
use crate::fault::Fault;

/// The two sorts of device that MLX knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// The processor.
    Cpu,
    /// Metal, CUDA or ROCm, whichever MLX was built for.
    Gpu,
}

impl DeviceKind {
    pub(crate) const fn code(self) -> u32 {
        match self {
            Self::Cpu => 0,
            Self::Gpu => 1,
        }
    }
}

/// One device of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceReport {
    /// What `open` takes.
    pub name: String,
    /// What a person reads.
    pub description: String,
    /// Memory of the device, 0 when unknown.
    pub total_bytes: u64,
    /// Memory that is free now, 0 when unknown.
    pub free_bytes: u64,
}

/// Answer of a probe.
#[derive(Debug, Clone)]
pub struct Probe {
    /// 0: cannot run here; higher is preferred.
    pub score: u32,
    /// Why the score is what it is.
    pub reason: String,
    /// Devices in MLX's order.
    pub devices: Vec<DeviceReport>,
    /// Whatever else a bug report should hold.
    pub details: Map<String, Value>,
}

impl Probe {
    pub(crate) fn to_json(&self) -> Value {
        let devices: Vec<Value> = self
            .devices
            .iter()
            .map(|device| {
                json!({
                    "name": device.name,
                    "description": device.description,
                    "total_bytes": device.total_bytes,
                    "free_bytes": device.free_bytes,
                })
            })
            .collect();
        json!({ "score": self.score, "reason": self.reason, "devices": devices, "details": self.details })
    }
}

/// Devices of a kind that this MLX can use.
pub fn device_count(kind: DeviceKind) -> Result<i32> {
    bridge::device_count(kind.code()).map_err(|error| Fault::from(error).named("device_count"))
}

/// MLX's own description of a device.
pub fn properties(kind: DeviceKind, index: i32) -> Result<Map<String, Value>> {
    let facts = bridge::device_facts(kind.code(), index)
        .map_err(|error| Fault::from(error).named("properties"))?;
    let value = |fact: &bridge::DeviceFact| {
        if fact.text.is_empty() {
            Value::from(fact.number)
        } else {
            Value::from(fact.text.clone())
        }
    };
    let mut facts: Vec<(String, Value)> = facts
        .iter()
        .map(|fact| (fact.key.clone(), value(fact)))
        .collect();
    facts.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(facts.into_iter().collect())
}

/// Total and available bytes of the machine's memory, within the limit of the control group this
/// process runs in; 0 where unknown.
pub fn host_memory() -> (u64, u64) {
    if cfg!(target_os = "linux") {
        let read = |path: &str| std::fs::read_to_string(Path::new(path)).unwrap_or_default();
        let limit = |path: &str| read(path).trim().parse::<u64>().ok();
        let group = limit("/sys/fs/cgroup/memory.max").zip(limit("/sys/fs/cgroup/memory.current"));
        return linux_memory(&read("/proc/meminfo"), group);
    }
    let total = properties(DeviceKind::Cpu, 0)
        .ok()
        .and_then(|facts| facts.get("total_memory")?.as_u64())
        .unwrap_or(0);
    (total, 0)
}

fn linux_memory(meminfo: &str, group: Option<(u64, u64)>) -> (u64, u64) {
    let kibibytes = |key: &str| {
        let line = meminfo
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let bytes = |key: &str| kibibytes(key).unwrap_or(0).saturating_mul(1024);
    let (total, available) = (bytes("MemTotal"), bytes("MemAvailable"));
    match group {
        Some((limit, used)) if limit < total => (limit, available.min(limit.saturating_sub(used))),
        _ => (total, available),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str =
        "MemTotal:       16000 kB\nMemFree:         100 kB\nMemAvailable:    8000 kB\n";

    #[test]
    fn memory_is_that_of_the_machine_or_of_the_group() {
        assert_eq!(linux_memory(MEMINFO, None), (16_384_000, 8_192_000));
        assert_eq!(
            linux_memory(MEMINFO, Some((1_000_000, 400_000))),
            (1_000_000, 600_000)
        );
        assert_eq!(
            linux_memory(MEMINFO, Some((u64::MAX, 1))),
            (16_384_000, 8_192_000)
        );
        assert_eq!(linux_memory("", None), (0, 0));
    }

    #[test]
    fn a_probe_is_the_documented_json() {
        let probe = Probe {
            score: 10,
            reason: "always there".into(),
            devices: vec![DeviceReport {
                name: "cpu".into(),
                description: "a processor".into(),
                total_bytes: 2,
                free_bytes: 1,
            }],
            details: Map::new(),
        };
        assert_eq!(
            probe.to_json().to_string(),
            r#"{"score":10,"reason":"always there","devices":[{"name":"cpu","description":"a processor","total_bytes":2,"free_bytes":1}],"details":{}}"#
        );
    }
}
