//! Tree attention and the merge of its splits.

use contract::KvFormat;

use super::super::norm::Out;
use super::super::{Args, Launch, Unit};
use super::rows::row_bytes;
use super::{AttentionConfig, Cache, MOST_SPLITS, Mask, Shape};
#[cfg(test)]
use crate::gpu_props::GpuProps;
use crate::numerics::Numerics;

/// Keys of a tile.
const TILE: usize = 64;
/// Tiles of 16 rows that the registers of a block hold without spilling, on every architecture.
const MOST_TILES: usize = 6;
/// Rows of a step.
const STEP_ROWS: usize = 64;
/// Eights of columns that `kernels/attention/swapped_operands_sm90.cuh` has a product for, and that registers hold.
const EIGHTS: [usize; 8] = [1, 2, 3, 4, 6, 8, 9, 12];

/// The same of `kernels/attention/decode_tree_warp_specialized_sm90.cu`.
const TRIO_EIGHTS: [usize; 8] = [3, 4, 6, 8, 9, 12, 16, 18];
/// The same of `kernels/attention/decode_fixed_splits_sm90.cu`.
const SPAN_EIGHTS: [usize; 10] = [1, 2, 3, 4, 6, 8, 9, 12, 16, 18];
/// Tiles of keys and of values that it may have in shared memory at once, the best first.
const SPAN_RINGS: [(usize, usize); 3] = [(4, 3), (3, 3), (3, 2)];
/// Tiles of keys and of values that it has in shared memory at once.
const TRIO_RINGS: (usize, usize) = (3, 3);
/// What a block of it takes where a sequence can hold no more than so many tokens: the more columns, the sooner keys
/// are done with, but the longer a block takes that has one tile only. One H200, 24 rows over Q8_0: 9 eights and 18
/// take 10.8 and 16.6 us at 512 keys, 35.5 and 28.9 at 9,000, 233 and 184 at 131,072.
const TRIO_SHORT: (usize, usize) = (8192, 9);
/// Up to so many tokens a span of `kernels/attention/decode_fixed_splits_sm90.cu` is one tile, and a block has few of them: its code, which then runs
/// once or twice, is in loops. Measured behind 512 tokens.
const ROLLED: usize = 2048;

/// How a launch of `kernels/attention/decode_fixed_splits_sm90.cu` is shaped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Spans {
    /// Eights of columns of a block.
    eights: usize,
    /// Tiles of keys and of values in shared memory at once.
    rings: (usize, usize),
    shared_bytes: usize,
}

/// How a launch of tree attention is shaped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tiling {
    /// Tiles of 16 rows, or with warpgroups of 8, that a block takes at most.
    tiles: usize,
    /// Tiles of keys or values in shared memory at once.
    ring: usize,
    shared_bytes: usize,
    /// Blocks that a multiprocessor holds.
    resident: usize,
}

impl Shape {
    /// Bytes of a tile of 64 stored keys and of one of values in shared memory; see `kernels/attention/kv_tiles.cuh`.
    fn tiles_bytes(&self) -> (usize, usize) {
        let bytes = |format: KvFormat, key: bool| {
            let (values, scales) = row_bytes(format, self.head_dim);
            let stride = match format {
                KvFormat::F16 | KvFormat::Bf16 if key => values + 64,
                KvFormat::Q8_0 if key => values + 32,
                _ => ((values / 16) | 1) * 16,
            };
            TILE * (stride + scales)
        };
        (bytes(self.k, true), bytes(self.v, false))
    }

    /// Bytes of the larger of both.
    fn tile_bytes(&self) -> usize {
        let (key, value) = self.tiles_bytes();
        key.max(value)
    }

    /// Whether the form by warpgroup products computes steps of `rows` rows: not where one block of few rows would
    /// have a multiprocessor for itself, which is slower than two of the other form.
    pub(super) fn by_warpgroups(&self, config: AttentionConfig, rows: usize) -> bool {
        let able = config.gpu.has_wgmma && self.head_dim == 256 && self.wants_f16_queries(config);
        able && (self.shares(config, rows) || self.across(config, rows).tiles > 2)
    }

    /// Whether a multiprocessor holds two blocks by warpgroups of a launch for `rows` rows.
    pub(super) fn shares(&self, config: AttentionConfig, rows: usize) -> bool {
        self.across(config, rows).resident == 2
    }

    /// Slots of 128 keys or values beside the queries and weights of `eights` eights of columns in `room` bytes of
    /// shared memory, an even number and at least two, and the bytes of all; see `kernels/attention/swapped_operands_sm90.cuh`.
    pub(in crate::launch) fn across_ring(&self, eights: usize, room: usize) -> (usize, usize) {
        let fixed = eights * (6 * 1024 + 12 * 8 * 4) + STEP_ROWS * 12;
        let slot = 2 * self.tile_bytes();
        // With an odd number, keys and values change places from pass to pass, which costs more than a slot brings.
        let ring = if room >= fixed + 4 * slot { 4 } else { 2 };
        (ring, fixed + ring * slot)
    }

    /// The tiling of a launch by warpgroup products for `rows` rows, all of which may be one tree's.
    fn across(&self, config: AttentionConfig, rows: usize) -> Tiling {
        let columns = rows * self.n_heads / self.n_kv_heads;
        let fits = |eights: &usize| self.across_ring(*eights, 0).1 <= config.gpu.shared_bytes;
        let most = EIGHTS.into_iter().rfind(fits).unwrap_or(1);
        // Equal parts, each rounded up to what there is a product for.
        let parts = columns.div_ceil(8 * most);
        let wanted = columns.div_ceil(8 * parts);
        let found = EIGHTS.into_iter().find(|eights| *eights >= wanted);
        let tiles = found.unwrap_or(most);
        let half = (config.gpu.shared_bytes / 2).saturating_sub(1024);
        let both = tiles <= 2 && self.across_ring(tiles, 0).1 <= half;
        let (resident, room) = match both {
            true => (2, half),
            false => (1, config.gpu.shared_bytes),
        };
        let (ring, shared_bytes) = self.across_ring(tiles, room);
        Tiling {
            tiles,
            ring,
            shared_bytes,
            resident,
        }
    }

    /// Eights of columns of a launch by three warpgroups for `rows` rows of sequences of at most `tokens` tokens, and
    /// the bytes of its shared memory; none for formats whose tiles are too large beside the queries of as many rows
    /// as are worth it.
    fn trio(&self, config: AttentionConfig, rows: usize, tokens: usize) -> Option<(usize, usize)> {
        let (key, value) = self.tiles_bytes();
        let rings = TRIO_RINGS.0 * key + TRIO_RINGS.1 * value + 8 + STEP_ROWS * 12;
        let bytes = |eights: usize| eights * (6 * 1024 + 9 * 8 * 4) + rings;
        let most = TRIO_EIGHTS
            .into_iter()
            .rfind(|&eights| bytes(eights) <= config.gpu.shared_bytes)?;
        if most < 12 || !self.by_warpgroups(config, rows) || self.shares(config, rows) {
            return None;
        }
        let most = match tokens > TRIO_SHORT.0 {
            true => most,
            false => TRIO_SHORT.1,
        };
        let columns = rows * self.n_heads / self.n_kv_heads;
        let wanted = columns.div_ceil(8 * columns.div_ceil(8 * most));
        let eights = TRIO_EIGHTS.into_iter().find(|&eights| eights >= wanted)?;
        Some((eights, bytes(eights)))
    }

    /// Whether what a row sums in which order follows from its position alone (`kernels/attention/fixed_splits.cuh`), so that a
    /// node of a tree has the bits that its token alone would have.
    pub(super) fn by_position(&self, config: AttentionConfig) -> bool {
        let able = config.gpu.has_wgmma && self.head_dim == 256 && self.mask == Mask::Ancestors;
        let whole = self.k != KvFormat::F32 && self.v != KvFormat::F32;
        config.numerics == Numerics::BatchInvariant
            && able
            && whole
            && self.spans(config, STEP_ROWS, usize::MAX).is_some()
    }

    /// Spans of a row by position at most: as many as there are blocks over all key heads.
    fn most_spans(&self, config: AttentionConfig) -> usize {
        (config.gpu.sm_count / self.n_kv_heads).clamp(1, MOST_SPLITS)
    }

    /// Slots of a row by position, in sequences of at most `tokens` tokens: its spans and two tiles.
    pub(super) fn slots(&self, config: AttentionConfig, tokens: usize) -> usize {
        let before = tokens.div_ceil(TILE).saturating_sub(2);
        2 + before.min(self.most_spans(config))
    }

    /// The define of `kernels/attention/fixed_splits.cuh`.
    pub(super) fn in_spans(&self, unit: Unit, config: AttentionConfig) -> Unit {
        unit.define("MAX_FIXED_SPLITS", self.most_spans(config))
    }

    /// The shape of a launch by position for `rows` rows of sequences of at most `tokens` tokens; none for formats whose
    /// tiles are too large.
    fn spans(&self, config: AttentionConfig, rows: usize, tokens: usize) -> Option<Spans> {
        let (key, value) = self.tiles_bytes();
        let group = self.n_heads / self.n_kv_heads;
        let bytes = |eights: usize, (keys, values): (usize, usize)| {
            // What it knows of trees, of items, of where nodes' own keys are and of an item's nodes.
            let nodes = 8 * eights / group;
            let work = 4 * 128 + 24 + 8 * (80 + 2 * nodes) + 4 * 4 * TILE + 16 * nodes;
            let marks = eights * 8 * 9 * 4 + 8;
            eights * 6 * 1024 + keys * key + values * value + marks + work
        };
        let fits = |eights: usize, rings, room: usize| bytes(eights, rings) <= room;
        let few = (rows * group).div_ceil(8);
        let most = match tokens > TRIO_SHORT.0 {
            true => 18,
            false => TRIO_SHORT.1,
        };
        let widths = || {
            SPAN_EIGHTS
                .into_iter()
                .filter(|&e| e <= most && 8 * e >= group)
        };
        let (most, rings) = [(3, 3), (3, 2)].into_iter().find_map(|rings| {
            let eights = widths().rfind(|&e| fits(e, rings, config.gpu.shared_bytes))?;
            (eights >= few.min(6)).then_some((eights, rings))
        })?;
        // Equal parts of whole nodes.
        let parts = rows.div_ceil(8 * most / group);
        let wanted = (rows.div_ceil(parts) * group).div_ceil(8);
        let eights = widths().find(|&e| e >= wanted)?;
        let deepest = |r: &(usize, usize)| fits(eights, *r, config.gpu.shared_bytes);
        let rings = SPAN_RINGS.into_iter().find(deepest).unwrap_or(rings);
        Some(Spans {
            eights,
            rings,
            // Two on one multiprocessor would leave another without.
            shared_bytes: bytes(eights, rings).max(config.gpu.shared_bytes / 2 + 1),
        })
    }

    /// The tiling of a launch for `rows` rows, all of which may be one tree's.
    fn tiling(&self, config: AttentionConfig, rows: usize) -> Tiling {
        let wanted = (rows * self.n_heads / self.n_kv_heads).div_ceil(16);
        let fixed = |tiles: usize| {
            let key_warps = if tiles == 1 { 8 } else { 4 };
            let stats = tiles * 16 * 4 * (key_warps + 3) + STEP_ROWS * 12;
            tiles * (32 * self.head_dim + 2048) + stats
        };
        let slot = self.tile_bytes();
        let fits =
            |tiles: usize, ring: usize| fixed(tiles) + ring * slot <= config.gpu.shared_bytes;
        let most = (1..=MOST_TILES)
            .rev()
            .find(|&tiles| fits(tiles, 2))
            .expect("a block of 48 KiB holds one tile of rows and two of keys");
        // Equal parts: nine tiles are five and four, not eight and one.
        let tiles = wanted.div_ceil(wanted.div_ceil(most));
        // Blocks of few rows wait for memory: two on a multiprocessor hide more than one.
        let half = (config.gpu.shared_bytes / 2).saturating_sub(1024);
        let resident = if tiles <= 2 && fixed(tiles) + 2 * slot <= half {
            2
        } else {
            1
        };
        let room = if resident == 2 {
            half
        } else {
            config.gpu.shared_bytes
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
/// stays in `scratch` for [`combine`]. The sequences of the step hold at most `tokens` tokens, its nodes included.
pub fn tree(
    shape: &Shape,
    config: AttentionConfig,
    (rows, tokens): (usize, usize),
    (step, q): (u64, u64),
    (cache, scratch): (Cache, u64),
) -> Launch {
    let planes = Args::new()
        .ptr(step)
        .ptr(q)
        .words(&[cache.k, cache.k_scale])
        .words(&[cache.v, cache.v_scale])
        .words(&shape.pages(&cache));
    if !shape.wants_f16_queries(config) {
        return Launch {
            entry: "attn_decode_tree_f32",
            unit: shape.spanned(
                shape.unit("attention/decode_tree_f32.cu"),
                config,
                (rows, 0),
            ),
            grid: [shape.n_heads as u32, rows as u32, 1],
            block: [256, 1, 1],
            shared: 0,
            args: planes.f32(shape.scale).ptr(scratch).i32(rows as i32),
            cooperative: false,
            overlap: true,
        };
    }
    let args = planes
        .f32(shape.scale * std::f32::consts::LOG2_E)
        .ptr(scratch)
        .i32(rows as i32);
    let by_position = shape.by_position(config);
    let spans = by_position.then(|| shape.spans(config, rows, tokens));
    let unit = |file| shape.spanned(shape.unit(file), config, (rows, tokens));
    let (unit, resident, threads, shared) = if let Some(spans) = spans.flatten() {
        let unit = unit("attention/decode_fixed_splits_sm90.cu")
            .define("N8_TILES", spans.eights)
            .define("K_STAGES", spans.rings.0)
            .define("V_STAGES", spans.rings.1)
            .define("ROLLED", u32::from(tokens <= ROLLED));
        (unit, 1, 384, spans.shared_bytes)
    } else if let Some((eights, shared)) = shape.trio(config, rows, tokens) {
        let unit = unit("attention/decode_tree_warp_specialized_sm90.cu")
            .define("N8_TILES", eights)
            .define("K_STAGES", TRIO_RINGS.0)
            .define("V_STAGES", TRIO_RINGS.1);
        (unit, 1, 384, shared)
    } else {
        let (file, tiles, tiling) = match shape.by_warpgroups(config, rows) {
            true => (
                "attention/decode_tree_sm90.cu",
                "N8_TILES",
                shape.across(config, rows),
            ),
            false => (
                "attention/decode_tree.cu",
                "M16_TILES",
                shape.tiling(config, rows),
            ),
        };
        let unit = unit(file)
            .define(tiles, tiling.tiles)
            .define("STAGES", tiling.ring);
        (unit, tiling.resident, 256, tiling.shared_bytes)
    };
    Launch {
        entry: "attn_decode_tree",
        unit,
        grid: [(resident * config.gpu.sm_count) as u32, 1, 1],
        block: [threads, 1, 1],
        shared: shared as u32,
        args,
        cooperative: false,
        overlap: true,
    }
}

/// Numerics the splits that [`tree`] left in `scratch` for a cache whose sequences hold `tokens` tokens, applies the gates in
/// the projection `q`, and writes `[rows][n_heads * head_dim]` in the forms of `out`.
pub fn combine(
    shape: &Shape,
    config: AttentionConfig,
    (rows, tokens): (usize, usize),
    (step, q, scratch): (u64, u64, u64),
    out: Out,
) -> Launch {
    let width = shape.n_heads * shape.head_dim;
    let unit = shape
        .spanned(
            shape.unit("attention/combine_splits.cu"),
            config,
            (rows, tokens),
        )
        .define("GATED", u32::from(shape.gate));
    Launch {
        entry: "attn_combine_splits",
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

#[cfg(test)]
mod tests {
    use contract::RopeSpec;

    use super::*;

    #[test]
    fn splits_fill_the_card_and_tiles_fit_it() {
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
            turned: true,
            eps: 1e-6,
            scale: 1.0 / 16.0,
            window: 0,
            mask: Mask::Ancestors,
            ring_pages: 0,
        };
        let config = AttentionConfig {
            gpu: GpuProps::new((9, 0), 132),
            numerics: Numerics::Fastest,
            tree_windows: false,
        };
        assert_eq!(
            (
                shape.splits(config, (1, 4096)),
                shape.splits(config, (24, 4096))
            ),
            (64, 33)
        );
        let exact = AttentionConfig {
            numerics: Numerics::BatchInvariant,
            ..config
        };
        assert_eq!(shape.splits(exact, (1, 4096)), 35);
        assert_eq!(
            [64, 1024, 131_072].map(|tokens| shape.slots(exact, tokens)),
            [2, 16, 35]
        );
        for (rows, short, deep) in [(1, 1, 1), (2, 2, 2), (8, 6, 6), (24, 9, 18), (64, 9, 18)] {
            for (tokens, eights) in [(8192, short), (131_072, deep)] {
                let found = shape.spans(exact, rows, tokens).unwrap();
                assert_eq!(found.eights, eights, "{rows} rows of {tokens} tokens");
                assert!(found.shared_bytes <= config.gpu.shared_bytes);
            }
        }
        assert_eq!(
            shape.scratch_bytes(config, (2, 4096)),
            2 * 24 * 64 * 258 * 4
        );
        assert_eq!(shape.frequencies().len(), 32);
        assert_eq!(shape.frequencies()[0], 1.0);

        for (rows, tiles, resident) in [(1, 1, 2), (8, 6, 1), (24, 9, 1), (64, 12, 1)] {
            let across = shape.across(config, rows);
            assert_eq!((across.tiles, across.resident), (tiles, resident));
            assert!(across.shared_bytes <= config.gpu.shared_bytes && across.ring >= 2);
        }
        for (rows, short, deep) in [(3, 3, 3), (8, 6, 6), (24, 9, 18), (32, 8, 12), (64, 8, 16)] {
            for (tokens, eights) in [(8192, short), (131_072, deep)] {
                let (found, bytes) = shape.trio(config, rows, tokens).unwrap();
                assert_eq!(found, eights, "{rows} rows of {tokens} tokens");
                assert!(bytes <= config.gpu.shared_bytes);
            }
        }
        assert_eq!(shape.trio(config, 1, 131_072), None);
        let half = Shape {
            k: KvFormat::F16,
            v: KvFormat::F16,
            ..shape
        };
        assert_eq!(half.trio(config, 24, 131_072), None);
        assert_eq!(half.spans(exact, 24, 131_072).unwrap().rings, (3, 2));
        assert!(half.by_position(exact) && !half.by_position(config));
        assert!(shape.by_warpgroups(config, 1) && half.by_warpgroups(config, 24));
        assert!(!half.by_warpgroups(config, 1) && half.splits(config, (1, 4096)) == 64);
        let one = shape.tiling(config, 1);
        assert_eq!((one.tiles, one.resident), (1, 2));
        assert!(2 * (one.shared_bytes + 1024) <= 228 * 1024);
        assert_eq!(shape.tiling(config, 24).tiles, 5);
        assert_eq!(shape.tiling(config, 64).tiles, 6);
        let small = AttentionConfig {
            gpu: GpuProps {
                shared_bytes: 99 * 1024,
                ..config.gpu
            },
            ..config
        };
        for rows in [1, 8, 24, 64] {
            let tiling = shape.tiling(small, rows);
            assert!(tiling.shared_bytes <= 99 * 1024 && tiling.ring >= 2);
        }
    }
}
