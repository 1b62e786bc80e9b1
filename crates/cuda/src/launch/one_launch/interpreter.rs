//! A slow interpreter of a program's table, as the kernel reads it: which rows each task waits for,
//! which it writes, and which parts its warps load and sum.

use std::collections::HashSet;
use std::ops::Range;

use super::program::{COUNTER_BYTES, LISTS_BYTES, Program, Table};
use super::task::{
    GEMV_PARTS_WORD, GEMV_TILES_WORD, LOAD_BYTES, MAX_CONSUMER_WARPS, RESIDUAL_EXCHANGED,
    SUM_BYTES, TASK_BYTES, TILE_BYTES, TaskKind, flag,
};

/// Exchanged rows are compared in pieces of this size.
const GRANULE: u64 = 16;

/// A part as the ring and the products of a warp read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TablePart {
    pub(super) weights: u64,
    pub(super) first_unit: usize,
    pub(super) units: usize,
    pub(super) sum: usize,
}

/// A tile as the threads of its rows read it.
#[derive(Debug, Clone)]
pub(super) struct TableTile {
    /// Address of the factors of its rows.
    pub(super) factors: u64,
    pub(super) residual: u64,
    pub(super) out: u64,
    pub(super) first_sum: usize,
    pub(super) n_first: usize,
    pub(super) n_sums: usize,
    pub(super) rows: u64,
}

/// A task with the parts that its warps take, and its tiles.
#[derive(Debug, Clone)]
pub(super) struct TableTask {
    pub(super) kind: TaskKind,
    pub(super) first: u64,
    pub(super) count: u64,
    pub(super) wait: Option<(usize, usize)>,
    pub(super) raise: Option<usize>,
    pub(super) flags: u32,
    pub(super) phase: u32,
    pub(super) exchanged: u32,
    pub(super) words: Vec<u64>,
    pub(super) parts: Vec<TablePart>,
    pub(super) tiles: Vec<TableTile>,
}

/// Shapes of the mixers, which a table does not have.
#[derive(Debug, Clone, Copy)]
pub(super) struct MixerShapes {
    pub(super) delta_heads: u64,
    pub(super) delta_channels: u64,
    pub(super) heads: u64,
    pub(super) kv_heads: u64,
    pub(super) head_dim: u64,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u16_at(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_le_bytes(
        bytes[at..at + 2].try_into().expect("two bytes"),
    ))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// The parts of a warp from its two lists, which have the same in the same order.
struct WarpParts<'a> {
    table: &'a Table,
    load: usize,
    sum: usize,
}

impl WarpParts<'_> {
    fn skip_workspace(&mut self) {
        let at = self.table.loads + self.load * LOAD_BYTES;
        assert_eq!(u16_at(&self.table.bytes, at + 22), 2, "loading waits");
        self.load += 1;
    }

    fn take(&mut self) -> TablePart {
        let bytes = &self.table.bytes;
        let sum = self.table.sums + self.sum * SUM_BYTES;
        let units = u16_at(bytes, sum);
        self.sum += 1;
        let mut weights = 0;
        if units > 0 {
            let load = self.table.loads + self.load * LOAD_BYTES;
            assert_eq!(u16_at(bytes, load + 22), 1, "units are loaded");
            assert_eq!(u16_at(bytes, load + 16), units, "as many as are summed");
            weights = u64_at(bytes, load);
            self.load += 1;
        }
        TablePart {
            weights,
            first_unit: u16_at(bytes, sum + 2),
            units,
            sum: u16_at(bytes, sum + 4),
        }
    }
}

/// Tile `index` of all blocks.
fn tile_of(table: &Table, index: usize) -> TableTile {
    let bytes = &table.bytes[table.tiles + index * TILE_BYTES..][..TILE_BYTES];
    TableTile {
        factors: u64_at(bytes, 0),
        residual: u64_at(bytes, 16),
        out: u64::from(u32_at(bytes, 32)),
        first_sum: u16_at(bytes, 36),
        n_first: usize::from(bytes[38]),
        n_sums: usize::from(bytes[39]),
        rows: u64::from(u32_at(bytes, 40)),
    }
}

/// The lists of a program from its table.
pub(super) fn lists_of(program: &Program) -> Vec<Vec<TableTask>> {
    assert_eq!(
        program.counter_bytes(),
        (program.counters + 3) * COUNTER_BYTES
    );
    let table = program.table();
    let list = |block: usize| block_list(&table, block, program.blocks[block].loads.len());
    (0..program.blocks.len()).map(list).collect()
}

fn block_list(table: &Table, block: usize, n_warps: usize) -> Vec<TableTask> {
    let bytes = &table.bytes;
    let begin = |i: usize| u32_at(bytes, block * LISTS_BYTES + 4 * i) as usize;
    let mut warps: Vec<WarpParts> = (0..n_warps)
        .map(|warp| WarpParts {
            table,
            load: begin(1 + warp),
            sum: begin(1 + MAX_CONSUMER_WARPS + warp),
        })
        .collect();
    let mut tasks = Vec::new();
    for at in (table.tasks + begin(0) * TASK_BYTES..).step_by(TASK_BYTES) {
        let kind = match u32_at(bytes, at) {
            0 => break,
            1 => TaskKind::Gemv,
            2 => TaskKind::GemvF32,
            3 => TaskKind::Delta,
            4 => TaskKind::Append,
            5 => TaskKind::Attention,
            6 => TaskKind::Combine,
            7 => TaskKind::GatedNorm,
            other => panic!("a task of kind {other}"),
        };
        let counter = |at| {
            let value = u32_at(bytes, at);
            (value != u32::MAX).then_some(value as usize)
        };
        let (mut parts, mut tiles) = (Vec::new(), Vec::new());
        let wait = counter(at + 12).map(|counter| (counter, u32_at(bytes, at + 16) as usize));
        let flags = u32_at(bytes, at + 24);
        let workspace_warps = flags >> flag::WORKSPACE_SHIFT & 0xff;
        for warp in warps.iter_mut().take(workspace_warps as usize) {
            warp.skip_workspace();
        }
        if kind == TaskKind::Gemv {
            for (warp, list) in warps.iter_mut().enumerate() {
                let n = u16_at(bytes, at + 32 + 8 * GEMV_PARTS_WORD + 2 * warp);
                parts.extend((0..n).map(|_| list.take()));
            }
            let tiles_at = at + 32 + 8 * GEMV_TILES_WORD;
            let (first, n) = (u32_at(bytes, tiles_at), u32_at(bytes, tiles_at + 4));
            tiles.extend((first..first + n).map(|index| tile_of(table, index as usize)));
        }
        let words = bytes[at + 32..at + TASK_BYTES].chunks(8);
        tasks.push(TableTask {
            kind,
            first: u64::from(u32_at(bytes, at + 4)),
            count: u64::from(u32_at(bytes, at + 8)),
            wait,
            raise: counter(at + 20),
            flags: flags & 0xff,
            phase: flags >> 16,
            exchanged: u32_at(bytes, at + 28),
            words: words.map(|word| u64_at(word, 0)).collect(),
            parts,
            tiles,
        });
    }
    for warp in &warps {
        let end = table.loads + warp.load * LOAD_BYTES;
        assert_eq!(u16_at(bytes, end + 22), 0, "nothing is loaded for no sum");
    }
    tasks
}

/// Where values `first` .. + `n` of a row in f16 are.
fn f16(at: u64, first: u64, n: u64) -> Range<u64> {
    at + 2 * first..at + 2 * (first + n)
}

impl TableTask {
    /// Operand `i` as `bytes` exchanged bytes from `begin` on; none if it is not exchanged.
    fn row(&self, i: usize, begin: u64, bytes: u64) -> Option<Range<u64>> {
        let at = self.words[i] + begin;
        (self.exchanged >> i & 1 == 1).then_some(at..at + bytes)
    }

    /// Calls `each` with every tile and its parts of both matrices, in the order of their sums.
    /// Fails unless each sum belongs to one tile and the parts of a matrix follow each other.
    pub(super) fn check_tiles(&self, mut each: impl FnMut(&TableTile, [&[&TablePart]; 2])) {
        let mut parts: Vec<&TablePart> = self.parts.iter().collect();
        parts.sort_by_key(|part| part.sum);
        assert!(parts.iter().map(|part| part.sum).eq(0..parts.len()));
        let mut sums = 0;
        for tile in &self.tiles {
            assert_eq!(tile.first_sum, sums);
            sums += tile.n_sums;
            let (first, second) = parts[tile.first_sum..sums].split_at(tile.n_first);
            for parts in [first, second] {
                let mut end = 0;
                for part in parts {
                    assert_eq!(part.first_unit, end, "of the tile at {}", tile.factors);
                    end += part.units;
                }
            }
            assert_eq!(second.is_empty(), self.flags & flag::SWIGLU == 0);
            each(tile, [first, second]);
        }
        assert_eq!(sums, parts.len(), "a sum belongs to no tile");
    }

    /// Exchanged bytes that the task reads and writes.
    pub(super) fn accesses(&self, shapes: &MixerShapes) -> [Vec<Range<u64>>; 2] {
        let w = &self.words;
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        match self.kind {
            TaskKind::Gemv => {
                let columns = w[2] & 0xffff_ffff;
                if self.flags & flag::NORM != 0 {
                    reads.extend(self.row(0, 0, 4 * columns));
                } else if self.exchanged & 1 == 1 {
                    reads.push(f16(w[0], 0, columns));
                }
                for tile in &self.tiles {
                    if self.flags & flag::SWIGLU != 0 {
                        writes.push(f16(tile.out, 0, 16));
                        continue;
                    }
                    if tile.residual & RESIDUAL_EXCHANGED != 0 {
                        let at = tile.residual & !RESIDUAL_EXCHANGED;
                        reads.push(at..at + 4 * tile.rows);
                    }
                    writes.push(tile.out..tile.out + 4 * tile.rows);
                }
            }
            // The row is that of the packed matrices of its phase.
            TaskKind::GemvF32 => {
                reads.extend(self.row(0, 0, GRANULE));
                writes.extend(self.row(3, 4 * self.first, 4 * self.count));
            }
            TaskKind::Delta => {
                reads.extend(self.row(1, 0, 4 * shapes.delta_channels));
                reads.extend(self.row(2, 0, 4 * shapes.delta_heads));
                reads.extend(self.row(3, 0, 4 * shapes.delta_heads));
                reads.extend(self.row(13, 512 * self.first, 512));
                writes.push(f16(w[17], 128 * self.first, 128));
            }
            TaskKind::Append => {
                reads.extend(self.row(1, 0, 8 * shapes.heads * shapes.head_dim));
                reads.extend(self.row(2, 0, 4 * shapes.kv_heads * shapes.head_dim));
                reads.extend(self.row(3, 0, 4 * shapes.kv_heads * shapes.head_dim));
            }
            // Of several rows nothing is exchanged.
            TaskKind::GatedNorm => {}
            TaskKind::Attention => {}
            TaskKind::Combine => {
                reads.extend(self.row(1, 0, 8 * shapes.heads * shapes.head_dim));
                writes.push(f16(w[6], 256 * self.first, 256));
            }
        }
        [reads, writes]
    }
}

/// The order in which blocks get their turns.
#[derive(Debug, Clone, Copy)]
pub(super) enum Turns {
    /// Each block runs one task, then the next block.
    Lockstep,
    /// A block runs as far as it can, then the next block.
    Greedy,
    /// As `Greedy`, the last block first.
    GreedyBackward,
}

/// Runs the lists: a task runs when the rows that it reads are there and its counter has its value.
/// Fails if a word is written twice, or with the blocks that wait for ever. Without shapes only
/// counters order tasks, as in steps of several rows.
pub(super) fn run(
    lists: &[Vec<TableTask>],
    counters: usize,
    shapes: Option<&MixerShapes>,
    turns: Turns,
) -> Result<(), String> {
    let mut values = vec![0; counters];
    let mut next = vec![0; lists.len()];
    let mut written: HashSet<u64> = HashSet::new();
    loop {
        let mut has_moved = false;
        for i in 0..lists.len() {
            let block = match turns {
                Turns::GreedyBackward => lists.len() - 1 - i,
                Turns::Lockstep | Turns::Greedy => i,
            };
            while let Some(task) = lists[block].get(next[block]) {
                let is_counted = |(counter, value): (usize, usize)| values[counter] >= value;
                let [reads, writes] =
                    shapes.map_or_else(Default::default, |shapes| task.accesses(shapes));
                let mut granules = reads
                    .iter()
                    .flat_map(|range| range.start / GRANULE..range.end.div_ceil(GRANULE));
                if !task.wait.is_none_or(is_counted) || !granules.all(|at| written.contains(&at)) {
                    break;
                }
                for at in writes.iter().flat_map(|range| range.clone().step_by(4)) {
                    // Granules of words: the first word of one says that it is there.
                    if at % GRANULE == 0 && !written.insert(at / GRANULE) {
                        return Err(format!("offset {at} is written twice"));
                    }
                }
                if let Some(raise) = task.raise {
                    values[raise] += 1;
                }
                next[block] += 1;
                has_moved = true;
                if matches!(turns, Turns::Lockstep) {
                    break;
                }
            }
        }
        if !has_moved {
            break;
        }
    }
    let is_stuck = |block: &usize| next[*block] < lists[*block].len();
    let stuck: Vec<usize> = (0..lists.len()).filter(is_stuck).collect();
    if stuck.is_empty() {
        Ok(())
    } else {
        Err(format!("blocks {stuck:?} wait for ever in {turns:?}"))
    }
}
