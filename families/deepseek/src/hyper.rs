//! Manifold-constrained hyper-connections (DeepSeek-V4, section 2.2): the residual is several
//! streams. A block reads a weighted sum of them, and what it gives is spread over all of them while
//! they are mixed by a matrix whose rows and columns sum to 1.

use mlxcel_sdk::prelude::*;

/// Settings of all hyper-connections of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HyperConfig {
    pub streams: usize,
    /// Rounds in which rows and columns are made to sum to 1 (Sinkhorn and Knopp 1967).
    pub rounds: usize,
    pub eps: f64,
    pub norm_eps: f32,
}

/// Weights of the streams from the streams: `sigmoid or softmax (scale * (fn x) + base)`, in f32.
struct Projection {
    /// `[streams * H, outputs]` view.
    matrix: Tensor,
    /// `[outputs]`.
    base: Tensor,
    /// `[outputs]`.
    scale: Tensor,
    norm_eps: f32,
}

impl Projection {
    /// Loads three tensors; `parts` are the numbers of outputs that share one element of the scale.
    fn load(
        weights: &Weights,
        names: [&str; 3],
        parts: &[usize],
        inputs: usize,
        norm_eps: f32,
    ) -> Result<Self> {
        let [matrix, base, scale] = names;
        let outputs = parts.iter().sum::<usize>() as i64;
        let scales = weights.single(scale, &[parts.len() as i64])?;
        let spread = parts
            .iter()
            .enumerate()
            .map(|(i, &n)| scales.narrow(0, i as i64, 1)?.broadcast_to(&[n as i64]))
            .collect::<Result<Vec<_>>>()?;
        let spread = Tensor::concat(weights.backend(), &spread.iter().collect::<Vec<_>>(), 0)?;
        weights.keep(&spread);
        Ok(Self {
            matrix: weights.single(matrix, &[outputs, inputs as i64])?.t()?,
            base: weights.single(base, &[outputs])?,
            scale: spread,
            norm_eps,
        })
    }

    /// f32 `[T, streams, H]` to `[T, outputs]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, width) = (x.dim(0)?, x.dim(1)? * x.dim(2)?);
        x.reshape(&[rows, width])?
            .rms_norm(None, self.norm_eps)?
            .matmul(&self.matrix)?
            .mul(&self.scale)?
            .add(&self.base)
    }
}

/// `sum_n weights[t, n] x[t, n]`: f32 `[T, N]` and `[T, N, H]` to `[T, H]`.
fn weighted(weights: &Tensor, x: &Tensor) -> Result<Tensor> {
    let width = x.dim(2)?;
    weights.unsqueeze(1)?.matmul(x)?.reshape(&[-1, width])
}

/// The connection of one half of a block.
pub(crate) struct HyperConnection {
    config: HyperConfig,
    projection: Projection,
}

/// What a block's input leaves behind for its output.
pub(crate) struct Spread {
    /// f32 `[T, N, 1]`.
    post: Tensor,
    /// f32 `[T, N, N]`, transposed.
    mix: Tensor,
    /// f32 `[T, N, H]`.
    streams: Tensor,
    dtype: DType,
}

impl HyperConnection {
    /// Loads `hc_<half>_fn`, `_base` and `_scale` of a layer.
    pub(crate) fn load(
        weights: &Weights,
        half: &str,
        hidden: usize,
        config: HyperConfig,
    ) -> Result<Self> {
        let n = config.streams;
        let name = |part: &str| format!("hc_{half}_{part}");
        let (matrix, base, scale) = (name("fn"), name("base"), name("scale"));
        Ok(Self {
            config,
            projection: Projection::load(
                weights,
                [&matrix, &base, &scale],
                &[n, n, n * n],
                n * hidden,
                config.norm_eps,
            )?,
        })
    }

    /// The block's input `[T, H]` from the streams `[T, N, H]`.
    pub(crate) fn collapse(&self, x: &Tensor) -> Result<(Tensor, Spread)> {
        let HyperConfig {
            streams,
            rounds,
            eps,
            ..
        } = self.config;
        let n = streams as i64;
        let dtype = x.dtype()?;
        let x = x.cast(DType::F32)?;
        let mixes = self.projection.forward(&x)?; // [T, (2 + N) N]
        let pre = mixes.narrow(1, 0, n)?.sigmoid()?.add_scalar(eps)?;
        let post = mixes.narrow(1, n, n)?.sigmoid()?.mul_scalar(2.0)?;
        let mut mix = mixes
            .narrow(1, 2 * n, n * n)?
            .reshape(&[-1, n, n])?
            .softmax(-1)?
            .add_scalar(eps)?;
        let normed = |mix: &Tensor, axis: i32| mix.div(&mix.sum(&[axis], true)?.add_scalar(eps)?);
        mix = normed(&mix, 1)?;
        for _ in 1..rounds {
            mix = normed(&normed(&mix, 2)?, 1)?;
        }
        let spread = Spread {
            post: post.unsqueeze(2)?,
            mix: mix.t()?,
            streams: x.clone(),
            dtype,
        };
        Ok((weighted(&pre, &x)?.cast(dtype)?, spread))
    }
}

impl Spread {
    /// The streams after a block that gave `[T, H]`.
    pub(crate) fn expand(&self, y: &Tensor) -> Result<Tensor> {
        let y = y.cast(DType::F32)?.unsqueeze(1)?; // [T, 1, H]
        let mixed = self.mix.matmul(&self.streams)?; // [T, N, H]
        self.post.mul(&y)?.add(&mixed)?.cast(self.dtype)
    }
}

/// The last sum of the streams, before the final norm.
pub(crate) struct HyperHead {
    projection: Projection,
    eps: f64,
}

impl HyperHead {
    /// Loads `hc_head_fn` and so on as published, or `hc_head.hc_fn` as transformers saves them.
    pub(crate) fn load(weights: &Weights, hidden: usize, config: HyperConfig) -> Result<Self> {
        let n = config.streams;
        let names = if weights.contains("hc_head.hc_fn") {
            ["hc_head.hc_fn", "hc_head.hc_base", "hc_head.hc_scale"]
        } else {
            ["hc_head_fn", "hc_head_base", "hc_head_scale"]
        };
        Ok(Self {
            projection: Projection::load(weights, names, &[n], n * hidden, config.norm_eps)?,
            eps: config.eps,
        })
    }

    /// `[R, N, H]` to `[R, H]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let dtype = x.dtype()?;
        let x = x.cast(DType::F32)?;
        let pre = self.projection.forward(&x)?.sigmoid()?;
        weighted(&pre.add_scalar(self.eps)?, &x)?.cast(dtype)
    }
}
