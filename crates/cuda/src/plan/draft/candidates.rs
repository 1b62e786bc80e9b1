//! From the rows after a draft's last layer to lists of candidates: the LM head and its reduction,
//! then scores of pairs, or chains of states with a bias.
//!
//! *Draft vocabulary.* A draft with the target's LM head proposes from the first tokens of a large
//! vocabulary ([`draft_vocab`]), as a multi-token-prediction head does.
//!
//! *Chains.* The bias of a depth depends on the token before, so depths follow each other: the
//! states of a depth ([`ChainSelect`]), a GEMM of their bias, its sum with the row's logits, and
//! the reduction. All are launches of one plan, without the host.
//!
//! [`draft_vocab`]: super::super::mtp::draft_vocab

use contract::DraftSpec;

use super::super::activations::ActivationFormats;
use super::super::gemm::{self, GemmOperation};
use super::super::lm_head::{self, LmHead};
use super::super::{Plan, PlanContext};
use super::lists::{ChainLayout, DraftLists};
use super::{eps, final_norm};
use crate::launch::draft::{
    CHAIN_STATES, ChainConfidence, ChainSelect, ChainStates, PairScores, chain_bias,
    transform_logits,
};
use crate::launch::embedding::EmbeddingTable;
use crate::launch::gemm::small_batch::GemmEpilogue;
use crate::launch::logits::{self, LogitsBuffers, LogitsReduction};
use crate::launch::norm::{self, Residual, RmsShape, RowSource};
use crate::memory::BumpAllocator;
use crate::weights::{Conditioned, DraftWeights, WeightMatrix};

/// A plan's rows, padding included, and the LM head that proposes for them.
#[derive(Clone, Copy)]
pub(super) struct ProposedRows {
    pub(super) rows: usize,
    pub(super) head: WeightMatrix,
}

/// The LM head of a draft: its own, or the first `proposed` rows of the target's.
pub(super) fn head(
    context: &PlanContext<'_>,
    weights: &DraftWeights,
    proposed: usize,
) -> WeightMatrix {
    weights.head.unwrap_or(WeightMatrix {
        rows: proposed,
        ..context.weights.head
    })
}

/// Appends the launches that make lists of the rows of the draft's step.
pub(super) fn append(
    context: &PlanContext<'_>,
    (spec, weights): (&DraftSpec, &DraftWeights),
    proposed: ProposedRows,
    arena: &mut BumpAllocator,
    plan: &mut Plan,
) {
    let ProposedRows { rows, head } = proposed;
    let (at, hidden) = (context.addresses, context.spec.hidden);
    let asked = RowSource::LogitsRowsOfStep(at.draft);
    let (mut products, mut formats) = (Vec::new(), ActivationFormats::of([head.kind]));
    let mut product = |matrix: WeightMatrix, out: u64| {
        products.push(GemmOperation {
            matrix,
            out,
            write: GemmEpilogue::Store,
        });
    };
    product(head, at.logits);
    let mut gates = 0;
    match weights.conditioned {
        Conditioned::Independent => {
            let head = LmHead {
                matrix: head,
                norm: final_norm(context),
                eps: eps(context),
            };
            lm_head::append(context, rows, asked, head, arena, plan);
            return;
        }
        Conditioned::Pairwise { hidden, .. } => {
            gates = arena.take(4 * rows * hidden.rows);
            product(hidden, gates);
            formats = formats.and(ActivationFormats::of([hidden.kind]));
        }
        Conditioned::Markov { confidence, .. } => {
            if confidence.is_some() {
                formats = formats.with_f32();
            }
        }
    }
    let y = formats.allocate(arena, rows, hidden);
    let rms = RmsShape {
        width: hidden,
        eps: eps(context),
    };
    let x = Residual::of(at.residual);
    plan.launches
        .push(norm::rms_norm(rms, rows, asked, x, weights.final_norm, y));
    plan.launches
        .extend(gemm::launches(context, rows, &y, &products));
    let (scale, cap) = (spec.logit_scale, spec.logit_softcap);
    if scale != 1.0 || cap.is_some() {
        let shape = (head.rows, rows);
        plan.launches
            .push(transform_logits(shape, at.draft, at.logits, (scale, cap)));
    }
    let reduction = LogitsReduction {
        vocab: head.rows,
        stride: head.rows,
        k: context.reduce.k,
    };
    match (weights.conditioned, context.draft_lists) {
        (
            Conditioned::Pairwise {
                predecessor,
                successor,
                ..
            },
            DraftLists::Pairs { top_k },
        ) => {
            let reduced = LogitsBuffers {
                logits: at.logits,
                edited: 0,
                edits: 0,
                scratch: arena.take(reduction.scratch_bytes(rows)),
                out: at.rows,
            };
            plan.launches
                .extend(logits::reduce(reduction, rows, asked, reduced));
            let scores = PairScores {
                top_k,
                first_row: spec.first_row,
                predecessor,
                successor,
                reduction,
                reduced: at.rows,
                gates,
                lists: at.draft_lists,
            };
            plan.launches.push(scores.launch(rows, at.draft));
        }
        (
            Conditioned::Markov {
                previous,
                next,
                confidence,
            },
            DraftLists::Chains(chains),
        ) => {
            let confidence = confidence.map(|(weight, bias)| ChainConfidence {
                y: y.f32,
                hidden,
                weight,
                bias,
                out: 0,
            });
            let chain = Chain {
                layout: chains.layout(rows),
                reduction: LogitsReduction {
                    k: chains.candidates(),
                    ..reduction
                },
                previous,
                next: WeightMatrix {
                    rows: head.rows,
                    ..next
                },
                confidence,
            };
            chain.append(context, arena, plan);
        }
        _ => unreachable!("weights and lists were laid out from this spec"),
    }
}

/// The chain of depths of a DSpark draft.
struct Chain {
    layout: ChainLayout,
    /// Of the rows of states.
    reduction: LogitsReduction,
    previous: EmbeddingTable,
    /// As many rows as the LM head.
    next: WeightMatrix,
    /// Its output is that of each depth.
    confidence: Option<ChainConfidence>,
}

impl Chain {
    fn append(&self, context: &PlanContext<'_>, arena: &mut BumpAllocator, plan: &mut Plan) {
        let (at, layout, reduction) = (context.addresses, self.layout, self.reduction);
        let (trees, rows) = (layout.trees, layout.states());
        let weights = [(); 2].map(|()| arena.take(8 * rows));
        let rank = self.previous.width;
        let input = ActivationFormats::of([self.next.kind]).allocate(arena, rows, rank);
        let scratch = arena.take(reduction.scratch_bytes(rows));
        let lists = at.draft_lists;
        let states = |depth: usize| ChainStates {
            tokens: lists + layout.tokens(depth) as u64,
            weights: weights[depth % 2],
        };
        let reduced = |depth: usize| lists + layout.reduced(depth) as u64;
        for depth in 0..layout.depths {
            let before = depth.saturating_sub(1);
            let select = ChainSelect {
                depth,
                reduction,
                reduced: reduced(before),
                before: states(before),
                states: states(depth),
                ids: context.draft_ids,
                previous: self.previous,
                confidence: self.confidence.map(|confidence| ChainConfidence {
                    out: lists + layout.confidence(depth) as u64,
                    ..confidence
                }),
                rows: input,
            };
            plan.launches.push(select.launch(trees, at.draft));
            let bias = GemmOperation {
                matrix: self.next,
                out: at.edited,
                write: GemmEpilogue::Store,
            };
            plan.launches
                .extend(gemm::launches(context, rows, &input, &[bias]));
            plan.launches.push(chain_bias(
                (reduction.vocab, trees),
                (at.draft, depth),
                at.logits,
                states(depth).tokens,
                at.edited,
            ));
            let buffers = LogitsBuffers {
                logits: at.edited,
                edited: 0,
                edits: 0,
                scratch,
                out: reduced(depth),
            };
            let all = RowSource::LogitsRowsOfChunk(at.all_rows);
            plan.launches
                .extend(logits::reduce(reduction, rows, all, buffers));
        }
        debug_assert_eq!(rows, CHAIN_STATES * trees);
    }
}
