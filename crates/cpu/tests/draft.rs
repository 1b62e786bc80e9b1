//! The draft on this device. Its candidates depend only on the committed tokens, however they were
//! committed. Hundreds of trees leave the target's state bit-identical to token-by-token decoding.
#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use contract::{
    Backend, CommitItem, DeviceError, DraftCandidates, DraftItem, DraftLoad, DraftLoadConfig,
    KvFormat, KvFormats, Limits, LoadConfig, LogitsRequest, NodeIdx, Runner, SeqId,
    SnapshotLocation, TokenId, Tree, VerifyItem,
};
use cpu::{CpuBackend, CpuOptions};
use model::DraftOptions;

const K: usize = 8;
const WINDOW: usize = 64;

fn ember(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../models/ember")
        .join(name)
}

/// The bundled pair; with `window`, all draft layers but the last have a sliding window.
fn load_config(window: Option<usize>, context: usize) -> LoadConfig {
    let loaded = model::load(&ember("ember.gguf")).unwrap();
    let draft = ember("ember-draft.gguf");
    let draft = model::load_draft(
        &draft,
        &loaded.spec,
        DraftOptions {
            window,
            ..DraftOptions::default()
        },
    )
    .unwrap();
    LoadConfig {
        target: loaded.spec,
        weights: loaded.weights,
        draft: Some(DraftLoadConfig {
            spec: draft.spec,
            weights: draft.weights,
            kv: KvFormat::F16,
            load: DraftLoad::AtFirstUse,
        }),
        batch_invariant: false,
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        },
        limits: Limits {
            sequences: 3,
            context,
            tree_nodes: 24,
            prefill_chunk: 256,
            pool_tokens: None,
        },
    }
}

fn open(config: LoadConfig) -> Box<dyn Runner> {
    CpuBackend::new(CpuOptions::default())
        .open(config, &mut |_| {})
        .unwrap()
}

fn text(n: u32) -> Vec<TokenId> {
    (0..n)
        .map(|i| TokenId((i * i * 31 + 7 * i) % 6000))
        .collect()
}

fn draft(runner: &mut dyn Runner, seqs: &[SeqId]) -> Vec<DraftCandidates> {
    let items: Vec<DraftItem> = seqs
        .iter()
        .map(|seq| DraftItem {
            seq: *seq,
            root: TokenId(300),
        })
        .collect();
    let depth = runner.info().draft_depth.unwrap();
    runner.draft(&items, depth, K).unwrap()
}

/// A draft of `depth` positions behind each sequence.
fn draft_to(runner: &mut dyn Runner, seqs: &[SeqId], depth: usize) -> Vec<DraftCandidates> {
    let root = TokenId(300);
    let items = seqs.iter().map(|seq| DraftItem { seq: *seq, root });
    runner.draft(&items.collect::<Vec<_>>(), depth, K).unwrap()
}

#[test]
fn narrow_drafts_are_those_of_a_shorter_block() {
    let mut short = load_config(None, 512);
    if let Some(draft) = &mut short.draft {
        let mut spec = (*draft.spec).clone();
        spec.block = 8;
        draft.spec = Arc::new(spec);
    }
    let (mut runner, mut short) = (open(load_config(None, 512)), open(short));
    let narrow = runner.info().narrow_draft.unwrap();
    assert_eq!((narrow.depth, narrow.blocks(3)), (7, 2));
    assert_eq!(short.info().narrow_draft, None);
    let read = |runner: &mut Box<dyn Runner>| -> Vec<SeqId> {
        let seqs = [60, 33, 90].map(|n| {
            let seq = runner.open(300).unwrap();
            runner.prefill(seq, &text(n), &[]).unwrap();
            seq
        });
        seqs.to_vec()
    };
    let (seqs, others) = (read(&mut runner), read(&mut short));
    for depth in [1, 7] {
        let found = draft_to(&mut *runner, &seqs, depth);
        assert_eq!(found, draft_to(&mut *short, &others, depth), "{depth}");
        assert_eq!(found[1..2], draft_to(&mut *runner, &seqs[1..2], depth));
    }
    let whole = draft_to(&mut *runner, &seqs, 8);
    assert_ne!(
        whole[0].log_probs[..K],
        draft_to(&mut *runner, &seqs, 7)[0].log_probs[..K]
    );
}

fn feed(runner: &mut dyn Runner, seq: SeqId, tokens: &[TokenId]) {
    for token in tokens {
        let tree = Tree::root(*token);
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
}

/// Commits `tokens` as a winding path through trees that are full of rejected branches.
fn feed_by_trees(runner: &mut dyn Runner, seq: SeqId, tokens: &[TokenId]) {
    for tokens in tokens.chunks(7) {
        let mut tree = Tree::root(tokens[0]);
        let mut at = NodeIdx::ROOT;
        for token in &tokens[1..] {
            let wrong = TokenId((token.0 + 1) % 6000);
            let dead_end = tree.push(at, wrong).unwrap();
            tree.push(dead_end, *token).unwrap();
            at = tree.push(at, *token).unwrap();
        }
        let requests = vec![LogitsRequest::NONE; tree.len()];
        let item = VerifyItem {
            seq,
            tree: &tree,
            requests: &requests,
        };
        runner.verify(&[item]).unwrap();
        let path = tree.path_to(at);
        runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
    }
}

#[test]
fn drafts_depend_on_committed_tokens_only() {
    let text = text(200);
    for window in [None, Some(WINDOW)] {
        let mut runner = open(load_config(window, 256));
        let whole = runner.open(256).unwrap();
        runner.prefill(whole, &text, &[]).unwrap();
        let expected = draft(&mut *runner, &[whole]).remove(0);
        assert_eq!(expected.ids.len(), 15 * K);
        // Prefilled and decoded states of the target differ in their last digits, and so do the
        // features: on these senseless tokens by up to 0.17. A missing token changes whole units.
        let near = |found: &DraftCandidates, exact: bool| {
            let off = found
                .log_probs
                .iter()
                .zip(&expected.log_probs)
                .map(|(a, b)| (a - b).abs());
            let worst = off.fold(0.0_f32, f32::max);
            let allowed = if exact { 0.0 } else { 0.25 };
            assert!(worst <= allowed, "window {window:?}: {worst}");
        };
        let pieces = runner.open(256).unwrap();
        for piece in text.chunks(64) {
            runner.prefill(pieces, piece, &[]).unwrap();
        }
        near(&draft(&mut *runner, &[pieces]).remove(0), true);
        let single = runner.open(256).unwrap();
        runner.prefill(single, &text[..64], &[]).unwrap();
        feed(&mut *runner, single, &text[64..]);
        let one_by_one = draft(&mut *runner, &[single]).remove(0);
        near(&one_by_one, false);
        // All three in one pass.
        let together = draft(&mut *runner, &[single, whole, pieces]);
        assert_eq!(
            together,
            [one_by_one.clone(), expected.clone(), expected.clone()]
        );
        runner.close(pieces);
        let trees = runner.open(256).unwrap();
        runner.prefill(trees, &text[..64], &[]).unwrap();
        feed_by_trees(&mut *runner, trees, &text[64..]);
        assert_eq!(draft(&mut *runner, &[trees]).remove(0), one_by_one);
        // A second call gives the same result.
        assert_eq!(draft(&mut *runner, &[trees]).remove(0), one_by_one);
    }
}

#[test]
fn snapshots_include_the_draft_cache() {
    let text = text(150);
    for window in [None, Some(WINDOW)] {
        let mut runner = open(load_config(window, 256));
        let seq = runner.open(256).unwrap();
        runner.prefill(seq, &text[..128], &[]).unwrap();
        feed(&mut *runner, seq, &text[128..]);
        // A snapshot with pending features.
        let saved = runner.snapshot(seq, SnapshotLocation::Host).unwrap();
        let expected = draft(&mut *runner, &[seq]).remove(0);
        let mut bytes = Vec::new();
        runner.export(saved.id, &mut bytes).unwrap();
        feed(&mut *runner, seq, &text[..9]);
        assert_ne!(draft(&mut *runner, &[seq]).remove(0), expected);
        runner.restore(seq, saved.id).unwrap();
        assert_eq!(draft(&mut *runner, &[seq]).remove(0), expected);
        let mut other = open(load_config(window, 512));
        let came = other.import(&mut &bytes[..]).unwrap();
        assert_eq!(came.position, text.len());
        let seq = other.open(400).unwrap();
        other.restore(seq, came.id).unwrap();
        assert_eq!(draft(&mut *other, &[seq]).remove(0), expected);
        // With another window, the draft is a different model.
        let reading = if window.is_some() { None } else { Some(WINDOW) };
        let mut stranger = open(load_config(reading, 256));
        let refused = stranger.import(&mut &bytes[..]).unwrap_err();
        assert!(
            matches!(refused, DeviceError::InvalidSnapshot { .. }),
            "{refused}"
        );
        assert!(refused.to_string().contains("another draft"), "{refused}");
    }
}

#[test]
fn invalid_calls_are_refused() {
    let mut runner = open(load_config(None, 64));
    let seq = runner.open(32).unwrap();
    let item = |seq, root| DraftItem {
        seq,
        root: TokenId(root),
    };
    for (items, depth, k) in [
        (vec![item(seq, 1)], 0, 8),
        (vec![item(seq, 1)], 16, 8),
        (vec![item(seq, 1)], 15, 0),
        (vec![item(seq, 8192)], 15, 8),
        (vec![item(seq, 1), item(seq, 1)], 15, 8),
        (vec![item(SeqId(99), 1)], 15, 8),
    ] {
        assert!(
            runner.draft(&items, depth, k).is_err(),
            "{items:?} {depth} {k}"
        );
    }
    // Without committed tokens there is no context, but a block.
    let drafted = runner.draft(&[item(seq, 1)], 3, 8192).unwrap().remove(0);
    assert_eq!(
        (drafted.ids.len(), drafted.k, drafted.lse.len()),
        (3 * 8192, 8192, 3)
    );
    let sum: f64 = drafted.log_probs[..8192]
        .iter()
        .map(|p| f64::from(*p).exp())
        .sum();
    assert!((sum - 1.0).abs() < 1e-4, "{sum}");
}

#[test]
fn draft_memory_is_planned_independent_of_loading_time() {
    let backend = CpuBackend::new(CpuOptions::default());
    let mut with = load_config(None, 256);
    let lazy = backend.estimate(&with).unwrap();
    if let Some(draft) = &mut with.draft {
        draft.load = DraftLoad::AtOpen;
    }
    assert_eq!(backend.estimate(&with).unwrap(), lazy);
    assert!(lazy.draft_bytes > 5_000_000, "{lazy:?}");
    with.draft = None;
    let without = backend.estimate(&with).unwrap();
    assert_eq!(without.total_bytes() + lazy.draft_bytes, lazy.total_bytes());
}

#[test]
fn hundreds_of_trees_leave_the_state_of_token_by_token_decoding() {
    const STEPS: usize = 250;
    let mut config = load_config(None, 9000);
    config.limits.sequences = 2;
    let backend = CpuBackend::new(CpuOptions::default());
    let mut runner = backend.open_inspected(config, &mut |_| {}).unwrap();
    let seq = runner.open(9000).unwrap();
    let prompt = text(40);
    runner.prefill(seq, &prompt, &[]).unwrap();
    let (mut tokens, mut root) = (Vec::new(), TokenId(300));
    for _ in 0..STEPS {
        let items = [DraftItem { seq, root }];
        let found = runner.draft(&items, 7, 2).unwrap().remove(0);
        let mut tree = Tree::root(root);
        let mut at = NodeIdx::ROOT;
        for pair in found.ids.chunks(2) {
            let best = tree.push(at, pair[0]).unwrap();
            let _ = tree.push(at, pair[1]);
            at = best;
        }
        let requests = vec![LogitsRequest::top_k(1); tree.len()];
        let item = VerifyItem {
            seq,
            tree: &tree,
            requests: &requests,
        };
        let rows = runner.verify(&[item]).unwrap().remove(0);
        let mut node = NodeIdx::ROOT;
        tokens.push(root);
        root = loop {
            let next = rows[node.index()].ids[0];
            match tree.child_with(node, next) {
                Some(child) => {
                    tokens.push(next);
                    node = child;
                }
                None => break next,
            }
        };
        let path = tree.path_to(node);
        runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
    }
    assert!(
        tokens.len() > STEPS * 5 / 4,
        "{} tokens in {STEPS} steps",
        tokens.len()
    );
    let other = runner.open(9000).unwrap();
    runner.prefill(other, &prompt, &[]).unwrap();
    feed(&mut *runner, other, &tokens);
    for layer in 0..12 {
        let (a, b) = (
            runner.delta_state(seq, layer).unwrap(),
            runner.delta_state(other, layer).unwrap(),
        );
        let norm =
            |v: &mut dyn Iterator<Item = f32>| v.map(|x| f64::from(x * x)).sum::<f64>().sqrt();
        let off = norm(&mut a.iter().zip(&b).map(|(a, b)| a - b));
        let size = norm(&mut b.iter().copied());
        assert!(off <= 1e-4 * size, "layer {layer}: {off} of {size}");
        assert_eq!(
            runner.kv_rows(seq, layer).unwrap(),
            runner.kv_rows(other, layer).unwrap(),
            "layer {layer}"
        );
    }
}

#[test]
fn drafts_can_be_loaded_at_first_use() {
    let backend = CpuBackend::new(CpuOptions::default());
    conformance::deferred_draft::loads_at_first_use(&backend, &load_config(None, 512)).unwrap();
}
