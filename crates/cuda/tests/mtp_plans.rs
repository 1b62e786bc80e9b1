//! Plans of models with a multi-token-prediction head, without a GPU: the kernels that the head
//! adds compile for every architecture, and it costs the memory that it says.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod nvrtc;
}

use std::collections::BTreeSet;

use contract::{Backend, KvFormat, KvFormats, Limits, LoadConfig, WeightRef};
use cuda::compile::{Nvrtc, Options as CompileOptions, compile};
use cuda::driver::Arch;
use cuda::launch::CompileUnit;
use cuda::{CudaBackend, GpuInfo, Options};
use model::synth::SynthSpec;

fn config(name: &str, with_head: bool, format: KvFormat) -> LoadConfig {
    let mut loaded = SynthSpec::parse(name).unwrap().load().unwrap();
    if !with_head {
        loaded.drop_mtp();
    }
    LoadConfig {
        target: loaded.spec,
        weights: loaded.weights,
        draft: None,
        batch_invariant: false,
        kv: KvFormats {
            k: format,
            v: format,
        },
        limits: Limits {
            sequences: 2,
            context: 4096,
            tree_nodes: 24,
            prefill_chunk: 512,
            pool_tokens: None,
        },
    }
}

fn backend(number: u32, as_large_model: bool) -> CudaBackend {
    let gpu = GpuInfo {
        ordinal: 0,
        name: "a GPU".to_owned(),
        capability: (number / 10, number % 10),
        run_as: None,
        sm_count: 132,
        total_bytes: 80 << 30,
    };
    let options = Options {
        as_large_model,
        ..Options::default()
    };
    CudaBackend::with_options(gpu, options)
}

/// The units that only the head needs.
fn added(name: &str, number: u32, format: KvFormat) -> BTreeSet<CompileUnit> {
    let [with, without] = [true, false].map(|head| {
        let backend = backend(number, name.starts_with("tiny"));
        let units = backend.units(&config(name, head, format)).unwrap();
        units.into_iter().collect::<BTreeSet<_>>()
    });
    assert!(with.is_superset(&without));
    with.difference(&without).cloned().collect()
}

#[test]
fn every_kernel_that_a_head_adds_compiles() {
    let nvrtc = fixtures::nvrtc::search();
    if let Err(error) = Nvrtc::open(&nvrtc) {
        eprintln!("SKIPPED every_kernel_that_a_head_adds_compiles: {error}");
        return;
    }
    let options = CompileOptions {
        nvrtc,
        ..CompileOptions::default()
    };
    for (number, names) in [
        (80, &[("tiny-hybrid+mtp:f32", KvFormat::F32)][..]),
        (86, &[("tiny-hybrid-r1+mtp-own:q8_0", KvFormat::Q4_0)]),
        (
            90,
            &[
                ("tiny-hybrid+mtp:bf16", KvFormat::F16),
                ("qwen3.5-27b+mtp:q4_k_m", KvFormat::Q8_0),
            ],
        ),
    ] {
        let mut units = BTreeSet::new();
        for (name, format) in names {
            units.extend(added(name, number, *format));
        }
        let units: Vec<CompileUnit> = units.into_iter().collect();
        for file in ["mtp/join.cu", "mtp/keep_hidden.cu", "mtp/commit_hidden.cu"] {
            assert!(units.iter().any(|unit| unit.file == file), "{file}");
        }
        let arch = Arch { number };
        match compile(arch, &units, &options, &mut |_| ()) {
            Ok(compiled) => {
                for unit in &compiled {
                    for entry in unit.entries.iter().filter(|e| e.entry.starts_with("mtp_")) {
                        assert_eq!(entry.spill_bytes, 0, "{entry:?}");
                    }
                }
                eprintln!("{} units for {arch}", compiled.len());
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_head_costs_its_tensors_and_its_rows() {
    let name = "qwen3.5-27b+mtp:q4_k_m";
    let backend = backend(90, false);
    let plan = |with_head, context| {
        let mut config = config(name, with_head, KvFormat::F16);
        config.limits.context = context;
        backend.estimate(&config).unwrap()
    };
    let spec = config(name, true, KvFormat::F16).target;
    let tensors: usize = spec
        .mtp
        .as_ref()
        .unwrap()
        .weights(&spec)
        .into_iter()
        .map(WeightRef::bytes)
        .sum();
    let (with, without) = (plan(true, 4096), plan(false, 4096));
    let more = (with.weights_bytes - without.weights_bytes) as f64 / tensors as f64;
    assert!((0.95..1.1).contains(&more), "{more} of the file's bytes");
    // Keys and values of 4 heads of 256 f16 values.
    let longer = plan(true, 8192).kv_bytes - plan(true, 4096).kv_bytes;
    let plainly = plan(false, 8192).kv_bytes - plan(false, 4096).kv_bytes;
    assert_eq!(longer - plainly, 2 * 4096 * 4096);
    assert_eq!(with.state_bytes - without.state_bytes, 2 * 65 * 5120 * 4);
    // Two headers; activations fit where the trunk's are.
    let scratch = with.scratch_bytes - without.scratch_bytes;
    assert!(scratch < 64 << 10, "{scratch} bytes");
    let total = with.total_bytes() - without.total_bytes();
    eprintln!("{name}: {tensors} bytes of tensors, {total} bytes in all");
}
