//! Scores of a prompt in f64, written from the formulas of `contract::scorer` and the spec's types.

use std::ops::Range;

use conformance::synthetic_model::SyntheticModel;
use contract::quant::dequantize_row;
use contract::{
    AttentionSpec, BlockSparsity, DenseSpec, FeedForward, GateActivation, GatedDeltaSpec,
    LayerSpec, Mixer, OutputGate, RopePairs, ScoreSettings, TokenId, WeightRef,
};

const BLOCK: usize = BlockSparsity::BLOCK;

/// A model in f64.
pub(crate) struct ReferenceF64<'a> {
    pub(crate) model: &'a SyntheticModel,
    pub(crate) exit_layer: usize,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn rms(x: &mut [f64], weight: &[f64], eps: f64) {
    let mean = dot(x, x) / x.len() as f64;
    let scale = 1.0 / (mean + eps).sqrt();
    for (x, w) in x.iter_mut().zip(weight) {
        *x *= scale * w;
    }
}

impl ReferenceF64<'_> {
    fn weight(&self, weight: &WeightRef) -> Vec<f64> {
        let bytes = self.model.weights.bytes(weight).unwrap();
        let mut row = vec![0.0_f32; weight.cols];
        let mut all = Vec::with_capacity(weight.values());
        for bytes in bytes.chunks_exact(weight.ty.row_bytes(weight.cols)) {
            dequantize_row(weight.ty, bytes, &mut row);
            all.extend(row.iter().map(|value| f64::from(*value)));
        }
        all
    }

    fn linear(&self, weight: &WeightRef, bias: Option<&WeightRef>, x: &[f64]) -> Vec<f64> {
        let (matrix, cols) = (self.weight(weight), weight.cols);
        let bias = bias.map(|bias| self.weight(bias));
        let mut out = Vec::with_capacity(x.len() / cols * weight.rows);
        for x in x.chunks_exact(cols) {
            for (i, row) in matrix.chunks_exact(cols).enumerate() {
                out.push(dot(row, x) + bias.as_ref().map_or(0.0, |bias| bias[i]));
            }
        }
        out
    }

    fn norm(&self, rows: &[f64], weight: Option<&WeightRef>, stride: usize) -> Vec<f64> {
        let mut rows = rows.to_vec();
        if let Some(weight) = weight {
            let weight = self.weight(weight);
            let eps = f64::from(self.model.spec.norm_eps);
            for row in rows.chunks_exact_mut(stride) {
                rms(&mut row[..weight.len()], &weight, eps);
            }
        }
        rows
    }

    /// Chunk scores.
    pub(crate) fn scores(&self, tokens: &[TokenId], settings: &ScoreSettings) -> Vec<f64> {
        let spec = &self.model.spec;
        let table = self.weight(&spec.embedding);
        let scale = f64::from(spec.embedding_scale);
        let mut x: Vec<f64> = tokens
            .iter()
            .flat_map(|token| &table[token.index() * spec.hidden..][..spec.hidden])
            .map(|value| value * scale)
            .collect();
        let layers = &spec.layers[..=self.exit_layer];
        let attention = |layer: &&LayerSpec| matches!(layer.mixer, Mixer::Attention(_));
        let n_attention = layers.iter().filter(attention).count();
        let first_scored = n_attention
            - settings
                .scored_layers
                .unwrap_or(n_attention)
                .min(n_attention);
        let mut best = vec![0.0_f64; settings.tail_tokens * tokens.len()];
        let mut seen = 0;
        for (i, layer) in layers.iter().enumerate() {
            let y = self.norm(&x, Some(&layer.mixer_norm), spec.hidden);
            let update = match &layer.mixer {
                Mixer::Attention(a) => {
                    let tail = (seen >= first_scored).then_some(&mut *best);
                    seen += 1;
                    self.attention(a, &y, settings, tail)
                }
                Mixer::GatedDelta(d) => self.delta(d, &y),
            };
            if i == self.exit_layer {
                break;
            }
            let update = self.norm(&update, layer.post_mixer_norm.as_ref(), spec.hidden);
            x.iter_mut().zip(&update).for_each(|(x, u)| *x += u);
            let y = self.norm(&x, Some(&layer.ffn_norm), spec.hidden);
            let update = self.ffn(&layer.ffn, &y);
            let update = self.norm(&update, layer.post_ffn_norm.as_ref(), spec.hidden);
            x.iter_mut().zip(&update).for_each(|(x, u)| *x += u);
        }
        chunk_scores(&best, tokens.len(), settings)
    }

    fn ffn(&self, ffn: &FeedForward, y: &[f64]) -> Vec<f64> {
        let FeedForward::Dense(DenseSpec {
            activation,
            gate,
            up,
            down,
        }) = ffn
        else {
            panic!("the scored models are dense")
        };
        let gates = self.linear(gate, None, y);
        let ups = self.linear(up, None, y);
        let mixed: Vec<f64> = gates
            .iter()
            .zip(&ups)
            .map(|(g, u)| match activation {
                GateActivation::Silu => g * sigmoid(*g) * u,
                GateActivation::GeluTanh => {
                    let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g * g * g);
                    0.5 * g * (1.0 + inner.tanh()) * u
                }
            })
            .collect();
        self.linear(down, None, &mixed)
    }

    fn rotate(&self, a: &AttentionSpec, rows: &mut [f64], stride: usize, per_row: usize) {
        let factors = a.rope_factors.as_ref().map(|factors| self.weight(factors));
        let half = a.rope.dims / 2;
        for (i, head) in rows.chunks_exact_mut(stride).enumerate() {
            for j in 0..half {
                let mut angle = a.rope.theta.powf(-2.0 * j as f64 / a.rope.dims as f64);
                angle *= a.rope.scale / factors.as_ref().map_or(1.0, |factors| factors[j]);
                let (sin, cos) = ((i / per_row) as f64 * angle).sin_cos();
                let (u, w) = match a.rope.pairs {
                    RopePairs::Halves => (j, j + half),
                    RopePairs::Adjacent => (2 * j, 2 * j + 1),
                };
                (head[u], head[w]) = (head[u] * cos - head[w] * sin, head[w] * cos + head[u] * sin);
            }
        }
    }

    fn attention(
        &self,
        a: &AttentionSpec,
        y: &[f64],
        settings: &ScoreSettings,
        tail: Option<&mut [f64]>,
    ) -> Vec<f64> {
        let n = y.len() / self.model.spec.hidden;
        let dim = a.head_dim;
        let stride = a.q.rows / a.n_heads;
        let q = self.linear(&a.q, a.biases.q.as_ref(), y);
        let k = self.linear(&a.k, a.biases.k.as_ref(), y);
        let v = self.linear(&a.v, a.biases.v.as_ref(), y);
        let plain_q = self.norm(&q, a.q_norm.as_ref(), stride);
        let plain_k = self.norm(&k, a.k_norm.as_ref(), dim);
        let (mut q, mut k) = (plain_q.clone(), plain_k.clone());
        self.rotate(a, &mut q, stride, a.n_heads);
        self.rotate(a, &mut k, dim, a.n_kv_heads);
        if let Some(best) = tail {
            let (q, k) = if settings.rotated_tail {
                (&q, &k)
            } else {
                (&plain_q, &plain_k)
            };
            let first = n - settings.tail_tokens;
            for t in first..n {
                for head in 0..a.n_heads {
                    let weights = weights(a, q, k, (t, head, stride), 0..t + 1, |_| true);
                    let row = &mut best[(t - first) * n..][..n];
                    row.iter_mut().zip(weights).for_each(|(b, w)| *b = b.max(w));
                }
            }
        }
        let mut heads = vec![0.0; n * a.n_heads * dim];
        for head in 0..a.n_heads {
            let kv_head = head / (a.n_heads / a.n_kv_heads);
            for block in 0..n.div_ceil(BLOCK) {
                let rows = block * BLOCK..n.min((block + 1) * BLOCK);
                let kept = kept(
                    a,
                    (&q, &k, stride),
                    (head, n),
                    rows.clone(),
                    settings.sparsity,
                );
                for row in rows {
                    let first = a
                        .window
                        .map_or(0, |window| (row + 1).saturating_sub(window));
                    let sees = |at: usize| at >= first && kept[at / BLOCK];
                    let weights = weights(a, &q, &k, (row, head, stride), 0..row + 1, sees);
                    let out = &mut heads[(row * a.n_heads + head) * dim..][..dim];
                    for (at, weight) in weights.into_iter().enumerate().filter(|(_, w)| *w > 0.0) {
                        let value = &v[(at * a.n_kv_heads + kv_head) * dim..][..dim];
                        out.iter_mut()
                            .zip(value)
                            .for_each(|(o, v)| *o += weight * v);
                    }
                    if a.gate == OutputGate::SigmoidPerHead {
                        let gate = &q[(row * a.n_heads + head) * stride + dim..][..dim];
                        out.iter_mut()
                            .zip(gate)
                            .for_each(|(o, g)| *o *= sigmoid(*g));
                    }
                }
            }
        }
        self.linear(&a.o, a.biases.o.as_ref(), &heads)
    }

    fn delta(&self, d: &GatedDeltaSpec, y: &[f64]) -> Vec<f64> {
        let n = y.len() / self.model.spec.hidden;
        let channels = d.channels();
        let inputs = self.linear(&d.qkv, None, y);
        let z = self.linear(&d.z, None, y);
        let beta = self.linear(&d.beta, None, y);
        let alpha = self.linear(&d.alpha, None, y);
        let (conv, taps) = (self.weight(&d.conv), d.conv_taps);
        let mut mixed = vec![0.0; n * channels];
        for t in 0..n {
            for ch in 0..channels {
                let sum: f64 = (0..taps)
                    .filter_map(|j| {
                        Some((t + j + 1).checked_sub(taps)? * channels + ch).map(|at| (j, at))
                    })
                    .map(|(j, at)| conv[ch * taps + j] * inputs[at])
                    .sum();
                mixed[t * channels + ch] = sum * sigmoid(sum);
            }
        }
        let (a, dt) = (self.weight(&d.a), self.weight(&d.dt));
        let norm = self.weight(&d.norm);
        let eps = f64::from(self.model.spec.norm_eps);
        let mut out = vec![0.0; n * d.n_v_heads * d.v_dim];
        let unit = |x: &[f64], scale: f64| -> Vec<f64> {
            let factor = scale / (dot(x, x) + 1e-6).sqrt();
            x.iter().map(|x| x * factor).collect()
        };
        for head in 0..d.n_v_heads {
            let k_head = d.head_map.k_head(head, d.n_k_heads, d.n_v_heads);
            let mut state = vec![0.0; d.k_dim * d.v_dim];
            for t in 0..n {
                let row = &mixed[t * channels..][..channels];
                let keys = d.n_k_heads * d.k_dim;
                let q = unit(
                    &row[k_head * d.k_dim..][..d.k_dim],
                    1.0 / (d.k_dim as f64).sqrt(),
                );
                let k = unit(&row[keys + k_head * d.k_dim..][..d.k_dim], 1.0);
                let v = &row[2 * keys + head * d.v_dim..][..d.v_dim];
                let at = t * d.n_v_heads + head;
                let softplus = (alpha[at] + dt[head]).exp().ln_1p();
                let (decay, beta) = ((a[head] * softplus).exp(), sigmoid(beta[at]));
                state.iter_mut().for_each(|s| *s *= decay);
                let mut u = v.to_vec();
                for (row, k) in state.chunks_exact(d.v_dim).zip(&k) {
                    u.iter_mut().zip(row).for_each(|(u, s)| *u -= k * s);
                }
                let o = &mut out[at * d.v_dim..][..d.v_dim];
                for ((row, k), q) in state.chunks_exact_mut(d.v_dim).zip(&k).zip(&q) {
                    for ((s, u), o) in row.iter_mut().zip(&u).zip(&mut *o) {
                        *s += k * beta * u;
                        *o += q * *s;
                    }
                }
                rms(o, &norm, eps);
                let z = &z[at * d.v_dim..][..d.v_dim];
                o.iter_mut().zip(z).for_each(|(o, z)| *o *= z * sigmoid(*z));
            }
        }
        self.linear(&d.out, None, &out)
    }
}

/// Softmax weights of one query over `keys`, `[keys.len()]`.
fn weights(
    a: &AttentionSpec,
    q: &[f64],
    k: &[f64],
    (row, head, stride): (usize, usize, usize),
    keys: Range<usize>,
    sees: impl Fn(usize) -> bool,
) -> Vec<f64> {
    let kv_head = head / (a.n_heads / a.n_kv_heads);
    let query = &q[(row * a.n_heads + head) * stride..][..a.head_dim];
    let logit = |at: usize| {
        if sees(at) {
            let key = &k[(at * a.n_kv_heads + kv_head) * a.head_dim..][..a.head_dim];
            dot(query, key) * f64::from(a.scale)
        } else {
            f64::NEG_INFINITY
        }
    };
    let logits: Vec<f64> = keys.map(logit).collect();
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let all: Vec<f64> = logits.iter().map(|logit| (logit - max).exp()).collect();
    let sum: f64 = all.iter().sum();
    all.into_iter().map(|weight| weight / sum).collect()
}

/// Which key blocks the query block of `rows` keeps.
fn kept(
    a: &AttentionSpec,
    (q, k, stride): (&[f64], &[f64], usize),
    (head, n): (usize, usize),
    rows: Range<usize>,
    sparsity: BlockSparsity,
) -> Vec<bool> {
    let kv_head = head / (a.n_heads / a.n_kv_heads);
    let m = rows.start / BLOCK;
    let lse: Vec<f64> = (0..=m)
        .map(|block| {
            let keys = block * BLOCK..n.min((block + 1) * BLOCK);
            let mut mean = vec![0.0; a.head_dim];
            for at in keys.clone() {
                let key = &k[(at * a.n_kv_heads + kv_head) * a.head_dim..][..a.head_dim];
                mean.iter_mut()
                    .zip(key)
                    .for_each(|(m, k)| *m += k / keys.len() as f64);
            }
            let score = |row: usize| {
                let query = &q[(row * a.n_heads + head) * stride..][..a.head_dim];
                (dot(query, &mean) * f64::from(a.scale)).exp()
            };
            rows.clone().map(score).sum::<f64>().ln()
        })
        .collect();
    let best = lse.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let dense = m + sparsity.dense_last_blocks >= n.div_ceil(BLOCK);
    (0..=m)
        .map(|block| {
            dense
                || block < sparsity.sink_blocks
                || m - block < sparsity.window_blocks
                || lse[block] >= best + f64::from(sparsity.alpha).ln()
        })
        .collect()
}

fn chunk_scores(best: &[f64], n: usize, settings: &ScoreSettings) -> Vec<f64> {
    let mean = |at: usize| {
        let rows = best.chunks_exact(n);
        rows.map(|row| row[at]).sum::<f64>() / settings.tail_tokens as f64
    };
    let mean: Vec<f64> = (0..n).map(mean).collect();
    let reach = settings.smoothing / 2;
    let smooth = |at: usize| {
        let near = &mean[at.saturating_sub(reach)..(at + reach + 1).min(n)];
        near.iter().sum::<f64>() / near.len() as f64
    };
    let smooth: Vec<f64> = (0..n).map(smooth).collect();
    let chunks = smooth.chunks(settings.chunk);
    chunks
        .map(|c| c.iter().sum::<f64>() / c.len() as f64)
        .collect()
}
