//! A mixture of experts. [`contract::MoeSpec`] has the formula.
//!
//! Rows are grouped by expert, so that each expert that any row chose is read once per pass. The
//! order of a row's sum is that of its choices, best first: neither the other rows of a pass nor
//! the number of threads change a bit.

use contract::MoeSpec;

use super::dense;
use crate::layer_buffers::{ExpertBuffers, sized};
use crate::linear::{Linear, Product, apply_each, dot};
use crate::pass::ExecContext;
use crate::reference::activation::sigmoid;
use crate::reference::router::{ChosenExpert, choose};
use crate::scratch::take;
use crate::weights::{ExpertWeights, SharedExpert};

/// The experts of `y` `[n, hidden]` into `out`, through three buffers `[n, ffn]` of the shared
/// expert.
pub(super) fn apply(
    compute: ExecContext<'_>,
    weights: &ExpertWeights,
    y: &[f32],
    (wide, buffers): ([&mut [f32]; 3], &mut ExpertBuffers),
    out: &mut [f32],
) {
    let hidden = weights.router.cols();
    let n_rows = y.len() / hidden;
    if let Some(shared) = &weights.shared {
        dense::apply(compute, &shared.ffn, y, wide, out);
    }
    route(compute, weights, y, buffers);
    group(weights.spec.n_experts, n_rows, buffers);
    let n_grouped = n_rows * weights.spec.n_used;
    let ExpertBuffers {
        factors,
        choices,
        starts,
        rows,
        slots,
        grouped,
        wide,
        ..
    } = buffers;
    let grouped = sized(grouped, n_grouped * hidden);
    let size = compute.light_grain(n_grouped, hidden);
    let items = grouped.chunks_mut(size * hidden).zip(rows.chunks(size));
    compute.pool.for_each_item(items, |(grouped, rows)| {
        for (input, row) in grouped.chunks_exact_mut(hidden).zip(rows) {
            input.copy_from_slice(&y[row * hidden..][..hidden]);
        }
    });
    let width = weights.spec.width();
    let [gate, up, mixed] = wide.each_mut().map(|wide| sized(wide, n_grouped * width));
    let mut products = Vec::new();
    add_products(&weights.gate, starts, gate, &mut products);
    add_products(&weights.up, starts, up, &mut products);
    apply_each(compute.pool, grouped, n_grouped, products);
    let activation = weights.spec.activation;
    dense::combine(compute, activation, (n_grouped, width), [gate, up], mixed);
    let mut products = Vec::new();
    add_products(&weights.down, starts, grouped, &mut products);
    apply_each(compute.pool, mixed, n_grouped, products);
    let chosen = (&choices[..n_grouped], &slots[..n_grouped]);
    let factors = weights.shared.as_ref().map(|_| &factors[..n_rows]);
    sum(compute, weights.spec.n_used, chosen, factors, grouped, out);
}

/// Chooses the experts of each row and the factors of the shared expert.
fn route(
    compute: ExecContext<'_>,
    weights: &ExpertWeights,
    y: &[f32],
    buffers: &mut ExpertBuffers,
) {
    let MoeSpec {
        n_experts,
        n_used,
        weights_scale,
        ..
    } = weights.spec;
    let hidden = weights.router.cols();
    let n_rows = y.len() / hidden;
    let logits = sized(&mut buffers.logits, n_rows * n_experts);
    weights.router.apply(compute.pool, y, n_rows, logits);
    let choices = sized(&mut buffers.choices, n_rows * n_used);
    let factors = sized(&mut buffers.factors, n_rows);
    let size = compute.light_grain(n_rows, n_experts * n_used);
    let rows = logits
        .chunks_mut(size * n_experts)
        .zip(y.chunks(size * hidden));
    let rows = rows
        .zip(choices.chunks_mut(size * n_used))
        .zip(factors.chunks_mut(size));
    compute
        .pool
        .for_each_item(rows, |(((logits, y), choices), factors)| {
            let rows = logits
                .chunks_exact_mut(n_experts)
                .zip(y.chunks_exact(hidden));
            let rows = rows.zip(choices.chunks_exact_mut(n_used)).zip(factors);
            for (((logits, y), choices), factor) in rows {
                choose(logits, (weights_scale, MoeSpec::MIN_WEIGHT_SUM), choices);
                if let Some(SharedExpert { gate, .. }) = &weights.shared {
                    *factor = sigmoid(dot(gate, y));
                }
            }
        });
    buffers.choices.truncate(n_rows * n_used);
}

/// Gives each choice a grouped row: by expert, and in the order of rows for one expert.
fn group(n_experts: usize, n_rows: usize, buffers: &mut ExpertBuffers) {
    let ExpertBuffers {
        choices,
        starts,
        rows,
        slots,
        ..
    } = buffers;
    starts.clear();
    starts.resize(n_experts + 1, 0);
    for choice in choices.iter() {
        starts[choice.expert + 1] += 1;
    }
    for expert in 0..n_experts {
        starts[expert + 1] += starts[expert];
    }
    rows.clear();
    rows.resize(choices.len(), 0);
    slots.clear();
    let n_used = choices.len() / n_rows;
    let mut next = starts.clone();
    for (i, choice) in choices.iter().enumerate() {
        let slot = next[choice.expert];
        next[choice.expert] += 1;
        rows[slot] = i / n_used;
        slots.push(slot);
    }
}

/// Adds the product of each chosen expert's matrix with its grouped rows.
fn add_products<'a>(
    linear: &'a Linear,
    starts: &[usize],
    mut out: &'a mut [f32],
    products: &mut Vec<Product<'a>>,
) {
    for (expert, bounds) in starts.windows(2).enumerate() {
        let rows = bounds[0]..bounds[1];
        if !rows.is_empty() {
            products.push(Product {
                linear,
                matrix: expert,
                out: take(&mut out, rows.len() * linear.rows()),
                rows,
            });
        }
    }
}

/// `out = sum of weight * grouped row over a row's choices + factor * out`; without factors, `out`
/// has no content yet. `out` is `[n, hidden]`.
fn sum(
    compute: ExecContext<'_>,
    n_used: usize,
    (choices, slots): (&[ChosenExpert], &[usize]),
    factors: Option<&[f32]>,
    grouped: &[f32],
    out: &mut [f32],
) {
    let n_rows = choices.len() / n_used;
    let hidden = out.len() / n_rows;
    let size = compute.light_grain(n_rows, n_used * hidden);
    let rows = out.chunks_mut(size * hidden).enumerate();
    compute.pool.for_each_item(rows, |(item, out)| {
        for (i, out) in out.chunks_exact_mut(hidden).enumerate() {
            let row = item * size + i;
            match factors {
                Some(factors) => out.iter_mut().for_each(|value| *value *= factors[row]),
                None => out.fill(0.0),
            }
            let of_row = row * n_used..(row + 1) * n_used;
            for (choice, slot) in choices[of_row.clone()].iter().zip(&slots[of_row]) {
                let expert = &grouped[slot * hidden..][..hidden];
                (compute.kernels.accumulate)(&[choice.weight], expert, hidden, out);
            }
        }
    });
}
