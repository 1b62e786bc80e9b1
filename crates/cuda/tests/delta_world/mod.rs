//! What the tests of the delta kernels share: headers, memory of a group of layers, and the reference.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test file uses its part of this, and all of it is a test"
)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::rc::Rc;

use contract::HeadMap;
use cpu::reference::activation::{sigmoid, softplus};
use cpu::reference::{conv, delta, norm};
use cuda::compile::Modules;
use cuda::driver::{Buffer, Gpu};
use cuda::launch::delta::{DIM, Group, Inputs, Layer, Rows, Shape, Slots, TAPS, order};
use cuda::launch::{Launch, Unit};

use crate::card::{self, Random};

/// The card with the units compiled so far.
pub struct Device {
    gpu: Gpu,
    modules: RefCell<HashMap<Unit, Rc<Modules>>>,
}

impl Device {
    pub fn open() -> Option<Device> {
        let modules = RefCell::default();
        card::gpu().map(|gpu| Device { gpu, modules })
    }

    /// Compiles units, several at a time.
    pub fn compile(&self, units: &[Unit]) {
        let known = |unit: &Unit| self.modules.borrow().contains_key(unit);
        let mut new: Vec<Unit> = units.iter().filter(|u| !known(u)).cloned().collect();
        new.sort();
        new.dedup();
        if new.is_empty() {
            return;
        }
        let modules = Rc::new(card::modules(&self.gpu, &new));
        for unit in new {
            self.modules.borrow_mut().insert(unit, Rc::clone(&modules));
        }
    }

    /// Runs launches in order and waits.
    pub fn launch(&self, launches: &[Launch]) {
        let units: Vec<Unit> = launches.iter().map(|l| l.unit.clone()).collect();
        self.compile(&units);
        for launch in launches {
            let modules = Rc::clone(&self.modules.borrow()[&launch.unit]);
            self.gpu.run(&modules, launch).unwrap();
        }
        self.gpu.sync().unwrap();
    }
}

impl Deref for Device {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.gpu
    }
}

/// Parents of a tree's nodes, in the tree's own numbers.
pub type Parents = Vec<Option<usize>>;

/// Heads as in the specimens, and the production shape at the end.
pub fn shapes() -> Vec<Shape> {
    [
        (2, 2, HeadMap::Tiled),
        (1, 3, HeadMap::Tiled),
        (2, 6, HeadMap::Tiled),
        (2, 4, HeadMap::Grouped),
    ]
    .map(|(n_k_heads, n_v_heads, head_map)| Shape {
        n_k_heads,
        n_v_heads,
        head_map,
    })
    .to_vec()
}

pub fn chain(n: usize) -> Parents {
    (0..n).map(|i| i.checked_sub(1)).collect()
}

pub fn star(n: usize) -> Parents {
    (0..n).map(|i| (i > 0).then_some(0)).collect()
}

/// A tree whose nodes hang anywhere before them, mostly near.
pub fn random_tree(random: &mut Random, n: usize) -> Parents {
    (0..n)
        .map(|i| (i > 0).then(|| i - 1 - random.below(i).min(random.below(i))))
        .collect()
}

/// The path from the root to `node`.
pub fn path(parents: &[Option<usize>], node: usize) -> Vec<usize> {
    let mut path = vec![node];
    while let Some(parent) = parents[path[path.len() - 1]] {
        path.push(parent);
    }
    path.reverse();
    path
}

/// The bytes of a `Step` of trees `(slot, parents)`, as 32-bit words.
pub fn step(trees: &[(usize, Parents)]) -> Vec<i32> {
    let mut words = vec![0; 544 + 64 * order::PARTS];
    let fields = |at: usize| 20 + 64 * at;
    words[fields(2)..fields(3)].fill(-1);
    words[fields(3)..fields(4)].fill(-1);
    let mut row = 0;
    words[1] = trees.len() as i32;
    for (index, (slot, parents)) in trees.iter().enumerate() {
        let first = row;
        words[4 + 4 * index..][..4].copy_from_slice(&[
            *slot as i32,
            0,
            first as i32,
            parents.len() as i32,
        ]);
        for (part, list) in order::header(parents).iter().enumerate() {
            for (at, &word) in list.iter().enumerate() {
                words[544 + 64 * part + first + at] = word as i32;
            }
        }
        for (node, parent) in parents.iter().enumerate() {
            words[fields(2) + row] = index as i32;
            words[fields(3) + row] = parent.map_or(-1, |p| (first + p) as i32);
            let line = path(parents, node);
            words[fields(4) + row] = line.len() as i32 - 1;
            let mask = line.iter().fold(0_u64, |mask, j| mask | 1 << j);
            words[fields(5) + 2 * row] = mask as i32;
            words[fields(5) + 2 * row + 1] = (mask >> 32) as i32;
            row += 1;
        }
    }
    words[0] = row as i32;
    words
}

/// The bytes of a `Commit` of `(slot, path)`, as 32-bit words.
pub fn commit(paths: &[(usize, &[usize])]) -> Vec<i32> {
    let mut words = vec![0; 4 + 4 * 68];
    words[0] = paths.len() as i32;
    for (index, (slot, path)) in paths.iter().enumerate() {
        let at = 4 + 68 * index;
        words[at] = *slot as i32;
        words[at + 2] = path.len() as i32;
        for (entry, node) in words[at + 4..].iter_mut().zip(*path) {
            *entry = *node as i32;
        }
    }
    words
}

/// The bytes of a `Chunk` without its tokens, as 32-bit words.
pub fn chunk(slot: usize, committed: usize, rows: usize) -> Vec<i32> {
    let mut words = vec![0; 4 + 64];
    words[..3].copy_from_slice(&[rows as i32, slot as i32, committed as i32]);
    words
}

/// Weights of a layer on the host.
#[derive(Clone)]
pub struct Weights {
    /// `[channels][4]`.
    pub conv: Vec<f32>,
    pub a: Vec<f32>,
    pub dt: Vec<f32>,
    pub norm: Vec<f32>,
}

impl Weights {
    pub fn new(shape: Shape, random: &mut Random) -> Weights {
        Weights {
            conv: random.normals(shape.channels() * TAPS, 0.5),
            a: random.between(shape.n_v_heads, -1.0, -0.02),
            dt: random.normals(shape.n_v_heads, 1.0),
            norm: random.between(DIM, 0.5, 1.5),
        }
    }
}

/// A group of layers on the card: memory of all slots, one layer's weights.
pub struct DeltaFixture {
    pub shape: Shape,
    pub layers: usize,
    pub nodes: usize,
    pub state: Buffer<f32>,
    pub window: Buffer<f32>,
    pub factors: Buffer<f32>,
    pub weights: Weights,
    conv: Buffer<f32>,
    a: Buffer<f32>,
    dt: Buffer<f32>,
    norm: Buffer<f32>,
}

pub const EPS: f32 = 1e-6;

impl DeltaFixture {
    /// `slots` slots of `layers` layers with room for trees of `nodes` nodes; random states and windows.
    pub fn new(
        gpu: &Gpu,
        shape: Shape,
        [slots, layers, nodes]: [usize; 3],
        seed: u64,
    ) -> DeltaFixture {
        let mut random = Random::new(seed);
        let weights = Weights::new(shape, &mut random);
        let all = slots * layers;
        let state = random.normals(all * shape.state_bytes() / 4, 0.3);
        let window = random.normals(all * shape.window_bytes() / 4, 1.0);
        DeltaFixture {
            shape,
            layers,
            nodes,
            state: gpu.upload(&state).unwrap(),
            window: gpu.upload(&window).unwrap(),
            factors: card::poisoned(gpu, all * shape.factor_bytes(nodes) / 4),
            conv: gpu.upload(&weights.conv).unwrap(),
            a: gpu.upload(&weights.a).unwrap(),
            dt: gpu.upload(&weights.dt).unwrap(),
            norm: gpu.upload(&weights.norm).unwrap(),
            weights,
        }
    }

    /// Replaces the decays' weights.
    pub fn set_decay(&mut self, gpu: &Gpu, a: &[f32], dt: &[f32]) {
        self.a.upload(gpu, a).unwrap();
        self.dt.upload(gpu, dt).unwrap();
        self.weights.a = a.to_vec();
        self.weights.dt = dt.to_vec();
    }

    fn slots(&self, base: u64, bytes: usize, layer: usize) -> Slots {
        Slots {
            at: base + (layer * bytes) as u64,
            stride: (self.layers * bytes) as u64,
        }
    }

    pub fn layer(&self, layer: usize) -> Layer {
        let shape = self.shape;
        Layer {
            state: self.slots(self.state.ptr(), shape.state_bytes(), layer),
            window: self.slots(self.window.ptr(), shape.window_bytes(), layer),
            factors: self.slots(self.factors.ptr(), shape.factor_bytes(self.nodes), layer),
            conv: self.conv.ptr(),
            a: self.a.ptr(),
            dt: self.dt.ptr(),
            norm: self.norm.ptr(),
            eps: EPS,
        }
    }

    pub fn group(&self) -> Group {
        let layer = self.layer(0);
        Group {
            layers: self.layers,
            state: layer.state,
            window: layer.window,
            factors: layer.factors,
            layer_strides: [
                self.shape.state_bytes() as u64,
                self.shape.window_bytes() as u64,
                self.shape.factor_bytes(self.nodes) as u64,
            ],
        }
    }

    /// One slot's state of a layer as the reference has it: `[head][k][v]`.
    pub fn state_of(&self, gpu: &Gpu, slot: usize, layer: usize) -> Vec<Vec<f32>> {
        let len = self.shape.state_bytes() / 4;
        let at = (slot * self.layers + layer) * len;
        let state = self.state.download_range(gpu, at..at + len).unwrap();
        state.chunks_exact(DIM * DIM).map(transpose).collect()
    }

    pub fn window_of(&self, gpu: &Gpu, slot: usize, layer: usize) -> Vec<f32> {
        let len = self.shape.window_bytes() / 4;
        let at = (slot * self.layers + layer) * len;
        self.window.download_range(gpu, at..at + len).unwrap()
    }

    /// What a node left: `(k, u, g, x)`.
    pub fn factors_of(&self, gpu: &Gpu, slot: usize, layer: usize, node: usize) -> [Vec<f32>; 4] {
        let shape = self.shape;
        let len = shape.factor_bytes(1) / 4;
        let at = ((slot * self.layers + layer) * self.nodes + node) * len;
        let all = self.factors.download_range(gpu, at..at + len).unwrap();
        let (k, rest) = all.split_at(shape.keys());
        let (u, rest) = rest.split_at(shape.values());
        let (g, x) = rest.split_at(shape.n_v_heads.next_multiple_of(32));
        [
            k.to_vec(),
            u.to_vec(),
            g[..shape.n_v_heads].to_vec(),
            x.to_vec(),
        ]
    }
}

/// What the projections of a layer gave, on the host.
pub struct Projected {
    pub rows: usize,
    pub qkv: Vec<f32>,
    pub z: Vec<f32>,
    pub alpha: Vec<f32>,
    pub beta: Vec<f32>,
}

impl Projected {
    pub fn new(shape: Shape, rows: usize, random: &mut Random) -> Projected {
        Projected {
            rows,
            qkv: random.normals(rows * shape.channels(), 1.0),
            z: random.normals(rows * shape.values(), 1.0),
            alpha: random.normals(rows * shape.n_v_heads, 2.0),
            beta: random.normals(rows * shape.n_v_heads, 2.0),
        }
    }

    pub fn part(&self, shape: Shape, range: Range<usize>) -> Projected {
        let cut = |all: &[f32], width: usize| all[range.start * width..range.end * width].to_vec();
        Projected {
            rows: range.len(),
            qkv: cut(&self.qkv, shape.channels()),
            z: cut(&self.z, shape.values()),
            alpha: cut(&self.alpha, shape.n_v_heads),
            beta: cut(&self.beta, shape.n_v_heads),
        }
    }

    /// `[rows][2][heads]`: g, then beta.
    pub fn gates(&self, shape: Shape, weights: &Weights) -> Vec<f32> {
        let heads = shape.n_v_heads;
        let mut gates = Vec::new();
        for row in 0..self.rows {
            for head in 0..heads {
                let alpha = self.alpha[row * heads + head];
                gates.push(weights.a[head] * softplus(alpha + weights.dt[head]));
            }
            gates.extend((0..heads).map(|head| sigmoid(self.beta[row * heads + head])));
        }
        gates
    }

    /// On the card, with NaN up to `capacity` rows and behind each row, so that strides are tried too.
    pub fn upload(&self, gpu: &Gpu, shape: Shape, capacity: usize) -> DeviceProjected {
        let put = |values: &[f32], width: usize| {
            let stride = width.next_multiple_of(4) + 8;
            let mut padded = vec![f32::NAN; capacity * stride];
            for (to, from) in padded.chunks_mut(stride).zip(values.chunks(width)) {
                to[..width].copy_from_slice(from);
            }
            let buffer = gpu.upload(&padded).unwrap();
            let at = buffer.ptr();
            (buffer, Rows { at, stride })
        };
        let (qkv_buffer, qkv) = put(&self.qkv, shape.channels());
        let (z_buffer, z) = put(&self.z, shape.values());
        let (alpha_buffer, alpha) = put(&self.alpha, shape.n_v_heads);
        let (beta_buffer, beta) = put(&self.beta, shape.n_v_heads);
        DeviceProjected {
            inputs: Inputs {
                qkv,
                z,
                alpha,
                beta,
            },
            _buffers: [qkv_buffer, z_buffer, alpha_buffer, beta_buffer],
        }
    }
}

/// [`Projected`] in device memory.
pub struct DeviceProjected {
    pub inputs: Inputs,
    _buffers: [Buffer<f32>; 4],
}

/// A 128 x 128 matrix with its indices exchanged.
pub fn transpose(matrix: &[f32]) -> Vec<f32> {
    (0..DIM * DIM)
        .map(|i| matrix[i % DIM * DIM + i / DIM])
        .collect()
}

/// `mixed` rows of the reference: convolution along `parents`, SiLU, norms of q and k.
pub fn mixed(
    shape: Shape,
    weights: &Weights,
    window: &[f32],
    x: &[f32],
    parents: &[Option<usize>],
) -> Vec<f32> {
    let channels = shape.channels();
    // The reference wants the weights tap by tap.
    let by_tap: Vec<f32> = (0..channels * TAPS)
        .map(|i| weights.conv[i % channels * TAPS + i / channels])
        .collect();
    let mut out = vec![0.0; x.len()];
    conv::tree(window, x, parents, &by_tap, &mut out);
    for row in out.chunks_exact_mut(channels) {
        for (head, values) in row.chunks_exact_mut(DIM).enumerate() {
            if head < shape.n_k_heads {
                norm::l2(values, 1e-6, 1.0 / (DIM as f32).sqrt());
            } else if head < 2 * shape.n_k_heads {
                norm::l2(values, 1e-6, 1.0);
            }
        }
    }
    out
}

/// One head's columns of `mixed` and `gates` rows `first..first + n`.
pub struct HeadRows {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    g: Vec<f32>,
    beta: Vec<f32>,
}

impl HeadRows {
    pub fn new(
        shape: Shape,
        head: usize,
        rows: Range<usize>,
        mixed: &[f32],
        gates: &[f32],
    ) -> HeadRows {
        let (channels, keys, heads) = (shape.channels(), shape.keys(), shape.n_v_heads);
        let key = shape.head_map.k_head(head, shape.n_k_heads, heads);
        let part = |at: usize| -> Vec<f32> {
            rows.clone()
                .flat_map(|row| mixed[row * channels + at..][..DIM].to_vec())
                .collect()
        };
        let gate = |at: usize| {
            rows.clone()
                .map(|row| gates[row * 2 * heads + at])
                .collect()
        };
        HeadRows {
            q: part(key * DIM),
            k: part(keys + key * DIM),
            v: part(2 * keys + head * DIM),
            g: gate(head),
            beta: gate(heads + head),
        }
    }

    pub fn tokens(&self) -> delta::Tokens<'_> {
        delta::Tokens {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            g: &self.g,
            beta: &self.beta,
        }
    }
}

/// `(u, o)` of a tree's rows, each `[n][values]`, from the states of all heads.
pub fn tree(
    shape: Shape,
    states: &[Vec<f32>],
    first: usize,
    parents: &[Option<usize>],
    mixed: &[f32],
    gates: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let n = parents.len();
    let (mut u, mut o) = (vec![0.0; n * shape.values()], vec![0.0; n * shape.values()]);
    for (head, state) in states.iter().enumerate() {
        let rows = HeadRows::new(shape, head, first..first + n, mixed, gates);
        let (mut u_head, mut o_head) = (vec![0.0; n * DIM], vec![0.0; n * DIM]);
        delta::tree(state, rows.tokens(), parents, &mut u_head, &mut o_head);
        for i in 0..n {
            let at = i * shape.values() + head * DIM;
            u[at..at + DIM].copy_from_slice(&u_head[i * DIM..][..DIM]);
            o[at..at + DIM].copy_from_slice(&o_head[i * DIM..][..DIM]);
        }
    }
    (u, o)
}

/// `(u, o)` of a head of a chain in f64, without the committed state: beside what is tried here that is nothing.
pub fn chain_in_f64(rows: &HeadRows) -> [Vec<f64>; 2] {
    let tokens = rows.tokens();
    let n = tokens.g.len();
    let dot = |a: &[f32], i: usize, j: usize| -> f64 {
        let (a, k) = (&a[i * DIM..][..DIM], &tokens.k[j * DIM..][..DIM]);
        a.iter()
            .zip(k)
            .map(|(a, k)| f64::from(*a) * f64::from(*k))
            .sum()
    };
    let until: Vec<f64> = (0..n)
        .map(|i| tokens.g[..=i].iter().map(|g| f64::from(*g)).sum())
        .collect();
    let mut out = [vec![0.0; n * DIM], vec![0.0; n * DIM]];
    for i in 0..n {
        for c in 0..DIM {
            out[0][i * DIM + c] = f64::from(tokens.beta[i]) * f64::from(tokens.v[i * DIM + c]);
        }
        for j in 0..=i {
            let decay = (until[i] - until[j]).exp();
            let of_u = if j < i {
                f64::from(tokens.beta[i]) * decay * dot(tokens.k, i, j)
            } else {
                0.0
            };
            let of_o = decay * dot(tokens.q, i, j);
            for c in 0..DIM {
                out[0][i * DIM + c] -= of_u * out[0][j * DIM + c];
            }
            for c in 0..DIM {
                out[1][i * DIM + c] += of_o * out[0][j * DIM + c];
            }
        }
    }
    out
}
