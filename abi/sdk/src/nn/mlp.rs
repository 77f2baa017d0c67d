//! Feed-forward blocks.

use mlxcel_abi::kinds::glu;

use crate::nn::Linear;
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
            gate: Linear::load(&weights.at(gate), hidden, inner, bias)?,
            up: Linear::load(&weights.at(up), hidden, inner, bias)?,
            down: Linear::load(&weights.at(down), inner, hidden, bias)?,
            activation,
            limit: None,
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
        let gate = self.gate.forward(x)?;
        let up = self.up.forward(x)?;
        self.down
            .forward(&gated(self.activation, self.limit, &gate, &up)?)
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
