//! A thin safe layer over the CUDA driver: one card, its memory, functions, streams, graphs, and time.
//!
//! Every call that fails becomes a [`contract::DeviceError`] that names the call, the kernel where there is
//! one, and what would help. Device pointers are plain `u64` here, as kernels take them: what a kernel does
//! with them is the business of [`crate::launch`], which checks shapes before a pointer is handed on.
//!
//! All of it belongs to one thread, except that dropping is allowed anywhere.

mod arch;
mod buffer;
mod context;
mod error;
mod function;
mod gpu;
mod graph;
mod stream;

pub use arch::Arch;
pub use buffer::{Buffer, CopyEngine, Pinned, Pod};
pub use error::failed;
pub use function::{Function, Module, Resources};
pub use gpu::Gpu;
pub use graph::Graph;
pub use stream::{Event, Stream};
