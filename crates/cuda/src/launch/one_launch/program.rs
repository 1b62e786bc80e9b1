//! The tasks of consecutive launches, their table and their launch.

use std::collections::BTreeMap;

use super::assignment::{Assignment, BlockList, BlockShape};
use super::exchange::Exchange;
use super::operation::Operation;
use super::task::{
    LOAD_BYTES, Load, MAX_CONSUMER_WARPS, OPERAND_WORDS, SUM_BYTES, TASK_BYTES, Task, TaskKind,
    flag,
};
use crate::gpu_props::GpuProps;
use crate::launch::gemm::words::{narrow, pair};
use crate::launch::{Args, CompileUnit, Launch};

/// Consumer warps and the units that each has in its ring at least, in the order of preference:
/// beside the warp that copies tasks, 15 have 128 registers a thread.
const WARPS_AND_SLOTS: [(usize, usize); 2] = [(15, 3), (8, 2)];
/// Static shared memory of a block at most, in bytes.
pub(super) const STATIC_SHARED_BYTES: usize = 12 << 10;
/// Partial sums of a task; fewer where there is little shared memory.
const TASK_SUMS: [usize; 2] = [256, 128];
/// Bytes of a partial sum: 16 rows in f32.
const SUMS_BYTES: usize = 16 * 4;
/// Bytes of the lists of a block, before those.
pub(super) const LISTS_BYTES: usize = 256;
/// Bytes between counters.
pub(super) const COUNTER_BYTES: usize = 128;
/// Counters besides those of launches: blocks that left, the error, the set of exchanged rows.
const MORE_COUNTERS: usize = 3;
/// Partial sums of a tile at most: a byte counts them.
const MAX_TILE_SUMS: usize = 255;
/// The widest row that is normed in registers.
const MAX_HIDDEN: usize = 2560;

/// Consecutive launches of a plan as tasks.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) blocks: Vec<BlockList>,
    /// Counters: one for each launch.
    pub(crate) counters: usize,
    /// Bytes of the rows that blocks exchange.
    pub(crate) exchange_bytes: usize,
    unit: CompileUnit,
    shared: u32,
    warps: usize,
}

/// Device addresses of a program.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProgramBuffers {
    /// [`Program::table`].
    pub(crate) table: u64,
    /// [`Program::counter_bytes`], zero before the first launch.
    pub(crate) counters: u64,
    /// Two times `exchange_bytes`, all bits set before the first launch.
    pub(crate) exchange: u64,
    /// u32 that every launch writes: 0, or which wait took too long.
    pub(crate) status: u64,
}

/// The table of a program, and where its parts begin.
#[derive(Debug, Clone, Default)]
pub(crate) struct Table {
    pub(crate) bytes: Vec<u8>,
    pub(super) tasks: usize,
    pub(super) loads: usize,
    pub(super) sums: usize,
    pub(super) tiles: usize,
}

impl Program {
    /// The program of `launches`. `None` if one of them is of a kernel or of shapes that the
    /// persistent launch does not have.
    pub(crate) fn of(gpu: GpuProps, launches: &[Launch]) -> Option<Program> {
        let operations: Vec<Operation> = launches
            .iter()
            .map(Operation::of)
            .collect::<Option<Vec<_>>>()?;
        if !are_in_order(&operations) {
            return None;
        }
        let shapes = shapes_of(gpu, launches, &operations)?;
        let exchange = Exchange::new(&operations);
        let mut assignment = Assignment::new(gpu.sm_count, exchange, shapes.block);
        for operation in &operations {
            assignment.push(operation);
        }
        let (blocks, exchange_bytes) = assignment.finish();
        let mut tasks = blocks.iter().flat_map(|block| &block.tasks);
        // Rows of f16 are read as blocks exchange them.
        let is_known = |task: &Task| {
            task.kind != TaskKind::Gemv || task.flags & flag::NORM != 0 || task.exchanged & 1 != 0
        };
        let fits = |task: &Task| task.words.len() <= OPERAND_WORDS && is_known(task);
        tasks.all(fits).then_some(Program {
            blocks,
            counters: launches.len(),
            exchange_bytes,
            unit: shapes.unit,
            shared: shapes.shared,
            warps: shapes.block.warps,
        })
    }

    /// One launch prints where its time goes.
    pub(crate) fn print_clocks(&mut self) {
        self.unit = self.unit.clone().define("CLOCKS", 1);
    }

    /// The longest run of `launches` from the first that has a program, if it has more than one.
    pub(crate) fn run_of(launches: &[Launch]) -> Option<std::ops::Range<usize>> {
        let known = |launch: &Launch| Operation::of(launch).is_some();
        let begin = launches.iter().position(known)?;
        let run = launches[begin..].iter().take_while(|launch| known(launch));
        let end = begin + run.count();
        (end - begin > 1).then_some(begin..end)
    }

    /// Bytes of all counters.
    pub(crate) fn counter_bytes(&self) -> usize {
        (self.counters + MORE_COUNTERS) * COUNTER_BYTES
    }

    /// What the kernel reads: where the lists of each block begin, tasks, what rings load, what is
    /// summed, and tiles. Lists of tasks and of loads have an end; rings read 32 loads ahead.
    pub(crate) fn table(&self) -> Table {
        let (mut lists, mut tasks, mut tiles) = (vec![], vec![], vec![]);
        let (mut loads, mut sums) = (vec![], vec![]);
        for block in &self.blocks {
            let mut begins = vec![narrow(tasks.len() / TASK_BYTES)];
            let of_block = block.tasks.iter();
            of_block.for_each(|task| task.append(&mut tasks, &mut tiles));
            tasks.resize(tasks.len() + TASK_BYTES, 0);
            for list in &block.loads {
                begins.push(narrow(loads.len() / LOAD_BYTES));
                let is_load = |load: &&Load| !matches!(load, Load::Part(part) if part.units == 0);
                let real = list.iter().filter(is_load);
                real.for_each(|load| load.append(&mut loads));
                loads.resize(loads.len() + LOAD_BYTES, 0);
            }
            begins.resize(1 + MAX_CONSUMER_WARPS, 0);
            for list in &block.loads {
                begins.push(narrow(sums.len() / SUM_BYTES));
                for load in list {
                    if let Load::Part(part) = load {
                        part.append_sum(&mut sums);
                    }
                }
            }
            let end = lists.len() + LISTS_BYTES;
            lists.extend(begins.into_iter().flat_map(u32::to_le_bytes));
            lists.resize(end, 0);
        }
        lists.resize(lists.len().next_multiple_of(TASK_BYTES), 0);
        loads.resize(loads.len() + 32 * LOAD_BYTES, 0);
        sums.resize(sums.len().next_multiple_of(16), 0);
        let tasks_at = lists.len();
        let loads_at = tasks_at + tasks.len();
        let sums_at = loads_at + loads.len();
        let tiles_at = sums_at + sums.len();
        Table {
            bytes: [lists, tasks, loads, sums, tiles].concat(),
            tasks: tasks_at,
            loads: loads_at,
            sums: sums_at,
            tiles: tiles_at,
        }
    }

    /// The launch.
    pub(crate) fn launch(&self, table: &Table, at: ProgramBuffers) -> Launch {
        Launch {
            entry: "one_launch",
            unit: self.unit.clone(),
            grid: [narrow(self.blocks.len()), 1, 1],
            block: [32 * narrow(self.warps + 1), 1, 1],
            shared: self.shared,
            args: Args::new().words(&[
                at.table,
                at.table + table.tasks as u64,
                at.table + table.loads as u64,
                at.table + table.sums as u64,
                at.table + table.tiles as u64,
                at.counters,
                at.status,
                at.exchange,
                pair(self.counters, self.exchange_bytes),
            ]),
            cooperative: true,
            overlap: false,
        }
    }
}

/// Whether counters order all that is not exchanged: keys and queries are appended right before
/// attention, and its partial results combined right behind. Other launches read the results of
/// the last one only, and those of packed matrices.
fn are_in_order(operations: &[Operation]) -> bool {
    let kind = |operation: &Operation| match operation {
        Operation::Gemv(_) => TaskKind::Gemv,
        Operation::Body(body) => body.kind,
    };
    let is_pair = |pair: &[Operation]| {
        let [before, operation] = pair else {
            return false;
        };
        let (before, kind) = (kind(before), kind(operation));
        (before == TaskKind::Append) == (kind == TaskKind::Attention)
            && (before == TaskKind::Attention) == (kind == TaskKind::Combine)
    };
    let is_gemv = |operation: Option<&Operation>| {
        operation.is_some_and(|operation| kind(operation) == TaskKind::Gemv)
    };
    is_gemv(operations.first()) && is_gemv(operations.last()) && operations.windows(2).all(is_pair)
}

/// The unit that has all operations, its dynamic shared memory in bytes, and what a block has room
/// for.
struct Shapes {
    unit: CompileUnit,
    shared: u32,
    block: BlockShape,
}

fn shapes_of(gpu: GpuProps, launches: &[Launch], operations: &[Operation]) -> Option<Shapes> {
    let mut defines: BTreeMap<&'static str, String> = BTreeMap::new();
    let (mut hidden, mut norm_warps) = (None, None);
    let (mut kinds, mut columns, mut parts, mut workspace) = (0, 0, 1, 0);
    let mut slot_bytes = 0;
    let (mut delta, mut attention) = (0, 0);
    for (launch, operation) in launches.iter().zip(operations) {
        match operation {
            Operation::Gemv(gemv) => {
                if gemv.is_normed() {
                    let of_launch = (
                        Some(gemv.columns),
                        launch.unit.value("NORM_WARPS")?.parse().ok(),
                    );
                    if hidden.is_some() && (hidden, norm_warps) != of_launch {
                        return None;
                    }
                    (hidden, norm_warps) = of_launch;
                }
                kinds |= launch.unit.value("KINDS")?.parse::<u32>().ok()?;
                columns = columns.max(gemv.columns);
                parts = parts.max(gemv.parts);
                let matrices = gemv.packed.iter().flat_map(|packed| &packed.matrices);
                for matrix in matrices {
                    slot_bytes = slot_bytes.max(matrix.unit_bytes.next_multiple_of(128));
                    let is_gated = gemv.flags & flag::SWIGLU != 0;
                    // Words without a row would never be there.
                    if is_gated && !matrix.rows.is_multiple_of(256) {
                        return None;
                    }
                }
            }
            Operation::Body(body) => {
                workspace = workspace.max(body.workspace);
                delta |= u32::from(body.kind == TaskKind::Delta);
                attention = attention.max(body.attention);
                for (name, value) in &body.defines {
                    let known = defines.entry(name).or_insert_with(|| value.clone());
                    if known != value {
                        return None;
                    }
                }
            }
        }
    }
    let hidden: usize = hidden?;
    let norm_warps: usize = norm_warps?;
    let attention_warps = if attention == 2 { 12 } else { 8 };
    let rows = 2 * columns + 4 * hidden;
    let room = gpu.shared_bytes.checked_sub(STATIC_SHARED_BYTES + rows)?;
    let fit = |(warps, least): (usize, usize), sums: usize| {
        let sums = sums.max(parts);
        let slots = room.saturating_sub(sums * SUMS_BYTES) / (warps * slot_bytes);
        let workspace_warps = workspace.div_ceil((slots * slot_bytes).max(1));
        let has_warps = warps >= attention_warps.max(norm_warps).max(workspace_warps);
        let block = BlockShape {
            warps,
            workspace_warps,
            sums,
        };
        (slots >= least && has_warps).then_some((slots, block))
    };
    let mut choices = WARPS_AND_SLOTS
        .into_iter()
        .flat_map(|warps| TASK_SUMS.map(|sums| (warps, sums)));
    let (slots, block) = choices.find_map(|(warps, sums)| fit(warps, sums))?;
    if hidden > MAX_HIDDEN || parts > MAX_TILE_SUMS {
        return None;
    }
    let fixed = rows + block.sums * SUMS_BYTES;
    // Rows are written in f16 only.
    for (name, value) in [("OUT_F32", "0"), ("OUT_F16", "1"), ("N8_TILES", "1")] {
        if defines.remove(name).is_some_and(|found| found != value) {
            return None;
        }
    }
    let mut unit = CompileUnit::new("one_launch/one_launch.cu")
        .define("HIDDEN", hidden)
        .define("WIDTH", hidden)
        .define("NORM_WARPS", norm_warps)
        .define("KINDS", kinds)
        .define("MAX_COLUMNS", columns)
        .define("CONSUMER_WARPS", block.warps)
        .define("MAX_SUMS", block.sums)
        .define("RING_SLOTS", slots)
        .define("SLOT_BYTES", slot_bytes)
        .define("OUT_F32", 0)
        .define("OUT_F16", 1)
        .define("N8_TILES", 1)
        .define("DELTA", delta)
        .define("ATTENTION", attention);
    for (name, value) in defines {
        unit = unit.define(name, value);
    }
    Some(Shapes {
        unit,
        shared: narrow(slots * block.warps * slot_bytes + fixed),
        block,
    })
}
