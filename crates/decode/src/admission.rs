//! From the queue to the first token: places on the device, prompts read, choices begun.

use std::mem;
use std::slice;
use std::sync::Arc;

use contract::{DeviceError, LogitsRow, SeqId, SnapshotLocation, TokenId};

use crate::parking::is_dry;
use crate::prefix::{Mark, Restored};
use crate::queue::Turn;
use crate::running::{PromptEnd, Running};
use crate::scheduler::{Attempt, Events};
use crate::sequence::Bounds;
use crate::{Event, FinishReason, Scheduler};

impl Scheduler {
    /// Begins choices whose prompt is read and which waited for a place.
    pub(crate) fn begin_choices(&mut self, out: &mut Events) -> Result<Attempt, DeviceError> {
        let mut attempt = Attempt::Nothing;
        let mut at = 0;
        while at < self.running.len() {
            let running = &self.running[at];
            let waits = running.prompt_end.is_some() && !running.unbegun.is_empty();
            if !waits {
                at += 1;
                continue;
            }
            let (prompt, max_len) = (running.prompt.len(), running.max_len());
            let turn = running.turn;
            let Some(seq) = self.open(turn, (prompt, max_len))? else {
                return Ok(Attempt::Refused);
            };
            let running = &mut self.running[at];
            let (Some(end), Some(choice)) = (&running.prompt_end, running.unbegun.pop_front())
            else {
                continue;
            };
            let row = end.row.clone();
            if let Err(error) = self.runner.restore(seq, end.snapshot) {
                self.runner.close(seq);
                running.unbegun.push_front(choice);
                self.fail(at, &error, out)?;
                continue;
            }
            attempt = Attempt::Moved;
            self.begin_choice(at, choice, seq, &row, out);
            self.retire();
        }
        Ok(attempt)
    }

    /// Admits jobs in the order of the queue while there is room.
    pub(crate) fn admit_queued(&mut self, out: &mut Events) -> Result<Attempt, DeviceError> {
        let mut attempt = Attempt::Nothing;
        while let (Some(job), Some(turn)) = (self.queue.first(), self.queue.first_turn()) {
            let bounds = Bounds::new(
                &job.settings,
                &self.config.eos,
                self.runner.info().limits.context,
            );
            let max_len = bounds.max_len(job.prompt.len());
            let (prompt, session) = (Arc::clone(&job.prompt), job.settings.session.clone());
            let wanted = (turn, max_len, job.settings.may_be_resumed());
            let Some((seq, cached)) = self.seat(&prompt, session.as_ref(), wanted)? else {
                return Ok(Attempt::Refused);
            };
            let align = self.runner.info().prefill_align;
            let stops = self.prefix.stops(&prompt, cached, align);
            let Some((turn, entry)) = self.queue.pop() else {
                self.runner.close(seq);
                break;
            };
            let id = entry.job.id;
            let mut running = Running::new(turn, entry, seq, self.model());
            running.cached = cached;
            running.prefill = running
                .prefill
                .map(|prefill| prefill.resumed(cached, stops));
            self.running.push(running);
            out.push((id, Event::Started { cached }));
            attempt = Attempt::Moved;
        }
        Ok(attempt)
    }

    /// A place that holds as much of a prompt as a saved state does, if those may be used, and how much that is; `None`
    /// where there is no place now.
    pub(crate) fn seat(
        &mut self,
        prompt: &[TokenId],
        session: Option<&Arc<str>>,
        (turn, max_len, use_saved): (Turn, usize, bool),
    ) -> Result<Option<(SeqId, usize)>, DeviceError> {
        let sizes = (prompt.len(), max_len);
        let Some(seq) = self.open(turn, sizes)? else {
            return Ok(None);
        };
        if !use_saved {
            return Ok(Some((seq, 0)));
        }
        let runner = &mut *self.runner;
        match self.prefix.restore(runner, seq, prompt, session)? {
            Restored::At(position) => Ok(Some((seq, position))),
            Restored::Nothing => Ok(Some((seq, 0))),
            Restored::Broken => {
                self.runner.close(seq);
                let fresh = self.open(turn, sizes)?;
                Ok(fresh.map(|seq| (seq, 0)))
            }
        }
    }

    /// A place on the device for what has this turn and holds `len` tokens soon and `max_len` at most, or `None` where
    /// there is none now or the pool has no room.
    pub(crate) fn open(
        &mut self,
        turn: Turn,
        (len, max_len): (usize, usize),
    ) -> Result<Option<SeqId>, DeviceError> {
        let room = self.runner.capacity();
        let busy = self.open_sequences() >= self.config.max_sequences.max(1);
        if busy || room.sequences == 0 || self.first_parked().is_some_and(|first| first < turn) {
            return Ok(None);
        }
        if !self.has_room(len, max_len) {
            self.stats.pool_waits = true;
            return Ok(None);
        }
        match self.runner.open(max_len) {
            Ok(seq) => Ok(Some(seq)),
            Err(lost @ DeviceError::DeviceLost { .. }) => Err(lost),
            Err(error) => {
                self.refused(&error);
                Ok(None)
            }
        }
    }

    /// Reads one chunk of the prompt whose turn it is.
    pub(crate) fn read(&mut self, out: &mut Events) -> Result<Attempt, DeviceError> {
        let reading = self.running.iter().enumerate();
        let next = reading
            .filter(|(_, running)| running.prefill.is_some() || !running.retold.is_empty())
            .min_by_key(|(_, running)| running.turn)
            .map(|(at, _)| at);
        let Some(at) = next else {
            return Ok(Attempt::Nothing);
        };
        if self.running[at].prefill.is_none() {
            return self.retell(at, out);
        }
        let last = self.running[at].first_ask(self.chunk, self.model());
        let running = &mut self.running[at];
        let Some(prefill) = &mut running.prefill else {
            return Ok(Attempt::Nothing);
        };
        let before = prefill.done;
        let row = match prefill.chunk(
            &mut *self.runner,
            &running.prompt,
            self.chunk,
            last.as_ref(),
        ) {
            Ok(row) => row,
            Err(lost @ DeviceError::DeviceLost { .. }) => return Err(lost),
            Err(error) if error.is_out_of_memory() => {
                self.refused(&error);
                let parked = is_dry(&error) && self.park()?;
                return Ok(match parked {
                    true => Attempt::Moved,
                    false => Attempt::Refused,
                });
            }
            Err(error) => {
                self.fail(at, &error, out)?;
                return Ok(Attempt::Moved);
            }
        };
        self.stats.chunks += 1;
        self.stats.prompt_tokens += (prefill.done - before) as u64;
        let (done, total) = (prefill.done, running.prompt.len());
        if let Some(stop) = prefill.reached().filter(|_| running.settings.use_saved) {
            let mark = Mark {
                head: stop.head,
                session: running.settings.session.as_ref(),
                ahead: false,
            };
            let tokens = &running.prompt[..done];
            self.prefix
                .save(&mut *self.runner, prefill.seq, tokens, mark)?;
        }
        let running = &self.running[at];
        out.push((running.id, Event::Prefill { done, total }));
        if let Some(row) = row {
            self.prompt_read(at, row, out)?;
        }
        Ok(Attempt::Moved)
    }

    /// Begins the first choice of a job whose prompt has just been read, and saves the state for the others.
    fn prompt_read(
        &mut self,
        at: usize,
        row: LogitsRow,
        out: &mut Events,
    ) -> Result<(), DeviceError> {
        let running = &mut self.running[at];
        let Some(mut prefill) = running.prefill.take() else {
            return Ok(());
        };
        let seq = prefill.seq;
        if let Some(logprobs) = prefill.take_logprobs() {
            out.push((running.id, Event::PromptLogprobs(logprobs)));
        }
        if running.settings.max_tokens == 0 {
            for choice in mem::take(&mut running.unbegun) {
                let stats = running.blank_stats();
                self.stats.finished += 1;
                let reason = FinishReason::Length;
                let event = Event::Finished {
                    choice,
                    reason,
                    stats,
                };
                out.push((running.id, event));
            }
            self.runner.close(seq);
            self.retire();
            return Ok(());
        }
        let Some(choice) = running.unbegun.pop_front() else {
            return Ok(());
        };
        if !running.unbegun.is_empty() {
            let saved = match self.runner.snapshot(seq, SnapshotLocation::Device) {
                Err(error) if error.is_out_of_memory() => {
                    self.runner.snapshot(seq, SnapshotLocation::Host)
                }
                saved => saved,
            };
            match saved {
                Ok(info) => {
                    running.prompt_end = Some(PromptEnd {
                        snapshot: info.id,
                        row: row.clone(),
                    });
                }
                Err(error) => {
                    self.runner.close(seq);
                    return self.fail(at, &error, out);
                }
            }
        }
        self.begin_choice(at, choice, seq, &row, out);
        self.begin_choices(out)?;
        self.retire();
        Ok(())
    }

    /// Chooses the first token of a choice whose prompt `seq` holds.
    fn begin_choice(
        &mut self,
        at: usize,
        choice: usize,
        seq: SeqId,
        row: &LogitsRow,
        out: &mut Events,
    ) {
        let running = &self.running[at];
        let mut sequence = running.sequence(choice, seq, self.model());
        let token = match sequence.plan(&[]).forced {
            Some(token) => sequence.sampler.take_forced(row, token),
            None => {
                let chosen = sequence.sampler.choose(row, sequence.position_after(0));
                sequence.doubt.see(row, chosen.id);
                chosen
            }
        };
        let ending = sequence.ending(1, token.id);
        sequence.push(slice::from_ref(&token));
        self.tell(&sequence, vec![token], ending, out);
        if ending.is_none() {
            self.running[at].sequences.push(sequence);
        }
    }
}
