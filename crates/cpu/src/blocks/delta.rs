//! The gated-delta mixer: projections, convolution, delta rule, gated norm, output projection.

use contract::GatedDeltaSpec;

use crate::blocks::delta_chunked;
use crate::linear::apply_all;
use crate::pass::CHUNK;
use crate::pass::{ExecContext, LayerSegment, PassBuffers, SegmentKind, TreePlan};
use crate::reference::activation::{sigmoid, softplus};
use crate::reference::delta::{Columns, PendingUpdate, Token, Tokens};
use crate::scratch::take;
use crate::state::{DeferredUpdates, DeltaState};
use crate::weights::Delta;

/// Added to the sum of squares when queries and keys are normalized.
const L2_EPS: f32 = 1e-6;

/// Reads `buffers.y`, writes `buffers.update`, and stores each segment's new state (chunks) or
/// pending updates (trees).
pub(crate) fn mix(
    compute: ExecContext<'_>,
    weights: &Delta,
    buffers: &mut PassBuffers,
    segments: &mut [LayerSegment<'_, DeltaState>],
) {
    let spec = &weights.spec;
    let n_rows: usize = segments.iter().map(|s| s.n_rows).sum();
    let (channels, values) = (spec.channels(), spec.n_v_heads * spec.v_dim);
    let (parts, _) = buffers.split();
    let inputs = &mut parts.a[..n_rows * channels];
    let z = &mut parts.b[..n_rows * values];
    let mixed = &mut parts.c[..n_rows * channels];
    let beta = &mut parts.beta[..n_rows * spec.n_v_heads];
    let g = &mut parts.alpha[..n_rows * spec.n_v_heads];
    apply_all(
        compute.pool,
        &parts.y[..n_rows * weights.qkv.cols()],
        n_rows,
        &mut [
            (&weights.qkv, &mut *inputs),
            (&weights.z, &mut *z),
            (&weights.beta, &mut *beta),
            (&weights.alpha, &mut *g),
        ],
    );
    for beta in &mut *beta {
        *beta = sigmoid(*beta);
    }
    for g in g.chunks_exact_mut(spec.n_v_heads) {
        for ((g, a), dt) in g.iter_mut().zip(&weights.a).zip(&weights.dt) {
            *g = a * softplus(*g + dt);
        }
    }
    convolve(compute, weights, segments, inputs, mixed);
    let rows = RecurrenceInputs {
        spec,
        norm: &weights.norm,
        mixed,
        beta,
        g,
        z,
    };
    let heads = &mut parts.heads[..n_rows * values];
    recur(compute, rows, segments, inputs, heads);
    let by_row = &mut parts.rows[..n_rows * values];
    transpose_heads(compute, spec, segments, heads, by_row);
    let update = &mut parts.update[..n_rows * weights.out.rows()];
    weights.out.apply(compute.pool, by_row, n_rows, update);
}

/// Inputs of the recurrence, all rows of the pass.
#[derive(Clone, Copy)]
struct RecurrenceInputs<'a> {
    spec: &'a GatedDeltaSpec,
    /// `[v_dim]`.
    norm: &'a [f32],
    /// `[n, channels]`: q and k normalized, q scaled, after the convolution.
    mixed: &'a [f32],
    /// `[n, n_v_heads]`.
    beta: &'a [f32],
    /// `[n, n_v_heads]`.
    g: &'a [f32],
    /// `[n, n_v_heads * v_dim]`.
    z: &'a [f32],
}

/// `mixed = silu(conv(inputs))`, with queries and keys normalized. Rows run in parallel; a few rows
/// are also split by head.
fn convolve(
    compute: ExecContext<'_>,
    weights: &Delta,
    segments: &[LayerSegment<'_, DeltaState>],
    inputs: &[f32],
    mixed: &mut [f32],
) {
    let spec = &weights.spec;
    let channels = spec.channels();
    let n_rows = inputs.len() / channels;
    let of_row = |row: usize| {
        segments
            .iter()
            .find(|s| row < s.first_row + s.n_rows)
            .expect("segments cover all rows")
    };
    let pieces = if spec.k_dim == spec.v_dim && n_rows < 2 * compute.pool.threads() {
        // One row holds `2 n_k + n_v` heads of one width. It is split so that every thread has
        // work.
        (2..=8)
            .find(|&pieces| (channels / spec.k_dim).is_multiple_of(pieces))
            .unwrap_or(1)
    } else {
        1
    };
    let width = channels / pieces;
    compute
        .pool
        .for_each_item(mixed.chunks_exact_mut(width).enumerate(), |(item, out)| {
            let (row, begin) = (item / pieces, item % pieces * width);
            let segment = of_row(row);
            let own = &inputs[segment.first_row * channels..];
            let taps = Taps {
                work: segment.work,
                window: &segment.state.window,
                rows: own,
                row: row - segment.first_row,
                channels,
            };
            let mut at = begin;
            while at < begin + width {
                let (head, scale) = head_at(spec, at);
                let out = &mut out[at - begin..][..head];
                taps.with(spec.conv_taps, at, head, |inputs| {
                    let weights = &weights.conv[at * spec.conv_taps..][..head * spec.conv_taps];
                    (compute.kernels.conv_row)(inputs, weights, out);
                });
                if let Some(scale) = scale {
                    (compute.kernels.l2)(out, L2_EPS, scale);
                }
                at += head;
            }
        });
}

/// Width of the head that begins at channel `at`, and its scale if it is a query or key.
fn head_at(spec: &GatedDeltaSpec, at: usize) -> (usize, Option<f32>) {
    let keys = spec.n_k_heads * spec.k_dim;
    if at < keys {
        (spec.k_dim, Some(1.0 / (spec.k_dim as f32).sqrt()))
    } else if at < 2 * keys {
        (spec.k_dim, Some(1.0))
    } else {
        (spec.v_dim, None)
    }
}

/// Source of the inputs of one row's convolution.
struct Taps<'a> {
    work: SegmentKind<'a>,
    window: &'a [f32],
    /// The segment's rows.
    rows: &'a [f32],
    row: usize,
    channels: usize,
}

impl Taps<'_> {
    /// Calls `work` with `n_taps` slices of `width` channels from `begin`, oldest first, the row's
    /// own last.
    fn with(&self, n_taps: usize, begin: usize, width: usize, work: impl FnOnce(&[&[f32]])) {
        const MOST: usize = 8;
        let mut few: [&[f32]; MOST] = [&[]; MOST];
        let mut many = Vec::new();
        let slices: &mut [&[f32]] = if n_taps <= MOST {
            &mut few[..n_taps]
        } else {
            many.resize(n_taps, &self.rows[..0]);
            &mut many
        };
        let mut at = Some(self.row);
        let mut before = n_taps - 1;
        for slice in slices.iter_mut().rev() {
            let from = match at {
                Some(row) => {
                    at = match self.work {
                        SegmentKind::Chunk => row.checked_sub(1),
                        SegmentKind::Tree(plan) => plan.parent(row),
                    };
                    &self.rows[row * self.channels..]
                }
                None => {
                    before -= 1;
                    &self.window[before * self.channels..]
                }
            };
            *slice = &from[begin..begin + width];
        }
        work(slices);
    }
}

/// One value head of one segment.
struct HeadItem<'a> {
    head: usize,
    first_row: usize,
    state: &'a mut [f32],
    deferred: DeferredUpdates<'a>,
    /// For a tree: its plan and its buffers of pending updates.
    tree: Option<Pending<'a>>,
    /// `[n, v_dim]`.
    o: &'a mut [f32],
    /// The sequence's position, which aligns chunks.
    position: usize,
}

/// One value head's pending updates of a tree.
struct Pending<'a> {
    plan: &'a TreePlan,
    /// `[n_nodes, v_dim]`.
    u: &'a mut [f32],
    /// `[n_nodes]`.
    decay: &'a mut [f32],
}

/// The recurrence and the gated norm, heads in parallel. `heads` receives `[n_v_heads, n, v_dim]`
/// per segment.
fn recur(
    compute: ExecContext<'_>,
    rows: RecurrenceInputs<'_>,
    segments: &mut [LayerSegment<'_, DeltaState>],
    inputs: &[f32],
    mut heads: &mut [f32],
) {
    let spec = rows.spec;
    let channels = spec.channels();
    let keys = spec.n_k_heads * spec.k_dim;
    let size = spec.k_dim * spec.v_dim;
    let mut items: Vec<HeadItem<'_>> = Vec::with_capacity(segments.len() * spec.n_v_heads);
    for segment in &mut *segments {
        let (n, first_row, position) = (segment.n_rows, segment.first_row, segment.position);
        let state = &mut *segment.state;
        let own = first_row * channels..(first_row + n) * channels;
        let plan = match segment.work {
            SegmentKind::Tree(plan) => {
                state.prepare(n);
                state.rows.copy_from_slice(&inputs[own.clone()]);
                let mixed = rows.mixed[own].chunks_exact(channels);
                let k = state.pending.k.chunks_exact_mut(keys);
                for (k, mixed) in k.zip(mixed) {
                    k.copy_from_slice(&mixed[keys..2 * keys]);
                }
                Some(plan)
            }
            SegmentKind::Chunk => None,
        };
        let (state, deferred, pending) = state.parts();
        let mut u = pending.u.chunks_exact_mut(n * spec.v_dim);
        let mut decay = pending.decay.chunks_exact_mut(n);
        let o = take(&mut heads, n * spec.n_v_heads * spec.v_dim);
        let states = state.chunks_exact_mut(size);
        let outputs = states.zip(o.chunks_exact_mut(n * spec.v_dim));
        for (head, (state, o)) in outputs.enumerate() {
            let tree = plan.and_then(|plan| {
                Some(Pending {
                    plan,
                    u: u.next()?,
                    decay: decay.next()?,
                })
            });
            items.push(HeadItem {
                head,
                first_row,
                state,
                deferred,
                tree,
                o,
                position,
            });
        }
    }
    compute.pool.for_each_item(items.into_iter(), |mut item| {
        match item.tree.take() {
            Some(tree) => run_tree(compute, rows, &mut item, tree),
            None => {
                item.deferred.apply(compute.kernels, item.head, item.state);
                run_chunks(compute, rows, &mut item);
            }
        }
        let values = spec.n_v_heads * spec.v_dim;
        for (i, o) in item.o.chunks_exact_mut(spec.v_dim).enumerate() {
            let at = (item.first_row + i) * values + item.head * spec.v_dim;
            let z = &rows.z[at..][..spec.v_dim];
            (compute.kernels.gated_rms)(o, rows.norm, z, compute.norm_eps);
        }
    });
    for segment in segments {
        segment.state.mark_applied();
        if let SegmentKind::Chunk = segment.work {
            let own = segment.first_row * channels..(segment.first_row + segment.n_rows) * channels;
            segment.state.shift_window(&inputs[own]);
        }
    }
}

impl<'a> RecurrenceInputs<'a> {
    /// The row's query, key and value of value head `head`.
    fn token(&self, row: usize, head: usize, decay: f32) -> Token<'a> {
        let spec = self.spec;
        let keys = spec.n_k_heads * spec.k_dim;
        let k_head = spec.head_map.k_head(head, spec.n_k_heads, spec.n_v_heads);
        let mixed = &self.mixed[row * spec.channels()..][..spec.channels()];
        Token {
            q: &mixed[k_head * spec.k_dim..][..spec.k_dim],
            k: &mixed[keys + k_head * spec.k_dim..][..spec.k_dim],
            v: &mixed[2 * keys + head * spec.v_dim..][..spec.v_dim],
            decay,
            beta: self.beta[row * spec.n_v_heads + head],
        }
    }
}

/// Columns of a state that a tree processes at a time: few enough for the L1 cache, and whole
/// vectors for every kernel. Columns are independent, so slicing changes no bit.
const SLICE: usize = 32;

/// Scratch floats of one head's tree with up to `forks` states.
pub(crate) fn tree_floats(k_dim: usize, v_dim: usize, forks: usize) -> usize {
    forks * k_dim * slice_of(v_dim)
}

/// Columns per slice.
fn slice_of(v_dim: usize) -> usize {
    if v_dim.is_multiple_of(SLICE) {
        SLICE
    } else {
        v_dim
    }
}

/// Applies the deferred updates to the state, then runs the nodes in DFS order. A node's state
/// exists only while it has unprocessed children; its first child computes it.
fn run_tree(
    compute: ExecContext<'_>,
    rows: RecurrenceInputs<'_>,
    item: &mut HeadItem<'_>,
    tree: Pending<'_>,
) {
    let Pending { plan, u, decay } = tree;
    for step in &plan.steps {
        let row = item.first_row + step.node.index();
        decay[step.node.index()] = rows.g[row * rows.spec.n_v_heads + item.head].exp();
    }
    let (k_dim, v_dim) = (rows.spec.k_dim, rows.spec.v_dim);
    let Some((root, steps)) = plan.steps.split_first() else {
        return;
    };
    // A single root leaves no state, so slicing has no use.
    let width = match root.target {
        None => v_dim,
        Some(_) => slice_of(v_dim),
    };
    let size = k_dim * width;
    let mut deferred = Vec::new();
    compute.scratch.with(plan.n_buffers * size, |buffers| {
        for begin in (0..v_dim).step_by(width) {
            let columns = begin..begin + width;
            let token = |node: usize| {
                let whole = rows.token(item.first_row + node, item.head, decay[node]);
                Token {
                    v: &whole.v[columns.clone()],
                    ..whole
                }
            };
            let own = |node: usize| node * v_dim + begin..node * v_dim + begin + width;
            deferred.clear();
            deferred.extend(item.deferred.updates(item.head, columns.clone()));
            let copy = match root.target {
                Some(target) => &mut buffers[target * size..][..size],
                None => &mut [],
            };
            let state = Columns {
                values: &mut item.state[begin..],
                stride: v_dim,
            };
            let out = [&mut u[own(0)], &mut item.o[own(0)]];
            (compute.kernels.delta_update_columns)(state, &deferred, copy, token(0), out);
            let mut before = root;
            for step in steps {
                let node = step.node.index();
                let source = step.source.unwrap_or(0);
                let at = source * size..(source + 1) * size;
                let (known, u) = u.split_at_mut(node * v_dim);
                let out = [&mut u[begin..begin + width], &mut item.o[own(node)]];
                if plan.parent(node) != Some(before.node.index()) {
                    let [u, o] = out;
                    (compute.kernels.delta_read_out)(&buffers[at], token(node), u, o);
                    before = step;
                    continue;
                }
                // The previous step is the parent, and this step computes the parent's state.
                let parent = before.node.index();
                let update = PendingUpdate {
                    k: token(parent).k,
                    u: &known[own(parent)],
                    decay: decay[parent],
                };
                let (from, state) = match before.source {
                    Some(above) if above != source => {
                        let [from, state] = buffers
                            .get_disjoint_mut([above * size..(above + 1) * size, at])
                            .expect("two buffers of equal size");
                        (Some(&*from), state)
                    }
                    _ => (None, &mut buffers[at]),
                };
                (compute.kernels.delta_update_read_out)(from, state, update, token(node), out);
                before = step;
            }
        }
    });
}

/// Scratch floats of one head's chunks.
pub(crate) fn chunk_floats(k_dim: usize, v_dim: usize) -> usize {
    CHUNK * (2 * k_dim + v_dim + 2) + delta_chunked::scratch_len(k_dim, v_dim)
}

/// Runs chunk by chunk, split at absolute multiples of [`CHUNK`].
fn run_chunks(compute: ExecContext<'_>, rows: RecurrenceInputs<'_>, item: &mut HeadItem<'_>) {
    let (k_dim, v_dim) = (rows.spec.k_dim, rows.spec.v_dim);
    let n = item.o.len() / v_dim;
    let all = chunk_floats(k_dim, v_dim);
    compute.scratch.with(all, |mut scratch| {
        let mut lend = |len| take(&mut scratch, len);
        let (q, k, v) = (
            lend(CHUNK * k_dim),
            lend(CHUNK * k_dim),
            lend(CHUNK * v_dim),
        );
        let (g, beta) = (lend(CHUNK), lend(CHUNK));
        let mut begin = 0;
        while begin < n {
            let position = item.position + begin;
            let end = n.min(begin + CHUNK - position % CHUNK);
            let len = end - begin;
            for i in 0..len {
                let row = item.first_row + begin + i;
                let token = rows.token(row, item.head, 0.0);
                q[i * k_dim..][..k_dim].copy_from_slice(token.q);
                k[i * k_dim..][..k_dim].copy_from_slice(token.k);
                v[i * v_dim..][..v_dim].copy_from_slice(token.v);
                g[i] = rows.g[row * rows.spec.n_v_heads + item.head];
                beta[i] = token.beta;
            }
            let tokens = Tokens {
                q: &q[..len * k_dim],
                k: &k[..len * k_dim],
                v: &v[..len * v_dim],
                g: &g[..len],
                beta: &beta[..len],
            };
            let o = &mut item.o[begin * v_dim..end * v_dim];
            delta_chunked::chunk(compute.kernels, item.state, tokens, scratch, o);
            begin = end;
        }
    });
}

/// Transposes head-major to row-major: `[n_v_heads, n, v_dim]` per segment to `[n, n_v_heads *
/// v_dim]`.
fn transpose_heads(
    compute: ExecContext<'_>,
    spec: &GatedDeltaSpec,
    segments: &[LayerSegment<'_, DeltaState>],
    heads: &[f32],
    by_row: &mut [f32],
) {
    let values = spec.n_v_heads * spec.v_dim;
    for segment in segments {
        let all = segment.first_row * values..(segment.first_row + segment.n_rows) * values;
        let (heads, by_row) = (&heads[all.clone()], &mut by_row[all]);
        if segment.n_rows == 1 {
            by_row.copy_from_slice(heads);
            continue;
        }
        let grain = compute.light_grain(segment.n_rows, values);
        let items = by_row.chunks_mut(grain * values).enumerate();
        compute.pool.for_each_item(items, |(item, rows)| {
            for (i, row) in rows.chunks_exact_mut(values).enumerate() {
                let row_idx = item * grain + i;
                for (head, out) in row.chunks_exact_mut(spec.v_dim).enumerate() {
                    let at = (head * segment.n_rows + row_idx) * spec.v_dim;
                    out.copy_from_slice(&heads[at..][..spec.v_dim]);
                }
            }
        });
    }
}
