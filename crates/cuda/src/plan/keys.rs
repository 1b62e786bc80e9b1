//! Which plans are built: those that the limits can call for, and no others.

use std::collections::BTreeSet;

use contract::Limits;

use super::select::Depth;
use super::{PlanKey, short_prefill};
use crate::step::{self, BUCKETS, ROWS, TREES};

/// Padded lengths that plans of chunks of more than [`ROWS`] rows are built for; the longest is the
/// limit itself.
const CHUNK_BUCKETS: [usize; 3] = [256, 1024, 4096];

pub(super) fn chunk_buckets(limit: usize, short: bool) -> impl Iterator<Item = usize> {
    let few: &[usize] = if short {
        &short_prefill::BUCKETS
    } else {
        &[ROWS]
    };
    let all = few.iter().copied().chain(CHUNK_BUCKETS);
    all.filter(move |b| *b < limit).chain([limit])
}

/// Buckets up to the one that holds `rows`.
fn buckets(rows: usize) -> impl Iterator<Item = usize> {
    let most = step::bucket(rows.min(ROWS));
    BUCKETS.into_iter().filter(move |bucket| *bucket <= most)
}

/// Whether plans propose from the whole vocabulary: no; and yes if there are such plans.
fn part_and_whole(has_whole: bool) -> impl Iterator<Item = bool> {
    [false, true].into_iter().take(1 + usize::from(has_whole))
}

/// What drafts for a model, and whether it has an LM head.
#[derive(Debug, Clone, Copy)]
pub(super) struct DraftKeys {
    /// Rows of the blocks of a draft, if there is one.
    pub(super) block: Option<usize>,
    /// Whether it usually proposes from a part of the vocabulary.
    pub(super) whole_block: bool,
    /// Whether there is a multi-token-prediction head.
    pub(super) mtp: bool,
    /// Whether it usually proposes from a part of the vocabulary.
    pub(super) whole_mtp: bool,
    /// Whether there is an LM head.
    pub(super) head: bool,
}

/// The plans that limits can call for.
pub(super) fn keys(limits: Limits, drafts: DraftKeys, short: bool) -> Vec<PlanKey> {
    let most = limits.sequences.min(TREES);
    let widest = limits.tree_nodes * most;
    let steps = (1..=most).flat_map(|trees| {
        let all = buckets(limits.tree_nodes * trees).filter(move |rows| *rows >= trees);
        let depths = [0, limits.context];
        all.flat_map(move |rows| {
            let mut depths = depths.map(|committed| Depth::of(rows, committed)).to_vec();
            depths.dedup();
            let key = move |depth| PlanKey::Step { rows, trees, depth };
            depths.into_iter().map(key)
        })
    });
    let heads = buckets(limits.prefill_chunk).map(PlanKey::LmHead);
    let chunks = chunk_buckets(limits.prefill_chunk, short).map(PlanKey::Chunk);
    let mut all: Vec<PlanKey> = steps.chain(chunks).collect();
    if drafts.head {
        all.extend(heads);
        all.extend(buckets(widest).map(PlanKey::EditedStep));
        for edited in [false, true] {
            all.extend(buckets(widest).map(|rows| PlanKey::Masses { rows, edited }));
        }
        all.extend(buckets(limits.prefill_chunk).map(PlanKey::EditedLmHead));
    }
    all.extend((1..=most).map(PlanKey::Commit));
    if drafts.mtp {
        all.extend(buckets(widest).map(PlanKey::MtpCommit));
        let rows = |whole| step::MTP_DRAFT_BUCKETS.map(|rows| PlanKey::MtpDraft { rows, whole });
        all.extend(part_and_whole(drafts.whole_mtp).flat_map(rows));
    }
    if let Some(block) = drafts.block {
        all.extend(buckets(ROWS).map(PlanKey::DraftContext));
        let blocks = 1..=most.min(ROWS / block);
        let rows: BTreeSet<usize> = blocks.map(|n| step::bucket(n * block)).collect();
        let keys = |whole| rows.iter().map(move |&rows| PlanKey::Draft { rows, whole });
        all.extend(part_and_whole(drafts.whole_block).flat_map(keys));
    }
    all
}

#[cfg(test)]
mod tests {
    use contract::{TokenId, Tree};

    use super::super::select::SHALLOW_TOKENS;
    use super::*;
    use crate::step::Step;

    const HEAD_ONLY: DraftKeys = DraftKeys {
        block: None,
        whole_block: false,
        mtp: false,
        whole_mtp: false,
        head: true,
    };

    #[test]
    fn limits_bound_the_buckets() {
        let limits = Limits {
            sequences: 1,
            context: 1024,
            tree_nodes: 10,
            prefill_chunk: 100,
            pool_tokens: None,
        };
        let kept = |short| -> Vec<PlanKey> {
            let all = keys(limits, HEAD_ONLY, short).into_iter();
            let kept = |key: &PlanKey| {
                matches!(
                    key,
                    PlanKey::Step { .. } | PlanKey::Chunk(_) | PlanKey::Commit(_)
                )
            };
            all.filter(kept).collect()
        };
        let key = |rows| PlanKey::Step {
            rows,
            trees: 1,
            depth: Depth::of(rows, 0),
        };
        let steps = [1, 8, 16].map(key);
        let others = [PlanKey::Chunk(64), PlanKey::Chunk(100), PlanKey::Commit(1)];
        assert_eq!(kept(false), [&steps[..], &others].concat());
        let chunks = kept(true)
            .into_iter()
            .filter(|key| matches!(key, PlanKey::Chunk(_)));
        let short = [16, 32, 64, 100].map(PlanKey::Chunk);
        assert_eq!(chunks.collect::<Vec<PlanKey>>(), short);
    }

    #[test]
    fn every_step_has_the_plan_of_its_rows_and_trees_and_there_are_no_others() {
        let key = |sizes: &[usize], committed: usize| {
            let mut step = Step::new();
            for (slot, n) in sizes.iter().enumerate() {
                step.push(
                    slot,
                    committed,
                    &Tree::chain(&vec![TokenId(0); *n]).unwrap(),
                );
            }
            PlanKey::of_step(&step)
        };
        let step = |rows, trees, depth| PlanKey::Step { rows, trees, depth };
        assert_eq!(key(&[24], SHALLOW_TOKENS), step(24, 1, Depth::Shallow));
        assert_eq!(key(&[24], SHALLOW_TOKENS + 1), step(24, 1, Depth::Any));
        assert_eq!(key(&[7, 1, 12], 0), step(24, 3, Depth::Shallow));
        assert_eq!(key(&[1, 1, 1, 1], 0), step(8, 4, Depth::Any));
        let rooms = [(1, 64), (2, 23), (3, 9), (4, 17), (9, 5)];
        let contexts = [SHALLOW_TOKENS, 2 * SHALLOW_TOKENS];
        for ((sequences, tree_nodes), context) in rooms
            .into_iter()
            .flat_map(|room| contexts.map(|context| (room, context)))
        {
            let limits = Limits {
                sequences,
                context,
                tree_nodes,
                prefill_chunk: 64,
                pool_tokens: None,
            };
            let all = keys(limits, HEAD_ONLY, false).into_iter();
            let built: BTreeSet<PlanKey> = all
                .filter(|key| matches!(key, PlanKey::Step { .. }))
                .collect();
            let possible = (1..=sequences.min(TREES)).flat_map(|trees| {
                let rows = trees..=ROWS.min(trees * tree_nodes);
                let committed = (0..=context).step_by(SHALLOW_TOKENS / 2);
                rows.flat_map(move |rows| {
                    let rows = step::bucket(rows);
                    let of = move |committed| step(rows, trees, Depth::of(rows, committed));
                    committed.clone().map(of)
                })
            });
            let taken: BTreeSet<PlanKey> = possible.collect();
            assert_eq!(built, taken, "{sequences} sequences of {tree_nodes} nodes");
        }
    }
}
