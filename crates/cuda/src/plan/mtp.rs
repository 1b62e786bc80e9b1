//! A multi-token-prediction head ([`contract::MtpSpec`]): one more attention layer, which drafts
//! from the target's own hidden rows.
//!
//! *Cache.* Its keys and values are one more layer of the paged cache, behind the trunk's. A
//! committed position has one row, computed from its token and from the hidden row of the position
//! before it: joined input, input projection, norm, key and value. Attention and feed-forward are
//! not needed. A chunk of a prompt fills all its rows at its end. A commit fills the rows of its
//! paths anew ([`commit`]), because drafted rows were computed from the head's own outputs. Drafted
//! rows are stored behind the committed ones, where the trunk's layers store the nodes of a tree.
//!
//! *Hidden rows.* `state.hidden` has, per slot, the row of the last committed position, then the
//! rows of the pending tree's nodes. Every step keeps them, and a commit moves the last node's row
//! to the front. A sequence without a pending tree drafts, and then the same rows are the outputs
//! of its drafted rows. So the row before a node, a token of a path and a drafted row is found
//! alike.
//!
//! *Drafts.* The rows of one depth of up to eight sequences are one launch sequence ([`draft`]): a
//! layer with the decode kernels, whose attention also sees the ancestors drafted before
//! ([`Mask::DraftedAncestors`]), then the LM head and its reduction. Its kernels are the fastest: a
//! draft is verified, so its bits change no text.
//!
//! *Draft vocabulary.* Of a large vocabulary, a draft proposes the first [`DRAFT_VOCAB`] tokens:
//! the LM head is then the larger part of what a depth reads, and the tokens of a byte-pair
//! vocabulary come in the order of their frequency. The rows of these tokens are the first of the
//! matrix, so the same weights serve. Calls that ask for more candidates than the reduction gives
//! get the whole head.

use contract::{AttentionSpec, Mixer};

use super::activations::ActivationFormats;
use super::decode_builder::{DecodeBuilder, builder};
use super::fused_layers::{DraftingFfn, DraftingLayer};
use super::layer_arguments::{cache, shape};
use super::lm_head::LmHead;
use super::{Plan, PlanContext, Plans};
use crate::launch::Launch;
use crate::launch::attention::{self, AppendTarget, Cache, Mask, Positions, Projections, Shape};
use crate::launch::embedding;
use crate::launch::mtp::{self, ChunkStream, HiddenPool, JoinInputs, KeptRows};
use crate::launch::norm::{self, ActivationBuffers, Residual, RmsShape, RowSource};
use crate::memory::BumpAllocator;
use crate::pack::BLOCK_ROWS;
use crate::state::LayerState;
use crate::weights::{MtpWeights, WeightMatrix};

/// Tokens that a head proposes from, if the vocabulary is at least twice as large. A multiple of
/// the row blocks of packed weights.
const DRAFT_VOCAB: usize = 1 << 16;

/// Tokens that a head of a model with `vocab` tokens proposes from; `wanted` replaces the default.
pub(super) fn draft_vocab(vocab: usize, wanted: Option<usize>) -> usize {
    match wanted {
        Some(wanted) => wanted.next_multiple_of(BLOCK_ROWS).min(vocab),
        None if vocab >= 2 * DRAFT_VOCAB => DRAFT_VOCAB,
        None => vocab,
    }
}

impl Plans {
    /// Whether drafts with the whole LM head have plans of their own.
    pub(crate) fn has_whole_mtp(&self) -> bool {
        self.drafts.whole_mtp
    }

    /// Tokens that the head proposes from; `None` for the whole vocabulary.
    pub(crate) fn mtp_vocab(&self) -> Option<usize> {
        self.drafts.whole_mtp.then_some(self.proposed)
    }
}

/// A head as its launches take it.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    attention: &'a AttentionSpec,
    pub(super) weights: &'a MtpWeights,
    pool: HiddenPool,
    cache: Cache,
}

impl<'a> Head<'a> {
    /// The model's head, if it has one.
    pub(super) fn of(context: &PlanContext<'a>) -> Option<Head<'a>> {
        let spec = context.spec.mtp.as_ref()?;
        let (Mixer::Attention(attention), weights, pool) = (
            &spec.layer.mixer,
            context.weights.mtp.as_ref()?,
            context.state.hidden?,
        ) else {
            return None;
        };
        let LayerState::Kv(group, index) = context.state.layer(context.spec.layers.len()) else {
            return None;
        };
        Some(Head {
            attention,
            weights,
            pool,
            cache: cache(context, group, index),
        })
    }

    /// The shape of its layer for the attention kernels.
    fn shape(&self, context: &PlanContext<'_>) -> Shape {
        shape(self.attention, context.load_config, context.spec.norm_eps)
    }

    /// The embedding rows of `rows` tokens, f32 at `out`.
    pub(super) fn embed(&self, rows: usize, source: RowSource, out: u64) -> Launch {
        embedding::gather(self.weights.embedding, rows, source, out)
    }

    /// What its joined input is made from; `embedding` is what [`Head::embed`] wrote.
    pub(super) fn join_inputs(&self, context: &PlanContext<'_>, embedding: u64) -> JoinInputs {
        JoinInputs {
            embedding,
            pool: self.pool,
            embedding_norm: self.weights.embedding_norm,
            hidden_norm: self.weights.hidden_norm,
            eps: context.spec.norm_eps,
        }
    }

    /// The matrices that give keys and values.
    pub(super) fn key_value_matrices(&self) -> [WeightMatrix; 2] {
        [self.weights.attention.k, self.weights.attention.v]
    }

    /// Writes the products of [`Head::key_value_matrices`] to the cache.
    pub(super) fn append(
        &self,
        context: &PlanContext<'_>,
        rows: usize,
        positions: Positions,
        projected: &[u64],
    ) -> Launch {
        let from = Projections {
            q: 0,
            k: projected[0],
            v: projected[1],
            kv_stride: self.weights.attention.k.rows,
            q_norm: 0,
            k_norm: self.weights.attention.k_norm,
            frequencies: context.frequencies(self.attention),
            biases: [0; 3],
        };
        let to = AppendTarget {
            cache: self.cache,
            f16_queries: 0,
        };
        attention::qk_norm_rope_append(&self.shape(context), rows, positions, from, to)
    }

    /// Keeps rows of the target's residual stream, after its final norm.
    pub(super) fn keep(&self, context: &PlanContext<'_>, rows: usize, kept: KeptRows) -> Launch {
        let norm = (context.weights.final_norm, context.spec.norm_eps);
        mtp::keep_hidden(rows, kept, context.addresses.residual, norm, self.pool)
    }
}

/// The residual stream of the chunk at hand.
pub(super) fn chunk_stream(context: &PlanContext<'_>) -> ChunkStream {
    ChunkStream {
        header: context.addresses.chunk,
        residual: context.addresses.residual,
        final_norm: context.weights.final_norm,
    }
}

/// The plan that fills the rows of committed paths, up to `rows` in all.
pub(super) fn commit(context: &PlanContext<'_>, rows: usize, arena: &mut BumpAllocator) -> Plan {
    let Some(head) = Head::of(context) else {
        return Plan::default();
    };
    let (step, eps) = (context.addresses.mtp_commit, context.spec.norm_eps);
    // Only the delta rule, which a head does not have, goes by the number of trees.
    let mut builder = builder(context, (rows, 1), step, eps, *arena);
    builder.block(|b, arena| {
        let x = context.addresses.residual;
        b.mtp_input(&head, (JoinedRows::Step(step), x), arena);
        b.mtp_keys_and_values(&head, x, Positions::Step(step), arena);
    });
    builder.push(mtp::commit_hidden(step, head.pool));
    let (plan, peak) = builder.finish();
    *arena = peak;
    plan
}

/// The plan that drafts up to `rows` rows and proposes the first `proposed` tokens.
pub(super) fn draft(
    context: &PlanContext<'_>,
    (rows, proposed): (usize, usize),
    arena: &mut BumpAllocator,
) -> Plan {
    let Some(head) = Head::of(context) else {
        return Plan::default();
    };
    let (step, eps) = (context.addresses.mtp_draft, context.spec.norm_eps);
    let x = context.addresses.residual;
    let weights = head.weights;
    let shape = Shape {
        mask: Mask::DraftedAncestors,
        ..head.shape(context)
    };
    let mut builder = builder(context, (rows, 1), step, eps, *arena);
    builder.block(|b, arena| b.mtp_input(&head, (JoinedRows::Step(step), x), arena));
    let mixer =
        |b: &mut DecodeBuilder<'_>, _: usize, projected: &[u64], arena: &mut BumpAllocator| {
            let layer = (head.attention, shape);
            b.attention(layer, &weights.attention, head.cache, projected, arena)
        };
    let layer = DraftingLayer {
        norm: weights.mixer_norm,
        attention: &weights.attention,
        ffn: DraftingFfn::of(&weights.ffn),
    };
    builder.push_drafting_layers(&[layer], mixer);
    let norm = (weights.final_norm, eps);
    let kept = KeptRows::Drafted(step);
    builder.push(mtp::keep_hidden(rows, kept, x, norm, head.pool));
    let lm_head = LmHead {
        matrix: WeightMatrix {
            rows: proposed,
            ..weights.head
        },
        norm: weights.final_norm,
        eps,
    };
    builder.head(RowSource::LogitsRowsOfStep(step), lm_head, arena)
}

/// Where the hidden row before each row is.
#[derive(Debug, Clone, Copy)]
enum JoinedRows {
    /// The `MtpStep` at this address names them.
    Step(u64),
    /// In the residual stream of a chunk.
    Chunk(ChunkStream),
}

impl DecodeBuilder<'_> {
    /// The input of the head's layer, f32 `[rows][hidden]` at `x`.
    fn mtp_input(
        &mut self,
        head: &Head<'_>,
        (joined, x): (JoinedRows, u64),
        arena: &mut BumpAllocator,
    ) {
        let (context, rows, eh_proj) = (self.context, self.rows, head.weights.eh_proj);
        // The embeddings are read before the product is written to the same place.
        self.push(head.embed(rows, self.source, x));
        let inputs = head.join_inputs(context, x);
        let out = ActivationFormats::of([eh_proj.kind]).allocate(arena, rows, eh_proj.cols);
        self.push(match joined {
            JoinedRows::Step(step) => mtp::join(rows, step, inputs, out),
            JoinedRows::Chunk(chunk) => mtp::join_chunk(rows, chunk, inputs, out),
        });
        self.project_to(&out, &[eh_proj], &[x]);
    }

    /// Writes the keys and values of the rows whose layer input is at `x`.
    fn mtp_keys_and_values(
        &mut self,
        head: &Head<'_>,
        x: u64,
        positions: Positions,
        arena: &mut BumpAllocator,
    ) {
        let (context, rows) = (self.context, self.rows);
        let matrices = head.key_value_matrices();
        let y: ActivationBuffers = ActivationFormats::of(matrices.map(|m| m.kind)).allocate(
            arena,
            rows,
            context.spec.hidden,
        );
        let rms = RmsShape {
            width: context.spec.hidden,
            eps: self.eps,
        };
        let norm = head.weights.mixer_norm;
        self.push(norm::rms_norm(
            rms,
            rows,
            self.source,
            Residual::of(x),
            norm,
            y,
        ));
        let projected = self.project(&y, &matrices, arena);
        self.push(head.append(context, rows, positions, &projected));
    }

    /// The head's rows of a chunk that the decode kernels compute.
    pub(super) fn chunk_mtp(&mut self, head: &Head<'_>, arena: &mut BumpAllocator) {
        let (context, rows) = (self.context, self.rows);
        let chunk = context.addresses.chunk;
        // The LM head reads the residual stream afterwards.
        let x = arena.take(4 * rows * context.spec.hidden);
        let joined = JoinedRows::Chunk(chunk_stream(context));
        self.mtp_input(head, (joined, x), arena);
        self.mtp_keys_and_values(head, x, Positions::Chunk(chunk), arena);
        self.push(head.keep(context, rows, KeptRows::LastOfChunk(chunk)));
    }
}

#[cfg(test)]
mod tests {
    use contract::{KvFormat, KvFormats, Limits, LoadConfig};
    use model::synth::SynthSpec;

    use super::super::PlanConfig;
    use super::super::PlanKey;
    use super::*;
    use crate::gpu_props::GpuProps;
    use crate::numerics::Numerics;
    use crate::options::OneLaunch;
    use crate::state::State;
    use crate::weights::{WeightPart, Weights};

    /// The plans of a synthetic model, without its head if `with_head` is false.
    fn plans(name: &str, with_head: bool, capability: (u32, u32), as_large_model: bool) -> Plans {
        let mut loaded = SynthSpec::parse(name).unwrap().load().unwrap();
        if !with_head {
            loaded.drop_mtp();
        }
        let config = LoadConfig {
            target: loaded.spec.clone(),
            weights: loaded.weights.clone(),
            draft: None,
            batch_invariant: false,
            kv: KvFormats {
                k: KvFormat::Q8_0,
                v: KvFormat::Q8_0,
            },
            limits: Limits {
                sequences: 4,
                context: 600,
                tree_nodes: 24,
                prefill_chunk: 192,
                pool_tokens: None,
            },
        };
        let arena = || BumpAllocator::new(1 << 30);
        let [mut weights, mut table, mut draft] = [(); 3].map(|()| arena());
        let [mut kv, mut states, mut scratch, mut rings] = [(); 4].map(|()| arena());
        let of_target = (WeightPart::whole(&config.target, None), &mut weights);
        let weights = Weights::new(of_target, &mut table, (None, &mut draft));
        let regions = [&mut kv, &mut states, &mut scratch, &mut rings];
        let state = State::new(&config, regions);
        let plan_config = PlanConfig {
            gpu: GpuProps::new(capability, 132),
            tree_windows: false,
            numerics: Numerics::Fastest,
            as_large_model,
            one_launch: OneLaunch::Off,
            separate_gemms: false,
            draft_vocab: Some(256),
            stage: None,
        };
        Plans::new(&config, &weights, &state, plan_config, &mut scratch)
    }

    fn entries(plans: &Plans, key: PlanKey) -> Vec<&'static str> {
        let launches = plans.all[&key].launches.iter();
        launches.map(|launch| launch.entry).collect()
    }

    #[test]
    fn drafts_and_commits_are_these_launches() {
        let found = plans("tiny-hybrid+mtp:q4_k_m", true, (8, 6), true);
        let input = ["embedding_gather", "mtp_join", "gemm_small_batch"];
        let fill = [
            "rms_norm",
            "gemm_small_batch",
            "attn_qk_norm_rope_append",
            "mtp_commit_hidden",
        ];
        let commit = [&input[..], &fill].concat();
        let layer = [
            "rms_norm",
            "gemm_small_batch",
            "attn_qk_norm_rope_append",
            "attn_decode_tree",
            "attn_combine_splits",
            "fused_layer",
        ];
        let head = [
            "mtp_keep_hidden",
            "rms_norm",
            "gemm_small_batch",
            "logits_reduce_chunks",
            "logits_top_k",
        ];
        let draft = [&input[..], &layer, &head].concat();
        for rows in [1, 8, 24, 40, 64] {
            assert_eq!(entries(&found, PlanKey::MtpCommit(rows)), commit, "{rows}");
        }
        for rows in crate::step::MTP_DRAFT_BUCKETS {
            let key = PlanKey::MtpDraft { rows, whole: false };
            assert_eq!(entries(&found, key), draft, "{rows}");
        }
        let hopper = plans("tiny-hybrid+mtp:q4_k_m", true, (9, 0), true);
        let key = PlanKey::MtpDraft {
            rows: 8,
            whole: false,
        };
        assert_eq!(entries(&hopper, key), draft);
    }

    #[test]
    fn drafts_propose_the_first_tokens_unless_more_are_asked_for() {
        assert_eq!(draft_vocab(248_320, None), DRAFT_VOCAB);
        assert_eq!(draft_vocab(100_000, None), 100_000);
        assert_eq!(draft_vocab(248_320, Some(1000)), 1024);
        assert_eq!(draft_vocab(500, Some(1000)), 500);
        let found = plans("tiny-hybrid+mtp:q4_k_m", true, (8, 6), false);
        for (whole, vocab) in [(false, "256"), (true, "1024")] {
            let key = PlanKey::MtpDraft { rows: 16, whole };
            let launches = &found.all[&key].launches;
            let reduce = launches.iter().find(|l| l.entry == "logits_top_k").unwrap();
            for name in ["VOCAB", "STRIDE"] {
                let given = reduce.unit.defines.iter().find(|(other, _)| *other == name);
                assert_eq!(given.unwrap().1, vocab, "{name}");
            }
        }
    }

    /// A step keeps its hidden rows before the LM head, a chunk fills its rows at the end, and
    /// nothing else changes. The head's own rows are not compacted.
    #[test]
    fn plans_of_the_trunk_gain_only_the_launches_of_the_head() {
        for (capability, as_large_model) in [((8, 6), false), ((9, 0), true)] {
            let name = "tiny-hybrid-r1+mtp-own:q8_0";
            let [with, without] = [true, false].map(|head| {
                let found = plans(name, head, capability, as_large_model);
                assert_eq!(found.all.keys().any(|key| of_head(*key)), head);
                found
            });
            for key in without.all.keys() {
                let (mut found, expected) = (entries(&with, *key), entries(&without, *key));
                let more = found.len() - expected.len();
                match key {
                    PlanKey::Step { .. } => {
                        let at = found.iter().position(|entry| *entry == "mtp_keep_hidden");
                        found.remove(at.expect("a step keeps hidden rows"));
                    }
                    PlanKey::Chunk(_) => {
                        let own = found.split_off(expected.len());
                        assert_eq!(own[..2], ["embedding_gather", "mtp_join"]);
                        assert_eq!(own.last(), Some(&"mtp_keep_hidden"));
                        assert!(own.contains(&"attn_qk_norm_rope_append"));
                    }
                    _ => assert_eq!(more, 0, "{key:?}"),
                }
                assert_eq!(found, expected, "{key:?}");
            }
            let compacted = |plans: &Plans| {
                let launches = &plans.all[&PlanKey::Commit(2)].launches;
                let compact = launches.iter().find(|l| l.entry == "attn_compact_kv");
                compact.map(|launch| launch.grid)
            };
            assert!(compacted(&with).is_some());
            assert_eq!(compacted(&with), compacted(&without));
        }
    }

    fn of_head(key: PlanKey) -> bool {
        matches!(key, PlanKey::MtpCommit(_) | PlanKey::MtpDraft { .. })
    }
}
