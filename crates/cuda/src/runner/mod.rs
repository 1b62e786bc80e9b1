//! The CUDA runner: bookkeeping of sequences and snapshots. Calls of the device interface run as
//! passes of the engine.

mod drafting;
mod pages;
mod stage;
mod verifying;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Instant;

use contract::protocol::{
    CallValidator, PrefillChunks, SequenceState, requests_within, scatter_rows,
};
use contract::snapshot::{ReadAt, SnapshotIdentity};
use contract::{
    Capacity, CommitItem, DetachedSnapshot, DeviceError, DraftCandidates, DraftItem, DraftLogits,
    DraftSpec, LogitsRequest, LogitsRow, MtpDraftItem, Runner, RunnerInfo, SeqId, SnapshotId,
    SnapshotInfo, SnapshotLocation, TokenId, Tree, VerifyItem,
};

use crate::deferred_draft::DeferredDraft;
use crate::driver::Gpu;
use crate::exec::Engine;
use crate::options::Options;
use crate::pages::{PageId, PagePool, SharedPagePool};
use crate::pinned::PinnedPool;
use crate::snapshot::{
    CudaDetachedSnapshot, ExportContext, GpuPageCopier, ImportTarget, PageLayout, Snapshot,
};
use crate::step::{self, ChunkHead, Commit};
use drafting::DraftedRows;
pub(crate) use stage::CudaStage;
use verifying::BegunVerify;

/// Freed page-locked memory that is kept for later states, in bytes.
const IDLE_BYTES: usize = 1 << 30;

/// One loaded model with its sequences and snapshots. Dropping it frees all of them.
pub(crate) struct CudaRunner {
    info: RunnerInfo,
    /// Identity of its snapshots: that of the whole model, in a pipeline stage.
    identity: SnapshotIdentity,
    /// Its first layer in the whole model.
    first_layer: usize,
    pub(crate) engine: Engine,
    /// The draft, if there is one.
    draft: Option<DraftProperties>,
    /// Its weights, while they are not on the GPU.
    deferred_draft: Option<DeferredDraft>,
    sequences: BTreeMap<SeqId, Sequence>,
    snapshots: BTreeMap<SnapshotId, Snapshot>,
    /// Slots that no sequence owns; the last is given out next.
    free_slots: Vec<usize>,
    /// Owners of the KV pages; detached snapshots read it on other threads.
    page_pool: Arc<SharedPagePool>,
    page_layout: Arc<PageLayout>,
    /// Dropped after the engine, whose queue may copy from and to its blocks.
    host: Arc<PinnedPool>,
    /// The last id of a sequence or snapshot; ids are never used twice.
    next_id: u64,
    /// Whether trees may have windows.
    windows: bool,
    /// The first fault of the GPU. Nothing runs after it.
    fault: Option<(&'static str, String)>,
    /// The verify call that has begun.
    begun: Option<BegunVerify>,
}

/// What the runner needs to know of a draft.
#[derive(Debug, Clone)]
pub(crate) struct DraftProperties {
    pub(crate) spec: Arc<DraftSpec>,
}

/// One open sequence.
pub(crate) struct Sequence {
    /// Slot of its states on the GPU.
    pub(crate) slot: usize,
    /// Pages of its committed rows and of those reserved beyond them.
    pub(crate) table: Vec<PageId>,
    /// Committed tokens it may grow to.
    pub(crate) max_len: usize,
    /// Committed tokens.
    pub(crate) position: usize,
    /// The tree verified last, until it is committed or discarded.
    pub(crate) pending: Option<Tree>,
    /// Rows that the multi-token-prediction head has drafted behind the committed tokens.
    pub(crate) drafted: DraftedRows,
}

impl SequenceState for Sequence {
    fn max_len(&self) -> usize {
        self.max_len
    }

    fn position(&self) -> usize {
        self.position
    }

    fn pending(&self) -> Option<&Tree> {
        self.pending.as_ref()
    }

    fn mtp_depths(&self) -> &[usize] {
        self.drafted.depths()
    }
}

impl CudaRunner {
    /// A runner without sequences. Pages are given out in order, or scattered all over the cache.
    pub(crate) fn new(
        info: RunnerInfo,
        (identity, first_layer): (SnapshotIdentity, usize),
        engine: Engine,
        draft: Option<DraftProperties>,
        options: &Options,
    ) -> CudaRunner {
        let scattered = options.scatter_pages;
        let n = info.pool.pages;
        // A step that has no divisor in common with the number of pages comes to each of them once.
        let prime =
            |step: &usize| (2..=*step).all(|d| !step.is_multiple_of(d) || !n.is_multiple_of(d));
        let step = if scattered {
            (n / 2 + 1..).find(prime).unwrap_or(1)
        } else {
            1
        };
        CudaRunner {
            free_slots: (0..info.limits.sequences).rev().collect(),
            page_pool: Arc::new(SharedPagePool::new(PagePool::new(
                (0..n).map(|i| (i * step + usize::from(scattered)) % n),
            ))),
            page_layout: Arc::new(PageLayout::new(engine.state())),
            host: Arc::new(PinnedPool::new(engine.gpu())),
            info,
            identity,
            first_layer,
            engine,
            draft,
            deferred_draft: None,
            sequences: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            next_id: 0,
            windows: options.windows,
            fault: None,
            begun: None,
        }
    }

    /// Loads the draft's weights before its first use instead of now.
    pub(crate) fn defer_draft(&mut self, draft: DeferredDraft) {
        self.deferred_draft = Some(draft);
    }

    /// Loads the draft's weights if that was deferred.
    fn load_deferred_draft(&mut self) -> Result<(), DeviceError> {
        self.require_device()?;
        if let Some(draft) = &self.deferred_draft {
            let done = draft.load(self.engine.gpu());
            self.record_fault(done)?;
            self.deferred_draft = None;
        }
        Ok(())
    }

    fn take_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Refuses every call once the GPU has failed.
    fn require_device(&self) -> Result<(), DeviceError> {
        match &self.fault {
            None => Ok(()),
            Some((during, detail)) => Err(DeviceError::DeviceLost {
                during,
                detail: detail.clone(),
            }),
        }
    }

    /// Passes a result on and stores a fault of the GPU, after which every call is refused.
    fn record_fault<T>(&mut self, result: Result<T, DeviceError>) -> Result<T, DeviceError> {
        if let Err(DeviceError::DeviceLost { during, detail }) = &result {
            self.fault = Some((during, detail.clone()));
        }
        result
    }

    fn validator(&self) -> CallValidator<'_, Sequence> {
        CallValidator {
            info: &self.info,
            sequences: &self.sequences,
        }
    }

    pub(crate) fn sequence(&self, seq: SeqId) -> Result<&Sequence, DeviceError> {
        self.validator().sequence(seq)
    }

    /// Prefills `tokens` after the committed ones, chunk by chunk. Calls `on_chunk` with the number
    /// of rows after each chunk.
    pub(crate) fn prefill_with(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
        on_chunk: &mut dyn FnMut(&mut Engine, usize) -> Result<(), DeviceError>,
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        self.load_deferred_draft()?;
        let sequence = self.validator().prefill(seq, tokens, requests)?;
        let (slot, mut position) = (sequence.slot, sequence.position);
        self.ensure_pages(seq, position + tokens.len())?;
        let chunks = PrefillChunks {
            max_tokens: self.engine.chunk_rows(),
            align: self.info.prefill_align,
        };
        let mut rows = Vec::new();
        let passes = self.engine.passes(chunks, position, tokens.len());
        for pass in passes {
            let asked = requests_within(requests, &pass);
            let mut head = ChunkHead::new(slot, position, pass.len());
            self.host.note_pass(pass.len());
            let result = self.engine.chunk(&mut head, &tokens[pass.clone()], &asked);
            let result = result.and_then(|rows| {
                on_chunk(&mut self.engine, pass.len())?;
                Ok(rows)
            });
            rows.append(&mut self.record_fault(result)?);
            position += pass.len();
            if let Some(sequence) = self.sequences.get_mut(&seq) {
                sequence.position = position;
                sequence.drafted.clear();
            }
        }
        let requests = requests.iter().map(|(_, ask)| ask);
        Ok(scatter_rows(requests, &mut rows.into_iter()))
    }
}

/// Logs how long a call blocked; the GPU may work for longer.
fn log_call(call: &'static str, tokens: usize, begun: Instant) {
    let us = begun.elapsed().as_micros() as u64;
    tracing::debug!(call, tokens, us, "runner");
}

fn copier<'a>(
    gpu: &'a Gpu,
    page_layout: &'a PageLayout,
    host: &'a PinnedPool,
) -> GpuPageCopier<'a> {
    GpuPageCopier {
        gpu,
        page_layout,
        host,
    }
}

impl Drop for CudaRunner {
    fn drop(&mut self) {
        // Exports read memory that the engine frees.
        self.page_pool.wait_for_exports();
    }
}

impl Runner for CudaRunner {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn capacity(&self) -> Capacity {
        let left: u64 = self.snapshots.values().map(Snapshot::non_paged_bytes).sum();
        let count = self.page_pool.lock().count();
        let pages = (count.saved * self.page_layout.bytes) as u64;
        self.validator()
            .capacity((count.in_use, count.evictable), left + pages)
    }

    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError> {
        self.require_device()?;
        self.validator().open(max_len)?;
        let slot = self.free_slots.pop();
        let slot =
            slot.expect("a slot is free where fewer sequences are open than there are slots");
        let cleared = self.engine.clear_slot(slot);
        self.record_fault(cleared)?;
        let id = SeqId(self.take_id());
        self.sequences.insert(
            id,
            Sequence {
                slot,
                table: Vec::new(),
                max_len,
                position: 0,
                pending: None,
                drafted: DraftedRows::default(),
            },
        );
        Ok(id)
    }

    fn close(&mut self, seq: SeqId) {
        // Work under way on the slot and its pages ends before any work of their next owners
        // begins: one stream, which a commit beside it joins.
        if let Some(sequence) = self.sequences.remove(&seq) {
            let joined = self.engine.join_commit();
            // The next call reports a fault.
            let _ = self.record_fault(joined);
            self.free_slots.push(sequence.slot);
            self.page_pool.lock().release(sequence.table.into_iter());
        }
    }

    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let begun = Instant::now();
        let rows = self.prefill_with(seq, tokens, requests, &mut |_, _| Ok(()));
        log_call("prefill", tokens.len(), begun);
        rows
    }

    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        self.load_deferred_draft()?;
        self.validator().draft(items, depth, k)?;
        self.draft_blocks(items, depth, k)
    }

    fn draft_logits(&mut self, item: DraftItem) -> Result<DraftLogits, DeviceError> {
        self.load_deferred_draft()?;
        let depth = self.info.draft_depth.unwrap_or(0);
        self.validator().draft(&[item], depth, 1)?;
        self.draft_block_logits(item)
    }

    fn draft_mtp(
        &mut self,
        items: &[MtpDraftItem],
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        self.require_device()?;
        self.validator().draft_mtp(items, k)?;
        self.draft_mtp_rows(items, k)
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        self.verify_all(items)
    }

    fn begin_verify(&mut self, items: &[VerifyItem<'_>]) -> Result<(), DeviceError> {
        self.begin_pass(items)
    }

    fn finish_verify(&mut self) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        self.finish_pass()
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        self.require_device()?;
        self.validator().commit(items)?;
        let mut rest = items;
        while !rest.is_empty() {
            let mut nodes = 0;
            let fits = rest.iter().take(step::TREES).take_while(|item| {
                nodes += item.path.len();
                nodes <= step::ROWS
            });
            let (items, later) = rest.split_at(fits.count().max(1));
            rest = later;
            let mut commit = Commit::new();
            for item in items {
                let sequence = self.sequence(item.seq)?;
                commit.push(sequence.slot, sequence.position, item.path.nodes());
            }
            let rows = self.committed_rows(items)?;
            let done = self.engine.commit(&commit, rows.as_ref());
            self.record_fault(done)?;
            for item in items {
                if let Some(sequence) = self.sequences.get_mut(&item.seq) {
                    sequence.position += item.path.len();
                    sequence.pending = None;
                }
            }
        }
        Ok(())
    }

    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError> {
        self.require_device()?;
        self.validator().discard(seq)?;
        if let Some(sequence) = self.sequences.get_mut(&seq) {
            sequence.pending = None;
        }
        Ok(())
    }

    fn snapshot(
        &mut self,
        seq: SeqId,
        location: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError> {
        self.require_device()?;
        let begun = Instant::now();
        let sequence = self.validator().require_idle("snapshot", seq)?;
        let position = sequence.position;
        let at = (sequence.slot, sequence.position);
        // A snapshot has the draft's context of all its tokens.
        let settled = self.engine.consume_features(&[at.0]);
        self.record_fault(settled)?;
        let state = self.engine.shared_state();
        let copies = self.engine.copy_stream();
        let saved =
            copies.and_then(|copies| Snapshot::save_slot(copies, &self.host, &state, at, location));
        let mut saved = self.record_fault(saved)?;
        if let Some(sequence) = self.sequences.get(&seq) {
            saved.pages = self
                .page_pool
                .lock()
                .retain(&sequence.table, sequence.position);
        }
        log_call("snapshot", position, begun);
        Ok(self.keep_snapshot(saved))
    }

    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError> {
        self.require_device()?;
        let begun = Instant::now();
        let saved = self
            .snapshots
            .get(&snapshot)
            .ok_or(DeviceError::UnknownSnapshot(snapshot))?;
        let position = saved.position;
        let slot = self.validator().restore(seq, saved.position)?.slot;
        let joined = self.engine.join_commit();
        self.record_fault(joined)?;
        if let Some(sequence) = self.sequences.get_mut(&seq) {
            // Its own pages may be needed.
            sequence.position = 0;
            sequence.drafted.clear();
            let table = std::mem::take(&mut sequence.table);
            self.page_pool.lock().release(table.into_iter());
        }
        let restored = self.restore_into(seq, snapshot);
        self.host.note_pass(0);
        let result = self.record_fault(restored);
        if result.is_err() && self.fault.is_none() {
            // An empty sequence is left behind.
            if let Some(sequence) = self.sequences.get_mut(&seq) {
                sequence.position = 0;
                let table = std::mem::take(&mut sequence.table);
                self.page_pool.lock().release(table.into_iter());
            }
            let cleared = self.engine.clear_slot(slot);
            self.record_fault(cleared)?;
        }
        log_call("restore", position, begun);
        result
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) {
        if let Some(saved) = self.snapshots.remove(&snapshot) {
            self.page_pool
                .lock()
                .release_snapshot(saved.pages.iter().copied());
        }
        // Later users of its memory are ordered after its copies. The next call reports a GPU that
        // failed.
        let met = self.engine.wait_for_all_copies().is_ok();
        if met && self.host.idle_bytes() > 2 * IDLE_BYTES && self.engine.gpu().sync().is_ok() {
            self.host.trim(IDLE_BYTES);
        }
    }

    fn export(&mut self, snapshot: SnapshotId, sink: &mut dyn Write) -> Result<(), DeviceError> {
        let written = self.detach(snapshot)?.write(sink);
        self.record_fault(written)
    }

    fn detach(&mut self, snapshot: SnapshotId) -> Result<Box<dyn DetachedSnapshot>, DeviceError> {
        self.require_device()?;
        let saved = self
            .snapshots
            .get(&snapshot)
            .ok_or(DeviceError::UnknownSnapshot(snapshot))?;
        let context = ExportContext {
            page_pool: Arc::clone(&self.page_pool),
            host: Arc::clone(&self.host),
            page_layout: Arc::clone(&self.page_layout),
            state: self.engine.shared_state(),
            copy_engine: self.engine.gpu().copy_engine(),
            identity: self.identity,
            first_layer: self.first_layer,
        };
        Ok(Box::new(CudaDetachedSnapshot::new(context, saved)))
    }

    fn import(&mut self, source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        let mut bytes = Vec::new();
        source.read_to_end(&mut bytes)?;
        self.import_at(&bytes)
    }

    fn import_at(&mut self, source: &dyn ReadAt) -> Result<SnapshotInfo, DeviceError> {
        self.require_device()?;
        let begun = Instant::now();
        let to = ImportTarget {
            identity: self.identity,
            first_layer: self.first_layer,
            context: self.info.limits.context,
        };
        let engine = &self.engine;
        let copier = copier(engine.gpu(), &self.page_layout, &self.host);
        let state = engine.state();
        let snapshot = Snapshot::import(&copier, &mut self.page_pool.lock(), state, to, source);
        let snapshot = self.record_fault(snapshot)?;
        log_call("import", snapshot.position, begun);
        Ok(self.keep_snapshot(snapshot))
    }
}
