//! One entry of a pool's tensor, whose first axis counts pages or slots, to the host and back.

use crate::plugin::{Backend, CallError, DType, DeviceTensor, SliceSpec};

/// The box of an entry.
pub struct Entry {
    starts: Vec<i64>,
    stops: Vec<i64>,
    strides: Vec<i64>,
}

impl Entry {
    /// Entry `index` of a tensor `[entries, inner..]`.
    pub fn new(index: u32, inner: &[usize]) -> Self {
        let at = i64::from(index);
        let zeros = inner.iter().map(|_| 0);
        let sizes = inner.iter().map(|n| *n as i64);
        Self {
            starts: core::iter::once(at).chain(zeros).collect(),
            stops: core::iter::once(at + 1).chain(sizes).collect(),
            strides: vec![1; inner.len() + 1],
        }
    }

    /// Elements of the entry.
    fn elements(&self) -> usize {
        self.stops.iter().skip(1).product::<i64>() as usize
    }

    fn spec(&self) -> SliceSpec<'_> {
        SliceSpec {
            starts: &self.starts,
            stops: &self.stops,
            strides: &self.strides,
        }
    }

    /// The bytes of the entry.
    pub fn read(&self, backend: &Backend, tensor: &DeviceTensor) -> Result<Vec<u8>, CallError> {
        backend.read(&backend.slice(tensor, self.spec())?)
    }

    /// The tensor with the entry's bytes taken from the front of `bytes`, which is shorter by them afterwards. On
    /// failure it is as it was. The old tensor is gone before anything is computed, so that the backend may write
    /// in place.
    pub fn replace(
        &self,
        backend: &Backend,
        old: DeviceTensor,
        dtype: DType,
        bytes: &mut &[u8],
    ) -> (DeviceTensor, Result<(), CallError>) {
        let len = self.elements() * dtype.size_bytes();
        let (own, after) = bytes.split_at_checked(len).unwrap_or((&[], &[]));
        *bytes = after;
        let shape: Vec<i64> = core::iter::once(1)
            .chain(self.stops.iter().skip(1).copied())
            .collect();
        let new = backend
            .from_host(own, dtype, &shape)
            .and_then(|update| backend.slice_update(&old, &update, self.spec()));
        match new {
            Ok(new) => (new, Ok(())),
            Err(error) => (old, Err(error)),
        }
    }
}
