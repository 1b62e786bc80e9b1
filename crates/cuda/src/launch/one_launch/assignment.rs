//! Which block does what: each block has its share of a phase's tiles, and what is left over goes
//! where the fewest bytes were loaded before.
//!
//! A phase takes as long as its slowest block, so tiles are divided evenly; where a phase has fewer
//! tiles than there are blocks, they even out the bytes, since rings are ahead of the tasks. Within
//! a task, the longest parts come first, each to the warp with the fewest units.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use super::exchange::{At, Exchange};
use super::operation::{Body, Gemv, Operation, Packed};
use super::task::{
    GEMV_PARTS_WORD, Load, MAX_CONSUMER_WARPS, RESIDUAL_EXCHANGED, Task, TaskKind, TaskTile,
    TilePart, WARP_PARTS, flag,
};
use crate::launch::gemm::words::pair;
use crate::pack::{A16_TILE, M16_ROWS};

/// Rows of an f32 matrix in a task.
const F32_ROWS: usize = 8;
/// Blocks of the separate kernel that a task of attention's norms and rotation is, at most; each
/// has four heads.
const APPEND_BLOCKS: usize = 3;

/// What a block does.
#[derive(Debug, Clone)]
pub(crate) struct BlockList {
    pub(crate) tasks: Vec<Task>,
    /// Of each consumer warp, in the order in which it sums them.
    pub(crate) loads: Vec<Vec<Load>>,
    /// Units of the phase and of all phases so far, of each consumer warp.
    units: Vec<(usize, usize)>,
}

impl BlockList {
    fn new(warps: usize) -> BlockList {
        BlockList {
            tasks: Vec::new(),
            loads: vec![Vec::new(); warps],
            units: vec![(0, 0); warps],
        }
    }

    /// Gives the parts of a task to warps; returns how many each has.
    fn add_parts(&mut self, mut parts: Vec<TilePart>) -> [usize; MAX_CONSUMER_WARPS] {
        let mut counts = [0; MAX_CONSUMER_WARPS];
        parts.sort_by_key(|part| Reverse(part.units));
        for part in parts {
            let warps = (0..self.loads.len()).filter(|warp| counts[*warp] < WARP_PARTS);
            let least = warps.min_by_key(|warp| (self.units[*warp], counts[*warp]));
            let warp = least.expect("a task has fewer parts than its warps take");
            self.units[warp].0 += part.units;
            self.units[warp].1 += part.units;
            counts[warp] += 1;
            self.loads[warp].push(Load::Part(part));
        }
        counts
    }
}

/// A packed matrix, or gate and up, and where its rows are while the persistent launch runs.
struct Placed<'a> {
    packed: &'a Packed,
    out: u64,
    residual: At,
    copy: u64,
    /// Its tiles among those of the phase.
    tiles: Range<usize>,
}

impl Placed<'_> {
    /// A tile of the phase, and its parts behind `sums` others.
    fn tile(&self, index: usize, sums: usize) -> (TaskTile, Vec<TilePart>) {
        let tile = index - self.tiles.start;
        let is_gated = self.packed.matrices.len() == 2;
        let first_row = tile * M16_ROWS;
        let mut parts = Vec::new();
        let mut ends = [0; 2];
        for (matrix, end) in self.packed.matrices.iter().zip(&mut ends) {
            let begin = sums + parts.len();
            parts.extend(
                matrix
                    .parts(self.packed.ranges, tile)
                    .into_iter()
                    .map(|part| {
                        let sum = begin + part.sum;
                        TilePart { sum, ..part }
                    }),
            );
            *end = parts.len();
        }
        let matrices = &self.packed.matrices;
        let factors = |i: usize| matrices.get(i).map_or(0, |matrix| matrix.factors(tile));
        // A row of f16 as `gemm/a16_layout.cuh` has it.
        let copied = if is_gated {
            tile / 4 * A16_TILE + tile % 4 * 256
        } else {
            4 * first_row
        };
        let residual = match self.residual {
            At::Plan(0) => 0,
            At::Plan(address) => address + 4 * first_row as u64,
            At::Exchanged(offset) => (offset + 4 * first_row as u64) | RESIDUAL_EXCHANGED,
        };
        let tile = TaskTile {
            factors: [factors(0), factors(1)],
            residual,
            copy: if self.copy == 0 {
                0
            } else {
                self.copy + copied as u64
            },
            out: self.out as usize + if is_gated { 2 } else { 4 } * first_row,
            first_sum: sums,
            n_first: ends[0],
            n_sums: parts.len(),
            rows: M16_ROWS.min(matrices[0].rows - first_row),
        };
        (tile, parts)
    }
}

/// What a block has room for.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockShape {
    /// Consumer warps.
    pub(super) warps: usize,
    /// Bytes of the ring of each.
    pub(super) ring_bytes: usize,
    /// Partial sums of a task at most.
    pub(super) sums: usize,
}

pub(super) struct Assignment {
    pub(super) blocks: Vec<BlockList>,
    exchange: Exchange,
    pub(super) shape: BlockShape,
    /// Bytes that each block has loaded.
    pub(super) loaded: Vec<usize>,
    /// The phase before and its tasks.
    pub(super) before: Option<(usize, usize)>,
    pub(super) phase: usize,
}

impl Assignment {
    pub(super) fn new(blocks: usize, exchange: Exchange, shape: BlockShape) -> Assignment {
        Assignment {
            blocks: vec![BlockList::new(shape.warps); blocks],
            exchange,
            shape,
            loaded: vec![0; blocks],
            before: None,
            phase: 0,
        }
    }

    /// The lists, and the bytes of the rows that blocks exchange.
    pub(super) fn finish(self) -> (Vec<BlockList>, usize) {
        (self.blocks, self.exchange.bytes())
    }

    pub(super) fn begin_phase(&mut self) {
        for block in &mut self.blocks {
            block.units.iter_mut().for_each(|units| units.0 = 0);
        }
    }

    pub(super) fn end_phase(&mut self, tasks: usize) {
        self.before = Some((self.phase, tasks));
        self.phase += 1;
    }

    /// Adds a phase of one row.
    pub(super) fn push(&mut self, operation: &Operation) {
        self.begin_phase();
        let tasks = match operation {
            Operation::Gemv(gemv) => self.gemv(operation, gemv),
            Operation::Body(body) => self.body(operation, body),
        };
        self.end_phase(tasks);
    }

    /// A task with operands, each exchanged or not.
    pub(super) fn task(
        &self,
        kind: TaskKind,
        (first, count): (usize, usize),
        words: &[At],
    ) -> Task {
        let bits = words.iter().enumerate().map(|(i, word)| word.bit(i));
        Task {
            kind,
            first,
            count,
            wait: None,
            raise: None,
            flags: 0,
            phase: self.phase,
            words: words.iter().map(|word| word.word()).collect(),
            exchanged: bits.sum(),
            tiles: Vec::new(),
        }
    }

    /// How many of `n` equal parts of `bytes` bytes each block takes.
    pub(super) fn take(&mut self, n: usize, bytes: usize) -> Vec<usize> {
        let loaded = self.loaded.iter().enumerate();
        let mut least: BinaryHeap<_> = loaded
            .map(|(block, bytes)| Reverse((*bytes, block)))
            .collect();
        let mut taken = vec![0; self.blocks.len()];
        for _ in 0..n {
            let Some(Reverse((before, block))) = least.pop() else {
                break;
            };
            taken[block] += 1;
            least.push(Reverse((before + bytes, block)));
        }
        for (loaded, taken) in self.loaded.iter_mut().zip(&taken) {
            *loaded += taken * bytes;
        }
        taken
    }

    /// Adds a task to a block, whose earlier task of the phase has the same input.
    pub(super) fn add(&mut self, block: usize, mut task: Task) {
        let same = |before: &Task| before.phase == task.phase;
        if self.blocks[block].tasks.last().is_some_and(same) {
            task.flags |= flag::KEEP_INPUT;
        }
        self.blocks[block].tasks.push(task);
    }

    fn gemv(&mut self, operation: &Operation, gemv: &Gemv) -> usize {
        let input = |address: u64| self.exchange.read(address);
        // Read before this phase writes: a residual is added to what was there.
        let f32_inputs: Vec<At> = gemv.f32.iter().map(|matrix| input(matrix.x)).collect();
        let inputs: Vec<(At, At)> = gemv
            .packed
            .iter()
            .map(|packed| {
                let first = &packed.matrices[0];
                let residual = if first.adds {
                    input(first.out)
                } else {
                    At::Plan(0)
                };
                (input(packed.x), residual)
            })
            .collect();
        let outs = self.exchange.write(operation);
        let (f32_outs, outs) = outs.split_at(gemv.f32.len());
        let mut tasks = 0;
        for ((matrix, x), out) in gemv.f32.iter().zip(f32_inputs).zip(f32_outs) {
            let plan = [matrix.norm, matrix.weights].map(At::Plan);
            let words = [x, plan[0], plan[1], *out, At::Plan(matrix.slice_and_eps)];
            let groups = matrix.rows.div_ceil(F32_ROWS);
            let taken = self.take(groups, 4 * F32_ROWS * gemv.columns);
            let mut group = 0;
            for (block, taken) in taken.into_iter().enumerate() {
                for _ in 0..taken {
                    let first = group * F32_ROWS;
                    let range = (first, F32_ROWS.min(matrix.rows - first));
                    let mut task = self.task(TaskKind::GemvF32, range, &words);
                    task.flags = gemv.flags;
                    self.add(block, task);
                    (group, tasks) = (group + 1, tasks + 1);
                }
            }
        }
        let Some((x, _)) = inputs.first().copied() else {
            return tasks;
        };
        let mut placed: Vec<Placed<'_>> = Vec::new();
        for ((packed, (_, residual)), out) in gemv.packed.iter().zip(inputs).zip(outs) {
            let first = &packed.matrices[0];
            let begin = placed.last().map_or(0, |before| before.tiles.end);
            placed.push(Placed {
                packed,
                out: out.word(),
                residual,
                copy: self.exchange.copy(self.phase, first.out),
                tiles: begin..begin + first.tiles(),
            });
        }
        tasks + self.packed(gemv, &placed, x)
    }

    /// How many of `n` tiles each block takes: equally many, and the others where the fewest bytes
    /// were loaded.
    pub(super) fn share(&self, n: usize) -> Vec<usize> {
        let mut taken = vec![n / self.blocks.len(); self.blocks.len()];
        let mut blocks: Vec<usize> = (0..self.blocks.len()).collect();
        blocks.sort_by_key(|block| self.loaded[*block]);
        let others = &blocks[..n % self.blocks.len()];
        others.iter().for_each(|block| taken[*block] += 1);
        taken
    }

    fn packed(&mut self, gemv: &Gemv, placed: &[Placed<'_>], x: At) -> usize {
        let first = placed[0].packed;
        let words = [
            x,
            At::Plan(first.norm),
            At::Plan(pair(gemv.columns, first.eps)),
            At::Plan(0),
        ];
        let is_gated = gemv.flags & flag::SWIGLU != 0;
        // A thread has each row, of gate and up two.
        let most = self.shape.warps * if is_gated { 1 } else { 2 };
        let n = placed.last().map_or(0, |last| last.tiles.end);
        let (mut at, mut tasks) = (0, 0);
        for (block, taken) in self.share(n).into_iter().enumerate() {
            let end = at + taken;
            while at < end {
                let (mut tiles, mut parts) = (Vec::new(), Vec::new());
                while at < end && tiles.len() < most {
                    let of = placed.iter().find(|placed| placed.tiles.contains(&at));
                    let of = of.expect("tiles of a phase are numbered without gaps");
                    let (tile, more) = of.tile(at, parts.len());
                    if !tiles.is_empty() && parts.len() + more.len() > self.shape.sums {
                        break;
                    }
                    let matrices = &of.packed.matrices;
                    self.loaded[block] += matrices.iter().map(|m| m.tile_bytes()).sum::<usize>();
                    tiles.push(tile);
                    parts.extend(more);
                    at += 1;
                }
                let mut task = self.task(TaskKind::Gemv, (0, 0), &words);
                debug_assert_eq!(task.words.len(), GEMV_PARTS_WORD);
                task.flags = gemv.flags;
                task.tiles = tiles;
                self.add_parts(block, &mut task, parts);
                self.add(block, task);
                tasks += 1;
            }
        }
        tasks
    }

    /// Gives the parts of a task of packed matrices to the warps of a block, and writes their
    /// counts.
    pub(super) fn add_parts(&mut self, block: usize, task: &mut Task, parts: Vec<TilePart>) {
        let counts = self.blocks[block].add_parts(parts);
        for counts in counts.chunks(4) {
            let halves = counts.iter().rev();
            let word = halves.fold(0, |word, n| word << 16 | *n as u64);
            task.words.push(word);
        }
    }

    /// Adds a task that works in the first `bytes` bytes of the block's rings.
    pub(super) fn add_with_workspace(&mut self, block: usize, mut task: Task, bytes: usize) {
        let warps = bytes.div_ceil(self.shape.ring_bytes.max(1));
        let warps = warps.min(self.shape.warps);
        task.flags |= (warps as u32) << flag::WORKSPACE_SHIFT;
        let list = &mut self.blocks[block];
        list.tasks.push(task);
        let loads = list.loads.iter_mut().take(warps);
        loads.for_each(|loads| loads.push(Load::Workspace));
    }

    fn body(&mut self, operation: &Operation, body: &Body) -> usize {
        let is_exchanged = |i: usize| body.inputs.contains(&i);
        let words = body.words.iter().enumerate();
        let mut words: Vec<At> = words
            .map(|(i, word)| {
                if is_exchanged(i) {
                    self.exchange.read(*word)
                } else {
                    At::Plan(*word)
                }
            })
            .collect();
        let outs = self.exchange.write(operation);
        if let (Some((i, _)), Some(out)) = (body.result, outs.first()) {
            words[i] = *out;
        }
        let blocks = self.blocks.len();
        let (wait, raise) = match body.kind {
            TaskKind::Append => (None, Some(self.phase)),
            TaskKind::Attention => (self.before, Some(self.phase)),
            TaskKind::Combine => (self.before, None),
            _ => (None, None),
        };
        // Other bodies have memory of their own.
        let workspace = if body.tasks == 0 { body.workspace } else { 0 };
        let add = |assignment: &mut Assignment, block: usize, first: usize| {
            let mut task = assignment.task(body.kind, (first, 1), &words);
            (task.wait, task.raise) = (wait, raise);
            assignment.add_with_workspace(block, task, workspace);
        };
        if body.tasks == 0 {
            for block in 0..blocks {
                add(self, block, block);
            }
            return blocks;
        }
        let step = if body.kind == TaskKind::Append {
            APPEND_BLOCKS.min(self.shape.warps / 4)
        } else {
            1
        };
        let tasks = body.tasks.div_ceil(step);
        let taken = self.take(tasks, body.bytes);
        let mut index = 0;
        for (block, taken) in taken.into_iter().enumerate() {
            for _ in 0..taken {
                add(self, block, index * step);
                index += 1;
            }
        }
        tasks
    }
}
