//! The laws of windows, to the bit: every layout, pairs of cache formats, the oracle, and as many threads as make
//! attention go node by node.

#![expect(clippy::panic, reason = "a law that does not hold fails the test")]

use conformance::compare::{Exactness, Tolerance};
use conformance::specimen::{Layout, Specimen};
use conformance::suite::{self, Subject};
use contract::{KvFormat, KvFormats, QuantType};
use cpu::{CpuBackend, Options};

fn check(options: Options, specimen: &Specimen, kv: (KvFormat, KvFormat)) {
    let subject = Subject {
        backend: &CpuBackend::new(options).turning(),
        specimen,
        kv: KvFormats { k: kv.0, v: kv.1 },
        exactness: Exactness::Bits,
        routes: Tolerance::NONE,
        exact: false,
    };
    if let Some(breach) = suite::window_breaches(&subject).first() {
        panic!("{breach}");
    }
}

fn fast(threads: usize) -> Options {
    Options {
        reference: false,
        threads: Some(threads),
    }
}

#[test]
fn every_layout_keeps_the_laws_of_windows() {
    for layout in Layout::ALL {
        let specimen = Specimen::new(layout, QuantType::Q4_K, 1);
        check(fast(2), &specimen, (KvFormat::F16, KvFormat::F16));
    }
}

#[test]
fn nodes_alone_and_together_keep_the_laws_of_windows() {
    let specimen = Specimen::new(Layout::HybridGrouped, QuantType::Q4_K, 2);
    for threads in [1, 3, 16] {
        check(fast(threads), &specimen, (KvFormat::Q8_0, KvFormat::Q4_0));
    }
}

#[test]
fn the_oracle_keeps_the_laws_of_windows() {
    let specimen = Specimen::new(Layout::Dense, QuantType::Q8_0, 3);
    let oracle = Options {
        reference: true,
        threads: Some(2),
    };
    check(oracle, &specimen, (KvFormat::F32, KvFormat::F32));
}
