//! Copies of rows with gaps between them.

use core::ffi::{c_uint, c_void};

use mlxcel_abi::Result;

use super::{Driver, Stream};

/// Rows in memory, and where they go without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) rows: usize,
    /// Bytes of a row.
    pub(crate) bytes: usize,
    /// From a row to the next.
    pub(crate) pitch: usize,
}

/// One side of a `CUDA_MEMCPY2D`.
#[repr(C)]
struct Side {
    x_bytes: usize,
    y: usize,
    kind: c_uint,
    host: *const c_void,
    device: usize,
    array: *const c_void,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
pub(super) struct Plane {
    from: Side,
    to: Side,
    width_bytes: usize,
    height: usize,
}

impl Side {
    /// Memory of the device.
    fn new(device: usize, pitch: usize) -> Self {
        /// `CU_MEMORYTYPE_DEVICE`.
        const DEVICE: c_uint = 2;
        Self {
            x_bytes: 0,
            y: 0,
            kind: DEVICE,
            host: core::ptr::null(),
            device,
            array: core::ptr::null(),
            pitch,
        }
    }
}

impl Driver {
    /// Copies rows.
    ///
    /// # Safety
    /// They are there, and so is room for them.
    pub(crate) unsafe fn copy_rows(&self, rows: &Rows, stream: Stream) -> Result<()> {
        let plane = Plane {
            from: Side::new(rows.from, rows.pitch),
            to: Side::new(rows.to, rows.bytes),
            width_bytes: rows.bytes,
            height: rows.rows,
        };
        // SAFETY: forwarded to the caller; the driver reads the description before it returns.
        unsafe { self.copy_plane(&raw const plane, stream) }
    }
}
