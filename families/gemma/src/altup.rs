//! Alternating updates (Baykal et al. 2023): of several residual streams a layer computes one; the
//! others are predicted before it and corrected behind it.

use mlxcel_sdk::nn::{Linear, RmsNorm};
use mlxcel_sdk::prelude::*;

/// Sizes and choices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub hidden: usize,
    pub streams: usize,
    /// The stream that layers compute.
    pub active: usize,
    /// Whether there is a scale for the corrected active stream.
    pub scales_active: bool,
}

/// Predicts all streams before a layer and corrects them behind it.
pub(crate) struct AltUp {
    router_norm: RmsNorm,
    router: Linear,
    prediction: Linear,
    correction: Linear,
    active_scale: Option<Tensor>,
    shape: Shape,
}

impl AltUp {
    pub(crate) fn load(at: &Weights, shape: &Shape, eps: f32) -> Result<Self> {
        let (hidden, n) = (shape.hidden, shape.streams);
        let scale = "correct_output_scale";
        let active_scale = if shape.scales_active {
            Some(at.tensor(scale, &[hidden as i64])?)
        } else {
            at.ignore(scale);
            None
        };
        Ok(Self {
            router_norm: RmsNorm::load(&at.at("router_norm"), hidden, eps)?,
            router: Linear::load(&at.at("modality_router"), hidden, n, false)?,
            prediction: Linear::load(&at.at("prediction_coefs"), n, n * n, false)?,
            correction: Linear::load(&at.at("correction_coefs"), n, n, false)?,
            active_scale,
            shape: *shape,
        })
    }

    /// `[T, hidden]` to `[T, N]`.
    fn route(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.router_norm.forward(x)?;
        let routed = self
            .router
            .forward(&x.mul_scalar((self.shape.hidden as f64).recip())?)?;
        routed.cast(DType::F32)?.tanh()?.cast(x.dtype()?)
    }

    /// The stream that a layer computes: `[T, N, hidden]` to `[T, hidden]`.
    pub(crate) fn active_of(&self, streams: &Tensor) -> Result<Tensor> {
        let active = streams.narrow(1, self.shape.active as i64, 1)?;
        active.reshape(&[-1, self.shape.hidden as i64])
    }

    /// The same, with the scale that the layer's own input is gated by.
    pub(crate) fn scaled_active_of(&self, streams: &Tensor) -> Result<Tensor> {
        let active = self.active_of(streams)?;
        match &self.active_scale {
            Some(scale) => active.mul(scale),
            None => Ok(active),
        }
    }

    /// Number of streams.
    pub(crate) fn streams(&self) -> i64 {
        self.shape.streams as i64
    }

    /// Every stream plus a mixture of all: `[T, N, hidden]`.
    pub(crate) fn predict(&self, streams: &Tensor) -> Result<Tensor> {
        let n = self.streams();
        let routed = self.route(&self.active_of(streams)?)?;
        let mixture = self.prediction.forward(&routed)?.reshape(&[-1, n, n])?;
        mixture.matmul(streams)?.add(streams)
    }

    /// Moves every prediction by a share of what the layer changed in the active one.
    pub(crate) fn correct(&self, predictions: &Tensor, computed: &Tensor) -> Result<Tensor> {
        let shares = self
            .correction
            .forward(&self.route(computed)?)?
            .add_scalar(1.0)?;
        let change = computed.sub(&self.active_of(predictions)?)?;
        change
            .unsqueeze(1)?
            .mul(&shares.unsqueeze(2)?)?
            .add(predictions)
    }
}
