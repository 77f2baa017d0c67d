//! Between the caches on the device and the pages on the disk: what is read when a sequence begins, and what is
//! written when there is nothing else to do.

use std::collections::VecDeque;

use super::super::pages::PageId;
use super::super::prefix_disk::{DiskStats, DiskTier, KeyChain};
use super::{PAGE_SIZE, Runner};

/// Sequences that may wait for their pages to be written; older ones are forgotten.
const WAITING_SEQUENCES: usize = 64;

/// A sequence whose pages are to be written.
pub struct Pending {
    namespace: String,
    /// Of its full pages.
    tokens: Vec<u32>,
    /// Pages that were looked at.
    done: usize,
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
            let Some(bytes) = disk.read(&chain, &key, so_far, self.pool.page_bytes()) else {
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

    /// Hands one page to the writer. For times when no request waits.
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
        while let Some(page) = pages.get(pending.done) {
            let end = (pending.done + 1) * PAGE_SIZE;
            let so_far = pending.tokens.get(..end).unwrap_or_default();
            let mut chain = pending.chain.clone();
            let key = chain.next(so_far.get(end - PAGE_SIZE..).unwrap_or_default());
            if !disk.contains(&key) {
                let bytes = match self.pool.read_page(*page) {
                    Ok(bytes) => bytes,
                    Err(error) => {
                        tracing::warn!("pages cannot be read from the device: {error}");
                        self.pending.clear();
                        return Spilled::Nothing;
                    }
                };
                if !disk.write(&chain, key, so_far, &bytes) {
                    return Spilled::Later;
                }
                pending.chain = chain;
                pending.done += 1;
                return Spilled::Some;
            }
            pending.chain = chain;
            pending.done += 1;
        }
        self.pending.pop_front();
        Spilled::Some
    }
}
