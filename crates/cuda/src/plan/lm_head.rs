//! The LM head: logits rows through the final norm and the head matrix, reduced to candidates.

use super::activations::ActivationFormats;
use super::decode_builder::DecodeBuilder;
use super::gemm::{self, GemmOperation};
use super::gemv;
use super::{Plan, PlanContext};
use crate::launch::gemm::small_batch::GemmEpilogue;
use crate::launch::logits::{self, LogitsBuffers, MassBuffers};
use crate::launch::norm::{self, Residual, RmsShape, RowSource};
use crate::memory::BumpAllocator;
use crate::weights::WeightMatrix;

/// An LM head with the norm before it.
#[derive(Debug, Clone, Copy)]
pub(super) struct LmHead {
    pub(super) matrix: WeightMatrix,
    pub(super) norm: u64,
    pub(super) eps: f32,
}

impl LmHead {
    /// The target's, with this epsilon.
    pub(super) fn of_target(context: &PlanContext<'_>, eps: f32) -> LmHead {
        LmHead {
            matrix: context.weights.head,
            norm: context.weights.final_norm,
            eps,
        }
    }
}

/// The LM head over the logits rows of the previous chunk.
pub(super) fn of_chunk(context: &PlanContext<'_>, rows: usize, arena: &mut BumpAllocator) -> Plan {
    let mut plan = Plan::default();
    let asked = RowSource::LogitsRowsOfChunk(context.addresses.chunk);
    let head = LmHead::of_target(context, context.spec.norm_eps);
    append(context, rows, asked, head, arena, &mut plan);
    plan
}

/// Edits of logits rows and a second reduction, after the LM head, if some row has edits.
pub(super) fn edited(
    context: &PlanContext<'_>,
    rows: usize,
    asked: RowSource,
    arena: &mut BumpAllocator,
) -> Plan {
    let at = context.addresses;
    let edited = LogitsBuffers {
        logits: at.logits,
        edited: at.edited,
        edits: at.edits,
        scratch: arena.take(context.reduce.scratch_bytes(rows)),
        out: at.rows,
    };
    let mut plan = Plan::default();
    plan.launches
        .extend(logits::edit(context.reduce, rows, asked, edited));
    plan.launches
        .extend(logits::reduce(context.reduce, rows, asked, edited));
    plan
}

/// Masses of the logits rows of a step, from their edits if there are any.
pub(super) fn masses(
    context: &PlanContext<'_>,
    (rows, edited): (usize, bool),
    arena: &mut BumpAllocator,
) -> Plan {
    let at = context.addresses;
    let reduced = LogitsBuffers {
        logits: at.logits,
        edited: if edited { at.edited } else { 0 },
        edits: if edited { at.edits } else { 0 },
        scratch: 0,
        out: at.rows,
    };
    let own = MassBuffers {
        queries: at.mass_queries,
        scratch: arena.take(context.reduce.mass_scratch_bytes(rows)),
        out: at.masses,
    };
    let source = RowSource::LogitsRowsOfStep(at.step);
    let mut plan = Plan::default();
    plan.launches
        .extend(logits::masses(context.reduce, rows, source, (reduced, own)));
    plan
}

/// Appends an LM head over up to `rows` logits rows; `asked` gathers them from the residual stream.
/// A row has the tokens of the matrix, at least as many as the reduction gives.
pub(super) fn append(
    context: &PlanContext<'_>,
    rows: usize,
    asked: RowSource,
    head: LmHead,
    arena: &mut BumpAllocator,
    plan: &mut Plan,
) {
    let LmHead {
        matrix,
        norm: weight,
        eps,
    } = head;
    let (hidden, at) = (context.spec.hidden, context.addresses);
    let logits = GemmOperation {
        matrix,
        out: at.logits,
        write: GemmEpilogue::Store,
    };
    // The only row of a single-row step is its only logits row.
    let one = match (rows, asked) {
        (1, RowSource::LogitsRowsOfStep(_)) => gemv::head(context, &logits, (weight, eps)),
        _ => None,
    };
    match one {
        Some(launch) => plan.launches.push(launch),
        None => {
            let y = ActivationFormats::of([matrix.kind]).allocate(arena, rows, hidden);
            let rms = RmsShape { width: hidden, eps };
            let x = Residual::of(at.residual);
            plan.launches
                .push(norm::rms_norm(rms, rows, asked, x, weight, y));
            plan.launches
                .extend(gemm::launches(context, rows, &y, &[logits]));
        }
    }
    let shape = logits::LogitsReduction {
        vocab: matrix.rows,
        stride: matrix.rows,
        k: context.reduce.k,
    };
    let reduced = LogitsBuffers {
        logits: at.logits,
        edited: 0,
        edits: 0,
        scratch: arena.take(shape.scratch_bytes(rows)),
        out: at.rows,
    };
    plan.launches
        .extend(logits::reduce(shape, rows, asked, reduced));
}

impl DecodeBuilder<'_> {
    /// Completes the plan with an LM head and moves `arena` past the furthest buffer.
    pub(super) fn head(self, asked: RowSource, head: LmHead, arena: &mut BumpAllocator) -> Plan {
        let mut plan = self.plan;
        let mut tail = *arena;
        append(self.context, self.rows, asked, head, &mut tail, &mut plan);
        *arena = if tail.used() > self.peak.used() {
            tail
        } else {
            self.peak
        };
        plan
    }
}
