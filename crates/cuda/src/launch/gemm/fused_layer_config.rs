//! What fused layers are compiled for, and which matrices they take.

use super::f32_split::F32Split;
use super::fused_layer_buffers::{FusedLayerMatrices, FusedMatrix};
use super::small_batch::{F32_SHARED, ROW_BLOCKS, TILES, kinds_of};
use crate::gpu_props::GpuProps;
use crate::launch::CompileUnit;
use crate::pack::{A16_TILE, ActivationFormat, WeightKind};

/// Maximum matrices of one launch.
pub(super) const MAX_MATRICES: usize = 8;
/// Matrices of the layer itself; gate and up count as one.
const LAYER_MATRICES: usize = 3;
/// Rows of an f32 matrix per job of `gemm/f32_gemm_tf32.cuh`.
pub(super) const F32_ROWS: usize = 16;
pub(super) const F32_SPLIT: F32Split = F32Split {
    k_step: 256,
    max_jobs: 120,
};
/// Shared memory of a block besides the pipeline ring and the f32 matrices, in bytes. It holds
/// barriers, work ranges, the epilogues of two tiles, and the scales that the lanes of eight warps
/// exchange.
const FIXED_SHARED: usize = 14 << 10;
/// The same in `gemm/fused_layer.cu`, and what f32 matrices add there.
const MMA_FIXED_SHARED: usize = 13 << 10;
const MMA_F32_SHARED: usize = 8 << 10;
/// Rows up to which a stage of x holds a whole slice in that kernel; of more rows it holds 64
/// values.
const MMA_SLICE_ROWS: usize = 32;
/// Stages of x there from 17 rows on.
const MMA_X_STAGES: usize = 3;
/// MMA warps, each with a ring of its own weights in `gemm/fused_layer.cu`.
const MMA_WARPS: usize = 8;
/// Total shared memory of a block, in bytes, if the GPU has it. It is the maximum per block, since
/// its registers leave no room for a second one.
const MAX_SHARED: usize = 227 << 10;

/// The source of a fused layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FusedLayerForm {
    /// `gemm/fused_layer_sm90.cu`: bulk copies and wgmma.
    Sm90,
    /// `gemm/fused_layer.cu`: cp.async and mma.sync.
    Mma,
}

impl FusedLayerForm {
    /// The file.
    pub(crate) fn file(self) -> &'static str {
        match self {
            FusedLayerForm::Sm90 => "gemm/fused_layer_sm90.cu",
            FusedLayerForm::Mma => "gemm/fused_layer.cu",
        }
    }
}

/// What the fused layers of a model are compiled for; each row bucket has a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FusedLayerConfig {
    form: FusedLayerForm,
    /// Bit `i`: kind `i` occurs.
    kinds: u32,
    pub(super) f32_matrices: bool,
    /// Dynamic shared memory of a block, in bytes.
    pub(super) ring: usize,
    /// Maximum rows of one launch, a multiple of 8.
    pub(super) max_rows: usize,
}

impl FusedLayerConfig {
    /// For matrices of these kinds on up to `most_rows` rows, a multiple of 8; `None` if the GPU
    /// has too little shared memory. Where it is too little for so many rows at once, a launch
    /// takes fewer.
    pub fn new(gpu: GpuProps, most_rows: usize, kinds: &[WeightKind]) -> Option<FusedLayerConfig> {
        let form = if gpu.has_wgmma {
            FusedLayerForm::Sm90
        } else {
            FusedLayerForm::Mma
        };
        let (bits, f32_matrices) = kinds_of(kinds);
        let packed = || kinds.iter().filter(|kind| **kind != WeightKind::F32);
        let slice_bytes = packed().flat_map(|kind| kind.slice_bytes()).max()?;
        let chunks = packed().map(|kind| kind.slices()).max()?;
        let x_bytes = |rows: usize| rows.div_ceil(8) * chunks * A16_TILE;
        // Room, what is beside the ring, and its least size by the rows of a launch, most first.
        let (room, fixed, f32_shared, least) = match form {
            // A warp may hold a slice while it waits for the next, and slices wrap around the ring.
            FusedLayerForm::Sm90 => {
                let largest = ROW_BLOCKS * TILES * slice_bytes + x_bytes(most_rows);
                let room = gpu.shared_bytes.min(MAX_SHARED);
                (
                    room,
                    FIXED_SHARED,
                    F32_SHARED,
                    vec![(most_rows, 3 * largest)],
                )
            }
            // A slice wraps around the ring of a warp as a whole.
            FusedLayerForm::Mma => {
                let rings = MMA_WARPS * 2 * ROW_BLOCKS * slice_bytes;
                let few = rings + MMA_X_STAGES * x_bytes(most_rows.min(MMA_SLICE_ROWS));
                let many = few.max(rings + MMA_X_STAGES * most_rows.div_ceil(8) * A16_TILE);
                let least = vec![(most_rows, many), (most_rows.min(MMA_SLICE_ROWS), few)];
                (gpu.shared_bytes, MMA_FIXED_SHARED, MMA_F32_SHARED, least)
            }
        };
        let own = fixed + if f32_matrices { f32_shared } else { 0 };
        let ring = room.saturating_sub(own) / 128 * 128;
        let (max_rows, _) = least.into_iter().find(|(_, least)| *least <= ring)?;
        Some(FusedLayerConfig {
            form,
            kinds: bits,
            f32_matrices,
            ring,
            max_rows,
        })
    }

    /// `exchanges`: whether sums are exchanged with another shard.
    pub(super) fn unit(self, rows: usize, exchanges: bool) -> CompileUnit {
        let unit = CompileUnit::new(self.form.file())
            .define("ROWS", rows)
            .define("N8_TILES", rows.div_ceil(8))
            .define("RING_BYTES", self.ring)
            .define("KINDS", self.kinds)
            .define("MAX_MATRICES", MAX_MATRICES)
            .define("F32_MATRICES", u8::from(self.f32_matrices));
        if exchanges {
            unit.define("EXCHANGE", 1)
        } else {
            unit
        }
    }

    /// The source.
    pub(crate) fn form(self) -> FusedLayerForm {
        self.form
    }

    /// Whether it is compiled for matrices of these kinds.
    pub(super) fn has(self, kinds: &[WeightKind]) -> bool {
        let (bits, has_f32) = kinds_of(kinds);
        bits & !self.kinds == 0 && (self.f32_matrices || !has_f32)
    }
}

/// Whether the matrices fit a fused layer. Gate and up must be alike, all must be packed except
/// some of the next layer's, and the launch must have entries for all.
pub fn fits(products: &FusedLayerMatrices<'_>) -> bool {
    let FusedLayerMatrices {
        out,
        gate,
        up,
        down,
        next,
    } = products;
    let of_next = || next.iter().map(|(matrix, _)| matrix);
    let packed = |matrix: &FusedMatrix| matrix.kind.input() == ActivationFormat::F16;
    let n_packed = of_next().filter(|m| packed(m)).count();
    let f32_matrices = of_next().filter(|m| !packed(m));
    [out, gate, up, down].into_iter().all(packed)
        && (gate.kind, gate.rows, gate.cols) == (up.kind, up.rows, up.cols)
        && (next.is_empty() || n_packed > 0)
        && LAYER_MATRICES + n_packed <= MAX_MATRICES
        && next.len() - n_packed <= MAX_MATRICES
        && f32_matrices.map(|m| m.rows.div_ceil(F32_ROWS)).sum::<usize>() <= F32_SPLIT.max_jobs
        && of_next().all(|m| packed(m) || m.cols.is_multiple_of(4))
        // Weights of norms come by 16 bytes.
        && out.rows.is_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use super::super::fused_layer_buffers::MAX_ROWS;
    use super::*;

    #[test]
    fn a_home_gpu_holds_the_slices_of_k_quants() {
        let kinds = [WeightKind::Q4K, WeightKind::Q6K, WeightKind::F32];
        let home = GpuProps::new((8, 6), 82);
        let config = FusedLayerConfig::new(home, MAX_ROWS, &kinds).unwrap();
        assert_eq!((config.ring, config.max_rows), (78 << 10, 64));
        assert!(config.has(&kinds[..2]) && !config.has(&[WeightKind::Q8]));
        // 16-bit weights have larger slices: fewer rows at once, and beside whole K-quant slices of
        // x the ring of a warp does not hold two.
        let halves = FusedLayerConfig::new(home, MAX_ROWS, &[WeightKind::F16, WeightKind::F32]);
        assert_eq!(halves.map(|config| config.max_rows), Some(32));
        let wide = [WeightKind::Q6K, WeightKind::F16, WeightKind::F32];
        assert_eq!(FusedLayerConfig::new(home, MAX_ROWS, &wide), None);
        let hopper = FusedLayerConfig::new(GpuProps::new((9, 0), 132), MAX_ROWS, &kinds).unwrap();
        assert_eq!((hopper.ring, hopper.max_rows), (196 << 10, 64));
    }
}
