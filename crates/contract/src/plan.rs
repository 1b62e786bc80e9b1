//! What is opened on a device, what that will cost, and what came of it.

use std::sync::Arc;

use crate::{DraftPlan, ModelSpec, QuantType, WeightSource};

/// Everything a device needs to open one loaded set. All parts open together, because a draft reads the
/// target's features, embedding and head on the device.
#[derive(Clone)]
pub struct OpenPlan {
    /// What the model is.
    pub target: Arc<ModelSpec>,
    /// Where its bytes are.
    pub weights: Arc<dyn WeightSource>,
    /// What proposes tokens, if anything does.
    pub draft: Option<DraftPlan>,
    /// How keys and values are stored.
    pub kv: KvFormats,
    /// How much of everything.
    pub limits: Limits,
    /// Whether bits must not depend on how a text is computed: a tree gives what its tokens give one by one, a sequence
    /// the same beside others as alone, and a prompt the same wherever it is cut
    /// ([`RunnerInfo::prefill_align`]). A device on which that is always so has nothing to choose.
    pub batch_invariant: bool,
}

/// Storage of cached keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvFormats {
    /// Keys.
    pub k: KvFormat,
    /// Values.
    pub v: KvFormat,
}

/// A storage format of cached rows, by the name users type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// Single precision: nothing is lost, which is what an oracle needs.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 32 signed bytes and a half scale.
    Q8_0,
    /// 32 nibbles and a half scale.
    Q4_0,
    /// 32 nibbles, a half scale and a half minimum.
    Q4_1,
    /// 32 five-bit values and a half scale.
    Q5_0,
    /// 32 five-bit values, a half scale and a half minimum.
    Q5_1,
    /// 3.5 bits a value: rotated, eight-level codebook.
    Tq3_0,
}

impl KvFormat {
    /// All formats, by falling size.
    pub const ALL: [KvFormat; 9] = [
        KvFormat::F32,
        KvFormat::F16,
        KvFormat::Bf16,
        KvFormat::Q8_0,
        KvFormat::Q5_1,
        KvFormat::Q5_0,
        KvFormat::Q4_1,
        KvFormat::Q4_0,
        KvFormat::Tq3_0,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::F16 => "f16",
            KvFormat::Bf16 => "bf16",
            KvFormat::Q8_0 => "q8_0",
            KvFormat::Q5_1 => "q5_1",
            KvFormat::Q5_0 => "q5_0",
            KvFormat::Q4_1 => "q4_1",
            KvFormat::Q4_0 => "q4_0",
            KvFormat::Tq3_0 => "tq3_0",
        }
    }

    /// The block format that rows are stored in; `None` for TQ3_0 ([`crate::quant::tq3`]), which is for rows only.
    pub fn block_type(self) -> Option<QuantType> {
        Some(match self {
            KvFormat::F32 => QuantType::F32,
            KvFormat::F16 => QuantType::F16,
            KvFormat::Bf16 => QuantType::BF16,
            KvFormat::Q8_0 => QuantType::Q8_0,
            KvFormat::Q5_1 => QuantType::Q5_1,
            KvFormat::Q5_0 => QuantType::Q5_0,
            KvFormat::Q4_1 => QuantType::Q4_1,
            KvFormat::Q4_0 => QuantType::Q4_0,
            KvFormat::Tq3_0 => return None,
        })
    }

    /// Whether values are stored as codes with a scale: what gains from being turned first
    /// ([`crate::quant::hadamard`]).
    pub fn is_quantized(self) -> bool {
        !matches!(self, KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16)
    }

    /// Bytes of `values` consecutive values, a multiple of 32.
    pub fn bytes(self, values: usize) -> usize {
        let per_32 = match self {
            KvFormat::F32 => 128,
            KvFormat::F16 | KvFormat::Bf16 => 64,
            KvFormat::Q8_0 => 34,
            KvFormat::Q5_1 => 24,
            KvFormat::Q5_0 => 22,
            KvFormat::Q4_1 => 20,
            KvFormat::Q4_0 => 18,
            KvFormat::Tq3_0 => 14,
        };
        values / 32 * per_32
    }
}

/// How much a runner must be able to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences open at once.
    pub sequences: usize,
    /// The longest sequence, in committed tokens. Tree nodes have room beyond it.
    pub context: usize,
    /// Nodes of the widest tree, at most [`Tree::MAX_NODES`](crate::Tree::MAX_NODES).
    pub tree_nodes: usize,
    /// Tokens of the longest prefill call.
    pub prefill_chunk: usize,
    /// Tokens that all sequences hold together; `None` for as many as all of them at full length. Whatever is said
    /// here, one sequence may have its full length, and no more is set aside than all of them could use: [`KvPool::of`].
    pub pool: Option<usize>,
}

/// The room that sequences share for their keys and values: pages, taken as a sequence grows and given back when it is
/// closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPool {
    /// Pages in all.
    pub pages: usize,
    /// Positions of a page.
    pub page_size: usize,
}

impl KvPool {
    /// The pool that limits mean, in pages of `page` positions.
    pub fn for_limits(limits: Limits, page_size: usize) -> KvPool {
        let each = limits.max_pages_per_sequence(page_size);
        let all = each.saturating_mul(limits.sequences);
        KvPool {
            pages: limits.pool.map_or(all, |tokens| {
                // Below one sequence nobody could ever go on, above all of them nobody could use it.
                tokens.div_ceil(page_size).clamp(each, all.max(each))
            }),
            page_size,
        }
    }

    /// Tokens that all sequences may hold together, the nodes of their trees included.
    pub fn tokens(&self) -> usize {
        self.pages.saturating_mul(self.page_size)
    }
}

impl Limits {
    /// Tokens that all sequences hold together, to within a page.
    pub fn pool_tokens(&self) -> usize {
        KvPool::for_limits(*self, 1).tokens()
    }

    /// Pages of `page` positions that the longest sequence takes: the context and the nodes of a tree beyond it.
    pub fn max_pages_per_sequence(&self, page_size: usize) -> usize {
        self.context
            .saturating_add(self.tree_nodes)
            .div_ceil(page_size)
    }
}

/// What a device is, as far as it can be told before anything is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The name users type, such as `cpu` or `cuda:0`.
    pub id: String,
    /// The hardware's own name.
    pub name: String,
    /// What of it will be used: threads, instruction sets, architecture.
    pub features: Vec<String>,
    /// Memory in all, in bytes.
    pub total_bytes: u64,
    /// Memory free now, in bytes.
    pub free_bytes: u64,
}

/// Bytes that opening a plan will take, by purpose.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryPlan {
    /// Weights, in the device's own layout; bytes read in place from a mapped file are not counted.
    pub weights_bytes: u64,
    /// Weights read in place from the mapped file.
    pub mapped_bytes: u64,
    /// Cached keys and values: the whole pool.
    pub kv_bytes: u64,
    /// Recurrent states and windows of all sequences.
    pub state_bytes: u64,
    /// Scratch: activations, pending tree work, logits.
    pub scratch_bytes: u64,
    /// All of the draft: weights, cached keys and values of all sequences, scratch.
    pub draft_bytes: u64,
    /// What the device's driver takes beside all that: code, graphs, local memory. An upper bound.
    pub driver_bytes: u64,
    /// Page-locked host memory at its peak, while weights are loaded; not part of the device's memory.
    pub pinned_bytes: u64,
}

impl MemoryPlan {
    /// Bytes of the device's memory that will be taken in all.
    pub fn total_bytes(&self) -> u64 {
        self.weights_bytes
            + self.kv_bytes
            + self.state_bytes
            + self.scratch_bytes
            + self.draft_bytes
            + self.driver_bytes
    }
}

/// How far loading has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of weights made ready.
    pub done_bytes: u64,
    /// Bytes of weights in all.
    pub total_bytes: u64,
}

/// What an opened runner is.
#[derive(Debug, Clone, PartialEq)]
pub struct RunnerInfo {
    /// The device it runs on.
    pub device: DeviceInfo,
    /// Length of a logits row.
    pub vocab: usize,
    /// What it was opened with.
    pub limits: Limits,
    /// What its sequences share.
    pub pool: KvPool,
    /// Storage of keys and values.
    pub kv: KvFormats,
    /// Identity of the target.
    pub model: crate::ModelHash,
    /// Positions the draft fills in one pass ([`DraftSpec::depth`](crate::DraftSpec::depth)), or `None` without
    /// a draft; then `draft` must not be called.
    pub draft_depth: Option<usize>,
    /// Whether a node of a tree gives bit for bit what its token gives alone, and so drafting changes no text.
    pub batch_invariant: bool,
    /// Prefill gives the same bits however it is cut, as long as cuts fall on multiples of this many tokens.
    pub prefill_align: usize,
    /// Bytes in use, by purpose.
    pub memory: MemoryPlan,
}
