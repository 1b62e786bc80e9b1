//! Windowed trees pass the window properties and match the CPU reference.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod gpu;
    pub mod model;
}

use conformance::compare::{Precision, Tolerance, compare};
use conformance::suite::{self, Case};
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{AttentionWindow, Backend, KvFormat, KvFormats, NodeIdx, QuantType, Runner, Tree};
use cuda::Options;

use fixtures::model::{
    ModelDevice, SMALL, cpu_reference, kv_tolerance, load_config, open_device_with,
    reference_tolerance, text, verify,
};

fn open_device() -> Option<ModelDevice> {
    open_device_with(Options {
        windows: true,
        ..Options::default()
    })
}

fn same(format: KvFormat) -> KvFormats {
    KvFormats {
        k: format,
        v: format,
    }
}

#[test]
fn window_properties_hold() {
    let Some(device) = open_device() else { return };
    let model = SyntheticModel::new(SyntheticLayout::HybridGrouped, QuantType::Q4_K, 1);
    let mut violations = 0;
    for (format, batch_invariant) in [
        (KvFormat::F16, false),
        (KvFormat::Q8_0, false),
        (KvFormat::Q4_0, false),
        (KvFormat::F16, true),
    ] {
        let half = Tolerance {
            absolute: 0.02,
            relative: 0.01,
        };
        let case = Case {
            backend: &device.backend,
            model: &model,
            kv: same(format),
            precision: if batch_invariant {
                Precision::BitExact
            } else {
                Precision::Within(half.or(Tolerance::of_cache(format)))
            },
            prefill_tolerance: Tolerance::NONE,
            batch_invariant,
        };
        for breach in suite::window_violations(&case) {
            eprintln!("  {breach}");
            violations += 1;
        }
    }
    assert_eq!(violations, 0, "{violations} property violations");
}

#[test]
fn windowed_rows_match_the_cpu_reference() {
    let Some(device) = open_device() else { return };
    let model = SyntheticModel::new(SyntheticLayout::HybridGrouped, QuantType::Q4_K, 2);
    let vocab = model.spec.vocab;
    for format in [KvFormat::F16, KvFormat::Q8_0] {
        // Rounding of the weights and of the cache add up.
        let (weights, cache) = (reference_tolerance(QuantType::Q4_K), kv_tolerance(format));
        let each = Tolerance {
            absolute: weights.each.absolute + cache.each.absolute,
            relative: weights.each.relative + cache.each.relative,
        };
        let most = weights.mean + cache.mean;
        let devices: [&dyn Backend; 2] = [&device.backend, &cpu_reference()];
        let runners = devices.map(|device| {
            let config = load_config(&model, same(format), SMALL);
            device.open(config, &mut |_| {}).unwrap()
        });
        let wide_tree = fixtures::model::tree(vocab, 20, |i| (i - 1) / 2);
        let rows = runners.map(|mut runner| {
            let runner: &mut dyn Runner = &mut *runner;
            let seq = runner.open(500).unwrap();
            let mut rows = Vec::new();
            runner.prefill(seq, &text(vocab, 192, 1), &[]).unwrap();
            runner.prefill(seq, &text(vocab, 150, 2), &[]).unwrap();
            for window in [
                AttentionWindow::new(64, 0),
                AttentionWindow::new(100, 5),
                AttentionWindow::new(64, 130),
            ] {
                let tree: Tree = wide_tree.clone().with_window(window);
                rows.extend(verify(runner, seq, &tree));
                let path = tree.path_to(NodeIdx(1));
                runner
                    .commit(&[contract::CommitItem { seq, path: &path }])
                    .unwrap();
            }
            rows
        });
        for (i, (found, expected)) in rows[0].iter().zip(&rows[1]).enumerate() {
            let what = format!("{}, row {i}", format.name());
            let near = compare(&found.raw, &expected.raw, each);
            near.unwrap_or_else(|off| panic!("{what}: {off}"));
            let off = found.raw.iter().zip(&expected.raw);
            let mean = off.map(|(f, e)| (f - e).abs()).sum::<f32>() / found.raw.len() as f32;
            assert!(mean <= most, "{what}: {mean} off on average");
        }
    }
}

#[test]
fn windows_are_rejected_unless_enabled_at_open() {
    let Some(device) = open_device_with(Options::default()) else {
        return;
    };
    let model = SyntheticModel::new(SyntheticLayout::Dense, QuantType::Q8_0, 1);
    let config = load_config(&model, same(KvFormat::F16), SMALL);
    let mut runner = device.backend.open(config, &mut |_| {}).unwrap();
    let seq = runner.open(100).unwrap();
    let tree = Tree::root(contract::TokenId(3)).with_window(AttentionWindow::new(64, 0));
    let requests = [contract::LogitsRequest::full()];
    let item = contract::VerifyItem {
        seq,
        tree: &tree,
        requests: &requests,
    };
    assert!(runner.verify(&[item]).is_err());
}
