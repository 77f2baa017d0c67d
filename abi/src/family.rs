//! What a family plugin offers, and the step it computes.
//!
//! A family keeps no state of a request: positions, caches and random numbers come with the step.

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
        /// `[T, Hkv, D]`, already rotated.
        pub k: Tensor = Tensor::NONE,
        /// `[T, Hkv, Dv]`.
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
    }
}

abi_table! {
    /// The host's caches, as a family sees them during one step.
    pub struct KvApi {
        /// Appends `k` and `v` of this step's rows to the layer's cache and attends, each row over
        /// its own sequence. Result `[T, H, Dv]`.
        fn attend(layer: u32, args: *const AttendArgs, out: *mut Tensor);
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
    }
}
