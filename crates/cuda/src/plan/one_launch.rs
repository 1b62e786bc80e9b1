//! Steps of one row as one persistent launch: the same plan, its launches as tasks.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::select::uses_one_launch;
use super::{Addresses, Plan, PlanConfig, PlanKey};
use crate::launch::Launch;
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

/// Whether `run` is all of a step but its embedding and the reduction of its logits, and made of
/// GEMVs: one launch in place of a part of them has not been measured, and larger models have fused
/// layers.
fn is_small_and_whole(launches: &[Launch], run: &Range<usize>) -> bool {
    let is_gemv = |launch: &Launch| launch.entry == "gemv_batch_1";
    run.start <= 1 && run.end + 2 >= launches.len() && launches[run.clone()].iter().any(is_gemv)
}

/// Replaces the launches of steps of one row by a persistent one, where there is one and it is
/// selected. Its tables are taken from `scratch`.
pub(super) fn fuse(
    plan_config: PlanConfig,
    addresses: &Addresses,
    all: &mut BTreeMap<PlanKey, Plan>,
    scratch: &mut BumpAllocator,
) -> OneLaunchPlans {
    let mut fused = OneLaunchPlans::default();
    let selected = uses_one_launch(plan_config.one_launch, plan_config.gpu);
    if !selected.kernel {
        return fused;
    }
    for (key, plan) in all {
        if !matches!(key, PlanKey::Step { rows: 1, .. }) {
            continue;
        }
        let Some(run) = Program::run_of(&plan.launches) else {
            continue;
        };
        if plan_config.one_launch == OneLaunch::Auto && !is_small_and_whole(&plan.launches, &run) {
            continue;
        }
        let Some(mut program) = Program::of(plan_config.gpu, &plan.launches[run.clone()]) else {
            continue;
        };
        if plan_config.one_launch == OneLaunch::Clocks {
            program.print_clocks();
        }
        let table = program.table();
        let exchanged = 2 * program.exchange_bytes;
        let at = ProgramBuffers {
            table: scratch.take(table.bytes.len()),
            counters: scratch.take(program.counter_bytes()),
            exchange: scratch.take(exchanged),
            status: addresses.one_launch_status,
        };
        let launch = program.launch(&table, at);
        fused.tables.extend([
            (at.table, table.bytes),
            (at.counters, vec![0; program.counter_bytes()]),
            (at.exchange, vec![0xff; exchanged]),
        ]);
        let end = run.start + 1;
        // All layers end with the launch; nothing that waits for single layers runs in steps.
        plan.layer_ends.iter_mut().for_each(|layer| *layer = end);
        plan.launches.splice(run, [launch]);
        plan.note("one_launch/one_launch.cu", selected.reason);
        fused.keys.insert(*key);
    }
    fused
}
