//! Attention of decode steps over trees, and the merge of its KV splits.

use contract::KvFormat;

use super::super::norm::ActivationBuffers;
use super::super::{Args, CompileUnit, Launch};
use super::kv_layout::row_bytes;
use super::{Cache, Shape};
use crate::gpu_props::GpuProps;

/// Keys of a tile.
pub(crate) const KEYS_PER_TILE: usize = 64;
/// Tiles of 16 rows that the registers of a block hold without spilling, on every architecture.
const MAX_M16_TILES: usize = 6;
/// Rows of a step.
pub(crate) const STEP_ROWS: usize = 64;
/// Tiles of 8 query columns that `kernels/attention/swapped_operands_sm90.cuh` has a product for,
/// and that registers hold.
const N8_TILES: [usize; 8] = [1, 2, 3, 4, 6, 8, 9, 12];
/// The same of `kernels/attention/decode_tree_warp_specialized_sm90.cu`.
const WARP_SPECIALIZED_N8_TILES: [usize; 8] = [3, 4, 6, 8, 9, 12, 16, 18];
/// The same of `kernels/attention/decode_fixed_splits_sm90.cu`.
const FIXED_SPLITS_N8_TILES: [usize; 10] = [1, 2, 3, 4, 6, 8, 9, 12, 16, 18];
/// Key stages and value stages of its pipelines, the best first.
const FIXED_SPLITS_STAGES: [(usize, usize); 3] = [(4, 3), (3, 3), (3, 2)];
/// Key stages and value stages of the warp-specialized kernel.
const WARP_SPECIALIZED_STAGES: (usize, usize) = (3, 3);

/// The tile of a block of verify attention, and what it takes of a multiprocessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    /// Tiles of 16 query rows, or of 8 query columns with swapped operands.
    pub tiles: usize,
    /// Stages of keys, or of keys and values alike.
    pub k_stages: usize,
    /// Stages of values, where they are stages of their own.
    pub v_stages: usize,
    /// Shared memory of a block, in bytes.
    pub shared_bytes: usize,
    /// Blocks that a multiprocessor holds.
    pub blocks_per_sm: usize,
}

/// A kernel of verify attention with its tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecodeKernel {
    /// `decode_tree_f32.cu`: f32 throughout, a block per query head and row.
    TreeF32,
    /// `decode_tree.cu`: warp-level mma.
    Tree(Tile),
    /// The same with batch-invariant KV splits.
    FixedSplits {
        /// The tile.
        tile: Tile,
        /// Room for the plans of so many trees.
        tree_plans: usize,
    },
    /// `decode_tree_sm90.cu`: wgmma with swapped operands (S^T), heads of 256.
    TreeSm90(Tile),
    /// `decode_tree_warp_specialized_sm90.cu`: one softmax warpgroup and two P V warpgroups.
    WarpSpecializedSm90(Tile),
    /// `decode_fixed_splits_sm90.cu`: batch-invariant KV splits.
    FixedSplitsSm90 {
        /// The tile.
        tile: Tile,
        /// Whether the mainloop is kept rolled, for splits of a single tile.
        rolled: bool,
        /// Room for the plans of so many trees.
        tree_plans: usize,
    },
}

impl DecodeKernel {
    /// The source file.
    pub fn file(&self) -> &'static str {
        match self {
            DecodeKernel::TreeF32 => "attention/decode_tree_f32.cu",
            DecodeKernel::Tree(_) | DecodeKernel::FixedSplits { .. } => "attention/decode_tree.cu",
            DecodeKernel::TreeSm90(_) => "attention/decode_tree_sm90.cu",
            DecodeKernel::WarpSpecializedSm90(_) => {
                "attention/decode_tree_warp_specialized_sm90.cu"
            }
            DecodeKernel::FixedSplitsSm90 { .. } => "attention/decode_fixed_splits_sm90.cu",
        }
    }
}

/// How a layer's verify attention runs for steps of up to `rows` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeAttention {
    /// The kernel.
    pub kernel: DecodeKernel,
    /// Rows of the step, padding included.
    pub rows: usize,
    /// Parts that the KV of a row is split into.
    pub splits: usize,
    /// The most parts before a row's last two tiles, where splits follow from positions alone.
    pub max_fixed_splits: Option<usize>,
    /// Whether trees may have windows of their own.
    pub tree_windows: bool,
    /// Multiprocessors that the persistent blocks fill.
    pub sm_count: usize,
}

impl DecodeAttention {
    /// Whether [`tree`] reads queries in f16 beside the projection, rather than normed in place.
    pub fn f16_queries(&self) -> bool {
        self.kernel != DecodeKernel::TreeF32
    }

    /// Bytes of scratch that [`tree`] and [`combine`] share. Need not be zeroed.
    pub fn scratch_bytes(&self, shape: &Shape) -> usize {
        self.rows * shape.n_heads * self.splits * (shape.head_dim + 2) * 4
    }
}

/// Device memory of [`tree`] and [`combine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeBuffers {
    /// The `Step`.
    pub step: u64,
    /// f32 `[rows][n_heads][q_stride]`: the projection, with its gates; normed in place where
    /// queries are not f16.
    pub projection: u64,
    /// f16 `[rows][n_heads][head_dim]`, where [`DecodeAttention::f16_queries`].
    pub queries: u64,
    /// The layer's KV cache.
    pub cache: Cache,
    /// f32 `[n_heads]`: a score without a value that joins each head's softmax; 0 for none.
    pub sinks: u64,
    /// [`DecodeAttention::scratch_bytes`].
    pub scratch: u64,
}

impl Shape {
    /// Bytes of a tile of 64 stored keys and of one of values in shared memory; see
    /// `kernels/attention/kv_tiles.cuh`.
    fn tiles_bytes(&self) -> (usize, usize) {
        let bytes = |format: KvFormat, key: bool| {
            let (values, scales) = row_bytes(format, self.head_dim);
            let stride = match format {
                KvFormat::F16 | KvFormat::Bf16 if key => values + 64,
                KvFormat::Q8_0 if key => values + 32,
                _ => ((values / 16) | 1) * 16,
            };
            KEYS_PER_TILE * (stride + scales)
        };
        (bytes(self.k, true), bytes(self.v, false))
    }

    /// Bytes of the larger of both.
    fn tile_bytes(&self) -> usize {
        let (key, value) = self.tiles_bytes();
        key.max(value)
    }

    /// Slots of 128 keys or values beside the queries and weights of `eights` eights of columns in
    /// `room` bytes of shared memory, an even number and at least two, and the bytes of all; see
    /// `kernels/attention/swapped_operands_sm90.cuh`.
    pub(in crate::launch) fn swapped_stages(&self, eights: usize, room: usize) -> (usize, usize) {
        let fixed = eights * (6 * 1024 + 12 * 8 * 4) + STEP_ROWS * 12;
        let slot = 2 * self.tile_bytes();
        // With an odd number, keys and values change places from pass to pass, which costs more
        // than a slot brings.
        let ring = if room >= fixed + 4 * slot { 4 } else { 2 };
        (ring, fixed + ring * slot)
    }

    /// The tile of the wgmma kernel with swapped operands for `rows` rows, all of which may be one
    /// tree's.
    pub(crate) fn tile_sm90(&self, gpu: GpuProps, rows: usize) -> Tile {
        let columns = rows * self.n_heads / self.n_kv_heads;
        let fits = |tiles: &usize| self.swapped_stages(*tiles, 0).1 <= gpu.shared_bytes;
        let most = N8_TILES.into_iter().rfind(fits).unwrap_or(1);
        // Equal parts, each rounded up to what there is a product for.
        let parts = columns.div_ceil(8 * most);
        let wanted = columns.div_ceil(8 * parts);
        let found = N8_TILES.into_iter().find(|tiles| *tiles >= wanted);
        let tiles = found.unwrap_or(most);
        let half = (gpu.shared_bytes / 2).saturating_sub(1024);
        let both = tiles <= 2 && self.swapped_stages(tiles, 0).1 <= half;
        let (blocks_per_sm, capacity) = if both {
            (2, half)
        } else {
            (1, gpu.shared_bytes)
        };
        let (stages, shared_bytes) = self.swapped_stages(tiles, capacity);
        Tile {
            tiles,
            k_stages: stages,
            v_stages: stages,
            shared_bytes,
            blocks_per_sm,
        }
    }

    fn warp_specialized_bytes(&self, tiles: usize) -> usize {
        let (key, value) = self.tiles_bytes();
        let (k_stages, v_stages) = WARP_SPECIALIZED_STAGES;
        let stages = k_stages * key + v_stages * value + 8 + STEP_ROWS * 12;
        tiles * (6 * 1024 + 9 * 8 * 4) + stages
    }

    /// The most tiles of 8 query columns that a block of the warp-specialized kernel holds.
    pub(crate) fn max_warp_specialized_tiles(&self, gpu: GpuProps) -> Option<usize> {
        let fits = |&tiles: &usize| self.warp_specialized_bytes(tiles) <= gpu.shared_bytes;
        WARP_SPECIALIZED_N8_TILES.into_iter().rfind(fits)
    }

    /// The tile of the warp-specialized kernel for `rows` rows, at most `most` tiles of 8 columns.
    pub(crate) fn warp_specialized_tile(&self, rows: usize, most: usize) -> Option<Tile> {
        let columns = rows * self.n_heads / self.n_kv_heads;
        let wanted = columns.div_ceil(8 * columns.div_ceil(8 * most));
        let mut all = WARP_SPECIALIZED_N8_TILES.into_iter();
        let tiles = all.find(|&tiles| tiles >= wanted)?;
        Some(Tile {
            tiles,
            k_stages: WARP_SPECIALIZED_STAGES.0,
            v_stages: WARP_SPECIALIZED_STAGES.1,
            shared_bytes: self.warp_specialized_bytes(tiles),
            blocks_per_sm: 1,
        })
    }

    /// The tile of the kernel with fixed KV splits for `rows` rows, at most `most` tiles of 8
    /// columns, beside the plans of `tree_plans` trees; none for KV types whose tiles are too
    /// large.
    pub(crate) fn fixed_splits_tile(
        &self,
        gpu: GpuProps,
        rows: usize,
        most: usize,
        tree_plans: usize,
    ) -> Option<Tile> {
        let (key, value) = self.tiles_bytes();
        let group = self.n_heads / self.n_kv_heads;
        let bytes = |tiles: usize, (keys, values): (usize, usize)| {
            // Tables of trees, of work items, of where nodes' own keys are, and of an item's nodes.
            let nodes = 8 * tiles / group;
            let work =
                tree_plans * 128 + 24 + 8 * (80 + 2 * nodes) + 4 * 4 * KEYS_PER_TILE + 16 * nodes;
            let marks = tiles * 8 * 9 * 4 + 8;
            tiles * 6 * 1024 + keys * key + values * value + marks + work
        };
        let fits = |tiles: usize, stages| bytes(tiles, stages) <= gpu.shared_bytes;
        let few = (rows * group).div_ceil(8);
        let widths = || {
            FIXED_SPLITS_N8_TILES
                .into_iter()
                .filter(|&tiles| tiles <= most && 8 * tiles >= group)
        };
        let (most, stages) = [(3, 3), (3, 2)].into_iter().find_map(|stages| {
            let tiles = widths().rfind(|&tiles| fits(tiles, stages))?;
            (tiles >= few.min(6)).then_some((tiles, stages))
        })?;
        // Equal parts of whole nodes.
        let parts = rows.div_ceil(8 * most / group);
        let wanted = (rows.div_ceil(parts) * group).div_ceil(8);
        let tiles = widths().find(|&tiles| tiles >= wanted)?;
        let deepest = |stages: &(usize, usize)| fits(tiles, *stages);
        let stages = FIXED_SPLITS_STAGES
            .into_iter()
            .find(deepest)
            .unwrap_or(stages);
        Some(Tile {
            tiles,
            k_stages: stages.0,
            v_stages: stages.1,
            // Two on one multiprocessor would leave another without.
            shared_bytes: bytes(tiles, stages).max(gpu.shared_bytes / 2 + 1),
            blocks_per_sm: 1,
        })
    }

    /// The tile of the warp-level mma kernel for `rows` rows, all of which may be one tree's;
    /// `tree_plans`: with fixed KV splits, the trees that a block has plans for, else 0.
    pub(crate) fn tile(&self, gpu: GpuProps, rows: usize, tree_plans: usize) -> Tile {
        let wanted = (rows * self.n_heads / self.n_kv_heads).div_ceil(16);
        let fixed = |tiles: usize| tree_fixed_bytes(tiles, self.head_dim, tree_plans);
        let slot = self.tile_bytes();
        let fits = |tiles: usize, ring: usize| fixed(tiles) + ring * slot <= gpu.shared_bytes;
        let most = (1..=MAX_M16_TILES)
            .rev()
            .find(|&tiles| fits(tiles, 2))
            .expect("a block of 48 KiB holds one tile of rows and two of keys");
        // Equal parts: nine tiles are five and four, not eight and one.
        let tiles = wanted.div_ceil(wanted.div_ceil(most));
        // Blocks of few rows wait for memory: two on a multiprocessor hide more than one.
        let half = (gpu.shared_bytes / 2).saturating_sub(1024);
        let blocks_per_sm = if tiles <= 2 && fixed(tiles) + 2 * slot <= half {
            2
        } else {
            1
        };
        let room = if blocks_per_sm == 2 {
            half
        } else {
            gpu.shared_bytes
        };
        let stages = ((room - fixed(tiles)) / slot).clamp(2, 5);
        Tile {
            tiles,
            k_stages: stages,
            v_stages: stages,
            shared_bytes: fixed(tiles) + stages * slot,
            blocks_per_sm,
        }
    }
}

/// Shared memory of a block of `decode_tree.cu` besides its stages, in bytes; `tree_plans`: with
/// fixed KV splits, the trees that it has plans for, else 0.
pub(in crate::launch) fn tree_fixed_bytes(
    tiles: usize,
    head_dim: usize,
    tree_plans: usize,
) -> usize {
    let key_warps = if tiles == 1 { 8 } else { 4 };
    let stats = tiles * 16 * 4 * (key_warps + 3) + STEP_ROWS * 12;
    // Plans, two items with their nodes, where nodes' own keys are; see `fixed_split_items.cuh`.
    let items = match tree_plans {
        0 => 0,
        plans => plans * 128 + 24 + 2 * (80 + STEP_ROWS * 8) + KEYS_PER_TILE * 4,
    };
    tiles * (32 * head_dim + 2048) + stats + items
}

/// Attention of the rows of a step over committed keys and their own trees. Partial results stay in
/// the scratch for [`combine`].
pub fn tree(shape: &Shape, selected: &DecodeAttention, at: &DecodeBuffers) -> Launch {
    let rows = selected.rows;
    let kernel = &selected.kernel;
    let queries = if selected.f16_queries() {
        at.queries
    } else {
        at.projection
    };
    let planes = Args::new()
        .ptr(at.step)
        .ptr(queries)
        .words(&[at.cache.k, at.cache.k_scale])
        .words(&[at.cache.v, at.cache.v_scale])
        .words(&shape.pages(&at.cache));
    let unit = shape.kv_range(shape.unit(kernel.file()), selected);
    let (unit, tile, threads) = match *kernel {
        DecodeKernel::TreeF32 => {
            return Launch {
                entry: "attn_decode_tree_f32",
                unit,
                grid: [shape.n_heads as u32, rows as u32, 1],
                block: [256, 1, 1],
                shared: 0,
                args: planes.f32(shape.scale).ptr(at.scratch).i32(rows as i32),
                cooperative: false,
                overlap: true,
            };
        }
        DecodeKernel::Tree(tile) => {
            let unit = unit.define("M16_TILES", tile.tiles);
            (unit.define("STAGES", tile.k_stages), tile, 256)
        }
        DecodeKernel::FixedSplits { tile, tree_plans } => {
            let unit = unit.define("M16_TILES", tile.tiles);
            let unit = unit.define("STAGES", tile.k_stages);
            (unit.define("TREE_PLANS", tree_plans), tile, 256)
        }
        DecodeKernel::TreeSm90(tile) => {
            let unit = unit.define("N8_TILES", tile.tiles);
            (unit.define("STAGES", tile.k_stages), tile, 256)
        }
        DecodeKernel::WarpSpecializedSm90(tile) => (with_stages(unit, &tile), tile, 384),
        DecodeKernel::FixedSplitsSm90 {
            tile,
            rolled,
            tree_plans,
        } => {
            let unit = with_stages(unit, &tile).define("TREE_PLANS", tree_plans);
            (unit.define("ROLLED", u32::from(rolled)), tile, 384)
        }
    };
    Launch {
        entry: "attn_decode_tree",
        unit,
        grid: [(tile.blocks_per_sm * selected.sm_count) as u32, 1, 1],
        block: [threads, 1, 1],
        shared: tile.shared_bytes as u32,
        args: planes
            .f32(shape.scale * std::f32::consts::LOG2_E)
            .ptr(at.scratch)
            .i32(rows as i32),
        cooperative: false,
        overlap: true,
    }
}

fn with_stages(unit: CompileUnit, tile: &Tile) -> CompileUnit {
    unit.define("N8_TILES", tile.tiles)
        .define("K_STAGES", tile.k_stages)
        .define("V_STAGES", tile.v_stages)
}

/// Merges the KV splits that [`tree`] left in the scratch, applies the gates of the projection, and
/// writes `[rows][n_heads * head_dim]` in the forms of `out`.
pub fn combine(
    shape: &Shape,
    selected: &DecodeAttention,
    at: &DecodeBuffers,
    out: ActivationBuffers,
) -> Launch {
    let (rows, width) = (selected.rows, shape.n_heads * shape.head_dim);
    let unit = shape.unit("attention/combine_splits.cu");
    let unit = shape
        .kv_range(unit, selected)
        .define("GATED", u32::from(shape.gate));
    let unit = if at.sinks == 0 {
        unit
    } else {
        unit.define("SINKS", 1)
    };
    Launch {
        entry: "attn_combine_splits",
        unit: out.define(unit, width, rows),
        grid: [width.div_ceil(256) as u32, rows as u32, 1],
        block: [256, 1, 1],
        shared: 0,
        args: Args::new()
            .ptr(at.step)
            .ptr(at.projection)
            .ptr(at.scratch)
            .ptr(at.sinks)
            .i32(rows as i32)
            .words(&out.words()),
        cooperative: false,
        overlap: true,
    }
}
