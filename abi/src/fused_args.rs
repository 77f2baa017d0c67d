//! Argument structs of the fused operations and of sampling (minor 2).
//!
//! A fused operation gives what its parts give one after another, within the rounding of its dtype.
//! It exists so that a device reads an activation once and is called once. All are optional: the SDK
//! composes what a backend lacks.

use crate::ops_args::QuantizedWeight;
use crate::types::Tensor;

abi_args! {
    /// One linear layer of a fused operation. Passed in arrays and by value, hence frozen.
    pub struct LinearWeight {
        /// `[K, N]`, as `matmul` takes it; none where the weight is quantised.
        pub plain: Tensor = Tensor::NONE,
        /// `[N, K]`; used where `plain` is none.
        pub quantized: QuantizedWeight = QuantizedWeight::default(),
        /// Optional `[N]`.
        pub bias: Tensor = Tensor::NONE,
    }
}

abi_args! {
    /// The RMS norm before a fused operation. Nested by value, hence frozen.
    pub struct InputNorm {
        /// 1: the input is normed first. 0: the rest is not read.
        pub normed: u32 = 0,
        /// Added to the mean of squares.
        pub eps: f32 = 0.0,
        /// Optional `[K]`.
        pub weight: Tensor = Tensor::NONE,
    }
}

abi_args! {
    /// Arguments of `project`: linear layers over one input.
    pub struct ProjectArgs {
        /// `[T, K]`.
        pub x: Tensor = Tensor::NONE,
        /// Norm of `x` before the products.
        pub norm: InputNorm = InputNorm::default(),
        /// The layers, all with K inputs.
        pub layers: *const LinearWeight = core::ptr::null(),
        /// Number of layers, and of results.
        pub n_layers: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
        /// Optional `[T, N]`, added to the result; only with one layer.
        pub residual: Tensor = Tensor::NONE,
    }
}

abi_args! {
    /// Arguments of `gated_mlp`: `down(f(gate(x)) * up(x))`.
    pub struct GatedMlpArgs {
        /// `[T, K]`.
        pub x: Tensor = Tensor::NONE,
        /// Norm of `x` before the products.
        pub norm: InputNorm = InputNorm::default(),
        /// K inputs, N outputs.
        pub gate: LinearWeight = LinearWeight::default(),
        /// K inputs, N outputs.
        pub up: LinearWeight = LinearWeight::default(),
        /// N inputs, K outputs.
        pub down: LinearWeight = LinearWeight::default(),
        /// One of [`crate::kinds::glu`].
        pub kind: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
        /// Optional `[T, K]`, added to the result.
        pub residual: Tensor = Tensor::NONE,
    }
}

abi_args! {
    /// What happens to queries and keys between their projection and the cache: a norm of every head,
    /// then a rotation.
    pub struct RotateArgs {
        /// 1: every head of the queries and of the keys is RMS-normed over its D elements first.
        pub normed: u32 = 0,
        /// Added to the mean of squares.
        pub eps: f32 = 0.0,
        /// Optional `[D]`, weight of the queries' norm.
        pub q_norm: Tensor = Tensor::NONE,
        /// Optional `[D]`, weight of the keys' norm.
        pub k_norm: Tensor = Tensor::NONE,
        /// Features rotated by the rows' positions, even, at most D; 0 rotates nothing.
        pub dims: u32 = 0,
        /// As in [`crate::ops_args::RopeArgs`].
        pub interleaved: u32 = 0,
        /// As in [`crate::ops_args::RopeArgs`].
        pub base: f32 = 10_000.0,
        /// As in [`crate::ops_args::RopeArgs`].
        pub scale: f32 = 1.0,
        /// As in [`crate::ops_args::RopeArgs`].
        pub freqs: Tensor = Tensor::NONE,
    }
}

abi_args! {
    /// Arguments of `route` (minor 4): the `top_k` experts with the highest logits of every row, in any
    /// order, and their softmax probabilities.
    pub struct RouteArgs {
        /// `[T, E]`, float.
        pub logits: Tensor = Tensor::NONE,
        /// 1 to E.
        pub top_k: u32 = 0,
        /// 1: the softmax is over the chosen alone, so that they sum to 1. 0: over all E.
        pub renormalised: u32 = 0,
    }
}

abi_args! {
    /// Arguments of `mixture` (minor 4): for every row the sum over its experts of
    /// `weight * down(f(gate(x)) * up(x))`.
    ///
    /// The layers are stacks: `plain` is `[E, K, N]` and `quantized` `[E, N, K]`; none has a bias.
    pub struct MixtureArgs {
        /// `[T, K]`.
        pub x: Tensor = Tensor::NONE,
        /// `[T, C]` u32, below E.
        pub experts: Tensor = Tensor::NONE,
        /// `[T, C]` in `x`'s dtype.
        pub weights: Tensor = Tensor::NONE,
        /// K inputs, N outputs.
        pub gate: LinearWeight = LinearWeight::default(),
        /// K inputs, N outputs.
        pub up: LinearWeight = LinearWeight::default(),
        /// N inputs, K outputs.
        pub down: LinearWeight = LinearWeight::default(),
        /// One of [`crate::kinds::glu`].
        pub kind: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
        /// Optional `[T, K]`, added to the result.
        pub residual: Tensor = Tensor::NONE,
    }
}

abi_args! {
    /// Arguments of `sample`: one token for every row of logits. All is in the order of rank: highest
    /// logit first, lower id first among equals. What is minus infinity is never taken.
    ///
    /// 1. The `top_k` first are kept.
    /// 2. With `top_p` below 1, of those as many from the first on as it takes for their sum of
    ///    probabilities to be `top_p` or more. Probabilities are the softmax of what step 1 left,
    ///    without temperature.
    /// 3. With `min_p` above 0, of those the ones whose logit is at least the highest plus `ln(min_p)`.
    /// 4. The token is the first at which the running sum of probabilities exceeds `uniform`.
    ///    Probabilities are the softmax of what is left, its logits divided by `temperature`.
    ///
    /// Steps 2 and 3 leave at least the first. Sums of 256 numbers in f32 are exact enough.
    pub struct SampleArgs {
        /// `[R, V]`, float.
        pub logits: Tensor = Tensor::NONE,
        /// `[R]` i32, 1 to 256. 1 is the highest logit, whatever the rest says.
        pub top_k: Tensor = Tensor::NONE,
        /// `[R]` f32 in [0, 1]; 1 keeps all.
        pub top_p: Tensor = Tensor::NONE,
        /// `[R]` f32 in [0, 1]; 0 keeps all.
        pub min_p: Tensor = Tensor::NONE,
        /// `[R]` f32, above 0.
        pub temperature: Tensor = Tensor::NONE,
        /// `[R]` f32 in [0, 1).
        pub uniform: Tensor = Tensor::NONE,
    }
}

/// Result of `sample` for a row that has a logit which is NaN or plus infinity, or none above minus
/// infinity.
pub const NO_TOKEN: u32 = u32::MAX;

/// Highest `top_k` of `sample`.
pub const MAX_TOP_K: u32 = 256;
