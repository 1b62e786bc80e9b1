//! CUDA graphs.

use std::sync::Arc;

use contract::DeviceError;
use cudarc::driver::{result, sys};

use super::context::Context;
use super::error::failed;
use super::gpu::Gpu;
use super::stream::Stream;

/// Work captured from a stream. All memory that it uses must outlive it. Destroyed on drop.
#[derive(Debug)]
pub struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    context: Arc<Context>,
}

impl Graph {
    /// Replays it on `stream`. Does not wait.
    pub fn launch_on(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: instantiated in `capture`; the stream is alive.
        unsafe { result::graph::launch(self.exec, stream.raw()) }
            .map_err(|e| failed("cuGraphLaunch", "", e))
    }

    /// Number of nodes: kernels, copies and fills.
    pub fn nodes(&self) -> Result<usize, DeviceError> {
        let mut count = 0_usize;
        // SAFETY: a null list requests the count only.
        unsafe { sys::cuGraphGetNodes(self.graph, std::ptr::null_mut(), &raw mut count) }
            .result()
            .map_err(|e| failed("cuGraphGetNodes", "", e))?;
        Ok(count)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `capture`, destroyed once. The driver destroys a running graph after
            // it ends.
            unsafe {
                let _ = result::graph::exec_destroy(self.exec);
                let _ = result::graph::destroy(self.graph);
            }
        }
    }
}

impl Gpu {
    /// Captures the work that `queue` puts on the main stream, without running it.
    ///
    /// # Errors
    /// Those of `queue`, and [`DeviceError::DeviceLost`] if the work cannot be captured, such as a
    /// wait.
    pub fn capture(
        &self,
        queue: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Graph, DeviceError> {
        let stream = self.stream().raw();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not capturing. Captures do not nest, because `queue` gets
        // no `&mut`.
        unsafe { result::stream::begin_capture(stream, mode) }
            .map_err(|e| failed("cuStreamBeginCapture", "", e))?;
        let queued = queue();
        // SAFETY: ends the capture begun above, whatever `queue` returned.
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

    /// Replays a graph on the main stream. Does not wait.
    pub fn replay(&self, graph: &Graph) -> Result<(), DeviceError> {
        graph.launch_on(self.stream())
    }
}
