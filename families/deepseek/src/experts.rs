//! The mixture of experts of every generation: settings, which layers have one, and the block with
//! its shared experts, which are one wide gated block.

use mlxcel_sdk::nn::{Activation, Experts, FeedForward, GatedMlp};
use mlxcel_sdk::prelude::*;

use crate::config::DecoderConfig;
use crate::routing::{GroupRank, Groups, Router, RouterConfig};

const MOST: usize = 4096;

/// Feed-forward blocks of a model.
#[derive(Debug, Clone)]
pub(crate) struct MoeConfig {
    /// None in a model without experts.
    router: Option<RouterConfig>,
    /// Width of an expert.
    inner: usize,
    /// Width of all shared experts together.
    shared_inner: Option<usize>,
    /// Width of the dense block, by layer; none is experts.
    dense_inner: Vec<Option<usize>>,
}

impl MoeConfig {
    /// Reads the settings; `first_dense` is the class's `first_k_dense_replace`, `router` reads what is
    /// the architecture's own from the number of experts and of those that a row goes through.
    pub(crate) fn read(
        config: &Config<'_>,
        decoder: &DecoderConfig,
        first_dense: usize,
        router: impl Fn(usize, usize) -> Result<RouterConfig>,
    ) -> Result<Self> {
        let router = match expert_count(config)? {
            None => None,
            Some(n_experts) => {
                let top_k = config.uint_in("num_experts_per_tok", 1..=MOST)?;
                if top_k > n_experts {
                    let expected = format!("at most the number of experts ({n_experts})");
                    return Err(config.error("num_experts_per_tok", expected));
                }
                Some(router(n_experts, top_k)?)
            }
        };
        let sparse = match router {
            Some(_) => sparse_layers(config, decoder.n_layers, first_dense)?,
            None => vec![false; decoder.n_layers],
        };
        let dense_inner = sparse
            .iter()
            // Only dense layers have this width: a file without any need not give it.
            .map(|sparse| {
                (!sparse)
                    .then(|| config.uint("intermediate_size"))
                    .transpose()
            })
            .collect::<Result<Vec<_>>>()?;
        let (mut inner, mut shared_inner) = (0, None);
        if sparse.contains(&true) {
            inner = config.uint("moe_intermediate_size")?;
            let shared = config.opt_uint("n_shared_experts", 0..=MOST)?.unwrap_or(0);
            shared_inner = (shared > 0).then_some(shared * inner);
        }
        Ok(Self {
            router,
            inner,
            shared_inner,
            dense_inner,
        })
    }

    /// Width of the widest block, all experts of a row together.
    pub(crate) fn widest(&self) -> usize {
        let top_k = self.router.as_ref().map_or(0, |router| router.top_k);
        let sparse = top_k * self.inner + self.shared_inner.unwrap_or(0);
        let dense = self.dense_inner.iter().flatten().max();
        sparse.max(dense.copied().unwrap_or(0))
    }

    /// Loads one layer's block.
    pub(crate) fn load_layer(
        &self,
        layer: usize,
        at: &Weights,
        decoder: &DecoderConfig,
    ) -> Result<Box<dyn FeedForward>> {
        let (hidden, activation) = (decoder.hidden, decoder.activation);
        let dense = self.dense_inner.get(layer).copied().flatten();
        match (dense, &self.router) {
            (Some(inner), _) => Ok(Box::new(gated(at, hidden, inner, activation)?)),
            (None, Some(router)) => {
                Ok(Box::new(self.load_experts(at, router, hidden, activation)?))
            }
            (None, None) => Err(Error::Other(format!(
                "layer {layer} has no feed-forward block"
            ))),
        }
    }

    fn load_experts(
        &self,
        at: &Weights,
        router: &RouterConfig,
        hidden: usize,
        activation: Activation,
    ) -> Result<SparseMlp> {
        let shared = self
            .shared_inner
            .map(|inner| gated(&at.at("shared_experts"), hidden, inner, activation));
        Ok(SparseMlp {
            router: Router::load(&at.at("gate"), hidden, router.clone())?,
            experts: Experts::load(
                &at.at("experts"),
                &at.at("switch_mlp"),
                ["gate_proj", "up_proj", "down_proj"],
                router.n_experts,
                hidden,
                self.inner,
                activation,
            )?,
            shared: shared.transpose()?,
        })
    }
}

fn gated(at: &Weights, hidden: usize, inner: usize, activation: Activation) -> Result<GatedMlp> {
    GatedMlp::load(at, hidden, inner, false, activation)
}

/// The number of experts under the published name or one of those that transformers knows it by.
/// A null is a model without experts.
fn expert_count(config: &Config<'_>) -> Result<Option<usize>> {
    const NAMES: [&str; 3] = ["n_routed_experts", "num_local_experts", "num_experts"];
    let mut count: Option<(&str, usize)> = None;
    for name in NAMES {
        let Some(own) = config.opt_uint(name, 1..=MOST)? else {
            continue;
        };
        match count {
            Some((first, other)) if other != own => {
                return Err(config.error(name, format!("the same as {first} ({other})")));
            }
            _ => count = Some((name, own)),
        }
    }
    if count.is_none() && !NAMES.iter().any(|name| config.is_null(name)) {
        let expected = format!("an integer from 1 to {MOST}, or null in a model without experts");
        return Err(config.error("n_routed_experts", expected));
    }
    Ok(count.map(|(_, count)| count))
}

/// Layers with experts: those that `mlp_layer_types` calls sparse, or every `moe_layer_freq`-th one
/// after the first `first_k_dense_replace`.
fn sparse_layers(config: &Config<'_>, n_layers: usize, first_dense: usize) -> Result<Vec<bool>> {
    const FIRST: &str = "first_k_dense_replace";
    const EVERY: &str = "moe_layer_freq";
    const TYPES: &str = "mlp_layer_types";
    let first = config.opt_uint(FIRST, 0..=MOST)?;
    let every = config.opt_uint(EVERY, 1..=MOST)?;
    let counted = |first: usize| -> Vec<bool> {
        let every = every.unwrap_or(1);
        let is_sparse = |layer: usize| layer >= first && layer.is_multiple_of(every);
        (0..n_layers).map(is_sparse).collect()
    };
    let Some(types) = config.opt_strs(TYPES)? else {
        return Ok(counted(first.unwrap_or(first_dense)));
    };
    if types.len() != n_layers {
        let found = types.len();
        let expected = format!("one entry for each of {n_layers} layers, not {found}");
        return Err(config.error(TYPES, expected));
    }
    let is_sparse = |(layer, &kind): (usize, &&str)| match kind {
        "dense" => Ok(false),
        "sparse" => Ok(true),
        _ => Err(config.unsupported_entry(TYPES, layer, "known types are dense and sparse")),
    };
    let listed: Vec<bool> = types
        .iter()
        .enumerate()
        .map(is_sparse)
        .collect::<Result<_>>()?;
    if let Some(key) = config.spelled(&[FIRST, EVERY]) {
        let from_list = || listed.iter().position(|sparse| *sparse).unwrap_or(n_layers);
        let counted = counted(first.unwrap_or_else(from_list));
        let differs = counted.iter().zip(&listed).position(|(a, b)| a != b);
        if let Some(layer) = differs {
            let kind = types.get(layer).copied().unwrap_or_default();
            let expected = format!(
                "a number with which layer {layer} is {kind}, as {TYPES} beside it says, or only one of the two"
            );
            return Err(config.error(key, expected));
        }
    }
    Ok(listed)
}

/// Reads `n_group` and `topk_group`, of which `default` are the class's. One group is none.
pub(crate) fn read_groups(
    config: &Config<'_>,
    rank: GroupRank,
    default: (usize, usize),
    n_experts: usize,
    top_k: usize,
) -> Result<Option<Groups>> {
    let read = |key: &str, class: usize| -> Result<usize> {
        let absent = if config.is_null(key) { 1 } else { class };
        Ok(config.opt_uint(key, 1..=MOST)?.unwrap_or(absent))
    };
    let (count, taken) = (read("n_group", default.0)?, read("topk_group", default.1)?);
    let least = if rank == GroupRank::BestTwo { 2 } else { 1 };
    if !n_experts.is_multiple_of(count) || n_experts / count < least {
        let expected = format!(
            "a number that divides the experts ({n_experts}) into groups of {least} or more (this is {count})"
        );
        return Err(config.error("n_group", expected));
    }
    if taken > count {
        return Err(config.error("topk_group", format!("at most n_group ({count})")));
    }
    let reachable = taken * (n_experts / count);
    if top_k > reachable {
        let expected = format!("at most the {reachable} experts of {taken} groups");
        return Err(config.error("num_experts_per_tok", expected));
    }
    Ok((count > 1).then_some(Groups { count, taken, rank }))
}

/// Routed experts and the shared ones, which every row goes through.
struct SparseMlp {
    router: Router,
    experts: Experts,
    shared: Option<GatedMlp>,
}

impl FeedForward for SparseMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let routed = self.experts.forward(x, &self.router.forward(x)?)?;
        match &self.shared {
            Some(shared) => routed.add(&shared.forward(x)?),
            None => Ok(routed),
        }
    }
}
