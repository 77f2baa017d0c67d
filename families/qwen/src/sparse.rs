//! The mixture of experts of both generations: settings, which layers have one, and the block with
//! its optional shared expert.

use mlxcel_sdk::nn::{Activation, Experts, FeedForward, GatedMlp, Linear, RmsNorm, TopKRouter};
use mlxcel_sdk::prelude::*;

/// Values of a configuration that does not give them.
pub(crate) struct SparseDefaults {
    pub n_experts: usize,
    pub top_k: usize,
    pub renormalise: bool,
}

/// Feed-forward blocks of a model with experts.
#[derive(Debug, Clone)]
pub(crate) struct SparseConfig {
    n_experts: usize,
    top_k: usize,
    /// The chosen scores are made to sum to 1.
    renormalise: bool,
    /// Width of an expert.
    inner: usize,
    /// Width of the expert that every row goes through.
    shared_inner: Option<usize>,
    /// Width of the dense block, by layer; none is experts.
    dense_inner: Vec<Option<usize>>,
}

impl SparseConfig {
    pub(crate) fn read(
        config: &Config<'_>,
        n_layers: usize,
        defaults: &SparseDefaults,
        shared_inner: Option<usize>,
    ) -> Result<Self> {
        let n_experts = expert_count(config)?.unwrap_or(defaults.n_experts);
        let top_k = config
            .opt_uint("num_experts_per_tok", 1..=4096)?
            .unwrap_or(defaults.top_k);
        if top_k > n_experts {
            let expected = format!("at most the number of experts ({n_experts})");
            return Err(config.error("num_experts_per_tok", expected));
        }
        Ok(Self {
            n_experts,
            top_k,
            renormalise: config.bool_or("norm_topk_prob", defaults.renormalise)?,
            inner: config.uint("moe_intermediate_size")?,
            shared_inner,
            dense_inner: dense_layers(config, n_layers)?,
        })
    }

    /// Width of the widest block, all experts of a row together.
    pub(crate) fn widest(&self) -> usize {
        let sparse = self.top_k * self.inner + self.shared_inner.unwrap_or(0);
        let dense = self.dense_inner.iter().flatten().max();
        sparse.max(dense.copied().unwrap_or(0))
    }

    /// Loads one layer's block.
    pub(crate) fn load_layer(
        &self,
        layer: usize,
        at: &Weights,
        hidden: usize,
        activation: Activation,
    ) -> Result<Box<dyn FeedForward>> {
        let gated = |at: &Weights, inner| GatedMlp::load(at, hidden, inner, false, activation);
        if let Some(inner) = self.dense_inner.get(layer).copied().flatten() {
            return Ok(Box::new(gated(at, inner)?));
        }
        let (n, k) = (self.n_experts, self.top_k);
        let router = TopKRouter::load(&at.at("gate"), hidden, n, k, self.renormalise)?;
        let experts = Experts::load(
            &at.at("experts"),
            &at.at("switch_mlp"),
            ["gate_proj", "up_proj", "down_proj"],
            n,
            hidden,
            self.inner,
            activation,
        )?;
        let shared = match self.shared_inner {
            Some(inner) => Some(SharedExpert {
                gate: Linear::load(&at.at("shared_expert_gate"), hidden, 1, false)?,
                mlp: gated(&at.at("shared_expert"), inner)?,
            }),
            None => None,
        };
        Ok(Box::new(SparseMlp {
            router,
            experts,
            shared,
        }))
    }
}

/// The count under either name: `num_experts` as published, `num_local_experts` as transformers 5
/// saves qwen3_moe.
fn expert_count(config: &Config<'_>) -> Result<Option<usize>> {
    let published = config.opt_uint("num_experts", 1..=4096)?;
    let renamed = config.opt_uint("num_local_experts", 1..=4096)?;
    match (published, renamed) {
        (Some(a), Some(b)) if a != b => Err(config.error(
            "num_local_experts",
            format!("the same as num_experts ({a})"),
        )),
        _ => Ok(published.or(renamed)),
    }
}

/// Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` lists it.
fn dense_layers(config: &Config<'_>, n_layers: usize) -> Result<Vec<Option<usize>>> {
    let step = config.uint_or("decoder_sparse_step", 1)?;
    let dense = config.opt_uints("mlp_only_layers")?.unwrap_or_default();
    if dense.iter().any(|&layer| layer >= n_layers) {
        let expected = format!("layer numbers below num_hidden_layers ({n_layers})");
        return Err(config.error("mlp_only_layers", expected));
    }
    (0..n_layers)
        .map(|layer| {
            let sparse = (layer + 1).is_multiple_of(step) && !dense.contains(&layer);
            // Only dense layers have this width: a file without any need not give it.
            (!sparse)
                .then(|| config.uint("intermediate_size"))
                .transpose()
        })
        .collect()
}

/// Routed experts, and the shared one where the model has it.
struct SparseMlp {
    router: TopKRouter,
    experts: Experts,
    shared: Option<SharedExpert>,
}

/// `sigmoid(gate(x)) * mlp(x)`.
struct SharedExpert {
    gate: Linear,
    mlp: GatedMlp,
}

impl FeedForward for SparseMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let routed = self.experts.forward(x, &self.router.forward(x)?)?;
        match &self.shared {
            Some(shared) => routed.add(&shared.forward(x)?),
            None => Ok(routed),
        }
    }

    fn forward_onto(&self, x: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        let normed = norm.forward(x)?;
        if self.shared.is_some() {
            return x.add(&self.forward(&normed)?);
        }
        let routing = self.router.forward(&normed)?;
        self.experts.forward_onto(&normed, &routing, x)
    }
}

impl SharedExpert {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let share = self.gate.forward(x)?.sigmoid()?; // [T, 1]
        self.mlp.forward(x)?.mul(&share)
    }
}
