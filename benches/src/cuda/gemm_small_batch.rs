//! GEMM kernels of `kernels/gemm`: single matrices, all matrices of a decode step, and those of a
//! draft.
//!
//! The step is that of a 64-layer 27B hybrid model with a Q4_K_M file's types, each tensor in its
//! own allocation. 48 delta layers have fused input projections (Q5_K 10240, Q4_K 6144, f32 96). 16
//! attention layers have Q4_K 12288, 1024 and 1024, half of the last Q6_K. Output projections,
//! fused gate and up, down (half Q6_K) and a Q6_K head follow. `step` launches only GEMMs, back to
//! back. In `step, norms between`, a small kernel over the same rows follows each GEMM, as in a
//! real step.

use anyhow::{Result, ensure};
use cuda::GpuProps;
use cuda::driver::{Buffer, Gpu};
use cuda::launch::gemm::small_batch::scratch_bytes;
use cuda::launch::gemm::small_batch::{
    GemmEpilogue, GemmInputs, GemmMatrix, GemmScratch, launches,
};
use cuda::launch::norm::{ActivationBuffers, Residual, RmsShape, RowSource, rms_norm};
use cuda::launch::{Launch, step_words};
use cuda::pack::{ActivationFormat, WeightKind};

use super::{Bench, Work};

const HIDDEN: usize = 5120;
const FFN: usize = 17408;
const INNER: usize = 6144;
const VOCAB: usize = 248_320;
const BUCKETS: [usize; 8] = [1, 8, 16, 24, 32, 40, 48, 64];
/// Random bytes that fill the weights repeatedly.
const PATTERN: usize = 64 << 20;
/// Words of a step header.
const HEADER: usize = step_words::STEP;

/// One launch: the input width, and kind and rows of each matrix.
type LaunchShape = (usize, Vec<(WeightKind, usize)>);

/// Launches and the weights that they read.
struct GemmPlan {
    shapes: Vec<LaunchShape>,
    /// Address of each matrix, in order.
    weights: Vec<Vec<u64>>,
    bytes: f64,
    params: f64,
    /// Freed with the plan.
    _memory: Vec<Buffer<u8>>,
}

impl GemmPlan {
    fn new(gpu: &Gpu, pattern: &Buffer<u8>, shapes: Vec<LaunchShape>) -> Result<GemmPlan> {
        let mut plan = GemmPlan {
            shapes,
            weights: Vec::new(),
            bytes: 0.0,
            params: 0.0,
            _memory: Vec::new(),
        };
        for (cols, matrices) in &plan.shapes {
            let mut at = Vec::new();
            for &(kind, rows) in matrices {
                let bytes = kind.bytes(rows, *cols);
                let memory = gpu.alloc::<u8>(bytes)?;
                for start in (0..bytes).step_by(PATTERN) {
                    let n = PATTERN.min(bytes - start);
                    gpu.copy_bytes(memory.ptr_at(start), pattern.ptr(), n)?;
                }
                at.push(memory.ptr());
                plan._memory.push(memory);
                plan.bytes += bytes as f64;
                plan.params += (rows * cols) as f64;
            }
            plan.weights.push(at);
        }
        gpu.sync()?;
        Ok(plan)
    }

    fn launches(&self, room: &GemmBuffers, bucket: usize) -> Vec<Launch> {
        let mut all = Vec::new();
        for ((cols, matrices), weights) in self.shapes.iter().zip(&self.weights) {
            let stride = matrices.iter().map(|m| m.1).sum();
            let mut first = 0;
            let segments: Vec<GemmMatrix> = matrices
                .iter()
                .zip(weights)
                .map(|(&(kind, rows), &weight)| {
                    let out = room.out.ptr_at(first);
                    first += rows;
                    GemmMatrix {
                        kind,
                        rows,
                        weight,
                        out,
                        stride,
                        write: GemmEpilogue::Store,
                    }
                })
                .collect();
            all.extend(launches(
                room.props,
                bucket,
                *cols,
                &segments,
                room.inputs(),
                room.scratch(),
            ));
        }
        all
    }

    fn work(&self, bucket: usize) -> Work {
        Work {
            bytes: self.bytes,
            flops: 2.0 * self.params * bucket as f64,
        }
    }
}

/// Buffers shared by all launches.
struct GemmBuffers {
    /// Step headers by row count, for [`GemmBuffers::norm`].
    headers: Buffer<i32>,
    normed: Buffer<u8>,
    props: GpuProps,
    x: Buffer<u8>,
    out: Buffer<f32>,
    partials: Buffer<u8>,
}

impl GemmBuffers {
    fn new(gpu: &Gpu, pattern: &Buffer<u8>) -> Result<GemmBuffers> {
        let props = gpu.info().props();
        let x = gpu.alloc::<u8>(ActivationFormat::F32.bytes(64, 25600))?;
        ensure!(x.bytes() < PATTERN);
        gpu.copy_bytes(x.ptr(), pattern.ptr(), x.bytes())?;
        let mut headers = vec![0; 65 * HEADER];
        for rows in 0..65 {
            headers[rows * HEADER] = rows as i32;
        }
        Ok(GemmBuffers {
            headers: gpu.upload(&headers)?,
            normed: gpu.alloc(ActivationFormat::F16.bytes(64, HIDDEN))?,
            props,
            x,
            out: gpu.alloc(64 * VOCAB)?,
            partials: gpu.filled(scratch_bytes(props, 64), 0)?,
        })
    }

    fn inputs(&self) -> GemmInputs {
        let x = self.x.ptr();
        GemmInputs { f16: x, f32: x }
    }

    /// A norm of rows that no other launch uses.
    fn norm(&self, rows: usize) -> Launch {
        let shape = RmsShape {
            width: HIDDEN,
            eps: 1e-6,
        };
        let source = RowSource::Step(self.headers.ptr_at(rows * HEADER));
        let out = ActivationBuffers {
            f16: self.normed.ptr(),
            ..ActivationBuffers::default()
        };
        let x = self.out.ptr();
        rms_norm(shape, rows, source, Residual::of(x), x, out)
    }

    fn scratch(&self) -> GemmScratch {
        GemmScratch(self.partials.ptr())
    }
}

/// Random bytes that are finite as f16, bf16 and f32: bit 6, the top exponent bit, is clear.
fn pattern(gpu: &Gpu) -> Result<Buffer<u8>> {
    let mut state = 1_u64;
    let bytes: Vec<u8> = (0..PATTERN)
        .map(|_| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            ((state >> 40) & 0xbf) as u8
        })
        .collect();
    Ok(gpu.upload(&bytes)?)
}

/// All GEMMs of a step.
fn step() -> Vec<LaunchShape> {
    let mut shapes = Vec::new();
    for layer in 0..64 {
        let more = !(8..56).contains(&layer) || (layer - 8) % 3 == 2;
        let six = if more {
            WeightKind::Q6K
        } else {
            WeightKind::Q4K
        };
        if layer % 4 == 3 {
            let qkv = vec![
                (WeightKind::Q4K, 2 * INNER),
                (WeightKind::Q4K, 1024),
                (six, 1024),
            ];
            shapes.push((HIDDEN, qkv));
        } else {
            let inputs = vec![
                (WeightKind::Q5K, 10240),
                (WeightKind::Q4K, INNER),
                (WeightKind::F32, 48),
                (WeightKind::F32, 48),
            ];
            shapes.push((HIDDEN, inputs));
        }
        shapes.push((INNER, vec![(WeightKind::Q4K, HIDDEN)]));
        shapes.push((HIDDEN, vec![(WeightKind::Q4K, FFN), (WeightKind::Q4K, FFN)]));
        shapes.push((FFN, vec![(six, HIDDEN)]));
    }
    shapes.push((HIDDEN, vec![(WeightKind::Q6K, VOCAB)]));
    shapes
}

/// All GEMMs of a five-layer draft: features in, blocks, and the target's head.
fn draft() -> Vec<LaunchShape> {
    let mut shapes = vec![(5 * HIDDEN, vec![(WeightKind::Q8, HIDDEN)])];
    for _ in 0..5 {
        shapes.push((
            HIDDEN,
            vec![
                (WeightKind::Q8, 4096),
                (WeightKind::Q8, 1024),
                (WeightKind::Q8, 1024),
            ],
        ));
        shapes.push((4096, vec![(WeightKind::Q8, HIDDEN)]));
        shapes.push((HIDDEN, vec![(WeightKind::Q8, FFN), (WeightKind::Q8, FFN)]));
        shapes.push((FFN, vec![(WeightKind::Q8, HIDDEN)]));
    }
    shapes.push((HIDDEN, vec![(WeightKind::Q6K, VOCAB)]));
    shapes
}

/// Times the GEMMs.
///
/// # Errors
/// Device errors.
pub fn run(bench: &mut Bench) -> Result<()> {
    let pattern = pattern(&bench.gpu)?;
    let room = GemmBuffers::new(&bench.gpu, &pattern)?;
    let singles: [(&str, usize, LaunchShape); 7] = [
        (
            "out q4_k 5120x6144",
            12,
            (INNER, vec![(WeightKind::Q4K, HIDDEN)]),
        ),
        (
            "qkvz q5_k+q4_k 16384x5120",
            5,
            (
                HIDDEN,
                vec![(WeightKind::Q5K, 10240), (WeightKind::Q4K, INNER)],
            ),
        ),
        (
            "gate+up q4_k 34816x5120",
            4,
            (HIDDEN, vec![(WeightKind::Q4K, FFN), (WeightKind::Q4K, FFN)]),
        ),
        (
            "down q4_k 5120x17408",
            5,
            (FFN, vec![(WeightKind::Q4K, HIDDEN)]),
        ),
        (
            "down q6_k 5120x17408",
            4,
            (FFN, vec![(WeightKind::Q6K, HIDDEN)]),
        ),
        (
            "beta+alpha f32 96x5120",
            48,
            (HIDDEN, vec![(WeightKind::F32, 48), (WeightKind::F32, 48)]),
        ),
        (
            "head q6_k 248320x5120",
            1,
            (HIDDEN, vec![(WeightKind::Q6K, VOCAB)]),
        ),
    ];
    for (name, copies, shape) in singles {
        let plan = GemmPlan::new(&bench.gpu, &pattern, vec![shape; copies])?;
        let all: Vec<_> = BUCKETS.map(|bucket| plan.launches(&room, bucket)).into();
        let units: Vec<_> = all.iter().map(|l| l[0].unit.clone()).collect();
        let modules = bench.modules(&units)?;
        for (bucket, list) in BUCKETS.into_iter().zip(&all) {
            let mut work = plan.work(bucket);
            work.bytes /= copies as f64;
            work.flops /= copies as f64;
            let list: Vec<&Launch> = list.iter().collect();
            bench.case(
                "matmul",
                &format!("{name} n={bucket}"),
                &modules,
                &list,
                work,
            )?;
        }
    }
    for (name, shapes, buckets) in [
        ("step", step(), &BUCKETS[..]),
        ("draft", draft(), &[16][..]),
    ] {
        let plan = GemmPlan::new(&bench.gpu, &pattern, shapes)?;
        for &bucket in buckets {
            let list = plan.launches(&room, bucket);
            let norm = room.norm(bucket);
            let mut units: Vec<_> = list.iter().map(|l| l.unit.clone()).collect();
            units.push(norm.unit.clone());
            let modules = bench.modules(&units)?;
            let alone: Vec<&Launch> = list.iter().collect();
            let between: Vec<&Launch> = list.iter().flat_map(|l| [l, &norm]).collect();
            for (what, list) in [("", alone), (", norms between", between)] {
                bench.sequence(
                    "matmul",
                    &format!("{name} n={bucket}{what}"),
                    &modules,
                    &list,
                    plan.work(bucket),
                )?;
            }
        }
    }
    ensure!(
        room.partials.download(&bench.gpu)?.iter().all(|&c| c == 0),
        "a launch left sums behind"
    );
    Ok(())
}
