//! Sums by path: a node of a tree has the bits that its token has when it is fed alone, whatever shares the step.
//!
//! Small models that go as large ones do, and some layers of a large one, so that they have chains, attention by position
//! and walked states.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod card;
mod model_world;

use std::sync::Arc;
use std::time::Instant;

use card::Random;
use conformance::compare::{Precision, compare_rows};
use conformance::specimen::{SyntheticLayout, SyntheticModel};
use contract::{
    Backend, CommitItem, KvFormat, KvFormats, Limits, LogitsRequest, LogitsRow, Mixer, NodeIdx,
    OpenPlan, QuantType, Runner, SeqId, SnapshotId, SnapshotLocation, TokenId, Tree, VerifyItem,
};
use cuda::{Options, Sums};
use model::synth::SynthSpec;

use model_world::{Bench, LIMITS, bench_with, plan, text};

const EIGHT: KvFormats = KvFormats {
    k: KvFormat::Q8_0,
    v: KvFormat::Q8_0,
};

fn bench(eager: bool) -> Option<Bench> {
    bench_with(Options {
        eager,
        as_large: true,
        sums: Some(Sums::ByPath),
        ..Options::default()
    })
}

/// A model, and the lengths of what its four sequences have read.
struct Trial {
    plan: OpenPlan,
    read: [usize; 4],
    /// What is asked at every node: sums of a whole row are among it.
    ask: LogitsRequest,
}

impl Trial {
    fn small(ty: QuantType, seed: u64) -> Trial {
        let specimen = SyntheticModel::new(SyntheticLayout::HybridWide, ty, seed);
        Trial {
            plan: plan(&specimen, EIGHT, LIMITS),
            read: [70, 3, 190, 121],
            ask: LogitsRequest::full(),
        }
    }

    /// The first delta layers and the first attention layer of a large model, which has matrices of f32 in its chains,
    /// and longer texts, whose keys are shared out otherwise.
    fn large() -> Trial {
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
        Trial {
            plan: OpenPlan {
                target: Arc::new(spec),
                weights: loaded.weights,
                draft: None,
                batch_invariant: false,
                kv: EIGHT,
                limits,
            },
            read: [2040, 63, 1300, 300],
            ask: LogitsRequest::top_k(20),
        }
    }

    fn name(&self) -> &str {
        &self.plan.target.name
    }

    fn open(&self, bench: &Bench) -> Box<dyn Runner> {
        bench.backend.open(self.plan.clone(), &mut |_| {}).unwrap()
    }
}

/// A tree of `n` nodes, each below one of the last few before it, so that paths are long and branch.
fn bush(random: &mut Random, vocab: usize, n: usize) -> Tree {
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

/// The row after one token that is fed alone, and stays.
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

/// Fails unless every node's row is that of its path fed token by token from the saved state on. The tree is
/// discarded first, and the sequence stands where it was saved in the end.
fn nodes_are_their_tokens(
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

/// Batches of 1 to 4 sequences that have read prompts of all lengths, each with a tree of its own.
fn trees_are_plain_steps(bench: &Bench, trial: &Trial) -> Vec<LogitsRow> {
    let mut runner = trial.open(bench);
    let runner = &mut *runner;
    assert!(runner.info().batch_invariant);
    let (vocab, ask) = (trial.plan.target.vocab, &trial.ask);
    let mut random = Random::new(21);
    let mut all = Vec::new();
    let read = trial.read.into_iter().enumerate();
    let seqs: Vec<SeqId> = read
        .map(|(i, read)| {
            let seq = runner.open(read + 300).unwrap();
            let prompt = text(vocab, read, i);
            for chunk in prompt.chunks(trial.plan.limits.prefill_chunk) {
                runner.prefill(seq, chunk, &[]).unwrap();
            }
            seq
        })
        .collect();
    for together in [1, 2, 3, 4, 4] {
        let some = &seqs[4 - together..];
        let trees: Vec<Tree> = (0..together)
            .map(|i| bush(&mut random, vocab, 64 / together - 3 * i))
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
            let what = format!("{}, {together} together, the {i}th", trial.name());
            runner.discard(some[i]).unwrap();
            let (at, told) = ((some[i], saved[i]), (&trees[i], ask, &rows[i][..]));
            nodes_are_their_tokens(runner, at, told, &what);
        }
        // Then every one goes down its deepest path, and stands where feeding it would have brought it.
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
fn nodes_of_trees_have_the_bits_of_plain_steps() {
    let Some(bench) = bench(false) else { return };
    let small = [QuantType::Q4_K, QuantType::Q6_K, QuantType::Q8_0];
    let small = small.into_iter().zip(1..);
    let trials = small.map(|(ty, seed)| Trial::small(ty, seed));
    for trial in trials.chain([Trial::large()]) {
        let start = Instant::now();
        let rows = trees_are_plain_steps(&bench, &trial).len();
        eprintln!("  {}: {rows} rows, {:.1?}", trial.name(), start.elapsed());
    }
}

#[test]
fn launch_by_launch_steps_have_the_bits_of_graphs() {
    let (Some(eager), Some(graphs)) = (bench(true), bench(false)) else {
        return;
    };
    let trial = Trial::small(QuantType::Q4_K, 4);
    let found = trees_are_plain_steps(&eager, &trial);
    let expected = trees_are_plain_steps(&graphs, &trial);
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        same("launch by launch", found, expected);
    }
}

/// Nodes of a tree and of every other that shares its step: together they come to all buckets, some with one to four trees.
const COMPANY: [(usize, usize); 7] = [(1, 1), (5, 1), (12, 4), (16, 8), (24, 4), (32, 8), (34, 10)];

/// The rows of trees that are verified alone, after it was found that they are the same beside one, two and three others,
/// wherever they stand in the step: every number of trees has a plan of its own.
fn company_changes_no_bit(bench: &Bench, trial: &Trial) -> Vec<LogitsRow> {
    let mut runner = trial.open(bench);
    let runner = &mut *runner;
    let (vocab, ask) = (trial.plan.target.vocab, &trial.ask);
    let mut random = Random::new(22);
    let read = trial.read.into_iter().enumerate();
    let seqs: Vec<SeqId> = read
        .map(|(i, read)| {
            let seq = runner.open(read + 100).unwrap();
            let prompt = text(vocab, read, i);
            for chunk in prompt.chunks(trial.plan.limits.prefill_chunk) {
                runner.prefill(seq, chunk, &[]).unwrap();
            }
            seq
        })
        .collect();
    let mut all = Vec::new();
    for (i, (nodes, others)) in COMPANY.into_iter().enumerate() {
        let own = i % seqs.len();
        let trees: Vec<Tree> = (0..seqs.len())
            .map(|seq| bush(&mut random, vocab, if seq == own { nodes } else { others }))
            .collect();
        let alone = verify(runner, seqs[own], (&trees[own], ask));
        runner.discard(seqs[own]).unwrap();
        let requests: Vec<Vec<LogitsRequest>> =
            trees.iter().map(|t| vec![ask.clone(); t.len()]).collect();
        for together in 2..=seqs.len() {
            for place in [0, together - 1] {
                let mut step: Vec<usize> = (1..together).map(|k| (own + k) % seqs.len()).collect();
                step.insert(place, own);
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
                let name = trial.name();
                for (node, (found, expected)) in rows[place].iter().zip(&alone).enumerate() {
                    let what =
                        format!("{name}: node {node} of {nodes}, the {place}th of {together}");
                    same(&what, found, expected);
                }
            }
        }
        all.extend(alone);
    }
    all
}

#[test]
fn a_tree_has_the_same_bits_in_the_plans_of_all_numbers_of_trees() {
    let (Some(eager), Some(graphs)) = (bench(true), bench(false)) else {
        return;
    };
    for trial in [Trial::small(QuantType::Q4_K, 6), Trial::large()] {
        let start = Instant::now();
        let found = company_changes_no_bit(&eager, &trial);
        let expected = company_changes_no_bit(&graphs, &trial);
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            same("launch by launch", found, expected);
        }
        let (name, rows) = (trial.name(), found.len());
        eprintln!("  {name}: {rows} rows, {:.1?}", start.elapsed());
    }
}

/// A root and the last leaf of a star of 1 to 64 nodes: every number of rows, whatever bucket it is padded to.
#[test]
fn a_row_has_the_same_bits_at_every_width() {
    let Some(bench) = bench(false) else { return };
    for trial in [Trial::small(QuantType::Q4_K, 5), Trial::large()] {
        let mut runner = trial.open(&bench);
        let runner = &mut *runner;
        let (seq, ask) = (runner.open(300).unwrap(), &trial.ask);
        let prompt = text(trial.plan.target.vocab, 70, 7);
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
            let name = trial.name();
            same(&format!("{name}: the root of {n}"), &rows[0], &single);
            let leaf = &rows[n as usize - 1];
            same(&format!("{name}: the leaf of {n}"), leaf, &second);
        }
    }
}
