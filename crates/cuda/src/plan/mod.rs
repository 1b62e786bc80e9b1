//! From a model to lists of launches with fixed buffers, once per bucket of rows, number of trees
//! and depth.
//!
//! Everything that varies from call to call sits in the headers of [`crate::step`]; a plan is
//! otherwise complete. All plans share one arena, since one runs at a time on one stream.

mod activations;
mod boundary;
mod commit;
mod decode;
mod decode_builder;
mod draft;
mod experts;
pub(crate) mod explain;
mod fused_layers;
mod gemm;
mod gemv;
mod keys;
mod layer_arguments;
mod lm_head;
mod mtp;
mod numerics;
mod one_launch;
mod prefill;
mod rotations;
pub mod select;
mod short_prefill;

use std::collections::{BTreeMap, BTreeSet};

use contract::{AttentionSpec, Limits, LoadConfig, ModelSpec, StageConfig};

use crate::gpu_props::GpuProps;
use crate::launch::all_reduce::ExchangeShape;
use crate::launch::draft::CaptureTarget;
use crate::launch::gated_delta::{self, ChunkLaunch, GatedNormOutput};
use crate::launch::gemm::small_batch;
use crate::launch::norm::RowSource;
use crate::launch::{CompileUnit, Launch, logits};
use crate::memory::BumpAllocator;
use crate::numerics::Numerics;
use crate::options::OneLaunch;
use crate::state::{DraftState, State};
use crate::step::{self, ChunkHead, Commit, MtpStep, ROWS, Step};
use crate::weights::Weights;

pub(crate) use boundary::{BlockPart, StageBoundary, StageKernels};
pub(crate) use draft::{DraftLists, chains, pairs};
use experts::all_dense;
use fused_layers::FusedLayerPlan;
use keys::{DraftKeys, chunk_buckets, keys};
pub(crate) use numerics::{attention_config, numerics_of};
pub(crate) use one_launch::STATUS_BYTES;
use prefill::DequantBuffers;
pub(crate) use prefill::{ScoringAddresses, ScoringLayer, ScoringModel, ScoringPlans};
use rotations::Rotations;
pub(crate) use rotations::rope_factors;
use select::{Depth, PrefillPath};

/// Candidates that the reduction of the head's rows gives; longer answers are made on the host.
const CANDIDATES: usize = 64;
/// Room for the counters of attention in one launch, one for each head.
const COUNTER_BYTES: usize = 4096;
/// Room for the counter of routers.
const MOE_COUNTER_BYTES: usize = 256;
/// Room for the edits of one pass; rows of more are edited on the host.
pub(crate) const EDIT_BYTES: usize = 4 << 20;

/// The longest part of a prompt that is prefilled in consecutive short passes, if there are plans
/// for these. A pass of up to 256 rows takes as long as four of them (`benches/README.md`).
const MAX_SHORT_PREFILL: usize = 4 * ROWS;

/// Which plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PlanKey {
    /// A step of exactly `trees` trees in up to `rows` rows, logits rows included. The delta rule
    /// has separate kernels for one tree, for two and for more, so the choice must not depend on
    /// the runner's limits.
    Step {
        rows: usize,
        trees: usize,
        depth: Depth,
    },
    /// A chunk of a prompt of up to so many rows, up to its residual stream.
    Chunk(usize),
    /// The head over up to so many asked rows of the chunk before it.
    LmHead(usize),
    /// The commit of just so many paths.
    Commit(usize),
    /// Up to so many rows of features that wait, into the draft's context.
    DraftContext(usize),
    /// Draft blocks of up to `rows` rows; `whole`: with the whole LM head of the target instead of
    /// its most frequent tokens.
    Draft { rows: usize, whole: bool },
    /// Up to so many rows of committed paths, into the cache of the multi-token-prediction head.
    MtpCommit(usize),
    /// Up to `rows` rows that the multi-token-prediction head drafts; `whole`: with the whole LM
    /// head instead of its most frequent tokens.
    MtpDraft { rows: usize, whole: bool },
    /// Edits of up to so many rows that a step asked for.
    EditedStep(usize),
    /// Edits of up to so many rows that were asked of a chunk.
    EditedLmHead(usize),
    /// Masses of up to `rows` rows of a step, after their edits if there are any.
    Masses { rows: usize, edited: bool },
}

impl PlanKey {
    /// The plan of a step that has its trees.
    pub(crate) fn of_step(step: &Step) -> PlanKey {
        let [rows, trees] = [step.rows, step.trees].map(|n| usize::try_from(n).unwrap_or(0));
        let committed = step.tree[..trees].iter().map(|tree| tree.committed);
        let deepest = usize::try_from(committed.max().unwrap_or(0)).unwrap_or(0);
        let rows = step::bucket(rows);
        PlanKey::Step {
            rows,
            trees,
            depth: Depth::of(rows, deepest),
        }
    }

    /// The plan of a commit that has its paths.
    pub(crate) fn of_commit(commit: &Commit) -> PlanKey {
        PlanKey::Commit(usize::try_from(commit.paths).unwrap_or(0))
    }
}

/// A list of launches.
#[derive(Debug, Clone, Default)]
pub(crate) struct Plan {
    pub(crate) launches: Vec<Launch>,
    /// Per layer, how many launches have run when its output stands in the residual stream.
    pub(crate) layer_ends: Vec<usize>,
    /// Source files that were selected among several, each with the reason.
    pub(crate) reasons: BTreeSet<(&'static str, &'static str)>,
}

impl Plan {
    /// Notes why a kernel was selected.
    pub(crate) fn note(&mut self, file: &'static str, reason: &'static str) {
        self.reasons.insert((file, reason));
    }

    /// Appends the chunked delta rule of one layer with its output norm.
    fn push_chunked_delta(
        &mut self,
        gpu: GpuProps,
        chunk: &ChunkLaunch<'_>,
        scratch: u64,
        out: &GatedNormOutput,
    ) {
        let scan = select::gated_delta_scan(gpu);
        self.note(scan.kernel.file(), scan.reason);
        self.launches
            .extend(gated_delta::prefill(scan.kernel, chunk, scratch, out));
    }
}

/// Fixed device addresses that the runner and the kernels share.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Addresses {
    pub(crate) step: u64,
    /// The step of a draft's blocks.
    pub(crate) draft: u64,
    /// A chunk header with as many rows as the widest commit.
    pub(crate) all_rows: u64,
    pub(crate) chunk: u64,
    pub(crate) commit: u64,
    /// Which rows of features become the draft's context.
    pub(crate) pending: u64,
    /// Rows of committed paths for the multi-token-prediction head; 0 without one.
    pub(crate) mtp_commit: u64,
    /// Rows that it drafts.
    pub(crate) mtp_draft: u64,
    /// Reduced rows of the head, `[ROWS]`.
    pub(crate) rows: u64,
    /// Lists of a draft, as [`DraftLists`] has them.
    pub(crate) draft_lists: u64,
    /// Residual stream, f32 `[rows][hidden]`.
    pub(crate) residual: u64,
    /// Logits of the asked rows, f32 `[ROWS][stride]`.
    pub(crate) logits: u64,
    /// The same after edits.
    pub(crate) edited: u64,
    /// The edits, up to [`EDIT_BYTES`] bytes.
    pub(crate) edits: u64,
    /// Queries of masses of logits rows, `[ROWS]`.
    pub(crate) mass_queries: u64,
    /// Their results, `[ROWS]`.
    pub(crate) masses: u64,
    /// Counters of attention in one launch; zero between launches.
    pub(crate) counters: u64,
    /// Partial sums of the small products; zero between launches.
    pub(crate) partials: u64,
    /// Workspace of the fused layers; zero before the first.
    pub(crate) fused_layer: u64,
    /// A counter of routers; zero between launches.
    pub(crate) moe_counter: u64,
    /// Flags that order the K splits of prefill GEMMs; zero between launches.
    pub(crate) split_k_flags: u64,
    /// What a shard exchanges with the others; 0 without any.
    pub(crate) exchange: u64,
}

/// Every plan of a loaded model.
pub(crate) struct Plans {
    pub(crate) all: BTreeMap<PlanKey, Plan>,
    pub(crate) addresses: Addresses,
    pub(crate) reduce: logits::LogitsReduction,
    /// Tables to be written once: address and bytes.
    pub(crate) tables: Vec<(u64, Vec<u8>)>,
    /// Runs to be zeroed once: address and bytes.
    pub(crate) zeroed: [(u64, usize); 6],
    /// Steps that are one persistent launch, which gives a status behind the reduced rows of its
    /// bucket: 0, or which wait took too long.
    pub(crate) one_launch: BTreeSet<PlanKey>,
    limits: Limits,
    /// Whether there are short plans for short chunks.
    short: bool,
    /// The draft's lists of candidates.
    pub(crate) draft_lists: DraftLists,
    /// Tokens that drafts with the target's LM head propose from.
    proposed: usize,
    /// What drafts.
    drafts: DraftKeys,
    /// What a pipeline stage receives and hands over.
    pub(crate) stage: StageBoundary,
    /// Bytes of its longest block.
    pub(crate) block_bytes: usize,
    pub(crate) kernels: StageKernels,
    /// What a shard of a tensor split exchanges.
    pub(crate) exchange: Option<ExchangeShape>,
}

/// What plans depend on besides the model.
#[derive(Clone, Copy)]
pub(crate) struct PlanConfig<'a> {
    pub(crate) gpu: GpuProps,
    /// Whether trees may have windows of their own.
    pub(crate) tree_windows: bool,
    /// Numerics of decode steps.
    pub(crate) numerics: Numerics,
    /// Whether small models use the kernels of large ones.
    pub(crate) as_large_model: bool,
    /// Whether steps of few rows are one persistent launch.
    pub(crate) one_launch: OneLaunch,
    /// Whether each GEMM of a layer is a launch of its own.
    pub(crate) separate_gemms: bool,
    /// Tokens that drafts with the target's LM head propose from, the first of the vocabulary;
    /// `None` for the default.
    pub(crate) draft_vocab: Option<usize>,
    /// The pipeline stage that the model is the layers of; `None` for a whole model.
    pub(crate) stage: Option<&'a StageConfig>,
}

/// The model, its memory and the options that plans are built from.
pub(crate) struct PlanContext<'a> {
    pub(crate) spec: &'a ModelSpec,
    pub(crate) weights: &'a Weights,
    pub(crate) state: &'a State,
    pub(crate) load_config: &'a LoadConfig,
    pub(crate) gpu: GpuProps,
    tree_windows: bool,
    /// Numerics of the target's decode steps.
    numerics: Numerics,
    /// Whether layers may be fused.
    fused_layers: bool,
    /// Whether layers of steps of one row go in few launches.
    gemv: bool,
    /// Whether no layer of the whole model has experts.
    dense: bool,
    pub(crate) addresses: Addresses,
    dequant: DequantBuffers,
    /// Inverse frequencies of each kind of rotation.
    rotations: Rotations,
    reduce: logits::LogitsReduction,
    draft_lists: DraftLists,
    /// The target's ids of a draft's own vocabulary, int32; 0 if they are the same.
    draft_ids: u64,
    stage: StageBoundary,
    /// What the products that end a block are summed through, in a tensor split.
    exchange: Option<ExchangeShape>,
}

impl PlanContext<'_> {
    /// The column of a layer of the stage among the captured hidden states, if a draft reads it.
    fn capture(&self, layer: usize) -> Option<(usize, &DraftState)> {
        let captured = &self.load_config.draft.as_ref()?.spec.capture_layers;
        let layer = self.stage.first_layer + layer;
        let column = captured.iter().position(|captured| *captured == layer)?;
        Some((column, self.state.draft.as_ref()?))
    }

    /// Where the rows of a chunk leave what the draft is to know of `layer`, among features at
    /// `out`.
    fn chunk_capture(&self, layer: usize, out: u64) -> Option<CaptureTarget> {
        let (column, draft) = self.capture(layer)?;
        Some(CaptureTarget {
            out,
            stride: draft.width,
            offset: column * self.spec.hidden,
            to_feature_pool: false,
        })
    }

    fn frequencies(&self, a: &AttentionSpec) -> u64 {
        self.rotations.frequencies(a)
    }
}

impl Plans {
    /// Builds every plan that `load_config` can call for, taking memory from `scratch`.
    pub(crate) fn new(
        load_config: &LoadConfig,
        weights: &Weights,
        state: &State,
        plan_config: PlanConfig<'_>,
        scratch: &mut BumpAllocator,
    ) -> Plans {
        let (spec, limits) = (&*load_config.target, load_config.limits);
        let reduce = logits::LogitsReduction {
            vocab: spec.vocab,
            stride: spec.vocab,
            k: CANDIDATES.min(spec.vocab),
        };
        let shard = plan_config.stage.and_then(StageConfig::which_shard);
        let fused = !plan_config.separate_gemms;
        let stage = match plan_config.stage {
            Some(stage) => StageBoundary::of(stage, fused),
            None => StageBoundary::whole(load_config, fused),
        };
        let whole = plan_config.stage.map_or(spec, |stage| &*stage.model.target);
        let of_head = |bytes: usize| if stage.has_head { bytes } else { 0 };
        // Of the target and of drafts; a draft that biases its logits does so beside them.
        let computes_logits = stage.has_head || stage.is_last;
        let logits_bytes = if computes_logits {
            4 * ROWS * reduce.stride
        } else {
            0
        };
        let rows_of_pass = ROWS.max(limits.prefill_chunk);
        let block_bytes = stage.block_bytes(rows_of_pass);
        let exchange = shard.map(|shard| ExchangeShape {
            devices: shard.count,
            width: spec.hidden,
            rows: rows_of_pass,
        });
        let exchange_bytes = exchange.map_or(0, ExchangeShape::bytes);
        let exchange_flags = exchange.map_or(0, ExchangeShape::zeroed_bytes);
        let dequant = DequantBuffers::of(spec, weights, limits.prefill_chunk);
        // The phases of a fused layer alternate between two scratch areas.
        let scratch_areas = 1 + usize::from(fused);
        let partial_bytes = small_batch::scratch_bytes(plan_config.gpu, scratch_areas * ROWS);
        let fused_layer_bytes = if fused {
            fused_layers::workspace_bytes(weights, spec.hidden)
        } else {
            0
        };
        let draft_spec = load_config.draft.as_ref().map(|draft| &*draft.spec);
        let draft_lists =
            draft_spec.map_or(DraftLists::ByDepth, |draft| DraftLists::of(draft, reduce));
        let mtp_bytes = spec.mtp.as_ref().map_or(0, |_| size_of::<MtpStep>());
        let addresses = Addresses {
            step: scratch.take(size_of::<Step>()),
            draft: scratch.take(size_of::<Step>()),
            all_rows: scratch.take(size_of::<ChunkHead>()),
            chunk: scratch.take(ChunkHead::bytes(limits.prefill_chunk)),
            commit: scratch.take(size_of::<Commit>()),
            pending: scratch.take(size_of::<Commit>()),
            mtp_commit: scratch.take(mtp_bytes),
            mtp_draft: scratch.take(mtp_bytes),
            rows: scratch.take(reduce.out_bytes(ROWS)),
            draft_lists: scratch.take(draft_lists.bytes(ROWS)),
            residual: scratch.take(block_bytes),
            logits: scratch.take(logits_bytes),
            edited: scratch.take(logits_bytes),
            edits: scratch.take(of_head(EDIT_BYTES)),
            mass_queries: scratch.take(logits::MASS_QUERIES_BYTES),
            masses: scratch.take(logits::mass_bytes(ROWS)),
            counters: scratch.take(COUNTER_BYTES),
            partials: scratch.take(partial_bytes),
            fused_layer: scratch.take(fused_layer_bytes),
            moe_counter: scratch.take(MOE_COUNTER_BYTES),
            split_k_flags: scratch.take(dequant.split_k_flag_bytes),
            exchange: scratch.take(exchange_bytes),
        };
        let of_draft = load_config
            .draft
            .iter()
            .flat_map(|draft| &draft.spec.layers);
        let of_draft = of_draft.map(|layer| &layer.attention);
        let rotated = spec.kv_layers().chain(of_draft);
        let (rotations, mut tables) = Rotations::of(rotated, load_config, scratch);
        let own_ids = draft_spec.and_then(|draft| draft.head.as_ref()?.ids.as_ref());
        let draft_ids = own_ids.map_or(0, |ids| {
            let at = scratch.take(4 * ids.len());
            tables.push((at, ids.iter().flat_map(|id| id.0.to_le_bytes()).collect()));
            at
        });
        let context = PlanContext {
            spec,
            weights,
            state,
            load_config,
            gpu: plan_config.gpu,
            tree_windows: plan_config.tree_windows,
            numerics: plan_config.numerics,
            fused_layers: fused,
            gemv: !plan_config.as_large_model
                && shard.is_none()
                && gemv::fits(plan_config.gpu, whole),
            dense: all_dense(whole),
            addresses,
            dequant,
            rotations,
            reduce,
            draft_lists,
            draft_ids,
            stage: stage.clone(),
            exchange,
        };
        // Every plan begins at the same place of the arena; the arena is as long as the longest.
        let mut all = BTreeMap::new();
        let mut longest = scratch.used();
        let short = short_prefill::path(&context, ROWS).kernel == PrefillPath::DecodeKernels;
        let kernels = StageKernels {
            short_prefill: short,
            fused_layers: FusedLayerPlan::of_target(&context).map(|plan| plan.form()),
            gemv: context.gemv,
        };
        let proposed = mtp::draft_vocab(spec.vocab, plan_config.draft_vocab);
        let in_part = proposed < spec.vocab;
        let drafts = DraftKeys {
            block: draft_spec.map(|draft| draft.block),
            whole_block: in_part && draft_spec.is_some_and(|draft| draft.head.is_none()),
            mtp: spec.mtp.is_some(),
            whole_mtp: in_part && spec.mtp.is_some(),
            head: stage.has_head,
        };
        for key in keys(limits, drafts, short) {
            let mut arena = *scratch;
            let plan = match key {
                PlanKey::Step { rows, trees, depth } => {
                    decode::step(&context, (rows, trees), depth, &mut arena)
                }
                PlanKey::Chunk(rows) => {
                    let path = short_prefill::path(&context, rows);
                    match path.kernel {
                        PrefillPath::DecodeKernels => {
                            short_prefill::build(&context, rows, path.reason, &mut arena)
                        }
                        PrefillPath::PrefillKernels => {
                            prefill::build(&context, rows, path.reason, &mut arena)
                        }
                    }
                }
                PlanKey::LmHead(rows) => lm_head::of_chunk(&context, rows, &mut arena),
                PlanKey::Commit(paths) => commit::build(&context, paths),
                PlanKey::DraftContext(rows) => {
                    draft::context_of_pending(&context, rows, &mut arena)
                }
                PlanKey::Draft { rows, whole } => {
                    let proposed = if whole { spec.vocab } else { proposed };
                    draft::block(&context, (rows, proposed), &mut arena)
                }
                PlanKey::MtpCommit(rows) => mtp::commit(&context, rows, &mut arena),
                PlanKey::MtpDraft { rows, whole } => {
                    let proposed = if whole { spec.vocab } else { proposed };
                    mtp::draft(&context, (rows, proposed), &mut arena)
                }
                PlanKey::EditedStep(rows) => {
                    let asked = RowSource::LogitsRowsOfStep(addresses.step);
                    lm_head::edited(&context, rows, asked, &mut arena)
                }
                PlanKey::Masses { rows, edited } => {
                    lm_head::masses(&context, (rows, edited), &mut arena)
                }
                PlanKey::EditedLmHead(rows) => {
                    let asked = RowSource::LogitsRowsOfChunk(addresses.chunk);
                    lm_head::edited(&context, rows, asked, &mut arena)
                }
            };
            longest = longest.max(arena.used());
            all.insert(key, plan);
        }
        let arena = usize::try_from(longest - scratch.used()).expect("an arena fits an address");
        scratch.take(arena);
        let one_launch = one_launch::fuse(plan_config, (&addresses, reduce), &mut all, scratch);
        tables.extend(one_launch.tables);
        Plans {
            all,
            addresses,
            reduce,
            tables,
            zeroed: [
                (addresses.counters, COUNTER_BYTES),
                (addresses.partials, partial_bytes),
                (addresses.fused_layer, fused_layer_bytes),
                (addresses.split_k_flags, dequant.split_k_flag_bytes),
                (addresses.moe_counter, MOE_COUNTER_BYTES),
                (addresses.exchange, exchange_flags),
            ],
            one_launch: one_launch.keys,
            limits,
            short,
            draft_lists,
            proposed,
            drafts,
            stage,
            block_bytes,
            kernels,
            exchange,
        }
    }

    /// Tokens of the longest chunk.
    pub(crate) fn chunk_rows(&self) -> usize {
        self.limits.prefill_chunk
    }

    /// The plan for a chunk of `rows` tokens.
    pub(crate) fn chunk_bucket(&self, rows: usize) -> usize {
        let mut buckets = chunk_buckets(self.limits.prefill_chunk, self.short);
        buckets
            .find(|bucket| *bucket >= rows)
            .unwrap_or(self.limits.prefill_chunk)
    }

    /// Whether chunks of up to `rows` rows use the decode kernels, with the header of a
    /// single-branch tree beside the chunk's.
    pub(crate) fn is_short_prefill(&self, rows: usize) -> bool {
        self.short && rows <= ROWS
    }

    /// The lengths of the passes in which `rows` tokens after `committed` ones are prefilled.
    pub(crate) fn pieces(&self, committed: usize, rows: usize) -> Vec<usize> {
        if self.short && rows <= MAX_SHORT_PREFILL {
            short_prefill::pieces(committed, rows)
        } else {
            vec![rows]
        }
    }

    /// Nodes of the widest tree.
    pub(crate) fn tree_nodes(&self) -> usize {
        self.limits.tree_nodes
    }

    /// Moves the launches out of every plan; the plans keep the ends of layers.
    pub(crate) fn take_launches(&mut self) -> BTreeMap<PlanKey, Vec<Launch>> {
        let plans = self.all.iter_mut();
        let taken = plans.map(|(key, plan)| (*key, std::mem::take(&mut plan.launches)));
        taken.collect()
    }

    /// Every unit that a launch is compiled from, each once.
    pub(crate) fn units(&self) -> Vec<CompileUnit> {
        let launches = self.all.values().flat_map(|plan| &plan.launches);
        let mut units: Vec<CompileUnit> = launches.map(|launch| launch.unit.clone()).collect();
        units.sort();
        units.dedup();
        units
    }

    /// Everything about a plan's launches but addresses.
    #[cfg(test)]
    pub(crate) fn bare_launches(&self, key: PlanKey) -> Vec<String> {
        let all = self.all[&key].launches.iter().cloned();
        let bare = all.map(|launch| Launch {
            args: crate::launch::Args::new(),
            ..launch
        });
        bare.map(|launch| format!("{launch:?}")).collect()
    }
}
