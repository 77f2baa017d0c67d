//! One packed step as a family sees it.

use core::marker::PhantomData;

use mlxcel_abi::family::{AttendArgs, KvApi, StepArgs};
use mlxcel_abi::{Table, Tensor as Handle};

use crate::{Backend, Error, Result, Tensor};

/// Options of one attention call over the host's cache.
#[derive(Debug, Clone, Copy)]
pub struct AttendOptions<'a> {
    /// Multiplies the scores.
    pub scale: f32,
    /// Soft cap of the scores; 0 is none.
    pub softcap: f32,
    /// Sink logit per head.
    pub sinks: Option<&'a Tensor>,
}

/// T rows of S sequences, one after another. Everything that varies from step to step is in the
/// tensors; a family takes no decision on their values.
#[derive(Debug)]
pub struct Step<'a> {
    backend: Backend,
    kv: KvApiBox,
    /// `[T]` token ids.
    pub tokens: Tensor,
    /// `[T]` position of every row in its sequence.
    pub positions: Tensor,
    logit_rows: Tensor,
    /// Rows.
    pub n_rows: usize,
    /// Sequences.
    pub n_sequences: usize,
    life: PhantomData<&'a ()>,
}

struct KvApiBox(KvApi);

impl core::fmt::Debug for KvApiBox {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("KvApi")
    }
}

impl Step<'_> {
    /// Reads the host's arguments.
    ///
    /// # Safety
    /// `args` and what it points to must be live for the value's lifetime, and its tensors must
    /// belong to `backend`.
    pub unsafe fn from_raw(args: *const StepArgs, backend: &Backend) -> Result<Self> {
        // SAFETY: forwarded to the caller.
        let args = unsafe { StepArgs::read(args) }.map_err(|source| Error::Backend {
            op: "step".to_owned(),
            source,
        })?;
        if args.kv.is_null() {
            return Err(Error::Other(
                "the host gave no caches with the step".to_owned(),
            ));
        }
        Ok(Self {
            backend: backend.clone(),
            // SAFETY: the host keeps the table valid during the step.
            kv: KvApiBox(unsafe { KvApi::import(args.kv) }),
            tokens: Tensor::borrow_handle(backend, args.tokens)?,
            positions: Tensor::borrow_handle(backend, args.positions)?,
            logit_rows: Tensor::borrow_handle(backend, args.logit_rows)?,
            n_rows: args.n_rows as usize,
            n_sequences: args.n_sequences as usize,
            life: PhantomData,
        })
    }

    /// The backend.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Appends `k` and `v` to the layer's cache and attends, each row over its own sequence.
    /// `q` is `[T, H, D]`, `k` `[T, Hkv, D]`, `v` `[T, Hkv, Dv]`; result `[T, H, Dv]`.
    pub fn attend(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        let args = AttendArgs {
            q: q.handle(),
            k: k.handle(),
            v: v.handle(),
            scale: options.scale,
            softcap: options.softcap,
            sinks: Tensor::handle_of(options.sinks),
            ..AttendArgs::default()
        };
        let mut out = Handle::NONE;
        command!(&self.kv.0, attend, layer as u32, &args, &mut out)?;
        Ok(Tensor::from_handle(&self.backend, out))
    }

    /// Rows of `[T, ..]` whose logits are wanted: `[R, ..]`.
    pub fn logit_rows(&self, hidden: &Tensor) -> Result<Tensor> {
        hidden.take(&self.logit_rows, 0)
    }
}
