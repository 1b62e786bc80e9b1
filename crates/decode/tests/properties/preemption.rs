//! Preemption in a shared KV pool: who waits, who is preempted, and that output never changes.

use conformance::fake::{FakeSpec, FaultKind, FaultTrigger, InjectedFault, RunnerMethod};
use contract::{KvPool, Limits};
use decode::{FinishReason, Job, JobError, JobId, SchedulerConfig, SchedulerState, Stats};

use crate::fixture::{
    ENDLESS, SchedulerFixture, config, greedy, job, prompt, reference_outputs, sampled, spec,
};

const PAGE: usize = 8;

/// A pool of this many pages of eight tokens. Trees have one node, so that pages can be counted.
fn pool(pages: usize) -> FakeSpec {
    let spec = spec(ENDLESS);
    let limits = Limits {
        tree_nodes: 1,
        pool_tokens: Some(pages * PAGE),
        ..spec.limits
    };
    let pool = KvPool::for_limits(limits, PAGE);
    assert_eq!(pool.pages, pages, "the pool holds one context and not all");
    FakeSpec {
        limits,
        pool_tokens: pool.tokens(),
        page_size: PAGE,
        ..spec
    }
}

fn with_reserve(reserve: usize) -> SchedulerConfig {
    SchedulerConfig {
        reserve,
        prefill_chunk: 8,
        ..config()
    }
}

/// Steps until idle and observes the stats after each step.
fn run_observed(fixture: &mut SchedulerFixture, mut seen: impl FnMut(Stats)) {
    while fixture.step().unwrap() != SchedulerState::Idle {
        seen(fixture.scheduler.stats());
    }
    let stats = fixture.scheduler.stats();
    assert_eq!((stats.leaks, stats.preempted, stats.failed), (0, 0, 0));
    assert_eq!(stats.preemptions, stats.resumed);
    assert_eq!(stats.free_tokens, stats.pool_tokens);
    assert_eq!(stats.prefix.bytes, 0, "a preemption snapshot is left");
}

fn check_against_reference(fixture: &SchedulerFixture, spec: &FakeSpec, jobs: &[Job]) {
    let outputs = fixture.outputs();
    for job in jobs {
        for (choice, expected) in reference_outputs(spec, job).into_iter().enumerate() {
            let found = &outputs[&(job.id.0, choice)];
            assert_eq!(found.ids(), expected.ids(), "{} {choice}", job.id);
            assert_eq!(found.reason, expected.reason);
        }
    }
}

#[test]
fn full_pool_queues_and_preempts_without_changing_tokens() {
    let spec = pool(20);
    let jobs = [
        job(0, prompt(40, 0), greedy(50)),
        job(1, prompt(44, 1), sampled(48, 7)),
        job(2, prompt(60, 2), greedy(30)),
        job(3, prompt(10, 3), sampled(10, 8)),
    ];
    let mut fixture = SchedulerFixture::new(spec.clone(), with_reserve(8));
    jobs.iter().for_each(|job| fixture.submit(job.clone()));
    let (mut waited, mut preempted, mut least) = (0, 0, usize::MAX);
    run_observed(&mut fixture, |stats| {
        waited += usize::from(stats.blocked_on_pool && stats.queued > 0);
        preempted = preempted.max(stats.preempted);
        least = least.min(stats.free_tokens);
    });
    check_against_reference(&fixture, &spec, &jobs);
    assert!(waited > 0);
    assert_eq!((preempted, least), (1, 0));
    assert_eq!(fixture.started(), [0, 1, 2, 3]);
}

#[test]
fn exactly_full_pool_never_preempts_and_one_page_less_preempts_once() {
    for (pages, preemptions) in [(16, 0), (15, 1)] {
        let spec = pool(pages);
        // 63 tokens each at the end, which is eight pages: the last token is never read.
        let jobs = [0, 1].map(|id| job(id, prompt(40, id as u32), greedy(24)));
        let mut fixture = SchedulerFixture::new(spec.clone(), with_reserve(0));
        jobs.iter().for_each(|job| fixture.submit(job.clone()));
        let mut least = usize::MAX;
        run_observed(&mut fixture, |stats| least = least.min(stats.free_tokens));
        check_against_reference(&fixture, &spec, &jobs);
        assert_eq!(least, 0);
        assert_eq!(
            fixture.scheduler.stats().preemptions,
            preemptions,
            "{pages} pages"
        );
    }
}

#[test]
fn preempted_sequences_resume_before_new_jobs_and_only_once() {
    let spec = pool(20);
    let mut jobs: Vec<Job> = (0..2)
        .map(|id| job(id, prompt(40, id as u32), greedy(50)))
        .collect();
    jobs.extend((2..9).map(|id| job(id, prompt(8, id as u32), greedy(4))));
    let mut fixture = SchedulerFixture::new(spec.clone(), with_reserve(0));
    jobs[..2].iter().for_each(|job| fixture.submit(job.clone()));
    let mut waits_behind = 0;
    let mut late = jobs[2..].iter();
    for _ in 0..10_000 {
        let preempted = fixture.scheduler.stats().preempted;
        let began = fixture.started().len();
        if preempted > 0
            && let Some(job) = late.next()
        {
            fixture.submit(job.clone());
        }
        let done = fixture.step().unwrap() == SchedulerState::Idle;
        if preempted > 0 && fixture.scheduler.stats().preempted > 0 {
            assert_eq!(
                fixture.started().len(),
                began,
                "a job overtook a preempted one"
            );
            waits_behind += fixture.scheduler.stats().queued;
        }
        if done && late.len() == 0 {
            break;
        }
    }
    check_against_reference(&fixture, &spec, &jobs);
    assert!(waits_behind > 0);
    assert_eq!(fixture.scheduler.stats().preemptions, 1);
}

#[test]
fn lowest_priority_sequence_is_preempted_regardless_of_arrival() {
    let spec = pool(15);
    let jobs = [
        job(0, prompt(40, 0), greedy(24)),
        Job {
            priority: 5,
            ..job(1, prompt(40, 1), greedy(24))
        },
    ];
    let mut fixture = SchedulerFixture::new(spec.clone(), with_reserve(0));
    jobs.iter().for_each(|job| fixture.submit(job.clone()));
    fixture.finish();
    check_against_reference(&fixture, &spec, &jobs);
    assert_eq!(fixture.scheduler.stats().preemptions, 1);
    let ended = |id: u64| {
        let mut events = fixture.events.iter();
        events.rposition(|(job, _)| job.0 == id)
    };
    assert!(ended(1) < ended(0));
}

#[test]
fn choices_of_one_job_are_preempted_one_by_one() {
    let spec = pool(20);
    let four = Job {
        choices: 4,
        ..job(0, prompt(24, 0), sampled(60, 3))
    };
    let jobs = [four, job(1, prompt(24, 1), greedy(20))];
    let mut fixture = SchedulerFixture::new(spec.clone(), with_reserve(0));
    jobs.iter().for_each(|job| fixture.submit(job.clone()));
    let mut preempted = 0;
    run_observed(&mut fixture, |stats| {
        preempted = preempted.max(stats.preempted)
    });
    check_against_reference(&fixture, &spec, &jobs);
    assert!(preempted >= 2, "{preempted}");
}

/// A decoding job and a prefilling one, so that the second is preempted within its prompt.
fn prefill_case() -> (FakeSpec, [Job; 2]) {
    let jobs = [
        job(0, prompt(8, 0), greedy(88)),
        job(1, prompt(90, 1), greedy(4)),
    ];
    // The pool holds both when the second arrives, but not once the first has grown during its
    // prefill.
    (pool(15), jobs)
}

fn submit_with_prefill_preempted(fixture: &mut SchedulerFixture, jobs: &[Job; 2]) {
    fixture.submit(jobs[0].clone());
    // The first decodes for a while. Then a job starts that hardly fits.
    for _ in 0..8 {
        fixture.step().unwrap();
    }
    fixture.submit(jobs[1].clone());
}

#[test]
fn preempted_prefill_resumes_at_saved_position() {
    let (spec, jobs) = prefill_case();
    let mut fixture = SchedulerFixture::new(spec.clone(), with_reserve(0));
    submit_with_prefill_preempted(&mut fixture, &jobs);
    run_observed(&mut fixture, |_| ());
    check_against_reference(&fixture, &spec, &jobs);
    let stats = fixture.scheduler.stats();
    assert_eq!((stats.preemptions, stats.prompt_tokens), (1, 98));
}

#[test]
fn preempted_prefill_without_snapshot_is_recomputed() {
    let (spec, jobs) = prefill_case();
    let mut fixture = SchedulerFixture::new(spec.clone(), with_reserve(0));
    fixture.handle.fail(InjectedFault {
        call: RunnerMethod::Snapshot,
        when: FaultTrigger::From(0),
        kind: FaultKind::OutOfMemory,
    });
    submit_with_prefill_preempted(&mut fixture, &jobs);
    run_observed(&mut fixture, |_| ());
    check_against_reference(&fixture, &spec, &jobs);
    let stats = fixture.scheduler.stats();
    assert_eq!(stats.preemptions, 1);
    assert!(stats.prompt_tokens > 98);
}

/// Snapshots fail from here on.
fn fail_snapshots(fixture: &SchedulerFixture) {
    fixture.handle.fail(InjectedFault {
        call: RunnerMethod::Snapshot,
        when: FaultTrigger::From(0),
        kind: FaultKind::OutOfMemory,
    });
}

#[test]
fn preempted_decode_without_snapshot_is_recomputed() {
    let spec = pool(15);
    for params in [greedy(24), sampled(24, 5)] {
        let jobs = [0, 1].map(|id| job(id, prompt(40, id as u32), params.clone()));
        let mut fixture = SchedulerFixture::new(spec.clone(), with_reserve(0));
        fail_snapshots(&fixture);
        jobs.iter().for_each(|job| fixture.submit(job.clone()));
        run_observed(&mut fixture, |_| ());
        check_against_reference(&fixture, &spec, &jobs);
        let stats = fixture.scheduler.stats();
        assert_eq!(stats.preemptions, 1);
        // Both prompts, and the second again with its output.
        assert!(stats.prompt_tokens > 40 + 40 + 40, "{stats:?}");
    }
}

#[test]
fn preempted_choices_without_snapshot_are_recomputed_one_by_one() {
    let spec = pool(20);
    let three = Job {
        choices: 3,
        ..job(1, prompt(24, 1), sampled(40, 3))
    };
    let jobs = [job(0, prompt(24, 0), greedy(60)), three];
    let mut fixture = SchedulerFixture::new(spec.clone(), with_reserve(0));
    jobs.iter().for_each(|job| fixture.submit(job.clone()));
    // The prompt's snapshot for later choices still succeeds.
    while fixture.scheduler.stats().sequences < 4 {
        fixture.step().unwrap();
    }
    fail_snapshots(&fixture);
    let mut preempted = 0;
    run_observed(&mut fixture, |stats| {
        preempted = preempted.max(stats.preempted)
    });
    check_against_reference(&fixture, &spec, &jobs);
    assert!(preempted >= 1 && fixture.scheduler.stats().preemptions >= 2);
}

#[test]
fn recomputing_choice_can_be_cancelled() {
    let spec = pool(15);
    let jobs = [0, 1].map(|id| job(id, prompt(40, id as u32), greedy(24)));
    let mut fixture = SchedulerFixture::new(spec.clone(), with_reserve(0));
    fail_snapshots(&fixture);
    jobs.iter().for_each(|job| fixture.submit(job.clone()));
    while fixture.scheduler.stats().preemptions == 0 || fixture.scheduler.stats().preempted > 0 {
        fixture.step().unwrap();
    }
    let outputs = fixture.outputs()[&(1, 0)].tokens.len();
    fixture.scheduler.cancel(JobId(1));
    fixture.finish();
    check_against_reference(&fixture, &spec, &jobs[..1]);
    let cancelled = &fixture.outputs()[&(1, 0)];
    assert_eq!(cancelled.reason, Some(FinishReason::Cancelled));
    assert_eq!(cancelled.tokens.len(), outputs);
}

#[test]
fn failed_restore_fails_only_the_preempted_job() {
    let spec = pool(15);
    let jobs = [0, 1].map(|id| job(id, prompt(40, id as u32), greedy(24)));
    let mut fixture = SchedulerFixture::new(spec.clone(), with_reserve(0));
    fixture.handle.fail(InjectedFault {
        call: RunnerMethod::Restore,
        when: FaultTrigger::From(0),
        kind: FaultKind::OutOfMemory,
    });
    jobs.iter().for_each(|job| fixture.submit(job.clone()));
    fixture.finish();
    check_against_reference(&fixture, &spec, &jobs[..1]);
    assert!(matches!(
        fixture.failure(1),
        Some(JobError::OutOfMemory { .. })
    ));
    assert_eq!(fixture.scheduler.stats().prefix.bytes, 0);
}

#[test]
fn cancelled_preempted_jobs_free_their_snapshots() {
    let (read_spec, read) = prefill_case();
    let decoding_jobs = [0, 1].map(|id| job(id, prompt(40, id as u32), greedy(24)));
    for (spec, jobs, choice) in [
        (pool(15), &decoding_jobs, Some(0)),
        (pool(15), &decoding_jobs, None),
        (read_spec.clone(), &read, Some(0)),
        (read_spec, &read, None),
    ] {
        let mut fixture = SchedulerFixture::new(spec.clone(), with_reserve(0));
        if jobs == &read {
            submit_with_prefill_preempted(&mut fixture, jobs)
        } else {
            jobs.iter().for_each(|job| fixture.submit(job.clone()))
        }
        while fixture.scheduler.stats().preempted == 0 {
            assert_eq!(fixture.step().unwrap(), SchedulerState::Working);
        }
        match choice {
            Some(choice) => fixture.scheduler.cancel_choice(JobId(1), choice),
            None => fixture.scheduler.cancel(JobId(1)),
        }
        assert_eq!(fixture.scheduler.stats().preempted, 0);
        fixture.finish();
        check_against_reference(&fixture, &spec, &jobs[..1]);
        assert_eq!(
            fixture.outputs()[&(1, 0)].reason,
            Some(FinishReason::Cancelled)
        );
        assert_eq!(fixture.scheduler.stats().prefix.bytes, 0);
    }
}
