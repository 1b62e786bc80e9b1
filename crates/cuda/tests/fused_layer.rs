//! Fused layers match the reference, layer by layer.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod fixtures {
    pub mod fused_layer;
    pub mod gpu;
}

use contract::QuantType::{self, BF16, F32, Q4_K, Q5_K, Q6_K, Q8_0};
use cuda::driver::Gpu;
use cuda::launch::gemm::fused_layer::MAX_ROWS;
use fixtures::fused_layer::{
    FusedLayerFixture, LayerShape, LayerTypes, TestLayer, form, gpu_props,
};
use fixtures::gpu::{Random, gpu};

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

fn k_quants() -> LayerTypes {
    LayerTypes {
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
    (what, shape, types): (&str, &LayerShape, &LayerTypes),
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
fn of(ty: QuantType, next: Vec<(QuantType, usize)>) -> LayerTypes {
    LayerTypes {
        out: ty,
        gate: ty,
        down: ty,
        next,
    }
}

#[test]
fn fused_layer_of_k_quants_matches_reference() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random::new(1);
    for rows in [1, 24, 32, 40, 64] {
        agrees(&gpu, &mut random, ("K-quants", &SMALL, &k_quants()), rows);
    }
}

#[test]
fn fused_layer_of_8_bit_weights_matches_reference() {
    let Some(gpu) = gpu() else { return };
    let bytes = of(Q8_0, vec![(Q8_0, 300), (F32, 4)]);
    for rows in [1, 16, 40] {
        let mut random = Random::new(6);
        agrees(&gpu, &mut random, ("Q8_0, odd", &ODD, &bytes), rows);
    }
}

#[test]
fn fused_layer_of_16_bit_weights_matches_reference() {
    let Some(gpu) = gpu() else { return };
    let halves = of(BF16, vec![(BF16, 33), (BF16, 257)]);
    for rows in [1, 16] {
        let mut random = Random::new(7);
        agrees(&gpu, &mut random, ("BF16, odd", &ODD, &halves), rows);
    }
}

#[test]
fn last_fused_layer_matches_reference() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random::new(8);
    let last = of(Q4_K, Vec::new());
    agrees(&gpu, &mut random, ("the last", &SMALL, &last), 8);
}

/// Shapes whose tiles spread over many blocks, and whose blocks have data-parallel tiles.
#[test]
fn fused_layer_of_real_widths_matches_reference() {
    let Some(gpu) = gpu() else { return };
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
fn data_parallel_shape(gpu: &Gpu, own: usize, missing: usize) -> LayerShape {
    let blocks = gpu_props(gpu).sm_count;
    LayerShape {
        hidden: 512 / own,
        ffn: 128 * (own * blocks + 4) - missing,
        mixed: 256,
    }
}

#[test]
fn fused_layer_of_data_parallel_tiles_matches_reference() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random::new(12);
    let bytes = of(Q8_0, vec![(Q8_0, 300)]);
    for (types, own, missing, rows) in [
        (&k_quants(), 1, 0, [1, 24]),
        (&k_quants(), 2, 0, [8, 64]),
        (&bytes, 1, 32, [1, 40]),
    ] {
        let shape = data_parallel_shape(&gpu, own, missing);
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
    let Some(gpu) = gpu() else { return };
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
    let Some(gpu) = gpu() else { return };
    check_row_bits(&gpu, &SMALL);
}

#[test]
fn row_bits_of_data_parallel_tiles_do_not_depend_on_the_other_rows() {
    let Some(gpu) = gpu() else { return };
    check_row_bits(&gpu, &data_parallel_shape(&gpu, 1, 0));
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
/// (harness/gpu/run.sh).
#[test]
fn fused_layer_is_deterministic() {
    let Some(gpu) = gpu() else { return };
    check_repeated_bits(&gpu, &SMALL);
}

#[test]
fn fused_layer_of_data_parallel_tiles_is_deterministic() {
    let Some(gpu) = gpu() else { return };
    check_repeated_bits(&gpu, &data_parallel_shape(&gpu, 1, 0));
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
    let Some(gpu) = gpu() else { return };
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
    let Some(gpu) = gpu() else { return };
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
