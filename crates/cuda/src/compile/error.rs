//! Compilation errors and their remedies.

use contract::DeviceError;

/// An error on the way from a unit to its CUBIN.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CompileError {
    /// No libnvrtc could be opened.
    #[error(
        "libnvrtc (the CUDA run-time compiler, 12 or 13) not found; searched: {}; install it with \
         `python3 -m venv ~/.venv && ~/.venv/bin/pip install nvidia-cuda-nvrtc` or the CUDA toolkit, or          name the file with --nvrtc",
        searched.join(", ")
    )]
    NvrtcNotFound {
        /// Searched paths, in order.
        searched: Vec<String>,
    },
    /// A unit or `#include` names a file that is not embedded.
    #[error("{from} includes {name}, which is no file under kernels/")]
    MissingSource {
        /// The including file.
        from: String,
        /// The included name.
        name: String,
    },
    /// The compiler rejected the source.
    #[error("{unit} does not compile for {arch}:\n{log}")]
    Rejected {
        /// File and defines.
        unit: String,
        /// The target.
        arch: String,
        /// The compiler log, with file and line.
        log: String,
    },
    /// Another NVRTC call failed.
    #[error("{call} failed for {unit}: {detail}")]
    Nvrtc {
        /// The call.
        call: &'static str,
        /// File and defines.
        unit: String,
        /// The NVRTC error text.
        detail: String,
    },
}

impl From<CompileError> for DeviceError {
    fn from(error: CompileError) -> DeviceError {
        match error {
            CompileError::NvrtcNotFound { .. } => DeviceError::Unsupported {
                what: "compiling CUDA kernels".to_owned(),
                device: "this machine".to_owned(),
                instead: format!("{error}, or use --device cpu"),
            },
            other => DeviceError::Unsupported {
                what: "a CUDA kernel".to_owned(),
                device: "this GPU".to_owned(),
                instead: format!("use --device cpu and report this: {other}"),
            },
        }
    }
}
