//! Attention of trees with windows, against the reference over the visible keys.

use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{AttentionWindow, KvFormat, KvFormats, NodeIdx, QuantType, TokenId, Tree};

use super::*;
use crate::kernels::Kernels;
use crate::pass::TreePlan;
use crate::reference;
use crate::scratch::ScratchPool;
use crate::thread_pool::ThreadPool;

/// Deterministic values between -1 and 1.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn tree() -> Tree {
    let mut tree = Tree::root(TokenId(0));
    for i in 1..12_u16 {
        tree.push(NodeIdx(i * 2 / 3), TokenId(u32::from(i)))
            .unwrap();
    }
    tree
}

/// `[n, n_heads * head_dim]`: the reference result of each node over its visible keys.
fn expected(
    spec: &AttentionSpec,
    cache: &KvCache,
    plan: &TreePlan,
    (committed, q): (usize, &[f32]),
) -> Vec<f32> {
    let (dim, stride) = (spec.head_dim, q_stride(spec));
    let group = spec.n_heads / spec.n_kv_heads;
    let mut out = Vec::new();
    for node in plan.tree.nodes() {
        for head in 0..spec.n_heads {
            let keys = Keys {
                cache,
                kv_head: head / group,
                committed,
                path: plan.path(node.index()),
                window: AttentionWindow::FULL,
                layer_window: None,
            };
            let masked = plan.tree.window().masked(keys.n() - 1);
            let first = spec
                .window
                .map_or(0, |window| keys.n().saturating_sub(window));
            let seen = (first..keys.n()).filter(|at| !masked.contains(at));
            let slots: Vec<usize> = seen.map(|at| keys.slot(at)).collect();
            let mut k = vec![0.0; slots.len() * dim];
            let mut v = k.clone();
            let rows = k.chunks_exact_mut(dim).zip(v.chunks_exact_mut(dim));
            for ((key, value), slot) in rows.zip(slots) {
                kv::decode_f32(keys.key(slot), key);
                kv::decode_f32(keys.value(slot), value);
            }
            let q = &q[(node.index() * spec.n_heads + head) * stride..][..stride];
            let mut row = vec![0.0; dim];
            reference::attention::attend(&q[..dim], &k, &v, spec.scale, &mut row);
            if spec.gate == OutputGate::SigmoidPerHead {
                reference::activation::sigmoid_gate(&mut row, &q[dim..]);
            }
            out.extend(row);
        }
    }
    out
}

#[test]
fn windowed_tree_attention_matches_the_reference() {
    let model = SyntheticModel::new(SyntheticLayout::HybridGrouped, QuantType::F32, 1);
    let full = model.spec.attention_layers().next().unwrap();
    let kv = KvFormats {
        k: KvFormat::F32,
        v: KvFormat::F32,
    };
    let scratch = ScratchPool::default();
    for committed in [70, 300] {
        let mut cache = KvCache::new(full, (kv, false), committed + 12);
        for (rows, seed) in [(&mut cache.keys, 1), (&mut cache.values, 2)] {
            let values = noise(rows.len() / 4, seed);
            let bytes = values.iter().flat_map(|value| value.to_le_bytes());
            rows.splice(.., bytes);
        }
        let q = noise(12 * full.n_heads * q_stride(full), 3);
        let windows = [
            AttentionWindow::FULL,
            AttentionWindow::new(64, 0),
            AttentionWindow::new(65, 3),
            AttentionWindow::new(100, 64),
            AttentionWindow::new(66, 70),
            AttentionWindow::new(250, 1),
        ];
        // A layer's own window may hide ancestors of a node too.
        let layer_windows = [None, Some(3), Some(64), Some(129)];
        let cases = layer_windows
            .into_iter()
            .flat_map(|own| windows.map(|window| (own, window)));
        for (own, window) in cases {
            let spec = &AttentionSpec {
                window: own,
                ..full.clone()
            };
            let plan = TreePlan::new(&tree().with_window(window));
            let wanted = expected(spec, &cache, &plan, (committed, &q));
            // With few threads, items hold several nodes; with many, single heads.
            for threads in [2, 40] {
                let pool = ThreadPool::new(threads);
                let compute = ExecContext {
                    pool: &pool,
                    kernels: &Kernels::scalar(),
                    scratch: &scratch,
                    norm_eps: 1e-6,
                };
                let mut out = vec![f32::NAN; wanted.len()];
                let segments = [LayerSegment {
                    state: &mut cache,
                    work: SegmentKind::Tree(&plan),
                    first_row: 0,
                    n_rows: plan.tree.len(),
                    position: committed,
                }];
                pool.enter(|| attend(compute, spec, &segments, &q, &mut out));
                for (i, (found, wanted)) in out.iter().zip(&wanted).enumerate() {
                    assert!(
                        (found - wanted).abs() < 2e-6,
                        "{window:?} and {own:?} after {committed}, {threads} threads, value {i}: {found} {wanted}"
                    );
                }
            }
        }
    }
}
