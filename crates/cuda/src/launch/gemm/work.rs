//! What a launch of `gemm/decode_gemm_small_batch.cu` computes, read back from its parameters.

use super::small_batch::{BLOCK_ROWS, MAX_MATRICES, ROW_BLOCKS, TILES};
use crate::launch::{CompileUnit, Launch};
use crate::pack::{A16_TILE, WeightKind};

/// Words of a matrix in the parameters, and which of them hold kind, units and tiles.
const MATRIX_WORDS: usize = 8;
const KIND_WORD: usize = 3;
const UNITS_WORD: usize = 4;

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

/// The packed matrices of a launch; none for another kernel.
pub(crate) fn matrices(launch: &Launch) -> Vec<MatrixWork> {
    if launch.entry != "gemm_small_batch" {
        return Vec::new();
    }
    let words = &launch.args.words;
    let low = |word: u64| usize::try_from(word & 0xffff_ffff).unwrap_or(0);
    let high = |word: u64| usize::try_from(word >> 32).unwrap_or(0);
    let n_matrices = words.get(MAX_MATRICES * MATRIX_WORDS + 2);
    words
        .chunks_exact(MATRIX_WORDS)
        .take(n_matrices.map_or(0, |word| low(*word)))
        .filter_map(|matrix| {
            let number = high(matrix[KIND_WORD]);
            let kind = WeightKind::ALL
                .into_iter()
                .find(|kind| *kind as usize == number)?;
            let units = low(matrix[UNITS_WORD]) * high(matrix[UNITS_WORD]);
            Some(MatrixWork {
                kind,
                units,
                weight_bytes: units * ROW_BLOCKS * TILES * kind.tile_bytes(),
            })
        })
        .collect()
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
    }
}
