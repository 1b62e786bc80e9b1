//! KV cache types: every pair has all properties of a runner, snapshots share rows, and a coarser
//! type diverges further from the finest.

#![allow(clippy::print_stdout, reason = "figures for runs with --nocapture")]
#![expect(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::path::Path;

use conformance::compare::{Precision, Tolerance};
use conformance::suite::{self, Case};
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{
    Backend, KvFormat, KvFormats, Limits, LoadConfig, LogitsRequest, QuantType, Runner,
    SnapshotLocation, TokenId,
};
use cpu::{CpuBackend, CpuOptions};

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions {
        reference: false,
        threads: Some(2),
    })
}

/// Head dimensions must be whole groups for the coarsest format.
const LONG_HEADS: SyntheticLayout = SyntheticLayout::Dense;

fn check(k: KvFormat, v: KvFormat) {
    let model = SyntheticModel::new(LONG_HEADS, QuantType::F32, 3);
    let backend = backend().with_rotation();
    let case = Case {
        backend: &backend,
        model: &model,
        kv: KvFormats { k, v },
        precision: Precision::BitExact,
        prefill_tolerance: Tolerance::NONE,
        batch_invariant: false,
    };
    if let Err(breach) = suite::run(&case) {
        panic!("keys {}, values {}: {breach}", k.name(), v.name());
    }
}

#[test]
fn rotated_formats_satisfy_every_property() {
    for format in KvFormat::ALL {
        check(format, format);
    }
}

/// Keys and values are read by separate code that depends on their own format only. Further pairs
/// would therefore test nothing new.
#[test]
fn key_and_value_formats_are_independent() {
    use KvFormat::{Bf16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Tq3_0};
    for (k, v) in [(Q8_0, Tq3_0), (Tq3_0, Q4_0), (Q5_1, Bf16), (Q4_1, Q5_0)] {
        check(k, v);
    }
}

fn ember(kv: KvFormats, context: usize) -> LoadConfig {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/ember/ember.gguf");
    let loaded = model::load(&file).unwrap();
    LoadConfig {
        target: loaded.spec,
        weights: loaded.weights,
        draft: None,
        batch_invariant: false,
        kv,
        limits: Limits {
            sequences: 2,
            context,
            tree_nodes: 1,
            prefill_chunk: 512,
            pool_tokens: None,
        },
    }
}

/// Arbitrary token ids, the same for all.
fn text(n: usize) -> Vec<TokenId> {
    (0..n)
        .map(|i| TokenId(300 + (i * i * 7 + i * 13) as u32 % 3000))
        .collect()
}

/// Mean divergence in nats of `found` from `expected`, row by row.
fn divergence(expected: &[Vec<f32>], found: &[Vec<f32>]) -> f64 {
    let log_probs = |row: &[f32]| -> Vec<f64> {
        let max = row.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = row.iter().map(|v| f64::from(v - max).exp()).sum();
        row.iter().map(|v| f64::from(v - max) - sum.ln()).collect()
    };
    let rows = expected.iter().zip(found).map(|(expected, found)| {
        let (p, q) = (log_probs(expected), log_probs(found));
        p.iter()
            .zip(&q)
            .map(|(p, q)| p.exp() * (p - q))
            .sum::<f64>()
    });
    rows.sum::<f64>() / expected.len() as f64
}

fn rows(backend: &CpuBackend, format: KvFormat) -> Vec<Vec<f32>> {
    let kv = KvFormats {
        k: format,
        v: format,
    };
    let mut runner = backend.open(ember(kv, 512), &mut |_| {}).unwrap();
    let seq = runner.open(512).unwrap();
    let tokens = text(400);
    let requests: Vec<(usize, LogitsRequest)> = (200..400)
        .step_by(10)
        .map(|at| (at, LogitsRequest::full()))
        .collect();
    let rows = runner.prefill(seq, &tokens, &requests).unwrap();
    rows.into_iter().map(|row| row.logits).collect()
}

#[test]
fn bundled_model_divergence_grows_with_quantization() {
    let exact = rows(&backend(), KvFormat::F32);
    let mut table = Vec::new();
    for format in KvFormat::ALL {
        let rotated = divergence(&exact, &rows(&backend().with_rotation(), format));
        let plain = divergence(&exact, &rows(&backend(), format));
        println!(
            "{:6} KL {rotated:.6} rotated, {plain:.6} plain",
            format.name()
        );
        table.push((format, rotated));
    }
    let plain = divergence(&exact, &rows(&backend(), KvFormat::Q4_0));
    println!("q4_0 plain: KL {plain:.6}");
    let of = |wanted: KvFormat| {
        table
            .iter()
            .find(|(format, _)| *format == wanted)
            .unwrap()
            .1
    };
    // Activations are rounded too, so the last bit of f16 matters.
    assert!(of(KvFormat::F16) < 0.003);
    assert!(of(KvFormat::Tq3_0) < 0.06);
    assert!(of(KvFormat::Q8_0) < of(KvFormat::Q5_0) && of(KvFormat::Q5_0) < of(KvFormat::Q4_0));
    assert!(of(KvFormat::Q4_0) < of(KvFormat::Tq3_0) && of(KvFormat::Q4_0) < plain);
}

#[test]
fn snapshots_of_one_text_share_their_pages() {
    let kv = KvFormats {
        k: KvFormat::Q8_0,
        v: KvFormat::Q4_0,
    };
    let mut runner = backend()
        .with_rotation()
        .open(ember(kv, 2048), &mut |_| {})
        .unwrap();
    let tokens = text(1600);
    let seq = runner.open(2048).unwrap();
    let bytes = |runner: &dyn Runner| runner.capacity().snapshot_bytes;
    runner.prefill(seq, &tokens[..1024], &[]).unwrap();
    let first = runner.snapshot(seq, SnapshotLocation::Host).unwrap();
    assert_eq!(bytes(&*runner), first.bytes);
    runner.prefill(seq, &tokens[1024..1536], &[]).unwrap();
    let second = runner.snapshot(seq, SnapshotLocation::Host).unwrap();
    // The rows of 1,024 positions are already stored.
    let both = bytes(&*runner);
    assert!(both < first.bytes + second.bytes && both > second.bytes);
    let shared = first.bytes + second.bytes - both;
    // A restored sequence shares rows too.
    let other = runner.open(2048).unwrap();
    runner.restore(other, second.id).unwrap();
    runner.prefill(other, &tokens[1536..1600], &[]).unwrap();
    let third = runner.snapshot(other, SnapshotLocation::Host).unwrap();
    assert!(
        bytes(&*runner) - both + shared + shared / 2 == third.bytes,
        "{shared}"
    );
    // Freeing some snapshots leaves the others intact.
    let mut expected = Vec::new();
    runner.export(third.id, &mut expected).unwrap();
    runner.free_snapshot(second.id);
    runner.free_snapshot(first.id);
    assert_eq!(bytes(&*runner), third.bytes);
    runner.restore(seq, third.id).unwrap();
    let again = runner.snapshot(seq, SnapshotLocation::Host).unwrap();
    let mut found = Vec::new();
    runner.export(again.id, &mut found).unwrap();
    assert!(found == expected);
    runner.free_snapshot(third.id);
    runner.free_snapshot(again.id);
    assert_eq!(bytes(&*runner), 0);
}
