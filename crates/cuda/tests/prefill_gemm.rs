//! Prefill GEMMs and activation formats match the reference.

#![allow(clippy::unwrap_used, reason = "these are tests")]

mod fixtures {
    pub mod gpu;
    pub mod prefill;
    pub mod step;
}

use contract::{GateActivation, QuantType};
use cpu::reference::{activation, matmul, norm};
use cuda::driver::Buffer;
use cuda::launch::gemm::panels::{ChunkRows, Panels, PrefillActivations};
use cuda::launch::gemm::prefill as gemm;
use cuda::launch::gemm::small_batch::{GemmEpilogue, GemmMatrix};
use cuda::launch::norm::RmsShape;
use cuda::launch::norm::panels::{self, F32Rows};
use cuda::pack::WeightKind;
use cuda::pack::dequantize::PackedMatrix;
use cuda::select::prefill_gemm;
use fixtures::gpu::{Random, close, poisoned, same_bits};
use fixtures::prefill::{
    PrefillFixture, PrefillMatrix, ZeroedScratch, from_panels, gpus, header, rows_of, segment,
};
use half::f16;

fn chunk_rows(header: &Buffer<i32>, rows: usize) -> ChunkRows {
    ChunkRows {
        header: header.ptr(),
        rows,
    }
}

const TYPES: [QuantType; 15] = [
    QuantType::Q4_K,
    QuantType::Q5_K,
    QuantType::Q6_K,
    QuantType::Q8_0,
    QuantType::F16,
    QuantType::BF16,
    QuantType::F32,
    QuantType::Q4_0,
    QuantType::Q4_1,
    QuantType::Q5_0,
    QuantType::Q5_1,
    QuantType::Q2_K,
    QuantType::Q3_K,
    QuantType::IQ4_NL,
    QuantType::IQ4_XS,
];

#[test]
fn activation_formats_match_reference() {
    let Some(gpu) = PrefillFixture::open(&[256, 5120, 17408, 128, 36, 384]) else {
        return;
    };
    let mut random = Random::new(1);
    for (width, n) in [
        (256, 65),
        (5120, 130),
        (17408, 3),
        (128, 1),
        (36, 7),
        (384, 64),
    ] {
        let cap = n + 9;
        let panel_rows = Panels::new(0, cap).rows;
        let header = header(&gpu, n);
        let mut x = random.normals(n * width, 3.0);
        x[width / 2] = 1e9;
        let up = random.normals(n * width, 2.0);
        let weight = random.between(width, 0.5, 1.5);
        let mut normed = vec![0.0; n * width];
        for (x, y) in x.chunks(width).zip(normed.chunks_mut(width)) {
            norm::rms(x, &weight, 1e-6, y);
        }
        let mut gated = vec![0.0; n * width];
        activation::swiglu(&x, &up, &mut gated);
        let mut gelu_gated = vec![0.0; n * width];
        activation::geglu(&x, &up, &mut gelu_gated);
        let upload = |host: &[f32]| {
            let mut buffer = poisoned::<f32>(&gpu, cap * width);
            buffer.upload(&gpu, host).unwrap();
            buffer
        };
        let (x_at, up_at, weight) = (upload(&x), upload(&up), gpu.upload(&weight).unwrap());
        let out = || {
            let y = poisoned::<f32>(&gpu, cap * width);
            (poisoned::<u16>(&gpu, Panels::bytes(cap, width) / 2), y)
        };
        let made = [out(), out(), out(), out()];
        let to = |i: usize| PrefillActivations {
            panels: made[i].0.ptr(),
            f32: made[i].1.ptr(),
        };
        let chunk = chunk_rows(&header, cap);
        let rms = RmsShape { width, eps: 1e-6 };
        let [x_rows, up_rows] = [&x_at, &up_at].map(|buffer| F32Rows {
            at: buffer.ptr(),
            width,
        });
        gpu.launch(&[
            panels::rms_norm(rms, chunk, x_at.ptr(), weight.ptr(), to(0)),
            panels::convert(chunk, x_rows, to(1)),
            panels::gated_unit(chunk, [x_rows, up_rows], GateActivation::Silu, to(2)),
            panels::gated_unit(chunk, [x_rows, up_rows], GateActivation::GeluTanh, to(3)),
        ]);
        let expected = [normed, x, gated, gelu_gated];
        for ((panels, y), expected) in made.iter().zip(&expected) {
            let y = y.download(&gpu).unwrap();
            close("f32 rows", &y[..n * width], expected, 4e-6);
            assert!(
                y[n * width..].iter().all(|v| v.is_nan()),
                "rows beyond the chunk were written"
            );
            let panels = panels.download(&gpu).unwrap();
            let stored: Vec<f32> = expected
                .iter()
                .map(|v| v.clamp(-65504.0, 65504.0))
                .collect();
            let found = from_panels(&panels, panel_rows, n, width.next_multiple_of(64));
            for (row, expected) in found
                .chunks(width.next_multiple_of(64))
                .zip(stored.chunks(width))
            {
                close("panels", &row[..width], expected, 4e-4);
                assert!(
                    row[width..].iter().all(|&v| v == 0.0),
                    "padding of K is not zero"
                );
            }
        }
    }
}

#[test]
fn dequantized_panels_equal_small_batch_weights() {
    let Some(gpu) = PrefillFixture::open(&[512]) else {
        return;
    };
    let mut random = Random::new(2);
    // Unit vectors select single weights, so the output is the exact f16 weight.
    for ty in TYPES {
        let cols = 512;
        let matrix = PrefillMatrix::random(&gpu, &mut random, ty, 263, cols);
        let bytes = matrix.weight.download(&gpu).unwrap();
        let packed = PackedMatrix {
            kind: matrix.kind,
            rows: 263,
            cols,
            bytes: &bytes,
        };
        let mut x = vec![0.0; cols * cols];
        x.iter_mut().step_by(cols + 1).for_each(|v| *v = 1.0);
        let header = header(&gpu, cols);
        let rows = rows_of(&gpu, &x, cols, cols, &header);
        let scratch = ZeroedScratch::new(&gpu, gemm::dequantized_bytes([263], cols), cols);
        for props in gpus(&gpu) {
            let out = poisoned::<f32>(&gpu, cols * 263);
            let segment = segment(&matrix, &out, 263, GemmEpilogue::Store);
            let inputs = rows.inputs();
            gpu.launch(&gemm::gemm(
                prefill_gemm(props).kernel,
                chunk_rows(&header, cols),
                cols,
                &[segment],
                inputs,
                scratch.scratch(),
            ));
            let found = out.download(&gpu).unwrap();
            for (i, &found) in found.iter().enumerate() {
                let (row, k) = (i % 263, i / 263);
                let expected = match ty {
                    QuantType::F32 => matrix.values[row * cols + k],
                    _ => f16::from_f32(packed.value(row, k)).to_f32(),
                };
                // F32 is split into two truncated terms of 11 bits.
                let most = match ty {
                    QuantType::F32 => expected.abs() * 1.0e-6,
                    _ => 0.0,
                };
                assert!(
                    (found - expected).abs() <= most,
                    "{}: {found:e} instead of {expected:e} at {i}",
                    ty.name()
                );
            }
        }
    }
}

#[test]
fn prefill_gemm_matches_reference() {
    let Some(gpu) = PrefillFixture::open(&[256, 768, 5120, 17408, 2048, 512, 4352]) else {
        return;
    };
    let mut random = Random::new(3);
    let k = [
        QuantType::Q4_K,
        QuantType::Q5_K,
        QuantType::F32,
        QuantType::Q6_K,
        QuantType::Q8_0,
        QuantType::BF16,
    ];
    let cases: [(usize, usize, &[usize], usize); 9] = [
        (1, 256, &[300, 5, 128, 3, 256, 17], usize::MAX),
        (65, 768, &[263, 2, 48], usize::MAX),
        (127, 5120, &[1024, 6, 48, 520], usize::MAX),
        (128, 256, &[1024], usize::MAX),
        (130, 17408, &[640], usize::MAX),
        (300, 2048, &[2057], usize::MAX),
        // Scratch for 512 weight rows.
        (200, 512, &[1500, 700, 48], 512 * 512 * 2),
        (2048, 5120, &[1280, 48], usize::MAX),
        (1100, 4352, &[5120], usize::MAX),
    ];
    for (n, cols, sizes, bytes) in cases {
        let header = header(&gpu, n);
        let cap = n + 5;
        let x = random.normals(n * cols, 1.0);
        let rows = rows_of(&gpu, &x, n, cap, &header);
        let matrices: Vec<PrefillMatrix> = sizes
            .iter()
            .enumerate()
            .map(|(i, &size)| PrefillMatrix::random(&gpu, &mut random, k[i % k.len()], size, cols))
            .collect();
        let bytes = bytes.min(gemm::dequantized_bytes(sizes.iter().copied(), cols));
        let scratch = ZeroedScratch::new(&gpu, bytes, cap);
        for props in gpus(&gpu) {
            for write in [GemmEpilogue::Store, GemmEpilogue::Add] {
                let before: Vec<Vec<f32>> = sizes
                    .iter()
                    .map(|&s| random.normals(n * (s + 3), 1.0))
                    .collect();
                let outs: Vec<Buffer<f32>> = before
                    .iter()
                    .zip(sizes)
                    .map(|(before, s)| {
                        let mut out = poisoned::<f32>(&gpu, cap * (s + 3));
                        out.upload(&gpu, before).unwrap();
                        out
                    })
                    .collect();
                let segments: Vec<GemmMatrix> = matrices
                    .iter()
                    .zip(&outs)
                    .map(|(m, out)| segment(m, out, m.rows + 3, write))
                    .collect();
                let inputs = rows.inputs();
                gpu.launch(&gemm::gemm(
                    prefill_gemm(props).kernel,
                    chunk_rows(&header, cap),
                    cols,
                    &segments,
                    inputs,
                    scratch.scratch(),
                ));
                scratch.is_left_zero(&gpu);
                for ((matrix, out), before) in matrices.iter().zip(&outs).zip(&before) {
                    check(matrix, &out.download(&gpu).unwrap(), before, &x, n, write);
                }
            }
        }
    }
}

#[test]
fn prefill_f32_gemm_matches_reference() {
    let Some(gpu) = PrefillFixture::open(&[256, 5120, 36]) else {
        return;
    };
    let mut random = Random::new(6);
    for (n, cols, sizes) in [
        (65, 5120, [48, 48, 263, 3, 1]),
        (1, 256, [2, 2, 100, 8, 9]),
        (300, 36, [1, 1, 1, 1, 97]),
    ] {
        let header = header(&gpu, n);
        let x = random.normals(n * cols, 1.0);
        let rows = rows_of(&gpu, &x, n, n, &header);
        let scratch = ZeroedScratch::new(&gpu, gemm::dequantized_bytes([256], cols), n);
        let matrices =
            sizes.map(|size| PrefillMatrix::random(&gpu, &mut random, QuantType::F32, size, cols));
        let before = sizes.map(|size| random.normals(n * (size + 3), 1.0));
        for write in [GemmEpilogue::Store, GemmEpilogue::Add] {
            let outs: Vec<Buffer<f32>> = before.iter().map(|b| gpu.upload(b).unwrap()).collect();
            let segments: Vec<GemmMatrix> = matrices
                .iter()
                .zip(&outs)
                .map(|(m, out)| segment(m, out, m.rows + 3, write))
                .collect();
            let (props, inputs) = (gpus(&gpu)[0], rows.inputs());
            gpu.launch(&gemm::gemm(
                prefill_gemm(props).kernel,
                chunk_rows(&header, n),
                cols,
                &segments,
                inputs,
                scratch.scratch(),
            ));
            for ((matrix, out), before) in matrices.iter().zip(&outs).zip(&before) {
                check(matrix, &out.download(&gpu).unwrap(), before, &x, n, write);
            }
        }
    }
}

/// Compares sampled rows of a GEMM with the reference, and checks that the rest is untouched.
fn check(
    matrix: &PrefillMatrix,
    found: &[f32],
    before: &[f32],
    x: &[f32],
    n: usize,
    write: GemmEpilogue,
) {
    let (size, stride, cols) = (matrix.rows, matrix.rows + 3, x.len() / n);
    let sample: Vec<usize> = if n * size * cols < 200_000_000 {
        (0..n).collect()
    } else {
        (0..n).step_by(n / 12).chain([n - 1]).collect()
    };
    let mut expected = vec![0.0; size];
    let (mut all, mut right) = (Vec::new(), Vec::new());
    for row in sample {
        matmul::linear(
            &matrix.values,
            &x[row * cols..][..cols],
            cols,
            &mut expected,
        );
        if write == GemmEpilogue::Add {
            for (e, b) in expected.iter_mut().zip(&before[row * stride..]) {
                *e += b;
            }
        }
        right.extend_from_slice(&expected);
        all.extend_from_slice(&found[row * stride..][..size]);
    }
    let most = if matrix.kind == WeightKind::F32 {
        1e-5
    } else {
        1.5e-3
    };
    close(
        &format!("{:?} [{n}][{cols}] x [{size}]", matrix.kind),
        &all,
        &right,
        most,
    );
    for (row, found) in found.chunks(stride).enumerate() {
        if row < n {
            same_bits(
                "columns beyond the matrix",
                &found[size..],
                &before[row * stride..][size..stride],
            );
        } else {
            assert!(
                found.iter().all(|v| v.is_nan()),
                "row {row} beyond the chunk was written"
            );
        }
    }
}

#[test]
fn prefill_gemm_row_bits_do_not_depend_on_the_chunk() {
    let Some(gpu) = PrefillFixture::open(&[6144]) else {
        return;
    };
    let mut random = Random::new(4);
    let (n, cols, size) = (192, 6144, 5120);
    let matrix = PrefillMatrix::random(&gpu, &mut random, QuantType::Q4_K, size, cols);
    let plain = PrefillMatrix::random(&gpu, &mut random, QuantType::F32, 48, cols);
    let x = random.normals(n * cols, 1.0);
    let scratch = ZeroedScratch::new(&gpu, gemm::dequantized_bytes([size, 48], cols), n);
    for props in gpus(&gpu) {
        let run = |x: &[f32]| -> [Vec<f32>; 2] {
            let n = x.len() / cols;
            let header = header(&gpu, n);
            let rows = rows_of(&gpu, x, n, n, &header);
            let outs = [
                poisoned::<f32>(&gpu, n * size),
                poisoned::<f32>(&gpu, n * 48),
            ];
            let segments = [
                segment(&matrix, &outs[0], size, GemmEpilogue::Store),
                segment(&plain, &outs[1], 48, GemmEpilogue::Store),
            ];
            let inputs = rows.inputs();
            gpu.launch(&gemm::gemm(
                prefill_gemm(props).kernel,
                chunk_rows(&header, n),
                cols,
                &segments,
                inputs,
                scratch.scratch(),
            ));
            outs.map(|out| out.download(&gpu).unwrap())
        };
        let whole = run(&x);
        for (first, end) in [(0, 64), (64, 192), (1, 2), (100, 165)] {
            let part = run(&x[first * cols..end * cols]);
            for (i, width) in [size, 48].into_iter().enumerate() {
                same_bits(
                    "a part of a chunk",
                    &part[i],
                    &whole[i][first * width..end * width],
                );
            }
        }
    }
}

#[test]
fn prefill_gated_gemm_matches_reference() {
    let Some(gpu) = PrefillFixture::open(&[256, 1024, 768, 512]) else {
        return;
    };
    let mut random = Random::new(5);
    for (n, cols, ffn, pieces) in [
        (65, 256, 512, 1),
        (127, 1024, 3584, 1),
        (300, 768, 1024, 3),
        (1, 512, 128, 1),
        // Tiles of 256 columns, where there is no wgmma.
        (500, 256, 3584, 1),
    ] {
        let header = header(&gpu, n);
        let x = random.normals(n * cols, 1.0);
        let cap = n + 70;
        let rows = rows_of(&gpu, &x, n, cap, &header);
        let gate = PrefillMatrix::random(&gpu, &mut random, QuantType::Q4_K, ffn, cols);
        let up = PrefillMatrix::random(&gpu, &mut random, QuantType::Q6_K, ffn, cols);
        let scratch = ZeroedScratch::new(
            &gpu,
            gemm::dequantized_bytes([ffn, ffn], cols) / pieces,
            cap,
        );
        let [mut gates, mut ups, mut expected] = [0, 1, 2].map(|_| vec![0.0; n * ffn]);
        matmul::linear(&gate.values, &x, cols, &mut gates);
        matmul::linear(&up.values, &x, cols, &mut ups);
        activation::swiglu(&gates, &ups, &mut expected);
        for props in gpus(&gpu) {
            let h = poisoned::<u16>(&gpu, Panels::bytes(cap, ffn) / 2);
            let pair = gemm::SwiGluMatrices {
                cols,
                ffn,
                gate: (gate.kind, gate.weight.ptr()),
                up: (up.kind, up.weight.ptr()),
            };
            let x = rows.panels.ptr();
            gpu.launch(&gemm::gemm_swiglu(
                prefill_gemm(props).kernel,
                chunk_rows(&header, cap),
                pair,
                x,
                scratch.scratch(),
                h.ptr(),
            ));
            let h = h.download(&gpu).unwrap();
            let panel_rows = Panels::new(0, cap).rows;
            let found = from_panels(&h, panel_rows, panel_rows, ffn);
            close("gated", &found[..n * ffn], &expected, 2e-3);
            assert!(
                found[n * ffn..].iter().all(|v| v.is_nan()),
                "rows beyond the chunk were written"
            );
        }
    }
}
