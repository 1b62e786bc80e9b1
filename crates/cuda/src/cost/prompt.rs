//! What a chunk of a prompt takes of a GPU: its GEMMs in `gemm/prefill_gemm.cu`, and the
//! dequantisation of their weights.
//!
//! A tile takes the longest of what tensor cores, issue slots, integer pipes and shared memory need
//! for its slices of K, by a fitted efficiency, then the instructions outside its main loop; tiles
//! come in waves of one per multiprocessor. Dequantisation takes what it reads and writes of
//! memory. Attention, the delta rule and norms are not counted.

use std::collections::{BTreeMap, BTreeSet};

use super::counts::Counts;
use super::rates::GpuRates;
use super::sheet::{CostError, UnitCode, kernel_of, main_loop};
use crate::launch::gemm::prompt_work::{TileWork, dequantized_bytes, tile_work};
use crate::launch::{CompileUnit, Launch};

/// Schedulers of a multiprocessor.
const SCHEDULERS: f64 = 4.0;
/// Warps of a block.
const WARPS: f64 = 8.0;

/// Constants that are fitted to measured GEMMs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PromptFit {
    /// Share of the longest rate that main loops reach.
    pub efficiency: f64,
    /// Clocks of an instruction outside the main loop.
    pub path_clocks: f64,
}

/// GEMMs that are alike.
#[derive(Debug, Clone, PartialEq)]
pub struct TiledGemm {
    /// How many launches of them there are.
    pub count: usize,
    /// The unit.
    pub unit: CompileUnit,
    work: TileWork,
    /// Instructions of a warp in a slice of K.
    pub per_slice: Counts,
    /// Instructions of a warp outside the main loop, per tile.
    pub path: f64,
}

/// The launches of a chunk.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptSheet {
    /// Rows of the chunk.
    pub rows: usize,
    /// GEMMs of packed matrices.
    pub gemms: Vec<TiledGemm>,
    /// Bytes that dequantisation reads and writes.
    pub dequantized_bytes: usize,
}

/// Milliseconds of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PromptTimes {
    /// Products at the peak of tensor cores.
    pub floor: f64,
    /// GEMMs.
    pub gemms: f64,
    /// Dequantisation.
    pub dequantize: f64,
}

impl PromptSheet {
    /// The units to compile and list for a chunk's launches.
    pub fn units(launches: &[Launch]) -> Vec<CompileUnit> {
        let gemms = launches
            .iter()
            .filter(|launch| tile_work(launch, 1).is_some());
        let units: BTreeSet<CompileUnit> = gemms.map(|launch| launch.unit.clone()).collect();
        units.into_iter().collect()
    }

    /// The costs of a chunk of `rows` rows, by the code of [`PromptSheet::units`].
    ///
    /// # Errors
    /// [`CostError`] if a GEMM is not in the code, or has no loop of products.
    pub fn new(
        rows: usize,
        launches: &[Launch],
        code: &BTreeMap<CompileUnit, UnitCode>,
    ) -> Result<PromptSheet, CostError> {
        let mut sheet = PromptSheet {
            rows,
            gemms: Vec::new(),
            dequantized_bytes: launches.iter().map(dequantized_bytes).sum(),
        };
        for launch in launches {
            let Some(work) = tile_work(launch, rows) else {
                continue;
            };
            let alike = |gemm: &&mut TiledGemm| gemm.work == work && gemm.unit == launch.unit;
            if let Some(gemm) = sheet.gemms.iter_mut().find(alike) {
                gemm.count += 1;
                continue;
            }
            let kernel = kernel_of(code, &launch.unit, launch.entry)?;
            let main = main_loop(&launch.unit, kernel.product_loops())?;
            sheet.gemms.push(TiledGemm {
                count: 1,
                unit: launch.unit.clone(),
                work,
                per_slice: main.once,
                path: kernel.path(true, &|_| 1.0),
            });
        }
        Ok(sheet)
    }

    /// The times of a chunk on a GPU.
    pub fn times(&self, gpu: &GpuRates, fit: &PromptFit) -> PromptTimes {
        let clock_ms = 1e-6 / gpu.ghz;
        let mut times = PromptTimes {
            dequantize: self.dequantized_bytes as f64 / gpu.read_gb_s * 1e-6,
            ..PromptTimes::default()
        };
        for gemm in &self.gemms {
            let (count, work) = (gemm.count as f64, gemm.work);
            let products = self.rows as f64 * work.w_rows as f64 * work.cols as f64;
            // HMMA.16816 multiplies 16 x 8 by 16 values of K.
            let mmas = products / (16.0 * 8.0 * 16.0);
            times.floor +=
                count * mmas * gpu.hmma_clocks / (gpu.sms as f64 * SCHEDULERS) * clock_ms;
            let of_slice = &gemm.per_slice;
            let warps = WARPS / SCHEDULERS;
            let tensor = warps
                * (of_slice.tensor_f16 as f64 * gpu.hmma_clocks
                    + of_slice.tensor_other as f64 * gpu.imma_clocks);
            let issue = warps * of_slice.total() as f64;
            let integer = warps * of_slice.integer as f64 * gpu.integer_clocks;
            let shared = WARPS * of_slice.shared_clocks as f64;
            let slice = tensor.max(issue).max(integer).max(shared) / fit.efficiency;
            let tile = work.slices as f64 * slice + gemm.path * fit.path_clocks;
            let waves = work.tiles.div_ceil(gpu.sms) as f64;
            times.gemms += count * waves * tile * clock_ms;
        }
        times
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::rates::{H100, RTX_3090};

    #[test]
    fn tiles_come_in_waves_and_take_their_longest_part() {
        let per_slice = Counts {
            tensor_f16: 64,
            control: 100,
            shared_clocks: 88,
            ..Counts::default()
        };
        let sheet = PromptSheet {
            rows: 2048,
            gemms: vec![TiledGemm {
                count: 2,
                unit: CompileUnit::new("gemm/prefill_gemm.cu"),
                work: TileWork {
                    w_rows: 5120,
                    cols: 5120,
                    tiles: 320,
                    slices: 160,
                },
                per_slice,
                path: 1_000.0,
            }],
            dequantized_bytes: 861_000_000,
        };
        let fit = PromptFit {
            efficiency: 0.9,
            path_clocks: 2.0,
        };
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-3 * b, "{a} {b}");
        let times = sheet.times(&RTX_3090, &fit);
        near(times.dequantize, 1.0);
        // 2048 x 5120 x 5120 products, 2048 of them in 32 clocks of one of 328 tensor cores.
        near(times.floor, 2.0 * 5120.0 * 5120.0 * 32.0 / 328.0 / 1.70e6);
        // Four waves of 160 slices of 128 products of 32 clocks for each scheduler.
        let tile = 160.0 * 4096.0 / 0.9 + 2_000.0;
        near(times.gemms, 2.0 * 4.0 * tile / 1.70e6);
        // On an H100 three waves, and products are next to shared memory.
        let tile = 160.0 * 128.0 * 6.7 / 0.9 + 2_000.0;
        near(sheet.times(&H100, &fit).gemms, 2.0 * 3.0 * tile / 1.98e6);
    }
}
