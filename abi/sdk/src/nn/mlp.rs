//! Feed-forward blocks.

use mlxcel_abi::Tensor as Handle;
use mlxcel_abi::fused_args::GatedMlpArgs;
use mlxcel_abi::kinds::glu;

use crate::backend::{Fused, FusedSite};
use crate::nn::{Linear, RmsNorm};
use crate::{Config, Result, Tensor, Weights};

/// Activation of a gated block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// Exact GELU.
    Gelu,
    /// GELU, tanh approximation.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
}

impl Activation {
    /// Reads `key` of a configuration.
    pub fn read(config: &Config<'_>, key: &str, default: Activation) -> Result<Self> {
        match config.opt_str(key)? {
            None => Ok(default),
            Some("silu" | "swish") => Ok(Self::Silu),
            Some("gelu") => Ok(Self::Gelu),
            Some("gelu_pytorch_tanh" | "gelu_new" | "gelu_fast") => Ok(Self::GeluTanh),
            Some("relu") => Ok(Self::Relu),
            Some(_) => Err(config.unsupported(
                key,
                "known activations are silu, gelu, gelu_pytorch_tanh and relu",
            )),
        }
    }

    /// Code of the gated operation.
    pub(crate) fn glu_kind(self) -> u32 {
        match self {
            Self::Silu => glu::SILU,
            Self::Gelu => glu::GELU,
            Self::GeluTanh => glu::GELU_TANH,
            Self::Relu => glu::RELU,
        }
    }
}

/// `down(f(gate(x)) * up(x))`.
#[derive(Debug, Clone)]
pub struct GatedMlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Activation,
    limit: Option<f64>,
    site: FusedSite,
}

impl GatedMlp {
    /// Loads `gate_proj`, `up_proj` and `down_proj`.
    pub fn load(
        weights: &Weights,
        hidden: usize,
        inner: usize,
        bias: bool,
        activation: Activation,
    ) -> Result<Self> {
        let names = ["gate_proj", "up_proj", "down_proj"];
        Self::load_named(weights, names, hidden, inner, bias, activation)
    }

    /// As `load`, with other names of gate, up and down.
    pub fn load_named(
        weights: &Weights,
        names: [&str; 3],
        hidden: usize,
        inner: usize,
        bias: bool,
        activation: Activation,
    ) -> Result<Self> {
        let [gate, up, down] = names;
        Ok(Self {
            gate: Linear::load_outputs(&weights.at(gate), hidden, inner, bias)?,
            up: Linear::load_outputs(&weights.at(up), hidden, inner, bias)?,
            down: Linear::load_inputs(&weights.at(down), inner, hidden, bias)?,
            activation,
            limit: None,
            site: FusedSite::default(),
        })
    }

    /// Limits what enters the product: the gate from above, the other half on both sides.
    #[must_use]
    pub fn limited(mut self, limit: f64) -> Self {
        self.limit = Some(limit);
        self
    }

    /// `[T, hidden]` to `[T, hidden]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.run(x, None, None)
    }

    /// As `forward`, of the norm of `x`.
    pub fn forward_normed(&self, x: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        self.run(x, Some(norm), None)
    }

    /// `x` plus the block's result for the norm of `x`.
    pub fn forward_onto(&self, x: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        self.run(x, Some(norm), Some(x))
    }

    fn run(&self, x: &Tensor, norm: Option<&RmsNorm>, residual: Option<&Tensor>) -> Result<Tensor> {
        let Some(ranks) = self.down.summed() else {
            return self.run_here(x, norm, residual);
        };
        let y = ranks.all_sum(&self.run_here(x, norm, None)?)?;
        residual.map_or_else(|| Ok(y.clone()), |residual| residual.add(&y))
    }

    /// As `run`, without the sum over ranks.
    fn run_here(
        &self,
        x: &Tensor,
        norm: Option<&RmsNorm>,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let composed = || {
            let x = RmsNorm::apply(norm, x)?;
            let (gate, up) = (self.gate.forward(&x)?, self.up.forward(&x)?);
            let inner = gated(self.activation, self.limit, &gate, &up)?;
            let y = self.down.forward_here(&inner)?;
            residual.map_or_else(|| Ok(y.clone()), |residual| residual.add(&y))
        };
        if self.limit.is_some() {
            return composed();
        }
        let fused = || self.fused(x, norm, residual);
        x.backend()
            .fused_at(Fused::GatedMlp, x, &self.site, fused, composed)
    }

    fn fused(
        &self,
        x: &Tensor,
        norm: Option<&RmsNorm>,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let args = GatedMlpArgs {
            x: x.handle(),
            norm: RmsNorm::raw(norm),
            gate: self.gate.raw(),
            up: self.up.raw(),
            down: self.down.raw(),
            kind: self.activation.glu_kind(),
            residual: Tensor::handle_of(residual),
            ..GatedMlpArgs::default()
        };
        let mut out = Handle::NONE;
        command!(x.backend().table(), gated_mlp, &args, &mut out)?;
        Ok(Tensor::from_handle(x.backend(), out))
    }
}

/// `f(gate) * up`, within limits where there are some.
pub(crate) fn gated(
    activation: Activation,
    limit: Option<f64>,
    gate: &Tensor,
    up: &Tensor,
) -> Result<Tensor> {
    match limit {
        None => gate.glu(activation.glu_kind(), up),
        Some(limit) => gate
            .minimum_scalar(limit)?
            .glu(activation.glu_kind(), &up.clip(-limit, limit)?),
    }
}
