//! The operation table: what a backend offers to the host and to families.
//!
//! Rules of every slot:
//! * called on the one backend thread only;
//! * inputs are borrowed, outputs are new handles with one reference that the caller releases;
//! * shapes are row-major, axes may be negative;
//! * evaluation may be lazy; an error may therefore surface in `eval` or `read`;
//! * half types stay half: an operation never returns f32 for f16/bf16 operands, and a parameter
//!   (norm weight, scale, bias of a group, mask, sink) of another float type never widens the
//!   activation. Two operands of equal rank (`binary`, `matmul`, ...) meet as in `kinds::binary`;
//! * on error nothing is written to the outputs.

use crate::cache_args::{GatedDeltaPoolArgs, ShortConvPoolArgs, SparseIndexArgs};
use crate::fused_args::{
    GatedMlpArgs, MixtureArgs, ProjectArgs, RotateArgs, RouteArgs, SampleArgs,
};
use crate::ops_args::{
    AttentionArgs, ConvArgs, FromHostArgs, GatherArgs, MemoryInfo, MemoryLimits,
    PagedAttentionArgs, QuantSpec, QuantizedMatmulArgs, QuantizedWeight, RandomArgs, RopeArgs,
    SliceArgs,
};
use crate::types::{DType, Tensor, TensorInfo};

abi_table! {
    /// Operations of one opened backend; `ctx` is that backend.
    pub struct BackendOps {
        // --- handles -----------------------------------------------------------------------
        /// Adds a reference to a handle.
        fn retain(t: Tensor);
        /// Drops a reference. Allowed from any thread; the backend defers it to its own.
        fn release(t: Tensor);
        /// Shape and dtype; never evaluates.
        fn info(t: Tensor, out: *mut TensorInfo);

        // --- creation and reading ------------------------------------------------------------
        /// Tensor over host memory, borrowed or copied. When the call fails the memory stays the
        /// caller's and `release` is not called.
        fn from_host(args: *const FromHostArgs, out: *mut Tensor);
        /// Constant tensor.
        fn full(value: f64, dtype: DType, dims: *const i64, ndim: u32, out: *mut Tensor);
        /// `[start, stop)` in steps.
        fn arange(start: f64, stop: f64, step: f64, dtype: DType, out: *mut Tensor);
        /// `[n, m]` with ones on the `k`-th diagonal.
        fn eye(n: i64, m: i64, k: i64, dtype: DType, out: *mut Tensor);
        /// Evaluates and copies the elements, row-major, to `dst` of exactly `byte_len` bytes.
        fn read(t: Tensor, dst: *mut u8, byte_len: usize);
        /// Evaluates and waits.
        fn eval(ts: *const Tensor, n: usize);
        /// Submits and returns.
        fn async_eval(ts: *const Tensor, n: usize);
        /// Waits for everything submitted.
        fn synchronize();

        // --- memory --------------------------------------------------------------------------
        /// Figures of the moment.
        fn memory(out: *mut MemoryInfo);
        /// Sets limits.
        fn set_memory_limits(args: *const MemoryLimits);
        /// Gives unused buffers back.
        fn clear_cache();

        // --- elementwise ---------------------------------------------------------------------
        /// Converts the elements.
        fn cast(a: Tensor, dtype: DType, out: *mut Tensor);
        /// Reinterprets the bytes; the last axis scales with the element size.
        fn view(a: Tensor, dtype: DType, out: *mut Tensor);
        /// See [`crate::kinds::unary`].
        fn unary(kind: u32, a: Tensor, out: *mut Tensor);
        /// See [`crate::kinds::binary`].
        fn binary(kind: u32, a: Tensor, b: Tensor, out: *mut Tensor);
        /// As `binary` with a constant of `a`'s dtype; `scalar_first` = 1 puts it on the left.
        fn binary_scalar(kind: u32, a: Tensor, scalar: f64, scalar_first: u32, out: *mut Tensor);
        /// `cond ? a : b`, broadcast.
        fn select(cond: Tensor, a: Tensor, b: Tensor, out: *mut Tensor);
        /// Limits to `[low, high]`.
        fn clip(a: Tensor, low: f64, high: f64, out: *mut Tensor);

        // --- reductions and order ------------------------------------------------------------
        /// See [`crate::kinds::reduce`]; `n_axes` = 0 reduces all axes.
        fn reduce(kind: u32, a: Tensor, axes: *const i32, n_axes: u32, keep_dims: u32, out: *mut Tensor);
        /// See [`crate::kinds::arg_reduce`].
        fn arg_reduce(kind: u32, a: Tensor, axis: i32, keep_dims: u32, out: *mut Tensor);
        /// See [`crate::kinds::cumulative`].
        fn cumulative(kind: u32, a: Tensor, axis: i32, reverse: u32, inclusive: u32, out: *mut Tensor);
        /// See [`crate::kinds::order`].
        fn order(kind: u32, a: Tensor, k: i64, axis: i32, out: *mut Tensor);
        /// Softmax along one axis, computed in f32, returned in `a`'s dtype.
        fn softmax(a: Tensor, axis: i32, out: *mut Tensor);

        // --- shape ---------------------------------------------------------------------------
        /// New shape; one dimension may be -1.
        fn reshape(a: Tensor, dims: *const i64, ndim: u32, out: *mut Tensor);
        /// Permutes the axes.
        fn transpose(a: Tensor, axes: *const i32, n_axes: u32, out: *mut Tensor);
        /// Broadcasts to a shape.
        fn broadcast_to(a: Tensor, dims: *const i64, ndim: u32, out: *mut Tensor);
        /// Joins along an existing axis.
        fn concat(ts: *const Tensor, n: usize, axis: i32, out: *mut Tensor);
        /// Takes a strided box.
        fn slice(a: Tensor, args: *const SliceArgs, out: *mut Tensor);
        /// Copy of `a` with a box replaced by `update`; in place when nobody else holds `a`.
        fn slice_update(a: Tensor, update: Tensor, args: *const SliceArgs, out: *mut Tensor);
        /// Pads with a constant; `low` and `high` have one entry per axis.
        fn pad(a: Tensor, low: *const i64, high: *const i64, ndim: u32, value: f64, out: *mut Tensor);
        /// Repeats every element along an axis.
        fn repeat(a: Tensor, n: i64, axis: i32, out: *mut Tensor);
        /// Repeats the whole tensor `reps[i]` times along axis i.
        fn tile(a: Tensor, reps: *const i64, n_reps: u32, out: *mut Tensor);
        /// Row-major copy if it is not already.
        fn contiguous(a: Tensor, out: *mut Tensor);

        // --- indexing ------------------------------------------------------------------------
        /// Rows of `a` along `axis` by integer `indices` of any shape.
        fn take(a: Tensor, indices: Tensor, axis: i32, out: *mut Tensor);
        /// Elements by indices of the same rank.
        fn take_along(a: Tensor, indices: Tensor, axis: i32, out: *mut Tensor);
        /// Copy of `a` with elements replaced by indices of the same rank.
        fn put_along(a: Tensor, indices: Tensor, values: Tensor, axis: i32, out: *mut Tensor);
        /// General gather.
        fn gather(a: Tensor, args: *const GatherArgs, out: *mut Tensor);
        /// General scatter; `kind` is one of [`crate::kinds::scatter`].
        fn scatter(kind: u32, a: Tensor, updates: Tensor, args: *const GatherArgs, out: *mut Tensor);

        // --- products ------------------------------------------------------------------------
        /// Batched matrix product.
        fn matmul(a: Tensor, b: Tensor, out: *mut Tensor);
        /// `alpha * a @ b + beta * c`.
        fn addmm(c: Tensor, a: Tensor, b: Tensor, alpha: f32, beta: f32, out: *mut Tensor);
        /// Products of chosen matrices: `a[lhs] @ b[rhs]`; either index tensor may be none.
        fn gather_matmul(a: Tensor, b: Tensor, lhs: Tensor, rhs: Tensor, sorted: u32, out: *mut Tensor);
        /// Quantises the last axis: writes weight, scales and (affine only, else none) biases.
        fn quantize(w: Tensor, spec: *const QuantSpec, out: *mut [Tensor; 3]);
        /// Expands a quantised weight to `dtype`.
        fn dequantize(w: *const QuantizedWeight, dtype: DType, out: *mut Tensor);
        /// Product with a quantised weight, in `x`'s dtype.
        fn quantized_matmul(args: *const QuantizedMatmulArgs, out: *mut Tensor);
        /// The same for chosen matrices (experts).
        fn gather_quantized_matmul(args: *const QuantizedMatmulArgs, out: *mut Tensor);
        /// Convolution in 1 to 3 spatial dimensions, plain or transposed.
        fn conv(args: *const ConvArgs, out: *mut Tensor);
        /// See [`crate::kinds::fft`]; `n[i]` resizes axis `axes[i]` first (0 keeps it).
        fn fft(kind: u32, a: Tensor, n: *const i64, axes: *const i32, n_axes: u32, out: *mut Tensor);

        // --- layers --------------------------------------------------------------------------
        /// `x / rms(x) * w` over the last axis; `w` may be none.
        fn rms_norm(x: Tensor, w: Tensor, eps: f32, out: *mut Tensor);
        /// Layer norm over the last axis; `w` and `b` may be none.
        fn layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: f32, out: *mut Tensor);
        /// Rotary embedding with a position per row.
        fn rope(args: *const RopeArgs, out: *mut Tensor);
        /// Attention over given keys and values; result `[B, H, Tq, Dv]`.
        fn attention(args: *const AttentionArgs, out: *mut Tensor);
        /// Appends to a pool and attends over it: writes result `[T, H, Dv]`, new k and v pools (v
        /// none where values are part of the keys). The contents of the old pools are not defined
        /// afterwards.
        fn paged_attention(args: *const PagedAttentionArgs, out: *mut [Tensor; 3]);
        /// Gated activation `f(gate) * up`; see [`crate::kinds::glu`].
        fn glu(kind: u32, gate: Tensor, up: Tensor, out: *mut Tensor);

        // --- random --------------------------------------------------------------------------
        /// Key from a seed.
        fn random_key(seed: u64, out: *mut Tensor);
        /// `n` independent keys from one: `[n, 2]` u32.
        fn random_split(key: Tensor, n: i64, out: *mut Tensor);
        /// Random tensor.
        fn random(args: *const RandomArgs, out: *mut Tensor);

        // --- caches that are not keys and values (minor 1) -------------------------------------
        /// Causal depthwise convolution of packed rows over a pool of states: writes the result
        /// `[T, C]` and the new pool. The contents of the old pool are not defined afterwards.
        fn short_conv(args: *const ShortConvPoolArgs, out: *mut [Tensor; 2]);
        /// Gated delta rule of packed rows over a pool of states: writes the result `[T, Hv, Dv]` in
        /// `v`'s dtype, computed in f32, and the new pool. As for `short_conv`.
        fn gated_delta(args: *const GatedDeltaPoolArgs, out: *mut [Tensor; 2]);
        /// Appends index keys to a pool and chooses keys for every row: writes `[T, top_k]` i32
        /// positions and the new pool. As for `short_conv`.
        fn sparse_index(args: *const SparseIndexArgs, out: *mut [Tensor; 2]);

        // --- fused operations (minor 2) --------------------------------------------------------
        /// Linear layers over one input, normed first where asked: writes `n_layers` tensors
        /// `[T, N]` in `x`'s dtype.
        fn project(args: *const ProjectArgs, out: *mut Tensor);
        /// A whole gated feed-forward block: `[T, K]` in `x`'s dtype.
        fn gated_mlp(args: *const GatedMlpArgs, out: *mut Tensor);
        /// Writes `x + residual` and the RMS norm of that; `w` may be none.
        fn add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: f32, out: *mut [Tensor; 2]);
        /// `paged_attention` over queries and keys that are normed and rotated first. All three may
        /// also come as products give them, `[T, heads * width]`; the result is then `[T, H * Dv]`.
        fn rotated_paged_attention(args: *const PagedAttentionArgs, rotate: *const RotateArgs, out: *mut [Tensor; 3]);
        /// One token for every row of logits: `[R]` u32.
        fn sample(args: *const SampleArgs, out: *mut Tensor);

        // --- mixtures of experts (minor 4) -----------------------------------------------------
        /// Experts of every row and their weights: writes `[T, top_k]` u32 and `[T, top_k]` in the
        /// logits' dtype. The experts of a row without a NaN are distinct; those of any row are below E.
        fn route(args: *const RouteArgs, out: *mut [Tensor; 2]);
        /// The chosen gated blocks of every row, weighted and summed: `[T, K]` in `x`'s dtype.
        fn mixture(args: *const MixtureArgs, out: *mut Tensor);
    }
}
