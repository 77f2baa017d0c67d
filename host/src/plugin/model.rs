//! A model built by a family: one packed step at a time, and its end.

use std::cell::RefCell;
use std::ffi::c_void;

use mlxcel_abi::family::{EncodeArgs, StepArgs, StepOutput};
use mlxcel_abi::{AbiError, ErrorObj, Status, Tensor, status};

use super::call::call;
use super::device::{Backend, DeviceTensor};
use super::error::CallError;
use super::family::Family;
use super::step::{KvSource, with_kv};

/// The inputs of one packed step: T rows of S sequences, one after another.
#[derive(Debug, Clone, Copy)]
pub struct StepInputs {
    /// `[T]` u32 token ids.
    pub tokens: Tensor,
    /// `[T]` i32: position of every row in its sequence.
    pub positions: Tensor,
    /// `[R]` i32: rows whose logits are wanted.
    pub logit_rows: Tensor,
    /// Rows of the bucket, padding rows included.
    pub n_rows: u32,
    /// Sequences of the bucket.
    pub n_sequences: u32,
}

/// A model on a backend. Unloaded when dropped; keeps its backend open until then.
pub struct Model {
    family: Family,
    backend: Backend,
    raw: *mut c_void,
    /// Text of the panic after which the model is not to be trusted.
    poison: RefCell<Option<String>>,
}

impl Model {
    pub(super) fn new(family: Family, backend: Backend, raw: *mut c_void) -> Self {
        Self {
            family,
            backend,
            raw,
            poison: RefCell::new(None),
        }
    }

    /// The family that built it.
    pub fn family(&self) -> &Family {
        &self.family
    }

    /// The backend it lives on.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// The panic that poisoned the model, if one did.
    pub fn poison(&self) -> Option<String> {
        self.poison.borrow().clone()
    }

    fn subject(&self, function: &str) -> String {
        format!("family {}: {function}", self.family.name())
    }

    /// An error where an earlier panic poisoned the model.
    fn check_poison(&self, function: &str) -> Result<(), CallError> {
        let Some(panic) = &*self.poison.borrow() else {
            return Ok(());
        };
        let text =
            format!("the model was given up after an earlier panic ({panic}): load it again");
        let error = AbiError::new(status::FAILED_PRECONDITION, text);
        Err(CallError::new(self.subject(function), error))
    }

    /// Calls into the family; a panic there poisons the model.
    fn enter(
        &self,
        function: &str,
        body: impl FnOnce(*mut *mut ErrorObj) -> Status,
    ) -> Result<(), CallError> {
        let result = call(|| self.subject(function), body);
        if let Err(error) = &result
            && error.is_panic()
        {
            *self.poison.borrow_mut() = Some(error.error.to_string());
        }
        result
    }

    /// Runs the encoder over the features `[L, W]` of one request, which sets the keys and values of all
    /// layers of cross-attention in `kv`.
    pub fn encode(
        &self,
        features: &DeviceTensor,
        n_rows: u32,
        kv: &dyn KvSource,
    ) -> Result<(), CallError> {
        self.check_poison("encode")?;
        let table = self.family.table();
        with_kv(kv, |api| {
            let args = EncodeArgs {
                features: features.handle(),
                n_rows,
                kv: api,
                ..EncodeArgs::default()
            };
            // SAFETY: as for `forward`.
            let body = |err| unsafe { (table.encode)(table.ctx, self.raw, &raw const args, err) };
            self.enter("encode", body)
        })
    }

    /// Computes one step: logits `[R, vocabulary]` in the compute dtype.
    pub fn forward(&self, step: &StepInputs, kv: &dyn KvSource) -> Result<DeviceTensor, CallError> {
        self.check_poison("forward")?;
        let table = self.family.table();
        let mut output = StepOutput::default();
        with_kv(kv, |api| {
            let args = StepArgs {
                tokens: step.tokens,
                positions: step.positions,
                logit_rows: step.logit_rows,
                n_rows: step.n_rows,
                n_sequences: step.n_sequences,
                kv: api,
                ..StepArgs::default()
            };
            // SAFETY: on the backend thread, since a `Model` is not `Send`; the model is loaded; all
            // that `args` points to outlives the call.
            let body = |err| unsafe {
                (table.forward)(table.ctx, self.raw, &raw const args, &raw mut output, err)
            };
            self.enter("forward", body)
        })?;
        self.backend.adopt(output.logits).ok_or_else(|| {
            let error = AbiError::internal("success was reported but no logits were given");
            CallError::new(self.subject("forward"), error)
        })
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        let table = self.family.table();
        // SAFETY: `raw` came from this family's `load` and is given back once, on the same thread.
        let body = |err| unsafe { (table.unload)(table.ctx, self.raw, err) };
        let subject = || format!("family {}: unload", self.family.name());
        if let Err(error) = call(subject, body) {
            tracing::warn!("{error}");
        }
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("family", &self.family)
            .field("backend", &self.backend)
            .field("poison", &self.poison)
            .finish_non_exhaustive()
    }
}
