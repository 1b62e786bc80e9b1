//! Cancellation of jobs and choices, between steps.

use crate::event::{ChoiceStats, Event, FinishReason};
use crate::job::JobId;

use super::Scheduler;
use super::running::Preempted;

impl Scheduler {
    /// Ends a job at once; the next step emits its events. An unknown id is ignored.
    pub fn cancel(&mut self, id: JobId) {
        let open: Vec<usize> = if let Some(queued) = self.queue.find(id) {
            queued.open.clone()
        } else if let Some(at) = self.running.position(id) {
            self.running[at].open_choices()
        } else {
            return;
        };
        open.into_iter()
            .for_each(|choice| self.cancel_choice(id, choice));
    }

    /// Ends one choice of a job at once; the next step emits its event. A choice that is not open
    /// is ignored.
    pub fn cancel_choice(&mut self, id: JobId, choice: usize) {
        let stats = if self.queue.find(id).is_some() {
            self.cancel_queued(id, choice)
        } else if let Some(at) = self.running.position(id) {
            let stats = self.cancel_running(at, choice);
            self.running.remove_finished(&mut self.device);
            stats
        } else {
            None
        };
        let Some(stats) = stats else {
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

    /// Takes a choice of a queued job out, and the job with its last choice.
    fn cancel_queued(&mut self, id: JobId, choice: usize) -> Option<ChoiceStats> {
        let queued = self.queue.find(id)?;
        let before = queued.open.len();
        queued.open.retain(|open| *open != choice);
        if queued.open.len() == before {
            return None;
        }
        let prompt_tokens = queued.job.prompt.len();
        if queued.open.is_empty() {
            self.queue.remove(id);
            self.stats.cancelled.queued += 1;
        }
        Some(ChoiceStats {
            prompt_tokens,
            ..ChoiceStats::default()
        })
    }

    /// Takes a choice of a running job out and frees what it holds on the device.
    fn cancel_running(&mut self, at: usize, choice: usize) -> Option<ChoiceStats> {
        let running = &mut self.running[at];
        if let Some(i) = position(&running.sequences, |s| s.choice == choice) {
            let sequence = running.sequences.remove(i);
            self.device.close(sequence.seq);
            self.stats.cancelled.decode += 1;
            return Some(sequence.stats);
        }
        if let Some(i) = position(&running.preempted, |p| p.choice() == Some(choice)) {
            let preempted = running.preempted.remove(i);
            self.stats.cancelled.decode += 1;
            if let Some(state) = preempted.state() {
                self.device.free_snapshot(state);
            }
            return Some(match preempted {
                Preempted::Decode(sequence, _) => sequence.stats,
                Preempted::Prefill(..) => running.initial_stats(),
            });
        }
        if let Some(i) = running.pending_choices.iter().position(|c| *c == choice) {
            running.pending_choices.remove(i);
            if !running.is_prefilling() {
                self.stats.cancelled.decode += 1;
            } else if running.pending_choices.is_empty() {
                self.stats.cancelled.prefill += 1;
                if let Some(prefill) = running.prefill.take() {
                    self.device.close(prefill.seq);
                }
                let states = running.preempted.drain(..).filter_map(|p| p.state());
                states.for_each(|state| self.device.free_snapshot(state));
            }
            return Some(running.initial_stats());
        }
        let i = position(&running.recomputing, |r| r.sequence.choice == choice)?;
        let recomputing = running.recomputing.remove(i);
        self.device.close(recomputing.prefill.seq);
        self.stats.cancelled.decode += 1;
        Some(recomputing.sequence.stats)
    }
}

fn position<T>(items: &[T], is_it: impl Fn(&T) -> bool) -> Option<usize> {
    items.iter().position(is_it)
}
