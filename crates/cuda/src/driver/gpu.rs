//! One card: its context, its main stream, and what it is.

use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use contract::DeviceError;
use cudarc::driver::{result, sys};

use super::buffer::{Buffer, Pinned, Pod};
use super::error::failed;
use super::function::Function;
use super::stream::Stream;
use crate::compile::Modules;
use crate::launch::Launch;
use crate::probe::{Card, probe};

/// A compute capability, which names what kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    /// Tens and units: 90 is compute capability 9.0.
    pub number: u32,
}

impl Arch {
    /// Reads `sm_86`, `86`, `sm_90a`; a trailing letter is taken as the number implies it.
    pub fn parse(text: &str) -> Option<Arch> {
        let digits = text.strip_prefix("sm_").unwrap_or(text);
        let digits = digits.strip_suffix('a').unwrap_or(digits);
        let number = digits.parse().ok().filter(|n| (50..=200).contains(n))?;
        Some(Arch { number })
    }

    /// Whether a file under `kernels/` can be compiled for it: a name ending in `_sm90` says "for 9.0 only".
    pub fn runs(self, file: &str) -> bool {
        let stem = file.strip_suffix(".cu").unwrap_or(file);
        match stem.rsplit_once("_sm") {
            Some((_, number)) if number.bytes().all(|b| b.is_ascii_digit()) => {
                number == self.number.to_string()
            }
            _ => true,
        }
    }

    /// Whether a launch may begin before its predecessor ends (`griddepcontrol`).
    pub fn has_pdl(self) -> bool {
        self.number >= 90
    }
}

impl fmt::Display for Arch {
    /// The target's full name: 9.0 and 12.0 have instructions of their own, reached by the letter.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = if matches!(self.number, 90 | 100 | 120) {
            "a"
        } else {
            ""
        };
        write!(f, "sm_{}{exact}", self.number)
    }
}

/// The primary context of one card, held while anything of ours lives on it.
#[derive(Debug)]
pub(super) struct Context {
    raw: sys::CUcontext,
    device: sys::CUdevice,
}

// SAFETY: a context handle may be used from any thread; `enter` makes it current where it is needed.
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
        // SAFETY: retained once in `Gpu::open`; everything that used it held an `Arc` of this.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// One card, opened on this thread. Its context ends when this and every buffer, module and graph are gone.
#[derive(Debug)]
pub struct Gpu {
    pub(super) context: Arc<Context>,
    stream: Stream,
    card: Card,
    shared_per_block: u32,
    l2_bytes: u64,
    driver: i32,
    /// The entry launched last: a fault is noticed later, and this narrows it down.
    last_entry: Cell<&'static str>,
}

impl Gpu {
    /// Opens card `ordinal`.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] without a driver or such a card; [`DeviceError::DeviceLost`] from the driver.
    pub fn open(ordinal: u32) -> Result<Gpu, DeviceError> {
        let missing = |why: String| DeviceError::Unsupported {
            what: format!("cuda:{ordinal}"),
            device: "this machine".to_owned(),
            instead: format!("{why}; or use --device cpu"),
        };
        let cards = probe().map_err(|absence| missing(absence.to_string()))?;
        let count = cards.len();
        let card = cards
            .into_iter()
            .find(|card| card.ordinal == ordinal)
            .ok_or_else(|| missing(format!("the driver sees {count} card(s), counted from 0")))?;
        let handle = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let device =
            result::device::get(handle).map_err(|e| failed("cuDeviceGet", &card.name, e))?;
        // SAFETY: `device` came from `cuDeviceGet`; released in `Context::drop`.
        let raw = unsafe { result::primary_ctx::retain(device) }
            .map_err(|e| failed("cuDevicePrimaryCtxRetain", &card.name, e))?;
        let context = Arc::new(Context { raw, device });
        context.enter()?;
        let attribute = |which| {
            // SAFETY: `device` came from `cuDeviceGet`.
            unsafe { result::device::get_attribute(device, which) }
                .map_err(|e| failed("cuDeviceGetAttribute", &card.name, e))
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
            card,
            last_entry: Cell::new("nothing"),
        })
    }

    /// What the driver said about the card.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// What kernels are compiled for.
    pub fn arch(&self) -> Arch {
        let (major, minor) = self.card.capability;
        Arch {
            number: major * 10 + minor,
        }
    }

    /// Streaming multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.card.multiprocessors
    }

    /// Most dynamic shared memory of a block, in bytes.
    pub fn shared_per_block(&self) -> u32 {
        self.shared_per_block
    }

    /// Size of the second-level cache, in bytes.
    pub fn l2_bytes(&self) -> u64 {
        self.l2_bytes
    }

    /// The driver's CUDA version as it gives it: 13000 is 13.0.
    pub fn driver_version(&self) -> i32 {
        self.driver
    }

    /// The stream that [`Gpu::run`] and every blocking copy use.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Another stream, which waits for nothing but its own work and the events it is told to wait for.
    pub fn new_stream(&self) -> Result<Stream, DeviceError> {
        Stream::new(&self.context)
    }

    /// Bytes of device memory free and in all.
    pub fn memory(&self) -> Result<(u64, u64), DeviceError> {
        self.context.enter()?;
        let (free, total) =
            result::mem_get_info().map_err(|e| failed("cuMemGetInfo", &self.card.name, e))?;
        Ok((free as u64, total as u64))
    }

    /// `len` values on the card, contents undefined. At least 256-byte aligned. `len` may be 0.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the card has no such run of memory free.
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<Buffer<T>, DeviceError> {
        Buffer::new(self, len)
    }

    /// The values of `host` on the card.
    pub fn upload<T: Pod>(&self, host: &[T]) -> Result<Buffer<T>, DeviceError> {
        let mut buffer = self.alloc(host.len())?;
        buffer.upload(self, host)?;
        Ok(buffer)
    }

    /// `len` values on the card, every byte `byte`: 0 for zeros, 0xff for NaNs of any float type.
    pub fn filled<T: Pod>(&self, len: usize, byte: u8) -> Result<Buffer<T>, DeviceError> {
        let mut buffer = self.alloc(len)?;
        buffer.fill(self, byte)?;
        Ok(buffer)
    }

    /// `len` values of page-locked host memory, zeroed, which the card can read and write at full speed.
    pub fn pinned<T: Pod>(&self, len: usize) -> Result<Pinned<T>, DeviceError> {
        Pinned::new(&self.context, len)
    }

    /// Queues a launch on the main stream.
    ///
    /// # Errors
    /// [`DeviceError::DeviceLost`] if the driver refuses it, or reports an earlier kernel's fault.
    pub fn run(&self, modules: &Modules, launch: &Launch) -> Result<(), DeviceError> {
        self.run_function(&modules.function(self, launch)?, launch)
    }

    /// Queues a launch whose function was looked up before, on the main stream.
    pub fn run_function(&self, function: &Function, launch: &Launch) -> Result<(), DeviceError> {
        self.run_on(&self.stream, function, launch)
    }

    /// Queues a launch on a stream of the caller's.
    pub fn run_on(
        &self,
        stream: &Stream,
        function: &Function,
        launch: &Launch,
    ) -> Result<(), DeviceError> {
        self.last_entry.set(launch.entry);
        let mut attributes = Vec::with_capacity(2);
        // SAFETY: an all-zero attribute is a valid value: id IGNORE and zero padding.
        let blank: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        if launch.cooperative {
            let mut attribute = blank;
            attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
            attribute.value.cooperative = 1;
            attributes.push(attribute);
        }
        if launch.overlap && self.arch().has_pdl() {
            let mut attribute = blank;
            attribute.id =
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attribute.value.programmaticStreamSerializationAllowed = 1;
            attributes.push(attribute);
        }
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: launch.shared,
            hStream: stream.raw(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: u32::try_from(attributes.len()).unwrap_or(0),
        };
        let mut arguments: Vec<*mut c_void> = launch.args.pointers();
        // SAFETY: the function belongs to a module that `function` keeps loaded; `arguments` points to at
        // least as many values, of the sizes, as the function takes (checked when it was looked up); the driver
        // copies them before it returns; `config` and its attributes live until then.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                function.raw(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(|e| failed("cuLaunchKernelEx", &launch.to_string(), e))
    }

    /// Waits for the main stream.
    ///
    /// # Errors
    /// [`DeviceError::DeviceLost`] with the fault of any kernel since the last wait.
    pub fn sync(&self) -> Result<(), DeviceError> {
        self.stream.sync_after(self.last_entry.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arch_names_round_trip() {
        for (typed, meant) in [
            ("sm_90", "sm_90a"),
            ("90a", "sm_90a"),
            ("86", "sm_86"),
            ("sm_120a", "sm_120a"),
        ] {
            assert_eq!(
                Arch::parse(typed).map(|a| a.to_string()).as_deref(),
                Some(meant)
            );
        }
        for wrong in ["", "sm_", "hopper", "900"] {
            assert_eq!(Arch::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn missing_gpu_error_names_the_cpu_flag() {
        if let Err(error) = Gpu::open(0) {
            assert!(error.to_string().contains("--device cpu"), "{error}");
        }
        let none = Gpu::open(9_999).map(|_| ()).unwrap_err().to_string();
        assert!(none.contains("cuda:9999"), "{none}");
    }
}
