//! The conformance suite on the GPU. Without a GPU every test prints SKIPPED and passes.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod gpu;
    pub mod model;
}

use std::time::{Duration, Instant};

use conformance::compare::{Precision, Tolerance, compare_rows};
use conformance::stage_faults::FaultyDevice;
use conformance::stages;
use conformance::suite::{self, Case};
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{
    Backend, DeviceError, KvFormat, KvFormats, LogitsRequest, LogitsRow, NodeIdx, QuantType,
    TokenId, Tree, VerifyItem,
};

use cuda::Options;
use fixtures::gpu::ran_in_own_process;
use fixtures::model::{
    F16_KV, LIMITS, ModelDevice, load_config, open_device, open_device_with, open_two_devices_with,
    reference_tolerance, text, verify,
};

/// Tolerance between equivalent paths: other sum orders, rounded to half precision.
fn tolerance(model: &SyntheticModel, kv: KvFormats) -> Tolerance {
    let of_products = match model.ty {
        QuantType::F32 => Tolerance::REORDERED,
        _ => Tolerance {
            absolute: 0.02,
            relative: 0.01,
        },
    };
    of_products
        .or(Tolerance::of_cache(kv.k))
        .or(Tolerance::of_cache(kv.v))
}

/// How to open a model, and the tolerance between equivalent paths.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    /// Trees and single steps have different sum orders.
    Fast,
    /// Trees and single steps give the same bits.
    Exact,
}

/// Checks all properties and prints each violation and the time. Returns the number of violations.
fn count_violations(
    device: &ModelDevice,
    model: &SyntheticModel,
    kv: KvFormats,
    mode: Mode,
) -> usize {
    violations_of(&device.backend, model, kv, mode)
}

fn violations_of(
    backend: &dyn Backend,
    model: &SyntheticModel,
    kv: KvFormats,
    mode: Mode,
) -> usize {
    let case = Case {
        backend,
        model,
        kv,
        precision: match mode {
            Mode::Fast => Precision::Within(tolerance(model, kv)),
            Mode::Exact => Precision::BitExact,
        },
        // Prefill uses f16 activations for every weight type.
        prefill_tolerance: match model.ty {
            QuantType::F32 => Tolerance::NONE,
            ty => reference_tolerance(ty).each,
        },
        batch_invariant: mode == Mode::Exact,
    };
    let begun = Instant::now();
    let violations = suite::violations(&case);
    for breach in &violations {
        eprintln!("  {breach}");
    }
    let (name, took) = (&model.spec.name, begun.elapsed());
    eprintln!("  {name}, {:?} and {:?}: {took:.1?}", kv.k, kv.v);
    violations.len()
}

fn assert_no_violations(violations: usize) {
    assert_eq!(violations, 0, "{violations} property violations");
}

#[test]
fn every_synthetic_layout_passes_the_suite() {
    let Some(device) = open_device(false) else {
        return;
    };
    let models = SyntheticLayout::ALL.map(|layout| SyntheticModel::new(layout, QuantType::Q4_K, 1));
    let violations = models.map(|model| count_violations(&device, &model, F16_KV, Mode::Fast));
    assert_no_violations(violations.iter().sum());
}

#[test]
fn layouts_of_experts_pass_the_suite() {
    let Some(device) = open_device(false) else {
        return;
    };
    let models =
        SyntheticLayout::EXPERTS.map(|layout| SyntheticModel::new(layout, QuantType::Q4_K, 1));
    let violations = models.map(|model| count_violations(&device, &model, F16_KV, Mode::Fast));
    assert_no_violations(violations.iter().sum());
}

/// Windows, biases, other rotations, norms behind blocks: as measured, and bit for bit.
#[test]
fn layouts_of_other_families_pass_the_suite() {
    let Some(device) = open_device(false) else {
        return;
    };
    let mut violations = 0;
    for layout in SyntheticLayout::OTHER_FAMILIES {
        let model = SyntheticModel::new(layout, QuantType::Q4_K, 1);
        for mode in [Mode::Fast, Mode::Exact] {
            violations += count_violations(&device, &model, F16_KV, mode);
        }
    }
    assert_no_violations(violations);
}

/// Small models use single-row kernels. Here they use the large-model paths, with fused layers
/// where the GPU has them.
#[test]
fn models_on_large_model_paths_pass_the_suite() {
    let options = Options {
        as_large_model: true,
        ..Options::default()
    };
    let Some(device) = open_device_with(options) else {
        return;
    };
    let layouts =
        SyntheticLayout::ALL.map(|layout| SyntheticModel::new(layout, QuantType::Q4_K, 7));
    let types = [QuantType::Q6_K, QuantType::BF16, QuantType::F32];
    let types = types.map(|ty| SyntheticModel::new(SyntheticLayout::HybridTiled, ty, 7));
    let models = layouts.iter().chain(&types);
    assert_no_violations(
        models
            .map(|model| count_violations(&device, model, F16_KV, Mode::Fast))
            .sum(),
    );
}

#[test]
fn eager_launches_pass_the_suite() {
    let Some(device) = open_device(true) else {
        return;
    };
    let model = SyntheticModel::new(SyntheticLayout::HybridGrouped, QuantType::Q5_K, 4);
    let kv = KvFormats {
        k: KvFormat::Q8_0,
        v: KvFormat::F16,
    };
    assert_no_violations(count_violations(&device, &model, kv, Mode::Fast));
}

#[test]
fn every_weight_type_passes_the_suite() {
    let Some(device) = open_device(false) else {
        return;
    };
    let models = QuantType::ALL.map(|ty| SyntheticModel::new(SyntheticLayout::HybridTiled, ty, 2));
    let violations = models.map(|model| count_violations(&device, &model, F16_KV, Mode::Fast));
    assert_no_violations(violations.iter().sum());
}

#[test]
fn every_kv_type_pair_passes_the_suite() {
    let Some(device) = open_device(false) else {
        return;
    };
    use KvFormat::{Bf16, F16, F32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Tq3_0};
    let same = KvFormat::ALL.into_iter().filter(|f| *f != Tq3_0);
    let mixed = [
        (F32, Q8_0),
        (F16, Q4_1),
        (Bf16, Q5_0),
        (Q8_0, Q4_0),
        (Q5_1, F16),
        (Q4_0, Bf16),
    ];
    let narrow = same.map(|f| (f, f)).chain(mixed);
    // Groups of 128 values need heads of at least 128 values.
    let wide = [(Tq3_0, Tq3_0), (F16, Tq3_0), (Tq3_0, Q8_0), (Q4_0, Tq3_0)];
    let [even, dense] = [SyntheticLayout::HybridEven, SyntheticLayout::Dense]
        .map(|layout| SyntheticModel::new(layout, QuantType::Q6_K, 3));
    let all = narrow
        .map(|pair| (&even, pair))
        .chain(wide.map(|pair| (&dense, pair)));
    let violations = all
        .map(|(model, (k, v))| count_violations(&device, model, KvFormats { k, v }, Mode::Fast))
        .sum();
    assert_no_violations(violations);
}

/// The promise of `--batch-invariant`: a text is bit-identical for any verification tree.
#[test]
fn batch_invariant_models_pass_the_suite_bit_exactly() {
    let Some(device) = open_device(false) else {
        return;
    };
    let mut violations = 0;
    for layout in SyntheticLayout::ALL {
        let model = SyntheticModel::new(layout, QuantType::Q4_K, 5);
        violations += count_violations(&device, &model, F16_KV, Mode::Exact);
    }
    let model = SyntheticModel::new(SyntheticLayout::HybridTiled, QuantType::F32, 5);
    violations += count_violations(&device, &model, F16_KV, Mode::Exact);
    assert_no_violations(violations);
}

/// Two shards on two GPUs: any tree gives the bits of its paths, so drafting changes no text.
#[test]
fn shards_on_two_gpus_pass_the_suite_bit_exactly() {
    let Some(devices) = open_two_devices_with(&Options::default()) else {
        return;
    };
    let boxed = |device: &ModelDevice| -> Box<dyn Backend> { Box::new(device.backend.clone()) };
    let backend = stages::shards(devices.iter().map(boxed));
    let models = [
        (SyntheticLayout::HybridHalves, QuantType::Q4_K),
        (SyntheticLayout::HybridExperts, QuantType::Q8_0),
    ];
    let violations = models.map(|(layout, ty)| {
        let model = SyntheticModel::new(layout, ty, 5);
        violations_of(&backend, &model, F16_KV, Mode::Exact)
    });
    assert_no_violations(violations.iter().sum());
}

/// The first shard never runs its step: the second waits for sums until its watchdog ends the
/// launch. One error names it, nothing hangs, and the process goes on.
#[test]
fn shard_that_waits_in_vain_ends_with_an_error_that_names_it() {
    if ran_in_own_process("shard_that_waits_in_vain_ends_with_an_error_that_names_it") {
        return;
    }
    let options = Options {
        shard_watchdog: Some(Duration::from_millis(500)),
        as_large_model: true,
        ..Options::default()
    };
    let Some(devices) = open_two_devices_with(&options) else {
        return;
    };
    let mut devices = devices
        .each_ref()
        .map(|device| FaultyDevice::new(device.backend.clone()));
    devices[0].skips_steps = true;
    let devices = devices.into_iter();
    let backend = stages::shards(devices.map(|device| -> Box<dyn Backend> { Box::new(device) }));
    let model = SyntheticModel::new(SyntheticLayout::HybridHalves, QuantType::Q4_K, 5);
    let config = load_config(&model, F16_KV, LIMITS);
    let prompt = text(config.target.vocab, 16, 1);
    let mut runner = backend.open(config, &mut |_| {}).unwrap();
    let seq = runner.open(64).unwrap();
    runner.prefill(seq, &prompt, &[]).unwrap();
    let begun = Instant::now();
    let tree = Tree::root(TokenId(1));
    let item = VerifyItem {
        seq,
        tree: &tree,
        requests: &[LogitsRequest::full()],
    };
    let error = runner.verify(&[item]).unwrap_err();
    eprintln!("after {} ms: {error}", begun.elapsed().as_millis());
    let message = error.to_string();
    assert!(matches!(error, DeviceError::DeviceLost { .. }), "{message}");
    assert!(message.contains("shard 2 of 2"), "{message}");
    assert_eq!(runner.capacity().tokens, 0);
    runner.close(seq);
    assert!(runner.open(64).is_err());
    drop(runner);
    assert!(begun.elapsed() < Duration::from_secs(15));
}

/// Batch-invariant models on large-model paths, in fused layers where the GPU has them.
#[test]
fn batch_invariant_models_on_large_model_paths_pass_the_suite_bit_exactly() {
    let options = Options {
        as_large_model: true,
        ..Options::default()
    };
    let Some(device) = open_device_with(options) else {
        return;
    };
    let layouts = [
        SyntheticLayout::HybridWide,
        SyntheticLayout::Dense,
        SyntheticLayout::Odd,
    ];
    let models = layouts.map(|layout| SyntheticModel::new(layout, QuantType::Q4_K, 8));
    let violations = models.map(|model| count_violations(&device, &model, F16_KV, Mode::Exact));
    assert_no_violations(violations.iter().sum());
}

/// In batch-invariant mode a row has the same bits for any other rows: the root of a star of 1 to
/// 64 nodes, and its last leaf.
#[test]
fn logits_row_bits_do_not_depend_on_the_batch_width() {
    let Some(device) = open_device(false) else {
        return;
    };
    for ty in QuantType::ALL {
        let model = SyntheticModel::new(SyntheticLayout::HybridTiled, ty, 6);
        let mut config = load_config(&model, F16_KV, LIMITS);
        config.batch_invariant = true;
        let mut runner = device.backend.open(config, &mut |_| {}).unwrap();
        let vocab = model.spec.vocab;
        let seq = runner.open(300).unwrap();
        runner.prefill(seq, &text(vocab, 70, 7), &[]).unwrap();
        // Single-row steps use kernels of their own.
        let single = verify(&mut *runner, seq, &Tree::root(TokenId(3))).remove(0);
        runner.discard(seq).unwrap();
        let mut alone: Option<(LogitsRow, LogitsRow)> = None;
        for n in 2..=64_u32 {
            // The same root and last leaf, with other nodes between them.
            let mut tokens: Vec<TokenId> = (0..n).map(|i| TokenId(i + 100)).collect();
            (tokens[0], tokens[n as usize - 1]) = (TokenId(3), TokenId(9));
            let star = Tree::new(&tokens, &vec![NodeIdx::ROOT; tokens.len() - 1]).unwrap();
            let mut rows = verify(&mut *runner, seq, &star);
            runner.discard(seq).unwrap();
            let (leaf, root) = (rows.pop().unwrap(), rows.remove(0));
            let (first_root, first_leaf) =
                alone.get_or_insert_with(|| (root.clone(), leaf.clone()));
            let pairs = [
                (&root, &*first_root),
                (&root, &single),
                (&leaf, &*first_leaf),
            ];
            for (found, expected) in pairs {
                let same = compare_rows(found, expected, Precision::BitExact);
                same.unwrap_or_else(|e| panic!("{}, {n} nodes: {e}", model.spec.name));
            }
        }
    }
}
