//! Attention of gemma3n and gemma4: norms of query, key and value heads, no scaling of scores, and
//! layers without keys and values of their own, which read the cache of an earlier layer.

use mlxcel_sdk::nn::{Linear, RmsNorm, Rope, RotatedAttention, project};
use mlxcel_sdk::prelude::*;

/// One layer's part.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub layer: usize,
    /// The layer whose cache is read; this one where it has its own.
    pub owner: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub eps: f32,
    pub bias: bool,
    /// Values are the keys' projection, before norm and rotation.
    pub value_is_key: bool,
}

struct KeyValue {
    k: Linear,
    v: Option<Linear>,
    inner: RotatedAttention,
}

/// See the module.
pub(crate) struct Attention {
    shape: Shape,
    rope: Rope,
    q: Linear,
    q_norm: RmsNorm,
    own: Option<KeyValue>,
    o: Linear,
}

impl Attention {
    pub(crate) fn load(at: &Weights, shape: Shape, rope: Rope) -> Result<Self> {
        let (hidden, head_dim, eps, bias) = (shape.hidden, shape.head_dim, shape.eps, shape.bias);
        let width = shape.heads * head_dim;
        let kv_width = shape.kv_heads * head_dim;
        let q_norm = RmsNorm::load(&at.at("q_norm"), head_dim, eps)?;
        let own = if shape.owner == shape.layer {
            let k_norm = RmsNorm::load(&at.at("k_norm"), head_dim, eps)?;
            let linear = |name: &str| Linear::load(&at.at(name), hidden, kv_width, bias);
            Some(KeyValue {
                k: linear("k_proj")?,
                v: (!shape.value_is_key)
                    .then(|| linear("v_proj"))
                    .transpose()?,
                inner: RotatedAttention::new(shape.layer, shape.heads, shape.kv_heads, head_dim)
                    .with_norms(Some([q_norm.clone(), k_norm]))
                    .with_rope(Some(rope.clone()))
                    .with_scores(1.0, 0.0),
            })
        } else {
            // Published files hold them all the same; nothing reads them.
            for name in ["k_proj", "v_proj", "k_norm", "v_norm"] {
                at.at(name).ignore_all();
            }
            None
        };
        Ok(Self {
            q: Linear::load(&at.at("q_proj"), hidden, width, bias)?,
            q_norm,
            own,
            o: Linear::load(&at.at("o_proj"), width, hidden, bias)?,
            rope,
            shape,
        })
    }

    /// `[T, hidden]` to `[T, hidden]`, of the norm of `x` where there is one.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        norm: Option<&RmsNorm>,
        step: &Step<'_>,
    ) -> Result<Tensor> {
        let y = match &self.own {
            Some(own) => {
                let (q, k, v) = match &own.v {
                    Some(v) => {
                        let [q, k, v] = project(x, norm, [&self.q, &own.k, v])?;
                        (q, k, v)
                    }
                    None => {
                        let [q, k] = project(x, norm, [&self.q, &own.k])?;
                        (q, k.clone(), k)
                    }
                };
                let v = self.split(&v, self.shape.kv_heads)?; // [T, Hkv, D]
                let v = v.rms_norm(None, self.shape.eps)?;
                let width = self.shape.kv_heads * self.shape.head_dim;
                let v = v.reshape(&[-1, width as i64])?;
                own.inner.forward([&q, &k, &v], step)?
            }
            None => {
                let [q] = project(x, norm, [&self.q])?;
                let q = self.split(&q, self.shape.heads)?; // [T, H, D]
                let q = self
                    .rope
                    .forward(&self.q_norm.forward(&q)?, &step.positions)?;
                let options = AttendOptions {
                    scale: 1.0,
                    ..AttendOptions::default()
                };
                let y = step.attend_shared(self.shape.owner, &q, &options)?;
                y.reshape(&[-1, (self.shape.heads * self.shape.head_dim) as i64])?
            }
        };
        self.o.forward(&y)
    }

    fn split(&self, t: &Tensor, heads: usize) -> Result<Tensor> {
        t.reshape(&[-1, heads as i64, self.shape.head_dim as i64])
    }
}
