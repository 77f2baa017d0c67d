//! Quantised weights from a checkpoint, checked against the shape that the layer needs.

use mlxcel_abi::DType;
use mlxcel_abi::kinds::quant;
use mlxcel_abi::ops_args::QuantSpec;

pub use crate::ops::QuantizedTensor;
use crate::{Error, Result, Weights};

/// Size of the groups of centred weights.
const CENTRED_GROUP: usize = 16;

/// Loads a quantised weight of logical shape `leading + [rows, columns]` at `weights`, which has
/// `weight`, `scales` and, when affine, `biases`. An affine weight in groups of 16, which MLX has none of, is centred where
/// it has no biases; in other groups a mode of its own says so, and an affine weight that lacks them is damaged.
pub fn load(
    weights: &Weights,
    spec: QuantSpec,
    leading: &[i64],
    rows: usize,
    columns: usize,
) -> Result<QuantizedTensor> {
    let group = spec.group_size as usize;
    let bits = spec.bits as usize;
    if group == 0 || !columns.is_multiple_of(group) || !(columns * bits).is_multiple_of(32) {
        return Err(Error::Quantization {
            name: format!("{}.weight", weights.path()),
            message: format!(
                "{columns} columns do not divide into groups of {group} at {bits} bits"
            ),
        });
    }
    let shape = |last: usize| -> Vec<i64> {
        leading
            .iter()
            .copied()
            .chain([rows as i64, last as i64])
            .collect()
    };
    let weight = weights.stored("weight", &shape(columns * bits / 32))?;
    if weight.dtype()? != DType::U32 {
        return Err(Error::Quantization {
            name: format!("{}.weight", weights.path()),
            message: format!(
                "stored as {}, packed weights are u32",
                weight.dtype()?.name()
            ),
        });
    }
    let groups = shape(columns / group);
    // Half activations take scales of their own type. With f32 activations the scales stay as they
    // are stored: widening them would only make every product read more.
    let as_stored = weights.compute_dtype() == DType::F32;
    let factors = |name: &str| {
        if as_stored {
            weights.stored(name, &groups)
        } else {
            weights.tensor(name, &groups)
        }
    };
    let is_centred = group == CENTRED_GROUP && !weights.contains("biases");
    let (scales, biases) = if spec.mode == quant::AFFINE && !is_centred {
        (factors("scales")?, Some(factors("biases")?))
    } else {
        // Exponents of the other modes, or the scales of a centred weight.
        (weights.stored("scales", &groups)?, None)
    };
    Ok(QuantizedTensor {
        weight,
        scales,
        biases,
        spec,
    })
}
