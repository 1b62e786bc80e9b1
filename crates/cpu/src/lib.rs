//! The CPU as a device: the reference every other device is judged by, and the default where there is no GPU.
//!
//! Knows blocks, shapes and formats; knows no family, no request, no sampling and no rule for building trees.
//! A forward pass walks a [`contract::ModelSpec`] and calls two things: products with stored weights
//! ([`linear`]) and the vector functions of [`kernels`], both chosen once at start. Choosing the scalar ones
//! gives the oracle.
//!
//! Start with [`mod@reference`] for what is computed, then `forward` for the walk, then `runner` for the calls.

mod blocks;
mod check;
mod device;
pub mod dispatch;
mod draft;
mod forward;
#[cfg(feature = "inspect")]
mod inspect;
pub mod kernels;
pub mod linear;
pub mod matmul;
mod memory;
pub mod reference;
mod runner;
mod scratch;
pub mod simd;
mod snapshot;
mod snapshot_pages;
mod state;
pub mod thread_pool;
mod weights;

pub use device::{CpuBackend, CpuOptions};
#[cfg(feature = "inspect")]
pub use inspect::InspectedRunner;
