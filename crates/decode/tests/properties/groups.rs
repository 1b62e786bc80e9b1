//! Two groups of sequences in turn: the time that overlaps, and that output never changes.

use std::cell::RefCell;
use std::time::Duration;

use conformance::fake::{FakeDraft, FakeSpec};
use conformance::stage_faults::{FaultyDevice, StepCost, VirtualTime};
use contract::{DeviceError, Limits, Runner, StepGroups};
use decode::{
    DraftSource, FinishReason, Job, JobId, SchedulerConfig, SchedulerState, SourceSet,
    SpeculationConfig, Stats,
};
use proptest::prelude::*;

use crate::fixture::{
    ENDLESS, LANGUAGE, SchedulerFixture, config, drafting, greedy, job, plain, prompt,
    reference_outputs, require_reference_tokens, sampled, spec,
};
use crate::stages::{any_refusal, devices, open, open_apart};

thread_local! {
    static TIME: RefCell<VirtualTime> = RefCell::default();
}

fn now() -> Duration {
    TIME.with(|time| Duration::from_micros(time.borrow().host_us()))
}

/// Microseconds of each of two stages by rows, and of a draft by sequences.
type Costs = (fn(usize) -> u64, fn(usize) -> u64);

/// Opens devices that stages are to be on.
type Open = fn(&FakeSpec, Vec<FaultyDevice>) -> Result<Box<dyn Runner>, DeviceError>;

/// Runs four choices of an endless text over two stages. Returns the virtual microseconds and the
/// counters.
fn run_four(
    spec: &FakeSpec,
    config: SchedulerConfig,
    open: Open,
    (us, draft_us): Costs,
) -> (u64, Stats) {
    let time = VirtualTime::default();
    TIME.with(|of_thread| of_thread.replace(time.clone()));
    let (mut devices, handles) = devices(spec);
    devices.truncate(2);
    for device in &mut devices {
        device.time = Some(StepCost {
            time: time.clone(),
            us,
            draft_us,
        });
    }
    let runner = open(spec, devices).unwrap();
    let config = SchedulerConfig {
        clock: Some(now),
        ..config
    };
    let mut fixture = SchedulerFixture::over(runner, handles[0].clone(), config);
    let tokens = spec.limits.context - 8;
    let four = Job {
        choices: 4,
        ..job(0, prompt(6, 0), greedy(tokens))
    };
    fixture.submit(four.clone());
    fixture.finish();
    let outputs = fixture.outputs();
    for (choice, expected) in reference_outputs(spec, &four).iter().enumerate() {
        assert_eq!(outputs[&(0, choice)].ids(), expected.ids());
    }
    (time.host_us(), fixture.scheduler.stats())
}

/// Four sequences whose trees have seven rows, together and in turn. Returns the microseconds of
/// both, and the group steps in turn.
fn both_ways(open: Open, costs: Costs) -> (u64, u64, u64) {
    let spec = FakeSpec {
        draft: Some(FakeDraft {
            depth: 6,
            acceptance_rate: 1.0,
        }),
        ..spec(ENDLESS)
    };
    let config = |groups| SchedulerConfig {
        groups,
        speculation: SpeculationConfig {
            budget: 6,
            measure_time_limit: None,
            sources: SourceSet::of(&[DraftSource::Block]),
            ..SpeculationConfig::default()
        },
        ..config()
    };
    let (together, stats) = run_four(&spec, config(StepGroups::One), open, costs);
    assert_eq!(stats.alternating_steps, 0);
    let (in_turn, stats) = run_four(&spec, config(StepGroups::Two), open, costs);
    assert!(stats.alternating_steps > 20, "{stats:?}");
    (together, in_turn, stats.alternating_steps)
}

/// A step of four takes 2 * 3,800 + 700 us. One of two takes 2,400 in each stage and 500 for its
/// draft: the upper stage and the draft are never idle, and the lower stage works beside them.
#[test]
fn one_group_is_below_while_the_other_is_verified_and_drafts() {
    let costs: Costs = (|rows| 1_000 + 100 * rows as u64, |n| 300 + 100 * n as u64);
    let (together, in_turn, steps) = both_ways(open, costs);
    assert!(10 * in_turn < 8 * together, "{in_turn} of {together}");
    // Before and behind it the devices fill and run empty.
    let busy = steps * (2_400 + 500);
    assert!(in_turn < busy + 15_000, "{in_turn} of {busy}");
}

/// A step of four takes 3,800 us and 2,400 for its draft. One of two takes 2,400, beside which the
/// draft of the other takes 1,400 on a device of its own.
#[test]
fn one_group_drafts_while_the_other_is_verified() {
    let costs: Costs = (|rows| 1_000 + 100 * rows as u64, |n| 400 + 500 * n as u64);
    let (together, in_turn, steps) = both_ways(open_apart, costs);
    assert!(10 * in_turn < 9 * together, "{in_turn} of {together}");
    let busy = steps * 2_400;
    assert!(in_turn < busy + 12_000, "{in_turn} of {busy}");
}

#[test]
fn groups_are_taken_where_they_are_measured_to_be_faster() {
    let limits = Limits {
        context: 300,
        ..spec(ENDLESS).limits
    };
    let spec = FakeSpec {
        limits,
        pool_tokens: 8 * (300 + 24),
        ..spec(ENDLESS)
    };
    let config = || SchedulerConfig {
        speculation: plain(),
        ..config()
    };
    let by_rows: Costs = (|rows| 100 * rows as u64, |_| 0);
    let (_, stats) = run_four(&spec, config(), open, by_rows);
    let together = stats.decode_steps - stats.alternating_steps;
    assert!(stats.alternating_steps > 10 * together, "{stats:?}");
}

/// Steps until idle, with jobs cancelled behind these steps.
fn run(fixture: &mut SchedulerFixture, cancels: &[(usize, u64)]) {
    for step in 0..20_000 {
        for (_, id) in cancels.iter().filter(|(at, _)| *at == step) {
            fixture.scheduler.cancel(JobId(*id));
        }
        if fixture.step().expect("no device is lost here") == SchedulerState::Idle {
            break;
        }
    }
    fixture.finish();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn groups_in_turn_change_no_tokens(
        faults in prop::collection::vec(any_refusal(), 0..5),
        choices in prop::collection::vec(1..3_usize, 2..5),
        cancels in prop::collection::vec((0..24_usize, 0..5_u64), 0..3),
        contexts in 2..9_usize,
        (open, n) in prop::sample::select(vec![
            (open as Open, 3), (open_apart as Open, 2), (open_apart as Open, 3),
        ]),
    ) {
        let mut spec = drafting(spec(LANGUAGE), 4, 0.6);
        spec.limits.pool_tokens = Some(contexts * (96 + 24));
        let settings = SchedulerConfig { groups: StepGroups::Two, reserve: 8, ..config() };
        let (mut devices, handles) = devices(&spec);
        devices.truncate(n);
        let runner = open(&spec, devices).expect("all stages open");
        let mut fixture = SchedulerFixture::over(runner, handles[0].clone(), settings);
        faults.into_iter().for_each(|(stage, fault)| handles[stage].fail(fault));
        let jobs: Vec<Job> = choices.iter().enumerate().map(|(i, choices)| Job {
            choices: *choices,
            ..job(i as u64, prompt(40, i as u32), sampled(20, i as u64))
        }).collect();
        jobs.iter().for_each(|job| fixture.submit(job.clone()));
        run(&mut fixture, &cancels);
        let outputs = fixture.outputs();
        let was_cancelled = |job: &&Job| {
            let mut own = outputs.iter().filter(|((id, _), _)| *id == job.id.0);
            own.any(|(_, output)| output.reason == Some(FinishReason::Cancelled))
        };
        let (cancelled, others): (Vec<&Job>, Vec<&Job>) = jobs.iter().partition(was_cancelled);
        let others: Vec<Job> = others.into_iter().cloned().collect();
        require_reference_tokens(&fixture, &others)?;
        for job in cancelled {
            for (choice, expected) in reference_outputs(&spec, job).iter().enumerate() {
                if let Some(found) = outputs.get(&(job.id.0, choice)) {
                    prop_assert!(expected.tokens.starts_with(&found.tokens));
                }
            }
        }
    }
}
