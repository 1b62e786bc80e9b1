//! Freezes which kernel runs what: every operation of well-known models on every architecture, with
//! the reason.
//!
//! `selection.txt` beside this file is what `CudaBackend::explain` gives. After a change that is
//! meant, write it anew by `BLESS=1 cargo test -p cuda --test selection` and read the difference.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "all of this file is a test"
)]

use std::fmt::Write as _;
use std::sync::Arc;

use contract::{KvFormat, KvFormats, Limits, LoadConfig};
use cuda::{CudaBackend, GpuInfo, Numerics, Options};
use model::synth::SynthSpec;

const MODELS: [&str; 2] = [
    "qwen3.5-27b:q4_k_m-published",
    "qwen3.5-0.8b:bf16-published",
];
/// The reason of kernels without an alternative, which the table leaves out.
const ONLY_KERNEL: &str = "the only kernel";
/// Compute capability and multiprocessors of a usual GPU.
const GPUS: [(u32, u32); 5] = [(80, 108), (86, 82), (89, 128), (90, 132), (120, 170)];
const LIMITS: Limits = Limits {
    sequences: 4,
    context: 32_768,
    tree_nodes: 64,
    prefill_chunk: 2048,
    pool_tokens: None,
};

fn table() -> String {
    let mut out = String::new();
    for name in MODELS {
        let loaded = SynthSpec::parse(name).unwrap().load().unwrap();
        for (number, sm_count) in GPUS {
            for format in [KvFormat::F16, KvFormat::Q8_0, KvFormat::F32] {
                for numerics in [Numerics::Fastest, Numerics::BatchInvariant] {
                    let config = LoadConfig {
                        target: Arc::clone(&loaded.spec),
                        weights: Arc::clone(&loaded.weights),
                        draft: None,
                        batch_invariant: false,
                        kv: KvFormats {
                            k: format,
                            v: format,
                        },
                        limits: LIMITS,
                    };
                    let gpu = GpuInfo {
                        ordinal: 0,
                        name: format!("sm_{number}"),
                        capability: (number / 10, number % 10),
                        run_as: None,
                        sm_count,
                        total_bytes: 24 << 30,
                    };
                    let options = Options {
                        numerics: Some(numerics),
                        assume_free: true,
                        ..Options::default()
                    };
                    let backend = CudaBackend::with_options(gpu, options);
                    let kv = format.name();
                    writeln!(out, "\n{name} on sm_{number}, KV {kv}, {numerics:?}").unwrap();
                    let explained = backend.explain(&config).unwrap();
                    for line in explained.iter().filter(|line| line.reason != ONLY_KERNEL) {
                        let words: Vec<String> = line
                            .to_string()
                            .split_whitespace()
                            .map(str::to_owned)
                            .collect();
                        writeln!(out, "{}", words.join(" ")).unwrap();
                    }
                }
            }
        }
    }
    out
}

#[test]
fn kernel_selection_is_the_recorded_one() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/selection.txt");
    let found = table();
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, &found).unwrap();
    }
    let recorded = std::fs::read_to_string(path).unwrap();
    for (number, (found, recorded)) in found.lines().zip(recorded.lines()).enumerate() {
        assert_eq!(found, recorded, "line {} of {path}", number + 1);
    }
    assert_eq!(found.lines().count(), recorded.lines().count());
}
