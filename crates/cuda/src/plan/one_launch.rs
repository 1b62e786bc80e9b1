//! Steps of few rows as one persistent launch: the same plan, its launches as tasks.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::select::uses_one_launch;
use super::{Addresses, Plan, PlanConfig, PlanKey};
use crate::launch::Launch;
use crate::launch::logits::LogitsReduction;
use crate::launch::one_launch::{Program, ProgramBuffers};
use crate::memory::BumpAllocator;
use crate::options::OneLaunch;

/// Bytes of the status of a persistent launch.
pub(crate) const STATUS_BYTES: usize = 4;

/// Plans that became one launch.
#[derive(Debug, Default)]
pub(super) struct OneLaunchPlans {
    pub(super) keys: BTreeSet<PlanKey>,
    /// Tables to be written once: address and bytes.
    pub(super) tables: Vec<(u64, Vec<u8>)>,
}

/// Whether `run` is all of a step but its embedding and the reduction of its logits: one launch in
/// place of a part of them has not been measured.
fn is_whole(launches: &[Launch], run: &Range<usize>) -> bool {
    run.start <= 1 && run.end + 2 >= launches.len()
}

/// Rows of steps that become one launch: one row, and trees of few rows.
const MOST_ROWS: usize = 16;

/// Replaces the launches of steps of few rows of one tree by a persistent one, where there is one
/// and it is selected. Its tables are taken from `scratch`.
pub(super) fn fuse(
    plan_config: PlanConfig,
    (addresses, reduce): (&Addresses, LogitsReduction),
    all: &mut BTreeMap<PlanKey, Plan>,
    scratch: &mut BumpAllocator,
) -> OneLaunchPlans {
    let mut fused = OneLaunchPlans::default();
    let selected = uses_one_launch(plan_config.one_launch, plan_config.gpu);
    if !selected.kernel {
        return fused;
    }
    let mut programs: Vec<(PlanKey, Range<usize>, Program)> = Vec::new();
    for (key, plan) in &*all {
        let PlanKey::Step { rows, trees: 1, .. } = *key else {
            continue;
        };
        if rows > MOST_ROWS {
            continue;
        }
        let Some(run) = Program::run_of(&plan.launches, rows) else {
            continue;
        };
        let launches = &plan.launches[run.clone()];
        let takes_part = rows == 1 && plan_config.one_launch != OneLaunch::Auto;
        // Keys come in the order of their rows, so those of one row are known. Larger models have
        // fused layers in place of GEMVs.
        let is_small = if rows == 1 {
            launches.iter().any(|launch| launch.entry == "gemv_batch_1")
        } else {
            !programs.is_empty()
        };
        if !(takes_part || is_small && is_whole(&plan.launches, &run)) {
            continue;
        }
        if let Some(program) = Program::of(plan_config.gpu, launches, rows) {
            programs.push((*key, run, program));
        }
    }
    // Launches do not overlap, so programs share what only a launch needs.
    let most = programs
        .iter()
        .map(|(_, _, program)| program.scratch_bytes());
    let shared = scratch.take(most.max().unwrap_or(0));
    for (key, run, mut program) in programs {
        let Some(plan) = all.get_mut(&key) else {
            continue;
        };
        if plan_config.one_launch == OneLaunch::Clocks {
            program.print_clocks();
        }
        let PlanKey::Step { rows, .. } = key else {
            continue;
        };
        let table = program.table();
        let exchanged = program.exchange_bytes();
        let at = ProgramBuffers {
            table: scratch.take(table.bytes.len()),
            counters: scratch.take(program.counter_bytes()),
            work: if exchanged > 0 {
                scratch.take(exchanged)
            } else {
                shared
            },
            status: addresses.rows + reduce.out_bytes(rows) as u64,
        };
        let launch = program.launch(&table, at);
        fused.tables.extend([
            (at.table, table.bytes),
            (at.counters, vec![0; program.counter_bytes()]),
            (at.work, vec![0xff; exchanged]),
        ]);
        let end = run.start + 1;
        // All layers end with the launch; nothing that waits for single layers runs in steps.
        plan.layer_ends.iter_mut().for_each(|layer| *layer = end);
        plan.launches.splice(run, [launch]);
        plan.note(program.file(), selected.reason);
        fused.keys.insert(key);
    }
    fused
}
