//! Prefix warm-up shortens the next prefill and changes nothing else.

use std::slice;
use std::sync::Arc;

use conformance::fake::{FakeSpec, FaultKind, FaultTrigger, InjectedFault, RunnerMethod};
use contract::{Limits, TokenId};
use decode::{Job, NextPrompt, PrefixConfig, SchedulerConfig, SchedulerState};
use proptest::prelude::*;

use crate::conversations::{by_turns, long_spec, turn};
use crate::fixture::{SchedulerFixture, TestRng, config, greedy, job, reference_outputs};

const CHUNK: usize = 16;

fn warmup_config(max_entries: usize, ahead: usize) -> SchedulerConfig {
    SchedulerConfig {
        prefill_chunk: CHUNK,
        prefix: PrefixConfig {
            warmup_tokens: ahead,
            ..by_turns(max_entries)
        },
        ..config()
    }
}

fn next_prompt(tokens: Vec<TokenId>) -> NextPrompt {
    NextPrompt {
        tokens: tokens.into(),
        session: None,
    }
}

/// A prompt, its re-rendering with the reply, and the next prompt.
fn conversation() -> (Job, Vec<TokenId>, Job) {
    let wish = turn(20, 1);
    // Turns with reasoning.
    let asked = [wish.clone(), turn(60, 2), turn(50, 3), turn(2, 4)].concat();
    // The same without reasoning, the reply, and the start of the next question.
    let shown = [wish, turn(40, 5), turn(30, 6), turn(25, 7), turn(1, 8)].concat();
    let next = [shown.clone(), turn(9, 9)[1..].to_vec(), turn(2, 4)].concat();
    (job(0, asked, greedy(6)), shown, job(1, next, greedy(6)))
}

fn run_warmup(fixture: &mut SchedulerFixture) -> usize {
    let mut chunks = 0;
    while fixture.scheduler.has_warmup() {
        fixture.scheduler.warmup_step().unwrap();
        chunks += 1;
        assert!(chunks < 1000, "warm-up does not end");
    }
    chunks
}

fn cached(fixture: &SchedulerFixture, id: u64) -> usize {
    fixture.outputs()[&(id, 0)].stats.cached_tokens
}

fn check(fixture: &SchedulerFixture, spec: &FakeSpec, jobs: &[Job]) {
    let outputs = fixture.outputs();
    for job in jobs {
        let expected = &reference_outputs(spec, job)[0];
        assert_eq!(
            outputs[&(job.id.0, 0)].tokens,
            expected.tokens,
            "{}",
            job.id
        );
    }
}

#[test]
fn next_prompt_resumes_from_warmed_up_prefix() {
    let (first, shown, next) = conversation();
    for (ahead, expected) in [(0, 20), (1000, 116)] {
        let mut fixture = SchedulerFixture::new(long_spec(), warmup_config(8, ahead));
        fixture.submit(first.clone());
        fixture.finish();
        fixture.scheduler.queue_warmup(next_prompt(shown.clone()));
        assert_eq!(fixture.scheduler.has_warmup(), ahead > 0);
        let events = fixture.events.len();
        run_warmup(&mut fixture);
        assert_eq!(fixture.events.len(), events, "nobody is reported");
        fixture.submit(next.clone());
        fixture.finish();
        assert_eq!(cached(&fixture, 1), expected);
        check(&fixture, &long_spec(), &[first.clone(), next.clone()]);
        let stats = fixture.scheduler.stats();
        assert_eq!(stats.prefix.warmup_hits, u64::from(ahead > 0));
        assert_eq!(stats.prefix.warmup_tokens > 0, ahead > 0);
        assert_eq!(stats.prefix.lookups, 2, "warm-up counts no lookups");
        assert_eq!(stats.prompt_tokens as usize, {
            let whole = first.prompt.len() + next.prompt.len();
            whole - cached(&fixture, 1)
        });
    }
}

#[test]
fn warmup_skips_prompts_already_cached() {
    let (first, ..) = conversation();
    let mut fixture = SchedulerFixture::new(long_spec(), warmup_config(8, 1000));
    fixture.submit(first.clone());
    fixture.finish();
    let calls = fixture.handle.record().prefills.len();
    // The same rendering, and a reply of a few tokens.
    let shown = [first.prompt[..132].to_vec(), turn(5, 5), turn(1, 6)].concat();
    fixture.scheduler.queue_warmup(next_prompt(shown));
    assert_eq!(run_warmup(&mut fixture), 1);
    assert_eq!(fixture.handle.record().prefills.len(), calls);
}

#[test]
fn arriving_job_waits_for_at_most_one_warmup_chunk() {
    let (first, shown, next) = conversation();
    let other = job(2, turn(50, 12), greedy(3));
    for (job, kept) in [(next, 5 * CHUNK), (other, 0)] {
        let mut fixture = SchedulerFixture::new(long_spec(), warmup_config(8, 1000));
        fixture.submit(first.clone());
        fixture.finish();
        fixture.scheduler.queue_warmup(next_prompt(shown.clone()));
        for _ in 0..4 {
            fixture.scheduler.warmup_step().unwrap();
        }
        let read = fixture.handle.record().prefills.len();
        fixture.submit(job.clone());
        // Warm-up does not continue, though it is called.
        fixture.scheduler.warmup_step().unwrap();
        assert_eq!(fixture.handle.record().prefills.len(), read);
        fixture.finish();
        assert_eq!(cached(&fixture, job.id.0), kept);
        check(&fixture, &long_spec(), &[first.clone(), job.clone()]);
        // The rest waits for the next idle time, unless its prompt arrived.
        assert_eq!(fixture.scheduler.has_warmup(), kept == 0);
        let before = fixture.scheduler.stats().prefix.warmup_tokens;
        run_warmup(&mut fixture);
        let after = fixture.scheduler.stats().prefix.warmup_tokens;
        assert_eq!(after > before, kept == 0);
        assert!(after <= 96, "tokens were read twice: {after}");
        fixture.finish();
    }
}

#[test]
fn warmup_stays_within_token_budget() {
    let (first, shown, next) = conversation();
    for budget in [4, 24, 40] {
        let mut fixture = SchedulerFixture::new(long_spec(), warmup_config(8, budget));
        fixture.submit(first.clone());
        fixture.finish();
        fixture.scheduler.queue_warmup(next_prompt(shown.clone()));
        run_warmup(&mut fixture);
        let read = fixture.scheduler.stats().prefix.warmup_tokens as usize;
        assert!(read <= budget && (read > 0) == (budget >= 8), "{read}");
        fixture.submit(next.clone());
        fixture.finish();
        assert_eq!(cached(&fixture, 1), 20 + read);
        check(&fixture, &long_spec(), slice::from_ref(&next));
    }
}

#[test]
fn warmup_entries_are_evicted_first_and_take_no_used_pages() {
    let (first, shown, _) = conversation();
    // Capacity for the prompt's own entries only.
    let saved = {
        let mut fixture = SchedulerFixture::new(long_spec(), warmup_config(8, 0));
        fixture.submit(first.clone());
        fixture.finish();
        fixture.scheduler.stats().prefix.entries
    };
    let mut fixture = SchedulerFixture::new(long_spec(), warmup_config(saved, 1000));
    fixture.submit(first.clone());
    fixture.finish();
    fixture.scheduler.queue_warmup(next_prompt(shown.clone()));
    run_warmup(&mut fixture);
    let again = Job {
        id: decode::JobId(7),
        ..first.clone()
    };
    fixture.submit(again);
    fixture.finish();
    assert_eq!(
        cached(&fixture, 7),
        132,
        "the prompt's own entries are cached"
    );
    // A device without a free page: warm-up does not start.
    let full = FakeSpec {
        pool_tokens: 160 + 24,
        limits: Limits {
            context: 160,
            ..long_spec().limits
        },
        ..long_spec()
    };
    let mut fixture = SchedulerFixture::new(full, warmup_config(8, 1000));
    fixture.submit(first);
    fixture.finish();
    let calls = fixture.handle.record().prefills.len();
    if fixture.scheduler.stats().evictable_tokens > 0 {
        fixture.scheduler.queue_warmup(next_prompt(shown));
        run_warmup(&mut fixture);
        assert_eq!(fixture.handle.record().prefills.len(), calls);
    }
}

#[test]
fn failed_warmup_does_not_change_next_prompt() {
    let (first, shown, next) = conversation();
    for call in [
        RunnerMethod::Open,
        RunnerMethod::Prefill,
        RunnerMethod::Restore,
        RunnerMethod::Snapshot,
    ] {
        let mut fixture = SchedulerFixture::new(long_spec(), warmup_config(8, 1000));
        fixture.submit(first.clone());
        fixture.finish();
        fixture.handle.fail(InjectedFault {
            call,
            when: FaultTrigger::From(0),
            kind: FaultKind::OutOfMemory,
        });
        fixture.scheduler.queue_warmup(next_prompt(shown.clone()));
        run_warmup(&mut fixture);
        fixture.handle.heal();
        fixture.submit(next.clone());
        fixture.finish();
        check(&fixture, &long_spec(), slice::from_ref(&next));
    }
}

#[test]
fn arriving_prompt_drops_superseded_warmup() {
    let (first, shown, next) = conversation();
    let named = |job: Job, name: &str| {
        let mut job = job;
        job.params.session = Some(name.into());
        job
    };
    // The same start, but the reasoning before the reply or the reply itself differs.
    let mut differs = next.prompt.to_vec();
    differs[85] = TokenId(30);
    let mut echoed = next.prompt.to_vec();
    echoed[100] = TokenId(30);
    let side = turn(30, 20);
    for (job, forgotten) in [
        (next, true),
        (named(job(3, differs.clone(), greedy(2)), "a"), true),
        (named(job(4, differs, greedy(2)), "b"), false),
        (job(6, echoed, greedy(2)), true),
        (named(job(5, side, greedy(2)), "a"), false),
    ] {
        let mut fixture = SchedulerFixture::new(long_spec(), warmup_config(8, 1000));
        fixture.submit(first.clone());
        fixture.finish();
        let text = NextPrompt {
            tokens: shown.clone().into(),
            session: Some(Arc::from("a")),
        };
        fixture.scheduler.queue_warmup(text);
        fixture.submit(job.clone());
        fixture.finish();
        assert_eq!(fixture.scheduler.has_warmup(), !forgotten, "{}", job.id);
    }
}

#[test]
fn warmup_queue_keeps_one_prompt_per_conversation_and_four_in_all() {
    let mut fixture = SchedulerFixture::new(long_spec(), warmup_config(16, 1000));
    let text = |salt: usize, reply: usize| {
        let turns = [turn(20, 1), turn(9, salt), turn(12, reply), turn(1, 8)];
        next_prompt(turns.concat())
    };
    // The same reply rendered otherwise replaces the earlier one.
    for reply in [11, 12, 13] {
        fixture.scheduler.queue_warmup(text(2, reply));
    }
    run_warmup(&mut fixture);
    let opened = fixture.handle.record().count(RunnerMethod::Open);
    assert_eq!(opened, 1);
    // Six conversations: the oldest two are dropped.
    for salt in 20..26 {
        fixture.scheduler.queue_warmup(text(salt, 11));
    }
    run_warmup(&mut fixture);
    assert_eq!(
        fixture.handle.record().count(RunnerMethod::Open) - opened,
        4
    );
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Conversations that continue as expected or not, with idle times of any length, match
    /// isolated runs.
    #[test]
    fn warmup_never_changes_tokens(
        seed in any::<u64>(),
        max_entries in 1_usize..10,
        budget in 0_usize..200,
    ) {
        let mut fixture = SchedulerFixture::new(long_spec(), warmup_config(max_entries, budget));
        let mut rng = TestRng(seed);
        let mut conversations = [turn(20, 1), turn(20, 1), turn(30, 2)];
        let mut jobs = Vec::new();
        for id in 0..9 {
            let who = rng.below(conversations.len());
            let conversation = &mut conversations[who];
            let thoughts = turn(10 + rng.below(30), rng.below(50));
            let asked = [&conversation[..], &thoughts, &turn(1, 3)].concat();
            jobs.push(job(id, asked, greedy(3)));
            fixture.submit(jobs[id as usize].clone());
            if rng.below(3) > 0 {
                fixture.finish();
            }
            conversation.extend(turn(10 + rng.below(20), rng.below(50)));
            fixture.scheduler.queue_warmup(next_prompt([&conversation[..], &turn(1, 8)].concat()));
            for _ in 0..rng.below(8) {
                fixture.scheduler.warmup_step().unwrap();
            }
            if rng.below(4) == 0 {
                conversation.truncate(conversation.len() - 5);
            }
        }
        while fixture.step().unwrap() == SchedulerState::Working {}
        run_warmup(&mut fixture);
        fixture.finish();
        check(&fixture, &long_spec(), &jobs);
        prop_assert_eq!(fixture.scheduler.stats().leaks, 0);
    }
}
