//! All GEMMs between two mixers of a decode step, in one launch of `gemm/fused_layer_sm90.cu` or
//! `gemm/fused_layer.cu`.
//!
//! The phases are: output projection into the residual stream; gate and up with SwiGLU; down into
//! the residual stream; the projections of the next layer. The norms before them are included.

use super::f32_split::F32GemmInput;
pub use super::fused_layer_buffers::{
    FusedLayer, FusedLayerBuffers, FusedLayerMatrices, FusedLayerNorms, FusedLayerWorkspace,
    FusedMatrix, MAX_ROWS, square_sum_bytes,
};
pub(crate) use super::fused_layer_config::FusedLayerForm;
use super::fused_layer_config::{F32_ROWS, F32_SPLIT, MAX_MATRICES};
pub use super::fused_layer_config::{FusedLayerConfig, fits};
use super::small_batch::{self, BLOCK_ROWS, ROW_BLOCKS, TILES, packed_scratch_bytes};
use super::words::{narrow, pair};
use crate::gpu_props::GpuProps;
use crate::launch::norm::ActivationBuffers;
use crate::launch::{Args, Launch};
use crate::pack::A16_TILE;
use crate::pack::{ActivationFormat, WeightKind};

/// Maximum GEMM phases of a launch, and words of a phase and of a matrix in
/// `gemm/fused_layer_phases.cuh`.
pub(super) const MAX_PHASES: usize = 4;
pub(super) const PHASE_WORDS: usize = 12;
/// The word of a phase that has its first matrix and the one behind its last.
pub(super) const PHASE_RANGE_WORD: usize = 8;
const MATRIX_WORDS: usize = 8;
/// Threads of a block: eight MMA warps, two producer warps, two auxiliary warps.
const THREADS: u32 = 384;

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
    /// Rows of the launch.
    rows: usize,
    /// Bytes from 64 values of the first phase's input to the next.
    x_chunk_stride: usize,
    matrices: Vec<u64>,
    phases: Vec<u64>,
    /// Whether sums are exchanged with another shard.
    exchanges: bool,
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
        /// Where sums are exchanged with another shard; 0 without one.
        exchange: u64,
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
    /// Words of a phase.
    fn phase_words(&self) -> usize {
        PHASE_WORDS + usize::from(self.exchanges)
    }

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
        let exchange = match results {
            PhaseEpilogue::Add { exchange, .. } => exchange,
            PhaseEpilogue::Store | PhaseEpilogue::SwiGlu { .. } => 0,
        };
        let (write, next, norm, squares) = match results {
            PhaseEpilogue::Store => (0, ActivationBuffers::default(), 0, 0),
            PhaseEpilogue::Add {
                next,
                norm,
                squares,
                ..
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
        if self.exchanges {
            self.phases.push(exchange);
        }
    }

    /// 16-byte words of f16 rows to clear.
    fn vectors_to_zero(&self, rows: ConsumedRows) -> usize {
        ActivationFormat::F16.bytes(self.rows, rows.width) / 16
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
        let phase_words = self.phase_words();
        let n_phases = self.phases.len() / phase_words;
        if let Some(consumed) = consumed {
            // One more phase without a GEMM.
            let mut words = vec![0; phase_words];
            (words[6], words[7]) = (consumed.at, pair(self.vectors_to_zero(consumed), 0));
            self.phases.extend(words);
        }
        let Phases {
            gpu,
            rows,
            x_chunk_stride,
            matrices: mut words,
            mut phases,
            exchanges,
        } = self;
        let n_waited_phases = phases.len() / phase_words;
        words.resize(MAX_MATRICES * MATRIX_WORDS, 0);
        phases.resize(MAX_PHASES * phase_words, 0);
        words.extend(phases);
        words.extend([
            memory.scratch.0,
            memory.workspace.barrier,
            memory.scales,
            u64::from(eps.to_bits()) | (n_phases as u64) << 32 | (n_waited_phases as u64) << 48,
            pair(x_chunk_stride, 0),
        ]);
        words.extend(f32_matrices.into_iter().flatten());
        Launch {
            entry: "fused_layer",
            unit: form.unit(rows, exchanges),
            grid: [narrow(gpu.sm_count), 1, 1],
            block: [THREADS, 1, 1],
            shared: narrow(form.ring),
            args: Args::new().words(&words),
            cooperative: false,
            overlap: true,
        }
    }
}

/// `F32Params` of `gemm/f32_gemm_tf32.cuh`: groups of 16 rows, K cut into slices where groups alone
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

/// The launches of one fused layer: one, or more if its rows are too many for one.
///
/// # Panics
/// If the matrices do not [`fits`], or their kinds are not those of `form`.
pub fn launches(gpu: GpuProps, form: FusedLayerConfig, layer: &FusedLayer<'_>) -> Vec<Launch> {
    let bucket = layer.bucket;
    assert!(
        (1..=MAX_ROWS).contains(&bucket),
        "a bucket of {bucket} rows"
    );
    assert!(
        fits(layer.matrices),
        "no fused layer of {:?}",
        layer.matrices
    );
    let x_chunk_stride = bucket.div_ceil(8) * A16_TILE;
    let launch_of = |first: usize| {
        let rows = form.max_rows.min(bucket - first);
        let at = |address: u64, floats: usize| address + 4 * (first * floats) as u64;
        let of_next = layer.matrices.next.iter();
        let next: Vec<_> = of_next
            .map(|&(matrix, out)| (matrix, at(out, matrix.rows)))
            .collect();
        let buffers = FusedLayerBuffers {
            residual: at(layer.buffers.residual, layer.matrices.out.rows),
            scales: at(layer.buffers.scales, 1),
            ..*layer.buffers
        };
        let part = FusedLayer {
            bucket: rows,
            matrices: &FusedLayerMatrices {
                next: &next,
                ..*layer.matrices
            },
            buffers: &buffers,
            mixed: layer.mixed + (first / 8 * A16_TILE) as u64,
            ..*layer
        };
        launch(gpu, form, &part, x_chunk_stride)
    };
    (0..bucket).step_by(form.max_rows).map(launch_of).collect()
}

/// The launch of rows that follow one another. `x_chunk_stride`: bytes from 64 values of the
/// mixer's output to the next.
fn launch(
    gpu: GpuProps,
    form: FusedLayerConfig,
    layer: &FusedLayer<'_>,
    x_chunk_stride: usize,
) -> Launch {
    let FusedLayer {
        bucket,
        matrices: products,
        norms,
        buffers: memory,
        mixed,
    } = *layer;
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
    assert!(form.has(&kinds), "{kinds:?} in {form:?}");
    let mut phases = Phases {
        gpu,
        rows: bucket,
        x_chunk_stride,
        matrices: Vec::new(),
        phases: Vec::new(),
        exchanges: memory.exchange != [0; 2],
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
        exchange: memory.exchange[0],
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
        exchange: memory.exchange[1],
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
        launches_overlap: true,
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

    /// Rows beyond one launch are a launch of their own: at an offset in what others read and
    /// write, and at none in what only a launch itself uses.
    #[test]
    fn rows_beyond_one_launch_of_a_home_gpu_take_another() {
        let gpu = GpuProps::new((8, 6), 82);
        let matrix = |rows, cols| FusedMatrix {
            kind: WeightKind::F16,
            rows,
            cols,
            weight: 0,
        };
        let next = [(matrix(256, 512), 1 << 32)];
        let layer = FusedLayer {
            bucket: 40,
            matrices: &FusedLayerMatrices {
                out: matrix(512, 768),
                gate: matrix(1280, 512),
                up: matrix(1280, 512),
                down: matrix(512, 1280),
                next: &next,
            },
            norms: FusedLayerNorms {
                ffn: 0,
                next: 0,
                eps: 1e-6,
            },
            buffers: &FusedLayerBuffers {
                residual: 2 << 32,
                workspace: FusedLayerWorkspace::at(3 << 32, 512),
                next: ActivationBuffers::default(),
                squares: [4 << 32, 5 << 32],
                scales: 6 << 32,
                scratch: small_batch::GemmScratch(7 << 32),
                exchange: [0; 2],
            },
            mixed: 8 << 32,
        };
        let config = FusedLayerConfig::new(gpu, MAX_ROWS, &[WeightKind::F16]).unwrap();
        let launches = launches(gpu, config, &layer);
        let rows: Vec<_> = launches
            .iter()
            .map(|launch| &*launch.unit.defines[0].1)
            .collect();
        assert_eq!(rows, ["32", "8"]);
        // Residual, projection of the next layer and mixer output; squares.
        let words = [2, 3 * MATRIX_WORDS + 2, MAX_MATRICES * MATRIX_WORDS];
        let of = |launch: &Launch| words.map(|word| launch.args.words[word]);
        let rows_apart = [32 * 512 * 4, 32 * 256 * 4, 32 / 8 * A16_TILE as u64];
        let [first, second] = [0, 1].map(|i| of(&launches[i]));
        assert_eq!(first, [2 << 32, 1 << 32, 8 << 32]);
        assert_eq!([0, 1, 2].map(|i| second[i] - first[i]), rows_apart);
        let squares = launches[1].args.words[MAX_MATRICES * MATRIX_WORDS + 5];
        assert_eq!(squares, 4 << 32);
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
