//! All GEMMs between two mixers of a decode step, in one launch of `gemm/fused_layer_sm90.cu`.
//!
//! The phases are: output projection into the residual stream; gate and up with SwiGLU; down into
//! the residual stream; the projections of the next layer. The norms before them are included.

use super::f32_split::{F32GemmInput, F32Split};
pub use super::fused_layer_buffers::{
    FusedLayer, FusedLayerBuffers, FusedLayerMatrices, FusedLayerNorms, FusedLayerWorkspace,
    FusedMatrix, MAX_ROWS, square_sum_bytes,
};
use super::small_batch::{
    self, BLOCK_ROWS, F32_SHARED, ROW_BLOCKS, TILES, kinds_of, packed_scratch_bytes,
};
use super::words::{narrow, pair};
use crate::gpu_props::GpuProps;
use crate::launch::norm::ActivationBuffers;
use crate::launch::{Args, CompileUnit, Launch};
use crate::pack::A16_TILE;
use crate::pack::{ActivationFormat, WeightKind};

/// Maximum matrices of one launch.
const MAX_MATRICES: usize = 8;
/// Matrices of the layer itself; gate and up count as one.
const LAYER_MATRICES: usize = 3;
/// Maximum GEMM phases of a launch, and words of a phase and of a matrix in
/// `gemm/fused_layer_phases.cuh`.
const MAX_PHASES: usize = 4;
const PHASE_WORDS: usize = 12;
const MATRIX_WORDS: usize = 8;
/// Threads of a block: eight MMA warps, a producer warp for weights, one for activations, two idle.
const THREADS: u32 = 384;
/// Shared memory of a block besides the pipeline ring and the f32 matrices, in bytes. It holds
/// barriers, work ranges, the epilogues of two tiles, and the scales that the lanes of eight warps
/// exchange.
const FIXED_SHARED: usize = 14 << 10;
/// Total shared memory of a block, in bytes, if the GPU has it. It is the maximum per block, since
/// its registers leave no room for a second one.
const MAX_SHARED: usize = 227 << 10;
/// Rows of an f32 matrix per job of `gemm/f32_gemm_sm90.cuh`.
const F32_ROWS: usize = 16;
const F32_SPLIT: F32Split = F32Split {
    k_step: 256,
    max_jobs: 120,
};
/// What the fused layers of a model are compiled for; each row bucket has a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FusedLayerConfig {
    kinds: u32,
    f32_matrices: bool,
    /// Bytes.
    ring: usize,
}

impl FusedLayerConfig {
    /// For matrices of these kinds on up to `most_rows` rows; `None` if the GPU has too little
    /// shared memory.
    pub fn new(gpu: GpuProps, most_rows: usize, kinds: &[WeightKind]) -> Option<FusedLayerConfig> {
        let (bits, f32_matrices) = kinds_of(kinds);
        let own = FIXED_SHARED + if f32_matrices { F32_SHARED } else { 0 };
        let room = if gpu.shared_bytes >= small_batch::MAX_SHARED {
            MAX_SHARED
        } else {
            gpu.shared_bytes
        };
        let ring = room.saturating_sub(own) / 128 * 128;
        let packed = || kinds.iter().filter(|kind| **kind != WeightKind::F32);
        let slice_bytes = packed().flat_map(|kind| kind.slice_bytes()).max()?;
        let chunks = packed().map(|kind| kind.slices()).max()?;
        let largest = ROW_BLOCKS * TILES * slice_bytes + most_rows.div_ceil(8) * chunks * A16_TILE;
        // A warp may hold a slice while it waits for the next, and slices wrap around the ring.
        (3 * largest <= ring).then_some(FusedLayerConfig {
            kinds: bits,
            f32_matrices,
            ring,
        })
    }

    fn unit(self, bucket: usize) -> CompileUnit {
        CompileUnit::new("gemm/fused_layer_sm90.cu")
            .define("ROWS", bucket)
            .define("N8_TILES", bucket.div_ceil(8))
            .define("RING_BYTES", self.ring)
            .define("KINDS", self.kinds)
            .define("MAX_MATRICES", MAX_MATRICES)
            .define("F32_MATRICES", u8::from(self.f32_matrices))
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

/// One matrix of a phase.
#[derive(Debug, Clone, Copy)]
struct PhaseMatrix {
    /// The first row block of each tile.
    matrix: FusedMatrix,
    /// The other row blocks of each tile, if they are those of a second matrix.
    second: Option<FusedMatrix>,
    /// f32 `[bucket][matrix.rows]`, or 0.
    out: u64,
}

/// How blocks share a tile if no block works on two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct WholeTileSplit {
    /// Units of a tile.
    units: usize,
    /// Thread blocks of a tile.
    blocks: usize,
}

/// The split of tiles in which each block works on one tile alone and all blocks of a tile reduce
/// it. `None` if a block would then have more units than in an even split of the total cost. In
/// that split a tile switch costs as much as a unit.
fn whole_tile_split(gpu: GpuProps, matrices: &[PhaseMatrix]) -> Option<WholeTileSplit> {
    let blocks = gpu.sm_count;
    let units = matrices[0].matrix.units();
    let alike = matrices.iter().all(|m| m.matrix.units() == units);
    let tiles = matrices
        .iter()
        .map(|m| m.matrix.rows.div_ceil(ROW_BLOCKS * BLOCK_ROWS));
    let tiles: usize = tiles.sum();
    let room = (blocks / tiles).min(units);
    if !alike || room == 0 {
        return None;
    }
    let most = units.div_ceil(room);
    let of_total = (tiles * (units + 1)).div_ceil(blocks);
    (most <= of_total).then(|| WholeTileSplit {
        units,
        blocks: units.div_ceil(most),
    })
}

/// Data-parallel tiles of gate and up per block. `None` if there are fewer tiles than blocks, or
/// more stream-K units than blocks.
fn data_parallel_tiles(gpu: GpuProps, gate: &FusedMatrix) -> Option<usize> {
    let blocks = gpu.sm_count;
    let (tiles, units) = (gate.rows.div_ceil(BLOCK_ROWS), gate.units());
    (tiles >= blocks && tiles % blocks * units <= blocks).then_some(tiles / blocks)
}

/// Builder of the GEMM phases of one launch.
struct Phases {
    gpu: GpuProps,
    bucket: usize,
    matrices: Vec<u64>,
    phases: Vec<u64>,
}

/// What a phase does with its results: the `EPILOGUE_STORE`, `EPILOGUE_ADD_NORM` and
/// `EPILOGUE_SWIGLU` of `gemm/fused_layer_phases.cuh`.
#[derive(Clone, Copy)]
enum PhaseEpilogue {
    Store,
    Add {
        next: ActivationBuffers,
        norm: u64,
        squares: u64,
    },
    SwiGlu {
        halves: u64,
    },
}

/// The input of a phase: f16 rows, and the sums of squares of rows that are still to be scaled.
#[derive(Clone, Copy)]
struct PhaseInput {
    halves: u64,
    squares: u64,
    width: usize,
    /// Input of an earlier phase, cleared once this phase's input is complete.
    consumed: ConsumedRows,
}

/// f16 rows that no later phase reads.
#[derive(Clone, Copy, Default)]
struct ConsumedRows {
    /// Their address; 0 for none.
    at: u64,
    /// Values of a row.
    width: usize,
}

impl Phases {
    fn add_phase(&mut self, x: PhaseInput, matrices: &[PhaseMatrix], results: PhaseEpilogue) {
        let first = self.matrices.len() / MATRIX_WORDS;
        let cost_of = |matrix: &FusedMatrix| ROW_BLOCKS * TILES * matrix.kind.tile_bytes() / 16;
        let costs = matrices.iter().map(|m| cost_of(&m.matrix));
        let max_unit_cost = costs.max().unwrap_or(1);
        let whole_tiles = match results {
            PhaseEpilogue::SwiGlu { .. } => None,
            _ => whole_tile_split(self.gpu, matrices),
        };
        // A tile switch takes a block about as long as a unit.
        let tile_switch_cost = if whole_tiles.is_some() {
            0
        } else {
            max_unit_cost
        };
        let data_parallel = match results {
            PhaseEpilogue::SwiGlu { .. } => {
                data_parallel_tiles(self.gpu, &matrices[0].matrix).unwrap_or(0)
            }
            _ => 0,
        };
        let mut total_cost = 0;
        for &PhaseMatrix {
            matrix,
            second,
            out,
        } in matrices
        {
            let kind = matrix.kind;
            let units = matrix.units();
            let row_blocks = matrix.rows.div_ceil(BLOCK_ROWS);
            let (tiles, others) = match second {
                Some(second) => (row_blocks, second.weight),
                None => (
                    row_blocks.div_ceil(ROW_BLOCKS),
                    matrix.weight + kind.bytes(BLOCK_ROWS, matrix.cols) as u64,
                ),
            };
            // If blocks do not switch tiles, a unit costs as much as a tile has blocks, and a work
            // range as much as a tile has units. So ranges end with tiles.
            let cost = whole_tiles.map_or_else(|| cost_of(&matrix), |split| split.blocks);
            self.matrices.extend([
                matrix.weight,
                others,
                out,
                pair(matrix.rows, matrix.rows),
                pair(kind as usize, units),
                pair(tiles, kind.tile_bytes()),
                pair(kind.slice_bytes()[0], kind.slices()),
                pair(total_cost, cost),
            ]);
            total_cost += tiles * (tile_switch_cost + units * cost);
        }
        let (write, next, norm, squares) = match results {
            PhaseEpilogue::Store => (0, ActivationBuffers::default(), 0, 0),
            PhaseEpilogue::Add {
                next,
                norm,
                squares,
            } => (1, next, norm, squares),
            PhaseEpilogue::SwiGlu { halves } => {
                let next = ActivationBuffers {
                    f16: halves,
                    ..ActivationBuffers::default()
                };
                (2, next, 0, 0)
            }
        };
        self.phases.extend([
            x.halves,
            x.squares,
            next.f16,
            next.f32,
            norm,
            squares,
            x.consumed.at,
            pair(self.vectors_to_zero(x.consumed), tile_switch_cost),
            pair(first, self.matrices.len() / MATRIX_WORDS),
            whole_tiles.map_or_else(
                || small_batch::work_ranges(self.gpu, total_cost, max_unit_cost),
                |split| pair(split.units, 0),
            ),
            pair(write, x.width),
            pair(data_parallel, data_parallel * self.gpu.sm_count),
        ]);
    }

    /// 16-byte words of f16 rows to clear.
    fn vectors_to_zero(&self, rows: ConsumedRows) -> usize {
        ActivationFormat::F16.bytes(self.bucket, rows.width) / 16
    }

    /// `consumed`: the input to clear after all phases.
    fn launch(
        mut self,
        consumed: Option<ConsumedRows>,
        form: FusedLayerConfig,
        memory: &FusedLayerBuffers,
        eps: f32,
        f32_matrices: Option<Vec<u64>>,
    ) -> Launch {
        let n_phases = self.phases.len() / PHASE_WORDS;
        if let Some(consumed) = consumed {
            // One more phase without a GEMM.
            let mut words = [0; PHASE_WORDS];
            (words[6], words[7]) = (consumed.at, pair(self.vectors_to_zero(consumed), 0));
            self.phases.extend(words);
        }
        let Phases {
            gpu,
            bucket,
            matrices: mut words,
            mut phases,
        } = self;
        let n_waited_phases = phases.len() / PHASE_WORDS;
        words.resize(MAX_MATRICES * MATRIX_WORDS, 0);
        phases.resize(MAX_PHASES * PHASE_WORDS, 0);
        words.extend(phases);
        words.extend([
            memory.scratch.0,
            memory.workspace.barrier,
            memory.scales,
            u64::from(eps.to_bits()) | (n_phases as u64) << 32 | (n_waited_phases as u64) << 48,
        ]);
        words.extend(f32_matrices.into_iter().flatten());
        Launch {
            entry: "fused_layer",
            unit: form.unit(bucket),
            grid: [narrow(gpu.sm_count), 1, 1],
            block: [THREADS, 1, 1],
            shared: narrow(form.ring),
            args: Args::new().words(&words),
            cooperative: false,
            overlap: true,
        }
    }
}

/// `F32Params` of `gemm/f32_gemm_sm90.cuh`: groups of 16 rows, K cut into slices where groups alone
/// would leave multiprocessors without work.
fn f32_params(gpu: GpuProps, matrices: &[(FusedMatrix, u64)], input: F32GemmInput) -> Vec<u64> {
    let mut words = Vec::new();
    let mut groups = 0;
    for (matrix, out) in matrices {
        let shape = pair(matrix.rows, matrix.rows);
        words.extend([matrix.weight, *out, shape, pair(0, groups)]);
        groups += matrix.rows.div_ceil(F32_ROWS);
    }
    words.resize(MAX_MATRICES * 4, 0);
    words.extend(F32_SPLIT.input_words(gpu, matrices.len(), groups, input));
    words
}

/// The launch of one fused layer.
///
/// # Panics
/// If the matrices do not [`fits`], or their kinds are not those of `form`.
pub fn launch(gpu: GpuProps, form: FusedLayerConfig, layer: &FusedLayer<'_>) -> Launch {
    let FusedLayer {
        bucket,
        matrices: products,
        norms,
        buffers: memory,
        mixed,
    } = *layer;
    assert!(
        (1..=MAX_ROWS).contains(&bucket),
        "a bucket of {bucket} rows"
    );
    assert!(fits(products), "no fused layer of {products:?}");
    let FusedLayerMatrices {
        out,
        gate,
        up,
        down,
        next,
    } = *products;
    let hidden = out.rows;
    assert!(
        gate.cols == hidden && down.rows == hidden && down.cols == gate.rows,
        "shapes of {products:?}"
    );
    let of_next = next.iter().map(|(matrix, _)| matrix.kind);
    let kinds: Vec<WeightKind> = of_next.chain([out.kind, gate.kind, down.kind]).collect();
    let (bits, has_f32) = kinds_of(&kinds);
    assert!(
        bits & !form.kinds == 0 && (form.f32_matrices || !has_f32),
        "{kinds:?} in {form:?}"
    );
    let mut phases = Phases {
        gpu,
        bucket,
        matrices: Vec::new(),
        phases: Vec::new(),
    };
    let FusedLayerWorkspace { normed, gated, .. } = memory.workspace;
    let unscaled = |halves, consumed| PhaseInput {
        halves,
        squares: 0,
        width: 0,
        consumed,
    };
    let to_scale = |halves, which: usize, consumed| PhaseInput {
        halves,
        squares: memory.squares[which],
        width: hidden,
        consumed,
    };
    let into_normed = PhaseEpilogue::Add {
        next: ActivationBuffers {
            f16: normed,
            ..ActivationBuffers::default()
        },
        norm: norms.ffn,
        squares: memory.squares[0],
    };
    let added = |matrix| {
        [PhaseMatrix {
            matrix,
            second: None,
            out: memory.residual,
        }]
    };
    let input = unscaled(mixed, ConsumedRows::default());
    phases.add_phase(input, &added(out), into_normed);
    let into_gated = PhaseEpilogue::SwiGlu { halves: gated };
    let gate_up = PhaseMatrix {
        matrix: gate,
        second: Some(up),
        out: 0,
    };
    // The previous launch read the next layer's input buffer; the next phase writes it again.
    let of_previous = if next.is_empty() {
        ConsumedRows::default()
    } else {
        ConsumedRows {
            at: memory.next.f16,
            width: hidden,
        }
    };
    let input = to_scale(normed, 0, of_previous);
    phases.add_phase(input, &[gate_up], into_gated);
    let (f32_matrices, packed): (Vec<_>, Vec<_>) =
        next.iter().partition(|(m, _)| m.kind == WeightKind::F32);
    let forms = match (next.is_empty(), f32_matrices.is_empty()) {
        (true, _) => ActivationBuffers::default(),
        (false, true) => ActivationBuffers {
            f32: 0,
            ..memory.next
        },
        (false, false) => memory.next,
    };
    let into_next = PhaseEpilogue::Add {
        next: forms,
        norm: norms.next,
        squares: memory.squares[1],
    };
    let consumed = ConsumedRows {
        at: normed,
        width: hidden,
    };
    let input = unscaled(gated, consumed);
    phases.add_phase(input, &added(down), into_next);
    let of_down = ConsumedRows {
        at: gated,
        width: down.cols,
    };
    if !next.is_empty() {
        let packed: Vec<_> = packed
            .into_iter()
            .map(|(matrix, out)| PhaseMatrix {
                matrix,
                second: None,
                out,
            })
            .collect();
        let input = to_scale(forms.f16, 1, of_down);
        phases.add_phase(input, &packed, PhaseEpilogue::Store);
    }
    let f32_matrices = form.f32_matrices.then(|| {
        let partials = memory.scratch.0 + 2 * packed_scratch_bytes(gpu, bucket) as u64;
        let input = F32GemmInput {
            x: forms.f32,
            cols: hidden,
            partials,
        };
        f32_params(gpu, &f32_matrices, input)
    });
    let consumed = next.is_empty().then_some(of_down);
    phases.launch(consumed, form, memory, norms.eps, f32_matrices)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: GpuProps = GpuProps {
        sm_count: 132,
        shared_bytes: 227 << 10,
        has_wgmma: true,
    };

    fn cut(rows: &[usize], cols: usize) -> Option<(usize, usize)> {
        let of = |&rows: &usize| {
            let matrix = FusedMatrix {
                kind: WeightKind::Q4K,
                rows,
                cols,
                weight: 0,
            };
            PhaseMatrix {
                matrix,
                second: None,
                out: 0,
            }
        };
        let matrices: Vec<_> = rows.iter().map(of).collect();
        whole_tile_split(H200, &matrices).map(|split| (split.units, split.blocks))
    }

    #[test]
    fn tiles_are_not_shared_between_ranges_if_no_block_has_more_units() {
        // 27B: the output projection has 4 units per block, the projections of a delta layer 10, as
        // in an even split.
        assert_eq!(cut(&[5120], 6144), Some((24, 6)));
        assert_eq!(cut(&[10240, 6144], 5120), Some((20, 2)));
        // Down would have 12 instead of 11, the projections of an attention layer 10 instead of 9.
        assert_eq!(cut(&[5120], 17408), None);
        assert_eq!(cut(&[12288, 1024, 1024], 5120), None);
        // More tiles than blocks; and no more blocks of a tile than it has units.
        assert_eq!(cut(&[256 * 133], 512), None);
        assert_eq!(cut(&[256], 512), Some((2, 2)));
    }

    #[test]
    fn blocks_have_data_parallel_tiles_if_few_tiles_remain() {
        let of = |rows, cols| {
            let matrix = FusedMatrix {
                kind: WeightKind::Q4K,
                rows,
                cols,
                weight: 0,
            };
            data_parallel_tiles(H200, &matrix)
        };
        // 27B: 136 tiles, 4 stream-K tiles with 80 units.
        assert_eq!(of(17408, 5120), Some(1));
        assert_eq!(of(128 * 264, 5120), Some(2));
        // Fewer tiles than blocks; 140 stream-K units.
        assert_eq!(of(12288, 4096), None);
        assert_eq!(of(128 * 139, 5120), None);
    }
}
