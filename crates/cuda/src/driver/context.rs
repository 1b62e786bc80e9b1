//! The primary context of a device.

use contract::DeviceError;
use cudarc::driver::{result, sys};

use super::error::failed;

/// The primary context. Every buffer, stream and module holds a reference.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) raw: sys::CUcontext,
    pub(super) device: sys::CUdevice,
}

// SAFETY: any thread may use a context handle. `enter` makes it current on the thread.
unsafe impl Send for Context {}
// SAFETY: as above, and nothing here changes after creation.
unsafe impl Sync for Context {}

impl Context {
    /// Makes the context current on this thread.
    pub(super) fn enter(&self) -> Result<(), DeviceError> {
        // SAFETY: `raw` is a retained primary context, released only in `drop`.
        unsafe { result::ctx::set_current(self.raw) }.map_err(|e| failed("cuCtxSetCurrent", "", e))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `Gpu::open`. Every user held an `Arc` of this.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}
