//! Mixtures of experts: their keys, and the feed-forward of a block.

use contract::{
    DenseSpec, ExpertGateUp, FeedForward, GateActivation, MoeSpec, SharedExpertSpec, WeightRef,
};

use super::{Common, product};
use crate::ModelError;
use crate::names::{
    EXPERT_DOWN, EXPERT_GATE, EXPERT_GATE_UP, EXPERT_UP, ROUTER, SHARED_DOWN, SHARED_FACTOR,
    SHARED_GATE, SHARED_UP,
};
use crate::reader::{BlockReader, Reader};

const COUNT: &str = "expert_count";
const USED: &str = "expert_used_count";
const WIDTH: &str = "expert_feed_forward_length";
const SHARED_WIDTH: &str = "expert_shared_feed_forward_length";
const SCALE: &str = "expert_weights_scale";
const DENSE_WIDTH: &str = "feed_forward_length";

/// What a family's blocks have beside the router and the experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SharedExpert {
    /// Nothing.
    None,
    /// An expert of every row, behind a gate.
    Gated,
}

/// The keys of a mixture of experts.
pub(super) struct ExpertKeys {
    n_experts: usize,
    weights_scale: f32,
    shared: SharedExpert,
    /// By block: experts per row, channels of an expert, channels of the shared expert.
    blocks: Vec<BlockCounts>,
}

struct BlockCounts {
    n_used: usize,
    width: usize,
    shared_width: usize,
}

impl ExpertKeys {
    pub(super) fn read(
        reader: &Reader<'_>,
        common: &Common,
        shared: SharedExpert,
    ) -> Result<ExpertKeys, ModelError> {
        let n_experts = reader.count(COUNT)?;
        let n_used = common.per_block(reader, USED)?;
        let widths = expert_widths(reader, common, &n_used)?;
        let shared_widths = match shared {
            SharedExpert::None => widths.clone(),
            SharedExpert::Gated => common.per_block_or(reader, SHARED_WIDTH, &widths)?,
        };
        let counts = n_used.into_iter().zip(widths).zip(shared_widths);
        let blocks = counts
            .enumerate()
            .map(|(block, ((n_used, width), shared_width))| {
                if !(1..=n_experts).contains(&n_used) {
                    let detail = format!(
                        "{n_used} experts per token in block {block}, 1 to {n_experts} ({COUNT}) \
                     are expected"
                    );
                    return Err(reader.refuse_key(USED, detail));
                }
                for (key, width) in [(WIDTH, width), (SHARED_WIDTH, shared_width)] {
                    if width == 0 {
                        let detail = format!("0 channels in block {block}, at least 1 is expected");
                        return Err(reader.refuse_key(key, detail));
                    }
                }
                Ok(BlockCounts {
                    n_used,
                    width,
                    shared_width,
                })
            });
        Ok(ExpertKeys {
            n_experts,
            weights_scale: weights_scale(reader)?,
            shared,
            blocks: blocks.collect::<Result<_, ModelError>>()?,
        })
    }

    /// The feed-forward of a block.
    pub(super) fn feed_forward(
        &self,
        block: &BlockReader<'_>,
        hidden: usize,
    ) -> Result<FeedForward, ModelError> {
        let (n, shared) = (self.n_experts, self.shared);
        let counts = &self.blocks[block.index];
        let width = counts.width;
        let router = router(block, n, hidden)?;
        let gate_up = if block.has(EXPERT_GATE_UP) && shared == SharedExpert::Gated {
            for separate in [EXPERT_GATE, EXPERT_UP] {
                if block.has(separate) {
                    let detail = format!("stored beside {EXPERT_GATE_UP}; keep one of both");
                    return Err(block.refuse(separate, &detail));
                }
            }
            let rows = product(block.reader, &[2, width], WIDTH)?;
            ExpertGateUp::Fused(block.stack(EXPERT_GATE_UP, n, (rows, hidden))?)
        } else {
            ExpertGateUp::Separate {
                gate: block.stack(EXPERT_GATE, n, (width, hidden))?,
                up: block.stack(EXPERT_UP, n, (width, hidden))?,
            }
        };
        Ok(FeedForward::Experts(Box::new(MoeSpec {
            n_experts: n,
            n_used: counts.n_used,
            weights_scale: self.weights_scale,
            activation: GateActivation::Silu,
            router,
            gate_up,
            down: block.stack(EXPERT_DOWN, n, (hidden, width))?,
            shared: match shared {
                SharedExpert::None => None,
                SharedExpert::Gated => Some(SharedExpertSpec {
                    gate: block.vector(SHARED_FACTOR, hidden)?,
                    ffn: DenseSpec {
                        activation: GateActivation::Silu,
                        gate: block.matrix(SHARED_GATE, counts.shared_width, hidden)?,
                        up: block.matrix(SHARED_UP, counts.shared_width, hidden)?,
                        down: block.matrix(SHARED_DOWN, hidden, counts.shared_width)?,
                    },
                }),
            },
        })))
    }
}

/// The router's matrix, of one row per expert.
fn router(
    block: &BlockReader<'_>,
    n_experts: usize,
    hidden: usize,
) -> Result<WeightRef, ModelError> {
    let info = block.reader.file.tensor(&block.name(ROUTER));
    let rows = info
        .and_then(|info| info.dims().get(1).copied())
        .unwrap_or(1);
    if info.is_some() && rows != n_experts as u64 {
        let detail = format!("a router of {rows} experts, but {COUNT} is {n_experts}");
        return Err(block.refuse(ROUTER, &detail));
    }
    block.matrix(ROUTER, n_experts, hidden)
}

/// The channels of an expert by block: their key, or else the dense width shared by the experts of
/// a row.
fn expert_widths(
    reader: &Reader<'_>,
    common: &Common,
    n_used: &[usize],
) -> Result<Vec<usize>, ModelError> {
    if reader.has_key(WIDTH) || !reader.has_key(DENSE_WIDTH) {
        return common.per_block(reader, WIDTH);
    }
    let dense = common.per_block(reader, DENSE_WIDTH)?;
    let widths = dense.into_iter().zip(n_used);
    widths
        .map(|(dense, &n_used)| match dense.checked_div(n_used) {
            Some(width) if width * n_used == dense => Ok(width),
            _ => {
                let detail = format!("{dense} channels cannot be shared by {n_used} experts");
                Err(reader.refuse_key(DENSE_WIDTH, detail))
            }
        })
        .collect()
}

/// The factor on the experts' weights; files write 0 for none.
fn weights_scale(reader: &Reader<'_>) -> Result<f32, ModelError> {
    match reader.number(SCALE)? {
        None => Ok(1.0),
        Some(0.0) => Ok(1.0),
        Some(scale) if scale > 0.0 && (scale as f32).is_finite() => Ok(scale as f32),
        Some(scale) => {
            let detail = format!("{scale} where a positive float is expected");
            Err(reader.refuse_key(SCALE, detail))
        }
    }
}
