//! All products between two mixers of a step, in one launch of `gemm/fused_layer_sm90.cu`.
//!
//! Out-projection into the residual stream, gate and up with the gated unit, down into the residual
//! stream, and the projections of the next layer, the norms before them included.

use super::small_batch::{
    self, BLOCK_ROWS, PLAIN_SHARED, ROW_BLOCKS, Scratch, TILES, kinds_of, narrow,
    packed_scratch_bytes, pair,
};
use crate::gpu_props::GpuProps;
use crate::launch::norm::Out;
use crate::launch::{Args, Launch, Unit};
use crate::pack::A16_TILE;
use crate::pack::{ActivationFormat, WeightKind};

/// Most matrices of one chain.
const MAX_SEGMENTS: usize = 8;
/// Matrices of a chain besides the next layer's; gate and up are one.
const OWN_SEGMENTS: usize = 3;
/// Stages a launch has room for, and words of a stage and of a segment in
/// `gemm/fused_layer_phases.cuh`.
const STAGES: usize = 4;
const STAGE_WORDS: usize = 12;
const SEGMENT_WORDS: usize = 8;
/// Threads of a block: eight warps that multiply, one that fetches weights, one for their input,
/// two aside.
const THREADS: u32 = 384;
/// Shared memory of a block besides the ring and what f32 matrices add, in bytes: barriers and
/// shares, what the ends of two tiles need, and what the lanes of eight warps tell each other of
/// scales.
const OWN_SHARED: usize = 14 << 10;
/// Shared memory of a block in all, in bytes, on cards that have it to spare: all that a block may
/// have, since its registers leave no room for another beside it.
const MOST_SHARED: usize = 227 << 10;
/// Rows that a chain multiplies at most.
pub const MOST_ROWS: usize = 64;
/// Rows of an f32 matrix that a job of `gemm/f32_gemm_sm90.cuh` takes, values of K that its slice
/// is a multiple of, and most jobs: the scratch of products has room for them.
const PLAIN_ROWS: usize = 16;
const PLAIN_CHUNK: usize = 256;
const PLAIN_JOBS: usize = 120;
/// Bytes of the barrier, and of the scales that blocks tell each other behind it.
const BARRIER_BYTES: usize = 256 + 512;

/// One matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// How it lies on the card.
    pub kind: WeightKind,
    /// Values of a row of the output.
    pub rows: usize,
    /// Values of a row of the input.
    pub cols: usize,
    /// Weights, 256-byte aligned.
    pub weight: u64,
}

/// What a chain multiplies with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Products<'a> {
    /// The mixer's output projection, `[hidden][..]`.
    pub out: Matrix,
    /// `[ffn][hidden]`.
    pub gate: Matrix,
    /// As `gate`, of the same kind.
    pub up: Matrix,
    /// `[hidden][ffn]`.
    pub down: Matrix,
    /// The projections of the next layer's mixer, each with its output, f32
    /// `[bucket][matrix.rows]`; none behind the last layer.
    pub next: &'a [(Matrix, u64)],
}

/// The norms of a chain: addresses of f32 `[hidden]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norms {
    /// Before gate and up.
    pub ffn: u64,
    /// Before the next layer's projections; 0 without.
    pub next: u64,
    /// Added to mean squares.
    pub eps: f32,
}

/// Where a chain works. Chains of one step may share all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// f32 `[bucket][hidden]`.
    pub residual: u64,
    /// The barrier and the inputs of two stages.
    pub own: Own,
    /// ActivationFormat of the next layer's projections, in the forms they read.
    pub next: Out,
    /// Two of [`squares_bytes`].
    pub squares: [u64; 2],
    /// f32 `[bucket]`: what the last norm multiplied the rows by
    /// ([`crate::launch::norm::rms_and_scales`]); left so.
    pub scales: u64,
    /// As products have it, for twice as many rows.
    pub scratch: Scratch,
}

/// What chains alone use, whatever their rows, and leave as it was: [`Own::bytes`] zero bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Own {
    barrier: u64,
    /// ActivationFormat of gate and up, halves.
    normed: u64,
    /// ActivationFormat of down, halves.
    gated: u64,
}

impl Own {
    /// For layers of `hidden` values, at 256-byte aligned memory.
    pub fn at(address: u64, hidden: usize) -> Own {
        let normed = address + BARRIER_BYTES as u64;
        Own {
            barrier: address,
            normed,
            gated: normed + ActivationFormat::F16.bytes(MOST_ROWS, hidden) as u64,
        }
    }

    /// Bytes for layers of `hidden` values and feed-forwards of at most `ffn`.
    pub fn bytes(hidden: usize, ffn: usize) -> usize {
        let halves = [hidden, ffn].map(|width| ActivationFormat::F16.bytes(MOST_ROWS, width));
        BARRIER_BYTES + halves.iter().sum::<usize>()
    }
}

/// Bytes of sums of squares for rows of `hidden` values.
pub fn squares_bytes(bucket: usize, hidden: usize) -> usize {
    4 * bucket * square_parts(hidden)
}

/// Parts that the squares of a row are summed in: 16 columns each, whole groups of 256.
fn square_parts(hidden: usize) -> usize {
    hidden.div_ceil(256) * 16
}

/// How chains of a model are compiled: one unit a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    kinds: u32,
    plain: bool,
    /// Bytes.
    ring: usize,
}

impl Form {
    /// For chains of matrices of these kinds on up to `most_rows` rows; `None` if the card has too
    /// little shared memory.
    pub fn new(gpu: GpuProps, most_rows: usize, kinds: &[WeightKind]) -> Option<Form> {
        let (bits, plain) = kinds_of(kinds);
        let own = OWN_SHARED + if plain { PLAIN_SHARED } else { 0 };
        let room = if gpu.shared_bytes >= small_batch::MOST_SHARED {
            MOST_SHARED
        } else {
            gpu.shared_bytes
        };
        let ring = room.saturating_sub(own) / 128 * 128;
        let packed = || kinds.iter().filter(|kind| **kind != WeightKind::F32);
        let piece = packed().flat_map(|kind| kind.piece_bytes()).max()?;
        let chunks = packed().map(|kind| kind.pieces()).max()?;
        let largest = ROW_BLOCKS * TILES * piece + most_rows.div_ceil(8) * chunks * A16_TILE;
        // A warp may hold a piece while it waits for the next, and pieces lie where there was room.
        (3 * largest <= ring).then_some(Form {
            kinds: bits,
            plain,
            ring,
        })
    }

    fn unit(self, bucket: usize) -> Unit {
        Unit::new("gemm/fused_layer_sm90.cu")
            .define("ROWS", bucket)
            .define("N8_TILES", bucket.div_ceil(8))
            .define("RING_BYTES", self.ring)
            .define("KINDS", self.kinds)
            .define("MAX_MATRICES", MAX_SEGMENTS)
            .define("F32_MATRICES", u8::from(self.plain))
    }
}

/// Whether matrices can be those of a chain: gate and up alike, all packed but some of the next
/// layer's, and not more than there is room for.
pub fn fits(products: &Products<'_>) -> bool {
    let Products {
        out,
        gate,
        up,
        down,
        next,
    } = products;
    let of_next = || next.iter().map(|(matrix, _)| matrix);
    let packed = |matrix: &Matrix| matrix.kind.input() == ActivationFormat::F16;
    let n_packed = of_next().filter(|m| packed(m)).count();
    let plain = of_next().filter(|m| !packed(m));
    [out, gate, up, down].into_iter().all(packed)
        && (gate.kind, gate.rows, gate.cols) == (up.kind, up.rows, up.cols)
        && (next.is_empty() || n_packed > 0)
        && OWN_SEGMENTS + n_packed <= MAX_SEGMENTS
        && next.len() - n_packed <= MAX_SEGMENTS
        && plain.map(|m| m.rows.div_ceil(PLAIN_ROWS)).sum::<usize>() <= PLAIN_JOBS
        && of_next().all(|m| packed(m) || m.cols.is_multiple_of(4))
        // Weights of norms come by 16 bytes.
        && out.rows.is_multiple_of(4)
}

/// Units and blocks of a tile, where a block can have units of one tile alone and has no more of
/// them than if the line was cut into equal parts, with a tile's beginning as long as a unit. Then
/// no block goes on to another tile, and all of a tile's sum it.
fn whole_cut(gpu: GpuProps, matrices: &[(Matrix, Option<Matrix>, u64)]) -> Option<(usize, usize)> {
    let blocks = gpu.sm_count;
    let units = matrices[0].0.kind.units(matrices[0].0.cols);
    let alike = matrices.iter().all(|(m, ..)| m.kind.units(m.cols) == units);
    let tiles = matrices
        .iter()
        .map(|(m, ..)| m.rows.div_ceil(ROW_BLOCKS * BLOCK_ROWS));
    let tiles: usize = tiles.sum();
    let room = (blocks / tiles).min(units);
    if !alike || room == 0 {
        return None;
    }
    let most = units.div_ceil(room);
    let of_line = (tiles * (units + 1)).div_ceil(blocks);
    (most <= of_line).then_some((units, units.div_ceil(most)))
}

/// Tiles of gate and up that each block has for itself, where there are as many as blocks or more,
/// and those left over have no more units than there are blocks.
fn own_tiles(gpu: GpuProps, gate: &Matrix) -> Option<usize> {
    let blocks = gpu.sm_count;
    let (tiles, units) = (gate.rows.div_ceil(BLOCK_ROWS), gate.kind.units(gate.cols));
    (tiles >= blocks && tiles % blocks * units <= blocks).then_some(tiles / blocks)
}

/// The stages of one launch, as it is being put together.
struct Stages {
    gpu: GpuProps,
    bucket: usize,
    segments: Vec<u64>,
    stages: Vec<u64>,
}

/// What becomes of a stage's products, the `EPILOGUE_STORE`, `EPILOGUE_ADD_NORM` and
/// `EPILOGUE_SWIGLU` of `gemm/fused_layer_phases.cuh`.
#[derive(Clone, Copy)]
enum Results {
    Store,
    Add { next: Out, norm: u64, squares: u64 },
    Gated { halves: u64 },
}

/// What a stage multiplies by: halves, and the sums of squares that their rows are yet to be scaled
/// by.
#[derive(Clone, Copy)]
struct StageInput {
    halves: u64,
    squares: u64,
    width: usize,
    /// What was the input of another stage and is made zero again once this one's is whole: halves,
    /// and values of a row.
    spent: (u64, usize),
}

impl Stages {
    /// `matrices`: first row blocks, the others where they are of a second matrix, and the output.
    fn stage(
        &mut self,
        x: StageInput,
        matrices: &[(Matrix, Option<Matrix>, u64)],
        results: Results,
    ) {
        let first = self.segments.len() / SEGMENT_WORDS;
        let cost_of = |matrix: &Matrix| ROW_BLOCKS * TILES * matrix.kind.tile_bytes() / 16;
        let costs = matrices.iter().map(|(matrix, ..)| cost_of(matrix));
        let dearest = costs.max().unwrap_or(1);
        let whole = match results {
            Results::Gated { .. } => None,
            _ => whole_cut(self.gpu, matrices),
        };
        // Going on to another tile takes a block about as long as a unit.
        let gap = if whole.is_some() { 0 } else { dearest };
        let own = match results {
            Results::Gated { .. } => own_tiles(self.gpu, &matrices[0].0).unwrap_or(0),
            _ => 0,
        };
        let mut line = 0;
        for &(matrix, second, out) in matrices {
            let kind = matrix.kind;
            let units = kind.units(matrix.cols);
            let row_blocks = matrix.rows.div_ceil(BLOCK_ROWS);
            let (tiles, others) = match second {
                Some(second) => (row_blocks, second.weight),
                None => (
                    row_blocks.div_ceil(ROW_BLOCKS),
                    matrix.weight + kind.bytes(BLOCK_ROWS, matrix.cols) as u64,
                ),
            };
            // For whole blocks a unit is as long as a tile has blocks, and a share as a tile has
            // units: so many shares are a tile.
            let cost = whole.map_or_else(|| cost_of(&matrix), |(_, blocks)| blocks);
            self.segments.extend([
                matrix.weight,
                others,
                out,
                pair(matrix.rows, matrix.rows),
                pair(kind as usize, units),
                pair(tiles, kind.tile_bytes()),
                pair(kind.piece_bytes()[0], kind.pieces()),
                pair(line, cost),
            ]);
            line += tiles * (gap + units * cost);
        }
        let (write, next, norm, squares) = match results {
            Results::Store => (0, Out::default(), 0, 0),
            Results::Add {
                next,
                norm,
                squares,
            } => (1, next, norm, squares),
            Results::Gated { halves } => {
                let next = Out {
                    f16: halves,
                    ..Out::default()
                };
                (2, next, 0, 0)
            }
        };
        self.stages.extend([
            x.halves,
            x.squares,
            next.f16,
            next.f32,
            norm,
            squares,
            x.spent.0,
            pair(self.quads(x.spent), gap),
            pair(first, self.segments.len() / SEGMENT_WORDS),
            whole.map_or_else(
                || small_batch::shares(self.gpu, line, dearest),
                |(units, _)| pair(units, 0),
            ),
            pair(write, x.width),
            pair(own, own * self.gpu.sm_count),
        ]);
    }

    /// 16-byte words of halves that are to be made zero.
    fn quads(&self, (_, width): (u64, usize)) -> usize {
        ActivationFormat::F16.bytes(self.bucket, width) / 16
    }

    /// `spent`: what is made zero when all stages are done.
    fn launch(
        mut self,
        spent: Option<(u64, usize)>,
        form: Form,
        (memory, eps): (&Memory, f32),
        plain: Option<Vec<u64>>,
    ) -> Launch {
        let n_stages = self.stages.len() / STAGE_WORDS;
        if let Some(spent) = spent {
            // One more that multiplies nothing.
            let mut words = [0; STAGE_WORDS];
            (words[6], words[7]) = (spent.0, pair(self.quads(spent), 0));
            self.stages.extend(words);
        }
        let Stages {
            gpu,
            bucket,
            segments: mut words,
            mut stages,
        } = self;
        let n_opened = stages.len() / STAGE_WORDS;
        words.resize(MAX_SEGMENTS * SEGMENT_WORDS, 0);
        stages.resize(STAGES * STAGE_WORDS, 0);
        words.extend(stages);
        words.extend([
            memory.scratch.0,
            memory.own.barrier,
            memory.scales,
            u64::from(eps.to_bits()) | (n_stages as u64) << 32 | (n_opened as u64) << 48,
        ]);
        words.extend(plain.into_iter().flatten());
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
/// would leave multiprocessors without work. `matrices`: each with its output; `x` f32
/// `[rows][cols]`.
fn plain_words(
    gpu: GpuProps,
    cols: usize,
    matrices: &[(Matrix, u64)],
    (x, partials): (u64, u64),
) -> Vec<u64> {
    let mut words = Vec::new();
    let mut groups = 0;
    for (matrix, out) in matrices {
        let shape = pair(matrix.rows, matrix.rows);
        words.extend([matrix.weight, *out, shape, pair(0, groups)]);
        groups += matrix.rows.div_ceil(PLAIN_ROWS);
    }
    words.resize(MAX_SEGMENTS * 4, 0);
    let chunks = cols.div_ceil(PLAIN_CHUNK).max(1);
    let at_once = (gpu.sm_count).min(PLAIN_JOBS) / groups.max(1);
    let slice = chunks.div_ceil(at_once.clamp(1, chunks)) * PLAIN_CHUNK;
    words.extend([
        x,
        partials,
        pair(matrices.len(), cols),
        pair(groups, cols.div_ceil(slice)),
        pair(slice, 0),
    ]);
    words
}

/// One chain on the rows of `bucket`; `mixed`: what the mixer gave, halves `[bucket][out.cols]`.
///
/// # Panics
/// If the matrices do not [`fits`], or their kinds are not those of `form`.
pub fn launch(
    gpu: GpuProps,
    bucket: usize,
    form: Form,
    products: &Products<'_>,
    mixed: u64,
    (norms, memory): (Norms, &Memory),
) -> Launch {
    assert!(
        (1..=MOST_ROWS).contains(&bucket),
        "a bucket of {bucket} rows"
    );
    assert!(fits(products), "no chain of {products:?}");
    let Products {
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
    let (bits, has_plain) = kinds_of(&kinds);
    assert!(
        bits & !form.kinds == 0 && (form.plain || !has_plain),
        "{kinds:?} in {form:?}"
    );
    let mut stages = Stages {
        gpu,
        bucket,
        segments: Vec::new(),
        stages: Vec::new(),
    };
    let Own { normed, gated, .. } = memory.own;
    let as_it_is = |halves, spent| StageInput {
        halves,
        squares: 0,
        width: 0,
        spent,
    };
    let to_be_scaled = |halves, which: usize, spent| StageInput {
        halves,
        squares: memory.squares[which],
        width: hidden,
        spent,
    };
    let into_normed = Results::Add {
        next: Out {
            f16: normed,
            ..Out::default()
        },
        norm: norms.ffn,
        squares: memory.squares[0],
    };
    let added = |matrix| [(matrix, None, memory.residual)];
    stages.stage(as_it_is(mixed, (0, 0)), &added(out), into_normed);
    let into_gated = Results::Gated { halves: gated };
    let pair_of = [(gate, Some(up), 0)];
    // The next layer's input was read by the launch before, and is written a stage from here.
    let of_before = if next.is_empty() {
        (0, 0)
    } else {
        (memory.next.f16, hidden)
    };
    let input = to_be_scaled(normed, 0, of_before);
    stages.stage(input, &pair_of, into_gated);
    let (plain, packed): (Vec<_>, Vec<_>) =
        next.iter().partition(|(m, _)| m.kind == WeightKind::F32);
    let forms = match (next.is_empty(), plain.is_empty()) {
        (true, _) => Out::default(),
        (false, true) => Out {
            f32: 0,
            ..memory.next
        },
        (false, false) => memory.next,
    };
    let into_next = Results::Add {
        next: forms,
        norm: norms.next,
        squares: memory.squares[1],
    };
    let input = as_it_is(gated, (normed, hidden));
    stages.stage(input, &added(down), into_next);
    let of_down = (gated, down.cols);
    if !next.is_empty() {
        let packed: Vec<_> = packed.into_iter().map(|(m, out)| (m, None, out)).collect();
        let input = to_be_scaled(forms.f16, 1, of_down);
        stages.stage(input, &packed, Results::Store);
    }
    let plain = form.plain.then(|| {
        let partials = memory.scratch.0 + 2 * packed_scratch_bytes(gpu, bucket) as u64;
        plain_words(gpu, hidden, &plain, (forms.f32, partials))
    });
    let spent = next.is_empty().then_some(of_down);
    stages.launch(spent, form, (memory, norms.eps), plain)
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
            let matrix = Matrix {
                kind: WeightKind::Q4K,
                rows,
                cols,
                weight: 0,
            };
            (matrix, None, 0)
        };
        let matrices: Vec<_> = rows.iter().map(of).collect();
        whole_cut(H200, &matrices)
    }

    #[test]
    fn tiles_are_cut_for_whole_blocks_where_none_has_more_units_for_it() {
        // Out and the next delta layer's projections of 27 billion weights: 4 units and 10, as if
        // the line was cut.
        assert_eq!(cut(&[5120], 6144), Some((24, 6)));
        assert_eq!(cut(&[10240, 6144], 5120), Some((20, 2)));
        // Down would have 12 for 11, those of an attention layer 10 for 9.
        assert_eq!(cut(&[5120], 17408), None);
        assert_eq!(cut(&[12288, 1024, 1024], 5120), None);
        // More tiles than blocks; and no more blocks of a tile than it has units.
        assert_eq!(cut(&[256 * 133], 512), None);
        assert_eq!(cut(&[256], 512), Some((2, 2)));
    }

    #[test]
    fn blocks_have_tiles_of_their_own_where_few_are_left_over() {
        let of = |rows, cols| {
            let matrix = Matrix {
                kind: WeightKind::Q4K,
                rows,
                cols,
                weight: 0,
            };
            own_tiles(H200, &matrix)
        };
        // 27 billion weights: 136 tiles, and 80 units of 4 of them.
        assert_eq!(of(17408, 5120), Some(1));
        assert_eq!(of(128 * 264, 5120), Some(2));
        // Fewer tiles than blocks; and 140 units left over.
        assert_eq!(of(12288, 4096), None);
        assert_eq!(of(128 * 139, 5120), None);
    }
}
