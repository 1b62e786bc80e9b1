//! A thin safe layer over the CUDA driver: one device, its memory, functions, streams and graphs.
//!
//! Kept by hand: cudarc's safe layer lacks graphs of foreign launches, page-locked pools and errors
//! with remedies.
//!
//! A failed call becomes a [`contract::DeviceError`] that names the call, the kernel and a remedy.
//! Device pointers are plain `u64`, as kernels take them. [`crate::launch`] checks shapes before it
//! passes a pointer to a kernel.
//!
//! All types belong to one thread, but may be dropped on any thread.

mod buffer;
mod context;
mod error;
mod function;
mod gpu;
mod graph;
mod peer;
mod stream;

pub use crate::arch::Arch;
pub use buffer::{Buffer, CopyEngine, Pinned, Pod};
pub use error::failed;
pub use function::{Function, Module, Resources};
pub use gpu::Gpu;
pub use graph::Graph;
pub use peer::can_access_peer;
pub use stream::{Event, Stream};
