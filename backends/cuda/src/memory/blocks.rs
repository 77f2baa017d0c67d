//! Free blocks by size, and what is done when the device has no more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};

use mlxcel_abi::{Result, status};

/// Blocks that are kept for reuse are freed above this share of what is in use, or above this many bytes if that is more.
const KEPT_BYTES: usize = 1 << 30;
/// Blocks from this size on are counted against the limit before they are had; what smaller ones come to is seen by the next evaluation.
const LEAST_CHECKED_BYTES: usize = 1 << 19;

/// Where blocks come from.
pub(super) trait Source {
    /// An error if `wanted` more bytes in use are more than the limit.
    fn check_room(&self, wanted: usize) -> Result<()>;
    /// A new block.
    fn allocate(&self, bytes: usize) -> Result<usize>;
    /// Gives a block back, after everything that was submitted.
    fn free(&self, address: usize);
    /// Submits what is held back, since it may use free blocks. Says whether it is.
    fn submit(&self) -> bool;
    /// Gives up what others have and can make again. May give blocks back to the pool meanwhile.
    fn make_room(&self);
    /// What the device has, for an error.
    fn free_bytes(&self) -> Option<usize>;
}

/// Free blocks, and figures.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// Lowest addresses are given out first: which they are depends on what is in use alone, not on what was before, so the same
    /// calls find the same memory again.
    free: BTreeMap<usize, BTreeSet<usize>>,
    /// Blocks that were filled from the host, and their bytes: nothing writes to them while they are used.
    pub(super) constant: BTreeMap<usize, usize>,
    pub(super) kept_bytes: usize,
    pub(super) used_bytes: usize,
    pub(super) peak_bytes: usize,
    pub(super) is_closed: bool,
}

/// Sizes that blocks come in: so few that they are found again, at most an eighth larger than asked for.
pub(super) fn rounded(bytes: usize) -> usize {
    let least = bytes.max(512);
    let step = (least.next_power_of_two() / 16).max(512);
    least.next_multiple_of(step)
}

pub(super) fn lock(blocks: &Mutex<Blocks>) -> MutexGuard<'_, Blocks> {
    blocks
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Blocks {
    fn find(&mut self, size: usize) -> Option<usize> {
        let address = self.free.get_mut(&size)?.pop_first()?;
        self.kept_bytes -= size;
        Some(address)
    }

    /// Bytes of the block with constant contents that `address` is in.
    pub(super) fn constant_around(&self, address: usize) -> Option<usize> {
        let (start, bytes) = self.constant.range(..=address).next_back()?;
        (address - start < *bytes).then_some(*bytes)
    }

    fn count(&mut self, size: usize) {
        self.used_bytes += size;
        self.peak_bytes = self.peak_bytes.max(self.used_bytes);
    }

    /// Keeps a block that came back. Gives how many bytes may stay where too many are kept.
    pub(super) fn keep(&mut self, address: usize, size: usize) -> Option<usize> {
        self.free.entry(size).or_default().insert(address);
        self.kept_bytes += size;
        let most = KEPT_BYTES.max(self.used_bytes / 8);
        (self.kept_bytes > most).then_some(most / 2)
    }

    /// Frees kept blocks, largest first, until at most `most` bytes are kept.
    pub(super) fn trim(&mut self, source: &impl Source, most: usize) {
        if self.kept_bytes <= most || !source.submit() {
            return;
        }
        while self.kept_bytes > most {
            let Some(mut entry) = self.free.last_entry() else {
                return;
            };
            let size = *entry.key();
            match entry.get_mut().pop_last() {
                Some(address) => {
                    self.kept_bytes -= size;
                    source.free(address);
                }
                None => {
                    entry.remove();
                }
            }
        }
    }
}

/// A block of `size` bytes. Where the device has none, first the pool's free blocks go back to it, then what others can make again.
pub(super) fn obtain(blocks: &Mutex<Blocks>, source: &impl Source, size: usize) -> Result<usize> {
    if size >= LEAST_CHECKED_BYTES {
        source.check_room(size)?;
    }
    let found = lock(blocks).find(size);
    let address = match found {
        Some(address) => address,
        None => allocate(blocks, source, size)?,
    };
    lock(blocks).count(size);
    Ok(address)
}

fn allocate(blocks: &Mutex<Blocks>, source: &impl Source, size: usize) -> Result<usize> {
    // Kernels that are held back cannot use what is allocated now, so it may come before them.
    let mut made = source.allocate(size);
    for gives_up in [false, true] {
        match &made {
            Err(error) if error.code == status::RESOURCE_EXHAUSTED => {
                if gives_up {
                    source.make_room();
                }
                lock(blocks).trim(source, 0);
                made = source.allocate(size);
            }
            _ => return made,
        }
    }
    made.map_err(|mut error| {
        if error.code == status::RESOURCE_EXHAUSTED {
            let used = lock(blocks).used_bytes;
            let free = source.free_bytes();
            let free = free.map_or_else(|| "an unknown number of".to_owned(), |n| n.to_string());
            error.message = format!(
                "{size} bytes more are needed, the device has {free} free and {used} are in use here: lower the budget of the cache, or end what else uses the device ({})",
                error.message
            );
        }
        error
    })
}

#[cfg(test)]
mod tests;
