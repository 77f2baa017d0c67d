//! The block types against values made by the `gguf` and `mlx` Python packages
//! (`tests/golden/gguf/make.py`).

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed expectation is a failed test"
)]

use mlxcel_registry::checkpoint::gguf::{
    GROUP_SIZE, GgmlType, affine_factors, dequantize, pack_codes, packed_bits,
};
use serde_json::Value;

fn golden() -> Vec<Value> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/golden/gguf/blocks.json"
    );
    let text = std::fs::read(path).expect("golden vectors");
    let document: Value = serde_json::from_slice(&text).expect("golden vectors");
    document["types"]
        .as_array()
        .expect("a list of types")
        .clone()
}

fn bytes(entry: &Value, key: &str) -> Vec<u8> {
    let hex = entry[key].as_str().expect("hex");
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
    (0..hex.len()).step_by(2).map(byte).collect()
}

fn floats(entry: &Value, key: &str) -> Vec<f32> {
    bytes(entry, key)
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

fn ggml_type(entry: &Value) -> GgmlType {
    let name = entry["type"].as_str().expect("a name");
    GgmlType::ALL
        .into_iter()
        .find(|ty| ty.to_string() == name)
        .expect("a supported type")
}

#[test]
fn every_type_is_covered() {
    let covered: Vec<GgmlType> = golden().iter().map(ggml_type).collect();
    for ty in GgmlType::ALL {
        assert!(covered.contains(&ty), "{ty}");
    }
}

#[test]
fn values_equal_those_of_gguf() {
    for entry in golden() {
        let ty = ggml_type(&entry);
        let expected = floats(&entry, "values");
        let mut values = vec![f32::NAN; expected.len()];
        dequantize(ty, &bytes(&entry, "blocks"), &mut values);
        assert_eq!(values, expected, "{ty}");
    }
}

#[test]
fn packed_parts_equal_those_that_mlx_reads() {
    for entry in golden() {
        let (ty, affine) = (ggml_type(&entry), &entry["affine"]);
        assert_eq!(
            affine["bits"].as_u64().map(|bits| bits as u32),
            packed_bits(ty),
            "{ty}"
        );
        if affine.is_null() {
            continue;
        }
        let blocks = bytes(&entry, "blocks");
        let expected = bytes(affine, "weight");
        let mut codes = vec![0u8; expected.len()];
        pack_codes(ty, &blocks, &mut codes);
        assert_eq!(codes, expected, "{ty}");

        let groups = floats(&entry, "values").len() / GROUP_SIZE;
        let (mut scales, mut biases) = (vec![0.0; groups], vec![0.0; groups]);
        affine_factors(ty, &blocks, &mut scales, &mut biases);
        assert_eq!(scales, floats(affine, "scales"), "{ty}");
        assert_eq!(biases, floats(affine, "biases"), "{ty}");
    }
}
