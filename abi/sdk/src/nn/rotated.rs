//! Attention over the host's cache with what happens to queries and keys before it: norms of heads and
//! the rotary embedding. One operation where host and backend have it, else one after another.

use mlxcel_abi::Tensor as Handle;
use mlxcel_abi::fused_args::RotateArgs;

use crate::backend::{Fused, FusedSite};
use crate::nn::{RmsNorm, Rope};
use crate::{AttendOptions, Result, Step, Tensor};

/// One layer's attention between its projections.
#[derive(Debug, Clone)]
pub struct RotatedAttention {
    layer: usize,
    heads: i64,
    kv_heads: i64,
    head_dim: i64,
    norms: Option<[RmsNorm; 2]>,
    rope: Option<Rope>,
    scale: f32,
    softcap: f32,
    site: FusedSite,
}

impl RotatedAttention {
    /// Attention of layer number `layer`, as in the model's description, with as many heads of
    /// queries, and of keys and values, each `head_dim` wide. Scores are multiplied by the square
    /// root of the reciprocal of that width.
    pub fn new(layer: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self {
            layer,
            heads: heads as i64,
            kv_heads: kv_heads as i64,
            head_dim: head_dim as i64,
            norms: None,
            rope: None,
            scale: (head_dim as f32).sqrt().recip(),
            softcap: 0.0,
            site: FusedSite::default(),
        }
    }

    /// Norms of the heads of queries and of keys, with one epsilon.
    #[must_use]
    pub fn with_norms(mut self, norms: Option<[RmsNorm; 2]>) -> Self {
        self.norms = norms;
        self
    }

    /// The rotary embedding; none for layers without positions.
    #[must_use]
    pub fn with_rope(mut self, rope: Option<Rope>) -> Self {
        self.rope = rope;
        self
    }

    /// Another factor of the scores, and their soft cap, 0 for none.
    #[must_use]
    pub fn with_scores(mut self, scale: f32, softcap: f32) -> Self {
        (self.scale, self.softcap) = (scale, softcap);
        self
    }

    /// `q` `[T, H * D]`, `k` and `v` `[T, Hkv * D]`, as projections give them, to `[T, H * D]`.
    pub fn forward(&self, [q, k, v]: [&Tensor; 3], step: &Step<'_>) -> Result<Tensor> {
        let options = AttendOptions {
            scale: self.scale,
            softcap: self.softcap,
            ..AttendOptions::default()
        };
        match self.rotation() {
            Some(rotate) => q.backend().fused_at(
                Fused::AttendRotated,
                q,
                &self.site,
                || step.attend_rotated(self.layer, [q, k, v], &options, &rotate),
                || self.composed([q, k, v], step, &options),
            ),
            None => self.composed([q, k, v], step, &options),
        }
    }

    /// The rotation as part of the fused operation; none where that cannot say it.
    fn rotation(&self) -> Option<RotateArgs> {
        let mut rotate = match &self.rope {
            Some(rope) => rope.raw()?,
            None => RotateArgs::default(),
        };
        if let Some([q_norm, k_norm]) = &self.norms {
            let ((q_weight, eps), (k_weight, k_eps)) = (q_norm.parts(), k_norm.parts());
            if eps != k_eps {
                return None;
            }
            rotate.normed = 1;
            rotate.eps = eps;
            let weights: [Handle; 2] = [q_weight.handle(), k_weight.handle()];
            [rotate.q_norm, rotate.k_norm] = weights;
        }
        Some(rotate)
    }

    fn composed(
        &self,
        [q, k, v]: [&Tensor; 3],
        step: &Step<'_>,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        let split = |t: &Tensor, heads: i64| t.reshape(&[-1, heads, self.head_dim]);
        let mut q = split(q, self.heads)?; // [T, H, D]
        let mut k = split(k, self.kv_heads)?; // [T, Hkv, D]
        let v = split(v, self.kv_heads)?;
        if let Some([q_norm, k_norm]) = &self.norms {
            q = q_norm.forward(&q)?;
            k = k_norm.forward(&k)?;
        }
        if let Some(rope) = &self.rope {
            q = rope.forward(&q, &step.positions)?;
            k = rope.forward(&k, &step.positions)?;
        }
        let y = step.attend(self.layer, &q, &k, &v, options)?; // [T, H, D]
        y.reshape(&[-1, self.heads * self.head_dim])
    }
}
