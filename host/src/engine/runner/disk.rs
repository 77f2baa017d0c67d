//! Between the caches on the device and the disk: what is read when a sequence begins, and what is written when there is
//! nothing else to do. A model with recurrent states has them on the disk beside the pages, at the boundaries where
//! checkpoints were left, and pages are of use only as far as the last such boundary.

use std::collections::VecDeque;

use super::super::pages::PageId;
use super::super::prefix_disk::{DiskStats, DiskTier, KeyChain, Part};
use super::{PAGE_SIZE, Runner};

/// Sequences that may wait for their pages to be written; older ones are forgotten.
const WAITING_SEQUENCES: usize = 64;

/// A sequence whose pages are to be written.
pub struct Pending {
    namespace: String,
    /// Of its full pages.
    tokens: Vec<u32>,
    /// Parts that were looked at: of every page itself and the states at its end.
    done: usize,
    /// As far as the last page that was looked at.
    chain: KeyChain,
}

/// Sequences that wait.
pub type PendingList = VecDeque<Pending>;

/// What became of an attempt to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spilled {
    /// Nothing waits.
    Nothing,
    /// Something was done, and there may be more.
    Some,
    /// The writer has enough for the moment.
    Later,
}

impl Runner {
    /// With pages that outlive the process.
    #[must_use]
    pub fn with_disk(mut self, disk: DiskTier) -> Self {
        self.disk = Some(disk);
        self
    }

    /// Counters of the disk tier.
    pub fn disk_stats(&self) -> DiskStats {
        self.disk.as_ref().map(DiskTier::stats).unwrap_or_default()
    }

    /// Reads what the disk has behind the pages that were found, as far as `limit` tokens.
    pub(super) fn restore(
        &mut self,
        namespace: &str,
        tokens: &[u32],
        limit: usize,
        found: &mut Vec<PageId>,
    ) {
        let Some(disk) = &self.disk else { return };
        let mut chain = disk.chain(namespace);
        let known = found.len();
        let within = tokens.get(..limit.min(tokens.len())).unwrap_or_default();
        for (index, chunk) in within.chunks_exact(PAGE_SIZE).enumerate() {
            let key = chain.next(chunk);
            if index < known {
                continue;
            }
            let so_far = within.get(..(index + 1) * PAGE_SIZE).unwrap_or_default();
            let Some(bytes) = disk.read(&chain, (Part::Page, &key), so_far, self.pool.page_bytes())
            else {
                break;
            };
            if self.pages.available() == 0 {
                self.prefix.evict(1, &mut self.pages);
            }
            let Ok(page) = self.pages.take(1) else { break };
            let capacity = self.pages.capacity();
            let written = self
                .pool
                .grow_to(capacity, capacity + self.pages.available())
                .and_then(|()| {
                    page.iter()
                        .try_for_each(|page| self.pool.write_page(*page, &bytes))
                });
            if let Err(error) = written {
                tracing::warn!("pages of the disk cannot be used: {error}");
                page.into_iter().for_each(|page| self.pages.give_back(page));
                break;
            }
            found.extend(page);
        }
        let read = found.len() - known;
        if read > 0 {
            self.prefix.count_restored(known == 0, read * PAGE_SIZE);
        }
    }

    /// Where a model has states: reads pages and states of the longest boundary at which the disk has states, and
    /// memory or disk all pages on the way, if memory has none that is longer.
    pub(super) fn restore_checkpoint(
        &mut self,
        namespace: &str,
        tokens: &[u32],
        found: &mut Vec<PageId>,
    ) {
        let mut pages = self.boundaries_on_disk(namespace, tokens, found.len());
        let known_tokens = found.len() * PAGE_SIZE;
        let longest = self.slots.longest(namespace, tokens, known_tokens);
        while let Some(boundary) = pages.pop().filter(|n| n * PAGE_SIZE > longest) {
            self.restore(namespace, tokens, boundary * PAGE_SIZE, found);
            if found.len() < boundary {
                // A page was not right after all.
                continue;
            }
            let cached = tokens.get(..boundary * PAGE_SIZE).unwrap_or_default();
            if self.restore_states(namespace, cached) {
                return;
            }
        }
    }

    /// Boundaries, in pages, at which the disk has states and that pages lead to, the first `known` of them without
    /// the disk. The last token has to run.
    fn boundaries_on_disk(&self, namespace: &str, tokens: &[u32], known: usize) -> Vec<usize> {
        let Some(disk) = &self.disk else {
            return Vec::new();
        };
        let mut chain = disk.chain(namespace);
        let mut boundaries = Vec::new();
        let within = tokens.get(..tokens.len().saturating_sub(1));
        let chunks = within.unwrap_or_default().chunks_exact(PAGE_SIZE);
        for (index, chunk) in chunks.enumerate() {
            let key = chain.next(chunk);
            if index >= known && !disk.contains(&key) {
                break;
            }
            if disk.contains(&chain.states()) {
                boundaries.push(index + 1);
            }
        }
        boundaries
    }

    /// Reads the states behind exactly these tokens into a checkpoint.
    fn restore_states(&mut self, namespace: &str, tokens: &[u32]) -> bool {
        let Some(disk) = &self.disk else {
            return false;
        };
        let mut chain = disk.chain(namespace);
        for chunk in tokens.chunks_exact(PAGE_SIZE) {
            chain.next(chunk);
        }
        let part = (Part::States, &chain.states());
        let Some(bytes) = disk.read(&chain, part, tokens, self.states.slot_bytes()) else {
            return false;
        };
        let Some(slot) = self.slots.adopt(namespace, tokens) else {
            return false;
        };
        let (slots, most_slots) = self.slots.capacity();
        let written = self
            .states
            .grow_to(slots, most_slots)
            .and_then(|()| self.states.write_slot(slot.index(), &bytes));
        if let Err(error) = written {
            tracing::warn!("states of the disk cannot be used: {error}");
            self.slots.discard(namespace, tokens);
            return false;
        }
        true
    }

    /// Notes a sequence whose pages are in the cache.
    pub(super) fn note_for_disk(&mut self, namespace: &str, tokens: &[u32]) {
        let Some(disk) = &self.disk else { return };
        let full = tokens.len() / PAGE_SIZE * PAGE_SIZE;
        if full == 0 {
            return;
        }
        if self.pending.len() >= WAITING_SEQUENCES {
            self.pending.pop_front();
        }
        self.pending.push_back(Pending {
            namespace: namespace.to_owned(),
            tokens: tokens.get(..full).unwrap_or_default().to_vec(),
            done: 0,
            chain: disk.chain(namespace),
        });
    }

    /// Hands one part to the writer. For times when no request waits.
    pub fn spill(&mut self) -> Spilled {
        let Some(disk) = &self.disk else {
            return Spilled::Nothing;
        };
        let Some(pending) = self.pending.front_mut() else {
            return match disk.is_busy() {
                true => Spilled::Later,
                false => Spilled::Nothing,
            };
        };
        let pages = self.prefix.pages_of(&pending.namespace, &pending.tokens);
        while let Some(page) = pages.get(pending.done / 2) {
            let end = (pending.done / 2 + 1) * PAGE_SIZE;
            let so_far = pending.tokens.get(..end).unwrap_or_default();
            let mut chain = pending.chain.clone();
            let is_page = pending.done.is_multiple_of(2);
            let (part, key) = match is_page {
                true => {
                    let own = so_far.get(end - PAGE_SIZE..).unwrap_or_default();
                    (Part::Page, chain.next(own))
                }
                false => (Part::States, chain.states()),
            };
            let bytes = match part {
                _ if disk.contains(&key) => None,
                Part::Page => Some(self.pool.read_page(*page)),
                Part::States => self
                    .slots
                    .slot_of(&pending.namespace, so_far)
                    .map(|slot| self.states.read_slot(slot.index())),
            };
            let is_written = match bytes {
                None => false,
                Some(Ok(bytes)) => {
                    if !disk.write(&chain, (part, key), so_far, &bytes) {
                        return Spilled::Later;
                    }
                    true
                }
                Some(Err(error)) => {
                    tracing::warn!("caches cannot be read from the device: {error}");
                    self.pending.clear();
                    return Spilled::Nothing;
                }
            };
            pending.chain = chain;
            pending.done += 1;
            if is_written {
                return Spilled::Some;
            }
        }
        self.pending.pop_front();
        Spilled::Some
    }
}
