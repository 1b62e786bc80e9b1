//! Constraints: masks and forced runs give the same output with and without trees, and a forced run
//! takes one pass.

use std::sync::Arc;

use conformance::fake::{FakeDraft, FakeSpec, Language, RunnerMethod};
use contract::{TokenId, TokenMask};
use decode::{Constraint, Constraints, FinishReason, GenerationParams, Job};
use proptest::prelude::*;

use crate::fixture::{
    ENDLESS, LANGUAGE, Output, RandomTrees, SchedulerFixture, TestRng, any_sources, config,
    drafting, greedy, job, prompt, sampled, spec, with_sources,
};

/// A toy grammar: the residue of the last token masks the next. If the output's sum is a multiple
/// of seven, the next token is forced.
#[derive(Clone)]
struct Residues {
    last: u32,
    sum: u32,
}

impl Residues {
    fn after(&self, path: &[TokenId]) -> Residues {
        path.iter().fold(self.clone(), |state, token| Residues {
            last: token.0,
            sum: state.sum + token.0 + 1,
        })
    }
}

impl Constraint for Residues {
    fn forced(&mut self, path: &[TokenId]) -> Option<TokenId> {
        let state = self.after(path);
        state
            .sum
            .is_multiple_of(7)
            .then_some(TokenId((state.last * 3 + 5) % 40))
    }

    fn allowed(&mut self, path: &[TokenId]) -> Option<Arc<TokenMask>> {
        let state = self.after(path);
        if state.last.is_multiple_of(5) {
            return None;
        }
        let mut mask = TokenMask::none(LANGUAGE.vocab);
        (0..40)
            .filter(|id| !(id + state.last).is_multiple_of(3))
            .for_each(|id| mask.insert(TokenId(id)));
        Some(Arc::new(mask))
    }

    fn advance(&mut self, tokens: &[TokenId]) {
        *self = self.after(tokens);
    }
}

/// Forces a text after a number of tokens: a prefix, or the end of reasoning.
#[derive(Debug, Clone)]
struct ForcedText {
    /// Tokens before the text, from the advanced ones on.
    wait: usize,
    text: Arc<[TokenId]>,
    /// Tokens of the text already advanced.
    done: usize,
}

impl ForcedText {
    /// `text` after `wait` tokens; with 0 it starts the output.
    fn after(wait: usize, text: Arc<[TokenId]>) -> ForcedText {
        ForcedText {
            wait,
            text,
            done: 0,
        }
    }
}

impl Constraint for ForcedText {
    fn forced(&mut self, path: &[TokenId]) -> Option<TokenId> {
        let into = path.len().checked_sub(self.wait)?;
        self.text.get(self.done + into).copied()
    }

    fn allowed(&mut self, _path: &[TokenId]) -> Option<Arc<TokenMask>> {
        None
    }

    fn advance(&mut self, tokens: &[TokenId]) {
        let waited = tokens.len().min(self.wait);
        self.wait -= waited;
        self.done += tokens.len() - waited;
    }
}

fn residues() -> Constraints {
    Constraints::new(|choice| {
        Box::new(Residues {
            last: choice as u32,
            sum: 0,
        })
    })
}

fn text(wait: usize, len: u32) -> (Constraints, Vec<TokenId>) {
    let text: Vec<TokenId> = (0..len).map(|i| TokenId(10 + i % 20)).collect();
    let shared: Arc<[TokenId]> = text.clone().into();
    let make =
        move |_| Box::new(ForcedText::after(wait, Arc::clone(&shared))) as Box<dyn Constraint>;
    (Constraints::new(make), text)
}

fn outputs(fixture: &mut SchedulerFixture, job: Job) -> Vec<Output> {
    let choices = job.choices;
    fixture.submit(job);
    fixture.finish();
    let mut all = fixture.outputs();
    (0..choices)
        .map(|i| all.remove(&(0, i)).unwrap_or_default())
        .collect()
}

/// Plain decoding: one token per step, forced or not, since passes hold one row.
fn plain_outputs(language: Language, job: &Job) -> Vec<Output> {
    let mut narrow = spec(language);
    narrow.limits.tree_nodes = 1;
    outputs(&mut SchedulerFixture::new(narrow, config()), job.clone())
}

fn same(a: &[Output], b: &[Output]) -> bool {
    let parts = |outputs: &Output| (outputs.tokens.clone(), outputs.reason);
    a.iter().map(parts).eq(b.iter().map(parts))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn constrained_output_is_independent_of_trees(
        len in 1..40_usize, salt in 0..40_u32, max_tokens in 1..60_usize, seed: u64,
        sample: bool, wait in 0..12_usize, run in 1..30_u32, grammar: bool,
        nodes in 1..24_usize, acceptance_rate in 0.0..1.0_f64, choices in 1..3_usize,
        logprobs in prop::option::of(0..3_usize), sources in any_sources(),
    ) {
        let params = if sample { sampled(max_tokens, seed) } else { greedy(max_tokens) };
        let constraints = if grammar { residues() } else { text(wait, run).0 };
        let job = Job {
            choices,
            ..job(0, prompt(len, salt), GenerationParams {
                constraints: Some(constraints),
                logprobs,
                ..params
            })
        };
        let expected = plain_outputs(LANGUAGE, &job);
        let random_trees = RandomTrees { language: LANGUAGE, rng: TestRng(seed), nodes };
        let mut fixture = SchedulerFixture::with_trees(spec(LANGUAGE), config(), random_trees);
        let found = outputs(&mut fixture, job.clone());
        prop_assert!(same(&found, &expected), "{found:?}\n{expected:?}");
        let drafting = drafting(spec(LANGUAGE), 7, acceptance_rate);
        let mixed = || SchedulerFixture::new(drafting.clone(), with_sources(config(), sources));
        let found = outputs(&mut mixed(), job.clone());
        prop_assert!(same(&found, &expected), "{found:?}\n{expected:?}");
        let conditional = FakeSpec { conditional_draft: true, ..drafting.clone() };
        let mut conditional = SchedulerFixture::new(conditional, with_sources(config(), sources));
        let found = outputs(&mut conditional, job.clone());
        prop_assert!(same(&found, &expected), "{found:?}\n{expected:?}");
        let mut opted_out = job;
        opted_out.params.speculate = false;
        let found = outputs(&mut mixed(), opted_out);
        prop_assert!(same(&found, &expected), "{found:?}\n{expected:?}");
    }
}

#[test]
fn forced_run_takes_one_pass_with_and_without_draft() {
    for draft in [
        None,
        Some(FakeDraft {
            depth: 7,
            acceptance_rate: 1.0,
        }),
    ] {
        let (constraints, text) = text(4, 20);
        let params = GenerationParams {
            constraints: Some(constraints),
            speculate: draft.is_some(),
            ..greedy(30)
        };
        let mut fixture = SchedulerFixture::new(
            FakeSpec {
                draft,
                ..spec(ENDLESS)
            },
            config(),
        );
        let outputs = outputs(&mut fixture, job(0, prompt(9, 1), params)).remove(0);
        assert_eq!(outputs.ids()[4..24], text);
        assert_eq!(outputs.reason, Some(FinishReason::Length));
        assert_eq!(outputs.stats.forced_tokens, 20);
        // Plain decoding: three more tokens, then the run and the next token at once, then five.
        let most = if draft.is_some() { 4 } else { 9 };
        assert!(outputs.stats.decode_steps <= most, "{:?}", outputs.stats);
        assert!(draft.is_some() || outputs.stats.drafted_tokens == 0);
        assert!(fixture.scheduler.stats().forced_tokens == 20);
    }
}

#[test]
fn output_may_start_and_end_within_forced_tokens() {
    let (constraints, text) = text(0, 5);
    let params = GenerationParams {
        constraints: Some(constraints),
        ..greedy(3)
    };
    let outputs = outputs(
        &mut SchedulerFixture::new(spec(ENDLESS), config()),
        job(0, prompt(9, 1), params),
    )
    .remove(0);
    assert_eq!(outputs.ids(), text[..3]);
    assert_eq!(
        outputs.stats.forced_tokens, 2,
        "the first came with the prompt's row"
    );
}

#[test]
fn request_can_disable_speculation() {
    let draft = Some(FakeDraft {
        depth: 7,
        acceptance_rate: 1.0,
    });
    let params = GenerationParams {
        speculate: false,
        ..greedy(10)
    };
    let mut fixture = SchedulerFixture::new(
        FakeSpec {
            draft,
            ..spec(ENDLESS)
        },
        config(),
    );
    let outputs = outputs(&mut fixture, job(0, prompt(9, 1), params)).remove(0);
    assert_eq!(
        (outputs.stats.decode_steps, outputs.stats.drafted_tokens),
        (9, 0)
    );
    assert_eq!(fixture.handle.record().count(RunnerMethod::Draft), 0);
}

#[test]
fn finished_event_reports_acceptance_depths_and_times() {
    let draft = Some(FakeDraft {
        depth: 7,
        acceptance_rate: 1.0,
    });
    let clock = || {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NOW: AtomicU64 = AtomicU64::new(0);
        std::time::Duration::from_millis(NOW.fetch_add(1, Ordering::Relaxed))
    };
    let config = decode::SchedulerConfig {
        clock: Some(clock),
        ..config()
    };
    let mut fixture = SchedulerFixture::new(
        FakeSpec {
            draft,
            ..spec(ENDLESS)
        },
        config,
    );
    let outputs = outputs(&mut fixture, job(0, prompt(9, 1), greedy(17))).remove(0);
    let stats = outputs.stats;
    assert_eq!((stats.decode_steps, stats.depths.steps), (2, 2));
    assert_eq!(stats.depths.accepted[..8], [2, 2, 2, 2, 2, 2, 2, 0]);
    assert!(stats.times.draft.as_millis() >= 2 && stats.times.verify.as_millis() >= 2);
    let all = fixture.scheduler.stats();
    assert_eq!((all.drafted_steps, all.accepted_by_depth[6]), (2, 2));
}

#[test]
fn drafting_stops_when_a_perfect_draft_cannot_pay() {
    let draft = Some(FakeDraft {
        depth: 7,
        acceptance_rate: 1.0,
    });
    // A pass of eight rows at the cost of one, or of eight: drafting pays, or it does not.
    for (eight, drafts) in [(1.0, true), (8.0, false)] {
        let costs = decode::CostTable::new(vec![(1, 1.0), (8, eight)])
            .and_then(|costs| costs.with_draft(decode::DraftSource::Block, vec![(1, 0.2)]));
        let config = decode::SchedulerConfig {
            speculation: decode::SpeculationConfig {
                costs,
                ..decode::SpeculationConfig::default()
            },
            ..config()
        };
        let mut fixture = SchedulerFixture::new(
            FakeSpec {
                draft,
                ..spec(ENDLESS)
            },
            config,
        );
        let outputs = outputs(&mut fixture, job(0, prompt(9, 1), greedy(33))).remove(0);
        assert_eq!(
            fixture.handle.record().count(RunnerMethod::Draft) > 0,
            drafts
        );
        assert_eq!(
            outputs.stats.decode_steps < 12,
            drafts,
            "{:?}",
            outputs.stats
        );
        assert_eq!(
            outputs.ids(),
            plain_outputs(ENDLESS, &job(0, prompt(9, 1), greedy(33)))[0].ids()
        );
    }
}

#[test]
fn forced_text_is_complete_for_any_split() {
    let text: Vec<TokenId> = (10..15).map(TokenId).collect();
    for cut in 0..9 {
        let mut forced = ForcedText::after(3, text.clone().into());
        let mut said = Vec::new();
        let say =
            |forced: &mut ForcedText, path: &[TokenId]| forced.forced(path).unwrap_or(TokenId(0));
        for _ in 0..cut {
            let token = say(&mut forced, &said);
            said.push(token);
        }
        forced.advance(&said);
        let mut path = Vec::new();
        for _ in cut..9 {
            let token = say(&mut forced, &path);
            path.push(token);
        }
        said.extend(path);
        let ids: Vec<u32> = said.iter().map(|t| t.0).collect();
        assert_eq!(ids, [0, 0, 0, 10, 11, 12, 13, 14, 0], "cut at {cut}");
    }
}
