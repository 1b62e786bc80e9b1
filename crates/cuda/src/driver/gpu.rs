//! An open device: its context, main stream and properties.

use std::cell::Cell;
use std::sync::Arc;

use contract::DeviceError;
use cudarc::driver::{result, sys};

use super::context::Context;
use super::error::failed;
use super::stream::{Event, Stream};
use crate::arch::Arch;
use crate::probe::{GpuInfo, probe};

/// A device opened on this thread. The context lives until this and every buffer, module and graph
/// are dropped.
#[derive(Debug)]
pub struct Gpu {
    pub(super) context: Arc<Context>,
    stream: Stream,
    info: GpuInfo,
    shared_per_block: u32,
    l2_bytes: u64,
    driver: i32,
    /// The last launched entry. Errors name it, because faults surface later.
    pub(super) last_entry: Cell<&'static str>,
}

impl Gpu {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] without a driver or this device, [`DeviceError::DeviceLost`]
    /// from the driver.
    pub fn open(ordinal: u32) -> Result<Gpu, DeviceError> {
        let missing = |why: String| DeviceError::Unsupported {
            what: format!("cuda:{ordinal}"),
            device: "this machine".to_owned(),
            instead: format!("{why}; or use --device cpu"),
        };
        let gpus = probe().map_err(|absence| missing(absence.to_string()))?;
        let count = gpus.len();
        let info = gpus
            .into_iter()
            .find(|info| info.ordinal == ordinal)
            .ok_or_else(|| missing(format!("the driver sees {count} GPUs, counted from 0")))?;
        Gpu::open_known(info)
    }

    /// Opens a device that [`probe`] described, as the class that the description says.
    ///
    /// # Errors
    /// [`DeviceError::DeviceLost`] from the driver.
    pub fn open_known(info: GpuInfo) -> Result<Gpu, DeviceError> {
        let handle = i32::try_from(info.ordinal).unwrap_or(i32::MAX);
        let device =
            result::device::get(handle).map_err(|e| failed("cuDeviceGet", &info.name, e))?;
        // SAFETY: `device` came from `cuDeviceGet`; released in `Context::drop`.
        let raw = unsafe { result::primary_ctx::retain(device) }
            .map_err(|e| failed("cuDevicePrimaryCtxRetain", &info.name, e))?;
        let context = Arc::new(Context { raw, device });
        context.enter()?;
        let attribute = |which| {
            // SAFETY: `device` came from `cuDeviceGet`.
            unsafe { result::device::get_attribute(device, which) }
                .map_err(|e| failed("cuDeviceGetAttribute", &info.name, e))
        };
        use sys::CUdevice_attribute as A;
        let shared =
            attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?.unsigned_abs();
        let l2 = attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.unsigned_abs();
        let mut driver = 0;
        // SAFETY: writes one int.
        unsafe { sys::cuDriverGetVersion(&raw mut driver) }
            .result()
            .map_err(|e| failed("cuDriverGetVersion", "", e))?;
        let stream = Stream::new(&context)?;
        Ok(Gpu {
            context,
            stream,
            shared_per_block: shared,
            l2_bytes: u64::from(l2),
            driver,
            info,
            last_entry: Cell::new("nothing"),
        })
    }

    /// The same device with a new main stream, whose launches go before those of other streams,
    /// such as a scorer's.
    ///
    /// # Errors
    /// [`DeviceError::DeviceLost`] from the driver.
    pub fn with_first_stream(self) -> Result<Gpu, DeviceError> {
        Ok(Gpu {
            stream: Stream::first(&self.context)?,
            ..self
        })
    }

    /// Properties that the driver reports.
    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// The compile target.
    pub fn arch(&self) -> Arch {
        let (major, minor) = self.info.capability;
        Arch {
            number: major * 10 + minor,
        }
    }

    /// Whether launches may overlap on it.
    pub fn has_pdl(&self) -> bool {
        self.info.has_pdl()
    }

    /// Number of streaming multiprocessors.
    pub fn sm_count(&self) -> u32 {
        self.info.sm_count
    }

    /// Maximum dynamic shared memory per block in bytes.
    pub fn shared_per_block(&self) -> u32 {
        self.shared_per_block
    }

    /// L2 cache size in bytes.
    pub fn l2_bytes(&self) -> u64 {
        self.l2_bytes
    }

    /// The driver's CUDA version: 13000 is 13.0.
    pub fn driver_version(&self) -> i32 {
        self.driver
    }

    /// The main stream, used by [`Gpu::run`] and blocking copies.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// A new stream, independent of the main stream.
    pub fn new_stream(&self) -> Result<Stream, DeviceError> {
        Stream::new(&self.context)
    }

    /// Free and total device memory in bytes.
    pub fn memory(&self) -> Result<(u64, u64), DeviceError> {
        self.context.enter()?;
        let (free, total) =
            result::mem_get_info().map_err(|e| failed("cuMemGetInfo", &self.info.name, e))?;
        Ok((free as u64, total as u64))
    }

    /// Waits for the main stream.
    ///
    /// # Errors
    /// [`DeviceError::DeviceLost`] with the fault of any kernel since the last wait.
    pub fn sync(&self) -> Result<(), DeviceError> {
        self.stream.sync_after(self.last_entry.get())
    }
}

impl Event {
    /// A new, unrecorded event.
    pub fn new(gpu: &Gpu) -> Result<Event, DeviceError> {
        Event::of(&gpu.context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_gpu_error_names_the_cpu_flag() {
        if let Err(error) = Gpu::open(0) {
            assert!(error.to_string().contains("--device cpu"), "{error}");
        }
        let none = Gpu::open(9_999).map(|_| ()).unwrap_err().to_string();
        assert!(none.contains("cuda:9999"), "{none}");
    }
}
