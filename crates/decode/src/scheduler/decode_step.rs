//! One decode step over all ready sequences: draft, build trees, verify, accept, commit.

use std::time::Duration;

use contract::{
    CommitItem, DeviceError, LogitsRequest, LogitsRow, NodeIdx, Runner, SeqId, TokenId, Tree,
    TreePath, VerifyItem,
};

use super::accept::{AcceptResult, accept};
use super::sequence::{NodeRequest, Sequence};
use crate::speculation::Clock;
use crate::speculation::{NoDraft, ProposedTree, SourceSet, TreeProposer, TreeRequest, TreeResult};
use crate::stats::{AcceptanceByDepth, StepTimes, TokensBySource};

/// The outcome of one sequence.
pub(super) enum SequenceOutcome {
    /// It has new tokens, already in its history. Unless it ends, its path is committed.
    Advanced(AcceptResult),
    /// The device ran out of memory; nothing has changed.
    OutOfMemory(DeviceError),
    /// It failed.
    Failed(DeviceError),
}

impl SequenceOutcome {
    /// Whether the sequence has new tokens and does not end with them.
    fn continues(&self) -> bool {
        matches!(self, SequenceOutcome::Advanced(result) if result.finish_reason.is_none())
    }
}

/// The result of a decode step.
#[derive(Default)]
pub(super) struct DecodeStepResult {
    /// One per sequence, in order.
    pub(super) outcomes: Vec<SequenceOutcome>,
    /// Over all sequences.
    pub(super) counts: StepCounts,
    pub(super) times: StepTimes,
    /// Expected tokens of the step, if they are known.
    pub(super) expected_tokens: Option<f64>,
    /// Whether the draft ran out of memory, so that only roots were verified.
    pub(super) draft_out_of_memory: bool,
}

/// Token counts of a step.
#[derive(Default)]
pub(super) struct StepCounts {
    pub(super) drafted: u64,
    pub(super) accepted: u64,
    pub(super) by_source: TokensBySource,
    pub(super) forced: u64,
    pub(super) depths: AcceptanceByDepth,
}

/// One sequence's part of a verify call.
struct VerifyEntry {
    seq: SeqId,
    tree: Tree,
    /// `[n_nodes]`: the sources that proposed each node.
    sources: Vec<SourceSet>,
    node_requests: Vec<NodeRequest>,
    requests: Vec<LogitsRequest>,
}

impl VerifyEntry {
    /// The reachable part of a sequence's tree.
    fn new(sequence: &mut Sequence, proposed: &ProposedTree) -> VerifyEntry {
        let (ProposedTree { tree, sources }, node_requests) = sequence.reachable(proposed);
        VerifyEntry {
            seq: sequence.seq,
            requests: node_requests
                .iter()
                .map(|node| node.request.clone())
                .collect(),
            tree,
            sources,
            node_requests,
        }
    }

    /// Whether the draft proposed a node, rather than a constraint.
    fn is_drafted(&self, node: NodeIdx) -> bool {
        let parent = self.tree.parent(node);
        parent.is_some_and(|parent| self.node_requests[parent.index()].forced.is_none())
    }
}

/// Trees that were proposed, and whose verify may have begun.
pub(super) struct ProposedStep {
    items: Vec<VerifyEntry>,
    draft_out_of_memory: bool,
    /// Expected tokens of all trees, if they are known.
    expected_tokens: Option<f64>,
    draft: Duration,
    /// Whether the runner has begun to verify them, beside other work.
    has_begun: bool,
}

impl ProposedStep {
    /// The sequences of its trees.
    pub(super) fn seqs(&self) -> impl Iterator<Item = SeqId> + Clone {
        self.items.iter().map(|item| item.seq)
    }

    /// Drops the trees of other sequences; their verify must not have begun.
    pub(super) fn retain(&mut self, keep: impl Fn(SeqId) -> bool) {
        self.items.retain(|item| keep(item.seq));
    }

    /// Whether the runner has begun to verify its trees.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Has the runner begin to verify the trees. Where it refuses, they are verified later, in one
    /// call.
    pub(super) fn begin(&mut self, runner: &mut dyn Runner) -> Result<(), DeviceError> {
        match runner.begin_verify(&calls(&self.items)) {
            Ok(()) => self.has_begun = true,
            Err(lost @ DeviceError::DeviceLost { .. }) => return Err(lost),
            Err(error) => tracing::debug!(%error, "verify could not begin"),
        }
        Ok(())
    }
}

/// Runs one decode step over the batch. The only error is a lost device.
pub(super) fn decode_step(
    runner: &mut dyn Runner,
    proposer: &mut dyn TreeProposer,
    batch: &mut [&mut Sequence],
    clock: Clock,
) -> Result<DecodeStepResult, DeviceError> {
    match propose_step(runner, proposer, batch, clock)? {
        Ok(mut proposed) => {
            let begun = clock();
            let rows = verify(runner, &mut proposed.items)?;
            let batch = batch.iter_mut().map(|sequence| Some(&mut **sequence));
            accept_step(
                runner,
                proposer,
                batch.collect(),
                (proposed, rows, begun),
                clock,
            )
        }
        Err(failed) => Ok(failed),
    }
}

/// Proposes a tree for each sequence of the batch, or fails all of them. The only error is a lost
/// device.
pub(super) fn propose_step(
    runner: &mut dyn Runner,
    proposer: &mut dyn TreeProposer,
    batch: &mut [&mut Sequence],
    clock: Clock,
) -> Result<Result<ProposedStep, DecodeStepResult>, DeviceError> {
    let start = clock();
    let (trees, draft_out_of_memory) = match propose_trees(runner, proposer, batch) {
        Ok(proposed) => proposed,
        Err(lost @ DeviceError::DeviceLost { .. }) => return Err(lost),
        Err(error) => {
            proposer.observe(&[], StepTimes::default());
            let all = batch.iter().map(|_| SequenceOutcome::Failed(error.clone()));
            return Ok(Err(DecodeStepResult {
                outcomes: all.collect(),
                ..DecodeStepResult::default()
            }));
        }
    };
    let pairs = batch.iter_mut().zip(&trees);
    Ok(Ok(ProposedStep {
        items: pairs.map(|(s, tree)| VerifyEntry::new(s, tree)).collect(),
        draft_out_of_memory,
        expected_tokens: proposer.expected_tokens(),
        draft: clock() - start,
        has_begun: false,
    }))
}

/// Waits for the rows of trees whose verify has begun; `None` where the call failed, and the trees
/// are to be verified again. The only error is a lost device.
pub(super) fn finish_verify(
    runner: &mut dyn Runner,
    proposed: &ProposedStep,
) -> Result<Option<Vec<VerifyResult>>, DeviceError> {
    match runner.finish_verify() {
        Ok(rows) => Ok(Some(one_per_item(rows, &proposed.items))),
        Err(lost @ DeviceError::DeviceLost { .. }) => Err(lost),
        Err(error) => {
            tracing::debug!(%error, "a verify that had begun failed");
            Ok(None)
        }
    }
}

/// Verifies proposed trees at once, while no verify has begun.
pub(super) fn verify_step(
    runner: &mut dyn Runner,
    proposed: &mut ProposedStep,
) -> Result<Vec<VerifyResult>, DeviceError> {
    verify(runner, &mut proposed.items)
}

/// Ends a step whose trees are verified: accepts tokens and commits paths.
///
/// `batch` has the sequence of each tree, `None` where it has ended meanwhile; outcomes are those
/// of the others. The only error is a lost device.
pub(super) fn accept_step(
    runner: &mut dyn Runner,
    proposer: &mut dyn TreeProposer,
    batch: Vec<Option<&mut Sequence>>,
    (proposed, rows, begun): (ProposedStep, Vec<VerifyResult>, Duration),
    clock: Clock,
) -> Result<DecodeStepResult, DeviceError> {
    let verified = clock();
    let entries = batch.into_iter().zip(proposed.items).zip(rows);
    let entries = entries.filter_map(|((sequence, item), rows)| Some((sequence?, item, rows)));
    let (mut outcomes, mut batch) = (Vec::new(), Vec::new());
    for (sequence, item, rows) in entries {
        outcomes.push(match rows {
            Ok(rows) => match accept(sequence, &item.tree, &item.node_requests, &rows) {
                Ok(result) => SequenceOutcome::Advanced(result),
                Err(error) => SequenceOutcome::Failed(error),
            },
            Err(error) if error.is_out_of_memory() => SequenceOutcome::OutOfMemory(error),
            Err(error) => SequenceOutcome::Failed(error),
        });
        batch.push((sequence, item));
    }
    // Sequences that end are closed next, which drops their pending nodes.
    let continuing: Vec<usize> = (0..batch.len())
        .filter(|i| outcomes[*i].continues())
        .collect();
    let paths: Vec<(SeqId, &TreePath)> = continuing
        .iter()
        .filter_map(|i| match &outcomes[*i] {
            SequenceOutcome::Advanced(result) => Some((batch[*i].0.seq, &result.path)),
            SequenceOutcome::OutOfMemory(_) | SequenceOutcome::Failed(_) => None,
        })
        .collect();
    let chosen = clock();
    let committed = commit(runner, &paths)?;
    for (i, result) in continuing.into_iter().zip(committed) {
        if let Err(error) = result {
            outcomes[i] = SequenceOutcome::Failed(error);
        }
    }
    let mut step = DecodeStepResult {
        outcomes,
        draft_out_of_memory: proposed.draft_out_of_memory,
        expected_tokens: proposed.expected_tokens,
        counts: StepCounts::default(),
        times: StepTimes {
            draft: proposed.draft,
            verify: verified - begun,
            commit: clock() - chosen,
        },
    };
    for ((sequence, item), outcome) in batch.iter_mut().zip(&step.outcomes) {
        if let SequenceOutcome::Advanced(result) = outcome {
            record(sequence, result, item, &mut step.counts);
            sequence.stats.times.add(step.times);
        }
    }
    let mut results = Vec::with_capacity(batch.len());
    for ((sequence, _), outcome) in batch.iter().zip(&step.outcomes) {
        if let SequenceOutcome::Advanced(result) = outcome {
            let history = sequence.history.tokens();
            results.push(TreeResult {
                seq: sequence.seq,
                tokens: &history[history.len() - result.tokens.len()..],
            });
        }
    }
    // Beside other work, a pass takes other times than alone.
    let alone = !proposed.has_begun;
    let times = if alone {
        step.times
    } else {
        StepTimes::default()
    };
    proposer.observe(&results, times);
    Ok(step)
}

/// Records accepted tokens in the sequence's history and in the counts.
fn record(
    sequence: &mut Sequence,
    result: &AcceptResult,
    item: &VerifyEntry,
    counts: &mut StepCounts,
) {
    sequence.push(&result.tokens);
    sequence.surprisal = result.surprisal;
    let mut by_source = TokensBySource::default();
    let (mut drafted, mut accepted) = (0, 0);
    for node in item.tree.nodes().filter(|node| item.is_drafted(*node)) {
        drafted += 1;
        by_source.add_drafted(item.sources[node.index()]);
    }
    let path = result.path.nodes().iter();
    for node in path.filter(|node| item.is_drafted(**node)) {
        accepted += 1;
        by_source.add_accepted(item.sources[node.index()]);
    }
    let stats = &mut sequence.stats;
    stats.decode_steps += 1;
    stats.drafted_tokens += drafted;
    stats.accepted_tokens += accepted;
    stats.by_source.add(by_source);
    stats.forced_tokens += result.forced;
    counts.drafted += drafted as u64;
    counts.accepted += accepted as u64;
    counts.by_source.add(by_source);
    counts.forced += result.forced as u64;
    if drafted > 0 {
        stats.depths.add(accepted);
        counts.depths.add(accepted);
    }
}

/// One tree per sequence, each with its root, and whether the draft ran out of memory.
fn propose_trees(
    runner: &mut dyn Runner,
    proposer: &mut dyn TreeProposer,
    batch: &mut [&mut Sequence],
) -> Result<(Vec<ProposedTree>, bool), DeviceError> {
    let max_nodes = runner.info().limits.tree_nodes;
    let forced_runs: Vec<Vec<TokenId>> = batch
        .iter_mut()
        .map(|sequence| sequence.forced_run(sequence.max_depth().min(max_nodes - 1)))
        .collect();
    let roots: Vec<TreeRequest<'_>> = batch
        .iter()
        .zip(&forced_runs)
        .map(|(sequence, forced)| TreeRequest {
            seq: sequence.seq,
            history: sequence.history.tokens(),
            max_depth: sequence.max_depth(),
            forced,
            speculate: sequence.speculate,
            surprisal: sequence.surprisal.nats(),
        })
        .collect();
    let trees = match proposer.propose(runner, &roots) {
        Ok(trees) => trees,
        Err(error) if error.is_out_of_memory() => {
            return Ok((NoDraft.propose(runner, &roots)?, true));
        }
        Err(error) => return Err(error),
    };
    let fit = trees.iter().zip(&roots).filter(|(proposed, root)| {
        let tree = &proposed.tree;
        tree.tokens()[0] == root.token() && tree.len() <= max_nodes
    });
    if trees.len() != roots.len() || fit.count() != roots.len() {
        return Err(DeviceError::InvalidCall {
            call: "trees",
            detail: format!("{} roots did not get trees of their own", roots.len()),
        });
    }
    Ok((trees, false))
}

/// The rows of one tree.
pub(super) type VerifyResult = Result<Vec<LogitsRow>, DeviceError>;

/// The items of a verify call.
fn calls(items: &[VerifyEntry]) -> Vec<VerifyItem<'_>> {
    let calls = items.iter().map(|item| VerifyItem {
        seq: item.seq,
        tree: &item.tree,
        requests: &item.requests,
    });
    calls.collect()
}

/// The result of each item of a call that succeeded.
fn one_per_item(rows: Vec<Vec<LogitsRow>>, items: &[VerifyEntry]) -> Vec<VerifyResult> {
    if rows.len() == items.len() {
        return rows.into_iter().map(Ok).collect();
    }
    let error = DeviceError::InvalidCall {
        call: "verify",
        detail: format!("{} results for {} items", rows.len(), items.len()),
    };
    items.iter().map(|_| Err(error.clone())).collect()
}

/// Verifies all together. If that fails, each alone. If that runs out of memory, its root alone.
fn verify(
    runner: &mut dyn Runner,
    items: &mut [VerifyEntry],
) -> Result<Vec<VerifyResult>, DeviceError> {
    if items.is_empty() {
        return Ok(Vec::new());
    }
    match runner.verify(&calls(items)) {
        Ok(rows) => Ok(one_per_item(rows, items)),
        Err(lost @ DeviceError::DeviceLost { .. }) => Err(lost),
        Err(error) => match items {
            [item] if item.tree.len() > 1 && error.is_out_of_memory() => {
                let window = item.tree.window();
                item.tree = Tree::root(item.tree.tokens()[0]).with_window(window);
                item.sources.truncate(1);
                item.requests.truncate(1);
                item.node_requests.truncate(1);
                verify(runner, items)
            }
            [_] => Ok(vec![Err(error)]),
            _ => {
                let mut verified_rows = Vec::with_capacity(items.len());
                for item in items.chunks_mut(1) {
                    verified_rows.extend(verify(runner, item)?);
                }
                Ok(verified_rows)
            }
        },
    }
}

/// Commits all together. If that fails, each alone.
fn commit(
    runner: &mut dyn Runner,
    paths: &[(SeqId, &TreePath)],
) -> Result<Vec<Result<(), DeviceError>>, DeviceError> {
    if paths.is_empty() {
        return Ok(Vec::new());
    }
    let calls: Vec<CommitItem<'_>> = paths
        .iter()
        .map(|(seq, path)| CommitItem { seq: *seq, path })
        .collect();
    match runner.commit(&calls) {
        Ok(()) => Ok(paths.iter().map(|_| Ok(())).collect()),
        Err(lost @ DeviceError::DeviceLost { .. }) => Err(lost),
        Err(error) if paths.len() == 1 => Ok(vec![Err(error)]),
        Err(_) => {
            let mut results = Vec::with_capacity(paths.len());
            for path in paths.chunks(1) {
                results.extend(commit(runner, path)?);
            }
            Ok(results)
        }
    }
}
