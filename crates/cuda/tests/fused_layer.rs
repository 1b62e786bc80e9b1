//! Fused layers match the reference, layer by layer.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]
#![allow(clippy::print_stderr, reason = "a skipped test says so")]

mod fixtures {
    pub mod gpu;
}

use contract::QuantType::{self, BF16, F32, Q4_K, Q5_K, Q6_K, Q8_0};
use contract::quant::{dequantize_row, quantize_row};
use cpu::reference::{activation, matmul::linear, norm::rms};
use cuda::GpuProps;
use cuda::driver::{Buffer, Gpu};
use cuda::launch::Launch;
use cuda::launch::gemm::fused_layer::{
    self, FusedLayerBuffers, FusedLayerConfig, FusedLayerMatrices, FusedLayerNorms,
    FusedLayerWorkspace, FusedMatrix, MAX_ROWS,
};
use cuda::launch::gemm::small_batch::{self, GemmScratch};
use cuda::launch::norm::ActivationBuffers;
use cuda::pack::activations::activations;
use cuda::pack::{self, ActivationFormat, WeightKind};
use fixtures::gpu::Random;

const EPS: f32 = 1e-6;

/// A random matrix on the device and as stored.
struct TestMatrix {
    matrix: FusedMatrix,
    values: Vec<f32>,
    _packed: Buffer<u8>,
}

impl TestMatrix {
    fn new(gpu: &Gpu, random: &mut Random, ty: QuantType, rows: usize, cols: usize) -> TestMatrix {
        let row_bytes = ty.row_bytes(cols);
        let mut stored = vec![0; rows * row_bytes];
        let mut values = vec![0.0; rows * cols];
        let deviation = 0.7 / (cols as f32).sqrt();
        for (bytes, values) in stored
            .chunks_exact_mut(row_bytes)
            .zip(values.chunks_exact_mut(cols))
        {
            quantize_row(ty, &random.normals(cols, deviation), bytes);
            dequantize_row(ty, bytes, values);
        }
        let kind = WeightKind::of(ty);
        let mut packed = vec![0xff; kind.bytes(rows, cols)];
        pack::pack(ty, cols, &stored, &mut packed);
        let packed = gpu.upload(&packed).unwrap();
        let matrix = FusedMatrix {
            kind,
            rows,
            cols,
            weight: packed.ptr(),
        };
        TestMatrix {
            matrix,
            values,
            _packed: packed,
        }
    }

    fn times(&self, x: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; x.len() / self.matrix.cols * self.matrix.rows];
        linear(&self.values, x, self.matrix.cols, &mut out);
        out
    }
}

/// The weight types of a layer.
#[derive(Clone)]
struct Types {
    out: QuantType,
    gate: QuantType,
    down: QuantType,
    /// Type and rows of the next layer's projections.
    next: Vec<(QuantType, usize)>,
}

struct LayerShape {
    hidden: usize,
    ffn: usize,
    mixed: usize,
}

/// GEMMs and norms of one layer.
struct TestLayer {
    out: TestMatrix,
    gate: TestMatrix,
    up: TestMatrix,
    down: TestMatrix,
    next: Vec<TestMatrix>,
    norms: [(Vec<f32>, Buffer<f32>); 2],
}

impl TestLayer {
    fn new(gpu: &Gpu, random: &mut Random, shape: &LayerShape, types: &Types) -> TestLayer {
        let mut matrix = |ty, rows, cols| TestMatrix::new(gpu, random, ty, rows, cols);
        let &LayerShape { hidden, ffn, mixed } = shape;
        let (out, gate) = (
            matrix(types.out, hidden, mixed),
            matrix(types.gate, ffn, hidden),
        );
        let (up, down) = (
            matrix(types.gate, ffn, hidden),
            matrix(types.down, hidden, ffn),
        );
        let next = types.next.iter().map(|&(ty, n)| matrix(ty, n, hidden));
        let next = next.collect();
        let norms = [(); 2].map(|()| {
            let weights: Vec<f32> = (0..hidden).map(|_| 0.5 + random.unit()).collect();
            let device = gpu.upload(&weights).unwrap();
            (weights, device)
        });
        TestLayer {
            out,
            gate,
            up,
            down,
            next,
            norms,
        }
    }

    fn kinds(&self) -> Vec<WeightKind> {
        let own = [&self.out, &self.gate, &self.down];
        own.into_iter()
            .chain(&self.next)
            .map(|w| w.matrix.kind)
            .collect()
    }

    /// Reference residual stream and projections after the layer.
    fn expected(&self, x: &[f32], y: &[f32], hidden: usize) -> (Vec<f32>, Vec<Vec<f32>>) {
        let normed = |x: &[f32], weight: &[f32]| {
            let mut out = vec![0.0; x.len()];
            for (x, out) in x.chunks_exact(hidden).zip(out.chunks_exact_mut(hidden)) {
                rms(x, weight, EPS, out);
            }
            out
        };
        let mut x = x.to_vec();
        activation::add(&mut x, &self.out.times(y));
        let n = normed(&x, &self.norms[0].0);
        let (gate, up) = (self.gate.times(&n), self.up.times(&n));
        let mut h = vec![0.0; gate.len()];
        activation::swiglu(&gate, &up, &mut h);
        activation::add(&mut x, &self.down.times(&h));
        let n = normed(&x, &self.norms[1].0);
        let next = self.next.iter().map(|w| w.times(&n)).collect();
        (x, next)
    }
}

/// Device memory for fused layers of one bucket.
struct FusedLayerFixture {
    card: GpuProps,
    bucket: usize,
    hidden: usize,
    x: Buffer<f32>,
    y: Buffer<u8>,
    outs: Vec<Buffer<f32>>,
    memory: FusedLayerBuffers,
    scratch_memory: Buffer<u8>,
    workspace: Buffer<u8>,
    _rest: Vec<Buffer<u8>>,
}

impl FusedLayerFixture {
    /// Rows `x` and their mixer outputs `y`.
    fn new(
        gpu: &Gpu,
        shape: &LayerShape,
        layer: &TestLayer,
        (x, y): (&[f32], &[f32]),
    ) -> FusedLayerFixture {
        let hidden = shape.hidden;
        let bucket = x.len() / hidden;
        let card = card_of(gpu);
        let mut rest = Vec::new();
        let mut poisoned = |bytes: usize| {
            rest.push(fixtures::gpu::poisoned::<u8>(gpu, bytes));
            rest.last().unwrap().ptr()
        };
        let mut halves = |width| poisoned(ActivationFormat::F16.bytes(bucket, width));
        let next = ActivationBuffers {
            f16: halves(hidden),
            f32: poisoned(4 * bucket * hidden),
        };
        let squares = [(); 2].map(|()| poisoned(fused_layer::square_sum_bytes(bucket, hidden)));
        let scales: Vec<f32> = x
            .chunks_exact(hidden)
            .map(|x| {
                let sum: f32 = x.iter().map(|x| x * x).sum();
                1.0 / (sum / hidden as f32 + EPS).sqrt()
            })
            .collect();
        let bytes: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        let scales = gpu.upload(&bytes).unwrap();
        let scratch_memory: Buffer<u8> = gpu
            .filled(small_batch::scratch_bytes(card, 2 * MAX_ROWS), 0)
            .unwrap();
        let own_bytes = FusedLayerWorkspace::bytes(hidden, shape.ffn);
        let own: Buffer<u8> = gpu.filled(own_bytes, 0).unwrap();
        let x = gpu.upload(x).unwrap();
        let y = activations(ActivationFormat::F16, y, shape.mixed, bucket).bytes;
        let memory = FusedLayerBuffers {
            residual: x.ptr(),
            workspace: FusedLayerWorkspace::at(own.ptr(), hidden),
            next,
            squares,
            scales: scales.ptr(),
            scratch: GemmScratch(scratch_memory.ptr()),
        };
        rest.push(scales);
        let outs = layer.next.iter();
        FusedLayerFixture {
            card,
            bucket,
            hidden,
            x,
            y: gpu.upload(&y).unwrap(),
            outs: outs
                .map(|w| fixtures::gpu::poisoned(gpu, bucket * w.matrix.rows))
                .collect(),
            memory,
            scratch_memory,
            workspace: own,
            _rest: rest,
        }
    }

    fn launch(&self, form: FusedLayerConfig, layer: &TestLayer) -> Launch {
        let next: Vec<_> = layer
            .next
            .iter()
            .zip(&self.outs)
            .map(|(w, out)| (w.matrix, out.ptr()))
            .collect();
        let products = FusedLayerMatrices {
            out: layer.out.matrix,
            gate: layer.gate.matrix,
            up: layer.up.matrix,
            down: layer.down.matrix,
            next: &next,
        };
        let norms = FusedLayerNorms {
            ffn: layer.norms[0].1.ptr(),
            next: if next.is_empty() {
                0
            } else {
                layer.norms[1].1.ptr()
            },
            eps: EPS,
        };
        let context = (norms, &self.memory);
        fused_layer::launch(
            self.card,
            self.bucket,
            form,
            &products,
            self.y.ptr(),
            context,
        )
    }

    /// Runs the fused layer `times` times.
    fn run(
        &self,
        gpu: &Gpu,
        form: FusedLayerConfig,
        layer: &TestLayer,
        times: usize,
    ) -> (Vec<f32>, Vec<Vec<f32>>) {
        let launch = self.launch(form, layer);
        let modules = fixtures::gpu::modules(gpu, std::slice::from_ref(&launch.unit));
        for _ in 0..times {
            gpu.run(&modules, &launch).unwrap();
        }
        let left = self.scratch_memory.download(gpu).unwrap();
        assert!(
            left.iter().all(|&b| b == 0),
            "the fused layer left nonzero sums"
        );
        let own = self.workspace.download(gpu).unwrap();
        let halves = &own[FusedLayerWorkspace::bytes(0, 0)..];
        assert!(
            halves.iter().all(|&b| b == 0),
            "the fused layer left nonzero f16 rows"
        );
        let outs = self.outs.iter().map(|out| out.download(gpu).unwrap());
        (self.x.download(gpu).unwrap(), outs.collect())
    }
}

/// A GPU with fused-layer kernels.
fn open_sm90() -> Option<Gpu> {
    let gpu = fixtures::gpu::gpu()?;
    if gpu.arch().number == 90 {
        return Some(gpu);
    }
    eprintln!(
        "SKIPPED: chains are for compute capability 9.0, this is {}",
        gpu.arch()
    );
    None
}

fn card_of(gpu: &Gpu) -> GpuProps {
    gpu.info().props()
}

fn form(gpu: &Gpu, layer: &TestLayer) -> FusedLayerConfig {
    FusedLayerConfig::new(card_of(gpu), MAX_ROWS, &layer.kinds()).unwrap()
}

const SMALL: LayerShape = LayerShape {
    hidden: 512,
    ffn: 1280,
    mixed: 768,
};
/// Row counts that are not whole tiles, and K that is not whole units.
const ODD: LayerShape = LayerShape {
    hidden: 352,
    ffn: 736,
    mixed: 416,
};

fn k_quants() -> Types {
    Types {
        out: Q5_K,
        gate: Q4_K,
        down: Q6_K,
        next: vec![(Q5_K, 640), (Q4_K, 130), (F32, 20), (F32, 12)],
    }
}

/// Rows with a common part and outliers, and possible mixer outputs.
fn inputs(random: &mut Random, shape: &LayerShape, rows: usize) -> (Vec<f32>, Vec<f32>) {
    let x = (0..rows * shape.hidden).map(|i| {
        let outlier = if i % shape.hidden == 5 { 30.0 } else { 1.0 };
        random.normal() * outlier
    });
    let x = x.collect();
    (x, random.normals(rows * shape.mixed, 0.6))
}

fn agrees(
    gpu: &Gpu,
    random: &mut Random,
    (what, shape, types): (&str, &LayerShape, &Types),
    rows: usize,
) {
    let layer = TestLayer::new(gpu, random, shape, types);
    check_layer_close(gpu, random, (what, shape, &layer), rows);
}

fn check_layer_close(
    gpu: &Gpu,
    random: &mut Random,
    (what, shape, layer): (&str, &LayerShape, &TestLayer),
    rows: usize,
) {
    let (x, y) = inputs(random, shape, rows);
    let fixture = FusedLayerFixture::new(gpu, shape, layer, (&x, &y));
    let (got, next) = fixture.run(gpu, form(gpu, layer), layer, 1);
    let (expected, expected_next) = layer.expected(&x, &y, shape.hidden);
    let what = format!("{what}, {rows} rows");
    fixtures::gpu::close(&format!("{what}: residual"), &got, &expected, 1.5e-3);
    for (i, (got, expected)) in next.iter().zip(&expected_next).enumerate() {
        fixtures::gpu::close(&format!("{what}: projection {i}"), got, expected, 4e-3);
    }
}

/// One weight kind for all matrices.
fn of(ty: QuantType, next: Vec<(QuantType, usize)>) -> Types {
    Types {
        out: ty,
        gate: ty,
        down: ty,
        next,
    }
}

#[test]
fn fused_layer_of_k_quants_matches_reference() {
    let Some(gpu) = open_sm90() else { return };
    let mut random = Random::new(1);
    for rows in [1, 24, 32, 40, 64] {
        agrees(&gpu, &mut random, ("K-quants", &SMALL, &k_quants()), rows);
    }
}

#[test]
fn fused_layer_of_8_bit_weights_matches_reference() {
    let Some(gpu) = open_sm90() else { return };
    let bytes = of(Q8_0, vec![(Q8_0, 300), (F32, 4)]);
    for rows in [1, 16, 40] {
        let mut random = Random::new(6);
        agrees(&gpu, &mut random, ("Q8_0, odd", &ODD, &bytes), rows);
    }
}

#[test]
fn fused_layer_of_16_bit_weights_matches_reference() {
    let Some(gpu) = open_sm90() else { return };
    let halves = of(BF16, vec![(BF16, 33), (BF16, 257)]);
    for rows in [1, 16] {
        let mut random = Random::new(7);
        agrees(&gpu, &mut random, ("BF16, odd", &ODD, &halves), rows);
    }
}

#[test]
fn last_fused_layer_matches_reference() {
    let Some(gpu) = open_sm90() else { return };
    let mut random = Random::new(8);
    let last = of(Q4_K, Vec::new());
    agrees(&gpu, &mut random, ("the last", &SMALL, &last), 8);
}

/// Shapes whose tiles spread over many blocks, and whose blocks have private tiles.
#[test]
fn fused_layer_of_real_widths_matches_reference() {
    let Some(gpu) = open_sm90() else { return };
    let mut random = Random::new(2);
    let shape = LayerShape {
        hidden: 5120,
        ffn: 2048,
        mixed: 1024,
    };
    let mut types = k_quants();
    types.next = vec![(Q5_K, 2048), (Q4_K, 1024), (F32, 48), (F32, 48)];
    for rows in [1, 8] {
        agrees(&gpu, &mut random, ("real", &shape, &types), rows);
    }
}

/// Shapes whose gate has `own` tiles per block and four more, so that some blocks have no unit of
/// those. The last tile lacks `missing` rows.
fn private_tile_shape(gpu: &Gpu, own: usize, missing: usize) -> LayerShape {
    let blocks = card_of(gpu).sm_count;
    LayerShape {
        hidden: 512 / own,
        ffn: 128 * (own * blocks + 4) - missing,
        mixed: 256,
    }
}

#[test]
fn fused_layer_of_private_tiles_matches_reference() {
    let Some(gpu) = open_sm90() else { return };
    let mut random = Random::new(12);
    let bytes = of(Q8_0, vec![(Q8_0, 300)]);
    for (types, own, missing, rows) in [
        (&k_quants(), 1, 0, [1, 24]),
        (&k_quants(), 2, 0, [8, 64]),
        (&bytes, 1, 32, [1, 40]),
    ] {
        let shape = private_tile_shape(&gpu, own, missing);
        let layer = TestLayer::new(&gpu, &mut random, &shape, types);
        for rows in rows {
            let what = format!("{own} tiles a block");
            check_layer_close(&gpu, &mut random, (&what, &shape, &layer), rows);
        }
    }
}

/// Blocks without units pass all GEMM phases as soon as these open, and must still terminate.
#[test]
fn fused_layer_with_idle_blocks_terminates() {
    let Some(gpu) = open_sm90() else { return };
    let mut random = Random::new(10);
    let shape = LayerShape {
        hidden: 256,
        ffn: 256,
        mixed: 256,
    };
    for types in [of(Q4_K, vec![(Q4_K, 256)]), of(Q4_K, Vec::new())] {
        let layer = TestLayer::new(&gpu, &mut random, &shape, &types);
        let (x, y) = inputs(&mut random, &shape, 1);
        let fixture = FusedLayerFixture::new(&gpu, &shape, &layer, (&x, &y));
        fixture.run(&gpu, form(&gpu, &layer), &layer, 3000);
    }
}

#[test]
fn row_bits_do_not_depend_on_the_other_rows() {
    let Some(gpu) = open_sm90() else { return };
    check_row_bits(&gpu, &SMALL);
}

#[test]
fn row_bits_of_private_tiles_do_not_depend_on_the_other_rows() {
    let Some(gpu) = open_sm90() else { return };
    check_row_bits(&gpu, &private_tile_shape(&gpu, 1, 0));
}

fn check_row_bits(gpu: &Gpu, shape: &LayerShape) {
    let mut random = Random::new(3);
    let layer = TestLayer::new(gpu, &mut random, shape, &k_quants());
    let (x, y) = inputs(&mut random, shape, MAX_ROWS);
    let form = form(gpu, &layer);
    let run = |first: usize, rows: usize| {
        let part = (
            &x[first * shape.hidden..][..rows * shape.hidden],
            &y[first * shape.mixed..][..rows * shape.mixed],
        );
        FusedLayerFixture::new(gpu, shape, &layer, part).run(gpu, form, &layer, 2)
    };
    let (together, next) = run(0, MAX_ROWS);
    for (first, rows) in [(31, 1), (16, 8), (8, 16), (8, 24), (3, 32), (16, 48)] {
        let (alone, next_alone) = run(first, rows);
        let what = format!("{rows} rows from {first} on");
        let of = |all: &[f32], width: usize| all[first * width..][..rows * width].to_vec();
        fixtures::gpu::same_bits(&what, &alone, &of(&together, shape.hidden));
        for (w, (alone, all)) in layer.next.iter().zip(next_alone.iter().zip(&next)) {
            fixtures::gpu::same_bits(&what, alone, &of(all, w.matrix.rows));
        }
    }
}

/// One row and 24 rows use different GEMM forms. Racecheck inspects the first launches
/// (harness/card/card.sh).
#[test]
fn fused_layer_is_deterministic() {
    let Some(gpu) = open_sm90() else { return };
    check_repeated_bits(&gpu, &SMALL);
}

#[test]
fn fused_layer_of_private_tiles_is_deterministic() {
    let Some(gpu) = open_sm90() else { return };
    check_repeated_bits(&gpu, &private_tile_shape(&gpu, 1, 0));
}

fn check_repeated_bits(gpu: &Gpu, shape: &LayerShape) {
    let mut random = Random::new(11);
    let layer = TestLayer::new(gpu, &mut random, shape, &k_quants());
    let form = form(gpu, &layer);
    let inputs = [1, 24].map(|rows| inputs(&mut random, shape, rows));
    let run = || {
        inputs.each_ref().map(|(x, y)| {
            let fixture = FusedLayerFixture::new(gpu, shape, &layer, (x, y));
            fixture.run(gpu, form, &layer, 1)
        })
    };
    let first = run();
    for _ in 0..3 {
        for ((x, next), (x_first, next_first)) in run().iter().zip(&first) {
            fixtures::gpu::same_bits("residual", x, x_first);
            for (a, b) in next.iter().zip(next_first) {
                fixtures::gpu::same_bits("projection", a, b);
            }
        }
    }
}

#[test]
fn non_finite_row_does_not_affect_other_rows() {
    let Some(gpu) = open_sm90() else { return };
    let mut random = Random::new(4);
    let layer = TestLayer::new(&gpu, &mut random, &SMALL, &k_quants());
    let (mut x, mut y) = inputs(&mut random, &SMALL, 8);
    let form = form(&gpu, &layer);
    let clean = FusedLayerFixture::new(&gpu, &SMALL, &layer, (&x, &y)).run(&gpu, form, &layer, 1);
    x[2 * SMALL.hidden + 100] = f32::NAN;
    x[4 * SMALL.hidden] = f32::INFINITY;
    y[6 * SMALL.mixed + 3] = f32::NAN;
    let (_, spoilt) =
        FusedLayerFixture::new(&gpu, &SMALL, &layer, (&x, &y)).run(&gpu, form, &layer, 1);
    for (w, (clean, spoilt)) in layer.next.iter().zip(clean.1.iter().zip(&spoilt)) {
        let width = w.matrix.rows;
        for row in 0..8 {
            let (clean, spoilt) = (
                &clean[row * width..][..width],
                &spoilt[row * width..][..width],
            );
            match row {
                2 | 4 | 6 => assert!(spoilt.iter().all(|v| !v.is_finite()), "row {row}"),
                _ => fixtures::gpu::same_bits("a clean row", spoilt, clean),
            }
        }
    }
}

/// f16 rows are scaled by the scale before the GEMM, and a GEMM may change a row's magnitude by
/// far.
#[test]
fn row_with_outliers_keeps_its_precision() {
    let Some(gpu) = open_sm90() else { return };
    let mut random = Random::new(5);
    let layer = TestLayer::new(&gpu, &mut random, &SMALL, &k_quants());
    for (before, mixed) in [(1e-3, 3.0), (1.0, 300.0), (1e3, 1e-3)] {
        let x = random.normals(8 * SMALL.hidden, before);
        let y = random.normals(8 * SMALL.mixed, mixed);
        let fixture = FusedLayerFixture::new(&gpu, &SMALL, &layer, (&x, &y));
        let (got, next) = fixture.run(&gpu, form(&gpu, &layer), &layer, 1);
        let (expected, expected_next) = layer.expected(&x, &y, fixture.hidden);
        let what = format!("from {before} by {mixed}");
        fixtures::gpu::close(&what, &got, &expected, 1.5e-3);
        for (got, expected) in next.iter().zip(&expected_next) {
            fixtures::gpu::close(&what, got, expected, 4e-3);
        }
    }
}
