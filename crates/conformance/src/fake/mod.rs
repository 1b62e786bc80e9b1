//! A runner without arithmetic: the next token is a hash of the history.
//!
//! It implements the runner protocol exactly (trees, snapshots, capacity, refusals), so a scheduler
//! bug shows as a wrong token. It can inject faults, and has flaws that the suite must detect.

mod backend;
mod drafts;
mod faults;
mod language;
mod pages;
mod stage;

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};

use contract::protocol::{CallValidator, SequenceState, invalid_call};
use contract::snapshot::{self, SectionKind, SnapshotHeader, SnapshotIdentity};
use contract::{
    Capacity, CommitItem, DeviceError, DraftCandidates, DraftItem, KvFormat, KvFormats, KvPool,
    Limits, LogitsRequest, LogitsRow, MemoryPlan, ModelHash, MtpDraftItem, NodeIdx, Runner,
    RunnerInfo, SeqId, SnapshotId, SnapshotInfo, SnapshotLocation, TokenId, Tree, VerifyItem,
};

use drafts::DraftedRows;

pub use backend::FakeBackend;
pub use drafts::FakeDraft;
pub use faults::{FakeHandle, FaultKind, FaultTrigger, Flaw, InjectedFault, Record, RunnerMethod};
pub use language::{Ending, HistoryHash, Language, answer, log_sum_exp, ranked};

/// Properties of a fake runner.
#[derive(Debug, Clone, PartialEq)]
pub struct FakeSpec {
    /// Its language.
    pub language: Language,
    /// Its limits.
    pub limits: Limits,
    /// Tokens that its sequences can hold together.
    pub pool_tokens: usize,
    /// Positions of a page.
    pub page_size: usize,
    /// Its prefill alignment.
    pub prefill_align: usize,
    /// Its draft, if it has one.
    pub draft: Option<FakeDraft>,
    /// Whether the draft's candidates depend on the tokens before them.
    pub conditional_draft: bool,
    /// Its multi-token-prediction head, if it has one.
    pub mtp: Option<FakeDraft>,
    /// Its flaw, if any.
    pub flaw: Option<Flaw>,
}

impl Default for FakeSpec {
    fn default() -> FakeSpec {
        FakeSpec {
            language: Language {
                vocab: 64,
                spread: 8.0,
                ending: None,
                salt: 0,
            },
            limits: Limits {
                sequences: 8,
                context: 4096,
                tree_nodes: Tree::MAX_NODES,
                prefill_chunk: 512,
                pool_tokens: None,
            },
            pool_tokens: 8 * (4096 + Tree::MAX_NODES),
            page_size: 1,
            prefill_align: 64,
            draft: None,
            conditional_draft: false,
            mtp: None,
            flaw: None,
        }
    }
}

/// Snapshot bytes per token.
const TOKEN_BYTES: usize = size_of::<u32>();

type Hook = Box<dyn FnMut(RunnerMethod) + Send>;

/// A runner over a hash-based language.
pub struct FakeRunner {
    language: Language,
    info: RunnerInfo,
    draft_acceptance_rate: f64,
    conditional_draft: bool,
    mtp_acceptance_rate: f64,
    flaw: Option<Flaw>,
    sequences: BTreeMap<SeqId, FakeSequence>,
    snapshots: HashMap<SnapshotId, (SeqId, Committed)>,
    next_id: u64,
    /// Pages leaked by a flaw.
    lost: usize,
    /// State of the last closed sequence, used by a flaw only.
    residue: HistoryHash,
    handle: FakeHandle,
    hook: Option<Hook>,
}

#[derive(Debug, Clone)]
struct Committed {
    history: Vec<TokenId>,
    hash: HistoryHash,
}

struct FakeSequence {
    committed: Committed,
    max_len: usize,
    /// Pages of the pool that it has taken.
    pages: usize,
    pending: Option<Tree>,
    drafted: DraftedRows,
}

impl SequenceState for FakeSequence {
    fn max_len(&self) -> usize {
        self.max_len
    }

    fn position(&self) -> usize {
        self.committed.history.len()
    }

    fn pending(&self) -> Option<&Tree> {
        self.pending.as_ref()
    }

    fn mtp_depths(&self) -> &[usize] {
        &self.drafted.depths
    }
}

impl Committed {
    fn push(&mut self, tokens: &[TokenId]) {
        self.history.extend_from_slice(tokens);
        self.hash = self.hash.then_all(tokens);
    }
}

impl FakeRunner {
    /// A runner without sequences.
    pub fn new(spec: FakeSpec) -> FakeRunner {
        let kv = KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        };
        FakeRunner {
            residue: spec.language.begin(),
            info: RunnerInfo {
                device: backend::device_info(),
                vocab: spec.language.vocab,
                limits: spec.limits,
                pool: KvPool {
                    pages: spec.pool_tokens / spec.page_size,
                    page_size: spec.page_size,
                },
                kv,
                model: model_hash(spec.language.salt),
                draft_depth: spec.draft.map(|draft| draft.depth),
                narrow_draft: None,
                mtp: spec.mtp.map(drafts::mtp_info),
                batch_invariant: true,
                begins_verify: false,
                prefill_align: spec.prefill_align,
                memory: MemoryPlan::default(),
            },
            language: spec.language,
            draft_acceptance_rate: spec.draft.map_or(0.0, |draft| draft.acceptance_rate),
            conditional_draft: spec.conditional_draft,
            mtp_acceptance_rate: spec.mtp.map_or(0.0, |mtp| mtp.acceptance_rate),
            flaw: spec.flaw,
            sequences: BTreeMap::new(),
            snapshots: HashMap::new(),
            next_id: 0,
            lost: 0,
            handle: FakeHandle::default(),
            hook: None,
        }
    }

    /// Calls `hook` first in every device method, for example to sleep for a simulated duration.
    pub fn with_hook(self, hook: impl FnMut(RunnerMethod) + Send + 'static) -> FakeRunner {
        FakeRunner {
            hook: Some(Box::new(hook)),
            ..self
        }
    }

    /// A handle to its record and faults that stays usable after boxing.
    pub fn handle(&self) -> FakeHandle {
        self.handle.clone()
    }

    fn enter(&mut self, call: RunnerMethod, seqs: &[SeqId]) -> Result<(), DeviceError> {
        if let Some(hook) = &mut self.hook {
            hook(call);
        }
        self.handle.enter(call, seqs)
    }

    fn has(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn validator(&self) -> CallValidator<'_, FakeSequence> {
        CallValidator {
            info: &self.info,
            sequences: &self.sequences,
        }
    }

    fn sequence(&mut self, seq: SeqId) -> Result<&mut FakeSequence, DeviceError> {
        self.sequences
            .get_mut(&seq)
            .ok_or(DeviceError::UnknownSequence(seq))
    }

    /// The history hash at each node, itself included, `[n_nodes]`.
    fn node_hashes(&self, committed: HistoryHash, tree: &Tree) -> Vec<HistoryHash> {
        let mut hashes: Vec<HistoryHash> = Vec::with_capacity(tree.len());
        for node in tree.nodes() {
            let before = match tree.parent(node) {
                None => committed,
                Some(_) if self.has(Flaw::SiblingsVisible) => hashes[node.index() - 1],
                Some(parent) => hashes[parent.index()],
            };
            hashes.push(before.then(tree.token(node)));
        }
        if self.has(Flaw::TreeWidthChangesResult) && tree.len() > 1 {
            return hashes.iter().map(|t| t.disturbed(1)).collect();
        }
        hashes
    }

    fn row(&self, hash: HistoryHash, request: &LogitsRequest) -> LogitsRow {
        if self.has(Flaw::ProcessorsIgnored) {
            let raw = LogitsRequest {
                selection: request.selection,
                processors: None,
                mass: None,
            };
            return self.language.row(hash, &raw);
        }
        let mut row = self.language.row(hash, request);
        if self.has(Flaw::TopKUnordered) {
            let mut order: Vec<usize> = (0..row.ids.len()).collect();
            order.sort_by_key(|i| row.ids[*i]);
            row.ids = order.iter().map(|i| row.ids[*i]).collect();
            row.logits = order.iter().map(|i| row.logits[*i]).collect();
            row.raw = order.iter().map(|i| row.raw[*i]).collect();
        }
        if self.has(Flaw::RawLseEdited) {
            row.raw_lse = row.lse;
        }
        row
    }
}

impl Runner for FakeRunner {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn capacity(&self) -> Capacity {
        let saved = self.snapshots.values();
        let bytes = saved.map(|(_, saved)| (saved.history.len() * TOKEN_BYTES) as u64);
        self.validator().capacity((self.held(), 0), bytes.sum())
    }

    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError> {
        self.enter(RunnerMethod::Open, &[])?;
        self.validator().open(max_len)?;
        let id = SeqId(self.new_id());
        let hash = if self.has(Flaw::SlotNotCleared) {
            self.residue
        } else {
            self.language.begin()
        };
        let committed = Committed {
            history: Vec::new(),
            hash,
        };
        let sequence = FakeSequence {
            committed,
            max_len,
            pages: 0,
            pending: None,
            drafted: DraftedRows::default(),
        };
        self.sequences.insert(id, sequence);
        Ok(id)
    }

    fn close(&mut self, seq: SeqId) {
        // Closing works on a lost device too.
        let _ = self.enter(RunnerMethod::Close, &[seq]);
        if self.has(Flaw::CloseLeaks) {
            return;
        }
        if let Some(sequence) = self.sequences.remove(&seq) {
            if self.has(Flaw::PoolLeaks) {
                self.lost += sequence.pages;
            }
            self.residue = sequence.committed.hash;
        }
    }

    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        self.enter(RunnerMethod::Prefill, &[seq])?;
        let moves = self.has(Flaw::RefusedCallChangesState);
        let shows = self.has(Flaw::ChunkingChangesResult)
            || (self.has(Flaw::RequestsChangeResult) && !requests.is_empty());
        if let Err(error) = self.validator().prefill(seq, tokens, requests) {
            if let Some(sequence) = self.sequences.get_mut(&seq)
                && moves
            {
                sequence.committed.hash = sequence.committed.hash.then_all(tokens);
            }
            return Err(error);
        }
        let position = self.sequence(seq)?.committed.history.len();
        self.give_pages(seq, position + tokens.len())?;
        let sequence = self.sequence(seq)?;
        sequence.drafted.clear();
        let mut before = sequence.committed.hash;
        sequence.committed.push(tokens);
        if shows {
            sequence.committed.hash = sequence.committed.hash.disturbed(1);
        }
        if self.has(Flaw::PrefillDisturbsOthers) {
            let others = self.sequences.iter_mut().filter(|(id, _)| **id != seq);
            others.for_each(|(_, s)| s.committed.hash = s.committed.hash.disturbed(3));
        }
        if self.has(Flaw::PrefillDiffersFromDecode) {
            before = before.disturbed(4);
        }
        let rows = requests
            .iter()
            .map(|(at, request)| self.row(before.then_all(&tokens[..=*at]), request))
            .collect();
        self.handle.note_prefill(seq, position, tokens.len());
        Ok(rows)
    }

    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let seqs: Vec<SeqId> = items.iter().map(|item| item.seq).collect();
        self.enter(RunnerMethod::Draft, &seqs)?;
        self.validator().draft(items, depth, k)?;
        self.draft_blocks(items, depth, k)
    }

    fn draft_mtp(
        &mut self,
        items: &[MtpDraftItem],
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let seqs: Vec<SeqId> = items.iter().map(|item| item.seq).collect();
        self.enter(RunnerMethod::Draft, &seqs)?;
        self.validator().draft_mtp(items, k)?;
        self.draft_rows(items, k)
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let seqs: Vec<SeqId> = items.iter().map(|item| item.seq).collect();
        self.enter(RunnerMethod::Verify, &seqs)?;
        if !self.has(Flaw::InvalidCallAccepted) {
            self.validator().verify(items)?;
        }
        for item in items {
            let position = self.sequence(item.seq)?.committed.history.len();
            self.give_pages(item.seq, position + item.tree.len())?;
        }
        let bleed = self.has(Flaw::BatchChangesResult) && items.len() > 1;
        let mut answers = Vec::with_capacity(items.len());
        for item in items {
            let sequence = self.sequence(item.seq)?;
            sequence.pending = Some(item.tree.clone());
            sequence.drafted.clear();
            let committed = sequence.committed.hash;
            let mut hashes = self.node_hashes(committed, item.tree);
            if bleed {
                hashes.iter_mut().for_each(|t| *t = t.disturbed(2));
            }
            let rows = hashes.iter().zip(item.requests);
            answers.push(
                rows.map(|(hash, request)| self.row(*hash, request))
                    .collect(),
            );
        }
        let nodes = items.iter().map(|item| item.tree.len()).collect();
        self.handle.note_verify(nodes);
        Ok(answers)
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        let seqs: Vec<SeqId> = items.iter().map(|item| item.seq).collect();
        self.enter(RunnerMethod::Commit, &seqs)?;
        if !self.has(Flaw::MaxLenIgnored) {
            self.validator().commit(items)?;
        }
        let (whole, short) = (
            self.has(Flaw::CommitsWholeTree),
            self.has(Flaw::CommitDropsLastNode),
        );
        let roots_only = self.has(Flaw::BatchCommitKeepsRoots) && items.len() > 1;
        for item in items {
            let sequence = self.sequence(item.seq)?;
            let Some(tree) = sequence.pending.take() else {
                return Err(invalid_call("commit", "nothing is pending".to_owned()));
            };
            let mut kept: Vec<NodeIdx> = item.path.nodes().to_vec();
            if whole {
                kept = tree.nodes().collect();
            }
            if short && kept.len() > 1 {
                kept.pop();
            }
            if roots_only {
                kept.truncate(1);
            }
            let tokens: Vec<TokenId> = kept.iter().map(|node| tree.token(*node)).collect();
            sequence.committed.push(&tokens);
        }
        Ok(())
    }

    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError> {
        self.enter(RunnerMethod::Discard, &[seq])?;
        self.validator().discard(seq)?;
        let keep = self.has(Flaw::DiscardCommits);
        let sequence = self.sequence(seq)?;
        if let Some(tree) = sequence.pending.take()
            && keep
        {
            sequence.committed.push(&[tree.token(NodeIdx::ROOT)]);
        }
        Ok(())
    }

    fn snapshot(
        &mut self,
        seq: SeqId,
        _location: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError> {
        self.enter(RunnerMethod::Snapshot, &[seq])?;
        let sequence = self.validator().require_idle("snapshot", seq)?;
        let committed = sequence.committed.clone();
        let id = SnapshotId(self.new_id());
        let position = committed.history.len();
        self.snapshots.insert(id, (seq, committed));
        Ok(snapshot_info(id, position))
    }

    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError> {
        self.enter(RunnerMethod::Restore, &[seq])?;
        let (origin, saved) = self
            .snapshots
            .get(&snapshot)
            .ok_or(DeviceError::UnknownSnapshot(snapshot))?;
        let mut saved = saved.clone();
        if self.has(Flaw::SnapshotNotCopied)
            && let Some(origin) = self.sequences.get(origin)
        {
            saved.hash = origin.committed.hash;
        }
        if self.has(Flaw::RestoreDropsLastToken) {
            saved = self.replayed(&saved.history[..saved.history.len().saturating_sub(1)]);
        }
        self.validator().restore(seq, saved.history.len())?;
        let position = saved.history.len();
        self.sequence(seq)?.pages = 0;
        self.sequence(seq)?.drafted.clear();
        let given = self.give_pages(seq, position);
        self.sequence(seq)?.committed = match given {
            Ok(()) => saved,
            Err(_) => self.replayed(&[]),
        };
        given
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) {
        // Freeing works on a lost device too.
        let _ = self.enter(RunnerMethod::FreeSnapshot, &[]);
        if !self.has(Flaw::FreedSnapshotUsable) {
            self.snapshots.remove(&snapshot);
        }
    }

    fn export(&mut self, id: SnapshotId, sink: &mut dyn Write) -> Result<(), DeviceError> {
        self.enter(RunnerMethod::Export, &[])?;
        let (_, saved) = self
            .snapshots
            .get(&id)
            .ok_or(DeviceError::UnknownSnapshot(id))?;
        let ids = saved.history.iter().map(|token| token.0);
        let bytes: Vec<u8> = ids.flat_map(u32::to_le_bytes).collect();
        let header = SnapshotHeader {
            identity: self.identity(),
            position: saved.history.len() as u64,
            sections: 1,
        };
        snapshot::write_header(sink, &header)?;
        snapshot::write_section(sink, SectionKind::Keys, 0, &bytes)?;
        Ok(())
    }

    fn import(&mut self, source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        self.enter(RunnerMethod::Import, &[])?;
        let mut history = self.read_history(source);
        if self.has(Flaw::ImportUnchecked) && history.is_err() {
            history = Ok(Vec::new());
        }
        let mut history = history?;
        let position = history.len();
        if self.has(Flaw::ImportDropsFirstToken) && position > 0 {
            history.remove(0);
        }
        let id = SnapshotId(self.new_id());
        let committed = self.replayed(&history);
        self.snapshots.insert(id, (SeqId(0), committed));
        Ok(snapshot_info(id, position))
    }
}

impl FakeRunner {
    fn identity(&self) -> SnapshotIdentity {
        SnapshotIdentity {
            model: self.info.model,
            kv: self.info.kv,
            rotated: false,
            draft: None,
            mtp: false,
        }
    }

    fn replayed(&self, history: &[TokenId]) -> Committed {
        Committed {
            history: history.to_vec(),
            hash: self.language.begin().then_all(history),
        }
    }

    fn read_history(&self, source: &mut dyn Read) -> Result<Vec<TokenId>, DeviceError> {
        let refuse = |detail: &str| DeviceError::InvalidSnapshot {
            detail: detail.to_owned(),
        };
        let header = snapshot::read_header(source, self.identity())?;
        let position = usize::try_from(header.position)
            .ok()
            .filter(|p| *p <= self.info.limits.context)
            .ok_or_else(|| refuse("its position is beyond the context"))?;
        if header.sections != 1 {
            return Err(refuse("a fake snapshot has one section"));
        }
        let section = snapshot::read_section(source, |kind, layer| {
            (kind == SectionKind::Keys && layer == 0).then_some(position * TOKEN_BYTES)
        })?;
        let words = section.bytes.chunks_exact(TOKEN_BYTES);
        Ok(words
            .map(|word| TokenId(u32::from_le_bytes([word[0], word[1], word[2], word[3]])))
            .collect())
    }
}

fn model_hash(salt: u64) -> ModelHash {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&language::mix(salt).to_le_bytes());
    ModelHash(bytes)
}

fn snapshot_info(id: SnapshotId, position: usize) -> SnapshotInfo {
    SnapshotInfo {
        id,
        position,
        bytes: (position * TOKEN_BYTES) as u64,
    }
}
