//! A paged cache on the card with its copy on the host, and attention by the reference over the stored bytes.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test file uses its part of this, and all of it is a test"
)]

use contract::quant::{dequantize_row, quantize_row};
use contract::{KvFormat, QuantType, RopeSpec, Tree};
use cpu::reference::{activation, attention, norm, rope};
use cuda::driver::Buffer;
use cuda::launch::attention::{Cache, Card, Mask, PAGE, Planes, Projections, Shape};

use crate::card::{Random, poisoned};
use crate::step_world::{Device, Placed};

pub const EPS: f32 = 1e-6;

/// Heads `(query, key, dim, rotated)`, gate, norms.
pub fn shape(
    heads: (usize, usize, usize, usize),
    gate: bool,
    normed: bool,
    k: KvFormat,
    v: KvFormat,
) -> Shape {
    let (n_heads, n_kv_heads, head_dim, dims) = heads;
    Shape {
        n_heads,
        n_kv_heads,
        head_dim,
        rope: RopeSpec { dims, theta: 1e7 },
        gate,
        normed,
        k,
        v,
        eps: EPS,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window: 0,
        mask: Mask::Ancestors,
        ring_pages: 0,
    }
}

/// Every kind of heads that specimens and the production model have.
pub fn shapes(k: KvFormat, v: KvFormat) -> Vec<Shape> {
    [
        ((24, 4, 256, 64), true, true),
        ((3, 1, 256, 64), true, true),
        ((4, 2, 64, 16), true, true),
        ((4, 1, 64, 16), true, true),
        ((2, 2, 64, 16), true, true),
        ((8, 1, 128, 128), false, true),
        ((4, 4, 64, 32), false, false),
        ((32, 8, 128, 128), false, true),
    ]
    .map(|(heads, gate, normed)| shape(heads, gate, normed, k, v))
    .to_vec()
}

pub fn quant(format: KvFormat) -> QuantType {
    match format {
        KvFormat::F32 => QuantType::F32,
        KvFormat::F16 => QuantType::F16,
        KvFormat::Q8_0 => QuantType::Q8_0,
        KvFormat::Q4_0 => QuantType::Q4_0,
        other => panic!("{}", other.name()),
    }
}

/// A stored row as the two planes have it: values, scales.
pub fn split(ty: QuantType, row: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let mut bytes = vec![0; ty.row_bytes(row.len())];
    quantize_row(ty, row, &mut bytes);
    if ty.block_values() == 1 {
        return (bytes, Vec::new());
    }
    let blocks = bytes.chunks(ty.block_bytes());
    let values = blocks.clone().flat_map(|b| b[2..].to_vec()).collect();
    (values, blocks.flat_map(|b| b[..2].to_vec()).collect())
}

/// The reverse of [`split`], decoded.
pub fn join(ty: QuantType, values: &[u8], scales: &[u8], dim: usize) -> Vec<f32> {
    let mut out = vec![0.0; dim];
    if ty.block_values() == 1 {
        dequantize_row(ty, values, &mut out);
        return out;
    }
    let per_block = values.chunks(ty.block_bytes() - 2).zip(scales.chunks(2));
    let bytes: Vec<u8> = per_block.flat_map(|(v, s)| [s, v].concat()).collect();
    dequantize_row(ty, &bytes, &mut out);
    out
}

/// One layer's cache for some slots, pages in no order.
pub struct World {
    pub shape: Shape,
    pub card: Card,
    pub max_pages: usize,
    pub table: Vec<i32>,
    /// Values of keys, scales of keys, values of values, scales of values.
    pub planes: [Vec<u8>; 4],
    on_card: [Buffer<u8>; 4],
    table_on_card: Buffer<i32>,
    frequencies: Buffer<f64>,
}

impl World {
    pub fn new(
        gpu: &Device,
        random: &mut Random,
        shape: Shape,
        slots: usize,
        positions: usize,
    ) -> World {
        let max_pages = match shape.ring_pages {
            0 => positions.div_ceil(PAGE),
            pages => pages,
        };
        let pages = slots * max_pages + 1;
        let mut table: Vec<i32> = (0..pages as i32).collect();
        for i in (1..table.len()).rev() {
            table.swap(i, random.below(i + 1));
        }
        table.truncate(slots * max_pages);
        let rows = pages * shape.n_kv_heads * PAGE;
        let bytes = |format: KvFormat| {
            let ty = quant(format);
            let scales = if ty.block_values() == 1 {
                0
            } else {
                shape.head_dim / 16
            };
            let values = ty.row_bytes(shape.head_dim) - scales;
            [rows * values, rows * scales]
        };
        let sizes = [bytes(shape.k), bytes(shape.v)].concat();
        let planes = [0, 1, 2, 3].map(|i| vec![0xff; sizes[i]]);
        World {
            card: Card {
                multiprocessors: gpu.multiprocessors() as usize,
                shared_bytes: gpu.shared_per_block() as usize,
                path_order: false,
            },
            on_card: [0, 1, 2, 3].map(|i| poisoned(gpu, sizes[i])),
            table_on_card: gpu.upload(&table).unwrap(),
            frequencies: gpu.upload(&shape.frequencies()).unwrap(),
            shape,
            max_pages,
            table,
            planes,
        }
    }

    pub fn cache(&self) -> Cache {
        let [k, k_scale, v, v_scale] = [0, 1, 2, 3].map(|i| self.on_card[i].ptr());
        Cache {
            k,
            k_scale,
            v,
            v_scale,
            page_table: self.table_on_card.ptr(),
            max_pages: self.max_pages,
        }
    }

    pub fn all_planes(&self) -> Planes {
        Planes {
            base: [0, 1, 2, 3].map(|i| self.on_card[i].ptr()),
            layer_stride: [0; 4],
        }
    }

    pub fn upload(&mut self, gpu: &Device) {
        for (buffer, plane) in self.on_card.iter_mut().zip(&self.planes) {
            buffer.upload(gpu, plane).unwrap();
        }
    }

    pub fn download(&mut self, gpu: &Device) {
        for (buffer, plane) in self.on_card.iter().zip(&mut self.planes) {
            *plane = buffer.download(gpu).unwrap();
        }
    }

    /// The row of a position in every plane.
    fn row(&self, slot: usize, position: usize, head: usize) -> usize {
        let mut page = position / PAGE;
        if self.shape.ring_pages > 0 {
            page %= self.shape.ring_pages;
        }
        let page = self.table[slot * self.max_pages + page] as usize;
        (page * self.shape.n_kv_heads + head) * PAGE + position % PAGE
    }

    fn format(&self, plane: usize) -> KvFormat {
        if plane < 2 {
            self.shape.k
        } else {
            self.shape.v
        }
    }

    /// Bytes of a row of a plane.
    pub fn row_bytes(&self, plane: usize) -> usize {
        let ty = quant(self.format(plane));
        let scales = if ty.block_values() == 1 {
            0
        } else {
            self.shape.head_dim / 16
        };
        if plane % 2 == 1 {
            scales
        } else {
            ty.row_bytes(self.shape.head_dim) - scales
        }
    }

    /// The stored bytes of a position in a plane.
    pub fn stored(&self, plane: usize, slot: usize, position: usize, head: usize) -> &[u8] {
        let bytes = self.row_bytes(plane);
        &self.planes[plane][self.row(slot, position, head) * bytes..][..bytes]
    }

    /// Stores a key (`plane` 0) or a value (2).
    pub fn store(&mut self, plane: usize, at: (usize, usize, usize), row: &[f32]) {
        let (slot, position, head) = at;
        let (values, scales) = split(quant(self.format(plane)), row);
        let index = self.row(slot, position, head);
        for (plane, bytes) in [(plane, values), (plane + 1, scales)] {
            let n = self.row_bytes(plane);
            self.planes[plane][index * n..][..n].copy_from_slice(&bytes);
        }
    }

    /// A decoded key (`plane` 0) or value (2).
    pub fn load(&self, plane: usize, slot: usize, position: usize, head: usize) -> Vec<f32> {
        join(
            quant(self.format(plane)),
            self.stored(plane, slot, position, head),
            self.stored(plane + 1, slot, position, head),
            self.shape.head_dim,
        )
    }

    /// Random committed rows.
    pub fn commit_random(
        &mut self,
        random: &mut Random,
        slot: usize,
        positions: std::ops::Range<usize>,
    ) {
        for position in positions {
            for head in 0..self.shape.n_kv_heads {
                for plane in [0, 2] {
                    let row = random.normals(self.shape.head_dim, 1.0);
                    self.store(plane, (slot, position, head), &row);
                }
            }
        }
    }

    pub fn projections(&self, from: &Inputs) -> Projections {
        Projections {
            q: from.q.ptr(),
            k: from.k.ptr(),
            v: from.v.ptr(),
            kv_stride: self.shape.n_kv_heads * self.shape.head_dim,
            q_norm: from.q_norm.ptr(),
            k_norm: from.k_norm.ptr(),
            frequencies: self.frequencies.ptr(),
        }
    }

    /// Everything stored of a sequence that one of its rows may see, decoded once.
    pub fn decode(&self, placed: &Placed) -> Decoded {
        let first = match self.shape.window {
            0 => 0,
            window => (placed.committed + 1)
                .saturating_sub(window)
                .min(placed.committed),
        };
        let end = placed.committed + placed.tree.len();
        let plane = |plane: usize| -> Vec<Vec<f32>> {
            (0..self.shape.n_kv_heads)
                .map(|head| {
                    (first..end)
                        .flat_map(|at| self.load(plane, placed.slot, at, head))
                        .collect()
                })
                .collect()
        };
        Decoded {
            first,
            keys: plane(0),
            values: plane(2),
        }
    }

    /// Attention of one row by the reference, gates included: `[n_heads * head_dim]`.
    pub fn attend(
        &self,
        (placed, decoded): (&Placed, &Decoded),
        node: usize,
        q: &[f32],
        gates: &[f32],
    ) -> Vec<f32> {
        let shape = &self.shape;
        let (dim, group) = (shape.head_dim, shape.n_heads / shape.n_kv_heads);
        let at = placed.committed + usize::from(placed.tree.depths()[node]);
        let first = match shape.window {
            0 => 0,
            window => (at + 1).saturating_sub(window).min(placed.committed),
        };
        let nodes = (0..placed.tree.len())
            .filter(|&other| self.sees(&placed.tree, node, other))
            .map(|other| placed.committed + other);
        let positions: Vec<usize> = (first..placed.committed).chain(nodes).collect();
        let mut out = vec![0.0; shape.n_heads * dim];
        for (kv_head, out) in out.chunks_mut(group * dim).enumerate() {
            let gather = |rows: &[f32]| -> Vec<f32> {
                positions
                    .iter()
                    .flat_map(|p| &rows[(p - decoded.first) * dim..][..dim])
                    .copied()
                    .collect()
            };
            let keys = gather(&decoded.keys[kv_head]);
            let values = gather(&decoded.values[kv_head]);
            for (i, out) in out.chunks_mut(dim).enumerate() {
                let head = kv_head * group + i;
                let q = &q[head * dim..][..dim];
                attention::attend(q, &keys, &values, shape.scale, out);
                if shape.gate {
                    activation::sigmoid_gate(out, &gates[head * dim..][..dim]);
                }
            }
        }
        out
    }

    fn sees(&self, tree: &Tree, node: usize, other: usize) -> bool {
        match self.shape.mask {
            Mask::Ancestors => tree.ancestor_mask(contract::NodeIdx(node as u16)) >> other & 1 == 1,
            Mask::Full => true,
            Mask::Causal => other <= node,
        }
    }
}

/// Keys and values of a sequence from position `first` on, `[n_kv_heads][positions * head_dim]`.
pub struct Decoded {
    first: usize,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

/// Projections of rows, on the card and on the host.
pub struct Inputs {
    pub q: Buffer<f32>,
    pub k: Buffer<f32>,
    pub v: Buffer<f32>,
    q_norm: Buffer<f32>,
    k_norm: Buffer<f32>,
    pub host_q: Vec<f32>,
    pub host_k: Vec<f32>,
    pub host_v: Vec<f32>,
    host_q_norm: Vec<f32>,
    host_k_norm: Vec<f32>,
}

impl Inputs {
    pub fn random(gpu: &Device, random: &mut Random, shape: &Shape, rows: usize) -> Inputs {
        let width = shape.n_kv_heads * shape.head_dim;
        let host_q = random.normals(rows * shape.n_heads * shape.q_stride(), 1.5);
        let host_k = random.normals(rows * width, 1.5);
        let host_v = random.normals(rows * width, 1.0);
        let host_q_norm = random.between(shape.head_dim, 0.8, 1.6);
        let host_k_norm = random.between(shape.head_dim, 0.8, 1.6);
        Inputs {
            q: gpu.upload(&host_q).unwrap(),
            k: gpu.upload(&host_k).unwrap(),
            v: gpu.upload(&host_v).unwrap(),
            q_norm: gpu.upload(&host_q_norm).unwrap(),
            k_norm: gpu.upload(&host_k_norm).unwrap(),
            host_q,
            host_k,
            host_v,
            host_q_norm,
            host_k_norm,
        }
    }

    /// The query heads of a row after norm and rope, and their gates.
    pub fn queries(&self, shape: &Shape, row: usize, position: usize) -> (Vec<f32>, Vec<f32>) {
        let stride = shape.q_stride();
        let own = &self.host_q[row * shape.n_heads * stride..][..shape.n_heads * stride];
        let mut q = Vec::new();
        let mut gates = Vec::new();
        for head in own.chunks(stride) {
            let mut head = head.to_vec();
            gates.extend(head.split_off(shape.head_dim));
            turn(shape, &mut head, &self.host_q_norm, position);
            q.extend(head);
        }
        (q, gates)
    }

    /// A key head of a row after norm and rope.
    pub fn key(&self, shape: &Shape, row: usize, head: usize, position: usize) -> Vec<f32> {
        let at = (row * shape.n_kv_heads + head) * shape.head_dim;
        let mut key = self.host_k[at..][..shape.head_dim].to_vec();
        turn(shape, &mut key, &self.host_k_norm, position);
        key
    }

    /// A value head of a row.
    pub fn value(&self, shape: &Shape, row: usize, head: usize) -> &[f32] {
        let at = (row * shape.n_kv_heads + head) * shape.head_dim;
        &self.host_v[at..][..shape.head_dim]
    }
}

fn turn(shape: &Shape, head: &mut [f32], weight: &[f32], position: usize) {
    if shape.normed {
        norm::rms_in_place(head, weight, shape.eps);
    }
    let half = shape.rope.dims / 2;
    let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
    rope::angles(position, shape.rope.theta, &mut cos, &mut sin);
    rope::rotate(head, &cos, &sin);
}
