//! Streams and events.

use std::sync::Arc;

use contract::DeviceError;
use cudarc::driver::{result, sys};

use super::context::Context;
use super::error::failed;

/// An in-order work queue. Destroyed on drop, after its work has finished.
#[derive(Debug)]
pub struct Stream {
    raw: sys::CUstream,
    context: Arc<Context>,
}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Stream, DeviceError> {
        context.enter()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|e| failed("cuStreamCreate", "", e))?;
        Ok(Stream {
            raw,
            context: Arc::clone(context),
        })
    }

    /// A stream whose waiting blocks are placed before those of streams of [`Stream::new`]. Blocks
    /// that run are not interrupted.
    pub(super) fn first(context: &Arc<Context>) -> Result<Stream, DeviceError> {
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        let kind = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle, which the new `Stream` destroys. Lower numbers go first, usual
        // streams have 0, and the driver clamps a number that the device does not have.
        unsafe { sys::cuStreamCreateWithPriority(&raw mut raw, kind, -1) }
            .result()
            .map_err(|e| failed("cuStreamCreateWithPriority", "", e))?;
        Ok(Stream {
            raw,
            context: Arc::clone(context),
        })
    }

    /// Its priority: lower numbers go first.
    pub fn priority(&self) -> Result<i32, DeviceError> {
        let mut priority = 0;
        // SAFETY: the stream lives as long as `self`, and one int is written.
        unsafe { sys::cuStreamGetPriority(self.raw, &raw mut priority) }
            .result()
            .map_err(|e| failed("cuStreamGetPriority", "", e))?;
        Ok(priority)
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Waits until all its work has finished.
    pub fn sync(&self) -> Result<(), DeviceError> {
        self.sync_after("a copy")
    }

    /// As [`Stream::sync`]. The error names the last queued work.
    pub(super) fn sync_after(&self, last: &str) -> Result<(), DeviceError> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.raw) }.map_err(|e| {
            failed(
                "cuStreamSynchronize",
                &format!("work since the last wait, ending with {last}"),
                e,
            )
        })
    }

    /// Makes later work wait for `event`, which any stream may have recorded.
    pub fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        let default = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are alive.
        unsafe { result::stream::wait_event(self.raw, event.raw, default) }
            .map_err(|e| failed("cuStreamWaitEvent", "", e))
    }

    /// Records `event` at this point of the stream.
    pub fn record(&self, event: &Event) -> Result<(), DeviceError> {
        // SAFETY: both handles are alive and of one context.
        unsafe { result::event::record(event.raw, self.raw) }
            .map_err(|e| failed("cuEventRecord", "", e))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created in `new`, destroyed once. The wait keeps buffers in use alive.
            unsafe {
                let _ = result::stream::synchronize(self.raw);
                let _ = result::stream::destroy(self.raw);
            }
        }
    }
}

/// A point in a stream and its time. Destroyed on drop.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    context: Arc<Context>,
}

impl Event {
    pub(super) fn of(context: &Arc<Context>) -> Result<Event, DeviceError> {
        context.enter()?;
        let raw = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(|e| failed("cuEventCreate", "", e))?;
        Ok(Event {
            raw,
            context: Arc::clone(context),
        })
    }

    /// Waits until the stream has reached the event. Returns at once if no stream recorded it.
    pub fn sync(&self) -> Result<(), DeviceError> {
        // SAFETY: the event lives as long as `self`.
        unsafe { result::event::synchronize(self.raw) }
            .map_err(|e| failed("cuEventSynchronize", "", e))
    }

    /// Microseconds from `earlier` to this event. Both must have been reached.
    pub fn us_since(&self, earlier: &Event) -> Result<f64, DeviceError> {
        // SAFETY: both events are alive, and the driver rejects unrecorded events.
        let ms = unsafe { result::event::elapsed(earlier.raw, self.raw) }
            .map_err(|e| failed("cuEventElapsedTime", "", e))?;
        Ok(f64::from(ms) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created in `new`, destroyed once.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}
