//! What goes to the device, in order: every kernel and every copy of this backend, on MLX's own stream.
//!
//! Kernels may be held back for a while (`programs.rs`); everything else that the stream orders first has them submitted. Only
//! the backend's thread uses a queue.

use core::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;

use mlxcel_abi::{AbiError, Result, Tensor};

use crate::driver::{Arguments, Driver, Function, Graph, Launch, Rows, Shape, Stream};
use crate::marks::Marks;
use crate::programs::{Bounds, Built, LONGEST, Recorder, Submitter, Tape};

/// Sets the longest program, or 0 for none.
const VARIABLE: &str = "MLXCEL_CUDA_PROGRAMS";
/// Longest program that can be set.
const MOST_LAUNCHES: usize = 1024;

/// The driver's stream as who does what a recorder says.
struct OnStream {
    driver: &'static Driver,
    stream: usize,
    /// Where launches are captured, once there is something to capture.
    side: usize,
}

impl Submitter for OnStream {
    fn launch(&mut self, launch: &Launch<'_>) -> Result<()> {
        // SAFETY: whoever added it vouched for it, and what it uses is freed in the stream's order, after this.
        unsafe { self.driver.launch(launch, self.stream as Stream) }
    }

    fn build(&mut self, launches: &Tape) -> Result<Built> {
        if self.side == 0 {
            self.side = self.driver.side_stream()? as usize;
        }
        let (side, stream) = (self.side as Stream, self.stream as Stream);
        let before = self.driver.free_bytes()?;
        // SAFETY: it is only replayed in place of these same launches.
        let graph = unsafe { self.driver.graph(launches.launches(), side, stream) }?;
        // The driver does not tell what a graph takes. Others on the device may make this too large or too small.
        let after = self.driver.free_bytes().unwrap_or(before);
        Ok(Built {
            handle: graph as usize,
            bytes: before.saturating_sub(after) as u64,
        })
    }

    fn replay(&mut self, program: usize) -> Result<()> {
        // SAFETY: a program of `build`; the launches that it stands for were vouched for as it does for `launch`.
        unsafe {
            self.driver
                .launch_graph(program as Graph, self.stream as Stream)
        }
    }

    fn discard(&mut self, program: usize) {
        // An error has nobody to be told to.
        // SAFETY: a program of `build`, which the recorder forgets.
        let _ = unsafe { self.driver.end_graph(program as Graph) };
    }
}

impl Drop for OnStream {
    fn drop(&mut self) {
        if self.side != 0 {
            // SAFETY: nothing is captured any more.
            let _ = unsafe { self.driver.end_side_stream(self.side as Stream) };
        }
    }
}

/// The queue of one open backend.
pub(crate) struct Queue {
    driver: &'static Driver,
    stream: usize,
    owner: ThreadId,
    recorder: Mutex<Recorder<OnStream>>,
    marks: Mutex<Marks>,
}

impl core::fmt::Debug for Queue {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Queue")
            .field("stream", &self.stream)
            .finish()
    }
}

thread_local! {
    /// Queues of the backends opened on this thread.
    static QUEUES: RefCell<Vec<Arc<Queue>>> = const { RefCell::new(Vec::new()) };
}

/// Has every queue that is registered on this thread submit what it holds back. An error is reported by the next kernel.
pub(crate) fn submit_held() {
    // Where the thread ends nothing is held back.
    let _ = QUEUES.try_with(|queues| {
        for queue in queues.borrow().iter() {
            queue.submit_silently();
        }
    });
}

/// For [`submit_held`], until the queue is closed.
pub(crate) fn register(queue: &Arc<Queue>) {
    QUEUES.with_borrow_mut(|queues| queues.push(Arc::clone(queue)));
}

/// What `MLXCEL_CUDA_PROGRAMS` says; nothing is the default.
fn longest(text: Option<&str>) -> Result<usize> {
    let Some(text) = text.filter(|text| !text.is_empty()) else {
        return Ok(LONGEST);
    };
    text.parse()
        .ok()
        .filter(|longest| *longest <= MOST_LAUNCHES)
        .ok_or_else(|| {
            AbiError::invalid(format!(
                "{VARIABLE} is the most launches of a step program, 0 (none) to {MOST_LAUNCHES}, found {text:?}"
            ))
        })
}

impl Queue {
    /// The queue of a backend that is opened on this thread.
    pub(crate) fn open(driver: &'static Driver, stream: Stream) -> Result<Arc<Self>> {
        let set = std::env::var_os(VARIABLE);
        let set = set.as_ref().map(|text| text.to_string_lossy());
        let longest = longest(set.as_deref())?;
        let longest = if driver.has_graphs()? { longest } else { 0 };
        let on_stream = OnStream {
            driver,
            stream: stream as usize,
            side: 0,
        };
        Ok(Arc::new(Self {
            driver,
            stream: stream as usize,
            owner: std::thread::current().id(),
            recorder: Mutex::new(Recorder::new(on_stream, Bounds::new(longest))),
            marks: Mutex::default(),
        }))
    }

    /// Submits what is held back, waits for all of it, and keeps no programs from now on. Called on the thread that opened it.
    pub(crate) fn close(&self) -> Result<()> {
        self.recorder().close();
        self.marks().end(self.driver);
        QUEUES.with_borrow_mut(|queues| {
            queues.retain(|queue| !core::ptr::eq(Arc::as_ptr(queue), self));
        });
        self.driver.synchronize(self.stream())
    }

    fn recorder(&self) -> MutexGuard<'_, Recorder<OnStream>> {
        self.recorder
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// For what may come before what is held back.
    pub(crate) fn stream(&self) -> Stream {
        self.stream as Stream
    }

    /// How many launches programs took over, for the log.
    pub(crate) fn summary(&self) -> String {
        self.recorder().summary()
    }

    /// Memory of the device that programs have, as far as it is known.
    pub(crate) fn program_bytes(&self) -> u64 {
        self.recorder().bytes()
    }

    /// Ends all programs.
    pub(crate) fn forget_programs(&self) {
        self.recorder().forget();
    }

    /// Gives memory of the device back for something else: ends all programs, and waits for what was added.
    pub(crate) fn make_room(&self) {
        self.recorder().make_room();
        // Freed blocks can be had again when what used them is done; an error is found again by the next kernel.
        let _ = self.driver.synchronize(self.stream());
    }

    /// Adds a kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and what they point to is as large as it takes. It is freed in this queue's order.
    pub(crate) unsafe fn launch(
        &self,
        function: Function,
        shape: &Shape,
        arguments: &Arguments,
        starts_early: bool,
    ) -> Result<()> {
        self.recorder().push(&Launch {
            function: function as usize,
            shape: *shape,
            starts_early,
            words: arguments.words(),
            starts: arguments.starts(),
        })
    }

    /// Says whether what follows keeps the device busy for longer than the host takes to submit it.
    pub(crate) fn set_busy(&self, is_busy: bool) -> Result<()> {
        self.recorder().set_busy(is_busy)
    }

    /// Submits what is held back.
    pub(crate) fn submit(&self) -> Result<()> {
        self.recorder().submit()
    }

    /// The same where an error cannot be reported: the next kernel or copy reports it. Says whether there was none.
    pub(crate) fn submit_silently(&self) -> bool {
        self.recorder().submit_silently()
    }

    /// Whether the calling thread is the one that opened it.
    pub(crate) fn is_here(&self) -> bool {
        std::thread::current().id() == self.owner
    }

    /// Zeros memory.
    ///
    /// # Safety
    /// `bytes` of device memory at `address`.
    pub(crate) unsafe fn zero(&self, address: usize, bytes: usize) -> Result<()> {
        self.submit()?;
        // SAFETY: forwarded to the caller.
        unsafe { self.driver.zero(address, bytes, self.stream()) }
    }

    /// Copies to the device. The source may change when this returns.
    ///
    /// # Safety
    /// `bytes` readable bytes at `from`, and as many on the device at `to`.
    pub(crate) unsafe fn upload(&self, to: usize, from: *const u8, bytes: usize) -> Result<()> {
        self.submit()?;
        // SAFETY: forwarded to the caller.
        unsafe { self.driver.upload(to, from, bytes, self.stream()) }
    }

    /// Copies rows to where they are without gaps.
    ///
    /// # Safety
    /// Rows of the device's memory at the places that `rows` says.
    pub(crate) unsafe fn copy_rows(&self, rows: &Rows) -> Result<()> {
        self.submit()?;
        // SAFETY: forwarded to the caller.
        unsafe { self.driver.copy_rows(rows, self.stream()) }
    }

    /// Copies from the device, and waits for it.
    ///
    /// # Safety
    /// `bytes` writable bytes at `to`, and as many on the device at `from`.
    pub(crate) unsafe fn download(&self, to: *mut u8, from: usize, bytes: usize) -> Result<()> {
        self.submit()?;
        // SAFETY: forwarded to the caller.
        unsafe { self.driver.download(to, from, bytes, self.stream()) }
    }

    /// Marks what was added and submitted so far: whoever reads one of `results` needs to wait for no more.
    pub(crate) fn mark(&self, results: &[Tensor]) -> Result<()> {
        self.marks().note(self.driver, self.stream(), results)
    }

    /// As [`Queue::download`], where `result` is behind a mark. Says whether it is.
    ///
    /// # Safety
    /// As for that; the bytes are those of `result`, and nothing writes to it.
    pub(crate) unsafe fn download_marked(
        &self,
        result: Tensor,
        to: *mut u8,
        from: usize,
        bytes: usize,
    ) -> Result<bool> {
        // SAFETY: forwarded to the caller.
        unsafe { self.marks().read(self.driver, result, to, from, bytes) }
    }

    /// Waits for all that was added.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.submit()?;
        self.driver.synchronize(self.stream())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_program_is_read_or_refused_by_name() {
        assert_eq!(longest(None), Ok(LONGEST));
        assert_eq!(longest(Some("")), Ok(LONGEST));
        assert_eq!(longest(Some("0")), Ok(0));
        assert_eq!(longest(Some("1024")), Ok(1024));
        for bad in ["1025", "-1", "on", "8 "] {
            let message = longest(Some(bad)).unwrap_err().message;
            assert_eq!(
                message,
                format!(
                    "MLXCEL_CUDA_PROGRAMS is the most launches of a step program, 0 (none) to 1024, found {bad:?}"
                )
            );
        }
    }
}
