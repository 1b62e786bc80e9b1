//! What the last tokens attend to: running maxima over layers and heads.

use contract::{AttentionSpec, ScoreSettings};

use crate::pass::ExecContext;
use crate::reference::score;

/// The largest attention weight of each token for each tail query, over layers and heads.
pub(super) struct TailWeights {
    /// `[tail, n]`.
    best: Vec<f32>,
    n: usize,
}

/// Logits of one layer's tail queries, filled piece by piece.
pub(super) struct TailLogits {
    /// `[tail, n_heads, head_dim]`.
    queries: Vec<f32>,
    /// `[tail, n_heads, n]`; minus infinity behind the query.
    logits: Vec<f32>,
    n: usize,
}

impl TailWeights {
    pub(super) fn new(n: usize, tail: usize) -> TailWeights {
        TailWeights {
            best: vec![0.0; tail * n],
            n,
        }
    }

    /// Takes over a layer's weights.
    pub(super) fn raise(&mut self, compute: ExecContext<'_>, logits: &mut TailLogits) {
        let n = self.n;
        let n_heads = logits.logits.len() / self.best.len();
        let rows = self.best.chunks_exact_mut(n);
        let rows = rows.zip(logits.logits.chunks_exact_mut(n_heads * n));
        compute.pool.for_each_item(rows, |(best, heads)| {
            for logits in heads.chunks_exact_mut(n) {
                score::raise_to_softmax(logits, best);
            }
        });
    }

    /// Chunk scores.
    pub(super) fn scores(&self, settings: &ScoreSettings) -> Vec<f32> {
        score::chunk_scores(&self.best, self.n, settings.smoothing, settings.chunk)
    }
}

impl TailLogits {
    /// Logits of prepared queries `[tail, n_heads, head_dim]` of the last of `n` tokens.
    pub(super) fn new(queries: Vec<f32>, spec: &AttentionSpec, n: usize) -> TailLogits {
        let rows = queries.len() / spec.head_dim;
        TailLogits {
            queries,
            logits: vec![f32::NEG_INFINITY; rows * n],
            n,
        }
    }

    /// Adds keys `[rows, n_kv_heads, head_dim]` of the tokens from `first` on.
    pub(super) fn add(
        &mut self,
        compute: ExecContext<'_>,
        spec: &AttentionSpec,
        first: usize,
        keys: &[f32],
    ) {
        let (dim, n) = (spec.head_dim, self.n);
        let (width, group) = (spec.n_kv_heads * dim, spec.n_heads / spec.n_kv_heads);
        let tail = self.queries.len() / (spec.n_heads * dim);
        let rows = self.queries.chunks_exact(dim);
        let rows = rows.zip(self.logits.chunks_exact_mut(n)).enumerate();
        compute.pool.for_each_item(rows, |(row, (query, logits))| {
            let (at, head) = (row / spec.n_heads, row % spec.n_heads);
            let position = n - tail + at;
            let kv_head = head / group;
            for (i, key) in keys.chunks_exact(width).enumerate() {
                if first + i > position {
                    break;
                }
                let key = &key[kv_head * dim..][..dim];
                logits[first + i] = dot(query, key) * spec.scale;
            }
        });
    }
}

/// `sum a * b` in eight interleaved sums, which vectorise.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 8;
    let mut sums = [0.0_f32; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a
        .remainder()
        .iter()
        .zip(b.remainder())
        .map(|(a, b)| a * b)
        .sum();
    for (a, b) in a.zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + rest
}
