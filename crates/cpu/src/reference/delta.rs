//! The gated delta rule of one value head (Gated DeltaNet, arXiv 2412.06464).
//!
//! With state `S` `[k_dim, v_dim]`, decay `e^g <= 1` and rate `beta`, each token computes
//!
//! ```text
//! S <- e^g S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q
//! ```
//!
//! [`read_out`] computes `u` and `o` without changing the state. [`update_state`] applies a saved
//! `u`. Both use one expression for the new state, so a deferred update equals [`recurrent_step`]
//! bit for bit.
//! A tree keeps `k`, `u` and the decay of every node instead of states; a commit applies the
//! updates of its path.

/// Inputs of one token for one value head.
#[derive(Debug, Clone, Copy)]
pub struct Token<'a> {
    /// `[k_dim]`, normalized and scaled.
    pub q: &'a [f32],
    /// `[k_dim]`, normalized.
    pub k: &'a [f32],
    /// `[v_dim]`.
    pub v: &'a [f32],
    /// `e^g`.
    pub decay: f32,
    /// In 0 to 1.
    pub beta: f32,
}

/// Computes `u` and `o` `[v_dim]` of a token after `state` `[k_dim, v_dim]`, without changing the
/// state.
///
/// ```text
/// u_j = beta (v_j - sum_i k_i (e^g S_ij));   o_j = sum_i q_i (e^g S_ij + k_i u_j)
/// ```
pub fn read_out(state: &[f32], token: Token<'_>, u: &mut [f32], o: &mut [f32]) {
    let Token {
        q,
        k,
        v,
        decay,
        beta,
    } = token;
    let v_dim = v.len();
    assert!(u.len() == v_dim && o.len() == v_dim && state.len() == k.len() * v_dim);
    u.fill(0.0);
    for (row, &k) in state.chunks_exact(v_dim).zip(k) {
        for (u, &s) in u.iter_mut().zip(row) {
            *u += k * (decay * s);
        }
    }
    for (u, &v) in u.iter_mut().zip(v) {
        *u = beta * (v - *u);
    }
    o.fill(0.0);
    for ((row, &k), &q) in state.chunks_exact(v_dim).zip(k).zip(q) {
        for ((o, &s), &u) in o.iter_mut().zip(row).zip(&*u) {
            *o += q * (decay * s + k * u);
        }
    }
}

/// Applies a token to `state` `[k_dim, v_dim]`: `S_ij <- e^g S_ij + k_i u_j`.
pub fn update_state(state: &mut [f32], k: &[f32], u: &[f32], decay: f32) {
    assert_eq!(state.len(), k.len() * u.len());
    for (row, &k) in state.chunks_exact_mut(u.len()).zip(k) {
        for (s, &u) in row.iter_mut().zip(u) {
            *s = decay * *s + k * u;
        }
    }
}

/// A rank-one update of a committed token that the state does not include yet; see
/// [`update_state`].
#[derive(Debug, Clone, Copy)]
pub struct PendingUpdate<'a> {
    /// `[k_dim]`.
    pub k: &'a [f32],
    /// `[v_dim]`.
    pub u: &'a [f32],
    /// `e^g`.
    pub decay: f32,
}

/// Adjacent columns of a state with rows `stride` apart: row `i` begins at `values[i * stride]`.
#[derive(Debug)]
pub struct Columns<'a> {
    /// Values from the first column on.
    pub values: &'a mut [f32],
    /// Distance between rows.
    pub stride: usize,
}

/// Applies `updates` to some columns in order, then reads out: [`update_state`] for each and
/// [`read_out`], bit for bit. A non-empty `copy` receives the dense columns `[k_dim, v_dim]`.
pub fn update_columns(
    state: Columns<'_>,
    updates: &[PendingUpdate<'_>],
    copy: &mut [f32],
    token: Token<'_>,
    [u, o]: [&mut [f32]; 2],
) {
    let mut dense = gather(&state, token.v.len());
    for update in updates {
        update_state(&mut dense, update.k, update.u, update.decay);
    }
    for (row, from) in state
        .values
        .chunks_mut(state.stride)
        .zip(dense.chunks_exact(token.v.len()))
    {
        row[..from.len()].copy_from_slice(from);
    }
    if !copy.is_empty() {
        copy.copy_from_slice(&dense);
    }
    read_out(&dense, token, u, o);
}

/// The first `width` columns as a dense matrix.
pub(crate) fn gather(state: &Columns<'_>, width: usize) -> Vec<f32> {
    let rows = state.values.chunks(state.stride);
    rows.flat_map(|row| &row[..width]).copied().collect()
}

/// Applies one update to `state` `[k_dim, v_dim]`, after copying it from `from` if given, then
/// reads out: [`update_state`] and [`read_out`], bit for bit.
pub fn update_read_out(
    from: Option<&[f32]>,
    state: &mut [f32],
    update: PendingUpdate<'_>,
    token: Token<'_>,
    [u, o]: [&mut [f32]; 2],
) {
    if let Some(from) = from {
        state.copy_from_slice(from);
    }
    update_state(state, update.k, update.u, update.decay);
    read_out(state, token, u, o);
}

/// The recurrent form for one token: [`read_out`], then [`update_state`].
pub fn recurrent_step(state: &mut [f32], token: Token<'_>, u: &mut [f32], o: &mut [f32]) {
    read_out(state, token, u, o);
    update_state(state, token.k, u, token.decay);
}

/// Tokens of one value head, each field `[n, ..]` and dense.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    /// `[n, k_dim]`, normalized and scaled.
    pub q: &'a [f32],
    /// `[n, k_dim]`, normalized.
    pub k: &'a [f32],
    /// `[n, v_dim]`.
    pub v: &'a [f32],
    /// `[n]`: the logarithm of the decay, at most 0.
    pub g: &'a [f32],
    /// `[n]`.
    pub beta: &'a [f32],
}

impl<'a> Tokens<'a> {
    /// The `i`th token.
    pub fn token(&self, i: usize) -> Token<'a> {
        let (n, g) = (self.g.len(), self.g[i]);
        let (k_dim, v_dim) = (self.k.len() / n, self.v.len() / n);
        Token {
            q: &self.q[i * k_dim..][..k_dim],
            k: &self.k[i * k_dim..][..k_dim],
            v: &self.v[i * v_dim..][..v_dim],
            decay: g.exp(),
            beta: self.beta[i],
        }
    }
}

/// A tree of tokens after `state` `[k_dim, v_dim]`: each node continues its parent. Does not change
/// `state`.
///
/// `parents` is `[n]`, parents before children, `None` for the root; `u` and `o` are `[n, v_dim]`.
pub fn tree(
    state: &[f32],
    tokens: Tokens<'_>,
    parents: &[Option<usize>],
    u: &mut [f32],
    o: &mut [f32],
) {
    let v_dim = tokens.v.len() / parents.len();
    let mut states: Vec<Vec<f32>> = Vec::with_capacity(parents.len());
    let outputs = u.chunks_exact_mut(v_dim).zip(o.chunks_exact_mut(v_dim));
    for (node, (u, o)) in outputs.enumerate() {
        let mut own = parents[node].map_or(state, |p| &states[p]).to_vec();
        recurrent_step(&mut own, tokens.token(node), u, o);
        states.push(own);
    }
}

/// The chunked (WY) form: solves the recurrence for a whole chunk of consecutive tokens at once.
///
/// With `c_i = g_1 + .. + g_i` and `G_ij = e^(c_i - c_j)` for `j <= i`:
/// ```text
/// A_ij = beta_i G_ij (k_i . k_j) for j < i;   (I + A) U = diag(beta) (V - diag(e^c) K S)
/// O    = diag(e^c) Q S + (Q K^T * G) U        (j <= i)
/// S   <- e^(c_n) S + sum_j e^(c_n - c_j) k_j u_j^T
/// ```
/// No exponent is positive, so nothing overflows. `o` is `[n, v_dim]`.
pub fn chunked(state: &mut [f32], tokens: Tokens<'_>, o: &mut [f32]) {
    let n = tokens.g.len();
    let (k_dim, v_dim) = (tokens.k.len() / n, tokens.v.len() / n);
    let dot = super::matmul::dot;
    let sums: Vec<f32> = tokens
        .g
        .iter()
        .scan(0.0, |c, g| {
            *c += g;
            Some(*c)
        })
        .collect();
    let mut u = vec![0.0; n * v_dim];
    for i in 0..n {
        let token = tokens.token(i);
        let (before, rest) = u.split_at_mut(i * v_dim);
        for (j, u_i) in rest[..v_dim].iter_mut().enumerate() {
            let column = |weights: &[f32]| -> f32 {
                (0..k_dim).map(|d| weights[d] * state[d * v_dim + j]).sum()
            };
            let carried = sums[i].exp();
            *u_i = token.v[j] - carried * column(token.k);
            o[i * v_dim + j] = carried * column(token.q);
        }
        for (past, u_past) in before.chunks_exact(v_dim).enumerate() {
            let decay = (sums[i] - sums[past]).exp();
            let k_past = tokens.token(past).k;
            let (seen, read) = (dot(token.k, k_past) * decay, dot(token.q, k_past) * decay);
            for j in 0..v_dim {
                rest[j] -= seen * u_past[j];
                o[i * v_dim + j] += read * u_past[j];
            }
        }
        let own = dot(token.q, token.k);
        for j in 0..v_dim {
            rest[j] *= token.beta;
            o[i * v_dim + j] += own * rest[j];
        }
    }
    let last = sums[n - 1];
    for s in state.iter_mut() {
        *s *= last.exp();
    }
    for (i, u) in u.chunks_exact(v_dim).enumerate() {
        let decay = (last - sums[i]).exp();
        for (row, &k) in state.chunks_exact_mut(v_dim).zip(tokens.token(i).k) {
            for (s, &u) in row.iter_mut().zip(u) {
                *s += decay * k * u;
            }
        }
    }
}
