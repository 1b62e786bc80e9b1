//! Attention over the paged cache: norm, rope and write; tree attention; compaction of accepted rows.
//!
//! A layer of the small path is [`prepare`], [`tree`], [`combine`]; a chunk of a prompt takes [`prepare`] alone and
//! then the prefill kernels. `kernels/attn/kv.cuh` has the layout of the cache.

use contract::{KvFormat, RopeSpec};

use super::norm::Out;
use super::{Args, Launch, Unit};

/// Positions of a page of the cache.
pub const PAGE: usize = 256;
/// Keys that are taken at once.
const TILE: usize = 64;
/// Splits of the keys at most.
const MOST_SPLITS: usize = 64;
/// Tiles of 16 rows that the registers of a block hold without spilling, on every architecture.
const MOST_TILES: usize = 6;
/// Rows of a step.
const STEP_ROWS: usize = 64;

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
    /// Storage of keys.
    pub k: KvFormat,
    /// Storage of values.
    pub v: KvFormat,
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
}

/// What of a card decides how attention is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Card {
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Most dynamic shared memory of a block, in bytes.
    pub shared_bytes: usize,
    /// Whether attention is to sum in path order (`--exact`).
    pub path_order: bool,
}

/// One layer's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cache {
    /// Values of keys.
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

/// What [`prepare`] reads.
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
    /// What [`Shape::frequencies`] gives, on the card.
    pub frequencies: u64,
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
}

impl Shape {
    /// f64 `[rope.dims / 2]`: what a position is multiplied with.
    pub fn frequencies(&self) -> Vec<f64> {
        let dims = self.rope.dims as f64;
        (0..self.rope.dims / 2)
            .map(|j| self.rope.theta.powf(-2.0 * j as f64 / dims))
            .collect()
    }

    /// Values between query heads in the projection.
    pub fn q_stride(&self) -> usize {
        self.head_dim * if self.gate { 2 } else { 1 }
    }

    /// Whether [`tree`] wants queries in f16 beside the projection, rather than normed in place.
    pub fn wants_f16_queries(&self, card: Card) -> bool {
        !card.path_order && self.k != KvFormat::F32 && self.v != KvFormat::F32
    }

    /// Parts the keys are split into: two blocks for each multiprocessor, whatever the rows.
    fn splits(&self, card: Card) -> usize {
        match self.wants_f16_queries(card) {
            true => (2 * card.multiprocessors / self.n_kv_heads).clamp(1, MOST_SPLITS),
            false => 1,
        }
    }

    /// Bytes of scratch that [`tree`] and [`combine`] share, for `rows` rows. Need not be zeroed.
    pub fn scratch_bytes(&self, card: Card, rows: usize) -> usize {
        rows * self.n_heads * self.splits(card) * (self.head_dim + 2) * 4
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

    fn unit(&self, file: &'static str) -> Unit {
        self.check();
        Unit::new(file)
            .define("HEADS", self.n_heads)
            .define("KV_HEADS", self.n_kv_heads)
            .define("DIM", self.head_dim)
            .define("K_FORMAT", number(self.k))
            .define("V_FORMAT", number(self.v))
    }

    /// The defines of `kernels/attn/span.cuh`.
    fn spanned(&self, unit: Unit, card: Card) -> Unit {
        let mask = match self.mask {
            Mask::Ancestors => 0,
            Mask::Full => 1,
            Mask::Causal => 2,
        };
        unit.define("WINDOW", self.window)
            .define("MASK", mask)
            .define("SPLITS", self.splits(card))
            .define("Q_STRIDE", self.q_stride())
    }

    fn pages(&self, cache: &Cache) -> [u64; 2] {
        [
            cache.page_table,
            cache.max_pages as u64 | (self.ring_pages as u64) << 32,
        ]
    }
}

/// The define of `kernels/attn/kv.cuh`.
fn number(format: KvFormat) -> u32 {
    match format {
        KvFormat::F32 => 0,
        KvFormat::F16 => 1,
        KvFormat::Q8_0 => 2,
        KvFormat::Q4_0 => 3,
        other => panic!(
            "a cache in {}: the plan should have been refused",
            other.name()
        ),
    }
}

/// Norm and rope of queries and keys, and the write of keys and values.
///
/// With `q16` 0 queries are changed in place; else they go there as f16 `[rows][n_heads][head_dim]` and the
/// projection, with its gates, stays as it is.
pub fn prepare(
    shape: &Shape,
    rows: usize,
    positions: Positions,
    from: Projections,
    (cache, q16): (Cache, u64),
) -> Launch {
    let (mode, header) = match positions {
        Positions::Step(at) => (0, at),
        Positions::Chunk(at) => (1, at),
        Positions::Commit(at) => (2, at),
    };
    // Rows of a commit are context: keys and values only.
    let heads = if from.q == 0 { 0 } else { shape.n_heads };
    let mut unit = shape.unit("attn/prepare.cu");
    unit.defines[0].1 = heads.to_string();
    let unit = unit
        .define("ROPE", shape.rope.dims)
        .define("NORMED", u32::from(shape.normed))
        .define("POSITIONS", mode)
        .define("Q_STRIDE", shape.q_stride())
        .define("KV_STRIDE", from.kv_stride)
        .define("Q16", u32::from(q16 != 0));
    Launch {
        entry: "attn_prepare",
        unit,
        grid: [
            (heads + 2 * shape.n_kv_heads).div_ceil(4) as u32,
            rows as u32,
            1,
        ],
        block: [128, 1, 1],
        shared: 0,
        args: Args::new()
            .ptr(header)
            .ptr(from.q)
            .ptr(from.k)
            .ptr(from.v)
            .ptr(from.q_norm)
            .ptr(from.k_norm)
            .ptr(from.frequencies)
            .ptr(q16)
            .f32(shape.eps)
            .words(&[cache.k, cache.k_scale])
            .words(&[cache.v, cache.v_scale])
            .words(&shape.pages(&cache)),
        cooperative: false,
        overlap: true,
    }
}

/// How a launch of tree attention is shaped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tiling {
    /// Tiles of 16 rows that a block takes at most.
    tiles: usize,
    /// Tiles of keys or values in shared memory at once.
    ring: usize,
    shared_bytes: usize,
    /// Blocks that a multiprocessor holds.
    resident: usize,
}

impl Shape {
    /// Bytes of a tile of 64 stored rows in shared memory; see `kernels/attn/tiles.cuh`.
    fn tile_bytes(&self) -> usize {
        let bytes = |format: KvFormat, key: bool| {
            let (row, pad) = match format {
                KvFormat::F16 => (2 * self.head_dim, if key { 64 } else { 16 }),
                KvFormat::Q8_0 => (self.head_dim, if key { 32 } else { 16 }),
                _ => (self.head_dim / 2, 16),
            };
            let scales = match format {
                KvFormat::F16 => 0,
                _ => self.head_dim / 16,
            };
            TILE * (row + pad + scales)
        };
        bytes(self.k, true).max(bytes(self.v, false))
    }

    /// The tiling of a launch for `rows` rows, all of which may be one tree's.
    fn tiling(&self, card: Card, rows: usize) -> Tiling {
        let wanted = (rows * self.n_heads / self.n_kv_heads).div_ceil(16);
        let fixed = |tiles: usize| {
            let key_warps = if tiles == 1 { 8 } else { 4 };
            let stats = tiles * 16 * 4 * (key_warps + 3) + STEP_ROWS * 12;
            tiles * (32 * self.head_dim + 2048) + stats
        };
        let slot = self.tile_bytes();
        let fits = |tiles: usize, ring: usize| fixed(tiles) + ring * slot <= card.shared_bytes;
        let most = (1..=MOST_TILES)
            .rev()
            .find(|&tiles| fits(tiles, 2))
            .expect("a block of 48 KiB holds one tile of rows and two of keys");
        // Equal parts: nine tiles are five and four, not eight and one.
        let tiles = wanted.div_ceil(wanted.div_ceil(most));
        // Blocks of few rows wait for memory: two on a multiprocessor hide more than one.
        let half = (card.shared_bytes / 2).saturating_sub(1024);
        let resident = if tiles <= 2 && fixed(tiles) + 2 * slot <= half {
            2
        } else {
            1
        };
        let room = if resident == 2 {
            half
        } else {
            card.shared_bytes
        };
        let ring = ((room - fixed(tiles)) / slot).clamp(2, 5);
        Tiling {
            tiles,
            ring,
            shared_bytes: fixed(tiles) + ring * slot,
            resident,
        }
    }
}

/// Attention of the rows of the `Step` at `step` over committed keys and their own trees.
///
/// `q` is the f16 queries where [`Shape::wants_f16_queries`], else the projection, normed in place. What it finds
/// stays in `scratch` for [`combine`].
pub fn tree(
    shape: &Shape,
    card: Card,
    rows: usize,
    (step, q): (u64, u64),
    (cache, scratch): (Cache, u64),
) -> Launch {
    let planes = Args::new()
        .ptr(step)
        .ptr(q)
        .words(&[cache.k, cache.k_scale])
        .words(&[cache.v, cache.v_scale])
        .words(&shape.pages(&cache));
    if !shape.wants_f16_queries(card) {
        return Launch {
            entry: "attn_path",
            unit: shape.spanned(shape.unit("attn/path.cu"), card),
            grid: [shape.n_heads as u32, rows as u32, 1],
            block: [256, 1, 1],
            shared: 0,
            args: planes.f32(shape.scale).ptr(scratch).i32(rows as i32),
            cooperative: false,
            overlap: true,
        };
    }
    let tiling = shape.tiling(card, rows);
    let unit = shape
        .spanned(shape.unit("attn/tree.cu"), card)
        .define("MT", tiling.tiles)
        .define("RING", tiling.ring);
    Launch {
        entry: "attn_tree",
        unit,
        grid: [(tiling.resident * card.multiprocessors) as u32, 1, 1],
        block: [256, 1, 1],
        shared: tiling.shared_bytes as u32,
        args: planes
            .f32(shape.scale * std::f32::consts::LOG2_E)
            .ptr(scratch)
            .i32(rows as i32),
        cooperative: false,
        overlap: true,
    }
}

/// Sums the splits that [`tree`] left in `scratch`, applies the gates in the projection `q`, and writes
/// `[rows][n_heads * head_dim]` in the forms of `out`.
pub fn combine(
    shape: &Shape,
    card: Card,
    rows: usize,
    (step, q, scratch): (u64, u64, u64),
    out: Out,
) -> Launch {
    let width = shape.n_heads * shape.head_dim;
    let unit = shape
        .spanned(shape.unit("attn/combine.cu"), card)
        .define("GATE", u32::from(shape.gate));
    Launch {
        entry: "attn_combine",
        unit: out.define(unit, width, rows),
        grid: [width.div_ceil(256) as u32, rows as u32, 1],
        block: [256, 1, 1],
        shared: 0,
        args: Args::new()
            .ptr(step)
            .ptr(q)
            .ptr(scratch)
            .i32(rows as i32)
            .words(&out.words()),
        cooperative: false,
        overlap: true,
    }
}

/// The planes of a group of layers: values of keys, scales of keys, values of values, scales of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planes {
    /// Address in the first layer; 0 for a plane that the format does not have.
    pub base: [u64; 4],
    /// Bytes between layers.
    pub layer_stride: [u64; 4],
}

/// Moves the rows of the paths of the `Commit` at `commit` to where committed rows stand, in `n_layers` layers.
pub fn compact(
    shape: &Shape,
    n_layers: usize,
    mut planes: Planes,
    (page_table, max_pages): (u64, usize),
    commit: u64,
) -> Launch {
    for (plane, format) in [(1, shape.k), (3, shape.v)] {
        if matches!(format, KvFormat::F32 | KvFormat::F16) {
            planes.base[plane] = 0;
        }
    }
    let words: Vec<u64> = planes.base.into_iter().chain(planes.layer_stride).collect();
    Launch {
        entry: "attn_compact",
        unit: shape.unit("attn/compact.cu"),
        grid: [n_layers as u32, 4 * shape.n_kv_heads as u32, 4],
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_do_not_depend_on_rows_and_fill_the_card() {
        let shape = Shape {
            n_heads: 24,
            n_kv_heads: 4,
            head_dim: 256,
            rope: RopeSpec {
                dims: 64,
                theta: 1e7,
            },
            gate: true,
            normed: true,
            k: KvFormat::Q8_0,
            v: KvFormat::Q8_0,
            eps: 1e-6,
            scale: 1.0 / 16.0,
            window: 0,
            mask: Mask::Ancestors,
            ring_pages: 0,
        };
        let card = Card {
            multiprocessors: 132,
            shared_bytes: 232_448,
            path_order: false,
        };
        assert_eq!(shape.splits(card), 64);
        assert_eq!(
            shape.splits(Card {
                path_order: true,
                ..card
            }),
            1
        );
        assert_eq!(shape.scratch_bytes(card, 2), 2 * 24 * 64 * 258 * 4);
        assert_eq!(shape.frequencies().len(), 32);
        assert_eq!(shape.frequencies()[0], 1.0);

        let one = shape.tiling(card, 1);
        assert_eq!((one.tiles, one.resident), (1, 2));
        assert!(2 * (one.shared_bytes + 1024) <= 228 * 1024);
        assert_eq!(shape.tiling(card, 24).tiles, 5);
        assert_eq!(shape.tiling(card, 64).tiles, 6);
        let small = Card {
            shared_bytes: 99 * 1024,
            ..card
        };
        for rows in [1, 8, 24, 64] {
            let tiling = shape.tiling(small, rows);
            assert!(tiling.shared_bytes <= 99 * 1024 && tiling.ring >= 2);
        }
    }
}
