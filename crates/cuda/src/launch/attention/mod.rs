//! Attention over the paged cache: norm, rope and write; tree attention; compaction of accepted
//! rows.
//!
//! A layer of a decode step is [`qk_norm_rope_append`], [`tree`], [`combine`]; a layer of a prefill
//! chunk is [`qk_norm_rope_append`], [`prefill`](prefill()). `kernels/attention/kv_cache.cuh` has
//! the layout of the cache.

use contract::{KvFormat, RopePairs, RopeSpec};

mod decode;
pub mod kv_layout;
mod prefill;

pub(in crate::launch) use decode::tree_fixed_bytes;
pub use decode::{DecodeAttention, DecodeBuffers, DecodeKernel, Tile, combine, tree};
pub(crate) use decode::{KEYS_PER_TILE, STEP_ROWS};
pub use prefill::{KeptBlocks, PrefillAttention, prefill, prefill_block_sparse};

use super::{Args, CompileUnit, Launch};
use crate::gpu_props::GpuProps;
use crate::numerics::Numerics;

/// Positions of a page of the cache.
pub const PAGE: usize = 256;

/// One attention layer; layers of equal shape share their kernels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Values per head: 64, 128 or 256.
    pub head_dim: usize,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// Whether a gate follows each query head in the projection.
    pub gate: bool,
    /// Whether q and k are normed per head.
    pub normed: bool,
    /// Whether values go through a norm per head that has no weights.
    pub values_normed: bool,
    /// Storage of keys.
    pub k: KvFormat,
    /// Storage of values.
    pub v: KvFormat,
    /// Whether coarse formats are stored after a Hadamard rotation; TQ3_0 always is.
    pub rotated: bool,
    /// Epsilon of the head norms.
    pub eps: f32,
    /// Factor on `q · k`.
    pub scale: f32,
    /// A key at `k` is seen from `q` while `q - k < window`; 0 for all.
    pub window: usize,
    /// Which new rows a row sees.
    pub mask: Mask,
    /// Pages after which positions begin again on the first; 0 for no ring.
    pub ring_pages: usize,
}

/// Which rows of its own tree or block a row sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// Its ancestors and itself.
    Ancestors,
    /// All of them.
    Full,
    /// Those up to itself.
    Causal,
    /// Its ancestors and itself, among the rows of an `MtpStep` and those that its sequence drafted
    /// before.
    DraftedAncestors,
}

/// What the choice of attention kernels depends on besides shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionConfig {
    /// The hardware.
    pub gpu: GpuProps,
    /// Whether a tree node must have the bits of its token decoded alone.
    pub numerics: Numerics,
    /// Whether trees may have windows of their own ([`contract::AttentionWindow`]).
    pub tree_windows: bool,
}

/// One layer's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cache {
    /// Values of keys; [`kv_layout`] has their layout.
    pub k: u64,
    /// Scales of keys; unused by formats without.
    pub k_scale: u64,
    /// Values of values.
    pub v: u64,
    /// Scales of values.
    pub v_scale: u64,
    /// i32 `[slots][max_pages]`.
    pub page_table: u64,
    /// Pages of a slot.
    pub max_pages: usize,
}

/// What [`qk_norm_rope_append`] reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Projections {
    /// f32 `[rows][n_heads][head_dim, or twice that with a gate]`; 0 with no query heads.
    pub q: u64,
    /// f32 rows of `[n_kv_heads][head_dim]`.
    pub k: u64,
    /// As `k`.
    pub v: u64,
    /// Floats between rows of `k` and of `v`.
    pub kv_stride: usize,
    /// f32 `[head_dim]`; unused without norms.
    pub q_norm: u64,
    /// f32 `[head_dim]`.
    pub k_norm: u64,
    /// f64 `[rope.dims / 2]`: the inverse frequencies, as [`Shape::frequencies`] gives them.
    pub frequencies: u64,
    /// f32 of each projection's rows, added to `q`, `k` and `v` first; 0 for none.
    pub biases: [u64; 3],
}

/// Where rows belong in their sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Positions {
    /// Nodes of a `Step` at this address.
    Step(u64),
    /// Tokens of a `Chunk` at this address.
    Chunk(u64),
    /// Entries of the paths of a `Commit` at this address, one path after the other.
    Commit(u64),
    /// Rows of an `MtpStep` at this address, behind those that their sequences drafted before.
    Drafted(u64),
}

impl Shape {
    /// f64 `[rope.dims / 2]`: what a position is multiplied with. `factors` are divisors, as many,
    /// or none.
    pub fn frequencies(&self, factors: &[f32]) -> Vec<f64> {
        let RopeSpec {
            dims, theta, scale, ..
        } = self.rope;
        let factors = factors.iter().copied().map(f64::from);
        let factors = factors.chain(std::iter::repeat(1.0));
        (0..dims / 2)
            .map(|j| theta.powf(-2.0 * j as f64 / dims as f64) * scale)
            .zip(factors)
            .map(|(frequency, factor)| frequency / factor)
            .collect()
    }

    /// Adds the define of `kernels/attention/head_norm_rope.cuh` for the pairs of the rotation.
    pub(in crate::launch) fn rope_pairs(&self, unit: CompileUnit) -> CompileUnit {
        match self.rope.pairs {
            RopePairs::Halves => unit,
            RopePairs::Adjacent => unit.define("ROPE_ADJACENT", 1),
        }
    }

    /// Values between query heads in the projection.
    pub fn q_stride(&self) -> usize {
        self.head_dim * if self.gate { 2 } else { 1 }
    }

    fn check(&self) {
        assert!(
            matches!(self.head_dim, 64 | 128 | 256)
                && self.rope.dims.is_multiple_of(2)
                && self.rope.dims <= self.head_dim
                && self.n_kv_heads > 0
                && self.n_heads.is_multiple_of(self.n_kv_heads),
            "attention of {self:?}: the plan should have been refused"
        );
    }

    fn unit(&self, file: &'static str) -> CompileUnit {
        self.check();
        CompileUnit::new(file)
            .define("HEADS", self.n_heads)
            .define("KV_HEADS", self.n_kv_heads)
            .define("HEAD_DIM", self.head_dim)
            .define("K_FORMAT", number(self.k))
            .define("V_FORMAT", number(self.v))
            .define("KV_ROTATED", u32::from(self.rotated))
    }

    /// The defines of `kernels/attention/kv_range.cuh`.
    fn kv_range(&self, unit: CompileUnit, selected: &DecodeAttention) -> CompileUnit {
        let mask = match self.mask {
            Mask::Ancestors => 0,
            Mask::Full => 1,
            Mask::Causal => 2,
            Mask::DraftedAncestors => 3,
        };
        // Blocks of a draft have the window of their layer.
        let per_tree = selected.tree_windows && self.mask == Mask::Ancestors && self.window == 0;
        let window = if per_tree {
            "-1".to_owned()
        } else {
            self.window.to_string()
        };
        let unit = match selected.max_fixed_splits {
            Some(splits) => unit.define("MAX_FIXED_SPLITS", splits),
            None => unit,
        };
        unit.define("WINDOW", window)
            .define("MASK", mask)
            .define("SPLITS", selected.splits)
            .define(
                "FIXED_SPLITS",
                u32::from(selected.max_fixed_splits.is_some()),
            )
            .define("Q_STRIDE", self.q_stride())
    }

    fn pages(&self, cache: &Cache) -> [u64; 2] {
        [
            cache.page_table,
            cache.max_pages as u64 | (self.ring_pages as u64) << 32,
        ]
    }
}

/// What `kernels/attention/kv_cache.cuh` calls a format.
pub(in crate::launch) fn number(format: KvFormat) -> u32 {
    match format {
        KvFormat::F32 => 0,
        KvFormat::F16 => 1,
        KvFormat::Bf16 => 2,
        KvFormat::Q8_0 => 3,
        KvFormat::Q4_0 => 4,
        KvFormat::Q4_1 => 5,
        KvFormat::Q5_0 => 6,
        KvFormat::Q5_1 => 7,
        KvFormat::Tq3_0 => 8,
    }
}

/// Where [`qk_norm_rope_append`] writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AppendTarget {
    /// Keys and values.
    pub cache: Cache,
    /// Queries, f16 `[rows][n_heads][head_dim]`, while the projection stays as it is; with 0 they
    /// are changed in place.
    pub f16_queries: u64,
}

/// Norm and rope of queries and keys, and the write of keys and values.
pub fn qk_norm_rope_append(
    shape: &Shape,
    rows: usize,
    positions: Positions,
    from: Projections,
    to: AppendTarget,
) -> Launch {
    let AppendTarget { cache, f16_queries } = to;
    let (mode, header) = match positions {
        Positions::Step(at) => (0, at),
        Positions::Chunk(at) => (1, at),
        Positions::Commit(at) => (2, at),
        Positions::Drafted(at) => (3, at),
    };
    // Rows of a commit are context: keys and values only.
    let heads = if from.q == 0 { 0 } else { shape.n_heads };
    let mut unit = shape.unit("attention/qk_norm_rope_append.cu");
    unit.defines[0].1 = heads.to_string();
    let unit = unit
        .define("ROPE", shape.rope.dims)
        .define("QK_NORM", u32::from(shape.normed))
        .define("POSITIONS_FROM", mode)
        .define("Q_STRIDE", shape.q_stride())
        .define("KV_STRIDE", from.kv_stride)
        .define("Q_F16", u32::from(f16_queries != 0));
    let unit = if shape.values_normed {
        unit.define("VALUES_NORMED", 1)
    } else {
        unit
    };
    let unit = shape.rope_pairs(unit);
    let has_biases = from.biases != [0; 3];
    let unit = if has_biases {
        unit.define("BIASES", 1)
    } else {
        unit
    };
    let args = Args::new()
        .ptr(header)
        .ptr(from.q)
        .ptr(from.k)
        .ptr(from.v)
        .ptr(from.q_norm)
        .ptr(from.k_norm)
        .ptr(from.frequencies)
        .ptr(f16_queries)
        .f32(shape.eps)
        .words(&[cache.k, cache.k_scale])
        .words(&[cache.v, cache.v_scale])
        .words(&shape.pages(&cache));
    let args = match from.biases {
        [0, 0, 0] => args,
        biases => biases.into_iter().fold(args, Args::ptr),
    };
    Launch {
        entry: "attn_qk_norm_rope_append",
        unit,
        grid: [
            (heads + 2 * shape.n_kv_heads).div_ceil(4) as u32,
            rows as u32,
            1,
        ],
        block: [128, 1, 1],
        shared: 0,
        args,
        cooperative: false,
        overlap: true,
    }
}

/// The cache of a group of layers in four planes: values of keys, scales of keys, values of values,
/// scales of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupCache {
    /// Layers of the group.
    pub n_layers: usize,
    /// Address in the first layer; 0 for a plane that the format does not have.
    pub base: [u64; 4],
    /// Bytes between layers.
    pub layer_stride: [u64; 4],
    /// i32 `[slots][max_pages]`.
    pub page_table: u64,
    /// Pages of a slot.
    pub max_pages: usize,
}

/// Moves the rows of up to `paths` paths of the `Commit` at `commit` to where committed rows stand.
pub fn compact(shape: &Shape, group: &GroupCache, paths: usize, commit: u64) -> Launch {
    let GroupCache {
        n_layers,
        mut base,
        layer_stride,
        page_table,
        max_pages,
    } = *group;
    for (plane, format) in [(1, shape.k), (3, shape.v)] {
        if kv_layout::row_bytes(format, shape.head_dim).1 == 0 {
            base[plane] = 0;
        }
    }
    let words: Vec<u64> = base.into_iter().chain(layer_stride).collect();
    Launch {
        entry: "attn_compact_kv",
        unit: shape.unit("attention/compact_kv.cu"),
        grid: [n_layers as u32, 4 * shape.n_kv_heads as u32, paths as u32],
        block: [128, 1, 1],
        shared: 0,
        args: Args::new().ptr(commit).words(&words).words(&[
            page_table,
            max_pages as u64 | (shape.ring_pages as u64) << 32,
        ]),
        cooperative: false,
        overlap: true,
    }
}
