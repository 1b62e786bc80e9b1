//! Loaded modules and their functions.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use contract::DeviceError;
use cudarc::driver::{result, sys};

use super::context::Context;
use super::error::failed;
use super::gpu::Gpu;
use super::stream::Stream;
use crate::launch::Launch;

/// Dynamic shared memory that every block may use without opt-in, in bytes.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;
/// Preferred shared memory carveout, in percent.
const MAX_SHARED_CARVEOUT: i32 = 100;
/// The first driver version with `cuFuncGetParamInfo`.
const MIN_DRIVER_WITH_PARAM_INFO: i32 = 12_040;

/// A loaded CUBIN. Unloaded on drop.
#[derive(Debug)]
pub struct Module {
    raw: sys::CUmodule,
    context: Arc<Context>,
}

// SAFETY: a module handle may be used from any thread once its context is current there.
unsafe impl Send for Module {}
// SAFETY: as above, and nothing here changes after loading.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a CUBIN. `about` names it in errors.
    ///
    /// # Errors
    /// [`DeviceError::DeviceLost`] if the driver rejects it.
    pub fn load(gpu: &Gpu, cubin: &[u8], about: &str) -> Result<Arc<Module>, DeviceError> {
        gpu.context.enter()?;
        // SAFETY: a CUBIN is self-delimiting (ELF); the driver copies what it needs.
        let raw = unsafe { result::module::load_data(cubin.as_ptr().cast()) }
            .map_err(|e| failed("cuModuleLoadData", about, e))?;
        Ok(Arc::new(Module {
            raw,
            context: Arc::clone(&gpu.context),
        }))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: loaded in `load`, unloaded once; functions hold an `Arc` of this.
            let _ = unsafe { result::module::unload(self.raw) };
        }
    }
}

/// Resources that a function uses on a multiprocessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Local memory per thread in bytes: spills and arrays with run-time indices.
    pub local_bytes: u32,
    /// Static shared memory in bytes.
    pub shared_bytes: u32,
    /// Maximum threads per block.
    pub max_threads: u32,
}

/// A kernel entry, ready to launch. Keeps its module loaded.
#[derive(Debug, Clone)]
pub struct Function {
    raw: sys::CUfunction,
    /// Keeps the code loaded. Never read.
    _module: Arc<Module>,
    name: &'static str,
    resources: Resources,
    /// Whether the driver reports parameter sizes.
    has_param_info: bool,
}

impl Function {
    /// Looks up entry `name`.
    ///
    /// # Errors
    /// [`DeviceError::DeviceLost`] if the module has no such entry.
    pub fn find(
        gpu: &Gpu,
        module: &Arc<Module>,
        name: &'static str,
    ) -> Result<Function, DeviceError> {
        let c_name = CString::new(name).map_err(|_| DeviceError::InvalidCall {
            call: "Function::find",
            detail: format!("{name:?} is no entry name"),
        })?;
        // SAFETY: the module is loaded while `module` lives.
        let raw = unsafe { result::module::get_function(module.raw, c_name) }
            .map_err(|e| failed("cuModuleGetFunction", name, e))?;
        let get = |which| {
            // SAFETY: `raw` is a function of a loaded module.
            unsafe { result::function::get_function_attribute(raw, which) }
                .map(i32::unsigned_abs)
                .map_err(|e| failed("cuFuncGetAttribute", name, e))
        };
        use sys::CUfunction_attribute as A;
        let resources = Resources {
            registers: get(A::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: get(A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            shared_bytes: get(A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            max_threads: get(A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        };
        Ok(Function {
            raw,
            _module: Arc::clone(module),
            name,
            resources,
            has_param_info: gpu.driver_version() >= MIN_DRIVER_WITH_PARAM_INFO,
        })
    }

    pub(super) fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    /// Resources per multiprocessor.
    pub fn resources(&self) -> Resources {
        self.resources
    }

    /// Rejects a launch with arguments of wrong sizes or too many arguments. Debug builds also
    /// reject too few. Asking the driver for a missing parameter is an API error that tools would
    /// report for every kernel.
    ///
    /// # Errors
    /// [`DeviceError::InvalidCall`] with both sizes.
    pub fn check_arguments(&self, sizes: &[usize]) -> Result<(), DeviceError> {
        if !self.has_param_info {
            return Ok(());
        }
        let refused = |index: usize, takes: Option<usize>| {
            let takes = takes.map_or("none".to_owned(), |bytes| format!("{bytes} bytes"));
            Err(DeviceError::InvalidCall {
                call: "a kernel launch",
                detail: format!(
                    "{} takes {takes} as argument {index}, and the launch has {sizes:?} bytes",
                    self.name
                ),
            })
        };
        for (index, size) in sizes.iter().enumerate() {
            let takes = self.parameter(index);
            if takes != Some(*size) {
                return refused(index, takes);
            }
        }
        if cfg!(debug_assertions)
            && let Some(more) = self.parameter(sizes.len())
        {
            return refused(sizes.len(), Some(more));
        }
        Ok(())
    }

    /// Size of parameter `index` in bytes.
    fn parameter(&self, index: usize) -> Option<usize> {
        let (mut offset, mut size) = (0_usize, 0_usize);
        // SAFETY: the function is loaded; the driver writes both values or gives an error.
        let got =
            unsafe { sys::cuFuncGetParamInfo(self.raw, index, &raw mut offset, &raw mut size) };
        (got == sys::CUresult::CUDA_SUCCESS).then_some(size)
    }

    /// Enables `bytes` of dynamic shared memory per block.
    ///
    /// # Errors
    /// [`DeviceError::InvalidCall`] beyond the device limit.
    pub fn enable_dynamic_shared(&self, gpu: &Gpu, bytes: u32) -> Result<(), DeviceError> {
        if bytes + self.resources.shared_bytes <= DEFAULT_SHARED_BYTES {
            return Ok(());
        }
        let most = gpu
            .shared_per_block()
            .saturating_sub(self.resources.shared_bytes);
        if bytes > most {
            return Err(DeviceError::InvalidCall {
                call: "a kernel launch",
                detail: format!(
                    "{} asks for {bytes} bytes of shared memory a block and {} has {most}",
                    self.name,
                    gpu.arch()
                ),
            });
        }
        let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let value = i32::try_from(most).unwrap_or(i32::MAX);
        // The driver's default carveout may fit one block per multiprocessor. An overlapping launch
        // would then wait for its predecessor's shared memory.
        let carveout =
            sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        for (which, value) in [(which, value), (carveout, MAX_SHARED_CARVEOUT)] {
            // SAFETY: `raw` is a function of a loaded module.
            unsafe { result::function::set_function_attribute(self.raw, which, value) }
                .map_err(|e| failed("cuFuncSetAttribute", self.name, e))?;
        }
        Ok(())
    }

    /// Blocks of `threads` threads and `shared` bytes that one multiprocessor can hold.
    pub fn resident_blocks(&self, threads: u32, shared: u32) -> Result<u32, DeviceError> {
        let threads = i32::try_from(threads).unwrap_or(i32::MAX);
        // SAFETY: `raw` is a function of a loaded module.
        unsafe {
            result::occupancy::max_active_block_per_multiprocessor(
                self.raw,
                threads,
                shared as usize,
            )
        }
        .map(i32::unsigned_abs)
        .map_err(|e| failed("cuOccupancyMaxActiveBlocksPerMultiprocessor", self.name, e))
    }
}

impl Gpu {
    /// Queues a launch of a known function on the main stream.
    pub fn run_function(&self, function: &Function, launch: &Launch) -> Result<(), DeviceError> {
        self.run_on(self.stream(), function, launch)
    }

    /// Queues a launch on `stream`.
    pub fn run_on(
        &self,
        stream: &Stream,
        function: &Function,
        launch: &Launch,
    ) -> Result<(), DeviceError> {
        self.last_entry.set(launch.entry);
        let mut attributes = Vec::with_capacity(2);
        // SAFETY: an all-zero attribute is valid: id IGNORE and zero padding.
        let blank: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        if launch.cooperative {
            let mut attribute = blank;
            attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
            attribute.value.cooperative = 1;
            attributes.push(attribute);
        }
        if launch.overlap && self.has_pdl() {
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
        // SAFETY: `function` keeps its module loaded. `arguments` points to values of the number
        // and sizes that the function takes (checked at look-up). The driver copies them before it
        // returns, and `config` and its attributes live until then.
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
}
