//! Properties of speculation on the bundled pair. Trees of every budget, chains and no draft
//! generate the same tokens, greedy and sampled, in batches, with cancellations and shared prompts.
//! The draft is used in all of them.

use std::sync::Arc;

use chat::{SpecialTokens, Tokenizer};
use contract::{Backend, TokenId};
use cpu::CpuBackend;
use decode::{
    ChoiceStats, Event, FinishReason, GenerationParams, Job, JobId, Sampling, Scheduler,
    SchedulerConfig, SchedulerState, SpeculationConfig, TreeInit,
};

use crate::draft::config_with_draft;
use crate::golden::{FAST, ember};

/// Total prompts; each budget from 0 to 63 is used at least three times.
const PROMPTS: usize = 204;
const MAX_TOKENS: usize = 10;

/// Prompts of many kinds, as the template renders them.
pub(crate) fn prompts() -> Vec<Vec<TokenId>> {
    let loaded = model::load(&ember("ember.gguf")).unwrap();
    let tokenizer = Tokenizer::new(&loaded.vocab).unwrap();
    let things = [
        "lamps", "coins", "letters", "apples", "tickets", "stones", "birds",
    ];
    let names = ["Otto", "Mira", "Jonas", "Hedda", "Nils"];
    let texts = (0..PROMPTS).map(|i| {
        let (thing, name) = (things[i % 7], names[i % 5]);
        match i % 6 {
            0 => format!("Write a Rust function count_{thing}_{i} that counts how often each entry of {thing} occurs."),
            1 => format!("Write a short story about {name} with {i} {thing}."),
            2 => format!("What is {} + {}?", 10 + i % 80, 90 - i % 70),
            3 => format!("Return only JSON. Use the keys name, city: name {name}, city Bergen {i}."),
            4 => format!("Explain what {thing} are for, {name}, in {} words.", 5 + i % 30),
            _ => format!("Sort the {thing} of {name}: {}, {}, {}.", i * 7 % 90, i * 3 % 50, i),
        }
    });
    texts
        .map(|text| {
            let turn = format!(
                "<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
            );
            tokenizer.encode(&turn, SpecialTokens::Parse).unwrap()
        })
        .collect()
}

/// Parameters of a prompt's continuation: every third is greedy, the others are sampled, some with
/// penalties or truncation.
fn settings(i: usize) -> GenerationParams {
    let sampling = match i % 6 {
        0 | 3 => Sampling::greedy(),
        1 => Sampling {
            temperature: 0.8,
            seed: i as u64,
            ..Sampling::default()
        },
        2 => Sampling {
            temperature: 1.0,
            top_k: 20,
            top_p: 0.95,
            seed: i as u64,
            ..Sampling::default()
        },
        4 => Sampling {
            temperature: 0.7,
            presence: 0.6,
            repetition: 1.1,
            seed: i as u64,
            ..Sampling::default()
        },
        _ => Sampling {
            temperature: 1.3,
            min_p: 0.05,
            seed: i as u64,
            ..Sampling::default()
        },
    };
    GenerationParams {
        sampling,
        max_tokens: MAX_TOKENS,
        ..GenerationParams::default()
    }
}

/// Tokens, finish reason and counters of each choice of each job.
type Outputs = Vec<(Vec<TokenId>, Option<FinishReason>, ChoiceStats)>;

struct Fixture {
    scheduler: Scheduler,
    generated: Outputs,
}

impl Fixture {
    fn new(
        (backend, batch_invariant): (&dyn Backend, bool),
        speculation: SpeculationConfig,
        sequences: usize,
    ) -> Fixture {
        let mut load_config = config_with_draft(None, FAST);
        load_config.limits.sequences = 5;
        load_config.batch_invariant = batch_invariant;
        let loaded = model::load(&ember("ember.gguf")).unwrap();
        let config = SchedulerConfig {
            max_sequences: sequences,
            queue_limit: usize::MAX,
            eos: loaded.vocab.eos,
            speculation,
            ..SchedulerConfig::default()
        };
        let runner = backend.open(load_config, &mut |_| {}).unwrap();
        Fixture {
            scheduler: Scheduler::new(runner, config),
            generated: vec![(Vec::new(), None, ChoiceStats::default()); 2 * PROMPTS],
        }
    }

    /// Submits a prompt's job. Every eleventh has two choices, with one prefill that is restored
    /// for the second.
    fn submit(&mut self, i: usize, prompt: &[TokenId]) {
        let job = Job {
            id: JobId(i as u64),
            prompt: Arc::from(prompt),
            choices: if i.is_multiple_of(11) { 2 } else { 1 },
            params: settings(i),
            priority: 0,
        };
        self.scheduler.submit(job).unwrap();
    }

    /// Steps until no job is left, cancelling each job of `cancelled` after a few decode steps.
    fn finish(&mut self, cancelled: &[usize]) {
        let mut events = Vec::new();
        for turn in 0.. {
            for i in cancelled.iter().filter(|i| **i % 5 + 2 == turn) {
                self.scheduler.cancel(JobId(*i as u64));
            }
            let progress = self.scheduler.step(&mut events).unwrap();
            for (id, event) in events.drain(..) {
                match event {
                    Event::Tokens { choice, tokens } => {
                        let ids = tokens.iter().map(|token| token.id);
                        self.generated[2 * id.0 as usize + choice].0.extend(ids);
                    }
                    Event::Finished {
                        choice,
                        reason,
                        stats,
                    } => {
                        let generated = &mut self.generated[2 * id.0 as usize + choice];
                        (generated.1, generated.2) = (Some(reason), stats);
                    }
                    Event::Failed { error } => panic!("{id}: {error}"),
                    _ => {}
                }
            }
            if progress == SchedulerState::Idle {
                assert_eq!(self.scheduler.stats().leaks, 0);
                return;
            }
        }
    }
}

fn speculation(budget: usize, init: TreeInit) -> SpeculationConfig {
    SpeculationConfig {
        budget,
        init,
        ..SpeculationConfig::default()
    }
}

/// Fails unless trees of these budgets generate the tokens of plain decoding alone, in batches and
/// beside cancelled jobs.
pub(crate) fn check_budgets(
    backend: &dyn Backend,
    batch_invariant: bool,
    budgets: impl Iterator<Item = usize>,
) {
    let prompts = prompts();
    let budgets: Vec<usize> = budgets.collect();
    // Each budget has its own three or four prompts.
    let of = |budget: usize| (0..PROMPTS).filter(move |i| i % 64 == budget);
    let mut plain = Fixture::new(
        (backend, batch_invariant),
        speculation(0, TreeInit::None),
        1,
    );
    for i in budgets.iter().copied().flat_map(of) {
        plain.submit(i, &prompts[i]);
    }
    plain.finish(&[]);
    let mut compared = 0;
    for &budget in &budgets {
        // Batches of one to four.
        let own: Vec<usize> = of(budget).collect();
        let seed = [
            TreeInit::None,
            TreeInit::Chain,
            TreeInit::None,
            TreeInit::ChainOnly,
        ][budget % 4];
        let mut fixture = Fixture::new(
            (backend, batch_invariant),
            speculation(budget, seed),
            1 + budget % 4,
        );
        for &i in &own {
            fixture.submit(i, &prompts[i]);
        }
        // One in five is cancelled while it runs, without effect on the others.
        let cancelled: Vec<usize> = own.iter().copied().filter(|i| i % 5 == 3).collect();
        fixture.finish(&cancelled);
        for i in own.into_iter().flat_map(|i| [2 * i, 2 * i + 1]) {
            let (expected, found) = (&plain.generated[i], &fixture.generated[i]);
            if found.1 == Some(FinishReason::Cancelled) {
                assert!(
                    expected.0.starts_with(&found.0),
                    "budget {budget}, prompt {}",
                    i / 2
                );
                continue;
            }
            assert_eq!(
                found.0,
                expected.0,
                "budget {budget}, {seed:?}, prompt {}",
                i / 2
            );
            assert_eq!(found.1, expected.1);
            compared += usize::from(found.1.is_some());
        }
    }
    let least = 5 * budgets.len() / 2;
    assert!(compared > least, "only {compared} texts were compared");
}

/// Every budget to 24 nodes and every third of the others, which take most of the time.
#[test]
fn trees_chains_and_no_draft_generate_the_same_tokens() {
    let budgets = (0..24).chain((24..64).step_by(3));
    check_budgets(&CpuBackend::new(FAST), false, budgets);
}

#[test]
fn drafted_steps_take_one_pass_and_give_several_tokens() {
    let prompts = prompts();
    let cpu = CpuBackend::new(FAST);
    let mut fixture = Fixture::new((&cpu, false), speculation(22, TreeInit::None), 1);
    for (i, prompt) in prompts.iter().enumerate().take(24) {
        fixture.submit(i, prompt);
    }
    fixture.finish(&[]);
    let stats = fixture.scheduler.stats();
    let texts = fixture
        .generated
        .iter()
        .filter(|generated| generated.1.is_some())
        .count() as u64;
    // A decode step is one verify: with one sequence at a time, both counts are equal.
    assert_eq!(stats.decode_steps, stats.batch_size_sum);
    assert!(
        stats.drafted_steps * 5 > stats.decode_steps * 4,
        "{stats:?}"
    );
    assert_eq!(stats.undrafted_steps, 0);
    let per_step = (stats.generated_tokens - texts) as f64 / stats.decode_steps as f64;
    assert!(per_step > 1.5, "{per_step} tokens per step");
    let accepted: u64 = fixture
        .generated
        .iter()
        .map(|generated| generated.2.accepted_tokens as u64)
        .sum();
    assert_eq!(stats.accepted_tokens, accepted);
}
