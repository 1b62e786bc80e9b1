//! One pass over all ready sequences: draft, tree, verify, accept, commit.

use contract::{Ask, CommitItem, DeviceError, Path, Row, Runner, SeqId, Tree, VerifyItem};

use crate::accept::{Walk, walk};
use crate::sequence::Sequence;
use crate::tree_build::{Root, Roots, TreeSource};

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
pub(crate) struct Outcome {
    /// One per sequence, in order.
    pub(crate) verdicts: Vec<Verdict>,
    /// Whether trees were wanted and there was no room to draft them.
    pub(crate) undrafted: bool,
}

/// One sequence's part in a verify call.
struct Item {
    seq: SeqId,
    tree: Tree,
    asks: Vec<Ask>,
}

/// Takes every sequence of the batch one round further. Only a lost device is an error.
pub(crate) fn round(
    runner: &mut dyn Runner,
    source: &mut dyn TreeSource,
    batch: &mut [&mut Sequence],
) -> Result<Outcome, DeviceError> {
    let (trees, undrafted) = match propose(runner, source, batch) {
        Ok(proposed) => proposed,
        Err(lost @ DeviceError::Lost { .. }) => return Err(lost),
        Err(error) => {
            let all = batch.iter().map(|_| Verdict::Fails(again(&error)));
            return Ok(Outcome {
                verdicts: all.collect(),
                undrafted: false,
            });
        }
    };
    let mut items: Vec<Item> = batch
        .iter()
        .zip(trees)
        .map(|(sequence, tree)| Item {
            seq: sequence.seq,
            asks: sequence.asks(&tree),
            tree,
        })
        .collect();
    let answers = verify(runner, &mut items)?;
    let mut verdicts = Vec::with_capacity(batch.len());
    for ((sequence, item), answer) in batch.iter().zip(&items).zip(answers) {
        verdicts.push(match answer {
            Ok(rows) => match walk(sequence, &item.tree, &rows) {
                Ok(walk) => Verdict::Went(walk),
                Err(error) => Verdict::Fails(error),
            },
            Err(error @ DeviceError::NoRoom { .. }) => Verdict::Waits(error),
            Err(error) => Verdict::Fails(error),
        });
    }
    // A sequence that ends is about to be closed, which drops what is pending.
    let going: Vec<usize> = (0..batch.len())
        .filter(|i| matches!(&verdicts[*i], Verdict::Went(walk) if walk.ending.is_none()))
        .collect();
    let paths: Vec<(SeqId, &Path)> = going
        .iter()
        .filter_map(|i| match &verdicts[*i] {
            Verdict::Went(walk) => Some((batch[*i].seq, &walk.path)),
            Verdict::Waits(_) | Verdict::Fails(_) => None,
        })
        .collect();
    let committed = commit(runner, &paths)?;
    for (i, result) in going.into_iter().zip(committed) {
        if let Err(error) = result {
            verdicts[i] = Verdict::Fails(error);
        }
    }
    for ((sequence, verdict), item) in batch.iter_mut().zip(&verdicts).zip(&items) {
        if let Verdict::Went(walk) = verdict {
            sequence.push(&walk.tokens);
            sequence.stats.rounds += 1;
            sequence.stats.drafted_tokens += item.tree.len() - 1;
            sequence.stats.accepted_tokens += walk.path.len() - 1;
        }
    }
    Ok(Outcome {
        verdicts,
        undrafted,
    })
}

/// One tree per sequence, each with the right root, and whether there was no room to draft.
fn propose(
    runner: &mut dyn Runner,
    source: &mut dyn TreeSource,
    batch: &[&mut Sequence],
) -> Result<(Vec<Tree>, bool), DeviceError> {
    let roots: Vec<Root<'_>> = batch
        .iter()
        .map(|sequence| Root {
            seq: sequence.seq,
            history: sequence.history.tokens(),
            max_depth: sequence.max_depth(),
        })
        .collect();
    let trees = match source.trees(runner, &roots) {
        Ok(trees) => trees,
        Err(DeviceError::NoRoom { .. }) => return Ok((Roots.trees(runner, &roots)?, true)),
        Err(error) => return Err(error),
    };
    let widest = runner.info().limits.tree_nodes;
    let fit = trees
        .iter()
        .zip(&roots)
        .filter(|(tree, root)| tree.tokens()[0] == root.token() && tree.len() <= widest);
    if trees.len() != roots.len() || fit.count() != roots.len() {
        return Err(DeviceError::Misuse {
            call: "trees",
            detail: format!("{} roots did not get trees of their own", roots.len()),
        });
    }
    Ok((trees, false))
}

type Answer = Result<Vec<Row>, DeviceError>;

/// Verifies all together; where that is refused, each alone; where that finds no room, its root alone.
fn verify(runner: &mut dyn Runner, items: &mut [Item]) -> Result<Vec<Answer>, DeviceError> {
    let calls: Vec<VerifyItem<'_>> = items
        .iter()
        .map(|item| VerifyItem {
            seq: item.seq,
            tree: &item.tree,
            asks: &item.asks,
        })
        .collect();
    match runner.verify(&calls) {
        Ok(rows) if rows.len() == items.len() => Ok(rows.into_iter().map(Ok).collect()),
        Ok(rows) => Ok(items
            .iter()
            .map(|_| {
                Err(DeviceError::Misuse {
                    call: "verify",
                    detail: format!("{} answers for {} items", rows.len(), items.len()),
                })
            })
            .collect()),
        Err(lost @ DeviceError::Lost { .. }) => Err(lost),
        Err(error) => match items {
            [item] if item.tree.len() > 1 && matches!(error, DeviceError::NoRoom { .. }) => {
                item.tree = Tree::root(item.tree.tokens()[0]);
                item.asks.truncate(1);
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
    paths: &[(SeqId, &Path)],
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
        Err(lost @ DeviceError::Lost { .. }) => Err(lost),
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
    DeviceError::Misuse {
        call: "draft",
        detail: error.to_string(),
    }
}
