//! The delta rule in chunked (WY) form, composed of small matrix products.
//!
//! Computes [`crate::reference::delta::chunked`]; only the order of some sums differs.

use crate::kernels::Kernels;
use crate::pass::CHUNK;
use crate::reference::delta::Tokens;
use crate::scratch::take;

/// Scratch floats of a chunk.
pub(crate) fn scratch_len(k_dim: usize, v_dim: usize) -> usize {
    CHUNK * (k_dim + v_dim) + 2 * CHUNK * CHUNK + 2 * CHUNK
}

/// Advances `state` `[k_dim, v_dim]` by at most [`CHUNK`] tokens; `o` is `[n, v_dim]`.
pub(crate) fn chunk(
    kernels: &Kernels,
    state: &mut [f32],
    tokens: Tokens<'_>,
    mut scratch: &mut [f32],
    o: &mut [f32],
) {
    let n = tokens.g.len();
    let (k_dim, v_dim) = (tokens.k.len() / n, tokens.v.len() / n);
    let k_turned = take(&mut scratch, n * k_dim);
    let u = take(&mut scratch, n * v_dim);
    let seen = take(&mut scratch, n * n);
    let read = take(&mut scratch, n * n);
    let sums = take(&mut scratch, n);
    let decays = take(&mut scratch, n);

    let mut sum = 0.0;
    for (total, g) in sums.iter_mut().zip(tokens.g) {
        sum += g;
        *total = sum;
    }
    transpose(tokens.k, k_dim, k_turned);
    seen.fill(0.0);
    read.fill(0.0);
    (kernels.accumulate)(tokens.k, k_turned, n, seen);
    (kernels.accumulate)(tokens.q, k_turned, n, read);
    // `seen` becomes -A and `read` the masked, decayed products of q and k.
    for i in 0..n {
        let decays = &mut decays[..=i];
        for (decay, past) in decays.iter_mut().zip(&*sums) {
            *decay = sums[i] - past;
        }
        (kernels.exp_sum)(decays, 0.0);
        let (seen, read) = (&mut seen[i * n..][..n], &mut read[i * n..][..n]);
        for ((seen, read), decay) in seen.iter_mut().zip(&mut *read).zip(&*decays) {
            *seen *= -tokens.beta[i] * decay;
            *read *= decay;
        }
        read[i + 1..].fill(0.0);
    }
    // Contributions of the incoming state to u and o.
    u.fill(0.0);
    o.fill(0.0);
    (kernels.accumulate)(tokens.k, state, v_dim, u);
    (kernels.accumulate)(tokens.q, state, v_dim, o);
    decays.copy_from_slice(sums);
    (kernels.exp_sum)(decays, 0.0);
    for (i, (&carried, &beta)) in decays.iter().zip(tokens.beta).enumerate() {
        let (row, v) = (i * v_dim..(i + 1) * v_dim, &tokens.v[i * v_dim..][..v_dim]);
        for (u, v) in u[row.clone()].iter_mut().zip(v) {
            *u = beta * (v - carried * *u);
        }
        for o in &mut o[row] {
            *o *= carried;
        }
    }
    // Forward substitution, then the chunk's own contribution to the output.
    for i in 1..n {
        let (past, own) = u.split_at_mut(i * v_dim);
        (kernels.accumulate)(&seen[i * n..][..i], past, v_dim, &mut own[..v_dim]);
    }
    (kernels.accumulate)(read, u, v_dim, o);
    // The outgoing state.
    let last = sums[n - 1];
    for (decay, past) in decays.iter_mut().zip(&*sums) {
        *decay = last - past;
    }
    (kernels.exp_sum)(decays, 0.0);
    for k_dim_row in k_turned.chunks_exact_mut(n) {
        for (k, decay) in k_dim_row.iter_mut().zip(&*decays) {
            *k *= decay;
        }
    }
    let whole = last.exp();
    for s in &mut *state {
        *s *= whole;
    }
    (kernels.accumulate)(k_turned, u, v_dim, state);
}

/// Transposes `[n, width]` to `[width, n]` in tiles that fit the cache or the registers.
pub(crate) fn transpose(rows: &[f32], width: usize, out: &mut [f32]) {
    const TILE: usize = 16;
    let n = rows.len() / width;
    if n.is_multiple_of(4) && width.is_multiple_of(4) {
        return transpose_by_four(rows, width, out);
    }
    for tile in (0..width).step_by(TILE) {
        let columns = tile..(tile + TILE).min(width);
        for (i, row) in rows.chunks_exact(width).enumerate() {
            for column in columns.clone() {
                out[column * n + i] = row[column];
            }
        }
    }
}

/// [`transpose`] of whole blocks of four by four values.
fn transpose_by_four(rows: &[f32], width: usize, out: &mut [f32]) {
    let n = rows.len() / width;
    let four = |from: &[f32], at: usize| [from[at], from[at + 1], from[at + 2], from[at + 3]];
    for (i, rows) in rows.chunks_exact(4 * width).enumerate() {
        let (a, rest) = rows.split_at(width);
        let (b, rest) = rest.split_at(width);
        let (c, d) = rest.split_at(width);
        for column in (0..width).step_by(4) {
            let (a, b) = (four(a, column), four(b, column));
            let (c, d) = (four(c, column), four(d, column));
            for j in 0..4 {
                let at = (column + j) * n + 4 * i;
                out[at..at + 4].copy_from_slice(&[a[j], b[j], c[j], d[j]]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::delta;
    use proptest::prelude::*;

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

    fn worst(a: &[f32], b: &[f32]) -> f32 {
        let size = a.iter().fold(1.0_f32, |m, x| m.max(x.abs()));
        let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        differences.fold(0.0, f32::max) / size
    }

    struct ChunkCase {
        q: Vec<f32>,
        k: Vec<f32>,
        v: Vec<f32>,
        g: Vec<f32>,
        beta: Vec<f32>,
    }

    fn case(n: usize, dim: usize, seed: u64) -> ChunkCase {
        let mut k = noise(n * dim, seed);
        let mut q = noise(n * dim, seed + 1);
        for row in k.chunks_exact_mut(dim).chain(q.chunks_exact_mut(dim)) {
            crate::reference::norm::l2(row, 1e-6, 1.0);
        }
        ChunkCase {
            q,
            k,
            v: noise(n * dim, seed + 2),
            g: noise(n, seed + 3).iter().map(|x| -3.0 * x * x).collect(),
            beta: noise(n, seed + 4).iter().map(|x| x.abs()).collect(),
        }
    }

    proptest! {
        #[test]
        fn chunked_form_equals_recurrent_steps(n in 1_usize..=64, seed in 1_u64..1 << 40) {
            let dim = 32;
            let case = case(n, dim, seed);
            let tokens = Tokens {
                q: &case.q, k: &case.k, v: &case.v, g: &case.g, beta: &case.beta,
            };
            let start = noise(dim * dim, seed + 5);
            let (mut stepped, mut plain, mut composed) = (start.clone(), start.clone(), start);
            let mut outputs = vec![vec![0.0; n * dim]; 3];
            let mut u = vec![0.0; dim];
            for i in 0..n {
                let o = &mut outputs[0][i * dim..][..dim];
                delta::recurrent_step(&mut stepped, tokens.token(i), &mut u, o);
            }
            delta::chunked(&mut plain, tokens, &mut outputs[1]);
            let mut scratch = vec![f32::NAN; scratch_len(dim, dim)];
            chunk(&Kernels::scalar(), &mut composed, tokens, &mut scratch, &mut outputs[2]);
            for other in [1, 2] {
                prop_assert!(worst(&outputs[0], &outputs[other]) < 1e-5);
            }
            prop_assert!(worst(&stepped, &plain) < 1e-5);
            prop_assert!(worst(&stepped, &composed) < 1e-5);
        }
    }
}
