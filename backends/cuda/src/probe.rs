//! Whether this backend can run here, and on what.

use mlxcel_abi::Result;
use mlxcel_backend_mlx::serde_json::{Map, Value, json};
use mlxcel_backend_mlx::{DeviceKind, DeviceReport, Probe, properties};

use crate::driver::Driver;

/// Higher than the processor's.
const SCORE: u32 = 100;
/// Oldest release of CUDA that a driver must have, in the driver's own notation. MLX is built for 12 and 13; its library says
/// by itself when it finds neither.
const LEAST_CUDA: i32 = 12_000;
/// Rows of a step of prompts. With 512, weights of experts are unpacked for 32 rows each, and plain products reach three quarters
/// of what they do with 2,048.
const STEP_ROWS: u32 = 2048;

/// Says which devices a process sees, by numbers or identifiers.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// What that variable says of the one device that this process sees as number `index`.
fn visible_as(index: usize, given: Option<&str>) -> String {
    let listed = given.and_then(|given| given.split(',').nth(index));
    listed.map_or_else(|| index.to_string(), |own| own.trim().to_owned())
}

/// Which of the devices can use each other's memory, which is how sums over ranks are added.
fn reach(driver: &Driver, count: i32) -> Result<&'static str> {
    let (mut some, mut all) = (false, true);
    for device in 0..count {
        for other in (0..count).filter(|other| *other != device) {
            let reaches = driver.reaches(device, other)?;
            some |= reaches;
            all &= reaches;
        }
    }
    Ok(match (some, all) {
        (_, true) => "between all devices",
        (true, false) => "between some devices",
        (false, false) => "between no devices",
    })
}

fn refusal(reason: String, details: Map<String, Value>) -> Probe {
    Probe {
        score: 0,
        reason,
        devices: Vec::new(),
        details,
    }
}

/// Answers without making a stream or a context of ours.
pub(crate) fn probe() -> Result<Probe> {
    let mut details = Map::new();
    details.insert(
        "mlx_version".to_owned(),
        Value::from(mlxcel_backend_mlx::mlx_version()),
    );
    let driver = match Driver::get() {
        Ok(driver) => driver,
        Err(error) => return Ok(refusal(error.message, details)),
    };
    let cuda = driver.cuda_version()?;
    let written = format!("{}.{}", cuda / 1000, cuda % 1000 / 10);
    details.insert(
        "driver_cuda_version".to_owned(),
        Value::from(written.clone()),
    );
    if cuda < LEAST_CUDA {
        let least = format!("{}.{}", LEAST_CUDA / 1000, LEAST_CUDA % 1000 / 10);
        return Ok(refusal(
            format!(
                "the driver knows CUDA {written}, {least} or newer is needed: update NVIDIA's driver"
            ),
            details,
        ));
    }
    let count = driver.devices()?;
    let known = mlxcel_backend_mlx::device_count(DeviceKind::Gpu)?;
    if count == 0 || known == 0 {
        return Ok(refusal(
            format!("the driver shows {count} devices and MLX {known}"),
            details,
        ));
    }
    let mut devices = Vec::new();
    let mut alone = Vec::new();
    let visible = std::env::var(VISIBLE).ok();
    for index in 0..count.min(known) {
        alone.push(json!({ VISIBLE: visible_as(index as usize, visible.as_deref()) }));
        let facts = properties(DeviceKind::Gpu, index)?;
        let text = |key: &str| facts.get(key).and_then(Value::as_str).unwrap_or_default();
        let number = |key: &str| facts.get(key).and_then(Value::as_u64).unwrap_or(0);
        let (major, minor) = (
            number("compute_capability_major"),
            number("compute_capability_minor"),
        );
        devices.push(DeviceReport {
            name: format!("cuda:{index}"),
            description: format!(
                "{}, compute capability {major}.{minor}",
                text("device_name")
            ),
            total_bytes: number("total_memory"),
            free_bytes: number("free_memory"),
        });
        if index == 0 {
            details.insert(
                "compute_capability".to_owned(),
                Value::from(format!("{major}.{minor}")),
            );
            details.insert(
                "kernels".to_owned(),
                Value::from(if major >= 8 { "ours" } else { "MLX's" }),
            );
            // Older devices have no bf16 arithmetic.
            let dtype = if major >= 8 { "bf16" } else { "f16" };
            details.insert("preferred_dtype".to_owned(), Value::from(dtype));
        }
    }
    if count > 1 {
        details.insert("peer_memory".to_owned(), Value::from(reach(driver, count)?));
    }
    details.insert("asynchronous".to_owned(), Value::from(true));
    details.insert("prefill_rows".to_owned(), Value::from(STEP_ROWS));
    // MLX's NCCL layer takes the device whose number is that of the rank among those that a process sees.
    details.insert("alone".to_owned(), Value::from(alone));
    Ok(Probe {
        score: SCORE,
        reason: format!(
            "{} with CUDA {written}",
            devices
                .first()
                .map_or("", |device| device.description.as_str())
        ),
        devices,
        details,
    })
}

#[cfg(test)]
mod tests {
    use super::visible_as;

    #[test]
    fn a_device_is_named_as_the_process_was_told_of_it() {
        assert_eq!(visible_as(1, None), "1");
        assert_eq!(visible_as(1, Some("3, 5")), "5");
        assert_eq!(visible_as(0, Some("GPU-1a2b")), "GPU-1a2b");
    }
}
