//! The features of one request as the encoder of a family sees them.

use core::marker::PhantomData;

use mlxcel_abi::Table;
use mlxcel_abi::family::{EncodeArgs, KvApi};

use crate::{Backend, Error, Result, Tensor};

/// Features of one request, and where its keys and values go.
pub struct Encode<'a> {
    backend: Backend,
    kv: KvApi,
    /// `[L, W]` in the compute dtype.
    pub features: Tensor,
    /// L.
    pub n_rows: usize,
    life: PhantomData<&'a ()>,
}

impl Encode<'_> {
    /// Reads the host's arguments.
    ///
    /// # Safety
    /// `args` and what it points to must be live for the value's lifetime, and its tensor must belong to
    /// `backend`.
    pub unsafe fn from_raw(args: *const EncodeArgs, backend: &Backend) -> Result<Self> {
        // SAFETY: forwarded to the caller.
        let args = unsafe { EncodeArgs::read(args) }.map_err(|source| Error::Backend {
            op: "encode".to_owned(),
            source,
        })?;
        if args.kv.is_null() {
            return Err(Error::Other(
                "the host gave no caches with the features".to_owned(),
            ));
        }
        Ok(Self {
            backend: backend.clone(),
            // SAFETY: the host keeps the table valid during the call.
            kv: unsafe { KvApi::import(args.kv) },
            features: Tensor::borrow_handle(backend, args.features)?,
            n_rows: args.n_rows as usize,
            life: PhantomData,
        })
    }

    /// The backend.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Sets the keys `[P, H, K]` and values `[P, H, V]` of a layer of cross-attention. P is
    /// `ceil(L / stride)` of the model's [`crate::EncoderDesc`].
    pub fn cross_write(&self, layer: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        let (k, v) = (k.handle(), v.handle());
        command!(&self.kv, cross_write, layer as u32, k, v)
    }
}

impl core::fmt::Debug for Encode<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Encode")
            .field("features", &self.features)
            .field("n_rows", &self.n_rows)
            .finish_non_exhaustive()
    }
}
