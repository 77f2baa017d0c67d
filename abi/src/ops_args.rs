//! Argument structs of operations with many parameters. Each starts with its own size, so that
//! parameters can be appended too; missing ones take the defaults written here.

use crate::error::{AbiError, Result};
use crate::types::{DType, ReleaseFn, Tensor};
use core::ffi::c_void;

/// Copies the part of `source` its writer knew over `defaults`.
///
/// # Safety
/// `source` must point to a live struct whose first field is a truthful `struct_size`.
pub(crate) unsafe fn read_args<T: Copy>(source: *const T, defaults: T) -> Result<T> {
    if source.is_null() {
        return Err(AbiError::invalid("argument struct is null"));
    }
    // SAFETY: every argument struct starts with `struct_size: usize`.
    let theirs = unsafe { *source.cast::<usize>() };
    if theirs < size_of::<usize>() {
        return Err(AbiError::invalid(format!(
            "argument struct says it has {theirs} bytes"
        )));
    }
    let mut args = defaults;
    // SAFETY: at most `theirs` bytes are read and at most `size_of::<T>()` are written.
    unsafe {
        core::ptr::copy_nonoverlapping(
            source.cast::<u8>(),
            (&raw mut args).cast::<u8>(),
            theirs.min(size_of::<T>()),
        );
    }
    Ok(args)
}

abi_args! {
    /// Arguments of `from_host`.
    pub struct FromHostArgs {
        /// First byte, aligned to the dtype.
        pub data: *const u8 = core::ptr::null(),
        /// Length in bytes; must equal the shape's.
        pub byte_len: usize = 0,
        /// Element type.
        pub dtype: DType = DType(0),
        /// Number of dimensions.
        pub ndim: u32 = 0,
        /// Dimensions, row-major.
        pub dims: *const i64 = core::ptr::null(),
        /// Not null: the memory is borrowed until the backend calls this with `owner`, once, from
        /// any thread. Null: the bytes are copied before the call returns.
        pub release: Option<ReleaseFn> = None,
        /// Passed to `release`.
        pub owner: *mut c_void = core::ptr::null_mut(),
    }
}

abi_args! {
    /// Arguments of `slice` and `slice_update`, one entry per axis.
    pub struct SliceArgs {
        /// Number of axes.
        pub ndim: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
        /// First index per axis; negative counts from the end.
        pub starts: *const i64 = core::ptr::null(),
        /// One past the last index per axis.
        pub stops: *const i64 = core::ptr::null(),
        /// Step per axis, not 0.
        pub strides: *const i64 = core::ptr::null(),
    }
}

abi_args! {
    /// Arguments of `gather` and `scatter`: `indices[i]` indexes `axes[i]` of the source, all
    /// broadcast to one shape `I`. Gather gives `I + slice_sizes`; scatter's updates have that shape.
    pub struct GatherArgs {
        /// Index tensors.
        pub indices: *const Tensor = core::ptr::null(),
        /// Axis of each index tensor.
        pub axes: *const u32 = core::ptr::null(),
        /// Number of index tensors.
        pub n_indices: u32 = 0,
        /// Rank of the source (entries in `slice_sizes`).
        pub ndim: u32 = 0,
        /// Size taken along every axis of the source (gather only).
        pub slice_sizes: *const i64 = core::ptr::null(),
    }
}

abi_args! {
    /// How a weight is quantised. Nested by value in other structs, hence frozen.
    pub struct QuantSpec {
        /// One of [`crate::kinds::quant`].
        pub mode: u32 = 1,
        /// Bits of an element.
        pub bits: u32 = 0,
        /// Elements sharing one scale.
        pub group_size: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
    }
}

abi_args! {
    /// A quantised weight `[.., N, K]`: packed words along K, scales and biases per group. Nested by
    /// value in other structs, hence frozen.
    pub struct QuantizedWeight {
        /// Packed values, u32 `[.., N, K * bits / 32]`.
        pub weight: Tensor = Tensor::NONE,
        /// Scales `[.., N, K / group_size]`; u8 exponents for the microscaling modes.
        pub scales: Tensor = Tensor::NONE,
        /// Biases, same shape as scales; none unless affine. Centred, or affine without: `scale * (code - 2^(bits - 1))`,
        /// only for a backend whose probe lists the form in `centred_forms`.
        pub biases: Tensor = Tensor::NONE,
        /// Mode, bits and group size.
        pub spec: QuantSpec = QuantSpec::default(),
    }
}

abi_args! {
    /// Arguments of `quantized_matmul` and `gather_quantized_matmul`.
    pub struct QuantizedMatmulArgs {
        /// Activations `[.., M, K]`.
        pub x: Tensor = Tensor::NONE,
        /// The weight.
        pub w: QuantizedWeight = QuantizedWeight::default(),
        /// 1: `x @ w.T` (weights as checkpoints have them); 0: `x @ w`.
        pub transpose: u32 = 1,
        /// Gathered form: 1 when `rhs_indices` ascend, which allows grouped kernels.
        pub sorted_indices: u32 = 0,
        /// Gathered form: matrix of `x` for every product, or none for all in order.
        pub lhs_indices: Tensor = Tensor::NONE,
        /// Gathered form: matrix (expert) of the weight for every product.
        pub rhs_indices: Tensor = Tensor::NONE,
    }
}

abi_args! {
    /// Arguments of `conv`, channels last: x `[N, spatial.., C]`, w `[O, kernel.., C / groups]`.
    pub struct ConvArgs {
        /// Input.
        pub x: Tensor = Tensor::NONE,
        /// Kernel; for transposed convolutions also `[O, kernel.., C / groups]`.
        pub w: Tensor = Tensor::NONE,
        /// Number of spatial axes, 1 to 3.
        pub n_spatial: u32 = 0,
        /// Groups.
        pub groups: u32 = 1,
        /// 1: transposed.
        pub transposed: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
        /// Stride per spatial axis.
        pub stride: [i64; 3] = [1; 3],
        /// Padding before each spatial axis.
        pub padding_low: [i64; 3] = [0; 3],
        /// Padding after each spatial axis.
        pub padding_high: [i64; 3] = [0; 3],
        /// Kernel dilation per spatial axis.
        pub dilation: [i64; 3] = [1; 3],
        /// Transposed only: rows added to the end of the output.
        pub output_padding: [i64; 3] = [0; 3],
    }
}

abi_args! {
    /// Arguments of `rope`, which rotates the first `dims` features of every head.
    pub struct RopeArgs {
        /// `[T, H, D]`.
        pub x: Tensor = Tensor::NONE,
        /// `[T]` i32, position of every row.
        pub positions: Tensor = Tensor::NONE,
        /// Features rotated, even, at most D.
        pub dims: u32 = 0,
        /// 1: pairs are neighbours (2i, 2i+1); 0: pairs are (i, i + dims / 2).
        pub interleaved: u32 = 0,
        /// Base of the geometric frequencies; unused when `freqs` is given.
        pub base: f32 = 10_000.0,
        /// Positions are multiplied by this.
        pub scale: f32 = 1.0,
        /// Optional f32 `[dims / 2]` of *periods over 2 pi* (inverse frequencies' inverses): angle
        /// `= scale * position / freqs[i]`.
        pub freqs: Tensor = Tensor::NONE,
    }
}

abi_args! {
    /// Arguments of `attention`: dense attention over given keys and values.
    pub struct AttentionArgs {
        /// `[B, H, Tq, D]`.
        pub q: Tensor = Tensor::NONE,
        /// `[B, Hkv, Tk, D]`, H a multiple of Hkv.
        pub k: Tensor = Tensor::NONE,
        /// `[B, Hkv, Tk, Dv]`.
        pub v: Tensor = Tensor::NONE,
        /// Multiplies the scores.
        pub scale: f32 = 1.0,
        /// Scores become `softcap * tanh(score / softcap)` when above 0.
        pub softcap: f32 = 0.0,
        /// One of [`crate::kinds::mask`]. Causal aligns the last query with the last key.
        pub mask_kind: u32 = 0,
        /// Causal only: a query sees at most this many keys, itself included; 0 is no limit.
        pub window: u32 = 0,
        /// Bool (true = attend) or additive, broadcast to `[B, H, Tq, Tk]`.
        pub mask: Tensor = Tensor::NONE,
        /// Optional `[H]`: a logit per head that joins the softmax's denominator.
        pub sinks: Tensor = Tensor::NONE,
    }
}

abi_args! {
    /// Arguments of `paged_attention`: append this step's keys and values to a pool, then attend.
    /// Everything that varies from step to step is in tensors; see `docs/ARCHITECTURE.md`.
    pub struct PagedAttentionArgs {
        /// `[T, H, D]`.
        pub q: Tensor = Tensor::NONE,
        /// `[T, Hkv, D]`.
        pub k: Tensor = Tensor::NONE,
        /// `[T, Hkv, Dv]`.
        pub v: Tensor = Tensor::NONE,
        /// `[pages, page_size, Hkv, D]`. The call may write into the pools it is given: after it
        /// succeeded only the pools it returned have defined contents.
        pub k_pool: Tensor = Tensor::NONE,
        /// `[pages, page_size, Hkv, Dv]`.
        pub v_pool: Tensor = Tensor::NONE,
        /// `[T]` i32: pool row (page * page_size + offset) that a row's key and value go to.
        /// Padding rows point into page 0, which belongs to nobody.
        pub slots: Tensor = Tensor::NONE,
        /// `[T]` i32: sequence of every row.
        pub row_sequences: Tensor = Tensor::NONE,
        /// `[T]` i32: position of every row in its sequence. A row sees keys at positions up to
        /// its own.
        pub positions: Tensor = Tensor::NONE,
        /// `[S, P]` i32: pages of every sequence in order; unused entries are 0.
        pub page_table: Tensor = Tensor::NONE,
        /// Host copy of the row boundaries, `n_sequences + 1` values: rows of sequence s are
        /// `[row_starts[s], row_starts[s + 1])`. For backends that compose this operation.
        pub row_starts: *const u32 = core::ptr::null(),
        /// Sequences in `row_starts` and `page_table`.
        pub n_sequences: u32 = 0,
        /// A row sees at most this many keys, itself included; 0 is no limit.
        pub window: u32 = 0,
        /// Multiplies the scores.
        pub scale: f32 = 1.0,
        /// Scores become `softcap * tanh(score / softcap)` when above 0.
        pub softcap: f32 = 0.0,
        /// Optional `[H]` attention sinks.
        pub sinks: Tensor = Tensor::NONE,
        /// Optional `[T, N]` i32 positions that a row may see, -1 for none, each at most once;
        /// others than those that causality and window leave do not count (minor 1). A row that
        /// sees nothing gives zeros.
        pub selection: Tensor = Tensor::NONE,
        /// Above 0: there are no `v` and `v_pool`; values are the first `latent_dim` elements of the
        /// keys (minor 1).
        pub latent_dim: u32 = 0,
        /// 1: `k` and `v` are none and nothing is appended; `slots` may be none (minor 1).
        pub read_only: u32 = 0,
        /// Above 0: a row sees keys of its own chunk only, those at positions with the same quotient
        /// by `chunk` (minor 1). Restricts what causality and window leave.
        pub chunk: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
    }
}

abi_args! {
    /// Arguments of `random`.
    pub struct RandomArgs {
        /// One of [`crate::kinds::random`].
        pub kind: u32 = 0,
        /// Result dtype (ignored by bits = u32, categorical = u32, bernoulli = bool).
        pub dtype: DType = DType::F32,
        /// Key from `random_key` or `random_split`.
        pub key: Tensor = Tensor::NONE,
        /// Shape of the result; not used by categorical.
        pub dims: *const i64 = core::ptr::null(),
        /// Number of dimensions.
        pub ndim: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
        /// First parameter.
        pub a: f64 = 0.0,
        /// Second parameter.
        pub b: f64 = 1.0,
        /// Categorical: logits `[.., V]`.
        pub logits: Tensor = Tensor::NONE,
    }
}

abi_args! {
    /// What a backend's memory looks like, in bytes.
    pub struct MemoryInfo {
        /// Held by live tensors.
        pub active_bytes: u64 = 0,
        /// Highest `active_bytes` since the backend was opened or the peak was reset.
        pub peak_bytes: u64 = 0,
        /// Freed but kept for reuse.
        pub cache_bytes: u64 = 0,
        /// Limit above which allocations fail or reclaim; 0 when there is none.
        pub limit_bytes: u64 = 0,
        /// Memory of the device; 0 when unknown.
        pub total_bytes: u64 = 0,
        /// Live handles, for leak checks.
        pub live_tensors: u64 = 0,
    }
}

abi_args! {
    /// New limits; `u64::MAX` leaves one as it is.
    pub struct MemoryLimits {
        /// For live tensors.
        pub limit_bytes: u64 = u64::MAX,
        /// For freed buffers kept for reuse.
        pub cache_limit_bytes: u64 = u64::MAX,
        /// For memory wired down, where the platform knows that.
        pub wired_limit_bytes: u64 = u64::MAX,
        /// 1: start a new peak measurement.
        pub reset_peak: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
    }
}
