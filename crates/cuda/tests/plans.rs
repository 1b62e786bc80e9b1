//! Plans of launches without a GPU: every unit compiles for every architecture, and memory is
//! planned to the byte.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod nvrtc;
}

use std::collections::BTreeSet;
use std::sync::Arc;

use conformance::drafts2::{Draft2Case, Draft2Format, NAMES, TARGET};
use conformance::golden::Golden;
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{
    Backend, DraftLoad, DraftLoadConfig, KvFormat, KvFormats, Limits, LoadConfig, QuantType,
    ScorerConfig,
};
use cuda::compile::{self, Nvrtc};
use cuda::driver::Arch;
use cuda::launch::CompileUnit;
use cuda::{CudaBackend, GpuInfo, Numerics, Options};
use model::DraftKind;
use model::synth::{SynthSpec, draft_of};

const LIMITS: Limits = Limits {
    sequences: 4,
    context: 600,
    tree_nodes: 64,
    prefill_chunk: 192,
    pool_tokens: None,
};

fn load_config(layout: SyntheticLayout, ty: QuantType, format: KvFormat) -> LoadConfig {
    let synthetic = SyntheticModel::new(layout, ty, 1);
    LoadConfig {
        target: synthetic.spec,
        weights: synthetic.weights,
        draft: None,
        batch_invariant: false,
        kv: KvFormats {
            k: format,
            v: format,
        },
        limits: LIMITS,
    }
}

fn gpu_info(number: u32) -> GpuInfo {
    GpuInfo {
        ordinal: 0,
        name: "a GPU".to_owned(),
        capability: (number / 10, number % 10),
        run_as: None,
        sm_count: 82,
        total_bytes: 24 << 30,
    }
}

/// Compiles the units of one row, of the most rows and of no fixed number. Other numbers are the
/// same sources with other sizes, and `hearth kernels build` compiles them for a large model.
fn compiles(number: u32, plans: &[LoadConfig]) {
    compiles_units(number, plans, |unit| {
        let rows = unit.defines.iter().find(|(name, _)| *name == "ROWS");
        rows.is_none_or(|(_, rows)| rows == "1" || rows == "24")
    });
}

/// Compiles those units of the plans that are `wanted`.
fn compiles_units(number: u32, plans: &[LoadConfig], wanted: impl Fn(&CompileUnit) -> bool) {
    let nvrtc = fixtures::nvrtc::search();
    if let Err(error) = Nvrtc::open(&nvrtc) {
        eprintln!("SKIPPED: {error}");
        return;
    }
    let backend = CudaBackend::new(gpu_info(number));
    let mut units = Vec::new();
    for config in plans {
        units.extend(backend.units(config).unwrap());
    }
    units.retain(wanted);
    assert!(!units.is_empty());
    units.sort();
    units.dedup();
    let arch = Arch { number };
    let options = compile::Options {
        nvrtc,
        ..compile::Options::default()
    };
    match compile::compile(arch, &units, &options, &mut |_| {}) {
        Ok(compiled) => eprintln!("{} units for {arch}", compiled.len()),
        Err(error) => panic!("{error}"),
    }
}

/// Single-row steps of small models use their own launches on every GPU. Layers of large models are
/// fused on every GPU, unless separate launches are requested.
#[test]
fn small_models_use_fused_layers_only_on_large_model_paths() {
    let config = load_config(SyntheticLayout::HybridTiled, QuantType::Q4_K, KvFormat::F16);
    let has = |number, as_large_model, separate_gemms, file| {
        let options = Options {
            as_large_model,
            separate_gemms,
            ..Options::default()
        };
        let backend = CudaBackend::with_options(gpu_info(number), options);
        let units = backend.units(&config).unwrap();
        units.iter().any(|unit| unit.file == file)
    };
    let gemv = "gemm/gemv.cu";
    for (number, fused) in [
        (80, "gemm/fused_layer.cu"),
        (86, "gemm/fused_layer.cu"),
        (120, "gemm/fused_layer.cu"),
        (90, "gemm/fused_layer_sm90.cu"),
    ] {
        assert!(has(number, false, false, gemv) && !has(number, false, false, fused));
        assert!(has(number, true, false, fused) && !has(number, true, false, gemv));
        assert!(!has(number, true, true, fused));
    }
}

/// Plans are batch-invariant by default unless the KV cache is f32, and always where the
/// configuration requires it.
#[test]
fn plans_are_batch_invariant_by_default_or_when_required() {
    let files = |layout, (number, kv), batch_invariant, numerics| {
        let mut config = load_config(layout, QuantType::Q4_K, kv);
        config.batch_invariant = batch_invariant;
        let options = Options {
            numerics,
            ..Options::default()
        };
        let units = CudaBackend::with_options(gpu_info(number), options).units(&config);
        let known = [
            "attention/decode_fixed_splits_sm90.cu",
            "attention/decode_tree_f32.cu",
            "gated_delta/decode_recurrent.cu",
            "gated_delta/decode_wy_tree.cu",
        ];
        let units = units.unwrap();
        let has_plans = |unit: &CompileUnit| {
            unit.file == "attention/decode_tree.cu"
                && unit.defines.iter().any(|(name, _)| *name == "TREE_PLANS")
        };
        (
            units.iter().any(has_plans),
            known.map(|file| units.iter().any(|unit| unit.file == file)),
        )
    };
    let wgmma = (false, [true, false, true, false]);
    let mma = (true, [false, false, true, false]);
    let fast = (false, [false, false, false, true]);
    let fastest = Some(Numerics::Fastest);
    let (wide, narrow) = (SyntheticLayout::HybridWide, SyntheticLayout::HybridTiled);
    for (layout, number, invariant) in [
        (wide, 90, wgmma),
        // No wgmma kernel for these heads, and none on this GPU.
        (narrow, 90, mma),
        (wide, 86, mma),
    ] {
        let gpu = (number, KvFormat::Q8_0);
        assert_eq!(files(layout, gpu, false, None), invariant);
        assert_eq!(files(layout, gpu, false, fastest), fast);
        assert_eq!(files(layout, gpu, true, fastest), invariant);
    }
    let full = (86, KvFormat::F32);
    assert_eq!(
        files(wide, full, false, None),
        (false, [false, true, false, true])
    );
    assert_eq!(
        files(wide, full, true, None),
        (false, [false, true, true, false])
    );
}

/// More sequences add only the multi-tree delta kernels, without duplicates.
#[test]
fn more_sequences_add_few_kernels() {
    let loaded = SynthSpec::parse("qwen3.5-27b:q4_k_m-published").unwrap();
    let loaded = loaded.load().unwrap();
    let units = |number, numerics, sequences| {
        let config = LoadConfig {
            target: Arc::clone(&loaded.spec),
            weights: Arc::clone(&loaded.weights),
            limits: Limits {
                sequences,
                ..LIMITS
            },
            ..load_config(SyntheticLayout::Dense, QuantType::Q4_K, KvFormat::Q8_0)
        };
        let options = Options {
            numerics: Some(numerics),
            ..Options::default()
        };
        let units = CudaBackend::with_options(gpu_info(number), options).units(&config);
        units.unwrap().into_iter().collect::<BTreeSet<_>>()
    };
    let (fastest, invariant) = (Numerics::Fastest, Numerics::BatchInvariant);
    for (number, numerics, file) in [
        (90, invariant, "gated_delta/decode_recurrent.cu"),
        (86, invariant, "gated_delta/decode_recurrent.cu"),
        (86, fastest, "gated_delta/decode_wy_tree.cu"),
    ] {
        let one = units(number, numerics, 1);
        for sequences in 2..=4 {
            let more = units(number, numerics, sequences);
            assert!(more.is_superset(&one), "sm_{number}, {sequences} sequences");
            let added: Vec<_> = more.difference(&one).collect();
            let names = added.iter().map(|unit| unit.to_string());
            let names = names.collect::<Vec<_>>().join("\n");
            assert!(added.iter().all(|unit| unit.file == file), "{names}");
            // For each width from 8 rows, at most one unit for two trees and one for more.
            assert!((1..=2 * 7).contains(&added.len()), "{names}");
            eprintln!("sm_{number}, {sequences} sequences: {} more", added.len());
        }
    }
}

#[test]
fn every_unit_of_a_hybrid_model_compiles_for_sm86_and_sm90() {
    let mut plans = [SyntheticLayout::HybridTiled, SyntheticLayout::HybridWide]
        .map(|l| load_config(l, QuantType::Q4_K, KvFormat::Q8_0));
    // Wide heads in the order of free KV splits are compiled by `hearth kernels build`.
    plans[1].batch_invariant = true;
    compiles(90, &plans[..1]);
    compiles(86, &plans[1..]);
}

#[test]
fn every_unit_of_float_weights_compiles() {
    let plans = [
        load_config(SyntheticLayout::Dense, QuantType::F32, KvFormat::F32),
        load_config(SyntheticLayout::Plain, QuantType::BF16, KvFormat::F16),
        load_config(SyntheticLayout::Odd, QuantType::Q8_0, KvFormat::Q4_0),
    ];
    compiles(80, &plans);
}

/// Steps of one row and chunks; other numbers of rows are the same sources with other sizes.
#[test]
fn units_of_experts_compile_for_sm86_and_sm90() {
    let plan = load_config(
        SyntheticLayout::HybridExperts,
        QuantType::Q4_K,
        KvFormat::F16,
    );
    for number in [86, 90] {
        compiles_units(number, std::slice::from_ref(&plan), |unit| {
            let rows = unit.defines.iter().find(|(name, _)| *name == "ROWS");
            unit.file.starts_with("moe/") && rows.is_none_or(|(_, rows)| rows == "1")
        });
    }
}

#[test]
fn every_weight_type_is_planned_for_every_arch() {
    for ty in QuantType::ALL {
        let config = load_config(SyntheticLayout::HybridTiled, ty, KvFormat::F16);
        for number in [80, 86, 90] {
            let units = CudaBackend::new(gpu_info(number)).units(&config).unwrap();
            assert!(!units.is_empty(), "{} for sm_{number}", ty.name());
        }
    }
}

#[test]
fn longer_context_adds_only_page_memory() {
    let backend = CudaBackend::new(gpu_info(86));
    let mut config = load_config(SyntheticLayout::Dense, QuantType::Q8_0, KvFormat::F16);
    // From here on a row has the most KV splits.
    config.limits.context = 8192;
    let short = backend.estimate(&config).unwrap();
    config.limits.context += 256;
    let long = backend.estimate(&config).unwrap();
    // Two layers, keys and values, one head of 128 f16 values: one more page for each of four
    // sequences.
    let page = 2 * 2 * 128 * 2 * 256_u64;
    let table = long.kv_bytes - short.kv_bytes - 4 * page;
    assert!(table <= 256, "{table} bytes of page table for 4 entries");
    assert_eq!(long.scratch_bytes, short.scratch_bytes);
    assert_eq!(long.weights_bytes, short.weights_bytes);
}

/// The tiny drafts of the fixtures, which have every part between them, with their target.
fn fixture_drafts() -> Vec<LoadConfig> {
    let target = Golden::open(TARGET).unwrap();
    let kv = KvFormats {
        k: KvFormat::F16,
        v: KvFormat::F16,
    };
    let limits = Limits {
        sequences: 1,
        prefill_chunk: 64,
        ..LIMITS
    };
    let with = |name| {
        let mut config = target.load_config(kv, limits).unwrap();
        let file = (Draft2Format::Gguf(QuantType::F32), None);
        let draft = Draft2Case::open(name).unwrap();
        let draft = draft.load(file, &config.target).unwrap();
        config.draft = Some(DraftLoadConfig {
            spec: draft.spec,
            weights: draft.weights,
            kv: KvFormat::F16,
            load: DraftLoad::AtOpen,
        });
        config
    };
    NAMES.map(with).into_iter().collect()
}

/// A published shape with random weights.
fn published_draft(kind: DraftKind, ty: QuantType) -> LoadConfig {
    let loaded = SynthSpec::parse("qwen3.5-27b:q4_k_m-published").unwrap();
    let loaded = loaded.load().unwrap();
    let draft = draft_of(&loaded, kind, ty, 1);
    LoadConfig {
        target: loaded.spec,
        weights: loaded.weights,
        draft: Some(DraftLoadConfig {
            spec: draft.spec,
            weights: draft.weights,
            kv: KvFormat::F16,
            load: DraftLoad::AtOpen,
        }),
        limits: Limits {
            sequences: 1,
            ..LIMITS
        },
        ..load_config(SyntheticLayout::Dense, QuantType::Q4_K, KvFormat::F16)
    }
}

#[test]
fn every_unit_of_later_drafts_compiles() {
    let fixtures = fixture_drafts();
    let published = [DraftKind::Dflash2, DraftKind::Dspark];
    let published = published.map(|kind| published_draft(kind, QuantType::Q8_0));
    // What only these drafts launch.
    let own = |unit: &CompileUnit| {
        let is_own = |name: &str| ["SINKS", "VALUES_NORMED"].contains(&name);
        unit.file.starts_with("draft/") || unit.defines.iter().any(|(name, _)| is_own(name))
    };
    compiles_units(80, &fixtures, own);
    // sm_89 has the code of sm_86.
    for number in [86, 90, 120] {
        compiles_units(number, &published, own);
    }
}

/// Layers with convolutions are not fused; a large vocabulary has plans with the whole head beside
/// those with a part of it, and the tables of a selector count as memory of the draft.
#[test]
fn later_drafts_are_planned_with_their_own_kernels() {
    for (kind, own, fused) in [
        (DraftKind::Dflash2, "draft/score_pairs.cu", false),
        (DraftKind::Dspark, "draft/chain_select.cu", true),
    ] {
        let config = published_draft(kind, QuantType::Q8_0);
        let backend = CudaBackend::new(gpu_info(90));
        let explained = backend.explain(&config).unwrap();
        let of_pass = |pass: &str| {
            let lines = explained.iter().filter(|line| line.pass == pass);
            lines.map(|line| line.file).collect::<BTreeSet<_>>()
        };
        let (part, whole) = (of_pass("draft block"), of_pass("whole draft block"));
        assert_eq!(part, whole);
        assert!(part.contains(own), "{kind:?}: {part:?}");
        assert_eq!(part.contains("gemm/fused_layer_sm90.cu"), fused, "{kind:?}");
        let with = backend.estimate(&config).unwrap();
        let spec = &config.draft.as_ref().unwrap().spec;
        let bytes: usize = spec.weights().iter().map(|weight| weight.bytes()).sum();
        let extra = with.draft_bytes - bytes as u64;
        assert!(extra < 300 << 20, "{kind:?}: {extra} bytes besides weights");
        let none = LoadConfig {
            draft: None,
            ..config
        };
        let plain = backend.estimate(&none).unwrap();
        assert_eq!(with.weights_bytes, plain.weights_bytes);
    }
}

fn scorer(
    loaded: model::LoadedModel,
    exit_layer: Option<usize>,
    max_tokens: usize,
) -> ScorerConfig {
    ScorerConfig {
        model: loaded.spec,
        weights: loaded.weights,
        exit_layer,
        max_tokens,
    }
}

/// Kernels that only scorers run, at heads of 64, 128 and 256 values and f16 or f32 keys.
#[test]
fn kernels_of_scorers_compile_without_wgmma() {
    let nvrtc = fixtures::nvrtc::search();
    if let Err(error) = Nvrtc::open(&nvrtc) {
        eprintln!("SKIPPED: {error}");
        return;
    }
    let backend = CudaBackend::new(gpu_info(86));
    let mut units = Vec::new();
    for (layout, ty) in [
        (SyntheticLayout::HybridWide, QuantType::Q8_0),
        (SyntheticLayout::Plain, QuantType::F32),
    ] {
        let synthetic = SyntheticModel::new(layout, ty, 1);
        let config = ScorerConfig {
            model: synthetic.spec,
            weights: synthetic.weights,
            exit_layer: None,
            max_tokens: 1000,
        };
        units.extend(backend.scorer_units(&config).unwrap());
    }
    units.retain(|unit| {
        let is_sparse = unit.defines.iter().any(|(name, _)| *name == "BLOCK_SPARSE");
        is_sparse || unit.file.starts_with("score/")
    });
    units.sort();
    units.dedup();
    assert_eq!(units.len(), 8, "{units:?}");
    let options = compile::Options {
        nvrtc,
        ..compile::Options::default()
    };
    let compiled = compile::compile(Arch { number: 86 }, &units, &options, &mut |_| {});
    let entries: Vec<_> = compiled
        .unwrap()
        .into_iter()
        .flat_map(|unit| unit.entries)
        .collect();
    assert!(
        entries.iter().all(|entry| entry.spill_bytes == 0),
        "{entries:?}"
    );
}

/// What scoring takes beside the weights, at the shapes of the usual scorers.
#[test]
fn scoring_128k_tokens_takes_little_memory_beside_the_weights() {
    let tokens = 131_072;
    for (name, exit_layer, most_mib) in [
        ("qwen3.5-0.8b:q8_0", Some(15), 1600),
        ("qwen3-0.6b:bf16", Some(14), 2000),
    ] {
        let loaded = SynthSpec::parse(name).unwrap().load().unwrap();
        for number in [86, 90] {
            let backend = CudaBackend::new(gpu_info(number));
            let config = scorer(loaded.clone(), exit_layer, tokens);
            let memory = backend.estimate_scorer(&config).unwrap();
            let beside = memory.total_bytes() - memory.weights_bytes;
            assert!(beside >> 20 < most_mib, "{name}: {memory:?}");
        }
    }
}
