//! Cancellation works in every phase and does not affect other jobs.

use decode::{Event, FinishReason, Job, JobId, SchedulerConfig};

use crate::fixture::{
    ENDLESS, SchedulerFixture, config, greedy, job, prompt, reference_outputs, sampled, spec,
};

fn cancelled(fixture: &SchedulerFixture, id: u64) -> Vec<usize> {
    let ends = fixture.events.iter().filter(|(job, _)| job.0 == id);
    ends.filter_map(|(_, event)| match event {
        Event::Finished {
            choice,
            reason: FinishReason::Cancelled,
            ..
        } => Some(*choice),
        _ => None,
    })
    .collect()
}

#[test]
fn cancelled_queued_job_frees_its_queue_slot() {
    let mut fixture = SchedulerFixture::new(
        spec(ENDLESS),
        SchedulerConfig {
            max_sequences: 1,
            queue_limit: 1,
            ..config()
        },
    );
    fixture.submit(job(0, prompt(5, 0), greedy(20)));
    fixture.step().unwrap();
    fixture.submit(Job {
        choices: 2,
        ..job(1, prompt(5, 1), greedy(20))
    });
    fixture.scheduler.cancel(JobId(1));
    fixture.submit(job(2, prompt(5, 2), greedy(20)));
    fixture.finish();
    assert_eq!(cancelled(&fixture, 1), [0, 1]);
    assert_eq!(fixture.started(), [0, 2]);
    assert_eq!(fixture.scheduler.stats().cancelled.queued, 1);
    let neighbour = reference_outputs(&spec(ENDLESS), &job(0, prompt(5, 0), greedy(20)));
    assert_eq!(fixture.outputs()[&(0, 0)].tokens, neighbour[0].tokens);
}

#[test]
fn job_is_cancelled_between_prefill_chunks() {
    let mut fixture = SchedulerFixture::new(
        spec(ENDLESS),
        SchedulerConfig {
            prefill_chunk: 4,
            ..config()
        },
    );
    fixture.submit(job(0, prompt(60, 0), greedy(20)));
    fixture.step().unwrap();
    fixture.step().unwrap();
    fixture.scheduler.cancel(JobId(0));
    assert_eq!(fixture.scheduler.stats().sequences, 0);
    fixture.finish();
    assert_eq!(cancelled(&fixture, 0), [0]);
    assert_eq!(fixture.handle.record().prefills.len(), 2);
    assert_eq!(fixture.scheduler.stats().cancelled.prefill, 1);
}

#[test]
fn cancelled_choice_leaves_other_choices_running() {
    let three = Job {
        choices: 3,
        ..job(0, prompt(9, 0), sampled(20, 5))
    };
    let mut fixture = SchedulerFixture::new(spec(ENDLESS), config());
    fixture.submit(three.clone());
    for _ in 0..6 {
        fixture.step().unwrap();
    }
    fixture.scheduler.cancel_choice(JobId(0), 1);
    // A second cancellation, and one of an unknown id, is ignored.
    fixture.scheduler.cancel_choice(JobId(0), 1);
    fixture.scheduler.cancel_choice(JobId(0), 7);
    fixture.scheduler.cancel(JobId(9));
    fixture.finish();
    assert_eq!(cancelled(&fixture, 0), [1]);
    let (outputs, expected) = (fixture.outputs(), reference_outputs(&spec(ENDLESS), &three));
    assert_eq!(outputs[&(0, 0)].tokens, expected[0].tokens);
    assert_eq!(outputs[&(0, 2)].tokens, expected[2].tokens);
    let partial = &outputs[&(0, 1)].tokens;
    assert!(!partial.is_empty() && partial.len() < 20);
    assert!(expected[1].tokens.starts_with(partial));
    assert_eq!(fixture.scheduler.stats().cancelled.decode, 1);
}

#[test]
fn choices_cancelled_during_prefill_never_start() {
    let mut fixture = SchedulerFixture::new(
        spec(ENDLESS),
        SchedulerConfig {
            prefill_chunk: 4,
            ..config()
        },
    );
    let three = Job {
        choices: 3,
        ..job(0, prompt(9, 0), sampled(6, 5))
    };
    fixture.submit(three.clone());
    fixture.scheduler.cancel_choice(JobId(0), 2);
    fixture.step().unwrap();
    fixture.scheduler.cancel_choice(JobId(0), 0);
    fixture.finish();
    assert_eq!(cancelled(&fixture, 0), [2, 0]);
    let (outputs, expected) = (fixture.outputs(), reference_outputs(&spec(ENDLESS), &three));
    assert_eq!(outputs[&(0, 1)].tokens, expected[1].tokens);
}

#[test]
fn cancelled_pending_choice_frees_the_prompt_snapshot() {
    let mut fixture = SchedulerFixture::new(
        spec(ENDLESS),
        SchedulerConfig {
            max_sequences: 1,
            ..config()
        },
    );
    fixture.submit(Job {
        choices: 2,
        ..job(0, prompt(9, 0), sampled(6, 5))
    });
    fixture.step().unwrap();
    fixture.step().unwrap();
    fixture.scheduler.cancel_choice(JobId(0), 1);
    let record = fixture.handle.record();
    assert_eq!(
        record.count(conformance::fake::RunnerMethod::FreeSnapshot),
        1
    );
    fixture.finish();
    assert_eq!(cancelled(&fixture, 0), [1]);
    assert_eq!(
        fixture.outputs()[&(0, 0)].reason,
        Some(FinishReason::Length)
    );
}
