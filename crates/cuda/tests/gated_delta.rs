//! Delta steps of trees in both forms, with convolution, output norm and commits.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod fixtures {
    pub mod gated_delta;
    pub mod gated_delta_layer;
    pub mod gpu;
}

use contract::HeadMap;
use cpu::reference::{delta as reference, norm};
use cuda::GpuProps;
use cuda::Numerics;
use cuda::launch::CompileUnit;
use cuda::launch::gated_delta::{
    DIM, Shape, TAPS, TreeLaunch, TreeStep, decode as steps, recurrent,
};
use cuda::launch::norm::{ActivationBuffers, RowSource, convert};
use cuda::select::wy_tree;
use fixtures::gated_delta::{
    DeltaDevice, DeltaFixture, HeadRows, Parents, Projected, chain, path, random_tree, shapes, star,
};
use fixtures::gated_delta_layer::{
    BUCKETS, LayerLaunches, LayerStep, bucket, gpus, own_gpu, random_factors, reference_tree,
    run_commit,
};
use fixtures::gpu::{Random, close, same_bits};

fn forms() -> [Numerics; 2] {
    [Numerics::Fastest, Numerics::BatchInvariant]
}

/// Runs one form on layer 0. Returns `o` before the norm, for all rows of the bucket.
fn run_tree(
    gpu: &DeltaDevice,
    fixture: &DeltaFixture,
    trees: &[(usize, Parents)],
    projected: &Projected,
    numerics: Numerics,
    bucket: usize,
) -> Vec<f32> {
    let shape = fixture.shape;
    let device = projected.upload(gpu, shape, bucket);
    let inputs = &device.inputs;
    let header = gpu.upload(&fixtures::gated_delta::step(trees)).unwrap();
    let o = fixtures::gpu::poisoned::<f32>(gpu, bucket * shape.values());
    let tree = TreeLaunch {
        gpu: own_gpu(gpu),
        shape,
        size: TreeStep {
            rows: bucket,
            trees: trees.len(),
        },
        step: header.ptr(),
        layer: &fixture.layer(0),
        inputs,
    };
    let bytes = recurrent::spill_bytes(tree.gpu, shape, bucket, trees.len());
    let spilled = fixtures::gpu::poisoned::<u8>(gpu, bytes.max(1));
    let launch = match numerics {
        Numerics::Fastest => steps::wy_tree(wy_tree(tree.gpu, shape, tree.size), &tree, o.ptr()),
        Numerics::BatchInvariant => recurrent::recurrent_tree(&tree, o.ptr(), spilled.ptr()),
    };
    gpu.launch(&[launch]);
    o.download(gpu).unwrap()
}

/// Runs a form and compares o and all factors of every node with the reference. Returns the largest
/// errors of o and u.
fn check_tree(
    gpu: &DeltaDevice,
    fixture: &DeltaFixture,
    trees: &[(usize, Parents)],
    projected: &Projected,
    numerics: Numerics,
    most: f64,
) -> f64 {
    let shape = fixture.shape;
    let (channels, values) = (shape.channels(), shape.values());
    let rows = projected.rows;
    let o = run_tree(gpu, fixture, trees, projected, numerics, bucket(rows));
    let (mut first, mut worst) = (0, 0.0_f64);
    for (slot, parents) in trees {
        let n = parents.len();
        let own = projected.part(shape, first..first + n);
        let (mixed, u_right, o_right) = reference_tree(gpu, (fixture, 0), *slot, parents, &own);
        let gates = own.gates(shape, &fixture.weights);
        for node in 0..n {
            let what = format!("{numerics:?} {shape:?}, {n} nodes, node {node}");
            let at = node * values..(node + 1) * values;
            let mine = &o[(first + node) * values..][..values];
            worst = worst.max(close(
                &format!("{what}: o"),
                mine,
                &o_right[at.clone()],
                most,
            ));
            let [k, u, g, x] = fixture.factors_of(gpu, *slot, 0, node);
            worst = worst.max(close(&format!("{what}: u"), &u, &u_right[at], most));
            let k_right = &mixed[node * channels + shape.keys()..][..shape.keys()];
            close(&format!("{what}: k"), &k, k_right, 2e-6);
            let g_right = &gates[node * 2 * shape.n_v_heads..][..shape.n_v_heads];
            close(&format!("{what}: g"), &g, g_right, 2e-6);
            same_bits(
                &format!("{what}: x"),
                &x,
                &own.qkv[node * channels..][..channels],
            );
        }
        first += n;
    }
    assert!(
        o[rows * values..].iter().all(|x| x.is_nan()),
        "rows of the padding were written"
    );
    worst
}

#[test]
fn delta_tree_paths_equal_recurrent_steps() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let mut random = Random::new(11);
    let mut worst = [0.0_f64; 2];
    let all: Vec<_> = shapes()
        .iter()
        .flat_map(|&shape| BUCKETS.map(|rows| (shape, rows)))
        .flat_map(|(shape, rows)| {
            let props = own_gpu(&gpu);
            let tree = wy_unit(props, shape, rows);
            [tree, recurrent::recurrent_unit(props, shape, rows, 1)]
        })
        .collect();
    gpu.compile(&all);
    for shape in shapes() {
        let fixture = DeltaFixture::new(&gpu, shape, [2, 1, 64], 5);
        for n in [1, 2, 7, 8, 9, 24, 40, 64] {
            for parents in [chain(n), star(n), random_tree(&mut random, n)] {
                let projected = Projected::new(shape, n, &mut random);
                for (form, worst) in forms().into_iter().zip(&mut worst) {
                    let trees = [(1, parents.clone())];
                    *worst = worst.max(check_tree(&gpu, &fixture, &trees, &projected, form, 1e-5));
                }
            }
        }
    }
    let [factors, sequential] = worst;
    eprintln!("worst error of a node: {factors:.2e} in factors, {sequential:.2e} in sequence");
}

#[test]
fn delta_trees_of_several_sequences_share_a_launch() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let mut random = Random::new(12);
    let shape = shapes()[2];
    let fixture = DeltaFixture::new(&gpu, shape, [5, 1, 64], 6);
    for sizes in [vec![8, 8, 8, 8], vec![1, 1, 1], vec![30, 3, 20, 11]] {
        let slots = [3, 0, 4, 1];
        let trees: Vec<(usize, Parents)> = sizes
            .iter()
            .zip(slots)
            .map(|(&n, slot)| (slot, random_tree(&mut random, n)))
            .collect();
        let projected = Projected::new(shape, sizes.iter().sum(), &mut random);
        for form in forms() {
            check_tree(&gpu, &fixture, &trees, &projected, form, 1e-5);
        }
    }
}

#[test]
fn delta_tree_handles_all_decay_values() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let mut random = Random::new(13);
    let shape = shapes()[0];
    let mut fixture = DeltaFixture::new(&gpu, shape, [1, 1, 64], 7);
    fixture.set_decay(&gpu, &[-1.0, -1.0], &[0.0, 0.0]);
    for n in [5, 24, 64] {
        for parents in [chain(n), random_tree(&mut random, n)] {
            let mut projected = Projected::new(shape, n, &mut random);
            for (alpha, beta) in projected.alpha.iter_mut().zip(&mut projected.beta) {
                // g of about -50, 0, -0.7, -700 and -0.002, and beta of 0, 1 and 0.5.
                *alpha = [50.0, -80.0, 0.0, 700.0, -6.0, -6.0][random.below(6)];
                *beta = [-90.0, 90.0, 0.0][random.below(3)];
            }
            for form in forms() {
                // Under strong decay, o is small relative to its terms.
                let trees = [(0, parents.clone())];
                check_tree(&gpu, &fixture, &trees, &projected, form, 3e-5);
            }
        }
    }
}

#[test]
fn delta_tree_nan_node_reaches_only_its_descendants() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let mut random = Random::new(14);
    let shape = shapes()[1];
    let fixture = DeltaFixture::new(&gpu, shape, [1, 1, 64], 8);
    for n in [6, 24, 64] {
        let parents = random_tree(&mut random, n);
        let clean = Projected::new(shape, n, &mut random);
        let mut dirty = clean.part(shape, 0..n);
        let bad = [n / 2, n - 1];
        for &node in &bad {
            dirty.qkv[node * shape.channels()..][..shape.channels()].fill(f32::NAN);
            dirty.alpha[node * shape.n_v_heads] = f32::NAN;
        }
        for form in forms() {
            let trees = [(0, parents.clone())];
            let good = run_tree(&gpu, &fixture, &trees, &clean, form, bucket(n));
            let mixed = run_tree(&gpu, &fixture, &trees, &dirty, form, bucket(n));
            for node in 0..n {
                let reached = path(&parents, node).iter().any(|j| bad.contains(j));
                let row = node * shape.values()..(node + 1) * shape.values();
                if reached {
                    assert!(
                        mixed[row].iter().any(|x| x.is_nan()),
                        "{form:?} node {node}"
                    );
                } else {
                    same_bits("a healthy node", &mixed[row.clone()], &good[row]);
                }
            }
        }
    }
}

#[test]
fn delta_tree_overflow_is_never_finite() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let mut random = Random::new(19);
    let shape = shapes()[3];
    let mut fixture = DeltaFixture::new(&gpu, shape, [1, 1, 64], 12);
    fixture.set_decay(&gpu, &[-1.0; 4], &[0.0; 4]);
    let (channels, keys) = (shape.channels(), shape.keys());
    for n in [7, 12, 32, 64] {
        // Neighbouring keys are opposite and nothing decays, so u_i = v_i + v_(i-1). v has pulses
        // near the f32 maximum.
        let mut projected = Projected::new(shape, n, &mut random);
        projected.alpha.fill(-80.0);
        projected.beta.fill(90.0);
        let base = random.normals(keys, 0.01);
        for (node, x) in projected.qkv.chunks_exact_mut(channels).enumerate() {
            for (x, base) in x[keys..2 * keys].iter_mut().zip(&base) {
                *x = if node % 2 == 0 { *base } else { -*base };
            }
            for (x, taps) in x[2 * keys..]
                .iter_mut()
                .zip(fixture.weights.conv[2 * keys * TAPS..].chunks(TAPS))
            {
                let most = taps.iter().fold(0.0_f32, |most, w| most.max(w.abs()));
                *x = if node % 5 == 4 {
                    (3e38 / most).min(f32::MAX)
                } else {
                    0.0
                };
            }
        }
        let parents = chain(n);
        let (mixed, ..) = reference_tree(&gpu, (&fixture, 0), 0, &parents, &projected);
        let gates = projected.gates(shape, &fixture.weights);
        for form in forms() {
            let o = run_tree(
                &gpu,
                &fixture,
                &[(0, parents.clone())],
                &projected,
                form,
                bucket(n),
            );
            let u: Vec<f32> = (0..n)
                .flat_map(|node| fixture.factors_of(&gpu, 0, 0, node)[1].clone())
                .collect();
            let (mut over, mut large) = (0, 0);
            for head in 0..shape.n_v_heads {
                let right = fixtures::gated_delta::chain_in_f64(&HeadRows::new(
                    shape,
                    head,
                    0..n,
                    &mixed,
                    &gates,
                ));
                for (what, mine, right) in [("u", &u, &right[0]), ("o", &o, &right[1])] {
                    for (at, right) in right.iter().enumerate() {
                        let (node, column) = (at / DIM, at % DIM);
                        let mine = mine[node * shape.values() + head * DIM + column];
                        over += usize::from(right.abs() > f64::from(f32::MAX));
                        large += usize::from(mine.is_finite() && right.abs() > 1e37);
                        assert!(
                            !mine.is_finite() || (f64::from(mine) - right).abs() < 1e35,
                            "{form:?}, {n} nodes, head {head}: {what} of node {node}, column {column}: {mine:e}, not {right:e}"
                        );
                    }
                }
            }
            assert!(
                over > 20 && large > 20,
                "{form:?}, {n} nodes: {over} values overflow and {large} large ones do not"
            );
        }
    }
}

/// The unit of the WY form of one tree.
fn wy_unit(props: GpuProps, shape: Shape, rows: usize) -> CompileUnit {
    let kernel = wy_tree(props, shape, TreeStep { rows, trees: 1 });
    steps::wy_tree_unit(kernel, props, shape, rows, 1)
}

/// The kernel for a bucket of one tree. The two kernels round sums differently.
fn kernel(gpu: &DeltaDevice, shape: Shape, form: Numerics, bucket: usize) -> &'static str {
    match form {
        Numerics::Fastest => wy_unit(own_gpu(gpu), shape, bucket).file,
        Numerics::BatchInvariant => recurrent::recurrent_unit(own_gpu(gpu), shape, bucket, 1).file,
    }
}

#[test]
fn delta_tree_row_bits_do_not_depend_on_the_row_count() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let mut random = Random::new(15);
    let shape = shapes()[3];
    let fixture = DeltaFixture::new(&gpu, shape, [1, 1, 64], 9);
    let parents = random_tree(&mut random, 64);
    let projected = Projected::new(shape, 64, &mut random);
    let run = |form, n: usize, bucket| {
        let trees = [(0, parents[..n].to_vec())];
        let some = projected.part(shape, 0..n);
        run_tree(&gpu, &fixture, &trees, &some, form, bucket)
    };
    for form in forms() {
        let all = [64, 32].map(|n| (kernel(&gpu, shape, form, n), run(form, n, n)));
        for (n, bucket) in [
            (1, 1),
            (1, 64),
            (5, 8),
            (9, 16),
            (16, 16),
            (20, 24),
            (20, 32),
            (33, 48),
        ] {
            let own = kernel(&gpu, shape, form, bucket);
            let (_, all) = all.iter().find(|(kernel, _)| *kernel == own).unwrap();
            let len = n * shape.values();
            let some = run(form, n, bucket);
            same_bits(
                &format!("{form:?}, {n} rows of {bucket}"),
                &some[..len],
                &all[..len],
            );
        }
    }
}

#[test]
fn delta_commit_advances_states_and_windows_of_every_layer() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let mut random = Random::new(16);
    for shape in shapes() {
        let mut fixture = DeltaFixture::new(&gpu, shape, [3, 3, 8], 10);
        random_factors(&gpu, &mut fixture, &mut random);
        let before = fixture.state.download(&gpu).unwrap();
        let paths: [(usize, &[usize]); 3] = [(2, &[0, 1, 4, 7]), (0, &[0]), (1, &[])];
        let mut right = Vec::new();
        for (slot, path) in paths {
            for layer in 0..3 {
                let mut states = fixture.state_of(&gpu, slot, layer);
                let mut window = fixture.window_of(&gpu, slot, layer);
                for &node in path {
                    let [k, u, g, x] = fixture.factors_of(&gpu, slot, layer, node);
                    for (head, state) in states.iter_mut().enumerate() {
                        let map = shape.head_map;
                        let key = map.k_head(head, shape.n_k_heads, shape.n_v_heads);
                        let k = &k[key * DIM..][..DIM];
                        reference::update_state(state, k, &u[head * DIM..][..DIM], g[head].exp());
                    }
                    window.drain(..shape.channels());
                    window.extend(x);
                }
                right.push((slot, layer, states, window));
            }
        }
        run_commit(&gpu, &fixture, &paths);
        for (slot, layer, states, window) in right {
            let what = format!("{shape:?} slot {slot} layer {layer}");
            let got = fixture.state_of(&gpu, slot, layer).concat();
            close(&what, &got, &states.concat(), 1e-6);
            same_bits(&what, &fixture.window_of(&gpu, slot, layer), &window);
        }
        let after = fixture.state.download(&gpu).unwrap();
        let slot = 3 * shape.state_bytes() / 4;
        same_bits(
            "an empty path",
            &after[slot..2 * slot],
            &before[slot..2 * slot],
        );
    }
}

#[test]
fn delta_commit_of_a_path_equals_single_node_commits() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let shape = shapes()[2];
    let mut worlds: Vec<DeltaFixture> = (0..2)
        .map(|_| DeltaFixture::new(&gpu, shape, [1, 2, 16], 11))
        .collect();
    for fixture in &mut worlds {
        random_factors(&gpu, fixture, &mut Random::new(17));
    }
    let path = [0, 1, 3, 4, 9, 15];
    run_commit(&gpu, &worlds[0], &[(0, &path)]);
    for node in path {
        run_commit(&gpu, &worlds[1], &[(0, &[node])]);
    }
    let [whole, single] = [0, 1].map(|i| worlds[i].state.download(&gpu).unwrap());
    same_bits("states", &whole, &single);
    let [whole, single] = [0, 1].map(|i| worlds[i].window.download(&gpu).unwrap());
    same_bits("windows", &whole, &single);
}

/// Runs the fixture's last layer and compares its rows with the composed references.
fn check_layer(gpu: &DeltaDevice, step: &LayerStep<'_>) {
    let LayerStep {
        fixture,
        layer: index,
        trees,
        projected,
        numerics,
        ..
    } = *step;
    let (shape, rows, values) = (fixture.shape, projected.rows, fixture.shape.values());
    let LayerLaunches {
        launches,
        bucket,
        header,
        result,
        f16,
        ..
    } = &mut step.launches(gpu, true);
    let (bucket, f16) = (*bucket, f16.as_ref().unwrap());
    let again = gpu.filled::<u8>(f16.len(), 0).unwrap();
    // f16 rows equal the rounded f32 rows.
    let all = RowSource::Step(header.ptr());
    let copy = ActivationBuffers {
        f16: again.ptr(),
        ..ActivationBuffers::default()
    };
    launches.push(convert(values, bucket, all, result.ptr(), copy));
    gpu.launch(launches);
    assert!(f16.download(gpu).unwrap() == again.download(gpu).unwrap());
    let result = result.download(gpu).unwrap();
    let mut first = 0;
    for (slot, parents) in trees {
        let n = parents.len();
        let own = projected.part(shape, first..first + n);
        let (_, _, mut o) = reference_tree(gpu, (fixture, index), *slot, parents, &own);
        for (head, z) in o.chunks_exact_mut(DIM).zip(own.z.chunks_exact(DIM)) {
            norm::gated_rms(head, &fixture.weights.norm, z, fixtures::gated_delta::EPS);
        }
        let got = &result[first * values..(first + n) * values];
        let what = format!("{numerics:?} {shape:?}, {n} rows of slot {slot}");
        close(&what, got, &o, 1e-5);
        first += n;
    }
    assert!(result[rows * values..].iter().all(|x| x.is_nan()));
}

/// Checks the fixture's last layer on both GPUs with both numerics.
fn check_layers(gpu: &DeltaDevice, fixture: &DeltaFixture, trees: &[(usize, Parents)]) {
    let rows: usize = trees.iter().map(|(_, parents)| parents.len()).sum();
    let projected = Projected::new(fixture.shape, rows, &mut Random::new(19));
    for gpu_props in gpus(gpu) {
        for numerics in forms() {
            let step = LayerStep {
                fixture,
                layer: fixture.layers - 1,
                trees,
                projected: &projected,
                gpu: gpu_props,
                numerics,
            };
            check_layer(gpu, &step);
        }
    }
}

#[test]
fn delta_layer_matches_composed_references() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let mut random = Random::new(20);
    for shape in shapes() {
        let fixture = DeltaFixture::new(&gpu, shape, [3, 2, 64], 13);
        for sizes in [vec![1], vec![24], vec![13, 2, 9]] {
            let slots = [2, 0, 1];
            let trees: Vec<(usize, Parents)> = sizes
                .iter()
                .zip(slots)
                .map(|(&n, slot)| (slot, random_tree(&mut random, n)))
                .collect();
            check_layers(&gpu, &fixture, &trees);
        }
    }
}

#[test]
fn delta_layer_of_production_shape_matches_references() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let shape = Shape {
        n_k_heads: 16,
        n_v_heads: 48,
        head_map: HeadMap::Tiled,
    };
    let fixture = DeltaFixture::new(&gpu, shape, [1, 1, 64], 14);
    for n in [1, 24, 64] {
        let trees = [(0, random_tree(&mut Random::new(21), n))];
        check_layers(&gpu, &fixture, &trees);
    }
}

#[test]
fn delta_state_drift_stays_bounded_over_500_steps() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let mut random = Random::new(22);
    let shape = shapes()[0];
    let fixture = DeltaFixture::new(&gpu, shape, [1, 1, 64], 15);
    let mut states = fixture.state_of(&gpu, 0, 0);
    for step in 0..500 {
        let n = 1 + random.below(12);
        let parents = random_tree(&mut random, n);
        let projected = Projected::new(shape, n, &mut random);
        let window = fixture.window_of(&gpu, 0, 0);
        let mixed = fixtures::gated_delta::mixed(
            shape,
            &fixture.weights,
            &window,
            &projected.qkv,
            &parents,
        );
        let gates = projected.gates(shape, &fixture.weights);
        let trees = [(0, parents.clone())];
        let o = run_tree(
            &gpu,
            &fixture,
            &trees,
            &projected,
            Numerics::Fastest,
            bucket(n),
        );
        let line = path(&parents, random.below(n));
        let leaf = line[line.len() - 1];
        let mut right = vec![0.0; shape.values()];
        for &node in &line {
            for (head, state) in states.iter_mut().enumerate() {
                let row = HeadRows::new(shape, head, node..node + 1, &mixed, &gates);
                let (mut u, o) = ([0.0; DIM], &mut right[head * DIM..][..DIM]);
                reference::recurrent_step(state, row.tokens().token(0), &mut u, o);
            }
        }
        let got = &o[leaf * shape.values()..][..shape.values()];
        close(&format!("o of step {step}"), got, &right, 1e-4);
        run_commit(&gpu, &fixture, &[(0, &line)]);
    }
    let got = fixture.state_of(&gpu, 0, 0).concat();
    let error = close("the state after 500 steps", &got, &states.concat(), 1e-4);
    eprintln!("state drift after 500 steps: {error:.2e}");
}
