//! The CPU keeps the laws every device keeps, bit for bit: on every head layout, every weight type and every
//! pair of cache formats, by the oracle and by the fast path.

use conformance::compare::Exactness;
use conformance::specimen::{Layout, Specimen};
use conformance::suite::{Subject, run};
use contract::{KvFormat, KvFormats, QuantType};
use cpu::{CpuBackend, Options};

const ORACLE: Options = Options {
    reference: true,
    threads: Some(2),
};
const FAST: Options = Options {
    reference: false,
    threads: Some(2),
};
const FORMATS: [KvFormat; 3] = [KvFormat::F16, KvFormat::Q8_0, KvFormat::F32];

fn check(options: Options, layout: Layout, ty: QuantType, (k, v): (KvFormat, KvFormat)) {
    let subject = Subject {
        backend: &CpuBackend::new(options),
        specimen: &Specimen::new(layout, ty, 7),
        kv: KvFormats { k, v },
        exactness: Exactness::Bits,
    };
    if let Err(breach) = run(&subject) {
        panic!("{options:?}: {breach}");
    }
}

#[test]
fn the_fast_path_keeps_the_laws_on_every_layout() {
    for (i, layout) in Layout::ALL.into_iter().enumerate() {
        check(
            FAST,
            layout,
            QuantType::Q4_K,
            (FORMATS[i % 3], FORMATS[i / 2 % 3]),
        );
    }
}

#[test]
fn the_oracle_keeps_the_laws_on_every_layout() {
    for (i, layout) in Layout::ALL.into_iter().enumerate() {
        check(
            ORACLE,
            layout,
            QuantType::Q8_0,
            (FORMATS[i / 2 % 3], FORMATS[i % 3]),
        );
    }
}

#[test]
fn the_fast_path_keeps_the_laws_with_every_weight_type() {
    for (i, ty) in QuantType::ALL.into_iter().enumerate() {
        check(
            FAST,
            Layout::Plain,
            ty,
            (FORMATS[i % 3], FORMATS[i / 3 % 3]),
        );
    }
}
