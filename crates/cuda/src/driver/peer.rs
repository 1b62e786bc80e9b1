//! Copies between the memories of two devices.

use contract::DeviceError;
use cudarc::driver::{result, sys};

use super::buffer::CopyEngine;
use super::error::failed;
use super::gpu::Gpu;
use super::stream::Stream;

impl Gpu {
    /// Makes this device the current one of the calling thread, which launches on several.
    ///
    /// # Errors
    /// [`DeviceError::DeviceLost`] from the driver.
    pub fn make_current(&self) -> Result<(), DeviceError> {
        self.context.enter()
    }
}

/// Whether device `ordinal` can read and write the memory of device `other`. Opens no context.
///
/// # Errors
/// [`DeviceError::DeviceLost`] from the driver.
pub fn can_access_peer(ordinal: u32, other: u32) -> Result<bool, DeviceError> {
    let device = |ordinal: u32| {
        let handle = i32::try_from(ordinal).unwrap_or(i32::MAX);
        result::device::get(handle)
            .map_err(|e| failed("cuDeviceGet", &format!("cuda:{ordinal}"), e))
    };
    can_access(device(ordinal)?, device(other)?)
}

fn can_access(device: sys::CUdevice, other: sys::CUdevice) -> Result<bool, DeviceError> {
    let mut can_access = 0;
    // SAFETY: both devices came from `cuDeviceGet`; writes one int.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut can_access, device, other) }
        .result()
        .map_err(|e| failed("cuDeviceCanAccessPeer", "", e))?;
    Ok(can_access != 0)
}

impl CopyEngine {
    /// Whether this device can read the memory of `other` directly; lets it do so.
    ///
    /// # Errors
    /// [`DeviceError::DeviceLost`] from the driver.
    pub fn enable_peer_access(&self, other: &CopyEngine) -> Result<bool, DeviceError> {
        if self.is_same_device(other) {
            return Ok(true);
        }
        if !can_access(self.0.device, other.0.device)? {
            return Ok(false);
        }
        self.0.enter()?;
        // SAFETY: both contexts are alive; the access ends with them.
        match unsafe { sys::cuCtxEnablePeerAccess(other.0.raw, 0) } {
            sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {
                Ok(true)
            }
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
            | sys::CUresult::CUDA_ERROR_TOO_MANY_PEERS => Ok(false),
            other => other
                .result()
                .map(|()| true)
                .map_err(|e| failed("cuCtxEnablePeerAccess", "", e)),
        }
    }

    /// Whether both are of one device.
    pub fn is_same_device(&self, other: &CopyEngine) -> bool {
        self.0.device == other.0.device
    }

    /// Queues a copy of `bytes` bytes from the memory of `other` on a stream of this device. Both
    /// are device addresses; a wrong one is a device fault that the next wait reports.
    ///
    /// # Errors
    /// [`DeviceError::DeviceLost`] from the driver.
    pub fn copy_from_device(
        &self,
        stream: &Stream,
        to: u64,
        (other, from): (&CopyEngine, u64),
        bytes: usize,
    ) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        self.0.enter()?;
        let raw = stream.raw();
        let (to_context, from_context) = (self.0.raw, other.0.raw);
        if self.is_same_device(other) {
            // SAFETY: both are addresses of this device.
            unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, raw) }
        } else {
            // SAFETY: each address is of the context beside it, and both contexts are alive.
            unsafe { sys::cuMemcpyPeerAsync(to, to_context, from, from_context, bytes, raw) }
        }
        .result()
        .map_err(|e| failed("cuMemcpyPeerAsync", &format!("{bytes} bytes"), e))
    }
}
