//! Conversion of driver errors to device errors.

use contract::DeviceError;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;

/// The device error for a failed driver call. It names the call, its subject (a kernel, a size) and
/// a remedy.
pub fn failed(call: &'static str, about: &str, error: DriverError) -> DeviceError {
    let name = match error.error_name() {
        Ok(name) => name.to_string_lossy().into_owned(),
        Err(_) => format!("{:?}", error.0),
    };
    let about = if about.is_empty() {
        String::new()
    } else {
        format!("{about}: ")
    };
    DeviceError::DeviceLost {
        during: call,
        detail: format!("{about}{name}; {}", remedy(error.0)),
    }
}

/// The remedy that a user can apply.
fn remedy(code: CUresult) -> &'static str {
    use CUresult as R;
    match code {
        R::CUDA_ERROR_OUT_OF_MEMORY => {
            "the GPU's memory is in use: close other programs on it, or lower --max-ctx"
        }
        // What a trap gives, by which shards end their waits.
        R::CUDA_ERROR_LAUNCH_FAILED | R::CUDA_ERROR_ILLEGAL_INSTRUCTION => {
            "a kernel bug, or a GPU of a tensor split that does not answer the other: restart, and \
             report the model and the GPUs"
        }
        R::CUDA_ERROR_ILLEGAL_ADDRESS
        | R::CUDA_ERROR_MISALIGNED_ADDRESS
        | R::CUDA_ERROR_INVALID_PC
        | R::CUDA_ERROR_HARDWARE_STACK_ERROR
        | R::CUDA_ERROR_ASSERT => "a kernel bug: restart, and report the model and the GPU",
        R::CUDA_ERROR_LAUNCH_TIMEOUT => {
            "a display's watchdog ended the kernel: use a GPU without a display"
        }
        R::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES => {
            "the kernel needs more registers or shared memory than this GPU has"
        }
        R::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE => {
            "the grid has more blocks than the GPU can hold at once"
        }
        R::CUDA_ERROR_INVALID_VALUE => {
            "a launch's grid, block, shared memory or arguments are out of bounds"
        }
        R::CUDA_ERROR_NO_BINARY_FOR_GPU
        | R::CUDA_ERROR_INVALID_IMAGE
        | R::CUDA_ERROR_INVALID_PTX
        | R::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            "the kernels were compiled for another GPU or by a newer toolkit than the driver \
             knows: update the driver"
        }
        R::CUDA_ERROR_NOT_FOUND => "the compiled kernel has no function of this name",
        R::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH | R::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "the driver was updated while running: restart the machine"
        }
        R::CUDA_ERROR_ECC_UNCORRECTABLE | R::CUDA_ERROR_NVLINK_UNCORRECTABLE => {
            "the GPU's memory has a fault: see nvidia-smi -q"
        }
        _ => "see nvidia-smi and the kernel log",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_remedy_depends_on_the_code() {
        let code = CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
        assert!(remedy(code).contains("grid"), "{}", remedy(code));
        assert!(remedy(CUresult::CUDA_ERROR_UNKNOWN).contains("nvidia-smi"));
    }
}
