//! How a GPU is used.

use std::time::Duration;

use crate::compile;
use crate::numerics::Numerics;

/// Limits and switches of one GPU; the defaults are what a server uses.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Maximum memory, in bytes; `None` for all free memory.
    pub vram_limit: Option<u64>,
    /// Maximum memory of a model before experts move to host memory, in bytes; `None` for
    /// [`Options::vram_limit`], and without one all experts lie on the device.
    pub expert_room: Option<u64>,
    /// Experts of each layer on the device, for tests; `None` for as many as fit.
    pub expert_slots: Option<usize>,
    /// Run launch by launch instead of as captured graphs, to find faults.
    pub eager: bool,
    /// Prefill prompts as decode steps over single-branch trees instead of in chunks, to find
    /// faults.
    pub prefill_as_steps: bool,
    /// Fill everything but weights with NaNs before the first use, for tests.
    pub poison: bool,
    /// Allocate KV pages in a scattered order, for tests.
    pub scatter_pages: bool,
    /// Compile attention so that trees may have windows ([`contract::AttentionWindow`]); without, a
    /// tree with one is refused.
    pub windows: bool,
    /// Run small models with the kernels of large ones, without the gemv of single-row steps, for
    /// tests.
    pub as_large_model: bool,
    /// Run each GEMM of a layer as a launch of its own in decode steps, to compare with fused
    /// layers.
    pub separate_gemms: bool,
    /// Numerics of decode steps where the plan does not require batch-invariant ones; `None` for
    /// the default of this GPU and model.
    pub numerics: Option<Numerics>,
    /// Tokens that drafts with the target's LM head propose from, the first of the vocabulary, at
    /// least 64; `None` for the default, which is all tokens of a small vocabulary.
    pub draft_vocab: Option<usize>,
    /// Refuse to run a pipeline stage above one on a GPU whose memory this GPU does not reach.
    pub require_peer_access: bool,
    /// Hand rows of pipeline stages over through host memory wherever the GPUs are, for tests.
    pub rows_through_host: bool,
    /// How long a shard of a tensor split waits for the other's sums before its GPU is lost, for
    /// tests; `None` for 20 s.
    pub shard_watchdog: Option<Duration>,
    /// Whether steps of one sequence of small models, of up to 16 rows, are one persistent launch.
    pub one_launch: OneLaunch,
    /// Plan as if all memory were free: for a GPU that is not in this machine.
    pub assume_free: bool,
    /// How kernels are compiled.
    pub compile: compile::Options,
}

/// Whether decode steps of one sequence run as one persistent launch where the model has one: of
/// one row (`one_launch/one_launch.cu`), and of 2 to 16 nodes (`one_launch/several_rows.cu`). A
/// token's bits are the same either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OneLaunch {
    /// Where it has been measured to be faster: small models without an MTP head, and without a
    /// draft that reads their layers, on GPUs before compute capability 9.0, whose launches do not
    /// overlap.
    #[default]
    Auto,
    /// Wherever there is one: for all layers and the LM head, or in steps of one row up to the
    /// first launch that it does not have. It is made of the launches of single GEMMs, so layers
    /// are not fused then.
    On,
    /// The same; one launch prints where its time goes.
    Clocks,
    /// Never.
    Off,
}
