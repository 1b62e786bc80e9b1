//! A device that refuses or dies: whose fault it is, and who goes on.

use conformance::fake::{
    FakeDraft, FakeSpec, FaultKind, FaultTrigger, Flaw, InjectedFault, RunnerMethod,
};
use contract::{DeviceError, SeqId};
use decode::{Failure, FinishReason, Job, Progress, Reject};
use proptest::prelude::*;

use crate::world::{ENDLESS, LANGUAGE, World, alone, config, greedy, job, prompt, sampled, spec};

fn no_room(call: RunnerMethod, when: FaultTrigger) -> InjectedFault {
    InjectedFault {
        call,
        when,
        kind: FaultKind::OutOfMemory,
    }
}

/// Three jobs, begun one after another.
fn three() -> Vec<Job> {
    (0..3)
        .map(|id| job(id, prompt(6, id as u32), sampled(15, id)))
        .collect()
}

fn check_untouched(world: &World, jobs: &[Job]) {
    let said = world.said();
    for job in jobs {
        let expected = alone(&spec(ENDLESS), job);
        for (choice, expected) in expected.iter().enumerate() {
            let found = &said[&(job.id.0, choice)];
            assert_eq!(found.tokens, expected.tokens, "{}", job.id);
            assert_eq!(found.reason, expected.reason);
        }
    }
}

#[test]
fn a_lost_device_fails_every_job_once_and_takes_no_more() {
    for call in [
        RunnerMethod::Open,
        RunnerMethod::Prefill,
        RunnerMethod::Draft,
        RunnerMethod::Verify,
        RunnerMethod::Commit,
        RunnerMethod::Snapshot,
        RunnerMethod::Restore,
    ] {
        let draft = Some(FakeDraft {
            depth: 3,
            right: 0.5,
        });
        let mut world = World::new(
            FakeSpec {
                draft,
                ..spec(ENDLESS)
            },
            config(),
        );
        world.handle.fail(InjectedFault {
            call,
            when: FaultTrigger::Nth(1),
            kind: FaultKind::DeviceLost,
        });
        for id in 0..12 {
            world.submit(Job {
                choices: 2,
                ..job(id, prompt(6, id as u32), greedy(30))
            });
        }
        let error = loop {
            match world.step() {
                Ok(Progress::Working) => {}
                Ok(Progress::Idle) => panic!("{call:?} was never called twice"),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, DeviceError::DeviceLost { during, .. } if during == call.name()));
        let said = world.said();
        for id in 0..12 {
            let whole = (0..2).all(|choice| {
                said.get(&(id, choice))
                    .is_some_and(|said| said.reason.is_some())
            });
            let failed = matches!(world.failure(id), Some(Failure::DeviceLost { .. }));
            assert!(whole != failed, "{call:?}: job {id}");
        }
        assert!(world.scheduler.is_idle());
        let refused = world.scheduler.submit(job(99, prompt(6, 0), greedy(1)));
        assert!(matches!(refused, Err(Reject::DeviceLost { .. })));
        assert!(matches!(world.step(), Err(DeviceError::DeviceLost { .. })));
    }
}

#[test]
fn a_batch_without_room_is_decoded_one_by_one() {
    let mut world = World::new(spec(ENDLESS), config());
    world
        .handle
        .fail(no_room(RunnerMethod::Verify, FaultTrigger::MoreThan(1)));
    world
        .handle
        .fail(no_room(RunnerMethod::Commit, FaultTrigger::MoreThan(1)));
    three().into_iter().for_each(|job| world.submit(job));
    world.finish();
    check_untouched(&world, &three());
}

#[test]
fn a_sequence_without_room_waits_for_its_neighbours_and_then_fails_alone() {
    let mut world = World::new(spec(ENDLESS), config());
    // The fake numbers what it opens from 1.
    world.handle.fail(no_room(
        RunnerMethod::Verify,
        FaultTrigger::Naming(SeqId(2)),
    ));
    three().into_iter().for_each(|job| world.submit(job));
    world.finish();
    let jobs = three();
    check_untouched(&world, &[jobs[0].clone(), jobs[2].clone()]);
    assert!(matches!(
        world.failure(1),
        Some(Failure::OutOfMemory { .. })
    ));
    assert!(world.scheduler.stats().waits > 10);
}

#[test]
fn a_sequence_without_room_for_its_tree_decodes_plainly() {
    let draft = Some(FakeDraft {
        depth: 4,
        right: 1.0,
    });
    let mut world = World::new(
        FakeSpec {
            draft,
            ..spec(ENDLESS)
        },
        config(),
    );
    world
        .handle
        .fail(no_room(RunnerMethod::Verify, FaultTrigger::Nth(0)));
    world
        .handle
        .fail(no_room(RunnerMethod::Draft, FaultTrigger::Nth(1)));
    world.submit(job(0, prompt(6, 0), greedy(12)));
    world.finish();
    check_untouched(&world, &[job(0, prompt(6, 0), greedy(12))]);
    assert_eq!(world.scheduler.stats().undrafted_rounds, 1);
    let widths: Vec<usize> = world.handle.record().verifies.concat();
    assert_eq!(&widths[..2], [1, 1]);
    assert!(widths[2] > 1);
}

#[test]
fn a_job_whose_commit_finds_no_room_fails_alone() {
    let mut world = World::new(spec(ENDLESS), config());
    world.handle.fail(no_room(
        RunnerMethod::Commit,
        FaultTrigger::Naming(SeqId(3)),
    ));
    three().into_iter().for_each(|job| world.submit(job));
    world.finish();
    check_untouched(&world, &three()[..2]);
    assert!(matches!(
        world.failure(2),
        Some(Failure::OutOfMemory { .. })
    ));
}

#[test]
fn a_prompt_without_room_is_read_later() {
    let mut world = World::new(spec(ENDLESS), config());
    world
        .handle
        .fail(no_room(RunnerMethod::Prefill, FaultTrigger::Nth(1)));
    world
        .handle
        .fail(no_room(RunnerMethod::Prefill, FaultTrigger::Nth(2)));
    three().into_iter().for_each(|job| world.submit(job));
    world.finish();
    check_untouched(&world, &three());
    assert!(world.scheduler.stats().waits >= 2);
}

#[test]
fn prompts_that_block_each_other_cost_the_one_that_came_last() {
    let mut world = World::new(spec(ENDLESS), config());
    world
        .handle
        .fail(no_room(RunnerMethod::Prefill, FaultTrigger::Nth(0)));
    three().into_iter().for_each(|job| world.submit(job));
    world.finish();
    check_untouched(&world, &three()[..2]);
    assert!(matches!(
        world.failure(2),
        Some(Failure::OutOfMemory { .. })
    ));
}

#[test]
fn a_prompt_state_that_does_not_fit_the_device_is_kept_by_the_host() {
    let two = Job {
        choices: 2,
        ..job(0, prompt(6, 0), sampled(9, 1))
    };
    let mut world = World::new(spec(ENDLESS), config());
    world
        .handle
        .fail(no_room(RunnerMethod::Snapshot, FaultTrigger::Nth(0)));
    world.submit(two.clone());
    world.finish();
    check_untouched(&world, std::slice::from_ref(&two));

    let mut world = World::new(spec(ENDLESS), config());
    world
        .handle
        .fail(no_room(RunnerMethod::Snapshot, FaultTrigger::From(0)));
    world.submit(two);
    world.submit(job(1, prompt(6, 1), greedy(9)));
    world.finish();
    assert!(matches!(
        world.failure(0),
        Some(Failure::OutOfMemory { .. })
    ));
    check_untouched(&world, &[job(1, prompt(6, 1), greedy(9))]);
}

#[test]
fn an_idle_scheduler_notices_what_the_device_did_not_get_back() {
    let leaky = FakeSpec {
        flaw: Some(Flaw::CloseLeaks),
        ..spec(ENDLESS)
    };
    let mut world = World::new(leaky, config());
    world.submit(job(0, prompt(6, 0), greedy(3)));
    while world.step().unwrap() == Progress::Working {}
    assert_eq!(world.scheduler.stats().leaks, 1);
    world.step().unwrap();
    assert_eq!(world.scheduler.stats().leaks, 1);
}

/// What the laws rest on: a runner that breaks a promise does give other tokens.
#[test]
fn a_runner_that_mixes_up_siblings_or_commits_gives_other_tokens() {
    for flaw in [
        Flaw::SiblingsVisible,
        Flaw::CommitsWholeTree,
        Flaw::CommitDropsLastNode,
    ] {
        let draft = Some(FakeDraft {
            depth: 4,
            right: 0.6,
        });
        let flawed = FakeSpec {
            draft,
            flaw: Some(flaw),
            ..spec(ENDLESS)
        };
        let mut world = World::new(flawed, config());
        let job = job(0, prompt(6, 0), greedy(40));
        world.submit(job.clone());
        while matches!(world.step(), Ok(Progress::Working)) {}
        let expected = alone(&spec(ENDLESS), &job);
        let same = world
            .said()
            .get(&(0, 0))
            .is_some_and(|said| said.tokens == expected[0].tokens);
        assert!(!same, "{flaw:?}");
    }
}

fn any_fault() -> impl Strategy<Value = InjectedFault> {
    let call = prop::sample::select(vec![
        RunnerMethod::Open,
        RunnerMethod::Prefill,
        RunnerMethod::Draft,
        RunnerMethod::Verify,
        RunnerMethod::Commit,
        RunnerMethod::Snapshot,
        RunnerMethod::Restore,
    ]);
    (call, 0..40_u64).prop_map(|(call, nth)| no_room(call, FaultTrigger::Nth(nth)))
}

proptest! {
    #[test]
    fn refusals_never_change_a_token_and_every_job_ends(
        faults in prop::collection::vec(any_fault(), 0..12),
        choices in prop::collection::vec(1..3_usize, 1..4),
    ) {
        let draft = Some(FakeDraft { depth: 4, right: 0.6 });
        let mut world = World::new(FakeSpec { draft, ..spec(LANGUAGE) }, config());
        faults.into_iter().for_each(|fault| world.handle.fail(fault));
        let jobs: Vec<Job> = choices.iter().enumerate().map(|(i, choices)| Job {
            choices: *choices,
            ..job(i as u64, prompt(40, i as u32), sampled(20, i as u64))
        }).collect();
        jobs.iter().for_each(|job| world.submit(job.clone()));
        world.finish();
        let said = world.said();
        for job in &jobs {
            let failed = world.failure(job.id.0);
            for (choice, expected) in alone(&spec(LANGUAGE), job).iter().enumerate() {
                let found = said.get(&(job.id.0, choice)).cloned().unwrap_or_default();
                if failed.is_some() {
                    prop_assert!(expected.tokens.starts_with(&found.tokens));
                } else {
                    prop_assert_eq!(&found.tokens, &expected.tokens);
                    prop_assert!(found.reason.is_some_and(|r| r != FinishReason::Cancelled));
                }
            }
        }
    }
}
