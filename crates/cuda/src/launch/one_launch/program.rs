//! The tasks of consecutive launches, their table and their launch.

use super::assignment::{Assignment, BlockList};
use super::exchange::Exchange;
use super::operation::Operation;
use super::several_rows;
use super::shapes::{self, Shapes};
use super::task::{
    LOAD_BYTES, Load, MAX_CONSUMER_WARPS, OPERAND_WORDS, SUM_BYTES, TASK_BYTES, Task, TaskKind,
    flag,
};
use crate::gpu_props::GpuProps;
use crate::launch::gemm::words::{narrow, pair};
use crate::launch::{Args, CompileUnit, Launch};

/// Bytes of the lists of a block, before those.
pub(super) const LISTS_BYTES: usize = 256;
/// Bytes between counters.
pub(super) const COUNTER_BYTES: usize = 128;
/// Counters besides those of launches: blocks that left, the error, the set of exchanged rows.
const MORE_COUNTERS: usize = 3;

/// Consecutive launches of a plan as tasks.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) blocks: Vec<BlockList>,
    /// Counters: one for each phase.
    pub(crate) counters: usize,
    /// Bytes of the rows that blocks exchange.
    pub(super) exchange_bytes: usize,
    /// Bytes of work memory.
    scratch_bytes: usize,
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
    /// [`Program::exchange_bytes`], all bits set before the first launch; or else
    /// [`Program::scratch_bytes`], which programs may share.
    pub(crate) work: u64,
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
    /// The program of `launches` of a step of up to `rows` rows. `None` if one of them is of a
    /// kernel or of shapes that the persistent launch does not have.
    pub(crate) fn of(gpu: GpuProps, launches: &[Launch], rows: usize) -> Option<Program> {
        if rows > 1 {
            return (1..=several_rows::MOST_M16_TILES)
                .rev()
                .find_map(|tiles| Program::of_rows(gpu, launches, rows, tiles));
        }
        let mut operations: Vec<Operation> = launches
            .iter()
            .map(Operation::of)
            .collect::<Option<Vec<_>>>()?;
        if !are_in_order(&operations) {
            return None;
        }
        let shapes = shapes::shapes_of(gpu, launches, &operations)?;
        let exchange = Exchange::new(&operations);
        let mut assignment = Assignment::new(gpu.sm_count, exchange, shapes.block);
        for operation in &mut operations {
            operation.set_stages(shapes.stages);
            assignment.push(operation);
        }
        let (blocks, exchange_bytes) = assignment.finish();
        let mut tasks = blocks.iter().flat_map(|block| &block.tasks);
        // Rows of f16 are read as blocks exchange them.
        let is_known = |task: &Task| {
            task.kind != TaskKind::Gemv || task.flags & flag::NORM != 0 || task.exchanged & 1 != 0
        };
        tasks
            .all(is_known)
            .then(|| Program::new(blocks, launches.len(), exchange_bytes, shapes))?
    }

    /// The same of several rows, where attention has tiles of `tiles` times 16 queries at most.
    fn of_rows(gpu: GpuProps, launches: &[Launch], rows: usize, tiles: usize) -> Option<Program> {
        let mut operations = several_rows::operations_of(launches, rows, tiles)?;
        let shapes = several_rows::shapes_of(gpu, &operations, rows)?;
        let mut assignment = Assignment::new(gpu.sm_count, Exchange::default(), shapes.block);
        for (operation, _) in &mut operations.all {
            operation.set_stages(shapes.stages);
            assignment.push_rows(operation);
        }
        let (blocks, exchange_bytes) = assignment.finish();
        Program::new(blocks, operations.all.len(), exchange_bytes, shapes)
    }

    /// `None` if the operands of a task are too many.
    fn new(
        blocks: Vec<BlockList>,
        counters: usize,
        exchange_bytes: usize,
        shapes: Shapes,
    ) -> Option<Program> {
        let mut tasks = blocks.iter().flat_map(|block| &block.tasks);
        let fits = tasks.all(|task| task.words.len() <= OPERAND_WORDS);
        fits.then_some(Program {
            blocks,
            counters,
            exchange_bytes,
            scratch_bytes: shapes.scratch,
            unit: shapes.unit,
            shared: shapes.shared,
            warps: shapes.block.warps,
        })
    }

    /// The file of its kernel.
    pub(crate) fn file(&self) -> &'static str {
        self.unit.file
    }

    /// One launch prints where its time goes.
    pub(crate) fn print_clocks(&mut self) {
        self.unit = self.unit.clone().define("CLOCKS", 1);
    }

    /// The longest run of `launches` of a step of up to `rows` rows from the first that has a
    /// program, if it has more than one.
    pub(crate) fn run_of(launches: &[Launch], rows: usize) -> Option<std::ops::Range<usize>> {
        let known = |launch: &Launch| match rows {
            1 => Operation::of(launch).is_some(),
            _ => several_rows::is_known(launch, rows),
        };
        let begin = launches.iter().position(known)?;
        let run = launches[begin..].iter().take_while(|launch| known(launch));
        let end = begin + run.count();
        (end - begin > 1).then_some(begin..end)
    }

    /// Bytes of both sets of exchanged rows.
    pub(crate) fn exchange_bytes(&self) -> usize {
        2 * self.exchange_bytes
    }

    /// Bytes of work memory, which nothing but a launch needs.
    pub(crate) fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
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
                at.work,
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
