//! Single-row GEMV with fused norm, residual or SwiGLU equals the separate launches bit for bit.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod fixtures {
    pub mod gpu;
    pub mod step;
}

use contract::quant::quantize_row;
use contract::{GateActivation, QuantType};
use cuda::GpuProps;
use cuda::driver::Buffer;
use cuda::launch::ffn::{self, GateUp};
use cuda::launch::gemm::gemv::{self, GemvEpilogue, GemvInput};
use cuda::launch::gemm::small_batch::{self, GemmEpilogue, GemmInputs, GemmMatrix, GemmScratch};
use cuda::launch::norm::{self, ActivationBuffers, Residual, RmsShape, RowSource};
use cuda::pack::{self, WeightKind};
use fixtures::gpu::{Random, poisoned, same_bits};
use fixtures::step::{KernelDevice, Placed, chain, step};

const EPS: f32 = 1e-6;

/// A packed matrix on the device.
struct GemvMatrix {
    kind: WeightKind,
    rows: usize,
    at: Buffer<u8>,
}

impl GemvMatrix {
    fn new(
        gpu: &KernelDevice,
        random: &mut Random,
        ty: QuantType,
        rows: usize,
        cols: usize,
    ) -> GemvMatrix {
        let row_bytes = ty.row_bytes(cols);
        let mut stored = vec![0; rows * row_bytes];
        for bytes in stored.chunks_exact_mut(row_bytes) {
            quantize_row(ty, &random.normals(cols, 0.05), bytes);
        }
        let kind = WeightKind::of(ty);
        let mut packed = vec![0xff; kind.bytes(rows, cols)];
        pack::pack(ty, cols, &stored, &mut packed);
        let at = gpu.bytes(&packed);
        GemvMatrix { kind, rows, at }
    }

    fn segment(&self, out: u64, write: GemmEpilogue) -> GemmMatrix {
        GemmMatrix {
            kind: self.kind,
            rows: self.rows,
            weight: self.at.ptr(),
            out,
            stride: self.rows,
            write,
        }
    }
}

/// Shared buffers of the tests.
struct GemvFixture {
    gpu: KernelDevice,
    props: GpuProps,
    scratch: Buffer<u8>,
    header: Buffer<i32>,
}

impl GemvFixture {
    fn open() -> Option<GemvFixture> {
        let gpu = KernelDevice::open()?;
        let props = gpu.info().props();
        let scratch = gpu.filled(small_batch::scratch_bytes(props, 8), 0).unwrap();
        let head = [Placed {
            slot: 0,
            committed: 7,
            tree: chain(1),
        }];
        let header = gpu.upload(&step(&head, &[0])).unwrap();
        Some(GemvFixture {
            gpu,
            props,
            scratch,
            header,
        })
    }

    fn source(&self) -> RowSource {
        RowSource::Step(self.header.ptr())
    }

    /// The row in f16, padded to whole groups, and in f32.
    fn forms(&self, width: usize) -> (Buffer<u8>, Buffer<f32>, ActivationBuffers) {
        let halves = poisoned::<u8>(&self.gpu, Input16::bytes(width));
        let floats = poisoned::<f32>(&self.gpu, width);
        let out = ActivationBuffers {
            f32: floats.ptr(),
            f16: halves.ptr(),
        };
        (halves, floats, out)
    }

    /// The result of the separate GEMM launches.
    fn products(
        &self,
        cols: usize,
        segments: &[GemmMatrix],
        x: ActivationBuffers,
    ) -> Vec<cuda::launch::Launch> {
        let inputs = GemmInputs {
            f16: x.f16,
            f32: x.f32,
        };
        let scratch = GemmScratch(self.scratch.ptr());
        small_batch::launches(self.props, 1, cols, segments, inputs, scratch)
    }
}

/// f16 format of a one-row bucket.
struct Input16;

impl Input16 {
    fn bytes(width: usize) -> usize {
        pack::ActivationFormat::F16.bytes(1, width)
    }
}

#[test]
fn gemv_with_fused_norm_equals_separate_launches() {
    let Some(fixture) = GemvFixture::open() else {
        return;
    };
    let (gpu, mut random) = (&fixture.gpu, Random::new(1));
    let cases: &[(usize, &[(QuantType, usize)])] = &[
        // The delta and attention layers of a 0.8B shape.
        (
            1024,
            &[
                (QuantType::BF16, 6144),
                (QuantType::BF16, 2048),
                (QuantType::F32, 16),
                (QuantType::F32, 16),
            ],
        ),
        (
            1024,
            &[
                (QuantType::BF16, 4096),
                (QuantType::BF16, 512),
                (QuantType::BF16, 512),
            ],
        ),
        // Odd row counts, several kinds, one block for all, and norms with more warps than a block
        // has.
        (
            2560,
            &[
                (QuantType::Q4_K, 300),
                (QuantType::Q6_K, 4096),
                (QuantType::Q8_0, 17),
                (QuantType::F32, 21),
            ],
        ),
        (256, &[(QuantType::Q5_K, 16), (QuantType::IQ4_XS, 263)]),
        (5120, &[(QuantType::Q4_K, 1280), (QuantType::Q5_K, 250)]),
    ];
    for (case, (cols, matrices)) in cases.iter().enumerate() {
        let cols = *cols;
        let matrices: Vec<GemvMatrix> = matrices
            .iter()
            .map(|&(ty, rows)| GemvMatrix::new(gpu, &mut random, ty, rows, cols))
            .collect();
        let row = gpu.upload(&random.normals(cols, 3.0)).unwrap();
        let weight = gpu.upload(&random.between(cols, 0.5, 1.5)).unwrap();
        let outs = || -> Vec<Buffer<f32>> {
            let all = matrices.iter().map(|m| poisoned::<f32>(gpu, m.rows));
            all.collect()
        };
        let segments = |outs: &[Buffer<f32>]| -> Vec<GemmMatrix> {
            let all = matrices.iter().zip(outs);
            all.map(|(m, out)| m.segment(out.ptr(), GemmEpilogue::Store))
                .collect()
        };
        let (expected, found) = (outs(), outs());
        let (_halves, _floats, x) = fixture.forms(cols);
        let shape = RmsShape {
            width: cols,
            eps: EPS,
        };
        let rows = Residual::of(row.ptr());
        let mut launches = vec![norm::rms_norm(
            shape,
            1,
            fixture.source(),
            rows,
            weight.ptr(),
            x,
        )];
        launches.extend(fixture.products(cols, &segments(&expected), x));
        let input = GemvInput::RmsNorm {
            row: row.ptr(),
            weight: weight.ptr(),
            eps: EPS,
        };
        let one = gemv::launch(
            fixture.props,
            cols,
            &segments(&found),
            input,
            GemvEpilogue::Store,
        );
        launches.push(one.unwrap());
        gpu.launch(&launches);
        for (i, (a, b)) in expected.iter().zip(&found).enumerate() {
            let (a, b) = (a.download(gpu).unwrap(), b.download(gpu).unwrap());
            assert!(b.iter().all(|v| v.is_finite()));
            same_bits(&format!("case {case}, matrix {i}"), &b, &a);
        }
    }
}

#[test]
fn gemv_with_fused_residual_equals_separate_launches() {
    let Some(fixture) = GemvFixture::open() else {
        return;
    };
    let (gpu, mut random) = (&fixture.gpu, Random::new(2));
    for (ty, rows, cols) in [
        (QuantType::BF16, 1024, 2048),
        (QuantType::BF16, 1024, 3584),
        (QuantType::Q4_K, 2560, 6144),
        (QuantType::Q8_0, 1031, 768),
    ] {
        let matrix = GemvMatrix::new(gpu, &mut random, ty, rows, cols);
        let row = gpu.upload(&random.normals(cols, 1.0)).unwrap();
        let before = random.normals(rows, 2.0);
        let streams = [(); 2].map(|()| gpu.upload(&before).unwrap());
        let (_halves, _floats, x) = fixture.forms(cols);
        let segments = [0, 1].map(|i| [matrix.segment(streams[i].ptr(), GemmEpilogue::Add)]);
        let mut launches = vec![norm::convert(cols, 1, fixture.source(), row.ptr(), x)];
        launches.extend(fixture.products(cols, &segments[0], x));
        let input = GemvInput::F16(x.f16);
        let one = gemv::launch(
            fixture.props,
            cols,
            &segments[1],
            input,
            GemvEpilogue::Store,
        );
        // Matrices whose part of a block exceeds its shared memory use separate launches.
        let Some(one) = one else {
            assert!(
                fixture.props.shared_bytes <= 99 << 10 && cols > 2048,
                "{cols}"
            );
            continue;
        };
        launches.push(one);
        gpu.launch(&launches);
        let [a, b] = streams.map(|stream| stream.download(gpu).unwrap());
        same_bits(&format!("{} {rows} x {cols}", ty.name()), &b, &a);
        assert!(b != before);
    }
}

#[test]
fn gemv_with_fused_swiglu_equals_separate_launches() {
    let Some(fixture) = GemvFixture::open() else {
        return;
    };
    let (gpu, mut random) = (&fixture.gpu, Random::new(3));
    for (ty, width, cols) in [
        (QuantType::BF16, 3584, 1024),
        (QuantType::Q4_K, 1536, 2560),
        (QuantType::Q6_K, 256, 512),
    ] {
        let matrices = [(); 2].map(|()| GemvMatrix::new(gpu, &mut random, ty, width, cols));
        let row = gpu.upload(&random.normals(cols, 3.0)).unwrap();
        let weight = gpu.upload(&random.between(cols, 0.5, 1.5)).unwrap();
        let (_halves, _floats, x) = fixture.forms(cols);
        let projected = [(); 2].map(|()| poisoned::<f32>(gpu, width));
        let [expected, found] = [(); 2].map(|()| gpu.filled(Input16::bytes(width), 0).unwrap());
        let segments = [0, 1].map(|i| matrices[i].segment(projected[i].ptr(), GemmEpilogue::Store));
        let shape = RmsShape {
            width: cols,
            eps: EPS,
        };
        let rows = Residual::of(row.ptr());
        let mut launches = vec![norm::rms_norm(
            shape,
            1,
            fixture.source(),
            rows,
            weight.ptr(),
            x,
        )];
        launches.extend(fixture.products(cols, &segments, x));
        let out = ActivationBuffers {
            f16: expected.ptr(),
            ..ActivationBuffers::default()
        };
        let from = GateUp {
            gate: projected[0].ptr(),
            up: projected[1].ptr(),
            stride: width,
        };
        launches.push(ffn::gated_unit(
            (width, 1),
            fixture.source(),
            from,
            GateActivation::Silu,
            out,
        ));
        let input = GemvInput::RmsNorm {
            row: row.ptr(),
            weight: weight.ptr(),
            eps: EPS,
        };
        let gated = GemvEpilogue::SwiGlu(found.ptr());
        let one = gemv::launch(fixture.props, cols, &segments, input, gated);
        launches.push(one.unwrap());
        gpu.launch(&launches);
        let [a, b]: [Vec<u8>; 2] = [expected, found].map(|halves| halves.download(gpu).unwrap());
        assert!(a == b, "{} {width} x {cols}", ty.name());
        assert!(a.iter().any(|byte| *byte != 0));
    }
}

/// Shapes that the other launches handle.
#[test]
fn oversized_gemv_is_rejected() {
    let props = GpuProps::new((8, 6), 82);
    let segment = |kind, rows| GemmMatrix {
        kind,
        rows,
        weight: 256,
        out: 256,
        stride: rows,
        write: GemmEpilogue::Store,
    };
    let (halves, normed) = (
        GemvInput::F16(256),
        GemvInput::RmsNorm {
            row: 256,
            weight: 256,
            eps: EPS,
        },
    );
    let fits = |cols, segments: &[GemmMatrix], input, results| {
        gemv::launch(props, cols, segments, input, results).is_some()
    };
    let f16 = segment(WeightKind::F16, 1024);
    assert!(fits(2048, &[f16], halves, GemvEpilogue::Store));
    assert!(!fits(3584, &[f16], halves, GemvEpilogue::Store));
    assert!(!fits(1000, &[f16], halves, GemvEpilogue::Store));
    let f32 = segment(WeightKind::F32, 16);
    assert!(fits(1024, &[f16, f32], normed, GemvEpilogue::Store));
    assert!(!fits(1024, &[f16, f32], halves, GemvEpilogue::Store));
    assert!(!fits(1024, &[f32], normed, GemvEpilogue::Store));
    let gated = GemvEpilogue::SwiGlu(256);
    assert!(fits(1024, &[f16, f16], normed, gated));
    assert!(!fits(
        1024,
        &[f16, segment(WeightKind::F16, 768)],
        normed,
        gated
    ));
    assert!(!fits(1024, &[f16], normed, gated));
    // A warp would sum 5,120 values.
    let large = segment(WeightKind::Q4K, 17408);
    assert!(!fits(5120, &[large, large], normed, gated));
}
