//! Decode steps: all decoding sequences together, or two groups in turn ([`Alternation`]).
//!
//! In turn, a group stays *in flight* from one scheduler step to the next: its trees are proposed
//! and their verify has begun. Before any other pass and before a preemption it lands: its step
//! ends, and no other begins. A sequence in flight that is cancelled is closed when it lands.
//!
//! [`Alternation`]: super::alternation::Alternation

use std::time::Duration;

use contract::{DeviceError, SeqId};

use super::Scheduler;
use super::accept::AcceptResult;
use super::decode_step::{
    DecodeStepResult, ProposedStep, SequenceOutcome, VerifyResult, accept_step, decode_step,
    finish_verify, propose_step, verify_step,
};
use super::device::pool_exhausted;
use super::outcome::{Events, StepOutcome};
use super::running::RunningJob;
use super::running_set::RunningSet;
use super::sequence::Sequence;
use crate::error::JobError;
use crate::job::JobId;
use crate::speculation::Clock;

/// A choice of a job.
type Owner = (JobId, usize);

/// A group whose step begins.
enum BegunGroup {
    /// It has no sequences.
    None,
    /// Its trees, which the runner has begun to verify unless it refused.
    Proposed(ProposedStep),
    /// Drafting failed all of these choices.
    Failed(Box<DecodeStepResult>, Vec<Owner>),
}

/// What a step has done.
#[derive(Default)]
struct Done {
    /// Sequences that advanced.
    advanced: usize,
    /// Whether one advanced or failed.
    is_progress: bool,
    /// Whether one found the pool exhausted.
    is_exhausted: bool,
}

impl Done {
    fn and(self, other: Done) -> Done {
        Done {
            advanced: self.advanced + other.advanced,
            is_progress: self.is_progress || other.is_progress,
            is_exhausted: self.is_exhausted || other.is_exhausted,
        }
    }

    fn outcome(&self) -> StepOutcome {
        if self.is_progress {
            StepOutcome::Advanced
        } else {
            StepOutcome::OutOfMemory
        }
    }
}

impl Scheduler {
    /// Runs one decode step: over all decoding sequences, or over one of two groups.
    pub(super) fn run_decode_step(&mut self, out: &mut Events) -> Result<StepOutcome, DeviceError> {
        let all: Vec<SeqId> = self.running.decoding().map(|s| s.seq).collect();
        if all.is_empty() && self.in_flight.is_none() {
            return Ok(StepOutcome::NothingToDo);
        }
        let _span = tracing::trace_span!("decode step", sequences = all.len()).entered();
        let in_turn = !self.running.has_prefill() && self.alternation.chooses(all.len());
        if !in_turn && self.in_flight.is_none() {
            return self.step_together(out);
        }
        let next = if in_turn {
            self.next_group(&all)
        } else {
            Vec::new()
        };
        self.step_in_turn(&next, out)
    }

    /// The group to begin beside the one in flight: half of the sequences, or those that are not in
    /// flight. None where the groups have become unequal, so that they are formed anew.
    fn next_group(&self, all: &[SeqId]) -> Vec<SeqId> {
        let half = all.len().div_ceil(2);
        let Some(in_flight) = &self.in_flight else {
            return all[..half].to_vec();
        };
        let flies = |seq: &SeqId| in_flight.seqs().any(|other| other == *seq);
        let others: Vec<SeqId> = all.iter().copied().filter(|seq| !flies(seq)).collect();
        if others.len().max(all.len() - others.len()) > half {
            return Vec::new();
        }
        others
    }

    /// A step of all sequences.
    fn step_together(&mut self, out: &mut Events) -> Result<StepOutcome, DeviceError> {
        let clock = self.clock();
        self.trees.keep(&[]);
        let mut batch = self.running.sequences_mut();
        let decoded = decode_step(self.device.runner(), &mut *self.trees, &mut batch, clock)?;
        let owners = batch.iter().map(|s| (s.job, s.choice)).collect();
        self.note_step(false, &decoded, clock());
        let done = self.apply(decoded, owners, out)?;
        self.preempt_if_exhausted(&done, out)
    }

    /// Begins a step of the sequences `next`, if there are any, and ends that of the group in
    /// flight.
    fn step_in_turn(
        &mut self,
        next: &[SeqId],
        out: &mut Events,
    ) -> Result<StepOutcome, DeviceError> {
        let mut done = Done::default();
        let mut next = match self.begin_group(next)? {
            BegunGroup::None => None,
            BegunGroup::Proposed(next) => Some(next),
            BegunGroup::Failed(failed, owners) => {
                done = self.apply(*failed, owners, out)?;
                None
            }
        };
        let waiting = self.clock()();
        if let Some(first) = self.in_flight.take() {
            let mut rows_of_next = None;
            let rows = self.land(&first)?;
            if rows.is_none() {
                // Its trees are verified again, which no other pass may be beside.
                rows_of_next = next.as_ref().map(|next| self.land(next)).transpose()?;
            }
            done = done.and(self.end_group(first, (rows, waiting), out)?);
            if let Some(rows) = rows_of_next
                && let Some(next) = next.take()
            {
                done = done.and(self.end_group(next, (rows, waiting), out)?);
            }
        } else {
            // Filling the devices is progress.
            done.is_progress |= next.is_some();
        }
        match next {
            Some(next) if !next.has_begun() => {
                let waiting = self.clock()();
                done = done.and(self.end_group(next, (None, waiting), out)?);
            }
            next => self.in_flight = next,
        }
        self.preempt_if_exhausted(&done, out)
    }

    /// Ends the step in flight, if there is one. No other begins.
    pub(super) fn land_all(&mut self, out: &mut Events) -> Result<StepOutcome, DeviceError> {
        self.alternation.interrupt();
        self.step_in_turn(&[], out)
    }

    /// Proposes trees for a group and begins their verify, or fails all of it.
    fn begin_group(&mut self, group: &[SeqId]) -> Result<BegunGroup, DeviceError> {
        if group.is_empty() {
            return Ok(BegunGroup::None);
        }
        let clock = self.clock();
        let all = self.running.sequences_mut().into_iter();
        let (mut batch, others): (Vec<_>, Vec<_>) = all.partition(|s| group.contains(&s.seq));
        let others: Vec<SeqId> = others.iter().map(|s| s.seq).collect();
        self.trees.keep(&others);
        let runner = self.device.runner();
        match propose_step(runner, &mut *self.trees, &mut batch, clock)? {
            Ok(mut proposed) => {
                proposed.begin(runner)?;
                if proposed.has_begun() {
                    self.device.hold(proposed.seqs());
                }
                Ok(BegunGroup::Proposed(proposed))
            }
            Err(failed) => {
                let owners = batch.iter().map(|s| (s.job, s.choice)).collect();
                Ok(BegunGroup::Failed(Box::new(failed), owners))
            }
        }
    }

    /// Waits for the rows of a group whose verify may have begun; its sequences may be closed
    /// again. `None` if the trees are to be verified in a call of their own.
    fn land(&mut self, step: &ProposedStep) -> Result<Option<Vec<VerifyResult>>, DeviceError> {
        if !step.has_begun() {
            return Ok(None);
        }
        let rows = finish_verify(self.device.runner(), step)?;
        self.device.release(step.seqs());
        Ok(rows)
    }

    /// Accepts and commits a group's step, whose rows were waited for since `waiting`. Without
    /// rows its trees are verified first.
    fn end_group(
        &mut self,
        mut step: ProposedStep,
        (rows, waiting): (Option<Vec<VerifyResult>>, Duration),
        out: &mut Events,
    ) -> Result<Done, DeviceError> {
        let clock = self.clock();
        let all = self.running.sequences_mut();
        let seqs: Vec<SeqId> = step.seqs().collect();
        let mut batch: Vec<Option<&mut Sequence>> = seqs.iter().map(|_| None).collect();
        for sequence in all {
            if let Some(at) = seqs.iter().position(|seq| *seq == sequence.seq) {
                batch[at] = Some(sequence);
            }
        }
        let left = batch.iter().flatten();
        let owners: Vec<Owner> = left.map(|s| (s.job, s.choice)).collect();
        let is_empty = owners.is_empty();
        let runner = self.device.runner();
        let rows = match rows {
            Some(rows) => rows,
            None => {
                step.retain(|seq| batch.iter().flatten().any(|s| s.seq == seq));
                batch.retain(Option::is_some);
                verify_step(runner, &mut step)?
            }
        };
        let trees = &mut *self.trees;
        let decoded = accept_step(runner, trees, batch, (step, rows, waiting), clock)?;
        self.note_step(true, &decoded, clock());
        let done = self.apply(decoded, owners, out)?;
        Ok(Done {
            is_progress: done.is_progress || is_empty,
            ..done
        })
    }

    fn clock(&self) -> Clock {
        self.config.clock.unwrap_or(|| Duration::ZERO)
    }

    /// Counts a step and times it for the choice of the next.
    fn note_step(&mut self, in_turn: bool, decoded: &DecodeStepResult, now: Duration) {
        let accepted = decoded.outcomes.iter().map(|outcome| match outcome {
            SequenceOutcome::Advanced(result) => result.tokens.len(),
            SequenceOutcome::OutOfMemory(_) | SequenceOutcome::Failed(_) => 0,
        });
        let accepted: usize = accepted.sum();
        let tokens = decoded.expected_tokens.unwrap_or(accepted as f64);
        self.alternation.note(in_turn, tokens, now);
        self.stats.decode_steps += 1;
        self.stats.alternating_steps += u64::from(in_turn);
        self.stats.undrafted_steps += u64::from(decoded.draft_out_of_memory);
        self.stats.drafted_tokens += decoded.counts.drafted;
        self.stats.accepted_tokens += decoded.counts.accepted;
        self.stats.by_source.add(decoded.counts.by_source);
        self.stats.forced_tokens += decoded.counts.forced;
        self.stats.drafted_steps += u64::from(decoded.counts.depths.steps);
        let by_depth = self.stats.accepted_by_depth.iter_mut();
        for (sum, steps) in by_depth.zip(decoded.counts.depths.accepted) {
            *sum += u64::from(steps);
        }
        self.stats.times.add(decoded.times);
    }

    /// Emits and drops what a step has decided about these choices.
    fn apply(
        &mut self,
        decoded: DecodeStepResult,
        owners: Vec<Owner>,
        out: &mut Events,
    ) -> Result<Done, DeviceError> {
        let mut done = Done::default();
        for ((id, choice), sequence_outcome) in owners.into_iter().zip(decoded.outcomes) {
            // A choice that failed earlier in this loop removed its whole job.
            let Some(at) = self.running.position(id) else {
                continue;
            };
            match sequence_outcome {
                SequenceOutcome::OutOfMemory(error) => {
                    done.is_exhausted |= pool_exhausted(&error);
                    self.note_out_of_memory(&error);
                }
                SequenceOutcome::Failed(error) => {
                    done.is_progress = true;
                    self.fail(at, error, out)?;
                }
                SequenceOutcome::Advanced(result) => {
                    done.is_progress = true;
                    done.advanced += 1;
                    self.finish_sequence_step(at, choice, result, out);
                }
            }
        }
        self.stats.batch_size_sum += done.advanced as u64;
        self.stats.largest_batch = self.stats.largest_batch.max(done.advanced);
        self.running.remove_finished(&mut self.device);
        Ok(done)
    }

    /// Preempts the last sequence if a step found the pool exhausted.
    fn preempt_if_exhausted(
        &mut self,
        done: &Done,
        out: &mut Events,
    ) -> Result<StepOutcome, DeviceError> {
        if !done.is_exhausted {
            return Ok(done.outcome());
        }
        if self.in_flight.is_some() {
            // What lands may end and free pages: the next step finds out.
            self.land_all(out)?;
            return Ok(StepOutcome::Advanced);
        }
        if self.preempt_last()? {
            return Ok(StepOutcome::Advanced);
        }
        Ok(done.outcome())
    }

    /// Emits a choice's accepted tokens, and drops the choice if it ended.
    fn finish_sequence_step(
        &mut self,
        at: usize,
        choice: usize,
        result: AcceptResult,
        out: &mut Events,
    ) {
        let sequences = &mut self.running[at].sequences;
        let Some(i) = sequences.iter().position(|s| s.choice == choice) else {
            return;
        };
        if let Some(error) = sequences[i].error() {
            let detail = error.to_owned();
            return self.remove_failed(at, JobError::Constraint { detail }, out);
        }
        let sequence = sequences.remove(i);
        self.emit(&sequence, result.tokens, result.finish_reason, out);
        if result.finish_reason.is_none() {
            self.running[at].sequences.insert(i, sequence);
        }
    }
}

impl RunningSet {
    /// Whether a sequence decodes.
    pub(super) fn is_decoding(&self) -> bool {
        self.decoding().next().is_some()
    }

    /// All sequences that decode.
    fn decoding(&self) -> impl Iterator<Item = &Sequence> {
        self.iter().flat_map(|job| &job.sequences)
    }

    /// Whether a prompt or a recomputed choice has tokens to prefill.
    pub(super) fn has_prefill(&self) -> bool {
        let mut jobs = self.iter().map(RunningJob::tokens_to_prefill);
        jobs.any(|tokens| tokens.is_some())
    }
}
