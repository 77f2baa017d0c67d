//! Whether this backend can run here, and on what.

use mlxcel_abi::Result;
use mlxcel_backend_mlx::serde_json::{Map, Value, json};
use mlxcel_backend_mlx::{DeviceKind, DeviceReport, Probe, properties};

use crate::driver::Driver;

/// Higher than the processor's.
const SCORE: u32 = 100;
/// MLX's builds by the compiler that they are linked to, with the oldest CUDA that a driver must have for them, in the driver's own
/// notation: releases of one major work with every driver of that major.
const BUILDS: [(&str, i32); 2] = [("libnvrtc.so.13", 13_000), ("libnvrtc.so.12", 12_000)];
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

/// A version of CUDA as people write it.
fn release(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn devices_text(count: i32) -> String {
    match count {
        1 => "1 device".to_owned(),
        count => format!("{count} devices"),
    }
}

/// The oldest CUDA that MLX's library in this package works with, which is told by what it is linked to.
fn built_for() -> i32 {
    let found = BUILDS.iter().find(|(library, _)| is_open(library));
    found.or(BUILDS.last()).map_or(0, |(_, least)| *least)
}

/// Whether this process has the library open already. Opens nothing.
fn is_open(library: &str) -> bool {
    use libloading::os::unix::{Library, RTLD_LAZY};
    /// `RTLD_NOLOAD`.
    const ONLY_IF_OPEN: core::ffi::c_int = if cfg!(target_os = "linux") { 0x4 } else { 0x10 };
    // SAFETY: nothing is loaded, so no constructor runs.
    unsafe { Library::open(Some(library), RTLD_LAZY | ONLY_IF_OPEN) }.is_ok()
}

fn too_old(driver: i32, least: i32) -> String {
    let mut text = format!(
        "NVIDIA's driver knows CUDA {}, and the build of MLX in this package is for CUDA {}: update the driver",
        release(driver),
        release(least)
    );
    let builds = BUILDS.iter();
    let fitting = builds
        .map(|(_, least)| *least)
        .find(|least| *least <= driver);
    if let Some(fitting) = fitting {
        text.push_str(&format!(
            ", or take this plugin's package for CUDA {}",
            fitting / 1000
        ));
    }
    text
}

/// What to look at when a driver is there and no device.
fn where_to_look(visible: Option<&str>) -> String {
    let visible = match visible {
        None => format!("{VISIBLE} is not set"),
        Some("") => format!("{VISIBLE} is empty, which hides all: unset it"),
        Some(given) => format!("{VISIBLE} is {given}: does it name devices that there are?"),
    };
    format!(
        "`nvidia-smi -L` says which the driver finds; a container has to be started with them, as with docker run --gpus all; {visible}"
    )
}

/// Why a driver that is there does not start, and what to do: `cuInit` says no more than a name.
pub(crate) fn not_started(code: i32, said: &str) -> String {
    let visible = std::env::var(VISIBLE).ok();
    let advice = match code {
        34 => "this libcuda.so.1 is the stub that programs are linked with: take its folder out of LD_LIBRARY_PATH".to_owned(),
        35 | 803 => "its library and its kernel module are of different versions: after an update the machine has to be restarted, and a container must have no libcuda.so.1 of its own".to_owned(),
        100 | 101 => where_to_look(visible.as_deref()),
        802 => "devices that are joined by NVSwitch need nvidia-fabricmanager: is it running?".to_owned(),
        _ => format!("{}; the system's log may say more (dmesg)", where_to_look(visible.as_deref())),
    };
    format!("NVIDIA's driver does not start ({said}): {advice}")
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
    let written = release(cuda);
    details.insert(
        "driver_cuda_version".to_owned(),
        Value::from(written.clone()),
    );
    let least = built_for();
    if cuda < least {
        return Ok(refusal(too_old(cuda, least), details));
    }
    let visible = std::env::var(VISIBLE).ok();
    let count = driver.devices()?;
    if count < 1 {
        let found = format!("NVIDIA's driver is here (CUDA {written}) and shows no device");
        return Ok(refusal(
            format!("{found}: {}", where_to_look(visible.as_deref())),
            details,
        ));
    }
    let known = mlxcel_backend_mlx::device_count(DeviceKind::Gpu)?;
    if known < 1 {
        return Ok(refusal(
            format!(
                "NVIDIA's driver (CUDA {written}) shows {}, and CUDA's run time in MLX none: its build needs a driver for CUDA {}; {}",
                devices_text(count),
                release(least),
                where_to_look(visible.as_deref())
            ),
            details,
        ));
    }
    let mut devices = Vec::new();
    let mut alone = Vec::new();
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
    use super::{too_old, visible_as, where_to_look};

    #[test]
    fn a_device_is_named_as_the_process_was_told_of_it() {
        assert_eq!(visible_as(1, None), "1");
        assert_eq!(visible_as(1, Some("3, 5")), "5");
        assert_eq!(visible_as(0, Some("GPU-1a2b")), "GPU-1a2b");
    }

    #[test]
    fn a_driver_that_is_too_old_is_told_with_both_versions() {
        let text = too_old(12_040, 13_000);
        assert!(text.contains("CUDA 12.4"), "{text}");
        assert!(
            text.contains(
                "for CUDA 13.0: update the driver, or take this plugin's package for CUDA 12"
            ),
            "{text}"
        );
        assert!(too_old(11_080, 12_000).ends_with("for CUDA 12.0: update the driver"));
    }

    #[test]
    fn a_machine_without_devices_says_what_hides_them() {
        assert!(where_to_look(None).ends_with("CUDA_VISIBLE_DEVICES is not set"));
        assert!(where_to_look(Some("")).contains("hides all"));
        assert!(where_to_look(Some("7")).contains("CUDA_VISIBLE_DEVICES is 7"));
    }
}
