//! Fairness of prefill: short prompts do not wait for long ones, and long ones do not starve.

use conformance::fake::FakeSpec;
use contract::Limits;
use decode::{Event, SchedulerConfig, SchedulerState};

use crate::fixture::{
    ENDLESS, SchedulerFixture, config, greedy, job, prompt, reference_outputs, spec,
};

/// Room for prompts of a hundred chunks of eight tokens.
fn wide(sequences: usize) -> FakeSpec {
    FakeSpec {
        limits: Limits {
            sequences,
            context: 1000,
            prefill_chunk: 8,
            ..spec(ENDLESS).limits
        },
        pool_tokens: 8 * 1100,
        ..spec(ENDLESS)
    }
}

fn fixture(max_sequences: usize) -> SchedulerFixture {
    let config = SchedulerConfig {
        max_sequences,
        ..config()
    };
    SchedulerFixture::new(wide(max_sequences), config)
}

impl SchedulerFixture {
    /// Chunks from now to the first token of the job.
    fn chunks_to_first_token(&mut self, id: u64) -> u64 {
        let before = self.scheduler.stats().chunks;
        for _ in 0..20_000 {
            let seen = self.events.len();
            let progress = self.step().unwrap();
            let first = self.events[seen..]
                .iter()
                .any(|(job, event)| job.0 == id && matches!(event, Event::Tokens { .. }));
            if first {
                return self.scheduler.stats().chunks - before;
            }
            assert_eq!(progress, SchedulerState::Working);
        }
        panic!("job {id} has no first token");
    }
}

#[test]
fn short_prompt_is_read_within_four_chunks_whatever_else_is_read() {
    // Six long prompts in as many sequences, in fewer, and in one.
    for max_sequences in [8, 4, 2, 1] {
        // The short prompt comes at once, and when the long ones are overdue.
        for n_chunks_before in [0, 1, 37, 150, 333] {
            let mut fixture = fixture(max_sequences);
            for id in 0..6 {
                fixture.submit(job(id, prompt(800, id as u32), greedy(5)));
            }
            while fixture.scheduler.stats().chunks < n_chunks_before {
                fixture.step().unwrap();
            }
            fixture.submit(job(9, prompt(6, 7), greedy(5)));
            let chunks = fixture.chunks_to_first_token(9);
            assert!(
                chunks <= 4,
                "{max_sequences}, after {n_chunks_before}: {chunks}"
            );
            fixture.finish();
            assert_eq!(fixture.outputs().len(), 7);
        }
    }
}

#[test]
fn prompts_that_made_way_give_the_same_tokens() {
    let mut fixture = fixture(2);
    let long = [
        job(0, prompt(600, 1), greedy(5)),
        job(1, prompt(700, 2), greedy(5)),
    ];
    for long in &long {
        fixture.submit(long.clone());
    }
    for id in 2..12 {
        for _ in 0..7 {
            fixture.step().unwrap();
        }
        fixture.submit(job(id, prompt(6, id as u32), greedy(4)));
    }
    fixture.finish();
    assert!(fixture.scheduler.stats().preemptions > 0);
    let outputs = fixture.outputs();
    for (id, long) in long.iter().enumerate() {
        let expected = &reference_outputs(&wide(2), long)[0];
        assert_eq!(outputs[&(id as u64, 0)].ids(), expected.ids(), "job {id}");
    }
}

#[test]
fn long_prompt_keeps_its_share_beside_endless_short_ones() {
    let mut fixture = fixture(4);
    fixture.submit(job(0, prompt(800, 1), greedy(2)));
    fixture.step().unwrap();
    // A new short prompt as soon as one is read: three always wait.
    let mut next_id = 1;
    let mut steps = 0;
    loop {
        let stats = fixture.scheduler.stats();
        while stats.queued + stats.prefilling < 4 && next_id % 4 != 0 {
            fixture.submit(job(next_id, prompt(8, next_id as u32), greedy(1)));
            next_id += 1;
        }
        next_id += u64::from(next_id % 4 == 0);
        fixture.step().unwrap();
        steps += 1;
        let read = fixture
            .events
            .iter()
            .any(|(id, event)| id.0 == 0 && matches!(event, Event::Tokens { .. }));
        if read {
            break;
        }
        assert!(steps < 5_000, "the long prompt starves");
    }
    let chunks = fixture.scheduler.stats().chunks;
    assert!(chunks <= 4 * 100 + 8, "{chunks} chunks for a prompt of 100");
}
