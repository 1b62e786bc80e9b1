//! The suite that every device must pass, on the CPU: each block layout, weight type and
//! KV cache type, the reference and every supported instruction set.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

use std::sync::Arc;

use conformance::compare::{Precision, Tolerance};
use conformance::drafts::{DRAFTS, DraftFileFormat, DraftFileQuirks, WeightPrecision};
use conformance::fake::{FaultKind, FaultTrigger, InjectedFault, RunnerMethod};
use conformance::stage_faults::FaultyDevice;
use conformance::stages::{self, DraftDevice};
use conformance::suite::{self, Case};
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{
    Backend, DeviceError, DraftLoad, DraftLoadConfig, KvFormat, KvFormats, LayerSplit, Limits,
    LoadConfig, ModelSpec, QuantType, StepGroups, TokenId, WeightSource,
};
use cpu::matmul::layout::Format;
use cpu::simd::dispatch::Dispatch;
use cpu::{CpuBackend, CpuOptions};
use model::synth::SynthSpec;

fn case<'a>(
    backend: &'a dyn Backend,
    model: &'a SyntheticModel,
    (k, v): (KvFormat, KvFormat),
) -> Case<'a> {
    Case {
        backend,
        model,
        kv: KvFormats { k, v },
        precision: Precision::BitExact,
        prefill_tolerance: Tolerance::NONE,
        batch_invariant: false,
    }
}

fn check(backend: &dyn Backend, model: &SyntheticModel, k: KvFormat, v: KvFormat) {
    if let Err(violation) = suite::run(&case(backend, model, (k, v))) {
        panic!("{violation}");
    }
}

/// Checks what a change of products alone can break.
fn check_arithmetic(backend: &dyn Backend, model: &SyntheticModel, k: KvFormat, v: KvFormat) {
    if let Err(violation) = suite::run_arithmetic(&case(backend, model, (k, v))) {
        panic!("{violation}");
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

/// A type of each form that weights have in memory. Products of experts differ by form only, and
/// files of the other types take seconds to make.
const TYPES_OF_EXPERTS: [QuantType; 11] = [
    QuantType::Q4_K,
    QuantType::Q5_K,
    QuantType::Q6_K,
    QuantType::Q4_0,
    QuantType::Q8_0,
    QuantType::MXFP4,
    QuantType::NVFP4,
    QuantType::Q4_1,
    QuantType::F32,
    QuantType::F16,
    QuantType::BF16,
];

#[test]
fn every_weight_type_satisfies_the_properties_of_arithmetic() {
    let every = QuantType::ALL.map(|ty| (ty, SyntheticLayout::HybridTiled));
    let experts = TYPES_OF_EXPERTS.map(|ty| (ty, SyntheticLayout::DenseExperts));
    let backend = fast();
    for (ty, layout) in every.into_iter().chain(experts) {
        let model = SyntheticModel::new(layout, ty, 2);
        check_arithmetic(&backend, &model, KvFormat::F16, KvFormat::F16);
    }
}

#[test]
fn experts_are_checked_in_every_form_of_memory() {
    for ty in QuantType::ALL {
        let form = Format::of(ty);
        let mut checked = TYPES_OF_EXPERTS.into_iter().map(Format::of);
        assert!(
            checked.any(|other| other == form),
            "{form:?} of {}",
            ty.name()
        );
    }
}

/// Unrotated; each format holds keys once and values once.
#[test]
fn every_cache_format_satisfies_every_property() {
    use KvFormat::{F16, F32, Q4_0, Q8_0};
    let model = SyntheticModel::new(SyntheticLayout::HybridEven, QuantType::Q6_K, 3);
    for (k, v) in [(F32, F16), (F16, Q8_0), (Q8_0, Q4_0), (Q4_0, F32)] {
        check(&fast(), &model, k, v);
    }
}

#[test]
fn every_instruction_set_satisfies_every_property() {
    let [model, experts] = [
        SyntheticLayout::HybridGrouped,
        SyntheticLayout::HybridExperts,
    ]
    .map(|layout| SyntheticModel::new(layout, QuantType::Q5_K, 4));
    for dispatch in Dispatch::all_fast() {
        let backend = CpuBackend::with_dispatch(dispatch, 3);
        check(&backend, &model, KvFormat::Q8_0, KvFormat::F16);
        check_arithmetic(&backend, &experts, KvFormat::Q8_0, KvFormat::F16);
    }
}

#[test]
fn reference_satisfies_every_property() {
    for layout in layouts() {
        let model = SyntheticModel::new(layout, QuantType::Q8_0, 5);
        check(&reference(), &model, KvFormat::F32, KvFormat::F32);
    }
}

fn boxed() -> Box<dyn Backend> {
    Box::new(fast())
}

#[test]
fn pipeline_stages_satisfy_every_property() {
    let model = SyntheticModel::new(SyntheticLayout::HybridGrouped, QuantType::Q8_0, 6);
    let backend = stages::split(3, boxed);
    check(&backend, &model, KvFormat::Q8_0, KvFormat::F16);
}

/// A model with both kinds of drafts.
fn drafting_config() -> LoadConfig {
    let draft = DRAFTS.iter().find(|draft| draft.name == "sliding").unwrap();
    let config = draft
        .load_config(KvFormat::F16, WeightPrecision::AsStored)
        .unwrap();
    let file = (DraftFileFormat::C, DraftFileQuirks::default());
    let loaded = draft.load(file, &config.target).unwrap();
    LoadConfig {
        draft: Some(DraftLoadConfig {
            spec: loaded.spec,
            weights: loaded.weights,
            kv: KvFormat::F16,
            load: DraftLoad::AtOpen,
        }),
        limits: Limits {
            sequences: 2,
            tree_nodes: 16,
            ..config.limits
        },
        ..config
    }
}

/// With both kinds of drafts, whose captured layers and heads are in different stages.
#[test]
fn pipeline_stages_give_the_bits_of_one_device() {
    let config = drafting_config();
    assert!(
        config.target.mtp.is_some(),
        "the target has a head that drafts"
    );
    let n = config.target.layers.len();
    let mut cuts: Vec<Vec<f64>> = (1..n)
        .map(|cut| vec![cut as f64, (n - cut) as f64])
        .collect();
    cuts.push(vec![1.0; n]);
    for cut in cuts {
        let backend = stages::split_by(LayerSplit::Weights(cut.clone()), cut.len(), boxed);
        if let Err(failure) = stages::compare(&fast(), &backend, &config) {
            panic!("layers {cut:?}: {failure}");
        }
    }
    let backend = stages::split(3, boxed).with_step_groups(StepGroups::Two);
    if let Err(failure) = stages::compare(&fast(), &backend, &config) {
        panic!("two groups: {failure}");
    }
}

/// A CPU of one thread.
fn one_thread(reference: bool) -> Box<dyn Backend> {
    Box::new(CpuBackend::new(CpuOptions {
        reference,
        threads: Some(1),
    }))
}

/// Two shards have the values of one device, in another order of sums.
#[test]
fn shards_give_the_values_of_one_device() {
    let models = [
        SyntheticModel::new(SyntheticLayout::HybridHalves, QuantType::Q8_0, 8),
        SyntheticModel::new(SyntheticLayout::Plain, QuantType::Q8_0, 8),
    ];
    for model in models {
        let config = LoadConfig {
            kv: KvFormats {
                k: KvFormat::F32,
                v: KvFormat::F32,
            },
            ..small_config(model.spec, model.weights)
        };
        let shards = stages::shards((0..2).map(|_| one_thread(true)));
        let tolerance = Tolerance::REORDERED;
        let compared = stages::compare_within(&*one_thread(true), &shards, &config, tolerance);
        if let Err(failure) = compared {
            panic!("{}: {failure}", config.target.name);
        }
    }
}

/// Trees give the bits of their paths, whatever shares a pass.
#[test]
fn shards_satisfy_the_properties_of_arithmetic() {
    let model = SyntheticModel::new(SyntheticLayout::HybridHalves, QuantType::Q8_0, 9);
    let backend = stages::shards((0..2).map(|_| one_thread(false)));
    check_arithmetic(&backend, &model, KvFormat::Q8_0, KvFormat::F16);
}

/// A pass that one shard refuses leaves the other in the middle of it: both are lost.
#[test]
fn shards_are_lost_with_the_first_that_fails() {
    let model = SyntheticModel::new(SyntheticLayout::HybridHalves, QuantType::Q8_0, 9);
    let config = small_config(model.spec, model.weights);
    let devices: Vec<FaultyDevice> = (0..2).map(|_| FaultyDevice::new(fast())).collect();
    let (call, when) = (RunnerMethod::Prefill, FaultTrigger::Nth(0));
    let kind = FaultKind::OutOfMemory;
    let faults = devices[1].faults.clone();
    faults.fail(InjectedFault { call, when, kind });
    let devices = devices.into_iter();
    let backend = stages::shards(devices.map(|device| -> Box<dyn Backend> { Box::new(device) }));
    let mut runner = backend.open(config, &mut |_| {}).unwrap();
    let seq = runner.open(64).unwrap();
    let tokens = [TokenId(1), TokenId(2)];
    for _ in 0..2 {
        let error = runner.prefill(seq, &tokens, &[]).unwrap_err();
        assert!(matches!(error, DeviceError::DeviceLost { .. }), "{error}");
    }
}

/// A step that a stage refuses is undone in the stages below.
#[test]
fn refused_steps_of_a_stage_change_no_bits() {
    let config = drafting_config();
    let call = RunnerMethod::Verify;
    for stage in 0..3 {
        let devices: Vec<FaultyDevice> = (0..3).map(|_| FaultyDevice::new(fast())).collect();
        let faults = devices[stage].faults.clone();
        let boxed = devices
            .into_iter()
            .map(|device| -> Box<dyn Backend> { Box::new(device) });
        let backend = stages::of_devices(LayerSplit::ByMemory, boxed);
        let when = FaultTrigger::Nth(1);
        let kind = FaultKind::OutOfMemory;
        faults.fail(InjectedFault { call, when, kind });
        if let Err(failure) = stages::compare(&fast(), &backend, &config) {
            panic!("stage {stage}: {failure}");
        }
        assert!(faults.record().count(call) > 1);
    }
}

/// Drafts of both kinds on a device of their own, and beside the first layers, are those of one
/// device, bit for bit.
#[test]
fn drafts_apart_from_the_lm_head_give_the_bits_of_one_device() {
    let config = drafting_config();
    let only_mtp = LoadConfig {
        draft: None,
        ..config.clone()
    };
    for (n, draft) in [
        (2, DraftDevice::Own),
        (3, DraftDevice::Own),
        (2, DraftDevice::First),
    ] {
        for config in [&config, &only_mtp] {
            let devices = (0..n).map(|_| boxed()).collect();
            let backend = stages::with_draft_apart(devices, draft);
            if let Err(failure) = stages::compare(&fast(), &backend, config) {
                panic!("{n} devices, {draft:?}: {failure}");
            }
        }
    }
}

/// The configuration of a model for stages, with room for two sequences.
fn small_config(target: Arc<ModelSpec>, weights: Arc<dyn WeightSource>) -> LoadConfig {
    let f16 = KvFormat::F16;
    LoadConfig {
        target,
        weights,
        draft: None,
        kv: KvFormats { k: f16, v: f16 },
        limits: Limits {
            sequences: 2,
            context: 160,
            tree_nodes: 16,
            prefill_chunk: 64,
            pool_tokens: None,
        },
        batch_invariant: false,
    }
}

/// Experts, and matrices of every type: the layers next to a boundary differ.
#[test]
fn stages_of_experts_and_of_mixed_types_give_the_bits_of_one_device() {
    let mut configs: Vec<LoadConfig> = SyntheticLayout::EXPERTS
        .into_iter()
        .map(|layout| SyntheticModel::new(layout, QuantType::Q4_K, 7))
        .map(|model| small_config(model.spec, model.weights))
        .collect();
    for shape in ["tiny-hybrid+mtp:mixed", "tiny-dense:mixed"] {
        let model = SynthSpec::parse(shape).unwrap().load().unwrap();
        configs.push(small_config(model.spec, model.weights));
    }
    for config in configs {
        let n = config.target.layers.len().min(3);
        let backend = stages::split(n, boxed).with_step_groups(StepGroups::Two);
        if let Err(failure) = stages::compare(&fast(), &backend, &config) {
            panic!("{}: {failure}", config.target.name);
        }
    }
}
