//! Mixture-of-experts building blocks: routing and gathered expert products.

use mlxcel_abi::fused_args::{LinearWeight, MixtureArgs, RouteArgs};
use mlxcel_abi::{DType, Tensor as Handle};

use crate::backend::{Fused, FusedSite};
use crate::nn::mlp::gated;
use crate::nn::{Activation, Linear};
use crate::ops::QuantizedTensor;
use crate::{Error, Result, Tensor, Weights, quant};

/// Experts of every row with their weights.
#[derive(Debug, Clone)]
pub struct Routing {
    /// `[T, K]` u32.
    pub experts: Tensor,
    /// `[T, K]` in the activations' dtype.
    pub weights: Tensor,
}

/// Top-k routing over softmax scores.
#[derive(Debug, Clone)]
pub struct TopKRouter {
    gate: Linear,
    n_experts: usize,
    top_k: usize,
    renormalise: bool,
    site: FusedSite,
}

impl TopKRouter {
    /// Loads `gate` `[n_experts, hidden]`. `renormalise`: the chosen scores are made to sum to 1.
    pub fn load(
        weights: &Weights,
        hidden: usize,
        n_experts: usize,
        top_k: usize,
        renormalise: bool,
    ) -> Result<Self> {
        let gate = Linear::load(weights, hidden, n_experts, false)?;
        Ok(Self {
            gate,
            n_experts,
            top_k,
            renormalise,
            site: FusedSite::default(),
        })
    }

    /// Routes `[T, hidden]`.
    pub fn forward(&self, x: &Tensor) -> Result<Routing> {
        let logits = self.gate.forward(x)?; // [T, E]
        x.backend().fused_at(
            Fused::Route,
            x,
            &self.site,
            || self.fused(&logits),
            || self.composed(&logits),
        )
    }

    fn fused(&self, logits: &Tensor) -> Result<Routing> {
        let args = RouteArgs {
            logits: logits.handle(),
            top_k: self.top_k as u32,
            renormalised: u32::from(self.renormalise),
            ..RouteArgs::default()
        };
        let backend = logits.backend();
        let mut out = [Handle::NONE; 2];
        command!(backend.table(), route, &args, &mut out)?;
        let [experts, weights] = out.map(|t| Tensor::from_handle(backend, t));
        Ok(Routing { experts, weights })
    }

    fn composed(&self, logits: &Tensor) -> Result<Routing> {
        let scores = logits.cast(DType::F32)?.softmax(-1)?; // [T, E]
        let (n, k) = (self.n_experts as i64, self.top_k as i64);
        let experts = if n == k {
            scores.argsort(-1)?
        } else {
            scores.argpartition(n - k, -1)?.narrow(1, n - k, k)? // [T, K]
        };
        let mut chosen = scores.take_along(&experts, 1)?;
        if self.renormalise {
            chosen = chosen.div(&chosen.sum(&[-1], true)?)?;
        }
        Ok(Routing {
            experts,
            weights: chosen.cast(logits.dtype()?)?,
        })
    }
}

#[derive(Debug, Clone)]
enum Stack {
    /// `[E, in, out]` view.
    Plain(Tensor),
    Quantized(QuantizedTensor),
}

impl Stack {
    fn forward(&self, x: &Tensor, rows: &Tensor, experts: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain(w) => x.gather_matmul(w, Some(rows), Some(experts), false),
            Self::Quantized(w) => w.gather_matmul_t(x, Some(rows), experts, false),
        }
    }

    fn raw(&self) -> LinearWeight {
        let mut raw = LinearWeight::default();
        match self {
            Self::Plain(w) => raw.plain = w.handle(),
            Self::Quantized(w) => raw.quantized = w.raw(),
        }
        raw
    }
}

/// Gated experts stacked along a leading axis.
#[derive(Debug, Clone)]
pub struct Experts {
    gate: Stack,
    up: Stack,
    down: Stack,
    activation: Activation,
    limit: Option<f64>,
    site: FusedSite,
}

impl Experts {
    /// Loads experts, either stacked under `stacked` (`gate_proj`, `up_proj`, `down_proj` of shape
    /// `[E, out, in]`) or one by one at `weights.<i>.<names[j]>`, `names` being gate, up and down.
    pub fn load(
        weights: &Weights,
        stacked: &Weights,
        names: [&str; 3],
        n_experts: usize,
        hidden: usize,
        inner: usize,
        activation: Activation,
    ) -> Result<Self> {
        if weights.contains("gate_up_proj") {
            return Self::load_fused(weights, n_experts, hidden, inner, activation);
        }
        let one = |slot: usize, rows: usize, columns: usize| -> Result<Stack> {
            let stacked_name = ["gate_proj", "up_proj", "down_proj"]
                .get(slot)
                .copied()
                .unwrap_or_default();
            let whole = stacked.at(stacked_name);
            if whole.contains("weight") {
                return load_stacked(&whole, n_experts, rows, columns);
            }
            let name = names.get(slot).copied().unwrap_or_default();
            let parts: Vec<Weights> = (0..n_experts)
                .map(|i| weights.at_index(i).at(name))
                .collect();
            load_separate(&parts, rows, columns)
        };
        Ok(Self {
            gate: one(0, inner, hidden)?,
            up: one(1, inner, hidden)?,
            down: one(2, hidden, inner)?,
            activation,
            limit: None,
            site: FusedSite::default(),
        })
    }

    /// Loads `gate_up_proj` `[E, 2 inner, hidden]`, gate rows first, and `down_proj`, the names that
    /// transformers 5 uses in memory.
    fn load_fused(
        weights: &Weights,
        n_experts: usize,
        hidden: usize,
        inner: usize,
        activation: Activation,
    ) -> Result<Self> {
        let (n, h, i) = (n_experts as i64, hidden as i64, inner as i64);
        let both = weights.tensor("gate_up_proj", &[n, 2 * i, h])?;
        let part = |start: i64| Ok(Stack::Plain(both.narrow(1, start, i)?.t()?));
        Ok(Self {
            gate: part(0)?,
            up: part(i)?,
            down: Stack::Plain(weights.tensor("down_proj", &[n, h, i])?.t()?),
            activation,
            limit: None,
            site: FusedSite::default(),
        })
    }

    /// Loads `gate_up_proj` `[E, hidden, 2 inner]`, gate columns first, and `down_proj`
    /// `[E, inner, hidden]`: the transposed form that Llama 4 is published in.
    pub fn load_input_major(
        weights: &Weights,
        n_experts: usize,
        hidden: usize,
        inner: usize,
        activation: Activation,
    ) -> Result<Self> {
        let (n, h, i) = (n_experts as i64, hidden as i64, inner as i64);
        let both = weights.tensor("gate_up_proj", &[n, h, 2 * i])?;
        let part = |start: i64| Ok(Stack::Plain(both.narrow(2, start, i)?));
        Ok(Self {
            gate: part(0)?,
            up: part(i)?,
            down: Stack::Plain(weights.tensor("down_proj", &[n, i, h])?),
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

    /// Sum of the chosen experts' outputs for `[T, hidden]`, weighted.
    pub fn forward(&self, x: &Tensor, routing: &Routing) -> Result<Tensor> {
        self.run(x, routing, None)
    }

    /// `residual` plus what `forward` gives.
    pub fn forward_onto(&self, x: &Tensor, routing: &Routing, residual: &Tensor) -> Result<Tensor> {
        self.run(x, routing, Some(residual))
    }

    fn run(&self, x: &Tensor, routing: &Routing, residual: Option<&Tensor>) -> Result<Tensor> {
        let composed = || {
            let each = self.each(x, &routing.experts)?;
            let sum = each.mul(&routing.weights.unsqueeze(2)?)?.sum(&[1], false)?;
            residual.map_or_else(|| Ok(sum.clone()), |residual| residual.add(&sum))
        };
        if self.limit.is_some() {
            return composed();
        }
        let fused = || self.fused(x, routing, residual);
        x.backend()
            .fused_at(Fused::Mixture, x, &self.site, fused, composed)
    }

    fn fused(&self, x: &Tensor, routing: &Routing, residual: Option<&Tensor>) -> Result<Tensor> {
        let args = MixtureArgs {
            x: x.handle(),
            experts: routing.experts.handle(),
            weights: routing.weights.handle(),
            gate: self.gate.raw(),
            up: self.up.raw(),
            down: self.down.raw(),
            kind: self.activation.glu_kind(),
            residual: Tensor::handle_of(residual),
            ..MixtureArgs::default()
        };
        let mut out = Handle::NONE;
        command!(x.backend().table(), mixture, &args, &mut out)?;
        Ok(Tensor::from_handle(x.backend(), out))
    }

    /// Output of each chosen expert: rows `[T, hidden]` and experts `[T, K]` give `[T, K, hidden]`.
    pub fn each(&self, x: &Tensor, experts: &Tensor) -> Result<Tensor> {
        let (rows, k) = (x.dim(0)?, experts.dim(1)?);
        let backend = x.backend();
        let x = x.unsqueeze(1)?; // [T, 1, hidden]: one matrix per row
        let row_of = Tensor::arange(backend, 0.0, rows as f64, 1.0, DType::U32)?
            .reshape(&[rows, 1])?
            .broadcast_to(&[rows, k])?;
        let gate = self.gate.forward(&x, &row_of, experts)?; // [T, K, 1, inner]
        let up = self.up.forward(&x, &row_of, experts)?;
        let inner = gated(self.activation, self.limit, &gate, &up)?;
        let width = inner.dim(-1)?;
        let flat = inner.reshape(&[rows * k, 1, width])?;
        let pair_of = Tensor::arange(backend, 0.0, (rows * k) as f64, 1.0, DType::U32)?
            .reshape(&[rows, k])?;
        let out = self.down.forward(&flat, &pair_of, experts)?; // [T, K, 1, hidden]
        let hidden = out.dim(-1)?;
        out.reshape(&[rows, k, hidden])
    }
}

fn load_stacked(weights: &Weights, n: usize, rows: usize, columns: usize) -> Result<Stack> {
    match weights.quant()? {
        Some(spec) => Ok(Stack::Quantized(quant::load(
            weights,
            spec,
            &[n as i64],
            rows,
            columns,
        )?)),
        None => Ok(Stack::Plain(
            weights
                .tensor("weight", &[n as i64, rows as i64, columns as i64])?
                .t()?,
        )),
    }
}

fn load_separate(parts: &[Weights], rows: usize, columns: usize) -> Result<Stack> {
    let Some(first) = parts.first() else {
        return Err(Error::Other(
            "a mixture of experts needs at least one expert".to_owned(),
        ));
    };
    let join = |tensors: Vec<Tensor>| -> Result<Tensor> {
        let tensors = tensors
            .iter()
            .map(|t| t.unsqueeze(0))
            .collect::<Result<Vec<_>>>()?;
        let joined = Tensor::concat(first.backend(), &tensors.iter().collect::<Vec<_>>(), 0)?;
        first.keep(&joined);
        Ok(joined)
    };
    let Some(spec) = first.quant()? else {
        let shape = [rows as i64, columns as i64];
        let plain = parts
            .iter()
            .map(|p| p.tensor("weight", &shape))
            .collect::<Result<Vec<_>>>()?;
        return Ok(Stack::Plain(join(plain)?.t()?));
    };
    let mut loaded = Vec::with_capacity(parts.len());
    for part in parts {
        let own = part.quant()?;
        let same = own.is_some_and(|own| {
            (own.mode, own.bits, own.group_size) == (spec.mode, spec.bits, spec.group_size)
        });
        if !same {
            return Err(Error::Quantization {
                name: part.path().to_owned(),
                message: format!(
                    "experts of one layer must be quantised alike, as {} is",
                    first.path()
                ),
            });
        }
        loaded.push(quant::load(part, spec, &[], rows, columns)?);
    }
    let weight = join(loaded.iter().map(|q| q.weight.clone()).collect())?;
    let scales = join(loaded.iter().map(|q| q.scales.clone()).collect())?;
    let biases: Vec<Tensor> = loaded.iter().filter_map(|q| q.biases.clone()).collect();
    let biases = if biases.is_empty() {
        None
    } else {
        Some(join(biases)?)
    };
    Ok(Stack::Quantized(QuantizedTensor {
        weight,
        scales,
        biases,
        spec,
    }))
}
