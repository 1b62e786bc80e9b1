//! Programs of a small hybrid model: complete, and never stuck.

use std::collections::HashSet;

use contract::{KvFormat, KvFormats, Limits, LoadConfig};
use model::synth::SynthSpec;

use super::interpreter::{MixerShapes, TableTask, Turns, lists_of, run};
use super::operation::Operation;
use super::program::Program;
use super::shapes::STATIC_SHARED_BYTES;
use super::task::TaskKind;
use crate::gpu_props::GpuProps;
use crate::launch::Launch;
use crate::memory::BumpAllocator;
use crate::numerics::Numerics;
use crate::options::OneLaunch;
use crate::plan::{PlanConfig, PlanKey, Plans};
use crate::state::State;
use crate::weights::{WeightPart, Weights};

/// Steps of one row of a small hybrid model.
fn launches(types: &str, gpu: GpuProps, one_launch: OneLaunch) -> Vec<Launch> {
    launches_of(types, gpu, one_launch, 1)
}

/// Steps of one tree in up to `rows` rows of the same.
pub(super) fn launches_of(
    types: &str,
    gpu: GpuProps,
    one_launch: OneLaunch,
    rows: usize,
) -> Vec<Launch> {
    let loaded = SynthSpec::parse(&format!("tiny-hybrid:{types}")).unwrap();
    let loaded = loaded.load().unwrap();
    let config = LoadConfig {
        target: loaded.spec,
        weights: loaded.weights,
        draft: None,
        batch_invariant: false,
        kv: KvFormats {
            k: KvFormat::Q8_0,
            v: KvFormat::Q8_0,
        },
        limits: Limits {
            sequences: 1,
            context: 600,
            tree_nodes: rows,
            prefill_chunk: 64,
            pool_tokens: None,
        },
    };
    let arena = || BumpAllocator::new(1 << 30);
    let [mut weights, mut table, mut draft] = [(); 3].map(|()| arena());
    let [mut kv, mut states, mut rings] = [2, 3, 4].map(|i| BumpAllocator::new(i << 40));
    let mut scratch = BumpAllocator::new(1 << 44);
    let of_target = (WeightPart::whole(&config.target, None), &mut weights);
    let weights = Weights::new(of_target, &mut table, (None, &mut draft));
    let regions = [&mut kv, &mut states, &mut scratch, &mut rings];
    let state = State::new(&config, regions);
    let numerics = if gpu.has_wgmma || rows > 1 {
        Numerics::BatchInvariant
    } else {
        Numerics::Fastest
    };
    let plan_config = PlanConfig {
        gpu,
        tree_windows: false,
        numerics,
        as_large_model: false,
        one_launch,
        separate_gemms: false,
        draft_vocab: None,
        stage: None,
    };
    let mut plans = Plans::new(&config, &weights, &state, plan_config, &mut scratch);
    let is_asked =
        |key: &PlanKey| matches!(key, PlanKey::Step { rows: of, trees: 1, .. } if *of == rows);
    let mut plans = plans.all.iter_mut();
    let (_, plan) = plans.find(|(key, _)| is_asked(key)).unwrap();
    std::mem::take(&mut plan.launches)
}

fn hopper() -> GpuProps {
    GpuProps::new((9, 0), 132)
}

fn program(types: &str, gpu: GpuProps) -> Program {
    let launches = launches(types, gpu, OneLaunch::Off);
    let run = Program::run_of(&launches, 1).unwrap();
    // All but the embedding and the reduction of the logits.
    assert_eq!((run.start, run.end), (1, launches.len() - 2));
    Program::of(gpu, &launches[run], 1).unwrap()
}

fn shapes() -> MixerShapes {
    MixerShapes {
        delta_heads: 6,
        delta_channels: (2 * 2 + 6) * 128,
        heads: 2,
        kv_heads: 1,
        head_dim: 256,
    }
}

#[test]
fn rows_that_tasks_wait_for_arrive_in_every_order_of_blocks() {
    for (types, gpu) in [
        ("bf16", hopper()),
        ("q4_k_m", hopper()),
        ("bf16", GpuProps::new((8, 6), 82)),
        ("q8_0", GpuProps::new((12, 0), 170)),
    ] {
        let program = program(types, gpu);
        let lists = lists_of(&program);
        for turns in [Turns::Lockstep, Turns::Greedy, Turns::GreedyBackward] {
            run(&lists, program.counters, Some(&shapes()), turns).unwrap();
        }
    }
}

#[test]
fn every_unit_of_every_tile_is_summed_once() {
    let program = program("bf16", hopper());
    let lists = lists_of(&program);
    let mut seen = HashSet::new();
    for task in lists.iter().flatten() {
        let columns = (task.words[2] & 0xffff_ffff) as usize;
        task.check_tiles(|tile, of_both| {
            assert!(seen.insert(tile.factors), "a tile is summed twice");
            for parts in of_both {
                let units: usize = parts.iter().map(|part| part.units).sum();
                // Units of this kind have 64 values.
                assert!(
                    parts.is_empty() || units * 64 == columns,
                    "{units} units of {columns}"
                );
            }
        });
    }
    let tiles = |launch: &Launch| match Operation::of(launch) {
        Some(Operation::Gemv(gemv)) => {
            let firsts = gemv.packed.iter().map(|packed| packed.matrices[0].tiles());
            firsts.sum()
        }
        _ => 0,
    };
    let launches = launches("bf16", hopper(), OneLaunch::Off);
    assert_eq!(seen.len(), launches.iter().map(tiles).sum::<usize>());
}

#[test]
fn missing_tasks_and_rows_written_twice_are_found() {
    let program = program("bf16", hopper());
    let lists = lists_of(&program);
    let run =
        |lists: &[Vec<TableTask>]| run(lists, program.counters, Some(&shapes()), Turns::Greedy);
    let mut missing = lists.clone();
    let is_delta = |task: &TableTask| task.kind == TaskKind::Delta;
    let block = lists
        .iter()
        .position(|list| list.iter().any(is_delta))
        .unwrap();
    let at = lists[block].iter().position(is_delta).unwrap();
    missing[block].remove(at);
    assert!(run(&missing).unwrap_err().contains("for ever"));
    let mut twice = lists.clone();
    let task = twice[block][at].clone();
    twice[block].insert(at, task);
    assert!(run(&twice).unwrap_err().contains("twice"));
    let mut uncounted = lists.clone();
    let attention = uncounted[3]
        .iter_mut()
        .find(|task| task.wait.is_some())
        .unwrap();
    attention.wait = attention.wait.map(|(counter, value)| (counter, value + 1));
    assert!(run(&uncounted).unwrap_err().contains('3'));
}

#[test]
fn a_selected_plan_is_the_embedding_one_launch_and_the_reduction() {
    let entries = |gpu, one_launch| -> Vec<&'static str> {
        let launches = launches("bf16", gpu, one_launch);
        launches.iter().map(|launch| launch.entry).collect()
    };
    let home = GpuProps::new((8, 6), 82);
    let expected = [
        "embedding_gather",
        "one_launch",
        "logits_reduce_chunks",
        "logits_top_k",
    ];
    assert_eq!(entries(hopper(), OneLaunch::On), expected);
    assert_eq!(entries(home, OneLaunch::Auto), expected);
    for (gpu, off) in [
        (hopper(), OneLaunch::Off),
        (hopper(), OneLaunch::Auto),
        (home, OneLaunch::Off),
    ] {
        assert_eq!(entries(gpu, off).len(), 3 + 3 * 5 + 7 + 1);
    }
    for (gpu, one_launch, warps) in [(hopper(), OneLaunch::On, 15), (home, OneLaunch::Auto, 8)] {
        let launches = launches("bf16", gpu, one_launch);
        let launch = &launches[1];
        assert!(launch.cooperative && launch.grid == [gpu.sm_count as u32, 1, 1]);
        assert_eq!(launch.block, [32 * (warps + 1), 1, 1]);
        assert!(launch.shared as usize + STATIC_SHARED_BYTES <= gpu.shared_bytes);
    }
}
