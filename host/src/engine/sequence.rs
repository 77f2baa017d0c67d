//! One sequence: the tokens whose keys and values are in the pool, and the pages they are in.

use super::cross::CrossRows;
use super::error::EngineError;
use super::pages::{PageAllocator, PageId};
use super::state_slots::SequenceState;

/// Tokens and pages of a sequence.
#[derive(Debug, Default)]
pub struct Sequence {
    tokens: Vec<u32>,
    pages: Vec<PageId>,
    /// Slots of recurrent states; empty for models without.
    pub(super) state: SequenceState,
    /// What the encoder gave; empty for models without one.
    pub(super) cross: CrossRows,
    /// Whether a step ran a row behind its last token.
    is_overrun: bool,
}

impl Sequence {
    /// A sequence that starts with full pages whose keys and values are there already.
    pub fn from_pages(tokens: &[u32], pages: Vec<PageId>) -> Self {
        Self {
            tokens: tokens.to_vec(),
            pages,
            ..Self::default()
        }
    }

    /// With recurrent states that belong to its tokens.
    pub fn with_state(mut self, state: SequenceState) -> Self {
        self.state = state;
        self
    }

    /// Slots of states that the next step reads and writes, where the model has states.
    pub fn state_slots(&self) -> Option<(i32, i32)> {
        self.state.slots()
    }

    /// Notes that a step ran a row behind the last token. Keys and values there are in nobody's way, since
    /// whoever goes on writes its own first, but a recurrent state may be that of one token too many.
    pub fn overrun(&mut self) {
        self.is_overrun = true;
    }

    /// Whether the recurrent state may be that of more tokens than there are.
    pub fn is_overrun(&self) -> bool {
        self.is_overrun
    }

    /// The encoder's output.
    pub fn cross(&self) -> &CrossRows {
        &self.cross
    }

    /// Tokens in the pool.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether nothing is in the pool.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Tokens in the pool, in order.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Pages in order.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Pool row of a position that has a page.
    pub fn slot(&self, position: usize, page_size: usize) -> Result<u32, EngineError> {
        let page = self
            .pages
            .get(position / page_size)
            .ok_or(EngineError::Internal {
                message: format!(
                    "position {position} has no page (the sequence has {})",
                    self.pages.len()
                ),
            })?;
        Ok(page.0 * page_size as u32 + (position % page_size) as u32)
    }

    /// Takes pages so that `more` tokens fit. All or nothing.
    pub fn reserve(
        &mut self,
        more: usize,
        page_size: usize,
        allocator: &mut PageAllocator,
    ) -> Result<(), EngineError> {
        let wanted = (self.tokens.len() + more).div_ceil(page_size);
        let missing = wanted.saturating_sub(self.pages.len());
        self.pages.extend(allocator.take(missing)?);
        Ok(())
    }

    /// Records that a step wrote the keys and values of `tokens`.
    pub fn append(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        self.state.written();
    }

    /// Keeps the first `len` tokens and gives back the pages behind them. Any boundary is exact
    /// for dense, windowed and latent caches, since the pool keeps all positions; recurrent states are
    /// not cut, so that models with such can only be cut to nothing, by `SequenceState::forget`.
    /// Pages that are shared through the prefix cache are only given back, never written.
    pub fn truncate(&mut self, len: usize, page_size: usize, allocator: &mut PageAllocator) {
        self.tokens.truncate(len);
        let keep = self.tokens.len().div_ceil(page_size);
        for page in self.pages.drain(keep.min(self.pages.len())..) {
            allocator.give_back(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pages_cover_the_tokens_and_slots_are_distinct(
            steps in proptest::collection::vec((1usize..40, 0usize..100), 1..20),
            page_size in 1usize..17,
        ) {
            let mut allocator = PageAllocator::new(1000);
            let mut sequence = Sequence::default();
            for (more, cut) in steps {
                sequence.reserve(more, page_size, &mut allocator).unwrap();
                sequence.append(&vec![7; more]);
                sequence.truncate(sequence.len().saturating_sub(cut % (more + 3)), page_size, &mut allocator);
                prop_assert_eq!(sequence.pages().len(), sequence.len().div_ceil(page_size));
                prop_assert_eq!(allocator.in_use(), sequence.pages().len());
                let mut slots: Vec<u32> = (0..sequence.len()).map(|p| sequence.slot(p, page_size).unwrap()).collect();
                slots.sort_unstable();
                slots.dedup();
                prop_assert_eq!(slots.len(), sequence.len());
                prop_assert!(slots.iter().all(|slot| *slot >= page_size as u32));
            }
        }
    }

    #[test]
    fn a_reservation_that_fails_takes_nothing() {
        let mut allocator = PageAllocator::new(3);
        let mut sequence = Sequence::default();
        assert!(sequence.reserve(100, 16, &mut allocator).is_err());
        assert_eq!(allocator.in_use(), 0);
        assert!(sequence.reserve(32, 16, &mut allocator).is_ok());
    }
}
