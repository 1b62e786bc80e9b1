//! Small-batch GEMM against sums in f64.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod fixtures {
    pub mod gpu;
}

use contract::QuantType;
use contract::quant::{dequantize_row, quantize_row};
use cpu::reference;
use cuda::GpuProps;
use cuda::compile::Modules;
use cuda::driver::{Buffer, Gpu};
use cuda::launch::Launch;
use cuda::launch::gemm::small_batch::{self, GemmEpilogue, GemmInputs, GemmMatrix, GemmScratch};
use cuda::pack::activations::activations;
use cuda::pack::dequantize::PackedMatrix;
use cuda::pack::{self, ActivationFormat, WeightKind};
use fixtures::gpu::Random;

/// A matrix as stored and on the device.
struct TestMatrix {
    ty: QuantType,
    rows: usize,
    cols: usize,
    stored: Vec<u8>,
    packed: Vec<u8>,
    device: Buffer<u8>,
}

impl TestMatrix {
    fn new(gpu: &Gpu, random: &mut Random, ty: QuantType, rows: usize, cols: usize) -> TestMatrix {
        let row_bytes = ty.row_bytes(cols);
        let mut stored = vec![0; rows * row_bytes];
        for bytes in stored.chunks_exact_mut(row_bytes) {
            quantize_row(ty, &random.normals(cols, 0.05), bytes);
        }
        let kind = WeightKind::of(ty);
        let mut packed = vec![0xff; kind.bytes(rows, cols)];
        pack::pack(ty, cols, &stored, &mut packed);
        TestMatrix {
            ty,
            rows,
            cols,
            stored,
            device: gpu.upload(&packed).unwrap(),
            packed,
        }
    }

    /// The stored values.
    fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.rows * self.cols];
        let row_bytes = self.ty.row_bytes(self.cols);
        for (row, out) in self
            .stored
            .chunks_exact(row_bytes)
            .zip(values.chunks_exact_mut(self.cols))
        {
            dequantize_row(self.ty, row, out);
        }
        values
    }

    /// The values as kernels round them.
    fn rounded(&self) -> Vec<f32> {
        let kind = WeightKind::of(self.ty);
        if kind == WeightKind::F32 {
            return self.values();
        }
        let packed = PackedMatrix {
            kind,
            rows: self.rows,
            cols: self.cols,
            bytes: &self.packed,
        };
        let all = (0..self.rows).flat_map(|row| (0..self.cols).map(move |k| (row, k)));
        all.map(|(row, k)| packed.value(row, k)).collect()
    }
}

fn gpu_props_of(gpu: &Gpu) -> GpuProps {
    gpu.info().props()
}

/// Shared scratch. It is zero before and after every launch.
struct ZeroedScratch(Buffer<u8>);

impl ZeroedScratch {
    fn new(gpu: &Gpu, props: GpuProps) -> ZeroedScratch {
        ZeroedScratch(
            gpu.filled(small_batch::scratch_bytes(props, 64), 0)
                .unwrap(),
        )
    }

    fn scratch(&self) -> GemmScratch {
        GemmScratch(self.0.ptr())
    }

    fn assert_zero(&self, gpu: &Gpu) {
        let left = self.0.download(gpu).unwrap();
        assert!(left.iter().all(|&b| b == 0), "a launch left sums behind");
    }
}

/// Rows in every activation format.
struct X {
    buffers: Vec<(ActivationFormat, Buffer<u8>)>,
}

impl X {
    fn new(gpu: &Gpu, x: &[f32], width: usize, bucket: usize) -> X {
        let forms = [ActivationFormat::F16, ActivationFormat::F32];
        X {
            buffers: forms
                .map(|form| {
                    let bytes = activations(form, x, width, bucket).bytes;
                    (form, gpu.upload(&bytes).unwrap())
                })
                .into(),
        }
    }

    fn inputs(&self) -> GemmInputs {
        let at = |i: usize| self.buffers[i].1.ptr();
        GemmInputs {
            f16: at(0),
            f32: at(1),
        }
    }
}

/// Error of f32 accumulation relative to all outputs.
const SUMMING: f64 = 5e-6;

fn segment(matrix: &TestMatrix, out: u64, stride: usize, write: GemmEpilogue) -> GemmMatrix {
    GemmMatrix {
        kind: WeightKind::of(matrix.ty),
        rows: matrix.rows,
        weight: matrix.device.ptr(),
        out,
        stride,
        write,
    }
}

fn run(gpu: &Gpu, launches: &[Launch]) {
    let units: Vec<_> = launches.iter().map(|l| l.unit.clone()).collect();
    let modules: Modules = fixtures::gpu::modules(gpu, &units);
    for launch in launches {
        gpu.run(&modules, launch).unwrap();
    }
    gpu.sync().unwrap();
}

/// One matrix times the rows of `x`, padded to a bucket.
fn product(
    gpu: &Gpu,
    scratch: &ZeroedScratch,
    props: GpuProps,
    m: &TestMatrix,
    x: &[f32],
    bucket: usize,
) -> Vec<f32> {
    let out = fixtures::gpu::poisoned::<f32>(gpu, bucket * m.rows);
    let x = X::new(gpu, x, m.cols, bucket);
    let segments = [segment(m, out.ptr(), m.rows, GemmEpilogue::Store)];
    let launches = small_batch::launches(
        props,
        bucket,
        m.cols,
        &segments,
        x.inputs(),
        scratch.scratch(),
    );
    run(gpu, &launches);
    out.download(gpu).unwrap()
}

fn gemm_in_f64(m: &TestMatrix, x: &[f32]) -> Vec<f32> {
    let values = m.rounded();
    let mut out = Vec::new();
    for x in x.chunks_exact(m.cols) {
        for w in values.chunks_exact(m.cols) {
            let terms = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
            out.push(terms.sum::<f64>() as f32);
        }
    }
    out
}

/// Rows with outliers and a common part, like activations.
fn rows(random: &mut Random, n: usize, cols: usize) -> Vec<f32> {
    (0..n * cols)
        .map(|i| {
            let outlier = if i % 97 == 5 { 8.0 } else { 1.0 };
            random.normal() * outlier + 0.2
        })
        .collect()
}

#[test]
fn every_weight_type_matches_reference() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let props = gpu_props_of(&gpu);
    let scratch = ZeroedScratch::new(&gpu, props);
    let mut random = Random::new(1);
    for ty in QuantType::ALL {
        let shapes: &[(usize, usize, usize)] = if ty.block_values() > 32 {
            &[(263, 256, 1), (300, 1280, 24), (17, 768, 8)]
        } else {
            &[(263, 96, 1), (300, 1280, 24), (17, 416, 8)]
        };
        for &(n_out, cols, bucket) in shapes {
            let m = TestMatrix::new(&gpu, &mut random, ty, n_out, cols);
            let x = rows(&mut random, bucket, cols);
            let out = product(&gpu, &scratch, props, &m, &x, bucket);
            let input = WeightKind::of(ty).input();
            let rounded = activations(input, &x, cols, bucket).rounded;
            let what = format!("{} {n_out} x {cols}, {bucket} rows", ty.name());
            fixtures::gpu::close(&what, &out, &gemm_in_f64(&m, &rounded), SUMMING);
            let mut wanted = vec![0.0; bucket * n_out];
            reference::matmul::linear(&m.values(), &x, cols, &mut wanted);
            let rounding = match WeightKind::of(ty) {
                WeightKind::F32 => 2e-6,
                WeightKind::F16 => 5e-4,
                _ => 1.5e-3,
            };
            fixtures::gpu::close(&format!("{what}, reference"), &out, &wanted, rounding);
        }
    }
    scratch.assert_zero(&gpu);
}

#[test]
fn row_bits_do_not_depend_on_the_other_rows() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let props = gpu_props_of(&gpu);
    let scratch = ZeroedScratch::new(&gpu, props);
    let mut random = Random::new(2);
    let types = [
        QuantType::Q4_K,
        QuantType::Q5_K,
        QuantType::Q6_K,
        QuantType::Q8_0,
        QuantType::Q4_1,
        QuantType::F16,
        QuantType::BF16,
        QuantType::F32,
    ];
    let (n_out, cols) = (272, 2304);
    let x = rows(&mut random, 64, cols);
    let alone: Vec<X> = x
        .chunks_exact(cols)
        .map(|x| X::new(&gpu, x, cols, 1))
        .collect();
    let together: Vec<(usize, X)> = [8, 16, 24, 32, 48, 64]
        .map(|bucket| (bucket, X::new(&gpu, &x[..bucket * cols], cols, bucket)))
        .into();
    let launches_of = |m: &TestMatrix, x: &X, bucket: usize, out: u64| {
        let segments = [segment(m, out, n_out, GemmEpilogue::Store)];
        small_batch::launches(
            props,
            bucket,
            cols,
            &segments,
            x.inputs(),
            scratch.scratch(),
        )
    };
    let matrices = types.map(|ty| TestMatrix::new(&gpu, &mut random, ty, n_out, cols));
    let out = fixtures::gpu::poisoned::<f32>(&gpu, 64 * n_out);
    // All units at once, so they compile in parallel.
    let units: Vec<_> = matrices
        .iter()
        .flat_map(|m| {
            let one = launches_of(m, &alone[0], 1, out.ptr());
            let more = together
                .iter()
                .map(|(bucket, x)| launches_of(m, x, *bucket, out.ptr()));
            let all = one.into_iter().chain(more.flatten());
            all.map(|l| l.unit).collect::<Vec<_>>()
        })
        .collect();
    let modules = fixtures::gpu::modules(&gpu, &units);
    for m in &matrices {
        for (row, x) in alone.iter().enumerate() {
            let at = out.ptr() + (4 * row * n_out) as u64;
            for launch in launches_of(m, x, 1, at) {
                gpu.run(&modules, &launch).unwrap();
            }
        }
        let single = out.download(&gpu).unwrap();
        for (bucket, x) in &together {
            let out = fixtures::gpu::poisoned::<f32>(&gpu, bucket * n_out);
            for launch in launches_of(m, x, *bucket, out.ptr()) {
                gpu.run(&modules, &launch).unwrap();
            }
            let what = format!("{} in {bucket} rows", m.ty.name());
            let got = out.download(&gpu).unwrap();
            fixtures::gpu::same_bits(&what, &got, &single[..bucket * n_out]);
        }
    }
}

#[test]
fn matrices_with_a_shared_input_run_together_and_may_accumulate() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let props = gpu_props_of(&gpu);
    let scratch = ZeroedScratch::new(&gpu, props);
    let mut random = Random::new(4);
    let (cols, bucket) = (1024, 24);
    let x = rows(&mut random, bucket, cols);
    let forms = X::new(&gpu, &x, cols, bucket);
    let sizes = [
        (QuantType::Q5_K, 640),
        (QuantType::Q4_K, 130),
        (QuantType::Q6_K, 33),
        (QuantType::F32, 6),
        (QuantType::BF16, 48),
        (QuantType::Q8_0, 257),
    ];
    let matrices = sizes.map(|(ty, n)| TestMatrix::new(&gpu, &mut random, ty, n, cols));
    let stride = 1300;
    let before = random.normals(bucket * stride, 1.0);
    let out = gpu.upload(&before).unwrap();
    let mut first = 7;
    let mut starts = Vec::new();
    let segments: Vec<GemmMatrix> = matrices
        .iter()
        .enumerate()
        .map(|(i, m)| {
            let write = if i % 2 == 0 {
                GemmEpilogue::Add
            } else {
                GemmEpilogue::Store
            };
            let at = out.ptr() + 4 * first as u64;
            starts.push(first);
            first += m.rows + 3;
            segment(m, at, stride, write)
        })
        .collect();
    let launches = small_batch::launches(
        props,
        bucket,
        cols,
        &segments,
        forms.inputs(),
        scratch.scratch(),
    );
    // Where the shared memory of a block holds slices of only some kinds, each kind has a launch.
    let most = if props.shared_bytes > 99 << 10 { 1 } else { 5 };
    let count = launches.len();
    assert!((1..=most).contains(&count), "{count} launches");
    run(&gpu, &launches);
    let got = out.download(&gpu).unwrap();
    let mut wanted = before.clone();
    for (i, m) in matrices.iter().enumerate() {
        let rounded = activations(WeightKind::of(m.ty).input(), &x, cols, bucket).rounded;
        let products = gemm_in_f64(m, &rounded);
        for (row, products) in products.chunks_exact(m.rows).enumerate() {
            for (n, &v) in products.iter().enumerate() {
                let to = &mut wanted[row * stride + starts[i] + n];
                *to = if i % 2 == 0 { *to + v } else { v };
            }
        }
    }
    fixtures::gpu::close("all segments", &got, &wanted, SUMMING);
    // The space between the outputs is untouched.
    let gap = starts[1] - 1;
    for row in 0..bucket {
        assert_eq!(got[row * stride + gap], before[row * stride + gap]);
    }
}

#[test]
fn non_finite_row_does_not_affect_other_rows() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let props = gpu_props_of(&gpu);
    let scratch = ZeroedScratch::new(&gpu, props);
    let mut random = Random::new(5);
    let (n_out, cols) = (160, 512);
    for ty in [
        QuantType::Q4_K,
        QuantType::Q6_K,
        QuantType::Q8_0,
        QuantType::BF16,
    ] {
        let m = TestMatrix::new(&gpu, &mut random, ty, n_out, cols);
        let mut x = rows(&mut random, 8, cols);
        let clean = product(&gpu, &scratch, props, &m, &x, 8);
        x[3 * cols + 300] = f32::INFINITY;
        x[6 * cols] = f32::NAN;
        let out = product(&gpu, &scratch, props, &m, &x, 8);
        for row in 0..8 {
            let (out, clean) = (&out[row * n_out..][..n_out], &clean[row * n_out..][..n_out]);
            if matches!(row, 3 | 6) {
                assert!(
                    out.iter().all(|v| !v.is_finite()),
                    "{} row {row}",
                    ty.name()
                );
            } else {
                fixtures::gpu::same_bits(ty.name(), out, clean);
            }
        }
    }
}

/// The longest sums and the widest joint launch of the supported shapes.
#[test]
fn real_shapes_match_reference() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let props = gpu_props_of(&gpu);
    let scratch = ZeroedScratch::new(&gpu, props);
    let mut random = Random::new(6);
    for (ty, n_out, cols, bucket) in [
        (QuantType::Q4_K, 144, 17408, 24),
        (QuantType::Q6_K, 5120, 512, 64),
        (QuantType::Q5_K, 10240, 512, 1),
    ] {
        let m = TestMatrix::new(&gpu, &mut random, ty, n_out, cols);
        let x = rows(&mut random, bucket, cols);
        let out = product(&gpu, &scratch, props, &m, &x, bucket);
        let rounded = activations(ActivationFormat::F16, &x, cols, bucket).rounded;
        let what = format!("{} {n_out} x {cols}, {bucket} rows", ty.name());
        fixtures::gpu::close(&what, &out, &gemm_in_f64(&m, &rounded), 2e-5);
    }
}

/// GPUs with small shared memory support every weight kind. Rows that exceed one launch are split,
/// and a row's bits stay the same.
#[test]
fn every_weight_kind_fits_small_shared_memory_with_the_same_bits() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let large = gpu_props_of(&gpu);
    let small = GpuProps {
        shared_bytes: 99 << 10,
        ..large
    };
    let scratch = ZeroedScratch::new(&gpu, large);
    let mut random = Random::new(7);
    let (n_out, cols) = (300, 768);
    let x = rows(&mut random, 64, cols);
    for ty in QuantType::ALL {
        let m = TestMatrix::new(&gpu, &mut random, ty, n_out, cols);
        assert!(
            small_batch::fits_shared_memory(small, WeightKind::of(ty)),
            "{}",
            ty.name()
        );
        for bucket in [1, 64] {
            let x = &x[..bucket * cols];
            let on_large = product(&gpu, &scratch, large, &m, x, bucket);
            let on_small = product(&gpu, &scratch, small, &m, x, bucket);
            fixtures::gpu::same_bits(ty.name(), &on_small, &on_large);
        }
    }
}

/// Values beyond the range of f16 and its scales, without the row exponents.
#[test]
fn rows_of_any_magnitude_keep_their_precision() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let props = gpu_props_of(&gpu);
    let scratch = ZeroedScratch::new(&gpu, props);
    let mut random = Random::new(8);
    let (n_out, cols, bucket) = (48, 512, 8);
    let x = rows(&mut random, bucket, cols);
    for ty in [
        QuantType::Q4_K,
        QuantType::Q6_K,
        QuantType::Q8_0,
        QuantType::Q4_1,
        QuantType::BF16,
    ] {
        for scale in [1e-4, 1e3] {
            let mut m = TestMatrix::new(&gpu, &mut random, ty, n_out, cols);
            let row_bytes = ty.row_bytes(cols);
            for bytes in m.stored.chunks_exact_mut(row_bytes) {
                quantize_row(ty, &random.normals(cols, scale), bytes);
            }
            pack::pack(ty, cols, &m.stored, &mut m.packed);
            m.device = gpu.upload(&m.packed).unwrap();
            let out = product(&gpu, &scratch, props, &m, &x, bucket);
            let mut wanted = vec![0.0; bucket * n_out];
            reference::matmul::linear(&m.values(), &x, cols, &mut wanted);
            let what = format!("{} around {scale}", ty.name());
            fixtures::gpu::close(&what, &out, &wanted, 1.5e-3);
        }
    }
}
