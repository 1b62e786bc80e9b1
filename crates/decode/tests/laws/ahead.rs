//! What is read in pauses: it makes prompts shorter to read, and nothing else of it can be noticed.

use std::slice;
use std::sync::Arc;

use conformance::fake::{FakeSpec, FaultKind, FaultTrigger, InjectedFault, RunnerMethod};
use contract::{Limits, TokenId};
use decode::{Foreseen, Job, PrefixConfig, Progress, SchedulerConfig};
use proptest::prelude::*;

use crate::turns::{by_turns, long_spec, turn};
use crate::world::{Dice, World, alone, config, greedy, job};

const CHUNK: usize = 16;

fn reading(slots: usize, ahead: usize) -> SchedulerConfig {
    SchedulerConfig {
        prefill_chunk: CHUNK,
        prefix: PrefixConfig {
            ahead,
            ..by_turns(slots)
        },
        ..config()
    }
}

fn foreseen(tokens: Vec<TokenId>) -> Foreseen {
    Foreseen {
        tokens: tokens.into(),
        session: None,
    }
}

/// A prompt, what the template makes of it once its reply stands there, and the prompt that comes then.
fn talk() -> (Job, Vec<TokenId>, Job) {
    let wish = turn(20, 1);
    // Turns with thoughts in them.
    let asked = [wish.clone(), turn(60, 2), turn(50, 3), turn(2, 4)].concat();
    // The same without, the reply, and the beginning of the next wish.
    let shown = [wish, turn(40, 5), turn(30, 6), turn(25, 7), turn(1, 8)].concat();
    let next = [shown.clone(), turn(9, 9)[1..].to_vec(), turn(2, 4)].concat();
    (job(0, asked, greedy(6)), shown, job(1, next, greedy(6)))
}

fn pause(world: &mut World) -> usize {
    let mut chunks = 0;
    while world.scheduler.has_ahead() {
        world.scheduler.read_ahead().unwrap();
        chunks += 1;
        assert!(chunks < 1000, "no end");
    }
    chunks
}

fn cached(world: &World, id: u64) -> usize {
    world.said()[&(id, 0)].stats.cached_tokens
}

fn check(world: &World, spec: &FakeSpec, jobs: &[Job]) {
    let said = world.said();
    for job in jobs {
        let expected = &alone(spec, job)[0];
        assert_eq!(said[&(job.id.0, 0)].tokens, expected.tokens, "{}", job.id);
    }
}

#[test]
fn the_next_prompt_goes_on_from_what_was_read_in_the_pause() {
    let (first, shown, next) = talk();
    for (ahead, expected) in [(0, 20), (1000, 116)] {
        let mut world = World::new(long_spec(), reading(8, ahead));
        world.submit(first.clone());
        world.finish();
        world.scheduler.foresee(foreseen(shown.clone()));
        assert_eq!(world.scheduler.has_ahead(), ahead > 0);
        let events = world.events.len();
        pause(&mut world);
        assert_eq!(world.events.len(), events, "nobody is told");
        world.submit(next.clone());
        world.finish();
        assert_eq!(cached(&world, 1), expected);
        check(&world, &long_spec(), &[first.clone(), next.clone()]);
        let stats = world.scheduler.stats();
        assert_eq!(stats.prefix.ahead_hits, u64::from(ahead > 0));
        assert_eq!(stats.prefix.ahead_tokens > 0, ahead > 0);
        assert_eq!(stats.prefix.lookups, 2, "reading ahead looks nothing up");
        assert_eq!(stats.prompt_tokens as usize, {
            let whole = first.prompt.len() + next.prompt.len();
            whole - cached(&world, 1)
        });
    }
}

#[test]
fn nothing_is_read_where_the_forms_are_equal() {
    let (first, ..) = talk();
    let mut world = World::new(long_spec(), reading(8, 1000));
    world.submit(first.clone());
    world.finish();
    let calls = world.handle.record().prefills.len();
    // As it was asked, and a reply of a few tokens.
    let shown = [first.prompt[..132].to_vec(), turn(5, 5), turn(1, 6)].concat();
    world.scheduler.foresee(foreseen(shown));
    assert_eq!(pause(&mut world), 1);
    assert_eq!(world.handle.record().prefills.len(), calls);
}

#[test]
fn a_job_that_comes_in_the_middle_waits_for_one_chunk_and_keeps_what_was_read() {
    let (first, shown, next) = talk();
    let other = job(2, turn(50, 12), greedy(3));
    for (job, kept) in [(next, 5 * CHUNK), (other, 0)] {
        let mut world = World::new(long_spec(), reading(8, 1000));
        world.submit(first.clone());
        world.finish();
        world.scheduler.foresee(foreseen(shown.clone()));
        for _ in 0..4 {
            world.scheduler.read_ahead().unwrap();
        }
        let read = world.handle.record().prefills.len();
        world.submit(job.clone());
        // No more of it is read, though it is asked for.
        world.scheduler.read_ahead().unwrap();
        assert_eq!(world.handle.record().prefills.len(), read);
        world.finish();
        assert_eq!(cached(&world, job.id.0), kept);
        check(&world, &long_spec(), &[first.clone(), job.clone()]);
        // The rest waits for another pause, unless its prompt has come.
        assert_eq!(world.scheduler.has_ahead(), kept == 0);
        let before = world.scheduler.stats().prefix.ahead_tokens;
        pause(&mut world);
        let after = world.scheduler.stats().prefix.ahead_tokens;
        assert_eq!(after > before, kept == 0);
        assert!(after <= 96, "what was read is not read again: {after}");
        world.finish();
    }
}

#[test]
fn no_more_is_read_than_the_budget() {
    let (first, shown, next) = talk();
    for budget in [4, 24, 40] {
        let mut world = World::new(long_spec(), reading(8, budget));
        world.submit(first.clone());
        world.finish();
        world.scheduler.foresee(foreseen(shown.clone()));
        pause(&mut world);
        let read = world.scheduler.stats().prefix.ahead_tokens as usize;
        assert!(read <= budget && (read > 0) == (budget >= 8), "{read}");
        world.submit(next.clone());
        world.finish();
        assert_eq!(cached(&world, 1), 20 + read);
        check(&world, &long_spec(), slice::from_ref(&next));
    }
}

#[test]
fn guesses_go_before_what_prompts_have_led_to_and_take_no_pages_from_it() {
    let (first, shown, _) = talk();
    // Room for the states of the prompt and no more.
    let saved = {
        let mut world = World::new(long_spec(), reading(8, 0));
        world.submit(first.clone());
        world.finish();
        world.scheduler.stats().prefix.entries
    };
    let mut world = World::new(long_spec(), reading(saved, 1000));
    world.submit(first.clone());
    world.finish();
    world.scheduler.foresee(foreseen(shown.clone()));
    pause(&mut world);
    let again = Job {
        id: decode::JobId(7),
        ..first.clone()
    };
    world.submit(again);
    world.finish();
    assert_eq!(cached(&world, 7), 132, "the prompt's own states are there");
    // A device without a free page: nothing is tried.
    let full = FakeSpec {
        pool_tokens: 160 + 24,
        limits: Limits {
            context: 160,
            ..long_spec().limits
        },
        ..long_spec()
    };
    let mut world = World::new(full, reading(8, 1000));
    world.submit(first);
    world.finish();
    let calls = world.handle.record().prefills.len();
    if world.scheduler.stats().kept_tokens > 0 {
        world.scheduler.foresee(foreseen(shown));
        pause(&mut world);
        assert_eq!(world.handle.record().prefills.len(), calls);
    }
}

#[test]
fn a_device_that_refuses_leaves_the_next_prompt_as_it_was() {
    let (first, shown, next) = talk();
    for call in [
        RunnerMethod::Open,
        RunnerMethod::Prefill,
        RunnerMethod::Restore,
        RunnerMethod::Snapshot,
    ] {
        let mut world = World::new(long_spec(), reading(8, 1000));
        world.submit(first.clone());
        world.finish();
        world.handle.fail(InjectedFault {
            call,
            when: FaultTrigger::From(0),
            kind: FaultKind::OutOfMemory,
        });
        world.scheduler.foresee(foreseen(shown.clone()));
        pause(&mut world);
        world.handle.heal();
        world.submit(next.clone());
        world.finish();
        check(&world, &long_spec(), slice::from_ref(&next));
    }
}

#[test]
fn what_was_foreseen_of_a_conversation_is_forgotten_when_it_goes_on() {
    let (first, shown, next) = talk();
    let named = |job: Job, name: &str| {
        let mut job = job;
        job.settings.session = Some(name.into());
        job
    };
    // The same beginning, but other words than were thought in the turn before the reply, or in the reply.
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
        let mut world = World::new(long_spec(), reading(8, 1000));
        world.submit(first.clone());
        world.finish();
        let text = Foreseen {
            tokens: shown.clone().into(),
            session: Some(Arc::from("a")),
        };
        world.scheduler.foresee(text);
        world.submit(job.clone());
        world.finish();
        assert_eq!(world.scheduler.has_ahead(), !forgotten, "{}", job.id);
    }
}

#[test]
fn a_conversation_has_one_text_at_most_and_four_wait() {
    let mut world = World::new(long_spec(), reading(16, 1000));
    let text = |salt: usize, reply: usize| {
        let turns = [turn(20, 1), turn(9, salt), turn(12, reply), turn(1, 8)];
        foreseen(turns.concat())
    };
    // The same reply written otherwise takes the place of the one before.
    for reply in [11, 12, 13] {
        world.scheduler.foresee(text(2, reply));
    }
    pause(&mut world);
    let opened = world.handle.record().count(RunnerMethod::Open);
    assert_eq!(opened, 1);
    // Six conversations: the oldest two are not read.
    for salt in 20..26 {
        world.scheduler.foresee(text(salt, 11));
    }
    pause(&mut world);
    assert_eq!(world.handle.record().count(RunnerMethod::Open) - opened, 4);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Conversations that go on as foreseen or not, with pauses of any length in between, say what they say alone.
    #[test]
    fn whatever_is_read_in_pauses_nobody_says_anything_else(
        seed in any::<u64>(),
        slots in 1_usize..10,
        budget in 0_usize..200,
    ) {
        let mut world = World::new(long_spec(), reading(slots, budget));
        let mut dice = Dice(seed);
        let mut talks = [turn(20, 1), turn(20, 1), turn(30, 2)];
        let mut jobs = Vec::new();
        for id in 0..9 {
            let who = dice.below(talks.len());
            let talk = &mut talks[who];
            let thoughts = turn(10 + dice.below(30), dice.below(50));
            let asked = [&talk[..], &thoughts, &turn(1, 3)].concat();
            jobs.push(job(id, asked, greedy(3)));
            world.submit(jobs[id as usize].clone());
            if dice.below(3) > 0 {
                world.finish();
            }
            talk.extend(turn(10 + dice.below(20), dice.below(50)));
            world.scheduler.foresee(foreseen([&talk[..], &turn(1, 8)].concat()));
            for _ in 0..dice.below(8) {
                world.scheduler.read_ahead().unwrap();
            }
            if dice.below(4) == 0 {
                talk.truncate(talk.len() - 5);
            }
        }
        while world.step().unwrap() == Progress::Working {}
        pause(&mut world);
        world.finish();
        check(&world, &long_spec(), &jobs);
        prop_assert_eq!(world.scheduler.stats().leaks, 0);
    }
}
