//! The CUDA device.
//!
//! Purpose: running a model on an NVIDIA GPU behind [`contract::Runner`].
//! What it must not know: families, requests, sampling, tree-building rules.
//!
//! From the bottom up: [`driver`] is the GPU, its memory and its streams. [`compile`] turns the
//! embedded sources into loaded modules. [`launch`] defines for each kernel what is compiled and
//! launched for given shapes. `libcuda` and `libnvrtc` are opened at run time, so this crate builds
//! and runs on machines without a GPU; [`probe`] lists the GPUs. Above them, `weights` and `state`
//! lay out device memory, and `plan` turns a model into lists of launches. `exec` runs such a list
//! eagerly or as a graph. `runner` implements the device interface. Start with [`launch`], which
//! needs no GPU to read.

mod arch;
mod backend;
mod check;
pub mod compile;
pub mod cost;
mod deferred_draft;
pub mod driver;
mod exec;
mod experts;
mod gpu_class;
mod gpu_props;
#[cfg(feature = "inspect")]
mod inspect;
pub mod launch;
mod memory;
mod meter;
mod numerics;
mod opened_part;
mod options;
pub mod pack;
mod pages;
mod peak_bandwidth;
mod pinned;
mod plan;
mod planned_kernels;
mod probe;
mod runner;
mod scorer;
mod snapshot;
mod state;
mod step;
pub mod timing;
mod weights;

pub use backend::CudaBackend;
pub use gpu_class::GpuClass;
pub use gpu_props::GpuProps;
#[cfg(feature = "inspect")]
pub use inspect::InspectedRunner;
pub use meter::{Meter, Reading};
pub use numerics::Numerics;
pub use options::{OneLaunch, Options};
pub use peak_bandwidth::read_bandwidth;
pub use plan::explain::ExplainedKernel;
pub use plan::select;
pub use probe::{GpuInfo, NoGpuReason, RunAsError, driver_version, probe};
