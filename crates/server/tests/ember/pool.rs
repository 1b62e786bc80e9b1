//! Few pages for many on the bundled pair: who waited for pages, or gave them up in the middle of a text, says bit for
//! bit what he says alone.

use chat::{SpecialTokens, Tokenizer};
use contract::Backend;
use cpu::CpuBackend;
use decode::{
    Event, GenerationParams, Job, JobId, OutputToken, PrefixConfig, Progress, Sampling, Scheduler,
    SchedulerConfig, Speculation, Stats,
};

use crate::draft::plan_with_draft;
use crate::golden::{FAST, ember};

/// A scheduler whose sequences share so many tokens.
fn scheduler(
    (backend, exact): (&dyn Backend, bool),
    pool: Option<usize>,
    slots: usize,
) -> Scheduler {
    let mut plan = plan_with_draft(None, FAST);
    plan.batch_invariant = exact;
    plan.limits.sequences = 4;
    plan.limits.context = 1000;
    plan.limits.pool = pool;
    let config = SchedulerConfig {
        reserve: 8,
        speculation: Speculation {
            budget: 7,
            ..Speculation::default()
        },
        prefix: PrefixConfig {
            slots,
            ..PrefixConfig::default()
        },
        ..SchedulerConfig::default()
    };
    let runner = backend.open(plan, &mut |_| {}).unwrap();
    Scheduler::new(runner, config)
}

fn jobs() -> Vec<Job> {
    let loaded = model::load(&ember("ember.gguf")).unwrap();
    let tokenizer = Tokenizer::new(&loaded.vocab).unwrap();
    let sizes = [(20, 360), (24, 330), (30, 200), (4, 60)];
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

/// What each job says, and whether anyone waited for pages.
fn said(scheduler: &mut Scheduler, jobs: &[Job]) -> (Vec<Vec<OutputToken>>, bool, Stats) {
    let (mut events, mut waited) = (Vec::new(), false);
    for job in jobs {
        scheduler.submit(job.clone()).unwrap();
    }
    while scheduler.step(&mut events).unwrap() == Progress::Working {
        let stats = scheduler.stats();
        waited |= stats.pool_waits && stats.queued > 0;
    }
    let mut said = vec![Vec::new(); jobs.len()];
    for (id, event) in events {
        let at = jobs.iter().position(|job| job.id == id).unwrap();
        match event {
            Event::Tokens { tokens, .. } => said[at].extend(tokens),
            Event::Failed { error } => panic!("{id}: {error}"),
            _ => {}
        }
    }
    (said, waited, scheduler.stats())
}

/// Fails unless texts that wait for pages or give them up on the way have the bits that they have alone.
pub(crate) fn few_pages_change_no_bit(backend: &dyn Backend, exact: bool) {
    let jobs = jobs();
    let on = (backend, exact);
    let alone = |job: &Job| {
        said(&mut scheduler(on, None, 0), std::slice::from_ref(job))
            .0
            .remove(0)
    };
    let expected: Vec<Vec<OutputToken>> = jobs.iter().map(alone).collect();
    for slots in [0, 8] {
        // One context: hardly more than one of them takes.
        let (found, waited, stats) = said(&mut scheduler(on, Some(0), slots), &jobs);
        assert!(found == expected, "{slots} slots: {stats:?}");
        assert!(waited && stats.preemptions > 0, "{stats:?}");
        assert_eq!((stats.preemptions, stats.leaks), (stats.resumed, 0));
        assert_eq!(stats.free_tokens, stats.pool_tokens);
    }
}

#[test]
fn queued_and_preempted_sequences_match_runs_alone() {
    few_pages_change_no_bit(&CpuBackend::new(FAST), false);
}
