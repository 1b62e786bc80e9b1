//! Mixtures of experts: kernels against sums in f64, whole models against the CPU reference.
//! Without a GPU every test prints SKIPPED and passes.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod gpu;
    pub mod model;
    pub mod moe;
    pub mod step;
}

use conformance::golden::Golden;
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{
    Backend, CommitItem, KvFormat, KvFormats, Limits, LoadConfig, LogitsRequest, LogitsRow,
    NodeIdx, QuantType, Runner, Tree,
};
use cuda::launch::moe::ExpertSum;
use cuda::launch::moe::decode::{DecodeMoe, RouteInput};
use cuda::launch::norm::{ActivationBuffers, Residual, RmsShape, RowSource, rms_norm};
use cuda::pack::ActivationFormat;
use fixtures::gpu::{Random, close, poisoned, same_bits};
use fixtures::model::{
    F16_KV, F32_KV, LIMITS, ModelDevice, ReferenceTolerance, SMALL, cpu_reference, load_config,
    open_device, open_device_with, reference_tolerance, text, tree, verify,
};
use fixtures::moe::{Mixture, shape, with_shared};
use fixtures::step::{KernelDevice, Placed, star, step};
use model::synth::SynthSpec;

/// f16 inputs, weights rounded once more.
const ERROR: f64 = 1.5e-3;

/// Shapes and types: each packed kind, kinds that differ, odd numbers of row blocks, more steps of
/// K than warps.
fn mixtures(gpu: &KernelDevice, random: &mut Random) -> Vec<Mixture> {
    use QuantType::{BF16, F16, Q2_K, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0};
    [
        (
            with_shared(shape(256, (8, 3), 256), 512),
            ([Q4_K, Q4_K, Q6_K], [Q4_K, Q4_K, Q5_K]),
        ),
        (
            with_shared(shape(2304, (5, 2), 256), 256),
            ([Q5_K, Q6_K, Q4_K], [Q8_0, Q6_K, Q8_0]),
        ),
        (shape(384, (40, 6), 128), ([Q8_0, Q8_0, Q4_1], [Q8_0; 3])),
        (
            with_shared(shape(512, (16, 10), 384), 128),
            ([F16, BF16, F16], [Q4_1, Q8_0, BF16]),
        ),
        (shape(256, (4, 4), 768), ([Q2_K, Q4_K, Q2_K], [Q8_0; 3])),
    ]
    .into_iter()
    .map(|(shape, types)| Mixture::new(gpu, random, shape, types))
    .collect()
}

fn add(x: &[f32], gains: &[f32]) -> Vec<f32> {
    x.iter().zip(gains).map(|(x, gain)| x + gain).collect()
}

/// How a mixture runs in a bucket, from rows before and behind the norm.
type MixtureRun = fn(&Mixture, &KernelDevice, usize, &[f32], &[f32]) -> Vec<f32>;

/// Compares all rows, given as (rows, bucket), with the reference, and the first rows in other
/// buckets with the same rows among all, bit for bit.
fn check_rows(
    run: MixtureRun,
    seed: u64,
    (rows, bucket): (usize, usize),
    fewer: &[(usize, usize)],
) {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(seed);
    for mixture in mixtures(&gpu, &mut random) {
        let width = mixture.shape.width;
        let y = random.normals(rows * width, 1.0);
        let x = random.normals(rows * width, 1.0);
        let gains: Vec<f32> = y.chunks(width).flat_map(|y| mixture.gain(y)).collect();
        let all = run(&mixture, &gpu, bucket, &y, &x);
        let what = format!("{:?}", mixture.shape);
        let off = close(&what, &all, &add(&x, &gains), ERROR);
        eprintln!("  {what}: {off:.1e}");
        for (rows, bucket) in fewer {
            let n = rows * width;
            let found = run(&mixture, &gpu, *bucket, &y[..n], &x[..n]);
            same_bits("a row whatever runs with it", &found, &all[..n]);
        }
    }
}

#[test]
fn experts_of_a_step_match_the_reference() {
    let fewer = [(1, 1), (5, 8), (24, 24), (33, 40)];
    check_rows(Mixture::step, 31, (64, 64), &fewer);
}

#[test]
fn experts_of_a_chunk_match_the_reference() {
    check_rows(Mixture::chunk, 33, (300, 320), &[(1, 16), (77, 77)]);
}

/// Rows that all choose the same experts, and rows whose logits are level.
#[test]
fn level_experts_are_chosen_by_index_and_shared_by_all_rows() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(32);
    let shape = with_shared(shape(256, (64, 8), 128), 128);
    let mut mixture = Mixture::new(
        &gpu,
        &mut random,
        shape,
        ([QuantType::Q8_0; 3], [QuantType::Q8_0; 3]),
    );
    mixture.router.fill(0.0);
    mixture.router_at.upload(&gpu, &mixture.router).unwrap();
    for rows in [1, 21, 64] {
        let y = random.normals(rows * 256, 1.0);
        let x = random.normals(rows * 256, 1.0);
        let gains: Vec<f32> = y.chunks(256).flat_map(|y| mixture.gain(y)).collect();
        let expected = add(&x, &gains);
        close(
            "a step",
            &mixture.step(&gpu, rows, &y, &x),
            &expected,
            ERROR,
        );
        close(
            "a chunk",
            &mixture.chunk(&gpu, rows + 3, &y, &x),
            &expected,
            ERROR,
        );
    }
}

/// A row's router computes the norm itself, with the bits of the norm's own kernel.
#[test]
fn fused_norm_of_a_router_equals_separate_launches() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(34);
    for mixture in mixtures(&gpu, &mut random) {
        let width = mixture.shape.width;
        let head = [Placed {
            slot: 0,
            committed: 3,
            tree: star(1),
        }];
        let header = gpu.upload(&step(&head, &[])).unwrap();
        let source = RowSource::Step(header.ptr());
        let x = random.normals(width, 3.0);
        let weight = gpu.upload(&random.between(width, 0.5, 1.5)).unwrap();
        let run = |fused: bool| {
            let out = gpu.upload(&x).unwrap();
            let y = poisoned::<f32>(&gpu, width);
            let f16_rows = poisoned::<u8>(&gpu, ActivationFormat::F16.bytes(1, width));
            let scratch = poisoned::<u8>(&gpu, DecodeMoe::scratch_bytes(mixture.shape, 1));
            let counter = gpu.filled::<i32>(64, 0).unwrap();
            let moe = DecodeMoe {
                shape: mixture.shape,
                rows: 1,
                source,
                scratch: scratch.ptr(),
            };
            let mut launches = Vec::new();
            let input = if fused && moe.takes_norm() {
                RouteInput::Residual {
                    x: out.ptr(),
                    weight: weight.ptr(),
                    eps: 1e-6,
                    normed: f16_rows.ptr(),
                }
            } else {
                let rms = RmsShape { width, eps: 1e-6 };
                let to = ActivationBuffers {
                    f32: y.ptr(),
                    f16: f16_rows.ptr(),
                };
                let x = Residual::of(out.ptr());
                launches.push(rms_norm(rms, 1, source, x, weight.ptr(), to));
                RouteInput::Normed(y.ptr())
            };
            let experts = Mixture::matrices(&mixture.experts);
            let shared = mixture.shared.as_ref().map(Mixture::matrices);
            let props = gpu.info().props();
            launches.push(moe.route(input, mixture.router(), counter.ptr()));
            launches.push(moe.gate_up((f16_rows.ptr(), mixture.scale), experts, shared));
            launches.push(moe.down(
                props,
                experts,
                shared,
                (ExpertSum::AddTo(out.ptr()), mixture.scale),
            ));
            gpu.launch(&launches);
            out.download(&gpu).unwrap()
        };
        let found = run(true);
        assert!(found.iter().all(|v| v.is_finite()));
        same_bits(&format!("{:?}", mixture.shape), &found, &run(false));
    }
}

/// Kernels that find experts through a table, half of them in host memory, compute the same bits
/// and count what they read.
#[test]
fn experts_that_lie_apart_give_the_same_bits() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(35);
    for mut mixture in mixtures(&gpu, &mut random) {
        let (width, what) = (mixture.shape.width, format!("{:?}", mixture.shape));
        let y = random.normals(70 * width, 1.0);
        let x = random.normals(70 * width, 1.0);
        let run = |mixture: &Mixture, rows: usize| {
            let n = rows * width;
            if rows > 64 {
                mixture.chunk(&gpu, 80, &y[..n], &x[..n])
            } else {
                mixture.step(&gpu, rows, &y[..n], &x[..n])
            }
        };
        let expected = [1, 24, 70].map(|rows| run(&mixture, rows));
        mixture.take_apart(&gpu);
        for (rows, expected) in [1, 24, 70].into_iter().zip(&expected) {
            let before: u32 = mixture.uses(&gpu).iter().sum();
            same_bits(&what, &run(&mixture, rows), expected);
            let read = mixture.uses(&gpu).iter().sum::<u32>() - before;
            let used = mixture.shape.n_used as u32;
            let counted = match rows {
                1 => read == used,
                24 => (3 * used..=24 * used).contains(&read),
                _ => read == 0,
            };
            assert!(counted, "{what}: {read} reads counted for {rows} rows");
        }
    }
}

/// Rows whose router is nearly level may choose other experts on the two devices: this share of
/// rows may be further off.
const EXCUSED: f64 = 0.06;

/// Compares rows of whole models.
struct Rows {
    tolerance: ReferenceTolerance,
    off: Vec<f32>,
}

impl Rows {
    fn add(&mut self, found: &[LogitsRow], expected: &[LogitsRow]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            let differences = found.raw.iter().zip(&expected.raw);
            let sum: f32 = differences.map(|(f, e)| (f - e).abs()).sum();
            self.off.push(sum / found.raw.len() as f32);
        }
    }

    fn check(mut self, what: &str) -> usize {
        self.off.sort_by(f32::total_cmp);
        // NaN is far off.
        let is_close = |off: &&f32| **off <= self.tolerance.mean;
        let far = self.off.len() - self.off.iter().filter(is_close).count();
        let (n, most) = (self.off.len(), (EXCUSED * self.off.len() as f64) as usize);
        let median = self.off[n / 2];
        eprintln!("  {what}: median {median:.2e}, {far} of {n} rows are far off, {most} may be");
        usize::from(far > most || median > self.tolerance.mean / 2.0)
    }
}

fn check_model(
    device: &ModelDevice,
    synthetic: &SyntheticModel,
    (kv, limits): (KvFormats, Limits),
    tolerance: ReferenceTolerance,
) -> usize {
    let vocab = synthetic.spec.vocab;
    let config = || load_config(synthetic, kv, limits);
    let mut ours = device.backend.open(config(), &mut |_| {}).unwrap();
    let mut reference = cpu_reference().open(config(), &mut |_| {}).unwrap();
    let (a, b) = (ours.open(600).unwrap(), reference.open(600).unwrap());
    let mut rows = Rows {
        tolerance,
        off: Vec::new(),
    };
    for (n, salt) in [(150, 1), (40, 2)] {
        let prompt = text(vocab, n, salt);
        let requests: Vec<_> = (0..n).map(|i| (i, LogitsRequest::full())).collect();
        let found = ours.prefill(a, &prompt, &requests).unwrap();
        rows.add(&found, &reference.prefill(b, &prompt, &requests).unwrap());
    }
    for n in [1, 5, 8, 23, 64, 1] {
        if n > limits.tree_nodes {
            continue;
        }
        let tree: Tree = tree(vocab, n, |i| (i - 1) / 2);
        let found = verify(&mut *ours, a, &tree);
        rows.add(&found, &verify(&mut *reference, b, &tree));
        let path = tree.path_to(NodeIdx(n as u16 - 1));
        let commit = |runner: &mut dyn Runner, seq| {
            runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
        };
        commit(&mut *ours, a);
        commit(&mut *reference, b);
    }
    rows.check(&synthetic.spec.name)
}

#[test]
fn models_with_experts_match_the_cpu_reference() {
    let mut faulty = 0;
    for options in [
        cuda::Options::default(),
        cuda::Options {
            eager: true,
            as_large_model: true,
            ..cuda::Options::default()
        },
    ] {
        let Some(device) = open_device_with(options) else {
            return;
        };
        for layout in SyntheticLayout::EXPERTS {
            let synthetic = SyntheticModel::new(layout, QuantType::F32, 6);
            let tolerance = reference_tolerance(QuantType::F16);
            faulty += check_model(&device, &synthetic, (F32_KV, LIMITS), tolerance);
        }
    }
    assert_eq!(faulty, 0, "{faulty} models are further off than allowed");
}

#[test]
fn every_weight_type_of_experts_matches_the_cpu_reference() {
    let mut faulty = 0;
    let Some(device) = open_device(false) else {
        return;
    };
    use QuantType::{BF16, IQ4_XS, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0};
    for ty in [Q4_K, Q5_K, Q6_K, Q8_0, Q4_0, Q4_1, IQ4_XS, BF16] {
        let synthetic = SyntheticModel::new(SyntheticLayout::HybridExperts, ty, 7);
        let tolerance = reference_tolerance(ty).at_least_f16();
        faulty += check_model(&device, &synthetic, (F16_KV, SMALL), tolerance);
    }
    assert_eq!(faulty, 0, "{faulty} models are further off than allowed");
}

/// The golden files with mixtures of experts.
const GOLDEN: [&str; 3] = [
    "qwen3moe_q8_0",
    "qwen35moe_fused_q5_0",
    "qwen35moe_mtp_q4_1",
];

fn a_gpu(capability: (u32, u32), sm_count: u32) -> cuda::GpuInfo {
    cuda::GpuInfo {
        ordinal: 0,
        name: "a GPU".to_owned(),
        capability,
        run_as: None,
        sm_count,
        total_bytes: 80 << 30,
    }
}

/// Needs no GPU: every golden mixture has plans on one.
#[test]
fn golden_experts_have_plans() {
    let backend = cuda::CudaBackend::new(a_gpu((8, 6), 82));
    for stem in GOLDEN {
        let golden = Golden::open(stem).unwrap();
        let config = golden.load_config(F16_KV, SMALL).unwrap();
        let units = backend.units(&config).unwrap();
        assert!(!units.is_empty(), "{stem}");
    }
}

#[test]
fn golden_experts_match_the_golden_files() {
    let Some(device) = open_device(false) else {
        return;
    };
    let tolerance = reference_tolerance(QuantType::F16);
    for stem in GOLDEN {
        let golden = Golden::open(stem).unwrap();
        let config = golden.load_config(F32_KV, SMALL).unwrap();
        let mut runner = device.backend.open(config, &mut |_| {}).unwrap();
        // Activations of 16 bits may choose other experts where the router is level.
        let found = golden.check_logits_beyond(0.05, &mut *runner, tolerance.each);
        let found = found.unwrap();
        assert!(found.mean <= tolerance.mean, "{stem}: {}", found.mean);
    }
}

/// All experts on the device, half of them, and one slot of each layer, whose expert changes.
#[test]
fn results_do_not_depend_on_where_experts_lie() {
    let synthetic = SyntheticModel::new(SyntheticLayout::HybridExperts, QuantType::Q4_K, 9);
    let vocab = synthetic.spec.vocab;
    let mut moe = synthetic.spec.layers.iter().filter_map(|l| l.ffn.experts());
    let half = moe.next().unwrap().n_experts / 2;
    let mut expected: Option<Vec<f32>> = None;
    for slots in [None, Some(half), Some(1)] {
        let options = cuda::Options {
            expert_slots: slots,
            ..cuda::Options::default()
        };
        let Some(device) = open_device_with(options) else {
            return;
        };
        let config = load_config(&synthetic, F16_KV, SMALL);
        let mut runner = device.backend.open(config, &mut |_| {}).unwrap();
        let placed = runner
            .info()
            .memory
            .experts
            .map(|experts| experts.on_device);
        assert_eq!(placed, slots);
        let seq = runner.open(600).unwrap();
        let prompt = text(vocab, 100, 3);
        let ask = [(99, LogitsRequest::full())];
        let mut rows = runner.prefill(seq, &prompt, &ask).unwrap();
        // Enough steps for experts to come and go.
        for i in 0..60 {
            let n = if i % 8 == 7 { 5 } else { 1 };
            let tree: Tree = tree(vocab, n, |i| (i - 1) / 2);
            rows.extend(verify(&mut *runner, seq, &tree));
            let path = tree.path_to(NodeIdx(0));
            runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
        }
        let found: Vec<f32> = rows.into_iter().flat_map(|row| row.raw).collect();
        match &expected {
            Some(expected) => same_bits(&format!("{slots:?} slots"), &found, expected),
            None => expected = Some(found),
        }
    }
}

/// Needs no GPU: 35B-A3B Q4_K_M in 16 GiB of an H100.
#[test]
fn experts_that_do_not_fit_stay_in_host_memory() {
    let shape = SynthSpec::parse("qwen3.5-35b-a3b:q4_k_m").unwrap();
    let loaded = shape.load().unwrap();
    let plan = |room: u64, context: usize| {
        let options = cuda::Options {
            vram_limit: Some(room),
            ..cuda::Options::default()
        };
        let config = LoadConfig {
            target: loaded.spec.clone(),
            weights: loaded.weights.clone(),
            draft: None,
            batch_invariant: false,
            kv: KvFormats {
                k: KvFormat::Q8_0,
                v: KvFormat::Q8_0,
            },
            limits: Limits {
                sequences: 1,
                context,
                tree_nodes: 1,
                prefill_chunk: 2048,
                pool_tokens: None,
            },
        };
        let backend = cuda::CudaBackend::with_options(a_gpu((9, 0), 132), options);
        backend.estimate(&config).unwrap()
    };
    assert_eq!(plan(80 << 30, 8192).experts, None);
    let memory = plan(16 << 30, 8192);
    let experts = memory.experts.unwrap();
    let expert_bytes = experts.outside_bytes / (256 - experts.on_device) as u64;
    eprintln!("  {experts:?}, {expert_bytes} bytes a slot of all layers");
    let left = (16 << 30) - memory.total_bytes();
    assert!(left < expert_bytes, "{left} of {expert_bytes}");
    assert!(memory.pinned_bytes > 256 * expert_bytes);
    // The goal is 120 tokens/s.
    assert!((3_000..8_333).contains(&experts.step_us), "{experts:?}");
    let longer = plan(16 << 30, 131_072).experts.unwrap();
    assert!(longer.on_device < experts.on_device);
    // What cannot fit is estimated with one slot.
    let least = plan(1 << 30, 8192);
    assert!(least.total_bytes() > 1 << 30 && least.experts.unwrap().on_device == 1);
}
