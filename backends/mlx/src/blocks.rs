//! Memory for results of a device's own kernels, kept for the next result when one is released.
//!
//! A decode step makes hundreds of small results and lets go of all of them. A block is memory of MLX's
//! allocator that no array of MLX has yet; it becomes one when an operation of MLX has to see it, and is
//! MLX's from then on. What MLX never saw is known here alone: its last handle's release makes it idle,
//! and the next result of its size takes it. Idle blocks count as cache, and are bounded in bytes.

use core::cell::OnceCell;
use std::rc::Rc;

use cxx::UniquePtr;

use crate::args::Result;
use crate::bridge::Array;

#[cxx::bridge(namespace = "mlxcel")]
mod ffi {
    /// The allocator's name of the memory, and where it begins.
    struct NewBlock {
        buffer: usize,
        data: usize,
        /// Bytes that the allocator gave, which are more where it had a larger buffer at hand.
        held_bytes: usize,
    }

    unsafe extern "C++" {
        include!("mlxcel-backend-mlx/cpp/blocks.h");

        type Array = crate::bridge::Array;

        fn new_block(bytes: usize) -> Result<NewBlock>;
        /// # Safety
        /// `buffer` is of `new_block`, no array owns it, and nobody uses it any more.
        unsafe fn free_block(buffer: usize);
        /// # Safety
        /// `buffer` is of `new_block` with at least `bytes` bytes, and no array owns it.
        unsafe fn adopt_block(buffer: usize, bytes: usize) -> Result<UniquePtr<Array>>;
        fn array_in_block(
            base: &Array,
            offset_bytes: usize,
            dtype: u32,
            dims: &[i64],
        ) -> Result<UniquePtr<Array>>;
        /// Whether `wanted` bytes more are within the limits.
        fn has_room(wanted: u64) -> bool;
    }
}

/// Where a block's elements begin: the line of a cache, so that no load of a vector touches two.
const ALIGNMENT: usize = 64;

/// Larger blocks are not kept: MLX's own cache has those, and one call more is little beside their use.
const MOST_KEPT_BYTES: usize = 1 << 20;

/// Largest block at all; larger results are arrays from the beginning.
pub(crate) const MOST_BYTES: usize = 1 << 30;

/// Idle bytes, unless the limit of the cache is lower.
pub(crate) const MOST_IDLE_BYTES: u64 = 8 << 20;

/// Classes of size: four to a power of two, from [`ALIGNMENT`] to [`MOST_KEPT_BYTES`].
const CLASSES: usize = 4 * (MOST_KEPT_BYTES.ilog2() - ALIGNMENT.ilog2()) as usize + 1;

/// Memory that some handles share.
pub(crate) struct Block {
    buffer: usize,
    data: *mut u8,
    offset: usize,
    bytes: usize,
    held_bytes: usize,
    /// Set when MLX has seen it, which then owns it.
    base: OnceCell<UniquePtr<Array>>,
}

impl Block {
    fn new(bytes: usize) -> Result<Option<Self>> {
        let found = ffi::new_block(bytes + ALIGNMENT)?;
        if found.data == 0 {
            return Ok(None);
        }
        let offset = found.data.next_multiple_of(ALIGNMENT) - found.data;
        let data = found.data as *mut u8;
        Ok(Some(Self {
            buffer: found.buffer,
            // SAFETY: less than the bytes that were added for it.
            data: unsafe { data.add(offset) },
            offset,
            bytes,
            held_bytes: found.held_bytes,
            base: OnceCell::new(),
        }))
    }

    /// Bytes of the allocator's, with those before and behind the elements, as its figures count them.
    fn allocated_bytes(&self) -> u64 {
        self.held_bytes as u64
    }

    /// First byte.
    pub(crate) fn data(&self) -> *mut u8 {
        self.data
    }

    /// A row-major array over its beginning.
    pub(crate) fn array(&self, dtype: u32, dims: &[i64]) -> Result<UniquePtr<Array>> {
        let base = match self.base.get() {
            Some(base) => base,
            None => {
                // SAFETY: of `new_block` with so many bytes; no array owns it while `base` is unset.
                let base = unsafe { ffi::adopt_block(self.buffer, self.bytes + self.offset) }?;
                self.base.get_or_init(|| base)
            }
        };
        Ok(ffi::array_in_block(base, self.offset, dtype, dims)?)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.base.get().is_none() {
            // SAFETY: of `new_block`, never an array's, and the last handle is gone.
            unsafe { ffi::free_block(self.buffer) };
        }
    }
}

/// Blocks that no handle has any more.
pub(crate) struct Blocks {
    idle: Vec<Vec<Rc<Block>>>,
    idle_bytes: u64,
    most_bytes: u64,
}

impl Blocks {
    pub(crate) fn new(most_bytes: u64) -> Self {
        Self {
            idle: (0..CLASSES).map(|_| Vec::new()).collect(),
            idle_bytes: 0,
            most_bytes,
        }
    }

    /// Bytes of what is kept.
    #[inline]
    pub(crate) fn idle_bytes(&self) -> u64 {
        self.idle_bytes
    }

    /// Bounds what is kept.
    pub(crate) fn set_most(&mut self, bytes: u64) {
        self.most_bytes = bytes;
        if self.idle_bytes > bytes {
            self.clear();
        }
    }

    /// Gives everything back.
    pub(crate) fn clear(&mut self) {
        self.idle.iter_mut().for_each(Vec::clear);
        self.idle_bytes = 0;
    }

    /// A block of at least `bytes` bytes that nobody else has, none when there is no memory. What is idle counts as used where
    /// limits are looked at, so that taking it needs no look.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<Option<Rc<Block>>> {
        let (class, bytes) = class_of(bytes);
        if let Some(block) = self.idle.get_mut(class).and_then(Vec::pop) {
            self.idle_bytes -= block.allocated_bytes();
            return Ok(Some(block));
        }
        if !ffi::has_room((bytes + ALIGNMENT) as u64) {
            return Ok(None);
        }
        Ok(Block::new(bytes)?.map(Rc::new))
    }

    /// What a handle leaves when it ends: kept when it was the last, MLX never saw the block, and there
    /// is room.
    pub(crate) fn put_back(&mut self, block: Rc<Block>) {
        let (class, _) = class_of(block.bytes);
        let bytes = block.allocated_bytes();
        let is_free = Rc::strong_count(&block) == 1 && block.base.get().is_none();
        if !is_free || self.idle_bytes + bytes > self.most_bytes {
            return;
        }
        if let Some(class) = self.idle.get_mut(class) {
            self.idle_bytes += bytes;
            class.push(block);
        }
    }
}

/// Class of a size and the bytes that all of the class have; sizes beyond the last class have none.
fn class_of(bytes: usize) -> (usize, usize) {
    let bytes = bytes.max(ALIGNMENT);
    if bytes > MOST_KEPT_BYTES {
        return (CLASSES, bytes);
    }
    let octave = bytes.ilog2();
    let step = 1usize << (octave - 2);
    let rounded = bytes.next_multiple_of(step);
    let (octave, step) = match rounded.ilog2() {
        next if next > octave => (next, step * 2),
        same => (same, step),
    };
    let quarter = (rounded - (1 << octave)) / step;
    let class = 4 * (octave - ALIGNMENT.ilog2()) as usize + quarter;
    (class, rounded)
}

#[cfg(test)]
mod tests {
    use mlxcel_abi::DType;

    use super::*;
    use crate::bridge;

    #[test]
    fn a_class_has_one_size_that_holds_what_it_is_for() {
        let mut sizes = vec![0; CLASSES];
        for bytes in 0..=MOST_KEPT_BYTES {
            let (class, rounded) = class_of(bytes);
            assert!(rounded >= bytes && (bytes < ALIGNMENT || rounded <= bytes + bytes / 4));
            assert!(sizes[class] == 0 || sizes[class] == rounded, "{bytes}");
            sizes[class] = rounded;
            assert_eq!(class_of(rounded), (class, rounded));
        }
        assert!(sizes.iter().all(|&size| size > 0));
        assert_eq!(class_of(MOST_KEPT_BYTES + 1).0, CLASSES);
    }

    /// MLX's allocator answers a request for 128 bytes with a cached buffer of 192. The only test here
    /// that uses the allocator, whose figures are those of the whole process.
    #[test]
    fn idle_blocks_are_what_the_allocator_counts_for_them() {
        let mut blocks = Blocks::new(MOST_IDLE_BYTES);
        let active = || bridge::memory_figures().unwrap().active;
        bridge::clear_cache().unwrap();
        let before = active();
        let seen = blocks.take(128).unwrap().unwrap();
        // MLX's from here on: it goes to MLX's cache.
        drop(seen.array(DType::U8.0, &[128]).unwrap());
        blocks.put_back(seen);
        assert_eq!((active(), blocks.idle_bytes()), (before, 0));
        let reused = blocks.take(64).unwrap().unwrap();
        assert!(active() - before > 128, "a cached buffer is taken");
        blocks.put_back(reused);
        assert_eq!(active() - blocks.idle_bytes(), before);
        let again = blocks.take(64).unwrap().unwrap();
        assert_eq!(blocks.idle_bytes(), 0);
        drop(again);
        assert_eq!(active(), before);
    }
}
