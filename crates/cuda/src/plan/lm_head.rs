//! The head: asked rows through the final norm and the head matrix, and reduced to candidates.

use super::activations::Forms;
use super::gemm::{self, Product};
use super::gemv;
use super::{Plan, Site};
use crate::launch::gemm::small_batch::Write;
use crate::launch::logits::{self, Rows};
use crate::launch::norm::{self, Residual, Rms, Source};
use crate::memory::BumpAllocator;

/// The head over asked rows of the chunk before it.
pub(super) fn of_chunk(site: &Site<'_>, rows: usize, arena: &mut BumpAllocator) -> Plan {
    let mut plan = Plan::default();
    let asked = Source::AskedOfChunk(site.addresses.chunk);
    let norm = (site.weights.final_norm, site.spec.norm_eps);
    append(site, rows, asked, norm, arena, &mut plan);
    plan
}

/// Edits of asked rows, and their reduction again: to be run after the head where some row has
/// edits.
pub(super) fn edited(
    site: &Site<'_>,
    rows: usize,
    asked: Source,
    arena: &mut BumpAllocator,
) -> Plan {
    let at = site.addresses;
    let edited = Rows {
        logits: at.logits,
        edited: at.edited,
        edits: at.edits,
        scratch: arena.take(site.reduce.scratch_bytes(rows)),
        out: at.rows,
    };
    let mut plan = Plan::default();
    plan.launches
        .extend(logits::edit(site.reduce, rows, asked, edited));
    plan.launches
        .extend(logits::reduce(site.reduce, rows, asked, edited));
    plan
}

/// Appends the head over up to `rows` asked rows; `asked` gathers them from the residual stream,
/// through a final norm of this weight and epsilon.
pub(super) fn append(
    site: &Site<'_>,
    rows: usize,
    asked: Source,
    (weight, eps): (u64, f32),
    arena: &mut BumpAllocator,
    plan: &mut Plan,
) {
    let (head, hidden) = (site.weights.head, site.spec.hidden);
    let at = site.addresses;
    let logits = Product {
        matrix: head,
        out: at.logits,
        write: Write::Store,
    };
    // The one row of a step is the row that may be asked for.
    let one = match (rows, asked) {
        (1, Source::AskedOfStep(_)) => gemv::head(site, &logits, (weight, eps)),
        _ => None,
    };
    match one {
        Some(launch) => plan.launches.push(launch),
        None => {
            let y = Forms::of([head.kind]).carve(arena, rows, hidden);
            let rms = Rms { width: hidden, eps };
            let x = Residual::of(at.residual);
            plan.launches
                .push(norm::rms(rms, rows, asked, x, weight, y));
            plan.launches
                .extend(gemm::launches(site, rows, &y, &[logits]));
        }
    }
    let reduced = Rows {
        logits: at.logits,
        edited: 0,
        edits: 0,
        scratch: arena.take(site.reduce.scratch_bytes(rows)),
        out: at.rows,
    };
    plan.launches
        .extend(logits::reduce(site.reduce, rows, asked, reduced));
}
