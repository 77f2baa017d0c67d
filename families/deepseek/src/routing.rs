//! Choice of experts. Scores are computed in f32, as in the reference: which expert is chosen
//! hangs on small differences.

use mlxcel_sdk::nn::Routing;
use mlxcel_sdk::prelude::*;

/// How logits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scoring {
    Softmax,
    Sigmoid,
    /// Square root of the softplus (DeepSeek-V4).
    SqrtSoftplus,
}

/// What ranks a group of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GroupRank {
    /// Its best score (`group_limited_greedy`, DeepSeek-V2).
    Best,
    /// The sum of its two best scores (`noaux_tc`, DeepSeek-V3).
    BestTwo,
}

/// Experts are taken from the best groups only.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Groups {
    pub count: usize,
    pub taken: usize,
    pub rank: GroupRank,
}

/// Settings of a router.
#[derive(Debug, Clone)]
pub(crate) struct RouterConfig {
    pub n_experts: usize,
    pub top_k: usize,
    pub scoring: Scoring,
    /// Name of a learned bias per expert that counts in the choice and not in the weights.
    pub selection_bias: Option<&'static str>,
    pub groups: Option<Groups>,
    /// The chosen scores are made to sum to 1.
    pub renormalise: bool,
    /// Multiplies the weights.
    pub scale: f64,
}

/// A loaded router.
#[derive(Debug, Clone)]
pub(crate) struct Router {
    config: RouterConfig,
    /// f32 `[H, E]` view.
    gate: Tensor,
    /// f32 `[E]`.
    bias: Option<Tensor>,
}

impl Router {
    /// Loads `weight` `[E, H]` and, where there is one, the bias `[E]`.
    pub(crate) fn load(weights: &Weights, hidden: usize, config: RouterConfig) -> Result<Self> {
        let experts = config.n_experts as i64;
        let gate = weights.single("weight", &[experts, hidden as i64])?.t()?;
        let bias = config
            .selection_bias
            .map(|name| weights.single(name, &[experts]))
            .transpose()?;
        Ok(Self { config, gate, bias })
    }

    /// Routes `[T, H]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Routing> {
        let scores = self.scores(x)?;
        let mut ranking = match &self.bias {
            Some(bias) => scores.add(bias)?,
            None => scores.clone(),
        };
        if let Some(groups) = self.config.groups.filter(|g| g.taken < g.count) {
            ranking = within_best_groups(&ranking, groups)?;
        }
        let experts = best(&ranking, self.config.top_k)?; // [T, K]
        self.weigh(&scores, experts, x.dtype()?)
    }

    /// Weighs experts that were chosen otherwise, `[T, K]` u32.
    pub(crate) fn forward_chosen(&self, x: &Tensor, experts: Tensor) -> Result<Routing> {
        self.weigh(&self.scores(x)?, experts, x.dtype()?)
    }

    /// f32 `[T, E]`.
    fn scores(&self, x: &Tensor) -> Result<Tensor> {
        let logits = x.cast(DType::F32)?.matmul(&self.gate)?;
        match self.config.scoring {
            Scoring::Softmax => logits.softmax(-1),
            Scoring::Sigmoid => logits.sigmoid(),
            Scoring::SqrtSoftplus => logits.softplus()?.sqrt(),
        }
    }

    fn weigh(&self, scores: &Tensor, experts: Tensor, dtype: DType) -> Result<Routing> {
        let mut weights = scores.take_along(&experts, 1)?;
        if self.config.renormalise {
            let sum = weights.sum(&[1], true)?.add_scalar(1e-20)?;
            weights = weights.div(&sum)?;
        }
        if self.config.scale != 1.0 {
            weights = weights.mul_scalar(self.config.scale)?;
        }
        Ok(Routing {
            experts,
            weights: weights.cast(dtype)?,
        })
    }
}

/// Places of the `count` largest along the last axis of `[T, N]`: `[T, count]`.
pub(crate) fn best(scores: &Tensor, count: usize) -> Result<Tensor> {
    let (n, count) = (scores.dim(1)?, count as i64);
    if n == count {
        return scores.argsort(-1);
    }
    scores
        .argpartition(n - count, -1)?
        .narrow(1, n - count, count)
}

/// `[T, E]` with minus infinity outside the best groups of every row.
fn within_best_groups(ranking: &Tensor, groups: Groups) -> Result<Tensor> {
    let (rows, experts, count) = (ranking.dim(0)?, ranking.dim(1)?, groups.count as i64);
    let size = experts / count;
    let grouped = ranking.reshape(&[rows, count, size])?;
    let rank = match groups.rank {
        GroupRank::Best => grouped.max(&[2], false)?,
        GroupRank::BestTwo if size > 2 => grouped.topk(2, 2)?.sum(&[2], false)?,
        GroupRank::BestTwo => grouped.sum(&[2], false)?,
    }; // [T, G]
    let chosen = best(&rank, groups.taken)?; // [T, taken]
    let backend = ranking.backend();
    let ones = Tensor::full(backend, 1.0, DType::F32, &[rows, groups.taken as i64])?;
    let taken = Tensor::zeros(backend, DType::F32, &[rows, count])?
        .put_along(&chosen, &ones, 1)?
        .gt_scalar(0.0)?
        .reshape(&[rows, count, 1])?
        .broadcast_to(&[rows, count, size])?;
    let nothing = Tensor::full(backend, f64::NEG_INFINITY, DType::F32, &[rows, count, size])?;
    taken.select(&grouped, &nothing)?.reshape(&[rows, experts])
}
