//! The suite every device must pass, on the CPU: each block layout and weight type, each pair of cache
//! formats, the oracle and every instruction set this machine has.

use conformance::compare::{Exactness, Tolerance};
use conformance::specimen::{Layout, Specimen};
use conformance::suite::{self, Subject};
use contract::{Backend, KvFormat, KvFormats, QuantType};
use cpu::dispatch::Dispatch;
use cpu::{CpuBackend, Options};

fn check(backend: &dyn Backend, specimen: &Specimen, k: KvFormat, v: KvFormat) {
    let subject = Subject {
        backend,
        specimen,
        kv: KvFormats { k, v },
        exactness: Exactness::Bits,
        routes: Tolerance::NONE,
        exact: false,
    };
    if let Err(breach) = suite::run(&subject) {
        panic!("{breach}");
    }
}

fn fast() -> CpuBackend {
    CpuBackend::new(Options {
        reference: false,
        threads: Some(2),
    })
}

fn oracle() -> CpuBackend {
    CpuBackend::new(Options {
        reference: true,
        threads: Some(2),
    })
}

#[test]
fn every_layout_keeps_every_law() {
    for layout in Layout::ALL {
        let specimen = Specimen::new(layout, QuantType::Q4_K, 1);
        check(&fast(), &specimen, KvFormat::F16, KvFormat::F16);
    }
}

#[test]
fn every_weight_type_keeps_every_law() {
    for ty in QuantType::ALL {
        let specimen = Specimen::new(Layout::HybridTiled, ty, 2);
        check(&fast(), &specimen, KvFormat::F16, KvFormat::F16);
    }
}

#[test]
fn every_pair_of_cache_formats_keeps_every_law() {
    let formats = [KvFormat::F32, KvFormat::F16, KvFormat::Q8_0, KvFormat::Q4_0];
    let specimen = Specimen::new(Layout::HybridEven, QuantType::Q6_K, 3);
    for k in formats {
        for v in formats {
            check(&fast(), &specimen, k, v);
        }
    }
}

#[test]
fn every_instruction_set_keeps_every_law() {
    let specimen = Specimen::new(Layout::HybridGrouped, QuantType::Q5_K, 4);
    for dispatch in Dispatch::all_fast() {
        let backend = CpuBackend::with_dispatch(dispatch, 3);
        check(&backend, &specimen, KvFormat::Q8_0, KvFormat::F16);
    }
}

#[test]
fn the_oracle_keeps_every_law() {
    for layout in Layout::ALL {
        let specimen = Specimen::new(layout, QuantType::Q8_0, 5);
        check(&oracle(), &specimen, KvFormat::F32, KvFormat::F32);
    }
}
