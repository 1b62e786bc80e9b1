//! The CUDA device.
//!
//! What it is for: running a model on an NVIDIA card behind [`contract::Runner`].
//! What it must not know: families, requests, sampling, tree-building rules.
//!
//! As yet it only looks: [`probe`] opens the driver if there is one and says what it found, and
//! [`CudaBackend`] refuses to open a model, by name. `libcuda` is opened at run time, so this
//! crate builds and runs on machines without a card.
//! Start with [`probe`].

mod backend;
mod probe;

pub use backend::CudaBackend;
pub use probe::{Absence, Card, probe};
