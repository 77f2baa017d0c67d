//! What the runs of goldens measured, kept beside them in `result.json`: `cargo xtask families` makes the
//! table of architectures from these files, so that a claim without a run does not appear.
//!
//! With `MLXCEL_RECORD_GOLDEN=1` a run writes its file. Without, it compares: the architecture and the
//! format must be those recorded, and the error no worse than on another kind of processor.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "support of tests: a failure here is a failed test"
)]

use std::path::Path;

use serde_json::{Value, json};

/// Set to 1 to write results.
const RECORD: &str = "MLXCEL_RECORD_GOLDEN";
/// Kernels of another instruction set sum in another order.
const SLACK: f32 = 8.0;
/// Below this an error is rounding of the last place.
const ROUNDING: f32 = 2e-6;

/// Records or compares one run.
pub(crate) fn settle(folder: &Path, arch: &str, error: f32) {
    let path = folder.join("result.json");
    let format = format_of(folder);
    let old: Option<Value> = std::fs::read(&path)
        .ok()
        .map(|text| serde_json::from_slice(&text).unwrap());
    let recorded = old
        .as_ref()
        .and_then(|old| old["max_logit_error"].as_f64())
        .map(|error| error as f32);
    if std::env::var_os(RECORD).is_some_and(|value| value == "1") {
        // Several tests may run one golden with different prompts: the worst of them counts.
        let worst = error.max(recorded.unwrap_or(0.0));
        let shown: f64 = format!("{worst:.1e}").parse().unwrap();
        let result = json!({"architecture": arch, "format": format, "max_logit_error": shown});
        let text = serde_json::to_string_pretty(&result).unwrap();
        std::fs::write(&path, text + "\n").unwrap();
        return;
    }
    let Some(old) = old else {
        // `cargo xtask families --check` lists goldens without a result.
        return;
    };
    let name = folder.display();
    assert_eq!(old["architecture"], arch, "{name}: result.json");
    assert_eq!(old["format"], format.as_str(), "{name}: result.json");
    let limit = recorded.unwrap_or(0.0) * SLACK + ROUNDING;
    assert!(
        error <= limit,
        "{name}: the error is {error:.1e}, result.json allows {limit:.1e}; if that is meant, run with {RECORD}=1"
    );
}

/// The form of the weights, in words of the table.
fn format_of(folder: &Path) -> String {
    if folder.join("model.gguf").exists() {
        return "GGUF".to_owned();
    }
    let config = std::fs::read(folder.join("config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let own = &config["quantization"];
    if own.is_object() {
        let mixed = own.as_object().unwrap().values().any(Value::is_object);
        let mixed = if mixed { ", mixed" } else { "" };
        return match own["mode"].as_str().unwrap_or("affine") {
            "affine" => format!("MLX {}-bit{mixed}", own["bits"]),
            mode => format!("MLX {mode}{mixed}"),
        };
    }
    let foreign = &config["quantization_config"];
    if foreign["quant_method"] == "fp8" && config["expert_dtype"] == "fp4" {
        return "fp8 with experts in fp4".to_owned();
    }
    if foreign["quant_method"] == "fp8" {
        return match foreign["weight_block_size"].is_null() {
            true => "fp8, a scale a matrix".to_owned(),
            false => "fp8, a scale a block".to_owned(),
        };
    }
    match &config["quantization_config"]["quant_method"] {
        Value::Null => format!(
            "safetensors {}",
            dtype_of(&folder.join("model.safetensors"))
        ),
        other => panic!("{}: method {other}", folder.display()),
    }
}

/// Type of the first matrix of floats in a safetensors file.
fn dtype_of(file: &Path) -> String {
    let bytes = std::fs::read(file).unwrap();
    let length = u64::from_le_bytes(bytes.get(..8).unwrap().try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(bytes.get(8..8 + length).unwrap()).unwrap();
    let tensors = header.as_object().unwrap().values();
    let is_float = |tensor: &&Value| {
        let name = tensor["dtype"].as_str().unwrap_or_default();
        name.starts_with('F') || name.starts_with("BF")
    };
    let is_matrix = |tensor: &&Value| {
        tensor["shape"]
            .as_array()
            .is_some_and(|shape| shape.len() >= 2)
    };
    let first = tensors.filter(is_matrix).find(is_float).unwrap();
    first["dtype"].as_str().unwrap().to_owned()
}
