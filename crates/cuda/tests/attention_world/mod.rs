//! A paged cache on the card with its copy on the host, and attention by the reference over the stored bytes.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test file uses its part of this, and all of it is a test"
)]

use contract::KvFormat::{self, Bf16, F16, F32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Tq3_0};
use contract::quant::turn::{rotate, rotate_inverse};
use contract::{RopeSpec, Tree};
use cpu::reference::kv::{Codec, decode, encode};
use cpu::reference::{activation, attention};
use cuda::driver::Buffer;
use cuda::launch::attention::rows::{from_planes, row_bytes, to_planes};
use cuda::launch::attention::{
    Cache, Card, Mask, PAGE, Planes, Positions, Projections, Shape, combine, prepare, tree,
};
use cuda::launch::norm::Out;
use half::f16;

use crate::card::{Random, poisoned};
use crate::step_world::{Device, Placed, step};

mod inputs;

pub use inputs::Inputs;

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
        turned: true,
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

/// A stored row as the two planes have it: values, scales.
pub fn split(codec: Codec, row: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let mut bytes = vec![0; codec.row_bytes(row.len())];
    encode(codec, row, &mut bytes);
    let (value_bytes, scale_bytes) = row_bytes(codec.format(), row.len());
    let (mut values, mut scales) = (vec![0; value_bytes], vec![0; scale_bytes]);
    to_planes(codec.format(), &bytes, &mut values, &mut scales);
    (values, scales)
}

/// The reverse of [`split`], decoded as it is stored: turned, if it was turned.
pub fn join(format: KvFormat, values: &[u8], scales: &[u8], dim: usize) -> Vec<f32> {
    let mut bytes = Vec::new();
    from_planes(format, dim, (values, scales), &mut bytes);
    let mut out = vec![0.0; dim];
    decode(format, &bytes, &mut out);
    out
}

/// How many of the codes of two rows are not the same, and how far their scales are apart: codes at an edge between
/// two steps may fall either way.
pub fn max_code_distance(found: &[f32], expected: &[f32]) -> usize {
    let apart = |(f, e): &(&f32, &f32)| (**f - **e).abs() > 2e-3 * e.abs().max(1e-6);
    found.iter().zip(expected).filter(apart).count()
}

/// A head as it stands in the basis of keys or values that `codec` stores.
pub fn as_stored(codec: Codec, head: &mut [f32]) {
    if codec.is_rotated() {
        rotate(head);
    }
}

/// How keys and values of a shape are stored.
pub fn codecs(shape: &Shape) -> [Codec; 2] {
    [shape.k, shape.v].map(|format| Codec::new(format, shape.turned))
}

/// Every format for both, and pairs that stand for the rest.
pub const ALL: [(KvFormat, KvFormat); 15] = [
    (F32, F32),
    (F16, F16),
    (Bf16, Bf16),
    (Q8_0, Q8_0),
    (Q5_1, Q5_1),
    (Q5_0, Q5_0),
    (Q4_1, Q4_1),
    (Q4_0, Q4_0),
    (Tq3_0, Tq3_0),
    (Q8_0, Q4_0),
    (F32, Q8_0),
    (F16, Tq3_0),
    (Tq3_0, Q8_0),
    (Q5_1, Bf16),
    (Bf16, Q4_1),
];

/// The kinds of heads to try in these formats: all of them in the plainest, else the widest, a narrow and a middle
/// one, as far as they can be stored so.
pub fn kinds(k: KvFormat, v: KvFormat) -> Vec<Shape> {
    let all = shapes(k, v);
    match (k, v) {
        (F32, F32) | (F16, F16) | (Q8_0, Q8_0) => all,
        (Tq3_0, _) | (_, Tq3_0) => vec![all[0], all[5]],
        _ => vec![all[0], all[2], all[5]],
    }
}

/// One layer's cache for some slots, pages in no order.
pub struct AttentionFixture {
    pub shape: Shape,
    pub card: Card,
    pub max_pages: usize,
    /// What kernels are told that a sequence holds at most.
    pub tokens: usize,
    pub table: Vec<i32>,
    /// Values of keys, scales of keys, values of values, scales of values.
    pub planes: [Vec<u8>; 4],
    device: [Buffer<u8>; 4],
    device_table: Buffer<i32>,
    frequencies: Buffer<f64>,
}

impl AttentionFixture {
    pub fn new(
        gpu: &Device,
        random: &mut Random,
        shape: Shape,
        slots: usize,
        positions: usize,
    ) -> AttentionFixture {
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
            let (values, scales) = row_bytes(format, shape.head_dim);
            [rows * values, rows * scales]
        };
        let sizes = [bytes(shape.k), bytes(shape.v)].concat();
        let planes = [0, 1, 2, 3].map(|i| vec![0xff; sizes[i]]);
        AttentionFixture {
            card: Card {
                multiprocessors: gpu.multiprocessors() as usize,
                shared_bytes: gpu.shared_per_block() as usize,
                warpgroups: gpu.arch().to_string() == "sm_90a",
                path_order: false,
                windows: false,
            },
            device: [0, 1, 2, 3].map(|i| poisoned(gpu, sizes[i])),
            device_table: gpu.upload(&table).unwrap(),
            frequencies: gpu.upload(&shape.frequencies()).unwrap(),
            shape,
            max_pages,
            tokens: max_pages * PAGE,
            table,
            planes,
        }
    }

    pub fn cache(&self) -> Cache {
        let [k, k_scale, v, v_scale] = [0, 1, 2, 3].map(|i| self.device[i].ptr());
        Cache {
            k,
            k_scale,
            v,
            v_scale,
            page_table: self.device_table.ptr(),
            max_pages: self.max_pages,
        }
    }

    pub fn all_planes(&self) -> Planes {
        Planes {
            base: [0, 1, 2, 3].map(|i| self.device[i].ptr()),
            layer_stride: [0; 4],
        }
    }

    pub fn upload(&mut self, gpu: &Device) {
        for (buffer, plane) in self.device.iter_mut().zip(&self.planes) {
            buffer.upload(gpu, plane).unwrap();
        }
    }

    pub fn download(&mut self, gpu: &Device) {
        for (buffer, plane) in self.device.iter().zip(&mut self.planes) {
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
        let (values, scales) = row_bytes(self.format(plane), self.shape.head_dim);
        if plane % 2 == 1 { scales } else { values }
    }

    /// The stored bytes of a position in a plane.
    pub fn stored(&self, plane: usize, slot: usize, position: usize, head: usize) -> &[u8] {
        let bytes = self.row_bytes(plane);
        &self.planes[plane][self.row(slot, position, head) * bytes..][..bytes]
    }

    /// Stores a key (`plane` 0) or a value (2).
    pub fn store(&mut self, plane: usize, at: (usize, usize, usize), row: &[f32]) {
        let (slot, position, head) = at;
        let (values, scales) = split(codecs(&self.shape)[plane / 2], row);
        let index = self.row(slot, position, head);
        for (plane, bytes) in [(plane, values), (plane + 1, scales)] {
            let n = self.row_bytes(plane);
            self.planes[plane][index * n..][..n].copy_from_slice(&bytes);
        }
    }

    /// Copies what `planes` have at position `from` of a slot and head to position `to`.
    pub fn copy(
        &mut self,
        (slot, head): (usize, usize),
        from: usize,
        to: usize,
        planes: &[Vec<u8>; 4],
    ) {
        let (from, to) = (self.row(slot, from, head), self.row(slot, to, head));
        for (plane, planes) in planes.iter().enumerate() {
            let n = self.row_bytes(plane);
            self.planes[plane][to * n..][..n].copy_from_slice(&planes[from * n..][..n]);
        }
    }

    /// A decoded key (`plane` 0) or value (2), in the basis it is stored in.
    pub fn load(&self, plane: usize, slot: usize, position: usize, head: usize) -> Vec<f32> {
        join(
            self.format(plane),
            self.stored(plane, slot, position, head),
            self.stored(plane + 1, slot, position, head),
            self.shape.head_dim,
        )
    }

    /// Random committed rows: the many of a long context are some hundred ones over and over, in no order.
    pub fn commit_random(
        &mut self,
        random: &mut Random,
        slot: usize,
        positions: std::ops::Range<usize>,
    ) {
        let dim = self.shape.head_dim;
        let different = (positions.len() * self.shape.n_kv_heads).min(4093);
        for plane in [0, 2] {
            let codec = codecs(&self.shape)[plane / 2];
            let rows: Vec<_> = (0..different)
                .map(|_| split(codec, &random.normals(dim, 1.0)))
                .collect();
            for position in positions.clone() {
                for head in 0..self.shape.n_kv_heads {
                    let index = self.row(slot, position, head);
                    let mut which = position * self.shape.n_kv_heads + head;
                    if positions.len() * self.shape.n_kv_heads > different {
                        which = random.below(different);
                    }
                    let (values, scales) = &rows[which % different];
                    for (plane, bytes) in [(plane, values), (plane + 1, scales)] {
                        let n = self.row_bytes(plane);
                        self.planes[plane][index * n..][..n].copy_from_slice(bytes);
                    }
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
}

/// Keys and values of a sequence from position `first` on, `[n_kv_heads][positions * head_dim]`.
pub struct Decoded {
    first: usize,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl Decoded {
    /// Attention of the nodes of a tree by the reference, gates included: `[nodes][n_heads * head_dim]`, from queries
    /// and gates of the same shape.
    pub fn attend(&self, shape: &Shape, placed: &Placed, q: &[f32], gates: &[f32]) -> Vec<f32> {
        let width = shape.n_heads * shape.head_dim;
        let mut out = vec![0.0; placed.tree.len() * width];
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let share = placed.tree.len().div_ceil(threads);
        std::thread::scope(|scope| {
            for (i, out) in out.chunks_mut(share * width).enumerate() {
                scope.spawn(move || {
                    for (j, out) in out.chunks_mut(width).enumerate() {
                        let node = i * share + j;
                        let at = node * width..(node + 1) * width;
                        let row = self.attend_one(shape, placed, node, &q[at.clone()], &gates[at]);
                        out.copy_from_slice(&row);
                    }
                });
            }
        });
        out
    }

    fn attend_one(
        &self,
        shape: &Shape,
        placed: &Placed,
        node: usize,
        q: &[f32],
        gates: &[f32],
    ) -> Vec<f32> {
        let (dim, group) = (shape.head_dim, shape.n_heads / shape.n_kv_heads);
        let at = placed.committed + usize::from(placed.tree.depths()[node]);
        let first = match shape.window {
            0 => 0,
            window => (at + 1).saturating_sub(window).min(placed.committed),
        };
        let nodes = (0..placed.tree.len())
            .filter(|&other| sees(shape, &placed.tree, node, other))
            .map(|other| placed.committed + other);
        let hidden = placed.tree.window().masked(at);
        let committed = (first..placed.committed).filter(|p| !hidden.contains(p));
        let positions: Vec<usize> = committed.chain(nodes).collect();
        let mut out = vec![0.0; shape.n_heads * dim];
        for (kv_head, out) in out.chunks_mut(group * dim).enumerate() {
            let gather = |rows: &[f32]| -> Vec<f32> {
                positions
                    .iter()
                    .flat_map(|p| &rows[(p - self.first) * dim..][..dim])
                    .copied()
                    .collect()
            };
            let keys = gather(&self.keys[kv_head]);
            let values = gather(&self.values[kv_head]);
            for (i, out) in out.chunks_mut(dim).enumerate() {
                let head = kv_head * group + i;
                let q = &q[head * dim..][..dim];
                attention::attend(q, &keys, &values, shape.scale, out);
                if codecs(shape)[1].is_rotated() {
                    rotate_inverse(out);
                }
                if shape.gate {
                    activation::sigmoid_gate(out, &gates[head * dim..][..dim]);
                }
            }
        }
        out
    }
}

fn sees(shape: &Shape, tree: &Tree, node: usize, other: usize) -> bool {
    match shape.mask {
        Mask::Ancestors => tree.ancestor_mask(contract::NodeIdx(node as u16)) >> other & 1 == 1,
        Mask::Full => true,
        Mask::Causal => other <= node,
    }
}

/// A pass of one layer over trees: what the card gave, and the queries it used.
pub struct Pass {
    /// `[rows][n_heads * head_dim]`.
    pub out: Vec<f32>,
    /// `[rows][n_heads * head_dim]`.
    pub queries: Vec<f32>,
}

/// prepare, tree and combine of `trees` in buckets of `bucket` rows.
pub fn pass(
    gpu: &Device,
    fixture: &AttentionFixture,
    trees: &[Placed],
    inputs: &Inputs,
    bucket: usize,
) -> Pass {
    let shape = &fixture.shape;
    let header = gpu.upload(&step(trees, &[])).unwrap();
    let rows: usize = trees.iter().map(|p| p.tree.len()).sum();
    let width = shape.n_heads * shape.head_dim;
    let out = poisoned::<f32>(gpu, bucket * width);
    let room = (bucket, fixture.tokens);
    let scratch = poisoned::<u8>(gpu, shape.scratch_bytes(fixture.card, room));
    let q16 = poisoned::<f16>(gpu, bucket * width);
    let mut q: Buffer<f32> = poisoned(gpu, bucket * shape.n_heads * shape.q_stride());
    q.upload(
        gpu,
        &inputs.host_q[..rows * shape.n_heads * shape.q_stride()],
    )
    .unwrap();
    let mut from = fixture.projections(inputs);
    from.q = q.ptr();
    let narrow = shape.wants_f16_queries(fixture.card);
    let (to, query) = if narrow {
        (q16.ptr(), q16.ptr())
    } else {
        (0, q.ptr())
    };
    let at = header.ptr();
    gpu.launch(&[
        prepare(
            shape,
            bucket,
            Positions::Step(at),
            from,
            (fixture.cache(), to),
        ),
        tree(
            shape,
            fixture.card,
            room,
            (at, query),
            (fixture.cache(), scratch.ptr()),
        ),
        combine(
            shape,
            fixture.card,
            room,
            (at, q.ptr(), scratch.ptr()),
            Out::f32(out.ptr()),
        ),
    ]);
    let mut out = out.download(gpu).unwrap();
    assert!(
        out[rows * width..].iter().all(|v| v.to_bits() == u32::MAX),
        "padding was written"
    );
    out.truncate(rows * width);
    let queries = match narrow {
        true => q16.download(gpu).unwrap()[..rows * width]
            .iter()
            .map(|h| h.to_f32())
            .collect(),
        false => {
            let all = q.download(gpu).unwrap();
            let heads = all.chunks(shape.q_stride()).take(rows * shape.n_heads);
            heads
                .flat_map(|head| head[..shape.head_dim].to_vec())
                .collect()
        }
    };
    Pass { out, queries }
}

/// A tree on a sequence.
pub fn on(slot: usize, committed: usize, tree: contract::Tree) -> Placed {
    Placed {
        slot,
        committed,
        tree,
    }
}
