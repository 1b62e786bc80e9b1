//! Programs of steps of several rows: complete, in the order of the launches, and never stuck.

use std::collections::{BTreeMap, HashSet};

use super::interpreter::{TableTask, Turns, lists_of, run};
use super::operation::Operation;
use super::program::Program;
use super::shapes::STATIC_SHARED_BYTES;
use super::task::TaskKind;
use super::tests::launches_of;
use crate::gpu_props::GpuProps;
use crate::launch::Launch;
use crate::options::OneLaunch;

fn home() -> GpuProps {
    GpuProps::new((8, 6), 82)
}

/// The launches that become one, without norms and gated units, which are part of the phases of
/// their products; and the program.
fn program(types: &str, rows: usize) -> (Vec<Launch>, Program) {
    let launches = launches_of(types, home(), OneLaunch::Off, rows);
    let run = Program::run_of(&launches, rows).unwrap();
    // All but the embedding and the reduction of the logits.
    assert_eq!((run.start, run.end), (1, launches.len() - 2));
    let mut launches = launches[run].to_vec();
    let program = Program::of(home(), &launches, rows).unwrap();
    launches.retain(|launch| !matches!(launch.entry, "gated_unit_rows" | "rms_norm"));
    (launches, program)
}

#[test]
fn every_task_waits_for_all_tasks_of_the_launch_before() {
    for (types, rows) in [("bf16", 8), ("q4_k_m", 8), ("q8_0-published", 16)] {
        let (launches, program) = program(types, rows);
        let lists = lists_of(&program);
        let mut raised: BTreeMap<usize, usize> = BTreeMap::new();
        let tasks = || lists.iter().flatten();
        for task in tasks() {
            assert_eq!(task.raise, Some(task.phase as usize));
            assert_eq!(task.exchanged, 0);
            *raised.entry(task.phase as usize).or_default() += 1;
        }
        assert!(raised.keys().copied().eq(0..launches.len()));
        for task in tasks() {
            let before = (task.phase as usize).checked_sub(1);
            assert_eq!(task.wait, before.map(|phase| (phase, raised[&phase])));
        }
        for list in &lists {
            assert!(list.is_sorted_by_key(|task| task.phase));
        }
        for turns in [Turns::Lockstep, Turns::Greedy, Turns::GreedyBackward] {
            run(&lists, program.counters, None, turns).unwrap();
        }
    }
}

#[test]
fn every_block_of_a_launch_is_in_one_task() {
    let (launches, program) = program("bf16", 8);
    let lists = lists_of(&program);
    for (phase, launch) in launches.iter().enumerate() {
        let of_phase = |task: &&TableTask| task.phase as usize == phase;
        let tasks: Vec<&TableTask> = lists.iter().flatten().filter(of_phase).collect();
        let [blocks, rows, _] = launch.grid.map(|n| n as usize);
        // Blocks of four warps go two to a task of eight.
        let (step, rows) = match tasks[0].kind {
            TaskKind::Append | TaskKind::GatedNorm => (2, rows),
            TaskKind::Delta | TaskKind::Combine => (1, rows),
            TaskKind::Attention => {
                assert_eq!(tasks.len(), home().sm_count);
                continue;
            }
            TaskKind::Gemv | TaskKind::GemvF32 => continue,
        };
        let places: HashSet<(u64, u64)> = tasks.iter().map(|t| (t.first, t.count)).collect();
        let expected = (0..rows as u64).flat_map(|row| {
            (0..blocks as u64)
                .step_by(step)
                .map(move |first| (first, row))
        });
        assert_eq!(places, expected.collect(), "{launch}");
        assert_eq!(places.len(), tasks.len(), "{launch}");
    }
}

#[test]
fn every_unit_of_every_tile_is_summed_once() {
    let (launches, program) = program("q8_0-published", 16);
    let lists = lists_of(&program);
    let (mut seen, mut f32_rows, mut gated) = (HashSet::new(), HashSet::new(), 0);
    for task in lists.iter().flatten() {
        if task.kind == TaskKind::GemvF32 {
            let rows = task.first..task.first + task.count;
            rows.for_each(|row| assert!(f32_rows.insert((task.words[1], row))));
        }
        task.check_tiles(|tile, [_, second]| {
            assert!(seen.insert(tile.factors), "a tile is summed twice");
            gated += usize::from(!second.is_empty());
        });
    }
    let (mut tiles, mut rows) = (0, 0);
    for launch in &launches {
        if let Some(Operation::Gemv(gemv)) = Operation::of_rows(launch, 16, 6) {
            let matrices = gemv.packed.iter().map(|packed| &packed.matrices[0]);
            tiles += matrices.map(|matrix| matrix.tiles()).sum::<usize>();
            rows += gemv.f32.iter().map(|matrix| matrix.rows).sum::<usize>();
        }
    }
    assert!(rows > 0 && gated > 0);
    // A tile of gate has one of up with it.
    assert_eq!((seen.len() + gated, f32_rows.len()), (tiles, rows));
}

#[test]
fn steps_of_2_to_16_rows_are_one_launch_on_a_home_gpu() {
    for rows in [8, 16, 24] {
        let launches = launches_of("bf16", home(), OneLaunch::Auto, rows);
        let found = launches.iter().find(|launch| launch.entry == "one_launch");
        assert_eq!(found.is_some(), rows <= 16, "{rows} rows");
        let Some(launch) = found else { continue };
        assert_eq!(launches.len(), 4);
        assert_eq!(launch.unit.file, "one_launch/several_rows.cu");
        assert!(launch.cooperative && launch.grid == [82, 1, 1]);
        assert!(launch.shared as usize + STATIC_SHARED_BYTES <= home().shared_bytes);
        // Three value heads of a key head: four warps have the state of those of a warp.
        let number = |name| launch.unit.number(name).unwrap();
        assert_eq!(number("HEADS_PER_BLOCK"), 3);
        let warps = 4 * number("HEADS_PER_BLOCK") / number("HEADS_PER_WARP");
        assert!(warps <= number("DELTA_WARPS"), "{warps} warps have state");
    }
}
