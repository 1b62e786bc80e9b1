//! Letting go of what nobody wants any more: between steps, so between chunks and between rounds.

use crate::{ChoiceStats, Event, FinishReason, JobId, Scheduler};

impl Scheduler {
    /// Ends a job at once; the next step tells of it. An unknown id is ignored.
    pub fn cancel(&mut self, id: JobId) {
        let open: Vec<usize> = if let Some(entry) = self.queue.find(id) {
            entry.open.clone()
        } else if let Some(running) = self.running.iter().find(|running| running.id == id) {
            let spoken = running.sequences.iter().map(|sequence| sequence.choice);
            spoken.chain(running.unbegun.iter().copied()).collect()
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
            let stats = match (spoken, waiting) {
                (Some(i), _) => {
                    let sequence = running.sequences.remove(i);
                    self.runner.close(sequence.seq);
                    self.stats.cancelled.decode += 1;
                    sequence.stats
                }
                (None, Some(i)) => {
                    running.unbegun.remove(i);
                    if running.prefill.is_none() {
                        self.stats.cancelled.decode += 1;
                    } else if running.unbegun.is_empty() {
                        self.stats.cancelled.prefill += 1;
                        running.prefill.take().into_iter().for_each(|prefill| {
                            self.runner.close(prefill.seq);
                        });
                    }
                    running.blank_stats()
                }
                (None, None) => return,
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
