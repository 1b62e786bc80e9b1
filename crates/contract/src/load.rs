//! How a model is opened on a device, the memory that this takes, and the properties of the result.

use std::sync::Arc;

use crate::{DraftLoadConfig, KvFormats, ModelSpec, WeightSource};

/// Everything a device needs to open a model. Target and draft open together, because the draft
/// shares the target's hidden states, embedding and LM head.
#[derive(Clone)]
pub struct LoadConfig {
    /// The target model.
    pub target: Arc<ModelSpec>,
    /// Source of its weights.
    pub weights: Arc<dyn WeightSource>,
    /// The draft model, if any.
    pub draft: Option<DraftLoadConfig>,
    /// KV cache types.
    pub kv: KvFormats,
    /// Limits of the runner.
    pub limits: Limits,
    /// Whether results must be batch-invariant: bit-identical in a tree and token by token, in a
    /// batch and alone, and for any split of a prompt ([`RunnerInfo::prefill_align`]). Ignored by
    /// devices that are always batch-invariant.
    pub batch_invariant: bool,
}

/// Limits that a runner must support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences open at once.
    pub sequences: usize,
    /// The longest sequence in committed tokens. Tree nodes come on top.
    pub context: usize,
    /// Maximum number of nodes of a tree, at most [`Tree::MAX_NODES`](crate::Tree::MAX_NODES).
    pub tree_nodes: usize,
    /// Maximum number of tokens of a prefill call.
    pub prefill_chunk: usize,
    /// KV tokens of all sequences together; `None` for all sequences at full length.
    /// [`KvPool::for_limits`] clamps it to at least one full sequence and at most all of them.
    pub pool_tokens: Option<usize>,
}

/// The KV page pool that all sequences share. A sequence takes pages as it grows and returns them
/// when it is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPool {
    /// Number of pages.
    pub pages: usize,
    /// Positions per page.
    pub page_size: usize,
}

impl KvPool {
    /// The pool for these limits, in pages of `page_size` positions.
    pub fn for_limits(limits: Limits, page_size: usize) -> KvPool {
        let each = limits.max_pages_per_sequence(page_size);
        let all = each.saturating_mul(limits.sequences);
        KvPool {
            pages: limits.pool_tokens.map_or(all, |tokens| {
                // Fewer pages cannot finish any sequence; more pages are never used.
                tokens.div_ceil(page_size).clamp(each, all.max(each))
            }),
            page_size,
        }
    }

    /// Tokens that all sequences can hold together, tree nodes included.
    pub fn tokens(&self) -> usize {
        self.pages.saturating_mul(self.page_size)
    }
}

impl Limits {
    /// KV tokens of all sequences together, rounded to a page.
    pub fn clamped_pool_tokens(&self) -> usize {
        KvPool::for_limits(*self, 1).tokens()
    }

    /// Maximum number of pages of one sequence: its context plus the nodes of one tree.
    pub fn max_pages_per_sequence(&self, page_size: usize) -> usize {
        self.context
            .saturating_add(self.tree_nodes)
            .div_ceil(page_size)
    }
}

/// Properties of a device before a model is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The user-visible id, such as `cpu` or `cuda:0`.
    pub id: String,
    /// The hardware's name.
    pub name: String,
    /// Features in use: threads, instruction sets, architecture.
    pub features: Vec<String>,
    /// What kind of GPU it is and what was measured on it; `None` for other devices.
    pub class: Option<String>,
    /// Total memory in bytes.
    pub total_bytes: u64,
    /// Free memory in bytes.
    pub free_bytes: u64,
}

/// Bytes that opening a model takes, by purpose.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryPlan {
    /// Weights in the device's layout. Excludes weights used in place from a mapped file.
    pub weights_bytes: u64,
    /// Weights used in place from the mapped file.
    pub mapped_bytes: u64,
    /// The KV page pool.
    pub kv_bytes: u64,
    /// Delta states and convolution windows of all sequences.
    pub state_bytes: u64,
    /// Scratch: activations, pending trees, logits.
    pub scratch_bytes: u64,
    /// The draft model: weights, KV cache of all sequences, scratch.
    pub draft_bytes: u64,
    /// Memory that the driver takes in addition: code, graphs, local memory. An upper bound.
    pub driver_bytes: u64,
    /// Peak page-locked host memory while weights are loaded. Not device memory.
    pub pinned_bytes: u64,
    /// Where experts lie, if not all of them are on the device.
    pub experts: Option<ExpertPlacement>,
}

/// A mixture of experts that does not fit a device: a part of every layer's experts lies there, the
/// others are read from host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertPlacement {
    /// Layers with experts.
    pub layers: usize,
    /// Experts of such a layer.
    pub n_experts: usize,
    /// How many of them lie on the device.
    pub on_device: usize,
    /// Bytes of those that do not, in all layers.
    pub outside_bytes: u64,
    /// Predicted time of a decode step of one row whose experts are chosen uniformly, in
    /// microseconds.
    pub step_us: u64,
    /// The rate of the bus that the prediction assumes, in bytes per second.
    pub bus_bytes_per_s: u64,
}

impl MemoryPlan {
    /// Device memory in total.
    pub fn total_bytes(&self) -> u64 {
        self.weights_bytes
            + self.kv_bytes
            + self.state_bytes
            + self.scratch_bytes
            + self.draft_bytes
            + self.driver_bytes
    }

    /// The sum of two plans, by purpose. Experts of one device at most lie apart.
    #[must_use]
    pub fn plus(&self, other: &MemoryPlan) -> MemoryPlan {
        MemoryPlan {
            weights_bytes: self.weights_bytes + other.weights_bytes,
            mapped_bytes: self.mapped_bytes + other.mapped_bytes,
            kv_bytes: self.kv_bytes + other.kv_bytes,
            state_bytes: self.state_bytes + other.state_bytes,
            scratch_bytes: self.scratch_bytes + other.scratch_bytes,
            draft_bytes: self.draft_bytes + other.draft_bytes,
            driver_bytes: self.driver_bytes + other.driver_bytes,
            pinned_bytes: self.pinned_bytes + other.pinned_bytes,
            experts: self.experts.or(other.experts),
        }
    }
}

impl DeviceInfo {
    /// Whether all of it is the CPU: `cpu`, or a list such as `cpu,cpu`.
    pub fn is_cpu(&self) -> bool {
        self.id.split(',').all(|id| id == "cpu")
    }
}

/// Progress of loading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Weight bytes loaded.
    pub done_bytes: u64,
    /// Weight bytes in total.
    pub total_bytes: u64,
}

/// Limits of drafting with a multi-token-prediction head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MtpInfo {
    /// Rows that a sequence may draft from one root, the root row included.
    pub max_rows: usize,
    /// Tokens of the longest drafted path, which is the number of rows on it.
    pub max_depth: usize,
    /// Tokens that it proposes, which are the first of the vocabulary; `None` for all.
    pub vocab: Option<usize>,
}

impl MtpInfo {
    /// The limits of every device: as many rows as a tree has nodes, seven tokens deep.
    pub const DEFAULT: MtpInfo = MtpInfo {
        max_rows: crate::Tree::MAX_NODES,
        max_depth: 7,
        vocab: None,
    };
}

/// Properties of an opened runner.
#[derive(Debug, Clone, PartialEq)]
pub struct RunnerInfo {
    /// The device it runs on.
    pub device: DeviceInfo,
    /// Length of a logits row.
    pub vocab: usize,
    /// Limits that it supports: those of its [`LoadConfig`].
    pub limits: Limits,
    /// The KV page pool of its sequences.
    pub pool: KvPool,
    /// KV cache types.
    pub kv: KvFormats,
    /// Identity of the target model.
    pub model: crate::ModelHash,
    /// Positions that the draft fills in one pass ([`DraftSpec::depth`](crate::DraftSpec::depth));
    /// `None` without a draft, and then `draft` must not be called.
    pub draft_depth: Option<usize>,
    /// The draft's narrow pass, which serves calls of up to its depth
    /// ([`DraftSpec::narrow`](crate::DraftSpec::narrow)).
    pub narrow_draft: Option<crate::NarrowDraft>,
    /// Limits of [`Runner::draft_mtp`](crate::Runner::draft_mtp); `None` without a
    /// multi-token-prediction head, and then it must not be called.
    pub mtp: Option<MtpInfo>,
    /// Whether results are batch-invariant: a tree node equals its token decoded alone, bit for
    /// bit, so speculation changes no text.
    pub batch_invariant: bool,
    /// Whether [`Runner::begin_verify`](crate::Runner::begin_verify) may be called: some devices
    /// then work on trees while others draft, or verify other trees.
    pub begins_verify: bool,
    /// Splits of a prompt at multiples of this many tokens do not change a bit.
    pub prefill_align: usize,
    /// Bytes in use, by purpose.
    pub memory: MemoryPlan,
}
