//! Which tensors hold values that are no numbers: damaged weights load like any others and give no text.
//!
//! Reads every value once. Owns what "not finite" is in each type. Must not know any architecture.

use half::{bf16, f16};

use super::dtype::DType;
use super::error::CheckpointError;
use super::open::Checkpoint;
use super::quant::QuantMode;

/// A tensor with values that are not finite.
#[derive(Debug, Clone, PartialEq)]
pub struct NotFinite {
    /// Its name.
    pub tensor: String,
    /// How many values it has.
    pub n_values: usize,
    /// How many of them are not finite.
    pub n_bad: usize,
    /// The first of these, in row-major order.
    pub first: usize,
    /// What it is: NaN or an infinity.
    pub value: f32,
}

impl Checkpoint {
    /// Every tensor with values that are not finite. Weights that are packed cannot hold such values, their
    /// scales can.
    pub fn not_finite(&self) -> Result<Vec<NotFinite>, CheckpointError> {
        let mut found = Vec::new();
        for name in self.names() {
            let tensor = self.load(name)?;
            let Some(value_of) = reader(tensor.dtype, self.codes_of(name)) else {
                continue;
            };
            let bytes = tensor.bytes.as_slice();
            let values = bytes.chunks_exact(tensor.dtype.size_bytes()).map(value_of);
            let bad = |(_, value): &(usize, f32)| !value.is_finite();
            let mut bad = values.enumerate().filter(bad);
            if let Some((first, value)) = bad.next() {
                found.push(NotFinite {
                    tensor: name.to_owned(),
                    n_values: bytes.len() / tensor.dtype.size_bytes(),
                    n_bad: 1 + bad.count(),
                    first,
                    value,
                });
            }
        }
        Ok(found)
    }

    /// The mode whose scales a tensor is.
    fn codes_of(&self, name: &str) -> Option<QuantMode> {
        let spec = self.quant_for(name.strip_suffix(".scales")?)?;
        Some(spec.mode)
    }
}

/// How a value is read of its bytes; none where every bit pattern is a number.
fn reader(dtype: DType, scales: Option<QuantMode>) -> Option<fn(&[u8]) -> f32> {
    Some(match (dtype, scales) {
        (DType::F32, _) => |b| <[u8; 4]>::try_from(b).map_or(0.0, f32::from_le_bytes),
        (DType::F64, _) => |b| <[u8; 8]>::try_from(b).map_or(0.0, f64::from_le_bytes) as f32,
        (DType::F16, _) => {
            |b| <[u8; 2]>::try_from(b).map_or(0.0, |b| f16::from_le_bytes(b).to_f32())
        }
        (DType::BF16, _) => {
            |b| <[u8; 2]>::try_from(b).map_or(0.0, |b| bf16::from_le_bytes(b).to_f32())
        }
        (DType::U8, Some(QuantMode::Mxfp4 | QuantMode::Mxfp8)) => |b| nan_where(b == [0xff]),
        (DType::U8, Some(QuantMode::Nvfp4)) => |b| nan_where(matches!(b, [0x7f | 0xff])),
        _ => return None,
    })
}

fn nan_where(is_nan: bool) -> f32 {
    if is_nan { f32::NAN } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::checkpoint::testing::{SafetensorsBuilder, TempCheckpoint};

    fn bad(
        weights: &[u8],
        config: serde_json::Value,
    ) -> Vec<(String, usize, usize, usize, String)> {
        let dir = TempCheckpoint::new()
            .file("model.safetensors", weights)
            .json("config.json", &config);
        let found = Checkpoint::open_dir(dir.path())
            .unwrap()
            .not_finite()
            .unwrap();
        let row = |bad: NotFinite| {
            (
                bad.tensor,
                bad.n_values,
                bad.n_bad,
                bad.first,
                bad.value.to_string(),
            )
        };
        found.into_iter().map(row).collect()
    }

    #[test]
    fn every_float_type_is_looked_through() {
        let half = |x: f32| f16::from_f32(x).to_le_bytes();
        let brain = |x: f32| bf16::from_f32(x).to_le_bytes();
        let weights = SafetensorsBuilder::new()
            .f32("a", &[4], &[1.0, f32::INFINITY, 2.0, f32::NAN])
            .tensor("b", DType::F16, &[2], &[half(1.0), half(f32::NAN)].concat())
            .tensor(
                "c",
                DType::BF16,
                &[2],
                &[brain(f32::NEG_INFINITY), brain(0.0)].concat(),
            )
            .f32("fine", &[2], &[f32::MAX, -0.0])
            .tensor("ids", DType::I32, &[1], &[0xff; 4])
            .build();
        let named = |name: &str, n: usize, bad: usize, first: usize, value: &str| {
            (name.to_owned(), n, bad, first, value.to_owned())
        };
        assert_eq!(
            bad(&weights, json!({})),
            [
                named("a", 4, 2, 1, "inf"),
                named("b", 2, 1, 1, "NaN"),
                named("c", 2, 1, 0, "-inf"),
            ]
        );
    }

    #[test]
    fn scales_of_bytes_are_looked_through() {
        let weights = SafetensorsBuilder::new()
            .tensor("w.weight", DType::U32, &[1, 8], &[0xff; 32])
            .tensor("w.scales", DType::U8, &[1, 2], &[0x7f, 0xff])
            .tensor("other", DType::U8, &[1], &[0xff])
            .build();
        let config = json!({"quantization": {"mode": "mxfp4", "bits": 4, "group_size": 32}});
        let found = bad(&weights, config);
        let names: Vec<&str> = found.iter().map(|bad| bad.0.as_str()).collect();
        assert_eq!(names, ["w.scales"]);
        assert_eq!((found[0].3, found[0].4.as_str()), (1, "NaN"));
    }
}
