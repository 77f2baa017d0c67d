//! Generation-checked handles: what a backend keeps behind the 64-bit [`Tensor`] handles.
//!
//! Low 32 bits: slot index + 1. High 32 bits: the slot's generation, so that a handle used after
//! its release is an error and never another tensor.

use crate::error::{AbiError, Result};
use crate::types::Tensor;

struct Slot<T> {
    generation: u32,
    references: u32,
    value: Option<T>,
}

/// Owns the values behind the handles of one opened backend.
pub struct Arena<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

impl<T> Default for Arena<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Arena<T> {
    /// Number of live handles.
    pub fn live(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Stores `value` with one reference.
    pub fn insert(&mut self, value: T) -> Result<Tensor> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                let index = u32::try_from(self.slots.len())
                    .ok()
                    .filter(|&index| index < u32::MAX)
                    .ok_or_else(|| AbiError::internal("more than 2^32 live tensors"))?;
                self.slots.push(Slot {
                    generation: 0,
                    references: 0,
                    value: None,
                });
                index
            }
        };
        let slot = self
            .slots
            .get_mut(index as usize)
            .ok_or_else(|| AbiError::internal("tensor arena lost a slot"))?;
        slot.references = 1;
        slot.value = Some(value);
        Ok(Tensor(
            (u64::from(slot.generation) << 32) | (u64::from(index) + 1),
        ))
    }

    fn index_of(&self, handle: Tensor) -> Result<usize> {
        let index = (handle.0 & 0xffff_ffff).wrapping_sub(1) as usize;
        let generation = (handle.0 >> 32) as u32;
        match self.slots.get(index) {
            Some(slot) if slot.value.is_some() && slot.generation == generation => Ok(index),
            _ if handle.is_none() => {
                Err(AbiError::invalid("no tensor was given where one is needed"))
            }
            _ => Err(AbiError::invalid(format!(
                "tensor handle {:#x} is stale or belongs to another backend",
                handle.0
            ))),
        }
    }

    /// The value behind `handle`.
    pub fn get(&self, handle: Tensor) -> Result<&T> {
        let index = self.index_of(handle)?;
        self.slots
            .get(index)
            .and_then(|slot| slot.value.as_ref())
            .ok_or_else(|| AbiError::internal("tensor arena lost a value"))
    }

    /// The value behind an optional handle.
    pub fn get_optional(&self, handle: Tensor) -> Result<Option<&T>> {
        if handle.is_none() {
            Ok(None)
        } else {
            self.get(handle).map(Some)
        }
    }

    /// Adds a reference.
    pub fn retain(&mut self, handle: Tensor) -> Result<()> {
        let index = self.index_of(handle)?;
        if let Some(slot) = self.slots.get_mut(index) {
            slot.references = slot
                .references
                .checked_add(1)
                .ok_or_else(|| AbiError::invalid("more than 2^32 references to one tensor"))?;
        }
        Ok(())
    }

    /// Drops a reference; returns the value when it was the last one.
    pub fn release(&mut self, handle: Tensor) -> Result<Option<T>> {
        let index = self.index_of(handle)?;
        let Some(slot) = self.slots.get_mut(index) else {
            return Ok(None);
        };
        slot.references -= 1;
        if slot.references > 0 {
            return Ok(None);
        }
        let value = slot.value.take();
        // A slot whose generation is used up is retired: a handle must never become valid again.
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.free.push(index as u32);
        }
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_handle_stays_dead_when_its_slot_is_reused() {
        let mut arena = Arena::default();
        let first = arena.insert("a").unwrap();
        assert_eq!(arena.release(first).unwrap(), Some("a"));
        let second = arena.insert("b").unwrap();
        assert_ne!(first, second);
        assert!(arena.get(first).is_err());
        assert_eq!(arena.get(second), Ok(&"b"));
        assert_eq!(arena.live(), 1);
    }

    #[test]
    fn references_are_counted() {
        let mut arena = Arena::default();
        let handle = arena.insert(1).unwrap();
        arena.retain(handle).unwrap();
        assert_eq!(arena.release(handle).unwrap(), None);
        assert_eq!(arena.release(handle).unwrap(), Some(1));
        assert!(arena.release(handle).is_err());
    }

    #[test]
    fn none_and_garbage_are_told_apart() {
        let arena = Arena::<u8>::default();
        assert!(
            arena
                .get(Tensor::NONE)
                .unwrap_err()
                .message
                .contains("no tensor")
        );
        assert!(arena.get(Tensor(77)).unwrap_err().message.contains("stale"));
        assert_eq!(arena.get_optional(Tensor::NONE), Ok(None));
    }
}
