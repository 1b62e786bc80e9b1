//! The prefix cache never changes output, whatever is saved, evicted, lost or imported.

use std::sync::{Arc, Mutex};

use conformance::fake::{FakeSpec, FaultKind, FaultTrigger, InjectedFault, Language, RunnerMethod};
use contract::{DetachedSnapshot, TokenId};
use decode::prefix::StoreHit;
use decode::{Event, GenerationParams, Job, PrefixConfig, Scheduler, SchedulerConfig, Store};
use proptest::prelude::*;

use crate::conversations::{by_turns, long_spec, turn};
use crate::fixture::{
    ENDLESS, SchedulerFixture, TestRng, config, greedy, job, reference_outputs, sampled,
};

fn caching(max_entries: usize, bytes: u64) -> SchedulerConfig {
    SchedulerConfig {
        prefix: PrefixConfig {
            bytes,
            ..by_turns(max_entries)
        },
        ..config()
    }
}

fn cached(fixture: &SchedulerFixture, id: u64) -> usize {
    let mut events = fixture.events.iter();
    let started = events.find_map(|(job, event)| match event {
        Event::Started { cached } if job.0 == id => Some(*cached),
        _ => None,
    });
    started.expect("the job has started")
}

fn check(fixture: &SchedulerFixture, spec: &FakeSpec, jobs: &[Job]) {
    let outputs = fixture.outputs();
    for job in jobs {
        for (choice, expected) in reference_outputs(spec, job).iter().enumerate() {
            let found = &outputs[&(job.id.0, choice)];
            assert_eq!(found.tokens, expected.tokens, "{} choice {choice}", job.id);
            assert_eq!(found.reason, expected.reason);
            assert_eq!(found.stats.cached_tokens, cached(fixture, job.id.0));
        }
    }
}

#[test]
fn prefix_cache_resumes_conversation_at_last_turn_start() {
    let mut fixture = SchedulerFixture::new(long_spec(), caching(8, u64::MAX));
    let head = [turn(20, 1), turn(30, 2), turn(2, 3)].concat();
    let first = job(0, head.clone(), greedy(6));
    fixture.submit(first.clone());
    fixture.finish();
    // The template re-renders the reply; what precedes it still matches.
    let second = job(
        1,
        [&head[..52], &turn(40, 4), &turn(9, 5)].concat(),
        greedy(6),
    );
    fixture.submit(second.clone());
    fixture.finish();
    assert_eq!((cached(&fixture, 0), cached(&fixture, 1)), (0, 52));
    // Another conversation with the same system prefix.
    let third = job(2, [turn(20, 1), turn(30, 9)].concat(), greedy(6));
    fixture.submit(third.clone());
    fixture.finish();
    assert_eq!(cached(&fixture, 2), 20);
    // The same prompt again: only what must be read for logits.
    let again = Job {
        id: decode::JobId(3),
        ..second.clone()
    };
    fixture.submit(again.clone());
    fixture.finish();
    let len = again.prompt.len();
    assert!(cached(&fixture, 3) > len - 24 && cached(&fixture, 3) < len);
    check(&fixture, &long_spec(), &[first, second, third, again]);
    let reads = fixture.handle.record().prefills;
    let last: usize = reads
        .iter()
        .rev()
        .take_while(|(_, at, _)| *at >= cached(&fixture, 3))
        .map(|r| r.2)
        .sum();
    assert_eq!(last, len - cached(&fixture, 3));
    let stats = fixture.scheduler.stats().prefix;
    assert_eq!((stats.lookups, stats.hits, stats.failed), (4, 3, 0));
    assert_eq!(stats.cached_tokens, (52 + 20 + cached(&fixture, 3)) as u64);
}

#[test]
fn prompt_logprobs_disable_prefix_reuse() {
    let mut fixture = SchedulerFixture::new(long_spec(), caching(8, u64::MAX));
    let text = [turn(20, 1), turn(30, 2)].concat();
    fixture.submit(job(0, text.clone(), greedy(3)));
    fixture.finish();
    let reported = GenerationParams {
        prompt_logprobs: Some(1),
        ..greedy(3)
    };
    fixture.submit(job(1, text.clone(), reported));
    fixture.finish();
    assert_eq!(cached(&fixture, 1), 0);
    assert_eq!(
        fixture.prompt_logprobs(1).map(|reported| reported.len()),
        Some(text.len())
    );
}

#[test]
fn zero_prefix_slots_take_no_snapshots() {
    let mut fixture = SchedulerFixture::new(long_spec(), caching(0, u64::MAX));
    for id in 0..2 {
        fixture.submit(job(id, [turn(20, 1), turn(30, 2)].concat(), greedy(3)));
        fixture.finish();
    }
    assert_eq!(fixture.handle.record().count(RunnerMethod::Snapshot), 0);
    assert_eq!(cached(&fixture, 1), 0);
}

/// Conversations that grow, are edited, branch and have side requests, in any order.
struct Conversations {
    rng: TestRng,
    conversations: Vec<Vec<Vec<TokenId>>>,
    next: u64,
}

impl Conversations {
    fn new(seed: u64) -> Conversations {
        let conversation = |i: usize| vec![turn(12, i % 2)];
        Conversations {
            rng: TestRng(seed),
            conversations: (0..4).map(conversation).collect(),
            next: 0,
        }
    }

    fn job(&mut self) -> Job {
        let who = self.rng.below(self.conversations.len());
        let conversation = &mut self.conversations[who];
        match self.rng.below(8) {
            0 if conversation.len() > 2 => {
                let at = 1 + self.rng.below(conversation.len() - 1);
                conversation.truncate(at);
            }
            1 => {
                let copy = conversation.clone();
                let other = self.rng.below(4);
                self.conversations[other] = copy;
            }
            _ => {}
        }
        let conversation = &mut self.conversations[who];
        if conversation.iter().map(Vec::len).sum::<usize>() > 300 {
            conversation.truncate(2);
        }
        let (len, salt) = (1 + self.rng.below(40), self.rng.below(5));
        conversation.push(turn(len, salt));
        let prompt = [conversation.concat(), turn(2, 7)].concat();
        self.next += 1;
        let params = GenerationParams {
            session: Some(format!("{who}").into()),
            ..sampled(1 + self.rng.below(8), self.next)
        };
        Job {
            choices: 1 + self.rng.below(2),
            ..job(self.next, prompt, params)
        }
    }
}

/// Runs `n` jobs, a few at a time.
fn play(fixture: &mut SchedulerFixture, seed: u64, n: usize, limit: (usize, u64)) -> Vec<Job> {
    let mut conversations = Conversations::new(seed);
    let mut jobs = Vec::new();
    for _ in 0..n {
        let job = conversations.job();
        fixture.submit(job.clone());
        jobs.push(job);
        for _ in 0..conversations.rng.below(30) {
            fixture.step().expect("no device is lost here");
            let held = fixture.scheduler.stats().prefix;
            // A job of two choices holds its own snapshot while one waits.
            assert!(held.entries <= limit.0, "{held:?}");
        }
    }
    fixture.finish();
    assert!(fixture.scheduler.stats().prefix.bytes <= limit.1);
    jobs
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn interleaved_conversations_match_isolated_runs(
        seed in any::<u64>(),
        max_entries in 1_usize..10,
        bytes in prop_oneof![Just(u64::MAX), 200_u64..4000],
    ) {
        let mut fixture = SchedulerFixture::new(long_spec(), caching(max_entries, bytes));
        let jobs = play(&mut fixture, seed, 14, (max_entries, bytes));
        check(&fixture, &long_spec(), &jobs);
    }

    #[test]
    fn failed_snapshots_do_not_change_tokens(
        seed in any::<u64>(),
        nth in proptest::collection::vec(0_u64..20, 1..6),
    ) {
        let mut fixture = SchedulerFixture::new(long_spec(), caching(4, 3000));
        for nth in nth {
            for call in [RunnerMethod::Snapshot, RunnerMethod::Restore] {
                let when = FaultTrigger::Nth(nth);
                fixture.handle.fail(InjectedFault { call, when, kind: FaultKind::OutOfMemory });
            }
        }
        let mut conversations = Conversations::new(seed);
        // One choice each: several choices need a snapshot that must not fail.
        let jobs: Vec<Job> = (0..10).map(|_| Job { choices: 1, ..conversations.job() }).collect();
        for job in &jobs {
            fixture.submit(job.clone());
            fixture.finish();
        }
        check(&fixture, &long_spec(), &jobs);
    }
}

#[test]
fn interleaved_conversations_reuse_more_than_half_of_prompt_tokens() {
    let mut fixture = SchedulerFixture::new(long_spec(), caching(12, u64::MAX));
    let jobs = play(&mut fixture, 5, 40, (12, u64::MAX));
    let all: usize = jobs.iter().map(|job| job.prompt.len()).sum();
    let cached = fixture.scheduler.stats().prefix.cached_tokens as usize;
    assert!(cached * 2 > all, "{cached} of {all}");
}

#[test]
fn prefix_entries_are_evicted_before_a_job_fails() {
    let mut fixture = SchedulerFixture::new(long_spec(), caching(8, u64::MAX));
    fixture.submit(job(0, [turn(20, 1), turn(30, 2)].concat(), greedy(3)));
    fixture.finish();
    assert!(fixture.scheduler.stats().prefix.entries > 0);
    fixture.handle.fail(InjectedFault {
        call: RunnerMethod::Open,
        when: FaultTrigger::Nth(1),
        kind: FaultKind::OutOfMemory,
    });
    let next = job(1, turn(40, 8), greedy(3));
    fixture.submit(next.clone());
    fixture.finish();
    check(&fixture, &long_spec(), &[next]);
}

/// Tokens and bytes of everything stored.
type StoredStates = Arc<Mutex<Vec<(Vec<TokenId>, Vec<u8>)>>>;

/// A store of these, and the order it received at shutdown.
#[derive(Default, Clone)]
struct MemoryStore(StoredStates, Arc<Mutex<Vec<Vec<TokenId>>>>);

impl Store for MemoryStore {
    fn find(&mut self, prompt: &[TokenId], more_than: usize, at_most: usize) -> Option<StoreHit> {
        let stored_states = self.0.lock().unwrap();
        let fits = |n: usize| n > more_than && n <= at_most;
        let kept = stored_states
            .iter()
            .filter(|(tokens, _)| fits(tokens.len()) && prompt.starts_with(tokens));
        let (tokens, bytes) = kept.max_by_key(|(tokens, _)| tokens.len())?;
        Some(StoreHit {
            position: tokens.len(),
            source: Box::new(bytes.clone()),
        })
    }

    fn longest_prefix_len(&mut self, tokens: &[TokenId]) -> usize {
        let stored_states = self.0.lock().unwrap();
        let kept = stored_states
            .iter()
            .filter(|(kept, _)| tokens.starts_with(kept));
        kept.map(|(kept, _)| kept.len()).max().unwrap_or(0)
    }

    fn put(&mut self, tokens: &[TokenId], mut snapshot: Box<dyn DetachedSnapshot>) {
        let mut bytes = Vec::new();
        snapshot.write(&mut bytes).unwrap();
        assert_eq!(bytes.len() as u64, snapshot.bytes());
        self.0.lock().unwrap().push((tokens.to_vec(), bytes));
    }

    fn begin_shutdown(&mut self, by_use: &[Vec<TokenId>]) {
        *self.1.lock().unwrap() = by_use.to_vec();
    }

    fn forget(&mut self, tokens: &[TokenId]) {
        self.0.lock().unwrap().retain(|(kept, _)| kept != tokens);
    }
}

fn fixture_with_stored(spec: FakeSpec, stored_states: &StoredStates) -> SchedulerFixture {
    fixture_with_store(spec, MemoryStore(stored_states.clone(), Arc::default()))
}

fn fixture_with_store(spec: FakeSpec, store: MemoryStore) -> SchedulerFixture {
    let mut fixture = SchedulerFixture::new(spec.clone(), config());
    let runner = conformance::fake::FakeRunner::new(spec);
    fixture.handle = runner.handle();
    fixture.scheduler =
        Scheduler::new(Box::new(runner), caching(8, u64::MAX)).with_store(Box::new(store));
    fixture
}

#[test]
fn flush_reports_usage_order_and_exports_missing_states() {
    for stored in 0..=3 {
        let store = MemoryStore::default();
        let mut fixture = fixture_with_store(long_spec(), store.clone());
        let heads: Vec<_> = (0..3).map(|i| turn(40, 10 + i)).collect();
        for (i, head) in heads.iter().enumerate() {
            fixture.submit(job(i as u64, head.clone(), greedy(3)));
            fixture.finish();
            while i < stored && fixture.scheduler.has_unpersisted() {
                fixture.scheduler.persist_next().unwrap();
            }
        }
        // The first of them again.
        fixture.submit(job(3, heads[0].clone(), greedy(3)));
        fixture.finish();
        fixture.scheduler.flush().unwrap();
        let whose = |tokens: &[TokenId]| heads.iter().position(|h| h[..8] == tokens[..8]).unwrap();
        let reported = store.1.lock().unwrap();
        let reported: Vec<usize> = reported.iter().map(|tokens| whose(tokens)).collect();
        assert_eq!(reported, [0, 2, 1], "{stored} stored before");
        let kept = store.0.lock().unwrap();
        let kept: Vec<usize> = kept.iter().map(|(tokens, _)| whose(tokens)).collect();
        let expected = [[0, 2, 1], [0, 2, 1], [0, 1, 2], [0, 1, 2]][stored];
        assert_eq!(kept, expected, "{stored} stored before");
    }
}

/// A conversation of two turns, the second in a new process after `change` edited the store.
fn cached_after_restart(
    change: impl FnOnce(&mut Vec<(Vec<TokenId>, Vec<u8>)>),
    later: FakeSpec,
) -> (usize, usize) {
    let stored_states = StoredStates::default();
    let mut fixture = fixture_with_stored(long_spec(), &stored_states);
    let head = [turn(20, 1), turn(60, 2), turn(2, 3)].concat();
    fixture.submit(job(0, head.clone(), greedy(3)));
    fixture.finish();
    while fixture.scheduler.has_unpersisted() {
        fixture.scheduler.persist_next().unwrap();
    }
    fixture.scheduler.flush().unwrap();
    assert!(!stored_states.lock().unwrap().is_empty());
    change(&mut stored_states.lock().unwrap());
    let mut fixture = fixture_with_stored(later.clone(), &stored_states);
    let second = job(1, [&head[..81], &turn(10, 4)].concat(), greedy(3));
    fixture.submit(second.clone());
    fixture.finish();
    check(&fixture, &later, &[second]);
    let kept = stored_states.lock().unwrap().len();
    (cached(&fixture, 1), kept)
}

#[test]
fn stored_states_are_found_after_restart() {
    assert_eq!(cached_after_restart(|_| (), long_spec()).0, 80);
}

#[test]
fn invalid_stored_states_are_misses_and_are_deleted() {
    let flip = |stored_states: &mut Vec<(Vec<TokenId>, Vec<u8>)>| {
        for (_, bytes) in stored_states {
            let at = bytes.len() - 3;
            bytes[at] ^= 1;
        }
    };
    assert_eq!(cached_after_restart(flip, long_spec()), (0, 0));
    let cut = |stored_states: &mut Vec<(Vec<TokenId>, Vec<u8>)>| {
        stored_states
            .iter_mut()
            .for_each(|(_, bytes)| bytes.truncate(bytes.len() / 2));
    };
    assert_eq!(cached_after_restart(cut, long_spec()), (0, 0));
    let other = FakeSpec {
        language: Language {
            salt: 77,
            ..ENDLESS
        },
        ..long_spec()
    };
    assert_eq!(cached_after_restart(|_| (), other), (0, 0));
    // Bytes of other tokens than the key.
    let swapped = |stored_states: &mut Vec<(Vec<TokenId>, Vec<u8>)>| {
        stored_states
            .iter_mut()
            .for_each(|(tokens, _)| tokens.truncate(tokens.len() - 4));
    };
    assert_eq!(cached_after_restart(swapped, long_spec()), (0, 0));
}
