//! Mixtures of experts: routing, products grouped by expert, and the sum of each row's experts.
//!
//! [`decode`] has the launches of a step, [`prefill`] those of a prompt's chunk.
//! [`contract::MoeSpec`] has the formula.

pub mod decode;
pub mod prefill;

use super::CompileUnit;
use crate::gpu_props::GpuProps;
use crate::launch::gemm::small_batch::gemm_shared_bytes;
use crate::pack::{BLOCK_ROWS, M16_ROWS, WeightKind};

/// Most experts of a layer.
pub const MAX_EXPERTS: usize = 512;
/// Most experts of a row.
pub const MAX_USED: usize = 10;

/// Sizes of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeShape {
    /// Values of a row of the model, a multiple of 128.
    pub width: usize,
    /// Experts, at most [`MAX_EXPERTS`].
    pub n_experts: usize,
    /// Experts of a row, at most [`MAX_USED`].
    pub n_used: usize,
    /// Channels of an expert, a multiple of 128.
    pub ffn: usize,
    /// Channels of the shared expert, a multiple of 128, if there is one.
    pub shared_ffn: Option<usize>,
}

impl MoeShape {
    fn has_shared(self) -> bool {
        self.shared_ffn.is_some()
    }

    /// Adds the defines that most kernels share.
    fn define(self, unit: CompileUnit) -> CompileUnit {
        unit.define("WIDTH", self.width)
            .define("EXPERTS", self.n_experts)
            .define("USED", self.n_used)
            .define("SHARED", u8::from(self.has_shared()))
    }

    /// Most groups of up to `size` rows of one expert that `rows` rows can need.
    fn max_groups(self, rows: usize, size: usize) -> usize {
        let pairs = rows * self.n_used;
        pairs.min(self.n_experts + pairs / size)
    }

    fn check(self) {
        let widths = [self.width, self.ffn, self.shared_ffn.unwrap_or(BLOCK_ROWS)];
        assert!(
            widths.iter().all(|width| width.is_multiple_of(BLOCK_ROWS))
                && (1..=MAX_EXPERTS).contains(&self.n_experts)
                && (1..=MAX_USED.min(self.n_experts)).contains(&self.n_used),
            "{self:?}"
        );
    }
}

/// What routes a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Router {
    /// f32 `[n_experts][width]`.
    pub weight: u64,
    /// f32 `[width]` of the shared expert; 0 without one.
    pub shared_gate: u64,
    /// Factor on the experts' weights.
    pub scale: f32,
}

/// One matrix of every expert, packed as one stack, or one of the shared expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertMatrix {
    /// A packed kind.
    pub kind: WeightKind,
    /// Address; with an [`ExpertTable`], the matrix's offset behind the address of an expert.
    pub weight: u64,
}

/// Experts that lie apart, on the device or in page-locked host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertTable {
    /// Addresses of experts, u64 `[n_experts]`.
    pub addresses: u64,
    /// How often steps have read each expert, u32 `[n_experts]`.
    pub uses: u64,
}

/// Gate, up and down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertMatrices {
    /// `[n_experts * ffn][width]`.
    pub gate: ExpertMatrix,
    /// As `gate`.
    pub up: ExpertMatrix,
    /// `[n_experts * width][ffn]`.
    pub down: ExpertMatrix,
    /// Where experts lie; `None` if each matrix is one stack.
    pub table: Option<ExpertTable>,
}

/// Where the sum of each row's experts goes, f32 `[rows][width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertSum {
    /// Added to the residual stream here.
    AddTo(u64),
    /// Stored here, as the partial sums of a shard.
    Store(u64),
}

impl ExpertSum {
    fn address(self) -> u64 {
        match self {
            ExpertSum::AddTo(at) | ExpertSum::Store(at) => at,
        }
    }

    fn define(self, unit: CompileUnit) -> CompileUnit {
        match self {
            ExpertSum::AddTo(_) => unit,
            ExpertSum::Store(_) => unit.define("STORE", 1),
        }
    }
}

impl ExpertMatrices {
    fn define(&self, unit: CompileUnit) -> CompileUnit {
        unit.define("EXPERT_TABLE", u8::from(self.table.is_some()))
    }

    fn addresses(&self) -> u64 {
        self.table.map_or(0, |table| table.addresses)
    }
}

impl ExpertMatrix {
    /// `ExpertStack` of `moe/expert_weights.cuh`.
    fn words(self, rows: usize, cols: usize) -> [u64; 2] {
        assert!(self.kind != WeightKind::F32, "experts are packed");
        let tiles = (rows / M16_ROWS) as u64;
        [self.weight, tiles | (cols as u64) << 32]
    }
}

/// Bytes of one step of a tile that a warp multiplies at a time, and its values of K.
fn step(kind: WeightKind) -> (usize, usize) {
    match kind.slices() {
        2 => (kind.tile_bytes(), 256),
        _ => (2 * kind.tile_bytes(), 128),
    }
}

/// Bytes of a step of M tiles and of up to `rows` rows of its input.
fn step_bytes(kind: WeightKind, tiles: usize, rows: usize) -> usize {
    let (bytes, values) = step(kind);
    tiles * bytes + rows.min(decode::EXPERT_ROWS) * (2 * values + 16)
}

/// Shared memory of a block that its pipeline may take, with so many bytes of other uses.
fn ring_bytes(gpu: GpuProps, other: usize) -> usize {
    gemm_shared_bytes(gpu).saturating_sub(1024 + other)
}
