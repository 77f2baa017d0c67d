//! The extension `mlxcel.ext.collectives/1`: operations over a group of processes.
//!
//! A backend plugin gives the table by `query`, and the host hands it on to families through
//! [`crate::host::HostApi`] while they load a model that is split over ranks. One process is one rank
//! of one group. `backend` is the `ctx` of the opened [`crate::ops::BackendOps`] to which tensors
//! belong; the slots are called on its thread. Appending a slot keeps the name; anything else is a new one.

use core::ffi::c_void;

use crate::types::{Str, Tensor};

/// Name of the extension.
pub const COLLECTIVES: &str = "mlxcel.ext.collectives/1";

abi_args! {
    /// The group that a process joins.
    pub struct JoinArgs {
        /// Number of this process, from 0.
        pub rank: u32 = 0,
        /// Processes of the group.
        pub size: u32 = 0,
        /// JSON list of one `host:port` for every rank, at which it may listen.
        pub addresses: Str = Str::EMPTY,
    }
}

abi_table! {
    /// Operations over the group. Every rank calls the same in the same order, with tensors of the
    /// same shape and dtype; results may be computed later, as those of other operations, and then in the
    /// order in which they depend on each other. Whether a call ends where a rank is gone is not promised.
    pub struct Collectives {
        /// Joins; waits for the other ranks. Once in a process: a second call has to name the same group.
        fn join(backend: *mut c_void, args: *const JoinArgs);
        /// Number of this process.
        fn rank(backend: *mut c_void, out: *mut u32);
        /// Processes of the group.
        fn size(backend: *mut c_void, out: *mut u32);
        /// Sum over the ranks, the same on all of them, in the dtype of `t`.
        fn all_sum(backend: *mut c_void, t: Tensor, out: *mut Tensor);
        /// Tensors of all ranks one after another along the first axis.
        fn all_gather(backend: *mut c_void, t: Tensor, out: *mut Tensor);
    }
}
