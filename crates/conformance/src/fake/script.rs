//! What a fake is told to do wrong, and what it remembers of its callers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use contract::{DeviceError, SeqId};

/// A method of the runner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "each is the method of that name")]
pub enum Call {
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

impl Call {
    /// The method's name.
    pub fn name(self) -> &'static str {
        match self {
            Call::Open => "open",
            Call::Close => "close",
            Call::Prefill => "prefill",
            Call::Draft => "draft",
            Call::Verify => "verify",
            Call::Commit => "commit",
            Call::Discard => "discard",
            Call::Snapshot => "snapshot",
            Call::Restore => "restore",
            Call::FreeSnapshot => "free_snapshot",
            Call::Export => "export",
            Call::Import => "import",
        }
    }
}

/// A failure to be had on demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Which method fails.
    pub call: Call,
    /// Which of its calls.
    pub when: When,
    /// How.
    pub kind: FaultKind,
}

/// Which calls of a method fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// The call with this number, the first being 0.
    Nth(u64),
    /// That call and all after it.
    From(u64),
    /// Every call that names this sequence.
    Naming(SeqId),
    /// Every call that names more than this many sequences.
    Wider(usize),
}

/// How a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// This call does not fit; nothing has changed.
    NoRoom,
    /// The device is gone, for this call and every later one.
    Lost,
}

/// What a flawed fake gets wrong; each is caught by one law of the suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    /// Where a prefill was cut shows in what follows.
    CutsShow,
    /// Asking for a row while reading shows in what follows.
    AsksShow,
    /// Rows told while reading are not those told while speaking.
    ReadingOff,
    /// Reading a prompt disturbs the other sequences.
    TurnsMix,
    /// A tree node follows the node before it in the list, not its parent.
    SiblingsSeen,
    /// What a node hears depends on how many nodes share the call.
    WidthShows,
    /// What a sequence hears depends on who shares the call.
    NeighboursShow,
    /// A commit keeps the whole tree.
    WholeTreeKept,
    /// A commit of several nodes forgets the last one.
    LastNodeForgotten,
    /// A commit of several sequences keeps their roots only.
    SharedCommitShort,
    /// A discarded root is kept.
    DiscardKept,
    /// A sequence continues where an earlier one of the same slot ended.
    SlotDirty,
    /// Restoring forgets the last token.
    RestoreShort,
    /// A snapshot follows its sequence instead of keeping a copy.
    SnapshotAlive,
    /// A freed snapshot is still there.
    FreedStays,
    /// Importing forgets the first token.
    ImportShort,
    /// Importing does not look at what it is given.
    ImportTrusting,
    /// Trees are taken whatever is wrong with the call.
    MisuseTaken,
    /// A commit goes on beyond what the sequence was opened for.
    LengthIgnored,
    /// Edits are left out.
    EditsIgnored,
    /// Top rows come in id order.
    TopUnordered,
    /// The log-sum-exp of the edited row stands where the raw one should.
    RawLseEdited,
    /// Closing gives nothing back.
    CloseKeeps,
    /// Sequences get pages that are not there.
    PoolBottomless,
    /// What a closed sequence had is not given out again.
    PoolKept,
    /// A refused call changes the sequence all the same.
    RefusalMoves,
}

/// What a fake remembers of its callers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Record {
    /// Every call in order, refused ones included.
    pub calls: Vec<Call>,
    /// Every prefill: sequence, position before, tokens.
    pub prefills: Vec<(SeqId, usize, usize)>,
    /// Every verify: how many nodes each item had.
    pub verifies: Vec<Vec<usize>>,
}

impl Record {
    /// How often a method was called.
    pub fn count(&self, call: Call) -> u64 {
        self.calls.iter().filter(|c| **c == call).count() as u64
    }
}

/// A shared view of a fake's record and faults, good while the runner is boxed away in a scheduler.
#[derive(Debug, Clone, Default)]
pub struct Handle {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    record: Record,
    counts: BTreeMap<Call, u64>,
    faults: Vec<Fault>,
    lost: Option<&'static str>,
}

impl Handle {
    /// What has been called so far.
    pub fn record(&self) -> Record {
        self.lock().record.clone()
    }

    /// Adds a fault.
    pub fn fail(&self, fault: Fault) {
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
    pub(super) fn enter(&self, call: Call, seqs: &[SeqId]) -> Result<(), DeviceError> {
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
                    When::Nth(n) => nth == n,
                    When::From(n) => nth >= n,
                    When::Naming(seq) => seqs.contains(&seq),
                    When::Wider(most) => seqs.len() > most,
                }
        });
        match fault.map(|fault| fault.kind) {
            None => Ok(()),
            Some(FaultKind::NoRoom) => Err(DeviceError::NoRoom {
                what: "faked bytes",
                wanted: 2,
                free: 1,
            }),
            Some(FaultKind::Lost) => {
                shared.lost = Some(call.name());
                Err(lost(call.name()))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // A test that panicked while holding it has already failed.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lost(during: &'static str) -> DeviceError {
    DeviceError::Lost {
        during,
        detail: "as the script says".to_owned(),
    }
}
