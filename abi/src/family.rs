//! What a family plugin offers, and the step it computes.
//!
//! A family keeps no state of a request: positions, caches and random numbers come with the step.

use crate::fused_args::RotateArgs;
use crate::host::{HostApi, WeightsApi};
use crate::ops::BackendOps;
use crate::types::{DType, OwnedBytes, Str, Tensor};
use core::ffi::c_void;

abi_args! {
    /// What a family needs to build a model.
    pub struct LoadArgs {
        /// Architecture, as the probe named it.
        pub arch: Str = Str::EMPTY,
        /// The checkpoint's configuration, a JSON object.
        pub config: Str = Str::EMPTY,
        /// Operations of the opened backend; outlive the model.
        pub ops: *const BackendOps = core::ptr::null(),
        /// The checkpoint's tensors; valid during the call.
        pub weights: *const WeightsApi = core::ptr::null(),
        /// Host services; outlive the model.
        pub host: *const HostApi = core::ptr::null(),
        /// Float type of activations and of unquantised parameters.
        pub compute_dtype: DType = DType::F32,
        /// Longest sequence the host will run, in tokens; 0 is the model's own limit. Rotary
        /// embeddings that have a short and a long form choose by it.
        pub context_length: u32 = 0,
    }
}

abi_args! {
    /// Options of one attention call.
    pub struct AttendArgs {
        /// `[T, H, D]`, already rotated.
        pub q: Tensor = Tensor::NONE,
        /// `[T, Hkv, D]`, already rotated. None together with `v`: nothing is appended, the rows
        /// attend over what the layer's cache holds, this step's rows included (minor 1).
        pub k: Tensor = Tensor::NONE,
        /// `[T, Hkv, Dv]`. None with a `k` where the layer's cache is latent: values are the first
        /// elements of the keys (minor 1).
        pub v: Tensor = Tensor::NONE,
        /// Multiplies the scores.
        pub scale: f32 = 1.0,
        /// Scores become `softcap * tanh(score / softcap)` when above 0.
        pub softcap: f32 = 0.0,
        /// Optional `[H]` attention sinks.
        pub sinks: Tensor = Tensor::NONE,
        /// A row sees at most this many keys, itself included; 0 takes the layer's descriptor.
        pub window: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
        /// Optional `[T, N]` i32 from `KvApi::index`: positions that a row may see, -1 for none.
        /// Restricts what causality and window leave (minor 1).
        pub selection: Tensor = Tensor::NONE,
        /// Above 0: a row sees keys of its own chunk only, those at positions with the same quotient
        /// by `chunk` (minor 1). Restricts what causality and window leave.
        pub chunk: u32 = 0,
        /// Zero.
        pub reserved2: u32 = 0,
    }
}

abi_args! {
    /// Choice of the keys that each row attends to (minor 1).
    pub struct IndexArgs {
        /// `[T, H, D]`, already rotated.
        pub q: Tensor = Tensor::NONE,
        /// `[T, D]`, already rotated.
        pub k: Tensor = Tensor::NONE,
        /// `[T, H]`.
        pub weights: Tensor = Tensor::NONE,
        /// Keys chosen for every row.
        pub top_k: u32 = 0,
        /// Multiplies `q . k`; above 0.
        pub scale: f32 = 1.0,
    }
}

abi_args! {
    /// Causal depthwise convolution along every sequence (minor 1).
    pub struct ShortConvArgs {
        /// `[T, C]`.
        pub x: Tensor = Tensor::NONE,
        /// `[C, K]`; the last column meets the row itself, the first the row K - 1 before it.
        pub weight: Tensor = Tensor::NONE,
        /// Optional `[C]`.
        pub bias: Tensor = Tensor::NONE,
        /// One of [`crate::kinds::unary`], applied to the sum; 0 is none.
        pub activation: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
    }
}

abi_args! {
    /// The gated delta rule along every sequence (minor 1). Per row and value head, with the state
    /// `S [Dk, Dv]`: `S *= exp(g)`; `S += k (beta * (v - k S))`; the result is `q S`.
    pub struct GatedDeltaArgs {
        /// `[T, Hk, Dk]`, already normed and scaled.
        pub q: Tensor = Tensor::NONE,
        /// `[T, Hk, Dk]`, already normed.
        pub k: Tensor = Tensor::NONE,
        /// `[T, Hv, Dv]`, Hv a multiple of Hk; value head h goes with key head `h / (Hv / Hk)`.
        pub v: Tensor = Tensor::NONE,
        /// Log decay: `[T, Hv]`, or `[T, Hv, Dk]` for one per key element.
        pub g: Tensor = Tensor::NONE,
        /// `[T, Hv]`.
        pub beta: Tensor = Tensor::NONE,
    }
}

abi_table! {
    /// The host's caches, as a family sees them during one step.
    pub struct KvApi {
        /// Appends `k` and `v` of this step's rows to the layer's cache and attends, each row over
        /// its own sequence. Result `[T, H, Dv]`.
        fn attend(layer: u32, args: *const AttendArgs, out: *mut Tensor);

        // --- minor 1 -------------------------------------------------------------------------
        /// Appends `k` to the layer's index keys and chooses, for every row, the `top_k` visible
        /// positions with the highest `sum_h weights_h * relu(scale * q_h . k)`. Result `[T, top_k]`
        /// i32 in no particular order, -1 where a row sees fewer. `UNIMPLEMENTED` where the backend
        /// has no such operation: take `index_keys`.
        fn index(layer: u32, args: *const IndexArgs, out: *mut Tensor);
        /// Convolves each row with the K - 1 before it in its sequence, and keeps the last K - 1 rows
        /// in the state `[K - 1, C]`. Result `[T, C]`. `UNIMPLEMENTED`: as for `index`, take
        /// `state_read` and `state_write`.
        fn short_conv(layer: u32, state: u32, args: *const ShortConvArgs, out: *mut Tensor);
        /// Runs the gated delta rule from the state `[Hv, Dk, Dv]` on. Result `[T, Hv, Dv]`.
        fn gated_delta(layer: u32, state: u32, args: *const GatedDeltaArgs, out: *mut Tensor);
        /// State of every sequence before this step, zeros where a sequence begins: `[S, shape..]` in
        /// the descriptor's dtype. After a `state_write` in the same step, what was written.
        fn state_read(layer: u32, state: u32, out: *mut Tensor);
        /// Sets the state that every sequence has after this step: `[S, shape..]`.
        fn state_write(layer: u32, state: u32, value: Tensor);
        /// `[S + 1]` i32: rows of sequence s are `[row_starts[s], row_starts[s + 1])`. Sequences of a
        /// bucket's padding may have no rows.
        fn row_starts(out: *mut Tensor);
        /// `[T]` i32: sequence of every row.
        fn row_sequences(out: *mut Tensor);
        /// Appends `k` `[T, D]` to the layer's index keys and gives those of every sequence in order
        /// of position: `[S, L, D]`, where L is the same for all and what is beyond a sequence's end
        /// is not defined.
        fn index_keys(layer: u32, k: Tensor, out: *mut Tensor);

        // --- minor 2 -------------------------------------------------------------------------
        /// `attend` with queries and keys that are normed and rotated first, by the positions of the
        /// step. All three may also come as products give them, `[T, heads * width]`; the result is then
        /// `[T, H * Dv]`. `UNIMPLEMENTED` where the backend has no such operation: norm, rotate and
        /// `attend`.
        fn attend_rotated(layer: u32, args: *const AttendArgs, rotate: *const RotateArgs, out: *mut Tensor);

        // --- minor 3 -------------------------------------------------------------------------
        /// Sets the keys `[P, H, K]` and values `[P, H, V]` of a cross-attention layer, P being what the
        /// description's `encoder` makes of the rows. In `FamilyTable::encode` only, once for every such
        /// layer; steps read them by `attend` without keys and values, and every row sees all P of its
        /// sequence.
        fn cross_write(layer: u32, k: Tensor, v: Tensor);
    }
}

abi_args! {
    /// What the encoder of one request reads (minor 3).
    pub struct EncodeArgs {
        /// `[L, W]` in the compute dtype.
        pub features: Tensor = Tensor::NONE,
        /// L.
        pub n_rows: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
        /// Caches, of which `cross_write` is the one slot; valid during the call.
        pub kv: *const KvApi = core::ptr::null(),
    }
}

abi_args! {
    /// One packed step. T rows of S sequences, one after another.
    pub struct StepArgs {
        /// `[T]` u32 token ids.
        pub tokens: Tensor = Tensor::NONE,
        /// `[T]` i32: position of every row in its sequence.
        pub positions: Tensor = Tensor::NONE,
        /// `[R]` i32: rows whose logits are wanted.
        pub logit_rows: Tensor = Tensor::NONE,
        /// Rows of the bucket (padding rows included).
        pub n_rows: u32 = 0,
        /// Sequences of the bucket.
        pub n_sequences: u32 = 0,
        /// Caches; valid during the call.
        pub kv: *const KvApi = core::ptr::null(),
    }
}

abi_args! {
    /// What a step gives.
    pub struct StepOutput {
        /// `[R, vocabulary]` in the compute dtype.
        pub logits: Tensor = Tensor::NONE,
    }
}

abi_table! {
    /// Entry table of a family plugin (`PluginHello::table`). `probe`, `describe` and `adapt_gguf`
    /// are pure and may be called from any thread; the rest belongs to the backend thread.
    pub struct FamilyTable {
        /// Which of the plugin's architectures fit a configuration: a JSON array of `{"arch",
        /// "score", "why"}`, best first, empty when none does. Score 100: the model type and all
        /// that matters is understood. A variant that is recognised and not implemented is an
        /// entry with score 0 and the reason in `why`.
        fn probe(config: Str, out: *mut OwnedBytes);
        /// What the host must know of a model, a JSON object: see `docs/ADDING_A_FAMILY.md`. Also
        /// validates the configuration.
        fn describe(arch: Str, config: Str, out: *mut OwnedBytes);
        /// Maps a GGUF file to this architecture: takes the file's summary, gives configuration,
        /// tensor names and transforms as a JSON object.
        fn adapt_gguf(arch: Str, summary: Str, out: *mut OwnedBytes);
        /// Builds a model.
        fn load(args: *const LoadArgs, out: *mut *mut c_void);
        /// Computes one packed step.
        fn forward(model: *mut c_void, step: *const StepArgs, out: *mut StepOutput);
        /// Destroys a model; its tensors are released.
        fn unload(model: *mut c_void);

        // --- minor 3 -------------------------------------------------------------------------
        /// Runs the encoder of one request, before its first step: computes what the cross-attention
        /// layers attend to and hands it to `KvApi::cross_write`. For models whose description has an
        /// `encoder`.
        fn encode(model: *mut c_void, args: *const EncodeArgs);
    }
}
