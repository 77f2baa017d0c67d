//! The host's side of recurrent states and index keys for tests: plain tensors for every sequence.
//!
//! The fused calls are left out, so that families run on what the SDK composes.

use core::ffi::c_void;

use mlxcel_abi::family::KvApi;
use mlxcel_abi::guard::guard;
use mlxcel_abi::status::Status;
use mlxcel_abi::{AbiError, DType, ErrorObj, Tensor as Handle};

use super::caches::Server;
use crate::{CacheDesc, Result, StateDesc, Tensor};

/// Adds the slots to a table.
pub(super) fn install(table: &mut KvApi) {
    table.state_read = state_read;
    table.state_write = state_write;
    table.row_starts = row_starts;
    table.row_sequences = row_sequences;
    table.index_keys = index_keys;
}

impl Server<'_> {
    /// Sequences of the step; one that is nobody's owns the padding rows.
    pub(super) fn n_sequences(&self) -> usize {
        self.parts.len() + usize::from(self.real_rows() < self.n_rows)
    }

    fn state(&self, layer: usize, state: usize) -> mlxcel_abi::Result<Vec<i64>> {
        let desc: Option<&StateDesc> = match self.layers.get(layer) {
            Some(CacheDesc::Recurrent { states }) => states.get(state),
            _ => None,
        };
        let desc = desc.ok_or_else(|| {
            AbiError::invalid(format!(
                "layer {layer} has no state {state} in the description"
            ))
        })?;
        Ok(desc.shape.iter().map(|&n| n as i64).collect())
    }

    fn read(&self, layer: usize, state: usize) -> mlxcel_abi::Result<Tensor> {
        let shape = self.state(layer, state)?;
        if let Some(written) = self.written.borrow().get(&(layer, state)) {
            return Ok(written.clone());
        }
        let dims: Vec<i64> = core::iter::once(1).chain(shape).collect();
        let caches = self.caches.borrow();
        let known = |sequence: usize| caches.sequences.get(&sequence)?.states.get(&(layer, state));
        let mut parts = Vec::new();
        for rows in self.parts {
            parts.push(match known(rows.sequence) {
                Some(state) => state.clone(),
                None => Tensor::zeros(self.backend, DType::F32, &dims)?,
            });
        }
        if self.n_sequences() > self.parts.len() {
            // Nobody's state may be anything.
            parts.push(Tensor::full(self.backend, 3.0, DType::F32, &dims)?);
        }
        Ok(Tensor::concat(
            self.backend,
            &parts.iter().collect::<Vec<_>>(),
            0,
        )?)
    }

    fn write(&self, layer: usize, state: usize, value: &Tensor) -> mlxcel_abi::Result<()> {
        let mut wanted = vec![self.n_sequences() as i64];
        wanted.extend(self.state(layer, state)?);
        let info = value.info()?;
        if info.shape() != wanted || info.dtype != DType::F32 {
            return Err(AbiError::invalid(format!(
                "layer {layer}: state {state} is written as {} {:?}, expected f32 {wanted:?}",
                info.dtype.name(),
                info.shape()
            )));
        }
        let mut caches = self.caches.borrow_mut();
        for (index, rows) in self.parts.iter().enumerate() {
            let own = value.narrow(0, index as i64, 1)?.contiguous()?;
            let sequence = caches.sequences.entry(rows.sequence).or_default();
            sequence.states.insert((layer, state), own);
        }
        self.written
            .borrow_mut()
            .insert((layer, state), value.clone());
        self.count(layer);
        Ok(())
    }

    fn boundaries(&self) -> Result<Tensor> {
        let mut starts = vec![0];
        let padding = self.n_rows - self.real_rows();
        let counts = self.parts.iter().map(|rows| rows.count);
        let mut end = 0;
        for count in counts.chain((padding > 0).then_some(padding)) {
            end += count as i32;
            starts.push(end);
        }
        Tensor::from_slice(self.backend, &starts, &[starts.len() as i64])
    }

    fn owners(&self) -> Result<Tensor> {
        let padding = self.n_rows - self.real_rows();
        let counts = self.parts.iter().map(|rows| rows.count).chain([padding]);
        let owners: Vec<i32> = counts
            .enumerate()
            .flat_map(|(sequence, count)| core::iter::repeat_n(sequence as i32, count))
            .collect();
        Tensor::from_slice(self.backend, &owners, &[owners.len() as i64])
    }

    /// Appends index keys; gives `[S, L, D]`.
    fn keys(&self, layer: usize, k: &Tensor) -> mlxcel_abi::Result<Tensor> {
        let Some(CacheDesc::Latent {
            index_dim: Some(width),
            ..
        }) = self.layers.get(layer)
        else {
            return Err(AbiError::invalid(format!(
                "layer {layer} has no index keys in the description"
            )));
        };
        let wanted = [self.n_rows as i64, *width as i64];
        let info = k.info()?;
        if info.shape() != wanted || info.dtype != self.dtype {
            return Err(AbiError::invalid(format!(
                "layer {layer}: index keys are {} {:?}, expected {} {wanted:?}",
                info.dtype.name(),
                info.shape(),
                self.dtype.name()
            )));
        }
        let mut caches = self.caches.borrow_mut();
        let mut all = Vec::new();
        for rows in self.parts {
            let new = k
                .narrow(0, rows.first as i64, rows.count as i64)?
                .contiguous()?;
            let sequence = caches.sequences.entry(rows.sequence).or_default();
            let keys = match sequence.index_keys.get(&layer) {
                None => new,
                Some(old) => Tensor::concat(self.backend, &[old, &new], 0)?,
            };
            sequence.index_keys.insert(layer, keys.clone());
            all.push(((sequence.length() + rows.count) as i64, keys));
        }
        let longest = all.iter().map(|(length, _)| *length).max().unwrap_or(1);
        let mut padded = Vec::new();
        for (length, keys) in &all {
            // Beyond a sequence's end may be anything.
            padded.push(
                keys.pad(&[0, 0], &[longest - length, 0], 50.0)?
                    .unsqueeze(0)?,
            );
        }
        if self.n_sequences() > self.parts.len() {
            let dims = [1, longest, *width as i64];
            padded.push(Tensor::full(self.backend, 50.0, self.dtype, &dims)?);
        }
        Ok(Tensor::concat(
            self.backend,
            &padded.iter().collect::<Vec<_>>(),
            0,
        )?)
    }
}

/// Runs a slot that gives a tensor.
///
/// # Safety
/// `ctx` must be a live `Server`, `out` writable and `err` the caller's slot.
unsafe fn give(
    ctx: *mut c_void,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
    body: impl FnOnce(&Server<'_>) -> mlxcel_abi::Result<Tensor>,
) -> Status {
    // SAFETY: forwarded to the caller.
    unsafe {
        guard(err, || {
            let tensor = body(&*ctx.cast::<Server<'_>>())?;
            out.write(tensor.into_handle()?);
            Ok(())
        })
    }
}

unsafe extern "C" fn state_read(
    ctx: *mut c_void,
    layer: u32,
    state: u32,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the table's contract.
    unsafe {
        give(ctx, out, err, |server| {
            server.read(layer as usize, state as usize)
        })
    }
}

unsafe extern "C" fn state_write(
    ctx: *mut c_void,
    layer: u32,
    state: u32,
    value: Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the table's contract.
    unsafe {
        guard(err, || {
            let server = &*ctx.cast::<Server<'_>>();
            server.write(layer as usize, state as usize, &server.share(value)?)
        })
    }
}

unsafe extern "C" fn row_starts(
    ctx: *mut c_void,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the table's contract.
    unsafe { give(ctx, out, err, |server| Ok(server.boundaries()?)) }
}

unsafe extern "C" fn row_sequences(
    ctx: *mut c_void,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the table's contract.
    unsafe { give(ctx, out, err, |server| Ok(server.owners()?)) }
}

unsafe extern "C" fn index_keys(
    ctx: *mut c_void,
    layer: u32,
    k: Handle,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the table's contract.
    unsafe {
        give(ctx, out, err, |server| {
            server.keys(layer as usize, &server.share(k)?)
        })
    }
}
