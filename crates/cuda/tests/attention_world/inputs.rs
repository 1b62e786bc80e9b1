//! What a layer of attention is given: projections of rows.

use cpu::reference::{norm, rope};
use cuda::driver::Buffer;
use cuda::launch::attention::Shape;

use super::{as_stored, codecs};
use crate::card::Random;
use crate::step_world::Device;

/// Projections of rows, on the card and on the host.
pub struct Inputs {
    pub q: Buffer<f32>,
    pub k: Buffer<f32>,
    pub v: Buffer<f32>,
    pub q_norm: Buffer<f32>,
    pub k_norm: Buffer<f32>,
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

    /// What a step of row `row` alone projects.
    pub fn row(&self, gpu: &Device, shape: &Shape, row: usize) -> Inputs {
        let (width, q_width) = (
            shape.n_kv_heads * shape.head_dim,
            shape.n_heads * shape.q_stride(),
        );
        let host_q = self.host_q[row * q_width..][..q_width].to_vec();
        let host_k = self.host_k[row * width..][..width].to_vec();
        let host_v = self.host_v[row * width..][..width].to_vec();
        Inputs {
            q: gpu.upload(&host_q).unwrap(),
            k: gpu.upload(&host_k).unwrap(),
            v: gpu.upload(&host_v).unwrap(),
            q_norm: gpu.upload(&self.host_q_norm).unwrap(),
            k_norm: gpu.upload(&self.host_k_norm).unwrap(),
            host_q,
            host_k,
            host_v,
            host_q_norm: self.host_q_norm.clone(),
            host_k_norm: self.host_k_norm.clone(),
        }
    }

    /// The query heads of a row after norm and rope, turned as keys are, and their gates.
    pub fn queries(&self, shape: &Shape, row: usize, position: usize) -> (Vec<f32>, Vec<f32>) {
        let stride = shape.q_stride();
        let own = &self.host_q[row * shape.n_heads * stride..][..shape.n_heads * stride];
        let mut q = Vec::new();
        let mut gates = Vec::new();
        for head in own.chunks(stride) {
            let mut head = head.to_vec();
            gates.extend(head.split_off(shape.head_dim));
            placed(shape, &mut head, &self.host_q_norm, position);
            as_stored(codecs(shape)[0], &mut head);
            q.extend(head);
        }
        (q, gates)
    }

    /// A key head of a row after norm and rope, in the basis it is stored in.
    pub fn key(&self, shape: &Shape, row: usize, head: usize, position: usize) -> Vec<f32> {
        let at = (row * shape.n_kv_heads + head) * shape.head_dim;
        let mut key = self.host_k[at..][..shape.head_dim].to_vec();
        placed(shape, &mut key, &self.host_k_norm, position);
        as_stored(codecs(shape)[0], &mut key);
        key
    }

    /// A value head of a row.
    pub fn value(&self, shape: &Shape, row: usize, head: usize) -> &[f32] {
        let at = (row * shape.n_kv_heads + head) * shape.head_dim;
        &self.host_v[at..][..shape.head_dim]
    }
}

/// Norm and rope of a head.
fn placed(shape: &Shape, head: &mut [f32], weight: &[f32], position: usize) {
    if shape.normed {
        norm::rms_in_place(head, weight, shape.eps);
    }
    let half = shape.rope.dims / 2;
    let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
    rope::angles(position, shape.rope.theta, &mut cos, &mut sin);
    rope::rotate(head, &cos, &sin);
}
