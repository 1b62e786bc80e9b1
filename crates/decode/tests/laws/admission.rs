//! Who gets in, when, and what those who do not are told.

use conformance::fake::{FakeSpec, RunnerMethod};
use contract::TokenId;
use decode::{Event, Failure, Job, JobId, Progress, Reject, Sampling, SchedulerConfig, Settings};

use crate::world::{ENDLESS, World, alone, config, greedy, job, prompt, sampled, spec};

fn one_at_a_time() -> SchedulerConfig {
    SchedulerConfig {
        max_sequences: 1,
        ..config()
    }
}

#[test]
fn a_prompt_that_is_too_long_is_refused_with_both_numbers() {
    let mut world = World::new(spec(ENDLESS), config());
    let refused = world.scheduler.submit(job(0, prompt(96, 0), greedy(5)));
    let expected = Reject::TooLong {
        prompt_tokens: 96,
        context_tokens: 96,
    };
    assert_eq!(refused, Err(expected.clone()));
    let text = expected.to_string();
    assert_eq!(
        text,
        "the prompt has 96 tokens; the context holds 96, answer included"
    );
    assert_eq!(
        world.scheduler.submit(job(0, prompt(95, 0), greedy(5))),
        Ok(())
    );
    // What is only to be read may fill the context.
    assert_eq!(
        world.scheduler.submit(job(1, prompt(96, 0), greedy(0))),
        Ok(())
    );
    world.finish();
    assert_eq!(world.said()[&(0, 0)].tokens.len(), 1);
}

#[test]
fn a_full_queue_refuses_with_its_numbers_and_takes_again_once_there_is_room() {
    let mut world = World::new(
        spec(ENDLESS),
        SchedulerConfig {
            queue_limit: 2,
            ..one_at_a_time()
        },
    );
    for id in 0..2 {
        world.submit(job(id, prompt(5, 0), greedy(5)));
    }
    let refused = world.scheduler.submit(job(2, prompt(5, 0), greedy(5)));
    assert_eq!(
        refused,
        Err(Reject::QueueFull {
            queued: 2,
            limit: 2
        })
    );
    world.step().unwrap();
    world.submit(job(2, prompt(5, 0), greedy(5)));
    world.finish();
    assert_eq!(world.started(), [0, 1, 2]);
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    fn check(field: &str, change: impl Fn(&mut Job)) {
        let mut world = World::new(spec(ENDLESS), config());
        let mut job = job(0, prompt(5, 0), greedy(5));
        change(&mut job);
        match world.scheduler.submit(job) {
            Err(Reject::Invalid { field: found, .. }) => assert_eq!(found, field),
            other => panic!("{field}: {other:?}"),
        }
        assert!(world.scheduler.is_idle());
    }
    fn sampling(change: impl Fn(&mut Sampling)) -> impl Fn(&mut Job) {
        move |job| change(&mut job.settings.sampling)
    }
    check("n", |job| job.choices = 0);
    check("n", |job| job.choices = 9);
    check("temperature", sampling(|s| s.temperature = -0.1));
    check("temperature", sampling(|s| s.temperature = f32::NAN));
    check("temperature", sampling(|s| s.temperature = f32::INFINITY));
    check("top_p", sampling(|s| s.top_p = 1.1));
    check("min_p", sampling(|s| s.min_p = -1.0));
    check("repetition_penalty", sampling(|s| s.repetition = 0.0));
    check("frequency_penalty", sampling(|s| s.frequency = f32::NAN));
    check("presence_penalty", sampling(|s| s.presence = f32::NAN));
    let bias = |id, x| sampling(move |s| s.bias = vec![(TokenId(1), 0.0), (TokenId(id), x)]);
    check("logit_bias", bias(40, 1.0));
    check("logit_bias", bias(2, f32::NAN));
    check("logit_bias", bias(1, 1.0));
    check("logprobs", |job| job.settings.logprobs = Some(21));
    check("prompt_logprobs", |job| {
        job.settings.prompt_logprobs = Some(21)
    });
    check("prompt", |job| job.prompt = [TokenId(40)].into());
}

#[test]
fn empty_prompts_and_names_in_use_are_refused() {
    let mut world = World::new(spec(ENDLESS), one_at_a_time());
    let refused = world.scheduler.submit(job(0, Vec::new(), greedy(5)));
    assert_eq!(refused, Err(Reject::EmptyPrompt));
    world.submit(job(0, prompt(5, 0), greedy(5)));
    world.submit(job(1, prompt(5, 0), greedy(5)));
    world.step().unwrap();
    for id in [0, 1] {
        let refused = world.scheduler.submit(job(id, prompt(5, 0), greedy(5)));
        assert_eq!(refused, Err(Reject::Duplicate(JobId(id))));
    }
    world.finish();
    world.submit(job(0, prompt(5, 0), greedy(5)));
}

#[test]
fn jobs_start_in_order_of_arrival_and_higher_priority_goes_first() {
    let mut world = World::new(spec(ENDLESS), one_at_a_time());
    for (id, priority) in [(0, 0), (1, 0), (2, 3), (3, 0), (4, 3)] {
        world.submit(Job {
            priority,
            ..job(id, prompt(5, 0), greedy(4))
        });
    }
    world.finish();
    assert_eq!(world.started(), [2, 4, 0, 1, 3]);
}

#[test]
fn a_large_job_is_not_overtaken_by_small_ones_for_ever() {
    // Room for one large job and its trees, or for two small ones.
    let tight = FakeSpec {
        pool_tokens: 96 + 24,
        ..spec(ENDLESS)
    };
    let mut world = World::new(tight, config());
    world.submit(job(0, prompt(10, 0), greedy(20)));
    world.submit(job(1, prompt(50, 0), greedy(46)));
    for id in 2..6 {
        world.submit(job(id, prompt(10, 0), greedy(20)));
    }
    world.finish();
    assert_eq!(world.started(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(world.said().len(), 6);
}

#[test]
fn a_job_larger_than_the_device_fails_alone_with_the_numbers() {
    // Less than a context, which no device is opened with.
    let tight = FakeSpec {
        pool_tokens: 40,
        ..spec(ENDLESS)
    };
    let mut world = World::new(tight, config());
    world.submit(job(0, prompt(30, 0), greedy(30)));
    world.submit(job(1, prompt(10, 0), greedy(5)));
    world.finish();
    let expected = Failure::OutOfMemory {
        what: "pages of keys and values",
        wanted: 1,
        free: 0,
    };
    assert_eq!(world.said()[&(0, 0)].tokens.len(), 11);
    assert_eq!(world.failure(0), Some(expected));
    assert_eq!(world.said()[&(1, 0)].tokens.len(), 5);
}

#[test]
fn chunks_end_at_absolute_multiples_and_a_round_comes_between_them() {
    let mut world = World::new(
        spec(ENDLESS),
        SchedulerConfig {
            prefill_chunk: 10,
            ..config()
        },
    );
    world.submit(job(0, prompt(5, 0), greedy(80)));
    world.step().unwrap();
    world.submit(job(1, prompt(61, 0), greedy(3)));
    world.finish();
    let record = world.handle.record();
    // The alignment is 4, so chunks of 10 become chunks of 8.
    let cuts: Vec<(usize, usize)> = record.prefills[1..]
        .iter()
        .map(|(_, at, n)| (*at, *n))
        .collect();
    let whole = (0..7).map(|i| (i * 8, 8));
    assert_eq!(cuts, whole.chain([(56, 5)]).collect::<Vec<_>>());
    let work: Vec<RunnerMethod> = record
        .calls
        .into_iter()
        .filter(|call| matches!(call, RunnerMethod::Prefill | RunnerMethod::Verify))
        .collect();
    let twice = work
        .windows(2)
        .any(|pair| pair == [RunnerMethod::Prefill, RunnerMethod::Prefill]);
    assert!(!twice, "{work:?}");
    let stats = world.scheduler.stats();
    assert_eq!((stats.chunks, stats.prompt_tokens), (9, 66));
    assert_eq!(stats.largest_batch, 2);
}

#[test]
fn a_first_token_does_not_wait_for_a_round_of_the_neighbours() {
    let mut world = World::new(spec(ENDLESS), config());
    world.submit(job(0, prompt(5, 0), greedy(80)));
    for _ in 0..4 {
        world.step().unwrap();
    }
    world.submit(job(1, prompt(5, 0), greedy(3)));
    for _ in 0..2 {
        let before = world.handle.record().count(RunnerMethod::Verify);
        world.step().unwrap();
        let rounds = world.handle.record().count(RunnerMethod::Verify) - before;
        let first = world
            .events
            .iter()
            .any(|(id, event)| id.0 == 1 && matches!(event, Event::Tokens { .. }));
        if first {
            assert_eq!(rounds, 0);
            return;
        }
    }
    panic!("two steps without a first token");
}

#[test]
fn choices_read_their_prompt_once_and_say_what_separate_jobs_would() {
    for max_sequences in [1, 2, 8] {
        let mut world = World::new(
            spec(ENDLESS),
            SchedulerConfig {
                max_sequences,
                ..config()
            },
        );
        let four = Job {
            choices: 4,
            ..job(0, prompt(40, 0), sampled(12, 77))
        };
        world.submit(four.clone());
        world.finish();
        let said: Vec<_> = world.said().into_values().collect();
        let expected = alone(&spec(ENDLESS), &four);
        assert_eq!(
            said.iter().map(|s| s.ids()).collect::<Vec<_>>(),
            expected.iter().map(|s| s.ids()).collect::<Vec<_>>()
        );
        assert_ne!(said[0].ids(), said[1].ids());
        assert_eq!(world.scheduler.stats().prompt_tokens, 40);
        let record = world.handle.record();
        assert_eq!(record.count(RunnerMethod::Snapshot), 1);
        assert_eq!(record.count(RunnerMethod::Restore), 3);
        assert_eq!(record.count(RunnerMethod::FreeSnapshot), 1);
    }
}

#[test]
fn an_idle_scheduler_does_nothing_and_says_so() {
    let mut world = World::new(spec(ENDLESS), config());
    assert!(world.scheduler.is_idle());
    assert_eq!(world.step().unwrap(), Progress::Idle);
    assert_eq!(world.handle.record().calls, []);
    assert_eq!(world.events, []);
    world.submit(job(0, prompt(3, 0), Settings::default()));
    assert!(!world.scheduler.is_idle());
}
