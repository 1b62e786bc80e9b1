//! Output depends only on prompt, parameters and seed.

use conformance::fake::{FakeDraft, FakeSpec, RunnerMethod};
use contract::{KvPool, LogitsProcessors, LogitsRequest, TokenCount, TokenId};
use decode::{
    DraftSource, FinishReason, GenerationParams, Job, JobId, Sampling, SchedulerConfig, SourceSet,
    SpeculationConfig,
};
use proptest::prelude::*;

use crate::fixture::{
    ENDLESS, EOS, LANGUAGE, RandomTrees, SchedulerFixture, TestRng, any_sources, config, greedy,
    job, prompt, reference_outputs, sampled, spec,
};

fn any_sampling() -> impl Strategy<Value = Sampling> {
    let cuts = (
        prop::sample::select(vec![0.0_f32, 0.0, 0.6, 1.0, 1.7]),
        prop::sample::select(vec![0_usize, 0, 1, 5, 30]),
        prop::sample::select(vec![1.0_f32, 0.9, 0.4]),
        prop::sample::select(vec![0.0_f32, 0.05]),
    );
    let penalties = (
        prop::sample::select(vec![1.0_f32, 1.0, 1.3]),
        prop::sample::select(vec![0.0_f32, 0.0, 0.7]),
        prop::sample::select(vec![0.0_f32, 0.0, 0.4]),
        prop::option::of(0..20_usize),
    );
    let bias = prop::option::of((0..40_u32, -4.0_f32..4.0));
    (cuts, penalties, bias, 0..1000_u64).prop_map(
        |(
            (temperature, top_k, top_p, min_p),
            (repetition, frequency, presence, window),
            bias,
            seed,
        )| {
            Sampling {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition,
                frequency,
                presence,
                window,
                bias: bias.into_iter().map(|(id, x)| (TokenId(id), x)).collect(),
                seed,
            }
        },
    )
}

fn any_params() -> impl Strategy<Value = GenerationParams> {
    (
        any_sampling(),
        prop::sample::select(vec![1_usize, 2, 7, 20, 500]),
        prop::sample::select(vec![0_usize, 0, 5]),
        prop::option::of(0..40_u32),
        any::<bool>(),
        prop::option::of(0..4_usize),
    )
        .prop_map(
            |(sampling, max_tokens, min_tokens, stop, ignore_eos, logprobs)| GenerationParams {
                sampling,
                max_tokens,
                min_tokens,
                stop_tokens: stop.into_iter().map(TokenId).collect(),
                ignore_eos,
                logprobs,
                ..GenerationParams::default()
            },
        )
}

fn any_job(id: u64) -> impl Strategy<Value = Job> {
    (1..60_usize, 0..50_u32, any_params(), 1..4_usize, -1..2_i32).prop_map(
        move |(len, salt, params, choices, priority)| Job {
            id: JobId(id),
            prompt: prompt(len, salt).into(),
            choices,
            params,
            priority,
        },
    )
}

/// The source of trees.
#[derive(Debug, Clone)]
enum Trees {
    Plain,
    Drafted {
        acceptance_rate: f64,
        depth: usize,
        budget: usize,
        sources: SourceSet,
        min_match: usize,
    },
    Random {
        seed: u64,
        nodes: usize,
    },
}

fn any_trees() -> impl Strategy<Value = Trees> {
    prop_oneof![
        Just(Trees::Plain),
        (
            0.0..1.0_f64,
            1..9_usize,
            1..30_usize,
            any_sources(),
            1..4_usize
        )
            .prop_map(|(acceptance_rate, depth, budget, sources, min_match)| {
                Trees::Drafted {
                    acceptance_rate,
                    depth,
                    budget,
                    sources,
                    min_match,
                }
            }),
        (any::<u64>(), 1..24_usize).prop_map(|(seed, nodes)| Trees::Random { seed, nodes }),
    ]
}

fn fixture(spec: &FakeSpec, config: SchedulerConfig, trees: &Trees) -> SchedulerFixture {
    match *trees {
        Trees::Plain => SchedulerFixture::new(spec.clone(), config),
        Trees::Drafted {
            acceptance_rate,
            depth,
            budget,
            sources,
            min_match,
        } => {
            let draft = Some(FakeDraft {
                depth,
                acceptance_rate,
            });
            let drafting = FakeSpec {
                draft,
                conditional_draft: budget % 2 == 1,
                mtp: draft,
                ..spec.clone()
            };
            SchedulerFixture::new(
                drafting,
                SchedulerConfig {
                    speculation: SpeculationConfig {
                        budget,
                        sources,
                        min_match,
                        ..SpeculationConfig::default()
                    },
                    ..config
                },
            )
        }
        Trees::Random { seed, nodes } => {
            let random_trees = RandomTrees {
                language: spec.language,
                rng: TestRng(seed),
                nodes,
            };
            SchedulerFixture::with_trees(spec.clone(), config, random_trees)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The main property of the algorithm.
    #[test]
    fn any_tree_batch_chunk_and_cancellation_matches_plain_decoding(
        jobs in (any_job(0), any_job(1), any_job(2), any_job(3)),
        n_jobs in 1..5_usize,
        trees in any_trees(),
        max_sequences in 1..6_usize,
        prefill_chunk in 1..40_usize,
        (pool_contexts, page, reserve) in (8..48_usize, 1..20_usize, 0..40_usize),
        arrivals in prop::collection::vec(0..12_usize, 4),
        cancelled in prop::collection::vec(
            (0..4_u64, prop::option::of(0..3_usize), 0..30_usize),
            0..3,
        ),
    ) {
        let mut spec = spec(LANGUAGE);
        // From little more than one sequence to six, in eighths.
        spec.limits.pool_tokens = Some(spec.limits.context * pool_contexts / 8);
        (spec.page_size, spec.pool_tokens) = (page, KvPool::for_limits(spec.limits, page).tokens());
        let jobs = [jobs.0, jobs.1, jobs.2, jobs.3];
        let jobs = &jobs[..n_jobs];
        let config = SchedulerConfig { max_sequences, prefill_chunk, reserve, ..config() };
        let mut fixture = fixture(&spec, config, &trees);
        for turn in 0..30 {
            for (job, _) in jobs.iter().zip(&arrivals).filter(|(_, at)| **at == turn) {
                fixture.submit(job.clone());
            }
            for (id, choice, _) in cancelled.iter().filter(|(_, _, at)| *at == turn) {
                match choice {
                    Some(choice) => fixture.scheduler.cancel_choice(JobId(*id), *choice),
                    None => fixture.scheduler.cancel(JobId(*id)),
                }
            }
            fixture.step().unwrap();
        }
        fixture.finish();
        let outputs = fixture.outputs();
        for job in jobs {
            for (choice, expected) in reference_outputs(&spec, job).into_iter().enumerate() {
                let found = outputs.get(&(job.id.0, choice));
                let found = found.ok_or_else(|| TestCaseError::fail("a choice has no output"))?;
                if found.reason == Some(FinishReason::Cancelled) {
                    prop_assert!(expected.tokens.starts_with(&found.tokens));
                } else {
                    prop_assert_eq!(&found.tokens, &expected.tokens);
                    prop_assert_eq!(found.reason, expected.reason);
                }
            }
        }
    }

    /// Plain decoding against the definition.
    #[test]
    fn greedy_output_is_the_argmax_of_processed_logits(
        len in 1..40_usize, salt in 0..50_u32, params in any_params(),
    ) {
        let mut params = params;
        params.sampling.temperature = 0.0;
        let job = job(0, prompt(len, salt), params.clone());
        let found = reference_outputs(&spec(LANGUAGE), &job).remove(0);
        let s = &params.sampling;
        let mut text = prompt(len, salt);
        let reason = loop {
            let generated = text.len() - len;
            let window = s.window.unwrap_or(text.len()).min(text.len());
            let counts = (0..LANGUAGE.vocab as u32).map(TokenId).map(|token| TokenCount {
                token,
                seen: text[text.len() - window..].contains(&token),
                generated: text[len..].iter().filter(|t| **t == token).count() as u32,
            });
            let processors = LogitsProcessors {
                allowed: None,
                bias: s.bias.clone(),
                repetition: s.repetition,
                frequency: s.frequency,
                presence: s.presence,
                counts: counts.collect(),
            };
            let trace = LANGUAGE.begin().then_all(&text);
            let mut row = LANGUAGE.row(trace, &LogitsRequest::full()).raw;
            processors.apply(&mut row);
            let ends = |token: TokenId| {
                params.stop_tokens.contains(&token) || (token == EOS && !params.ignore_eos)
            };
            if generated < params.min_tokens {
                for token in (0..40).map(TokenId).filter(|t| ends(*t)) {
                    row[token.index()] = f32::NEG_INFINITY;
                }
            }
            let best = (0..row.len()).rev().max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
            let token = TokenId(best as u32);
            text.push(token);
            if ends(token) {
                break FinishReason::Eos;
            } else if generated + 1 == params.max_tokens {
                break FinishReason::Length;
            } else if text.len() == 96 {
                break FinishReason::ContextFull;
            }
        };
        prop_assert_eq!(found.ids(), &text[len..]);
        prop_assert_eq!(found.reason, Some(reason));
    }
}

#[test]
fn perfect_draft_yields_several_tokens_per_step() {
    let job = job(0, prompt(9, 1), greedy(40));
    let plain = reference_outputs(&spec(ENDLESS), &job).remove(0);
    let draft = Some(FakeDraft {
        depth: 7,
        acceptance_rate: 1.0,
    });
    let mut fixture = SchedulerFixture::new(
        FakeSpec {
            draft,
            ..spec(ENDLESS)
        },
        config(),
    );
    fixture.submit(job);
    fixture.finish();
    let outputs = &fixture.outputs()[&(0, 0)];
    assert_eq!(outputs.tokens, plain.tokens);
    // 39 tokens after the first, 8 per step.
    assert_eq!(
        (plain.stats.decode_steps, outputs.stats.decode_steps),
        (39, 5)
    );
    let stats = fixture.scheduler.stats();
    assert_eq!(stats.accepted_tokens, 34);
    assert_eq!(
        stats.accepted_tokens as usize,
        outputs.stats.accepted_tokens
    );
    assert!(stats.drafted_tokens > stats.accepted_tokens);
}

#[test]
fn perfect_head_yields_several_tokens_per_step() {
    let job = job(0, prompt(9, 1), greedy(40));
    let plain = reference_outputs(&spec(ENDLESS), &job).remove(0);
    let mtp = Some(FakeDraft {
        depth: 7,
        acceptance_rate: 1.0,
    });
    let both = FakeSpec {
        mtp,
        draft: Some(FakeDraft {
            depth: 1,
            acceptance_rate: 0.0,
        }),
        ..spec(ENDLESS)
    };
    let without_block = SpeculationConfig {
        sources: SourceSet::ALL.without(DraftSource::Block),
        ..SpeculationConfig::default()
    };
    for (spec, speculation) in [
        (
            FakeSpec {
                mtp,
                ..spec(ENDLESS)
            },
            SpeculationConfig::default(),
        ),
        (both, without_block),
    ] {
        let config = SchedulerConfig {
            speculation,
            ..config()
        };
        let mut fixture = SchedulerFixture::new(spec, config);
        fixture.submit(job.clone());
        fixture.finish();
        let outputs = &fixture.outputs()[&(0, 0)];
        assert_eq!(outputs.tokens, plain.tokens);
        // As with a draft model: 39 tokens after the first, 8 per step.
        assert_eq!(outputs.stats.decode_steps, 5);
    }
}

#[test]
fn zero_speculation_budget_disables_drafting() {
    let draft = Some(FakeDraft {
        depth: 7,
        acceptance_rate: 1.0,
    });
    let off = SchedulerConfig {
        speculation: SpeculationConfig {
            budget: 0,
            ..SpeculationConfig::default()
        },
        ..config()
    };
    let mut fixture = SchedulerFixture::new(
        FakeSpec {
            draft,
            ..spec(ENDLESS)
        },
        off,
    );
    fixture.submit(job(0, prompt(9, 1), greedy(10)));
    fixture.finish();
    assert_eq!(fixture.handle.record().count(RunnerMethod::Draft), 0);
    assert_eq!(fixture.outputs()[&(0, 0)].stats.drafted_tokens, 0);
}

#[test]
fn context_limit_ends_output_at_same_token_with_and_without_tree() {
    for seed in 0..40 {
        let job = job(0, prompt(70, seed), sampled(1000, u64::from(seed)));
        let plain = reference_outputs(&spec(ENDLESS), &job).remove(0);
        assert_eq!(plain.reason, Some(FinishReason::ContextFull));
        assert_eq!(plain.tokens.len(), 96 - 70);
        let random_trees = RandomTrees {
            language: ENDLESS,
            rng: TestRng(u64::from(seed)),
            nodes: 24,
        };
        let mut fixture = SchedulerFixture::with_trees(spec(ENDLESS), config(), random_trees);
        fixture.submit(job);
        fixture.finish();
        let outputs = &fixture.outputs()[&(0, 0)];
        assert_eq!(
            (outputs.reason, &outputs.tokens),
            (plain.reason, &plain.tokens)
        );
    }
}

#[test]
fn equal_seeds_repeat_output_and_different_seeds_differ() {
    let text = |seed| {
        reference_outputs(&spec(ENDLESS), &job(0, prompt(9, 1), sampled(30, seed))).remove(0)
    };
    assert_eq!(text(1), text(1));
    assert_ne!(text(1).ids(), text(2).ids());
}

#[test]
fn prompt_logprobs_equal_raw_logprobs_for_any_chunk_size() {
    let prompt = prompt(50, 3);
    let mut params = greedy(0);
    params.prompt_logprobs = Some(2);
    for prefill_chunk in [1, 4, 7, 32] {
        let mut fixture = SchedulerFixture::new(
            spec(LANGUAGE),
            SchedulerConfig {
                prefill_chunk,
                ..config()
            },
        );
        fixture.submit(job(0, prompt.clone(), params.clone()));
        fixture.finish();
        assert_eq!(
            fixture.outputs()[&(0, 0)].reason,
            Some(FinishReason::Length),
            "nothing was to be generated"
        );
        let reported = fixture.prompt_logprobs(0).unwrap();
        assert_eq!(reported.len(), prompt.len());
        assert_eq!(reported[0], None);
        for at in 1..prompt.len() {
            let trace = LANGUAGE.begin().then_all(&prompt[..at]);
            let raw = LANGUAGE.row(trace, &LogitsRequest::full());
            let best = LANGUAGE.row(trace, &LogitsRequest::top_k(2));
            let reported = reported[at].as_ref().unwrap();
            assert_eq!(reported.logprob, raw.raw[prompt[at].index()] - raw.raw_lse);
            let ids: Vec<TokenId> = reported.top.iter().map(|(id, _)| *id).collect();
            assert_eq!(ids, best.ids);
        }
    }
}

#[test]
fn pass_costs_are_measured_before_first_speculative_job() {
    let clock = || {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NOW: AtomicU64 = AtomicU64::new(0);
        std::time::Duration::from_micros(NOW.fetch_add(1, Ordering::Relaxed))
    };
    let draft = Some(FakeDraft {
        depth: 7,
        acceptance_rate: 1.0,
    });
    let spec = FakeSpec {
        draft,
        ..spec(ENDLESS)
    };
    let config = SchedulerConfig {
        speculation: SpeculationConfig {
            measure_time_limit: Some(std::time::Duration::from_secs(1)),
            ..SpeculationConfig::default()
        },
        clock: Some(clock),
        ..config()
    };
    let mut fixture = SchedulerFixture::new(spec.clone(), config);
    let plain = GenerationParams {
        speculate: false,
        ..greedy(20)
    };
    let expected = reference_outputs(&spec, &job(0, prompt(9, 1), greedy(20))).remove(0);
    fixture.submit(job(0, prompt(9, 1), plain));
    fixture.finish();
    assert_eq!(fixture.handle.record().count(RunnerMethod::Draft), 0);
    fixture.submit(job(1, prompt(9, 1), greedy(20)));
    fixture.step().unwrap();
    let measuring = fixture.handle.record().count(RunnerMethod::Draft);
    assert!(measuring > 0);
    fixture.finish();
    fixture.submit(job(2, prompt(9, 1), greedy(20)));
    fixture.finish();
    for outputs in fixture.outputs().values() {
        assert_eq!(outputs.tokens, expected.tokens);
    }
    // A draft and a token cost the same on this clock, so few steps draft; the measurement is over.
    assert!(fixture.handle.record().count(RunnerMethod::Draft) < measuring + 40);
}
