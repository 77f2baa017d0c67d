//! Normalisation layers over the last axis.

use mlxcel_abi::Tensor as Handle;
use mlxcel_abi::fused_args::InputNorm;

use crate::backend::Fused;
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

    /// `residual + x` and the norm of it.
    pub fn forward_sum(&self, x: &Tensor, residual: &Tensor) -> Result<[Tensor; 2]> {
        let backend = x.backend();
        backend.fused_or(
            Fused::AddRmsNorm,
            x,
            || {
                let mut out = [Handle::NONE; 2];
                command!(
                    backend.table(),
                    add_rms_norm,
                    x.handle(),
                    residual.handle(),
                    self.weight.handle(),
                    self.eps,
                    &mut out
                )?;
                Ok(out.map(|handle| Tensor::from_handle(backend, handle)))
            },
            || {
                let sum = residual.add(x)?;
                let normed = self.forward(&sum)?;
                Ok([sum, normed])
            },
        )
    }

    /// The norm as part of a fused operation.
    pub(crate) fn raw(norm: Option<&Self>) -> InputNorm {
        match norm {
            Some(norm) => InputNorm {
                normed: 1,
                eps: norm.eps,
                weight: norm.weight.handle(),
                ..InputNorm::default()
            },
            None => InputNorm::default(),
        }
    }

    /// Its weight and what is added to the mean of squares.
    pub(crate) fn parts(&self) -> (&Tensor, f32) {
        (&self.weight, self.eps)
    }

    /// `x`, normed where there is a norm.
    pub(crate) fn apply(norm: Option<&Self>, x: &Tensor) -> Result<Tensor> {
        norm.map_or_else(|| Ok(x.clone()), |norm| norm.forward(x))
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
