//! Device faults: which job fails, and which go on.

use conformance::fake::{
    FakeDraft, FakeSpec, FaultKind, FaultTrigger, Flaw, InjectedFault, RunnerMethod,
};
use contract::{DeviceError, SeqId};
use decode::{Job, JobError, SchedulerState, SubmitError};
use proptest::prelude::*;

use crate::fixture::{
    ENDLESS, LANGUAGE, SchedulerFixture, any_sources, config, drafting, greedy, job, prompt,
    reference_outputs, require_reference_tokens, sampled, spec, with_sources,
};

fn out_of_memory(call: RunnerMethod, when: FaultTrigger) -> InjectedFault {
    InjectedFault {
        call,
        when,
        kind: FaultKind::OutOfMemory,
    }
}

/// Three jobs, submitted one after another.
fn three_jobs() -> Vec<Job> {
    (0..3)
        .map(|id| job(id, prompt(6, id as u32), sampled(15, id)))
        .collect()
}

fn check_unaffected(fixture: &SchedulerFixture, jobs: &[Job]) {
    let outputs = fixture.outputs();
    for job in jobs {
        let expected = reference_outputs(&spec(ENDLESS), job);
        for (choice, expected) in expected.iter().enumerate() {
            let found = &outputs[&(job.id.0, choice)];
            assert_eq!(found.tokens, expected.tokens, "{}", job.id);
            assert_eq!(found.reason, expected.reason);
        }
    }
}

#[test]
fn lost_device_fails_every_job_once_and_rejects_new_jobs() {
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
            acceptance_rate: 0.5,
        });
        let mut fixture = SchedulerFixture::new(
            FakeSpec {
                draft,
                ..spec(ENDLESS)
            },
            config(),
        );
        fixture.handle.fail(InjectedFault {
            call,
            when: FaultTrigger::Nth(1),
            kind: FaultKind::DeviceLost,
        });
        for id in 0..12 {
            fixture.submit(Job {
                choices: 2,
                ..job(id, prompt(6, id as u32), greedy(30))
            });
        }
        let error = loop {
            match fixture.step() {
                Ok(SchedulerState::Working) => {}
                Ok(SchedulerState::Idle) => panic!("{call:?} was never called twice"),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, DeviceError::DeviceLost { during, .. } if during == call.name()));
        let outputs = fixture.outputs();
        for id in 0..12 {
            let whole = (0..2).all(|choice| {
                outputs
                    .get(&(id, choice))
                    .is_some_and(|outputs| outputs.reason.is_some())
            });
            let failed = matches!(fixture.failure(id), Some(JobError::DeviceLost { .. }));
            assert!(whole != failed, "{call:?}: job {id}");
        }
        assert!(fixture.scheduler.is_idle());
        let refused = fixture.scheduler.submit(job(99, prompt(6, 0), greedy(1)));
        assert!(matches!(refused, Err(SubmitError::DeviceLost { .. })));
        assert!(matches!(
            fixture.step(),
            Err(DeviceError::DeviceLost { .. })
        ));
    }
}

#[test]
fn out_of_memory_batch_is_decoded_sequence_by_sequence() {
    let mut fixture = SchedulerFixture::new(spec(ENDLESS), config());
    fixture.handle.fail(out_of_memory(
        RunnerMethod::Verify,
        FaultTrigger::MoreThan(1),
    ));
    fixture.handle.fail(out_of_memory(
        RunnerMethod::Commit,
        FaultTrigger::MoreThan(1),
    ));
    three_jobs().into_iter().for_each(|job| fixture.submit(job));
    fixture.finish();
    check_unaffected(&fixture, &three_jobs());
}

#[test]
fn out_of_memory_sequence_waits_for_others_then_fails_alone() {
    let mut fixture = SchedulerFixture::new(spec(ENDLESS), config());
    // The fake numbers sequences from 1.
    fixture.handle.fail(out_of_memory(
        RunnerMethod::Verify,
        FaultTrigger::Naming(SeqId(2)),
    ));
    three_jobs().into_iter().for_each(|job| fixture.submit(job));
    fixture.finish();
    let jobs = three_jobs();
    check_unaffected(&fixture, &[jobs[0].clone(), jobs[2].clone()]);
    assert!(matches!(
        fixture.failure(1),
        Some(JobError::OutOfMemory { .. })
    ));
    assert!(fixture.scheduler.stats().out_of_memory_calls > 10);
}

#[test]
fn out_of_memory_tree_falls_back_to_plain_decoding() {
    let draft = Some(FakeDraft {
        depth: 4,
        acceptance_rate: 1.0,
    });
    let mut fixture = SchedulerFixture::new(
        FakeSpec {
            draft,
            ..spec(ENDLESS)
        },
        config(),
    );
    fixture
        .handle
        .fail(out_of_memory(RunnerMethod::Verify, FaultTrigger::Nth(0)));
    fixture
        .handle
        .fail(out_of_memory(RunnerMethod::Draft, FaultTrigger::Nth(1)));
    fixture.submit(job(0, prompt(6, 0), greedy(12)));
    fixture.finish();
    check_unaffected(&fixture, &[job(0, prompt(6, 0), greedy(12))]);
    assert_eq!(fixture.scheduler.stats().undrafted_steps, 1);
    let widths: Vec<usize> = fixture.handle.record().verifies.concat();
    assert_eq!(&widths[..2], [1, 1]);
    assert!(widths[2] > 1);
}

#[test]
fn out_of_memory_commit_fails_only_its_job() {
    let mut fixture = SchedulerFixture::new(spec(ENDLESS), config());
    fixture.handle.fail(out_of_memory(
        RunnerMethod::Commit,
        FaultTrigger::Naming(SeqId(3)),
    ));
    three_jobs().into_iter().for_each(|job| fixture.submit(job));
    fixture.finish();
    check_unaffected(&fixture, &three_jobs()[..2]);
    assert!(matches!(
        fixture.failure(2),
        Some(JobError::OutOfMemory { .. })
    ));
}

#[test]
fn out_of_memory_prefill_is_retried_later() {
    let mut fixture = SchedulerFixture::new(spec(ENDLESS), config());
    fixture
        .handle
        .fail(out_of_memory(RunnerMethod::Prefill, FaultTrigger::Nth(1)));
    fixture
        .handle
        .fail(out_of_memory(RunnerMethod::Prefill, FaultTrigger::Nth(2)));
    three_jobs().into_iter().for_each(|job| fixture.submit(job));
    fixture.finish();
    check_unaffected(&fixture, &three_jobs());
    assert!(fixture.scheduler.stats().out_of_memory_calls >= 2);
}

#[test]
fn mutually_blocking_prefills_fail_the_last_admitted() {
    let mut fixture = SchedulerFixture::new(spec(ENDLESS), config());
    fixture
        .handle
        .fail(out_of_memory(RunnerMethod::Prefill, FaultTrigger::Nth(0)));
    three_jobs().into_iter().for_each(|job| fixture.submit(job));
    fixture.finish();
    check_unaffected(&fixture, &three_jobs()[..2]);
    assert!(matches!(
        fixture.failure(2),
        Some(JobError::OutOfMemory { .. })
    ));
}

#[test]
fn prompt_snapshot_falls_back_to_host_memory() {
    let two = Job {
        choices: 2,
        ..job(0, prompt(6, 0), sampled(9, 1))
    };
    let mut fixture = SchedulerFixture::new(spec(ENDLESS), config());
    fixture
        .handle
        .fail(out_of_memory(RunnerMethod::Snapshot, FaultTrigger::Nth(0)));
    fixture.submit(two.clone());
    fixture.finish();
    check_unaffected(&fixture, std::slice::from_ref(&two));

    let mut fixture = SchedulerFixture::new(spec(ENDLESS), config());
    fixture
        .handle
        .fail(out_of_memory(RunnerMethod::Snapshot, FaultTrigger::From(0)));
    fixture.submit(two);
    fixture.submit(job(1, prompt(6, 1), greedy(9)));
    fixture.finish();
    assert!(matches!(
        fixture.failure(0),
        Some(JobError::OutOfMemory { .. })
    ));
    check_unaffected(&fixture, &[job(1, prompt(6, 1), greedy(9))]);
}

#[test]
fn idle_scheduler_reports_leaked_device_resources() {
    let leaky = FakeSpec {
        flaw: Some(Flaw::CloseLeaks),
        ..spec(ENDLESS)
    };
    let mut fixture = SchedulerFixture::new(leaky, config());
    fixture.submit(job(0, prompt(6, 0), greedy(3)));
    while fixture.step().unwrap() == SchedulerState::Working {}
    assert_eq!(fixture.scheduler.stats().leaks, 1);
    fixture.step().unwrap();
    assert_eq!(fixture.scheduler.stats().leaks, 1);
}

/// The premise of these properties: a runner that breaks its contract changes tokens.
#[test]
fn runner_with_sibling_or_commit_flaw_changes_tokens() {
    for flaw in [
        Flaw::SiblingsVisible,
        Flaw::CommitsWholeTree,
        Flaw::CommitDropsLastNode,
    ] {
        let draft = Some(FakeDraft {
            depth: 4,
            acceptance_rate: 0.6,
        });
        let flawed = FakeSpec {
            draft,
            flaw: Some(flaw),
            ..spec(ENDLESS)
        };
        let mut fixture = SchedulerFixture::new(flawed, config());
        let job = job(0, prompt(6, 0), greedy(40));
        fixture.submit(job.clone());
        while matches!(fixture.step(), Ok(SchedulerState::Working)) {}
        let expected = reference_outputs(&spec(ENDLESS), &job);
        let same = fixture
            .outputs()
            .get(&(0, 0))
            .is_some_and(|outputs| outputs.tokens == expected[0].tokens);
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
    (call, 0..40_u64).prop_map(|(call, nth)| out_of_memory(call, FaultTrigger::Nth(nth)))
}

proptest! {
    #[test]
    fn injected_faults_never_change_tokens_and_every_job_ends(
        faults in prop::collection::vec(any_fault(), 0..12),
        choices in prop::collection::vec(1..3_usize, 1..4),
        sources in any_sources(),
    ) {
        let drafting = drafting(spec(LANGUAGE), 4, 0.6);
        let mut fixture = SchedulerFixture::new(drafting, with_sources(config(), sources));
        faults.into_iter().for_each(|fault| fixture.handle.fail(fault));
        let jobs: Vec<Job> = choices.iter().enumerate().map(|(i, choices)| Job {
            choices: *choices,
            ..job(i as u64, prompt(40, i as u32), sampled(20, i as u64))
        }).collect();
        jobs.iter().for_each(|job| fixture.submit(job.clone()));
        fixture.finish();
        require_reference_tokens(&fixture, &jobs)?;
    }
}
