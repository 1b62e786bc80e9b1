//! What a decode step takes of a GPU, counted from machine code, for GPUs that are not here.
//!
//! [`listing`] reads what a disassembler prints, [`Sheet`] puts it together with the launches of a
//! plan, and [`step_times`] turns it into milliseconds by published rates and three fitted
//! constants.

mod counts;
pub mod listing;
mod model;
mod prompt;
mod rates;
mod sheet;

pub use counts::Counts;
pub use model::{Fit, MeasuredStep, StepTimes, launch_times, step_times};
pub use prompt::{PromptFit, PromptSheet, PromptTimes, TiledGemm};
pub use rates::{GpuRates, H100, H200, RTX_3090, RTX_4090, RTX_5090};
pub use sheet::{CostError, LaunchCost, Products, Sheet, UnitCode};
