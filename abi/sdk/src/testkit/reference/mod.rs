//! A backend in plain Rust: eager, slow, obviously right, and the definition that conformance
//! tests compare others with.
//!
//! Elements are kept as f64 (integers exactly) and rounded to the tensor's dtype after every
//! operation, so a half result is the correctly rounded exact one up to f64 error. Where the
//! interface is silent it does what MLX does: promotion in `binary`, `select`, `concat`, `matmul`
//! and `conv`; sums and products of narrow integers in 32 bits; NaN wins in max and min, and sorts
//! last. Every argument is checked, so with [`ReferenceOptions::shapes_only`] it is a checker of
//! shapes and dtypes that computes and stores nothing.
//!
//! It must know nothing of families, of the host or of any device.

mod attention;
mod binary;
mod cache_slots;
mod complex;
mod control_slots;
mod conv;
mod edge;
mod entry;
mod fourier;
mod fused_slots;
mod indexing;
mod inner;
mod layers;
mod mixture_slots;
mod movement;
pub(in crate::testkit) mod number;
mod operation_slots;
mod paged;
mod product;
mod product_slots;
pub(in crate::testkit) mod quant;
mod random;
mod recurrent;
mod reduce;
mod sampling;
mod selection;
pub(in crate::testkit) mod shape;
mod special;
#[cfg(test)]
mod tests;
mod unary;
pub(in crate::testkit) mod value;

use std::collections::BTreeMap;
use std::thread::ThreadId;

use mlxcel_abi::Table;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::status::Status;

pub use entry::reference_backend_table;
use inner::Inner;

/// How a reference backend behaves.
#[derive(Debug, Clone, Default)]
pub struct ReferenceOptions {
    /// Check and infer shapes and dtypes only; every element reads as 0 and nothing is stored, so
    /// models of any size fit.
    pub shapes_only: bool,
    /// Calls that fail or panic.
    pub faults: Vec<Fault>,
    /// Slots that are left out: they answer `UNIMPLEMENTED`, as an older backend's would.
    pub missing: Vec<String>,
    /// Limit for live tensors, above which operations answer `RESOURCE_EXHAUSTED`; 0 is none.
    pub memory_limit_bytes: u64,
    /// Allow calls from any thread. Otherwise the first caller's thread is the backend thread and
    /// others get `FAILED_PRECONDITION`, except for `release`.
    pub any_thread: bool,
}

/// A call that does not succeed.
#[derive(Debug, Clone)]
pub struct Fault {
    /// Slot it happens in; none counts the calls of all slots but `retain`, `release` and `info`.
    pub slot: Option<String>,
    /// Which of those calls, from 1.
    pub nth: u64,
    /// What happens.
    pub kind: FaultKind,
}

/// What a faulty call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// Answers this status.
    Status(Status),
    /// Panics inside the slot, which its guard turns into `INTERNAL`.
    Panic,
}

impl Fault {
    /// The `nth` call of any operation answers `status`.
    pub fn nth_call(nth: u64, status: Status) -> Self {
        Self {
            slot: None,
            nth,
            kind: FaultKind::Status(status),
        }
    }
}

/// What a reference backend has seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statistics {
    /// Calls of every slot that was called.
    pub calls: BTreeMap<&'static str, u64>,
    /// Handles that were not released.
    pub live_tensors: usize,
    /// Borrowed host memory that was not given back.
    pub live_borrows: usize,
    /// Bytes of live tensors, as a device would need them.
    pub active_bytes: u64,
    /// Highest `active_bytes`.
    pub peak_bytes: u64,
    /// Threads that called, in order of appearance.
    pub threads: Vec<ThreadId>,
}

impl Statistics {
    /// Calls of one slot.
    pub fn calls_of(&self, slot: &str) -> u64 {
        self.calls.get(slot).copied().unwrap_or(0)
    }
}

/// An opened reference backend. Dropping it closes it: handles die, borrowed memory is given back.
/// Its table stays readable after that, and calls through it answer `FAILED_PRECONDITION`.
pub struct ReferenceBackend {
    inner: &'static Inner,
    table: &'static BackendOps,
}

// SAFETY: the table is never written after its making, and its context is an `Inner`, which is
// `Sync`.
unsafe impl Send for ReferenceBackend {}
// SAFETY: as above.
unsafe impl Sync for ReferenceBackend {}

/// Opens a reference backend.
pub fn reference_backend(options: ReferenceOptions) -> ReferenceBackend {
    let missing = options.missing.clone();
    // Both are leaked, a few hundred bytes for each backend: a table that a tensor still points to
    // must not dangle when a test drops things in the wrong order.
    let inner: &'static Inner = Box::leak(Box::new(Inner::new(options)));
    let mut table = BackendOps::stubs();
    table.ctx = core::ptr::from_ref(inner).cast_mut().cast();
    control_slots::install(&mut table, &missing);
    operation_slots::install(&mut table, &missing);
    product_slots::install(&mut table, &missing);
    cache_slots::install(&mut table, &missing);
    fused_slots::install(&mut table, &missing);
    mixture_slots::install(&mut table, &missing);
    sampling::install(&mut table, &missing);
    ReferenceBackend {
        inner,
        table: Box::leak(Box::new(table)),
    }
}

/// Fills a table, for tests that put a wrong slot in front of the right one.
#[cfg(test)]
pub(in crate::testkit) fn install_all(table: &mut BackendOps) {
    control_slots::install(table, &[]);
    operation_slots::install(table, &[]);
    product_slots::install(table, &[]);
    cache_slots::install(table, &[]);
    fused_slots::install(table, &[]);
    mixture_slots::install(table, &[]);
}

impl ReferenceBackend {
    /// The operation table.
    pub fn ops(&self) -> *const BackendOps {
        self.table
    }

    /// The table as the SDK's backend.
    pub fn backend(&self) -> crate::Backend {
        // SAFETY: the table and what it points to are never freed.
        unsafe { crate::Backend::from_raw(self.table) }
    }

    /// Counts up to now.
    pub fn statistics(&self) -> Statistics {
        self.inner.statistics()
    }

    /// Starts the counts of calls and threads anew, and the peak at the bytes of now.
    pub fn reset_statistics(&self) {
        self.inner.reset_statistics();
    }

    /// Replaces the faults; calls count from here.
    pub fn set_faults(&self, faults: Vec<Fault>) {
        self.inner.set_faults(faults);
    }
}

impl Drop for ReferenceBackend {
    fn drop(&mut self) {
        self.inner.close();
    }
}
