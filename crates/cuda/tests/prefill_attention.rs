//! Prefill attention matches the reference over the stored bytes.

#![allow(clippy::unwrap_used, reason = "these are tests")]

mod fixtures {
    pub mod attention;
    pub mod gpu;
    pub mod step;
}

use contract::KvFormat;
use contract::quant::hadamard::rotate_inverse;
use cpu::reference::{activation, attention};
use cuda::GpuProps;
use cuda::compile::Modules;
use cuda::launch::attention::{Shape, prefill};
use cuda::launch::gemm::panels::{ChunkRows, Panels, PrefillActivations};
use cuda::select::prefill_attention;
use fixtures::attention::{AttentionFixture, codecs, shape, shapes};
use fixtures::gpu::{Random, close, poisoned, same_bits};
use fixtures::step::{KernelDevice, chunk};
use half::f16;

/// The device's properties, with and without WGMMA.
fn gpus(gpu: &KernelDevice) -> Vec<GpuProps> {
    let props = |has_wgmma| GpuProps {
        has_wgmma,
        ..gpu.info().props()
    };
    if gpu.info().props().has_wgmma {
        vec![props(true), props(false)]
    } else {
        vec![props(false)]
    }
}

/// The kernels of several shapes, compiled in parallel.
fn compiled(gpu: &KernelDevice, shapes: &[Shape]) -> Modules {
    let cache = AttentionFixture::new(gpu, &mut Random::new(1), shapes[0], 1, 1).cache();
    let out = PrefillActivations { panels: 1, f32: 1 };
    let launch = |(props, shape)| {
        prefill(
            prefill_attention(shape, props).kernel,
            shape,
            ChunkRows { header: 1, rows: 1 },
            1,
            cache,
            out,
        )
    };
    let every = gpus(gpu)
        .into_iter()
        .flat_map(|props| shapes.iter().map(move |shape| (props, shape)));
    let mut units: Vec<_> = every.map(|one| launch(one).unit).collect();
    units.sort();
    units.dedup();
    fixtures::gpu::modules(gpu, &units)
}

/// f32 queries with gates, of deviation 1.5.
fn queries(random: &mut Random, shape: &Shape, rows: usize) -> Vec<f32> {
    random.normals(rows * shape.n_heads * shape.q_stride(), 1.5)
}

/// Attention of rows on the device. Returns f32 rows and the panels' rows.
fn on_gpu(
    (gpu, modules, props): (&KernelDevice, &Modules, GpuProps),
    fixture: &AttentionFixture,
    slot: usize,
    committed: usize,
    q: &[f32],
) -> [Vec<f32>; 2] {
    let shape = &fixture.shape;
    let (q_width, width) = (
        shape.n_heads * shape.q_stride(),
        shape.n_heads * shape.head_dim,
    );
    let n = q.len() / q_width;
    let cap = n + 67;
    let header = gpu
        .upload(&chunk(slot, committed, &vec![0; n], &[]))
        .unwrap();
    let mut queries = poisoned::<f32>(gpu, cap * q_width);
    queries.upload(gpu, q).unwrap();
    let y = poisoned::<f32>(gpu, cap * width);
    let panels = poisoned::<u16>(gpu, Panels::bytes(cap, width) / 2);
    let out = PrefillActivations {
        panels: panels.ptr(),
        f32: y.ptr(),
    };
    let chunk = ChunkRows {
        header: header.ptr(),
        rows: cap,
    };
    let launch = prefill(
        prefill_attention(shape, props).kernel,
        shape,
        chunk,
        queries.ptr(),
        fixture.cache(),
        out,
    );
    gpu.run(modules, &launch).unwrap();
    if let Err(error) = gpu.sync() {
        panic!("{n} rows at {committed} of {shape:?}, {props:?}: {error}");
    }
    let y = y.download(gpu).unwrap();
    assert!(
        y[n * width..].iter().all(|v| v.is_nan()),
        "rows beyond the chunk were written"
    );
    let panels = panels.download(gpu).unwrap();
    let rows = Panels::new(0, cap).rows;
    let at =
        |row: usize, k: usize| (k / 64 * rows + row) * 64 + ((k % 64 / 8) ^ (row % 8)) * 8 + k % 8;
    let held = |row: usize| -> Vec<f32> {
        (0..width)
            .map(|k| f16::from_bits(panels[at(row, k)]).to_f32())
            .collect()
    };
    assert!((n..rows).all(|row| held(row).iter().all(|v| v.is_nan())));
    [y[..n * width].to_vec(), (0..n).flat_map(held).collect()]
}

/// The reference's row `row`.
fn expected(
    fixture: &AttentionFixture,
    slot: usize,
    committed: usize,
    q: &[f32],
    row: usize,
) -> Vec<f32> {
    let shape = &fixture.shape;
    let (dim, stride) = (shape.head_dim, shape.q_stride());
    let mut out = vec![0.0; shape.n_heads * dim];
    for (h, out) in out.chunks_mut(dim).enumerate() {
        let head = &q[(row * shape.n_heads + h) * stride..][..stride];
        let load = |plane: usize| -> Vec<f32> {
            (0..=committed + row)
                .flat_map(|p| fixture.load(plane, slot, p, h * shape.n_kv_heads / shape.n_heads))
                .collect()
        };
        attention::attend(&head[..dim], &load(0), &load(2), shape.scale, out);
        if codecs(shape)[1].is_rotated() {
            rotate_inverse(out);
        }
        if shape.gate {
            activation::sigmoid_gate(out, &head[dim..]);
        }
    }
    out
}

fn check(
    (gpu, modules): (&KernelDevice, &Modules),
    random: &mut Random,
    shape: Shape,
    (rows, committed): (usize, usize),
) {
    let slot = 1;
    let mut fixture = AttentionFixture::new(gpu, random, shape, 2, committed + rows);
    fixture.commit_random(random, slot, 0..committed + rows);
    fixture.upload(gpu);
    let q = queries(random, &shape, rows);
    for props in gpus(gpu) {
        check_on((gpu, modules, props), &fixture, slot, committed, &q);
    }
}

fn check_on(
    on: (&KernelDevice, &Modules, GpuProps),
    fixture: &AttentionFixture,
    slot: usize,
    committed: usize,
    q: &[f32],
) {
    let shape = fixture.shape;
    let rows = q.len() / (shape.n_heads * shape.q_stride());
    let found = on_gpu(on, fixture, slot, committed, q);
    let width = shape.n_heads * shape.head_dim;
    let sample = (0..rows)
        .step_by((rows * (committed + rows) / 3000).max(1))
        .chain([rows - 1]);
    let exact = shape.k == KvFormat::F32 || shape.v == KvFormat::F32;
    for row in sample {
        let expected = expected(fixture, slot, committed, q, row);
        let what = format!("{rows} rows at {committed}, row {row}, of {shape:?}");
        let [plain, panels] = [0, 1].map(|i| &found[i][row * width..][..width]);
        // Queries, probabilities and values are f16: 2^-12 each, unless the cache adds more.
        close(&what, plain, &expected, if exact { 5e-6 } else { 2e-3 });
        close(&what, panels, &expected, if exact { 4e-4 } else { 2e-3 });
    }
}

#[test]
fn prefill_attention_matches_reference() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(11);
    let of = |format| {
        let mut all = shapes(format, format);
        if format == KvFormat::Tq3_0 {
            all.retain(|shape| shape.head_dim >= 128);
        }
        all
    };
    let same: Vec<Shape> = KvFormat::ALL.into_iter().flat_map(of).collect();
    let mixed: Vec<Shape> = [
        (KvFormat::Q8_0, KvFormat::Q4_0),
        (KvFormat::F16, KvFormat::Q8_0),
        (KvFormat::F32, KvFormat::Q8_0),
        (KvFormat::Q4_0, KvFormat::F32),
        (KvFormat::Bf16, KvFormat::Q5_1),
        (KvFormat::Q5_0, KvFormat::Q4_1),
    ]
    .map(|(k, v)| shape((4, 2, 64, 16), true, true, k, v))
    .into_iter()
    .chain(
        [
            (KvFormat::Q8_0, KvFormat::Q4_0),
            (KvFormat::F16, KvFormat::Tq3_0),
            (KvFormat::Tq3_0, KvFormat::Q8_0),
            (KvFormat::Q5_1, KvFormat::Bf16),
        ]
        .map(|(k, v)| shape((6, 1, 256, 64), true, true, k, v)),
    )
    .collect();
    let modules = compiled(&gpu, &[same.clone(), mixed.clone()].concat());
    for &shape in &same {
        for (rows, committed) in [(65, 0), (128, 192), (1, 255), (130, 77)] {
            check((&gpu, &modules), &mut random, shape, (rows, committed));
        }
    }
    for &shape in &mixed {
        check((&gpu, &modules), &mut random, shape, (127, 300));
    }
}

#[test]
fn prefill_attention_at_long_context_matches_reference() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(12);
    for format in [
        KvFormat::F16,
        KvFormat::Q8_0,
        KvFormat::Q5_1,
        KvFormat::Q4_0,
        KvFormat::Tq3_0,
    ] {
        let shape = shape((2, 1, 256, 64), true, true, format, format);
        let modules = compiled(&gpu, &[shape]);
        check((&gpu, &modules), &mut random, shape, (70, 131_072 - 6));
    }
}

#[test]
fn prefill_attention_row_bits_do_not_depend_on_the_chunk() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(13);
    let formats = [KvFormat::F16, KvFormat::Q8_0, KvFormat::Q5_1, KvFormat::F32];
    let heads = [(4, 2, 64, 16), (3, 1, 256, 64)];
    let every: Vec<Shape> = formats
        .iter()
        .flat_map(|&f| heads.map(|heads| shape(heads, true, true, f, f)))
        .collect();
    let modules = compiled(&gpu, &every);
    for shape in every {
        let (rows, committed) = (200, 64);
        let mut fixture = AttentionFixture::new(&gpu, &mut random, shape, 1, committed + rows);
        fixture.commit_random(&mut random, 0, 0..committed + rows);
        fixture.upload(&gpu);
        let q = queries(&mut random, &shape, rows);
        let (q_width, width) = (q.len() / rows, shape.n_heads * shape.head_dim);
        for props in gpus(&gpu) {
            let on = (&gpu, &modules, props);
            let [whole, _] = on_gpu(on, &fixture, 0, committed, &q);
            for (first, end) in [(0, 64), (64, 200), (7, 9), (100, 165)] {
                let q = &q[first * q_width..end * q_width];
                let [part, _] = on_gpu(on, &fixture, 0, committed + first, q);
                same_bits(
                    "a part of a chunk",
                    &part,
                    &whole[first * width..end * width],
                );
            }
        }
    }
}

#[test]
fn nan_key_beyond_the_mask_has_no_effect() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(14);
    for (format, dim) in [
        (KvFormat::F16, 64),
        (KvFormat::F16, 256),
        (KvFormat::F32, 64),
    ] {
        let shape = shape((2, 2, dim, 16), false, false, format, format);
        let modules = compiled(&gpu, &[shape]);
        let mut fixture = AttentionFixture::new(&gpu, &mut random, shape, 1, 300);
        fixture.commit_random(&mut random, 0, 0..300);
        for position in [0, 5, 130] {
            fixture.store(0, (0, position, 1), &vec![f32::NAN; dim]);
        }
        fixture.upload(&gpu);
        let q = queries(&mut random, &shape, 300);
        for props in gpus(&gpu) {
            let [found, _] = on_gpu((&gpu, &modules, props), &fixture, 0, 0, &q);
            for row in [0, 1, 5, 131, 299] {
                let found = &found[row * 2 * dim..][..2 * dim];
                close("row", found, &expected(&fixture, 0, 0, &q, row), 2e-3);
            }
        }
    }
}
