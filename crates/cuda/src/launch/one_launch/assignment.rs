//! Which block does what: tiles go where the fewest bytes were loaded before.
//!
//! The loading warps run ahead of the tasks, so blocks should load equally much over a few phases,
//! not in each of them: a phase may have fewer tiles than there are blocks. Within a block, the
//! parts of a phase go to the warps that have the fewest units of it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::exchange::{At, Exchange};
use super::operation::{Body, Gemv, Operation, Packed};
use super::task::{CONSUMER_WARPS, GEMV_PARTS_WORD, Load, Task, TaskKind, TilePart, flag};
use crate::launch::gemm::words::pair;

/// Rows of an f32 matrix in a task.
const F32_ROWS: usize = 8;

/// What a block does.
#[derive(Debug, Clone, Default)]
pub(crate) struct BlockList {
    pub(crate) tasks: Vec<Task>,
    /// Of each consumer warp, in the order in which it sums them.
    pub(crate) loads: [Vec<Load>; CONSUMER_WARPS],
    /// Tiles of several sums so far.
    sequence: usize,
    /// Units of the phase and of all phases so far, of each consumer warp.
    units: [(usize, usize); CONSUMER_WARPS],
}

impl BlockList {
    /// Gives the parts of a tile to warps; returns how many each has.
    fn add_tile(&mut self, mut parts: Vec<TilePart>) -> [usize; CONSUMER_WARPS] {
        let mut counts = [0; CONSUMER_WARPS];
        for part in &mut parts {
            part.sequence = self.sequence;
            let warps = self.units.iter().enumerate();
            let least = warps.min_by_key(|(_, units)| **units);
            let warp = least.map_or(0, |(warp, _)| warp);
            self.units[warp].0 += part.units;
            self.units[warp].1 += part.units;
            counts[warp] += 1;
            self.loads[warp].push(Load::Part(part.clone()));
        }
        self.sequence += usize::from(parts.len() > 1);
        counts
    }
}

pub(super) struct Assignment {
    blocks: Vec<BlockList>,
    exchange: Exchange,
    /// Consumer warps in whose rings attention works.
    workspace_warps: usize,
    /// Bytes that each block has loaded.
    loaded: Vec<usize>,
    /// The phase before and its tasks.
    before: Option<(usize, usize)>,
    phase: usize,
}

impl Assignment {
    pub(super) fn new(blocks: usize, exchange: Exchange, workspace_warps: usize) -> Assignment {
        Assignment {
            blocks: vec![BlockList::default(); blocks],
            exchange,
            workspace_warps,
            loaded: vec![0; blocks],
            before: None,
            phase: 0,
        }
    }

    /// The lists, and the bytes of the rows that blocks exchange.
    pub(super) fn finish(self) -> (Vec<BlockList>, usize) {
        (self.blocks, self.exchange.bytes())
    }

    /// Adds a phase.
    pub(super) fn push(&mut self, operation: &Operation) {
        for block in &mut self.blocks {
            block.units.iter_mut().for_each(|units| units.0 = 0);
        }
        let tasks = match operation {
            Operation::Gemv(gemv) => self.gemv(operation, gemv),
            Operation::Body(body) => self.body(operation, body),
        };
        self.before = Some((self.phase, tasks));
        self.phase += 1;
    }

    /// A task with operands, each exchanged or not.
    fn task(&self, kind: TaskKind, (first, count): (usize, usize), words: &[At]) -> Task {
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
        }
    }

    /// How many of `n` equal parts of `bytes` bytes each block takes.
    fn take(&mut self, n: usize, bytes: usize) -> Vec<usize> {
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
    fn add(&mut self, block: usize, mut task: Task) {
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
        for ((packed, input), out) in gemv.packed.iter().zip(inputs).zip(outs) {
            tasks += self.packed(gemv, packed, input, *out);
        }
        tasks
    }

    fn packed(&mut self, gemv: &Gemv, packed: &Packed, (x, residual): (At, At), out: At) -> usize {
        let first = &packed.matrices[0];
        let factors = |i: usize| packed.matrices.get(i).map_or(0, |matrix| matrix.weights);
        let words = [
            x,
            At::Plan(packed.norm),
            residual,
            out,
            At::Plan(self.exchange.copy(self.phase, first.out)),
            At::Plan(factors(0)),
            At::Plan(factors(1)),
            At::Plan(pair(first.factor_stride(), first.kind)),
            At::Plan(pair(gemv.columns, packed.eps)),
        ];
        let tile_bytes = packed.matrices.iter().map(|m| m.units * m.unit_bytes).sum();
        let taken = self.take(first.tiles(), tile_bytes);
        let (mut tile, mut tasks) = (0, 0);
        for (block, taken) in taken
            .into_iter()
            .enumerate()
            .filter(|(_, taken)| *taken > 0)
        {
            let mut counts = [0_usize; CONSUMER_WARPS];
            for tile in tile..tile + taken {
                let mut parts = first.parts(packed.ranges, tile);
                if let Some(second) = packed.matrices.get(1) {
                    let mut more = second.parts(packed.ranges, tile);
                    let n = parts.len() + more.len();
                    more.iter_mut().for_each(|part| part.number += parts.len());
                    let n_first = parts.len();
                    parts.extend(more);
                    for part in &mut parts {
                        (part.n_first, part.n_parts) = (n_first, n);
                    }
                }
                let of_tile = self.blocks[block].add_tile(parts);
                counts
                    .iter_mut()
                    .zip(of_tile)
                    .for_each(|(n, more)| *n += more);
            }
            let mut task = self.task(TaskKind::Gemv, (0, first.rows), &words);
            debug_assert_eq!(task.words.len(), GEMV_PARTS_WORD);
            for counts in counts.chunks(4) {
                let halves = counts.iter().rev();
                task.words
                    .push(halves.fold(0, |word, n| word << 16 | *n as u64));
            }
            task.flags = gemv.flags;
            self.add(block, task);
            (tile, tasks) = (tile + taken, tasks + 1);
        }
        tasks
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
        let add = |assignment: &mut Assignment, block: usize, first: usize| {
            let mut task = assignment.task(body.kind, (first, 1), &words);
            (task.wait, task.raise) = (wait, raise);
            assignment.blocks[block].tasks.push(task);
        };
        if body.tasks == 0 {
            for block in 0..blocks {
                add(self, block, block);
                for loads in &mut self.blocks[block].loads[..self.workspace_warps] {
                    loads.push(Load::Workspace);
                }
            }
            return blocks;
        }
        let taken = self.take(body.tasks, body.bytes);
        let mut index = 0;
        for (block, taken) in taken.into_iter().enumerate() {
            for _ in 0..taken {
                add(self, block, index * body.step);
                index += 1;
            }
        }
        body.tasks
    }
}
