//! Places in the order of a stream that others wait for.

use core::ffi::{c_uint, c_void};

use mlxcel_abi::Result;

use super::{Driver, Stream};

/// `CUevent`.
pub(crate) type Event = *mut c_void;

/// `CU_EVENT_DISABLE_TIMING`.
const WITHOUT_TIMES: c_uint = 2;

impl Driver {
    /// An event that is nowhere yet.
    pub(crate) fn event(&self) -> Result<Event> {
        let mut event = core::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { self.new_event(&raw mut event, WITHOUT_TIMES) }?;
        Ok(event)
    }

    /// Puts an event after all that was submitted.
    ///
    /// # Safety
    /// It came from [`Driver::event`] and was not ended.
    pub(crate) unsafe fn record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: forwarded to the caller.
        unsafe { self.record_event(event, stream) }
    }

    /// Has what is submitted to `stream` from now on wait for an event.
    ///
    /// # Safety
    /// As for [`Driver::record`].
    pub(crate) unsafe fn await_event(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: forwarded to the caller.
        unsafe { self.wait_event(stream, event, 0) }
    }

    /// Ends an event.
    ///
    /// # Safety
    /// It came from [`Driver::event`] and is not used again.
    pub(crate) unsafe fn end_event(&self, event: Event) -> Result<()> {
        // SAFETY: forwarded to the caller.
        unsafe { self.destroy_event(event) }
    }
}
