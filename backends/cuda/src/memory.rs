//! Memory for results of our kernels: blocks of the driver, reused in stream order.
//!
//! All work of a backend is on one stream, so a block may be given out again as soon as nothing of MLX or of the host knows it:
//! whatever used it comes before whatever uses it next, even if it is held back as yet.

mod blocks;

use core::ffi::c_void;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use mlxcel_abi::Result;
use mlxcel_backend_mlx::stream::{Block, Device};

use crate::driver::Driver;
use crate::queue::Queue;
use blocks::{Blocks, Source, lock, obtain, rounded};

/// Bytes in use of all pools, since MLX's own figures are of the process too.
static IN_USE: AtomicU64 = AtomicU64::new(0);

/// Bytes in use of all pools.
pub(crate) fn bytes_in_use() -> u64 {
    IN_USE.load(Ordering::Relaxed)
}

/// MLX beside a pool: what it counts and what it keeps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Library {
    /// The context of its table, which outlives the pool's use on the backend's thread.
    pub(crate) ctx: usize,
    /// Gives what it keeps back to the driver.
    pub(crate) clear_cache: ClearCache,
}

/// The slot of that name.
pub(crate) type ClearCache =
    unsafe extern "C" fn(*mut c_void, *mut *mut mlxcel_abi::ErrorObj) -> mlxcel_abi::Status;

/// The blocks of one open backend.
#[derive(Debug)]
pub(crate) struct Pool {
    queue: Arc<Queue>,
    library: Library,
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

/// The device as where blocks come from, on the backend's thread.
struct OnDevice<'a> {
    driver: &'a Driver,
    queue: &'a Queue,
    library: Library,
}

impl Source for OnDevice<'_> {
    fn check_room(&self, wanted: usize) -> Result<()> {
        // SAFETY: the context of a backend that is open; another thread is refused.
        unsafe { Device::from_raw(self.library.ctx as *mut c_void) }?.check_room(wanted as u64)
    }

    fn allocate(&self, bytes: usize) -> Result<usize> {
        self.driver.allocate_bytes(bytes, self.queue.stream())
    }

    fn free(&self, address: usize) {
        // SAFETY: nobody knows the block, and the stream orders this after its last use, which was submitted.
        let _ = unsafe { self.driver.free(address, self.queue.stream()) };
    }

    fn submit(&self) -> bool {
        self.queue.submit_silently()
    }

    fn make_room(&self) {
        // SAFETY: the slot that was replaced, with its own context. What it keeps is all it can give up; an error changes nothing.
        let _ = unsafe {
            (self.library.clear_cache)(self.library.ctx as *mut c_void, core::ptr::null_mut())
        };
        self.queue.make_room();
    }

    fn free_bytes(&self) -> Option<usize> {
        self.driver.free_bytes().ok()
    }
}

impl Pool {
    pub(crate) fn new(queue: Arc<Queue>, library: Library, device: i32) -> Arc<Self> {
        Arc::new(Self {
            queue,
            library,
            device,
            blocks: Mutex::default(),
        })
    }

    fn source<'a>(&'a self, driver: &'a Driver) -> OnDevice<'a> {
        OnDevice {
            driver,
            queue: &self.queue,
            library: self.library,
        }
    }

    /// Memory that kernels submitted from now on may use.
    pub(crate) fn take(&self, driver: &Driver, bytes: usize) -> Result<(usize, usize)> {
        let size = rounded(bytes);
        let address = obtain(&self.blocks, &self.source(driver), size)?;
        IN_USE.fetch_add(size as u64, Ordering::Relaxed);
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
        IN_USE.fetch_sub(size as u64, Ordering::Relaxed);
        let Ok(driver) = Driver::get() else { return };
        let mut blocks = lock(&self.blocks);
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
        let may_stay = blocks.keep(address, size);
        // Threads of MLX leave this to the next block that comes back on the backend's.
        if let Some(most) = may_stay.filter(|_| self.queue.is_here()) {
            blocks.trim(&self.source(driver), most);
        }
    }

    /// Notes that a block's contents, so many bytes, come from the host and stay.
    pub(crate) fn set_constant(&self, address: usize, bytes: usize) {
        lock(&self.blocks).constant.insert(address, bytes);
    }

    /// Bytes of the block that `address` is in, where its contents come from the host.
    pub(crate) fn constant_around(&self, address: usize) -> Option<usize> {
        lock(&self.blocks).constant_around(address)
    }

    /// Whether a block begins here whose contents come from the host.
    pub(crate) fn is_constant(&self, address: usize) -> bool {
        lock(&self.blocks).constant.contains_key(&address)
    }

    /// Frees what is kept.
    pub(crate) fn clear(&self, driver: &Driver) {
        lock(&self.blocks).trim(&self.source(driver), 0);
    }

    /// Frees all that this pool, MLX and step programs keep without using it, after a failure for want of memory.
    pub(crate) fn make_room(&self, driver: &Driver) {
        let source = self.source(driver);
        source.make_room();
        lock(&self.blocks).trim(&source, 0);
    }

    /// Frees what is kept, and from now on what comes back; the stream is done and will not be used any more.
    pub(crate) fn close(&self, driver: &Driver) {
        let mut blocks = lock(&self.blocks);
        blocks.trim(&self.source(driver), 0);
        blocks.is_closed = true;
    }

    pub(crate) fn figures(&self) -> Figures {
        let blocks = lock(&self.blocks);
        Figures {
            used: blocks.used_bytes as u64,
            peak: blocks.peak_bytes as u64,
            kept: blocks.kept_bytes as u64,
        }
    }

    /// Starts a new measurement of the peak.
    pub(crate) fn reset_peak(&self) {
        let mut blocks = lock(&self.blocks);
        blocks.peak_bytes = blocks.used_bytes;
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
