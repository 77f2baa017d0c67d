//! Who has which slot of the state pool: running sequences, and checkpoints that later sequences start
//! from.
//!
//! A state is exact at one position only. A checkpoint is the slot of a sequence that was left as it
//! was when the sequence went on in another one: nothing is copied. Checkpoints are found by the exact
//! tokens that lead to them.

use super::error::EngineError;
use super::pages::{PageAllocator, PageId};

/// Number of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SlotId(PageId);

impl SlotId {
    /// Index into the pool.
    pub fn index(self) -> u32 {
        self.0.0
    }
}

/// A state that a sequence left behind, and its length then.
#[derive(Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Tokens whose rows led to it.
    pub tokens: usize,
    slot: SlotId,
}

/// A checkpoint for sequences to come.
struct Kept {
    namespace: String,
    tokens: Box<[u32]>,
    slot: SlotId,
    used: u64,
}

/// Slots with their owners.
pub struct StateSlots {
    slots: PageAllocator,
    kept: Vec<Kept>,
    clock: u64,
    /// Checkpoints there are, kept ones and those of running sequences.
    checkpoints: usize,
    most_checkpoints: usize,
}

impl StateSlots {
    /// Slots for `sequences` at a time and `most_checkpoints`. A sequence holds two slots at most, one
    /// that it reads and one that it writes, so a running one always finds its slot.
    pub fn new(sequences: usize, most_checkpoints: usize) -> Self {
        Self {
            slots: PageAllocator::new(2 * sequences + most_checkpoints + 1),
            kept: Vec::new(),
            clock: 0,
            checkpoints: 0,
            most_checkpoints,
        }
    }

    /// Slots that exist, and that there may be; slot 0 included.
    pub fn capacity(&self) -> (usize, usize) {
        let exist = self.slots.capacity();
        (exist, self.slots.in_use() + self.slots.available() + 1)
    }

    /// Checkpoints that are kept.
    pub fn kept(&self) -> usize {
        self.kept.len()
    }

    fn release(&mut self, slot: SlotId) {
        self.slots.give_back(slot.0);
    }

    /// Lets a checkpoint go.
    fn drop_checkpoint(&mut self, checkpoint: Checkpoint) {
        self.release(checkpoint.slot);
        self.checkpoints -= 1;
    }

    /// Lets the checkpoint that was not used for longest go. Whether there was one.
    fn evict(&mut self) -> bool {
        let oldest = (0..self.kept.len()).min_by_key(|i| self.kept.get(*i).map(|kept| kept.used));
        let Some(index) = oldest else { return false };
        let kept = self.kept.swap_remove(index);
        self.release(kept.slot);
        self.checkpoints -= 1;
        true
    }

    /// The longest checkpoint on the way to `tokens`, at most `limit` tokens long, with a reference for
    /// the caller: its length and slot.
    pub fn find(&mut self, namespace: &str, tokens: &[u32], limit: usize) -> Option<Checkpoint> {
        let fits = |kept: &Kept| {
            kept.tokens.len() <= limit
                && kept.namespace == namespace
                && tokens.starts_with(&kept.tokens)
        };
        self.clock += 1;
        let found = self
            .kept
            .iter_mut()
            .filter(|kept| fits(kept))
            .max_by_key(|kept| kept.tokens.len())?;
        found.used = self.clock;
        let (tokens, slot) = (found.tokens.len(), found.slot);
        self.slots.share(slot.0);
        Some(Checkpoint { tokens, slot })
    }

    /// Length of the longest checkpoint that [`StateSlots::find`] would find; 0 for none.
    pub fn longest(&self, namespace: &str, tokens: &[u32], limit: usize) -> usize {
        let fits = |kept: &&Kept| {
            kept.tokens.len() <= limit
                && kept.namespace == namespace
                && tokens.starts_with(&kept.tokens)
        };
        let lengths = self.kept.iter().filter(fits).map(|kept| kept.tokens.len());
        lengths.max().unwrap_or(0)
    }

    /// The slot of the checkpoint that is kept for exactly these tokens.
    pub fn slot_of(&self, namespace: &str, tokens: &[u32]) -> Option<SlotId> {
        let is_it = |kept: &&Kept| kept.namespace == namespace && *kept.tokens == *tokens;
        self.kept.iter().find(is_it).map(|kept| kept.slot)
    }

    /// A slot for a checkpoint of these tokens that comes from elsewhere, kept from now on. None where there is no
    /// room for one more.
    pub fn adopt(&mut self, namespace: &str, tokens: &[u32]) -> Option<SlotId> {
        while self.checkpoints >= self.most_checkpoints {
            if !self.evict() {
                return None;
            }
        }
        let slot = SlotId(self.slots.take(1).ok()?.into_iter().next()?);
        self.checkpoints += 1;
        self.clock += 1;
        self.kept.push(Kept {
            namespace: namespace.to_owned(),
            tokens: tokens.into(),
            slot,
            used: self.clock,
        });
        Some(slot)
    }

    /// Lets the checkpoint of exactly these tokens go.
    pub fn discard(&mut self, namespace: &str, tokens: &[u32]) {
        let is_it = |kept: &Kept| kept.namespace == namespace && *kept.tokens == *tokens;
        if let Some(index) = self.kept.iter().position(is_it) {
            let kept = self.kept.swap_remove(index);
            self.release(kept.slot);
            self.checkpoints -= 1;
        }
    }

    /// Forgets what is kept.
    pub fn clear(&mut self) {
        while self.evict() {}
    }
}

/// The slots of one sequence.
#[derive(Debug, Default)]
pub struct SequenceState {
    /// State after all of the sequence's tokens; none at the start.
    source: Option<SlotId>,
    /// Where the next step writes.
    target: Option<SlotId>,
    /// Whether a step wrote there.
    is_written: bool,
    /// Oldest first.
    checkpoints: Vec<Checkpoint>,
    /// Lengths at which a checkpoint is worth keeping to the end.
    marks: Vec<usize>,
}

impl SequenceState {
    /// The state at a checkpoint that was found.
    pub fn restored(checkpoint: Checkpoint) -> Self {
        Self {
            source: Some(checkpoint.slot),
            ..Self::default()
        }
    }

    /// Lengths at which checkpoints are wanted.
    pub fn mark(&mut self, lengths: impl IntoIterator<Item = usize>) {
        self.marks.extend(lengths);
    }

    /// Rows of at most `rows` to run next, so that a step ends at the next mark.
    pub fn cut(&self, len: usize, rows: usize) -> usize {
        let next = self.marks.iter().filter(|mark| **mark > len).min();
        next.map_or(rows, |mark| rows.min(mark - len))
    }

    /// Slots that a step reads and writes: -1 reads zeros.
    pub fn slots(&self) -> Option<(i32, i32)> {
        let source = self.source.map_or(-1, |slot| slot.index() as i32);
        self.target.map(|target| (source, target.index() as i32))
    }

    /// Notes that a step wrote the target.
    pub fn written(&mut self) {
        self.is_written = self.target.is_some();
    }

    /// After a step: what was written is the state from now on.
    fn settle(&mut self, slots: &mut StateSlots) {
        if !std::mem::take(&mut self.is_written) {
            return;
        }
        let old = std::mem::replace(&mut self.source, self.target.take());
        if let Some(old) = old.filter(|old| self.source != Some(*old)) {
            slots.release(old);
        }
    }

    /// Leaves the state of `len` tokens behind as a checkpoint, if there is room for one more. Of the
    /// checkpoints that nobody marked only the newest stays.
    pub fn checkpoint(&mut self, len: usize, slots: &mut StateSlots) {
        self.settle(slots);
        let Some(source) = self.source else { return };
        if self.checkpoints.iter().any(|c| c.tokens == len) {
            return;
        }
        let unmarked = |c: &Checkpoint| !self.marks.contains(&c.tokens);
        if let Some(index) = self.checkpoints.iter().position(unmarked) {
            slots.drop_checkpoint(self.checkpoints.remove(index));
        }
        while slots.checkpoints >= slots.most_checkpoints {
            if !slots.evict() {
                return;
            }
        }
        slots.slots.share(source.0);
        slots.checkpoints += 1;
        // A slot to write that was chosen before is not ours alone any more.
        self.target.take_if(|target| *target == source);
        self.checkpoints.push(Checkpoint {
            tokens: len,
            slot: source,
        });
    }

    /// Finds the slot that the next step writes: the one it reads, unless somebody else has that too.
    pub fn reserve(&mut self, slots: &mut StateSlots) -> Result<(), EngineError> {
        self.settle(slots);
        if self.target.is_some() {
            return Ok(());
        }
        self.target = match self.source {
            Some(source) if slots.slots.is_unique(source.0) => Some(source),
            _ => {
                let taken = slots.slots.take(1)?.into_iter().next();
                Some(SlotId(taken.ok_or_else(|| EngineError::Internal {
                    message: "the state pool gave no slot".to_owned(),
                })?))
            }
        };
        Ok(())
    }

    /// Ends the sequence of `tokens`: its checkpoints stay for others.
    pub fn keep(mut self, namespace: &str, tokens: &[u32], slots: &mut StateSlots) {
        self.publish(namespace, tokens, slots);
        self.forget(slots);
    }

    /// Hands the checkpoints of a sequence of `tokens` over to whoever begins with them. It goes on without.
    pub fn publish(&mut self, namespace: &str, tokens: &[u32], slots: &mut StateSlots) {
        for checkpoint in std::mem::take(&mut self.checkpoints) {
            let Some(tokens) = tokens.get(..checkpoint.tokens) else {
                slots.drop_checkpoint(checkpoint);
                continue;
            };
            slots.clock += 1;
            let used = slots.clock;
            let known = slots
                .kept
                .iter_mut()
                .find(|kept| kept.namespace == namespace && *kept.tokens == *tokens);
            if let Some(known) = known {
                known.used = used;
                slots.drop_checkpoint(checkpoint);
                continue;
            }
            slots.kept.push(Kept {
                namespace: namespace.to_owned(),
                tokens: tokens.into(),
                slot: checkpoint.slot,
                used,
            });
        }
    }

    /// Gives everything back.
    pub fn forget(mut self, slots: &mut StateSlots) {
        for checkpoint in std::mem::take(&mut self.checkpoints) {
            slots.drop_checkpoint(checkpoint);
        }
        let target = self.target.filter(|target| self.source != Some(*target));
        for slot in self.source.into_iter().chain(target) {
            slots.release(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn step(state: &mut SequenceState, slots: &mut StateSlots) -> (i32, i32) {
        state.reserve(slots).unwrap();
        let used = state.slots().unwrap();
        state.written();
        used
    }

    #[test]
    fn a_state_moves_in_place_until_it_is_a_checkpoint() {
        let mut slots = StateSlots::new(2, 2);
        let mut state = SequenceState::default();
        assert_eq!(step(&mut state, &mut slots), (-1, 1));
        assert_eq!(step(&mut state, &mut slots), (1, 1));
        state.checkpoint(4, &mut slots);
        assert_eq!(step(&mut state, &mut slots), (1, 2));
        assert_eq!(step(&mut state, &mut slots), (2, 2));
        state.keep("", &[7; 6], &mut slots);
        let found = slots.find("", &[7; 9], 9).unwrap();
        assert_eq!((found.tokens, found.slot.index()), (4, 1));
        let mut next = SequenceState::restored(found);
        let (source, target) = step(&mut next, &mut slots);
        assert_eq!(source, 1);
        assert_ne!(target, 1);
        assert!(slots.find("other", &[7; 9], 9).is_none());
        assert!(slots.find("", &[7; 9], 3).is_none());
        assert!(slots.find("", &[7, 7, 8, 7, 7], 5).is_none());
    }

    #[test]
    fn marked_checkpoints_stay_and_cut_steps() {
        let mut slots = StateSlots::new(1, 3);
        let mut state = SequenceState::default();
        state.mark([4, 12]);
        assert_eq!(
            (state.cut(0, 9), state.cut(4, 9), state.cut(12, 9)),
            (4, 8, 9)
        );
        for len in [4, 8, 12, 16] {
            step(&mut state, &mut slots);
            state.checkpoint(len, &mut slots);
        }
        let lengths: Vec<usize> = state.checkpoints.iter().map(|c| c.tokens).collect();
        assert_eq!(lengths, [4, 12, 16]);
    }

    proptest! {
        /// Slots are never written by two, checkpoints stay below their bound, nothing leaks.
        #[test]
        fn no_slot_is_written_while_another_reads_it(
            most in 0usize..4,
            ops in proptest::collection::vec((0usize..3, 0u8..8), 1..120),
        ) {
            let mut slots = StateSlots::new(3, most);
            let mut running: Vec<(SequenceState, Vec<u32>)> = (0..3).map(|_| Default::default()).collect();
            for (who, op) in ops {
                match op {
                    0..=2 => {
                        for (state, _) in &mut running {
                            state.reserve(&mut slots).unwrap();
                        }
                        let used: Vec<(i32, i32)> = running.iter().map(|(state, _)| state.slots().unwrap()).collect();
                        for (i, (_, target)) in used.iter().enumerate() {
                            prop_assert!(*target > 0);
                            for (j, (source, other)) in used.iter().enumerate() {
                                prop_assert!(i == j || (source != target && other != target));
                            }
                            prop_assert!(slots.kept.iter().all(|kept| kept.slot.index() as i32 != *target));
                        }
                        let (state, tokens) = &mut running[who];
                        state.written();
                        tokens.push(u32::from(op));
                    }
                    3 => {
                        let (state, tokens) = &mut running[who];
                        let len = tokens.len();
                        state.checkpoint(len, &mut slots);
                    }
                    5 => {
                        let (state, tokens) = &mut running[who];
                        state.publish("", tokens, &mut slots);
                    }
                    6 => {
                        let tokens = vec![100 + u32::from(op); running[who].1.len()];
                        match slots.slot_of("", &tokens) {
                            Some(_) => slots.discard("", &tokens),
                            None => drop(slots.adopt("", &tokens)),
                        }
                    }
                    4 => {
                        let (state, tokens) = std::mem::take(&mut running[who]);
                        state.keep("", &tokens, &mut slots);
                        if let Some(found) = slots.find("", &tokens, tokens.len()) {
                            let len = found.tokens;
                            running[who] = (SequenceState::restored(found), tokens[..len].to_vec());
                        }
                    }
                    _ => std::mem::take(&mut running[who]).0.forget(&mut slots),
                }
                prop_assert!(slots.checkpoints <= most);
                prop_assert!(slots.kept.len() <= slots.checkpoints);
            }
            for (state, _) in running {
                state.forget(&mut slots);
            }
            slots.clear();
            prop_assert_eq!((slots.slots.in_use(), slots.checkpoints), (0, 0));
        }
    }
}
