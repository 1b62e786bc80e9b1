//! The properties of a runner, bit for bit, on tiny models with production head sizes. Verified
//! trees give the results of decoding, and rejected nodes leave no state.

#![expect(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::cell::RefCell;
use std::path::Path;

use contract::{
    Backend, CommitItem, DeviceError, KvFormat, KvFormats, Limits, LoadConfig, LogitsRequest,
    LogitsRow, NodeIdx, Runner, SeqId, SnapshotLocation, TokenId, Tree, VerifyItem,
};
use cpu::{CpuBackend, CpuOptions};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const VOCAB: u32 = 512;

/// One way to open a runner.
#[derive(Debug, Clone, Copy)]
struct Setup {
    model: &'static str,
    kv: (KvFormat, KvFormat),
    options: CpuOptions,
}

const FAST: CpuOptions = CpuOptions {
    reference: false,
    threads: Some(2),
};
const REFERENCE: CpuOptions = CpuOptions {
    reference: true,
    threads: Some(2),
};

/// Every model, both numerics, and each pair of KV cache types at least once.
const SETUPS: [Setup; 11] = [
    setup("hybrid_r3_q4_k_m", (KvFormat::F16, KvFormat::F16), FAST),
    setup("hybrid_r3_mixed", (KvFormat::Q8_0, KvFormat::Q8_0), FAST),
    setup("hybrid_r1_bf16", (KvFormat::F16, KvFormat::Q8_0), FAST),
    setup("dense_f16", (KvFormat::Q8_0, KvFormat::F16), FAST),
    setup("llama3_f16", (KvFormat::Q8_0, KvFormat::F16), FAST),
    setup("gemma3_q4_1", (KvFormat::F16, KvFormat::F16), FAST),
    setup("qwen3moe_q8_0", (KvFormat::Q8_0, KvFormat::F16), FAST),
    setup("qwen35moe_mtp_q4_1", (KvFormat::F16, KvFormat::F16), FAST),
    setup(
        "qwen35moe_fused_q5_0",
        (KvFormat::F32, KvFormat::F32),
        REFERENCE,
    ),
    setup(
        "hybrid_r3_q4_k_m",
        (KvFormat::F32, KvFormat::F32),
        REFERENCE,
    ),
    setup("dense_f16", (KvFormat::F16, KvFormat::Q8_0), REFERENCE),
];

const fn setup(model: &'static str, kv: (KvFormat, KvFormat), options: CpuOptions) -> Setup {
    Setup { model, kv, options }
}

impl Setup {
    fn load_config(&self) -> LoadConfig {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/fixtures/models");
        let loaded = model::load(&folder.join(format!("{}.gguf", self.model))).unwrap();
        LoadConfig {
            target: loaded.spec,
            weights: loaded.weights,
            draft: None,
            batch_invariant: false,
            kv: KvFormats {
                k: self.kv.0,
                v: self.kv.1,
            },
            limits: Limits {
                sequences: 4,
                context: 320,
                tree_nodes: 24,
                prefill_chunk: 256,
                pool_tokens: None,
            },
        }
    }

    fn open(&self) -> Box<dyn Runner> {
        CpuBackend::new(self.options)
            .open(self.load_config(), &mut |_| {})
            .unwrap()
    }
}

/// Runs `property` on generated values, on one runner per setup. A property closes the sequences
/// that it opens.
fn check<V: std::fmt::Debug>(
    strategy: impl Strategy<Value = V>,
    property: impl Fn(&mut dyn Runner, V) -> Result<(), TestCaseError>,
) {
    for setup in SETUPS {
        let runner = RefCell::new(setup.open());
        let config = Config {
            cases: if setup.options.reference { 3 } else { 8 },
            failure_persistence: None,
            ..Config::default()
        };
        TestRunner::new(config)
            .run(&strategy, |value| {
                property(&mut **runner.borrow_mut(), value)
            })
            .unwrap_or_else(|error| panic!("{setup:?}: {error}"));
        let room = runner.borrow().capacity();
        assert_eq!(room.sequences, 4, "a property left a sequence open");
    }
}

fn tokens(n: impl Into<proptest::collection::SizeRange>) -> impl Strategy<Value = Vec<TokenId>> {
    proptest::collection::vec((0..VOCAB).prop_map(TokenId), n)
}

/// Trees of any shape: each node's parent is a random earlier node.
fn trees() -> impl Strategy<Value = Tree> {
    let nodes = proptest::collection::vec((any::<prop::sample::Index>(), 0..VOCAB), 0..20);
    ((0..VOCAB), nodes).prop_map(|(root, nodes)| {
        let mut tree = Tree::root(TokenId(root));
        for (parent, token) in nodes {
            let parent = NodeIdx(parent.index(tree.len()) as u16);
            // Skips a token that a sibling already has.
            let _ = tree.push(parent, TokenId(token));
        }
        tree
    })
}

fn start(runner: &mut dyn Runner, history: &[TokenId]) -> SeqId {
    let seq = runner.open(320).unwrap();
    if !history.is_empty() {
        runner.prefill(seq, history, &[]).unwrap();
    }
    seq
}

fn verify(runner: &mut dyn Runner, seq: SeqId, tree: &Tree) -> Vec<LogitsRow> {
    let requests = vec![LogitsRequest::full(); tree.len()];
    let item = VerifyItem {
        seq,
        tree,
        requests: &requests,
    };
    runner.verify(&[item]).unwrap().remove(0)
}

fn commit(runner: &mut dyn Runner, seq: SeqId, tree: &Tree, end: NodeIdx) {
    let path = tree.path_to(end);
    runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
}

/// Decodes one token without a tree.
fn decode(runner: &mut dyn Runner, seq: SeqId, token: TokenId) -> LogitsRow {
    let tree = Tree::root(token);
    let row = verify(runner, seq, &tree).remove(0);
    commit(runner, seq, &tree, NodeIdx::ROOT);
    row
}

/// Every bit of a sequence's committed state.
fn state(runner: &mut dyn Runner, seq: SeqId) -> Vec<u8> {
    let snapshot = runner.snapshot(seq, SnapshotLocation::Host).unwrap();
    let mut bytes = Vec::new();
    runner.export(snapshot.id, &mut bytes).unwrap();
    runner.free_snapshot(snapshot.id);
    bytes
}

#[test]
fn aligned_chunked_prefill_equals_whole_prefill() {
    let cuts = proptest::collection::vec(any::<bool>(), 4);
    check((tokens(60..250), cuts), |runner, (tokens, cuts)| {
        let align = runner.info().prefill_align;
        let requests: Vec<(usize, LogitsRequest)> = [3, 50, tokens.len() - 1]
            .map(|i| (i, LogitsRequest::full()))
            .into();
        let whole = runner.open(320).unwrap();
        let expected = runner.prefill(whole, &tokens, &requests).unwrap();
        let cut = runner.open(320).unwrap();
        let mut rows = Vec::new();
        let mut begin = 0;
        let ends = (1..).map(|i| i * align).zip(&cuts).filter(|(_, cut)| **cut);
        for end in ends.map(|(end, _)| end).chain([tokens.len()]) {
            let end = end.min(tokens.len());
            let own = requests.iter().filter(|(at, _)| (begin..end).contains(at));
            let own: Vec<(usize, LogitsRequest)> =
                own.map(|(at, ask)| (at - begin, ask.clone())).collect();
            if begin < end {
                rows.extend(runner.prefill(cut, &tokens[begin..end], &own).unwrap());
            }
            begin = end;
        }
        prop_assert!(rows == expected);
        prop_assert!(state(runner, cut) == state(runner, whole));
        runner.close(whole);
        runner.close(cut);
        Ok(())
    });
}

#[test]
fn path_commit_equals_decoding_its_nodes() {
    let case = (
        tokens(0..150),
        trees(),
        any::<prop::sample::Index>(),
        trees(),
    );
    check(case, |runner, (history, tree, end, next)| {
        let end = NodeIdx(end.index(tree.len()) as u16);
        let together = start(runner, &history);
        let rows = verify(runner, together, &tree);
        commit(runner, together, &tree, end);
        let alone = start(runner, &history);
        for node in tree.path_to(end).nodes() {
            let row = decode(runner, alone, tree.token(*node));
            prop_assert!(row == rows[node.index()], "node {node}");
        }
        prop_assert!(state(runner, together) == state(runner, alone));
        let after = verify(runner, together, &next);
        prop_assert!(after == verify(runner, alone, &next));
        runner.close(together);
        runner.close(alone);
        Ok(())
    });
}

#[test]
fn speculative_steps_leave_the_state_of_decoding() {
    let rounds = proptest::collection::vec((trees(), any::<prop::sample::Index>()), 1..6);
    check((tokens(0..70), rounds), |runner, (history, rounds)| {
        let (treed, plain) = (start(runner, &history), start(runner, &history));
        for (tree, end) in &rounds {
            let end = NodeIdx(end.index(tree.len()) as u16);
            verify(runner, treed, tree);
            commit(runner, treed, tree, end);
            for node in tree.path_to(end).nodes() {
                decode(runner, plain, tree.token(*node));
            }
        }
        // Prefill after decoding begins inside a chunk.
        let tail: Vec<TokenId> = (0..70).map(TokenId).collect();
        let requests = [(69, LogitsRequest::full())];
        let rows = runner.prefill(treed, &tail, &requests).unwrap();
        prop_assert!(rows == runner.prefill(plain, &tail, &requests).unwrap());
        prop_assert!(state(runner, treed) == state(runner, plain));
        runner.close(treed);
        runner.close(plain);
        Ok(())
    });
}

#[test]
fn discard_leaves_no_trace() {
    check(
        (tokens(0..100), trees(), trees()),
        |runner, (history, forgotten, next)| {
            let seq = start(runner, &history);
            let before = state(runner, seq);
            verify(runner, seq, &forgotten);
            runner.discard(seq).unwrap();
            prop_assert!(state(runner, seq) == before);
            let rows = verify(runner, seq, &next);
            let fresh = start(runner, &history);
            prop_assert!(rows == verify(runner, fresh, &next));
            runner.close(seq);
            runner.close(fresh);
            Ok(())
        },
    );
}

#[test]
fn siblings_are_independent() {
    check((tokens(0..100), trees()), |runner, (history, tree)| {
        let seq = start(runner, &history);
        let rows = verify(runner, seq, &tree);
        runner.discard(seq).unwrap();
        for node in tree.nodes() {
            let path = tree.path_to(node);
            let line: Vec<TokenId> = path.nodes().iter().map(|n| tree.token(*n)).collect();
            let alone = verify(runner, seq, &Tree::chain(&line).unwrap());
            runner.discard(seq).unwrap();
            prop_assert!(alone.last() == rows.get(node.index()), "node {node}");
        }
        runner.close(seq);
        Ok(())
    });
}

#[test]
fn batching_changes_no_bit() {
    let items = proptest::collection::vec((tokens(0..90), trees()), 2..=4);
    check(items, |runner, items| {
        let seqs: Vec<SeqId> = items.iter().map(|(h, _)| start(runner, h)).collect();
        let alone: Vec<Vec<LogitsRow>> = seqs
            .iter()
            .zip(&items)
            .map(|(&seq, (_, tree))| {
                let rows = verify(runner, seq, tree);
                runner.discard(seq).unwrap();
                rows
            })
            .collect();
        let requests: Vec<Vec<LogitsRequest>> = items
            .iter()
            .map(|(_, tree)| vec![LogitsRequest::full(); tree.len()])
            .collect();
        let together: Vec<VerifyItem<'_>> = seqs
            .iter()
            .zip(&items)
            .zip(&requests)
            .map(|((&seq, (_, tree)), requests)| VerifyItem {
                seq,
                tree,
                requests,
            })
            .collect();
        prop_assert!(runner.verify(&together).unwrap() == alone);
        seqs.into_iter().for_each(|seq| runner.close(seq));
        Ok(())
    });
}

#[test]
fn restore_and_import_are_bit_identical() {
    check(
        (tokens(1..150), trees(), tokens(0..40)),
        |runner, (history, tree, other)| {
            let seq = start(runner, &history);
            verify(runner, seq, &tree);
            commit(runner, seq, &tree, NodeIdx(tree.len() as u16 - 1));
            let before = state(runner, seq);
            let saved = runner.snapshot(seq, SnapshotLocation::Device).unwrap();
            let expected = decode(runner, seq, TokenId(7));
            runner.restore(seq, saved.id).unwrap();
            prop_assert!(state(runner, seq) == before);
            let imported = runner.import(&mut before.as_slice()).unwrap();
            prop_assert_eq!(imported.position, saved.position);
            prop_assert_eq!(imported.bytes, saved.bytes);
            // The sequence's earlier state is discarded.
            let elsewhere = start(runner, &other);
            decode(runner, elsewhere, TokenId(9));
            runner.restore(elsewhere, imported.id).unwrap();
            for seq in [seq, elsewhere] {
                prop_assert!(decode(runner, seq, TokenId(7)) == expected);
                runner.close(seq);
            }
            runner.free_snapshot(saved.id);
            runner.free_snapshot(imported.id);
            Ok(())
        },
    );
}

#[test]
fn thread_count_changes_no_bit() {
    let (history, tree) = history_and_tree();
    for setup in SETUPS {
        let results = [1, 2, 5].map(|threads| {
            let options = CpuOptions {
                threads: Some(threads),
                ..setup.options
            };
            let mut runner = Setup { options, ..setup }.open();
            let seq = start(&mut *runner, &history);
            let rows = verify(&mut *runner, seq, &tree);
            commit(&mut *runner, seq, &tree, NodeIdx(3));
            (rows, state(&mut *runner, seq))
        });
        assert!(results[0] == results[1] && results[1] == results[2]);
    }
}

#[test]
fn prefill_and_decode_agree_closely() {
    let (history, _) = history_and_tree();
    for setup in SETUPS {
        let mut runner = setup.open();
        let (whole, steps) = (runner.open(320).unwrap(), runner.open(320).unwrap());
        let last = history.len() - 1;
        let requests = [(last, LogitsRequest::full())];
        let row = runner
            .prefill(whole, &history, &requests)
            .unwrap()
            .remove(0);
        let mut stepped = LogitsRow::default();
        for token in &history {
            stepped = decode(&mut *runner, steps, *token);
        }
        let pairs = row.logits.iter().zip(&stepped.logits);
        let mean = pairs.map(|(a, b)| (a - b).abs()).sum::<f32>() / row.logits.len() as f32;
        // Sums in another order differ by 1e-6; rounding to eight bits or to f16 may differ by one
        // step.
        let bound = match setup.kv.0 {
            KvFormat::F32 => 1e-5,
            _ => 0.03,
        };
        assert!(mean < bound, "{setup:?}: {mean}");
    }
}

fn history_and_tree() -> (Vec<TokenId>, Tree) {
    let history = (0..150_u32).map(|i| TokenId(i * 37 % VOCAB)).collect();
    let mut tree = Tree::root(TokenId(11));
    for (parent, token) in [(0, 5), (1, 6), (2, 7), (0, 8), (4, 9), (1, 10)] {
        tree.push(NodeIdx(parent), TokenId(token)).unwrap();
    }
    (history, tree)
}

#[test]
fn foreign_and_damaged_snapshots_are_refused() {
    let mut runner = SETUPS[0].open();
    let (history, _) = history_and_tree();
    let seq = start(&mut *runner, &history);
    let good = state(&mut *runner, seq);
    let mut other = SETUPS[1].open();
    let mut refused = |bytes: &[u8]| {
        let mut source = bytes;
        let error = runner.import(&mut source).unwrap_err();
        assert!(
            matches!(error, DeviceError::InvalidSnapshot { .. }),
            "{error}"
        );
    };
    let mut source = good.as_slice();
    assert!(other.import(&mut source).is_err());
    for cut in (0..good.len()).step_by(good.len() / 50) {
        refused(&good[..cut]);
    }
    let mut far = good.clone();
    far[44..52].copy_from_slice(&u64::MAX.to_le_bytes());
    refused(&far);
    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    refused(&flipped);
}
