//! The backend a model runs on: an imported operation table shared by all its tensors.

use std::cell::Cell;
use std::rc::Rc;

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::MemoryInfo;
use mlxcel_abi::{Table, Tensor as Handle};

use crate::{Result, Tensor};

struct Inner {
    table: BackendOps,
    /// Fused operations that answered `UNIMPLEMENTED` once, so that they are not tried again.
    lacks: Cell<u64>,
}

/// Fused operations with a composed fallback in this SDK.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Fused {
    /// Gated activation.
    Glu = 0,
    /// RMS norm.
    RmsNorm = 1,
    /// Rotary embedding.
    Rope = 2,
    /// Layer norm.
    LayerNorm = 3,
    /// Gathered quantised product.
    GatherQuantizedMatmul = 4,
    /// Linear layers over one input.
    Project = 5,
    /// Gated feed-forward block.
    GatedMlp = 6,
    /// Sum and the norm of it.
    AddRmsNorm = 7,
    /// Attention with what happens to queries and keys before it.
    AttendRotated = 8,
    /// Experts of every row.
    Route = 9,
    /// Gated blocks of a mixture of experts.
    Mixture = 10,
}

/// Where one layer stands with a fused operation. A backend may have the operation and not for this
/// layer's kind of weight, so every layer remembers the refusal for itself.
#[derive(Debug, Clone, Default)]
pub struct FusedSite(Cell<bool>);

/// Shared handle of an opened backend. Neither `Send` nor `Sync`: it belongs to the backend thread.
#[derive(Clone)]
pub struct Backend(Rc<Inner>);

impl core::fmt::Debug for Backend {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Backend(minor {})", self.0.table.minor)
    }
}

impl Backend {
    /// Imports an operation table.
    ///
    /// # Safety
    /// `ops` must point to a table made by any build of this ABI major, which outlives the value
    /// and all its clones, and the calling thread must be the backend thread.
    pub unsafe fn from_raw(ops: *const BackendOps) -> Self {
        // SAFETY: forwarded to the caller.
        let table = unsafe { BackendOps::import(ops) };
        Self(Rc::new(Inner {
            table,
            lacks: Cell::new(0),
        }))
    }

    pub(crate) fn table(&self) -> &BackendOps {
        &self.0.table
    }

    /// Whether both values are the same opened backend.
    pub fn is(&self, other: &Backend) -> bool {
        Rc::ptr_eq(&self.0, &other.0) || self.0.table.ctx == other.0.table.ctx
    }

    /// Tries a fused operation on `x` and composes it when the backend does not have it. A refusal is remembered, unless `x` has
    /// no elements: of a step that asks for no logits nothing is learned.
    pub fn fused_or<T>(
        &self,
        which: Fused,
        x: &Tensor,
        fused: impl FnOnce() -> Result<T>,
        composed: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let bit = 1u64 << (which as u8);
        if self.0.lacks.get() & bit == 0 {
            match fused() {
                Err(error) if error.is_unimplemented() => {
                    if !x.is_empty()? {
                        self.0.lacks.set(self.0.lacks.get() | bit);
                    }
                }
                other => return other,
            }
        }
        composed()
    }

    /// As [`Backend::fused_or`], for operations that a backend may refuse for one layer and not for
    /// another.
    pub fn fused_at<T>(
        &self,
        which: Fused,
        x: &Tensor,
        site: &FusedSite,
        fused: impl FnOnce() -> Result<T>,
        composed: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.0.lacks.get() & (1u64 << (which as u8)) == 0 && !site.0.get() {
            match fused() {
                Err(error) if error.is_unimplemented() => site.0.set(!x.is_empty()?),
                other => return other,
            }
        }
        composed()
    }

    /// Makes the SDK compose `which` even where the backend has it; for conformance tests.
    pub fn set_composed(&self, which: Fused, composed: bool) {
        let bit = 1u64 << (which as u8);
        let lacks = self.0.lacks.get();
        self.0
            .lacks
            .set(if composed { lacks | bit } else { lacks & !bit });
    }

    /// Evaluates and waits.
    pub fn eval(&self, tensors: &[&Tensor]) -> Result<()> {
        let handles: Vec<Handle> = tensors.iter().map(|t| t.handle()).collect();
        command!(self.table(), eval, handles.as_ptr(), handles.len())
    }

    /// Submits and returns.
    pub fn async_eval(&self, tensors: &[&Tensor]) -> Result<()> {
        let handles: Vec<Handle> = tensors.iter().map(|t| t.handle()).collect();
        command!(self.table(), async_eval, handles.as_ptr(), handles.len())
    }

    /// Waits for everything submitted.
    pub fn synchronize(&self) -> Result<()> {
        command!(self.table(), synchronize)
    }

    /// Memory figures of the moment.
    pub fn memory(&self) -> Result<MemoryInfo> {
        let mut info = MemoryInfo::default();
        command!(self.table(), memory, &mut info)?;
        Ok(info)
    }
}
