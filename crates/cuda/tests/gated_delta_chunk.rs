//! Prefill chunks: convolution and chunked delta rule, and the final state and window.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod fixtures {
    pub mod gated_delta;
    pub mod gpu;
}

use contract::HeadMap;
use cpu::reference::{delta as reference, norm};
use cuda::launch::gated_delta::{
    ChunkLaunch, ChunkScanKernel, DIM, GatedNormOutput, Shape, prefill, prefill_scratch_bytes,
};
use cuda::launch::norm::ActivationBuffers;
use fixtures::gated_delta::{DeltaDevice, DeltaFixture, HeadRows, Projected, chain, shapes};
use fixtures::gpu::{Random, close, same_bits};

/// The scan forms that this GPU supports.
fn forms(gpu: &DeltaDevice) -> Vec<ChunkScanKernel> {
    let mut forms = vec![ChunkScanKernel::Mma];
    if gpu.info().props().has_wgmma {
        forms.push(ChunkScanKernel::Sm90);
    }
    forms
}

/// Runs a layer over a prefill chunk with buffers of `capacity` rows. Returns the normed output
/// rows.
fn run(
    gpu: &DeltaDevice,
    fixture: &DeltaFixture,
    kernel: ChunkScanKernel,
    [slot, committed, capacity]: [usize; 3],
    prompt: &Projected,
) -> Vec<f32> {
    let shape = fixture.shape;
    let device = prompt.upload(gpu, shape, capacity);
    let scratch = fixtures::gpu::poisoned::<u8>(gpu, prefill_scratch_bytes(shape, capacity));
    let header = gpu
        .upload(&fixtures::gated_delta::chunk(slot, committed, prompt.rows))
        .unwrap();
    let result = fixtures::gpu::poisoned::<f32>(gpu, capacity * shape.values());
    let out = GatedNormOutput::of(ActivationBuffers::f32(result.ptr()));
    let chunk = ChunkLaunch {
        shape,
        rows: capacity,
        chunk: header.ptr(),
        layer: &fixture.layer(0),
        inputs: &device.inputs,
    };
    gpu.launch(&prefill(kernel, &chunk, scratch.ptr(), &out));
    let mut result = result.download(gpu).unwrap();
    let rest = result.split_off(prompt.rows * shape.values());
    assert!(rest.iter().all(|x| x.is_nan()), "padding rows were written");
    result
}

/// The f32 reference, token by token: output rows, states and window.
fn right(
    fixture: &DeltaFixture,
    mut states: Vec<Vec<f32>>,
    window: &[f32],
    prompt: &Projected,
) -> (Vec<f32>, Vec<Vec<f32>>, Vec<f32>) {
    let shape = fixture.shape;
    let rows = prompt.rows;
    let mixed =
        fixtures::gated_delta::mixed(shape, &fixture.weights, window, &prompt.qkv, &chain(rows));
    let gates = prompt.gates(shape, &fixture.weights);
    let mut out = vec![0.0; rows * shape.values()];
    for (head, state) in states.iter_mut().enumerate() {
        let own = HeadRows::new(shape, head, 0..rows, &mixed, &gates);
        let tokens = own.tokens();
        let mut u = [0.0; DIM];
        for row in 0..rows {
            let at = row * shape.values() + head * DIM;
            let o = &mut out[at..at + DIM];
            reference::recurrent_step(state, tokens.token(row), &mut u, o);
            norm::gated_rms(
                o,
                &fixture.weights.norm,
                &prompt.z[at..at + DIM],
                fixtures::gated_delta::EPS,
            );
        }
    }
    let mut all = window.to_vec();
    all.extend(&prompt.qkv);
    let window = all.split_off(rows * shape.channels());
    (out, states, window)
}

/// Runs consecutive chunks and compares all results with the reference.
fn check(
    gpu: &DeltaDevice,
    kernel: ChunkScanKernel,
    shape: Shape,
    start: usize,
    cuts: &[usize],
    most: f64,
) -> [f64; 2] {
    let fixture = DeltaFixture::new(gpu, shape, [2, 1, 1], 31);
    let mut random = Random::new(32);
    let rows: usize = cuts.iter().sum();
    let prompt = Projected::new(shape, rows, &mut random);
    let (states, window) = (fixture.state_of(gpu, 1, 0), fixture.window_of(gpu, 1, 0));
    let (out, states, window) = right(&fixture, states, &window, &prompt);
    let mut at = 0;
    let mut got = Vec::new();
    for &rows in cuts {
        let part = prompt.part(shape, at..at + rows);
        let placement = [1, start + at, rows.next_multiple_of(128)];
        got.extend(run(gpu, &fixture, kernel, placement, &part));
        at += rows;
    }
    let what = format!("{kernel:?} {shape:?}, {cuts:?} rows from {start}");
    let output = close(&format!("{what}: rows"), &got, &out, most);
    let final_state = fixture.state_of(gpu, 1, 0).concat();
    let state = close(
        &format!("{what}: state"),
        &final_state,
        &states.concat(),
        most,
    );
    same_bits(
        &format!("{what}: window"),
        &fixture.window_of(gpu, 1, 0),
        &window,
    );
    [output, state]
}

#[test]
fn delta_chunked_prefill_equals_recurrent_steps() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
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
            for form in forms(&gpu) {
                let [rows, state] = check(&gpu, form, shape, start, &cuts, 5e-5);
                eprintln!("{form:?} {cuts:?} from {start}: rows {rows:.2e}, state {state:.2e}");
            }
        }
    }
}

#[test]
fn delta_chunked_prefill_of_production_shape_equals_recurrent_steps() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let shape = Shape {
        n_k_heads: 16,
        n_v_heads: 48,
        head_map: HeadMap::Tiled,
    };
    for form in forms(&gpu) {
        let [rows, state] = check(&gpu, form, shape, 0, &[2048], 5e-5);
        eprintln!("{form:?}, 2048 positions: rows {rows:.2e}, state {state:.2e}");
    }
}

#[test]
fn delta_chunked_state_drift_stays_bounded_over_16384_positions() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let cuts = [2048; 8];
    for form in forms(&gpu) {
        let [rows, state] = check(&gpu, form, shapes()[1], 0, &cuts, 1e-4);
        eprintln!("{form:?}, 16384 positions: rows {rows:.2e}, state {state:.2e}");
    }
}

#[test]
fn delta_chunk_boundaries_at_multiples_of_64_change_no_bit() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let shape = shapes()[2];
    let prompt = Projected::new(shape, 300, &mut Random::new(33));
    for form in forms(&gpu) {
        let mut results = Vec::new();
        for cuts in [vec![300], vec![64, 128, 108], vec![192, 108]] {
            let fixture = DeltaFixture::new(&gpu, shape, [1, 1, 1], 34);
            let (mut at, mut got) = (0, Vec::new());
            for rows in cuts {
                let part = prompt.part(shape, at..at + rows);
                got.extend(run(&gpu, &fixture, form, [0, 640 + at, 384], &part));
                at += rows;
            }
            results.push((got, fixture.state_of(&gpu, 0, 0).concat()));
        }
        for other in &results[1..] {
            same_bits("rows", &other.0, &results[0].0);
            same_bits("state", &other.1, &results[0].1);
        }
    }
}

#[test]
fn delta_chunk_handles_all_decay_values() {
    let Some(gpu) = DeltaDevice::open() else {
        return;
    };
    let shape = shapes()[0];
    let mut random = Random::new(36);
    let mut prompt = Projected::new(shape, 192, &mut random);
    for alpha in &mut prompt.alpha {
        *alpha = [-80.0, 50.0, 0.0, 700.0, -6.0, -6.0, -6.0][random.below(7)];
    }
    for form in forms(&gpu) {
        let mut fixture = DeltaFixture::new(&gpu, shape, [1, 1, 1], 35);
        fixture.set_decay(&gpu, &[-1.0, -1.0], &[0.0, 0.0]);
        let (states, window) = (fixture.state_of(&gpu, 0, 0), fixture.window_of(&gpu, 0, 0));
        let (out, states, _) = right(&fixture, states, &window, &prompt);
        let got = run(&gpu, &fixture, form, [0, 0, 256], &prompt);
        close("rows", &got, &out, 5e-5);
        let got = fixture.state_of(&gpu, 0, 0).concat();
        close("state", &got, &states.concat(), 5e-5);
    }
}
