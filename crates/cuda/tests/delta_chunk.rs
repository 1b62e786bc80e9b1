//! Chunks of a prompt: convolution and delta rule in chunk form, with the state and the window they leave.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod card;
mod delta_world;

use card::{Random, close, same_bits};
use contract::HeadMap;
use cpu::reference::activation::{sigmoid, softplus};
use cpu::reference::{delta as reference, norm};
use cuda::launch::delta::{DIM, Inputs, Out, Rows, Shape, prefill, prefill_scratch_bytes};
use delta_world::{Device, HeadRows, World, chain, shapes};

/// What the projections of a prompt gave, and what the reference makes of it.
struct Prompt {
    rows: usize,
    qkv: Vec<f32>,
    z: Vec<f32>,
    alpha: Vec<f32>,
    beta: Vec<f32>,
}

impl Prompt {
    fn new(shape: Shape, rows: usize, random: &mut Random) -> Prompt {
        Prompt {
            rows,
            qkv: random.normals(rows * shape.channels(), 1.0),
            z: random.normals(rows * shape.values(), 1.0),
            alpha: random.normals(rows * shape.n_v_heads, 2.0),
            beta: random.normals(rows * shape.n_v_heads, 2.0),
        }
    }

    fn part(&self, shape: Shape, range: std::ops::Range<usize>) -> Prompt {
        let cut = |all: &[f32], width: usize| all[range.start * width..range.end * width].to_vec();
        Prompt {
            rows: range.len(),
            qkv: cut(&self.qkv, shape.channels()),
            z: cut(&self.z, shape.values()),
            alpha: cut(&self.alpha, shape.n_v_heads),
            beta: cut(&self.beta, shape.n_v_heads),
        }
    }

    fn gates(&self, shape: Shape, world: &World) -> Vec<f32> {
        let heads = shape.n_v_heads;
        let mut gates = Vec::new();
        for row in 0..self.rows {
            for head in 0..heads {
                let alpha = self.alpha[row * heads + head];
                let weights = &world.weights;
                gates.push(weights.a[head] * softplus(alpha + weights.dt[head]));
            }
            gates.extend((0..heads).map(|head| sigmoid(self.beta[row * heads + head])));
        }
        gates
    }
}

/// Runs a layer over a chunk of a prompt; gives the normed output rows. `capacity` is what buffers hold.
fn run(
    gpu: &Device,
    world: &World,
    slot: usize,
    committed: usize,
    prompt: &Prompt,
    capacity: usize,
) -> Vec<f32> {
    let shape = world.shape;
    let upload = |values: &[f32], width: usize| {
        let mut padded = values.to_vec();
        padded.resize(capacity * width, f32::NAN);
        let buffer = gpu.upload(&padded).unwrap();
        let at = buffer.ptr();
        (buffer, Rows { at, stride: width })
    };
    let (_qkv, qkv) = upload(&prompt.qkv, shape.channels());
    let (_z, z) = upload(&prompt.z, shape.values());
    let (_alpha, alpha) = upload(&prompt.alpha, shape.n_v_heads);
    let (_beta, beta) = upload(&prompt.beta, shape.n_v_heads);
    let inputs = Inputs {
        qkv,
        z,
        alpha,
        beta,
    };
    let scratch = card::poisoned::<u8>(gpu, prefill_scratch_bytes(shape, capacity));
    let header = gpu
        .upload(&delta_world::chunk(slot, committed, prompt.rows))
        .unwrap();
    let result = card::poisoned::<f32>(gpu, capacity * shape.values());
    let out = Out {
        f32: result.ptr(),
        ..Out::default()
    };
    let layer = world.layer(0);
    let header = header.ptr();
    gpu.launch(&prefill(
        shape,
        capacity,
        header,
        &layer,
        &inputs,
        scratch.ptr(),
        &out,
    ));
    let mut result = result.download(gpu).unwrap();
    let rest = result.split_off(prompt.rows * shape.values());
    assert!(
        rest.iter().all(|x| x.is_nan()),
        "rows of nobody were written"
    );
    result
}

/// The reference, token by token in f32: output rows, states and window.
fn right(
    world: &World,
    mut states: Vec<Vec<f32>>,
    window: &[f32],
    prompt: &Prompt,
) -> (Vec<f32>, Vec<Vec<f32>>, Vec<f32>) {
    let shape = world.shape;
    let rows = prompt.rows;
    let mixed = delta_world::mixed(shape, &world.weights, window, &prompt.qkv, &chain(rows));
    let gates = prompt.gates(shape, world);
    let mut out = vec![0.0; rows * shape.values()];
    for (head, state) in states.iter_mut().enumerate() {
        let own = HeadRows::new(shape, head, 0..rows, &mixed, &gates);
        let tokens = own.tokens();
        let mut u = [0.0; DIM];
        for row in 0..rows {
            let at = row * shape.values() + head * DIM;
            let o = &mut out[at..at + DIM];
            reference::step(state, tokens.token(row), &mut u, o);
            norm::gated_rms(
                o,
                &world.weights.norm,
                &prompt.z[at..at + DIM],
                delta_world::EPS,
            );
        }
    }
    let mut all = window.to_vec();
    all.extend(&prompt.qkv);
    let window = all.split_off(rows * shape.channels());
    (out, states, window)
}

/// Runs chunk after chunk and compares everything with the reference.
fn check(gpu: &Device, shape: Shape, start: usize, cuts: &[usize], most: f64) -> [f64; 2] {
    let world = World::new(gpu, shape, [2, 1, 1], 31);
    let mut random = Random::new(32);
    let rows: usize = cuts.iter().sum();
    let prompt = Prompt::new(shape, rows, &mut random);
    let (states, window) = (world.state_of(gpu, 1, 0), world.window_of(gpu, 1, 0));
    let (out, states, window) = right(&world, states, &window, &prompt);
    let mut at = 0;
    let mut got = Vec::new();
    for &rows in cuts {
        let part = prompt.part(shape, at..at + rows);
        got.extend(run(
            gpu,
            &world,
            1,
            start + at,
            &part,
            rows.next_multiple_of(128),
        ));
        at += rows;
    }
    let what = format!("{shape:?}, {cuts:?} rows from {start}");
    let output = close(&format!("{what}: rows"), &got, &out, most);
    let kept = world.state_of(gpu, 1, 0).concat();
    let state = close(&format!("{what}: state"), &kept, &states.concat(), most);
    same_bits(
        &format!("{what}: window"),
        &world.window_of(gpu, 1, 0),
        &window,
    );
    [output, state]
}

#[test]
fn chunk_prefill_equals_the_steps() {
    let Some(gpu) = Device::open() else { return };
    for shape in shapes() {
        for (start, cuts) in [
            (0, vec![64]),
            (0, vec![1]),
            (0, vec![2]),
            (0, vec![200]),
            (64, vec![128, 63]),
            (37, vec![90]),
            (63, vec![1, 1, 64]),
            (10, vec![5, 3, 120]),
        ] {
            let [rows, state] = check(&gpu, shape, start, &cuts, 5e-5);
            eprintln!("{shape:?} {cuts:?} from {start}: rows {rows:.2e}, state {state:.2e}");
        }
    }
}

#[test]
fn chunk_prefill_at_the_production_shape_equals_the_steps() {
    let Some(gpu) = Device::open() else { return };
    let shape = Shape {
        n_k_heads: 16,
        n_v_heads: 48,
        head_map: HeadMap::Tiled,
    };
    let [rows, state] = check(&gpu, shape, 0, &[2048], 5e-5);
    eprintln!("2048 positions: rows {rows:.2e}, state {state:.2e}");
}

#[test]
fn chunk_state_drifts_little_over_16384_positions() {
    let Some(gpu) = Device::open() else { return };
    let cuts = [2048; 8];
    let [rows, state] = check(&gpu, shapes()[1], 0, &cuts, 1e-4);
    eprintln!("16384 positions: rows {rows:.2e}, state {state:.2e}");
}

#[test]
fn chunk_cuts_at_multiples_of_64_change_no_bit() {
    let Some(gpu) = Device::open() else { return };
    let shape = shapes()[2];
    let prompt = Prompt::new(shape, 300, &mut Random::new(33));
    let mut results = Vec::new();
    for cuts in [vec![300], vec![64, 128, 108], vec![192, 108]] {
        let world = World::new(&gpu, shape, [1, 1, 1], 34);
        let (mut at, mut got) = (0, Vec::new());
        for rows in cuts {
            let part = prompt.part(shape, at..at + rows);
            got.extend(run(&gpu, &world, 0, 640 + at, &part, 384));
            at += rows;
        }
        results.push((got, world.state_of(&gpu, 0, 0).concat()));
    }
    for other in &results[1..] {
        same_bits("rows", &other.0, &results[0].0);
        same_bits("state", &other.1, &results[0].1);
    }
}

#[test]
fn chunk_decays_from_nothing_to_all() {
    let Some(gpu) = Device::open() else { return };
    let shape = shapes()[0];
    let mut world = World::new(&gpu, shape, [1, 1, 1], 35);
    world.set_decay(&gpu, &[-1.0, -1.0], &[0.0, 0.0]);
    let mut random = Random::new(36);
    let mut prompt = Prompt::new(shape, 192, &mut random);
    for alpha in &mut prompt.alpha {
        *alpha = [-80.0, 50.0, 0.0, 700.0, -6.0, -6.0, -6.0][random.below(7)];
    }
    let (states, window) = (world.state_of(&gpu, 0, 0), world.window_of(&gpu, 0, 0));
    let (out, states, _) = right(&world, states, &window, &prompt);
    let got = run(&gpu, &world, 0, 0, &prompt, 256);
    close("rows", &got, &out, 5e-5);
    close(
        "state",
        &world.state_of(&gpu, 0, 0).concat(),
        &states.concat(),
        5e-5,
    );
}
