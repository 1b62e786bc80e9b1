//! A model split into pipeline stages gives the bits of one device: logits, drafts and snapshots.

use contract::checked::CheckedRunner;
use contract::{
    Backend, CommitItem, DeviceError, DraftItem, LayerSplit, LoadConfig, LogitsRequest,
    MtpDraftItem, NodeIdx, Runner, SeqId, SnapshotLocation, SplitBackend, SplitDevice, TokenId,
    Tree, TreeError, VerifyItem,
};

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

/// Compares `stages` with `one` device: prompts, trees of two sequences in one call, commits,
/// discards and drafts; snapshots in bytes, and saved by either and restored by the other.
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
    let restored = |runner: &mut dyn Runner, from: &StageRun| restored(runner, &from.snapshot);
    let expected = restored(&mut *one, &found)?;
    require_same(&restored(&mut *stages, &found)?, &expected)
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
    let mut results = Vec::new();
    let context = runner.info().limits.context;
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
        results.push((verify, format!("{:?}", rows?)));
        let (path, other) = (a.path_to(leaf), b.path_to(NodeIdx(1)));
        let commit = |seq, path| CommitItem { seq, path };
        if step == 1 {
            runner.commit(&[commit(seqs[0], &path)])?;
            runner.discard(seqs[1])?;
        } else {
            runner.commit(&[commit(seqs[0], &path), commit(seqs[1], &other)])?;
        }
    }
    let saved = runner.snapshot(seqs[0], SnapshotLocation::Host)?;
    results.push(("snapshot", format!("{}", saved.position)));
    let mut snapshot = Vec::new();
    runner.export(saved.id, &mut snapshot)?;
    results.push(("after a snapshot", probe(&mut runner, seqs[0])?));
    for seq in seqs {
        runner.close(seq);
    }
    runner.free_snapshot(saved.id);
    Ok(StageRun { results, snapshot })
}

/// What follows from a snapshot's bytes.
fn restored(
    runner: &mut dyn Runner,
    snapshot: &[u8],
) -> Result<Vec<(&'static str, String)>, StageFailure> {
    let mut runner = CheckedRunner::new(Forward(runner));
    let saved = runner.import(&mut &*snapshot)?;
    let seq = runner.open(runner.info().limits.context)?;
    runner.restore(seq, saved.id)?;
    let mut again = Vec::new();
    runner.export(saved.id, &mut again)?;
    let results = vec![
        ("draft after a restore", drafted(&mut runner, &[seq])?),
        ("verify after a restore", probe(&mut runner, seq)?),
        ("bytes saved again", format!("{}", again == snapshot)),
    ];
    runner.close(seq);
    runner.free_snapshot(saved.id);
    Ok(results)
}

/// The rows of one more token.
fn probe(runner: &mut dyn Runner, seq: SeqId) -> Result<String, StageFailure> {
    let tree = Tree::root(text(runner, 1, 90)[0]);
    let requests = [LogitsRequest::full()];
    let item = VerifyItem {
        seq,
        tree: &tree,
        requests: &requests,
    };
    let rows = runner.verify(&[item])?;
    runner.discard(seq)?;
    Ok(format!("{rows:?}"))
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
        draft_logits, draft_mtp, verify, commit, discard, snapshot, restore, free_snapshot, detach,
        export, import, import_at);
}
