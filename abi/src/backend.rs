//! What a backend plugin offers: a probe and the opening of a device.

use crate::host::HostApi;
use crate::ops::BackendOps;
use crate::types::{OwnedBytes, Str};

abi_args! {
    /// How a backend is opened.
    pub struct OpenArgs {
        /// Device name from the probe, or empty for the first.
        pub device: Str = Str::EMPTY,
        /// JSON object of options: `threads` (0 = physical cores), `memory_limit_bytes`,
        /// `cache_limit_bytes`, and what the backend documents itself. Unknown keys are refused.
        pub options: Str = Str::EMPTY,
        /// Host services; outlives the backend.
        pub host: *const HostApi = core::ptr::null(),
    }
}

abi_table! {
    /// Entry table of a backend plugin (`PluginHello::table`).
    pub struct BackendTable {
        /// JSON: `{"score": n, "reason": "..", "devices": [{"name", "description",
        /// "total_bytes", "free_bytes"}], "details": {..}}`. Score 0 means that the backend cannot
        /// run here and `reason` says why; higher wins under `--backend auto`. Runs in a child
        /// process when the host is careful, and must not need `open`.
        fn probe(out: *mut OwnedBytes);
        /// Opens a device on the calling thread, which becomes the backend thread, and gives its
        /// operations. The table lives until `close`.
        fn open(args: *const OpenArgs, out: *mut *const BackendOps);
        /// Closes an opened device; all its handles die.
        fn close(ops: *const BackendOps);
    }
}
