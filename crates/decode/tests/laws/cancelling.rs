//! Cancellation meets a job wherever it is, and costs its neighbours nothing.

use decode::{Event, FinishReason, Job, JobId, SchedulerConfig};

use crate::world::{ENDLESS, World, alone, config, greedy, job, prompt, sampled, spec};

fn cancelled(world: &World, id: u64) -> Vec<usize> {
    let ends = world.events.iter().filter(|(job, _)| job.0 == id);
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
fn a_queued_job_leaves_at_once_and_makes_room_in_the_queue() {
    let mut world = World::new(
        spec(ENDLESS),
        SchedulerConfig {
            max_sequences: 1,
            queue_limit: 1,
            ..config()
        },
    );
    world.submit(job(0, prompt(5, 0), greedy(20)));
    world.step().unwrap();
    world.submit(Job {
        choices: 2,
        ..job(1, prompt(5, 1), greedy(20))
    });
    world.scheduler.cancel(JobId(1));
    world.submit(job(2, prompt(5, 2), greedy(20)));
    world.finish();
    assert_eq!(cancelled(&world, 1), [0, 1]);
    assert_eq!(world.started(), [0, 2]);
    assert_eq!(world.scheduler.stats().cancelled.queued, 1);
    let neighbour = alone(&spec(ENDLESS), &job(0, prompt(5, 0), greedy(20)));
    assert_eq!(world.said()[&(0, 0)].tokens, neighbour[0].tokens);
}

#[test]
fn a_job_is_cancelled_between_two_chunks_of_its_prompt() {
    let mut world = World::new(
        spec(ENDLESS),
        SchedulerConfig {
            prefill_chunk: 4,
            ..config()
        },
    );
    world.submit(job(0, prompt(60, 0), greedy(20)));
    world.step().unwrap();
    world.step().unwrap();
    world.scheduler.cancel(JobId(0));
    assert_eq!(world.scheduler.stats().sequences, 0);
    world.finish();
    assert_eq!(cancelled(&world, 0), [0]);
    assert_eq!(world.handle.record().prefills.len(), 2);
    assert_eq!(world.scheduler.stats().cancelled.prefill, 1);
}

#[test]
fn one_choice_is_cancelled_between_two_rounds_and_the_others_go_on() {
    let three = Job {
        choices: 3,
        ..job(0, prompt(9, 0), sampled(20, 5))
    };
    let mut world = World::new(spec(ENDLESS), config());
    world.submit(three.clone());
    for _ in 0..6 {
        world.step().unwrap();
    }
    world.scheduler.cancel_choice(JobId(0), 1);
    // A second time, and for what is not there, it is ignored.
    world.scheduler.cancel_choice(JobId(0), 1);
    world.scheduler.cancel_choice(JobId(0), 7);
    world.scheduler.cancel(JobId(9));
    world.finish();
    assert_eq!(cancelled(&world, 0), [1]);
    let (said, expected) = (world.said(), alone(&spec(ENDLESS), &three));
    assert_eq!(said[&(0, 0)].tokens, expected[0].tokens);
    assert_eq!(said[&(0, 2)].tokens, expected[2].tokens);
    let partial = &said[&(0, 1)].tokens;
    assert!(!partial.is_empty() && partial.len() < 20);
    assert!(expected[1].tokens.starts_with(partial));
    assert_eq!(world.scheduler.stats().cancelled.decode, 1);
}

#[test]
fn choices_cancelled_before_their_prompt_is_read_are_never_begun() {
    let mut world = World::new(
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
    world.submit(three.clone());
    world.scheduler.cancel_choice(JobId(0), 2);
    world.step().unwrap();
    world.scheduler.cancel_choice(JobId(0), 0);
    world.finish();
    assert_eq!(cancelled(&world, 0), [2, 0]);
    let (said, expected) = (world.said(), alone(&spec(ENDLESS), &three));
    assert_eq!(said[&(0, 1)].tokens, expected[1].tokens);
}

#[test]
fn a_choice_that_waits_for_a_place_can_be_cancelled_and_frees_the_saved_state() {
    let mut world = World::new(
        spec(ENDLESS),
        SchedulerConfig {
            max_sequences: 1,
            ..config()
        },
    );
    world.submit(Job {
        choices: 2,
        ..job(0, prompt(9, 0), sampled(6, 5))
    });
    world.step().unwrap();
    world.step().unwrap();
    world.scheduler.cancel_choice(JobId(0), 1);
    let record = world.handle.record();
    assert_eq!(
        record.count(conformance::fake::RunnerMethod::FreeSnapshot),
        1
    );
    world.finish();
    assert_eq!(cancelled(&world, 0), [1]);
    assert_eq!(world.said()[&(0, 0)].reason, Some(FinishReason::Length));
}
