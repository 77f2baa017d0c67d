//! The encoder of a model, for tests: its keys and values go to a sequence as they are.

use core::cell::RefCell;
use core::ffi::c_void;
use std::collections::BTreeMap;

use mlxcel_abi::family::{EncodeArgs, KvApi};
use mlxcel_abi::guard::guard;
use mlxcel_abi::status::Status;
use mlxcel_abi::{AbiError, ErrorObj, Table, Tensor as Handle};

use super::LoadedModel;
use super::caches::{Caches, Pair};
use crate::{Backend, CacheDesc, EncoderDesc, Error, Result, Tensor};

/// Takes what the family sets during one `encode`.
struct Taker<'a> {
    backend: &'a Backend,
    layers: &'a [CacheDesc],
    positions: usize,
    written: RefCell<BTreeMap<usize, Pair>>,
}

impl Taker<'_> {
    fn write(&self, layer: usize, k: Handle, v: Handle) -> mlxcel_abi::Result<()> {
        let Some(&CacheDesc::Cross {
            kv_heads,
            k_dim,
            v_dim,
        }) = self.layers.get(layer)
        else {
            return Err(AbiError::invalid(format!(
                "cross_write: layer {layer} is no layer of cross-attention in the description"
            )));
        };
        let checked = |what: &str, handle: Handle, width: usize| {
            let tensor = Tensor::borrow_handle(self.backend, handle)?;
            let (shape, wanted) = (
                tensor.shape()?,
                [self.positions, kv_heads, width].map(|n| n as i64),
            );
            if shape != wanted {
                return Err(AbiError::invalid(format!(
                    "cross_write: {what} of layer {layer} have shape {shape:?}, expected {wanted:?}"
                )));
            }
            Ok(tensor)
        };
        let pair = Pair {
            keys: checked("keys", k, k_dim)?,
            values: checked("values", v, v_dim)?,
        };
        match self.written.borrow_mut().insert(layer, pair) {
            None => Ok(()),
            Some(_) => Err(AbiError::invalid(format!(
                "cross_write: layer {layer} was set before in this call"
            ))),
        }
    }
}

unsafe extern "C" fn cross_write(
    ctx: *mut c_void,
    layer: u32,
    k: Handle,
    v: Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: `ctx` is the taker of the call that runs; `err` is the family's slot.
    unsafe {
        guard(err, || {
            (&*ctx.cast::<Taker<'_>>()).write(layer as usize, k, v)
        })
    }
}

impl LoadedModel {
    /// Runs the encoder over `features`, whole rows of the encoder's width, for a sequence that has not begun.
    /// One that begins without gets features of the kit's own, the same for every sequence.
    pub fn encode(&self, caches: &mut Caches, sequence: usize, features: &[f32]) -> Result<()> {
        let encoder = self
            .desc()
            .encoder
            .ok_or_else(|| Error::Other("the description has no encoder".to_owned()))?;
        let rows = features.len() / encoder.width.max(1);
        let dims = [rows as i64, encoder.width as i64];
        let features = Tensor::from_slice(self.backend(), features, &dims)?;
        let features = features.cast(self.compute_dtype())?;
        let taker = Taker {
            backend: self.backend(),
            layers: &self.desc().layers,
            positions: rows.div_ceil(encoder.stride.max(1)),
            written: RefCell::default(),
        };
        let kv = KvApi {
            ctx: core::ptr::from_ref(&taker).cast_mut().cast(),
            cross_write,
            ..KvApi::stubs()
        };
        let args = EncodeArgs {
            features: features.handle(),
            n_rows: rows as u32,
            kv: &kv,
            ..EncodeArgs::default()
        };
        command!(self.table(), encode, self.raw(), &args)?;
        let written = taker.written.into_inner();
        let is_cross = |desc: &CacheDesc| matches!(desc, CacheDesc::Cross { .. });
        let mut layers = self.desc().layers.iter().enumerate();
        let missing = layers.find(|(layer, desc)| is_cross(desc) && !written.contains_key(layer));
        if let Some((layer, _)) = missing {
            return Err(Error::Other(format!(
                "encode set no keys and values of layer {layer}, which attends to the encoder"
            )));
        }
        let sequence = caches.sequences.entry(sequence).or_default();
        sequence.layers.extend(written);
        Ok(())
    }

    /// Encodes the kit's own features for a sequence that begins without any.
    pub(super) fn encode_if_new(&self, caches: &mut Caches, sequence: usize) -> Result<()> {
        let Some(EncoderDesc {
            width, max_rows, ..
        }) = self.desc().encoder
        else {
            return Ok(());
        };
        let has_begun = caches
            .sequences
            .get(&sequence)
            .is_some_and(|sequence| !sequence.layers.is_empty());
        if has_begun {
            return Ok(());
        }
        let values = width * max_rows.min(KIT_ROWS);
        let features: Vec<f32> = (0..values).map(|at| (at as f32 * 0.7).sin()).collect();
        self.encode(caches, sequence, &features)
    }
}

/// Rows of the kit's own features, unless the model takes fewer.
const KIT_ROWS: usize = 11;
