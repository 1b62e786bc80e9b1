//! The multi-token-prediction head on this device. Its logits equal an independent f64
//! implementation, its rows do not depend on how tokens were committed, and it changes no bit of
//! the target's results.
#![expect(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::collections::HashMap;

use contract::quant::dequantize_row;
use contract::{
    Backend, CommitItem, DeviceError, DraftCandidates, ExpertGateUp, FeedForward, KvFormat,
    KvFormats, Limits, LoadConfig, LogitsRequest, Mixer, ModelSpec, MtpDraftItem, MtpRow, NodeIdx,
    Runner, SeqId, SnapshotLocation, TokenId, Tree, VerifyItem, WeightRef,
};
use cpu::{CpuBackend, CpuOptions};
use model::LoadedModel;
use model::synth::SynthSpec;

const SHARED: &str = "tiny-hybrid+mtp:q8_0";
const EXPERTS: &str = "tiny-hybrid-moe+mtp:q8_0";
const OWN: &str = "tiny-hybrid-r1+mtp-own:q4_k_m";
const VOCAB: usize = 1024;

fn model(name: &str) -> LoadedModel {
    SynthSpec::parse(name).unwrap().load().unwrap()
}

fn load_config(loaded: &LoadedModel, format: KvFormat) -> LoadConfig {
    LoadConfig {
        target: loaded.spec.clone(),
        weights: loaded.weights.clone(),
        draft: None,
        batch_invariant: false,
        kv: KvFormats {
            k: format,
            v: format,
        },
        limits: Limits {
            sequences: 4,
            context: 512,
            tree_nodes: 24,
            prefill_chunk: 128,
            pool_tokens: None,
        },
    }
}

fn open(loaded: &LoadedModel, format: KvFormat, reference: bool) -> Box<dyn Runner> {
    let options = CpuOptions {
        reference,
        threads: Some(2),
    };
    let backend = CpuBackend::new(options);
    backend
        .open(load_config(loaded, format), &mut |_| {})
        .unwrap()
}

fn text(n: u32) -> Vec<TokenId> {
    (0..n)
        .map(|i| TokenId((i * i * 31 + 7 * i + 3) % VOCAB as u32))
        .collect()
}

fn row(seq: SeqId, parent: Option<u16>, token: u32) -> MtpDraftItem {
    MtpDraftItem {
        seq,
        parent: parent.map(MtpRow),
        token: TokenId(token),
    }
}

/// A tree around the draft of the next call: a root row, three children of it, two rows below.
fn draft(runner: &mut dyn Runner, seq: SeqId) -> Vec<DraftCandidates> {
    let mut all = runner.draft_mtp(&[row(seq, None, 300)], 8).unwrap();
    let children = [1, 2, 3].map(|token| row(seq, Some(0), token));
    all.extend(runner.draft_mtp(&children, 8).unwrap());
    let below = [row(seq, Some(2), 77), row(seq, Some(3), 78)];
    all.extend(runner.draft_mtp(&below, 8).unwrap());
    all
}

/// Commits `tokens` one by one, or as the last path of trees full of rejected branches.
fn feed(runner: &mut dyn Runner, seq: SeqId, tokens: &[TokenId], per_tree: usize) {
    for tokens in tokens.chunks(per_tree) {
        let mut tree = Tree::root(tokens[0]);
        let mut at = NodeIdx::ROOT;
        for token in &tokens[1..] {
            let wrong = tree
                .push(at, TokenId((token.0 + 1) % VOCAB as u32))
                .unwrap();
            tree.push(wrong, *token).unwrap();
            at = tree.push(at, *token).unwrap();
        }
        let requests = vec![LogitsRequest::NONE; tree.len()];
        let item = VerifyItem {
            seq,
            tree: &tree,
            requests: &requests,
        };
        runner.verify(&[item]).unwrap();
        let path = tree.path_to(at);
        runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
    }
}

/// All bytes of a sequence's state.
fn state(runner: &mut dyn Runner, seq: SeqId) -> Vec<u8> {
    let snapshot = runner.snapshot(seq, SnapshotLocation::Host).unwrap();
    let mut bytes = Vec::new();
    runner.export(snapshot.id, &mut bytes).unwrap();
    runner.free_snapshot(snapshot.id);
    bytes
}

#[test]
fn rows_and_drafts_do_not_depend_on_how_tokens_were_committed() {
    for (name, format, reference) in [
        (SHARED, KvFormat::F16, false),
        (OWN, KvFormat::Q8_0, false),
        (EXPERTS, KvFormat::F16, false),
        (SHARED, KvFormat::F32, true),
        (EXPERTS, KvFormat::F32, true),
    ] {
        let loaded = model(name);
        let tokens = text(150);
        let mut reached: Vec<(Vec<u8>, Vec<DraftCandidates>)> = Vec::new();
        // Chunks end at multiples of the runner's alignment, as the calling protocol asks for.
        for (chunk, per_tree) in [(64, 1), (128, 7), (64, 5), (128, 8)] {
            let mut runner = open(&loaded, format, reference);
            let seq = runner.open(400).unwrap();
            let (prefilled, fed) = tokens.split_at(128);
            for piece in prefilled.chunks(chunk) {
                runner.prefill(seq, piece, &[]).unwrap();
            }
            feed(&mut *runner, seq, fed, per_tree);
            let drafted = draft(&mut *runner, seq);
            reached.push((state(&mut *runner, seq), drafted));
        }
        for other in &reached[1..] {
            assert!(other.0 == reached[0].0, "{name}: the state differs");
            assert_eq!(other.1, reached[0].1, "{name}");
        }
    }
}

#[test]
fn rows_cached_late_equal_rows_cached_after_each_commit() {
    let loaded = model(SHARED);
    let mut runner = open(&loaded, KvFormat::F16, false);
    let tokens = text(420);
    // More commits than may stay uncached, a prompt behind uncached ones, and a snapshot of some.
    let [eager, lazy] = [true, false].map(|drafts| {
        let seq = runner.open(450).unwrap();
        runner.prefill(seq, &tokens[..64], &[]).unwrap();
        for piece in tokens[64..340].chunks(12) {
            feed(&mut *runner, seq, piece, 5);
            if drafts {
                runner.draft_mtp(&[row(seq, None, 300)], 1).unwrap();
            }
        }
        runner.prefill(seq, &tokens[340..400], &[]).unwrap();
        feed(&mut *runner, seq, &tokens[400..], 4);
        seq
    });
    let expected = draft(&mut *runner, eager);
    let saved = runner.snapshot(lazy, SnapshotLocation::Host).unwrap();
    assert!(state(&mut *runner, eager) == state(&mut *runner, lazy));
    assert_eq!(draft(&mut *runner, lazy), expected);
    // A restored sequence forgets its uncached tokens.
    feed(&mut *runner, lazy, &text(9), 3);
    runner.restore(lazy, saved.id).unwrap();
    assert_eq!(draft(&mut *runner, lazy), expected);
    assert!(state(&mut *runner, eager) == state(&mut *runner, lazy));
}

#[test]
fn drafted_rows_do_not_depend_on_what_shares_the_call() {
    let loaded = model(SHARED);
    let mut runner = open(&loaded, KvFormat::F16, false);
    let tokens = text(90);
    let [a, b] = [70, 90].map(|n| {
        let seq = runner.open(400).unwrap();
        runner.prefill(seq, &tokens[..n], &[]).unwrap();
        seq
    });
    let alone = [a, b].map(|seq| draft(&mut *runner, seq));
    let roots = [row(b, None, 300), row(a, None, 300)];
    let together = runner.draft_mtp(&roots, 8).unwrap();
    assert_eq!(together, [alone[1][0].clone(), alone[0][0].clone()]);
    let mixed = [1, 2, 3].map(|t| [row(b, Some(0), t), row(a, Some(0), t)]);
    let together = runner.draft_mtp(&mixed.concat(), 8).unwrap();
    for i in 0..3 {
        assert_eq!(together[2 * i], alone[1][1 + i]);
        assert_eq!(together[2 * i + 1], alone[0][1 + i]);
    }
}

#[test]
fn restored_sequences_draft_as_if_never_interrupted() {
    let loaded = model(OWN);
    let mut runner = open(&loaded, KvFormat::F16, false);
    let tokens = text(100);
    let seq = runner.open(400).unwrap();
    runner.prefill(seq, &tokens[..64], &[]).unwrap();
    feed(&mut *runner, seq, &tokens[64..80], 4);
    let snapshot = runner.snapshot(seq, SnapshotLocation::Device).unwrap();
    let expected = draft(&mut *runner, seq);
    feed(&mut *runner, seq, &tokens[80..], 3);
    let later = (draft(&mut *runner, seq), state(&mut *runner, seq));
    // In the same sequence, in another one, and in another runner.
    runner.restore(seq, snapshot.id).unwrap();
    assert_eq!(draft(&mut *runner, seq), expected);
    let mut bytes = Vec::new();
    runner.export(snapshot.id, &mut bytes).unwrap();
    let mut second = open(&loaded, KvFormat::F16, false);
    let imported = second.import(&mut &bytes[..]).unwrap();
    for (runner, id) in [(&mut runner, snapshot.id), (&mut second, imported.id)] {
        let other = runner.open(400).unwrap();
        runner.prefill(other, &tokens[40..77], &[]).unwrap();
        draft(&mut **runner, other);
        runner.restore(other, id).unwrap();
        assert_eq!(draft(&mut **runner, other), expected);
        feed(&mut **runner, other, &tokens[80..], 3);
        assert_eq!(draft(&mut **runner, other), later.0);
        assert!(state(&mut **runner, other) == later.1);
        let again = runner.restore(other, id);
        assert!(again.is_ok());
    }
    // Without the head, the state is another one.
    let mut without = loaded.clone();
    without.drop_mtp();
    let mut plain = open(&without, KvFormat::F16, false);
    let refused = plain.import(&mut &bytes[..]);
    assert!(matches!(refused, Err(DeviceError::InvalidSnapshot { .. })));
    assert_eq!(plain.info().mtp, None);
}

#[test]
fn head_changes_no_bit_of_the_target() {
    for (name, reference) in [(SHARED, false), (OWN, true)] {
        let loaded = model(name);
        let mut without = loaded.clone();
        without.drop_mtp();
        let tokens = text(80);
        let rows = [&loaded, &without].map(|loaded| {
            let mut runner = open(loaded, KvFormat::F16, reference);
            let seq = runner.open(400).unwrap();
            runner.prefill(seq, &tokens[..64], &[]).unwrap();
            if runner.info().mtp.is_some() {
                draft(&mut *runner, seq);
            }
            feed(&mut *runner, seq, &tokens[64..], 5);
            let tree = Tree::chain(&tokens[..4]).unwrap();
            let requests = vec![LogitsRequest::full(); 4];
            let item = VerifyItem {
                seq,
                tree: &tree,
                requests: &requests,
            };
            runner.verify(&[item]).unwrap()
        });
        assert_eq!(rows[0], rows[1], "{name}");
    }
}

#[test]
fn invalid_drafts_are_refused_and_change_nothing() {
    let loaded = model(SHARED);
    let mut runner = open(&loaded, KvFormat::F16, false);
    let seq = runner.open(200).unwrap();
    runner.prefill(seq, &text(10), &[]).unwrap();
    let refused = |runner: &mut dyn Runner, items: &[MtpDraftItem], k: usize| {
        let result = runner.draft_mtp(items, k);
        assert!(
            matches!(result, Err(DeviceError::InvalidCall { .. })),
            "{items:?}"
        );
    };
    refused(&mut *runner, &[row(seq, Some(0), 1)], 4);
    refused(&mut *runner, &[row(seq, None, 1)], 0);
    refused(&mut *runner, &[row(seq, None, VOCAB as u32)], 4);
    refused(&mut *runner, &[row(seq, None, 1), row(seq, None, 2)], 4);
    let mut chain = runner.draft_mtp(&[row(seq, None, 300)], 8).unwrap();
    for depth in 1..7 {
        refused(&mut *runner, &[row(seq, Some(depth), 1)], 4);
        let item = row(seq, Some(depth - 1), u32::from(depth));
        chain.extend(runner.draft_mtp(&[item], 8).unwrap());
    }
    // The path is as long as it may be; the tree may still grow to its number of rows.
    refused(&mut *runner, &[row(seq, Some(6), 1)], 4);
    let limits = runner.info().mtp.unwrap();
    for i in 7..limits.max_rows {
        runner.draft_mtp(&[row(seq, Some(0), i as u32)], 1).unwrap();
    }
    refused(&mut *runner, &[row(seq, Some(0), 1)], 4);
    // A new root begins anew, with the same results.
    assert_eq!(
        runner.draft_mtp(&[row(seq, None, 300)], 8).unwrap()[0],
        chain[0]
    );
    refused(&mut *runner, &[row(seq, Some(1), 1)], 4);
    feed(&mut *runner, seq, &text(1), 1);
    refused(&mut *runner, &[row(seq, Some(0), 1)], 4);
}

/// `down · (silu(gate · x) * (up · x))`.
fn swiglu(gate: &[f64], up: &[f64], down: &[f64], x: &[f64]) -> Vec<f64> {
    let times = |matrix: &[f64], x: &[f64]| -> Vec<f64> {
        let rows = matrix.chunks_exact(x.len());
        rows.map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum())
            .collect()
    };
    let (gate, up) = (times(gate, x), times(up, x));
    let inner = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u);
    times(down, &inner.collect::<Vec<f64>>())
}

/// An independent implementation of the head in f64, over the target's own hidden rows.
struct Independent {
    spec: std::sync::Arc<ModelSpec>,
    matrices: HashMap<String, Vec<f64>>,
}

impl Independent {
    fn new(loaded: &LoadedModel) -> Independent {
        let spec = loaded.spec.clone();
        let mtp = spec.mtp.as_ref().unwrap();
        let mut read = mtp.weights(&spec);
        read.extend([
            &spec.embedding,
            &spec.head,
            &spec.final_norm,
            &mtp.final_norm,
        ]);
        let matrices = read.into_iter().map(|weight| {
            let mut values = vec![0.0; weight.values()];
            let bytes = loaded.weights.bytes(weight).unwrap();
            dequantize_row(weight.ty, bytes, &mut values);
            let values = values.into_iter().map(f64::from).collect();
            (weight.name.to_string(), values)
        });
        Independent {
            matrices: matrices.collect(),
            spec: spec.clone(),
        }
    }

    fn times(&self, weight: &WeightRef, x: &[f64]) -> Vec<f64> {
        let rows = self.matrices[&*weight.name].chunks_exact(weight.cols);
        rows.map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum())
            .collect()
    }

    fn feed_forward(&self, ffn: &FeedForward, y: &[f64]) -> Vec<f64> {
        let matrix = |weight: &WeightRef| &self.matrices[&*weight.name][..];
        let moe = match ffn {
            FeedForward::Dense(dense) => {
                let [gate, up, down] = dense.matrices().map(matrix);
                return swiglu(gate, up, down, y);
            }
            FeedForward::Experts(moe) => moe,
        };
        let shared = moe.shared.as_ref().unwrap();
        let [gate, up, down] = shared.ffn.matrices().map(matrix);
        let factor = self.times(&shared.gate, y)[0];
        let mut out = swiglu(gate, up, down, y);
        out.iter_mut().for_each(|out| *out /= 1.0 + (-factor).exp());
        let chances: Vec<f64> = self.times(&moe.router, y).iter().map(|l| l.exp()).collect();
        let mut order: Vec<usize> = (0..moe.n_experts).collect();
        order.sort_by(|a, b| chances[*b].total_cmp(&chances[*a]));
        let chosen = &order[..moe.n_used];
        let sum: f64 = chosen.iter().map(|expert| chances[*expert]).sum();
        let ExpertGateUp::Separate { gate, up } = &moe.gate_up else {
            panic!("synthetic experts are not fused")
        };
        for &expert in chosen {
            let [gate, up, down] = [gate, up, &moe.down].map(|stack| {
                let all = matrix(&stack.weight);
                let size = all.len() / moe.n_experts;
                &all[expert * size..][..size]
            });
            let of_expert = swiglu(gate, up, down, y);
            for (out, value) in out.iter_mut().zip(of_expert) {
                *out += chances[expert] / sum * value;
            }
        }
        out
    }

    fn rms(&self, x: &[f64], weight: &WeightRef) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let factor = 1.0 / (mean + f64::from(self.spec.norm_eps)).sqrt();
        let weights = &self.matrices[&*weight.name];
        x.iter().zip(weights).map(|(x, w)| x * factor * w).collect()
    }

    fn rotate(head: &mut [f64], dims: usize, theta: f64, position: usize) {
        for j in 0..dims / 2 {
            let angle = position as f64 * theta.powf(-2.0 * j as f64 / dims as f64);
            let (sin, cos) = angle.sin_cos();
            let (a, b) = (head[j], head[j + dims / 2]);
            head[j] = a * cos - b * sin;
            head[j + dims / 2] = b * cos + a * sin;
        }
    }

    /// Outputs and logits of a chain: `hidden` are the rows before each of `tokens`; from
    /// `drafted` on, a row reads the output of the one before.
    fn logits(&self, tokens: &[TokenId], hidden: &[Vec<f64>], drafted: usize) -> Vec<Vec<f64>> {
        let mtp = self.spec.mtp.as_ref().unwrap();
        let Mixer::Attention(a) = &mtp.layer.mixer else {
            panic!("a head attends")
        };
        let table = mtp.embedding.as_ref().unwrap_or(&self.spec.embedding);
        let head = mtp.head.as_ref().unwrap_or(&self.spec.head);
        let (dim, group) = (a.head_dim, a.n_heads / a.n_kv_heads);
        let (mut keys, mut values): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (Vec::new(), Vec::new());
        let mut all = Vec::new();
        let mut output: Vec<f64> = Vec::new();
        for (position, token) in tokens.iter().enumerate() {
            let before = if position > drafted {
                &output
            } else {
                &hidden[position]
            };
            let width = self.spec.hidden;
            let embedding = &self.matrices[&*table.name][token.index() * width..][..width];
            let mut joined = self.rms(embedding, &mtp.embedding_norm);
            joined.extend(self.rms(before, &mtp.hidden_norm));
            let mut x = self.times(&mtp.eh_proj, &joined);
            let y = self.rms(&x, &mtp.layer.mixer_norm);
            let (mut q, mut k) = (self.times(&a.q, &y), self.times(&a.k, &y));
            for key in k.chunks_exact_mut(dim) {
                let normed = self.rms(key, a.k_norm.as_ref().unwrap());
                key.copy_from_slice(&normed);
                Self::rotate(key, a.rope.dims, a.rope.theta, position);
            }
            keys.push(k);
            values.push(self.times(&a.v, &y));
            let mut mixed = Vec::new();
            for (h, both) in q.chunks_exact_mut(2 * dim).enumerate() {
                let (query, gate) = both.split_at_mut(dim);
                let mut query = self.rms(query, a.q_norm.as_ref().unwrap());
                Self::rotate(&mut query, a.rope.dims, a.rope.theta, position);
                let at = h / group * dim..(h / group + 1) * dim;
                let scores: Vec<f64> = keys
                    .iter()
                    .map(|key| {
                        let products = key[at.clone()].iter().zip(&query).map(|(k, q)| k * q);
                        (products.sum::<f64>() / (dim as f64).sqrt()).exp()
                    })
                    .collect();
                let total: f64 = scores.iter().sum();
                for i in 0..dim {
                    let sum: f64 = scores
                        .iter()
                        .zip(&values)
                        .map(|(score, value)| score * value[at.start + i])
                        .sum();
                    mixed.push(sum / total / (1.0 + (-gate[i]).exp()));
                }
            }
            let add = |x: &mut [f64], more: &[f64]| {
                x.iter_mut().zip(more).for_each(|(x, more)| *x += more);
            };
            add(&mut x, &self.times(&a.o, &mixed));
            let y = self.rms(&x, &mtp.layer.ffn_norm);
            add(&mut x, &self.feed_forward(&mtp.layer.ffn, &y));
            output = self.rms(&x, &mtp.final_norm);
            all.push(self.times(head, &output));
        }
        all
    }
}

#[test]
fn draft_logits_equal_an_independent_implementation() {
    const DEPTH: usize = 3;
    for (name, prefix, committed) in [
        ("tiny-hybrid+mtp:f32", 1, 0),
        ("tiny-hybrid+mtp:f32", 33, 9),
        ("tiny-hybrid-r1+mtp-own:f32", 70, 12),
        ("tiny-hybrid-moe+mtp:f32", 33, 9),
    ] {
        let loaded = model(name);
        let options = CpuOptions {
            reference: true,
            threads: Some(2),
        };
        let opened = load_config(&loaded, KvFormat::F32);
        let mut runner = CpuBackend::new(options)
            .open_inspected(opened, &mut |_| {})
            .unwrap();
        let tokens = text(prefix + committed + 1 + DEPTH as u32);
        let n = (prefix + committed) as usize;
        // The residual stream after the last layer becomes h by the final norm.
        let last = runner.hidden_states(&tokens[..n]).unwrap().pop().unwrap();
        let independent = Independent::new(&loaded);
        let width = loaded.spec.hidden;
        let mut hidden = vec![vec![0.0; width]];
        for row in last.chunks_exact(width) {
            let row: Vec<f64> = row.iter().copied().map(f64::from).collect();
            hidden.push(independent.rms(&row, &loaded.spec.final_norm));
        }
        let seq = runner.open(400).unwrap();
        let (prefilled, fed) = tokens[..n].split_at(prefix as usize);
        runner.prefill(seq, prefilled, &[]).unwrap();
        feed(&mut *runner, seq, fed, 4);
        let expected = independent.logits(&tokens[..n + DEPTH], &hidden, n);
        for (depth, expected) in expected[n..].iter().enumerate() {
            let parent = depth.checked_sub(1).map(|row| row as u16);
            let item = row(seq, parent, tokens[n + depth].0);
            let found = runner.draft_mtp(&[item], VOCAB).unwrap().remove(0);
            let mut worst: f64 = 0.0;
            for (id, log_prob) in found.ids.iter().zip(&found.log_probs) {
                let logit = f64::from(log_prob + found.lse[0]);
                worst = worst.max((logit - expected[id.index()]).abs());
            }
            let spread = expected.iter().map(|x| x.abs()).fold(0.0, f64::max);
            assert!(spread > 1.0, "{name}: the logits say something");
            assert!(worst < 1e-3, "{name} at {n}, depth {depth}: {worst}");
        }
    }
}

#[test]
fn fast_path_follows_the_reference() {
    for name in ["tiny-hybrid+mtp:f32", "tiny-hybrid-moe+mtp:f32"] {
        let loaded = model(name);
        let found = [false, true].map(|reference| {
            let mut runner = open(&loaded, KvFormat::F32, reference);
            let seq = runner.open(400).unwrap();
            runner.prefill(seq, &text(90), &[]).unwrap();
            feed(&mut *runner, seq, &text(10), 3);
            draft(&mut *runner, seq)
        });
        for (fast, reference) in found[0].iter().zip(&found[1]) {
            assert!((fast.lse[0] - reference.lse[0]).abs() < 1e-3);
            for (a, b) in fast.log_probs.iter().zip(&reference.log_probs) {
                assert!((a - b).abs() < 1e-3, "{name}: {a} and {b}");
            }
        }
    }
}
