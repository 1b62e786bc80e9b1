//! A small page pool for several sequences of the bundled pair. Sequences that waited for pages, or
//! were preempted, give bit for bit the tokens of a run alone.

use chat::{SpecialTokens, Tokenizer};
use contract::Backend;
use cpu::CpuBackend;
use decode::{
    Event, GenerationParams, Job, JobId, OutputToken, PrefixConfig, Sampling, Scheduler,
    SchedulerConfig, SchedulerState, SpeculationConfig, Stats,
};

use crate::draft::config_with_draft;
use crate::golden::{FAST, ember};

/// A scheduler whose sequences share `pool` tokens.
fn scheduler(
    (backend, batch_invariant): (&dyn Backend, bool),
    pool: Option<usize>,
    max_entries: usize,
) -> Scheduler {
    let mut load_config = config_with_draft(None, FAST);
    load_config.batch_invariant = batch_invariant;
    load_config.limits.sequences = 4;
    load_config.limits.context = 1000;
    load_config.limits.pool_tokens = pool;
    let config = SchedulerConfig {
        reserve: 8,
        speculation: SpeculationConfig {
            budget: 7,
            ..SpeculationConfig::default()
        },
        prefix: PrefixConfig {
            max_entries,
            ..PrefixConfig::default()
        },
        ..SchedulerConfig::default()
    };
    let runner = backend.open(load_config, &mut |_| {}).unwrap();
    Scheduler::new(runner, config)
}

fn jobs() -> Vec<Job> {
    let loaded = model::load(&ember("ember.gguf")).unwrap();
    let tokenizer = Tokenizer::new(&loaded.vocab).unwrap();
    let sizes = [(20, 560), (24, 520), (30, 200), (4, 60)];
    let jobs = sizes.into_iter().enumerate();
    jobs.map(|(i, (sentences, max_tokens))| {
        let text =
            format!("Lamp {i} stands beside coin {i}, and nobody counts. ").repeat(sentences);
        let sampling = match i % 2 {
            0 => Sampling::greedy(),
            _ => Sampling {
                temperature: 0.9,
                seed: i as u64,
                ..Sampling::default()
            },
        };
        Job {
            id: JobId(i as u64),
            prompt: tokenizer
                .encode(&text, SpecialTokens::Parse)
                .unwrap()
                .into(),
            choices: 1,
            params: GenerationParams {
                sampling,
                max_tokens,
                ignore_eos: true,
                logprobs: Some(3),
                ..GenerationParams::default()
            },
            priority: 0,
        }
    })
    .collect()
}

/// The tokens of each job, and whether any job waited for pages.
fn generated(scheduler: &mut Scheduler, jobs: &[Job]) -> (Vec<Vec<OutputToken>>, bool, Stats) {
    let (mut events, mut waited) = (Vec::new(), false);
    for job in jobs {
        scheduler.submit(job.clone()).unwrap();
    }
    while scheduler.step(&mut events).unwrap() == SchedulerState::Working {
        let stats = scheduler.stats();
        waited |= stats.blocked_on_pool && stats.queued > 0;
    }
    let mut generated = vec![Vec::new(); jobs.len()];
    for (id, event) in events {
        let at = jobs.iter().position(|job| job.id == id).unwrap();
        match event {
            Event::Tokens { tokens, .. } => generated[at].extend(tokens),
            Event::Failed { error } => panic!("{id}: {error}"),
            _ => {}
        }
    }
    (generated, waited, scheduler.stats())
}

/// Fails unless sequences that wait for pages or are preempted give the bits of a run alone.
pub(crate) fn check_small_pool(backend: &dyn Backend, batch_invariant: bool) {
    let jobs = jobs();
    let device = (backend, batch_invariant);
    let alone = |job: &Job| {
        generated(&mut scheduler(device, None, 0), std::slice::from_ref(job))
            .0
            .remove(0)
    };
    let expected: Vec<Vec<OutputToken>> = jobs.iter().map(alone).collect();
    for max_entries in [0, 8] {
        // The pool holds one context, hardly more than one of them takes.
        let (found, waited, stats) = generated(&mut scheduler(device, Some(0), max_entries), &jobs);
        assert!(found == expected, "{max_entries} entries: {stats:?}");
        assert!(waited && stats.preemptions > 0, "{stats:?}");
        assert_eq!((stats.preemptions, stats.leaks), (stats.resumed, 0));
        assert_eq!(stats.free_tokens, stats.pool_tokens);
    }
}

#[test]
fn queued_and_preempted_sequences_match_runs_alone() {
    check_small_pool(&CpuBackend::new(FAST), false);
}
