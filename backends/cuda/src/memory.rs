//! Memory for results of our kernels: blocks of the driver, reused in stream order.
//!
//! All work of a backend is on one stream, so a block may be given out again as soon as nothing of MLX or of the host knows it:
//! whatever used it comes before whatever uses it next, even if it is held back as yet.

use core::ffi::c_void;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use mlxcel_abi::Result;
use mlxcel_backend_mlx::stream::Block;

use crate::driver::Driver;
use crate::queue::Queue;

/// Blocks that are kept for reuse are freed above this share of what is in use, or above this many bytes if that is more.
const KEPT_BYTES: usize = 1 << 30;

/// Free blocks by size, and figures.
#[derive(Debug, Default)]
struct Blocks {
    /// Lowest addresses are given out first: which they are depends on what is in use alone, not on what was before, so the same
    /// calls find the same memory again.
    free: BTreeMap<usize, BTreeSet<usize>>,
    /// Blocks that were filled from the host: nothing writes to them while they are used.
    constant: HashSet<usize>,
    kept_bytes: usize,
    used_bytes: usize,
    peak_bytes: usize,
    is_closed: bool,
}

/// The blocks of one open backend.
#[derive(Debug)]
pub(crate) struct Pool {
    queue: Arc<Queue>,
    device: i32,
    blocks: Mutex<Blocks>,
}

/// Bytes in use, at most in use, and kept.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Figures {
    pub(crate) used: u64,
    pub(crate) peak: u64,
    pub(crate) kept: u64,
}

/// Sizes that blocks come in: so few that they are found again, at most an eighth larger than asked for.
fn rounded(bytes: usize) -> usize {
    let least = bytes.max(512);
    let step = (least.next_power_of_two() / 16).max(512);
    least.next_multiple_of(step)
}

impl Pool {
    pub(crate) fn new(queue: Arc<Queue>, device: i32) -> Arc<Self> {
        Arc::new(Self {
            queue,
            device,
            blocks: Mutex::default(),
        })
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Memory that kernels submitted from now on may use.
    pub(crate) fn take(&self, driver: &Driver, bytes: usize) -> Result<(usize, usize)> {
        let size = rounded(bytes);
        let mut blocks = self.blocks();
        let found = blocks.free.get_mut(&size).and_then(BTreeSet::pop_first);
        let address = match found {
            Some(address) => {
                blocks.kept_bytes -= size;
                address
            }
            None => {
                // Kernels that are held back cannot use what is allocated now, so it may come before them.
                let stream = self.queue.stream();
                match driver.allocate_bytes(size, stream) {
                    Ok(address) => address,
                    Err(_) => {
                        trim(&mut blocks, driver, &self.queue, 0);
                        driver.allocate_bytes(size, stream)?
                    }
                }
            }
        };
        blocks.used_bytes += size;
        blocks.peak_bytes = blocks.peak_bytes.max(blocks.used_bytes);
        Ok((address, size))
    }

    /// As [`Pool::take`], as what an array takes over.
    pub(crate) fn lend(self: &Arc<Self>, driver: &Driver, bytes: usize) -> Result<Block> {
        let (address, bytes) = self.take(driver, bytes)?;
        Ok(Block {
            address,
            bytes,
            device: self.device,
            release,
            owner: Arc::into_raw(Arc::clone(self)).cast_mut().cast(),
        })
    }

    /// Memory that stays this pool's while an array uses it.
    pub(crate) fn borrowed(&self, address: usize, bytes: usize) -> Block {
        Block {
            address,
            bytes,
            device: self.device,
            release: keep,
            owner: core::ptr::null_mut(),
        }
    }

    /// Gives memory of [`Pool::take`] back.
    pub(crate) fn put(&self, address: usize, size: usize) {
        self.give_back(address, size, false);
    }

    fn give_back(&self, address: usize, size: usize, moved: bool) {
        let Ok(driver) = Driver::get() else { return };
        let mut blocks = self.blocks();
        blocks.constant.remove(&address);
        blocks.used_bytes = blocks.used_bytes.saturating_sub(size);
        if moved {
            // MLX freed the block; this is the managed memory that it went to. An error has nobody to be told to.
            // SAFETY: the last array over it is gone.
            let _ = unsafe { driver.free_managed(address) };
            return;
        }
        if blocks.is_closed {
            // SAFETY: the backend waited for its stream before it was closed.
            let _ = unsafe { driver.free(address, core::ptr::null_mut()) };
            return;
        }
        blocks.free.entry(size).or_default().insert(address);
        blocks.kept_bytes += size;
        let most = KEPT_BYTES.max(blocks.used_bytes / 8);
        // Threads of MLX leave this to the next block that comes back on the backend's.
        if blocks.kept_bytes > most && self.queue.is_here() {
            trim(&mut blocks, driver, &self.queue, most / 2);
        }
    }

    /// Notes that a block's contents come from the host and stay.
    pub(crate) fn set_constant(&self, address: usize) {
        self.blocks().constant.insert(address);
    }

    /// Whether a block begins here whose contents come from the host.
    pub(crate) fn is_constant(&self, address: usize) -> bool {
        self.blocks().constant.contains(&address)
    }

    /// Frees what is kept.
    pub(crate) fn clear(&self, driver: &Driver) {
        trim(&mut self.blocks(), driver, &self.queue, 0);
    }

    /// Frees what is kept, and from now on what comes back; the stream is done and will not be used any more.
    pub(crate) fn close(&self, driver: &Driver) {
        let mut blocks = self.blocks();
        trim(&mut blocks, driver, &self.queue, 0);
        blocks.is_closed = true;
    }

    pub(crate) fn figures(&self) -> Figures {
        let blocks = self.blocks();
        Figures {
            used: blocks.used_bytes as u64,
            peak: blocks.peak_bytes as u64,
            kept: blocks.kept_bytes as u64,
        }
    }

    /// Starts a new measurement of the peak.
    pub(crate) fn reset_peak(&self) {
        let mut blocks = self.blocks();
        blocks.peak_bytes = blocks.used_bytes;
    }
}

/// Frees kept blocks, largest first, until at most `most` bytes are kept.
fn trim(blocks: &mut Blocks, driver: &Driver, queue: &Queue, most: usize) {
    if blocks.kept_bytes <= most || !queue.submit_silently() {
        return;
    }
    while blocks.kept_bytes > most {
        let Some(mut entry) = blocks.free.last_entry() else {
            return;
        };
        let size = *entry.key();
        match entry.get_mut().pop_last() {
            Some(address) => {
                blocks.kept_bytes -= size;
                // SAFETY: nobody knows the block, and the stream orders this after its last use, which was submitted.
                let _ = unsafe { driver.free(address, queue.stream()) };
            }
            None => {
                entry.remove();
            }
        }
    }
}

/// # Safety
/// `owner` is a pool that [`Pool::lend`] gave with this block, called once.
unsafe extern "C" fn release(owner: *mut c_void, address: *mut c_void, size: usize, moved: bool) {
    // SAFETY: the reference that `lend` made.
    let pool = unsafe { Arc::from_raw(owner.cast_const().cast::<Pool>()) };
    pool.give_back(address as usize, size, moved);
}

/// # Safety
/// Uses nothing of what it is given.
unsafe extern "C" fn keep(_: *mut c_void, _: *mut c_void, _: usize, _: bool) {}

#[cfg(test)]
mod tests {
    use super::rounded;

    #[test]
    fn sizes_are_few_and_hardly_larger() {
        assert_eq!((rounded(0), rounded(1), rounded(513)), (512, 512, 1024));
        for bytes in [1 << 20, (1 << 20) + 1, 123_456_789, 4 << 30] {
            let size = rounded(bytes);
            assert!(
                size >= bytes && size <= bytes + bytes / 8 + 512,
                "{bytes}: {size}"
            );
            assert_eq!(rounded(size), size);
        }
    }
}
