//! Whether this backend can run here, and on what.

use mlxcel_abi::Result;
use mlxcel_backend_mlx::Probe;
use mlxcel_backend_mlx::serde_json::{Map, Value};

fn details() -> Map<String, Value> {
    let mut details = Map::new();
    details.insert(
        "mlx_version".to_owned(),
        Value::from(mlxcel_backend_mlx::mlx_version()),
    );
    details
}

fn refusal(reason: impl Into<String>) -> Probe {
    Probe {
        score: 0,
        reason: reason.into(),
        devices: Vec::new(),
        details: details(),
    }
}

/// Metal is a part of macOS.
#[cfg(not(target_os = "macos"))]
pub(crate) fn probe() -> Result<Probe> {
    Ok(refusal(
        "Metal is a part of macOS, and this is another system",
    ))
}

#[cfg(target_os = "macos")]
pub(crate) use apple::probe;

#[cfg(target_os = "macos")]
mod apple {
    use mlxcel_abi::Result;
    use mlxcel_backend_mlx::serde_json::Value;
    use mlxcel_backend_mlx::{
        DeviceKind, DeviceReport, Probe, device_count, host_memory, properties,
    };

    use super::{details, refusal};

    /// Higher than the processor's.
    const SCORE: u32 = 100;

    pub(crate) fn probe() -> Result<Probe> {
        if device_count(DeviceKind::Gpu)? == 0 {
            return Ok(refusal(
                "MLX finds no Metal device: a virtual machine without one, or a package without mlx.metallib",
            ));
        }
        let facts = properties(DeviceKind::Gpu, 0)?;
        let number = |key: &str| facts.get(key).and_then(Value::as_u64).unwrap_or(0);
        let name = facts
            .get("device_name")
            .and_then(Value::as_str)
            .unwrap_or("Apple GPU")
            .to_owned();
        let mut details = details();
        // What macOS lets a program keep on the device, and what it may wire down.
        for key in [
            "architecture",
            "max_recommended_working_set_size",
            "max_buffer_length",
        ] {
            if let Some(value) = facts.get(key) {
                details.insert(key.to_owned(), value.clone());
            }
        }
        details.insert("preferred_dtype".to_owned(), Value::from("bf16"));
        let (total, free) = host_memory();
        let working_set = number("max_recommended_working_set_size");
        Ok(Probe {
            score: SCORE,
            reason: format!("{name} with Metal"),
            devices: vec![DeviceReport {
                name: "metal".to_owned(),
                description: name,
                // The memory is the machine's; what the device should hold of it is less.
                total_bytes: if working_set > 0 { working_set } else { total },
                free_bytes: free,
            }],
            details,
        })
    }
}

#[cfg(all(test, not(target_os = "macos")))]
mod tests {
    #[test]
    fn other_systems_are_refused_with_a_reason() {
        let probe = super::probe().unwrap();
        assert_eq!(probe.score, 0);
        assert!(probe.reason.contains("macOS"), "{}", probe.reason);
    }
}
