//! What a fake is told to do wrong, and what it remembers of its callers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use contract::{DeviceError, SeqId};

/// A method of the runner.
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
        }
    }
}

/// A failure to be had on demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InjectedFault {
    /// Which method fails.
    pub call: RunnerMethod,
    /// Which of its calls.
    pub when: FaultTrigger,
    /// How.
    pub kind: FaultKind,
}

/// Which calls of a method fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultTrigger {
    /// The call with this number, the first being 0.
    Nth(u64),
    /// That call and all after it.
    From(u64),
    /// Every call that names this sequence.
    Naming(SeqId),
    /// Every call that names more than this many sequences.
    MoreThan(usize),
}

/// How a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// This call does not fit; nothing has changed.
    OutOfMemory,
    /// The device is gone, for this call and every later one.
    DeviceLost,
}

/// What a flawed fake gets wrong; each is caught by one law of the suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    /// Where a prefill was cut shows in what follows.
    ChunkingChangesResult,
    /// Asking for a row while reading shows in what follows.
    RequestsChangeResult,
    /// Rows told while reading are not those told while speaking.
    PrefillDiffersFromDecode,
    /// Reading a prompt disturbs the other sequences.
    PrefillDisturbsOthers,
    /// A tree node follows the node before it in the list, not its parent.
    SiblingsVisible,
    /// What a node hears depends on how many nodes share the call.
    TreeWidthChangesResult,
    /// What a sequence hears depends on who shares the call.
    BatchChangesResult,
    /// A commit keeps the whole tree.
    CommitsWholeTree,
    /// A commit of several nodes forgets the last one.
    CommitDropsLastNode,
    /// A commit of several sequences keeps their roots only.
    BatchCommitKeepsRoots,
    /// A discarded root is kept.
    DiscardCommits,
    /// A sequence continues where an earlier one of the same slot ended.
    SlotNotCleared,
    /// Restoring forgets the last token.
    RestoreDropsLastToken,
    /// A snapshot follows its sequence instead of keeping a copy.
    SnapshotNotCopied,
    /// A freed snapshot is still there.
    FreedSnapshotUsable,
    /// Importing forgets the first token.
    ImportDropsFirstToken,
    /// Importing does not look at what it is given.
    ImportUnchecked,
    /// Trees are taken whatever is wrong with the call.
    InvalidCallAccepted,
    /// A commit goes on beyond what the sequence was opened for.
    MaxLenIgnored,
    /// Edits are left out.
    EditsIgnored,
    /// Top rows come in id order.
    TopKUnordered,
    /// The log-sum-exp of the edited row stands where the raw one should.
    RawLseEdited,
    /// Closing gives nothing back.
    CloseLeaks,
    /// Sequences get pages that are not there.
    PoolUnlimited,
    /// What a closed sequence had is not given out again.
    PoolLeaks,
    /// A refused call changes the sequence all the same.
    RefusedCallChangesState,
}

/// What a fake remembers of its callers.
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

/// A shared view of a fake's record and faults, good while the runner is boxed away in a scheduler.
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
    /// What has been called so far.
    pub fn record(&self) -> Record {
        self.lock().record.clone()
    }

    /// Adds a fault.
    pub fn fail(&self, fault: InjectedFault) {
        self.lock().faults.push(fault);
    }

    /// Takes all faults away; a lost device stays lost.
    pub fn heal(&self) {
        self.lock().faults.clear();
    }

    pub(super) fn note_prefill(&self, seq: SeqId, position: usize, tokens: usize) {
        self.lock().record.prefills.push((seq, position, tokens));
    }

    pub(super) fn note_verify(&self, nodes: Vec<usize>) {
        self.lock().record.verifies.push(nodes);
    }

    /// Counts a call and says whether it is to fail.
    pub(super) fn enter(&self, call: RunnerMethod, seqs: &[SeqId]) -> Result<(), DeviceError> {
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
            Some(FaultKind::OutOfMemory) => Err(DeviceError::OutOfMemory {
                what: "faked bytes",
                wanted: 2,
                free: 1,
            }),
            Some(FaultKind::DeviceLost) => {
                shared.lost = Some(call.name());
                Err(lost(call.name()))
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
        detail: "as the script says".to_owned(),
    }
}
