//! States of a slot to the host and back, as plain bytes: layer by layer, state by state.

use crate::plugin::{CallError, DType};

use super::super::entry::Entry;
use super::StatePool;

impl StatePool {
    /// Bytes of one slot over all layers.
    pub fn slot_bytes(&self) -> usize {
        self.bytes_per_slot
    }

    /// The bytes of a slot, which has to have memory.
    pub fn read_slot(&self, slot: u32) -> Result<Vec<u8>, CallError> {
        let mut bytes = Vec::with_capacity(self.bytes_per_slot);
        let pools = self.pools.borrow();
        for (states, pools) in self.layers.iter().zip(pools.iter()) {
            for (state, pool) in states.iter().zip(pools.iter().flatten()) {
                bytes.extend(Entry::new(slot, &state.shape).read(&self.backend, pool)?);
            }
        }
        Ok(bytes)
    }

    /// Writes the bytes of a slot, which has to have memory.
    pub fn write_slot(&mut self, slot: u32, bytes: &[u8]) -> Result<(), CallError> {
        let mut rest = bytes;
        let mut pools = self.pools.take();
        let mut outcome = Ok(());
        for (states, pools) in self.layers.iter().zip(&mut pools) {
            for (state, pool) in states.iter().zip(pools) {
                let Some(old) = pool.take() else { continue };
                let entry = Entry::new(slot, &state.shape);
                let (new, written) = entry.replace(&self.backend, old, DType::F32, &mut rest);
                *pool = Some(new);
                outcome = outcome.and(written);
            }
        }
        self.pools = pools.into();
        outcome?;
        self.backend.eval(&self.handles())
    }
}
