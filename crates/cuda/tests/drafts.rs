//! Random drafts against the published PyTorch module and an independent implementation: within
//! sum-order differences for f32 weights and caches, and within half precision otherwise. Without a
//! GPU the tests print SKIPPED and pass.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod gpu;
    pub mod model;
}

use conformance::compare::Tolerance;
use conformance::drafts::{DRAFTS, DraftFileFormat, DraftFileQuirks, RandomDraft, WeightPrecision};
use conformance::drafts2::{Draft2Case, Draft2Format, NAMES, TARGET};
use conformance::golden::Golden;
use conformance::stages;
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{
    Backend, DraftCandidates, DraftItem, DraftLoad, DraftLoadConfig, KvFormat, LayerSplit, Limits,
    LoadConfig, QuantType, Runner, SeqId, SnapshotLocation, StepGroups, TokenId,
};
use cpu::{CpuBackend, CpuOptions};
use cuda::Options;
use model::DraftKind;
use model::synth::{SynthSpec, draft_of};

use fixtures::model::{
    F16_KV, F32_KV, LIMITS, ModelDevice, SMALL, cpu_reference, load_config, open_device,
    open_device_with, open_last_device_with, open_two_devices_with, reference_tolerance, text,
};

/// Accepts every number and rejects NaN.
const ANY: Tolerance = Tolerance {
    absolute: f32::MAX,
    relative: 0.0,
};
/// Tolerance for other sum orders and for the GPU's exponentials and roots, relative to the logits'
/// deviation. Logits reach twenty.
const CLOSE: f32 = 1e-4;

/// The standard deviation.
fn spread(values: &[f32]) -> f32 {
    let n = values.len() as f64;
    let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
    let square = |v: &f32| (f64::from(*v) - mean).powi(2);
    (values.iter().map(square).sum::<f64>() / n).sqrt() as f32
}

/// Mean error of half precision for logits that spread by up to 5: GEMMs of a target and a draft,
/// up to nine layers in sequence, and twice that for targets in block formats.
fn half(draft: &RandomDraft) -> f32 {
    if draft.target.ends_with("f16") {
        0.02
    } else {
        0.07
    }
}

fn logits(
    device: &ModelDevice,
    draft: &RandomDraft,
    (ty, kv, weights): (QuantType, KvFormat, WeightPrecision),
) -> Vec<f32> {
    let config = draft.load_config(kv, weights).unwrap();
    let ids = draft.target().unwrap().ids;
    let quirks = DraftFileQuirks {
        ty: Some(ty),
        ..DraftFileQuirks::default()
    };
    let loaded = draft
        .load((DraftFileFormat::C, quirks), &config.target)
        .unwrap();
    let device = &device.backend;
    draft.logits(device, (config, &ids), (loaded, kv)).unwrap()
}

#[test]
fn f32_draft_logits_match_the_published_module() {
    let Some(device) = open_device(false) else {
        return;
    };
    for draft in DRAFTS {
        let floats = (QuantType::F32, KvFormat::F32, WeightPrecision::Floats);
        let found = logits(&device, &draft, floats);
        let off = draft.check(&found, ANY).unwrap();
        let spread = spread(&draft.expected().unwrap().values);
        eprintln!(
            "  {}: {:.1e} at most, logits spread by {spread:.1}",
            draft.name, off.worst
        );
        assert!(off.worst <= CLOSE * spread, "{}: {off:?}", draft.name);
    }
}

#[test]
fn f16_draft_logits_stay_within_half_precision_of_the_published_module() {
    let Some(device) = open_device(false) else {
        return;
    };
    for draft in DRAFTS {
        let stored = (QuantType::BF16, KvFormat::F16, WeightPrecision::AsStored);
        let off = draft.check(&logits(&device, &draft, stored), ANY).unwrap();
        let (worst, mean) = (off.worst, off.mean);
        eprintln!(
            "  {}: {worst:.1e} at most, {mean:.1e} on average",
            draft.name
        );
        assert!(mean <= half(&draft), "{}: {off:?}", draft.name);
    }
}

#[test]
fn draft_logits_do_not_depend_on_when_features_are_appended() {
    let Some(device) = open_device(false) else {
        return;
    };
    for draft in DRAFTS {
        let config = draft
            .load_config(KvFormat::F16, WeightPrecision::AsStored)
            .unwrap();
        let ids = draft.target().unwrap().ids;
        for ty in [QuantType::BF16, QuantType::Q8_0] {
            let quirks = DraftFileQuirks {
                ty: Some(ty),
                ..DraftFileQuirks::default()
            };
            let loaded = draft
                .load((DraftFileFormat::C, quirks), &config.target)
                .unwrap();
            let on_progress = (config.clone(), &ids[..]);
            let checked =
                draft.check_waiting(&device.backend, on_progress, (loaded, KvFormat::F16));
            checked.unwrap_or_else(|error| panic!("{ty:?}: {error}"));
        }
    }
}

/// DFlash2 and DSpark drafts with every part that a file may have: logits, chains, candidates given
/// the token before and confidences, before and after commits.
#[test]
fn later_drafts_match_the_independent_implementation() {
    let Some(device) = open_device(false) else {
        return;
    };
    let target = Golden::open(TARGET).unwrap();
    for name in NAMES {
        let case = Draft2Case::open(name).unwrap();
        let config = target.load_config_of_floats(F32_KV, SMALL).unwrap();
        let file = (Draft2Format::Gguf(QuantType::F32), None);
        let draft = case.load(file, &config.target).unwrap();
        let runner = Draft2Case::open_on(&device.backend, config, (draft, KvFormat::F32));
        let worst = case.worst_on(&mut *runner.unwrap(), &target.ids).unwrap();
        eprintln!(
            "  {name}: logits {:.1e}, candidates {:.1e}",
            worst.0, worst.1
        );
        assert!(worst.0.max(worst.1) < 1e-3, "{name}: {worst:?}");
    }
}

/// The kinds with quantised matrices, of a small hybrid model.
const KINDS: [(DraftKind, QuantType); 3] = [
    (DraftKind::Dflash2, QuantType::Q8_0),
    (DraftKind::Dspark, QuantType::Q8_0),
    (DraftKind::Dflash2, QuantType::Q4_K),
];
const VOCAB: usize = 1024;
const K: usize = 8;

fn synthetic((kind, ty): (DraftKind, QuantType)) -> LoadConfig {
    let target = SynthSpec::parse("tiny-hybrid:q8_0")
        .unwrap()
        .load()
        .unwrap();
    let draft = draft_of(&target, kind, ty, 5);
    LoadConfig {
        target: target.spec,
        weights: target.weights,
        draft: Some(DraftLoadConfig {
            spec: draft.spec,
            weights: draft.weights,
            kv: KvFormat::F16,
            load: DraftLoad::AtOpen,
        }),
        batch_invariant: false,
        kv: F16_KV,
        limits: LIMITS,
    }
}

fn drafted(runner: &mut dyn Runner, seqs: &[SeqId], depth: usize) -> Vec<DraftCandidates> {
    let items = seqs.iter().map(|seq| DraftItem {
        seq: *seq,
        root: TokenId(300),
    });
    let found = runner.draft(&items.collect::<Vec<_>>(), depth, K).unwrap();
    assert!(found.iter().all(DraftCandidates::is_well_formed));
    found
}

/// The largest difference of log-probabilities and confidences along the chain of `expected`;
/// infinite if a list lacks the other's best candidate.
fn apart(found: &DraftCandidates, expected: &DraftCandidates) -> f32 {
    let (mut worst, mut lists) = (0.0_f32, (found.first(), expected.first()));
    while let (Some(of_found), Some(of_expected)) = lists {
        let (ours, theirs) = (found.list(of_found), expected.list(of_expected));
        let best = theirs.ids[0];
        let Some(rank) = ours.ids.iter().position(|id| *id == best) else {
            return f32::INFINITY;
        };
        worst = worst.max((ours.log_probs[rank] - theirs.log_probs[0]).abs());
        if let (Some(ours), Some(theirs)) = (ours.confidence, theirs.confidence) {
            worst = worst.max((ours - theirs).abs());
        }
        lists = (found.next(of_found, rank), expected.next(of_expected, 0));
    }
    if lists == (None, None) {
        worst
    } else {
        f32::INFINITY
    }
}

/// Largest difference of half precision in scores of pairs, which add products of three factors to
/// logits that spread by 2.
const HALF: f32 = 0.15;

/// Candidates of several sequences in one call, at full and at less depth, are those of each alone
/// and those of the CPU, up to rounding; a snapshot keeps them.
#[test]
fn later_drafts_of_several_sequences_match_the_cpu() {
    let Some(device) = open_device(false) else {
        return;
    };
    for kind in KINDS {
        let mut runner = device.backend.open(synthetic(kind), &mut |_| {}).unwrap();
        let mut reference = cpu_reference().open(synthetic(kind), &mut |_| {}).unwrap();
        let depth = runner.info().draft_depth.unwrap();
        assert_eq!(reference.info().draft_depth, Some(depth));
        let lengths = [70, 3, 191, 256];
        let open = |runner: &mut dyn Runner| {
            lengths.map(|n| {
                let seq = runner.open(300).unwrap();
                runner.prefill(seq, &text(VOCAB, n, n), &[]).unwrap();
                seq
            })
        };
        let (ours, theirs) = (open(&mut *runner), open(&mut *reference));
        let together = drafted(&mut *runner, &ours, depth);
        let expected = drafted(&mut *reference, &theirs, depth);
        let few = drafted(&mut *runner, &ours, depth - 2);
        for (i, seq) in ours.iter().enumerate() {
            let alone = drafted(&mut *runner, &[*seq], depth).remove(0);
            let off = [
                apart(&together[i], &expected[i]),
                apart(&alone, &together[i]),
            ];
            eprintln!("  {kind:?}, sequence {i}: {off:?}");
            assert!(
                off[0] < HALF && off[1] < 0.02,
                "{kind:?}, sequence {i}: {off:?}"
            );
            assert_eq!(together[i].n_lists(), expected[i].n_lists());
            assert_eq!(few[i].chain(), together[i].chain()[..depth - 2]);
        }
        let saved = runner.snapshot(ours[0], SnapshotLocation::Host).unwrap();
        let before = drafted(&mut *runner, &ours[..1], depth);
        runner.prefill(ours[0], &text(VOCAB, 20, 9), &[]).unwrap();
        assert_ne!(drafted(&mut *runner, &ours[..1], depth), before);
        runner.restore(ours[0], saved.id).unwrap();
        assert_eq!(drafted(&mut *runner, &ours[..1], depth), before, "{kind:?}");
    }
}

/// With a part of the vocabulary, candidates come from its first tokens; whole logits stay whole.
#[test]
fn later_drafts_propose_from_a_part_of_the_vocabulary() {
    const PART: usize = 256;
    let options = Options {
        draft_vocab: Some(PART),
        ..Options::default()
    };
    let Some(device) = open_device_with(options) else {
        return;
    };
    for kind in &KINDS[..2] {
        let mut config = synthetic(*kind);
        config.limits = SMALL;
        let mut runner = device.backend.open(config, &mut |_| {}).unwrap();
        let depth = runner.info().draft_depth.unwrap();
        let seq = runner.open(300).unwrap();
        runner.prefill(seq, &text(VOCAB, 70, 1), &[]).unwrap();
        let found = drafted(&mut *runner, &[seq], depth).remove(0);
        assert!(found.ids.iter().all(|id| id.index() < PART), "{kind:?}");
        assert_eq!(found.chain().len(), depth);
        let root = TokenId(300);
        let whole = runner.draft_logits(DraftItem { seq, root }).unwrap();
        assert!(
            whole.logits.iter().all(|logit| logit.is_finite()),
            "{kind:?}"
        );
        // The part's best candidate of the first row is the best of these logits.
        let row = &whole.logits[..PART];
        let best = (0..PART)
            .max_by(|a, b| row[*a].total_cmp(&row[*b]))
            .unwrap();
        if kind.0 == DraftKind::Dspark {
            assert_eq!(found.ids[0].index(), best);
        }
    }
}

/// A model with both kinds of drafts.
fn drafting_config() -> LoadConfig {
    let draft = DRAFTS.iter().find(|draft| draft.name == "sliding").unwrap();
    let stored = draft.load_config(KvFormat::F16, WeightPrecision::AsStored);
    let stored = stored.unwrap();
    let file = (DraftFileFormat::C, DraftFileQuirks::default());
    let loaded = draft.load(file, &stored.target).unwrap();
    LoadConfig {
        draft: Some(DraftLoadConfig {
            spec: loaded.spec,
            weights: loaded.weights,
            kv: KvFormat::F16,
            load: DraftLoad::AtOpen,
        }),
        limits: Limits {
            sequences: 2,
            context: 1100,
            tree_nodes: 16,
            prefill_chunk: 320,
            pool_tokens: None,
        },
        ..stored
    }
}

/// Several stages on one GPU, with both kinds of drafts, whose captured layers and heads are in
/// different stages; rows copied within the GPU and through host memory.
#[test]
fn pipeline_stages_on_one_gpu_give_the_bits_of_one_runner() {
    let config = drafting_config();
    let n = config.target.layers.len();
    let cuts = [
        vec![1.0, (n - 1) as f64],
        vec![(n - 1) as f64, 1.0],
        vec![1.0; n],
    ];
    for (as_large_model, rows_through_host) in [(false, false), (true, false), (true, true)] {
        let options = Options {
            as_large_model,
            rows_through_host,
            ..Options::default()
        };
        let Some(device) = open_device_with(options) else {
            return;
        };
        for cut in &cuts {
            let boxed = || -> Box<dyn Backend> { Box::new(device.backend.clone()) };
            let split = LayerSplit::Weights(cut.clone());
            let backend = stages::split_by(split, cut.len(), boxed);
            if let Err(failure) = stages::compare(&device.backend, &backend, &config) {
                panic!("large {as_large_model}, host {rows_through_host}, {cut:?}: {failure}");
            }
        }
    }
}

/// Both kinds of drafts on the CPU: the logits of the GPU stay the same, bit for bit.
#[test]
fn drafts_on_the_cpu_leave_the_bits_of_the_gpu() {
    let config = drafting_config();
    for as_large_model in [false, true] {
        let options = Options {
            as_large_model,
            ..Options::default()
        };
        let Some(device) = open_device_with(options) else {
            return;
        };
        let cpu = CpuBackend::new(CpuOptions::default()).with_rotation();
        let devices: Vec<Box<dyn Backend>> = vec![Box::new(device.backend.clone()), Box::new(cpu)];
        let backend = stages::with_draft_apart(devices, stages::DraftDevice::Own);
        if let Err(failure) = stages::compare_logits(&device.backend, &backend, &config) {
            panic!("large {as_large_model}: {failure}");
        }
    }
}

/// Drafts of every kind on a GPU of their own, which is a second runner on the same GPU where there
/// is no other, and on the GPU of the first layers where the LM head is on another: candidates,
/// logits and snapshots have the bits of one GPU.
#[test]
fn drafts_on_another_gpu_have_the_bits_of_one_gpu() {
    let only_mtp = LoadConfig {
        draft: None,
        ..drafting_config()
    };
    let later = KINDS[..2].iter().map(|kind| LoadConfig {
        limits: drafting_config().limits,
        ..synthetic(*kind)
    });
    // Where steps may also be in turn, beside drafts.
    let both = LoadConfig {
        batch_invariant: true,
        ..drafting_config()
    };
    let all: Vec<LoadConfig> = [both, only_mtp].into_iter().chain(later).collect();
    for (as_large_model, rows_through_host, configs) in
        [(false, false, &all[..]), (true, true, &all[..1])]
    {
        let options = || Options {
            as_large_model,
            rows_through_host,
            ..Options::default()
        };
        let (Some(first), Some(last)) = (
            open_device_with(options()),
            open_last_device_with(options()),
        ) else {
            return;
        };
        let on = |device: &ModelDevice| -> Box<dyn Backend> { Box::new(device.backend.clone()) };
        // A stage of all layers, since the calls of a stage make its GPU the current one.
        let one = stages::split(1, || on(&first));
        for (i, config) in configs.iter().enumerate() {
            let place = match i {
                0 => &[stages::DraftDevice::Own, stages::DraftDevice::First][..],
                _ => &[stages::DraftDevice::Own],
            };
            for place in place {
                let devices = vec![on(&first), on(&last)];
                let apart = stages::with_draft_apart(devices, *place);
                if let Err(failure) = stages::compare(&one, &apart, config) {
                    panic!("{:?}, draft {i}, {place:?}: {failure}", options());
                }
            }
        }
    }
}

/// Two sequences in two groups, which are in two stages at once.
#[test]
fn two_groups_in_stages_on_one_gpu_give_the_bits_of_one_runner() {
    let config = LoadConfig {
        batch_invariant: true,
        ..drafting_config()
    };
    let Some(device) = open_device_with(Options::default()) else {
        return;
    };
    let boxed = || -> Box<dyn Backend> { Box::new(device.backend.clone()) };
    let backend = stages::split(2, boxed).with_step_groups(StepGroups::Two);
    if let Err(failure) = stages::compare(&device.backend, &backend, &config) {
        panic!("{failure}");
    }
}

/// Compares stages on GPUs 0 and 1 with GPU 0 alone, snapshots saved by either and restored by the
/// other included. The stages are on the GPUs of `order` and share the layers by `shares`.
fn compare_on_two_gpus(
    options: &Options,
    (order, shares): (&[usize], &[f64]),
    groups: StepGroups,
    config: &LoadConfig,
) {
    let Some(devices) = open_two_devices_with(options) else {
        return;
    };
    let on = |i: usize| -> Box<dyn Backend> { Box::new(devices[i].backend.clone()) };
    // A stage of all layers, since the calls of a stage make its GPU the current one.
    let one = stages::split(1, || on(0));
    let split = LayerSplit::Weights(shares.to_vec());
    let backend = stages::of_devices(split, order.iter().map(|i| on(*i)));
    let backend = backend.with_step_groups(groups);
    if let Err(failure) = stages::compare(&one, &backend, config) {
        panic!("{options:?}, GPUs {order:?}, layers {shares:?}, {groups:?}: {failure}");
    }
}

/// Models that two devices can share: a hybrid with value heads tiled over key heads, attention
/// alone, and a hybrid with both kinds of drafts.
fn shared_configs() -> Vec<LoadConfig> {
    let limits = drafting_config().limits;
    let layouts = [
        (SyntheticLayout::HybridHalves, QuantType::Q4_K),
        (SyntheticLayout::Plain, QuantType::F32),
        (SyntheticLayout::HybridExperts, QuantType::Q8_0),
        (SyntheticLayout::DenseExperts, QuantType::Q8_0),
        (SyntheticLayout::Neighbours, QuantType::Q8_0),
        (SyntheticLayout::Windowed, QuantType::Q8_0),
    ];
    let models = layouts.map(|(layout, ty)| SyntheticModel::new(layout, ty, 12));
    let mut configs: Vec<LoadConfig> = models
        .iter()
        .map(|model| load_config(model, F16_KV, limits))
        .collect();
    let target = SynthSpec::parse("tiny-hybrid-r1+mtp-own:q8_0").unwrap();
    let target = target.load().unwrap();
    let draft = draft_of(&target, DraftKind::Dflash2, QuantType::Q8_0, 1);
    configs.push(LoadConfig {
        target: target.spec,
        weights: target.weights,
        draft: Some(DraftLoadConfig {
            spec: draft.spec,
            weights: draft.weights,
            kv: KvFormat::F16,
            load: DraftLoad::AtOpen,
        }),
        kv: F16_KV,
        limits,
        batch_invariant: false,
    });
    configs
}

/// Two GPUs that share each layer give the values of one, with drafts and snapshots; sums are
/// exchanged between launches, and in fused layers.
#[test]
fn shards_on_two_gpus_give_the_values_of_one_gpu() {
    for separate_gemms in [true, false] {
        let options = Options {
            separate_gemms,
            as_large_model: true,
            ..Options::default()
        };
        let Some(devices) = open_two_devices_with(&options) else {
            return;
        };
        let on = |device: &ModelDevice| -> Box<dyn Backend> { Box::new(device.backend.clone()) };
        // A stage of all layers, since the calls of a stage make its GPU the current one.
        let one = stages::split(1, || on(&devices[0]));
        for config in shared_configs() {
            let shards = stages::shards(devices.iter().map(on));
            let tolerance = reference_tolerance(config.target.layers[0].ffn.weights()[0].ty).each;
            let tolerance = tolerance.or(Tolerance::of_cache(KvFormat::F16));
            if let Err(failure) = stages::compare_within(&one, &shards, &config, tolerance) {
                panic!(
                    "{}, separate {separate_gemms}: {failure}",
                    config.target.name
                );
            }
        }
    }
}

/// Rows come by peer access, where the GPUs have it, and through host memory. Of three stages, two
/// are on one GPU.
#[test]
fn pipeline_stages_on_two_gpus_give_the_bits_of_one_gpu() {
    let config = drafting_config();
    let cuts: [(bool, bool, &[usize], &[f64]); 4] = [
        (false, false, &[0, 1], &[2.0, 2.0]),
        (false, false, &[1, 0, 1], &[1.0, 2.0, 1.0]),
        (true, false, &[0, 1], &[3.0, 1.0]),
        (true, true, &[0, 1, 0], &[1.0, 1.0, 2.0]),
    ];
    for (as_large_model, rows_through_host, order, shares) in cuts {
        let options = Options {
            as_large_model,
            rows_through_host,
            ..Options::default()
        };
        compare_on_two_gpus(&options, (order, shares), StepGroups::Measured, &config);
    }
}

#[test]
fn two_groups_in_stages_on_two_gpus_give_the_bits_of_one_gpu() {
    let config = LoadConfig {
        batch_invariant: true,
        ..drafting_config()
    };
    for rows_through_host in [false, true] {
        let options = Options {
            rows_through_host,
            ..Options::default()
        };
        let halves = (&[0, 1][..], &[2.0, 2.0][..]);
        compare_on_two_gpus(&options, halves, StepGroups::Two, &config);
    }
}
