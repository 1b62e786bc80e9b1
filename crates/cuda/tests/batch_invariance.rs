//! Batch invariance: a tree node has the bits of its token fed alone, for any other trees in the
//! step.
//!
//! The models are small ones on large-model paths, and some layers of a large model. They use fused
//! layers, fixed KV splits and the recurrent delta form.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod gpu;
    pub mod model;
}

use std::sync::Arc;
use std::time::Instant;

use conformance::compare::{Precision, compare_rows};
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{
    Backend, CommitItem, KvFormat, KvFormats, Limits, LoadConfig, LogitsRequest, LogitsRow, Mixer,
    NodeIdx, QuantType, Runner, SeqId, SnapshotId, SnapshotLocation, TokenId, Tree, VerifyItem,
};
use cuda::{Numerics, OneLaunch, Options};
use fixtures::gpu::Random;
use model::synth::SynthSpec;

use fixtures::model::{LIMITS, ModelDevice, load_config, open_device_with, text};

const Q8_0_KV: KvFormats = KvFormats {
    k: KvFormat::Q8_0,
    v: KvFormat::Q8_0,
};

fn open_device(eager: bool) -> Option<ModelDevice> {
    open_device_with(Options {
        eager,
        as_large_model: true,
        numerics: Some(Numerics::BatchInvariant),
        ..Options::default()
    })
}

/// A model and the prompt lengths of its four sequences.
struct ModelCase {
    config: LoadConfig,
    read: [usize; 4],
    /// The logits request of every node. It includes whole-row sums.
    ask: LogitsRequest,
}

impl ModelCase {
    fn small(ty: QuantType, seed: u64) -> ModelCase {
        let synthetic = SyntheticModel::new(SyntheticLayout::HybridWide, ty, seed);
        ModelCase {
            config: load_config(&synthetic, Q8_0_KV, LIMITS),
            read: [70, 3, 190, 121],
            ask: LogitsRequest::full(),
        }
    }

    /// The first delta layers and the first attention layer of a large model, with f32 matrices in
    /// its fused layers, and longer prompts with other KV splits.
    fn large() -> ModelCase {
        let loaded = SynthSpec::parse("qwen3.5-27b:q4_k_m-published").unwrap();
        let loaded = loaded.load().unwrap();
        let mut spec = (*loaded.spec).clone();
        let is_attention = |i: &usize| matches!(spec.layers[*i].mixer, Mixer::Attention(_));
        let first = (0..spec.layers.len()).find(is_attention).unwrap();
        spec.layers.truncate(first + 2);
        let limits = Limits {
            context: 2600,
            prefill_chunk: 1024,
            ..LIMITS
        };
        ModelCase {
            config: LoadConfig {
                target: Arc::new(spec),
                weights: loaded.weights,
                draft: None,
                batch_invariant: false,
                kv: Q8_0_KV,
                limits,
            },
            read: [2040, 63, 1300, 300],
            ask: LogitsRequest::top_k(20),
        }
    }

    fn name(&self) -> &str {
        &self.config.target.name
    }

    fn open(&self, device: &ModelDevice) -> Box<dyn Runner> {
        device
            .backend
            .open(self.config.clone(), &mut |_| {})
            .unwrap()
    }
}

/// A random tree of `n` nodes. Parents are among the last few nodes, so paths are long and branch.
fn random_tree(random: &mut Random, vocab: usize, n: usize) -> Tree {
    let mut tree = Tree::root(TokenId(random.below(vocab) as u32));
    while tree.len() < n {
        let back = 1 + random.below(tree.len().min(5));
        let parent = NodeIdx((tree.len() - back) as u16);
        let token = TokenId(random.below(vocab) as u32);
        if tree.child_with(parent, token).is_none() {
            tree.push(parent, token).unwrap();
        }
    }
    tree
}

fn verify(
    runner: &mut dyn Runner,
    seq: SeqId,
    (tree, ask): (&Tree, &LogitsRequest),
) -> Vec<LogitsRow> {
    let requests = vec![ask.clone(); tree.len()];
    let item = VerifyItem {
        seq,
        tree,
        requests: &requests,
    };
    runner.verify(&[item]).unwrap().remove(0)
}

/// Feeds one token alone, commits it, and returns its row.
fn feed(runner: &mut dyn Runner, seq: SeqId, (token, ask): (TokenId, &LogitsRequest)) -> LogitsRow {
    let tree = Tree::root(token);
    let row = verify(runner, seq, (&tree, ask)).remove(0);
    let path = tree.path_to(NodeIdx::ROOT);
    runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
    row
}

fn same(what: &str, found: &LogitsRow, expected: &LogitsRow) {
    let same = compare_rows(found, expected, Precision::BitExact);
    same.unwrap_or_else(|e| panic!("{what}: {e}"));
}

/// Fails unless every node's row equals that of its path fed token by token from the saved state.
/// The tree is discarded first, and the sequence ends at the saved state.
fn check_nodes_equal_tokens(
    runner: &mut dyn Runner,
    (seq, saved): (SeqId, SnapshotId),
    (tree, ask, rows): (&Tree, &LogitsRequest, &[LogitsRow]),
    what: &str,
) {
    let is_leaf = |node: &NodeIdx| tree.nodes().all(|other| tree.parent(other) != Some(*node));
    for leaf in tree.nodes().filter(is_leaf) {
        runner.restore(seq, saved).unwrap();
        for node in tree.path_to(leaf).nodes() {
            let alone = feed(runner, seq, (tree.token(*node), ask));
            let what = format!("{what}, node {} of {}", node.index(), tree.len());
            same(&what, &rows[node.index()], &alone);
        }
    }
    runner.restore(seq, saved).unwrap();
}

/// Batches of 1 to 4 sequences with prompts of all lengths, each with its own tree.
fn check_trees_equal_plain_steps(device: &ModelDevice, model_case: &ModelCase) -> Vec<LogitsRow> {
    let mut runner = model_case.open(device);
    let runner = &mut *runner;
    assert!(runner.info().batch_invariant);
    let (vocab, ask) = (model_case.config.target.vocab, &model_case.ask);
    let mut random = Random::new(21);
    let mut all = Vec::new();
    let read = model_case.read.into_iter().enumerate();
    let seqs: Vec<SeqId> = read
        .map(|(i, read)| {
            let seq = runner.open(read + 300).unwrap();
            let prompt = text(vocab, read, i);
            for chunk in prompt.chunks(model_case.config.limits.prefill_chunk) {
                runner.prefill(seq, chunk, &[]).unwrap();
            }
            seq
        })
        .collect();
    for together in [1, 2, 3, 4, 4] {
        let some = &seqs[4 - together..];
        let trees: Vec<Tree> = (0..together)
            .map(|i| random_tree(&mut random, vocab, 64 / together - 3 * i))
            .collect();
        let saved: Vec<SnapshotId> = some
            .iter()
            .map(|seq| runner.snapshot(*seq, SnapshotLocation::Device).unwrap().id)
            .collect();
        let requests: Vec<Vec<LogitsRequest>> =
            trees.iter().map(|t| vec![ask.clone(); t.len()]).collect();
        let items: Vec<VerifyItem<'_>> = (0..together)
            .map(|i| VerifyItem {
                seq: some[i],
                tree: &trees[i],
                requests: &requests[i],
            })
            .collect();
        let rows = runner.verify(&items).unwrap();
        for i in 0..together {
            let what = format!("{}, {together} together, the {i}th", model_case.name());
            runner.discard(some[i]).unwrap();
            let (at, on_progress) = ((some[i], saved[i]), (&trees[i], ask, &rows[i][..]));
            check_nodes_equal_tokens(runner, at, on_progress, &what);
        }
        // Commit every deepest path and compare with the state after feeding it.
        let again = runner.verify(&items).unwrap();
        let paths: Vec<_> = trees
            .iter()
            .map(|tree| tree.path_to(tree.nodes().max_by_key(|n| tree.depth(*n)).unwrap()))
            .collect();
        let items: Vec<CommitItem<'_>> = some
            .iter()
            .zip(&paths)
            .map(|(seq, path)| CommitItem { seq: *seq, path })
            .collect();
        runner.commit(&items).unwrap();
        for i in 0..together {
            same("the same step again", &again[i][0], &rows[i][0]);
            let next = feed(runner, some[i], (TokenId(5), ask));
            runner.restore(some[i], saved[i]).unwrap();
            for node in paths[i].nodes() {
                feed(runner, some[i], (trees[i].token(*node), ask));
            }
            let plain = feed(runner, some[i], (TokenId(5), ask));
            same("after a path", &next, &plain);
            runner.free_snapshot(saved[i]);
            all.push(next);
        }
        all.extend(rows.into_iter().flatten());
    }
    all
}

#[test]
fn tree_nodes_equal_plain_decode_steps() {
    let Some(device) = open_device(false) else {
        return;
    };
    let small = [QuantType::Q4_K, QuantType::Q6_K, QuantType::Q8_0];
    let small = small.into_iter().zip(1..);
    let trials = small.map(|(ty, seed)| ModelCase::small(ty, seed));
    for model_case in trials.chain([ModelCase::large()]) {
        let start = Instant::now();
        let rows = check_trees_equal_plain_steps(&device, &model_case).len();
        eprintln!(
            "  {}: {rows} rows, {:.1?}",
            model_case.name(),
            start.elapsed()
        );
    }
}

#[test]
fn eager_steps_equal_graph_replays() {
    let (Some(eager), Some(graphs)) = (open_device(true), open_device(false)) else {
        return;
    };
    let model_case = ModelCase::small(QuantType::Q4_K, 4);
    let found = check_trees_equal_plain_steps(&eager, &model_case);
    let expected = check_trees_equal_plain_steps(&graphs, &model_case);
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        same("launch by launch", found, expected);
    }
}

/// Nodes of one tree, and of each other tree in its step. Together they cover all row buckets, some
/// with one to four trees.
const BATCHES: [(usize, usize); 7] = [(1, 1), (5, 1), (12, 4), (16, 8), (24, 4), (32, 8), (34, 10)];

/// Returns the rows of trees verified alone. It first checks them beside one, two and three other
/// trees, in every order, because each tree count has its own plan.
fn check_batch_invariance(device: &ModelDevice, model_case: &ModelCase) -> Vec<LogitsRow> {
    let mut runner = model_case.open(device);
    let runner = &mut *runner;
    let (vocab, ask) = (model_case.config.target.vocab, &model_case.ask);
    let mut random = Random::new(22);
    let read = model_case.read.into_iter().enumerate();
    let seqs: Vec<SeqId> = read
        .map(|(i, read)| {
            let seq = runner.open(read + 100).unwrap();
            let prompt = text(vocab, read, i);
            for chunk in prompt.chunks(model_case.config.limits.prefill_chunk) {
                runner.prefill(seq, chunk, &[]).unwrap();
            }
            seq
        })
        .collect();
    let mut all = Vec::new();
    for (i, (nodes, others)) in BATCHES.into_iter().enumerate() {
        let own = i % seqs.len();
        let trees: Vec<Tree> = (0..seqs.len())
            .map(|seq| random_tree(&mut random, vocab, if seq == own { nodes } else { others }))
            .collect();
        let alone = verify(runner, seqs[own], (&trees[own], ask));
        runner.discard(seqs[own]).unwrap();
        let requests: Vec<Vec<LogitsRequest>> =
            trees.iter().map(|t| vec![ask.clone(); t.len()]).collect();
        for together in 2..=seqs.len() {
            for position_in_step in [0, together - 1] {
                let mut step: Vec<usize> = (1..together).map(|k| (own + k) % seqs.len()).collect();
                step.insert(position_in_step, own);
                let items: Vec<VerifyItem<'_>> = step
                    .iter()
                    .map(|&i| VerifyItem {
                        seq: seqs[i],
                        tree: &trees[i],
                        requests: &requests[i],
                    })
                    .collect();
                let rows = runner.verify(&items).unwrap();
                for i in step {
                    runner.discard(seqs[i]).unwrap();
                }
                let name = model_case.name();
                for (node, (found, expected)) in
                    rows[position_in_step].iter().zip(&alone).enumerate()
                {
                    let what = format!(
                        "{name}: node {node} of {nodes}, the {position_in_step}th of {together}"
                    );
                    same(&what, found, expected);
                }
            }
        }
        all.extend(alone);
    }
    all
}

#[test]
fn tree_bits_do_not_depend_on_the_tree_count_of_the_plan() {
    let (Some(eager), Some(graphs)) = (open_device(true), open_device(false)) else {
        return;
    };
    for model_case in [ModelCase::small(QuantType::Q4_K, 6), ModelCase::large()] {
        let start = Instant::now();
        let found = check_batch_invariance(&eager, &model_case);
        let expected = check_batch_invariance(&graphs, &model_case);
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            same("launch by launch", found, expected);
        }
        let (name, rows) = (model_case.name(), found.len());
        eprintln!("  {name}: {rows} rows, {:.1?}", start.elapsed());
    }
}

/// The root and the last leaf of a star of 1 to 64 nodes: every row count and its padding.
#[test]
fn logits_row_bits_do_not_depend_on_the_batch_width() {
    let Some(device) = open_device(false) else {
        return;
    };
    for model_case in [ModelCase::small(QuantType::Q4_K, 5), ModelCase::large()] {
        let mut runner = model_case.open(&device);
        let runner = &mut *runner;
        let (seq, ask) = (runner.open(300).unwrap(), &model_case.ask);
        let prompt = text(model_case.config.target.vocab, 70, 7);
        runner.prefill(seq, &prompt, &[]).unwrap();
        let saved = runner.snapshot(seq, SnapshotLocation::Device).unwrap().id;
        let single = feed(runner, seq, (TokenId(3), ask));
        let second = feed(runner, seq, (TokenId(9), ask));
        for n in 2..=64_u32 {
            runner.restore(seq, saved).unwrap();
            let mut tokens: Vec<TokenId> = (0..n).map(|i| TokenId(i + 100)).collect();
            (tokens[0], tokens[n as usize - 1]) = (TokenId(3), TokenId(9));
            let star = Tree::new(&tokens, &vec![NodeIdx::ROOT; tokens.len() - 1]).unwrap();
            let rows = verify(runner, seq, (&star, ask));
            runner.discard(seq).unwrap();
            let name = model_case.name();
            same(&format!("{name}: the root of {n}"), &rows[0], &single);
            let leaf = &rows[n as usize - 1];
            same(&format!("{name}: the leaf of {n}"), leaf, &second);
        }
    }
}

/// The first layers of a model up to one past its first attention layer.
struct FirstLayers {
    runner: Box<dyn Runner>,
    vocab: usize,
    /// The files of its kernels.
    files: Vec<&'static str>,
}

/// `None` without a GPU.
fn open_first_layers(model: &str, one_launch: OneLaunch, eager: bool) -> Option<FirstLayers> {
    let loaded = SynthSpec::parse(model).unwrap().load().unwrap();
    let mut spec = (*loaded.spec).clone();
    let is_attention = |i: &usize| matches!(spec.layers[*i].mixer, Mixer::Attention(_));
    let first = (0..spec.layers.len()).find(is_attention).unwrap();
    spec.layers.truncate(first + 2);
    let vocab = spec.vocab;
    let config = LoadConfig {
        target: Arc::new(spec),
        weights: loaded.weights,
        draft: None,
        batch_invariant: false,
        kv: Q8_0_KV,
        limits: Limits {
            sequences: 2,
            tree_nodes: 16,
            ..LIMITS
        },
    };
    let device = open_device_with(Options {
        eager,
        one_launch,
        ..Options::default()
    })?;
    let units = device.backend.units(&config).unwrap();
    let files: Vec<&'static str> = units.iter().map(|unit| unit.file).collect();
    let has_one = files.contains(&"one_launch/one_launch.cu");
    assert_eq!(has_one, one_launch == OneLaunch::On, "{model}");
    Some(FirstLayers {
        runner: device.backend.open(config, &mut |_| {}).unwrap(),
        vocab,
        files,
    })
}

impl FirstLayers {
    /// A sequence that has read `n` tokens.
    fn read(&mut self, n: usize, seed: usize) -> SeqId {
        let seq = self.runner.open(600).unwrap();
        for chunk in text(self.vocab, n, seed).chunks(192) {
            self.runner.prefill(seq, chunk, &[]).unwrap();
        }
        seq
    }

    /// Rows of greedy decoding after prompts of 70 and 500 tokens.
    fn greedy_rows(&mut self) -> Vec<LogitsRow> {
        let mut rows = Vec::new();
        let ask = LogitsRequest::full();
        for (prompt, steps) in [(70, 64), (500, 16)] {
            let seq = self.read(prompt, steps);
            let mut token = TokenId(11);
            for _ in 0..steps {
                let row = feed(&mut *self.runner, seq, (token, &ask));
                let best = (0..row.raw.len()).max_by(|a, b| row.raw[*a].total_cmp(&row.raw[*b]));
                token = TokenId(best.unwrap() as u32);
                rows.push(row);
            }
            self.runner.close(seq);
        }
        rows
    }

    /// Rows of the nodes of trees of 2 to 16 nodes after the same prompts. Of each tree the path to
    /// its last node is committed, or after every third the tree is discarded.
    fn tree_rows(&mut self) -> Vec<LogitsRow> {
        let mut random = Random::new(7);
        let mut rows = Vec::new();
        let ask = LogitsRequest::full();
        for prompt in [70, 500] {
            let seq = self.read(prompt, 16);
            for n in [2, 8, 5, 16, 3, 9, 1, 7, 12] {
                let tree = random_tree(&mut random, self.vocab, n);
                rows.extend(verify(&mut *self.runner, seq, (&tree, &ask)));
                let path = tree.path_to(tree.nodes().last().unwrap());
                if n % 3 == 0 {
                    self.runner.discard(seq).unwrap();
                } else {
                    let item = CommitItem { seq, path: &path };
                    self.runner.commit(&[item]).unwrap();
                }
            }
            self.runner.close(seq);
        }
        rows
    }
}

#[test]
fn one_launch_steps_equal_separate_launches() {
    // The tiny one has three value heads for each key head; the dense one has no delta rule.
    for (model, eager) in [
        ("tiny-hybrid:q8_0", false),
        ("qwen3-0.6b:q8_0", false),
        ("qwen3.5-0.8b:bf16", true),
        ("qwen3.5-0.8b:bf16", false),
        ("qwen3.5-0.8b:q8_0", false),
        ("qwen3.5-0.8b:q4_k_m", false),
    ] {
        let begun = Instant::now();
        let open = |one_launch| open_first_layers(model, one_launch, eager);
        let (Some(mut separate), Some(mut one)) = (open(OneLaunch::Off), open(OneLaunch::On))
        else {
            return;
        };
        // The kernel of trees is that of attention by mma.
        if separate.files.contains(&"attention/decode_tree.cu") {
            assert!(one.files.contains(&"one_launch/several_rows.cu"), "{model}");
        }
        let plain = ("greedy", separate.greedy_rows(), one.greedy_rows());
        let trees = ("trees", separate.tree_rows(), one.tree_rows());
        for (what, separate, one) in [plain, trees] {
            assert_eq!(one.len(), separate.len());
            for (i, (one, separate)) in one.iter().zip(&separate).enumerate() {
                same(&format!("{model}, {what}, row {i}"), one, separate);
            }
        }
        eprintln!("{model}: {:?}", begun.elapsed());
    }
}
