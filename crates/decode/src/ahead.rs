//! Reads in pauses what the next prompt of a conversation will begin with.
//!
//! A template shows a finished turn otherwise than the prompt that asked for it: thoughts go once the next wish comes,
//! and with them every state behind the first of them. Whoever writes prompts knows the new form as soon as the reply
//! is whole, and hands its tokens over ([`Scheduler::foresee`]); while there is nothing else to do they are read chunk
//! by chunk ([`Scheduler::read_ahead`]) and their states saved, so that the next prompt goes on from there. A prompt
//! that begins otherwise loses nothing: states are found by tokens, here as everywhere. The rules:
//!
//! - Only an idle scheduler reads ahead. The first job waits for the chunk under way and no longer; what was read until
//!   then is saved, and the rest is read in another pause, unless that job's prompt is the one that was foreseen.
//! - A conversation has one text at most: what is foreseen of it next, or its next prompt, takes its place. They are
//!   known for the same by what stands before the reply that was made last.
//! - A text is read only where that spares its prompt [`apart`](crate::Boundaries::apart) tokens, from the longest state
//!   there is, and [`PrefixConfig::ahead`](crate::PrefixConfig::ahead) tokens of it at most.
//! - It takes only pages that neither a sequence nor a saved state holds, and while no prompt has used them its states
//!   are the first to be given up ([`prefix`](crate::prefix)), so nothing that is known to be of use goes for a guess.

use std::collections::VecDeque;
use std::sync::Arc;

use contract::{DeviceError, TokenId};

use crate::prefill::Prefill;
use crate::prefix::{Mark, Restored, Stop};
use crate::{Job, Scheduler};

/// Texts that wait for a pause; with one more the oldest goes. So many conversations may be in a pause at once.
const TEXTS: usize = 4;

/// What the next prompt of a conversation will begin with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Foreseen {
    /// Its tokens, as far as they are known.
    pub tokens: Arc<[TokenId]>,
    /// The conversation, as [`Settings::session`](crate::Settings::session).
    pub session: Option<Arc<str>>,
}

/// A text that is still to come.
struct Text {
    foreseen: Foreseen,
    /// Where the reply begins that was made last.
    reply: usize,
    /// Tokens of it read in all pauses.
    read: usize,
}

impl Text {
    /// Whether a prompt, or what is foreseen now, is the one that was foreseen, or has come in its place.
    fn is_past(&self, prompt: &[TokenId], session: Option<&Arc<str>>) -> bool {
        let Foreseen {
            tokens,
            session: own,
        } = &self.foreseen;
        let both = tokens.iter().zip(prompt);
        let common = both.take_while(|(a, b)| a == b).count();
        // Requests on the side have the name too, but not half of the text.
        let named = session.is_some() && session == own.as_ref();
        common >= self.reply || (named && 2 * common >= tokens.len())
    }
}

/// What is read ahead, and what will be.
#[derive(Default)]
pub(crate) struct Ahead {
    /// Texts not begun, or put aside; the next one last.
    waiting: VecDeque<Text>,
    /// The text under way. The scheduler closes its place.
    reading: Option<Reading>,
}

/// A text under way.
struct Reading {
    text: Text,
    /// Tokens of it that are read, up to the last place where a state is saved.
    end: usize,
    prefill: Prefill,
    /// Up to where its state is saved.
    saved: usize,
}

impl Ahead {
    /// Whether a place on the device is held.
    pub(crate) fn is_reading(&self) -> bool {
        self.reading.is_some()
    }

    /// A job has come: what was foreseen of its conversation is past.
    pub(crate) fn see(&mut self, job: &Job) {
        let session = job.settings.session.as_ref();
        self.waiting
            .retain(|text| !text.is_past(&job.prompt, session));
    }
}

impl Scheduler {
    /// Takes what the next prompt of a conversation will begin with. Where reading ahead is off it is forgotten.
    pub fn foresee(&mut self, text: Foreseen) {
        if !self.prefix.reads_ahead() || self.lost.is_some() {
            return;
        }
        let reply = self.prefix.last_reply(&text.tokens);
        let waiting = &mut self.ahead.waiting;
        waiting.retain(|old| !old.is_past(&text.tokens, text.session.as_ref()));
        if waiting.len() == TEXTS {
            waiting.pop_front();
        }
        waiting.push_back(Text {
            foreseen: text,
            reply,
            read: 0,
        });
    }

    /// Whether [`read_ahead`](Scheduler::read_ahead) has something to do.
    pub fn has_ahead(&self) -> bool {
        let ahead = &self.ahead;
        self.lost.is_none() && (ahead.is_reading() || !ahead.waiting.is_empty())
    }

    /// Reads at most one chunk of what was foreseen. To be called while [`is_idle`](Scheduler::is_idle), else it does
    /// nothing.
    ///
    /// The only error is [`DeviceError::DeviceLost`].
    pub fn read_ahead(&mut self) -> Result<(), DeviceError> {
        if !self.has_ahead() || !self.is_idle() {
            return Ok(());
        }
        if !self.ahead.is_reading() {
            let Some(text) = self.ahead.waiting.pop_back() else {
                return Ok(());
            };
            self.ahead.reading = self.begin_ahead(text)?;
        }
        let Some(mut reading) = self.ahead.reading.take() else {
            return Ok(());
        };
        let (seq, before) = (reading.prefill.seq, reading.prefill.done);
        let tokens = &reading.text.foreseen.tokens[..reading.end];
        let chunk = reading
            .prefill
            .chunk(&mut *self.runner, tokens, self.chunk, None);
        if let Err(error) = chunk {
            self.runner.close(seq);
            return given_up(error);
        }
        let done = reading.prefill.done;
        reading.text.read += done - before;
        self.prefix.count_ahead(done - before);
        let saved = match reading.prefill.reached() {
            Some(stop) => self.save_ahead(&mut reading, stop.head),
            None => Ok(()),
        };
        if saved.is_err() || done == reading.end {
            self.runner.close(seq);
            return saved;
        }
        self.ahead.reading = Some(reading);
        Ok(())
    }

    /// A sequence that holds what is known of a text, if reading on is worth it and takes nothing from anybody.
    fn begin_ahead(&mut self, text: Text) -> Result<Option<Reading>, DeviceError> {
        let info = self.runner.info();
        let (align, page) = (info.prefill_align.max(1), info.pool.page_size);
        let tokens = &text.foreseen.tokens;
        let known = self.prefix.covered(tokens);
        let mut stops = self.prefix.stops(tokens, known, align);
        let most = known.saturating_add(self.prefix.ahead_left(text.read));
        let most = most.min(info.limits.context) / align * align;
        let end = stops.last().map_or(0, |last| last.at.min(most));
        if end < known + self.prefix.least_ahead() {
            return Ok(None);
        }
        stops.retain(|stop| stop.at <= end);
        if stops.last().is_none_or(|last| last.at < end) {
            let (at, head) = (end, false);
            stops.push(Stop { at, head });
        }
        let room = self.runner.capacity();
        let free = room.tokens.saturating_sub(room.evictable_tokens);
        if room.sequences == 0 || end - known + page + info.limits.tree_nodes > free {
            return Ok(None);
        }
        let seq = match self.runner.open(end) {
            Ok(seq) => seq,
            Err(error) => return given_up(error).map(|()| None),
        };
        let at = match self.prefix.resume(&mut *self.runner, seq, tokens) {
            Ok(Restored::At(position)) => position,
            Ok(Restored::Nothing) => 0,
            Ok(Restored::Broken) => {
                self.runner.close(seq);
                return Ok(None);
            }
            Err(error) => {
                self.runner.close(seq);
                return Err(error);
            }
        };
        Ok(Some(Reading {
            text,
            end,
            prefill: Prefill::new(seq, None).resumed(at, stops),
            saved: at,
        }))
    }

    /// A job has come, or the end: what was read is saved, and the place given back. What is left waits for another
    /// pause, if it is still to come.
    pub(crate) fn put_ahead_aside(&mut self) -> Result<(), DeviceError> {
        let Some(mut reading) = self.ahead.reading.take() else {
            return Ok(());
        };
        let new = reading.prefill.done - reading.saved;
        let saved = match new >= self.prefix.least_ahead() {
            true => self.save_ahead(&mut reading, false),
            false => Ok(()),
        };
        self.runner.close(reading.prefill.seq);
        let mut jobs = self.queue.jobs();
        let past = |job: &Job| {
            let session = job.settings.session.as_ref();
            reading.text.is_past(&job.prompt, session)
        };
        if !jobs.any(past) {
            self.ahead.waiting.push_back(reading.text);
        }
        saved
    }

    fn save_ahead(&mut self, reading: &mut Reading, head: bool) -> Result<(), DeviceError> {
        let Prefill { seq, done, .. } = reading.prefill;
        reading.saved = done;
        let mark = Mark {
            head,
            session: reading.text.foreseen.session.as_ref(),
            ahead: true,
        };
        let tokens = &reading.text.foreseen.tokens[..done];
        self.prefix.save(&mut *self.runner, seq, tokens, mark)
    }
}

/// A refusal ends the reading of a text, since nobody waits for it; a lost device is everyone's.
fn given_up(error: DeviceError) -> Result<(), DeviceError> {
    match error {
        lost @ DeviceError::DeviceLost { .. } => Err(lost),
        error => {
            tracing::debug!(%error, "nothing is read ahead");
            Ok(())
        }
    }
}
