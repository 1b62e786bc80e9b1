//! Device memory and page-locked host memory.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::size_of;
use std::ops::Range;
use std::sync::Arc;

use contract::DeviceError;
use cudarc::driver::{result, sys};

use super::context::Context;
use super::error::failed;
use super::gpu::Gpu;
use super::stream::{Event, Stream};

/// A plain-old-data value: every bit pattern is valid and there is no padding.
///
/// # Safety
/// Every bit pattern must be a valid value. The type must not contain pointers, references or
/// padding.
pub unsafe trait Pod: Copy + 'static {}

macro_rules! pod {
    ($($ty:ty),*) => {$(
        // SAFETY: every bit pattern is a value, and there is no padding.
        unsafe impl Pod for $ty {}
    )*};
}
pod!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);
pod!(half::f16, half::bf16);

/// `len` values of device memory. Freed on drop, after all work that uses it.
#[derive(Debug)]
pub struct Buffer<T: Pod> {
    ptr: sys::CUdeviceptr,
    len: usize,
    context: Arc<Context>,
    holds: PhantomData<T>,
}

// SAFETY: a device address may be used from any thread.
unsafe impl<T: Pod> Send for Buffer<T> {}

impl<T: Pod> Buffer<T> {
    pub(super) fn new(gpu: &Gpu, len: usize) -> Result<Buffer<T>, DeviceError> {
        gpu.context.enter()?;
        let bytes = len * size_of::<T>();
        let ptr = if bytes == 0 {
            0
        } else {
            // SAFETY: the contents are undefined until written, and only kernels and copies read
            // them.
            unsafe { result::malloc_sync(bytes) }.map_err(|error| {
                if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                    DeviceError::OutOfMemory {
                        what: "device memory bytes",
                        wanted: bytes as u64,
                        free: gpu.memory().map_or(0, |(free, _)| free),
                    }
                } else {
                    failed("cuMemAlloc", &format!("{bytes} bytes"), error)
                }
            })?
        };
        Ok(Buffer {
            ptr,
            len,
            context: Arc::clone(&gpu.context),
            holds: PhantomData,
        })
    }

    /// The device address, as kernels take it.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// The device address of value `index`.
    ///
    /// # Panics
    /// If `index` is beyond the end.
    pub fn ptr_at(&self, index: usize) -> u64 {
        assert!(index <= self.len, "{index} of {}", self.len);
        self.ptr + (index * size_of::<T>()) as u64
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Copies `host` to the start of the buffer, ordered on the main stream, and waits.
    ///
    /// # Panics
    /// If `host` is longer than the buffer.
    pub fn upload(&mut self, gpu: &Gpu, host: &[T]) -> Result<(), DeviceError> {
        self.upload_at(gpu, 0, host)
    }

    /// Copies `host` to value `start` onward, ordered on the main stream, and waits.
    ///
    /// # Panics
    /// If the range exceeds the buffer.
    pub fn upload_at(&mut self, gpu: &Gpu, start: usize, host: &[T]) -> Result<(), DeviceError> {
        assert!(start + host.len() <= self.len, "upload past the end");
        if host.is_empty() {
            return Ok(());
        }
        // SAFETY: the range lies in the buffer; `host` lives until the wait below.
        unsafe { result::memcpy_htod_async(self.ptr_at(start), host, gpu.stream().raw()) }
            .map_err(|e| failed("cuMemcpyHtoDAsync", "", e))?;
        gpu.sync()
    }

    /// Returns all values, ordered after the main stream.
    pub fn download(&self, gpu: &Gpu) -> Result<Vec<T>, DeviceError> {
        self.download_range(gpu, 0..self.len)
    }

    /// Returns the values of `range`, ordered after the main stream.
    ///
    /// # Panics
    /// If the range exceeds the buffer.
    pub fn download_range(&self, gpu: &Gpu, range: Range<usize>) -> Result<Vec<T>, DeviceError> {
        assert!(range.end <= self.len, "download past the end");
        let len = range.len();
        let mut host: Vec<T> = Vec::with_capacity(len);
        if len == 0 {
            gpu.sync()?;
            return Ok(host);
        }
        // SAFETY: the range lies in the buffer, the vector has capacity for `len` values, and the
        // copy has filled them when the wait returns. Every bit pattern is a value.
        unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                host.as_mut_ptr().cast::<c_void>(),
                self.ptr_at(range.start),
                len * size_of::<T>(),
                gpu.stream().raw(),
            )
            .result()
            .map_err(|e| failed("cuMemcpyDtoHAsync", "", e))?;
            gpu.sync()?;
            host.set_len(len);
        }
        Ok(host)
    }

    /// Sets every byte, ordered on the main stream. Does not wait.
    pub fn fill(&mut self, gpu: &Gpu, byte: u8) -> Result<(), DeviceError> {
        if self.len == 0 {
            return Ok(());
        }
        // SAFETY: the range is the whole buffer, which lives until the stream is drained on free.
        unsafe { result::memset_d8_async(self.ptr, byte, self.bytes(), gpu.stream().raw()) }
            .map_err(|e| failed("cuMemsetD8Async", "", e))
    }

    /// Copies a buffer of equal length over this one, ordered on the main stream.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_from(&mut self, gpu: &Gpu, other: &Buffer<T>) -> Result<(), DeviceError> {
        assert_eq!(self.len, other.len, "copy of another length");
        gpu.copy_bytes(self.ptr, other.ptr, self.bytes())
    }
}

impl<T: Pod> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.ptr != 0 && self.context.enter().is_ok() {
            // SAFETY: allocated in `new`, freed once. `cuMemFree` waits for work that uses it.
            let _ = unsafe { result::free_sync(self.ptr) };
        }
    }
}

/// `len` values of page-locked host memory, mapped for the device. Freed on drop.
#[derive(Debug)]
pub struct Pinned<T: Pod> {
    host: *mut T,
    device: sys::CUdeviceptr,
    len: usize,
    context: Arc<Context>,
}

// SAFETY: it owns its memory like a boxed slice.
unsafe impl<T: Pod + Send> Send for Pinned<T> {}
// SAFETY: as above, and a shared reference only reads.
unsafe impl<T: Pod + Sync> Sync for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    pub(super) fn new(context: &Arc<Context>, len: usize) -> Result<Pinned<T>, DeviceError> {
        context.enter()?;
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: the memory is zeroed below before use.
        let host = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP) }.map_err(
            |error| {
                if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                    DeviceError::OutOfMemory {
                        what: "page-locked host memory bytes",
                        wanted: bytes as u64,
                        free: 0,
                    }
                } else {
                    failed("cuMemHostAlloc", &format!("{bytes} bytes"), error)
                }
            },
        )?;
        let mut device = 0;
        // SAFETY: `host` has `bytes` bytes, allocated as mapped just above.
        unsafe {
            std::ptr::write_bytes(host.cast::<u8>(), 0, bytes);
            sys::cuMemHostGetDevicePointer_v2(&raw mut device, host, 0)
        }
        .result()
        .map_err(|e| failed("cuMemHostGetDevicePointer", "", e))?;
        Ok(Pinned {
            host: host.cast::<T>(),
            device,
            len,
            context: Arc::clone(context),
        })
    }

    /// The values. All copies into this memory must have finished.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `len` initialised values, owned by this.
        unsafe { std::slice::from_raw_parts(self.host, self.len) }
    }

    /// The values, mutable. All copies from this memory must have finished.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: `len` initialised values, owned by this and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.host, self.len) }
    }

    /// The address that kernels use.
    pub fn device_ptr(&self) -> u64 {
        self.device
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<T: Pod> Drop for Pinned<T> {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: allocated in `new`, freed once.
            let _ = unsafe { result::free_host(self.host.cast::<c_void>()) };
        }
    }
}

/// The operations on a device that other threads may use: locking host memory, and copies on their
/// own streams.
#[derive(Debug, Clone)]
pub struct CopyEngine(pub(super) Arc<Context>);

impl CopyEngine {
    /// As [`Gpu::pinned`].
    pub fn pinned<T: Pod>(&self, len: usize) -> Result<Pinned<T>, DeviceError> {
        Pinned::new(&self.0, len)
    }

    /// As [`Gpu::new_stream`].
    pub fn stream(&self) -> Result<Stream, DeviceError> {
        Stream::new(&self.0)
    }

    /// As [`Event::new`].
    pub fn event(&self) -> Result<Event, DeviceError> {
        Event::of(&self.0)
    }

    /// Waits for all work on all streams.
    pub fn sync_all(&self) -> Result<(), DeviceError> {
        self.0.enter()?;
        result::ctx::synchronize().map_err(|e| failed("cuCtxSynchronize", "", e))
    }

    /// Queues a copy of `bytes` bytes between device and page-locked memory, in either direction.
    ///
    /// # Safety
    /// As [`Gpu::copy_rows`].
    pub unsafe fn copy(
        &self,
        stream: &Stream,
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.0.enter()?;
        // SAFETY: guaranteed by the caller.
        unsafe { copy_rows(stream, (to, 0), (from, 0), bytes, 1) }
    }
}

/// Queues a copy of `n` rows of `width` bytes. Each side is the address of the first row and the
/// row pitch in bytes, in device or page-locked host memory.
///
/// # Safety
/// Host memory must stay alive and untouched until the copy has finished.
unsafe fn copy_rows(
    stream: &Stream,
    (to, to_pitch): (u64, usize),
    (from, from_pitch): (u64, usize),
    width: usize,
    n: usize,
) -> Result<(), DeviceError> {
    /// The largest pitch that a 2D copy takes on every device.
    const MAX_PITCH: usize = (1 << 31) - 1;
    let raw = stream.raw();
    let description = || format!("{n} rows of {width} bytes");
    if width == 0 || n == 0 {
        return Ok(());
    }
    if n == 1 || to_pitch.max(from_pitch) > MAX_PITCH {
        for row in 0..n {
            let (to, from) = (
                to + (row * to_pitch) as u64,
                from + (row * from_pitch) as u64,
            );
            // SAFETY: addresses are unified, so the driver knows which side is the host. The caller
            // guarantees lifetimes. A wrong device address is a device fault that the next wait
            // reports.
            unsafe { sys::cuMemcpyAsync(to, from, width, raw) }
                .result()
                .map_err(|e| failed("cuMemcpyAsync", &description(), e))?;
        }
        return Ok(());
    }
    let unified = sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED;
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: unified,
        srcHost: std::ptr::null(),
        srcDevice: from,
        srcArray: std::ptr::null_mut(),
        srcPitch: from_pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: unified,
        dstHost: std::ptr::null_mut(),
        dstDevice: to,
        dstArray: std::ptr::null_mut(),
        dstPitch: to_pitch,
        WidthInBytes: width,
        Height: n,
    };
    // SAFETY: as above.
    unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, raw) }
        .result()
        .map_err(|e| failed("cuMemcpy2DAsync", &description(), e))
}

impl Gpu {
    /// Allocates `len` values, contents undefined, aligned to at least 256 bytes. `len` may be 0.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the device has no free range of this size.
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<Buffer<T>, DeviceError> {
        Buffer::new(self, len)
    }

    /// Copies `host` to new device memory.
    pub fn upload<T: Pod>(&self, host: &[T]) -> Result<Buffer<T>, DeviceError> {
        let mut buffer = self.alloc(host.len())?;
        buffer.upload(self, host)?;
        Ok(buffer)
    }

    /// `len` values with every byte set to `byte`: 0 gives zeros, 0xff gives NaNs of every float
    /// type.
    pub fn filled<T: Pod>(&self, len: usize, byte: u8) -> Result<Buffer<T>, DeviceError> {
        let mut buffer = self.alloc(len)?;
        buffer.fill(self, byte)?;
        Ok(buffer)
    }

    /// `len` zeroed values of page-locked host memory, which the device accesses at full bus speed.
    pub fn pinned<T: Pod>(&self, len: usize) -> Result<Pinned<T>, DeviceError> {
        Pinned::new(&self.context, len)
    }

    /// The operations that other threads may use.
    pub fn copy_engine(&self) -> CopyEngine {
        CopyEngine(Arc::clone(&self.context))
    }

    /// Copies within the device, ordered on the main stream. Does not wait.
    pub fn copy_bytes(&self, to: u64, from: u64, bytes: usize) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both are device addresses. A wrong one is a device fault that the next wait
        // reports.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream().raw()) }
            .map_err(|e| failed("cuMemcpyDtoDAsync", &format!("{bytes} bytes"), e))
    }

    /// Queues a copy of `n` rows of `width` bytes on the main stream. Does not wait. Each side is
    /// the address of the first row and the row pitch in bytes, in device or page-locked host
    /// memory.
    ///
    /// # Safety
    /// Host memory must stay alive and untouched until the copy has finished.
    pub unsafe fn copy_rows(
        &self,
        (to, to_pitch): (u64, usize),
        (from, from_pitch): (u64, usize),
        width: usize,
        n: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: guaranteed by the caller.
        unsafe { copy_rows(self.stream(), (to, to_pitch), (from, from_pitch), width, n) }
    }

    /// Zeroes `bytes` bytes at a device address, ordered on the main stream. Does not wait.
    pub fn zero_bytes(&self, at: u64, bytes: usize) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: a device address. A wrong one is a device fault that the next wait reports.
        unsafe { result::memset_d8_async(at, 0, bytes, self.stream().raw()) }
            .map_err(|e| failed("cuMemsetD8Async", &format!("{bytes} bytes"), e))
    }

    /// Queues a copy of `range` of page-locked memory to device address `to`.
    ///
    /// # Safety
    /// `from` must stay alive and unwritten until `stream` has finished the copy.
    ///
    /// # Panics
    /// If the range exceeds the memory.
    pub unsafe fn copy_to_device<T: Pod>(
        &self,
        stream: &Stream,
        to: u64,
        from: &Pinned<T>,
        range: Range<usize>,
    ) -> Result<(), DeviceError> {
        if range.is_empty() {
            return Ok(());
        }
        // SAFETY: slicing checks the bounds, and the caller guarantees the lifetime.
        unsafe { result::memcpy_htod_async(to, &from.as_slice()[range], stream.raw()) }
            .map_err(|e| failed("cuMemcpyHtoDAsync", "", e))
    }

    /// Queues a copy from device address `from` into `range` of page-locked memory.
    ///
    /// # Safety
    /// `to` must stay alive and unread until `stream` has finished the copy.
    ///
    /// # Panics
    /// If the range exceeds the memory.
    pub unsafe fn copy_to_host<T: Pod>(
        &self,
        stream: &Stream,
        to: &mut Pinned<T>,
        range: Range<usize>,
        from: u64,
    ) -> Result<(), DeviceError> {
        if range.is_empty() {
            return Ok(());
        }
        // SAFETY: slicing checks the bounds, and the caller guarantees the lifetime.
        unsafe { result::memcpy_dtoh_async(&mut to.as_mut_slice()[range], from, stream.raw()) }
            .map_err(|e| failed("cuMemcpyDtoHAsync", "", e))
    }
}
