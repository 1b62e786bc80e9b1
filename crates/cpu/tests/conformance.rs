//! The suite that every device must pass, on the CPU: each block layout and weight type, each pair
//! of KV cache types, the reference and every supported instruction set.

use conformance::compare::{Precision, Tolerance};
use conformance::suite::{self, Case};
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{Backend, KvFormat, KvFormats, QuantType};
use cpu::simd::dispatch::Dispatch;
use cpu::{CpuBackend, CpuOptions};

fn check(backend: &dyn Backend, model: &SyntheticModel, k: KvFormat, v: KvFormat) {
    let case = Case {
        backend,
        model,
        kv: KvFormats { k, v },
        precision: Precision::BitExact,
        prefill_tolerance: Tolerance::NONE,
        batch_invariant: false,
    };
    if let Err(breach) = suite::run(&case) {
        panic!("{breach}");
    }
}

fn fast() -> CpuBackend {
    CpuBackend::new(CpuOptions {
        reference: false,
        threads: Some(2),
    })
}

fn reference() -> CpuBackend {
    CpuBackend::new(CpuOptions {
        reference: true,
        threads: Some(2),
    })
}

fn layouts() -> impl Iterator<Item = SyntheticLayout> {
    SyntheticLayout::ALL
        .into_iter()
        .chain(SyntheticLayout::EXPERTS)
}

#[test]
fn every_layout_satisfies_every_property() {
    for layout in layouts() {
        let model = SyntheticModel::new(layout, QuantType::Q4_K, 1);
        check(&fast(), &model, KvFormat::F16, KvFormat::F16);
    }
}

#[test]
fn every_weight_type_satisfies_every_property() {
    for ty in QuantType::ALL {
        for layout in [SyntheticLayout::HybridTiled, SyntheticLayout::DenseExperts] {
            let model = SyntheticModel::new(layout, ty, 2);
            check(&fast(), &model, KvFormat::F16, KvFormat::F16);
        }
    }
}

#[test]
fn every_pair_of_cache_formats_satisfies_every_property() {
    let formats = [KvFormat::F32, KvFormat::F16, KvFormat::Q8_0, KvFormat::Q4_0];
    let model = SyntheticModel::new(SyntheticLayout::HybridEven, QuantType::Q6_K, 3);
    for k in formats {
        for v in formats {
            check(&fast(), &model, k, v);
        }
    }
}

#[test]
fn every_instruction_set_satisfies_every_property() {
    for layout in [
        SyntheticLayout::HybridGrouped,
        SyntheticLayout::HybridExperts,
    ] {
        let model = SyntheticModel::new(layout, QuantType::Q5_K, 4);
        for dispatch in Dispatch::all_fast() {
            let backend = CpuBackend::with_dispatch(dispatch, 3);
            check(&backend, &model, KvFormat::Q8_0, KvFormat::F16);
        }
    }
}

#[test]
fn reference_satisfies_every_property() {
    for layout in layouts() {
        let model = SyntheticModel::new(layout, QuantType::Q8_0, 5);
        check(&reference(), &model, KvFormat::F32, KvFormat::F32);
    }
}
