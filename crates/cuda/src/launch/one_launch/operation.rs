//! What a launch of a plan is in the persistent launch.

use super::task::{TaskKind, TilePart, flag};
use crate::launch::attention::tree_fixed_bytes;
use crate::launch::gemm::gemv::block_of;
use crate::launch::gemm::small_batch::MAX_MATRICES;
use crate::launch::gemm::words::pair;
use crate::launch::{CompileUnit, Launch};
use crate::pack::{M16_ROWS, WeightKind};

/// Words of a packed matrix in the arguments of `gemm/gemv.cu`.
const MATRIX_WORDS: usize = 6;
/// Words of a matrix in the arguments of `gemm/decode_gemm_small_batch.cu`.
const SMALL_BATCH_MATRIX_WORDS: usize = 8;
/// Words of an f32 matrix there.
const F32_MATRIX_WORDS: usize = 4;
/// Stages that `attention/decode_tree.cu` works with at least.
const LEAST_STAGES: usize = 2;

/// A launch of `gemm/gemv.cu`, or of `gemm/decode_gemm_small_batch.cu`.
#[derive(Debug, Clone)]
pub(super) struct Gemv {
    /// Packed matrices; gate and up are one entry.
    pub(super) packed: Vec<Packed>,
    pub(super) f32: Vec<F32Rows>,
    /// [`flag::NORM`] and [`flag::SWIGLU`].
    pub(super) flags: u32,
    /// Values of the input row.
    pub(super) columns: usize,
    /// Of several rows: bytes from 64 values of all rows to the next.
    pub(super) chunk_stride: usize,
    /// Of several rows: the norm that gives the input.
    pub(super) norm: Option<RowsNorm>,
    /// Partial sums of a tile at most, of gate and up together.
    pub(super) parts: usize,
}

/// A launch of `norm/rms_norm.cu` of several rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowsNorm {
    /// Addresses of the header, of the rows and of the weights, and epsilon as bits.
    pub(super) header: u64,
    pub(super) x: u64,
    pub(super) weight: u64,
    pub(super) eps: u64,
    /// Where it puts the rows in f32 and in f16.
    pub(super) f32: u64,
    pub(super) f16: u64,
    /// [`flag::LOGITS_ROWS`] if it takes the rows whose logits are asked for.
    pub(super) flags: u32,
}

impl Gemv {
    pub(super) fn is_normed(&self) -> bool {
        self.flags & flag::NORM != 0
    }
}

/// A packed matrix.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix {
    pub(super) weights: u64,
    pub(super) out: u64,
    pub(super) rows: usize,
    /// Of several rows: values from a row of the output to the next.
    pub(super) stride: usize,
    pub(super) adds: bool,
    pub(super) kind: usize,
    /// Units along K.
    pub(super) units: usize,
    /// Bytes of a unit of 16 rows.
    pub(super) unit_bytes: usize,
    /// Where its units begin on the line of costs, and the cost of each.
    pub(super) first_cost: usize,
    pub(super) cost: usize,
}

impl Matrix {
    pub(super) fn tiles(&self) -> usize {
        self.rows.div_ceil(M16_ROWS)
    }

    /// Bytes from the row factors of 128 rows to those of the next.
    fn factor_stride(&self) -> usize {
        128 * 4 + self.units * self.unit_bytes * 8
    }

    /// Address of the factors of the rows of a tile.
    pub(super) fn factors(&self, tile: usize) -> u64 {
        self.weights + (tile / 8 * self.factor_stride() + tile % 8 * 64) as u64
    }

    /// Bytes of a tile of 16 rows.
    pub(super) fn tile_bytes(&self) -> usize {
        self.units * self.unit_bytes
    }

    /// Bytes of the second slice of a unit.
    fn second_slice_bytes(&self) -> usize {
        match WeightKind::ALL.get(self.kind) {
            Some(WeightKind::Q4K) => 1024,
            Some(WeightKind::Q5K) => 1280,
            Some(WeightKind::Q6K) => 1664,
            _ => 0,
        }
    }

    /// The parts of a tile of 16 rows, as `gemm/gemv_tile.cuh` has them: where
    /// `gemm/decode_gemm_small_batch.cu` splits the tile of 256 rows that it belongs to.
    pub(super) fn parts(&self, ranges: u64, tile: usize) -> Vec<TilePart> {
        let row_block = tile / 8;
        let tiles = (self.rows - row_block * 128).div_ceil(M16_ROWS).min(8);
        let second = self.second_slice_bytes();
        let first = self.unit_bytes - second;
        let at = row_block * self.factor_stride() + tiles * 64 + tile % 8 * first;
        let unit_stride = self.unit_bytes * tiles;
        let first_unit = tile / 16 * self.units;
        let begin = self.first_cost + first_unit * self.cost;
        let block = |unit: usize| block_of(ranges, begin + unit * self.cost);
        let n = block(self.units - 1) - block(0) + 1;
        let range_begin = |block: usize| block * low(ranges) + block.min(high(ranges));
        let split = |part: usize| {
            let begin = range_begin(block(0) + part);
            let unit = begin.saturating_sub(self.first_cost).div_ceil(self.cost);
            unit.saturating_sub(first_unit).min(self.units)
        };
        let part = |number: usize| {
            let begin = split(number);
            let end = if number + 1 < n {
                split(number + 1)
            } else {
                self.units
            };
            TilePart {
                weights: self.weights + (at + begin * unit_stride) as u64,
                first_unit: begin,
                units: end - begin,
                unit_stride,
                second_slice: tiles * first - tile % 8 * (first - second),
                slice_bytes: (first, second),
                kind: self.kind,
                sum: number,
            }
        };
        (0..n).map(part).collect()
    }
}

/// A packed matrix, or gate and up.
#[derive(Debug, Clone)]
pub(super) struct Packed {
    pub(super) matrices: Vec<Matrix>,
    /// Address of the input row, of its norm, and the norm's epsilon as bits.
    pub(super) x: u64,
    pub(super) norm: u64,
    pub(super) eps: usize,
    /// How `gemm/decode_gemm_small_batch.cu` splits the line of costs.
    pub(super) ranges: u64,
}

/// An f32 matrix.
#[derive(Debug, Clone)]
pub(super) struct F32Rows {
    pub(super) rows: usize,
    /// Of several rows: values from a row of the output to the next.
    pub(super) stride: usize,
    pub(super) weights: u64,
    pub(super) out: u64,
    pub(super) x: u64,
    pub(super) norm: u64,
    /// Values of a K-slice, and the norm's epsilon as bits.
    pub(super) slice_and_eps: u64,
}

/// A launch whose kernel the persistent launch calls as a function.
#[derive(Debug, Clone)]
pub(super) struct Body {
    pub(super) kind: TaskKind,
    /// Blocks of the launch; 0: as many as there are.
    pub(super) tasks: usize,
    /// Of several rows: how many times as many, a row or more each.
    pub(super) rows: usize,
    /// Bytes that a task loads.
    pub(super) bytes: usize,
    /// The arguments.
    pub(super) words: Vec<u64>,
    /// Those that are rows exchanged between blocks.
    pub(super) inputs: &'static [usize],
    /// That which is the row it writes for other blocks, in f16, and its bytes.
    pub(super) result: Option<(usize, usize)>,
    /// Bytes of dynamic shared memory; of attention with the fewest stages, before
    /// [`Operation::set_stages`].
    pub(super) workspace: usize,
    /// `ATTENTION` of the kernel; 0 for other operations.
    pub(super) attention: u32,
    /// Of attention by `attention/decode_tree.cu`.
    pub(super) tree: Option<TreeMemory>,
    pub(super) defines: Vec<(&'static str, String)>,
}

impl Body {
    /// A launch of `tasks` blocks, each of which loads `bytes` bytes.
    pub(super) fn of(kind: TaskKind, tasks: usize, bytes: usize, launch: &Launch) -> Body {
        Body {
            kind,
            tasks,
            rows: 1,
            bytes,
            words: launch.args.as_words().to_vec(),
            inputs: &[],
            result: None,
            workspace: launch.shared as usize,
            attention: 0,
            tree: None,
            defines: Vec::new(),
        }
    }

    /// Attention by `attention/decode_tree.cu` with tiles of `tiles` times 16 queries; its stages
    /// are those that it works with at least.
    pub(super) fn as_tree(&mut self, launch: &Launch, tiles: usize) -> Option<()> {
        let number = |name| launch.unit.number(name);
        let (stages, head_dim) = (number("STAGES")?, number("HEAD_DIM")?);
        let fixed = |tiles| tree_fixed_bytes(tiles, head_dim, number("TREE_PLANS").unwrap_or(0));
        let memory = TreeMemory {
            fixed: fixed(tiles),
            stage_bytes: (launch.shared as usize - fixed(number("M16_TILES")?)) / stages,
            stages,
        };
        self.workspace = memory.bytes(LEAST_STAGES);
        self.tree = Some(memory);
        self.defines.retain(|(name, _)| *name != "STAGES");
        for (name, value) in &mut self.defines {
            if *name == "M16_TILES" {
                *value = tiles.to_string();
            }
        }
        Some(())
    }
}

/// Shared memory of `attention/decode_tree.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TreeMemory {
    /// Bytes besides the stages, and those of a stage.
    fixed: usize,
    stage_bytes: usize,
    /// Stages of the separate launch.
    stages: usize,
}

impl TreeMemory {
    /// Bytes with so many stages.
    pub(super) fn bytes(self, stages: usize) -> usize {
        self.fixed + self.stage_bytes * stages
    }

    /// As many stages as `room` bytes hold and the separate launch has.
    pub(super) fn stages_in(self, room: usize) -> usize {
        let stages = room.saturating_sub(self.fixed) / self.stage_bytes;
        stages.clamp(LEAST_STAGES, self.stages.max(LEAST_STAGES))
    }
}

impl Operation {
    /// Gives attention so many stages.
    pub(super) fn set_stages(&mut self, stages: usize) {
        if let Operation::Body(body) = self
            && let Some(memory) = body.tree
        {
            body.workspace = memory.bytes(stages);
        }
    }
}

#[derive(Debug, Clone)]
pub(super) enum Operation {
    Gemv(Gemv),
    Body(Body),
}

/// Bytes of an exchanged row of `values` values in f16.
fn f16_bytes(values: usize) -> usize {
    2 * values.next_multiple_of(256)
}

pub(super) fn low(word: u64) -> usize {
    (word & 0xffff_ffff) as usize
}

pub(super) fn high(word: u64) -> usize {
    (word >> 32) as usize
}

impl CompileUnit {
    /// The value of a define.
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        let found = self.defines.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(super) fn number(&self, name: &str) -> Option<usize> {
        self.value(name)?.parse().ok()
    }
}

impl Operation {
    /// Rows that others read: address and bytes.
    pub(super) fn results(&self) -> Vec<(u64, usize)> {
        match self {
            Operation::Gemv(gemv) => {
                let f32 = gemv.f32.iter().map(|matrix| (matrix.out, 4 * matrix.rows));
                let packed = gemv.packed.iter().map(|packed| {
                    let first = &packed.matrices[0];
                    let bytes = if packed.matrices.len() == 2 {
                        f16_bytes(first.rows)
                    } else {
                        4 * first.rows
                    };
                    (first.out, bytes)
                });
                f32.chain(packed).collect()
            }
            Operation::Body(body) => body
                .result
                .iter()
                .map(|(word, bytes)| (body.words[*word], *bytes))
                .collect(),
        }
    }

    /// The operation of a launch; `None` if the persistent launch has none.
    pub(super) fn of(launch: &Launch) -> Option<Operation> {
        let body = |kind, tasks: usize, bytes| {
            let (inputs, result): (&[usize], _) = match kind {
                TaskKind::Delta => (&[1, 2, 3, 13], Some((17, f16_bytes(128 * tasks)))),
                TaskKind::Append => (&[1, 2, 3], None),
                TaskKind::Combine => (&[1], Some((6, f16_bytes(256 * tasks)))),
                _ => (&[], None),
            };
            Some(Operation::Body(Body {
                inputs,
                result,
                defines: defines_of(&launch.unit),
                ..Body::of(kind, tasks, bytes, launch)
            }))
        };
        match (launch.entry, launch.unit.file) {
            ("gemv_batch_1", _) => Some(Operation::Gemv(gemv(launch)?)),
            ("gemm_small_batch", _) => {
                let gemv = small_batch(launch)?;
                let is_one_row = launch.unit.number("ROWS") == Some(1) && gemv.f32.is_empty();
                is_one_row.then_some(Operation::Gemv(gemv))
            }
            // A head's state is [128][128] f32.
            ("gated_delta_row_fused", _) => body(TaskKind::Delta, launch.grid[0] as usize, 1 << 16),
            ("attn_qk_norm_rope_append", _)
                if launch.grid[1] == 1 && !has_variant(&launch.unit) =>
            {
                body(TaskKind::Append, launch.grid[0] as usize, 1 << 14)
            }
            (
                "attn_decode_tree",
                "attention/decode_tree.cu" | "attention/decode_fixed_splits_sm90.cu",
            ) => {
                let Operation::Body(mut body) = body(TaskKind::Attention, 0, 0)? else {
                    return None;
                };
                body.attention = 2;
                if launch.unit.file == "attention/decode_tree.cu" {
                    body.attention = 1;
                    body.as_tree(launch, launch.unit.number("M16_TILES")?)?;
                }
                Some(Operation::Body(body))
            }
            ("attn_combine_splits", _) if launch.grid[1] == 1 => {
                body(TaskKind::Combine, launch.grid[0] as usize, 1 << 14)
            }
            _ => None,
        }
    }
}

/// Whether a unit rotates adjacent pairs or adds biases, which the bodies do not.
fn has_variant(unit: &CompileUnit) -> bool {
    let mut names = unit.defines.iter().map(|(name, _)| *name);
    names.any(|name| name == "ROPE_ADJACENT" || name == "BIASES")
}

/// Defines under the names that `one_launch/bodies.cuh` has for them.
fn defines_of(unit: &CompileUnit) -> Vec<(&'static str, String)> {
    let is_delta = unit.file == "gated_delta/decode_row_fused.cu";
    let named = |name: &'static str| match (name, is_delta) {
        ("WIDTH", _) => None,
        ("K_HEADS", true) => Some("DELTA_K_HEADS"),
        ("V_HEADS", true) => Some("DELTA_V_HEADS"),
        ("GROUPED", true) => Some("DELTA_GROUPED"),
        ("HEAD_DIM", false) => Some("ATTENTION_HEAD_DIM"),
        _ => Some(name),
    };
    let named = |(name, value): &(&'static str, String)| Some((named(name)?, value.clone()));
    unit.defines.iter().filter_map(named).collect()
}

fn gemv(launch: &Launch) -> Option<Gemv> {
    let words = launch.args.as_words();
    let (matrices, rest) = words.split_at_checked(MAX_MATRICES * MATRIX_WORDS)?;
    let &[x, norm, ranges, counts, sizes, ref f32_words @ ..] = rest else {
        return None;
    };
    let unit = &launch.unit;
    let columns = unit.number("WIDTH")?;
    let is_normed = unit.number("NORM")? == 1;
    let is_gated = unit.number("SWIGLU")? == 1;
    let per_entry = if is_gated { 2 } else { 1 };
    let matrix = |words: &[u64]| Matrix {
        weights: words[0],
        out: words[1],
        rows: low(words[2]),
        stride: 0,
        adds: high(words[2]) != 0,
        kind: low(words[3]),
        units: high(words[3]),
        unit_bytes: high(words[4]),
        first_cost: low(words[5]),
        cost: high(words[5]),
    };
    let matrices: Vec<Matrix> = matrices
        .chunks(MATRIX_WORDS)
        .take(low(counts))
        .map(matrix)
        .collect();
    let entry = |matrices: &[Matrix]| Packed {
        matrices: matrices.to_vec(),
        x,
        norm,
        eps: high(counts),
        ranges,
    };
    let f32 = if unit.number("F32_MATRICES")? == 1 {
        let (matrices, rest) = f32_words.split_at_checked(MAX_MATRICES * F32_MATRIX_WORDS)?;
        let &[_, _, f32_counts, _, slice] = rest else {
            return None;
        };
        let matrices = matrices.chunks(F32_MATRIX_WORDS).take(low(f32_counts));
        let rows = |matrix: &[u64]| {
            let adds = low(matrix[3]) != 0;
            (!adds).then_some(F32Rows {
                rows: low(matrix[2]),
                stride: 0,
                weights: matrix[0],
                out: matrix[1],
                x,
                norm,
                slice_and_eps: pair(low(slice), high(counts)),
            })
        };
        // Their input is the row that packed matrices have normed.
        if !is_normed {
            return None;
        }
        matrices.map(rows).collect::<Option<Vec<_>>>()?
    } else {
        Vec::new()
    };
    Some(Gemv {
        packed: matrices.chunks(per_entry).map(entry).collect(),
        f32,
        flags: (u32::from(is_normed) * flag::NORM) | (u32::from(is_gated) * flag::SWIGLU),
        columns,
        chunk_stride: 0,
        norm: None,
        parts: per_entry * high(sizes),
    })
}

/// A launch of `gemm/decode_gemm_small_batch.cu`: over one row it takes the place of a GEMV where a
/// tile does not fit shared memory. Bits and weights are those of the GEMV.
pub(super) fn small_batch(launch: &Launch) -> Option<Gemv> {
    let unit = &launch.unit;
    let words = launch.args.as_words();
    let (matrices, rest) = words.split_at_checked(MAX_MATRICES * SMALL_BATCH_MATRIX_WORDS)?;
    let (&[x, _, counts, ranges], f32_words) = rest.split_first_chunk()?;
    let matrices = matrices.chunks(SMALL_BATCH_MATRIX_WORDS).take(low(counts));
    let (mut packed, mut columns, mut parts) = (Vec::new(), 0, 1);
    for matrix in matrices {
        let &[
            weight,
            out,
            rows_and_stride,
            add_and_kind,
            units,
            bytes,
            costs,
            _,
        ] = matrix
        else {
            return None;
        };
        let (units, tiles_of_256, tile_bytes) = (low(units), high(units), low(bytes));
        let kind = *WeightKind::ALL.get(high(add_and_kind))?;
        columns = units * kind.unit_values();
        for tile in 0..tiles_of_256 {
            let begin = low(costs) + tile * units * high(costs);
            let last = begin + (units - 1) * high(costs);
            parts = parts.max(block_of(ranges, last) - block_of(ranges, begin) + 1);
        }
        packed.push(Packed {
            matrices: vec![Matrix {
                weights: weight,
                out,
                rows: low(rows_and_stride),
                stride: high(rows_and_stride),
                adds: low(add_and_kind) != 0,
                kind: high(add_and_kind),
                units,
                unit_bytes: tile_bytes,
                first_cost: low(costs),
                cost: high(costs),
            }],
            x,
            norm: 0,
            eps: 0,
            ranges,
        });
    }
    let f32 = if unit.number("F32_MATRICES")? == 1 {
        f32_matrices(f32_words)?
    } else {
        Vec::new()
    };
    Some(Gemv {
        packed,
        f32,
        flags: 0,
        columns,
        chunk_stride: high(counts),
        norm: None,
        parts,
    })
}

/// The f32 matrices of such a launch.
fn f32_matrices(words: &[u64]) -> Option<Vec<F32Rows>> {
    let (matrices, rest) = words.split_at_checked(MAX_MATRICES * F32_MATRIX_WORDS)?;
    let &[x, _, counts, _, slice] = rest else {
        return None;
    };
    let matrices = matrices.chunks(F32_MATRIX_WORDS).take(low(counts));
    let rows = |matrix: &[u64]| {
        let adds = low(matrix[3]) != 0;
        (!adds).then_some(F32Rows {
            rows: low(matrix[2]),
            stride: high(matrix[2]),
            weights: matrix[0],
            out: matrix[1],
            x,
            norm: 0,
            slice_and_eps: slice,
        })
    };
    matrices.map(rows).collect()
}
