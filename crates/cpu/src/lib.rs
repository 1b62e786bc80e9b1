//! The CPU device: the reference for all other devices, and the default without a GPU.
//!
//! It knows blocks, shapes and formats, but no model family, request, sampling or tree building. A
//! forward pass iterates a [`contract::ModelSpec`] and calls products with stored weights
//! ([`linear`]) and the vector functions of [`kernels`]. Both are chosen once at start; the scalar
//! choice is the reference.
//!
//! Start with [`mod@reference`] for the formulas, then `forward` for the pass, then `runner` for
//! the calls. `scorer` runs a model layer by layer over a whole prompt to score it.

mod blocks;
mod check;
mod device;
mod draft;
mod draft_cache;
mod exchange;
mod forward;
pub mod importance;
#[cfg(feature = "inspect")]
mod inspect;
pub mod kernels;
mod kv_shape;
mod layer_buffers;
pub mod linear;
pub mod matmul;
mod memory;
mod mtp;
mod mtp_state;
mod pass;
pub mod reference;
mod runner;
mod scorer;
mod scratch;
mod shard;
pub mod simd;
mod snapshot;
mod snapshot_pages;
mod stage;
mod state;
pub mod thread_pool;
mod weights;
mod workers;

pub use device::{CpuBackend, CpuOptions};
#[cfg(feature = "inspect")]
pub use inspect::InspectedRunner;
