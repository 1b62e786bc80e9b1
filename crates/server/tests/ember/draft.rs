//! The bundled draft against its golden files: the independent implementation's candidates with a
//! greedy token as root. The draft runs as shipped, and with sliding windows and causal blocks.

use contract::{
    Backend, CommitItem, DraftCandidates, DraftItem, DraftLoad, DraftLoadConfig, KvFormat,
    LoadConfig, LogitsRequest, NodeIdx, Runner, SeqId, TokenId, Tree, VerifyItem,
};
use cpu::{CpuBackend, CpuOptions};
use decode::TreeInit;
use decode::speculation::{TreeBudget, TreeInputs, build_tree};
use model::DraftOptions;

use crate::golden::{FAST, REFERENCE, cases, ember, ids, numbers, tensors};
use crate::load_config;

/// Candidates per depth in the golden file.
const K: usize = 8;
/// Distance of the roots in the golden file of the sliding variant; the other file has every root.
const STRIDE: usize = 6;
/// Window of the sliding variant.
const WINDOW: usize = 64;

pub(crate) fn config_with_draft(window: Option<usize>, options: CpuOptions) -> LoadConfig {
    let loaded = model::load(&ember("ember.gguf")).unwrap();
    let path = ember("ember-draft.gguf");
    let draft = model::load_draft(
        &path,
        &loaded.spec,
        DraftOptions {
            window,
            ..DraftOptions::default()
        },
    )
    .unwrap();
    let mut config = load_config(&loaded, options);
    config.limits.tree_nodes = 64;
    config.draft = Some(DraftLoadConfig {
        spec: draft.spec,
        weights: draft.weights,
        kv: if options.reference {
            KvFormat::F32
        } else {
            KvFormat::F16
        },
        load: DraftLoad::AtFirstUse,
    });
    config
}

/// Commits one token by plain decoding.
pub(crate) fn feed(runner: &mut dyn Runner, seq: SeqId, token: TokenId) {
    let tree = Tree::root(token);
    let requests = [LogitsRequest::NONE];
    let item = VerifyItem {
        seq,
        tree: &tree,
        requests: &requests,
    };
    runner.verify(&[item]).unwrap();
    let path = tree.path_to(NodeIdx::ROOT);
    runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
}

/// Passes the candidates of every `stride`th greedy token of a case to `see`, with the root's
/// index.
fn drafts(
    (config, backend): (&LoadConfig, &dyn Backend),
    name: &str,
    (k, stride): (usize, usize),
    see: &mut dyn FnMut(usize, DraftCandidates),
) {
    let cases = cases();
    let case = cases.iter().find(|case| case["name"] == name).unwrap();
    let (prompt, greedy) = (ids(&case["prompt_ids"]), ids(&case["greedy_ids"]));
    let mut runner = backend.open(config.clone(), &mut |_| {}).unwrap();
    let depth = runner.info().draft_depth.unwrap();
    let seq = runner.open(prompt.len() + greedy.len()).unwrap();
    for chunk in prompt.chunks(runner.info().limits.prefill_chunk) {
        runner.prefill(seq, chunk, &[]).unwrap();
    }
    for (i, &root) in greedy.iter().enumerate() {
        if i.is_multiple_of(stride) {
            let items = [DraftItem { seq, root }];
            see(i, runner.draft(&items, depth, k).unwrap().remove(0));
        }
        feed(&mut *runner, seq, root);
    }
}

/// The largest difference of a log-probability from the golden one, over the three cases that have
/// them.
fn worst(window: Option<usize>, options: CpuOptions) -> f32 {
    let golden = tensors();
    let config = config_with_draft(window, options);
    let backend = CpuBackend::new(options);
    let kind = if window.is_some() { "sliding." } else { "" };
    let (mut worst, mut count) = (0.0_f32, 0);
    for name in ["story", "code", "tool"] {
        let best = &golden[&format!("{name}.{kind}draft_ids")];
        let expected = &golden[&format!("{name}.{kind}draft_log_probs")];
        // Twice as many candidates, because near ties may be ordered differently.
        drafts(
            (&config, &backend),
            name,
            (2 * K, STRIDE),
            &mut |root, found| {
                let root = if window.is_some() {
                    root / STRIDE
                } else {
                    root
                };
                let depth = found.lse.len();
                for row in 0..depth {
                    for rank in 0..K {
                        let at = (root * depth + row) * K + rank;
                        let token = TokenId(best[at] as u32);
                        let of_row = row * found.k..(row + 1) * found.k;
                        let rank_found =
                            found.ids[of_row.clone()].iter().position(|id| *id == token);
                        let rank_found = rank_found.unwrap_or_else(|| {
                            panic!(
                                "{name}, root {root}, depth {}: {token} is not a candidate",
                                row + 1
                            )
                        });
                        let off = (found.log_probs[of_row][rank_found] - expected[at]).abs();
                        worst = worst.max(off);
                        count += 1;
                    }
                }
            },
        );
    }
    assert!(count > 4000, "only {count} candidates were compared");
    worst
}

#[test]
fn reference_drafts_match_the_independent_implementation() {
    let off = worst(None, REFERENCE);
    assert!(off < 1e-4, "{off}");
}

#[test]
fn windowed_causal_drafts_match_the_independent_implementation() {
    let off = worst(Some(WINDOW), REFERENCE);
    assert!(off < 1e-4, "{off}");
}

/// Drafted tokens of a tree that agree with a text.
fn accepted(tree: &Tree, text: &[TokenId]) -> usize {
    let mut at = NodeIdx::ROOT;
    let follow = |token: &&TokenId| {
        let child = tree.child_with(at, **token);
        at = child.unwrap_or(at);
        child.is_some()
    };
    text.iter().take_while(follow).count()
}

/// Accepted draft tokens on a device and in the independent implementation, for chains and for
/// trees of the same candidates.
pub(crate) fn acceptance(backend: &dyn Backend) -> Vec<(&'static str, usize, f64)> {
    let config = config_with_draft(None, FAST);
    let kinds = [("chain", TreeInit::ChainOnly), ("tree", TreeInit::None)];
    let mut all = kinds.map(|(kind, _)| (kind, 0, 0.0));
    for case in cases().iter().filter(|case| !case["kept"].is_null()) {
        let text = ids(&case["greedy_ids"]);
        for (kind, _, expected) in &mut all {
            *expected += numbers(&case["kept"][*kind]).iter().sum::<f64>();
        }
        let name = case["name"].as_str().unwrap();
        drafts((&config, backend), name, (K, 1), &mut |root, candidates| {
            for ((_, init), (_, found, _)) in kinds.into_iter().zip(&mut all) {
                let inputs = TreeInputs {
                    root: text[root],
                    forced: &[],
                    hints: &[],
                    candidates: &candidates,
                };
                let budget = TreeBudget {
                    max_nodes: 22,
                    max_depth: 15,
                    init,
                };
                *found += accepted(&build_tree(inputs, budget).tree, &text[root + 1..]);
            }
        });
    }
    all.to_vec()
}

#[test]
fn acceptance_matches_the_independent_implementation() {
    for (kind, found, expected) in acceptance(&CpuBackend::new(FAST)) {
        let off = (found as f64 - expected).abs() / expected;
        assert!(off < 0.02, "{kind}: {found} accepted, {expected} expected");
        assert!(expected > 1000.0, "{kind}: only {expected} were expected");
    }
}
