//! What a block needs and has room for: the unit of all operations, its shared memory, its warps.

use std::collections::BTreeMap;

use super::assignment::BlockShape;
use super::operation::{Body, Operation};
use super::task::{TaskKind, flag};
use crate::gpu_props::GpuProps;
use crate::launch::gemm::words::narrow;
use crate::launch::{CompileUnit, Launch};

/// Consumer warps and the units that each has in its ring at least, in the order of preference:
/// beside the warp that copies tasks, 15 have 128 registers a thread.
const WARPS_AND_SLOTS: [(usize, usize); 2] = [(15, 3), (8, 2)];
/// Static shared memory of a block at most, in bytes.
pub(super) const STATIC_SHARED_BYTES: usize = 12 << 10;
/// Partial sums of a task; fewer where there is little shared memory.
const TASK_SUMS: [usize; 2] = [256, 128];
/// Bytes of a partial sum: 16 rows in f32.
const SUMS_BYTES: usize = 16 * 4;
/// Partial sums of a tile at most: a byte counts them.
pub(super) const MAX_TILE_SUMS: usize = 255;
/// The widest row that is normed in registers, and multiplied by f32 matrices from there.
pub(super) const MAX_HIDDEN: usize = 2560;

/// The unit that has all operations, its dynamic shared memory in bytes, and what a block has room
/// for.
pub(super) struct Shapes {
    pub(super) unit: CompileUnit,
    pub(super) shared: u32,
    pub(super) block: BlockShape,
    /// Bytes of work memory of all blocks.
    pub(super) scratch: usize,
    /// Stages of attention; 0 where it has none.
    pub(super) stages: usize,
}

/// Defines of the bodies of a unit.
#[derive(Debug, Default)]
pub(super) struct BodyDefines {
    pub(super) all: BTreeMap<&'static str, String>,
    /// Those of each kind of task.
    by_kind: BTreeMap<u32, Vec<(&'static str, String)>>,
}

impl BodyDefines {
    /// Adds those of a body; `None` if another body of its kind has others, or one of another kind
    /// has another value.
    pub(super) fn add(&mut self, body: &Body) -> Option<()> {
        let of_kind = self.by_kind.entry(body.kind as u32);
        if of_kind.or_insert_with(|| body.defines.clone()) != &body.defines {
            return None;
        }
        let mut defines = body.defines.iter();
        let fits = |(name, value): &(&'static str, String)| {
            self.all.entry(name).or_insert_with(|| value.clone()) == value
        };
        defines.all(fits).then_some(())
    }
}

impl Shapes {
    /// `unit` with the defines of bodies, and with as many stages of attention as the `shared`
    /// bytes of dynamic shared memory hold: while it runs, nothing else is in there.
    pub(super) fn new<'a>(
        mut unit: CompileUnit,
        defines: BodyDefines,
        mut operations: impl Iterator<Item = &'a Operation>,
        (shared, block): (usize, BlockShape),
    ) -> Shapes {
        let stages = operations.find_map(|operation| match operation {
            Operation::Body(body) => Some(body.tree?.stages_in(shared)),
            Operation::Gemv(_) => None,
        });
        if let Some(stages) = stages {
            unit = unit.define("STAGES", stages);
        }
        for (name, value) in defines.all {
            unit = unit.define(name, value);
        }
        Shapes {
            unit,
            shared: narrow(shared),
            block,
            scratch: 0,
            stages: stages.unwrap_or(0),
        }
    }
}

/// Those of a step of one row.
pub(super) fn shapes_of(
    gpu: GpuProps,
    launches: &[Launch],
    operations: &[Operation],
) -> Option<Shapes> {
    let mut defines = BodyDefines::default();
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
                defines.add(body)?;
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
        let ring_bytes = slots * slot_bytes;
        // Attention may go on in what is behind the rings.
        let shared = ring_bytes * warps + rows + sums * SUMS_BYTES;
        let has_warps = warps >= attention_warps.max(norm_warps) && workspace <= shared;
        let block = BlockShape {
            warps,
            ring_bytes,
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
        if defines.all.remove(name).is_some_and(|found| found != value) {
            return None;
        }
    }
    let unit = CompileUnit::new("one_launch/one_launch.cu")
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
    let shared = slots * block.warps * slot_bytes + fixed;
    Some(Shapes::new(
        unit,
        defines,
        operations.iter(),
        (shared, block),
    ))
}
