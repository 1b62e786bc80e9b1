//! Captured work that is replayed by one call.

use std::sync::Arc;

use contract::DeviceError;
use cudarc::driver::{result, sys};

use super::context::Context;
use super::error::failed;
use super::gpu::Gpu;
use super::stream::Stream;

/// Work that was captured from a stream. Whatever it points at must outlive it. Destroyed on drop.
#[derive(Debug)]
pub struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    context: Arc<Context>,
}

impl Graph {
    /// Replays it on `stream`; does not wait.
    pub fn launch_on(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: instantiated in `capture`; the stream is alive.
        unsafe { result::graph::launch(self.exec, stream.raw()) }
            .map_err(|e| failed("cuGraphLaunch", "", e))
    }

    /// Kernels, copies and fills in it.
    pub fn nodes(&self) -> Result<usize, DeviceError> {
        let mut count = 0_usize;
        // SAFETY: a null list asks for the count alone.
        unsafe { sys::cuGraphGetNodes(self.graph, std::ptr::null_mut(), &raw mut count) }
            .result()
            .map_err(|e| failed("cuGraphGetNodes", "", e))?;
        Ok(count)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `capture`, destroyed once. A graph in flight is destroyed when it ends.
            unsafe {
                let _ = result::graph::exec_destroy(self.exec);
                let _ = result::graph::destroy(self.graph);
            }
        }
    }
}

impl Gpu {
    /// Records what `queue` puts on the main stream, without running it.
    ///
    /// # Errors
    /// Those of `queue`, and [`DeviceError::DeviceLost`] if something in it cannot be captured, such as a wait.
    pub fn capture(
        &self,
        queue: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Graph, DeviceError> {
        let stream = self.stream().raw();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not capturing: captures do not nest, as `queue` gets no `&mut`.
        unsafe { result::stream::begin_capture(stream, mode) }
            .map_err(|e| failed("cuStreamBeginCapture", "", e))?;
        let queued = queue();
        // SAFETY: ends what was begun above, whatever `queue` did.
        let graph = unsafe { result::stream::end_capture(stream) };
        queued?;
        let graph = graph.map_err(|e| failed("cuStreamEndCapture", "", e))?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: `graph` is complete; `exec` receives the handle.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) }.result();
        if let Err(error) = made {
            // SAFETY: made above, destroyed once.
            let _ = unsafe { result::graph::destroy(graph) };
            return Err(failed("cuGraphInstantiate", "", error));
        }
        Ok(Graph {
            graph,
            exec,
            context: Arc::clone(&self.context),
        })
    }

    /// Replays a graph on the main stream; does not wait.
    pub fn replay(&self, graph: &Graph) -> Result<(), DeviceError> {
        graph.launch_on(self.stream())
    }
}
