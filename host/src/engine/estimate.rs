//! How much memory a model takes, from its description and its headers alone.
//!
//! Owns the formula. Reads no file and asks no device; how much there is, is the caller's business.

use super::desc::ModelDesc;
use super::kv_types::KvType;

/// Share that is added to the sum for what the formula does not see: allocator slack, graphs, the process itself.
pub const DEFAULT_HEADROOM_FACTOR: f64 = 1.20;

/// Logits are widened to f32 before they are read.
const LOGIT_BYTES: u64 = 4;

/// What an estimate depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EstimateInputs {
    /// Bytes of the weights as they will lie in memory.
    pub weights_bytes: u64,
    /// Tokens of each sequence.
    pub tokens: u64,
    /// Sequences at once.
    pub batch: u64,
    /// Most rows of a step; longer prompts are cut.
    pub step_rows: u64,
    /// Type of keys and values.
    pub kv_type: KvType,
    /// Bytes of one element of activations.
    pub activation_element_bytes: u64,
    /// Factor on the sum; 1.2 adds a fifth.
    pub headroom_factor: f64,
}

/// The parts of an estimate, and their sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Weights.
    pub weights_bytes: u64,
    /// Keys and values of one position, over all layers.
    pub kv_bytes_per_token: u64,
    /// Keys and values of all positions of all sequences, their states, and what their encoders give.
    pub kv_bytes_total: u64,
    /// Recurrent states of all sequences, two of each: one that a step reads and one that it writes.
    pub state_bytes: u64,
    /// Intermediate values of the largest step, and its logits.
    pub activation_bytes: u64,
    /// What the headroom factor adds.
    pub headroom_bytes: u64,
    /// Everything.
    pub total_bytes: u64,
}

/// An encoder's output is not quantised.
fn cross_element_bytes(inputs: &EstimateInputs) -> usize {
    match inputs.kv_type {
        KvType::Float(dtype) => dtype.size_bytes(),
        KvType::Q8_0 | KvType::Q4_0 => inputs.activation_element_bytes as usize,
    }
}

/// Estimates the memory of a model. Saturates instead of overflowing: sizes come from untrusted files.
///
/// Windowed layers count in full, because the pool keeps all of their positions.
pub fn estimate(desc: &ModelDesc, inputs: EstimateInputs) -> MemoryEstimate {
    let kv_bytes_per_token =
        u64::try_from(desc.kv_bytes_per_token(inputs.kv_type)).unwrap_or(u64::MAX);
    let positions = inputs.tokens.saturating_mul(inputs.batch);
    let per_sequence = u64::try_from(desc.state_bytes_per_sequence()).unwrap_or(u64::MAX);
    let state_bytes = per_sequence.saturating_mul(2).saturating_mul(inputs.batch);
    let cross_bytes = desc
        .cross_bytes_per_sequence(cross_element_bytes(&inputs))
        .saturating_mul(usize::try_from(inputs.batch).unwrap_or(usize::MAX));
    let kv_bytes_total = kv_bytes_per_token
        .saturating_mul(positions)
        .saturating_add(state_bytes)
        .saturating_add(cross_bytes as u64);
    let rows = positions.min(inputs.step_rows.max(inputs.batch));
    let activations = (desc.activation_width as u64)
        .saturating_mul(rows)
        .saturating_mul(inputs.activation_element_bytes);
    let logits = (desc.vocab_size as u64)
        .saturating_mul(inputs.batch)
        .saturating_mul(LOGIT_BYTES);
    let activation_bytes = activations.saturating_add(logits);
    let sum = inputs
        .weights_bytes
        .saturating_add(kv_bytes_total)
        .saturating_add(activation_bytes);
    // A float cast saturates, and a factor below one or none at all adds nothing.
    let headroom_bytes = (sum as f64 * (inputs.headroom_factor - 1.0).max(0.0)) as u64;
    MemoryEstimate {
        weights_bytes: inputs.weights_bytes,
        kv_bytes_per_token,
        kv_bytes_total,
        state_bytes,
        activation_bytes,
        headroom_bytes,
        total_bytes: sum.saturating_add(headroom_bytes),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::engine::{CacheDesc, StateDesc};
    use crate::plugin::DType;

    fn desc(layers: usize, heads: usize, width: usize) -> ModelDesc {
        ModelDesc {
            arch: "a".to_owned(),
            task: "text-generation".to_owned(),
            vocab_size: 100,
            hidden_size: 16,
            context_length: 4096,
            layers: vec![
                CacheDesc::Dense {
                    kv_heads: heads,
                    k_dim: width,
                    v_dim: width
                };
                layers
            ],
            activation_width: 50,
            encoder: None,
        }
    }

    const INPUTS: EstimateInputs = EstimateInputs {
        weights_bytes: 1_000_000,
        tokens: 1000,
        batch: 1,
        step_rows: 512,
        kv_type: KvType::Float(DType::F16),
        activation_element_bytes: 2,
        headroom_factor: 1.5,
    };

    #[test]
    fn the_sum_is_that_of_the_parts() {
        let found = estimate(&desc(3, 2, 8), INPUTS);
        let per_token = 3 * 2 * (8 + 8) * 2;
        let activations = 50 * 512 * 2 + 100 * 4;
        let sum = 1_000_000 + per_token * 1000 + activations;
        let expected = MemoryEstimate {
            weights_bytes: 1_000_000,
            kv_bytes_per_token: per_token,
            kv_bytes_total: per_token * 1000,
            state_bytes: 0,
            activation_bytes: activations,
            headroom_bytes: sum / 2,
            total_bytes: sum + sum / 2,
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn states_count_by_sequence_and_not_by_token() {
        let mut desc = desc(1, 1, 1);
        desc.layers.push(CacheDesc::Recurrent {
            states: vec![StateDesc {
                shape: vec![4, 25],
                dtype: "f32".to_owned(),
            }],
        });
        let inputs = EstimateInputs { batch: 3, ..INPUTS };
        let found = estimate(&desc, inputs);
        assert_eq!(found.state_bytes, 100 * 4 * 2 * 3);
        assert_eq!(found.kv_bytes_per_token, 4);
        assert_eq!(found.kv_bytes_total, 3 * 1000 * 4 + found.state_bytes);
        let longer = EstimateInputs {
            tokens: 9000,
            ..inputs
        };
        assert_eq!(estimate(&desc, longer).state_bytes, found.state_bytes);
    }

    #[test]
    fn a_short_sequence_is_one_short_step() {
        let inputs = EstimateInputs {
            tokens: 4,
            ..INPUTS
        };
        assert_eq!(
            estimate(&desc(1, 1, 1), inputs).activation_bytes,
            50 * 4 * 2 + 100 * 4
        );
    }

    proptest! {
        #[test]
        fn more_of_anything_never_takes_less(
            layers in 1usize..200, heads in 1usize..64, width in 1usize..1024,
            weights_bytes: u64, tokens: u64, batch: u64, factor in -1.0f64..1e6,
        ) {
            let desc = desc(layers, heads, width);
            let inputs = EstimateInputs { weights_bytes, tokens, batch, headroom_factor: factor, ..INPUTS };
            let base = estimate(&desc, inputs);
            prop_assert!(base.total_bytes >= base.weights_bytes.max(base.kv_bytes_total).max(base.activation_bytes));
            for more in [
                EstimateInputs { weights_bytes: weights_bytes.saturating_add(7), ..inputs },
                EstimateInputs { tokens: tokens.saturating_add(7), ..inputs },
                EstimateInputs { batch: batch.saturating_add(7), ..inputs },
                EstimateInputs { kv_type: DType::F32.into(), ..inputs },
                EstimateInputs { headroom_factor: factor + 1.0, ..inputs },
            ] {
                prop_assert!(estimate(&desc, more).total_bytes >= base.total_bytes);
            }
        }
    }
}
