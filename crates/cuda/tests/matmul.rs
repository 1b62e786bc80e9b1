//! The small-batch products against sums in f64 and in whole numbers.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod card;

use card::Random;
use contract::QuantType;
use contract::quant::{dequantize_row, quantize_row, scale_and_min};
use cpu::reference;
use cuda::compile::Modules;
use cuda::driver::{Buffer, Gpu};
use cuda::launch::Launch;
use cuda::launch::matmul::{self, Card, Inputs, Products, Rows, Scratch, Segment, Write};
use cuda::pack::activations::activations;
use cuda::pack::{self, Input, Kind};

/// A matrix as stored, and on the card.
struct Matrix {
    ty: QuantType,
    rows: usize,
    cols: usize,
    stored: Vec<u8>,
    packed: Buffer<u8>,
}

impl Matrix {
    fn new(gpu: &Gpu, random: &mut Random, ty: QuantType, rows: usize, cols: usize) -> Matrix {
        let row_bytes = ty.row_bytes(cols);
        let mut stored = vec![0; rows * row_bytes];
        for bytes in stored.chunks_exact_mut(row_bytes) {
            quantize_row(ty, &random.normals(cols, 0.05), bytes);
        }
        let kind = Kind::of(ty);
        let mut packed = vec![0xff; kind.bytes(rows, cols)];
        pack::pack(ty, cols, &stored, &mut packed);
        Matrix {
            ty,
            rows,
            cols,
            stored,
            packed: gpu.upload(&packed).unwrap(),
        }
    }

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
}

fn card_of(gpu: &Gpu) -> Card {
    Card {
        multiprocessors: gpu.multiprocessors(),
        shared: gpu.shared_per_block(),
    }
}

/// Scratch for any test here.
struct Room {
    partials: Buffer<u8>,
    counters: Buffer<u32>,
}

impl Room {
    fn new(gpu: &Gpu, card: Card) -> Room {
        let zeros = vec![0; matmul::counter_bytes([1 << 16]) / 4];
        Room {
            partials: card::poisoned(gpu, matmul::scratch_bytes(card, 64)),
            counters: gpu.upload(&zeros).unwrap(),
        }
    }

    fn scratch(&self) -> Scratch {
        Scratch {
            partials: self.partials.ptr(),
            counters: self.counters.ptr(),
        }
    }
}

/// Rows in every form that some kind reads.
struct X {
    buffers: Vec<(Input, Buffer<u8>)>,
}

impl X {
    fn new(gpu: &Gpu, x: &[f32], width: usize, bucket: usize) -> X {
        let forms = [Input::A8, Input::F16, Input::Bf16, Input::F32];
        X {
            buffers: forms
                .map(|form| {
                    let bytes = activations(form, x, width, bucket).bytes;
                    (form, gpu.upload(&bytes).unwrap())
                })
                .into(),
        }
    }

    fn inputs(&self) -> Inputs {
        let at = |i: usize| self.buffers[i].1.ptr();
        Inputs {
            a8: at(0),
            f16: at(1),
            bf16: at(2),
            f32: at(3),
        }
    }
}

fn segment(matrix: &Matrix, out: u64, stride: usize, write: Write) -> Segment {
    Segment {
        kind: Kind::of(matrix.ty),
        rows: matrix.rows,
        weight: matrix.packed.ptr(),
        out,
        stride,
        write,
    }
}

fn run(gpu: &Gpu, launches: &[Launch]) {
    let units: Vec<_> = launches.iter().map(|l| l.unit.clone()).collect();
    let modules: Modules = card::modules(gpu, &units);
    for launch in launches {
        gpu.run(&modules, launch).unwrap();
    }
    gpu.sync().unwrap();
}

/// One matrix times the rows of `x`, in a bucket.
fn product(gpu: &Gpu, room: &Room, card: Card, m: &Matrix, x: &[f32], bucket: usize) -> Vec<f32> {
    let out = card::poisoned::<f32>(gpu, bucket * m.rows);
    let x = X::new(gpu, x, m.cols, bucket);
    let segments = [segment(m, out.ptr(), m.rows, Write::Store)];
    let launches = matmul::launches(card, bucket, m.cols, &segments, x.inputs(), room.scratch());
    run(gpu, &launches);
    out.download(gpu).unwrap()
}

fn products_in_f64(m: &Matrix, x: &[f32]) -> Vec<f32> {
    let values = m.values();
    let mut out = Vec::new();
    for x in x.chunks_exact(m.cols) {
        for w in values.chunks_exact(m.cols) {
            let terms = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
            out.push(terms.sum::<f64>() as f32);
        }
    }
    out
}

/// Rows with outliers and a common part, as activations have.
fn rows(random: &mut Random, n: usize, cols: usize) -> Vec<f32> {
    (0..n * cols)
        .map(|i| {
            let outlier = if i % 97 == 5 { 8.0 } else { 1.0 };
            random.normal() * outlier + 0.2
        })
        .collect()
}

#[test]
fn every_format_agrees_with_the_reference() {
    let Some(gpu) = card::gpu() else { return };
    let card = card_of(&gpu);
    let room = Room::new(&gpu, card);
    let mut random = Random::new(1);
    for ty in QuantType::ALL {
        let shapes: &[(usize, usize, usize)] = if ty.block_values() == 256 {
            &[(263, 256, 1), (300, 1280, 24), (17, 768, 8)]
        } else {
            &[(263, 96, 1), (300, 1280, 24), (17, 416, 8)]
        };
        for &(n_out, cols, bucket) in shapes {
            let m = Matrix::new(&gpu, &mut random, ty, n_out, cols);
            let x = rows(&mut random, bucket, cols);
            let out = product(&gpu, &room, card, &m, &x, bucket);
            let input = Kind::of(ty).input();
            let rounded = activations(input, &x, cols, bucket).rounded;
            let what = format!("{} {n_out} x {cols}, {bucket} rows", ty.name());
            card::close(&what, &out, &products_in_f64(&m, &rounded), 2e-6);
            let mut wanted = vec![0.0; bucket * n_out];
            reference::matmul::linear(&m.values(), &x, cols, &mut wanted);
            let rounding = match input {
                Input::A8 => 3e-2,
                Input::Bf16 => 4e-3,
                Input::F16 => 5e-4,
                Input::F32 => 2e-6,
            };
            card::close(&format!("{what}, reference"), &out, &wanted, rounding);
        }
    }
    assert!(
        room.counters
            .download(&gpu)
            .unwrap()
            .iter()
            .all(|&c| c == 0)
    );
}

#[test]
fn a_row_has_the_same_bits_whatever_rows_are_beside_it() {
    let Some(gpu) = card::gpu() else { return };
    let card = card_of(&gpu);
    let room = Room::new(&gpu, card);
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
    let launches_of = |m: &Matrix, x: &X, bucket: usize, out: u64, products: Products| {
        let segments = [segment(m, out, n_out, Write::Store)];
        let rows = Rows {
            bucket,
            cols,
            inputs: x.inputs(),
            products,
        };
        matmul::launches_by(card, rows, &segments, room.scratch())
    };
    // Only the K-quants have a second form.
    let forms = |m: &Matrix| match Kind::of(m.ty) {
        Kind::Q4K | Kind::Q5K | Kind::Q6K => vec![Products::Warps, Products::Warpgroups],
        _ => vec![Products::Warps],
    };
    let matrices = types.map(|ty| Matrix::new(&gpu, &mut random, ty, n_out, cols));
    let out = card::poisoned::<f32>(&gpu, 64 * n_out);
    // All units at once: they compile side by side.
    let units: Vec<_> = matrices
        .iter()
        .flat_map(|m| {
            let one = launches_of(m, &alone[0], 1, out.ptr(), Products::Warps);
            let more = together.iter().flat_map(|(bucket, x)| {
                forms(m)
                    .into_iter()
                    .map(|products| launches_of(m, x, *bucket, out.ptr(), products))
            });
            let all = one.into_iter().chain(more.flatten());
            all.map(|l| l.unit).collect::<Vec<_>>()
        })
        .collect();
    let modules = card::modules(&gpu, &units);
    for m in &matrices {
        for (row, x) in alone.iter().enumerate() {
            let at = out.ptr() + (4 * row * n_out) as u64;
            for launch in launches_of(m, x, 1, at, Products::Warps) {
                gpu.run(&modules, &launch).unwrap();
            }
        }
        let single = out.download(&gpu).unwrap();
        for (bucket, x) in &together {
            for products in forms(m) {
                let out = card::poisoned::<f32>(&gpu, bucket * n_out);
                for launch in launches_of(m, x, *bucket, out.ptr(), products) {
                    gpu.run(&modules, &launch).unwrap();
                }
                let what = format!("{} in {bucket} rows by {products:?}", m.ty.name());
                let got = out.download(&gpu).unwrap();
                card::same_bits(&what, &got, &single[..bucket * n_out]);
            }
        }
    }
}

/// One unit of K: every sum is a whole number times scales, so the bits are known.
#[test]
fn whole_number_sums_are_exact() {
    let Some(gpu) = card::gpu() else { return };
    let card = card_of(&gpu);
    let room = Room::new(&gpu, card);
    let mut random = Random::new(3);
    let (n_out, cols, bucket) = (144, 256, 16);
    let x = rows(&mut random, bucket, cols);
    let codes_of = |x: &[f32]| -> (f32, Vec<i64>) {
        let top = x.iter().fold(0.0_f32, |top, v| top.max(v.abs()));
        let factor = 127.0 / top;
        let codes = x.iter().map(|v| (v * factor).round_ties_even() as i64);
        (top * (1.0 / 127.0), codes.collect())
    };
    for ty in [QuantType::Q4_K, QuantType::Q5_K] {
        let m = Matrix::new(&gpu, &mut random, ty, n_out, cols);
        let out = product(&gpu, &room, card, &m, &x, bucket);
        let mut wanted = Vec::new();
        for x in x.chunks_exact(cols) {
            let (d8, u) = codes_of(x);
            for block in m.stored.chunks_exact(ty.row_bytes(cols)) {
                let half = |at: usize| half_of(block[at], block[at + 1]);
                let packed: &[u8; 12] = block[4..16].as_array().unwrap();
                let (mut sum, mut mins) = (0_i64, 0_i64);
                for (k, u) in u.iter().enumerate() {
                    let (scale, min) = scale_and_min(packed, k / 32);
                    let five = ty == QuantType::Q5_K;
                    let nibbles = if five { 48 } else { 16 };
                    let low = block[nibbles + k / 64 * 32 + k % 32] >> (k / 32 % 2 * 4) & 15;
                    let high = if five {
                        block[16 + k % 32] >> (k / 32) & 1
                    } else {
                        0
                    };
                    sum += i64::from(scale) * i64::from(low | high << 4) * u;
                    mins += i64::from(min) * u;
                }
                let v = half(0).mul_add(sum as f32, -(half(2) * mins as f32));
                wanted.push(d8.mul_add(v, 0.0));
            }
        }
        card::same_bits(ty.name(), &out, &wanted);
    }
    let m = Matrix::new(&gpu, &mut random, QuantType::Q6_K, n_out, cols);
    let out = product(&gpu, &room, card, &m, &x, bucket);
    let mut wanted = Vec::new();
    for x in x.chunks_exact(cols) {
        let (d8, u) = codes_of(x);
        for block in m.stored.chunks_exact(210) {
            let mut sum = 0_i64;
            for (k, u) in u.iter().enumerate() {
                let (half, q, l) = (k / 128, k % 128 / 32, k % 32);
                let low = block[64 * half + l + 32 * (q % 2)] >> (4 * (q / 2)) & 15;
                let code = low | (block[128 + 32 * half + l] >> (2 * q) & 3) << 4;
                let scale = block[192 + k / 16].cast_signed();
                sum += i64::from(scale) * (i64::from(code) - 32) * u;
            }
            let v = (0.25 * half_of(block[208], block[209])) * (4 * sum) as f32;
            wanted.push(d8.mul_add(v, 0.0));
        }
    }
    card::same_bits("Q6_K", &out, &wanted);
}

fn half_of(low: u8, high: u8) -> f32 {
    let mut value = [0.0];
    dequantize_row(QuantType::F16, &[low, high], &mut value);
    value[0]
}

#[test]
fn matrices_that_share_an_input_go_together_and_may_add() {
    let Some(gpu) = card::gpu() else { return };
    let card = card_of(&gpu);
    let room = Room::new(&gpu, card);
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
    let matrices = sizes.map(|(ty, n)| Matrix::new(&gpu, &mut random, ty, n, cols));
    let stride = 1300;
    let before = random.normals(bucket * stride, 1.0);
    let out = gpu.upload(&before).unwrap();
    let mut first = 7;
    let mut places = Vec::new();
    let segments: Vec<Segment> = matrices
        .iter()
        .enumerate()
        .map(|(i, m)| {
            let write = if i % 2 == 0 { Write::Add } else { Write::Store };
            let at = out.ptr() + 4 * first as u64;
            places.push(first);
            first += m.rows + 3;
            segment(m, at, stride, write)
        })
        .collect();
    let launches = matmul::launches(
        card,
        bucket,
        cols,
        &segments,
        forms.inputs(),
        room.scratch(),
    );
    assert_eq!(launches.len(), 1, "all go together");
    run(&gpu, &launches);
    let got = out.download(&gpu).unwrap();
    let mut wanted = before.clone();
    for (i, m) in matrices.iter().enumerate() {
        let rounded = activations(Kind::of(m.ty).input(), &x, cols, bucket).rounded;
        let products = products_in_f64(m, &rounded);
        for (row, products) in products.chunks_exact(m.rows).enumerate() {
            for (n, &v) in products.iter().enumerate() {
                let to = &mut wanted[row * stride + places[i] + n];
                *to = if i % 2 == 0 { *to + v } else { v };
            }
        }
    }
    card::close("all segments", &got, &wanted, 2e-6);
    // What lies between them is untouched.
    let gap = places[1] - 1;
    for row in 0..bucket {
        assert_eq!(got[row * stride + gap], before[row * stride + gap]);
    }
}

#[test]
fn a_row_that_is_not_finite_spoils_no_other() {
    let Some(gpu) = card::gpu() else { return };
    let card = card_of(&gpu);
    let room = Room::new(&gpu, card);
    let mut random = Random::new(5);
    let (n_out, cols) = (160, 512);
    for ty in [
        QuantType::Q4_K,
        QuantType::Q6_K,
        QuantType::Q8_0,
        QuantType::BF16,
    ] {
        let m = Matrix::new(&gpu, &mut random, ty, n_out, cols);
        let mut x = rows(&mut random, 8, cols);
        let clean = product(&gpu, &room, card, &m, &x, 8);
        x[3 * cols + 300] = f32::INFINITY;
        x[6 * cols] = f32::NAN;
        let out = product(&gpu, &room, card, &m, &x, 8);
        for row in 0..8 {
            let (out, clean) = (&out[row * n_out..][..n_out], &clean[row * n_out..][..n_out]);
            if matches!(row, 3 | 6) {
                assert!(
                    out.iter().all(|v| !v.is_finite()),
                    "{} row {row}",
                    ty.name()
                );
            } else {
                card::same_bits(ty.name(), out, clean);
            }
        }
    }
}

/// The longest sums and the widest fused launch of the shapes this is built for.
#[test]
fn real_shapes_agree_with_the_reference() {
    let Some(gpu) = card::gpu() else { return };
    let card = card_of(&gpu);
    let room = Room::new(&gpu, card);
    let mut random = Random::new(6);
    for (ty, n_out, cols, bucket) in [
        (QuantType::Q4_K, 144, 17408, 24),
        (QuantType::Q6_K, 5120, 512, 64),
        (QuantType::Q5_K, 10240, 512, 1),
    ] {
        let m = Matrix::new(&gpu, &mut random, ty, n_out, cols);
        let x = rows(&mut random, bucket, cols);
        let out = product(&gpu, &room, card, &m, &x, bucket);
        let rounded = activations(Input::A8, &x, cols, bucket).rounded;
        let what = format!("{} {n_out} x {cols}, {bucket} rows", ty.name());
        card::close(&what, &out, &products_in_f64(&m, &rounded), 5e-6);
    }
}
