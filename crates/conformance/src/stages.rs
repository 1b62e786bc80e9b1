//! A model split into pipeline stages gives the bits of one device: logits, drafts and snapshots.
//! Split into shards of each layer, it gives the same values, summed in another order.

use contract::checked::CheckedRunner;
use contract::{
    Backend, CommitItem, DeviceError, DraftItem, LayerSplit, LoadConfig, LogitsRequest, LogitsRow,
    MtpDraftItem, NodeIdx, Runner, SeqId, SnapshotLocation, SplitBackend, SplitDevice, SplitMode,
    TokenId, Tree, TreeError, VerifyItem,
};

use crate::compare::{Precision, RowDifference, Tolerance, compare_rows};

/// Tokens of the short prompt; the long one takes two thirds of the context.
const SHORT_PROMPT: usize = 37;
/// Candidates of drafts.
const CANDIDATES: usize = 5;
/// Names of the calls of each step.
const STEPS: [(&str, &str); 3] = [
    ("draft of step 0", "verify of step 0"),
    ("draft of step 1", "verify of step 1"),
    ("draft of step 2", "verify of step 2"),
];

/// Why stages are not one device.
#[derive(Debug, thiserror::Error)]
pub enum StageFailure {
    /// A call returned an error.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An invalid tree.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A row of logits is further off than it may be.
    #[error("{what}: {difference}")]
    Row {
        /// The call.
        what: &'static str,
        /// What differs.
        difference: RowDifference,
    },
    /// A result differs.
    #[error("{what}: {found} with stages, {expected} on one device")]
    Differs {
        /// The call.
        what: &'static str,
        /// The result of stages.
        found: String,
        /// The result of one device.
        expected: String,
    },
}

/// Results by call, and an exported snapshot.
struct StageRun {
    results: Vec<(&'static str, String)>,
    /// Whole rows of logits, by call.
    rows: Vec<(&'static str, LogitsRow)>,
    snapshot: Vec<u8>,
}

/// Devices that share the layers by memory, all of them the same.
pub fn split(n: usize, device: impl Fn() -> Box<dyn Backend>) -> SplitBackend {
    split_by(LayerSplit::ByMemory, n, device)
}

/// The same with another rule.
pub fn split_by(
    split: LayerSplit,
    n: usize,
    device: impl Fn() -> Box<dyn Backend>,
) -> SplitBackend {
    of_devices(split, (0..n).map(|_| device()))
}

/// The same with these devices, `device 0` first.
pub fn of_devices(
    split: LayerSplit,
    devices: impl Iterator<Item = Box<dyn Backend>>,
) -> SplitBackend {
    let devices = devices.enumerate().map(|(i, backend)| SplitDevice {
        id: format!("device {i}"),
        backend,
        usable_bytes: 1 << 50,
    });
    let devices: Vec<SplitDevice> = devices.collect();
    let n = devices.len();
    SplitBackend::new(devices, (n, split), None)
}

/// Devices that share each layer.
pub fn shards(devices: impl Iterator<Item = Box<dyn Backend>>) -> SplitBackend {
    of_devices(LayerSplit::ByMemory, devices).with_split_mode(SplitMode::Tensor)
}

/// The same with drafts on the last device, or on the first beside its layers.
pub fn with_draft_apart(devices: Vec<Box<dyn Backend>>, draft: DraftDevice) -> SplitBackend {
    let n = devices.len();
    let devices = devices
        .into_iter()
        .enumerate()
        .map(|(i, backend)| SplitDevice {
            id: format!("device {i}"),
            backend,
            usable_bytes: 1 << 50,
        });
    let (n_targets, draft) = match draft {
        DraftDevice::Own => (n - 1, n - 1),
        DraftDevice::First => (n, 0),
    };
    SplitBackend::new(
        devices.collect(),
        (n_targets, LayerSplit::ByMemory),
        Some(draft),
    )
}

/// Where drafts run, apart from the LM head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftDevice {
    /// On the last device, which has no layers.
    Own,
    /// On the first device, beside its layers.
    First,
}

/// Compares `stages` with `one` device: prompts, trees of two sequences in one call and in turn,
/// commits, discards and drafts; snapshots in bytes, and saved by either and restored by the other.
///
/// # Errors
/// The first difference.
pub fn compare(
    one: &dyn Backend,
    stages: &dyn Backend,
    config: &LoadConfig,
) -> Result<(), StageFailure> {
    let open = |backend: &dyn Backend| backend.open(config.clone(), &mut |_| {});
    let (mut one, mut stages) = (open(one)?, open(stages)?);
    let (expected, found) = (outcome(&mut *one)?, outcome(&mut *stages)?);
    require_same(&found.results, &expected.results)?;
    if found.snapshot != expected.snapshot {
        let bytes = |outcome: &StageRun| format!("{} bytes", outcome.snapshot.len());
        return Err(StageFailure::Differs {
            what: "an exported snapshot",
            found: bytes(&found),
            expected: bytes(&expected),
        });
    }
    let restored = |runner: &mut dyn Runner, from: &StageRun| -> Result<_, StageFailure> {
        Ok(restored(runner, &from.snapshot)?.0)
    };
    let expected = restored(&mut *one, &found)?;
    require_same(&restored(&mut *stages, &found)?, &expected)
}

/// Compares `shards` with `one` device up to a tolerance: the logits of prompts and of trees, those
/// behind a snapshot saved by either and restored by the other, and how snapshots are laid out.
/// Bytes that shards export and import again are the same.
///
/// # Errors
/// The first difference.
pub fn compare_within(
    one: &dyn Backend,
    shards: &dyn Backend,
    config: &LoadConfig,
    tolerance: Tolerance,
) -> Result<(), StageFailure> {
    let open = |backend: &dyn Backend| backend.open(config.clone(), &mut |_| {});
    let (mut one, mut shards) = (open(one)?, open(shards)?);
    let (expected, found) = (outcome(&mut *one)?, outcome(&mut *shards)?);
    require_close(&found.rows, &expected.rows, tolerance)?;
    let length = |run: &StageRun| vec![("bytes of a snapshot", format!("{}", run.snapshot.len()))];
    require_same(&length(&found), &length(&expected))?;
    for run in [&found, &expected] {
        let (expected, rows) = restored(&mut *one, &run.snapshot)?;
        let (found, found_rows) = restored(&mut *shards, &run.snapshot)?;
        require_close(&found_rows, &rows, tolerance)?;
        let again = |mut all: Vec<(&'static str, String)>| all.split_off(all.len() - 1);
        require_same(&again(found), &again(expected))?;
    }
    Ok(())
}

fn require_close(
    found: &[(&'static str, LogitsRow)],
    expected: &[(&'static str, LogitsRow)],
    tolerance: Tolerance,
) -> Result<(), StageFailure> {
    let precision = Precision::Within(tolerance);
    for ((what, found), (_, expected)) in found.iter().zip(expected) {
        compare_rows(found, expected, precision)
            .map_err(|difference| StageFailure::Row { what, difference })?;
    }
    Ok(())
}

/// Compares the logits alone: drafts that run on a device of another kind are rounded otherwise.
///
/// # Errors
/// The first difference.
pub fn compare_logits(
    one: &dyn Backend,
    stages: &dyn Backend,
    config: &LoadConfig,
) -> Result<(), StageFailure> {
    let open = |backend: &dyn Backend| backend.open(config.clone(), &mut |_| {});
    let logits = |mut runner: Box<dyn Runner>| -> Result<_, StageFailure> {
        let mut results = outcome(&mut *runner)?.results;
        results.retain(|(what, _)| !what.starts_with("draft"));
        Ok(results)
    };
    require_same(&logits(open(stages)?)?, &logits(open(one)?)?)
}

fn require_same(
    found: &[(&'static str, String)],
    expected: &[(&'static str, String)],
) -> Result<(), StageFailure> {
    for ((what, found), (_, expected)) in found.iter().zip(expected) {
        if found != expected {
            return Err(StageFailure::Differs {
                what,
                found: found.clone(),
                expected: expected.clone(),
            });
        }
    }
    Ok(())
}

/// `n` tokens; another `salt` gives other tokens.
fn text(runner: &dyn Runner, n: usize, salt: usize) -> Vec<TokenId> {
    let vocab = runner.info().vocab;
    let ids = (0..n).map(|i| (i * i + (7 + salt) * i + 31 * salt + 5) % vocab);
    ids.map(|id| TokenId(id as u32)).collect()
}

/// A root, two children and a child of each.
fn branches(tokens: &[TokenId]) -> Result<(Tree, NodeIdx), TreeError> {
    let mut tree = Tree::root(tokens[0]);
    let [left, right] = [tokens[1], tokens[2]].map(|token| tree.push(NodeIdx::ROOT, token));
    tree.push(left?, tokens[3])?;
    let leaf = tree.push(right?, tokens[4])?;
    Ok((tree, leaf))
}

/// Runs the calls on a runner without sequences.
fn outcome(runner: &mut dyn Runner) -> Result<StageRun, StageFailure> {
    let mut runner = CheckedRunner::new(Forward(runner));
    let (mut results, mut whole_rows) = (Vec::new(), Vec::new());
    let context = runner.info().limits.context;
    let vocab = runner.info().vocab;
    let mut keep = |what, rows: &[LogitsRow]| {
        let whole = rows.iter().filter(|row| row.ids.len() == vocab);
        whole_rows.extend(whole.map(|row| (what, row.clone())));
    };
    let mut seqs = [SeqId(0); 2];
    for (i, seq) in seqs.iter_mut().enumerate() {
        *seq = runner.open(context)?;
        let n = [2 * context / 3, SHORT_PROMPT][i];
        let prompt = text(&runner, n, i);
        let chunks = prompt.chunks(runner.info().limits.prefill_chunk);
        let last = chunks.len() - 1;
        for (chunk, tokens) in chunks.enumerate() {
            // Only the last chunk is waited for.
            let asked = [
                (3, LogitsRequest::top_k(4)),
                (tokens.len() - 1, LogitsRequest::full()),
            ];
            let asked = if chunk == last { &asked[..] } else { &[] };
            let rows = runner.prefill(*seq, tokens, asked)?;
            keep("prefill", &rows);
            results.push(("prefill", format!("{rows:?}")));
        }
    }
    for (step, (draft, verify)) in STEPS.into_iter().enumerate() {
        results.push((draft, drafted(&mut runner, &seqs)?));
        let tokens = [0, 1].map(|i| text(&runner, 5, 40 + step + i));
        let (a, leaf) = branches(&tokens[0])?;
        let b = Tree::chain(&tokens[1][..3])?;
        let requests = vec![LogitsRequest::full(); a.len().max(b.len())];
        let [first, second] = [(&a, seqs[0]), (&b, seqs[1])].map(|(tree, seq)| VerifyItem {
            seq,
            tree,
            requests: &requests[..tree.len()],
        });
        let items = [first, second];
        // A refused call has changed nothing in any stage.
        let rows = match runner.verify(&items) {
            Err(error) if error.is_refusal() => runner.verify(&items),
            done => done,
        };
        let rows = rows?;
        keep(verify, &rows.concat());
        results.push((verify, format!("{rows:?}")));
        let (path, other) = (a.path_to(leaf), b.path_to(NodeIdx(1)));
        let commit = |seq, path| CommitItem { seq, path };
        if step == 1 {
            runner.commit(&[commit(seqs[0], &path)])?;
            runner.discard(seqs[1])?;
        } else {
            runner.commit(&[commit(seqs[0], &path), commit(seqs[1], &other)])?;
        }
    }
    results.append(&mut in_turn(&mut runner, seqs)?);
    let saved = runner.snapshot(seqs[0], SnapshotLocation::Host)?;
    results.push(("snapshot", format!("{}", saved.position)));
    let mut snapshot = Vec::new();
    runner.export(saved.id, &mut snapshot)?;
    let rows = probe(&mut runner, seqs[0])?;
    keep("after a snapshot", &rows);
    results.push(("after a snapshot", format!("{rows:?}")));
    for seq in seqs {
        runner.close(seq);
    }
    runner.free_snapshot(saved.id);
    Ok(StageRun {
        results,
        rows: whole_rows,
        snapshot,
    })
}

/// Two sequences in turn: one drafts and its verify begins before that of the other ends. A runner
/// that cannot begin verifies where the rows are due.
fn in_turn(
    runner: &mut dyn Runner,
    seqs: [SeqId; 2],
) -> Result<Vec<(&'static str, String)>, StageFailure> {
    const TURNS: usize = 4;
    let begins = runner.info().begins_verify;
    let mut results = Vec::new();
    let mut begun: Option<(SeqId, Tree, Vec<LogitsRequest>)> = None;
    for turn in 0..=TURNS {
        let mut next = None;
        if turn < TURNS {
            let seq = seqs[turn % 2];
            results.push(("draft in turn", drafted(runner, &[seq])?));
            let tree = Tree::chain(&text(runner, 3 + turn % 2, 70 + turn))?;
            let requests = vec![LogitsRequest::full(); tree.len()];
            if begins {
                runner.begin_verify(&[VerifyItem {
                    seq,
                    tree: &tree,
                    requests: &requests,
                }])?;
            }
            next = Some((seq, tree, requests));
        }
        if let Some((seq, tree, requests)) = begun.take() {
            let rows = if begins {
                runner.finish_verify()?
            } else {
                runner.verify(&[VerifyItem {
                    seq,
                    tree: &tree,
                    requests: &requests,
                }])?
            };
            results.push(("verify in turn", format!("{rows:?}")));
            let path = tree.path_to(NodeIdx(1));
            runner.commit(&[CommitItem { seq, path: &path }])?;
        }
        begun = next;
    }
    Ok(results)
}

/// Results and rows.
type Restored = (Vec<(&'static str, String)>, Vec<(&'static str, LogitsRow)>);

/// What follows from a snapshot's bytes.
fn restored(runner: &mut dyn Runner, snapshot: &[u8]) -> Result<Restored, StageFailure> {
    let mut runner = CheckedRunner::new(Forward(runner));
    let saved = runner.import(&mut &*snapshot)?;
    let seq = runner.open(runner.info().limits.context)?;
    runner.restore(seq, saved.id)?;
    let mut again = Vec::new();
    runner.export(saved.id, &mut again)?;
    let drafts = drafted(&mut runner, &[seq])?;
    let rows = probe(&mut runner, seq)?;
    let results = vec![
        ("draft after a restore", drafts),
        ("verify after a restore", format!("{rows:?}")),
        ("bytes saved again", format!("{}", again == snapshot)),
    ];
    runner.close(seq);
    runner.free_snapshot(saved.id);
    let rows = rows.into_iter();
    let rows = rows.map(|row| ("verify after a restore", row));
    Ok((results, rows.collect()))
}

/// The rows of one more token.
fn probe(runner: &mut dyn Runner, seq: SeqId) -> Result<Vec<LogitsRow>, StageFailure> {
    let tree = Tree::root(text(runner, 1, 90)[0]);
    let requests = [LogitsRequest::full()];
    let item = VerifyItem {
        seq,
        tree: &tree,
        requests: &requests,
    };
    let rows = runner.verify(&[item])?;
    runner.discard(seq)?;
    Ok(rows.concat())
}

/// The candidates of whatever drafts there are.
fn drafted(runner: &mut dyn Runner, seqs: &[SeqId]) -> Result<String, StageFailure> {
    let mut all = Vec::new();
    let root = text(runner, 1, 60)[0];
    if let Some(depth) = runner.info().draft_depth {
        let items: Vec<DraftItem> = seqs
            .iter()
            .map(|seq| DraftItem { seq: *seq, root })
            .collect();
        all.extend(runner.draft(&items, depth, CANDIDATES)?);
    }
    if runner.info().mtp.is_some() {
        let items = seqs.iter().map(|seq| MtpDraftItem {
            seq: *seq,
            parent: None,
            token: root,
        });
        let items: Vec<MtpDraftItem> = items.collect();
        all.extend(runner.draft_mtp(&items, CANDIDATES)?);
    }
    Ok(format!("{all:?}"))
}

/// A borrowed runner as a runner.
struct Forward<'a>(&'a mut dyn Runner);

impl Runner for Forward<'_> {
    contract::forward_runner!(self => self.0; info, capacity, open, close, prefill, draft,
        draft_logits, draft_mtp, verify, begin_verify, finish_verify, commit, discard, snapshot,
        restore, free_snapshot, detach, export, import, import_at);
}
