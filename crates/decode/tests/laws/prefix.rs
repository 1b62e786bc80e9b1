//! Saved states: a prompt that begins like an earlier one says what it would have said without them, whatever
//! is saved, given up, lost or brought back from elsewhere.

use std::sync::{Arc, Mutex};

use conformance::fake::{FakeSpec, FaultKind, FaultTrigger, InjectedFault, Language, RunnerMethod};
use contract::{DetachedSnapshot, TokenId};
use decode::prefix::Found;
use decode::{Event, Job, PrefixConfig, Scheduler, SchedulerConfig, Settings, Store};
use proptest::prelude::*;

use crate::turns::{by_turns, long_spec, turn};
use crate::world::{Dice, ENDLESS, World, alone, config, greedy, job, sampled};

fn caching(slots: usize, bytes: u64) -> SchedulerConfig {
    SchedulerConfig {
        prefix: PrefixConfig {
            bytes,
            ..by_turns(slots)
        },
        ..config()
    }
}

fn cached(world: &World, id: u64) -> usize {
    let mut events = world.events.iter();
    let started = events.find_map(|(job, event)| match event {
        Event::Started { cached } if job.0 == id => Some(*cached),
        _ => None,
    });
    started.expect("the job has started")
}

fn check(world: &World, spec: &FakeSpec, jobs: &[Job]) {
    let said = world.said();
    for job in jobs {
        for (choice, expected) in alone(spec, job).iter().enumerate() {
            let found = &said[&(job.id.0, choice)];
            assert_eq!(found.tokens, expected.tokens, "{} choice {choice}", job.id);
            assert_eq!(found.reason, expected.reason);
            assert_eq!(found.stats.cached_tokens, cached(world, job.id.0));
        }
    }
}

#[test]
fn a_conversation_goes_on_where_its_last_turn_began() {
    let mut world = World::new(long_spec(), caching(8, u64::MAX));
    let head = [turn(20, 1), turn(30, 2), turn(2, 3)].concat();
    let first = job(0, head.clone(), greedy(6));
    world.submit(first.clone());
    world.finish();
    // The template shows the reply otherwise than it was said: what came before it still holds.
    let second = job(
        1,
        [&head[..52], &turn(40, 4), &turn(9, 5)].concat(),
        greedy(6),
    );
    world.submit(second.clone());
    world.finish();
    assert_eq!((cached(&world, 0), cached(&world, 1)), (0, 52));
    // Another conversation with the same head.
    let third = job(2, [turn(20, 1), turn(30, 9)].concat(), greedy(6));
    world.submit(third.clone());
    world.finish();
    assert_eq!(cached(&world, 2), 20);
    // Exactly the same prompt again: only what must be read for a row.
    let again = Job {
        id: decode::JobId(3),
        ..second.clone()
    };
    world.submit(again.clone());
    world.finish();
    let len = again.prompt.len();
    assert!(cached(&world, 3) > len - 24 && cached(&world, 3) < len);
    check(&world, &long_spec(), &[first, second, third, again]);
    let reads = world.handle.record().prefills;
    let last: usize = reads
        .iter()
        .rev()
        .take_while(|(_, at, _)| *at >= cached(&world, 3))
        .map(|r| r.2)
        .sum();
    assert_eq!(last, len - cached(&world, 3));
    let stats = world.scheduler.stats().prefix;
    assert_eq!((stats.lookups, stats.hits, stats.failed), (4, 3, 0));
    assert_eq!(stats.cached_tokens, (52 + 20 + cached(&world, 3)) as u64);
}

#[test]
fn a_prompt_whose_logprobs_are_told_is_read_whole() {
    let mut world = World::new(long_spec(), caching(8, u64::MAX));
    let text = [turn(20, 1), turn(30, 2)].concat();
    world.submit(job(0, text.clone(), greedy(3)));
    world.finish();
    let told = Settings {
        prompt_logprobs: Some(1),
        ..greedy(3)
    };
    world.submit(job(1, text.clone(), told));
    world.finish();
    assert_eq!(cached(&world, 1), 0);
    assert_eq!(
        world.prompt_logprobs(1).map(|told| told.len()),
        Some(text.len())
    );
}

#[test]
fn without_slots_nothing_is_saved() {
    let mut world = World::new(long_spec(), caching(0, u64::MAX));
    for id in 0..2 {
        world.submit(job(id, [turn(20, 1), turn(30, 2)].concat(), greedy(3)));
        world.finish();
    }
    assert_eq!(world.handle.record().count(RunnerMethod::Snapshot), 0);
    assert_eq!(cached(&world, 1), 0);
}

/// Conversations that grow, are edited, branch and are asked aside, in any order.
struct Talks {
    dice: Dice,
    talks: Vec<Vec<Vec<TokenId>>>,
    next: u64,
}

impl Talks {
    fn new(seed: u64) -> Talks {
        let talk = |i: usize| vec![turn(12, i % 2)];
        Talks {
            dice: Dice(seed),
            talks: (0..4).map(talk).collect(),
            next: 0,
        }
    }

    fn job(&mut self) -> Job {
        let who = self.dice.below(self.talks.len());
        let talk = &mut self.talks[who];
        match self.dice.below(8) {
            0 if talk.len() > 2 => {
                let at = 1 + self.dice.below(talk.len() - 1);
                talk.truncate(at);
            }
            1 => {
                let copy = talk.clone();
                let other = self.dice.below(4);
                self.talks[other] = copy;
            }
            _ => {}
        }
        let talk = &mut self.talks[who];
        if talk.iter().map(Vec::len).sum::<usize>() > 300 {
            talk.truncate(2);
        }
        let (len, salt) = (1 + self.dice.below(40), self.dice.below(5));
        talk.push(turn(len, salt));
        let prompt = [talk.concat(), turn(2, 7)].concat();
        self.next += 1;
        let settings = Settings {
            session: Some(format!("{who}").into()),
            ..sampled(1 + self.dice.below(8), self.next)
        };
        Job {
            choices: 1 + self.dice.below(2),
            ..job(self.next, prompt, settings)
        }
    }
}

/// Plays `n` jobs, a few at a time, with `before` called before each.
fn play(world: &mut World, seed: u64, n: usize, limit: (usize, u64)) -> Vec<Job> {
    let mut talks = Talks::new(seed);
    let mut jobs = Vec::new();
    for _ in 0..n {
        let job = talks.job();
        world.submit(job.clone());
        jobs.push(job);
        for _ in 0..talks.dice.below(30) {
            world.step().expect("no device is lost here");
            let held = world.scheduler.stats().prefix;
            // A job of two choices keeps a state of its own for as long as one waits.
            assert!(held.entries <= limit.0, "{held:?}");
        }
    }
    world.finish();
    assert!(world.scheduler.stats().prefix.bytes <= limit.1);
    jobs
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn interleaved_conversations_say_what_they_say_alone(
        seed in any::<u64>(),
        slots in 1_usize..10,
        bytes in prop_oneof![Just(u64::MAX), 200_u64..4000],
    ) {
        let mut world = World::new(long_spec(), caching(slots, bytes));
        let jobs = play(&mut world, seed, 14, (slots, bytes));
        check(&world, &long_spec(), &jobs);
    }

    #[test]
    fn a_device_that_refuses_states_costs_time_and_nothing_else(
        seed in any::<u64>(),
        nth in proptest::collection::vec(0_u64..20, 1..6),
    ) {
        let mut world = World::new(long_spec(), caching(4, 3000));
        for nth in nth {
            for call in [RunnerMethod::Snapshot, RunnerMethod::Restore] {
                world.handle.fail(InjectedFault { call, when: FaultTrigger::Nth(nth), kind: FaultKind::OutOfMemory });
            }
        }
        let mut talks = Talks::new(seed);
        // One choice each: several begin from a state that the job cannot do without.
        let jobs: Vec<Job> = (0..10).map(|_| Job { choices: 1, ..talks.job() }).collect();
        for job in &jobs {
            world.submit(job.clone());
            world.finish();
        }
        check(&world, &long_spec(), &jobs);
    }
}

#[test]
fn conversations_in_turn_are_mostly_read_from_states() {
    let mut world = World::new(long_spec(), caching(12, u64::MAX));
    let jobs = play(&mut world, 5, 40, (12, u64::MAX));
    let all: usize = jobs.iter().map(|job| job.prompt.len()).sum();
    let cached = world.scheduler.stats().prefix.cached_tokens as usize;
    assert!(cached * 2 > all, "{cached} of {all}");
}

#[test]
fn saved_states_go_before_a_job_fails_for_want_of_room() {
    let mut world = World::new(long_spec(), caching(8, u64::MAX));
    world.submit(job(0, [turn(20, 1), turn(30, 2)].concat(), greedy(3)));
    world.finish();
    assert!(world.scheduler.stats().prefix.entries > 0);
    world.handle.fail(InjectedFault {
        call: RunnerMethod::Open,
        when: FaultTrigger::Nth(1),
        kind: FaultKind::OutOfMemory,
    });
    let next = job(1, turn(40, 8), greedy(3));
    world.submit(next.clone());
    world.finish();
    check(&world, &long_spec(), &[next]);
}

/// Tokens and bytes of everything stored.
type Shelf = Arc<Mutex<Vec<(Vec<TokenId>, Vec<u8>)>>>;

/// A store of these, and what it was told when the process ended.
#[derive(Default, Clone)]
struct ShelfStore(Shelf, Arc<Mutex<Vec<Vec<TokenId>>>>);

impl Store for ShelfStore {
    fn find(&mut self, prompt: &[TokenId], more_than: usize, at_most: usize) -> Option<Found> {
        let shelf = self.0.lock().unwrap();
        let fits = |n: usize| n > more_than && n <= at_most;
        let kept = shelf
            .iter()
            .filter(|(tokens, _)| fits(tokens.len()) && prompt.starts_with(tokens));
        let (tokens, bytes) = kept.max_by_key(|(tokens, _)| tokens.len())?;
        Some(Found {
            position: tokens.len(),
            source: Box::new(bytes.clone()),
        })
    }

    fn covered(&mut self, tokens: &[TokenId]) -> usize {
        let shelf = self.0.lock().unwrap();
        let kept = shelf.iter().filter(|(kept, _)| tokens.starts_with(kept));
        kept.map(|(kept, _)| kept.len()).max().unwrap_or(0)
    }

    fn put(&mut self, tokens: &[TokenId], mut parcel: Box<dyn DetachedSnapshot>) {
        let mut bytes = Vec::new();
        parcel.write(&mut bytes).unwrap();
        assert_eq!(bytes.len() as u64, parcel.bytes());
        self.0.lock().unwrap().push((tokens.to_vec(), bytes));
    }

    fn closing(&mut self, by_use: &[Vec<TokenId>]) {
        *self.1.lock().unwrap() = by_use.to_vec();
    }

    fn forget(&mut self, tokens: &[TokenId]) {
        self.0.lock().unwrap().retain(|(kept, _)| kept != tokens);
    }
}

fn stored_world(spec: FakeSpec, shelf: &Shelf) -> World {
    world_over(spec, ShelfStore(shelf.clone(), Arc::default()))
}

fn world_over(spec: FakeSpec, store: ShelfStore) -> World {
    let mut world = World::new(spec.clone(), config());
    let runner = conformance::fake::FakeRunner::new(spec);
    world.handle = runner.handle();
    world.scheduler =
        Scheduler::new(Box::new(runner), caching(8, u64::MAX)).keep_in(Box::new(store));
    world
}

#[test]
fn at_the_end_the_store_is_told_who_was_used_last_and_given_what_it_lacks() {
    for stored in 0..=3 {
        let store = ShelfStore::default();
        let mut world = world_over(long_spec(), store.clone());
        let heads: Vec<_> = (0..3).map(|i| turn(40, 10 + i)).collect();
        for (i, head) in heads.iter().enumerate() {
            world.submit(job(i as u64, head.clone(), greedy(3)));
            world.finish();
            while i < stored && world.scheduler.has_upkeep() {
                world.scheduler.upkeep().unwrap();
            }
        }
        // The first of them again.
        world.submit(job(3, heads[0].clone(), greedy(3)));
        world.finish();
        world.scheduler.flush().unwrap();
        let whose = |tokens: &[TokenId]| heads.iter().position(|h| h[..8] == tokens[..8]).unwrap();
        let told = store.1.lock().unwrap();
        let told: Vec<usize> = told.iter().map(|tokens| whose(tokens)).collect();
        assert_eq!(told, [0, 2, 1], "{stored} stored before");
        let kept = store.0.lock().unwrap();
        let kept: Vec<usize> = kept.iter().map(|(tokens, _)| whose(tokens)).collect();
        let expected = [[0, 2, 1], [0, 2, 1], [0, 1, 2], [0, 1, 2]][stored];
        assert_eq!(kept, expected, "{stored} stored before");
    }
}

/// A conversation of two turns, the second in a new process whose store `change` has been at.
fn after_a_restart(
    change: impl FnOnce(&mut Vec<(Vec<TokenId>, Vec<u8>)>),
    later: FakeSpec,
) -> (usize, usize) {
    let shelf = Shelf::default();
    let mut world = stored_world(long_spec(), &shelf);
    let head = [turn(20, 1), turn(60, 2), turn(2, 3)].concat();
    world.submit(job(0, head.clone(), greedy(3)));
    world.finish();
    while world.scheduler.has_upkeep() {
        world.scheduler.upkeep().unwrap();
    }
    world.scheduler.flush().unwrap();
    assert!(!shelf.lock().unwrap().is_empty());
    change(&mut shelf.lock().unwrap());
    let mut world = stored_world(later.clone(), &shelf);
    let second = job(1, [&head[..81], &turn(10, 4)].concat(), greedy(3));
    world.submit(second.clone());
    world.finish();
    check(&world, &later, &[second]);
    let kept = shelf.lock().unwrap().len();
    (cached(&world, 1), kept)
}

#[test]
fn a_stored_state_survives_the_process() {
    assert_eq!(after_a_restart(|_| (), long_spec()).0, 80);
}

#[test]
fn stored_states_that_are_damaged_or_of_another_model_are_misses_and_forgotten() {
    let flip = |shelf: &mut Vec<(Vec<TokenId>, Vec<u8>)>| {
        for (_, bytes) in shelf {
            let at = bytes.len() - 3;
            bytes[at] ^= 1;
        }
    };
    assert_eq!(after_a_restart(flip, long_spec()), (0, 0));
    let cut = |shelf: &mut Vec<(Vec<TokenId>, Vec<u8>)>| {
        shelf
            .iter_mut()
            .for_each(|(_, bytes)| bytes.truncate(bytes.len() / 2));
    };
    assert_eq!(after_a_restart(cut, long_spec()), (0, 0));
    let other = FakeSpec {
        language: Language {
            salt: 77,
            ..ENDLESS
        },
        ..long_spec()
    };
    assert_eq!(after_a_restart(|_| (), other), (0, 0));
    // Bytes of other tokens than it says.
    let swapped = |shelf: &mut Vec<(Vec<TokenId>, Vec<u8>)>| {
        shelf
            .iter_mut()
            .for_each(|(tokens, _)| tokens.truncate(tokens.len() - 4));
    };
    assert_eq!(after_a_restart(swapped, long_spec()), (0, 0));
}
