//! Tests of the speculation controller: steps on a fake runner whose passes take the times of a
//! table, with adversarial acceptance.

use std::time::Duration;

use conformance::fake::{FakeDraft, FakeRunner, FakeSpec, Language, RunnerMethod};
use contract::protocol::MAX_WAITING_TOKENS;
use contract::{
    CommitItem, DraftItem, LogitsRequest, NodeIdx, Runner, SeqId, TokenId, Tree, VerifyItem,
};

use super::build_tree::TreeInit;
use super::config::SpeculationConfig;
use super::controller::{INITIAL_BUDGET, TRIAL_SHARE};
use super::costs::CostTable;
use super::proposer::MixedProposer;
use super::sources::{DraftSource, SourceSet};
use super::tree_proposer::{TreeProposer, TreeRequest, TreeResult};
use crate::stats::StepTimes;

/// A device on which a draft costs more than a token, and a row a third of one: two CPU cores and a
/// small model. A token that waits for a draft costs a thirtieth of one.
fn expensive_draft() -> CostTable {
    let verify = [
        (1, 0.64),
        (2, 0.76),
        (4, 1.09),
        (8, 2.02),
        (16, 3.44),
        (24, 4.85),
    ];
    table(&verify, &[(1, 0.91), (2, 1.82)]).with_waiting(DraftSource::Block, 0.02e-3)
}

/// A device bound by reading weights: a draft costs a seventh of a token, 24 rows hardly more than
/// one.
fn cheap_draft() -> CostTable {
    let verify = [(1, 7.0), (8, 7.4), (16, 8.3), (24, 9.6)];
    table(&verify, &[(1, 0.97), (2, 1.43)])
}

/// A table in milliseconds.
fn table(verify: &[(usize, f64)], draft: &[(usize, f64)]) -> CostTable {
    let seconds = |points: &[(usize, f64)]| points.iter().map(|p| (p.0, p.1 * 1e-3)).collect();
    CostTable::new(seconds(verify))
        .and_then(|table| table.with_draft(DraftSource::Block, seconds(draft)))
        .unwrap()
}

/// A device with the table's times, each with noise of up to a fifth.
struct NoisyDevice {
    costs: CostTable,
    rng: u64,
}

impl NoisyDevice {
    fn noise(&mut self) -> f64 {
        // Knuth's MMIX generator; its high bits suffice here.
        self.rng = self
            .rng
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        0.8 + 0.4 * (self.rng >> 40) as f64 / f64::from(1 << 24)
    }
}

/// A text: accepted tokens of a step, given the step's number, the tokens generated so far and the
/// tree's depth; and the surprisal.
struct Scenario {
    tokens: usize,
    kept: fn(usize, usize, usize) -> usize,
    surprisal: f64,
}

/// Seconds of all scenarios, seconds of plain decoding, and tokens, one scenario after another.
fn simulate(costs: CostTable, scenarios: impl Iterator<Item = Scenario>) -> (f64, f64, usize) {
    let mut device = NoisyDevice {
        costs: costs.clone(),
        rng: 11,
    };
    let spec = FakeSpec {
        draft: Some(FakeDraft {
            depth: 15,
            acceptance_rate: 0.9,
        }),
        language: Language {
            vocab: 24,
            spread: 20.0,
            ending: None,
            salt: 3,
        },
        ..FakeSpec::default()
    };
    let mut runner = FakeRunner::new(spec);
    let mut drafted = MixedProposer::new(
        SpeculationConfig {
            init: TreeInit::None,
            costs: Some(costs.clone()),
            ..SpeculationConfig::default()
        },
        SourceSet::of(&[DraftSource::Block]),
    );
    let (mut seconds_taken, mut plain_seconds, mut generated) = (0.0, 0.0, 0);
    for scenario in scenarios {
        let seq = runner.open(scenario.tokens + 100).unwrap();
        let (mut left, mut rounds, mut waiting) = (scenario.tokens, 0, 0);
        while left > 0 {
            let history = [TokenId((left % 20) as u32)];
            let root = TreeRequest {
                seq,
                history: &history,
                max_depth: left - 1,
                forced: &[],
                speculate: true,
                surprisal: scenario.surprisal,
            };
            let item = DraftItem {
                seq,
                root: root.token(),
            };
            let chain = runner.draft(&[item], 15, 1).unwrap().remove(0).ids;
            let drafts = runner.handle().record().count(RunnerMethod::Draft);
            let tree = drafted
                .propose(&mut runner, &[root])
                .unwrap()
                .remove(0)
                .tree;
            let drew = runner.handle().record().count(RunnerMethod::Draft) > drafts;
            let deepest = tree.depths().iter().copied().max().map_or(0, usize::from);
            let kept = (scenario.kept)(rounds, scenario.tokens - left, deepest).min(deepest);
            let yielded = yielded(&chain, kept, deepest);
            let tokens = yielded.len();
            advance(&mut runner, seq, &tree);
            let seconds = Duration::from_secs_f64;
            let off = device.noise();
            let draft = if drew {
                let costs = &device.costs;
                let stored = costs.waiting(DraftSource::Block, std::mem::take(&mut waiting));
                (costs.draft(DraftSource::Block, 1) + stored) * off
            } else {
                0.0
            };
            let verify = device.costs.verify(tree.len()) * off;
            let times = StepTimes {
                draft: seconds(draft),
                verify: seconds(verify),
                commit: Duration::ZERO,
            };
            let tokens_of = &yielded[..];
            drafted.observe(
                &[TreeResult {
                    seq,
                    tokens: tokens_of,
                }],
                times,
            );
            seconds_taken += draft + verify;
            plain_seconds += tokens as f64 * device.costs.verify(1);
            left -= tokens;
            waiting += tokens;
            if waiting >= MAX_WAITING_TOKENS {
                waiting = 0;
            }
            generated += tokens;
            rounds += 1;
        }
        runner.close(seq);
    }
    (seconds_taken, plain_seconds, generated)
}

/// The tokens of a step that accepts `kept` drafted ones of a tree: as far as drafted, and behind a
/// tree that is accepted as a whole, the token that the draft would have proposed next.
fn yielded(chain: &[TokenId], kept: usize, deepest: usize) -> Vec<TokenId> {
    let mut tokens = chain[..kept].to_vec();
    let next = chain.get(kept).filter(|_| kept == deepest && kept > 0);
    tokens.push(next.copied().unwrap_or(TokenId(9999)));
    tokens
}

/// Advances the fake's position; its token does not matter.
fn advance(runner: &mut dyn Runner, seq: SeqId, tree: &Tree) {
    let root = Tree::root(tree.token(NodeIdx::ROOT));
    let requests = [LogitsRequest::NONE];
    let tree = &root;
    runner
        .verify(&[VerifyItem {
            seq,
            tree,
            requests: &requests,
        }])
        .unwrap();
    let path = tree.path_to(NodeIdx::ROOT);
    runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
}

fn scenarios(n: usize, scenario: impl Fn(usize) -> Scenario) -> impl Iterator<Item = Scenario> {
    (0..n).map(scenario)
}

#[test]
fn adversarial_acceptance_loses_at_most_the_trial_budget() {
    let adversaries: [fn(usize, usize, usize) -> usize; 6] = [
        // Nothing is ever accepted.
        |_, _, _| 0,
        // Everything is accepted until the controller trusts it, then nothing, repeatedly.
        |round, _, deepest| if round % 12 < 4 { deepest } else { 0 },
        // One good step in many.
        |round, _, deepest| if round % 7 == 0 { deepest } else { 0 },
        // The start of each text promises what the rest does not hold.
        |_, generated, deepest| if generated < 30 { deepest } else { 0 },
        // Always slightly too little.
        |_, _, deepest| deepest.min(1),
        |round, _, deepest| deepest.min(round % 3),
    ];
    for costs in [expensive_draft(), cheap_draft()] {
        for (i, kept) in adversaries.into_iter().enumerate() {
            for surprisal in [0.0, 0.3] {
                for (n, tokens) in [(30, 20), (6, 128), (1, 1000)] {
                    let of = |_| Scenario {
                        tokens,
                        kept,
                        surprisal,
                    };
                    let (seconds_taken, plain_seconds, generated) =
                        simulate(costs.clone(), scenarios(n, of));
                    let token = plain_seconds / generated as f64;
                    let lost = (seconds_taken - plain_seconds) / token;
                    // Step times have noise of up to a fifth, in both directions.
                    let noise = 0.01 * generated as f64;
                    let most = INITIAL_BUDGET + TRIAL_SHARE * generated as f64 + noise + 2.0;
                    assert!(
                        lost <= most,
                        "{i}, surprisal {surprisal}, {n} x {tokens}: {lost} of {most}"
                    );
                }
            }
        }
    }
}

#[test]
fn draft_that_is_never_accepted_costs_less_than_3_percent() {
    for costs in [expensive_draft(), cheap_draft()] {
        for surprisal in [0.0, 0.05, 1.0] {
            let of = |_| Scenario {
                tokens: 256,
                kept: |_, _, _| 0,
                surprisal,
            };
            let (seconds_taken, plain_seconds, _) = simulate(costs.clone(), scenarios(20, of));
            assert!(
                seconds_taken < 1.03 * plain_seconds,
                "{surprisal}: {seconds_taken} for {plain_seconds}"
            );
        }
    }
}

#[test]
fn accepted_drafts_speed_up_from_the_first_step() {
    let of = |_| Scenario {
        tokens: 96,
        kept: |_, _, deepest| deepest,
        surprisal: 0.0005,
    };
    let (seconds_taken, plain_seconds, _) = simulate(expensive_draft(), scenarios(10, of));
    assert!(
        plain_seconds > 1.4 * seconds_taken,
        "{seconds_taken} for {plain_seconds}"
    );
    // With cheap drafts, texts are drafted at any surprisal.
    for surprisal in [0.4, 9.0] {
        let of = |_| Scenario {
            tokens: 96,
            kept: |_, _, deepest| deepest.min(3),
            surprisal,
        };
        let (seconds_taken, plain_seconds, _) = simulate(cheap_draft(), scenarios(10, of));
        assert!(
            plain_seconds > 2.0 * seconds_taken,
            "{surprisal}: {seconds_taken} for {plain_seconds}"
        );
    }
}

#[test]
fn controller_detects_a_text_that_becomes_predictable() {
    let of = |_| Scenario {
        tokens: 3000,
        kept: |_, generated, deepest| if generated < 800 { 0 } else { deepest },
        surprisal: 0.2,
    };
    let (seconds_taken, plain_seconds, _) = simulate(expensive_draft(), scenarios(1, of));
    assert!(
        plain_seconds > 1.2 * seconds_taken,
        "{seconds_taken} for {plain_seconds}"
    );
}
