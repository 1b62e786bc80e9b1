//! Injected faults and flaws of the fake runner, and the record of its calls.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use contract::{DeviceError, SeqId};

/// A method of a runner or of a pipeline stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "each is the method of that name")]
pub enum RunnerMethod {
    Open,
    Close,
    Prefill,
    Draft,
    Verify,
    Commit,
    Discard,
    Snapshot,
    Restore,
    FreeSnapshot,
    Export,
    Import,
    Receive,
}

impl RunnerMethod {
    /// The method's name.
    pub fn name(self) -> &'static str {
        match self {
            RunnerMethod::Open => "open",
            RunnerMethod::Close => "close",
            RunnerMethod::Prefill => "prefill",
            RunnerMethod::Draft => "draft",
            RunnerMethod::Verify => "verify",
            RunnerMethod::Commit => "commit",
            RunnerMethod::Discard => "discard",
            RunnerMethod::Snapshot => "snapshot",
            RunnerMethod::Restore => "restore",
            RunnerMethod::FreeSnapshot => "free_snapshot",
            RunnerMethod::Export => "export",
            RunnerMethod::Import => "import",
            RunnerMethod::Receive => "receive",
        }
    }
}

/// A fault to inject.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InjectedFault {
    /// The failing method.
    pub call: RunnerMethod,
    /// The failing calls.
    pub when: FaultTrigger,
    /// The error.
    pub kind: FaultKind,
}

/// The calls of a method that fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultTrigger {
    /// The call with this number, the first being 0.
    Nth(u64),
    /// The call with this number and all later ones.
    From(u64),
    /// Every call that names this sequence.
    Naming(SeqId),
    /// Every call that names more than this many sequences.
    MoreThan(usize),
}

/// How a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// Out of memory; nothing has changed.
    OutOfMemory,
    /// The device is lost, for this call and every later one.
    DeviceLost,
    /// The call is refused; nothing has changed.
    Refused,
}

impl FaultKind {
    /// The error of a call.
    pub fn error(self, call: &'static str) -> DeviceError {
        match self {
            FaultKind::OutOfMemory => DeviceError::OutOfMemory {
                what: "faked bytes",
                wanted: 2,
                free: 1,
            },
            FaultKind::DeviceLost => lost(call),
            FaultKind::Refused => DeviceError::InvalidCall {
                call,
                detail: "injected refusal".to_owned(),
            },
        }
    }
}

/// A flaw of a fake runner; at least one property of the suite must detect each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    /// Prefill chunking changes later results.
    ChunkingChangesResult,
    /// A logits request during prefill changes later results.
    RequestsChangeResult,
    /// Prefill rows differ from decode rows.
    PrefillDiffersFromDecode,
    /// A prefill changes other sequences.
    PrefillDisturbsOthers,
    /// A tree node follows the node before it in the list, not its parent.
    SiblingsVisible,
    /// A node's row depends on the number of nodes in the call.
    TreeWidthChangesResult,
    /// A sequence's row depends on the other sequences in the call.
    BatchChangesResult,
    /// A commit keeps the whole tree.
    CommitsWholeTree,
    /// A commit of several nodes drops the last one.
    CommitDropsLastNode,
    /// A commit of several sequences keeps their roots only.
    BatchCommitKeepsRoots,
    /// A discard commits the root.
    DiscardCommits,
    /// A sequence continues where an earlier one of the same slot ended.
    SlotNotCleared,
    /// Restore drops the last token.
    RestoreDropsLastToken,
    /// A snapshot aliases its sequence instead of copying it.
    SnapshotNotCopied,
    /// A freed snapshot stays usable.
    FreedSnapshotUsable,
    /// Import drops the first token.
    ImportDropsFirstToken,
    /// Import does not check its input.
    ImportUnchecked,
    /// Invalid verify calls are accepted.
    InvalidCallAccepted,
    /// A commit may exceed `max_len`.
    MaxLenIgnored,
    /// Logits processors are ignored.
    ProcessorsIgnored,
    /// Top rows come in id order.
    TopKUnordered,
    /// The raw log-sum-exp is that of the edited row.
    RawLseEdited,
    /// Close returns no capacity.
    CloseLeaks,
    /// The pool never runs out.
    PoolUnlimited,
    /// Pages of a closed sequence are never reused.
    PoolLeaks,
    /// A refused call changes the sequence.
    RefusedCallChangesState,
}

/// Record of the calls.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Record {
    /// Every call in order, refused ones included.
    pub calls: Vec<RunnerMethod>,
    /// Every prefill: sequence, position before, tokens.
    pub prefills: Vec<(SeqId, usize, usize)>,
    /// Every verify: how many nodes each item had.
    pub verifies: Vec<Vec<usize>>,
}

impl Record {
    /// How often a method was called.
    pub fn count(&self, call: RunnerMethod) -> u64 {
        self.calls.iter().filter(|c| **c == call).count() as u64
    }
}

/// Shared access to a fake's record and faults while a scheduler owns the runner.
#[derive(Debug, Clone, Default)]
pub struct FakeHandle {
    shared: Arc<Mutex<FakeState>>,
}

#[derive(Debug, Default)]
struct FakeState {
    record: Record,
    counts: BTreeMap<RunnerMethod, u64>,
    faults: Vec<InjectedFault>,
    lost: Option<&'static str>,
}

impl FakeHandle {
    /// The calls so far.
    pub fn record(&self) -> Record {
        self.lock().record.clone()
    }

    /// Adds a fault.
    pub fn fail(&self, fault: InjectedFault) {
        self.lock().faults.push(fault);
    }

    /// Removes all faults; a lost device stays lost.
    pub fn heal(&self) {
        self.lock().faults.clear();
    }

    pub(super) fn note_prefill(&self, seq: SeqId, position: usize, tokens: usize) {
        self.lock().record.prefills.push((seq, position, tokens));
    }

    pub(super) fn note_verify(&self, nodes: Vec<usize>) {
        self.lock().record.verifies.push(nodes);
    }

    /// Counts a call and returns its injected error, if any.
    pub(crate) fn enter(&self, call: RunnerMethod, seqs: &[SeqId]) -> Result<(), DeviceError> {
        let mut shared = self.lock();
        shared.record.calls.push(call);
        let count = shared.counts.entry(call).or_insert(0);
        let nth = *count;
        *count += 1;
        if let Some(during) = shared.lost {
            return Err(lost(during));
        }
        let fault = shared.faults.iter().find(|fault| {
            fault.call == call
                && match fault.when {
                    FaultTrigger::Nth(n) => nth == n,
                    FaultTrigger::From(n) => nth >= n,
                    FaultTrigger::Naming(seq) => seqs.contains(&seq),
                    FaultTrigger::MoreThan(most) => seqs.len() > most,
                }
        });
        match fault.map(|fault| fault.kind) {
            None => Ok(()),
            Some(kind) => {
                if kind == FaultKind::DeviceLost {
                    shared.lost = Some(call.name());
                }
                Err(kind.error(call.name()))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, FakeState> {
        // A test that panicked while holding it has already failed.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lost(during: &'static str) -> DeviceError {
    DeviceError::DeviceLost {
        during,
        detail: "injected fault".to_owned(),
    }
}
