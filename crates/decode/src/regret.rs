//! What the stop by costs may lose: rounds on a fake runner whose passes take the time of a table, with texts whose
//! drafts come true as an adversary likes.

use std::time::Duration;

use conformance::fake::{FakeDraft, FakeRunner, FakeSpec, Language, RunnerMethod};
use contract::{CommitItem, LogitsRequest, NodeIdx, Runner, SeqId, TokenId, Tree, VerifyItem};

use crate::costs::CostTable;
use crate::habit::{EARNED, FIRST, PURSES};
use crate::tree_build::{Drafted, Root, Speculation, TreeResult, TreeSource};
use crate::{RoundTimes, Seed};

/// A device on which a draft costs more than a token, and rows cost a third of one: two CPU cores and a small model.
fn dear() -> CostTable {
    let verify = [
        (1, 0.64),
        (2, 0.76),
        (4, 1.09),
        (8, 2.02),
        (16, 3.44),
        (24, 4.85),
    ];
    table(&verify, &[(1, 0.91), (2, 1.82)])
}

/// A device that is bound by reading weights: a draft costs a seventh of a token, 24 rows hardly more than one.
fn cheap() -> CostTable {
    let verify = [(1, 7.0), (8, 7.4), (16, 8.3), (24, 9.6)];
    table(&verify, &[(1, 0.97), (2, 1.43)])
}

/// A table of milliseconds.
fn table(verify: &[(usize, f64)], draft: &[(usize, f64)]) -> CostTable {
    let seconds = |points: &[(usize, f64)]| points.iter().map(|p| (p.0, p.1 * 1e-3)).collect();
    CostTable::new(seconds(verify), seconds(draft)).unwrap()
}

/// What a table says, with every round's time off by up to a fifth.
struct Machine {
    costs: CostTable,
    dice: u64,
}

impl Machine {
    fn off(&mut self) -> f64 {
        // Knuth's MMIX generator; its high bits are good enough for dice.
        self.dice = self
            .dice
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        0.8 + 0.4 * (self.dice >> 40) as f64 / f64::from(1 << 24)
    }
}

/// What a text is like: how many drafted tokens come true in a round, given its number, the tokens said so far
/// and the longest way down the tree; and the doubt at its tokens.
struct Text {
    tokens: usize,
    kept: fn(usize, usize, usize) -> usize,
    doubt: f64,
}

/// Time of all texts against that of plain decoding, and tokens of all of them, one text after another.
fn spoken(costs: CostTable, texts: impl Iterator<Item = Text>) -> (f64, f64, usize) {
    let mut machine = Machine {
        costs: costs.clone(),
        dice: 11,
    };
    let spec = FakeSpec {
        draft: Some(FakeDraft {
            depth: 15,
            right: 0.9,
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
    let mut drafted = Drafted::new(Speculation {
        seed: Seed::None,
        costs: Some(costs.clone()),
        ..Speculation::default()
    });
    let (mut took, mut plainly, mut said) = (0.0, 0.0, 0);
    for text in texts {
        let seq = runner.open(text.tokens + 100).unwrap();
        let (mut left, mut rounds) = (text.tokens, 0);
        while left > 0 {
            let history = [TokenId((left % 20) as u32)];
            let root = Root {
                seq,
                history: &history,
                max_depth: left - 1,
                forced: &[],
                speculate: true,
                doubt: text.doubt,
            };
            let drafts = runner.handle().record().count(RunnerMethod::Draft);
            let tree = drafted.trees(&mut runner, &[root]).unwrap().remove(0);
            let drew = runner.handle().record().count(RunnerMethod::Draft) > drafts;
            let deepest = tree.depths().iter().copied().max().map_or(0, usize::from);
            let tokens = 1 + (text.kept)(rounds, text.tokens - left, deepest).min(deepest);
            advance(&mut runner, seq, &tree);
            let seconds = Duration::from_secs_f64;
            let off = machine.off();
            let draft = if drew {
                machine.costs.draft(1) * off
            } else {
                0.0
            };
            let verify = machine.costs.verify(tree.len()) * off;
            let times = RoundTimes {
                draft: seconds(draft),
                verify: seconds(verify),
                commit: Duration::ZERO,
            };
            drafted.learn(&[TreeResult { seq, tokens }], times);
            took += draft + verify;
            plainly += tokens as f64 * machine.costs.verify(1);
            left -= tokens;
            said += tokens;
            rounds += 1;
        }
        runner.close(seq);
    }
    (took, plainly, said)
}

/// Keeps the fake's own position moving; which token it stands at is of no matter.
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

fn texts(n: usize, text: impl Fn(usize) -> Text) -> impl Iterator<Item = Text> {
    (0..n).map(text)
}

#[test]
fn no_adversary_takes_more_than_the_purses_and_the_share() {
    let adversaries: [fn(usize, usize, usize) -> usize; 6] = [
        // Nothing ever comes true.
        |_, _, _| 0,
        // Everything does until it is trusted, then nothing, over and over.
        |round, _, deepest| if round % 12 < 4 { deepest } else { 0 },
        // One good round in many.
        |round, _, deepest| if round % 7 == 0 { deepest } else { 0 },
        // The beginning of each text promises what the rest breaks.
        |_, said, deepest| if said < 30 { deepest } else { 0 },
        // Just too little, always.
        |_, _, deepest| deepest.min(1),
        |round, _, deepest| deepest.min(round % 3),
    ];
    for costs in [dear(), cheap()] {
        for (i, kept) in adversaries.into_iter().enumerate() {
            for doubt in [0.0, 0.3] {
                for (n, tokens) in [(30, 20), (6, 128), (1, 1000)] {
                    let of = |_| Text {
                        tokens,
                        kept,
                        doubt,
                    };
                    let (took, plainly, said) = spoken(costs.clone(), texts(n, of));
                    let token = plainly / said as f64;
                    let lost = (took - plainly) / token;
                    // Rounds are off by up to a fifth, in both directions.
                    let noise = 0.01 * said as f64;
                    let most = PURSES * FIRST + EARNED * said as f64 + noise + 2.0;
                    assert!(
                        lost <= most,
                        "{i}, doubt {doubt}, {n} x {tokens}: {lost} of {most}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_never_comes_true_costs_less_than_three_hundredths() {
    for costs in [dear(), cheap()] {
        for doubt in [0.0, 0.05, 1.0] {
            let of = |_| Text {
                tokens: 256,
                kept: |_, _, _| 0,
                doubt,
            };
            let (took, plainly, _) = spoken(costs.clone(), texts(20, of));
            assert!(took < 1.03 * plainly, "{doubt}: {took} for {plainly}");
        }
    }
}

#[test]
fn what_comes_true_is_drafted_from_the_first_round_on() {
    let of = |_| Text {
        tokens: 96,
        kept: |_, _, deepest| deepest,
        doubt: 0.0005,
    };
    let (took, plainly, _) = spoken(dear(), texts(10, of));
    assert!(plainly > 1.4 * took, "{took} for {plainly}");
    // Where drafts are cheap, texts are drafted however doubtful they are.
    for doubt in [0.4, 9.0] {
        let of = |_| Text {
            tokens: 96,
            kept: |_, _, deepest| deepest.min(3),
            doubt,
        };
        let (took, plainly, _) = spoken(cheap(), texts(10, of));
        assert!(plainly > 2.0 * took, "{doubt}: {took} for {plainly}");
    }
}

#[test]
fn a_long_text_that_turns_good_is_found_out() {
    let of = |_| Text {
        tokens: 3000,
        kept: |_, said, deepest| if said < 800 { 0 } else { deepest },
        doubt: 0.2,
    };
    let (took, plainly, _) = spoken(dear(), texts(1, of));
    assert!(plainly > 1.2 * took, "{took} for {plainly}");
}
