//! Kernels and their arguments.

use core::ffi::{c_uint, c_void};

use mlxcel_abi::Result;

use super::{Driver, Function, Stream};

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Stream,
    attributes: *const Attribute,
    attribute_count: c_uint,
}

/// `CUlaunchAttribute`: an id, padding to 8 bytes, a union of 64.
#[repr(C, align(8))]
struct Attribute {
    id: c_uint,
    padding: u32,
    value: [u32; 16],
}

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
const EARLY_START: c_uint = 6;

/// A kernel with its arguments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Launch<'a> {
    /// A [`Function`] of a module that is never unloaded.
    pub(crate) function: usize,
    pub(crate) shape: Shape,
    /// It may be started before the one before it ends: such kernels wait by themselves.
    pub(crate) starts_early: bool,
    /// Arguments one after another.
    pub(crate) words: &'a [u64],
    /// Where each argument starts.
    pub(crate) starts: &'a [u8],
}

impl Driver {
    /// Submits a kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and what they point to is as large as it takes.
    pub(crate) unsafe fn launch(&self, launch: &Launch<'_>, stream: Stream) -> Result<()> {
        let attribute = Attribute {
            id: EARLY_START,
            padding: 0,
            value: core::array::from_fn(|i| u32::from(i == 0)),
        };
        let config = Config {
            grid: launch.shape.grid,
            block: [launch.shape.threads, 1, 1],
            shared_bytes: launch.shape.shared_bytes,
            stream,
            attributes: &raw const attribute,
            attribute_count: u32::from(launch.starts_early),
        };
        let mut pointers = [core::ptr::null_mut::<c_void>(); Arguments::MOST];
        for (pointer, start) in pointers.iter_mut().zip(launch.starts) {
            if let Some(word) = launch.words.get(usize::from(*start)) {
                *pointer = core::ptr::from_ref(word).cast_mut().cast();
            }
        }
        // SAFETY: forwarded to the caller; the driver reads the arguments and copies them before it returns.
        unsafe {
            self.launch_kernel(
                &raw const config,
                launch.function as Function,
                pointers.as_mut_ptr(),
                core::ptr::null_mut(),
            )
        }
    }
}

/// Blocks along the second and the third dimension of a launch, at most.
pub(crate) const MOST_ACROSS: usize = 65_535;

/// Two 32-bit fields of a struct, which lie in one word, the first in its low half.
pub(crate) fn pair(first: u32, second: u32) -> u64 {
    u64::from(first) | u64::from(second) << 32
}

/// Blocks and threads of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
}

impl Shape {
    /// So many blocks in a row.
    pub(crate) fn line(blocks: u32, threads: u32) -> Self {
        Self {
            grid: [blocks, 1, 1],
            threads,
            shared_bytes: 0,
        }
    }
}

/// Arguments of a kernel, each in 8 bytes: the driver reads as many of them as the parameter has.
#[derive(Debug)]
pub(crate) struct Arguments {
    values: [u64; Self::MOST],
    len: usize,
    /// Where each argument starts.
    starts: [u8; Self::MOST],
    count: usize,
}

impl Arguments {
    const MOST: usize = 64;

    /// No arguments yet.
    pub(crate) fn new() -> Self {
        Self {
            values: [0; Self::MOST],
            len: 0,
            starts: [0; Self::MOST],
            count: 0,
        }
    }

    #[inline(always)]
    fn push(self, value: u64) -> Self {
        self.record(&[value])
    }

    /// A struct of 64-bit words.
    #[inline(always)]
    pub(crate) fn record(mut self, words: &[u64]) -> Self {
        // More than there is room for would be a kernel of ours with more parameters than any has.
        let place = self.values.get_mut(self.len..self.len + words.len());
        let (Some(place), Some(start)) = (place, self.starts.get_mut(self.count)) else {
            return self;
        };
        place.copy_from_slice(words);
        *start = self.len as u8;
        self.len += words.len();
        self.count += 1;
        self
    }

    /// A pointer or a 64-bit number.
    #[inline(always)]
    pub(crate) fn wide(self, value: usize) -> Self {
        self.push(value as u64)
    }

    /// A 32-bit number.
    #[inline(always)]
    pub(crate) fn int(self, value: i32) -> Self {
        self.push(u64::from(value as u32))
    }

    /// A float.
    #[inline(always)]
    pub(crate) fn float(self, value: f32) -> Self {
        self.push(u64::from(value.to_bits()))
    }

    /// Arguments one after another.
    pub(crate) fn words(&self) -> &[u64] {
        self.values.get(..self.len).unwrap_or_default()
    }

    /// Where each argument starts.
    pub(crate) fn starts(&self) -> &[u8] {
        self.starts.get(..self.count).unwrap_or_default()
    }
}
