//! Steps of trees: the convolution, the delta rule in both forms, the output norm, and commits.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod card;
mod delta_world;

use card::{Random, close, same_bits};
use contract::HeadMap;
use cpu::reference::activation::{sigmoid, softplus};
use cpu::reference::{delta as reference, norm};
use cuda::driver::Buffer;
use cuda::launch::delta::{DIM, Exactness, Inputs, Out, Rows, Shape, tree as steps, verify};
use cuda::launch::delta::{commit, verify_scratch_bytes};
use delta_world::{Device, Parents, World, bush, chain, path, shapes, star};

const BUCKETS: [usize; 7] = [1, 8, 16, 24, 32, 48, 64];

fn bucket(rows: usize) -> usize {
    BUCKETS.into_iter().find(|b| *b >= rows).unwrap()
}

/// Random `mixed` and `gates` rows for `rows` rows, NaN in the padding up to the bucket.
struct Prepared {
    mixed: Vec<f32>,
    gates: Vec<f32>,
}

impl Prepared {
    fn new(shape: Shape, rows: usize, random: &mut Random) -> Prepared {
        let (channels, heads) = (shape.channels(), shape.n_v_heads);
        let mut mixed = random.normals(rows * channels, 1.0);
        for row in mixed.chunks_exact_mut(channels) {
            let (q, rest) = row.split_at_mut(shape.keys());
            q.chunks_exact_mut(DIM)
                .for_each(|q| norm::l2(q, 1e-6, 1.0 / (DIM as f32).sqrt()));
            rest[..shape.keys()]
                .chunks_exact_mut(DIM)
                .for_each(|k| norm::l2(k, 1e-6, 1.0));
        }
        let mut gates = Vec::new();
        for _ in 0..rows {
            gates.extend((0..heads).map(|_| -(3.0 * random.unit() * random.unit())));
            gates.extend(random.between(heads, 0.0, 1.0));
        }
        mixed.resize(bucket(rows) * channels, f32::NAN);
        gates.resize(bucket(rows) * 2 * heads, f32::NAN);
        Prepared { mixed, gates }
    }
}

/// Runs one of the two forms; gives `o` of all rows of the bucket.
fn run_tree(
    gpu: &Device,
    world: &World,
    trees: &[(usize, Parents)],
    prepared: &Prepared,
    exactness: Exactness,
    bucket: usize,
) -> Vec<f32> {
    let shape = world.shape;
    let mut fitted = (prepared.mixed.clone(), prepared.gates.clone());
    fitted.0.resize(bucket * shape.channels(), f32::NAN);
    fitted.1.resize(bucket * 2 * shape.n_v_heads, f32::NAN);
    let mixed = gpu.upload(&fitted.0).unwrap();
    let gates = gpu.upload(&fitted.1).unwrap();
    let header = gpu.upload(&delta_world::step(trees)).unwrap();
    let o = card::poisoned::<f32>(gpu, bucket * shape.values());
    let layer = world.layer(0);
    let buffers = [mixed.ptr(), gates.ptr(), o.ptr()];
    let states: Buffer<f32>;
    let launch = match exactness {
        Exactness::Factors => {
            steps::tree(shape, bucket, trees.len(), header.ptr(), &layer, buffers)
        }
        Exactness::Sequential => {
            states = card::poisoned(gpu, bucket * shape.state_bytes() / 4);
            let [m, g, o] = buffers;
            let buffers = [m, g, o, states.ptr()];
            steps::tree_persist(shape, trees.len(), header.ptr(), &layer, buffers)
        }
    };
    gpu.launch(&[launch]);
    o.download(gpu).unwrap()
}

/// Writes k and g of the prepared rows where the convolution would have put them.
fn fill_factors(gpu: &Device, world: &mut World, trees: &[(usize, Parents)], prepared: &Prepared) {
    let shape = world.shape;
    let node_floats = shape.factor_bytes(1) / 4;
    let mut row = 0;
    for (slot, parents) in trees {
        for node in 0..parents.len() {
            let at = (slot * world.layers * world.nodes + node) * node_floats;
            let k = &prepared.mixed[row * shape.channels() + shape.keys()..][..shape.keys()];
            let g = &prepared.gates[row * 2 * shape.n_v_heads..][..shape.n_v_heads];
            world.factors.upload_at(gpu, at, k).unwrap();
            let at = at + shape.keys() + shape.values();
            world.factors.upload_at(gpu, at, g).unwrap();
            row += 1;
        }
    }
}

/// Runs a form and compares o and u of every node with the reference; gives the worse error.
fn check_tree(
    gpu: &Device,
    world: &World,
    trees: &[(usize, Parents)],
    prepared: &Prepared,
    exactness: Exactness,
    most: f64,
) -> f64 {
    let shape = world.shape;
    let rows: usize = trees.iter().map(|(_, parents)| parents.len()).sum();
    let bucket = bucket(rows);
    let o = run_tree(gpu, world, trees, prepared, exactness, bucket);
    let (mut first, mut worst) = (0, 0.0_f64);
    for (slot, parents) in trees {
        let n = parents.len();
        let states = world.state_of(gpu, *slot, 0);
        let (u_right, o_right) = delta_world::tree(
            shape,
            &states,
            first,
            parents,
            &prepared.mixed,
            &prepared.gates,
        );
        for node in 0..n {
            let what = format!("{exactness:?} {shape:?}, {n} nodes, node {node}");
            let at = node * shape.values()..(node + 1) * shape.values();
            let mine = &o[(first + node) * shape.values()..][..shape.values()];
            worst = worst.max(close(
                &format!("{what}: o"),
                mine,
                &o_right[at.clone()],
                most,
            ));
            let [_, u, _, _] = world.factors_of(gpu, *slot, 0, node);
            worst = worst.max(close(&format!("{what}: u"), &u, &u_right[at], most));
        }
        first += n;
    }
    assert!(
        o[rows * shape.values()..].iter().all(|x| x.is_nan()),
        "rows of the padding were written"
    );
    worst
}

fn forms() -> [Exactness; 2] {
    [Exactness::Factors, Exactness::Sequential]
}

#[test]
fn tree_every_path_equals_the_steps() {
    let Some(gpu) = Device::open() else { return };
    let mut random = Random::new(11);
    let mut worst = 0.0_f64;
    let all: Vec<_> = shapes()
        .iter()
        .flat_map(|&shape| BUCKETS.map(|rows| steps::tree_unit(shape, rows)))
        .collect();
    gpu.compile(&all);
    for shape in shapes() {
        let world = World::new(&gpu, shape, [2, 1, 64], 5);
        for n in [1, 2, 7, 8, 9, 24, 40, 64] {
            for parents in [chain(n), star(n), bush(&mut random, n)] {
                let prepared = Prepared::new(shape, n, &mut random);
                for form in forms() {
                    let trees = [(1, parents.clone())];
                    worst = worst.max(check_tree(&gpu, &world, &trees, &prepared, form, 1e-5));
                }
            }
        }
    }
    eprintln!("worst relative error of a node: {worst:.2e}");
}

#[test]
fn tree_several_sequences_share_a_launch() {
    let Some(gpu) = Device::open() else { return };
    let mut random = Random::new(12);
    let shape = shapes()[2];
    let world = World::new(&gpu, shape, [5, 1, 64], 6);
    for sizes in [vec![8, 8, 8, 8], vec![1, 1, 1], vec![30, 3, 20, 11]] {
        let slots = [3, 0, 4, 1];
        let trees: Vec<(usize, Parents)> = sizes
            .iter()
            .zip(slots)
            .map(|(&n, slot)| (slot, bush(&mut random, n)))
            .collect();
        let prepared = Prepared::new(shape, sizes.iter().sum(), &mut random);
        for form in forms() {
            check_tree(&gpu, &world, &trees, &prepared, form, 1e-5);
        }
    }
}

#[test]
fn tree_decays_from_nothing_to_all() {
    let Some(gpu) = Device::open() else { return };
    let mut random = Random::new(13);
    let shape = shapes()[0];
    let world = World::new(&gpu, shape, [1, 1, 64], 7);
    let choices = [0.0, -50.0, -1e-4, -0.5, -700.0, -1e-30];
    for n in [5, 24, 64] {
        for parents in [chain(n), bush(&mut random, n)] {
            let mut prepared = Prepared::new(shape, n, &mut random);
            for row in 0..n {
                for head in 0..shape.n_v_heads {
                    let at = row * 2 * shape.n_v_heads + head;
                    prepared.gates[at] = choices[random.below(choices.len())];
                    prepared.gates[at + shape.n_v_heads] = [0.0, 1.0, 0.5][random.below(3)];
                }
            }
            for form in forms() {
                check_tree(&gpu, &world, &[(0, parents.clone())], &prepared, form, 3e-5);
            }
        }
    }
}

#[test]
fn tree_a_poisoned_sibling_reaches_its_descendants_only() {
    let Some(gpu) = Device::open() else { return };
    let mut random = Random::new(14);
    let shape = shapes()[1];
    let world = World::new(&gpu, shape, [1, 1, 64], 8);
    for n in [6, 24, 64] {
        let parents = bush(&mut random, n);
        let clean = Prepared::new(shape, n, &mut random);
        let mut dirty = Prepared {
            mixed: clean.mixed.clone(),
            gates: clean.gates.clone(),
        };
        let bad = [n / 2, n - 1];
        for &node in &bad {
            dirty.mixed[node * shape.channels()..][..shape.channels()].fill(f32::NAN);
            dirty.gates[node * 2 * shape.n_v_heads] = f32::NAN;
        }
        for form in forms() {
            let trees = [(0, parents.clone())];
            let good = run_tree(&gpu, &world, &trees, &clean, form, bucket(n));
            let mixed = run_tree(&gpu, &world, &trees, &dirty, form, bucket(n));
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
fn tree_rows_do_not_depend_on_how_many_there_are() {
    let Some(gpu) = Device::open() else { return };
    let mut random = Random::new(15);
    let shape = shapes()[3];
    let world = World::new(&gpu, shape, [1, 1, 64], 9);
    let parents = bush(&mut random, 64);
    let prepared = Prepared::new(shape, 64, &mut random);
    for form in forms() {
        let all = run_tree(&gpu, &world, &[(0, parents.clone())], &prepared, form, 64);
        for (n, bucket) in [(1, 1), (1, 64), (5, 8), (16, 16), (20, 24), (33, 48)] {
            let trees = [(0, parents[..n].to_vec())];
            let some = run_tree(&gpu, &world, &trees, &prepared, form, bucket);
            let len = n * shape.values();
            same_bits(&format!("{form:?}, {n} of 64"), &some[..len], &all[..len]);
        }
    }
}

fn run_commit(gpu: &Device, world: &World, paths: &[(usize, &[usize])]) {
    let header = gpu.upload(&delta_world::commit(paths)).unwrap();
    let launch = commit(world.shape, &world.group(), 4, header.ptr());
    gpu.launch(&[launch]);
}

#[test]
fn commit_brings_states_and_windows_of_every_layer_past_the_path() {
    let Some(gpu) = Device::open() else { return };
    let mut random = Random::new(16);
    for shape in shapes() {
        let mut world = World::new(&gpu, shape, [3, 3, 8], 10);
        let factors = random.normals(world.factors.len(), 0.1);
        world.factors.upload(&gpu, &factors).unwrap();
        let node_floats = shape.factor_bytes(1) / 4;
        // Gates must not grow.
        let mut fixed = factors.clone();
        for node in fixed.chunks_exact_mut(node_floats) {
            for g in &mut node[shape.keys() + shape.values()..][..shape.n_v_heads] {
                *g = -g.abs();
            }
        }
        world.factors.upload(&gpu, &fixed).unwrap();
        let before = world.state.download(&gpu).unwrap();
        let paths: [(usize, &[usize]); 3] = [(2, &[0, 1, 4, 7]), (0, &[0]), (1, &[])];
        let right: Vec<_> = (0..3)
            .flat_map(|slot| (0..3).map(move |layer| (slot, layer)))
            .map(|(slot, layer)| {
                let path = paths.iter().find(|p| p.0 == slot).unwrap().1;
                let mut states = world.state_of(&gpu, slot, layer);
                let mut window = world.window_of(&gpu, slot, layer);
                for &node in path {
                    let [k, u, g, x] = world.factors_of(&gpu, slot, layer, node);
                    for (head, state) in states.iter_mut().enumerate() {
                        let map = shape.head_map;
                        let key = map.k_head(head, shape.n_k_heads, shape.n_v_heads);
                        let k = &k[key * DIM..][..DIM];
                        reference::fold(state, k, &u[head * DIM..][..DIM], g[head].exp());
                    }
                    window.drain(..shape.channels());
                    window.extend(x);
                }
                (slot, layer, states, window)
            })
            .collect();
        run_commit(&gpu, &world, &paths);
        for (slot, layer, states, window) in right {
            let what = format!("{shape:?} slot {slot} layer {layer}");
            let got = world.state_of(&gpu, slot, layer).concat();
            close(&what, &got, &states.concat(), 1e-6);
            same_bits(&what, &world.window_of(&gpu, slot, layer), &window);
        }
        let after = world.state.download(&gpu).unwrap();
        let slot = 3 * shape.state_bytes() / 4;
        same_bits(
            "an empty path",
            &after[slot..2 * slot],
            &before[slot..2 * slot],
        );
    }
}

#[test]
fn commit_of_a_path_equals_committing_its_nodes_one_by_one() {
    let Some(gpu) = Device::open() else { return };
    let shape = shapes()[2];
    let mut random = Random::new(17);
    let mut worlds: Vec<World> = (0..2)
        .map(|_| World::new(&gpu, shape, [1, 2, 16], 11))
        .collect();
    let mut factors = random.normals(worlds[0].factors.len(), 0.1);
    let node_floats = shape.factor_bytes(1) / 4;
    for node in factors.chunks_exact_mut(node_floats) {
        for g in &mut node[shape.keys() + shape.values()..][..shape.n_v_heads] {
            *g = -g.abs();
        }
    }
    for world in &mut worlds {
        world.factors.upload(&gpu, &factors).unwrap();
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

#[test]
fn tree_persist_gives_the_bits_of_single_steps() {
    let Some(gpu) = Device::open() else { return };
    let mut random = Random::new(18);
    let shape = shapes()[2];
    let n = 24;
    let parents = bush(&mut random, n);
    let prepared = Prepared::new(shape, n, &mut random);
    let trees = [(0, parents.clone())];
    let mut world = World::new(&gpu, shape, [1, 1, 64], 12);
    fill_factors(&gpu, &mut world, &trees, &prepared);
    let form = Exactness::Sequential;
    let all = run_tree(&gpu, &world, &trees, &prepared, form, 24);
    for leaf in [n - 1, n / 2, n / 3] {
        let mut world = World::new(&gpu, shape, [1, 1, 64], 12);
        for node in path(&parents, leaf) {
            let channels = shape.channels();
            let alone = Prepared {
                mixed: prepared.mixed[node * channels..][..channels].to_vec(),
                gates: prepared.gates[node * 2 * shape.n_v_heads..][..2 * shape.n_v_heads].to_vec(),
            };
            let root = [(0, chain(1))];
            fill_factors(&gpu, &mut world, &root, &alone);
            let o = run_tree(&gpu, &world, &root, &alone, form, 1);
            let right = &all[node * shape.values()..][..shape.values()];
            same_bits(&format!("node {node}"), &o, right);
            run_commit(&gpu, &world, &[(0, &[0])]);
        }
    }
}

/// Inputs of a layer for `rows` rows in wider buffers, so that strides are tried too.
struct Projected {
    qkv: Vec<f32>,
    z: Vec<f32>,
    alpha: Vec<f32>,
    beta: Vec<f32>,
}

impl Projected {
    fn new(shape: Shape, rows: usize, random: &mut Random) -> Projected {
        Projected {
            qkv: random.normals(rows * shape.channels(), 1.0),
            z: random.normals(rows * shape.values(), 1.0),
            alpha: random.normals(rows * shape.n_v_heads, 2.0),
            beta: random.normals(rows * shape.n_v_heads, 2.0),
        }
    }
}

fn upload(gpu: &Device, values: &[f32], width: usize, bucket: usize) -> (Buffer<f32>, Rows) {
    let stride = width.next_multiple_of(4) + 8;
    let mut padded = vec![f32::NAN; bucket * stride];
    for (to, from) in padded.chunks_mut(stride).zip(values.chunks(width)) {
        to[..width].copy_from_slice(from);
    }
    let buffer = gpu.upload(&padded).unwrap();
    let at = buffer.ptr();
    (buffer, Rows { at, stride })
}

/// Runs a whole layer and compares it with the references, chained; gives the output rows.
fn check_layer(gpu: &Device, world: &World, trees: &[(usize, Parents)], exactness: Exactness) {
    let shape = world.shape;
    let mut random = Random::new(19);
    let rows: usize = trees.iter().map(|(_, parents)| parents.len()).sum();
    let bucket = bucket(rows);
    let projected = Projected::new(shape, rows, &mut random);
    let (channels, heads, values) = (shape.channels(), shape.n_v_heads, shape.values());
    let (_qkv, qkv) = upload(gpu, &projected.qkv, channels, bucket);
    let (_z, z) = upload(gpu, &projected.z, values, bucket);
    let (_alpha, alpha) = upload(gpu, &projected.alpha, heads, bucket);
    let (_beta, beta) = upload(gpu, &projected.beta, heads, bucket);
    let inputs = Inputs {
        qkv,
        z,
        alpha,
        beta,
    };
    let layer_index = world.layers - 1;
    let layer = world.layer(layer_index);
    let scratch = card::poisoned::<u8>(gpu, verify_scratch_bytes(shape, bucket, exactness));
    let header = gpu.upload(&delta_world::step(trees)).unwrap();
    let result = card::poisoned::<f32>(gpu, bucket * values);
    let out = Out {
        f32: result.ptr(),
        ..Out::default()
    };
    let launches = verify(
        shape,
        bucket,
        trees.len(),
        exactness,
        header.ptr(),
        &layer,
        &inputs,
        scratch.ptr(),
        &out,
    );
    gpu.launch(&launches);
    let result = result.download(gpu).unwrap();
    let gates: Vec<f32> = (0..rows)
        .flat_map(|row| {
            let weights = &world.weights;
            let at = move |i: usize| row * heads + i;
            let g = (0..heads)
                .map(|h| weights.a[h] * softplus(projected.alpha[at(h)] + weights.dt[h]))
                .collect::<Vec<_>>();
            let beta = (0..heads).map(|h| sigmoid(projected.beta[at(h)]));
            g.into_iter().chain(beta.collect::<Vec<_>>())
        })
        .collect();
    let mut first = 0;
    for (slot, parents) in trees {
        let n = parents.len();
        let window = world.window_of(gpu, *slot, layer_index);
        let x = &projected.qkv[first * channels..(first + n) * channels];
        let mixed = delta_world::mixed(shape, &world.weights, &window, x, parents);
        let own_gates = &gates[first * 2 * heads..(first + n) * 2 * heads];
        let states = world.state_of(gpu, *slot, layer_index);
        let (u, mut o) = delta_world::tree(shape, &states, 0, parents, &mixed, own_gates);
        for node in 0..n {
            let what = format!("{shape:?} slot {slot} node {node}");
            let got = world.factors_of(gpu, *slot, layer_index, node);
            let k = &mixed[node * channels + shape.keys()..][..shape.keys()];
            close(&format!("{what}: k"), &got[0], k, 2e-6);
            close(
                &format!("{what}: u"),
                &got[1],
                &u[node * values..][..values],
                1e-5,
            );
            close(
                &format!("{what}: g"),
                &got[2],
                &own_gates[node * 2 * heads..][..heads],
                2e-6,
            );
            same_bits(
                &format!("{what}: x"),
                &got[3],
                &x[node * channels..][..channels],
            );
        }
        for (i, head) in o.chunks_exact_mut(DIM).enumerate() {
            let z = &projected.z[first * values + i * DIM..][..DIM];
            norm::gated_rms(head, &world.weights.norm, z, delta_world::EPS);
        }
        let got = &result[first * values..(first + n) * values];
        close(&format!("{shape:?} rows of slot {slot}"), got, &o, 1e-5);
        first += n;
    }
    assert!(result[rows * values..].iter().all(|x| x.is_nan()));
}

#[test]
fn verify_equals_the_references_chained() {
    let Some(gpu) = Device::open() else { return };
    let mut random = Random::new(20);
    for shape in shapes() {
        let world = World::new(&gpu, shape, [3, 2, 64], 13);
        for sizes in [vec![1], vec![24], vec![13, 2, 9]] {
            let slots = [2, 0, 1];
            let trees: Vec<(usize, Parents)> = sizes
                .iter()
                .zip(slots)
                .map(|(&n, slot)| (slot, bush(&mut random, n)))
                .collect();
            for form in forms() {
                check_layer(&gpu, &world, &trees, form);
            }
        }
    }
}

#[test]
fn verify_at_the_production_shape_equals_the_references() {
    let Some(gpu) = Device::open() else { return };
    let shape = Shape {
        n_k_heads: 16,
        n_v_heads: 48,
        head_map: HeadMap::Tiled,
    };
    let world = World::new(&gpu, shape, [1, 1, 64], 14);
    for n in [1, 24, 64] {
        check_layer(
            &gpu,
            &world,
            &[(0, bush(&mut Random::new(21), n))],
            Exactness::Factors,
        );
    }
}

#[test]
fn commit_and_tree_drift_little_in_500_steps() {
    let Some(gpu) = Device::open() else { return };
    let mut random = Random::new(22);
    let shape = shapes()[0];
    let mut world = World::new(&gpu, shape, [1, 1, 64], 15);
    let mut states = world.state_of(&gpu, 0, 0);
    for step in 0..500 {
        let n = 1 + random.below(12);
        let parents = bush(&mut random, n);
        let prepared = Prepared::new(shape, n, &mut random);
        let trees = [(0, parents.clone())];
        fill_factors(&gpu, &mut world, &trees, &prepared);
        let o = run_tree(
            &gpu,
            &world,
            &trees,
            &prepared,
            Exactness::Factors,
            bucket(n),
        );
        let line = path(&parents, random.below(n));
        let leaf = line[line.len() - 1];
        let mut right = vec![0.0; shape.values()];
        for &node in &line {
            for (head, state) in states.iter_mut().enumerate() {
                let mixed = (&prepared.mixed, &prepared.gates);
                let row = delta_world::HeadRows::new(shape, head, node..node + 1, mixed.0, mixed.1);
                let (mut u, o) = ([0.0; DIM], &mut right[head * DIM..][..DIM]);
                reference::step(state, row.tokens().token(0), &mut u, o);
            }
        }
        let got = &o[leaf * shape.values()..][..shape.values()];
        close(&format!("o of step {step}"), got, &right, 1e-4);
        run_commit(&gpu, &world, &[(0, &line)]);
    }
    let got = world.state_of(&gpu, 0, 0).concat();
    let error = close("the state after 500 steps", &got, &states.concat(), 1e-4);
    eprintln!("state drift after 500 steps: {error:.2e}");
}
