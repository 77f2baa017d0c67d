//! The experts of gemma4: chosen by a router that norms and scales on its own, beside the dense
//! feed-forward block of the same layer.

use mlxcel_sdk::nn::{Activation, Linear, Routing};
use mlxcel_sdk::prelude::*;
use mlxcel_sdk::quant::{self, QuantizedTensor};

use crate::config::glu_kind;

/// Sizes of the experts of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub n_experts: usize,
    pub top_k: usize,
    pub hidden: usize,
    pub inner: usize,
    pub eps: f32,
    pub activation: Activation,
}

/// Softmax over all experts, the best made to sum to 1, each times a scale of its expert.
pub(crate) struct Router {
    shape: Shape,
    /// Scale of the normed input, with the root of its width in it.
    scale: Tensor,
    projection: Linear,
    per_expert: Tensor,
}

impl Router {
    pub(crate) fn load(at: &Weights, shape: Shape) -> Result<Self> {
        let (hidden, n) = (shape.hidden, shape.n_experts);
        let scale = at.tensor("scale", &[hidden as i64])?;
        let scale = scale.mul_scalar((hidden as f64).sqrt().recip())?;
        at.keep(&scale);
        Ok(Self {
            scale,
            projection: Linear::load(&at.at("proj"), hidden, n, false)?,
            per_expert: at.tensor("per_expert_scale", &[n as i64])?,
            shape,
        })
    }

    /// Routes `[T, hidden]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Routing> {
        let dtype = x.dtype()?;
        let (n, k) = (self.shape.n_experts as i64, self.shape.top_k as i64);
        let normed = x.rms_norm(Some(&self.scale), self.shape.eps)?;
        let scores = self
            .projection
            .forward(&normed)?
            .cast(DType::F32)?
            .softmax(-1)?; // [T, E]
        let experts = if n == k {
            scores.argsort(-1)?
        } else {
            scores.argpartition(n - k, -1)?.narrow(1, n - k, k)? // [T, K]
        };
        let chosen = scores.take_along(&experts, 1)?;
        let chosen = chosen.div(&chosen.sum(&[-1], true)?)?;
        let own = self.per_expert.take(&experts, 0)?.cast(DType::F32)?;
        Ok(Routing {
            experts,
            weights: chosen.mul(&own)?.cast(dtype)?,
        })
    }
}

enum Stack {
    /// `[E, in, out]` view.
    Plain(Tensor),
    Quantized(QuantizedTensor),
}

impl Stack {
    /// `rows` and `columns` of each of the experts, under a name that has `.weight` behind it or not.
    fn load(
        at: &Weights,
        name: &str,
        n_experts: usize,
        rows: usize,
        columns: usize,
    ) -> Result<Self> {
        let shape = [n_experts as i64, rows as i64, columns as i64];
        let module = at.at(name);
        if let Some(spec) = module.quant()? {
            let loaded = quant::load(&module, spec, &[n_experts as i64], rows, columns)?;
            return Ok(Self::Quantized(loaded));
        }
        let plain = if at.contains(name) {
            at.tensor(name, &shape)?
        } else {
            module.tensor("weight", &shape)?
        };
        Ok(Self::Plain(plain.t()?))
    }

    fn forward(&self, x: &Tensor, rows: &Tensor, experts: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain(w) => x.gather_matmul(w, Some(rows), Some(experts), false),
            Self::Quantized(w) => w.gather_matmul_t(x, Some(rows), experts, false),
        }
    }
}

enum GateUp {
    /// Gate rows first.
    Joined(Stack),
    Separate(Stack, Stack),
}

/// Gated experts, stacked along a leading axis.
pub(crate) struct Experts {
    shape: Shape,
    gate_up: GateUp,
    down: Stack,
}

impl Experts {
    /// Loads experts as published (`gate_up_proj`, gate rows first) or as mlx-lm splits them.
    pub(crate) fn load(at: &Weights, shape: Shape) -> Result<Self> {
        let (n, hidden, inner) = (shape.n_experts, shape.hidden, shape.inner);
        let split = at.at("switch_glu");
        let at = if split.exists() { &split } else { at };
        let gate_up = if at.at("gate_proj").exists() {
            let half = |name: &str| Stack::load(at, name, n, inner, hidden);
            GateUp::Separate(half("gate_proj")?, half("up_proj")?)
        } else {
            GateUp::Joined(Stack::load(at, "gate_up_proj", n, 2 * inner, hidden)?)
        };
        Ok(Self {
            gate_up,
            down: Stack::load(at, "down_proj", n, hidden, inner)?,
            shape,
        })
    }

    /// Weighted sum of the chosen experts' outputs for `[T, hidden]`.
    pub(crate) fn forward(&self, x: &Tensor, routing: &Routing) -> Result<Tensor> {
        let backend = x.backend();
        let (rows, k) = (x.dim(0)?, self.shape.top_k as i64);
        let (hidden, inner) = (self.shape.hidden as i64, self.shape.inner as i64);
        let count = |n: i64| Tensor::arange(backend, 0.0, n as f64, 1.0, DType::U32);
        let row_of = count(rows)?.reshape(&[rows, 1])?.broadcast_to(&[rows, k])?;
        let x = x.unsqueeze(1)?; // [T, 1, hidden]: one matrix a row
        let product = |stack: &Stack| stack.forward(&x, &row_of, &routing.experts);
        let (gate, up) = match &self.gate_up {
            GateUp::Joined(both) => {
                let both = product(both)?; // [T, K, 1, 2 inner]
                (both.narrow(-1, 0, inner)?, both.narrow(-1, inner, inner)?)
            }
            GateUp::Separate(gate, up) => (product(gate)?, product(up)?),
        };
        let y = gate.glu(glu_kind(self.shape.activation), &up)?;
        let y = y.reshape(&[rows * k, 1, inner])?;
        let pair_of = count(rows * k)?.reshape(&[rows, k])?;
        let y = self.down.forward(&y, &pair_of, &routing.experts)?; // [T, K, 1, hidden]
        y.reshape(&[rows, k, hidden])?
            .mul(&routing.weights.unsqueeze(2)?)?
            .sum(&[1], false)
    }
}
