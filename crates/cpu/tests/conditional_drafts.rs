//! DFlash2 and DSpark drafts on the fast path: their candidates depend only on the committed
//! tokens, bit for bit, however these were committed and whatever else shares the pass.
#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

use conformance::stages::{self, DraftDevice};
use contract::{
    Backend, CommitItem, DraftCandidates, DraftItem, DraftLoad, DraftLoadConfig, KvFormat,
    KvFormats, Limits, LoadConfig, LogitsRequest, NodeIdx, QuantType, Runner, SeqId,
    SnapshotLocation, TokenId, Tree, VerifyItem,
};
use cpu::{CpuBackend, CpuOptions};
use model::DraftKind;
use model::synth::{SynthSpec, draft_of};

const VOCAB: u32 = 1024;
const K: usize = 8;
const KINDS: [(DraftKind, QuantType); 4] = [
    (DraftKind::Dflash2, QuantType::Q8_0),
    (DraftKind::Dflash2, QuantType::Q4_K),
    (DraftKind::Dspark, QuantType::Q8_0),
    (DraftKind::Dspark, QuantType::F32),
];

fn load_config((kind, ty): (DraftKind, QuantType), load: DraftLoad) -> LoadConfig {
    let target = SynthSpec::parse("tiny-hybrid:q8_0")
        .unwrap()
        .load()
        .unwrap();
    let draft = draft_of(&target, kind, ty, 5);
    LoadConfig {
        target: target.spec,
        weights: target.weights,
        draft: Some(DraftLoadConfig {
            spec: draft.spec,
            weights: draft.weights,
            kv: KvFormat::F16,
            load,
        }),
        batch_invariant: false,
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        },
        limits: Limits {
            sequences: 4,
            context: 256,
            tree_nodes: 24,
            prefill_chunk: 256,
            pool_tokens: None,
        },
    }
}

fn open(kind: (DraftKind, QuantType)) -> Box<dyn Runner> {
    CpuBackend::new(CpuOptions::default())
        .open(load_config(kind, DraftLoad::AtOpen), &mut |_| {})
        .unwrap()
}

fn text(n: u32) -> Vec<TokenId> {
    (0..n)
        .map(|i| TokenId((i * i * 31 + 7 * i) % VOCAB))
        .collect()
}

fn draft(runner: &mut dyn Runner, seqs: &[SeqId]) -> Vec<DraftCandidates> {
    let root = TokenId(300);
    let items: Vec<DraftItem> = seqs
        .iter()
        .map(|seq| DraftItem { seq: *seq, root })
        .collect();
    let depth = runner.info().draft_depth.unwrap();
    let found = runner.draft(&items, depth, K).unwrap();
    assert!(found.iter().all(DraftCandidates::is_well_formed));
    found
}

/// Commits tokens through trees that are full of rejected branches, `width` tokens at a time.
fn commit(runner: &mut dyn Runner, seq: SeqId, tokens: &[TokenId], width: usize) {
    for tokens in tokens.chunks(width) {
        let mut tree = Tree::root(tokens[0]);
        let mut at = NodeIdx::ROOT;
        for token in &tokens[1..] {
            let wrong = TokenId((token.0 + 1) % VOCAB);
            tree.push(at, wrong).unwrap();
            at = tree.push(at, *token).unwrap();
        }
        let requests = vec![LogitsRequest::NONE; tree.len()];
        let item = VerifyItem {
            seq,
            tree: &tree,
            requests: &requests,
        };
        runner.verify(&[item]).unwrap();
        let path = &tree.path_to(at);
        runner.commit(&[CommitItem { seq, path }]).unwrap();
    }
}

#[test]
fn candidates_depend_on_committed_tokens_only() {
    let text = text(180);
    for kind in KINDS {
        let mut runner = open(kind);
        let whole = runner.open(256).unwrap();
        runner.prefill(whole, &text, &[]).unwrap();
        let expected = draft(&mut *runner, &[whole]).remove(0);
        let pieces = runner.open(256).unwrap();
        for piece in text.chunks(64) {
            runner.prefill(pieces, piece, &[]).unwrap();
        }
        let found = draft(&mut *runner, &[pieces]).remove(0);
        assert_eq!(found, expected, "{kind:?}");
        let [single, trees] = [1, 7].map(|width| {
            let seq = runner.open(256).unwrap();
            runner.prefill(seq, &text[..64], &[]).unwrap();
            commit(&mut *runner, seq, &text[64..], width);
            seq
        });
        let one_by_one = draft(&mut *runner, &[single]).remove(0);
        let found = draft(&mut *runner, &[trees]).remove(0);
        assert_eq!(found, one_by_one, "{kind:?}");
        let together = draft(&mut *runner, &[trees, whole, pieces, single]);
        let all = [&one_by_one, &expected, &expected, &one_by_one].map(Clone::clone);
        assert_eq!(together, all, "{kind:?}");
        assert_ne!(
            one_by_one.lse,
            draft_behind_more(&mut *runner, single, &text[..9]).lse
        );
    }
}

fn draft_behind_more(runner: &mut dyn Runner, seq: SeqId, more: &[TokenId]) -> DraftCandidates {
    commit(runner, seq, more, 3);
    draft(runner, &[seq]).remove(0)
}

#[test]
fn snapshots_restore_the_candidates() {
    let text = text(150);
    for kind in KINDS {
        let mut runner = open(kind);
        let seq = runner.open(256).unwrap();
        runner.prefill(seq, &text[..128], &[]).unwrap();
        commit(&mut *runner, seq, &text[128..], 5);
        let saved = runner.snapshot(seq, SnapshotLocation::Host).unwrap();
        let expected = draft(&mut *runner, &[seq]).remove(0);
        let mut bytes = Vec::new();
        runner.export(saved.id, &mut bytes).unwrap();
        assert_ne!(draft_behind_more(&mut *runner, seq, &text[..9]), expected);
        runner.restore(seq, saved.id).unwrap();
        assert_eq!(draft(&mut *runner, &[seq]).remove(0), expected, "{kind:?}");
        let mut other = open(kind);
        let came = other.import(&mut &bytes[..]).unwrap();
        let seq = other.open(256).unwrap();
        other.restore(seq, came.id).unwrap();
        assert_eq!(draft(&mut *other, &[seq]), [expected], "{kind:?}");
    }
}

#[test]
fn lists_hold_the_candidates_behind_each_token() {
    for kind in KINDS {
        let mut runner = open(kind);
        let seq = runner.open(256).unwrap();
        runner.prefill(seq, &text(70), &[]).unwrap();
        let drafted = draft(&mut *runner, &[seq]).remove(0);
        let depth = runner.info().draft_depth.unwrap();
        assert_eq!(drafted.chain().len(), depth, "{kind:?}");
        // The second candidate has successors of its own.
        let first = drafted.first().unwrap();
        let behind = [0, 1].map(|rank| drafted.next(first, rank).unwrap());
        let [best, second] = behind.map(|list| drafted.list(list).log_probs.to_vec());
        assert_ne!(best, second, "{kind:?}");
        for list in (0..drafted.n_lists()).map(|list| contract::ListIdx(list as u16)) {
            let list = drafted.list(list);
            assert!(
                list.log_probs.is_sorted_by(|a, b| a >= b),
                "{kind:?}: {list:?}"
            );
            let sum: f32 = list.log_probs.iter().map(|p| p.exp()).sum();
            assert!(sum < 1.0 + 1e-4, "{kind:?}: {sum}");
            let confident = list.confidence.is_some_and(|c| (0.0..=1.0).contains(&c));
            assert_eq!(confident, kind.0 == DraftKind::Dspark);
        }
        let item = DraftItem {
            seq,
            root: TokenId(300),
        };
        let logits = runner.draft_logits(item).unwrap();
        assert_eq!(logits.logits.len(), depth * VOCAB as usize);
        assert_eq!(logits.chain, drafted.chain(), "{kind:?}");
    }
}

#[test]
fn independent_drafts_have_the_same_logits_by_both_ways() {
    let mut runner = open((DraftKind::Dflash, QuantType::Q8_0));
    let seq = runner.open(256).unwrap();
    runner.prefill(seq, &text(70), &[]).unwrap();
    let item = DraftItem {
        seq,
        root: TokenId(300),
    };
    let depth = runner.info().draft_depth.unwrap();
    let found = runner.draft_logits(item).unwrap();
    let drafted = runner
        .draft(&[item], depth, VOCAB as usize)
        .unwrap()
        .remove(0);
    assert_eq!(found.chain, drafted.chain());
    for (row, logits) in found.logits.chunks(VOCAB as usize).enumerate() {
        let list = drafted.list(contract::ListIdx(row as u16));
        for (id, log_prob) in list.ids.iter().zip(list.log_probs) {
            let logit = log_prob + drafted.lse[row];
            assert!((logits[id.index()] - logit).abs() < 1e-4);
        }
    }
}

#[test]
fn memory_is_planned_independent_of_loading_time() {
    let backend = CpuBackend::new(CpuOptions::default());
    for kind in KINDS {
        let now = backend
            .estimate(&load_config(kind, DraftLoad::AtOpen))
            .unwrap();
        let later = load_config(kind, DraftLoad::AtFirstUse);
        assert_eq!(backend.estimate(&later).unwrap(), now);
        let mut without = later;
        without.draft = None;
        let plain = backend.estimate(&without).unwrap();
        assert_eq!(plain.total_bytes() + now.draft_bytes, now.total_bytes());
        assert!(
            now.mapped_bytes > plain.mapped_bytes,
            "tables are read in place"
        );
    }
}

#[test]
fn later_drafts_apart_from_the_lm_head_give_the_bits_of_one_device() {
    for kind in [KINDS[0], KINDS[2]] {
        let config = load_config(kind, DraftLoad::AtFirstUse);
        let boxed = || -> Box<dyn Backend> { Box::new(CpuBackend::new(CpuOptions::default())) };
        let backend = stages::with_draft_apart(vec![boxed(), boxed()], DraftDevice::Own);
        if let Err(failure) = stages::compare(&*boxed(), &backend, &config) {
            panic!("{kind:?}: {failure}");
        }
    }
}
