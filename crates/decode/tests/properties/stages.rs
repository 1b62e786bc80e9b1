//! Faults of one of several pipeline stages: one error per job, and no hang.

use std::sync::Arc;

use conformance::fake::{
    FakeBackend, FakeDraft, FakeHandle, FakeSpec, FaultKind, FaultTrigger, InjectedFault,
    RunnerMethod,
};
use conformance::stage_faults::{FaultyDevice, StepCost, VirtualTime};
use conformance::stages::{self, DraftDevice};
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{
    Backend, DeviceError, KvFormat, KvFormats, LayerSpec, LayerSplit, LoadConfig, LogitsRequest,
    Mixer, ModelSpec, MtpSpec, QuantType, Runner, StepGroups, Tree, VerifyItem,
};
use decode::{Job, JobError, SchedulerConfig, SchedulerState, SubmitError};
use proptest::prelude::*;

use crate::fixture::{
    ENDLESS, LANGUAGE, SchedulerFixture, config, drafting, greedy, job, prompt,
    require_reference_tokens, sampled, spec,
};

/// Devices of a test.
const STAGES: usize = 3;

/// Faulty devices of fake stages; the handle of each.
pub(crate) fn devices(spec: &FakeSpec) -> (Vec<FaultyDevice>, Vec<FakeHandle>) {
    let devices: Vec<FaultyDevice> = (0..STAGES)
        .map(|_| FaultyDevice::new(FakeBackend { spec: spec.clone() }))
        .collect();
    let handles = devices.iter().map(|device| device.faults.clone());
    let handles = handles.collect();
    (devices, handles)
}

pub(crate) fn open(
    spec: &FakeSpec,
    devices: Vec<FaultyDevice>,
) -> Result<Box<dyn Runner>, DeviceError> {
    open_with(spec, devices, StepGroups::Measured)
}

fn open_with(
    spec: &FakeSpec,
    devices: Vec<FaultyDevice>,
    groups: StepGroups,
) -> Result<Box<dyn Runner>, DeviceError> {
    let backend = stages::of_devices(LayerSplit::ByMemory, boxed(devices));
    let config = load_config(spec, SyntheticLayout::HybridGrouped);
    backend.with_step_groups(groups).open(config, &mut |_| {})
}

/// Opens two shards of every layer.
fn open_shards(
    spec: &FakeSpec,
    devices: Vec<FaultyDevice>,
) -> Result<Box<dyn Runner>, DeviceError> {
    let config = load_config(spec, SyntheticLayout::HybridHalves);
    stages::shards(boxed(devices)).open(config, &mut |_| {})
}

fn boxed(devices: Vec<FaultyDevice>) -> impl Iterator<Item = Box<dyn Backend>> {
    let devices = devices.into_iter();
    devices.map(|device| -> Box<dyn Backend> { Box::new(device) })
}

fn load_config(spec: &FakeSpec, layout: SyntheticLayout) -> LoadConfig {
    let model = SyntheticModel::new(layout, QuantType::Q8_0, 1);
    let f16 = KvFormat::F16;
    LoadConfig {
        target: Arc::new(ModelSpec {
            vocab: spec.language.vocab,
            ..(*model.spec).clone()
        }),
        weights: model.weights.clone(),
        draft: None,
        kv: KvFormats { k: f16, v: f16 },
        limits: spec.limits,
        batch_invariant: true,
    }
}

/// The same with drafts on the last device.
pub(crate) fn open_apart(
    spec: &FakeSpec,
    devices: Vec<FaultyDevice>,
) -> Result<Box<dyn Runner>, DeviceError> {
    let config = load_config(spec, SyntheticLayout::HybridGrouped);
    let model = &*config.target;
    let is_attention = |layer: &&LayerSpec| matches!(layer.mixer, Mixer::Attention(_));
    // A head of these weights; the fake runner reads none.
    let mtp = MtpSpec {
        eh_proj: model.head.clone(),
        embedding_norm: model.final_norm.clone(),
        hidden_norm: model.final_norm.clone(),
        embedding: None,
        layer: model.layers.iter().find(is_attention).unwrap().clone(),
        final_norm: model.final_norm.clone(),
        head: None,
    };
    let target = Arc::new(ModelSpec {
        mtp: Some(mtp),
        ..model.clone()
    });
    let backend = stages::with_draft_apart(boxed(devices).collect(), DraftDevice::Own);
    backend.open(LoadConfig { target, ..config }, &mut |_| {})
}

/// A scheduler over stages, with the faults of each.
fn fixture(spec: &FakeSpec) -> (SchedulerFixture, Vec<FakeHandle>) {
    fixture_with(spec, config())
}

/// The same with other settings.
fn fixture_with(spec: &FakeSpec, config: SchedulerConfig) -> (SchedulerFixture, Vec<FakeHandle>) {
    let (devices, handles) = devices(spec);
    let runner = open(spec, devices).expect("all stages open");
    let fixture = SchedulerFixture::over(runner, handles[0].clone(), config);
    (fixture, handles)
}

#[test]
fn stage_that_fails_at_start_is_named() {
    for (at, kind) in [
        (0, FaultKind::OutOfMemory),
        (1, FaultKind::DeviceLost),
        (2, FaultKind::OutOfMemory),
    ] {
        let (mut devices, _) = devices(&spec(ENDLESS));
        devices[at].at_start = Some(kind);
        let error = open(&spec(ENDLESS), devices).err().unwrap();
        let text = error.to_string();
        assert!(text.contains(&format!("device {at} (layer")), "{text}");
        let lost = matches!(error, DeviceError::DeviceLost { .. });
        assert_eq!(lost, kind == FaultKind::DeviceLost, "{text}");
    }
}

/// The calls of a stage that may fail.
const CALLS: [RunnerMethod; 8] = [
    RunnerMethod::Open,
    RunnerMethod::Prefill,
    RunnerMethod::Receive,
    RunnerMethod::Draft,
    RunnerMethod::Verify,
    RunnerMethod::Commit,
    RunnerMethod::Snapshot,
    RunnerMethod::Restore,
];

/// Twelve jobs on a device of which this stage is lost in the second call of a kind: one error for
/// each job, which names the stage.
fn check_lost_stage(
    (mut fixture, handles): (SchedulerFixture, Vec<FakeHandle>),
    (call, stage): (RunnerMethod, usize),
    name: &str,
) {
    handles[stage].fail(InjectedFault {
        call,
        when: FaultTrigger::Nth(1),
        kind: FaultKind::DeviceLost,
    });
    for id in 0..12 {
        fixture.submit(Job {
            choices: 2,
            ..job(id, prompt(6, id as u32), greedy(20))
        });
    }
    let error = loop {
        match fixture.step() {
            Ok(SchedulerState::Working) => {}
            Ok(SchedulerState::Idle) => panic!("{call:?} was never called twice"),
            Err(error) => break error,
        }
    };
    let DeviceError::DeviceLost { during, detail } = &error else {
        panic!("{call:?}: {error}");
    };
    assert!([call.name(), "a pass of a tensor split"].contains(during));
    assert!(detail.starts_with(name), "{detail}");
    let outputs = fixture.outputs();
    for id in 0..12 {
        let ended = |choice| {
            let output = outputs.get(&(id, choice));
            output.is_some_and(|output| output.reason.is_some())
        };
        let failed = matches!(fixture.failure(id), Some(JobError::DeviceLost { .. }));
        assert!((ended(0) && ended(1)) != failed, "{call:?}: job {id}");
    }
    let refused = fixture.scheduler.submit(job(99, prompt(6, 0), greedy(1)));
    assert!(matches!(refused, Err(SubmitError::DeviceLost { .. })));
}

#[test]
fn lost_stage_or_shard_fails_every_job_once_and_is_named() {
    let draft = Some(FakeDraft {
        depth: 3,
        acceptance_rate: 0.5,
    });
    let spec = FakeSpec {
        draft,
        ..spec(ENDLESS)
    };
    let groups = [StepGroups::One, StepGroups::Two];
    let stages = || (0..STAGES).flat_map(|stage| groups.map(|groups| (stage, groups)));
    for (call, (stage, groups)) in CALLS
        .into_iter()
        .flat_map(|call| stages().map(move |of| (call, of)))
    {
        let (drafts, receives) = (call == RunnerMethod::Draft, call == RunnerMethod::Receive);
        if (!drafts || stage + 1 == STAGES) && (!receives || stage > 0) {
            let name = format!("device {stage} (layer");
            let stages = fixture_with(&spec, SchedulerConfig { groups, ..config() });
            check_lost_stage(stages, (call, stage), &name);
        }
        let is_called = !receives && (!drafts || stage == 1);
        if stage < 2 && is_called && groups == StepGroups::One {
            let (mut devices, mut handles) = devices(&spec);
            devices.truncate(2);
            handles.truncate(2);
            let runner = open_shards(&spec, devices).expect("both shards open");
            let shards = SchedulerFixture::over(runner, handles[0].clone(), config());
            let name = format!("device {stage} (shard {} of 2", stage + 1);
            check_lost_stage((shards, handles), (call, stage), &name);
        }
    }
}

/// A stage above the first refuses a chunk that those below have read: no state leads back.
#[test]
fn refused_prefill_of_an_upper_stage_fails_its_job_alone() {
    for kind in [FaultKind::OutOfMemory, FaultKind::Refused] {
        let (mut fixture, handles) = fixture(&spec(ENDLESS));
        handles[1].fail(InjectedFault {
            call: RunnerMethod::Prefill,
            when: FaultTrigger::Nth(1),
            kind,
        });
        let jobs: Vec<Job> = (0..3)
            .map(|id| job(id, prompt(6, id as u32), greedy(9)))
            .collect();
        jobs.iter().for_each(|job| fixture.submit(job.clone()));
        fixture.finish();
        let failed: Vec<JobError> = (0..3).filter_map(|id| fixture.failure(id)).collect();
        let [error @ JobError::SequenceLost { during, .. }] = &failed[..] else {
            panic!("{failed:?}");
        };
        assert_eq!(*during, "prefill");
        let text = error.to_string();
        assert!(text.contains("device 1 (layer"), "{text}");
    }
}

/// Virtual microseconds of a step of one stage.
fn us_of_rows(rows: usize) -> u64 {
    100 * rows as u64
}

/// Virtual microseconds of a step of four sequences with six rows each, where each of `n` stages
/// takes 100 us a row, and the rows that it gives.
fn step_of_four(n: usize, groups: StepGroups) -> (u64, String) {
    let spec = spec(ENDLESS);
    let time = VirtualTime::default();
    let (mut devices, _) = devices(&spec);
    devices.truncate(n);
    for device in &mut devices {
        device.time = Some(StepCost {
            time: time.clone(),
            us: us_of_rows,
            draft_us: |_| 0,
        });
    }
    let mut runner = open_with(&spec, devices, groups).unwrap();
    let tree = Tree::chain(&prompt(6, 9)).unwrap();
    let requests = vec![LogitsRequest::full(); tree.len()];
    let mut items = Vec::new();
    for i in 0..4 {
        let seq = runner.open(64).unwrap();
        runner.prefill(seq, &prompt(6, i), &[]).unwrap();
        items.push(VerifyItem {
            seq,
            tree: &tree,
            requests: &requests,
        });
    }
    let rows = runner.verify(&items).unwrap();
    (time.host_us(), format!("{rows:?}"))
}

#[test]
fn two_groups_of_sequences_occupy_the_stages_in_turn() {
    for n in [2, 3] {
        let (together, rows) = step_of_four(n, StepGroups::One);
        let (apart, rows_apart) = step_of_four(n, StepGroups::Two);
        assert_eq!(rows, rows_apart);
        assert_eq!(together, n as u64 * 2_400);
        assert_eq!(apart, (n as u64 + 1) * 1_200);
    }
}

pub(crate) fn any_refusal() -> impl Strategy<Value = (usize, InjectedFault)> {
    let call = prop::sample::select(CALLS.to_vec());
    let kind = prop::sample::select(vec![FaultKind::OutOfMemory, FaultKind::Refused]);
    (0..STAGES, call, kind, 0..30_u64).prop_map(|(stage, call, kind, nth)| {
        let when = FaultTrigger::Nth(nth);
        (stage, InjectedFault { call, when, kind })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn refusals_of_stages_lose_no_device_and_change_no_tokens(
        faults in prop::collection::vec(any_refusal(), 0..8),
        choices in prop::collection::vec(1..3_usize, 1..4),
    ) {
        let (mut fixture, handles) = fixture(&drafting(spec(LANGUAGE), 4, 0.6));
        faults.into_iter().for_each(|(stage, fault)| handles[stage].fail(fault));
        let jobs: Vec<Job> = choices.iter().enumerate().map(|(i, choices)| Job {
            choices: *choices,
            ..job(i as u64, prompt(40, i as u32), sampled(20, i as u64))
        }).collect();
        jobs.iter().for_each(|job| fixture.submit(job.clone()));
        // A lost device would panic here.
        fixture.finish();
        require_reference_tokens(&fixture, &jobs)?;
    }
}
