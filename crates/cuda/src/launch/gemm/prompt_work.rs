//! What the launches of a prompt's GEMMs compute, read back from their parameters.

use super::panels::{PANEL, TILE};
use crate::launch::Launch;
use crate::pack::WeightKind;

/// Words of the parameters of `gemm/prefill_gemm.cu`, and of those of `gemm/prefill_dequant.cu`.
const W_ROWS_WORD: usize = 4;
const K_TILES_WORD: usize = 5;
const SPLITS_WORD: usize = 6;
const DEQUANT_ROWS_WORD: usize = 1;
const DEQUANT_K_TILES_WORD: usize = 3;
/// Values of K in a slice of the main loop.
const SLICE: usize = 32;

/// A launch of `gemm/prefill_gemm.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TileWork {
    /// Rows of weights, padding included.
    pub(crate) w_rows: usize,
    /// Values of K.
    pub(crate) cols: usize,
    /// Work units: tiles times splits of K.
    pub(crate) tiles: usize,
    /// Slices of a work unit.
    pub(crate) slices: usize,
}

/// The work of a launch over `rows` rows; `None` for another kernel.
pub(crate) fn tile_work(launch: &Launch, rows: usize) -> Option<TileWork> {
    if launch.unit.file != "gemm/prefill_gemm.cu" {
        return None;
    }
    let word = |at: usize| usize::try_from(*launch.args.as_words().get(at)?).ok();
    let columns = launch.unit.defines.iter();
    let columns = columns.clone().find(|(name, _)| *name == "TILE_COLUMNS")?;
    let columns: usize = columns.1.parse().ok()?;
    let splits = if launch.entry == "prefill_gemm" {
        word(SPLITS_WORD)?
    } else {
        1
    };
    let (w_rows, k_tiles) = (word(W_ROWS_WORD)?, word(K_TILES_WORD)?);
    Some(TileWork {
        w_rows,
        cols: k_tiles * PANEL,
        tiles: rows.div_ceil(TILE) * (w_rows / columns) * splits,
        slices: k_tiles.div_ceil(splits) * PANEL / SLICE,
    })
}

/// Bytes that a launch of `gemm/prefill_dequant.cu` reads and writes; 0 for another kernel.
pub(crate) fn dequantized_bytes(launch: &Launch) -> usize {
    let word = |at: usize| {
        let word = launch.args.as_words().get(at);
        word.and_then(|&word| usize::try_from(word).ok())
            .unwrap_or(0)
    };
    let kind = launch.unit.defines.iter();
    let kind = kind.clone().find(|(name, _)| *name == "WEIGHT_KIND");
    let number = kind.and_then(|(_, number)| number.parse().ok());
    let is_own = |kind: &WeightKind| Some(*kind as usize) == number;
    let Some(kind) = WeightKind::ALL.into_iter().find(is_own) else {
        return 0;
    };
    let (rows, cols) = (word(DEQUANT_ROWS_WORD), word(DEQUANT_K_TILES_WORD) * PANEL);
    kind.bytes(rows, cols) + rows * cols * 2
}

#[cfg(test)]
mod tests {
    use super::super::panels::ChunkRows;
    use super::super::prefill::{
        DequantScratch, PrefillGemm, PrefillGemmInputs, PrefillGemmKernel, gemm,
    };
    use super::super::small_batch::{GemmEpilogue, GemmMatrix};
    use super::*;

    #[test]
    fn the_work_of_a_prompt_is_read_from_the_parameters_of_its_launches() {
        let of = |sm_count, rows, cols, chunk| {
            let matrix = GemmMatrix {
                kind: WeightKind::Q4K,
                rows,
                weight: 256,
                out: 512,
                stride: rows,
                write: GemmEpilogue::Store,
            };
            let kernel = PrefillGemm {
                kernel: PrefillGemmKernel::Mma,
                sm_count,
            };
            let chunk = ChunkRows {
                header: 64,
                rows: chunk,
            };
            let inputs = PrefillGemmInputs {
                panels: 1024,
                f32: 0,
            };
            let scratch = DequantScratch {
                weights: 4096,
                weight_bytes: 1 << 30,
                split_k_flags: 128,
            };
            let launches = gemm(kernel, chunk, cols, &[matrix], inputs, scratch);
            assert_eq!(launches.len(), 2);
            let bytes = dequantized_bytes(&launches[0]);
            assert_eq!(bytes, WeightKind::Q4K.bytes(rows, cols) + 2 * rows * cols);
            tile_work(&launches[1], chunk.rows).map(|work| (work.tiles, work.slices))
        };
        // Large tiles; two splits of K where one wave in three would be mostly idle.
        assert_eq!(of(82, 5120, 17_408, 2048), Some((16 * 20, 544)));
        assert_eq!(of(132, 5120, 17_408, 2048), Some((2 * 16 * 20, 272)));
        // Small tiles where large ones would leave most multiprocessors without work.
        assert_eq!(of(132, 1024, 1024, 2048), Some((16 * 8, 32)));
    }
}
