//! Compilation with NVRTC, which needs no GPU: every standard unit, and the cache.
//!
//! NVRTC is searched where CI and users install it. Without it the tests print a line and pass.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod nvrtc;
}

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{KvFormat, KvFormats, Limits, LoadConfig, QuantType};
use cuda::compile::{CompileError, Compiled, Nvrtc, Options, compile};
use cuda::driver::Arch;
use cuda::launch::{CompileUnit, bandwidth};
use cuda::{CudaBackend, GpuInfo};

/// Options with NVRTC, or `None` with a SKIPPED line.
fn options(test: &str, cache: Option<PathBuf>) -> Option<Options> {
    let nvrtc = fixtures::nvrtc::search();
    match Nvrtc::open(&nvrtc) {
        Ok(_) => Some(Options {
            nvrtc,
            cache,
            ..Options::default()
        }),
        Err(error) => {
            eprintln!("SKIPPED {test}: {error}");
            None
        }
    }
}

fn arch(text: &str) -> Arch {
    Arch::parse(text).unwrap()
}

fn compile_units(units: &[CompileUnit], options: &Options) -> Result<Vec<Compiled>, CompileError> {
    compile(arch("sm_86"), units, options, &mut |_| ())
}

#[test]
fn unit_compiles_to_a_cubin_with_resource_usage() {
    let Some(options) = options("a_unit_becomes_machine_code", None) else {
        return;
    };
    for target in [
        "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_110", "sm_120", "sm_121",
    ] {
        let units = [bandwidth::unit(), bandwidth::unit()];
        let mut on_progress = Vec::new();
        let compiled =
            compile(arch(target), &units, &options, &mut |p| on_progress.push(p)).unwrap();
        assert_eq!(compiled.len(), 1, "a unit named twice is compiled once");
        assert_eq!((on_progress[0].done, on_progress[0].total), (1, 1));
        let unit = &compiled[0];
        assert!(unit.cubin.starts_with(b"\x7fELF"), "{target}");
        let names: Vec<&str> = unit.entries.iter().map(|e| e.entry.as_str()).collect();
        assert!(names.contains(&"bandwidth_read") && names.contains(&"bandwidth_copy"));
        for entry in &unit.entries {
            assert!(entry.registers > 8 && entry.spill_bytes == 0, "{entry:?}");
        }
    }
}

/// What the dense families beside Qwen have: pairs of neighbours, biases, windows, GELU, scaled
/// embeddings and norms behind blocks.
#[test]
fn kernels_of_dense_families_compile_without_spills() {
    let Some(options) = options("dense_families", None) else {
        return;
    };
    let kv = KvFormats {
        k: KvFormat::Q8_0,
        v: KvFormat::Q8_0,
    };
    let limits = Limits {
        sequences: 1,
        context: 1024,
        tree_nodes: 1,
        prefill_chunk: 128,
        pool_tokens: None,
    };
    let backend = CudaBackend::new(GpuInfo {
        ordinal: 0,
        name: "RTX 3090".to_owned(),
        capability: (8, 6),
        run_as: None,
        sm_count: 82,
        total_bytes: 24 << 30,
    });
    let mut own = Vec::new();
    for layout in SyntheticLayout::OTHER_FAMILIES {
        let model = SyntheticModel::new(layout, QuantType::Q8_0, 1);
        let config = LoadConfig {
            target: model.spec,
            weights: model.weights,
            draft: None,
            batch_invariant: false,
            kv,
            limits,
        };
        let window = SyntheticLayout::WINDOW.to_string();
        let is_own = |unit: &CompileUnit| {
            unit.file == "norm/add_normed.cu"
                || unit.defines.iter().any(|(name, value)| match *name {
                    "ROPE_ADJACENT" | "BIASES" | "GELU" | "SCALED" => true,
                    "WINDOW" => *value == window,
                    _ => false,
                })
        };
        own.extend(backend.units(&config).unwrap().into_iter().filter(is_own));
    }
    let files: BTreeSet<&str> = own.iter().map(|unit| unit.file).collect();
    for file in [
        "attention/decode_tree.cu",
        "attention/prefill.cu",
        "attention/qk_norm_rope_append.cu",
        "embedding/gather.cu",
        "ffn/gated_unit.cu",
        "norm/add_normed.cu",
        "norm/prefill_to_panels.cu",
    ] {
        assert!(files.contains(file), "{file} is not in {files:?}");
    }
    for unit in compile_units(&own, &options).unwrap() {
        for entry in &unit.entries {
            assert_eq!(entry.spill_bytes, 0, "{entry:?}");
        }
    }
}

#[test]
fn compile_error_names_file_and_line() {
    let Some(options) = options("a_mistake_is_reported", None) else {
        return;
    };
    let unit = bandwidth::unit().define("sums", "7");
    let error = compile_units(&[unit], &options).unwrap_err().to_string();
    assert!(
        error.contains("common/bandwidth.cu(") && error.contains("sm_86"),
        "{error}"
    );
}

#[test]
fn cache_hits_skip_compilation_and_corrupt_entries_recompile() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("kernels");
    let Some(options) = options("the_cache_is_used", Some(cache.clone())) else {
        return;
    };
    let units = [bandwidth::unit()];
    let first = compile_units(&units, &options).unwrap().remove(0);
    assert_eq!(first.cached, None);
    let second = compile_units(&units, &options).unwrap().remove(0);
    let file = second.cached.unwrap();
    assert_eq!(
        (&second.cubin, &second.entries),
        (&first.cubin, &first.entries)
    );
    assert!(
        second.took < first.took,
        "{:?} {:?}",
        second.took,
        first.took
    );
    let whole = fs::read(&file).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 4;
    for bad in [&flipped[..], &whole[..whole.len() / 3], &[]] {
        fs::write(&file, bad).unwrap();
        let again = compile_units(&units, &options).unwrap().remove(0);
        assert_eq!(again.cached, None, "a damaged entry is not used");
        assert_eq!(again.cubin, first.cubin);
        let third = compile_units(&units, &options).unwrap().remove(0);
        assert_eq!(third.cached.as_ref(), Some(&file), "and is replaced");
    }
    let other = [bandwidth::unit().define("UNUSED", 1)];
    assert_eq!(compile_units(&other, &options).unwrap()[0].cached, None);
    assert_eq!(fs::read_dir(&cache).unwrap().count(), 2);
}

#[test]
fn concurrent_compilations_share_a_cache() {
    let folder = tempfile::tempdir().unwrap();
    let Some(options) = options("many_at_once", Some(folder.path().to_path_buf())) else {
        return;
    };
    let units: Vec<CompileUnit> = (0..6)
        .map(|n| bandwidth::unit().define("UNUSED", n))
        .collect();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| assert_eq!(compile_units(&units, &options).unwrap().len(), 6));
        }
    });
    let cached = compile_units(&units, &options).unwrap();
    assert!(cached.iter().all(|unit| unit.cached.is_some()));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 6);
}

#[test]
fn unwritable_cache_folder_does_not_fail_compilation() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("taken");
    fs::write(&taken, "a file, not a folder").unwrap();
    let Some(options) = options("a_folder_that_cannot_be_written", Some(taken)) else {
        return;
    };
    assert_eq!(
        compile_units(&[bandwidth::unit()], &options).unwrap()[0].cached,
        None
    );
}
