//! Rotary position embedding (Su et al. 2021) and its ways to stretch a context.
//!
//! Frequencies follow the definitions of the transformers library (`modeling_rope_utils`), which
//! checkpoints are made against. They are turned into periods once at load; a step only multiplies
//! positions. Two types depend on the length of the sequence there, which a packed step must not:
//! * `dynamic`: every row uses the base for a sequence that ends at its own position. It equals the
//!   reference fed token by token, and is the same alone, in a batch and after a prefix hit;
//! * `longrope`: the list is chosen once, by the longest sequence that the host will run.

use core::f64::consts::PI;

use mlxcel_abi::fused_args::RotateArgs;

use crate::nn::rope_scaling::{RopeConfig, RopeScaling};
use crate::ops::RopeSpec;
use crate::{DType, Result, Tensor, Weights};

/// A rotary embedding, ready for steps.
#[derive(Debug, Clone)]
pub struct Rope {
    spec: RopeSpec,
    dynamic: Option<Dynamic>,
    attention_factor: f64,
    width: usize,
}

#[derive(Debug, Clone)]
struct Dynamic {
    base: f64,
    factor: f64,
    original: f64,
    /// `2 i / dims`, f32 `[dims / 2]`.
    exponents: Tensor,
}

impl Rope {
    /// Prepares an embedding for heads of `width` features; `interleaved` when pairs are
    /// neighbours. `weights` gives the backend and the context length, no tensor.
    pub fn new(
        weights: &Weights,
        config: &RopeConfig,
        width: usize,
        interleaved: bool,
    ) -> Result<Self> {
        let backend = weights.backend();
        let half = config.dims / 2;
        let mut spec = RopeSpec {
            dims: config.dims as u32,
            interleaved,
            base: config.base as f32,
            scale: 1.0,
            freqs: None,
        };
        let mut attention_factor = 1.0;
        let mut dynamic = None;
        match &config.scaling {
            RopeScaling::Plain => {}
            RopeScaling::Linear { factor } => spec.scale = (1.0 / factor) as f32,
            RopeScaling::Dynamic { factor, original } => {
                let exponents: Vec<f32> = (0..half)
                    .map(|i| (2 * i) as f32 / config.dims as f32)
                    .collect();
                let exponents = Tensor::from_slice(backend, &exponents, &[half as i64])?;
                dynamic = Some(Dynamic {
                    base: config.base,
                    factor: *factor,
                    original: *original,
                    exponents,
                });
            }
            RopeScaling::Yarn {
                attention_factor: given,
                ..
            }
            | RopeScaling::LongRope {
                attention_factor: given,
                ..
            } => {
                attention_factor = *given;
            }
            RopeScaling::Llama3 { .. } => {}
        }
        if let Some(periods) = periods(config, weights.context_length()) {
            let periods: Vec<f32> = periods.into_iter().map(|p| p as f32).collect();
            spec.freqs = Some(Tensor::from_slice(backend, &periods, &[half as i64])?);
        }
        Ok(Self {
            spec,
            dynamic,
            attention_factor,
            width,
        })
    }

    /// As `new`, for files that ship a factor per period as a tensor `factors` `[dims / 2]` (GGUF's
    /// `rope_freqs`) in place of settings.
    pub fn with_factors(
        weights: &Weights,
        config: &RopeConfig,
        width: usize,
        interleaved: bool,
        factors: &Tensor,
    ) -> Result<Self> {
        let mut rope = Self::new(weights, config, width, interleaved)?;
        let plain: Vec<f32> = plain_periods(config)
            .into_iter()
            .map(|p| p as f32)
            .collect();
        let plain = Tensor::from_slice(weights.backend(), &plain, &[(config.dims / 2) as i64])?;
        let periods = plain.mul(&factors.cast(DType::F32)?)?;
        weights.keep(&periods);
        rope.spec.freqs = Some(periods);
        Ok(rope)
    }

    /// Rotates `[T, H, width]` at `positions` `[T]`.
    pub fn forward(&self, x: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let rotated = match &self.dynamic {
            None => x.rope(positions, &self.spec)?,
            Some(dynamic) => self.forward_dynamic(dynamic, x, positions)?,
        };
        if self.attention_factor == 1.0 {
            return Ok(rotated);
        }
        let dims = i64::from(self.spec.dims);
        if dims == self.width as i64 {
            return rotated.mul_scalar(self.attention_factor);
        }
        // Only the rotated features carry the factor.
        let head = rotated
            .narrow(2, 0, dims)?
            .mul_scalar(self.attention_factor)?;
        let rest = rotated.narrow(2, dims, self.width as i64 - dims)?;
        Tensor::concat(x.backend(), &[&head, &rest], 2)
    }

    /// The embedding as part of a fused operation; none where that cannot say it: bases that depend
    /// on the position, and factors on the rotated features.
    pub(crate) fn raw(&self) -> Option<RotateArgs> {
        (self.dynamic.is_none() && self.attention_factor == 1.0).then(|| RotateArgs {
            dims: self.spec.dims,
            interleaved: u32::from(self.spec.interleaved),
            base: self.spec.base,
            scale: self.spec.scale,
            freqs: Tensor::handle_of(self.spec.freqs.as_ref()),
            ..RotateArgs::default()
        })
    }

    /// base(L) = base * (factor L / original - (factor - 1)) ^ (d / (d - 2)), L at least original.
    fn forward_dynamic(&self, dynamic: &Dynamic, x: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let dims = f64::from(self.spec.dims);
        let positions = positions.cast(DType::F32)?.reshape(&[-1, 1])?;
        let length = positions
            .add_scalar(1.0)?
            .maximum_scalar(dynamic.original)?;
        let stretch = length
            .mul_scalar(dynamic.factor / dynamic.original)?
            .add_scalar(1.0 - dynamic.factor)?;
        let log_base = stretch
            .log()?
            .mul_scalar(dims / (dims - 2.0))?
            .add_scalar(dynamic.base.ln())?;
        let inverse = log_base.mul(&dynamic.exponents)?.neg()?.exp()?; // [T, dims / 2]
        let angles = positions.mul(&inverse)?;
        x.rotate(&angles.cos()?, &angles.sin()?, self.spec.interleaved)
    }
}

/// `base ^ (2 i / dims)`, the periods of the plain embedding.
fn plain_periods(config: &RopeConfig) -> Vec<f64> {
    let dims = config.dims as f64;
    (0..config.dims / 2)
        .map(|i| config.base.powf(2.0 * i as f64 / dims))
        .collect()
}

/// Periods where they are not those of a plain base.
fn periods(config: &RopeConfig, context_length: usize) -> Option<Vec<f64>> {
    let plain = plain_periods(config);
    match &config.scaling {
        RopeScaling::Plain | RopeScaling::Linear { .. } | RopeScaling::Dynamic { .. } => None,
        RopeScaling::Llama3 {
            factor,
            low,
            high,
            original,
        } => Some(
            plain
                .into_iter()
                .map(|period| llama3_period(period, *factor, *low, *high, *original))
                .collect(),
        ),
        RopeScaling::Yarn {
            factor,
            original,
            beta_fast,
            beta_slow,
            truncate,
            ..
        } => {
            let ramp = yarn_ramp(config, *original, *beta_fast, *beta_slow, *truncate);
            let blend = |(period, ramp): (f64, f64)| {
                1.0 / (ramp / (factor * period) + (1.0 - ramp) / period)
            };
            Some(plain.into_iter().zip(ramp).map(blend).collect())
        }
        RopeScaling::LongRope {
            short,
            long,
            original,
            limit,
            ..
        } => {
            let context = if context_length == 0 {
                *limit
            } else {
                context_length.min(*limit)
            };
            let factors = if context > *original { long } else { short };
            Some(
                plain
                    .into_iter()
                    .zip(factors)
                    .map(|(period, factor)| period * factor)
                    .collect(),
            )
        }
    }
}

fn llama3_period(period: f64, factor: f64, low: f64, high: f64, original: f64) -> f64 {
    let wavelength = 2.0 * PI * period;
    if wavelength < original / high || (low == high && wavelength == original / low) {
        return period;
    }
    if wavelength > original / low {
        return period * factor;
    }
    let smooth = (original / wavelength - low) / (high - low);
    1.0 / ((1.0 - smooth) / (factor * period) + smooth / period)
}

/// How far each frequency is interpolated: 0 not at all, 1 in full.
fn yarn_ramp(
    config: &RopeConfig,
    original: f64,
    beta_fast: f64,
    beta_slow: f64,
    truncate: bool,
) -> Vec<f64> {
    let dims = config.dims as f64;
    let dimension_of =
        |rotations: f64| dims * (original / (rotations * 2.0 * PI)).ln() / (2.0 * config.base.ln());
    let (mut low, mut high) = (dimension_of(beta_fast), dimension_of(beta_slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dims - 1.0));
    if low == high {
        high += 0.001;
    }
    (0..config.dims / 2)
        .map(|i| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use serde_json::json;

    fn read(value: &serde_json::Value) -> RopeConfig {
        RopeConfig::read(&Config::root(value).unwrap(), 8, None).unwrap()
    }

    #[test]
    fn both_spellings_read_alike() {
        let old = json!({"rope_theta": 500000.0, "max_position_embeddings": 64, "rope_scaling":
            {"type": "linear", "factor": 4}});
        let new = json!({"max_position_embeddings": 64, "rope_parameters":
            {"rope_theta": 500000.0, "rope_type": "linear", "factor": 4.0}});
        assert_eq!(read(&old), read(&new));
        assert_eq!(read(&old).scaling, RopeScaling::Linear { factor: 4.0 });
    }

    #[test]
    fn settings_may_be_nested_by_layer_type() {
        let value = json!({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8}}});
        let config = Config::root(&value).unwrap();
        let full = RopeConfig::read(&config, 8, Some("full_attention")).unwrap();
        assert_eq!(
            (full.base, full.scaling),
            (1e6, RopeScaling::Linear { factor: 8.0 })
        );
        assert_eq!(
            RopeConfig::read(&config, 8, Some("sliding_attention"))
                .unwrap()
                .base,
            1e4
        );
    }

    #[test]
    fn unknown_types_and_absurd_values_are_refused_by_name() {
        for (value, part) in [
            (
                json!({"rope_scaling": {"rope_type": "wavy"}}),
                "rope_scaling.rope_type = \"wavy\"",
            ),
            (
                json!({"rope_scaling": {"type": "linear", "factor": 0}}),
                "rope_scaling.factor",
            ),
            (
                json!({"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}}),
                "short_factor",
            ),
            (json!({"rope_theta": -1}), "rope_theta"),
            (
                json!({"rope_scaling": {"type": "yarn"}}),
                "rope_scaling.factor",
            ),
            (json!({"partial_rotary_factor": 0.1}), "even"),
        ] {
            let error = RopeConfig::read(&Config::root(&value).unwrap(), 8, None)
                .unwrap_err()
                .to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn llama3_keeps_short_wavelengths_and_stretches_long_ones() {
        let value = json!({"rope_theta": 10000.0, "max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3",
            "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 32}});
        let config = read(&value);
        let periods = periods(&config, 0).unwrap();
        let plain = plain_periods(&config);
        assert_eq!(periods[0], plain[0]);
        assert_eq!(periods[3], plain[3] * 8.0);
    }

    /// As Llama 4 Scout is published.
    #[test]
    fn equal_bounds_of_llama3_leave_nothing_between() {
        let value = json!({"rope_theta": 10000.0, "max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3",
            "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1, "original_max_position_embeddings": 32}});
        let config = read(&value);
        let plain = plain_periods(&config);
        let factors = periods(&config, 0).unwrap().into_iter().zip(plain);
        let factors: Vec<f64> = factors.map(|(period, plain)| period / plain).collect();
        assert_eq!(factors, [1.0, 8.0, 8.0, 8.0]);
        assert_eq!(llama3_period(2.0, 8.0, 1.0, 1.0, 4.0 * PI), 2.0);
    }

    #[test]
    fn longrope_chooses_by_the_context_that_is_run() {
        let value = json!({"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_scaling":
            {"type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [2, 2, 2, 2]}});
        let config = read(&value);
        assert_eq!(periods(&config, 16).unwrap()[1], plain_periods(&config)[1]);
        assert_eq!(
            periods(&config, 0).unwrap()[1],
            2.0 * plain_periods(&config)[1]
        );
    }
}
