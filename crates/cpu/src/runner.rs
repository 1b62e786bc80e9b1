//! The CPU runner: bookkeeping of sequences and snapshots, and runner calls as forward passes.

use std::collections::BTreeMap;
use std::io::{Read, Write};

use contract::protocol::{CallValidator, requests_within, scatter_rows};
use contract::snapshot::SnapshotIdentity;
use contract::{
    Capacity, CommitItem, DeviceError, DraftCandidates, DraftItem, DraftLogits, LogitsRequest,
    LogitsRow, LogitsSelection, MtpDraftItem, Runner, RunnerInfo, SeqId, SnapshotId, SnapshotInfo,
    SnapshotLocation, Stage, TokenId, VerifyItem,
};

use crate::blocks::head::{self, AskedRow, HeadBuffers};
use crate::draft::{Draft, HiddenStateCapture, Reach};
use crate::draft_cache::{DraftCache, MAX_PENDING_FEATURES};
use crate::exchange::ExchangeEnd;
use crate::kernels::Kernels;
use crate::mtp::{self, Committed, DraftedRow, MtpBuffers};
use crate::mtp_state::MAX_UNCACHED_ROWS;
use crate::pass::rows_per_pass;
use crate::pass::{ExecContext, PassBuffers, Segment, SegmentKind, TreePlan};
use crate::scratch::ScratchPool;
use crate::snapshot::{Imported, Snapshot};
use crate::snapshot_pages::{PAGE, SnapshotBytes};
use crate::stage::StageRows;
use crate::state::CpuSequence;
use crate::thread_pool::ThreadPool;
use crate::weights::ModelWeights;

mod drafting;
mod stage;

/// A loaded model with its sequences and snapshots. Dropping it frees everything.
pub(crate) struct CpuRunner {
    pub(crate) info: RunnerInfo,
    pub(crate) weights: ModelWeights,
    pub(crate) pool: ThreadPool,
    pub(crate) kernels: Kernels,
    pub(crate) scratch: ScratchPool,
    pub(crate) buffers: PassBuffers,
    head: HeadBuffers,
    draft: Option<Draft>,
    mtp: MtpBuffers,
    /// Captured hidden states of the rows of a pass, `[n, n_captured * hidden]`; empty without a
    /// draft.
    features: Vec<f32>,
    /// Identity of the snapshots.
    identity: SnapshotIdentity,
    pub(crate) sequences: BTreeMap<SeqId, CpuSequence>,
    pub(crate) snapshots: BTreeMap<SnapshotId, Snapshot>,
    /// Bytes of all snapshots.
    ledger: SnapshotBytes,
    /// The next sequence or snapshot id; ids are never reused.
    next_id: u64,
    /// Maximum number of rows of a pass.
    max_rows: usize,
    /// What it receives and hands over as a pipeline stage.
    stage: StageRows,
    /// What it adds partial sums through, as a shard of a tensor split.
    exchange: Option<ExchangeEnd>,
}

/// Parts of a runner.
pub(crate) struct Parts {
    pub(crate) weights: ModelWeights,
    pub(crate) draft: Option<Draft>,
    pub(crate) pool: ThreadPool,
    pub(crate) kernels: Kernels,
    /// Identity of the snapshots.
    pub(crate) identity: SnapshotIdentity,
    pub(crate) stage: StageRows,
}

/// Raises the pages of a sequence to `n` if `free` pages suffice.
fn give_pages(held: &mut usize, n: usize, free: usize) -> Result<(), DeviceError> {
    let more = n.saturating_sub(*held);
    if more > free {
        return Err(DeviceError::PoolExhausted { wanted: more, free });
    }
    *held += more;
    Ok(())
}

impl CpuRunner {
    /// A runner without sequences.
    pub(crate) fn new(info: RunnerInfo, parts: Parts) -> Self {
        let Parts {
            weights,
            draft,
            pool,
            kernels,
            identity,
            stage,
        } = parts;
        let max_rows = rows_per_pass(info.limits);
        let feature_width = draft.as_ref().map_or(0, |draft| draft.spec().fc.cols);
        CpuRunner {
            buffers: PassBuffers::new(crate::pass::BufferWidths::of(&weights.spec), max_rows),
            identity,
            info,
            weights,
            pool,
            kernels,
            scratch: ScratchPool::default(),
            head: HeadBuffers::default(),
            draft,
            mtp: MtpBuffers::default(),
            features: vec![0.0; max_rows * feature_width],
            sequences: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            ledger: SnapshotBytes::default(),
            next_id: 0,
            max_rows,
            stage,
            exchange: None,
        }
    }

    /// Pages that no sequence holds.
    fn free_pages(&self) -> usize {
        let held: usize = self.sequences.values().map(|s| s.pages).sum();
        self.info.pool.pages - held
    }

    /// Ensures that a sequence has pages for its first `n` rows.
    fn give_pages(&mut self, seq: SeqId, n: usize) -> Result<(), DeviceError> {
        let free = self.free_pages();
        match self.sequences.get_mut(&seq) {
            Some(sequence) => give_pages(&mut sequence.pages, n.div_ceil(PAGE), free),
            None => Err(DeviceError::UnknownSequence(seq)),
        }
    }

    fn take_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn validator(&self) -> CallValidator<'_, CpuSequence> {
        CallValidator {
            info: &self.info,
            sequences: &self.sequences,
        }
    }

    /// Runs `tokens` in chunks after the committed ones. Calls `on_layer` for each chunk and layer
    /// with the residual stream `[n, hidden]`.
    pub(crate) fn prefill_seen(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
        on_layer: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let position = self.validator().prefill(seq, tokens, requests)?.position;
        self.ready()?;
        self.give_pages(seq, position + tokens.len())?;
        let asked = requests.iter().map(|(_, ask)| ask);
        self.stage.require_head("prefill", asked)?;
        self.cache_mtp_rows(&[seq])?;
        let passes = self.passes(position, tokens.len());
        let mut rows = Vec::new();
        let compute =
            ExecContext::new(&self.pool, &self.kernels, &self.scratch, &self.weights.spec);
        let sequence = self.sequences.get_mut(&seq);
        let sequence = sequence.ok_or(DeviceError::UnknownSequence(seq))?;
        for pass in passes {
            let mut capture = HiddenStateCapture::new(self.draft.as_ref(), &mut self.features);
            let asked = requests_within(requests, &pass);
            let piece = &tokens[pass];
            let width = piece.len() * self.weights.spec.hidden;
            let x = &mut self.buffers.x[..width];
            if self.stage.is_first() {
                self.weights.embed(piece, x)?;
            }
            let first_layer = self.stage.first_layer();
            let stage = &mut self.stage;
            stage.begin(piece.len(), x, &mut capture)?;
            let mut segments = [Segment {
                seq: &mut *sequence,
                work: SegmentKind::Chunk,
                first_row: 0,
                n_rows: piece.len(),
            }];
            let asked: Vec<AskedRow<'_>> = asked
                .into_iter()
                .map(|(row, ask)| AskedRow { row, ask })
                .collect();
            self.pool.enter(|| {
                let on_layer = &mut |layer: usize, x: &[f32]| {
                    capture.take(first_layer + layer, x);
                    stage.keep(first_layer + layer, x);
                    on_layer(layer, x);
                };
                let exchange = self.exchange.as_ref();
                let (weights, buffers) = (&self.weights, &mut self.buffers);
                compute.forward(weights, buffers, &mut segments, exchange, on_layer);
                rows.append(&mut head::rows(
                    compute,
                    &self.weights.head,
                    &self.buffers.y,
                    &asked,
                    &mut self.head,
                ));
            });
            stage.end(&self.buffers.x[..width]);
            self.exchange
                .as_ref()
                .map_or(Ok(()), ExchangeEnd::require)?;
            sequence.drop_drafted();
            let hidden = self.weights.spec.hidden;
            let y = &self.buffers.y[..width];
            let position = sequence.position;
            let CpuSequence { layers, mtp, .. } = &mut *sequence;
            if let (Some(mtp), Some(cache)) = (mtp, mtp::cache(layers)) {
                let before = std::iter::once(&*mtp.hidden).chain(y.chunks_exact(hidden));
                let mut items = [Committed {
                    cache,
                    position,
                    tokens: piece.to_vec(),
                    hidden: before.take(piece.len()).collect(),
                }];
                let buffers = &mut self.mtp;
                self.pool
                    .enter(|| mtp::fill(compute, &self.weights, &mut items, buffers))?;
                mtp.hidden.copy_from_slice(&y[width - hidden..]);
            }
            sequence.position += piece.len();
            if let Some(cache) = &mut sequence.draft {
                cache
                    .pending_features
                    .extend_from_slice(capture.rows(0..piece.len()));
            }
            if let (Some(draft), Some(cache)) = (&mut self.draft, &mut sequence.draft) {
                let position = sequence.position;
                self.pool
                    .enter(|| draft.project(compute, cache, position))?;
            }
        }
        let requests = requests.iter().map(|(_, ask)| ask);
        Ok(scatter_rows(requests, &mut rows.into_iter()))
    }

    /// Verifies items whose nodes fit one pass.
    fn verify_pass(
        &mut self,
        items: &[VerifyItem<'_>],
    ) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let hidden = self.weights.spec.hidden;
        let plans: Vec<TreePlan> = items.iter().map(|i| TreePlan::new(i.tree)).collect();
        let mut first_row = 0;
        let mut asked = Vec::new();
        for item in items {
            if self.stage.is_first() {
                let x = &mut self.buffers.x[first_row * hidden..];
                let x = &mut x[..item.tree.len() * hidden];
                self.weights.embed(item.tree.tokens(), x)?;
            }
            for (node, ask) in item.requests.iter().enumerate() {
                if ask.selection != LogitsSelection::None {
                    let row = first_row + node;
                    asked.push(AskedRow { row, ask });
                }
            }
            first_row += item.tree.len();
        }
        let mut found = by_id(&mut self.sequences);
        let mut segments = Vec::with_capacity(items.len());
        let mut first_row = 0;
        for (item, plan) in items.iter().zip(&plans) {
            let seq = found
                .remove(&item.seq)
                .ok_or(DeviceError::UnknownSequence(item.seq))?;
            segments.push(Segment {
                seq,
                work: SegmentKind::Tree(plan),
                first_row,
                n_rows: item.tree.len(),
            });
            first_row += item.tree.len();
        }
        let compute =
            ExecContext::new(&self.pool, &self.kernels, &self.scratch, &self.weights.spec);
        let mut capture = HiddenStateCapture::new(self.draft.as_ref(), &mut self.features);
        let first_layer = self.stage.first_layer();
        let stage = &mut self.stage;
        let x = &mut self.buffers.x[..first_row * hidden];
        stage.begin(first_row, x, &mut capture)?;
        let rows = self.pool.enter(|| {
            let on_layer = &mut |layer: usize, x: &[f32]| {
                capture.take(first_layer + layer, x);
                stage.keep(first_layer + layer, x);
            };
            let exchange = self.exchange.as_ref();
            let (weights, buffers) = (&self.weights, &mut self.buffers);
            compute.forward(weights, buffers, &mut segments, exchange, on_layer);
            stage.end(&self.buffers.x[..first_row * hidden]);
            head::rows(
                compute,
                &self.weights.head,
                &self.buffers.y,
                &asked,
                &mut self.head,
            )
        });
        self.exchange
            .as_ref()
            .map_or(Ok(()), ExchangeEnd::require)?;
        for (segment, plan) in segments.into_iter().zip(plans.iter()) {
            if let Some(cache) = &mut segment.seq.draft {
                let rows = segment.first_row..segment.first_row + segment.n_rows;
                cache.tree_features.clear();
                cache.tree_features.extend_from_slice(capture.rows(rows));
            }
            if let Some(mtp) = &mut segment.seq.mtp {
                let rows = &self.buffers.y[segment.first_row * hidden..];
                mtp.tree_hidden.clear();
                mtp.tree_hidden
                    .extend_from_slice(&rows[..segment.n_rows * hidden]);
                mtp.drop_drafted();
            }
            segment.seq.pending = Some(plan.tree.clone());
        }
        let mut rows = rows.into_iter();
        let answered = items
            .iter()
            .map(|item| scatter_rows(item.requests.iter(), &mut rows));
        Ok(answered.collect())
    }
}

impl Runner for CpuRunner {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn capacity(&self) -> Capacity {
        let held = self.sequences.values().map(|sequence| sequence.pages).sum();
        // Snapshots use memory of their own.
        self.validator().capacity((held, 0), self.ledger.total())
    }

    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError> {
        self.validator().open(max_len)?;
        let limits = self.info.limits;
        let kv = (self.info.kv, self.identity.rotated);
        let mut sequence = CpuSequence::new(&self.weights.spec, kv, limits, max_len);
        if let (Some(draft), Some((_, kv))) = (&self.draft, self.identity.draft) {
            sequence.draft = Some(DraftCache::new(draft.spec(), kv, max_len));
        }
        let id = SeqId(self.take_id());
        self.sequences.insert(id, sequence);
        Ok(id)
    }

    fn close(&mut self, seq: SeqId) {
        self.sequences.remove(&seq);
    }

    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        self.prefill_seen(seq, tokens, requests, &mut |_, _| {})
    }

    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        self.validator().draft(items, depth, k)?;
        self.draft_pass(items, Reach { depth, k })
    }

    fn draft_logits(&mut self, item: DraftItem) -> Result<DraftLogits, DeviceError> {
        let depth = self.info.draft_depth.unwrap_or(0);
        self.validator().draft(&[item], depth, 1)?;
        self.draft_logits_pass(item)
    }

    fn draft_mtp(
        &mut self,
        items: &[MtpDraftItem],
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        self.validator().draft_mtp(items, k)?;
        let mut rows = Vec::with_capacity(items.len());
        let mut ids: Vec<SeqId> = Vec::new();
        for item in items {
            let known = ids.iter().position(|id| *id == item.seq);
            let sequence = known.unwrap_or_else(|| {
                ids.push(item.seq);
                ids.len() - 1
            });
            let state = self.sequences.get_mut(&item.seq);
            let state = state.and_then(|sequence| sequence.mtp.as_mut());
            let state = state.ok_or(DeviceError::UnknownSequence(item.seq))?;
            rows.push(DraftedRow {
                sequence,
                row: state.add_row(item.parent),
                token: item.token,
            });
        }
        self.cache_mtp_rows(&ids)?;
        self.draft_mtp_rows(&ids, &rows, k)
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        self.validator().verify(items)?;
        let asked = items.iter().flat_map(|item| item.requests);
        self.stage.require_head("verify", asked)?;
        self.ready()?;
        for item in items {
            let sequence = self.sequences.get(&item.seq);
            let position = sequence.map_or(0, |sequence| sequence.position);
            self.give_pages(item.seq, position + item.tree.len())?;
        }
        let mut rows = Vec::with_capacity(items.len());
        let mut rest = items;
        while !rest.is_empty() {
            let nodes: Vec<usize> = rest.iter().map(|item| item.tree.len()).collect();
            let (pass, later) = rest.split_at(self.items_per_pass(&nodes));
            rows.append(&mut self.verify_pass(pass)?);
            rest = later;
        }
        Ok(rows)
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        self.validator().commit(items)?;
        let mut full = Vec::new();
        for item in items {
            let Some(sequence) = self.sequences.get_mut(&item.seq) else {
                continue;
            };
            sequence.commit(item.path.nodes());
            let waiting = sequence
                .draft
                .as_ref()
                .map_or(0, DraftCache::n_pending_features);
            let uncached = sequence
                .mtp
                .as_ref()
                .map_or(0, |mtp| mtp.uncached_tokens.len());
            if uncached >= MAX_UNCACHED_ROWS {
                full.push(item.seq);
            }
            if waiting >= MAX_PENDING_FEATURES {
                self.project(item.seq)?;
            }
        }
        self.cache_mtp_rows(&full)
    }

    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError> {
        self.validator().discard(seq)?;
        if let Some(sequence) = self.sequences.get_mut(&seq) {
            sequence.pending = None;
        }
        Ok(())
    }

    fn snapshot(
        &mut self,
        seq: SeqId,
        _place: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError> {
        self.validator().require_idle("snapshot", seq)?;
        self.project(seq)?;
        self.cache_mtp_rows(&[seq])?;
        let sequence = self
            .sequences
            .get_mut(&seq)
            .ok_or(DeviceError::UnknownSequence(seq))?;
        sequence.apply_deferred(&self.pool, &self.kernels);
        let snapshot = Snapshot::of(sequence, &self.ledger)?;
        Ok(self.keep_snapshot(snapshot))
    }

    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError> {
        let saved = self
            .snapshots
            .get(&snapshot)
            .ok_or(DeviceError::UnknownSnapshot(snapshot))?;
        self.validator().restore(seq, saved.position)?;
        let pages = saved.position.div_ceil(PAGE);
        let free = self.free_pages();
        let sequence = self.sequences.get_mut(&seq);
        let sequence = sequence.ok_or(DeviceError::UnknownSequence(seq))?;
        // The sequence's own pages are reusable for the restored state.
        give_pages(&mut 0, pages, free + sequence.pages)?;
        sequence.pages = pages;
        saved.restore(sequence);
        Ok(())
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) {
        self.snapshots.remove(&snapshot);
    }

    fn export(&mut self, snapshot: SnapshotId, sink: &mut dyn Write) -> Result<(), DeviceError> {
        let saved = self
            .snapshots
            .get(&snapshot)
            .ok_or(DeviceError::UnknownSnapshot(snapshot))?;
        saved.export(self.identity, self.stage.first_layer(), sink)
    }

    fn import(&mut self, source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        let plan = Imported {
            identity: self.identity,
            spec: &self.weights.spec,
            first_layer: self.stage.first_layer(),
            draft: self.draft.as_ref().map(Draft::spec),
            context: self.info.limits.context,
            ledger: &self.ledger,
        };
        let snapshot = Snapshot::import(plan, source)?;
        Ok(self.keep_snapshot(snapshot))
    }
}

impl CpuRunner {
    fn keep_snapshot(&mut self, snapshot: Snapshot) -> SnapshotInfo {
        let id = SnapshotId(self.take_id());
        let info = SnapshotInfo {
            id,
            position: snapshot.position,
            bytes: snapshot.bytes(),
        };
        self.snapshots.insert(id, snapshot);
        info
    }
}

/// The open sequences, so that a call can take several of them at once.
fn by_id(sequences: &mut BTreeMap<SeqId, CpuSequence>) -> BTreeMap<SeqId, &mut CpuSequence> {
    sequences.iter_mut().map(|(id, seq)| (*id, seq)).collect()
}
