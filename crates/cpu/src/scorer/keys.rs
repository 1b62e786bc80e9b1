//! Keys and values of one attention layer of a whole prompt, in blocks that attention reads as they
//! are.

use contract::{AttentionSpec, BlockSparsity};

use crate::blocks::delta_chunked::transpose;
use crate::kernels::Kernels;

const BLOCK: usize = BlockSparsity::BLOCK;

/// Keys and values of a layer. Rows beyond the prompt are zero.
pub(super) struct LayerKeys {
    /// `[n_kv_heads, n_blocks, head_dim, BLOCK]`.
    keys: Vec<f32>,
    /// `[n_kv_heads, n_blocks, BLOCK, head_dim]`.
    values: Vec<f32>,
    /// Mean keys, `[n_kv_heads, head_dim, n_blocks]`.
    means: Vec<f32>,
    n_rows: usize,
    n_blocks: usize,
    n_kv_heads: usize,
    head_dim: usize,
}

impl LayerKeys {
    /// Room for `n_rows` rows.
    pub(super) fn new(spec: &AttentionSpec, n_rows: usize) -> LayerKeys {
        let n_blocks = n_rows.div_ceil(BLOCK);
        let size = spec.n_kv_heads * n_blocks * BLOCK * spec.head_dim;
        LayerKeys {
            keys: vec![0.0; size],
            values: vec![0.0; size],
            means: vec![0.0; spec.n_kv_heads * spec.head_dim * n_blocks],
            n_rows,
            n_blocks,
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim,
        }
    }

    pub(super) fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    /// Stores rows of keys and values `[n, n_kv_heads, head_dim]` from row `first` on, which begins
    /// a block.
    pub(super) fn store(&mut self, first: usize, keys: &[f32], values: &[f32]) {
        let (dim, width) = (self.head_dim, self.n_kv_heads * self.head_dim);
        let mut rows = vec![0.0; BLOCK * dim];
        let blocks = keys.chunks(BLOCK * width).zip(values.chunks(BLOCK * width));
        for (i, (keys, values)) in blocks.enumerate() {
            let block = first / BLOCK + i;
            let n = keys.len() / width;
            for head in 0..self.n_kv_heads {
                let at = (head * self.n_blocks + block) * BLOCK * dim;
                let row = |rows: &[f32], row: usize| row * width + head * dim..rows.len();
                let own = &mut self.values[at..][..n * dim];
                for (j, to) in own.chunks_exact_mut(dim).enumerate() {
                    to.copy_from_slice(&values[row(values, j)][..dim]);
                }
                rows[n * dim..].fill(0.0);
                for (j, to) in rows.chunks_exact_mut(dim).take(n).enumerate() {
                    to.copy_from_slice(&keys[row(keys, j)][..dim]);
                }
                for d in 0..dim {
                    let sum: f32 = rows[..n * dim].iter().skip(d).step_by(dim).sum();
                    self.means[(head * dim + d) * self.n_blocks + block] = sum / n as f32;
                }
                transpose(&rows, dim, &mut self.keys[at..][..BLOCK * dim]);
            }
        }
    }

    /// Keys `[head_dim, BLOCK]` and values `[BLOCK, head_dim]` of a block.
    pub(super) fn block(&self, kv_head: usize, block: usize) -> (&[f32], &[f32]) {
        let size = BLOCK * self.head_dim;
        let at = (kv_head * self.n_blocks + block) * size;
        (&self.keys[at..][..size], &self.values[at..][..size])
    }

    /// `lse` of each key block up to `block` for queries `[n, head_dim]` of that block.
    pub(super) fn block_lse(
        &self,
        kernels: &Kernels,
        (kv_head, block): (usize, usize),
        queries: &[f32],
        scale: f32,
    ) -> Vec<f32> {
        let means = &self.means[kv_head * self.head_dim * self.n_blocks..];
        let means = &means[..self.head_dim * self.n_blocks];
        let n = queries.len() / self.head_dim;
        let mut scores = vec![0.0; n * self.n_blocks];
        (kernels.accumulate)(queries, means, self.n_blocks, &mut scores);
        scores.iter_mut().for_each(|score| *score *= scale);
        let mut lse = crate::reference::score::column_lse(&scores, self.n_blocks);
        lse.truncate(block + 1);
        lse
    }

    /// Number of rows.
    pub(super) fn n_rows(&self) -> usize {
        self.n_rows
    }
}
