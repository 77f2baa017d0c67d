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

/// AMD's run time, opened to see whether it is there.
fn run_time() -> core::result::Result<(), String> {
    // SAFETY: the library is made to be opened; its constructors are its own.
    unsafe { libloading::Library::new("libamdhip64.so") }
        .map(drop)
        .map_err(|error| {
            use core::error::Error as _;
            // libloading keeps what the linker said in the error's source.
            let said = error.source().map(ToString::to_string);
            let said = said.unwrap_or_else(|| error.to_string());
            format!("AMD's ROCm is not installed (libamdhip64.so is not there): {said}")
        })
}

/// Without MLX's ROCm branch in it, this plugin cannot compute on the device.
#[cfg(not(feature = "mlx-source"))]
pub(crate) fn probe() -> Result<Probe> {
    let built = "this plugin was built without MLX's ROCm branch: build it from source (backends/rocm/README.md)";
    Ok(refusal(match run_time() {
        Ok(()) => built.to_owned(),
        Err(missing) => format!("{missing}; {built}"),
    }))
}

#[cfg(feature = "mlx-source")]
pub(crate) fn probe() -> Result<Probe> {
    use mlxcel_backend_mlx::{DeviceKind, DeviceReport, device_count, properties};

    /// Higher than the processor's.
    const SCORE: u32 = 100;

    if let Err(missing) = run_time() {
        return Ok(refusal(missing));
    }
    let count = device_count(DeviceKind::Gpu)?;
    if count == 0 {
        return Ok(refusal("MLX finds no AMD device that ROCm supports"));
    }
    let mut devices = Vec::new();
    for index in 0..count {
        let facts = properties(DeviceKind::Gpu, index)?;
        let text = |key: &str| facts.get(key).and_then(Value::as_str).unwrap_or_default();
        let number = |key: &str| facts.get(key).and_then(Value::as_u64).unwrap_or(0);
        devices.push(DeviceReport {
            name: format!("rocm:{index}"),
            description: format!("{}, {}", text("device_name"), text("architecture")),
            total_bytes: number("total_memory"),
            free_bytes: number("free_memory"),
        });
    }
    let mut details = details();
    details.insert("preferred_dtype".to_owned(), Value::from("bf16"));
    Ok(Probe {
        score: SCORE,
        reason: devices
            .first()
            .map(|device| device.description.clone())
            .unwrap_or_default(),
        devices,
        details,
    })
}

#[cfg(all(test, not(feature = "mlx-source")))]
mod tests {
    #[test]
    fn a_build_without_the_branch_says_what_to_do() {
        let probe = super::probe().unwrap();
        assert_eq!(probe.score, 0);
        assert!(probe.reason.contains("README"), "{}", probe.reason);
    }
}
