//! Compilation from embedded sources to loaded modules: expansion, NVRTC, cache and function
//! lookup.
//!
//! One [`CompileUnit`](crate::launch::CompileUnit) is one file with defines. It becomes one CUBIN
//! for the exact target. Each thread compiles one program.

mod build;
mod cache;
mod error;
mod machine_code;
mod modules;
mod nvrtc;
mod nvrtc_library;
mod report;
mod source;

pub use build::{CompileProgress, Compiled, Options, compile};
pub use error::CompileError;
pub use machine_code::uniform_copies;
pub use modules::Modules;
pub use nvrtc_library::{Nvrtc, NvrtcSearch};
pub use report::{EntryReport, entry_reports};
pub use source::{expand, min_arch, sources};
