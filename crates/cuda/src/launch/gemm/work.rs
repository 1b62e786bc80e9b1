//! What a launch of `gemm/decode_gemm_small_batch.cu` or of a fused layer computes, read back from
//! its parameters.

use super::fused_layer::{MAX_PHASES, PHASE_RANGE_WORD, PHASE_WORDS};
use super::fused_layer_config;
use super::small_batch::{BLOCK_ROWS, MAX_MATRICES, ROW_BLOCKS, TILES};
use crate::launch::{CompileUnit, Launch};
use crate::pack::{A16_TILE, WeightKind};

/// Words of a matrix in the parameters, and which of them hold kind, units and tiles.
const MATRIX_WORDS: usize = 8;
const KIND_WORD: usize = 3;
const UNITS_WORD: usize = 4;
/// The same in a fused layer: a word of kind and units, and the word of tiles.
const FUSED_KIND_WORD: usize = 4;
const FUSED_TILES_WORD: usize = 5;

/// One packed matrix of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MatrixWork {
    /// Its layout.
    pub(crate) kind: WeightKind,
    /// Work units in all: units along K times tiles of 256 rows.
    pub(crate) units: usize,
    /// Bytes of weights that they read.
    pub(crate) weight_bytes: usize,
}

fn low(word: u64) -> usize {
    usize::try_from(word & 0xffff_ffff).unwrap_or(0)
}

fn high(word: u64) -> usize {
    usize::try_from(word >> 32).unwrap_or(0)
}

/// The packed matrices of a launch; none for another kernel.
pub(crate) fn matrices(launch: &Launch) -> Vec<MatrixWork> {
    let words = &launch.args.words;
    let (n_matrices, is_fused) = match launch.entry {
        "gemm_small_batch" => {
            let count = words.get(MAX_MATRICES * MATRIX_WORDS + 2);
            (count.map_or(0, |word| low(*word)), false)
        }
        "fused_layer" => (fused_phases(words).map(high).max().unwrap_or(0), true),
        _ => return Vec::new(),
    };
    words
        .chunks_exact(MATRIX_WORDS)
        .take(n_matrices)
        .filter_map(|matrix| {
            let (number, units) = if is_fused {
                let of_kind = matrix[FUSED_KIND_WORD];
                (low(of_kind), high(of_kind) * low(matrix[FUSED_TILES_WORD]))
            } else {
                let units = matrix[UNITS_WORD];
                (high(matrix[KIND_WORD]), low(units) * high(units))
            };
            let kind = WeightKind::ALL
                .into_iter()
                .find(|kind| *kind as usize == number)?;
            Some(MatrixWork {
                kind,
                units,
                weight_bytes: units * ROW_BLOCKS * TILES * kind.tile_bytes(),
            })
        })
        .collect()
}

/// First and end matrix of each phase of a fused layer.
fn fused_phases(words: &[u64]) -> impl Iterator<Item = u64> {
    let phases = words.get(fused_layer_config::MAX_MATRICES * MATRIX_WORDS..);
    let phases = phases.unwrap_or_default().chunks_exact(PHASE_WORDS);
    phases.take(MAX_PHASES).map(|phase| phase[PHASE_RANGE_WORD])
}

/// GEMM phases of a launch, one after the other: 1 but for a fused layer.
pub(crate) fn phases(launch: &Launch) -> usize {
    if launch.entry == "fused_layer" {
        fused_phases(&launch.args.words)
            .filter(|&range| high(range) > 0)
            .count()
    } else {
        1
    }
}

/// The unit of a launch with one kind of weights only, so that it has one main loop.
pub(crate) fn unit_of_kind(launch: &Launch, kind: WeightKind) -> CompileUnit {
    let mut unit = launch.unit.clone();
    for (name, value) in &mut unit.defines {
        match *name {
            "KINDS" => *value = (1_u32 << kind as u32).to_string(),
            "F32_MATRICES" => *value = "0".to_owned(),
            _ => {}
        }
    }
    unit
}

/// Copies of 16 bytes that each thread makes per slice of a unit, for either half of the tile's
/// rows and for the input of `n8_tiles` tiles of 8 rows.
pub(crate) fn copies_of_slice(kind: WeightKind, slice: usize, n8_tiles: usize) -> [usize; 3] {
    const THREAD_BYTES: usize = 16 * 256;
    let weights = BLOCK_ROWS / 16 * kind.slice_bytes()[slice];
    let input = kind.slices() * n8_tiles * A16_TILE;
    [weights, weights, input].map(|bytes| bytes.div_ceil(THREAD_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu_props::GpuProps;
    use crate::launch::gemm::small_batch::{
        GemmEpilogue, GemmInputs, GemmMatrix, GemmScratch, launches,
    };

    #[test]
    fn the_work_of_a_launch_is_read_from_its_parameters() {
        let gpu = GpuProps::new((8, 6), 82);
        let matrix = |kind, rows| GemmMatrix {
            kind,
            rows,
            weight: 256,
            out: 512,
            stride: rows,
            write: GemmEpilogue::Store,
        };
        let both = [matrix(WeightKind::Q4K, 512), matrix(WeightKind::Q6K, 300)];
        let inputs = GemmInputs { f16: 1024, f32: 0 };
        let launch = &launches(gpu, 1, 1024, &both, inputs, GemmScratch(4096))[0];
        let found = matrices(launch);
        assert_eq!((found[0].kind, found[0].units), (WeightKind::Q4K, 8));
        assert_eq!((found[1].kind, found[1].units), (WeightKind::Q6K, 8));
        assert_eq!(found[0].weight_bytes, 8 * 256 * 144);
        assert_eq!(unit_of_kind(launch, WeightKind::Q6K).defines[3].1, "4");
        assert_eq!(copies_of_slice(WeightKind::Q4K, 0, 3), [3, 3, 2]);
        assert_eq!(phases(launch), 1);
    }
}
