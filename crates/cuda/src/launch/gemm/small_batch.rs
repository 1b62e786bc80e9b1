//! Quantised matrix products for few rows.
//!
//! [`launches`] multiplies the rows of one bucket by several matrices that share their input, in
//! one launch of `gemm/decode_gemm_small_batch.cu`.

use crate::gpu_props::GpuProps;
use crate::launch::{Args, Launch, Unit};
use crate::pack::A16_TILE;
use crate::pack::{ActivationFormat, WeightKind};

/// Most matrices of one launch.
pub const MAX_SEGMENTS: usize = 6;
/// Tiles of 16 rows in a row block.
pub(super) const TILES: usize = 8;
/// Threads of a block: eight warps that multiply and one that fills the ring.
const THREADS: u32 = 288;
/// Most turns of a ring.
const MAX_STAGES: usize = 8;
/// Shared memory of a block besides its ring, in bytes: barriers, and what the lanes of eight warps
/// tell each other of scales.
const OWN_SHARED: usize = 1024 + (8 << 10);
/// Most shared memory of a block, in bytes: what small kernels need is left.
pub(super) const MOST_SHARED: usize = 200 << 10;
/// Rows of a row block of packed weights.
pub(super) const BLOCK_ROWS: usize = 128;
/// Row blocks of a tile.
pub(super) const ROW_BLOCKS: usize = 2;
/// Rows of an f32 matrix that a job takes, values of K that its slice is a multiple of, and most
/// jobs that have slices.
const PLAIN_ROWS: usize = 8;
const PLAIN_TURN: usize = 512;
const PLAIN_JOBS: usize = 255;
/// Shared memory that f32 matrices add, in bytes.
pub(super) const PLAIN_SHARED: usize = 17 << 10;
/// Words that `Matrix` of `gemm/decode_gemm_small_batch.cu` has.
const SEGMENT_WORDS: usize = 8;

/// Dynamic shared memory of a block of small-batch GEMMs, in bytes.
pub(crate) fn gemm_shared_bytes(gpu: GpuProps) -> usize {
    gpu.shared_bytes.min(MOST_SHARED)
}

/// What a matrix does to its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// `out = W x`.
    Store,
    /// `out += W x`, such as the residual stream.
    Add,
}

/// One matrix of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// How it lies on the card.
    pub kind: WeightKind,
    /// Rows of the matrix: values of a row of the output.
    pub rows: usize,
    /// Packed weights, 256-byte aligned.
    pub weight: u64,
    /// f32 `[bucket][stride]`.
    pub out: u64,
    /// Floats from a row of the output to the next.
    pub stride: usize,
    /// Store or add.
    pub write: Write,
}

/// The rows all matrices are multiplied with, in the forms their kinds read; 0 where no kind reads
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Inputs {
    /// Halves ([`ActivationFormat::F16`]).
    pub f16: u64,
    /// f32 `[bucket][cols]`.
    pub f32: u64,
}

impl Inputs {
    fn of(self, input: ActivationFormat) -> u64 {
        match input {
            ActivationFormat::F16 => self.f16,
            ActivationFormat::F32 => self.f32,
        }
    }
}

/// Memory that launches share, one after the other: [`scratch_bytes`] at this address, zero before
/// the first launch, and left zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scratch(pub u64);

/// Bytes of [`Scratch`] for buckets of up to `bucket` rows.
pub fn scratch_bytes(gpu: GpuProps, bucket: usize) -> usize {
    packed_scratch_bytes(gpu, bucket) + PLAIN_JOBS * PLAIN_ROWS * bucket * 4
}

/// What the packed matrices of a launch need of it, at its start.
pub(super) fn packed_scratch_bytes(gpu: GpuProps, bucket: usize) -> usize {
    gpu.sm_count * 2 * TILES * ROW_BLOCKS * bucket.div_ceil(8) * 512
}

/// How a launch of packed kinds is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Form {
    /// Rows of one launch, at most the bucket.
    rows: usize,
    /// Bit `i`: kind `i` occurs.
    kinds: u32,
    /// Turns of the ring.
    stages: usize,
    /// Whether there are f32 matrices.
    plain: bool,
}

impl Form {
    /// `None` if not even 8 rows of these kinds leave room for a ring of two turns.
    fn new(gpu: GpuProps, rows: usize, kinds: u32, plain: bool) -> Option<Form> {
        let own = if plain { PLAIN_SHARED } else { 0 };
        let room = gemm_shared_bytes(gpu).saturating_sub(OWN_SHARED + own);
        let mut form = Form {
            rows,
            kinds,
            stages: 0,
            plain,
        };
        // With too many rows for a ring they go in two launches.
        while form.slot() * 2 > room {
            if form.rows <= 8 {
                return None;
            }
            form.rows = (form.rows / 2).next_multiple_of(8);
        }
        form.stages = (room / form.slot()).clamp(2, MAX_STAGES);
        Some(form)
    }

    /// Shared memory of a block in bytes.
    fn shared(self) -> usize {
        self.stages * self.slot()
    }

    fn tiles(self) -> usize {
        self.rows.div_ceil(8)
    }

    /// Bytes of a turn of the ring, as `SLOT` of the kernel.
    fn slot(self) -> usize {
        let kinds = || WeightKind::ALL.into_iter().filter(|&kind| self.has(kind));
        let piece = kinds().flat_map(WeightKind::piece_bytes).max().unwrap_or(0);
        let chunks = kinds().map(WeightKind::pieces).max().unwrap_or(0);
        (ROW_BLOCKS * TILES * piece + self.tiles() * chunks * A16_TILE).max(16)
    }

    fn has(self, kind: WeightKind) -> bool {
        kind != WeightKind::F32 && self.kinds >> kind as u32 & 1 == 1
    }

    fn unit(self) -> Unit {
        Unit::new("gemm/decode_gemm_small_batch.cu")
            .define("ROWS", self.rows)
            .define("N8_TILES", self.tiles())
            .define("STAGES", self.stages)
            .define("KINDS", self.kinds)
            .define("MAX_MATRICES", MAX_SEGMENTS)
            .define("F32_MATRICES", u8::from(self.plain))
    }
}

/// The launches that multiply the rows of `bucket` by every segment; `cols` is the width of the
/// input.
///
/// # Panics
/// If there are no segments or more than [`MAX_SEGMENTS`], the bucket is not 1..=64, an input that
/// a kind reads is missing, or the GPU does not hold a kind (see [`holds`]).
pub fn launches(
    gpu: GpuProps,
    bucket: usize,
    cols: usize,
    segments: &[Segment],
    inputs: Inputs,
    scratch: Scratch,
) -> Vec<Launch> {
    assert!((1..=64).contains(&bucket), "a bucket of {bucket} rows");
    assert!(
        (1..=MAX_SEGMENTS).contains(&segments.len()),
        "{} matrices in one launch",
        segments.len()
    );
    for segment in segments {
        assert!(
            inputs.of(segment.kind.input()) != 0,
            "{:?} without its form of the input",
            segment.kind
        );
        assert!(segment.stride >= segment.rows, "{segment:?}");
        assert!(
            segment.kind != WeightKind::F32 || cols.is_multiple_of(4),
            "an f32 matrix of {cols} columns: rows are read 16 bytes at a time"
        );
    }
    let rows = Rows {
        bucket,
        cols,
        inputs,
    };
    parts(gpu, segments)
        .iter()
        .flat_map(|segments| part_launches(gpu, rows, segments, scratch))
        .collect()
}

/// What every matrix of a launch is multiplied with.
#[derive(Debug, Clone, Copy)]
struct Rows {
    bucket: usize,
    cols: usize,
    inputs: Inputs,
}

/// Whether a card has the shared memory that matrices of a kind need.
pub fn holds(gpu: GpuProps, kind: WeightKind) -> bool {
    let (kinds, plain) = kinds_of(&[kind]);
    Form::new(gpu, 8, kinds, plain).is_some()
}

/// The packed kinds as bits, and whether there are f32 matrices.
pub(super) fn kinds_of(kinds: &[WeightKind]) -> (u32, bool) {
    let packed = kinds.iter().filter(|kind| **kind != WeightKind::F32);
    let bits = packed.fold(0, |bits, &kind| bits | 1 << kind as u32);
    (bits, kinds.contains(&WeightKind::F32))
}

/// The segments of each launch: all in one where the card has the room, else those of a kind.
pub(super) fn parts(gpu: GpuProps, segments: &[Segment]) -> Vec<Vec<Segment>> {
    let kinds: Vec<WeightKind> = segments.iter().map(|s| s.kind).collect();
    let (bits, plain) = kinds_of(&kinds);
    if Form::new(gpu, 8, bits, plain).is_some() {
        return vec![segments.to_vec()];
    }
    let of = |kind| {
        let own = segments.iter().filter(move |s| s.kind == kind);
        own.copied().collect::<Vec<_>>()
    };
    let parts = WeightKind::ALL.into_iter().map(of);
    parts.filter(|part| !part.is_empty()).collect()
}

/// The launches of segments that share one form.
fn part_launches(gpu: GpuProps, rows: Rows, segments: &[Segment], scratch: Scratch) -> Vec<Launch> {
    let Rows {
        bucket,
        cols,
        inputs,
    } = rows;
    let (plain, packed): (Vec<Segment>, Vec<Segment>) =
        segments.iter().partition(|s| s.kind == WeightKind::F32);
    let kinds: Vec<WeightKind> = segments.iter().map(|s| s.kind).collect();
    let (kinds, has_plain) = kinds_of(&kinds);
    let mut launches = Vec::new();
    let mut first = 0;
    while first < bucket {
        let form = Form::new(gpu, bucket - first, kinds, has_plain)
            .expect("kinds that a card cannot hold are refused before anything is planned");
        let part = Part {
            gpu,
            bucket,
            cols,
            first,
            form,
        };
        launches.push(part.launch(&packed, &plain, inputs, scratch));
        first += form.rows;
    }
    launches
}

/// The rows of a bucket that one launch multiplies.
struct Part {
    gpu: GpuProps,
    bucket: usize,
    cols: usize,
    /// The first of them, a multiple of 8.
    first: usize,
    form: Form,
}

impl Part {
    fn launch(
        &self,
        packed: &[Segment],
        plain: &[Segment],
        inputs: Inputs,
        scratch: Scratch,
    ) -> Launch {
        let (form, cols) = (self.form, self.cols);
        let mut words = Vec::new();
        let (mut line, mut dearest) = (0, 1);
        for segment in packed {
            let kind = segment.kind;
            let units = kind.units(cols);
            let segment_tiles = segment.rows.div_ceil(BLOCK_ROWS * ROW_BLOCKS);
            let cost = ROW_BLOCKS * TILES * kind.tile_bytes() / 16;
            words.extend([
                segment.weight,
                self.out(segment),
                pair(segment.rows, segment.stride),
                pair(usize::from(segment.write == Write::Add), kind as usize),
                pair(units, segment_tiles),
                pair(kind.tile_bytes(), kind.piece_bytes()[0]),
                pair(line, cost),
                pair(kind.pieces(), 0),
            ]);
            line += units * segment_tiles * cost;
            dearest = dearest.max(cost);
        }
        words.resize(MAX_SEGMENTS * SEGMENT_WORDS, 0);
        let x = inputs.f16 + (self.first / 8 * A16_TILE) as u64;
        words.extend([
            x,
            scratch.0,
            pair(packed.len(), self.bucket.div_ceil(8) * A16_TILE),
            shares(self.gpu, line, dearest),
        ]);
        if !plain.is_empty() {
            let room = scratch.0 + packed_scratch_bytes(self.gpu, self.bucket) as u64;
            let plain: Vec<Segment> = plain
                .iter()
                .map(|segment| Segment {
                    out: self.out(segment),
                    ..*segment
                })
                .collect();
            let x = inputs.f32 + (4 * self.first * cols) as u64;
            words.extend(plain_words(self.gpu, cols, (&plain, MAX_SEGMENTS), x, room));
        }
        Launch {
            entry: "gemm_small_batch",
            unit: form.unit(),
            grid: [narrow(self.gpu.sm_count), 1, 1],
            block: [THREADS, 1, 1],
            shared: narrow(form.shared()),
            args: Args::new().words(&words),
            cooperative: false,
            overlap: true,
        }
    }

    /// Where the first row's output goes.
    fn out(&self, segment: &Segment) -> u64 {
        segment.out + (4 * self.first * segment.stride) as u64
    }
}

/// `F32Params` of `gemm/f32_gemm.cuh` with room for `most` segments: groups of 8 rows, K cut into
/// slices where groups alone would leave multiprocessors without work. `x` f32 `[rows][cols]`; the
/// outputs are those of the first of its rows.
pub(super) fn plain_words(
    gpu: GpuProps,
    cols: usize,
    (segments, most): (&[Segment], usize),
    x: u64,
    partials: u64,
) -> Vec<u64> {
    let mut words = Vec::new();
    let mut groups = 0;
    for segment in segments {
        words.extend([
            segment.weight,
            segment.out,
            pair(segment.rows, segment.stride),
            pair(usize::from(segment.write == Write::Add), groups),
        ]);
        groups += segment.rows.div_ceil(PLAIN_ROWS);
    }
    words.resize(most * 4, 0);
    let turns = cols.div_ceil(PLAIN_TURN).max(1);
    let at_once = (gpu.sm_count).min(PLAIN_JOBS) / groups.max(1);
    let slice = turns.div_ceil(at_once.clamp(1, turns)) * PLAIN_TURN;
    words.extend([
        x,
        partials,
        pair(segments.len(), cols),
        pair(groups, cols.div_ceil(slice)),
        pair(slice, 0),
    ]);
    words
}

/// Where blocks cut a line of units: the share of each, and how many have one more. Every share
/// holds the beginning of some unit: those who wait for a tile count on it.
pub(super) fn shares(gpu: GpuProps, line: usize, dearest: usize) -> u64 {
    let blocks = (gpu.sm_count).min((line / dearest).max(1));
    pair(line / blocks, line % blocks)
}

/// Two 32-bit fields of a struct.
pub(super) fn pair(low: usize, high: usize) -> u64 {
    u64::from(narrow(low)) | u64::from(narrow(high)) << 32
}

pub(super) fn narrow(n: usize) -> u32 {
    u32::try_from(n).expect("matrices have fewer than 2^36 values")
}
