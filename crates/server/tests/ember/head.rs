//! A multi-token-prediction head drafts without changing a text, on models of random weights: their
//! texts mean nothing, and any wrong bit shows in them.

use contract::{Backend, KvFormat, KvFormats, Limits, LoadConfig, TokenId};
use cpu::CpuBackend;
use decode::{
    Event, GenerationParams, Job, JobId, Sampling, Scheduler, SchedulerConfig, SchedulerState,
    SpeculationConfig,
};
use model::synth::SynthSpec;

use crate::golden::FAST;

const MAX_TOKENS: usize = 48;
const PROMPTS: usize = 12;

fn load_config(name: &str, batch_invariant: bool) -> LoadConfig {
    let loaded = SynthSpec::parse(name).unwrap().load().unwrap();
    LoadConfig {
        target: loaded.spec,
        weights: loaded.weights,
        draft: None,
        batch_invariant,
        kv: KvFormats {
            k: KvFormat::Q8_0,
            v: KvFormat::F16,
        },
        limits: Limits {
            sequences: 3,
            context: 600,
            tree_nodes: 24,
            prefill_chunk: 128,
            pool_tokens: None,
        },
    }
}

fn prompt(i: usize) -> Vec<TokenId> {
    let ids = (0..5 + 29 * i).map(|at| (at * at * 7 + 13 * at + 101 * i) % 1024);
    ids.map(|id| TokenId(id as u32)).collect()
}

fn sampling(i: usize) -> Sampling {
    match i % 3 {
        0 => Sampling::greedy(),
        1 => Sampling {
            temperature: 0.4,
            seed: i as u64,
            ..Sampling::default()
        },
        _ => Sampling {
            temperature: 0.9,
            top_k: 5,
            presence: 0.3,
            seed: i as u64,
            ..Sampling::default()
        },
    }
}

/// The texts of all prompts, and how many drafted tokens were verified.
fn generate(backend: &dyn Backend, config: LoadConfig, drafts: bool) -> (Vec<Vec<TokenId>>, u64) {
    let runner = backend.open(config, &mut |_| {}).unwrap();
    assert!(runner.info().mtp.is_some());
    let config = SchedulerConfig {
        max_sequences: 3,
        queue_limit: usize::MAX,
        speculation: SpeculationConfig {
            budget: 11,
            // The head alone drafts.
            min_match: 0,
            ..SpeculationConfig::default()
        },
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(runner, config);
    for i in 0..PROMPTS {
        let params = GenerationParams {
            sampling: sampling(i),
            max_tokens: MAX_TOKENS,
            ignore_eos: true,
            speculate: drafts,
            ..GenerationParams::default()
        };
        let job = Job {
            id: JobId(i as u64),
            prompt: prompt(i).as_slice().into(),
            choices: 1,
            params,
            priority: 0,
        };
        scheduler.submit(job).unwrap();
    }
    let mut texts = vec![Vec::new(); PROMPTS];
    let mut events = Vec::new();
    while scheduler.step(&mut events).unwrap() != SchedulerState::Idle || !events.is_empty() {
        for (id, event) in events.drain(..) {
            match event {
                Event::Tokens { tokens, .. } => {
                    texts[id.0 as usize].extend(tokens.iter().map(|token| token.id));
                }
                Event::Failed { error } => panic!("{id}: {error}"),
                _ => {}
            }
        }
    }
    (texts, scheduler.stats().drafted_tokens)
}

/// Fails unless greedy and sampled texts are the same with drafts and without.
pub(crate) fn check_head(backend: &dyn Backend) {
    for name in ["tiny-hybrid+mtp:q8_0", "tiny-hybrid-r1+mtp-own:q4_k_m"] {
        let [(drafted, nodes), (plain, none)] =
            [true, false].map(|drafts| generate(backend, load_config(name, true), drafts));
        assert!(nodes > 1000 && none == 0, "{nodes} and {none} drafted");
        for (i, (drafted, plain)) in drafted.iter().zip(&plain).enumerate() {
            assert_eq!(plain.len(), MAX_TOKENS, "{name}, prompt {i}");
            assert_eq!(drafted, plain, "{name}, prompt {i}");
        }
    }
}

#[test]
fn drafts_of_a_head_change_no_text() {
    check_head(&CpuBackend::new(FAST));
}
