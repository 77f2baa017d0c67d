//! The projections of an attention layer: of all heads, or of this rank's where the model is split over ranks.

use crate::nn::Linear;
use crate::ranks::Share;
use crate::{Result, Weights};

/// Sizes of a whole layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadSizes {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// `q_proj`, `k_proj`, `v_proj` and `o_proj`, and how many heads they are of.
#[derive(Debug, Clone)]
pub struct HeadProjections {
    /// `[T, hidden]` to `[T, heads * head_dim]`.
    pub q: Linear,
    /// `[T, hidden]` to `[T, kv_heads * head_dim]`.
    pub k: Linear,
    /// As `k`.
    pub v: Linear,
    /// `[T, heads * head_dim]` to `[T, hidden]`, summed over the ranks.
    pub o: Linear,
    /// Query heads of this rank.
    pub heads: usize,
    /// Key and value heads of this rank.
    pub kv_heads: usize,
}

impl HeadProjections {
    /// Loads the four, with biases of the first three and of the last where they are wanted.
    pub fn load(
        weights: &Weights,
        sizes: HeadSizes,
        qkv_bias: bool,
        out_bias: bool,
    ) -> Result<Self> {
        let HeadSizes {
            hidden,
            heads,
            kv_heads,
            head_dim,
        } = sizes;
        let shares = weights.ranks().map(|ranks| ranks.heads(heads, kv_heads));
        let shares = shares.transpose()?;
        let queries = shares.map(|all| all.queries);
        let keys = shares.map(|all| all.keys);
        let linear = |name: &str, heads: usize, share: Option<Share>| {
            let (at, width) = (weights.at(name), heads * head_dim);
            match share {
                None => Linear::load(&at, hidden, width, qkv_bias),
                Some(share) => Linear::load_share(&at, hidden, width, qkv_bias, share),
            }
        };
        let part = |heads: usize, share: Option<Share>| heads / share.map_or(1, |s| s.count);
        Ok(Self {
            q: linear("q_proj", heads, queries)?,
            k: linear("k_proj", kv_heads, keys)?,
            v: linear("v_proj", kv_heads, keys)?,
            o: Linear::load_inputs(&weights.at("o_proj"), heads * head_dim, hidden, out_bias)?,
            heads: part(heads, queries),
            kv_heads: part(kv_heads, keys),
        })
    }
}
