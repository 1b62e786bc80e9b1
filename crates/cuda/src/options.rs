//! How a GPU is used.

use crate::compile;
use crate::numerics::Numerics;

/// Limits and switches of one GPU; the defaults are what a server uses.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The most memory to take, in bytes; `None` for all that is free.
    pub vram_limit: Option<u64>,
    /// Run launch by launch instead of as captured graphs, to find faults.
    pub eager: bool,
    /// Read prompts as chains of tree nodes instead of in chunks, to find faults.
    pub chains: bool,
    /// Fill everything but weights with NaNs before the first use, for tests.
    pub poison: bool,
    /// Give pages of keys and values out in a scattered order, for tests.
    pub scatter: bool,
    /// Compile attention so that trees may have windows ([`contract::AttentionWindow`]); without, a
    /// tree with one is refused.
    pub windows: bool,
    /// Run small models as large ones run, without launches of their own for steps of one row, for
    /// tests.
    pub as_large: bool,
    /// Numerics of decode steps where the plan does not require batch-invariant ones; `None` for
    /// the default of this GPU and model.
    pub numerics: Option<Numerics>,
    /// Plan as if all memory were free: for a GPU that is not in this machine.
    pub unseen: bool,
    /// How kernels are compiled.
    pub compile: compile::Options,
}
