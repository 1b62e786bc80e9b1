//! One pass over all ready sequences: draft, tree, verify, accept, commit.

use contract::{
    CommitItem, DeviceError, LogitsRequest, LogitsRow, NodeIdx, Runner, SeqId, TokenId, Tree,
    TreePath, VerifyItem,
};

use crate::accept::{Walk, walk};
use crate::sequence::{NodePlan, Sequence};
use crate::tree_build::{Root, Roots, TreeResult, TreeSource};
use crate::{Clock, DraftDepths, RoundTimes};

/// What became of one sequence.
pub(crate) enum Verdict {
    /// It has new tokens, already in its history. If it goes on, its path is committed.
    Went(Walk),
    /// There was no room for it this time; nothing has changed.
    Waits(DeviceError),
    /// It cannot go on.
    Fails(DeviceError),
}

/// What became of a round.
#[derive(Default)]
pub(crate) struct Outcome {
    /// One per sequence, in order.
    pub(crate) verdicts: Vec<Verdict>,
    /// Over all its sequences.
    pub(crate) counts: Counts,
    pub(crate) times: RoundTimes,
    /// Whether trees were wanted and there was no room to draft them.
    pub(crate) undrafted: bool,
}

/// What a round drafted, kept and forced.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) drafted: u64,
    pub(crate) accepted: u64,
    pub(crate) forced: u64,
    pub(crate) depths: DraftDepths,
}

/// One sequence's part in a verify call.
struct Item {
    seq: SeqId,
    tree: Tree,
    plans: Vec<NodePlan>,
    requests: Vec<LogitsRequest>,
}

impl Item {
    /// A sequence's tree, without what no walk can reach.
    fn new(sequence: &mut Sequence, tree: &Tree) -> Item {
        let (tree, plans) = sequence.reachable(tree);
        Item {
            seq: sequence.seq,
            requests: plans.iter().map(|plan| plan.ask.clone()).collect(),
            tree,
            plans,
        }
    }

    /// Nodes that a draft proposed: those that nothing forced.
    fn is_drafted(&self, node: NodeIdx) -> bool {
        let parent = self.tree.parent(node);
        parent.is_some_and(|parent| self.plans[parent.index()].forced.is_none())
    }
}

/// Takes every sequence of the batch one round further. Only a lost device is an error.
pub(crate) fn round(
    runner: &mut dyn Runner,
    source: &mut dyn TreeSource,
    batch: &mut [&mut Sequence],
    clock: Clock,
) -> Result<Outcome, DeviceError> {
    let start = clock();
    let (trees, undrafted) = match propose(runner, source, batch) {
        Ok(proposed) => proposed,
        Err(lost @ DeviceError::DeviceLost { .. }) => return Err(lost),
        Err(error) => {
            let all = batch.iter().map(|_| Verdict::Fails(again(&error)));
            return Ok(Outcome {
                verdicts: all.collect(),
                ..Outcome::default()
            });
        }
    };
    let pairs = batch.iter_mut().zip(&trees);
    let mut items: Vec<Item> = pairs.map(|(s, tree)| Item::new(s, tree)).collect();
    let drafted = clock();
    let answers = verify(runner, &mut items)?;
    let verified = clock();
    let mut verdicts = Vec::with_capacity(batch.len());
    for ((sequence, item), answer) in batch.iter().zip(&items).zip(answers) {
        verdicts.push(match answer {
            Ok(rows) => match walk(sequence, &item.tree, &item.plans, &rows) {
                Ok(walk) => Verdict::Went(walk),
                Err(error) => Verdict::Fails(error),
            },
            Err(error) if error.is_out_of_memory() => Verdict::Waits(error),
            Err(error) => Verdict::Fails(error),
        });
    }
    // A sequence that ends is about to be closed, which drops what is pending.
    let going: Vec<usize> = (0..batch.len())
        .filter(|i| matches!(&verdicts[*i], Verdict::Went(walk) if walk.ending.is_none()))
        .collect();
    let paths: Vec<(SeqId, &TreePath)> = going
        .iter()
        .filter_map(|i| match &verdicts[*i] {
            Verdict::Went(walk) => Some((batch[*i].seq, &walk.path)),
            Verdict::Waits(_) | Verdict::Fails(_) => None,
        })
        .collect();
    let chosen = clock();
    let committed = commit(runner, &paths)?;
    for (i, result) in going.into_iter().zip(committed) {
        if let Err(error) = result {
            verdicts[i] = Verdict::Fails(error);
        }
    }
    let mut outcome = Outcome {
        verdicts,
        undrafted,
        counts: Counts::default(),
        times: RoundTimes {
            draft: drafted - start,
            verify: verified - drafted,
            commit: clock() - chosen,
        },
    };
    let mut results = Vec::with_capacity(batch.len());
    for ((sequence, verdict), item) in batch.iter_mut().zip(&outcome.verdicts).zip(&items) {
        if let Verdict::Went(walk) = verdict {
            results.push(TreeResult {
                seq: item.seq,
                tokens: walk.tokens.len(),
            });
            settle(sequence, walk, item, &mut outcome.counts);
            sequence.stats.times.add(outcome.times);
        }
    }
    source.learn(&results, outcome.times);
    Ok(outcome)
}

/// Takes a walk into a sequence's history and into the counts.
fn settle(sequence: &mut Sequence, walk: &Walk, item: &Item, counts: &mut Counts) {
    sequence.push(&walk.tokens);
    sequence.doubt = walk.doubt;
    let drafted = item.tree.nodes().filter(|n| item.is_drafted(*n)).count();
    let path = walk.path.nodes().iter();
    let accepted = path.filter(|n| item.is_drafted(**n)).count();
    let stats = &mut sequence.stats;
    stats.rounds += 1;
    stats.drafted_tokens += drafted;
    stats.accepted_tokens += accepted;
    stats.forced_tokens += walk.forced;
    counts.drafted += drafted as u64;
    counts.accepted += accepted as u64;
    counts.forced += walk.forced as u64;
    if drafted > 0 {
        stats.depths.add(accepted);
        counts.depths.add(accepted);
    }
}

/// One tree per sequence, each with the right root, and whether there was no room to draft.
fn propose(
    runner: &mut dyn Runner,
    source: &mut dyn TreeSource,
    batch: &mut [&mut Sequence],
) -> Result<(Vec<Tree>, bool), DeviceError> {
    let widest = runner.info().limits.tree_nodes;
    let runs: Vec<Vec<TokenId>> = batch
        .iter_mut()
        .map(|sequence| sequence.forced_run(sequence.max_depth().min(widest - 1)))
        .collect();
    let roots: Vec<Root<'_>> = batch
        .iter()
        .zip(&runs)
        .map(|(sequence, forced)| Root {
            seq: sequence.seq,
            history: sequence.history.tokens(),
            max_depth: sequence.max_depth(),
            forced,
            speculate: sequence.speculate,
            doubt: sequence.doubt.nats(),
        })
        .collect();
    let trees = match source.trees(runner, &roots) {
        Ok(trees) => trees,
        Err(error) if error.is_out_of_memory() => return Ok((Roots.trees(runner, &roots)?, true)),
        Err(error) => return Err(error),
    };
    let fit = trees
        .iter()
        .zip(&roots)
        .filter(|(tree, root)| tree.tokens()[0] == root.token() && tree.len() <= widest);
    if trees.len() != roots.len() || fit.count() != roots.len() {
        return Err(DeviceError::InvalidCall {
            call: "trees",
            detail: format!("{} roots did not get trees of their own", roots.len()),
        });
    }
    Ok((trees, false))
}

type Answer = Result<Vec<LogitsRow>, DeviceError>;

/// Verifies all together; where that is refused, each alone; where that finds no room, its root alone.
fn verify(runner: &mut dyn Runner, items: &mut [Item]) -> Result<Vec<Answer>, DeviceError> {
    let calls: Vec<VerifyItem<'_>> = items
        .iter()
        .map(|item| VerifyItem {
            seq: item.seq,
            tree: &item.tree,
            requests: &item.requests,
        })
        .collect();
    match runner.verify(&calls) {
        Ok(rows) if rows.len() == items.len() => Ok(rows.into_iter().map(Ok).collect()),
        Ok(rows) => Ok(items
            .iter()
            .map(|_| {
                Err(DeviceError::InvalidCall {
                    call: "verify",
                    detail: format!("{} answers for {} items", rows.len(), items.len()),
                })
            })
            .collect()),
        Err(lost @ DeviceError::DeviceLost { .. }) => Err(lost),
        Err(error) => match items {
            [item] if item.tree.len() > 1 && error.is_out_of_memory() => {
                let window = item.tree.window();
                item.tree = Tree::root(item.tree.tokens()[0]).with_window(window);
                item.requests.truncate(1);
                item.plans.truncate(1);
                verify(runner, items)
            }
            [_] => Ok(vec![Err(error)]),
            _ => {
                let mut answers = Vec::with_capacity(items.len());
                for item in items.chunks_mut(1) {
                    answers.extend(verify(runner, item)?);
                }
                Ok(answers)
            }
        },
    }
}

/// Commits all together; where that is refused, each alone.
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

/// The same refusal for another sequence; device errors cannot be copied.
fn again(error: &DeviceError) -> DeviceError {
    DeviceError::InvalidCall {
        call: "draft",
        detail: error.to_string(),
    }
}
