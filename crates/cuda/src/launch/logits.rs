//! Logits rows: edits, top tokens and log-sum-exps.

use contract::{LogitsProcessors, MassPart, MassQuery};

use super::norm::RowSource;
use super::{Args, CompileUnit, Launch};

/// Maximum rows of one reduction, as in a header.
const ROWS: usize = 64;
/// Logits per warp.
const RUN: usize = 1024;

/// Shape of a row reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogitsReduction {
    /// Logits of a row.
    pub vocab: usize,
    /// Floats between rows.
    pub stride: usize,
    /// How many of the best tokens are wanted, 1 to 64; a row of fewer logits gives them all.
    pub k: usize,
}

/// Device memory of edits and reductions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogitsBuffers {
    /// f32 `[asked][stride]`.
    pub logits: u64,
    /// f32 `[asked][stride]`: rows after their edits; 0 where no row has any.
    pub edited: u64,
    /// What [`edits`] made, on the GPU; 0 where no row has any.
    pub edits: u64,
    /// [`LogitsReduction::scratch_bytes`].
    pub scratch: u64,
    /// [`LogitsReduction::out_bytes`].
    pub out: u64,
}

/// The reduced row of logits.
#[derive(Debug, Clone, PartialEq)]
pub struct TopLogits {
    /// Log-sum-exp of the edited row.
    pub lse: f32,
    /// Log-sum-exp of the raw row.
    pub raw_lse: f32,
    /// The best tokens, best first.
    pub ids: Vec<u32>,
    /// Their edited logits.
    pub logits: Vec<f32>,
    /// Their raw logits.
    pub raw: Vec<f32>,
}

impl LogitsReduction {
    /// Logits per group maximum: short rows need short groups so that there are more than `k`.
    fn group(self) -> usize {
        if self.vocab <= 16 * RUN { 32 } else { 256 }
    }

    /// Bytes of scratch for `rows` rows. Need not be zeroed.
    pub fn scratch_bytes(self, rows: usize) -> usize {
        rows * 4 * (self.vocab.div_ceil(self.group()) + 4 * self.vocab.div_ceil(RUN))
    }

    /// Bytes of scratch of [`masses`] for `rows` rows. Need not be zeroed.
    pub fn mass_scratch_bytes(self, rows: usize) -> usize {
        8 * rows * self.vocab.div_ceil(MASS_BLOCK)
    }

    /// Bytes of the result for `rows` rows.
    pub fn out_bytes(self, rows: usize) -> usize {
        rows * 4 * (4 + 3 * self.k)
    }

    /// Row `row` of a downloaded result.
    ///
    /// # Panics
    /// If `bytes` is shorter than [`LogitsReduction::out_bytes`] of `row + 1` rows.
    pub fn read(self, bytes: &[u8], row: usize) -> TopLogits {
        let bytes = &bytes[self.out_bytes(row)..][..self.out_bytes(1)];
        let word = |i: usize| -> [u8; 4] {
            let word = bytes[4 * i..].first_chunk();
            *word.expect("the slice above has all words of a row")
        };
        let n = u32::from_le_bytes(word(2)) as usize;
        let floats = |begin: usize| {
            (begin..begin + n)
                .map(|i| f32::from_le_bytes(word(i)))
                .collect()
        };
        TopLogits {
            lse: f32::from_le_bytes(word(0)),
            raw_lse: f32::from_le_bytes(word(1)),
            ids: (4..4 + n).map(|i| u32::from_le_bytes(word(i))).collect(),
            logits: floats(4 + self.k),
            raw: floats(4 + 2 * self.k),
        }
    }

    fn unit(self, file: &'static str, source: RowSource) -> CompileUnit {
        assert!(
            (1..=64).contains(&self.k) && self.stride >= self.vocab && self.vocab > 0,
            "a reduction of {self:?}"
        );
        // Word of the header with the number of logits rows.
        let asked_at = match source {
            RowSource::Step(_) | RowSource::LogitsRowsOfStep(_) => 2,
            RowSource::Chunk(_) | RowSource::LogitsRowsOfChunk(_) => 3,
        };
        CompileUnit::new(file)
            .define("N_LOGITS_ROWS_AT", asked_at)
            .define("VOCAB", self.vocab)
            .define("STRIDE", self.stride)
            .define("GROUP_SIZE", self.group())
    }
}

/// The two launches that edit rows, before [`reduce`], if some row has edits.
pub fn edit(
    shape: LogitsReduction,
    rows: usize,
    source: RowSource,
    at: LogitsBuffers,
) -> [Launch; 2] {
    assert!(
        at.edited != 0 && at.edits != 0 && rows <= ROWS,
        "edits need a place to go"
    );
    let unit = shape.unit("logits/edit.cu", source);
    let header = Args::new().ptr(source.header());
    let args = header.clone().ptr(at.logits).ptr(at.edited).ptr(at.edits);
    let grid = [shape.vocab.div_ceil(4096) as u32, rows as u32, 1];
    let dense = launch("logits_edit_dense", unit.clone(), grid, 256, args);
    let args = header.ptr(at.edited).ptr(at.edits);
    let grid = [rows as u32, 1, 1];
    let sparse = launch("logits_edit_sparse", unit, grid, 256, args);
    [dense, sparse]
}

/// The two launches that reduce the logits rows of a header to [`TopLogits`]s.
pub fn reduce(
    shape: LogitsReduction,
    rows: usize,
    source: RowSource,
    at: LogitsBuffers,
) -> [Launch; 2] {
    assert!(
        (at.edited == 0) == (at.edits == 0) && rows <= ROWS,
        "edited rows and edits go together"
    );
    let runs = shape.vocab.div_ceil(RUN);
    let args = Args::new()
        .ptr(source.header())
        .ptr(at.logits)
        .ptr(at.edited)
        .ptr(at.edits)
        .ptr(at.scratch);
    let versions = if at.edits == 0 { 1 } else { 2 };
    let unit = shape.unit("logits/reduce_chunks.cu", source);
    let grid = [runs.div_ceil(8) as u32, rows as u32, versions];
    let scan = launch("logits_reduce_chunks", unit, grid, 256, args.clone());
    let unit = shape.unit("logits/top_k.cu", source).define("K", shape.k);
    let grid = [rows as u32, 1, 1];
    let select = launch("logits_top_k", unit, grid, 1024, args.ptr(at.out));
    [scan, select]
}

/// Bytes of one row's query and of its result, as `kernels/logits/mass.cu` has them.
const QUERY_BYTES: usize = 16;
const MASS_BYTES: usize = 24;
/// Tokens whose mass is summed as one block.
const MASS_BLOCK: usize = contract::mass::BLOCK;

/// Device memory of [`masses`], beside the rows of [`reduce`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MassBuffers {
    /// What [`queries`] made.
    pub queries: u64,
    /// [`LogitsReduction::mass_scratch_bytes`].
    pub scratch: u64,
    /// [`mass_bytes`] of the rows.
    pub out: u64,
}

/// The mass of a row, and the token at the share that was asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowMass {
    /// Total mass; 0 for a row without a query or with an infinite best logit.
    pub total: f64,
    /// The token, its edited logit and its raw logit; `None` if it was not found.
    pub token: Option<(u32, f32, f32)>,
}

/// Bytes of the queries of any number of rows.
pub const MASS_QUERIES_BYTES: usize = ROWS * QUERY_BYTES;

/// Bytes of the results of `rows` rows.
pub fn mass_bytes(rows: usize) -> usize {
    rows * MASS_BYTES
}

/// The queries of logits rows as uploaded; rows that are not listed have none.
///
/// # Panics
/// If a row is beyond the 64 that a header asks for.
pub fn queries(items: &[(usize, MassQuery)]) -> Vec<u8> {
    let mut bytes = vec![0; MASS_QUERIES_BYTES];
    for (row, query) in items {
        let (picks, share) = match query.part {
            MassPart::AtShare(share) => (1_u32, share),
            MassPart::Best(_) => (0, 0.0),
        };
        let words = [query.divisor.to_bits(), picks].map(u32::to_le_bytes);
        let to = &mut bytes[row * QUERY_BYTES..][..QUERY_BYTES];
        to[..4].copy_from_slice(&words[0]);
        to[4..8].copy_from_slice(&words[1]);
        to[8..].copy_from_slice(&share.to_le_bytes());
    }
    bytes
}

/// The result of row `row`, from downloaded bytes.
///
/// # Panics
/// If there are fewer than [`mass_bytes`] of `row + 1` rows.
pub fn read_mass(bytes: &[u8], row: usize) -> RowMass {
    let bytes = &bytes[row * MASS_BYTES..][..MASS_BYTES];
    let word = |at: usize| -> [u8; 4] {
        let word = bytes[at..].first_chunk();
        *word.expect("the slice above has all words of a result")
    };
    let total = bytes.first_chunk().expect("as above");
    let (id, logit, raw) = (word(8), word(12), word(16));
    let id = u32::try_from(i32::from_le_bytes(id)).ok();
    RowMass {
        total: f64::from_le_bytes(*total),
        token: id.map(|id| (id, f32::from_le_bytes(logit), f32::from_le_bytes(raw))),
    }
}

/// The two launches that sum the masses of queried rows, after [`reduce`] of the same rows.
pub fn masses(
    shape: LogitsReduction,
    rows: usize,
    source: RowSource,
    (at, own): (LogitsBuffers, MassBuffers),
) -> [Launch; 2] {
    assert!(
        (at.edited == 0) == (at.edits == 0) && rows <= ROWS,
        "edited rows and edits go together"
    );
    let unit = shape.unit("logits/mass.cu", source).define("K", shape.k);
    let args = Args::new()
        .ptr(source.header())
        .ptr(at.logits)
        .ptr(at.edited)
        .ptr(at.edits)
        .ptr(own.queries)
        .ptr(at.out)
        .ptr(own.scratch);
    let blocks = shape.vocab.div_ceil(MASS_BLOCK);
    let grid = [blocks.div_ceil(32) as u32, rows as u32, 1];
    let sum = launch("logits_block_masses", unit.clone(), grid, 256, args.clone());
    let (grid, threads) = ([rows as u32, 1, 1], MASS_BLOCK as u32);
    let pick = launch("logits_pick_share", unit, grid, threads, args.ptr(own.out));
    [sum, pick]
}

fn launch(
    entry: &'static str,
    unit: CompileUnit,
    grid: [u32; 3],
    threads: u32,
    args: Args,
) -> Launch {
    Launch {
        entry,
        unit,
        grid,
        block: [threads, 1, 1],
        shared: 0,
        args,
        cooperative: false,
        overlap: true,
    }
}

/// Bytes of one edit, as `kernels/logits/edits.cuh` has it.
const EDIT_BYTES: usize = 32;

/// The edits of logits rows as uploaded: `(index among the logits rows, edits)`, rows of `vocab`
/// logits.
///
/// # Panics
/// If a row is beyond the 64 that a header asks for.
pub fn edits(items: &[(usize, &LogitsProcessors)], vocab: usize) -> Vec<u8> {
    let mut head = Vec::new();
    let mut tail: Vec<u8> = Vec::new();
    let mut which = [-1_i32; ROWS];
    let begin = 4 * ROWS + EDIT_BYTES * ROWS;
    for (index, &(row, edits)) in items.iter().enumerate() {
        which[row] = index as i32;
        let word = |tail: &Vec<u8>| ((begin + tail.len()) / 8) as i32;
        let bias = word(&tail);
        for (token, bias) in &edits.bias {
            tail.extend_from_slice(&token.0.to_le_bytes());
            tail.extend_from_slice(&bias.to_le_bytes());
        }
        let count = word(&tail);
        for entry in &edits.counts {
            let token = entry.token.0.min(i32::MAX as u32) | u32::from(entry.seen) << 31;
            tail.extend_from_slice(&token.to_le_bytes());
            tail.extend_from_slice(&entry.generated.to_le_bytes());
        }
        let mask = match &edits.allowed {
            None => -1,
            Some(allowed) => {
                let at = word(&tail);
                let words = allowed.words();
                for i in 0..vocab.div_ceil(64) {
                    let word = words.get(i).copied().unwrap_or(0);
                    tail.extend_from_slice(&word.to_le_bytes());
                }
                at
            }
        };
        for n in [
            bias,
            edits.bias.len() as i32,
            count,
            edits.counts.len() as i32,
            mask,
        ] {
            head.extend_from_slice(&n.to_le_bytes());
        }
        for x in [edits.repetition, edits.frequency, edits.presence] {
            head.extend_from_slice(&x.to_le_bytes());
        }
    }
    let mut blob: Vec<u8> = which.iter().flat_map(|n| n.to_le_bytes()).collect();
    blob.extend(head);
    blob.resize(begin, 0);
    blob.extend(tail);
    blob
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use contract::{TokenCount, TokenId, TokenMask};

    use super::*;

    fn int(blob: &[u8], at: usize) -> i32 {
        i32::from_le_bytes(*blob[at..].first_chunk().unwrap())
    }

    #[test]
    fn edits_point_at_their_parts() {
        let edits_of_row = LogitsProcessors {
            allowed: Some(Arc::new(TokenMask::all(100))),
            bias: vec![(TokenId(7), 0.5)],
            counts: vec![TokenCount {
                token: TokenId(9),
                seen: true,
                generated: 3,
            }],
            ..LogitsProcessors::default()
        };
        let blob = edits(&[(5, &edits_of_row)], 100);
        assert_eq!((int(&blob, 4 * 5), int(&blob, 4 * 4)), (0, -1));
        let at = |i: usize| 8 * int(&blob, 256 + 4 * i) as usize;
        assert_eq!((int(&blob, 256 + 4), int(&blob, 256 + 12)), (1, 1));
        assert_eq!(int(&blob, at(0)), 7);
        assert_eq!(int(&blob, at(2)) & i32::MAX, 9);
        assert!(int(&blob, at(2)) < 0 && int(&blob, at(2) + 4) == 3);
        assert_eq!(blob.len(), at(4) + 16);
        assert!(blob[at(4)..].starts_with(&[255; 8]));
    }

    #[test]
    fn a_result_is_read_back_as_it_is_written() {
        let shape = LogitsReduction {
            vocab: 10,
            stride: 10,
            k: 2,
        };
        let words: [u32; 10] = [
            1f32.to_bits(),
            2f32.to_bits(),
            2,
            0,
            8,
            3,
            5f32.to_bits(),
            4f32.to_bits(),
            7f32.to_bits(),
            6f32.to_bits(),
        ];
        let mut bytes = vec![0; shape.out_bytes(1)];
        bytes.extend(words.iter().flat_map(|w| w.to_le_bytes()));
        let best = shape.read(&bytes, 1);
        assert_eq!((best.lse, best.raw_lse), (1.0, 2.0));
        assert_eq!(
            (best.ids, best.logits, best.raw),
            (vec![8, 3], vec![5.0, 4.0], vec![7.0, 6.0])
        );
    }
}
