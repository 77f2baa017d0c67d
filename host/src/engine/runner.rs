//! Runs packed steps of a loaded model. Lives on the engine thread.

mod choices;
mod chosen;
mod disk;
mod encode;
mod score;
mod states;
mod step;

use std::time::Instant;

use crate::plugin::{DType, Model};

use super::cross::CrossPool;
use super::desc::ModelDesc;
use super::error::EngineError;
use super::flight::Lookahead;
use super::kv_types::KvType;
use super::pages::PageAllocator;
use super::pool::KvPool;
use super::prefix::{PrefixCache, PrefixLimits, PrefixStats};
use super::prefix_disk::DiskTier;
use super::ranks::Ranks;
use super::sequence::Sequence;
use super::state_slots::StateSlots;
use super::states::StatePool;
use choices::Choices;
use chosen::Chooser;
use disk::PendingList;

pub use disk::Spilled;
pub use encode::EncodeError;
pub use step::{Outcome, Submitted};

/// Positions in a page: the unit of sharing and of growth.
pub const PAGE_SIZE: usize = 32;

/// A loaded model with its caches.
pub struct Runner {
    // Order of fields is order of drop: tensors and model before the backend they keep open.
    pool: KvPool,
    states: StatePool,
    cross: CrossPool,
    chooser: Chooser,
    looks_ahead: bool,
    /// Steps whose tokens all ranks choose.
    choices: Choices,
    model: Model,
    desc: ModelDesc,
    pages: PageAllocator,
    prefix: PrefixCache,
    slots: StateSlots,
    /// Pages that outlive the process; none unless it was asked for.
    disk: Option<DiskTier>,
    pending: PendingList,
    context_tokens: usize,
    compute_dtype: DType,
    /// The other ranks, where the model is split and this is rank 0.
    ranks: Option<Ranks>,
}

/// Type of an encoder's keys and values. Nothing appends to them, which is what quantised rows are made for.
pub fn cross_dtype(kv_type: KvType, compute_dtype: DType) -> DType {
    match kv_type {
        KvType::Float(dtype) => dtype,
        KvType::Q8_0 | KvType::Q4_0 => compute_dtype,
    }
}

impl Runner {
    /// Prepares caches for sequences of up to `context_tokens`, `kv_tokens` in all. `compute_dtype` is that
    /// of the activations.
    pub fn new(
        model: Model,
        desc: ModelDesc,
        context_tokens: usize,
        kv_tokens: usize,
        kv_type: KvType,
        compute_dtype: DType,
    ) -> Self {
        let pool = KvPool::new(model.backend(), &desc, PAGE_SIZE, kv_type);
        let states = StatePool::new(model.backend(), &desc);
        let cross = CrossPool::new(
            model.backend(),
            &desc,
            1,
            cross_dtype(kv_type, compute_dtype),
        );
        let pages = PageAllocator::new(kv_tokens.div_ceil(PAGE_SIZE).max(1) + 1);
        Self {
            pool,
            states,
            cross,
            chooser: Chooser::new(model.backend()),
            looks_ahead: false,
            slots: StateSlots::new(1, 0),
            model,
            desc,
            pages,
            prefix: PrefixCache::new(PAGE_SIZE, PrefixLimits::default()),
            disk: None,
            pending: PendingList::default(),
            context_tokens,
            compute_dtype,
            ranks: None,
            choices: Choices::default(),
        }
    }

    /// With the other ranks, which run every step too.
    #[must_use]
    pub fn with_ranks(mut self, ranks: Option<Ranks>) -> Self {
        self.ranks = ranks;
        self
    }

    /// With bounds of the prefix cache.
    #[must_use]
    pub fn with_prefix_limits(mut self, limits: PrefixLimits) -> Self {
        self.prefix.set_limits(limits);
        self
    }

    /// Whether a sequence may go on anywhere behind what it has in its pages, which is so where everything that is
    /// cached is cached by position.
    pub fn has_exact_boundaries(&self) -> bool {
        self.desc.is_exact_everywhere()
    }

    /// On a backend that goes on working after a submission, or not.
    #[must_use]
    pub fn with_lookahead(mut self, lookahead: Lookahead, is_asynchronous: bool) -> Self {
        self.chooser.set_asynchronous(is_asynchronous);
        if is_asynchronous {
            self.pool.begin_roomy();
        }
        self.looks_ahead = match lookahead {
            Lookahead::Auto => is_asynchronous,
            Lookahead::On => true,
            Lookahead::Off => false,
        };
        self
    }

    /// Whether steps are submitted before the tokens of the ones before them are known.
    pub fn looks_ahead(&self) -> bool {
        self.looks_ahead
    }

    /// With recurrent states for `sequences` at a time, and `checkpoints` of them for sequences to come.
    #[must_use]
    pub fn with_states(mut self, sequences: usize, checkpoints: usize) -> Self {
        self.slots = StateSlots::new(sequences, checkpoints);
        self
    }

    /// With room for the encoder's output of `sequences` at a time.
    #[must_use]
    pub fn with_encoders(mut self, sequences: usize) -> Self {
        self.cross = CrossPool::new(
            self.model.backend(),
            &self.desc,
            sequences,
            self.cross.dtype(),
        );
        self
    }

    /// Pages of encoders' output in use.
    pub fn cross_pages_in_use(&self) -> usize {
        self.cross.pages_in_use()
    }

    /// The model's description.
    pub fn desc(&self) -> &ModelDesc {
        &self.desc
    }

    /// Longest sequence, in tokens.
    pub fn context_tokens(&self) -> usize {
        self.context_tokens
    }

    /// Bytes of keys, values and states on the device.
    pub fn kv_bytes(&self) -> usize {
        self.pool.bytes() + self.states.bytes() + self.cross.bytes()
    }

    /// Pages in use and pages there may be, page 0 left out.
    pub fn pages(&self) -> (usize, usize) {
        let in_use = self.pages.in_use();
        (in_use, in_use + self.pages.available())
    }

    /// Counters of the prefix cache, and the pages it holds.
    pub fn prefix(&self) -> (PrefixStats, usize) {
        (self.prefix.stats(), self.prefix.pages())
    }

    /// Bounds of the prefix cache.
    pub fn prefix_limits(&self) -> PrefixLimits {
        self.prefix.limits()
    }

    /// Tensors that the backend holds; 0 where it does not tell.
    pub fn live_tensors(&self) -> u64 {
        self.model
            .backend()
            .memory()
            .map_or(0, |memory| memory.live_tensors)
    }

    /// Whether the model panicked, after which it refuses every step.
    pub fn is_poisoned(&self) -> bool {
        self.model.poison().is_some()
    }

    /// Empties the prefix cache and its disk. Sequences that run keep their pages.
    pub fn clear_prefix(&mut self) {
        self.prefix.clear(&mut self.pages);
        self.slots.clear();
        if let Some(disk) = &mut self.disk {
            disk.clear();
            self.pending.clear();
        }
    }

    /// A sequence that starts with what the cache has of `tokens`, but never all of them: the last
    /// token has to run to give logits.
    pub fn begin(&mut self, namespace: &str, tokens: &[u32]) -> Sequence {
        let limit = tokens.len().saturating_sub(1);
        self.prefix.trim(Instant::now(), &mut self.pages);
        let mut pages = self.prefix.find(namespace, tokens, limit, &mut self.pages);
        if self.states.is_needed() {
            let state = self.restore_state(namespace, tokens, &mut pages);
            let cached = tokens.get(..pages.len() * PAGE_SIZE).unwrap_or_default();
            return Sequence::from_pages(cached, pages).with_state(state);
        }
        if self.has_exact_boundaries() {
            self.restore(namespace, tokens, limit, &mut pages);
        }
        let mut cached = pages.len() * PAGE_SIZE;
        if self.has_exact_boundaries()
            && let Some((page, more)) =
                self.prefix
                    .take_tail(namespace, tokens, pages.len(), limit, &self.pages)
        {
            pages.push(page);
            cached += more;
        }
        Sequence::from_pages(tokens.get(..cached).unwrap_or_default(), pages)
    }

    /// Puts the full pages of a sequence that goes on into the cache, and its checkpoints. They are written no more.
    pub fn share(&mut self, namespace: &str, sequence: &mut Sequence) {
        self.prefix.keep(
            namespace,
            sequence.tokens(),
            sequence.pages(),
            &mut self.pages,
        );
        self.share_checkpoints(namespace, sequence);
        self.prefix.trim(Instant::now(), &mut self.pages);
    }

    /// Ends a sequence. Its full pages stay in the cache.
    pub fn end(&mut self, namespace: &str, mut sequence: Sequence) {
        self.prefix.keep(
            namespace,
            sequence.tokens(),
            sequence.pages(),
            &mut self.pages,
        );
        if self.has_exact_boundaries() {
            self.prefix.keep_tail(
                namespace,
                sequence.tokens(),
                sequence.pages(),
                &mut self.pages,
            );
        }
        self.note_for_disk(namespace, sequence.tokens());
        self.leave_checkpoint(&mut sequence);
        let state = std::mem::take(&mut sequence.state);
        state.keep(namespace, sequence.tokens(), &mut self.slots);
        self.cross.give_back(std::mem::take(&mut sequence.cross));
        sequence.truncate(0, PAGE_SIZE, &mut self.pages);
        self.prefix.trim(Instant::now(), &mut self.pages);
    }

    /// Takes pages so that `more` tokens fit; cached pages that nobody uses make room.
    pub fn reserve(&mut self, sequence: &mut Sequence, more: usize) -> Result<(), EngineError> {
        if self.states.is_needed() {
            self.leave_checkpoint(sequence);
            sequence.state.reserve(&mut self.slots)?;
        }
        match sequence.reserve(more, PAGE_SIZE, &mut self.pages) {
            Err(EngineError::KvPoolFull {
                wanted_pages,
                available_pages,
            }) => {
                self.prefix
                    .evict(wanted_pages - available_pages, &mut self.pages);
                sequence.reserve(more, PAGE_SIZE, &mut self.pages)
            }
            other => other,
        }
    }

    /// Forgets all keys and values: what a failed step wrote is not to be trusted. Sequences that
    /// live must be emptied with [`Runner::forget`].
    pub fn reset(&mut self) {
        self.prefix.clear(&mut self.pages);
        self.slots.clear();
        self.pool.reset();
        self.states.reset();
        self.cross.reset();
        self.chooser.rest();
    }

    /// Gives a sequence's pages back without keeping them.
    pub fn forget(&mut self, sequence: &mut Sequence) {
        std::mem::take(&mut sequence.state).forget(&mut self.slots);
        self.cross.give_back(std::mem::take(&mut sequence.cross));
        sequence.truncate(0, PAGE_SIZE, &mut self.pages);
    }

    /// Checks token ids before they reach a family.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<(), EngineError> {
        let vocab_size = self.desc.vocab_size;
        match tokens.iter().find(|&&token| token as usize >= vocab_size) {
            Some(&token) => Err(EngineError::TokenOutOfRange { token, vocab_size }),
            None => Ok(()),
        }
    }
}
