//! Memory that other processes of the machine write to.

use core::ffi::{c_uint, c_void};

use mlxcel_abi::Result;

use super::Driver;

/// What another process opens memory by (`CUipcMemHandle`).
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Handle([u8; 64]);

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEER_ACCESS: c_uint = 1;
/// `CU_MEMHOSTALLOC_PORTABLE` and `CU_MEMHOSTALLOC_DEVICEMAP`.
const FOR_DEVICES: c_uint = 1 | 2;
/// A page: nothing else should be beside the word.
const WORD_BYTES: usize = 4096;

impl Handle {
    /// Of bytes that a process got from another one.
    pub(crate) fn new(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Driver {
    /// What a device is called on every process of the machine.
    pub(crate) fn identifier(&self, device: i32) -> Result<[u8; 16]> {
        let mut bytes = [0; 16];
        // SAFETY: writes 16 bytes.
        unsafe { self.uuid(bytes.as_mut_ptr().cast(), device) }?;
        Ok(bytes)
    }

    /// Whether one device can use another one's memory.
    pub(crate) fn reaches(&self, device: i32, other: i32) -> Result<bool> {
        let mut can = 0;
        // SAFETY: writes one number.
        unsafe { self.can_access(&raw mut can, device, other) }?;
        Ok(can != 0)
    }

    /// Zeroed memory of the current device that can be shared, which that of [`Driver::allocate_bytes`] cannot.
    pub(crate) fn window(&self, bytes: usize) -> Result<usize> {
        let mut address = 0;
        // SAFETY: writes one address, and then as many bytes of what is there. The first call of a null stream is waited for.
        unsafe {
            self.allocate_now(&raw mut address, bytes)?;
            self.set_bytes(address, 0, bytes, core::ptr::null_mut())?;
        }
        self.synchronize(core::ptr::null_mut())?;
        Ok(address)
    }

    /// By what others open memory of [`Driver::window`].
    pub(crate) fn handle_of(&self, window: usize) -> Result<Handle> {
        let mut handle = Handle([0; 64]);
        // SAFETY: writes one handle.
        unsafe { self.get_handle(&raw mut handle, window) }?;
        Ok(handle)
    }

    /// Opens another process's memory, whose device this process need not see.
    pub(crate) fn open_window(&self, handle: Handle) -> Result<usize> {
        let mut address = 0;
        // SAFETY: writes one address; the driver checks the handle.
        unsafe { self.open_handle(&raw mut address, handle, LAZY_PEER_ACCESS) }?;
        Ok(address)
    }

    /// A zero of the host's memory that devices can read at the same address, and that is never freed.
    pub(crate) fn host_word(&self) -> Result<usize> {
        let mut host: *mut c_void = core::ptr::null_mut();
        // SAFETY: writes one address, of a page that is then written.
        unsafe {
            self.allocate_host(&raw mut host, WORD_BYTES, FOR_DEVICES)?;
            host.cast::<u8>().write_bytes(0, WORD_BYTES);
        }
        Ok(host as usize)
    }
}
