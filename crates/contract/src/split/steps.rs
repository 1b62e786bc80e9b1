//! A step of trees through the stages, in groups that occupy the stages in turn.
//!
//! Group `g` is in stage `s` in turn `s + g`. In each turn every stage first receives its rows, as
//! the stages below overwrite them next. Then the stages run from the bottom, so that those that
//! return early are busy while the stage with the LM head is waited for.

use std::ops::Range;
use std::time::Instant;

use super::groups::first_group;
use super::runner::SplitRunner;
use super::stages::StoppedPass;
use crate::{DeviceError, LogitsRequest, LogitsRow, SeqId, VerifyItem};

/// The trees of a step and how far they have come.
struct Step<'a> {
    items: &'a [VerifyItem<'a>],
    /// The ids of each item in each stage.
    ids: Vec<Vec<SeqId>>,
    /// No logits, for the nodes of the longest tree.
    none: Vec<LogitsRequest>,
    groups: Vec<Group>,
}

/// Trees that run together.
struct Group {
    items: Range<usize>,
    n_rows: usize,
    /// Stages in which they are pending.
    done: usize,
    /// Of the stage with the LM head.
    rows: Vec<Vec<LogitsRow>>,
}

impl Step<'_> {
    /// What a group is for stage `stage`.
    fn items_of(&self, group: usize, stage: usize, head: usize) -> Vec<VerifyItem<'_>> {
        let range = self.groups[group].items.clone();
        let all = self.items[range.clone()].iter().zip(&self.ids[range]);
        let items = all.map(|(item, ids)| VerifyItem {
            seq: ids[stage],
            tree: item.tree,
            requests: if stage == head {
                item.requests
            } else {
                &self.none[..item.tree.len()]
            },
        });
        items.collect()
    }
}

impl SplitRunner {
    /// Verifies trees; if a stage fails, no stage has a tree of the call pending.
    pub(super) fn step(
        &mut self,
        items: &[VerifyItem<'_>],
    ) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let mut ids = Vec::with_capacity(items.len());
        for item in items {
            let sequence = self.sequence(item.seq)?;
            let (of_stages, position) = (sequence.ids.clone(), sequence.position);
            ids.push(of_stages);
            self.reserve(item.seq, position + item.tree.len())?;
        }
        let rows: Vec<usize> = items.iter().map(|item| item.tree.len()).collect();
        let begun = Instant::now();
        let (groups, apart) = self.groups(&rows);
        let mut step = Step {
            items,
            ids,
            none: vec![LogitsRequest::NONE; rows.iter().copied().max().unwrap_or(0)],
            groups,
        };
        if let Err(StoppedPass { error, .. }) = self.run_groups(&mut step) {
            self.stages.require()?;
            for group in step.groups {
                for item in &items[group.items] {
                    self.discard_in(item.seq, group.done)?;
                }
            }
            return Err(error);
        }
        if let Some(apart) = apart {
            self.times.note(&rows, apart, begun.elapsed());
        }
        Ok(step
            .groups
            .into_iter()
            .flat_map(|group| group.rows)
            .collect())
    }

    /// The groups of trees with these rows: as many as fit a pass of every stage, or two. The
    /// choice between one and two groups, where there was one.
    fn groups(&mut self, rows: &[usize]) -> (Vec<Group>, Option<bool>) {
        let group = |items: Range<usize>| Group {
            n_rows: rows[items.clone()].iter().sum(),
            items,
            done: 0,
            rows: Vec::new(),
        };
        let mut groups = Vec::new();
        let mut begin = 0;
        while begin < rows.len() {
            let each = self
                .stages
                .iter()
                .map(|stage| stage.items_per_pass(&rows[begin..]));
            let end = begin + each.min().unwrap_or(1).clamp(1, rows.len() - begin);
            groups.push(group(begin..end));
            begin = end;
        }
        // Only stages with layers of their own take time that can overlap.
        let overlaps = self.head > 0 && !self.stages.are_shards();
        if groups.len() != 1 || rows.len() < 2 || !overlaps {
            return (groups, None);
        }
        let apart = self.times.splits(rows);
        if apart {
            let middle = first_group(rows);
            groups = vec![group(0..middle), group(middle..rows.len())];
        }
        (groups, Some(apart))
    }

    fn run_groups(&mut self, step: &mut Step<'_>) -> Result<(), StoppedPass> {
        let (n_stages, n_groups) = (self.stages.len(), step.groups.len());
        if self.stages.are_shards() {
            // A shard's pass ends with those of the others.
            for group in 0..n_groups {
                for stage in 0..n_stages {
                    let done = self.run_group(step, group, stage);
                    done.map_err(|stopped| self.stages.stopped(stopped))?;
                }
            }
            return Ok(());
        }
        for turn in 0..(n_stages + n_groups).saturating_sub(1) {
            let busy = |stage: &usize| *stage <= turn && turn - stage < n_groups;
            let stages: Vec<usize> = (0..n_stages).filter(busy).collect();
            for stage in stages.iter().rev().copied() {
                let rows = step.groups[turn - stage].n_rows;
                let received = self.stages.hand_over(stage, rows);
                received.map_err(|error| StoppedPass { stage, error })?;
            }
            for stage in stages {
                self.run_group(step, turn - stage, stage)?;
            }
        }
        Ok(())
    }

    /// Runs a group in one stage.
    fn run_group(
        &mut self,
        step: &mut Step<'_>,
        group: usize,
        stage: usize,
    ) -> Result<(), StoppedPass> {
        let head = self.head;
        let items = step.items_of(group, stage, head);
        let done = self.stages.call(stage, |of| of.verify(&items));
        let rows = done.map_err(|error| StoppedPass { stage, error })?;
        let group = &mut step.groups[group];
        group.done = stage + 1;
        if stage == head {
            group.rows = rows;
        }
        Ok(())
    }
}
