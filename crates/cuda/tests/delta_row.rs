//! A delta layer of a step of one row in one launch: the bits of the launches that it stands for.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod card;
mod delta_world;

use card::Random;
use contract::HeadMap;
use cuda::driver::Buffer;
use cuda::launch::Launch;
use cuda::launch::delta::norm::gated_norm;
use cuda::launch::delta::{Inputs, Layer, Out, Rows, Shape, Source, tree as steps};
use cuda::launch::norm::Out as Forms;
use delta_world::{Device, Projected, World, chain, shapes};

/// What a layer leaves: f32 rows, halves, and the factors of all slots.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    f32: Vec<u32>,
    f16: Vec<u8>,
    factors: Vec<u32>,
}

/// Bits, every NaN being the same.
fn bits(values: &[f32]) -> Vec<u32> {
    let one = |x: &f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
    values.iter().map(one).collect()
}

/// Runs `launches` of the last layer of a fresh world on a step of one row in slot 1.
fn run(
    gpu: &Device,
    shape: Shape,
    projected: &Projected,
    launches: impl Fn(u64, &Layer, &Inputs, &Out) -> Vec<Launch>,
) -> Left {
    let world = World::new(gpu, shape, [2, 2, 3], 31);
    let on_card = projected.upload(gpu, shape, 1);
    let header = gpu.upload(&delta_world::step(&[(1, chain(1))])).unwrap();
    let result = card::poisoned::<f32>(gpu, shape.values());
    // Eight rows of whole groups of 256 values; zeros, for the seven rows that nobody writes.
    let wide = 16 * shape.values().next_multiple_of(256);
    let f16 = gpu.filled::<u8>(wide, 0).unwrap();
    let out = Out::of(Forms {
        f16: f16.ptr(),
        ..Forms::f32(result.ptr())
    });
    gpu.launch(&launches(
        header.ptr(),
        &world.layer(1),
        &on_card.inputs,
        &out,
    ));
    Left {
        f32: bits(&result.download(gpu).unwrap()),
        f16: f16.download(gpu).unwrap(),
        factors: bits(&world.factors.download(gpu).unwrap()),
    }
}

fn by_parts(gpu: &Device, shape: Shape, projected: &Projected) -> Left {
    let poisoned = |len: usize| -> Buffer<f32> { card::poisoned(gpu, len) };
    let mixed = poisoned(shape.channels());
    let gates = poisoned(2 * shape.n_v_heads);
    let (o, states) = (poisoned(shape.values()), poisoned(shape.state_bytes() / 4));
    let pair = [mixed.ptr(), gates.ptr()];
    let all = [mixed.ptr(), gates.ptr(), o.ptr(), states.ptr()];
    let rows = Rows {
        at: o.ptr(),
        stride: shape.values(),
    };
    run(gpu, shape, projected, |step, layer, inputs, out| {
        let source = Source::Step(step);
        vec![
            steps::conv_tree(shape, 1, step, layer, inputs, pair),
            steps::tree_persist(shape, 1, step, layer, all),
            gated_norm(shape, 1, source, layer, [rows, inputs.z], out),
        ]
    })
}

fn at_once(gpu: &Device, shape: Shape, projected: &Projected) -> Left {
    run(gpu, shape, projected, |step, layer, inputs, out| {
        vec![steps::row(shape, step, layer, inputs, out)]
    })
}

/// The shapes of the tests, and those of a 0.8B and a 27B hybrid.
fn all_shapes() -> Vec<Shape> {
    let wide = [(16, 16), (16, 48)].map(|(n_k_heads, n_v_heads)| Shape {
        n_k_heads,
        n_v_heads,
        head_map: HeadMap::Tiled,
    });
    shapes().into_iter().chain(wide).collect()
}

#[test]
fn row_gives_the_bits_of_its_parts() {
    let Some(gpu) = Device::open() else { return };
    let mut random = Random::new(32);
    for shape in all_shapes() {
        for _ in 0..3 {
            let projected = Projected::new(shape, 1, &mut random);
            let parts = by_parts(&gpu, shape, &projected);
            assert!(
                parts.f32.iter().all(|x| f32::from_bits(*x).is_finite()),
                "{shape:?}"
            );
            assert!(
                at_once(&gpu, shape, &projected) == parts,
                "{shape:?}: other bits than conv_tree, tree_persist and gated_norm give"
            );
        }
    }
}

#[test]
fn row_of_hostile_values_gives_the_bits_of_its_parts() {
    let Some(gpu) = Device::open() else { return };
    let mut random = Random::new(33);
    for shape in shapes() {
        let gates = [(50.0, -90.0), (700.0, 90.0), (-80.0, 0.0), (f32::NAN, 1.0)];
        for (i, (alpha, beta)) in gates.into_iter().enumerate() {
            let mut projected = Projected::new(shape, 1, &mut random);
            projected.alpha[0] = alpha;
            projected.beta[shape.n_v_heads - 1] = beta;
            projected.qkv[random.below(shape.channels())] = [f32::NAN, f32::INFINITY, 1e30, 0.0][i];
            projected.z[random.below(shape.values())] = [f32::INFINITY, -1e30, 1e30, 0.0][i];
            let parts = by_parts(&gpu, shape, &projected);
            assert!(
                at_once(&gpu, shape, &projected) == parts,
                "{shape:?}, hostile values {i}"
            );
        }
    }
}

#[test]
fn row_of_a_step_without_trees_writes_nothing() {
    let Some(gpu) = Device::open() else { return };
    let shape = shapes()[1];
    let projected = Projected::new(shape, 1, &mut Random::new(34));
    let empty = gpu.upload(&delta_world::step(&[])).unwrap();
    let left = run(&gpu, shape, &projected, |_, layer, inputs, out| {
        vec![steps::row(shape, empty.ptr(), layer, inputs, out)]
    });
    let untouched = |all: &[u32]| all.iter().all(|x| *x == u32::MAX);
    assert!(untouched(&left.f32) && untouched(&left.factors));
    assert!(left.f16.iter().all(|x| *x == 0));
}
