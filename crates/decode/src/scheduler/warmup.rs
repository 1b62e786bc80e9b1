//! Reads in pauses what the next prompt of a conversation will begin with.
//!
//! A template shows a finished turn otherwise than the prompt that asked for it: thoughts go once the next wish comes,
//! and with them every state behind the first of them. Whoever writes prompts knows the new form as soon as the reply
//! is whole, and hands its tokens over ([`Scheduler::queue_warmup`]); while there is nothing else to do they are read chunk
//! by chunk ([`Scheduler::warmup_step`]) and their states saved, so that the next prompt goes on from there. A prompt
//! that begins otherwise loses nothing: states are found by tokens, here as everywhere. The rules:
//!
//! - Only an idle scheduler reads ahead. The first job waits for the chunk under way and no longer; what was read until
//!   then is saved, and the rest is read in another pause, unless that job's prompt is the one that was foreseen.
//! - A conversation has one text at most: what is foreseen of it next, or its next prompt, takes its place. They are
//!   known for the same by what stands before the reply that was made last.
//! - A text is read only where that spares its prompt [`apart`](crate::SavePointConfig::apart) tokens, from the longest state
//!   there is, and [`PrefixConfig::warmup_tokens`](crate::PrefixConfig::warmup_tokens) tokens of it at most.
//! - It takes only pages that neither a sequence nor a saved state holds, and while no prompt has used them its states
//!   are the first to be given up ([`prefix`](crate::prefix)), so nothing that is known to be of use goes for a guess.

use std::collections::VecDeque;
use std::sync::Arc;

use contract::{DeviceError, TokenId};

use super::Scheduler;
use super::prefill::Prefill;
use crate::job::Job;
use crate::prefix::{Restored, SaveInfo, SavePoint};

/// Texts that wait for a pause; with one more the oldest goes. So many conversations may be in a pause at once.
const MAX_PENDING: usize = 4;

/// What the next prompt of a conversation will begin with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NextPrompt {
    /// Its tokens, as far as they are known.
    pub tokens: Arc<[TokenId]>,
    /// The conversation, as [`GenerationParams::session`](crate::GenerationParams::session).
    pub session: Option<Arc<str>>,
}

/// A text that is still to come.
struct PendingPrompt {
    next: NextPrompt,
    /// Where the reply begins that was made last.
    reply: usize,
    /// Tokens of it read in all pauses.
    read: usize,
}

impl PendingPrompt {
    /// Whether a prompt, or what is foreseen now, is the one that was foreseen, or has come in its place.
    fn is_superseded_by(&self, prompt: &[TokenId], session: Option<&Arc<str>>) -> bool {
        let NextPrompt {
            tokens,
            session: own,
        } = &self.next;
        let both = tokens.iter().zip(prompt);
        let common = both.take_while(|(a, b)| a == b).count();
        // Requests on the side have the name too, but not half of the text.
        let named = session.is_some() && session == own.as_ref();
        common >= self.reply || (named && 2 * common >= tokens.len())
    }
}

/// What is read ahead, and what will be.
#[derive(Default)]
pub(crate) struct PrefixWarmup {
    /// Texts not begun, or put aside; the next one last.
    pending: VecDeque<PendingPrompt>,
    /// The text under way. The scheduler closes its place.
    active: Option<ActiveWarmup>,
}

/// A text under way.
struct ActiveWarmup {
    text: PendingPrompt,
    /// Tokens of it that are read, up to the last place where a state is saved.
    end: usize,
    prefill: Prefill,
    /// Up to where its state is saved.
    saved: usize,
}

impl PrefixWarmup {
    /// Whether a place on the device is held.
    pub(crate) fn is_active(&self) -> bool {
        self.active.is_some()
    }

    /// A job has come: what was foreseen of its conversation is past.
    pub(crate) fn drop_superseded(&mut self, job: &Job) {
        let session = job.params.session.as_ref();
        self.pending
            .retain(|text| !text.is_superseded_by(&job.prompt, session));
    }
}

impl Scheduler {
    /// Takes what the next prompt of a conversation will begin with. Where reading ahead is off it is forgotten.
    pub fn queue_warmup(&mut self, text: NextPrompt) {
        if !self.prefix.warmup_enabled() || self.lost.is_some() {
            return;
        }
        let reply = self.prefix.last_reply(&text.tokens);
        let pending = &mut self.warmup.pending;
        pending.retain(|old| !old.is_superseded_by(&text.tokens, text.session.as_ref()));
        if pending.len() == MAX_PENDING {
            pending.pop_front();
        }
        pending.push_back(PendingPrompt {
            next: text,
            reply,
            read: 0,
        });
    }

    /// Whether [`warmup_step`](Scheduler::warmup_step) has something to do.
    pub fn has_warmup(&self) -> bool {
        let warmup = &self.warmup;
        self.lost.is_none() && (warmup.is_active() || !warmup.pending.is_empty())
    }

    /// Reads at most one chunk of what was foreseen. To be called while [`is_idle`](Scheduler::is_idle), else it does
    /// nothing.
    ///
    /// The only error is [`DeviceError::DeviceLost`].
    pub fn warmup_step(&mut self) -> Result<(), DeviceError> {
        if !self.has_warmup() || !self.is_idle() {
            return Ok(());
        }
        if !self.warmup.is_active() {
            let Some(text) = self.warmup.pending.pop_back() else {
                return Ok(());
            };
            self.warmup.active = self.start_warmup(text)?;
        }
        let Some(mut active) = self.warmup.active.take() else {
            return Ok(());
        };
        let (seq, before) = (active.prefill.seq, active.prefill.done);
        let tokens = &active.text.next.tokens[..active.end];
        let chunk = active
            .prefill
            .chunk(&mut *self.runner, tokens, self.chunk, None);
        if let Err(error) = chunk {
            self.runner.close(seq);
            return ignore_refusal(error);
        }
        let done = active.prefill.done;
        active.text.read += done - before;
        self.prefix.count_warmup(done - before);
        let saved = match active.prefill.reached() {
            Some(stop) => self.save_warmup(&mut active, stop.head),
            None => Ok(()),
        };
        if saved.is_err() || done == active.end {
            self.runner.close(seq);
            return saved;
        }
        self.warmup.active = Some(active);
        Ok(())
    }

    /// A sequence that holds what is known of a text, if active on is worth it and takes nothing from anybody.
    fn start_warmup(&mut self, text: PendingPrompt) -> Result<Option<ActiveWarmup>, DeviceError> {
        let info = self.runner.info();
        let (align, page) = (info.prefill_align.max(1), info.pool.page_size);
        let tokens = &text.next.tokens;
        let known = self.prefix.covered(tokens);
        let mut save_points = self.prefix.save_points(tokens, known, align);
        let most = known.saturating_add(self.prefix.warmup_budget_left(text.read));
        let most = most.min(info.limits.context) / align * align;
        let end = save_points.last().map_or(0, |last| last.at.min(most));
        if end < known + self.prefix.min_warmup_tokens() {
            return Ok(None);
        }
        save_points.retain(|stop| stop.at <= end);
        if save_points.last().is_none_or(|last| last.at < end) {
            let (at, head) = (end, false);
            save_points.push(SavePoint { at, head });
        }
        let room = self.runner.capacity();
        let free = room.tokens.saturating_sub(room.evictable_tokens);
        if room.sequences == 0 || end - known + page + info.limits.tree_nodes > free {
            return Ok(None);
        }
        let seq = match self.runner.open(end) {
            Ok(seq) => seq,
            Err(error) => return ignore_refusal(error).map(|()| None),
        };
        let at = match self
            .prefix
            .restore_for_warmup(&mut *self.runner, seq, tokens)
        {
            Ok(Restored::At(position)) => position,
            Ok(Restored::NotFound) => 0,
            Ok(Restored::Broken) => {
                self.runner.close(seq);
                return Ok(None);
            }
            Err(error) => {
                self.runner.close(seq);
                return Err(error);
            }
        };
        Ok(Some(ActiveWarmup {
            text,
            end,
            prefill: Prefill::new(seq, None).resumed(at, save_points),
            saved: at,
        }))
    }

    /// A job has come, or the end: what was read is saved, and the place given back. What is left waits for another
    /// pause, if it is still to come.
    pub(crate) fn pause_warmup(&mut self) -> Result<(), DeviceError> {
        let Some(mut active) = self.warmup.active.take() else {
            return Ok(());
        };
        let new = active.prefill.done - active.saved;
        let saved = match new >= self.prefix.min_warmup_tokens() {
            true => self.save_warmup(&mut active, false),
            false => Ok(()),
        };
        self.runner.close(active.prefill.seq);
        let mut jobs = self.queue.jobs();
        let past = |job: &Job| {
            let session = job.params.session.as_ref();
            active.text.is_superseded_by(&job.prompt, session)
        };
        if !jobs.any(past) {
            self.warmup.pending.push_back(active.text);
        }
        saved
    }

    fn save_warmup(&mut self, active: &mut ActiveWarmup, head: bool) -> Result<(), DeviceError> {
        let Prefill { seq, done, .. } = active.prefill;
        active.saved = done;
        let mark = SaveInfo {
            head,
            session: active.text.next.session.as_ref(),
            from_warmup: true,
        };
        let tokens = &active.text.next.tokens[..done];
        self.prefix.save(&mut *self.runner, seq, tokens, mark)
    }
}

/// A refusal ends the active of a text, since nobody waits for it; a lost device is everyone's.
fn ignore_refusal(error: DeviceError) -> Result<(), DeviceError> {
    match error {
        lost @ DeviceError::DeviceLost { .. } => Err(lost),
        error => {
            tracing::debug!(%error, "nothing is read ahead");
            Ok(())
        }
    }
}
