//! Which answers run now, for `/slots`: numbers only, no text.

use std::sync::{Mutex, PoisonError};

use crate::sampling::SamplingParams;

/// One place of an answer, with the last one that had it.
#[derive(Debug, Clone, Default)]
pub struct Slot {
    /// Number of the answer; none before the first.
    pub task: Option<u64>,
    /// Whether it runs.
    pub is_processing: bool,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Of them, from the cache.
    pub cached_tokens: usize,
    /// Of them, computed.
    pub processed_tokens: usize,
    /// Tokens generated.
    pub decoded_tokens: usize,
    /// Most tokens to generate.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampling: Option<SamplingParams>,
}

/// As many places as answers can run at a time.
#[derive(Debug)]
pub struct Slots(Mutex<Vec<Slot>>);

impl Slots {
    /// Free places.
    pub fn new(count: usize) -> Self {
        Self(Mutex::new(vec![Slot::default(); count]))
    }

    /// Gives a free place to an answer. None when the last owner of every place is still about to leave.
    pub fn enter(&self, slot: Slot) -> Option<usize> {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = slots.iter().position(|slot| !slot.is_processing)?;
        if let Some(place) = slots.get_mut(at) {
            *place = Slot {
                is_processing: true,
                ..slot
            };
        }
        Some(at)
    }

    /// Changes a place.
    pub fn update(&self, at: usize, change: impl FnOnce(&mut Slot)) {
        if let Some(slot) = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_mut(at)
        {
            change(slot);
        }
    }

    /// All places.
    pub fn all(&self) -> Vec<Slot> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}
