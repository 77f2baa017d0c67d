//! Normalisation layers over the last axis.

use crate::{Result, Tensor, Weights};

/// `x / rms(x) * w` (Zhang and Sennrich 2019).
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f32,
}

impl RmsNorm {
    /// Loads `weight` `[width]`.
    pub fn load(weights: &Weights, width: usize, eps: f32) -> Result<Self> {
        Ok(Self {
            weight: weights.tensor("weight", &[width as i64])?,
            eps,
        })
    }

    /// Loads a weight that is stored minus one (Gemma's convention).
    pub fn load_minus_one(weights: &Weights, width: usize, eps: f32) -> Result<Self> {
        let weight = weights.tensor("weight", &[width as i64])?.add_scalar(1.0)?;
        weights.keep(&weight);
        Ok(Self { weight, eps })
    }

    /// Same shape and dtype.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.rms_norm(Some(&self.weight), self.eps)
    }
}

/// Layer norm with optional weight and bias (Ba et al. 2016).
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    eps: f32,
}

impl LayerNorm {
    /// Loads `weight` and `bias` `[width]` where the checkpoint has them.
    pub fn load(weights: &Weights, width: usize, eps: f32) -> Result<Self> {
        let shape = [width as i64];
        Ok(Self {
            weight: weights.optional("weight", &shape)?,
            bias: weights.optional("bias", &shape)?,
            eps,
        })
    }

    /// Same shape and dtype.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.layer_norm(self.weight.as_ref(), self.bias.as_ref(), self.eps)
    }
}
