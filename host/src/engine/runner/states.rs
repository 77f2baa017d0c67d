//! Recurrent states of sequences: where they start from, and what they leave for others.

use super::{PAGE_SIZE, Runner};
use crate::engine::pages::PageId;
use crate::engine::sequence::Sequence;
use crate::engine::state_slots::SequenceState;

impl Runner {
    /// Rows that a sequence may run in the next step, at most `rows`: steps end where a checkpoint is
    /// wanted.
    pub fn cut(&self, sequence: &Sequence, rows: usize) -> usize {
        sequence.state.cut(sequence.len(), rows)
    }

    /// Hands the checkpoints of a sequence that goes on over to others.
    pub(super) fn share_checkpoints(&mut self, namespace: &str, sequence: &mut Sequence) {
        let tokens = sequence.tokens().to_vec();
        sequence.state.publish(namespace, &tokens, &mut self.slots);
    }

    /// Cuts the pages that were found to the longest checkpoint on their way, and gives its state. Where
    /// the pages went on, others came by before: a checkpoint is wanted there, as at the last boundary of
    /// `tokens`.
    pub(super) fn restore_state(
        &mut self,
        namespace: &str,
        tokens: &[u32],
        pages: &mut Vec<PageId>,
    ) -> SequenceState {
        self.restore_checkpoint(namespace, tokens, pages);
        let found = pages.len();
        let limit = found * PAGE_SIZE;
        let checkpoint = self.slots.find(namespace, tokens, limit);
        let exact = checkpoint.as_ref().map_or(0, |c| c.tokens / PAGE_SIZE);
        for page in pages.drain(exact.min(found)..) {
            self.pages.give_back(page);
        }
        self.prefix.not_used(found, exact);
        let mut state = checkpoint.map_or_else(SequenceState::default, SequenceState::restored);
        let last = tokens.len().saturating_sub(1) / PAGE_SIZE * PAGE_SIZE;
        state.mark([limit, last]);
        state
    }

    /// Leaves a checkpoint when the sequence stands at the boundary of a page.
    pub(super) fn leave_checkpoint(&mut self, sequence: &mut Sequence) {
        let len = sequence.len();
        let is_exact = len.is_multiple_of(PAGE_SIZE) && !sequence.is_overrun();
        if self.states.is_needed() && len > 0 && is_exact {
            sequence.state.checkpoint(len, &mut self.slots);
        }
    }
}
