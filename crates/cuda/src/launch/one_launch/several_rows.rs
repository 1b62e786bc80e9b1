//! Launches of a step of several rows as operations of the persistent launch, and what a block
//! needs for them (`kernels/one_launch/several_rows.cu`).

use super::assignment::BlockShape;
use super::operation::{Body, Gemv, Operation, Packed, RowsNorm, small_batch};
use super::shapes::{BodyDefines, MAX_HIDDEN, MAX_TILE_SUMS, STATIC_SHARED_BYTES, Shapes};
use super::task::{TaskKind, flag};
use crate::gpu_props::GpuProps;
use crate::launch::gated_delta::recurrent_storage_bytes;
use crate::launch::{CompileUnit, Launch};
use crate::pack::A16_TILE;

/// Partial sums of a task; fewer where there is little shared memory.
const TASK_SUMS: [usize; 3] = [64, 48, 32];
/// Bytes of a partial sum of 16 rows of a matrix and 8 rows of a step.
const SUM_BYTES: usize = 512;
/// Tiles of 16 queries of a task of attention at most: of more it needs more registers than there
/// are.
pub(super) const MOST_M16_TILES: usize = 2;
/// Consumer warps of a block, as many as attention has: a thread of more would have too few
/// registers.
const WARPS: usize = 8;
/// Warps that share the columns of a head, or of several, in a block of
/// `gated_delta/decode_recurrent.cu`.
const WARPS_OF_A_STATE: usize = 4;
/// Units in the ring of a warp at least.
const LEAST_SLOTS: usize = 2;

impl Operation {
    /// The operation of a launch of a step of up to `rows` rows, where attention has tiles of
    /// `tiles` times 16 queries at most; `None` if the persistent launch has none.
    pub(super) fn of_rows(launch: &Launch, rows: usize, tiles: usize) -> Option<Operation> {
        let unit = &launch.unit;
        let [blocks, grid_rows, trees] = launch.grid.map(|n| n as usize);
        if launch.entry == "gemm_small_batch" {
            let gemv = small_batch(launch)?;
            let is_whole = unit.number("ROWS")? == rows
                && gemv.chunk_stride == unit.number("N8_TILES")? * A16_TILE;
            return is_whole.then_some(Operation::Gemv(gemv));
        }
        let (kind, bytes) = match launch.entry {
            "gated_delta_recurrent_tree" => (TaskKind::Delta, 1 << 16),
            "gated_delta_norm" => (TaskKind::GatedNorm, 1 << 13),
            "attn_qk_norm_rope_append" => (TaskKind::Append, 1 << 14),
            "attn_decode_tree" => (TaskKind::Attention, 0),
            "attn_combine_splits" => (TaskKind::Combine, 1 << 14),
            _ => return None,
        };
        let mut body = Body {
            defines: defines_of(launch, kind),
            workspace: 0,
            rows: grid_rows,
            ..Body::of(kind, blocks, bytes, launch)
        };
        // Rows go in f16 only, and are the step's.
        let is_plain = unit.number("OUT_F32").unwrap_or(0) == 0
            && unit.number("SOURCE").unwrap_or(0) == 0
            && unit.number("OUT_PANEL").unwrap_or(0) == 0;
        let is_known = match kind {
            TaskKind::Delta => {
                fit_delta(&mut body.defines, unit)?;
                body.workspace = recurrent_storage_bytes(
                    unit.number("NODES")?,
                    unit.number("HEADS_PER_BLOCK")?,
                    unit.number("SHARED_SPILLS")?,
                );
                unit.number("NODES")? == rows && trees == 1
            }
            TaskKind::Append => {
                let has_variant = ["ROPE_ADJACENT", "BIASES"].map(|name| unit.value(name));
                unit.number("POSITIONS_FROM")? == 0 && has_variant == [None; 2]
            }
            TaskKind::Attention => {
                (body.tasks, body.rows, body.attention) = (0, 1, 1);
                let group = unit.number("HEADS")? / unit.number("KV_HEADS")?;
                let most = unit.number("M16_TILES")?;
                body.as_tree(launch, tiles.min(most))?;
                unit.file == "attention/decode_tree.cu" && group <= 16 * tiles
            }
            _ => is_plain,
        };
        is_known.then_some(Operation::Body(body))
    }
}

/// Whether the persistent launch has a launch of a step of up to `rows` rows, perhaps together with
/// the one before.
pub(super) fn is_known(launch: &Launch, rows: usize) -> bool {
    matches!(launch.entry, "gated_unit_rows" | "rms_norm")
        || Operation::of_rows(launch, rows, MOST_M16_TILES).is_some()
}

/// The operations of a step of up to `rows` rows with the units of their launches, and what norms
/// have in common.
pub(super) struct RowsOperations<'a> {
    pub(super) all: Vec<(Operation, &'a CompileUnit)>,
    hidden: usize,
    norm_warps: usize,
}

/// The operations of launches: mostly one of each, but norms are part of the products behind them,
/// and the gated unit is of those of gate and up.
pub(super) fn operations_of(
    launches: &[Launch],
    rows: usize,
    tiles: usize,
) -> Option<RowsOperations<'_>> {
    let mut operations: Vec<(Operation, &CompileUnit)> = Vec::new();
    let mut norm: Option<RowsNorm> = None;
    let (mut is_read, mut is_stale) = (true, false);
    let mut shapes: Option<(usize, usize)> = None;
    for launch in launches {
        let unit = &launch.unit;
        match launch.entry {
            "rms_norm" => {
                if !std::mem::replace(&mut is_read, false) {
                    return None;
                }
                norm = Some(norm_of(launch)?);
                is_stale = false;
                let shape = (unit.number("WIDTH")?, unit.number("NORM_WARPS")?);
                if *shapes.get_or_insert(shape) != shape {
                    return None;
                }
            }
            "gated_unit_rows" => {
                let (Operation::Gemv(gemv), _) = operations.last_mut()? else {
                    return None;
                };
                gate(gemv, launch)?;
            }
            _ => {
                let mut operation = Operation::of_rows(launch, rows, tiles)?;
                if let (Operation::Gemv(gemv), Some(norm)) = (&mut operation, norm) {
                    gemv.norm = reads(gemv, &norm)?.then_some(norm);
                    is_read |= gemv.norm.is_some();
                    let mut matrices = gemv.packed.iter().flat_map(|packed| &packed.matrices);
                    is_stale |= matrices.any(|matrix| matrix.out == norm.x);
                    // Its tasks would norm other rows than the launch did.
                    if is_stale && gemv.norm.is_some() {
                        return None;
                    }
                }
                operations.push((operation, unit));
            }
        }
    }
    let (hidden, norm_warps) = shapes?;
    let is_whole = |(operation, _): &(Operation, &CompileUnit)| match operation {
        Operation::Gemv(gemv) => match gemv.norm {
            Some(_) => gemv.columns == hidden,
            // Rows in f32 come of norms only.
            None => gemv.f32.is_empty(),
        },
        Operation::Body(_) => true,
    };
    let is_whole = is_read && operations.iter().all(is_whole);
    is_whole.then_some(RowsOperations {
        all: operations,
        hidden,
        norm_warps,
    })
}

/// A launch of `norm/rms_norm.cu`; `None` if the products behind it cannot do what it does.
fn norm_of(launch: &Launch) -> Option<RowsNorm> {
    let unit = &launch.unit;
    let &[header, x, _, weight, eps, f32, f16, 0] = launch.args.as_words() else {
        return None;
    };
    let flags = match unit.number("SOURCE")? {
        0 => 0,
        2 => flag::LOGITS_ROWS,
        _ => return None,
    };
    (unit.number("UPDATE")? == 0).then_some(RowsNorm {
        header,
        x,
        weight,
        eps,
        f32,
        f16,
        flags,
    })
}

/// Whether products read the rows that a norm gives; `None` if only some do.
fn reads(gemv: &Gemv, norm: &RowsNorm) -> Option<bool> {
    let of_f32 = gemv.f32.iter().map(|matrix| matrix.x == norm.f32);
    let of_f16 = gemv.packed.iter().map(|packed| packed.x == norm.f16);
    let mut of_norm = of_f16.chain(of_f32);
    let first = of_norm.next()?;
    of_norm.all(|other| other == first).then_some(first)
}

/// Adds the gated unit of their results to the products of gate and up.
fn gate(gemv: &mut Gemv, launch: &Launch) -> Option<()> {
    let (unit, words) = (&launch.unit, launch.args.as_words());
    let &[_, gate, up, out_f32, out_f16] = words else {
        return None;
    };
    let [first, second] = <[Packed; 2]>::try_from(std::mem::take(&mut gemv.packed)).ok()?;
    let [mut gate_rows, up_rows] = [first.matrices[0], second.matrices[0]];
    let width = unit.number("WIDTH")?;
    let is_known = (gate_rows.out, up_rows.out) == (gate, up)
        && gate_rows.rows == width
        && up_rows.rows == width
        && width.is_multiple_of(256)
        && [gate_rows, up_rows].iter().all(|matrix| !matrix.adds)
        && unit.number("STRIDE")? == gate_rows.stride
        && unit.number("SOURCE")? == 0
        && unit.value("GELU").is_none()
        && (out_f32, gemv.f32.len()) == (0, 0);
    gate_rows.out = out_f16;
    gemv.packed = vec![Packed {
        matrices: vec![gate_rows, up_rows],
        ..first
    }];
    gemv.flags |= flag::SWIGLU;
    gemv.parts *= 2;
    is_known.then_some(())
}

/// Gives a warp all heads of its block where not every head has four warps with its state.
fn fit_delta(defines: &mut [(&'static str, String)], unit: &CompileUnit) -> Option<()> {
    let (heads, of_warp) = (
        unit.number("HEADS_PER_BLOCK")?,
        unit.number("HEADS_PER_WARP")?,
    );
    if heads.div_ceil(of_warp) * WARPS_OF_A_STATE <= WARPS {
        return Some(());
    }
    let mut defines = defines.iter_mut();
    let (_, value) = defines.find(|(name, _)| *name == "HEADS_PER_WARP")?;
    *value = heads.to_string();
    Some(())
}

/// Defines of a body under the names that `one_launch/rows_bodies.cuh` has for them.
fn defines_of(launch: &Launch, kind: TaskKind) -> Vec<(&'static str, String)> {
    let of_delta = matches!(kind, TaskKind::Delta | TaskKind::GatedNorm);
    let named = |name: &'static str| match (kind, name) {
        (_, "K_HEADS") if of_delta => Some("DELTA_K_HEADS"),
        (_, "V_HEADS") if of_delta => Some("DELTA_V_HEADS"),
        (_, "GROUPED") if of_delta => Some("DELTA_GROUPED"),
        (_, "HEAD_DIM") => Some("ATTENTION_HEAD_DIM"),
        (_, "WIDTH" | "SOURCE" | "OUT_F32" | "OUT_F16" | "OUT_PANEL") => None,
        (_, "N8_TILES" | "NODES" | "CLUSTER" | "WARPS") => None,
        _ => Some(name),
    };
    let named = |(name, value): &(&'static str, String)| Some((named(name)?, value.clone()));
    launch.unit.defines.iter().filter_map(named).collect()
}

/// The unit of all operations of a step of up to `rows` rows, and what a block has room for.
pub(super) fn shapes_of(
    gpu: GpuProps,
    operations: &RowsOperations<'_>,
    rows: usize,
) -> Option<Shapes> {
    let (hidden, norm_warps) = (operations.hidden, operations.norm_warps);
    let operations = &operations.all;
    let mut defines = BodyDefines::default();
    let (mut kinds, mut parts, mut workspace, mut slot_bytes) = (0, 1, 0, 0);
    for (operation, unit) in operations {
        match operation {
            Operation::Gemv(gemv) => {
                kinds |= packed_kinds(unit, gemv)?;
                parts = parts.max(gemv.parts);
                let matrices = gemv.packed.iter().flat_map(|packed| &packed.matrices);
                let bytes = matrices.map(|matrix| matrix.unit_bytes.next_multiple_of(128));
                slot_bytes = slot_bytes.max(bytes.max().unwrap_or(0));
            }
            Operation::Body(body) => {
                workspace = workspace.max(body.workspace);
                defines.add(body)?;
            }
        }
    }
    let is_f32_known = |gemv: &Gemv| gemv.f32.is_empty() || hidden.is_multiple_of(128);
    let gemvs = || {
        operations
            .iter()
            .filter_map(|(operation, _)| match operation {
                Operation::Gemv(gemv) => Some(gemv),
                Operation::Body(_) => None,
            })
    };
    if hidden > MAX_HIDDEN || parts > MAX_TILE_SUMS || !gemvs().all(is_f32_known) {
        return None;
    }
    let n8_tiles = rows.div_ceil(8);
    let room = gpu.shared_bytes.checked_sub(STATIC_SHARED_BYTES)?;
    let fit = |sums: usize| {
        let sums = sums.max(parts);
        let sum_bytes = sums * n8_tiles * SUM_BYTES;
        let slots = room.saturating_sub(sum_bytes) / (WARPS * slot_bytes).max(1);
        let ring_bytes = slots * slot_bytes;
        // A task that works in the rings may go on in the sums behind them.
        let fits = slots >= LEAST_SLOTS && workspace <= ring_bytes * WARPS + sum_bytes;
        let block = BlockShape {
            warps: WARPS,
            ring_bytes,
            sums,
        };
        fits.then_some((slots, sum_bytes, block))
    };
    let (slots, sum_bytes, block) = TASK_SUMS.into_iter().find_map(fit)?;
    let kind_of = |(operation, _): &(Operation, &CompileUnit)| match operation {
        Operation::Gemv(_) => TaskKind::Gemv,
        Operation::Body(body) => body.kind,
    };
    let has = |kind| {
        u8::from(
            operations
                .iter()
                .any(|operation| kind_of(operation) == kind),
        )
    };
    let mut unit = CompileUnit::new("one_launch/several_rows.cu")
        .define("ROWS", rows)
        .define("N8_TILES", n8_tiles)
        .define("HIDDEN", hidden)
        .define("WIDTH", hidden)
        .define("NORM_WARPS", norm_warps)
        .define("KINDS", kinds)
        .define("CONSUMER_WARPS", WARPS)
        .define("DELTA_WARPS", WARPS)
        .define("MAX_SUMS", block.sums)
        .define("RING_SLOTS", slots)
        .define("SLOT_BYTES", slot_bytes)
        .define("OUT_F32", 0)
        .define("OUT_F16", 1)
        .define("CLUSTER", 1)
        .define("DELTA", has(TaskKind::Delta))
        .define("ATTENTION", has(TaskKind::Attention));
    if gemvs().any(|gemv| gemv.flags & flag::SWIGLU != 0) {
        unit = unit.define("GATED_UNITS", 1);
    }
    let shared = slots * WARPS * slot_bytes + sum_bytes;
    // Normed rows of a block, in f16 and, for f32 matrices, in f32.
    let of_f16 = n8_tiles * hidden.div_ceil(256) * 4 * A16_TILE;
    let has_f32 = gemvs().any(|gemv| !gemv.f32.is_empty());
    let block_scratch = of_f16 + usize::from(has_f32) * 4 * rows * hidden;
    unit = unit.define("SCRATCH_BYTES", block_scratch);
    let operations = operations.iter().map(|(operation, _)| operation);
    Some(Shapes {
        scratch: gpu.sm_count * block_scratch,
        ..Shapes::new(unit, defines, operations, (shared, block))
    })
}

/// The kinds of packed matrices of a launch, as bits.
fn packed_kinds(unit: &CompileUnit, gemv: &Gemv) -> Option<u32> {
    let kinds = unit.number("KINDS")? as u32;
    let matrices = || gemv.packed.iter().flat_map(|packed| &packed.matrices);
    let has = |kind: usize| matrices().any(|matrix| matrix.kind == kind);
    Some(
        (0..u32::BITS)
            .filter(|kind| has(*kind as usize))
            .fold(0, |all, kind| all | kinds & 1 << kind),
    )
}
