//! All products between two mixers of a step, in one launch of `matmul/chain.cu`.
//!
//! Out-projection into the residual stream, gate and up with the gated unit, down into the residual stream, and the
//! projections of the next layer, the norms before them included.

use super::matmul::{
    self, BLOCK_ROWS, Card, PLAIN_SHARED, ROW_BLOCKS, Scratch, Segment, TILES, Write, kinds_of,
    narrow, packed_scratch_bytes, pair, plain_words,
};
use super::norm::Out;
use super::{Args, Launch, Unit};
use crate::pack::activations::A16_TILE;
use crate::pack::{Input, Kind};

/// Most matrices of one chain.
const MAX_SEGMENTS: usize = 8;
/// Matrices of a chain besides the next layer's; gate and up are one.
const OWN_SEGMENTS: usize = 3;
/// Stages a launch has room for, and words of a stage and of a segment in `matmul/chain.cuh`.
const STAGES: usize = 4;
const STAGE_WORDS: usize = 9;
const SEGMENT_WORDS: usize = 8;
/// Threads of a block: eight warps that multiply, one that fills the ring, one that keeps the barrier, two aside.
const THREADS: u32 = 384;
/// Shared memory of a block besides the ring and what f32 matrices add, in bytes.
const OWN_SHARED: usize = 2048;
/// Bytes of the barrier that chains share, zero before the first.
pub const BARRIER_BYTES: usize = 256;

/// One matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// How it lies on the card.
    pub kind: Kind,
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
    /// The projections of the next layer's mixer, each with its output, f32 `[bucket][matrix.rows]`; none behind the last layer.
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
    /// Input of gate and up, halves.
    pub normed: u64,
    /// Input of down, halves.
    pub gated: u64,
    /// Input of the next layer's projections, in the forms they read.
    pub next: Out,
    /// Two of [`squares_bytes`].
    pub squares: [u64; 2],
    /// f32 `[bucket]`: what the last norm multiplied the rows by ([`super::norm::rms_and_scales`]); left so.
    pub scales: u64,
    /// As products have it.
    pub scratch: Scratch,
    /// [`BARRIER_BYTES`], zero before the first chain.
    pub barrier: u64,
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
    /// For chains of matrices of these kinds on up to `most_rows` rows; `None` if the card has too little shared memory.
    pub fn new(card: Card, most_rows: usize, kinds: &[Kind]) -> Option<Form> {
        let (bits, plain) = kinds_of(kinds);
        let own = OWN_SHARED + if plain { PLAIN_SHARED } else { 0 };
        let ring = (card.shared as usize).saturating_sub(own) / 128 * 128;
        let packed = || kinds.iter().filter(|kind| **kind != Kind::F32);
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
        Unit::new("matmul/chain.cu")
            .define("ROWS", bucket)
            .define("NT", bucket.div_ceil(8))
            .define("RING", self.ring)
            .define("KINDS", self.kinds)
            .define("SEGMENTS", MAX_SEGMENTS)
            .define("PLAIN", u8::from(self.plain))
    }
}

/// Whether matrices can be those of a chain: gate and up alike, all packed but some of the next layer's, and not more than
/// there is room for.
pub fn fits(products: &Products<'_>) -> bool {
    let Products {
        out,
        gate,
        up,
        down,
        next,
    } = products;
    let of_next = || next.iter().map(|(matrix, _)| matrix);
    let packed = |matrix: &Matrix| matrix.kind.input() == Input::F16;
    let n_packed = of_next().filter(|m| packed(m)).count();
    [out, gate, up, down].into_iter().all(packed)
        && (gate.kind, gate.rows, gate.cols) == (up.kind, up.rows, up.cols)
        && (next.is_empty() || n_packed > 0)
        && OWN_SEGMENTS + n_packed <= MAX_SEGMENTS
        && next.len() - n_packed <= MAX_SEGMENTS
        && of_next().all(|m| packed(m) || m.cols.is_multiple_of(4))
}

/// The stages of one launch, as it is being put together.
struct Stages {
    card: Card,
    bucket: usize,
    segments: Vec<u64>,
    stages: Vec<u64>,
}

/// What becomes of a stage's products, the `STORE`, `ADD` and `GATED` of `matmul/chain.cuh`.
#[derive(Clone, Copy)]
enum Results {
    Store,
    Add { next: Out, norm: u64, squares: u64 },
    Gated { halves: u64 },
}

/// What a stage multiplies by: halves, and the sums of squares that their rows are yet to be scaled by.
#[derive(Clone, Copy)]
struct StageInput {
    halves: u64,
    squares: u64,
    width: usize,
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
        let (mut line, mut dearest) = (0, 1);
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
            let cost = ROW_BLOCKS * TILES * kind.tile_bytes() / 16;
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
            line += units * tiles * cost;
            dearest = dearest.max(cost);
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
            pair(first, self.segments.len() / SEGMENT_WORDS),
            matmul::shares(self.card, line, dearest),
            pair(write, x.width),
        ]);
    }

    fn launch(self, form: Form, memory: &Memory, eps: f32, plain: Option<Vec<u64>>) -> Launch {
        let Stages {
            card,
            bucket,
            segments: mut words,
            mut stages,
        } = self;
        let n_stages = stages.len() / STAGE_WORDS;
        words.resize(MAX_SEGMENTS * SEGMENT_WORDS, 0);
        stages.resize(STAGES * STAGE_WORDS, 0);
        words.extend(stages);
        words.extend([
            memory.scratch.0,
            memory.barrier,
            memory.scales,
            u64::from(eps.to_bits()) | (n_stages as u64) << 32,
        ]);
        words.extend(plain.into_iter().flatten());
        Launch {
            entry: "matmul_chain",
            unit: form.unit(bucket),
            grid: [card.multiprocessors, 1, 1],
            block: [THREADS, 1, 1],
            shared: narrow(form.ring),
            args: Args::new().words(&words),
            cooperative: false,
            overlap: true,
        }
    }
}

/// One chain on the rows of `bucket`; `mixed`: what the mixer gave, halves `[bucket][out.cols]`.
///
/// # Panics
/// If the matrices do not [`fits`], or their kinds are not those of `form`.
pub fn launch(
    card: Card,
    bucket: usize,
    form: Form,
    products: &Products<'_>,
    mixed: u64,
    (norms, memory): (Norms, &Memory),
) -> Launch {
    assert!((1..=64).contains(&bucket), "a bucket of {bucket} rows");
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
    let kinds: Vec<Kind> = of_next.chain([out.kind, gate.kind, down.kind]).collect();
    let (bits, has_plain) = kinds_of(&kinds);
    assert!(
        bits & !form.kinds == 0 && (form.plain || !has_plain),
        "{kinds:?} in {form:?}"
    );
    let mut stages = Stages {
        card,
        bucket,
        segments: Vec::new(),
        stages: Vec::new(),
    };
    let as_it_is = |halves| StageInput {
        halves,
        squares: 0,
        width: 0,
    };
    let to_be_scaled = |halves, which: usize| StageInput {
        halves,
        squares: memory.squares[which],
        width: hidden,
    };
    let into_normed = Results::Add {
        next: Out {
            f16: memory.normed,
            ..Out::default()
        },
        norm: norms.ffn,
        squares: memory.squares[0],
    };
    let added = |matrix| [(matrix, None, memory.residual)];
    stages.stage(as_it_is(mixed), &added(out), into_normed);
    let gated = Results::Gated {
        halves: memory.gated,
    };
    let pair_of = [(gate, Some(up), 0)];
    stages.stage(to_be_scaled(memory.normed, 0), &pair_of, gated);
    let (plain, packed): (Vec<_>, Vec<_>) = next.iter().partition(|(m, _)| m.kind == Kind::F32);
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
    stages.stage(as_it_is(memory.gated), &added(down), into_next);
    if !next.is_empty() {
        let packed: Vec<_> = packed.into_iter().map(|(m, out)| (m, None, out)).collect();
        stages.stage(to_be_scaled(forms.f16, 1), &packed, Results::Store);
    }
    let plain = form.plain.then(|| {
        let segments: Vec<Segment> = plain
            .into_iter()
            .map(|(matrix, out)| Segment {
                kind: matrix.kind,
                rows: matrix.rows,
                weight: matrix.weight,
                out,
                stride: matrix.rows,
                write: Write::Store,
            })
            .collect();
        let partials = memory.scratch.0 + packed_scratch_bytes(card, bucket) as u64;
        plain_words(card, hidden, (&segments, MAX_SEGMENTS), forms.f32, partials)
    });
    stages.launch(form, memory, norms.eps, plain)
}
