//! Admission: which jobs start, when, and how rejected ones are reported.

use conformance::fake::{FakeSpec, RunnerMethod};
use contract::TokenId;
use decode::{
    Event, GenerationParams, Job, JobError, JobId, Sampling, SchedulerConfig, SchedulerState,
    SubmitError,
};

use crate::fixture::{
    ENDLESS, SchedulerFixture, config, greedy, job, prompt, reference_outputs, sampled, spec,
};

fn one_at_a_time() -> SchedulerConfig {
    SchedulerConfig {
        max_sequences: 1,
        ..config()
    }
}

#[test]
fn too_long_prompt_is_rejected_with_both_lengths() {
    let mut fixture = SchedulerFixture::new(spec(ENDLESS), config());
    let refused = fixture.scheduler.submit(job(0, prompt(96, 0), greedy(5)));
    let expected = SubmitError::TooLong {
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
        fixture.scheduler.submit(job(0, prompt(95, 0), greedy(5))),
        Ok(())
    );
    // A prompt that is only read may fill the context.
    assert_eq!(
        fixture.scheduler.submit(job(1, prompt(96, 0), greedy(0))),
        Ok(())
    );
    fixture.finish();
    assert_eq!(fixture.outputs()[&(0, 0)].tokens.len(), 1);
}

#[test]
fn full_queue_rejects_until_a_slot_frees() {
    let mut fixture = SchedulerFixture::new(
        spec(ENDLESS),
        SchedulerConfig {
            queue_limit: 2,
            ..one_at_a_time()
        },
    );
    for id in 0..2 {
        fixture.submit(job(id, prompt(5, 0), greedy(5)));
    }
    let refused = fixture.scheduler.submit(job(2, prompt(5, 0), greedy(5)));
    assert_eq!(
        refused,
        Err(SubmitError::QueueFull {
            queued: 2,
            limit: 2
        })
    );
    fixture.step().unwrap();
    fixture.submit(job(2, prompt(5, 0), greedy(5)));
    fixture.finish();
    assert_eq!(fixture.started(), [0, 1, 2]);
}

#[test]
fn out_of_range_params_are_rejected_by_name() {
    fn check(field: &str, change: impl Fn(&mut Job)) {
        let mut fixture = SchedulerFixture::new(spec(ENDLESS), config());
        let mut job = job(0, prompt(5, 0), greedy(5));
        change(&mut job);
        match fixture.scheduler.submit(job) {
            Err(SubmitError::Invalid { field: found, .. }) => assert_eq!(found, field),
            other => panic!("{field}: {other:?}"),
        }
        assert!(fixture.scheduler.is_idle());
    }
    fn sampling(change: impl Fn(&mut Sampling)) -> impl Fn(&mut Job) {
        move |job| change(&mut job.params.sampling)
    }
    check("n", |job| job.choices = 0);
    check("n", |job| job.choices = 129);
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
    check("logprobs", |job| job.params.logprobs = Some(21));
    check("prompt_logprobs", |job| {
        job.params.prompt_logprobs = Some(21)
    });
    check("prompt", |job| job.prompt = [TokenId(40)].into());
}

#[test]
fn empty_prompts_and_duplicate_ids_are_rejected() {
    let mut fixture = SchedulerFixture::new(spec(ENDLESS), one_at_a_time());
    let refused = fixture.scheduler.submit(job(0, Vec::new(), greedy(5)));
    assert_eq!(refused, Err(SubmitError::EmptyPrompt));
    fixture.submit(job(0, prompt(5, 0), greedy(5)));
    fixture.submit(job(1, prompt(5, 0), greedy(5)));
    fixture.step().unwrap();
    for id in [0, 1] {
        let refused = fixture.scheduler.submit(job(id, prompt(5, 0), greedy(5)));
        assert_eq!(refused, Err(SubmitError::Duplicate(JobId(id))));
    }
    fixture.finish();
    fixture.submit(job(0, prompt(5, 0), greedy(5)));
}

#[test]
fn jobs_start_by_priority_then_arrival() {
    let mut fixture = SchedulerFixture::new(spec(ENDLESS), one_at_a_time());
    for (id, priority) in [(0, 0), (1, 0), (2, 3), (3, 0), (4, 3)] {
        fixture.submit(Job {
            priority,
            ..job(id, prompt(5, 0), greedy(4))
        });
    }
    fixture.finish();
    assert_eq!(fixture.started(), [2, 4, 0, 1, 3]);
}

#[test]
fn large_job_is_not_starved_by_small_jobs() {
    // Capacity for one large job and its trees, or for two small ones.
    let tight = FakeSpec {
        pool_tokens: 96 + 24,
        ..spec(ENDLESS)
    };
    let mut fixture = SchedulerFixture::new(tight, config());
    fixture.submit(job(0, prompt(10, 0), greedy(20)));
    fixture.submit(job(1, prompt(50, 0), greedy(46)));
    for id in 2..6 {
        fixture.submit(job(id, prompt(10, 0), greedy(20)));
    }
    fixture.finish();
    assert_eq!(fixture.started(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(fixture.outputs().len(), 6);
}

#[test]
fn job_larger_than_device_fails_alone_with_sizes() {
    // Less than a context, which no device is opened with.
    let tight = FakeSpec {
        pool_tokens: 40,
        ..spec(ENDLESS)
    };
    let mut fixture = SchedulerFixture::new(tight, config());
    fixture.submit(job(0, prompt(30, 0), greedy(30)));
    fixture.submit(job(1, prompt(10, 0), greedy(5)));
    fixture.finish();
    let expected = JobError::OutOfMemory {
        what: "pages of keys and values",
        wanted: 1,
        free: 0,
    };
    assert_eq!(fixture.outputs()[&(0, 0)].tokens.len(), 11);
    assert_eq!(fixture.failure(0), Some(expected));
    assert_eq!(fixture.outputs()[&(1, 0)].tokens.len(), 5);
}

#[test]
fn prefill_chunks_end_at_multiples_and_alternate_with_decode_steps() {
    let mut fixture = SchedulerFixture::new(
        spec(ENDLESS),
        SchedulerConfig {
            prefill_chunk: 10,
            ..config()
        },
    );
    fixture.submit(job(0, prompt(5, 0), greedy(80)));
    fixture.step().unwrap();
    fixture.submit(job(1, prompt(61, 0), greedy(3)));
    fixture.finish();
    let record = fixture.handle.record();
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
    let stats = fixture.scheduler.stats();
    assert_eq!((stats.chunks, stats.prompt_tokens), (9, 66));
    assert_eq!(stats.largest_batch, 2);
}

#[test]
fn first_token_does_not_wait_for_another_decode_step() {
    let mut fixture = SchedulerFixture::new(spec(ENDLESS), config());
    fixture.submit(job(0, prompt(5, 0), greedy(80)));
    for _ in 0..4 {
        fixture.step().unwrap();
    }
    fixture.submit(job(1, prompt(5, 0), greedy(3)));
    for _ in 0..2 {
        let before = fixture.handle.record().count(RunnerMethod::Verify);
        fixture.step().unwrap();
        let rounds = fixture.handle.record().count(RunnerMethod::Verify) - before;
        let first = fixture
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
fn choices_share_one_prefill_and_match_separate_jobs() {
    for max_sequences in [1, 2, 8] {
        let mut fixture = SchedulerFixture::new(
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
        fixture.submit(four.clone());
        fixture.finish();
        let outputs: Vec<_> = fixture.outputs().into_values().collect();
        let expected = reference_outputs(&spec(ENDLESS), &four);
        assert_eq!(
            outputs.iter().map(|s| s.ids()).collect::<Vec<_>>(),
            expected.iter().map(|s| s.ids()).collect::<Vec<_>>()
        );
        assert_ne!(outputs[0].ids(), outputs[1].ids());
        assert_eq!(fixture.scheduler.stats().prompt_tokens, 40);
        let record = fixture.handle.record();
        assert_eq!(record.count(RunnerMethod::Snapshot), 1);
        assert_eq!(record.count(RunnerMethod::Restore), 3);
        assert_eq!(record.count(RunnerMethod::FreeSnapshot), 1);
    }
}

#[test]
fn idle_scheduler_reports_idle_without_device_calls() {
    let mut fixture = SchedulerFixture::new(spec(ENDLESS), config());
    assert!(fixture.scheduler.is_idle());
    assert_eq!(fixture.step().unwrap(), SchedulerState::Idle);
    assert_eq!(fixture.handle.record().calls, []);
    assert_eq!(fixture.events, []);
    fixture.submit(job(0, prompt(3, 0), GenerationParams::default()));
    assert!(!fixture.scheduler.is_idle());
}
