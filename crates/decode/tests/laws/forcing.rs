//! What must or may come next: forced runs and masks give the same text with and without trees, and whole runs
//! of forced tokens take one pass.

use std::sync::Arc;

use conformance::fake::{FakeDraft, FakeSpec, Language, RunnerMethod};
use contract::{TokenId, TokenMask};
use decode::{Constraint, Constraints, FinishReason, ForcedText, Job, Settings};
use proptest::prelude::*;

use crate::world::{
    Dice, ENDLESS, LANGUAGE, Said, Wild, World, config, greedy, job, prompt, sampled, spec,
};

/// A grammar of sorts: the residue of the last token decides which residues may follow; where the sum of what
/// was said is a multiple of seven, the next token is forced.
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

fn said(world: &mut World, job: Job) -> Vec<Said> {
    let choices = job.choices;
    world.submit(job);
    world.finish();
    let mut all = world.said();
    (0..choices)
        .map(|i| all.remove(&(0, i)).unwrap_or_default())
        .collect()
}

/// Plainly: one token a round, forced or not, in a world whose passes hold one row.
fn plain(language: Language, job: &Job) -> Vec<Said> {
    let mut narrow = spec(language);
    narrow.limits.tree_nodes = 1;
    said(&mut World::new(narrow, config()), job.clone())
}

fn same(a: &[Said], b: &[Said]) -> bool {
    let parts = |said: &Said| (said.tokens.clone(), said.reason);
    a.iter().map(parts).eq(b.iter().map(parts))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn constraints_give_one_text_with_any_tree_and_with_none(
        len in 1..40_usize, salt in 0..40_u32, max_tokens in 1..60_usize, seed: u64,
        sample: bool, wait in 0..12_usize, run in 1..30_u32, grammar: bool,
        nodes in 1..24_usize, right in 0.0..1.0_f64, choices in 1..3_usize, logprobs in prop::option::of(0..3_usize),
    ) {
        let settings = if sample { sampled(max_tokens, seed) } else { greedy(max_tokens) };
        let constraints = if grammar { residues() } else { text(wait, run).0 };
        let job = Job {
            choices,
            ..job(0, prompt(len, salt), Settings { constraints: Some(constraints), logprobs, ..settings })
        };
        let expected = plain(LANGUAGE, &job);
        let wild = Wild { language: LANGUAGE, dice: Dice(seed), nodes };
        let found = said(&mut World::with_trees(spec(LANGUAGE), config(), wild), job.clone());
        prop_assert!(same(&found, &expected), "{found:?}\n{expected:?}");
        let drafting = FakeSpec { draft: Some(FakeDraft { depth: 7, right }), ..spec(LANGUAGE) };
        let found = said(&mut World::new(drafting.clone(), config()), job.clone());
        prop_assert!(same(&found, &expected), "{found:?}\n{expected:?}");
        let mut opted_out = job;
        opted_out.settings.speculate = false;
        let found = said(&mut World::new(drafting, config()), opted_out);
        prop_assert!(same(&found, &expected), "{found:?}\n{expected:?}");
    }
}

#[test]
fn a_forced_run_takes_one_pass_with_and_without_a_draft() {
    for draft in [
        None,
        Some(FakeDraft {
            depth: 7,
            right: 1.0,
        }),
    ] {
        let (constraints, text) = text(4, 20);
        let settings = Settings {
            constraints: Some(constraints),
            speculate: draft.is_some(),
            ..greedy(30)
        };
        let mut world = World::new(
            FakeSpec {
                draft,
                ..spec(ENDLESS)
            },
            config(),
        );
        let said = said(&mut world, job(0, prompt(9, 1), settings)).remove(0);
        assert_eq!(said.ids()[4..24], text);
        assert_eq!(said.reason, Some(FinishReason::Length));
        assert_eq!(said.stats.forced_tokens, 20);
        // Plainly: three more, then the run and the token after it at once, then five.
        let most = if draft.is_some() { 4 } else { 9 };
        assert!(said.stats.rounds <= most, "{:?}", said.stats);
        assert!(draft.is_some() || said.stats.drafted_tokens == 0);
        assert!(world.scheduler.stats().forced_tokens == 20);
    }
}

#[test]
fn a_text_may_begin_with_what_is_forced_and_end_in_it() {
    let (constraints, text) = text(0, 5);
    let settings = Settings {
        constraints: Some(constraints),
        ..greedy(3)
    };
    let said = said(
        &mut World::new(spec(ENDLESS), config()),
        job(0, prompt(9, 1), settings),
    )
    .remove(0);
    assert_eq!(said.ids(), text[..3]);
    assert_eq!(
        said.stats.forced_tokens, 2,
        "the first came with the prompt's row"
    );
}

#[test]
fn a_request_can_opt_out_of_drafting() {
    let draft = Some(FakeDraft {
        depth: 7,
        right: 1.0,
    });
    let settings = Settings {
        speculate: false,
        ..greedy(10)
    };
    let mut world = World::new(
        FakeSpec {
            draft,
            ..spec(ENDLESS)
        },
        config(),
    );
    let said = said(&mut world, job(0, prompt(9, 1), settings)).remove(0);
    assert_eq!((said.stats.rounds, said.stats.drafted_tokens), (9, 0));
    assert_eq!(world.handle.record().count(RunnerMethod::Draft), 0);
}

#[test]
fn depths_and_times_are_told() {
    let draft = Some(FakeDraft {
        depth: 7,
        right: 1.0,
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
    let mut world = World::new(
        FakeSpec {
            draft,
            ..spec(ENDLESS)
        },
        config,
    );
    let said = said(&mut world, job(0, prompt(9, 1), greedy(17))).remove(0);
    let stats = said.stats;
    assert_eq!((stats.rounds, stats.depths.rounds), (2, 2));
    assert_eq!(stats.depths.kept[..8], [2, 2, 2, 2, 2, 2, 2, 0]);
    assert!(stats.times.draft.as_millis() >= 2 && stats.times.verify.as_millis() >= 2);
    let all = world.scheduler.stats();
    assert_eq!((all.drafted_rounds, all.kept_depths[6]), (2, 2));
}

#[test]
fn drafting_rests_where_even_a_perfect_draft_would_not_pay() {
    let draft = Some(FakeDraft {
        depth: 7,
        right: 1.0,
    });
    // A pass of eight rows at the price of one, or of eight: drafting brings much, or nothing.
    for (eight, drafts) in [(1.0, true), (8.0, false)] {
        let costs = decode::CostTable::new(vec![(1, 1.0), (8, eight)], vec![(1, 0.2)]);
        let config = decode::SchedulerConfig {
            speculation: decode::Speculation {
                costs,
                ..decode::Speculation::default()
            },
            ..config()
        };
        let mut world = World::new(
            FakeSpec {
                draft,
                ..spec(ENDLESS)
            },
            config,
        );
        let said = said(&mut world, job(0, prompt(9, 1), greedy(33))).remove(0);
        assert_eq!(world.handle.record().count(RunnerMethod::Draft) > 0, drafts);
        assert_eq!(said.stats.rounds < 12, drafts, "{:?}", said.stats);
        assert_eq!(
            said.ids(),
            plain(ENDLESS, &job(0, prompt(9, 1), greedy(33)))[0].ids()
        );
    }
}
