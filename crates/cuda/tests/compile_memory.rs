//! Memory that stays resident after kernels were compiled.
//!
//! The test counts the memory of its whole process, so no other test stands beside it. Without
//! NVRTC or `/proc` it prints a line and passes.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod nvrtc;
}

use std::fs;
use std::sync::Arc;

use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{KvFormat, KvFormats, Limits, LoadConfig, QuantType};
use cuda::compile::{Nvrtc, Options, compile};
use cuda::driver::Arch;
use cuda::{CudaBackend, GpuInfo};

/// Resident anonymous memory of this process in MiB.
fn anonymous_mib() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("RssAnon:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024)
}

fn load_config() -> LoadConfig {
    let synthetic = SyntheticModel::new(SyntheticLayout::HybridTiled, QuantType::Q4_K, 1);
    LoadConfig {
        target: synthetic.spec,
        weights: Arc::clone(&synthetic.weights),
        draft: None,
        batch_invariant: false,
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        },
        limits: Limits {
            sequences: 1,
            context: 256,
            tree_nodes: 8,
            prefill_chunk: 64,
            pool_tokens: None,
        },
    }
}

#[test]
fn compiler_memory_returns_to_the_system() {
    let nvrtc = fixtures::nvrtc::search();
    if let Err(error) = Nvrtc::open(&nvrtc) {
        eprintln!("SKIPPED compiler_memory_returns_to_the_system: {error}");
        return;
    }
    let gpu = GpuInfo {
        ordinal: 0,
        name: "a GPU".to_owned(),
        capability: (8, 6),
        run_as: None,
        sm_count: 82,
        total_bytes: 24 << 30,
    };
    let mut units = CudaBackend::new(gpu).units(&load_config()).unwrap();
    units.sort();
    units.dedup();
    units.truncate(12);
    let options = Options {
        nvrtc,
        threads: 2,
        ..Options::default()
    };
    let Some(before) = anonymous_mib() else {
        eprintln!("SKIPPED compiler_memory_returns_to_the_system: no /proc/self/status");
        return;
    };
    let compiled = compile(Arch { number: 86 }, &units, &options, &mut |_| {}).unwrap();
    let after = anonymous_mib().unwrap();
    let cubins: usize = compiled.iter().map(|unit| unit.cubin.len()).sum();
    eprintln!(
        "{} units: {before} MiB before, {after} MiB after",
        units.len()
    );
    assert!(
        after <= before + 12 + (cubins >> 20) as u64,
        "{before} MiB before {} units were compiled, {after} MiB after",
        units.len()
    );
}
