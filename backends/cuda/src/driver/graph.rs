//! Launches that the driver takes as one.

use core::ffi::{c_uint, c_void};

use mlxcel_abi::Result;

use super::{Driver, Launch, Stream};

/// `CUgraphExec`.
pub(crate) type Graph = *mut c_void;

/// First version whose graphs keep early starts of captured launches, as edges of their own kind.
const LEAST_VERSION: i32 = 12_030;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: other threads, and this one on other streams, may do as they like meanwhile.
const RELAXED: c_uint = 2;

impl Driver {
    /// Whether graphs of launches do what the launches do.
    pub(crate) fn has_graphs(&self) -> Result<bool> {
        Ok(self.cuda_version()? >= LEAST_VERSION)
    }

    /// A stream that nothing runs on: for [`Driver::graph`].
    pub(crate) fn side_stream(&self) -> Result<Stream> {
        let mut stream = core::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { self.new_stream(&raw mut stream, NON_BLOCKING) }?;
        Ok(stream)
    }

    /// Ends a stream of [`Driver::side_stream`].
    ///
    /// # Safety
    /// It came from there, and is not used again.
    pub(crate) unsafe fn end_side_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: forwarded to the caller.
        unsafe { self.end_stream(stream) }
    }

    /// Makes one graph of launches, each after the one before it. `side` is a stream of [`Driver::side_stream`], where they are
    /// recorded without being run; the graph is sent to the device in the order of `stream`.
    ///
    /// # Safety
    /// As for [`Driver::launch`], whenever the graph is launched.
    pub(crate) unsafe fn graph<'a>(
        &self,
        launches: impl Iterator<Item = Launch<'a>>,
        side: Stream,
        stream: Stream,
    ) -> Result<Graph> {
        let mut captured = core::ptr::null_mut();
        let mut graph = core::ptr::null_mut();
        // SAFETY: what is captured is not run; the launches are the caller's to vouch for. Every handle is made by the call before.
        unsafe {
            self.begin_capture(side, RELAXED)?;
            let launched = launches
                .into_iter()
                .try_for_each(|launch| self.launch(&launch, side));
            // A capture has to end whatever happened in it.
            let ended = self.end_capture(side, &raw mut captured);
            let made = launched
                .and(ended)
                .and_then(|()| self.make_executable(&raw mut graph, captured, 0));
            if !captured.is_null() {
                // An error here would be of the launches, which were told of above.
                let _ = self.end_captured(captured);
            }
            made?;
            if let Err(error) = self.upload_executable(graph, stream) {
                let _ = self.end_graph(graph);
                return Err(error);
            }
        }
        Ok(graph)
    }

    /// Submits a graph.
    ///
    /// # Safety
    /// It came from [`Driver::graph`] and was not ended; what its launches use is there.
    pub(crate) unsafe fn launch_graph(&self, graph: Graph, stream: Stream) -> Result<()> {
        // SAFETY: forwarded to the caller.
        unsafe { self.launch_executable(graph, stream) }
    }

    /// Ends a graph; what of it is under way is still done.
    ///
    /// # Safety
    /// It came from [`Driver::graph`], and is not used again.
    pub(crate) unsafe fn end_graph(&self, graph: Graph) -> Result<()> {
        // SAFETY: forwarded to the caller.
        unsafe { self.end_executable(graph) }
    }
}
