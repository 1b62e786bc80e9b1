//! The bundled model: greedy text equals the CPU's, except where the two best tokens are nearly
//! tied.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod gpu;
}

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use contract::{
    Backend, CommitItem, DraftCandidates, DraftItem, DraftLoad, DraftLoadConfig, KvFormat,
    KvFormats, Limits, LoadConfig, LogitsRequest, LogitsRow, NodeIdx, Runner, ScoreSettings,
    ScorerConfig, SeqId, SnapshotLocation, TokenId, Tree, VerifyItem,
};
use cpu::CpuBackend;
use cuda::{CudaBackend, GpuInfo, Options};

/// Maximum gap of the two best logits at which the devices may choose differently: the largest
/// measured shift from 8-bit activation rounding.
const LEVEL: f32 = 0.25;
const WORDS: usize = 120;

fn file(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/ember");
    if folder.is_dir() {
        folder.join(name)
    } else {
        // A test binary that runs on another machine starts below the root.
        Path::new("../../models/ember").join(name)
    }
}

fn open(backend: &dyn Backend, format: KvFormat) -> Box<dyn Runner> {
    open_with(backend, format, false)
}

fn open_with(backend: &dyn Backend, format: KvFormat, drafted: bool) -> Box<dyn Runner> {
    backend
        .open(load_config(format, drafted), &mut |_| {})
        .unwrap()
}

fn load_config(format: KvFormat, drafted: bool) -> LoadConfig {
    let loaded = model::load(&file("ember.gguf")).unwrap();
    let draft = drafted.then(|| {
        let options = model::DraftOptions::default();
        let draft = model::load_draft(&file("ember-draft.gguf"), &loaded.spec, options).unwrap();
        DraftLoadConfig {
            spec: draft.spec,
            weights: draft.weights,
            kv: format,
            load: DraftLoad::AtOpen,
        }
    });
    LoadConfig {
        target: loaded.spec,
        weights: loaded.weights,
        draft,
        batch_invariant: false,
        kv: KvFormats {
            k: format,
            v: format,
        },
        limits: Limits {
            sequences: 2,
            context: 2048,
            tree_nodes: 24,
            prefill_chunk: 512,
            pool_tokens: None,
        },
    }
}

fn decode_token(runner: &mut dyn Runner, seq: SeqId, token: TokenId) -> LogitsRow {
    let tree = Tree::root(token);
    let requests = [LogitsRequest::top_k(4)];
    let item = VerifyItem {
        seq,
        tree: &tree,
        requests: &requests,
    };
    let row = runner.verify(&[item]).unwrap().pop().unwrap().pop();
    let path = tree.path_to(NodeIdx::ROOT);
    runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
    row.unwrap()
}

fn options() -> Options {
    Options {
        poison: true,
        compile: fixtures::gpu::compiling(),
        ..Options::default()
    }
}

fn gpu_backend(info: &GpuInfo) -> CudaBackend {
    CudaBackend::with_options(info.clone(), options())
}

/// The largest and the mean difference of candidates over the whole vocabulary.
fn apart(found: &DraftCandidates, expected: &DraftCandidates) -> (f32, f32) {
    let by_id = |all: &DraftCandidates, row: usize| {
        let mut logits = vec![f32::NAN; all.k];
        for i in row * all.k..(row + 1) * all.k {
            logits[all.ids[i].index()] = all.log_probs[i];
        }
        logits
    };
    let (mut worst, mut sum, mut n) = (0.0_f32, 0.0_f64, 0);
    for row in 0..expected.lse.len() {
        for (f, e) in by_id(found, row).iter().zip(by_id(expected, row)) {
            let off = (f - e).abs();
            assert!(off.is_finite(), "row {row}: {f} beside {e}");
            worst = worst.max(off);
            sum += f64::from(off);
            n += 1;
        }
    }
    (worst, (sum / n as f64) as f32)
}

/// Trees of drafted tokens are verified and committed on the way. Context therefore comes from
/// prompts, from paths with gaps, and wraps around the ring.
#[test]
fn draft_logits_match_the_cpu_up_to_rounding() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let processor = CpuBackend::new(cpu::CpuOptions::default());
    let mut gpu_runner = open_with(&gpu_backend(gpu.info()), KvFormat::F16, true);
    let mut reference = open_with(&processor, KvFormat::F16, true);
    let depth = reference.info().draft_depth.unwrap();
    assert_eq!(gpu_runner.info().draft_depth, Some(depth));
    let vocab = reference.info().vocab;
    let (a, b) = (
        gpu_runner.open(2048).unwrap(),
        reference.open(2048).unwrap(),
    );
    let prompt: Vec<TokenId> = (0..300)
        .map(|i| TokenId(((i * i * 7 + i * 3 + 11) % 4000) as u32))
        .collect();
    gpu_runner.prefill(a, &prompt, &[]).unwrap();
    reference.prefill(b, &prompt, &[]).unwrap();
    let (mut worst, mut mean) = (0.0_f32, 0.0_f32);
    for round in 0..40_u32 {
        let root = TokenId(17 + 31 * round);
        let found = gpu_runner.draft(&[DraftItem { seq: a, root }], depth, vocab);
        let found = found.unwrap().remove(0);
        let expected = reference.draft(&[DraftItem { seq: b, root }], depth, vocab);
        let expected = expected.unwrap().remove(0);
        assert_eq!((found.k, found.lse.len()), (vocab, depth));
        let (most, of_round) = apart(&found, &expected);
        worst = worst.max(most);
        mean = mean.max(of_round);
        if round % 8 == 0 {
            let narrow = reference.info().narrow_draft.unwrap().depth;
            let found = gpu_runner.draft(&[DraftItem { seq: a, root }], narrow, vocab);
            let expected = reference.draft(&[DraftItem { seq: b, root }], narrow, vocab);
            let (most, of_round) = apart(&found.unwrap()[0], &expected.unwrap()[0]);
            worst = worst.max(most);
            mean = mean.max(of_round);
        }
        let few = gpu_runner
            .draft(&[DraftItem { seq: a, root }], depth, 8)
            .unwrap();
        for row in 0..depth {
            let head = &found.ids[row * vocab..row * vocab + 8];
            assert_eq!(
                few[0].ids[row * 8..][..8],
                *head,
                "round {round}, row {row}"
            );
        }
        // Two branches. Commit the second and half of its path.
        let mut tree = Tree::root(root);
        let (mut left, mut right) = (NodeIdx::ROOT, NodeIdx::ROOT);
        for row in 0..depth.min(8) {
            left = tree.push(left, expected.ids[row * vocab]).unwrap();
            right = tree.push(right, expected.ids[row * vocab + 1]).unwrap();
        }
        let path = tree.path_to(right).truncated(1 + round as usize % 7);
        let requests = vec![LogitsRequest::NONE; tree.len()];
        for (runner, seq) in [(&mut gpu_runner, a), (&mut reference, b)] {
            let tree = &tree;
            let requests = &requests;
            runner
                .verify(&[VerifyItem {
                    seq,
                    tree,
                    requests,
                }])
                .unwrap();
            runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
        }
        // A snapshot in between changes nothing.
        if round == 20 {
            let saved = gpu_runner.snapshot(a, SnapshotLocation::Host).unwrap();
            let mut bytes = Vec::new();
            gpu_runner.export(saved.id, &mut bytes).unwrap();
            let travelled = gpu_runner.import(&mut &bytes[..]).unwrap();
            let other = gpu_runner.open(2048).unwrap();
            gpu_runner.restore(other, travelled.id).unwrap();
            let root = TokenId(5);
            let items = [a, other].map(|seq| DraftItem { seq, root });
            for depth in [depth, 7] {
                let both = gpu_runner.draft(&items, depth, vocab).unwrap();
                assert!(apart(&both[1], &both[0]).0 < 1e-4, "after a journey");
            }
            gpu_runner.close(other);
        }
    }
    eprintln!("  log-probabilities at most {worst:.3} off, {mean:.4} on average per step");
    assert!(worst < 1.5 && mean < 0.1);
}

/// Large models prefill up to 256 tokens in short chunks, small models in one long chunk. Draft and
/// target must agree up to rounding.
#[test]
fn prefill_chunk_length_does_not_change_the_result() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let options = Options {
        as_large_model: true,
        ..options()
    };
    let short = CudaBackend::with_options(gpu.info().clone(), options);
    let mut gpu_runner = open_with(&short, KvFormat::F16, true);
    let mut reference = open_with(&gpu_backend(gpu.info()), KvFormat::F16, true);
    let (depth, vocab) = (
        reference.info().draft_depth.unwrap(),
        reference.info().vocab,
    );
    let (a, b) = (
        gpu_runner.open(2048).unwrap(),
        reference.open(2048).unwrap(),
    );
    let prompt: Vec<TokenId> = (0..250)
        .map(|i| TokenId(((i * i * 7 + i * 3 + 11) % 4000) as u32))
        .collect();
    let last = [(prompt.len() - 1, LogitsRequest::full())];
    let found = gpu_runner.prefill(a, &prompt, &last).unwrap().remove(0);
    let expected = reference.prefill(b, &prompt, &last).unwrap().remove(0);
    let off = found.logits.iter().zip(&expected.logits);
    let off = off.map(|(f, e)| (f - e).abs()).fold(0.0, f32::max);
    let root = TokenId(17);
    let found = gpu_runner.draft(&[DraftItem { seq: a, root }], depth, vocab);
    let expected = reference.draft(&[DraftItem { seq: b, root }], depth, vocab);
    let (worst, mean) = apart(&found.unwrap()[0], &expected.unwrap()[0]);
    eprintln!("  logits {off:.4} off; the draft's {worst:.4}, {mean:.5} on average");
    assert!(off < LEVEL && worst < 1.5 && mean < 0.1);
}

#[test]
fn deferred_draft_loads_at_first_use() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let backend = gpu_backend(gpu.info());
    conformance::deferred_draft::loads_at_first_use(&backend, &load_config(KvFormat::F16, true))
        .unwrap();
}

/// Mean KL divergence of `found` from `expected`, in nats, row by row.
fn divergence(expected: &[Vec<f32>], found: &[Vec<f32>]) -> f64 {
    let log_probs = |row: &[f32]| -> Vec<f64> {
        let max = row.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = row.iter().map(|v| f64::from(v - max).exp()).sum();
        row.iter().map(|v| f64::from(v - max) - sum.ln()).collect()
    };
    let of = |(expected, found): (&Vec<f32>, &Vec<f32>)| -> f64 {
        let both = log_probs(expected).into_iter().zip(log_probs(found));
        both.map(|(p, q)| p.exp() * (p - q)).sum()
    };
    expected.iter().zip(found).map(of).sum::<f64>() / expected.len() as f64
}

/// Logits during prefill and decode over a cache of `format`.
fn logits(backend: &CudaBackend, format: KvFormat) -> Vec<Vec<f32>> {
    let mut runner = open(backend, format);
    let seq = runner.open(2048).unwrap();
    let tokens: Vec<TokenId> = (0..900)
        .map(|i| TokenId(300 + (i * i * 7 + i * 13) as u32 % 3000))
        .collect();
    let requests: Vec<(usize, LogitsRequest)> = (200..800)
        .step_by(10)
        .map(|at| (at, LogitsRequest::full()))
        .collect();
    let mut rows: Vec<LogitsRow> = Vec::new();
    for (first, chunk) in [(0, &tokens[..512]), (512, &tokens[512..800])] {
        let within = requests
            .iter()
            .filter(|(at, _)| (first..first + chunk.len()).contains(at))
            .map(|(at, ask)| (at - first, ask.clone()));
        let within: Vec<(usize, LogitsRequest)> = within.collect();
        rows.extend(runner.prefill(seq, chunk, &within).unwrap());
    }
    for token in &tokens[800..] {
        let tree = Tree::root(*token);
        let requests = [LogitsRequest::full()];
        let item = VerifyItem {
            seq,
            tree: &tree,
            requests: &requests,
        };
        rows.extend(runner.verify(&[item]).unwrap().remove(0));
        let path = tree.path_to(NodeIdx::ROOT);
        runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
    }
    rows.into_iter().map(|row| row.logits).collect()
}

#[test]
fn kv_type_divergence_is_ordered_by_precision() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let backend = gpu_backend(gpu.info());
    let half = logits(&backend, KvFormat::F16);
    let drift = |format: KvFormat| {
        let drift = divergence(&half, &logits(&backend, format));
        eprintln!("  {:6} KL {drift:.6} against f16", format.name());
        drift
    };
    let all = KvFormat::ALL.map(|format| (format, drift(format)));
    let of = |wanted: KvFormat| {
        all.iter()
            .find(|(f, _)| *f == wanted)
            .map_or(1.0, |(_, d)| *d)
    };
    assert!(of(KvFormat::Q8_0) < of(KvFormat::Q5_0) && of(KvFormat::Q5_0) < of(KvFormat::Q4_0));
    assert!(of(KvFormat::Q4_0) < of(KvFormat::Tq3_0) && of(KvFormat::Tq3_0) < 0.06);
}

#[test]
fn greedy_text_matches_the_cpu_up_to_near_ties() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let backend = gpu_backend(gpu.info());
    // Without the rounding of the CPU's fast path, which may exceed the gap of two tokens.
    let exact = cpu::CpuOptions {
        reference: true,
        ..cpu::CpuOptions::default()
    };
    let processor = CpuBackend::new(exact).with_rotation();
    for (prompt_len, format) in [
        (1, KvFormat::F16),
        (90, KvFormat::F16),
        (700, KvFormat::F16),
        (333, KvFormat::Q8_0),
        (70, KvFormat::Q4_0),
        (210, KvFormat::Tq3_0),
    ] {
        let mut gpu_runner = open(&backend, format);
        let mut reference = open(&processor, format);
        // The model's most common tokens in a fixed order. Training text would give smaller errors.
        let prompt: Vec<TokenId> = (0..prompt_len)
            .map(|i| TokenId(((i * i * 7 + i * 3 + 11) % 4000) as u32))
            .collect();
        let (a, b) = (
            gpu_runner.open(2048).unwrap(),
            reference.open(2048).unwrap(),
        );
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        let mut begin = 0;
        for piece in prompt.chunks(512) {
            begin += piece.len();
            let requests = [(piece.len() - 1, LogitsRequest::top_k(4))];
            let requests = if begin == prompt.len() {
                &requests[..]
            } else {
                &[]
            };
            found = gpu_runner.prefill(a, piece, requests).unwrap();
            expected = reference.prefill(b, piece, requests).unwrap();
        }
        let (mut found, mut expected) = (found.remove(0), expected.remove(0));
        let (mut ties, mut worst) = (0, 0.0_f32);
        for word in 0..WORDS {
            if found.ids[0] != expected.ids[0] {
                let gap = expected.logits[0] - expected.logits[1];
                assert!(
                    gap < LEVEL,
                    "word {word} after {prompt_len}: {} instead of {}, {gap} apart",
                    found.ids[0],
                    expected.ids[0]
                );
                ties += 1;
            } else {
                worst = worst.max((found.logits[0] - expected.logits[0]).abs());
            }
            // Both runners continue with the reference's choice, so every token is compared.
            let token = expected.ids[0];
            found = decode_token(&mut *gpu_runner, a, token);
            expected = decode_token(&mut *reference, b, token);
        }
        eprintln!(
            "  prompt {prompt_len}, {}: {ties} near ties of {WORDS}, best logit at most {worst:.3} off",
            format.name()
        );
        assert!(ties <= WORDS / 20, "{ties} near ties");
    }
}

/// The best tenth of the chunks of a prompt that ends with a repetition. Chunks whose scores are
/// within two percent of the last chosen one's may differ: the GPU rounds activations to f16.
#[test]
fn chunks_selected_by_score_are_those_of_the_cpu() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let loaded = model::load(&file("ember.gguf")).unwrap();
    let mut tokens: Vec<TokenId> = (0..1000)
        .map(|i| TokenId(((i * i * 7 + i * 3 + 11) % 4000) as u32))
        .collect();
    let repeated = tokens[300..340].to_vec();
    tokens.extend(repeated);
    let scores = |backend: &dyn Backend| {
        let config = ScorerConfig {
            model: loaded.spec.clone(),
            weights: loaded.weights.clone(),
            exit_layer: None,
            max_tokens: 2048,
        };
        let mut scorer = backend.open_scorer(config, &mut |_| {}).unwrap();
        let settings = ScoreSettings::default();
        let scores = scorer.score(&tokens, &settings, &mut |_| ControlFlow::Continue(()));
        scores.unwrap().unwrap()
    };
    let reference = CpuBackend::new(cpu::CpuOptions {
        reference: true,
        threads: None,
    });
    let (found, expected) = (scores(&gpu_backend(gpu.info())), scores(&reference));
    assert_eq!(found.len(), expected.len());
    let best = |scores: &[f32]| {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
        order.truncate(scores.len() / 10);
        order
    };
    let (selected, wanted) = (best(&found), best(&expected));
    let last = expected[wanted[wanted.len() - 1]];
    let clear = |chunk: &usize| (expected[*chunk] - last).abs() > 0.02 * last;
    let missing = wanted.iter().filter(|chunk| !selected.contains(chunk));
    let added = selected.iter().filter(|chunk| !wanted.contains(chunk));
    let differ: Vec<&usize> = missing.chain(added).filter(|chunk| clear(chunk)).collect();
    assert!(
        differ.is_empty(),
        "chunks {differ:?}, last chosen at {last}"
    );
}
