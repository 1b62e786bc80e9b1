//! Why kernels could not be compiled, and what would help.

use contract::DeviceError;

/// An error between a unit and its CUBIN.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CompileError {
    /// No libnvrtc could be opened.
    #[error(
        "libnvrtc (the CUDA run-time compiler, 12 or 13) was not found; looked at: {}; install it with \
         `pip install nvidia-cuda-nvrtc` or the CUDA toolkit, or name the file with --nvrtc",
        searched.join(", ")
    )]
    NvrtcNotFound {
        /// Everywhere it was looked for, in order.
        searched: Vec<String>,
    },
    /// A unit or an `#include` names no embedded file.
    #[error("{from} includes {name}, which is no file under kernels/")]
    MissingSource {
        /// The file that asked.
        from: String,
        /// What it asked for.
        name: String,
    },
    /// The compiler refused the source.
    #[error("{unit} does not compile for {arch}:\n{log}")]
    Rejected {
        /// File and defines.
        unit: String,
        /// The target.
        arch: String,
        /// The compiler's words, with file and line.
        log: String,
    },
    /// Another call of the library failed.
    #[error("{call} failed for {unit}: {detail}")]
    Nvrtc {
        /// The call.
        call: &'static str,
        /// File and defines.
        unit: String,
        /// The library's words.
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
                device: "this card".to_owned(),
                instead: format!("use --device cpu and report this: {other}"),
            },
        }
    }
}
