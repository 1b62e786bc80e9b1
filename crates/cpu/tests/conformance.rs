//! The suite that every device must pass, on the CPU: each block layout, weight type and
//! KV cache type, the reference and every supported instruction set.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use conformance::compare::{Precision, Tolerance};
use conformance::drafts::{DRAFTS, DraftFileFormat, DraftFileQuirks, WeightPrecision};
use conformance::fake::{FaultKind, FaultTrigger, InjectedFault, RunnerMethod};
use conformance::stage_faults::FaultyDevice;
use conformance::stages::{self, DraftDevice};
use conformance::suite::{self, Case};
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{
    Backend, CommitItem, DeviceError, DraftLoad, DraftLoadConfig, KvFormat, KvFormats, LayerSplit,
    Limits, LoadConfig, LogitsRequest, ModelSpec, NodeIdx, QuantType, Runner, SnapshotLocation,
    SplitBackend, StepGroups, TokenId, Tree, VerifyItem, WeightSource,
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
const TYPES_OF_EXPERTS: [QuantType; 13] = [
    QuantType::Q4_K,
    QuantType::Q5_K,
    QuantType::Q6_K,
    QuantType::Q4_0,
    QuantType::Q8_0,
    QuantType::MXFP4,
    QuantType::NVFP4,
    QuantType::Q4_1,
    QuantType::Q5_0,
    QuantType::Q5_1,
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
    let layouts = [
        SyntheticLayout::HybridHalves,
        SyntheticLayout::Plain,
        SyntheticLayout::HybridExperts,
        SyntheticLayout::DenseExperts,
        SyntheticLayout::Neighbours,
        SyntheticLayout::Windowed,
    ];
    for layout in layouts {
        let model = SyntheticModel::new(layout, QuantType::Q8_0, 8);
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
    for layout in [
        SyntheticLayout::HybridHalves,
        SyntheticLayout::HybridExperts,
    ] {
        let model = SyntheticModel::new(layout, QuantType::Q8_0, 9);
        let backend = stages::shards((0..2).map(|_| one_thread(false)));
        check_arithmetic(&backend, &model, KvFormat::Q8_0, KvFormat::F16);
    }
}

/// Two shards on the CPU with a fault in one of them.
fn shards_with_fault(shard: usize, fault: InjectedFault) -> SplitBackend {
    let devices = [0, 1].map(|_| FaultyDevice::new(fast()));
    devices[shard].faults.fail(fault);
    stages::shards(
        devices
            .into_iter()
            .map(|device| -> Box<dyn Backend> { Box::new(device) }),
    )
}

/// Calls of every kind until one fails; then those that a scheduler makes after a lost device.
fn calls_until_error(runner: &mut dyn Runner) -> Option<DeviceError> {
    let tokens = [TokenId(1), TokenId(2)];
    let tree = Tree::root(TokenId(3));
    let requests = [LogitsRequest::full()];
    let (mut opened, mut saved) = (None, None);
    let mut calls = || -> Result<(), DeviceError> {
        let seq = *opened.insert(runner.open(64)?);
        runner.prefill(seq, &tokens, &[])?;
        let snapshot = runner.snapshot(seq, SnapshotLocation::Host)?.id;
        runner.restore(seq, *saved.insert(snapshot))?;
        let item = VerifyItem {
            seq,
            tree: &tree,
            requests: &requests,
        };
        runner.verify(&[item])?;
        runner.discard(seq)?;
        runner.verify(&[item])?;
        let path = tree.path_to(NodeIdx::ROOT);
        runner.commit(&[CommitItem { seq, path: &path }])
    };
    let error = calls().err();
    let lost = matches!(error, Some(DeviceError::DeviceLost { .. }));
    assert_eq!(runner.capacity().tokens == 0, lost);
    saved.into_iter().for_each(|id| runner.free_snapshot(id));
    opened.into_iter().for_each(|seq| runner.close(seq));
    error
}

/// A shard is lost in any call, while the other may wait for its sums: one error that names it, for
/// this call and all that follow, and nothing waits, neither a close nor the end of the runner.
#[test]
fn lost_shard_is_named_and_leaves_nothing_waiting() {
    let model = SyntheticModel::new(SyntheticLayout::HybridHalves, QuantType::Q8_0, 9);
    let (report, reported) = channel();
    std::thread::spawn(move || {
        let calls = [
            RunnerMethod::Open,
            RunnerMethod::Prefill,
            RunnerMethod::Snapshot,
            RunnerMethod::Restore,
            RunnerMethod::Verify,
            RunnerMethod::Discard,
            RunnerMethod::Commit,
        ];
        for (call, shard) in calls.into_iter().flat_map(|call| [(call, 0), (call, 1)]) {
            let (when, kind) = (FaultTrigger::Nth(0), FaultKind::DeviceLost);
            let backend = shards_with_fault(shard, InjectedFault { call, when, kind });
            let config = small_config(model.spec.clone(), model.weights.clone());
            let mut runner = backend.open(config, &mut |_| {}).unwrap();
            let first = calls_until_error(&mut *runner);
            let next = runner.open(64).err();
            drop(runner);
            report.send((call, shard, first, next)).unwrap();
        }
    });
    for _ in 0..14 {
        let (call, shard, first, next) = reported
            .recv_timeout(Duration::from_secs(60))
            .expect("nothing waits for a lost shard");
        let name = format!("device {shard} (shard {} of 2", shard + 1);
        for error in [first, next] {
            let text = error.map_or(String::new(), |error| error.to_string());
            let starts = format!("device lost in {}", call.name());
            assert!(
                text.starts_with(&starts) && text.contains(&name),
                "{call:?}: {text}"
            );
        }
    }
}

/// A pass that the second shard refuses leaves the first in the middle of it: both are lost. One
/// that the first refuses has begun nowhere.
#[test]
fn pass_that_a_shard_refuses_loses_both_if_it_has_begun() {
    let model = SyntheticModel::new(SyntheticLayout::HybridHalves, QuantType::Q8_0, 9);
    let (when, kind) = (FaultTrigger::Nth(0), FaultKind::OutOfMemory);
    for (call, shard) in [RunnerMethod::Prefill, RunnerMethod::Verify]
        .into_iter()
        .flat_map(|call| [(call, 0), (call, 1)])
    {
        let backend = shards_with_fault(shard, InjectedFault { call, when, kind });
        let config = small_config(model.spec.clone(), model.weights.clone());
        let mut runner = backend.open(config, &mut |_| {}).unwrap();
        let error = calls_until_error(&mut *runner).unwrap();
        let lost = matches!(error, DeviceError::DeviceLost { .. });
        assert_eq!(lost, shard == 1, "{call:?} of shard {shard}: {error}");
        let again = calls_until_error(&mut *runner);
        assert_eq!(
            again.is_some(),
            lost,
            "{call:?} of shard {shard}: {again:?}"
        );
    }
}

/// A shard that does not open is named, and GPUs that do not reach each other are refused before
/// any shard opens.
#[test]
fn shards_that_do_not_open_are_named_and_peer_access_is_asked_first() {
    let model = SyntheticModel::new(SyntheticLayout::HybridHalves, QuantType::Q8_0, 9);
    let error = |edit: &dyn Fn(&mut [FaultyDevice; 2])| {
        let mut devices = [0, 1].map(|_| FaultyDevice::new(fast()));
        edit(&mut devices);
        let devices = devices.into_iter();
        let devices = devices.map(|device| -> Box<dyn Backend> { Box::new(device) });
        let config = small_config(model.spec.clone(), model.weights.clone());
        let opened = stages::shards(devices).open(config, &mut |_| {});
        opened
            .err()
            .map_or(String::new(), |error| error.to_string())
    };
    for at in [0, 1] {
        for kind in [FaultKind::OutOfMemory, FaultKind::DeviceLost] {
            let text = error(&|devices| devices[at].at_start = Some(kind));
            let name = format!("device {at} (shard {} of 2", at + 1);
            assert!(text.contains(&name), "{name} in {text}");
        }
    }
    let text = error(&|devices| {
        for device in devices {
            device.at_start = Some(FaultKind::DeviceLost);
            device.is_without_peers = true;
        }
    });
    assert!(text.contains("peer access"), "{text}");
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
