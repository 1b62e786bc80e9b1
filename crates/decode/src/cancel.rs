//! Letting go of what nobody wants any more: between steps, so between chunks and between rounds.

use crate::running::Parked;
use crate::{ChoiceStats, Event, FinishReason, JobId, Scheduler};

impl Scheduler {
    /// Ends a job at once; the next step tells of it. An unknown id is ignored.
    pub fn cancel(&mut self, id: JobId) {
        let open: Vec<usize> = if let Some(entry) = self.queue.find(id) {
            entry.open.clone()
        } else if let Some(running) = self.running.iter().find(|running| running.id == id) {
            let spoken = running.sequences.iter().map(|sequence| sequence.choice);
            let parked = running.parked.iter().filter_map(Parked::choice);
            let retold = running.retold.iter().map(|retold| retold.sequence.choice);
            let begun = spoken.chain(parked).chain(retold);
            begun.chain(running.unbegun.iter().copied()).collect()
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
            let spoken = running.sequences.iter().position(|s| s.choice == choice);
            let waiting = running.unbegun.iter().position(|open| *open == choice);
            let mut parked = running.parked.iter();
            let parked = parked.position(|parked| parked.choice() == Some(choice));
            let mut retold = running.retold.iter();
            let retold = retold.position(|retold| retold.sequence.choice == choice);
            let stats = match (spoken, parked, waiting) {
                (None, None, None) if let Some(i) = retold => {
                    let retold = running.retold.remove(i);
                    self.runner.close(retold.prefill.seq);
                    self.stats.cancelled.decode += 1;
                    retold.sequence.stats
                }
                (None, Some(i), _) => {
                    let parked = running.parked.remove(i);
                    self.stats.cancelled.decode += 1;
                    if let Some(state) = parked.state() {
                        self.runner.free_snapshot(state);
                    }
                    match parked {
                        Parked::Speaking(sequence, _) => sequence.stats,
                        Parked::Reading(..) => running.blank_stats(),
                    }
                }
                (Some(i), ..) => {
                    let sequence = running.sequences.remove(i);
                    self.runner.close(sequence.seq);
                    self.stats.cancelled.decode += 1;
                    sequence.stats
                }
                (None, None, Some(i)) => {
                    running.unbegun.remove(i);
                    if !running.is_reading() {
                        self.stats.cancelled.decode += 1;
                    } else if running.unbegun.is_empty() {
                        self.stats.cancelled.prefill += 1;
                        running.prefill.take().into_iter().for_each(|prefill| {
                            self.runner.close(prefill.seq);
                        });
                        let states = running.parked.drain(..).filter_map(|p| p.state());
                        states.for_each(|state| self.runner.free_snapshot(state));
                    }
                    running.blank_stats()
                }
                (None, None, None) => return,
            };
            self.retire();
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
        self.news.push((id, event));
    }
}
