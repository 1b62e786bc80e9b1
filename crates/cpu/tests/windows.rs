//! The properties of windows, bit for bit: every layout, pairs of KV cache types, the reference,
//! and enough threads for per-node attention items.

#![expect(clippy::panic, reason = "a violated property fails the test")]

use conformance::compare::{Precision, Tolerance};
use conformance::suite::{self, Case};
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{KvFormat, KvFormats, QuantType};
use cpu::{CpuBackend, CpuOptions};

fn check(options: CpuOptions, model: &SyntheticModel, kv: (KvFormat, KvFormat)) {
    let case = Case {
        backend: &CpuBackend::new(options).with_rotation(),
        model,
        kv: KvFormats { k: kv.0, v: kv.1 },
        precision: Precision::BitExact,
        prefill_tolerance: Tolerance::NONE,
        batch_invariant: false,
    };
    if let Some(breach) = suite::window_violations(&case).first() {
        panic!("{breach}");
    }
}

fn fast(threads: usize) -> CpuOptions {
    CpuOptions {
        reference: false,
        threads: Some(threads),
    }
}

#[test]
fn every_layout_satisfies_the_window_properties() {
    for layout in SyntheticLayout::ALL {
        let model = SyntheticModel::new(layout, QuantType::Q4_K, 1);
        check(fast(2), &model, (KvFormat::F16, KvFormat::F16));
    }
}

#[test]
fn single_and_batched_nodes_satisfy_the_window_properties() {
    let model = SyntheticModel::new(SyntheticLayout::HybridGrouped, QuantType::Q4_K, 2);
    for threads in [1, 3, 16] {
        check(fast(threads), &model, (KvFormat::Q8_0, KvFormat::Q4_0));
    }
}

#[test]
fn reference_satisfies_the_window_properties() {
    let model = SyntheticModel::new(SyntheticLayout::Dense, QuantType::Q8_0, 3);
    let reference = CpuOptions {
        reference: true,
        threads: Some(2),
    };
    check(reference, &model, (KvFormat::F32, KvFormat::F32));
}
