//! Letting go of what nobody wants any more: between steps, so between chunks and between rounds.

use super::Scheduler;
use super::running::Preempted;
use crate::event::{ChoiceStats, Event, FinishReason};
use crate::job::JobId;

impl Scheduler {
    /// Ends a job at once; the next step tells of it. An unknown id is ignored.
    pub fn cancel(&mut self, id: JobId) {
        let open: Vec<usize> = if let Some(entry) = self.queue.find(id) {
            entry.open.clone()
        } else if let Some(running) = self.running.iter().find(|running| running.id == id) {
            let decoding = running.sequences.iter().map(|sequence| sequence.choice);
            let preempted = running.preempted.iter().filter_map(Preempted::choice);
            let recomputing = running
                .recomputing
                .iter()
                .map(|recomputing| recomputing.sequence.choice);
            let begun = decoding.chain(preempted).chain(recomputing);
            begun
                .chain(running.pending_choices.iter().copied())
                .collect()
        } else {
            return;
        };
        open.into_iter()
            .for_each(|choice| self.cancel_choice(id, choice));
    }

    /// Ends one choice of a job at once; the next step tells of it. One that is not open is ignored.
    pub fn cancel_choice(&mut self, id: JobId, choice: usize) {
        let stats = if let Some(entry) = self.queue.find(id) {
            let before = entry.open.len();
            entry.open.retain(|open| *open != choice);
            if entry.open.len() == before {
                return;
            }
            let prompt_tokens = entry.job.prompt.len();
            if entry.open.is_empty() {
                self.queue.remove(id);
                self.stats.cancelled.queued += 1;
            }
            ChoiceStats {
                prompt_tokens,
                ..ChoiceStats::default()
            }
        } else if let Some(at) = self.running.iter().position(|running| running.id == id) {
            let running = &mut self.running[at];
            let decoding = running.sequences.iter().position(|s| s.choice == choice);
            let waiting = running
                .pending_choices
                .iter()
                .position(|open| *open == choice);
            let mut preempted = running.preempted.iter();
            let preempted = preempted.position(|preempted| preempted.choice() == Some(choice));
            let mut recomputing = running.recomputing.iter();
            let recomputing =
                recomputing.position(|recomputing| recomputing.sequence.choice == choice);
            let stats = match (decoding, preempted, waiting) {
                (None, None, None) if let Some(i) = recomputing => {
                    let recomputing = running.recomputing.remove(i);
                    self.runner.close(recomputing.prefill.seq);
                    self.stats.cancelled.decode += 1;
                    recomputing.sequence.stats
                }
                (None, Some(i), _) => {
                    let preempted = running.preempted.remove(i);
                    self.stats.cancelled.decode += 1;
                    if let Some(state) = preempted.state() {
                        self.runner.free_snapshot(state);
                    }
                    match preempted {
                        Preempted::Decode(sequence, _) => sequence.stats,
                        Preempted::Prefill(..) => running.initial_stats(),
                    }
                }
                (Some(i), ..) => {
                    let sequence = running.sequences.remove(i);
                    self.runner.close(sequence.seq);
                    self.stats.cancelled.decode += 1;
                    sequence.stats
                }
                (None, None, Some(i)) => {
                    running.pending_choices.remove(i);
                    if !running.is_prefilling() {
                        self.stats.cancelled.decode += 1;
                    } else if running.pending_choices.is_empty() {
                        self.stats.cancelled.prefill += 1;
                        running.prefill.take().into_iter().for_each(|prefill| {
                            self.runner.close(prefill.seq);
                        });
                        let states = running.preempted.drain(..).filter_map(|p| p.state());
                        states.for_each(|state| self.runner.free_snapshot(state));
                    }
                    running.initial_stats()
                }
                (None, None, None) => return,
            };
            self.remove_finished();
            stats
        } else {
            return;
        };
        let reason = FinishReason::Cancelled;
        let event = Event::Finished {
            choice,
            reason,
            stats,
        };
        self.pending_events.push((id, event));
    }
}
