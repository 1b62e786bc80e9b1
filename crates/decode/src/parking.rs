//! Who gets pages when there are not enough for all.
//!
//! Sequences take pages of keys and values from one pool as they grow, and nobody is promised more than he has: most
//! requests name far more tokens than they end up saying, and a promise kept for each would leave most of the pool
//! empty. The rules:
//!
//! - A job is let in where the pool has room for its prompt and [`reserve`](crate::SchedulerConfig::reserve) tokens more
//!   (fewer where it may not say as many), beside as many for every text that is being read or said. Until then it waits
//!   in the queue, and those behind it too. Pages that saved states alone hold are room: the device moves them
//!   elsewhere when a sequence needs their place. A newcomer is counted in full, though what he has in common with
//!   somebody who is in takes room once; so this errs on the careful side.
//! - Where a sequence cannot grow, the place whose turn comes last is given up: its state is saved in the host's memory,
//!   and it is *parked*. Its pages stay where they are until somebody needs them.
//! - Parked ones go on by their turn, before anyone of a later turn begins, once there is room for what they hold and
//!   the reserve; from the very state they stopped at, so that they say what they would have said.
//! - A prompt whose state nobody could save is read again, and so is a text with its prompt: then the host has no memory
//!   left, though all saved states were given up for it. Whatever chooses its tokens was kept, so it goes on as it would
//!   have, as far as reading tokens together gives the bits of saying them one by one.
//!
//! The place whose turn comes first is never given up while there is another, and a pool holds at least one sequence at
//! full length, so it always goes on; so does then the next, and nobody waits for ever. Nor do two take pages from each
//! other in turns: what was parked needs its pages back and more besides, which only an end or another parking frees.

use contract::{DeviceError, SeqId, SnapshotId, SnapshotLocation};

use crate::Scheduler;
use crate::prefill::Prefill;
use crate::queue::Turn;
use crate::running::{Parked, Retold};
use crate::scheduler::{Attempt, Events};

/// Whether a refusal says that others hold the pool.
pub(crate) fn is_dry(error: &DeviceError) -> bool {
    matches!(error, DeviceError::PoolExhausted { .. })
}

impl Scheduler {
    /// Whether the pool has room for one more sequence, of `len` tokens soon and `max_len` at most.
    pub(crate) fn has_room(&self, len: usize, max_len: usize) -> bool {
        let info = self.runner.info();
        let (page, nodes) = (info.pool.page_size, info.limits.tree_nodes);
        let each = info.limits.max_pages_per_sequence(page);
        if info.pool.pages / each >= info.limits.sequences {
            return true;
        }
        // Pages of a text that has so many tokens now, once it has grown by the reserve.
        let soon = |len: usize, max_len: usize| {
            let grown = len.saturating_add(self.config.reserve).min(max_len);
            grown.saturating_add(nodes).div_ceil(page)
        };
        let mut alone = true;
        let mut owed = 0;
        for running in &self.running {
            let max_len = running.max_len();
            let mut owes = |held: usize, len: usize| {
                alone = false;
                owed += soon(len, max_len).saturating_sub(held.div_ceil(page));
            };
            if let Some(prefill) = &running.prefill {
                owes(prefill.done, running.prompt.len());
            }
            for retold in &running.retold {
                owes(retold.prefill.done, retold.tokens().len() + 1);
            }
            for sequence in &running.sequences {
                let len = sequence.history.tokens().len();
                // The last token is not in the cache yet.
                owes(len - 1, len);
            }
        }
        // Whoever is alone has the whole pool, and that is enough for him.
        alone || owed + soon(len, max_len) <= self.runner.capacity().tokens / page
    }

    /// The turn of what goes on first among those that gave their place up.
    pub(crate) fn first_parked(&self) -> Option<Turn> {
        let waiting = self.running.iter().filter(|r| !r.parked.is_empty());
        waiting.map(|running| running.turn).min()
    }

    /// A sequence could not grow: the place whose turn comes last is given up. Says whether anything came of it; not
    /// where there is but one place.
    pub(crate) fn park(&mut self) -> Result<bool, DeviceError> {
        if self.open_sequences() < 2 {
            return Ok(false);
        }
        let open = self.running.iter().enumerate();
        let open = open.filter(|(_, running)| running.places().next().is_some());
        let Some((at, _)) = open.max_by_key(|(_, running)| running.turn) else {
            return Ok(false);
        };
        let running = &mut self.running[at];
        tracing::info!(job = running.id.0, "parked: the pool has no pages left");
        self.stats.parkings += 1;
        if let Some(prefill) = running.prefill.take() {
            let saved = match prefill.done {
                0 => None,
                _ => self.save_parked(prefill.seq)?,
            };
            self.runner.close(prefill.seq);
            let parked = Parked::Reading(prefill, saved);
            self.running[at].parked.push(parked);
            return Ok(true);
        }
        // What is read again has no state worth saving: reading it once more costs what it cost.
        if let Some(Retold { sequence, prefill }) = running.retold.pop() {
            running.parked.push(Parked::Speaking(sequence, None));
            self.runner.close(prefill.seq);
            return Ok(true);
        }
        // Of the choices of a job the last one.
        let last = running.sequences.iter().enumerate();
        let Some((last, _)) = last.max_by_key(|(_, sequence)| sequence.choice) else {
            return Ok(false);
        };
        let sequence = Box::new(running.sequences.remove(last));
        let saved = self.save_parked(sequence.seq)?;
        self.runner.close(sequence.seq);
        let parked = Parked::Speaking(sequence, saved);
        self.running[at].parked.push(parked);
        Ok(true)
    }

    /// Saves the state of a place that is about to be given up; saved prompts go for it if they must. Gives nothing where
    /// it cannot be saved; the only error is a lost device.
    fn save_parked(&mut self, seq: SeqId) -> Result<Option<SnapshotId>, DeviceError> {
        loop {
            match self.runner.snapshot(seq, SnapshotLocation::Host) {
                Ok(info) => return Ok(Some(info.id)),
                Err(lost @ DeviceError::DeviceLost { .. }) => return Err(lost),
                Err(error) => {
                    let lacking = error.is_out_of_memory();
                    if !lacking || !self.prefix.shed(&mut *self.runner)? {
                        tracing::warn!(%error, "a state cannot be saved");
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Lets those go on that gave their place up, by their turn, while there is room.
    pub(crate) fn resume(&mut self, out: &mut Events) -> Result<Attempt, DeviceError> {
        let mut attempt = Attempt::Nothing;
        while let Some(turn) = self.first_parked() {
            let Some(at) = self.running.iter().position(|r| r.turn == turn) else {
                break;
            };
            // A job has either its prompt parked or choices of it.
            let parked = self.running[at].parked.iter().enumerate();
            let Some((i, _)) = parked.min_by_key(|(_, parked)| parked.choice()) else {
                break;
            };
            let Some((seq, cached)) = self.seat_for(at, i)? else {
                return Ok(Attempt::Refused);
            };
            let parked = self.running[at].parked.remove(i);
            attempt = Attempt::Moved;
            if let Some(state) = parked.state() {
                let restored = self.runner.restore(seq, state);
                if let Err(error) = restored {
                    self.runner.close(seq);
                    if is_memory(&error) && self.prefix.shed(&mut *self.runner)? {
                        // Once more with what that freed.
                        self.running[at].parked.push(parked);
                        continue;
                    }
                    self.runner.free_snapshot(state);
                    self.fail(at, &error, out)?;
                    continue;
                }
                self.runner.free_snapshot(state);
            }
            self.stats.resumed += 1;
            let align = self.runner.info().prefill_align;
            let running = &mut self.running[at];
            tracing::info!(job = running.id.0, "goes on");
            match parked {
                Parked::Speaking(sequence, Some(_)) => running.go_on(sequence, seq),
                Parked::Speaking(sequence, None) => {
                    let prefill = Prefill::new(seq, None).resumed(cached, Vec::new());
                    running.retold.push(Retold { sequence, prefill });
                }
                Parked::Reading(mut prefill, Some(_)) => {
                    prefill.seq = seq;
                    running.prefill = Some(prefill);
                }
                Parked::Reading(_, None) => {
                    let stops = self.prefix.stops(&running.prompt, cached, align);
                    let fresh = Prefill::new(seq, running.settings.prompt_logprobs);
                    running.prefill = Some(fresh.resumed(cached, stops));
                }
            }
        }
        Ok(attempt)
    }

    /// Reads one chunk of a text whose state is lost; at its end the choice goes on.
    pub(crate) fn retell(&mut self, at: usize, out: &mut Events) -> Result<Attempt, DeviceError> {
        let running = &mut self.running[at];
        let Some(mut retold) = running.retold.pop() else {
            return Ok(Attempt::Nothing);
        };
        let before = retold.prefill.done;
        let tokens = retold.tokens().to_vec();
        let runner = &mut *self.runner;
        let chunk = retold.prefill.chunk(runner, &tokens, self.chunk, None);
        let (seq, done) = (retold.prefill.seq, retold.prefill.done);
        match chunk {
            Ok(Some(_)) => running.go_on(retold.sequence, seq),
            Ok(None) | Err(_) => running.retold.push(retold),
        }
        match chunk {
            Ok(_) => {
                self.stats.chunks += 1;
                self.stats.prompt_tokens += (done - before) as u64;
                Ok(Attempt::Moved)
            }
            Err(error) if error.is_out_of_memory() => {
                self.refused(&error);
                let parked = is_dry(&error) && self.park()?;
                Ok(if parked {
                    Attempt::Moved
                } else {
                    Attempt::Refused
                })
            }
            Err(error) => {
                self.fail(at, &error, out)?;
                Ok(Attempt::Moved)
            }
        }
    }

    /// A place for something parked, and how much of its prompt is there already where that is read again; `None` while
    /// there is none.
    fn seat_for(&mut self, at: usize, i: usize) -> Result<Option<(SeqId, usize)>, DeviceError> {
        let running = &self.running[at];
        let (turn, max_len) = (running.turn, running.max_len());
        let len = match &running.parked[i] {
            Parked::Reading(_, None) => {
                let (prompt, settings) = (running.prompt.clone(), running.settings.clone());
                let wanted = (turn, max_len, settings.may_be_resumed());
                return self.seat(&prompt, settings.session.as_ref(), wanted);
            }
            Parked::Speaking(sequence, None) => {
                let (tokens, settings) = (sequence.history.tokens(), running.settings.clone());
                // One of those to be in the cache is always read, as with a prompt.
                let tokens = tokens[..tokens.len() - 1].to_vec();
                let wanted = (turn, max_len, settings.may_be_resumed());
                return self.seat(&tokens, settings.session.as_ref(), wanted);
            }
            Parked::Reading(_, Some(_)) => running.prompt.len(),
            Parked::Speaking(sequence, Some(_)) => sequence.history.tokens().len(),
        };
        let seq = self.open(turn, (len, max_len))?;
        Ok(seq.map(|seq| (seq, 0)))
    }
}

/// Whether the device lacked memory, and not pages of the pool.
fn is_memory(error: &DeviceError) -> bool {
    matches!(error, DeviceError::OutOfMemory { .. })
}
