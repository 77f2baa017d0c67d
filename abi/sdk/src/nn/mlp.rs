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
        Ok(Self {
            gate: Linear::load(&weights.at("gate_proj"), hidden, inner, bias)?,
            up: Linear::load(&weights.at("up_proj"), hidden, inner, bias)?,
            down: Linear::load(&weights.at("down_proj"), inner, hidden, bias)?,
            activation,
        })
    }

    /// `[T, hidden]` to `[T, hidden]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = self.gate.forward(x)?;
        let up = self.up.forward(x)?;
        self.down
            .forward(&gate.glu(self.activation.glu_kind(), &up)?)
    }
}
