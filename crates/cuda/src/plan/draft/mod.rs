//! A draft: keys and values of committed tokens from the target's features, and blocks of masks
//! through the draft's layers and an LM head. [`contract::draft`] has the formulas.
//!
//! Layers that consist of norms, matrices and attention run as the target's do ([`block`]); those
//! with convolutions or norms before the residual are [`sublayers`].

mod candidates;
mod lists;
mod sublayers;

use contract::{BlockMask, DraftLayer, DraftValues, KvFormats};

use super::activations::ActivationFormats;
use super::decode_builder::{DecodeBuilder, builder};
use super::fused_layers::{DraftingFfn, DraftingLayer};
use super::gemm::{self, GemmOperation};
use super::{Plan, PlanContext, Plans};
use crate::launch::Launch;
use crate::launch::attention::{Cache, Mask, Positions, Projections, Shape};
use crate::launch::draft::{CapturedStates, context as write_context, path_rows};
use crate::launch::gemm::small_batch::GemmEpilogue;
use crate::launch::norm::{self, ActivationBuffers, Residual, RmsShape, RowSource};
use crate::memory::BumpAllocator;
use crate::state::{DraftRing, FEATURE_ROWS};
use crate::weights::{DraftLayerWeights, DraftWeights, WeightMatrix};

pub(crate) use lists::{DraftLists, chains, pairs};

use candidates::ProposedRows;

impl Plans {
    /// Whether draft blocks with the whole LM head have plans of their own.
    pub(crate) fn has_whole_draft(&self) -> bool {
        self.drafts.whole_block
    }
}

/// How the attention kernels see a draft layer.
fn shape(layer: &DraftLayer, ring: &DraftRing, kv: KvFormats, eps: f32) -> Shape {
    let a = &layer.attention;
    Shape {
        n_heads: a.n_heads,
        n_kv_heads: a.n_kv_heads,
        head_dim: a.head_dim,
        rope: a.rope,
        gate: false,
        normed: a.q_norm.is_some(),
        values_normed: layer.values == DraftValues::Keys,
        k: kv.k,
        v: kv.v,
        rotated: false,
        eps,
        scale: a.scale,
        window: layer.window,
        mask: match layer.block_mask {
            BlockMask::Full => Mask::Full,
            BlockMask::Causal => Mask::Causal,
        },
        ring_pages: ring.pages,
    }
}

fn cache(ring: &DraftRing) -> Cache {
    Cache {
        k: ring.rows.k.values,
        k_scale: ring.rows.k.scales,
        v: ring.rows.v.values,
        v_scale: ring.rows.v.scales,
        page_table: ring.page_table,
        max_pages: ring.pages,
    }
}

/// Epsilon of the draft's norms.
pub(super) fn eps(context: &PlanContext<'_>) -> f32 {
    let draft = context.load_config.draft.as_ref();
    draft.map_or(context.spec.norm_eps, |draft| draft.spec.norm_eps)
}

/// The draft's norm before the LM head.
fn final_norm(context: &PlanContext<'_>) -> u64 {
    let draft = context.weights.draft.as_ref();
    draft.map_or(context.weights.final_norm, |draft| draft.final_norm)
}

/// Every layer with its shape and its ring, bottom to top.
fn layers<'a>(
    context: &PlanContext<'a>,
) -> impl Iterator<Item = (&'a DraftLayer, Shape, &'a DraftRing)> {
    let (load_config, state) = (context.load_config, context.state);
    let draft = load_config.draft.iter().zip(&state.draft);
    draft.flat_map(|(draft, state)| {
        let kv = KvFormats {
            k: draft.kv,
            v: draft.kv,
        };
        let eps = draft.spec.norm_eps;
        let layers = draft.spec.layers.iter().zip(&state.rings);
        layers.map(move |(layer, ring)| (layer, shape(layer, ring, kv, eps), ring))
    })
}

/// The matrices that turn features into context: keys, then values, layer by layer.
pub(super) fn context_readers(weights: &DraftWeights) -> Vec<WeightMatrix> {
    let parts = weights.layers.iter();
    parts
        .flat_map(|layer| [layer.attention.k, layer.attention.v])
        .collect()
}

/// Writes what those matrices gave, `projected` f32 `[rows][..]` in their order, into the rings.
pub(super) fn write_draft_context(
    context: &PlanContext<'_>,
    rows: usize,
    at: Positions,
    projected: &[u64],
) -> Vec<Launch> {
    let weights = context.weights.draft.iter().flat_map(|draft| &draft.layers);
    let layers = layers(context).zip(weights).zip(projected.chunks_exact(2));
    layers
        .map(|(((layer, shape, ring), weights), projected)| {
            let from = Projections {
                q: 0,
                k: projected[0],
                v: projected[1],
                kv_stride: weights.attention.k.rows,
                q_norm: 0,
                k_norm: weights.attention.k_norm,
                frequencies: context.frequencies(&layer.attention),
                biases: [0; 3],
            };
            write_context(&shape, rows, at, from, cache(ring))
        })
        .collect()
}

/// The plan by which up to `rows` rows of features that wait become keys and values.
pub(super) fn context_of_pending(
    context: &PlanContext<'_>,
    rows: usize,
    arena: &mut BumpAllocator,
) -> Plan {
    let mut plan = Plan::default();
    let (Some(weights), Some(state)) = (&context.weights.draft, &context.state.draft) else {
        return plan;
    };
    let header = context.addresses.pending;
    let (width, hidden) = (weights.fc.cols, weights.fc.rows);
    let input = ActivationFormats::of([weights.fc.kind]).allocate(arena, rows, width);
    let captured = CapturedStates {
        at: state.features,
        width,
        rows_per_slot: FEATURE_ROWS,
    };
    plan.launches.push(path_rows(captured, rows, header, input));
    let raw = arena.take(4 * rows * hidden);
    append_products(context, rows, &input, &[(weights.fc, raw)], &mut plan);
    let input_projections = context_readers(weights);
    let f = ActivationFormats::of(input_projections.iter().map(|m| m.kind))
        .allocate(arena, rows, hidden);
    let rms = RmsShape {
        width: hidden,
        eps: eps(context),
    };
    // Rows beyond those that wait are normed too; nobody reads them.
    let all = RowSource::Chunk(context.addresses.all_rows);
    let norm = norm::rms_norm(rms, rows, all, Residual::of(raw), weights.hidden_norm, f);
    let projected: Vec<(WeightMatrix, u64)> = input_projections
        .iter()
        .map(|matrix| (*matrix, arena.take(4 * rows * matrix.rows)))
        .collect();
    plan.launches.push(norm);
    append_products(context, rows, &f, &projected, &mut plan);
    let outs: Vec<u64> = projected.iter().map(|(_, out)| *out).collect();
    plan.launches.extend(write_draft_context(
        context,
        rows,
        Positions::Commit(header),
        &outs,
    ));
    plan
}

/// Appends products of one input, each into f32 rows of its own.
fn append_products(
    context: &PlanContext<'_>,
    rows: usize,
    input: &ActivationBuffers,
    matrices: &[(WeightMatrix, u64)],
    plan: &mut Plan,
) {
    let products: Vec<GemmOperation> = matrices
        .iter()
        .map(|(matrix, out)| GemmOperation {
            matrix: *matrix,
            out: *out,
            write: GemmEpilogue::Store,
        })
        .collect();
    plan.launches
        .extend(gemm::launches(context, rows, input, &products));
}

/// The plan of draft blocks of up to `rows` rows that propose the first `proposed` tokens of the
/// target's LM head, or those of the draft's own.
pub(super) fn block(
    context: &PlanContext<'_>,
    (rows, proposed): (usize, usize),
    arena: &mut BumpAllocator,
) -> Plan {
    let (Some(weights), Some(config)) = (&context.weights.draft, &context.load_config.draft) else {
        return Plan::default();
    };
    let (step, eps) = (context.addresses.draft, eps(context));
    // Only the delta rule, which no draft has, goes by the number of trees.
    let mut builder = builder(context, (rows, 1), step, eps, *arena);
    builder.embed_from(weights.embedding.unwrap_or(context.weights.embedding));
    let layers: Vec<_> = layers(context).zip(&weights.layers).collect();
    let mixer =
        |b: &mut DecodeBuilder<'_>, i: usize, projected: &[u64], arena: &mut BumpAllocator| {
            let ((layer, shape, ring), weights): &((&DraftLayer, Shape, &DraftRing), _) =
                &layers[i];
            let DraftLayerWeights { attention, .. } = weights;
            let a = (&layer.attention, *shape);
            b.attention(a, attention, cache(ring), projected, arena)
        };
    if weights.layers.iter().any(sublayers::has_ends) {
        sublayers::push(&mut builder, &weights.layers, mixer);
    } else {
        let layers = weights.layers.iter().map(|layer| DraftingLayer {
            norm: layer.attention_norm,
            attention: &layer.attention,
            ffn: DraftingFfn::Dense(&layer.ffn),
        });
        builder.push_drafting_layers(&layers.collect::<Vec<_>>(), mixer);
    }
    let (mut plan, peak) = builder.finish();
    let mut tail = *arena;
    let proposed = ProposedRows {
        rows,
        head: candidates::head(context, weights, proposed),
    };
    let draft = (&*config.spec, weights);
    candidates::append(context, draft, proposed, &mut tail, &mut plan);
    *arena = if tail.used() > peak.used() {
        tail
    } else {
        peak
    };
    plan
}
