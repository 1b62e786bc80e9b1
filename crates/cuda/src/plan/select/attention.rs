//! Attention of decode steps and of prefill chunks.

use contract::KvFormat;

use super::Selected;
use crate::gpu_props::GpuProps;
use crate::launch::attention::{
    AttentionConfig, DecodeAttention, DecodeKernel, KEYS_PER_TILE, Mask, PrefillAttention,
    STEP_ROWS, Shape,
};
use crate::numerics::Numerics;
use crate::step::TREES;

/// KV splits of a row at most: what [`combine`](crate::launch::attention::combine) merges in one
/// block.
const MAX_SPLITS: usize = 64;
/// The warp-specialized kernel pays from so many tiles of 8 query columns per block on: below, its
/// pipeline fill is not hidden.
const MIN_WARP_SPECIALIZED_TILES: usize = 12;
/// In sequences of at most so many tokens, blocks take at most so many tiles of 8 query columns.
/// Wide tiles read keys fewer times, but a block with a single KV tile takes longer. One H200, 24
/// rows over Q8_0: 9 tiles and 18 take 10.8 and 16.6 us at 512 keys, 35.5 and 28.9 at 9,000, 233
/// and 184 at 131,072.
const NARROW_TILES: (usize, usize) = (8192, 9);
/// The widest tile of deeper sequences.
const WIDE_TILES: usize = 18;
/// Up to so many tokens a fixed split is one KV tile and the mainloop runs once or twice, so it
/// stays rolled. Measured behind 512 tokens.
const ROLLED_TOKENS: usize = 2048;
/// Steps of so many trees have a kernel of their own.
const FEW_TREES: usize = 4;

/// Rows of a step, and the tokens that its sequences hold at most, nodes included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSize {
    /// Rows, padding included.
    pub rows: usize,
    /// Trees.
    pub trees: usize,
    /// Tokens of the longest sequence.
    pub tokens: usize,
}

impl StepSize {
    /// Trees that a block has plans for. Plans of more leave less room for keys.
    fn tree_plans(self) -> usize {
        if self.trees <= FEW_TREES {
            FEW_TREES
        } else {
            TREES
        }
    }

    fn max_tiles(self) -> usize {
        if self.tokens > NARROW_TILES.0 {
            WIDE_TILES
        } else {
            NARROW_TILES.1
        }
    }
}

fn kv_is_f32(shape: &Shape) -> bool {
    shape.k == KvFormat::F32 || shape.v == KvFormat::F32
}

/// Whether KV splits follow from a row's position alone, so that a tree node has the bits of its
/// token decoded alone.
pub fn has_fixed_splits(shape: &Shape, config: AttentionConfig) -> bool {
    config.numerics == Numerics::BatchInvariant
        && shape.mask == Mask::Ancestors
        && !kv_is_f32(shape)
        && (has_fixed_splits_sm90(shape, config.gpu) || fits_mma(shape, config.gpu))
}

/// Whether the wgmma kernel with fixed KV splits takes steps of every size.
fn has_fixed_splits_sm90(shape: &Shape, gpu: GpuProps) -> bool {
    let deepest = StepSize {
        rows: STEP_ROWS,
        trees: TREES,
        tokens: usize::MAX,
    };
    let (tiles, plans) = (deepest.max_tiles(), deepest.tree_plans());
    gpu.has_wgmma
        && shape.head_dim == 256
        && shape
            .fixed_splits_tile(gpu, STEP_ROWS, tiles, plans)
            .is_some()
}

/// Whether the mma kernel with fixed KV splits takes all query heads of a node at once.
fn fits_mma(shape: &Shape, gpu: GpuProps) -> bool {
    [1, STEP_ROWS]
        .into_iter()
        .all(|rows| 16 * shape.tile(gpu, rows, TREES).tiles >= shape.n_heads / shape.n_kv_heads)
}

/// Whether decode attention reads queries in f16 beside the projection.
pub fn uses_f16_queries(shape: &Shape, config: AttentionConfig) -> bool {
    !kv_is_f32(shape) && (config.numerics == Numerics::Fastest || has_fixed_splits(shape, config))
}

/// The kernel, tile and KV splits of verify attention.
pub fn decode_attention(
    shape: &Shape,
    config: AttentionConfig,
    size: StepSize,
) -> Selected<DecodeAttention> {
    let gpu = config.gpu;
    let fixed = has_fixed_splits(shape, config);
    let Selected { kernel, reason } = decode_kernel(shape, config, size, fixed);
    // As many fixed splits as there are blocks over all KV heads: a multiprocessor has two of few
    // rows of the mma kernel.
    let blocks = match kernel {
        DecodeKernel::FixedSplits { .. } => 2 * gpu.sm_count,
        _ => gpu.sm_count,
    };
    let max_fixed_splits = (blocks / shape.n_kv_heads).clamp(1, MAX_SPLITS);
    let splits = match kernel {
        DecodeKernel::TreeF32 => 1,
        _ if fixed => {
            let before = size.tokens.div_ceil(KEYS_PER_TILE).saturating_sub(2);
            2 + before.min(max_fixed_splits)
        }
        _ => {
            let alone = matches!(kernel, DecodeKernel::WarpSpecializedSm90(_))
                || matches!(kernel, DecodeKernel::TreeSm90(tile) if tile.blocks_per_sm == 1);
            // Two splits per multiprocessor hide latency. One where a wgmma block fills a
            // multiprocessor: the partial results of every split are then most of what is written.
            let blocks = if alone {
                gpu.sm_count
            } else {
                2 * gpu.sm_count
            };
            (blocks / shape.n_kv_heads).clamp(1, MAX_SPLITS)
        }
    };
    let selected = DecodeAttention {
        kernel,
        rows: size.rows,
        splits,
        max_fixed_splits: fixed.then_some(max_fixed_splits),
        tree_windows: config.tree_windows,
        sm_count: gpu.sm_count,
    };
    Selected::new(selected, reason)
}

fn decode_kernel(
    shape: &Shape,
    config: AttentionConfig,
    size: StepSize,
    fixed: bool,
) -> Selected<DecodeKernel> {
    let (gpu, rows) = (config.gpu, size.rows);
    if kv_is_f32(shape) {
        return Selected::new(DecodeKernel::TreeF32, "KV is stored as f32");
    }
    if !uses_f16_queries(shape, config) {
        let reason = "batch-invariant numerics without a fixed-split kernel for this GPU or shape";
        return Selected::new(DecodeKernel::TreeF32, reason);
    }
    let tree_plans = size.tree_plans();
    if fixed
        && has_fixed_splits_sm90(shape, gpu)
        && let Some(tile) = shape.fixed_splits_tile(gpu, rows, size.max_tiles(), tree_plans)
    {
        let kernel = DecodeKernel::FixedSplitsSm90 {
            tile,
            rolled: size.tokens <= ROLLED_TOKENS,
            tree_plans,
        };
        return Selected::new(kernel, "batch-invariant numerics, wgmma, head size 256");
    }
    if fixed {
        let tile = shape.tile(gpu, rows, tree_plans);
        let kernel = DecodeKernel::FixedSplits { tile, tree_plans };
        let reason = "batch-invariant numerics: KV splits follow from positions";
        return Selected::new(kernel, reason);
    }
    let tile = shape.tile_sm90(gpu, rows);
    let alone = tile.blocks_per_sm == 1;
    // A wgmma block of few rows that fills a multiprocessor is slower than two mma blocks.
    if !(gpu.has_wgmma && shape.head_dim == 256 && (!alone || tile.tiles > 2)) {
        let reason = if gpu.has_wgmma && shape.head_dim == 256 {
            "two mma blocks per SM beat one wgmma block of few rows"
        } else {
            "no wgmma kernel for this GPU or head size"
        };
        return Selected::new(DecodeKernel::Tree(shape.tile(gpu, rows, 0)), reason);
    }
    let most = shape.max_warp_specialized_tiles(gpu).unwrap_or(0);
    if alone && most >= MIN_WARP_SPECIALIZED_TILES {
        let deep = size.tokens > NARROW_TILES.0;
        let most = if deep { most } else { NARROW_TILES.1 };
        if let Some(tile) = shape.warp_specialized_tile(rows, most) {
            let kernel = DecodeKernel::WarpSpecializedSm90(tile);
            return Selected::new(kernel, "one block per SM: separate warpgroups hide softmax");
        }
    }
    let reason = if alone {
        "KV tiles leave too little shared memory for warp specialization"
    } else {
        "few rows: two wgmma blocks per SM"
    };
    Selected::new(DecodeKernel::TreeSm90(tile), reason)
}

/// The kernel of attention of a prefill chunk over the KV cache.
pub fn prefill_attention(shape: &Shape, gpu: GpuProps) -> Selected<PrefillAttention> {
    if kv_is_f32(shape) {
        return Selected::new(PrefillAttention::F32, "KV is stored as f32");
    }
    if !(gpu.has_wgmma && shape.head_dim == 256) {
        let reason = "no wgmma kernel for this GPU or head size";
        return Selected::new(PrefillAttention::Mma, reason);
    }
    if shape.window > 0 {
        return Selected::new(PrefillAttention::Mma, "the kernel that has windows");
    }
    if shape.k == KvFormat::F16 && shape.v == KvFormat::F16 {
        return Selected::new(PrefillAttention::Sm90, "f16 KV feeds wgmma as it is stored");
    }
    let reason = "quantized KV is dequantized once for swapped wgmma operands";
    Selected::new(PrefillAttention::SwappedSm90, reason)
}

/// The kernel of attention of a prefill chunk over the key blocks that its queries keep.
pub fn block_sparse_attention(shape: &Shape) -> Selected<PrefillAttention> {
    if kv_is_f32(shape) {
        Selected::new(PrefillAttention::F32, "KV is stored as f32")
    } else {
        Selected::new(PrefillAttention::Mma, "the kernel that skips key blocks")
    }
}

#[cfg(test)]
mod tests {
    use contract::RopeSpec;

    use super::*;

    const SHAPE: Shape = Shape {
        n_heads: 24,
        n_kv_heads: 4,
        head_dim: 256,
        rope: RopeSpec::new(64, 1e7),
        gate: true,
        values_normed: false,
        normed: true,
        k: KvFormat::Q8_0,
        v: KvFormat::Q8_0,
        rotated: true,
        eps: 1e-6,
        scale: 1.0 / 16.0,
        window: 0,
        mask: Mask::Ancestors,
        ring_pages: 0,
    };
    const HALF: Shape = Shape {
        k: KvFormat::F16,
        v: KvFormat::F16,
        ..SHAPE
    };

    fn config(numerics: Numerics) -> AttentionConfig {
        AttentionConfig {
            gpu: GpuProps::new((9, 0), 132),
            numerics,
            tree_windows: false,
        }
    }

    fn of(shape: &Shape, numerics: Numerics, rows: usize, tokens: usize) -> DecodeAttention {
        let size = StepSize {
            rows,
            trees: 1,
            tokens,
        };
        decode_attention(shape, config(numerics), size).kernel
    }

    #[test]
    fn splits_fill_the_gpu() {
        let splits = |shape, numerics, rows, tokens| of(shape, numerics, rows, tokens).splits;
        let (fastest, invariant) = (Numerics::Fastest, Numerics::BatchInvariant);
        assert_eq!(
            [1, 24].map(|rows| splits(&SHAPE, fastest, rows, 4096)),
            [64, 33]
        );
        assert_eq!(splits(&HALF, fastest, 1, 4096), 64);
        assert_eq!(splits(&SHAPE, invariant, 1, 4096), 35);
        assert_eq!(
            [64, 1024, 131_072].map(|tokens| splits(&SHAPE, invariant, 1, tokens)),
            [2, 16, 35]
        );
        let two = of(&SHAPE, fastest, 2, 4096);
        assert_eq!(two.scratch_bytes(&SHAPE), 2 * 24 * 64 * 258 * 4);
        assert_eq!(SHAPE.frequencies(&[]).len(), 32);
        assert_eq!(SHAPE.frequencies(&[])[0], 1.0);
    }

    #[test]
    fn tiles_grow_with_rows_and_depth_within_shared_memory() {
        let gpu = config(Numerics::Fastest).gpu;
        for (rows, short, deep) in [(1, 1, 1), (2, 2, 2), (8, 6, 6), (24, 9, 18), (64, 9, 18)] {
            for (tokens, tiles) in [(8192, short), (131_072, deep)] {
                let found = of(&SHAPE, Numerics::BatchInvariant, rows, tokens).kernel;
                let DecodeKernel::FixedSplitsSm90 { tile, .. } = found else {
                    panic!("{found:?} for {rows} rows of {tokens} tokens");
                };
                assert_eq!(tile.tiles, tiles, "{rows} rows of {tokens} tokens");
                assert!(tile.shared_bytes <= gpu.shared_bytes);
            }
        }
        for (rows, short, deep) in [(3, 3, 3), (8, 6, 6), (24, 9, 18), (32, 8, 12), (64, 8, 16)] {
            for (tokens, tiles) in [(8192, short), (131_072, deep)] {
                let found = of(&SHAPE, Numerics::Fastest, rows, tokens).kernel;
                let DecodeKernel::WarpSpecializedSm90(tile) = found else {
                    panic!("{found:?} for {rows} rows of {tokens} tokens");
                };
                assert_eq!(tile.tiles, tiles, "{rows} rows of {tokens} tokens");
                assert!(tile.shared_bytes <= gpu.shared_bytes);
            }
        }
        for (rows, tiles, blocks) in [(1, 1, 2), (8, 6, 1), (24, 9, 1), (64, 12, 1)] {
            let tile = SHAPE.tile_sm90(gpu, rows);
            assert_eq!((tile.tiles, tile.blocks_per_sm), (tiles, blocks));
            assert!(tile.shared_bytes <= gpu.shared_bytes && tile.k_stages >= 2);
        }
        let one = SHAPE.tile(gpu, 1, 0);
        assert_eq!((one.tiles, one.blocks_per_sm), (1, 2));
        assert!(2 * (one.shared_bytes + 1024) <= 228 * 1024);
        assert_eq!([24, 64].map(|rows| SHAPE.tile(gpu, rows, 0).tiles), [5, 6]);
        let small = GpuProps {
            shared_bytes: 99 * 1024,
            ..gpu
        };
        for rows in [1, 8, 24, 64] {
            let tile = SHAPE.tile(small, rows, TREES);
            assert!(tile.shared_bytes <= 99 * 1024 && tile.k_stages >= 2);
        }
    }

    #[test]
    fn kernels_follow_rows_kv_type_and_numerics() {
        let kernel = |shape, numerics, rows| of(shape, numerics, rows, 131_072).kernel;
        let (fastest, invariant) = (Numerics::Fastest, Numerics::BatchInvariant);
        assert!(matches!(
            kernel(&SHAPE, fastest, 1),
            DecodeKernel::TreeSm90(_)
        ));
        assert!(matches!(kernel(&HALF, fastest, 1), DecodeKernel::Tree(_)));
        // f16 tiles leave too little shared memory for warp specialization.
        assert!(matches!(
            kernel(&HALF, fastest, 24),
            DecodeKernel::TreeSm90(_)
        ));
        let DecodeKernel::FixedSplitsSm90 { tile, .. } = kernel(&HALF, invariant, 24) else {
            panic!("f16 KV has fixed splits");
        };
        assert_eq!((tile.k_stages, tile.v_stages), (3, 2));
        let narrow = Shape {
            head_dim: 128,
            ..SHAPE
        };
        assert!(matches!(
            kernel(&narrow, invariant, 1),
            DecodeKernel::FixedSplits {
                tree_plans: FEW_TREES,
                ..
            }
        ));
        let home = AttentionConfig {
            gpu: GpuProps {
                sm_count: 82,
                shared_bytes: 99 << 10,
                has_wgmma: false,
                launches_overlap: false,
            },
            ..config(invariant)
        };
        for (rows, trees) in [(1, 1), (24, 1), (64, TREES)] {
            let size = StepSize {
                rows,
                trees,
                tokens: 131_072,
            };
            let found = decode_attention(&SHAPE, home, size).kernel;
            let DecodeKernel::FixedSplits { tile, .. } = found.kernel else {
                panic!("{found:?}");
            };
            // A row's splits depend on nothing but its position.
            assert_eq!(found.max_fixed_splits, Some(41));
            assert!(tile.shared_bytes <= home.gpu.shared_bytes && 16 * tile.tiles >= 6);
        }
        let full = Shape {
            k: KvFormat::F32,
            ..SHAPE
        };
        assert_eq!(kernel(&full, invariant, 1), DecodeKernel::TreeF32);
    }
}
