//! Scripted runner: follows the calling protocol and computes nothing.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::sync::Arc;

use chat::Tokenizer;
use contract::{
    Capacity, CommitItem, DeviceError, DeviceInfo, DraftCandidates, DraftItem, KvFormat, KvFormats,
    KvPool, Limits, LogitsRequest, LogitsRow, MemoryPlan, ModelSpec, Runner, RunnerInfo, SeqId,
    SnapshotId, SnapshotInfo, SnapshotLocation, TokenId, Tree, VerifyItem,
};

use super::file::Script;
use super::reply::{ReplyOffset, ScriptedReply, certain};

/// Device id of a script.
pub const DEVICE: &str = "script";
/// Warning at the start and in `/props`.
pub const WARNING: &str = "the answers come from a script, not from a model: no weights are run";
/// Any prefill boundary is allowed: nothing is rounded.
const PREFILL_ALIGN: usize = 1;

/// Runner that replays a script.
pub struct ScriptedRunner {
    script: Script,
    tokenizer: Arc<Tokenizer>,
    /// Texts of the end-of-turn tokens.
    ends: Vec<String>,
    info: RunnerInfo,
    sequences: HashMap<SeqId, ScriptedSequence>,
    snapshots: HashMap<SnapshotId, ScriptedState>,
    next_id: u64,
}

/// Committed tokens and the current reply.
#[derive(Clone, Default)]
struct ScriptedState {
    history: Vec<TokenId>,
    /// Chosen at the first row after a prompt; a further prefill ends it.
    reply: Option<(Arc<ScriptedReply>, ReplyOffset)>,
}

impl ScriptedState {
    fn bytes(&self) -> u64 {
        (self.history.len() * size_of::<TokenId>()) as u64
    }
}

struct ScriptedSequence {
    state: ScriptedState,
    max_len: usize,
    pending: Option<Tree>,
}

impl ScriptedRunner {
    /// A runner in place of the model `spec`.
    pub fn new(
        script: Script,
        tokenizer: Arc<Tokenizer>,
        spec: &ModelSpec,
        limits: Limits,
    ) -> ScriptedRunner {
        let ends = tokenizer.eos().iter().map(|id| tokenizer.decode(&[*id]));
        let info = RunnerInfo {
            device: DeviceInfo {
                id: DEVICE.to_owned(),
                name: "a script of replies".to_owned(),
                features: Vec::new(),
                class: None,
                total_bytes: 0,
                free_bytes: 0,
            },
            vocab: spec.vocab,
            limits,
            pool: KvPool::for_limits(limits, 1),
            kv: KvFormats {
                k: KvFormat::F16,
                v: KvFormat::F16,
            },
            model: spec.hash,
            draft_depth: None,
            narrow_draft: None,
            mtp: None,
            batch_invariant: true,
            begins_verify: false,
            prefill_align: PREFILL_ALIGN,
            memory: MemoryPlan::default(),
        };
        ScriptedRunner {
            ends: ends.collect(),
            script,
            tokenizer,
            info,
            sequences: HashMap::new(),
            snapshots: HashMap::new(),
            next_id: 0,
        }
    }

    fn sequence(&mut self, seq: SeqId) -> Result<&mut ScriptedSequence, DeviceError> {
        let found = self.sequences.get_mut(&seq);
        found.ok_or(DeviceError::UnknownSequence(seq))
    }

    /// Current reply of a sequence; if none, its history is the prompt.
    fn reply(&mut self, seq: SeqId) -> Result<(Arc<ScriptedReply>, ReplyOffset), DeviceError> {
        let state = &self.sequences.get(&seq);
        let state = &state.ok_or(DeviceError::UnknownSequence(seq))?.state;
        if let Some((reply, offset)) = &state.reply {
            return Ok((Arc::clone(reply), *offset));
        }
        let prompt = self.tokenizer.decode(&state.history);
        let (text, line) =
            self.script
                .answer(&prompt, &self.ends, &self.tokenizer.markup().reasoning);
        match line {
            Some(line) => tracing::info!(line, "the script answers"),
            None => tracing::warn!("no line of the script fits a prompt"),
        }
        let chosen = (
            Arc::new(ScriptedReply::new(&text, &self.tokenizer)),
            ReplyOffset::default(),
        );
        self.sequence(seq)?.state.reply = Some(chosen.clone());
        Ok(chosen)
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn no_draft(call: &'static str) -> DeviceError {
        DeviceError::InvalidCall {
            call,
            detail: "a script has no draft".to_owned(),
        }
    }
}

impl Runner for ScriptedRunner {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn capacity(&self) -> Capacity {
        // A script holds all its sequences at full length.
        let lent: usize = self.sequences.values().map(|s| s.max_len).sum();
        let limits = self.info.limits;
        Capacity {
            sequences: limits.sequences.saturating_sub(self.sequences.len()),
            tokens: self.info.pool.tokens().saturating_sub(lent),
            evictable_tokens: 0,
            snapshot_bytes: self.snapshots.values().map(ScriptedState::bytes).sum(),
        }
    }

    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError> {
        let room = self.capacity();
        let refuse = |what, wanted: usize, free: usize| DeviceError::OutOfMemory {
            what,
            wanted: wanted as u64,
            free: free as u64,
        };
        if room.sequences == 0 {
            return Err(refuse("sequences", 1, 0));
        }
        let free = room.tokens.min(self.info.limits.context);
        if max_len > free {
            return Err(refuse("context tokens", max_len, free));
        }
        let seq = SeqId(self.new_id());
        self.sequences.insert(
            seq,
            ScriptedSequence {
                state: ScriptedState::default(),
                max_len,
                pending: None,
            },
        );
        Ok(seq)
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
        std::thread::sleep(self.script.step);
        let sequence = self.sequence(seq)?;
        let free = sequence.max_len - sequence.state.history.len();
        if tokens.len() > free {
            return Err(DeviceError::OutOfMemory {
                what: "context tokens",
                wanted: tokens.len() as u64,
                free: free as u64,
            });
        }
        sequence.state.history.extend_from_slice(tokens);
        sequence.state.reply = None;
        let vocab = self.info.vocab;
        let mut rows = Vec::with_capacity(requests.len());
        for (at, request) in requests {
            rows.push(match tokens.get(at + 1) {
                Some(next) => certain(*next, request, vocab),
                None => {
                    let (reply, offset) = self.reply(seq)?;
                    reply.row(offset, request, (&self.tokenizer, vocab))
                }
            });
        }
        Ok(rows)
    }

    fn draft(
        &mut self,
        _items: &[DraftItem],
        _depth: usize,
        _k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        Err(ScriptedRunner::no_draft("draft"))
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        std::thread::sleep(self.script.step);
        let mut answers = Vec::with_capacity(items.len());
        for item in items {
            let (reply, offset) = self.reply(item.seq)?;
            let mut offsets: Vec<ReplyOffset> = Vec::with_capacity(item.tree.len());
            for node in item.tree.nodes() {
                let before = item
                    .tree
                    .parent(node)
                    .map_or(offset, |p| offsets[p.index()]);
                offsets.push(reply.after(before, item.tree.token(node), &self.tokenizer));
            }
            let about = (&*self.tokenizer, self.info.vocab);
            let rows = offsets.iter().zip(item.requests);
            answers.push(
                rows.map(|(at, request)| reply.row(*at, request, about))
                    .collect(),
            );
            self.sequence(item.seq)?.pending = Some(item.tree.clone());
        }
        Ok(answers)
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        for item in items {
            let (reply, mut offset) = self.reply(item.seq)?;
            let tokenizer = Arc::clone(&self.tokenizer);
            let sequence = self.sequence(item.seq)?;
            let tree = sequence.pending.take().ok_or(DeviceError::InvalidCall {
                call: "commit",
                detail: "nothing is pending".to_owned(),
            })?;
            for node in item.path.nodes() {
                let token = tree.token(*node);
                offset = reply.after(offset, token, &tokenizer);
                sequence.state.history.push(token);
            }
            sequence.state.reply = Some((reply, offset));
        }
        Ok(())
    }

    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError> {
        self.sequence(seq)?.pending = None;
        Ok(())
    }

    fn snapshot(
        &mut self,
        seq: SeqId,
        _place: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError> {
        let state = self.sequence(seq)?.state.clone();
        let info = SnapshotInfo {
            id: SnapshotId(self.new_id()),
            position: state.history.len(),
            bytes: state.bytes(),
        };
        self.snapshots.insert(info.id, state);
        Ok(info)
    }

    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError> {
        let saved = self.snapshots.get(&snapshot);
        let saved = saved.ok_or(DeviceError::UnknownSnapshot(snapshot))?.clone();
        let sequence = self.sequence(seq)?;
        if saved.history.len() > sequence.max_len {
            return Err(DeviceError::OutOfMemory {
                what: "context tokens",
                wanted: saved.history.len() as u64,
                free: sequence.max_len as u64,
            });
        }
        sequence.state = saved;
        Ok(())
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) {
        self.snapshots.remove(&snapshot);
    }

    fn export(&mut self, _snapshot: SnapshotId, _sink: &mut dyn Write) -> Result<(), DeviceError> {
        Err(stateless())
    }

    fn import(&mut self, _source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        Err(stateless())
    }
}

fn stateless() -> DeviceError {
    DeviceError::InvalidSnapshot {
        detail: "a script has no states to keep".to_owned(),
    }
}
