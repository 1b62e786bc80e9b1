//! The multi-token-prediction head on the GPU: drafts match the CPU reference behind prompts,
//! commits, restores and imports, and the head changes no bit of the target. Without a GPU every
//! test prints SKIPPED and passes.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod gpu;
    pub mod model;
}

use contract::{
    Backend, CommitItem, DeviceError, DraftCandidates, KvFormat, KvFormats, Limits, LoadConfig,
    LogitsRequest, MtpDraftItem, MtpRow, NodeIdx, QuantType, Runner, SeqId, SnapshotLocation,
    TokenId, Tree, VerifyItem,
};
use cuda::Options;
use model::LoadedModel;
use model::synth::SynthSpec;

use fixtures::model::{
    F16_KV, F32_KV, ModelDevice, ReferenceTolerance, cpu_reference, kv_tolerance, open_device,
    open_device_with, reference_tolerance, text,
};

const VOCAB: usize = 1024;
const LIMITS: Limits = Limits {
    sequences: 6,
    context: 600,
    tree_nodes: 24,
    prefill_chunk: 192,
    pool_tokens: None,
};

fn model(name: &str) -> LoadedModel {
    SynthSpec::parse(name).unwrap().load().unwrap()
}

fn load_config(loaded: &LoadedModel, kv: KvFormats) -> LoadConfig {
    LoadConfig {
        target: loaded.spec.clone(),
        weights: loaded.weights.clone(),
        draft: None,
        batch_invariant: false,
        kv,
        limits: LIMITS,
    }
}

fn open(backend: &dyn Backend, loaded: &LoadedModel, kv: KvFormats) -> Box<dyn Runner> {
    backend.open(load_config(loaded, kv), &mut |_| {}).unwrap()
}

fn row(seq: SeqId, parent: Option<u16>, token: u32) -> MtpDraftItem {
    MtpDraftItem {
        seq,
        parent: parent.map(MtpRow),
        token: TokenId(token),
    }
}

/// A root row, three children of it, three rows below two of them, and a path on to the deepest.
fn draft(runner: &mut dyn Runner, seq: SeqId, k: usize) -> Vec<DraftCandidates> {
    let mut all = runner.draft_mtp(&[row(seq, None, 300)], k).unwrap();
    let children = [1, 2, 3].map(|token| row(seq, Some(0), token));
    all.extend(runner.draft_mtp(&children, k).unwrap());
    let below = [(2, 77), (3, 78), (2, 79)].map(|(at, token)| row(seq, Some(at), token));
    all.extend(runner.draft_mtp(&below, k).unwrap());
    for depth in 3..7 {
        let item = row(seq, Some(depth + 3), 90 + u32::from(depth));
        all.extend(runner.draft_mtp(&[item], k).unwrap());
    }
    all
}

/// Commits `tokens` one by one, or as the last path of trees full of rejected branches.
fn feed(runner: &mut dyn Runner, seq: SeqId, tokens: &[TokenId], per_tree: usize) {
    for tokens in tokens.chunks(per_tree) {
        let mut tree = Tree::root(tokens[0]);
        let mut at = NodeIdx::ROOT;
        for token in &tokens[1..] {
            let wrong = TokenId((token.0 + 1) % VOCAB as u32);
            let wrong = tree.push(at, wrong).unwrap();
            tree.push(wrong, *token).unwrap();
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

/// The logits of each row, by token.
fn logits(drafted: &[DraftCandidates]) -> Vec<Vec<f32>> {
    let of = |found: &DraftCandidates| {
        assert_eq!((found.ids.len(), found.k), (VOCAB, VOCAB));
        let mut logits = vec![f32::NAN; VOCAB];
        for (id, log_prob) in found.ids.iter().zip(&found.log_probs) {
            logits[id.index()] = log_prob + found.lse[0];
        }
        logits
    };
    drafted.iter().map(of).collect()
}

/// Fails if a row is further off than allowed. Returns the largest mean difference.
fn check(
    what: &str,
    found: &[DraftCandidates],
    expected: &[DraftCandidates],
    tolerance: ReferenceTolerance,
) -> f32 {
    assert_eq!(found.len(), expected.len(), "{what}");
    let mut worst: f32 = 0.0;
    let rows = logits(found).into_iter().zip(logits(expected));
    for (i, (found, expected)) in rows.enumerate() {
        let off = found.iter().zip(&expected).map(|(f, e)| (f - e).abs());
        let mean = off.sum::<f32>() / VOCAB as f32;
        worst = worst.max(mean);
        // NaN must fail.
        let close = mean <= tolerance.mean;
        assert!(close, "{what}, row {i}: {mean:e} off on average");
        let each = conformance::compare::compare(&found, &expected, tolerance.each);
        each.unwrap_or_else(|difference| panic!("{what}, row {i}: {difference}"));
    }
    worst
}

/// Weights, KV types and tolerance; f32 throughout separates rounding from faults.
fn cases() -> [(&'static str, KvFormats, ReferenceTolerance); 8] {
    let q8 = KvFormats {
        k: KvFormat::Q8_0,
        v: KvFormat::Q8_0,
    };
    let block = reference_tolerance(QuantType::Q4_K);
    let narrow = kv_tolerance(KvFormat::Q8_0).at_least_f16();
    [
        (
            "tiny-hybrid+mtp:f32",
            F32_KV,
            reference_tolerance(QuantType::F32),
        ),
        (
            "tiny-hybrid-r1+mtp-own:f32",
            F32_KV,
            reference_tolerance(QuantType::F32),
        ),
        (
            "tiny-hybrid+mtp:bf16",
            F16_KV,
            reference_tolerance(QuantType::BF16),
        ),
        // Experts take f16 rows whatever type stores them.
        (
            "tiny-hybrid-moe+mtp:f32",
            F32_KV,
            reference_tolerance(QuantType::F16),
        ),
        ("tiny-hybrid+mtp:q8_0", q8, narrow),
        ("tiny-hybrid-r1+mtp-own:q8_0", F16_KV, block),
        ("tiny-hybrid+mtp:q4_k_m", F16_KV, block),
        ("tiny-hybrid-r1+mtp-own:q4_k_m", q8, block),
    ]
}

/// Runs `each` with every case on a device of these options.
fn for_each_case(
    options: Options,
    each: impl Fn(&ModelDevice, &LoadedModel, KvFormats, ReferenceTolerance) -> f32,
) {
    let Some(device) = open_device_with(options) else {
        return;
    };
    for (name, kv, tolerance) in cases() {
        let worst = each(&device, &model(name), kv, tolerance);
        let (k, v) = (kv.k.name(), kv.v.name());
        eprintln!("  {name}, keys {k}, values {v}: {worst:.1e} off on average at most");
    }
}

/// Draft logits behind prompts of three lengths, before and after commits, in trees.
fn drafts_match(
    device: &ModelDevice,
    loaded: &LoadedModel,
    kv: KvFormats,
    tolerance: ReferenceTolerance,
) -> f32 {
    let mut gpu = open(&device.backend, loaded, kv);
    let mut cpu = open(&cpu_reference(), loaded, kv);
    assert_eq!(gpu.info().mtp, cpu.info().mtp);
    let mut worst: f32 = 0.0;
    for prefix in [1, 33, 250] {
        let tokens = text(VOCAB, prefix + 12, prefix);
        let mut drafted = [&mut gpu, &mut cpu].map(|runner| {
            let seq = runner.open(400).unwrap();
            runner.prefill(seq, &tokens[..prefix], &[]).unwrap();
            let mut all = vec![draft(&mut **runner, seq, VOCAB)];
            feed(&mut **runner, seq, &tokens[prefix..prefix + 3], 1);
            all.push(draft(&mut **runner, seq, VOCAB));
            // Drafts are dropped by the next tree and begin anew.
            feed(&mut **runner, seq, &tokens[prefix + 3..], 4);
            all.push(draft(&mut **runner, seq, VOCAB));
            runner.close(seq);
            all
        });
        let [found, expected] = &mut drafted;
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            let what = format!("{}: {prefix} tokens, draft {i}", loaded.spec.name);
            worst = worst.max(check(&what, found, expected, tolerance));
        }
    }
    worst
}

#[test]
fn drafts_match_the_cpu_reference() {
    for_each_case(Options::default(), drafts_match);
}

/// With the kernels of large models: fused layers where the GPU has them.
#[test]
fn drafts_on_large_model_paths_match_the_cpu_reference() {
    let options = Options {
        as_large_model: true,
        ..Options::default()
    };
    for_each_case(options, drafts_match);
}

/// Launch by launch, with pages all over the cache: separates faults of graphs from others.
#[test]
fn drafts_launch_by_launch_match_the_cpu_reference() {
    let options = Options {
        eager: true,
        scatter_pages: true,
        ..Options::default()
    };
    for_each_case(options, drafts_match);
}

/// Prompts as committed steps fill the cache by commits alone.
#[test]
fn drafts_behind_prompts_of_committed_steps_match_the_cpu_reference() {
    let options = Options {
        prefill_as_steps: true,
        ..Options::default()
    };
    for_each_case(options, drafts_match);
}

/// Six sequences draft roots and branches in shared calls, in an order of their own.
#[test]
fn several_sequences_draft_together() {
    for_each_case(Options::default(), |device, loaded, kv, tolerance| {
        let mut gpu = open(&device.backend, loaded, kv);
        let mut cpu = open(&cpu_reference(), loaded, kv);
        let drafted = [&mut gpu, &mut cpu].map(|runner| {
            let seqs: Vec<SeqId> = (0..6)
                .map(|i| {
                    let seq = runner.open(300).unwrap();
                    let tokens = text(VOCAB, 20 + 41 * i, i);
                    runner.prefill(seq, &tokens, &[]).unwrap();
                    seq
                })
                .collect();
            let roots: Vec<MtpDraftItem> =
                seqs.iter().rev().map(|seq| row(*seq, None, 300)).collect();
            let mut all = runner.draft_mtp(&roots, VOCAB).unwrap();
            // Rows of the sequences alternate; 6 x 12 rows exceed one pass.
            let mixed: Vec<MtpDraftItem> = (0..12)
                .flat_map(|token| seqs.iter().map(move |seq| row(*seq, Some(0), token)))
                .collect();
            all.extend(runner.draft_mtp(&mixed, VOCAB).unwrap());
            let below: Vec<MtpDraftItem> = seqs
                .iter()
                .zip(1..)
                .map(|(seq, parent)| row(*seq, Some(parent), 7))
                .collect();
            all.extend(runner.draft_mtp(&below, VOCAB).unwrap());
            all
        });
        check(&loaded.spec.name, &drafted[0], &drafted[1], tolerance)
    });
}

fn export(runner: &mut dyn Runner, seq: SeqId) -> Vec<u8> {
    let snapshot = runner.snapshot(seq, SnapshotLocation::Host).unwrap();
    let mut bytes = Vec::new();
    runner.export(snapshot.id, &mut bytes).unwrap();
    runner.free_snapshot(snapshot.id);
    bytes
}

/// Snapshots travel between the devices, and a sequence drafts as if it had never left.
#[test]
fn snapshots_travel_between_the_devices() {
    for_each_case(Options::default(), |device, loaded, kv, tolerance| {
        let mut gpu = open(&device.backend, loaded, kv);
        let mut cpu = open(&cpu_reference(), loaded, kv);
        let tokens = text(VOCAB, 290, 3);
        let mut worst: f32 = 0.0;
        for gpu_first in [true, false] {
            let (from, to) = if gpu_first {
                (&mut gpu, &mut cpu)
            } else {
                (&mut cpu, &mut gpu)
            };
            let seq = from.open(400).unwrap();
            from.prefill(seq, &tokens[..270], &[]).unwrap();
            feed(&mut **from, seq, &tokens[270..283], 4);
            let expected = draft(&mut **from, seq, VOCAB);
            let bytes = export(&mut **from, seq);
            let imported = to.import(&mut &bytes[..]).unwrap();
            assert_eq!(imported.position, 283);
            let other = to.open(400).unwrap();
            to.prefill(other, &tokens[40..77], &[]).unwrap();
            draft(&mut **to, other, 4);
            to.restore(other, imported.id).unwrap();
            // The bytes stay as they are.
            assert!(export(&mut **to, other) == bytes, "{gpu_first}");
            let found = draft(&mut **to, other, VOCAB);
            let what = format!("{}, from the GPU: {gpu_first}", loaded.spec.name);
            worst = worst.max(check(&what, &found, &expected, tolerance));
            // The hidden row is used by the next commit.
            for (runner, seq) in [(&mut *from, seq), (&mut *to, other)] {
                feed(&mut **runner, seq, &tokens[283..], 3);
            }
            let [found, expected] =
                [(&mut *to, other), (&mut *from, seq)].map(|(r, seq)| draft(&mut **r, seq, VOCAB));
            worst = worst.max(check(&what, &found, &expected, tolerance));
            from.close(seq);
            to.close(other);
        }
        worst
    });
}

/// Candidates of a part of the vocabulary are those of the whole one that are in it, normalised
/// among themselves.
#[test]
fn drafts_of_a_part_of_the_vocabulary_are_its_best_tokens() {
    const PART: usize = 256;
    let options = Options {
        draft_vocab: Some(PART),
        ..Options::default()
    };
    let Some(device) = open_device_with(options) else {
        return;
    };
    for name in ["tiny-hybrid+mtp:q4_k_m", "tiny-hybrid-r1+mtp-own:f32"] {
        let loaded = model(name);
        let mut runner = open(&device.backend, &loaded, F16_KV);
        let seq = runner.open(400).unwrap();
        runner.prefill(seq, &text(VOCAB, 90, 4), &[]).unwrap();
        let whole = draft(&mut *runner, seq, VOCAB);
        let part = draft(&mut *runner, seq, 8);
        for (whole, part) in logits(&whole).iter().zip(&part) {
            let mut best: Vec<usize> = (0..PART).collect();
            best.sort_by(|a, b| whole[*b].total_cmp(&whole[*a]).then(a.cmp(b)));
            let ids: Vec<usize> = part.ids.iter().map(|id| id.index()).collect();
            assert_eq!(ids, best[..8], "{name}");
            let sum: f32 = whole[..PART]
                .iter()
                .map(|x| (x - whole[best[0]]).exp())
                .sum();
            let lse = whole[best[0]] + sum.ln();
            assert!((part.lse[0] - lse).abs() < 1e-4, "{name}");
            for (id, log_prob) in ids.iter().zip(&part.log_probs) {
                assert!((whole[*id] - lse - log_prob).abs() < 1e-4, "{name}");
            }
        }
    }
}

/// On the GPU itself, a restore gives the bits of the saved state, and so do later drafts.
#[test]
fn restored_sequences_draft_the_same_bits() {
    let Some(device) = open_device(false) else {
        return;
    };
    for location in [SnapshotLocation::Device, SnapshotLocation::Host] {
        let loaded = model("tiny-hybrid-r1+mtp-own:q4_k_m");
        let mut runner = open(&device.backend, &loaded, F16_KV);
        let tokens = text(VOCAB, 300, 9);
        let seq = runner.open(400).unwrap();
        runner.prefill(seq, &tokens[..260], &[]).unwrap();
        feed(&mut *runner, seq, &tokens[260..276], 4);
        let snapshot = runner.snapshot(seq, location).unwrap();
        let expected = draft(&mut *runner, seq, 8);
        feed(&mut *runner, seq, &tokens[276..], 3);
        let later = (draft(&mut *runner, seq, 8), export(&mut *runner, seq));
        let other = runner.open(400).unwrap();
        runner.prefill(other, &tokens[..100], &[]).unwrap();
        draft(&mut *runner, other, 8);
        for seq in [seq, other] {
            runner.restore(seq, snapshot.id).unwrap();
            assert_eq!(draft(&mut *runner, seq, 8), expected, "{location:?}");
            feed(&mut *runner, seq, &tokens[276..], 3);
            assert_eq!(draft(&mut *runner, seq, 8), later.0, "{location:?}");
            assert!(export(&mut *runner, seq) == later.1, "{location:?}");
        }
    }
}

/// The head's rows do not depend on where a prompt is cut, bit for bit, nor on the trees that
/// commit them.
#[test]
fn rows_do_not_depend_on_how_tokens_were_committed() {
    let Some(device) = open_device(false) else {
        return;
    };
    let loaded = model("tiny-hybrid+mtp:q4_k_m");
    let mut config = load_config(&loaded, F16_KV);
    config.batch_invariant = true;
    let tokens = text(VOCAB, 150, 5);
    let mut reached: Vec<(Vec<u8>, Vec<DraftCandidates>)> = Vec::new();
    for (chunk, per_tree) in [(64, 1), (128, 7), (64, 5), (128, 8)] {
        let mut runner = device.backend.open(config.clone(), &mut |_| {}).unwrap();
        let seq = runner.open(400).unwrap();
        let (prefilled, fed) = tokens.split_at(128);
        for piece in prefilled.chunks(chunk) {
            runner.prefill(seq, piece, &[]).unwrap();
        }
        feed(&mut *runner, seq, fed, per_tree);
        reached.push((export(&mut *runner, seq), draft(&mut *runner, seq, 8)));
    }
    for other in &reached[1..] {
        assert!(other.0 == reached[0].0, "the state differs");
        assert_eq!(other.1, reached[0].1);
    }
}

#[test]
fn head_changes_no_bit_of_the_target() {
    for as_large_model in [false, true] {
        let options = Options {
            as_large_model,
            ..Options::default()
        };
        let Some(device) = open_device_with(options) else {
            return;
        };
        for name in [
            "tiny-hybrid+mtp:q8_0",
            "tiny-hybrid-r1+mtp-own:q4_k_m",
            "tiny-hybrid-moe+mtp:q8_0",
        ] {
            let loaded = model(name);
            let mut without = loaded.clone();
            without.drop_mtp();
            let tokens = text(VOCAB, 280, 2);
            let rows = [&loaded, &without].map(|loaded| {
                let mut runner = open(&device.backend, loaded, F16_KV);
                let seq = runner.open(400).unwrap();
                runner.prefill(seq, &tokens[..250], &[]).unwrap();
                if runner.info().mtp.is_some() {
                    draft(&mut *runner, seq, 8);
                }
                feed(&mut *runner, seq, &tokens[250..], 5);
                if runner.info().mtp.is_some() {
                    draft(&mut *runner, seq, 8);
                }
                let tree = Tree::chain(&tokens[..4]).unwrap();
                let requests = vec![LogitsRequest::full(); 4];
                let item = VerifyItem {
                    seq,
                    tree: &tree,
                    requests: &requests,
                };
                runner.verify(&[item]).unwrap()
            });
            assert_eq!(rows[0], rows[1], "{name}");
        }
    }
}

/// A draft takes pages behind the committed tokens; without any, it fails and changes nothing.
#[test]
fn drafts_without_pages_fail_and_change_nothing() {
    let Some(device) = open_device(false) else {
        return;
    };
    let loaded = model("tiny-hybrid+mtp:q8_0");
    let mut config = load_config(&loaded, F16_KV);
    config.limits.context = 256;
    config.limits.tree_nodes = 1;
    config.limits.sequences = 2;
    config.limits.pool_tokens = Some(512);
    let mut runner = device.backend.open(config, &mut |_| {}).unwrap();
    let [a, b] = [250, 200].map(|n| {
        let seq = runner.open(256).unwrap();
        runner.prefill(seq, &text(VOCAB, n, 1), &[]).unwrap();
        seq
    });
    runner.draft_mtp(&[row(a, None, 300)], 4).unwrap();
    let mut fails = |items: &[MtpDraftItem]| {
        let result = runner.draft_mtp(items, 4);
        let exhausted = matches!(result, Err(DeviceError::PoolExhausted { .. }));
        assert!(exhausted, "{result:?}");
    };
    let children: Vec<MtpDraftItem> = (0..6).map(|token| row(a, Some(0), token)).collect();
    fails(&children);
    runner.close(b);
    // With the page of the other sequence, the same rows fit.
    assert_eq!(runner.draft_mtp(&children, 4).unwrap().len(), 6);
}
