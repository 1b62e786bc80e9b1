//! Kernels of the multi-token-prediction head alone: hidden rows, joined inputs, and attention of
//! rows that are drafted depth by depth. Without a GPU every test prints SKIPPED and passes.

#![allow(clippy::unwrap_used, reason = "these are tests")]

mod fixtures {
    pub mod attention;
    pub mod gpu;
    pub mod step;
}

use contract::KvFormat::{Bf16, F16, F32, Q4_0, Q8_0, Tq3_0};
use contract::Tree;
use cpu::reference::norm;
use cuda::GpuProps;
use cuda::driver::Buffer;
use cuda::launch::attention::{Mask, Shape};
use cuda::launch::gemm::panels::{Panels, PrefillActivations};
use cuda::launch::mtp::{
    ChunkStream, HiddenPool, JoinInputs, KeptRows, commit_hidden, join, join_chunk, join_prefill,
    keep_hidden,
};
use cuda::launch::norm::ActivationBuffers;
use cuda::launch::step_words;
use cuda::pack::ActivationFormat;
use cuda::pack::activations::activations;
use half::f16;

use fixtures::attention::{AttentionFixture, LayerInputs, kinds, on, pass_of};
use fixtures::gpu::{Random, close, poisoned, same_bits};
use fixtures::step::{KernelDevice, Placed, chunk, drafted_step, random_tree, step, tree};

const EPS: f32 = 1e-6;
const ROWS_PER_SLOT: usize = 65;
const SLOTS: usize = 3;

fn rms(x: &[f32], weight: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    norm::rms(x, weight, EPS, &mut out);
    out
}

/// Rows, norms and a pool of hidden rows of one width, on the GPU and the host.
struct Rows {
    width: usize,
    x: Vec<f32>,
    pool: Vec<f32>,
    norms: [Vec<f32>; 3],
    device_x: Buffer<f32>,
    device_pool: Buffer<f32>,
    device_norms: [Buffer<f32>; 3],
}

impl Rows {
    fn new(gpu: &KernelDevice, random: &mut Random, width: usize, rows: usize) -> Rows {
        let x = random.normals(rows * width, 3.0);
        let pool = random.normals(SLOTS * ROWS_PER_SLOT * width, 2.0);
        let norms = [(); 3].map(|()| random.between(width, 0.5, 1.5));
        Rows {
            device_x: gpu.upload(&x).unwrap(),
            device_pool: gpu.upload(&pool).unwrap(),
            device_norms: [0, 1, 2].map(|i| gpu.upload(&norms[i]).unwrap()),
            width,
            x,
            pool,
            norms,
        }
    }

    fn pool(&self) -> HiddenPool {
        HiddenPool {
            at: self.device_pool.ptr(),
            width: self.width,
            rows_per_slot: ROWS_PER_SLOT,
        }
    }

    fn x(&self, row: usize) -> &[f32] {
        &self.x[row * self.width..][..self.width]
    }

    fn hidden(&self, row: usize) -> &[f32] {
        &self.pool[row * self.width..][..self.width]
    }

    /// The pool on the GPU, and what it holds but for `rows`.
    fn check_pool(&self, gpu: &KernelDevice, what: &str, rows: &[(usize, Vec<f32>)]) {
        let found = self.device_pool.download(gpu).unwrap();
        for row in 0..SLOTS * ROWS_PER_SLOT {
            let found = &found[row * self.width..][..self.width];
            match rows.iter().find(|(changed, _)| *changed == row) {
                Some((_, expected)) => {
                    close(&format!("{what}, row {row}"), found, expected, 1e-6);
                }
                None => same_bits(&format!("{what}, row {row}"), found, self.hidden(row)),
            }
        }
    }

    fn inputs(&self, embedding: u64) -> JoinInputs {
        JoinInputs {
            embedding,
            pool: self.pool(),
            embedding_norm: self.device_norms[0].ptr(),
            hidden_norm: self.device_norms[1].ptr(),
            eps: EPS,
        }
    }
}

fn widths() -> [usize; 5] {
    [32, 96, 256, 1024, 5120]
}

#[test]
fn hidden_rows_are_kept_at_their_places() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(1);
    for width in widths() {
        let trees = [on(2, 7, tree(&[0, 0, 1])), on(0, 30, tree(&[0]))];
        let header = gpu.upload(&step(&trees, &[])).unwrap();
        let rows = Rows::new(&gpu, &mut random, width, 8);
        let norm = (rows.device_norms[2].ptr(), EPS);
        let kept = |row: usize| rms(rows.x(row), &rows.norms[2]);
        let x = rows.device_x.ptr();
        let nodes = KeptRows::Nodes(header.ptr());
        gpu.launch(&[keep_hidden(8, nodes, x, norm, rows.pool())]);
        let at = |slot: usize, node: usize| slot * ROWS_PER_SLOT + 1 + node;
        let mut changed: Vec<(usize, Vec<f32>)> =
            (0..4).map(|row| (at(2, row), kept(row))).collect();
        changed.extend((4..6).map(|row| (at(0, row - 4), kept(row))));
        rows.check_pool(&gpu, "nodes", &changed);

        let rows = Rows::new(&gpu, &mut random, width, 8);
        let kept = |row: usize| rms(rows.x(row), &rows.norms[2]);
        let drafted = [(trees[0].clone(), 1, 3), (trees[1].clone(), 0, 2)];
        let header = gpu.upload(&drafted_step(&drafted)).unwrap();
        let norm = (rows.device_norms[2].ptr(), EPS);
        let x = rows.device_x.ptr();
        let kind = KeptRows::Drafted(header.ptr());
        gpu.launch(&[keep_hidden(8, kind, x, norm, rows.pool())]);
        let mut changed: Vec<(usize, Vec<f32>)> =
            (0..3).map(|row| (at(2, 1 + row), kept(row))).collect();
        changed.extend((3..5).map(|row| (at(0, row - 3), kept(row))));
        rows.check_pool(&gpu, "drafted rows", &changed);

        let rows = Rows::new(&gpu, &mut random, width, 8);
        let header = gpu.upload(&chunk(1, 9, &[4; 5], &[])).unwrap();
        let norm = (rows.device_norms[2].ptr(), EPS);
        let x = rows.device_x.ptr();
        let kind = KeptRows::LastOfChunk(header.ptr());
        gpu.launch(&[keep_hidden(64, kind, x, norm, rows.pool())]);
        let last = rms(rows.x(4), &rows.norms[2]);
        rows.check_pool(&gpu, "a chunk", &[(ROWS_PER_SLOT, last)]);

        let rows = Rows::new(&gpu, &mut random, width, 1);
        let mut words = drafted_step(&drafted);
        words[step_words::LAST..][..2].copy_from_slice(&[3, 0]);
        let header = gpu.upload(&words).unwrap();
        gpu.launch(&[commit_hidden(header.ptr(), rows.pool())]);
        let committed = [
            (2 * ROWS_PER_SLOT, rows.hidden(at(2, 3)).to_vec()),
            (0, rows.hidden(at(0, 0)).to_vec()),
        ];
        rows.check_pool(&gpu, "paths", &committed);
    }
}

/// Joined rows of a step name their hidden rows; those of a chunk are in the residual stream.
#[test]
fn joined_inputs_match_the_reference() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(2);
    for width in widths() {
        for (n, bucket) in [(1, 1), (5, 8), (13, 16)] {
            let rows = Rows::new(&gpu, &mut random, width, bucket);
            let host = random.normals(bucket * width, 1.0);
            let embedding = gpu.upload(&host).unwrap();
            let inputs = rows.inputs(embedding.ptr());
            let joined = |row: usize, hidden: &[f32]| {
                let mut all = rms(&host[row * width..][..width], &rows.norms[0]);
                all.extend(rms(hidden, &rows.norms[1]));
                all
            };
            let chain: Vec<usize> = (0..n - 1).collect();
            let tree = if n == 1 {
                Tree::root(contract::TokenId(3))
            } else {
                tree(&chain)
            };
            let mut words = drafted_step(&[(on(1, 4, tree), 0, n)]);
            let before: Vec<usize> = (0..n)
                .map(|_| random.below(SLOTS * ROWS_PER_SLOT))
                .collect();
            for (word, row) in words[step_words::BEFORE..].iter_mut().zip(&before) {
                *word = *row as i32;
            }
            let header = gpu.upload(&words).unwrap();
            let outputs = Outputs::new(&gpu, bucket, 2 * width);
            gpu.launch(&[join(bucket, header.ptr(), inputs, outputs.buffers())]);
            let expected: Vec<f32> = (0..n)
                .flat_map(|row| joined(row, rows.hidden(before[row])))
                .collect();
            outputs.check(&gpu, &format!("{n} rows of {width}"), n, &expected);

            let header = gpu.upload(&chunk(2, 11, &vec![1; n], &[])).unwrap();
            let stream = ChunkStream {
                header: header.ptr(),
                residual: rows.device_x.ptr(),
                final_norm: rows.device_norms[2].ptr(),
            };
            let expected: Vec<f32> = (0..n)
                .flat_map(|row| match row {
                    0 => joined(0, rows.hidden(2 * ROWS_PER_SLOT)),
                    row => joined(row, &rms(rows.x(row - 1), &rows.norms[2])),
                })
                .collect();
            let outputs = Outputs::new(&gpu, bucket, 2 * width);
            gpu.launch(&[join_chunk(bucket, stream, inputs, outputs.buffers())]);
            outputs.check(&gpu, &format!("a chunk of {n} of {width}"), n, &expected);
            check_panels(&gpu, (n, 2 * width), (stream, inputs), &expected);
        }
    }
}

/// A row in the forms of decode GEMMs.
struct Outputs {
    bucket: usize,
    width: usize,
    f32: Buffer<f32>,
    f16: Buffer<u8>,
}

impl Outputs {
    fn new(gpu: &KernelDevice, bucket: usize, width: usize) -> Outputs {
        Outputs {
            bucket,
            width,
            f32: poisoned(gpu, bucket * width),
            f16: poisoned(gpu, ActivationFormat::F16.bytes(bucket, width)),
        }
    }

    fn buffers(&self) -> ActivationBuffers {
        ActivationBuffers {
            f32: self.f32.ptr(),
            f16: self.f16.ptr(),
        }
    }

    /// Compares `n` rows with the reference, and the f16 form with the f32 form: also its zeros
    /// beyond the width.
    fn check(&self, gpu: &KernelDevice, what: &str, n: usize, expected: &[f32]) {
        let found = self.f32.download(gpu).unwrap();
        let (own, padding) = found.split_at(n * self.width);
        close(what, own, expected, 1e-6);
        assert!(padding.iter().all(|v| v.to_bits() == u32::MAX), "{what}");
        let made = activations(ActivationFormat::F16, own, self.width, self.bucket);
        let halves = self.f16.download(gpu).unwrap();
        let tiles = self.bucket.div_ceil(8);
        let columns = self.width.next_multiple_of(256);
        for row in 0..n {
            for k in 0..columns {
                let at = (k / 64 * tiles + row / 8) * 1024 + k % 64 / 8 * 128;
                let at = at + row % 8 * 16 + k % 8 * 2;
                assert_eq!(
                    halves[at..at + 2],
                    made.bytes[at..at + 2],
                    "{what}: {row}, {k}"
                );
            }
        }
    }
}

/// The same rows as panels and f32 rows.
fn check_panels(
    gpu: &KernelDevice,
    (n, width): (usize, usize),
    (stream, inputs): (ChunkStream, JoinInputs),
    expected: &[f32],
) {
    let rows = 70;
    let panels: Buffer<u8> = poisoned(gpu, Panels::bytes(rows, width));
    let plain: Buffer<f32> = poisoned(gpu, rows * width);
    let out = PrefillActivations {
        panels: panels.ptr(),
        f32: plain.ptr(),
    };
    gpu.launch(&[join_prefill(rows, stream, inputs, out)]);
    let plain = plain.download(gpu).unwrap();
    let what = format!("panels of {n} rows of {width}");
    close(&what, &plain[..n * width], expected, 1e-6);
    let panels = panels.download(gpu).unwrap();
    let cap = Panels::new(0, rows).rows;
    for row in 0..n {
        for k in 0..width {
            let chunk = k / 8;
            let at = (chunk / 8 * cap + row) * 128 + ((chunk % 8) ^ (row % 8)) * 16 + k % 8 * 2;
            let found = f16::from_le_bytes([panels[at], panels[at + 1]]);
            let expected = f16::from_f32(plain[row * width + k]);
            assert_eq!(found.to_bits(), expected.to_bits(), "{what}: {row}, {k}");
        }
    }
}

/// A tree whose nodes come in the order of their depths, as rows are drafted.
fn by_depth(random: &mut Random, nodes: usize) -> Tree {
    let shuffled = random_tree(random, nodes);
    let mut order: Vec<usize> = (0..nodes).collect();
    order.sort_by_key(|node| shuffled.depths()[*node]);
    let place = |node: usize| order.iter().position(|other| *other == node).unwrap();
    let parents: Vec<usize> = order[1..]
        .iter()
        .map(|node| {
            let node = contract::NodeIdx(*node as u16);
            place(shuffled.parent(node).unwrap().index())
        })
        .collect();
    tree(&parents)
}

/// Drafts every tree depth by depth over random committed rows, then compares all rows with the
/// reference over whole trees, whose keys and values are those that the drafts wrote.
fn check_drafted(gpu: &KernelDevice, random: &mut Random, shape: Shape, trees: &[Placed]) {
    let shape = Shape {
        mask: Mask::DraftedAncestors,
        ..shape
    };
    let most = trees.iter().map(|p| p.committed + 64).max().unwrap();
    let mut fixture = AttentionFixture::new(gpu, random, shape, SLOTS, most);
    for placed in trees {
        fixture.commit_random(random, placed.slot, 0..placed.committed);
    }
    let rows: usize = trees.iter().map(|p| p.tree.len()).sum();
    let inputs = LayerInputs::random(gpu, random, &shape, rows);
    let firsts: Vec<usize> = trees
        .iter()
        .scan(0, |next, placed| {
            *next += placed.tree.len();
            Some(*next - placed.tree.len())
        })
        .collect();
    let deepest = trees.iter().flat_map(|p| p.tree.depths()).max().unwrap();
    let width = shape.n_heads * shape.head_dim;
    let base = fixture.config.gpu;
    for has_wgmma in [base.has_wgmma, false] {
        fixture.config.gpu = GpuProps { has_wgmma, ..base };
        fixture.upload(gpu);
        let mut out = vec![0.0; rows * width];
        let mut queries = vec![0.0; rows * width];
        for depth in 0..=*deepest {
            // Rows of this depth, tree by tree; a tree may have none.
            let (mut parts, mut own) = (Vec::new(), Vec::new());
            for (placed, first) in trees.iter().zip(&firsts) {
                let depths = placed.tree.depths();
                let earlier = depths.iter().filter(|d| **d < depth).count();
                let count = depths.iter().filter(|d| **d == depth).count();
                if count > 0 {
                    parts.push((placed.clone(), earlier, count));
                    own.extend(first + earlier..first + earlier + count);
                }
            }
            let header = drafted_step(&parts);
            let bucket = own.len().next_multiple_of(8);
            let inputs = inputs.rows(gpu, &shape, &own);
            let found = pass_of(gpu, &fixture, (&header, own.len()), &inputs, bucket);
            for (i, row) in own.iter().enumerate() {
                let (to, from) = (row * width, i * width);
                out[to..to + width].copy_from_slice(&found.out[from..from + width]);
                queries[to..to + width].copy_from_slice(&found.queries[from..from + width]);
            }
        }
        fixture.download(gpu);
        let mut expected = Vec::new();
        for (placed, first) in trees.iter().zip(&firsts) {
            let decoded = fixture.decode(placed);
            let mut gates = Vec::new();
            for node in 0..placed.tree.len() {
                let position = placed.committed + usize::from(placed.tree.depths()[node]);
                gates.extend(inputs.queries(&shape, first + node, position).1);
            }
            let own = &queries[first * width..][..placed.tree.len() * width];
            if !shape.gate {
                gates = vec![0.0; own.len()];
            }
            expected.extend(decoded.attend(&shape, placed, own, &gates));
        }
        let allowed = if shape.k == F32 || shape.v == F32 {
            3e-6
        } else {
            2e-3
        };
        close(&format!("{shape:?} {trees:?}"), &out, &expected, allowed);
    }
}

#[test]
fn rows_drafted_depth_by_depth_attend_to_their_ancestors() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(3);
    for format in [F32, F16, Bf16, Q8_0, Q4_0, Tq3_0] {
        for shape in kinds(format, format) {
            let trees = [(1, 0, 1), (0, 250, 24), (2, 63, 13)]
                .map(|(slot, committed, n)| on(slot, committed, by_depth(&mut random, n)));
            check_drafted(&gpu, &mut random, shape, &trees);
        }
    }
}

#[test]
fn rows_drafted_behind_long_contexts_attend_to_their_ancestors() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(4);
    for format in [F16, Q8_0] {
        let shape = kinds(format, format)[0];
        let widest = [on(1, 5000, by_depth(&mut random, 64))];
        check_drafted(&gpu, &mut random, shape, &widest);
    }
}
