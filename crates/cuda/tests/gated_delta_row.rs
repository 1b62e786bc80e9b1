//! Bit equality of delta layers: the fused single-row launch equals the tree launches, and tree
//! nodes equal single-row steps with commits along their paths.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod fixtures {
    pub mod gated_delta;
    pub mod gated_delta_layer;
    pub mod gpu;
}

use contract::HeadMap;
use cuda::GpuProps;
use cuda::Numerics;
use cuda::launch::Launch;
use cuda::launch::gated_delta::gated_norm::gated_norm;
use cuda::launch::gated_delta::{
    GatedDeltaRows, GatedNormOutput, Shape, StridedRows, TreeLaunch, TreeStep, decode as steps,
    recurrent,
};
use cuda::launch::norm::ActivationBuffers;
use fixtures::gated_delta::{
    DeltaDevice, DeltaFixture, Parents, Projected, chain, path, random_tree, shapes, star,
};
use fixtures::gated_delta_layer::{LayerLaunches, LayerStep, own_gpu, run_commit};
use fixtures::gpu::Random;

/// The smallest shared memory of supported GPUs.
const SMALL: GpuProps = GpuProps {
    sm_count: 82,
    shared_bytes: 99 << 10,
    has_wgmma: false,
    launches_overlap: false,
};

/// Results of a layer: f32 rows, f16 rows, and the factors of all slots.
#[derive(Debug, PartialEq, Eq)]
struct FinalState {
    f32: Vec<u32>,
    f16: Vec<u8>,
    factors: Vec<u32>,
}

/// Bit patterns with a canonical NaN.
fn bits(values: &[f32]) -> Vec<u32> {
    let one = |x: &f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
    values.iter().map(one).collect()
}

/// Runs `launches` of the last layer of a fresh fixture on a single-row step in slot 1.
fn run(
    gpu: &DeltaDevice,
    shape: Shape,
    projected: &Projected,
    launches: impl Fn(&TreeLaunch<'_>, &GatedNormOutput) -> Vec<Launch>,
) -> FinalState {
    let fixture = DeltaFixture::new(gpu, shape, [2, 2, 3], 31);
    let on_card = projected.upload(gpu, shape, 1);
    let header = gpu
        .upload(&fixtures::gated_delta::step(&[(1, chain(1))]))
        .unwrap();
    let result = fixtures::gpu::poisoned::<f32>(gpu, shape.values());
    // Eight rows of whole groups of 256 values. Seven rows stay zero.
    let wide = 16 * shape.values().next_multiple_of(256);
    let f16 = gpu.filled::<u8>(wide, 0).unwrap();
    let out = GatedNormOutput::of(ActivationBuffers {
        f16: f16.ptr(),
        ..ActivationBuffers::f32(result.ptr())
    });
    let tree = TreeLaunch {
        gpu: own_gpu(gpu),
        shape,
        size: TreeStep { rows: 1, trees: 1 },
        step: header.ptr(),
        layer: &fixture.layer(1),
        inputs: &on_card.inputs,
    };
    gpu.launch(&launches(&tree, &out));
    FinalState {
        f32: bits(&result.download(gpu).unwrap()),
        f16: f16.download(gpu).unwrap(),
        factors: bits(&fixture.factors.download(gpu).unwrap()),
    }
}

fn separate_launches(gpu: &DeltaDevice, shape: Shape, projected: &Projected) -> FinalState {
    let o = fixtures::gpu::poisoned::<f32>(gpu, shape.values());
    let bytes = recurrent::spill_bytes(own_gpu(gpu), shape, 1, 1);
    let spilled = fixtures::gpu::poisoned::<u8>(gpu, bytes.max(1));
    let rows = StridedRows {
        at: o.ptr(),
        stride: shape.values(),
    };
    run(gpu, shape, projected, |tree, out| {
        let (source, inputs) = (GatedDeltaRows::Step(tree.step), [rows, tree.inputs.z]);
        vec![
            recurrent::recurrent_tree(tree, o.ptr(), spilled.ptr()),
            gated_norm(shape, 1, source, tree.layer, inputs, out),
        ]
    })
}

fn fused_launch(gpu: &DeltaDevice, shape: Shape, projected: &Projected) -> FinalState {
    run(gpu, shape, projected, |tree, out| {
        vec![steps::row(tree, out)]
    })
}

/// The test shapes, and those of a 0.8B and a 27B hybrid model.
fn all_shapes() -> Vec<Shape> {
    let wide = [(16, 16), (16, 48)].map(|(n_k_heads, n_v_heads)| Shape {
        n_k_heads,
        n_v_heads,
        head_map: HeadMap::Tiled,
    });
    shapes().into_iter().chain(wide).collect()
}

#[test]
fn fused_delta_row_equals_separate_launches() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let mut random = Random::new(32);
    for shape in all_shapes() {
        for _ in 0..3 {
            let projected = Projected::new(shape, 1, &mut random);
            let parts = separate_launches(&gpu, shape, &projected);
            assert!(
                parts.f32.iter().all(|x| f32::from_bits(*x).is_finite()),
                "{shape:?}"
            );
            assert!(
                fused_launch(&gpu, shape, &projected) == parts,
                "{shape:?}: other bits than the recurrent form of one node"
            );
        }
    }
}

#[test]
fn fused_delta_row_of_extreme_values_equals_separate_launches() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let mut random = Random::new(33);
    for shape in shapes() {
        let gates = [(50.0, -90.0), (700.0, 90.0), (-80.0, 0.0), (f32::NAN, 1.0)];
        for (i, (alpha, beta)) in gates.into_iter().enumerate() {
            let mut projected = Projected::new(shape, 1, &mut random);
            projected.alpha[0] = alpha;
            projected.beta[shape.n_v_heads - 1] = beta;
            projected.qkv[random.below(shape.channels())] = [f32::NAN, f32::INFINITY, 1e30, 0.0][i];
            projected.z[random.below(shape.values())] = [f32::INFINITY, -1e30, 1e30, 0.0][i];
            let parts = separate_launches(&gpu, shape, &projected);
            assert!(
                fused_launch(&gpu, shape, &projected) == parts,
                "{shape:?}, hostile values {i}"
            );
        }
    }
}

#[test]
fn fused_delta_row_without_trees_writes_nothing() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let shape = shapes()[1];
    let projected = Projected::new(shape, 1, &mut Random::new(34));
    let empty = gpu.upload(&fixtures::gated_delta::step(&[])).unwrap();
    let left = run(&gpu, shape, &projected, |tree, out| {
        let step = empty.ptr();
        vec![steps::row(&TreeLaunch { step, ..*tree }, out)]
    });
    let untouched = |all: &[u32]| all.iter().all(|x| *x == u32::MAX);
    assert!(untouched(&left.f32) && untouched(&left.factors));
    assert!(left.f16.iter().all(|x| *x == 0));
}

/// Runs all launches of a layer for `trees` on all slots. Returns the normed rows.
fn layer_rows(
    gpu: &DeltaDevice,
    fixture: &DeltaFixture,
    trees: &[(usize, Parents)],
    projected: &Projected,
    props: GpuProps,
    without_clusters: bool,
) -> Vec<f32> {
    let (shape, rows) = (fixture.shape, projected.rows);
    let step = LayerStep {
        fixture,
        layer: 0,
        trees,
        projected,
        gpu: props,
        numerics: Numerics::BatchInvariant,
    };
    let LayerLaunches {
        launches, result, ..
    } = &mut step.launches(gpu, false);
    if without_clusters {
        for launch in &mut *launches {
            launch.unit = launch.unit.clone().define("NO_SM90", 1);
            launch.overlap = false;
        }
    }
    gpu.launch(launches);
    let result = result.download(gpu).unwrap();
    let padding = &result[rows * shape.values()..];
    assert!(padding.iter().all(|x| x.is_nan()), "padding was written");
    result
}

/// Compares rows and factors of every node on the paths to `leaves` of the first tree with
/// single-row steps and commits.
fn check_paths(
    gpu: &DeltaDevice,
    shape: Shape,
    trees: &[(usize, Parents)],
    props: GpuProps,
    apart: bool,
) {
    let rows = trees.iter().map(|(_, parents)| parents.len()).sum();
    let projected = Projected::new(shape, rows, &mut Random::new(35));
    let fixture = DeltaFixture::new(gpu, shape, [4, 1, 64], 36);
    let all = layer_rows(gpu, &fixture, trees, &projected, props, apart);
    let mut first = 0;
    for (slot, parents) in trees {
        let n = parents.len();
        let left: Vec<_> = (0..n)
            .map(|i| fixture.factors_of(gpu, *slot, 0, i))
            .collect();
        for leaf in [n - 1, n / 2, n / 3] {
            let fixture = DeltaFixture::new(gpu, shape, [4, 1, 64], 36);
            for node in path(parents, leaf) {
                let what = format!("{shape:?}, node {node} of {n}, {props:?}");
                let alone = projected.part(shape, first + node..first + node + 1);
                let own = [(*slot, chain(1))];
                let row = layer_rows(gpu, &fixture, &own, &alone, props, false);
                let right = &all[(first + node) * shape.values()..][..shape.values()];
                assert!(bits(&row) == bits(right), "{what}: other rows");
                let factors = fixture.factors_of(gpu, *slot, 0, 0);
                for (mine, theirs) in factors.iter().zip(&left[node]) {
                    assert!(bits(mine) == bits(theirs), "{what}: other factors");
                }
                let path: &[usize] = &[0];
                run_commit(gpu, &fixture, &[(*slot, path)]);
            }
        }
        first += n;
    }
}

/// A tree whose nodes have two children each.
fn full(n: usize) -> Parents {
    (0..n).map(|i| i.checked_sub(1).map(|j| j / 2)).collect()
}

#[test]
fn delta_tree_nodes_equal_single_row_steps() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let mut random = Random::new(37);
    let mut units = Vec::new();
    for props in [own_gpu(&gpu), SMALL] {
        for shape in all_shapes() {
            units.extend([8, 24, 64].map(|rows| recurrent::recurrent_unit(props, shape, rows, 1)));
        }
    }
    gpu.compile(&units);
    for (i, shape) in all_shapes().into_iter().enumerate() {
        for n in [2, 8, 23, 64] {
            let mut trees = vec![random_tree(&mut random, n), full(n)];
            if i == 2 {
                trees.extend([chain(n), star(n)]);
            }
            for parents in trees {
                for props in [own_gpu(&gpu), SMALL] {
                    check_paths(&gpu, shape, &[(1, parents.clone())], props, false);
                }
            }
        }
    }
}

#[test]
fn delta_tree_nodes_of_several_sequences_equal_single_row_steps() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let mut random = Random::new(38);
    let shape = shapes()[2];
    for sizes in [vec![8, 8, 8, 8], vec![1, 2], vec![30, 3, 20, 11]] {
        let slots = [3, 0, 2, 1];
        let trees: Vec<_> = sizes
            .iter()
            .zip(slots)
            .map(|(&n, slot)| (slot, random_tree(&mut random, n)))
            .collect();
        for props in [own_gpu(&gpu), SMALL] {
            check_paths(&gpu, shape, &trees, props, false);
        }
    }
}

#[test]
fn delta_tree_without_clusters_has_the_same_bits() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    for shape in all_shapes() {
        for parents in [random_tree(&mut Random::new(39), 24), full(64)] {
            check_paths(&gpu, shape, &[(1, parents)], SMALL, true);
        }
    }
}
