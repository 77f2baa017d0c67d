//! Attention of gemma3n and gemma4: norms of query, key and value heads, no scaling of scores, and
//! layers without keys and values of their own, which read the cache of an earlier layer.

use mlxcel_sdk::nn::{Linear, RmsNorm, Rope};
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
    k_norm: RmsNorm,
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
        let own = if shape.owner == shape.layer {
            let linear = |name: &str| Linear::load(&at.at(name), hidden, kv_width, bias);
            Some(KeyValue {
                k: linear("k_proj")?,
                v: (!shape.value_is_key)
                    .then(|| linear("v_proj"))
                    .transpose()?,
                k_norm: RmsNorm::load(&at.at("k_norm"), head_dim, eps)?,
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
            q_norm: RmsNorm::load(&at.at("q_norm"), head_dim, eps)?,
            own,
            o: Linear::load(&at.at("o_proj"), width, hidden, bias)?,
            rope,
            shape,
        })
    }

    /// `[T, hidden]` to `[T, hidden]`.
    pub(crate) fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let (heads, kv_heads, head_dim) = (
            self.shape.heads as i64,
            self.shape.kv_heads as i64,
            self.shape.head_dim as i64,
        );
        let rotate = |t: &Tensor| self.rope.forward(t, &step.positions);
        let q = self.q.forward(x)?.reshape(&[-1, heads, head_dim])?; // [T, H, D]
        let q = rotate(&self.q_norm.forward(&q)?)?;
        let options = AttendOptions {
            scale: 1.0,
            ..AttendOptions::default()
        };
        let y = match &self.own {
            Some(own) => {
                let split = |t: Tensor| t.reshape(&[-1, kv_heads, head_dim]);
                let k = split(own.k.forward(x)?)?; // [T, Hkv, D]
                let v = match &own.v {
                    Some(v) => split(v.forward(x)?)?,
                    None => k.clone(),
                };
                let v = v.rms_norm(None, self.shape.eps)?;
                let k = rotate(&own.k_norm.forward(&k)?)?;
                step.attend(self.shape.layer, &q, &k, &v, &options)?
            }
            None => step.attend_shared(self.shape.owner, &q, &options)?,
        };
        self.o.forward(&y.reshape(&[-1, heads * head_dim])?)
    }
}
