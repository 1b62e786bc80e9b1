//! Prefix warm-up: while idle, prefills the start of a conversation's expected next prompt.
//!
//! Chat templates re-render past turns, for example without reasoning, so the cached prefix would
//! miss. The caller knows the new rendering once the reply is complete and queues its tokens
//! ([`Scheduler::queue_warmup`](super::Scheduler::queue_warmup)). Their prefixes are saved like any
//! others. A prompt that starts otherwise loses nothing, since prefixes are found by their tokens.
//! The rules:
//!
//! - Only an idle scheduler warms up. An arriving job waits for at most one chunk. What was
//!   prefilled is saved, and the rest waits for the next idle time unless that job supersedes it.
//! - A conversation has one pending prompt. A newer one, or the actual next prompt, replaces it.
//!   Two prompts belong together if they agree up to the start of the last reply.
//! - Warm-up must spare the prompt at least [`min_distance`](crate::SavePointConfig::min_distance)
//!   tokens, and prefills at most [`warmup_tokens`](crate::PrefixConfig::warmup_tokens).
//! - It takes only pages that neither a sequence nor a prefix holds. Its prefixes are evicted first
//!   until a prompt uses them.

use std::collections::VecDeque;
use std::sync::Arc;

use contract::{DeviceError, TokenId};

use crate::job::Job;
use crate::prefix::{PrefixCache, Restored, SaveInfo, SavePoint};

use super::device::Device;
use super::prefill::Prefill;

/// Maximum number of pending prompts; one more drops the oldest.
const MAX_PENDING: usize = 4;

/// The expected start of a conversation's next prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NextPrompt {
    /// The known tokens.
    pub tokens: Arc<[TokenId]>,
    /// The conversation, as [`GenerationParams::session`](crate::GenerationParams::session).
    pub session: Option<Arc<str>>,
}

/// A prompt that is expected and has not arrived.
struct PendingPrompt {
    next: NextPrompt,
    /// Start of the last reply, in tokens.
    reply: usize,
    /// Tokens of it prefilled so far, over all idle times.
    prefilled: usize,
}

impl PendingPrompt {
    /// Whether a prompt, arrived or expected, is this one or replaces it.
    fn is_superseded_by(&self, prompt: &[TokenId], session: Option<&Arc<str>>) -> bool {
        let NextPrompt {
            tokens,
            session: own,
        } = &self.next;
        let both = tokens.iter().zip(prompt);
        let common = both.take_while(|(a, b)| a == b).count();
        // Side requests carry the session's name too, but share less than half of the tokens.
        let same_session = session.is_some() && session == own.as_ref();
        common >= self.reply || (same_session && 2 * common >= tokens.len())
    }
}

/// Expected prompts, and the one in prefill.
#[derive(Default)]
pub(super) struct PrefixWarmup {
    /// Prompts not started or paused; the next one is last.
    pending: VecDeque<PendingPrompt>,
    active: Option<ActiveWarmup>,
}

/// An expected prompt in prefill.
struct ActiveWarmup {
    prompt: PendingPrompt,
    /// Tokens to prefill, up to the last save point.
    end: usize,
    prefill: Prefill,
    /// Tokens whose state is saved.
    saved: usize,
}

impl PrefixWarmup {
    /// Whether a sequence is open on the device.
    pub(super) fn is_active(&self) -> bool {
        self.active.is_some()
    }

    /// Whether [`step`](PrefixWarmup::step) has something to do.
    pub(super) fn has_work(&self) -> bool {
        self.is_active() || !self.pending.is_empty()
    }

    /// Drops the pending prompts that an arriving job supersedes.
    pub(super) fn drop_superseded(&mut self, job: &Job) {
        let session = job.params.session.as_ref();
        self.pending
            .retain(|pending| !pending.is_superseded_by(&job.prompt, session));
    }

    /// Adds an expected prompt.
    pub(super) fn push(&mut self, next: NextPrompt, prefix: &PrefixCache) {
        let reply = prefix.last_reply(&next.tokens);
        self.pending
            .retain(|old| !old.is_superseded_by(&next.tokens, next.session.as_ref()));
        if self.pending.len() == MAX_PENDING {
            self.pending.pop_front();
        }
        self.pending.push_back(PendingPrompt {
            next,
            reply,
            prefilled: 0,
        });
    }

    /// Prefills at most one chunk. The only error is a lost device.
    pub(super) fn step(
        &mut self,
        device: &mut Device,
        prefix: &mut PrefixCache,
    ) -> Result<(), DeviceError> {
        if !self.is_active() {
            let Some(prompt) = self.pending.pop_back() else {
                return Ok(());
            };
            self.active = ActiveWarmup::start(prompt, device, prefix)?;
        }
        let Some(mut active) = self.active.take() else {
            return Ok(());
        };
        let (seq, before) = (active.prefill.seq, active.prefill.done);
        let tokens = &active.prompt.next.tokens[..active.end];
        let size = device.chunk();
        let chunk = active.prefill.chunk(device.runner(), tokens, size, None);
        if let Err(error) = chunk {
            device.close(seq);
            return ignore_unless_lost(error);
        }
        let done = active.prefill.done;
        active.prompt.prefilled += done - before;
        prefix.count_warmup(done - before);
        let saved = match active.prefill.take_reached() {
            Some(save_point) => active.save(device, prefix, save_point.system_prefix),
            None => Ok(()),
        };
        if saved.is_err() || done == active.end {
            device.close(seq);
            return saved;
        }
        self.active = Some(active);
        Ok(())
    }

    /// Saves what was prefilled and closes the sequence. The rest stays pending unless one of
    /// `jobs` supersedes it.
    ///
    /// The only error is a lost device.
    pub(super) fn pause<'a, I: Iterator<Item = &'a Job>>(
        &mut self,
        device: &mut Device,
        prefix: &mut PrefixCache,
        jobs: impl FnOnce() -> I,
    ) -> Result<(), DeviceError> {
        let Some(mut active) = self.active.take() else {
            return Ok(());
        };
        let unsaved = active.prefill.done - active.saved;
        let saved = if unsaved >= prefix.min_warmup_tokens() {
            active.save(device, prefix, false)
        } else {
            Ok(())
        };
        device.close(active.prefill.seq);
        let prompt = active.prompt;
        let supersedes =
            |job: &Job| prompt.is_superseded_by(&job.prompt, job.params.session.as_ref());
        if !jobs().any(supersedes) {
            self.pending.push_back(prompt);
        }
        saved
    }
}

impl ActiveWarmup {
    /// Opens a sequence from the longest cached prefix, if prefilling the rest saves enough and
    /// takes no used pages.
    fn start(
        prompt: PendingPrompt,
        device: &mut Device,
        prefix: &mut PrefixCache,
    ) -> Result<Option<ActiveWarmup>, DeviceError> {
        let info = device.info();
        let (align, page) = (info.prefill_align.max(1), info.pool.page_size);
        let tokens = &prompt.next.tokens;
        let cached = prefix.longest_prefix_len(tokens);
        let mut save_points = prefix.save_points(tokens, cached, align);
        let most = cached.saturating_add(prefix.warmup_budget_left(prompt.prefilled));
        let most = most.min(info.limits.context) / align * align;
        let end = save_points.last().map_or(0, |last| last.at.min(most));
        if end < cached + prefix.min_warmup_tokens() {
            return Ok(None);
        }
        save_points.retain(|save_point| save_point.at <= end);
        if save_points.last().is_none_or(|last| last.at < end) {
            let (at, system_prefix) = (end, false);
            save_points.push(SavePoint { at, system_prefix });
        }
        let capacity = device.capacity();
        let free = capacity.tokens.saturating_sub(capacity.evictable_tokens);
        if capacity.sequences == 0 || end - cached + page + info.limits.tree_nodes > free {
            return Ok(None);
        }
        let seq = match device.runner().open(end) {
            Ok(seq) => seq,
            Err(error) => return ignore_unless_lost(error).map(|()| None),
        };
        let at = match prefix.restore_for_warmup(device.runner(), seq, tokens) {
            Ok(Restored::At(position)) => position,
            Ok(Restored::NotFound) => 0,
            Ok(Restored::Broken) => {
                device.close(seq);
                return Ok(None);
            }
            Err(error) => {
                device.close(seq);
                return Err(error);
            }
        };
        Ok(Some(ActiveWarmup {
            prompt,
            end,
            prefill: Prefill::new(seq, None).resumed(at, save_points),
            saved: at,
        }))
    }

    fn save(
        &mut self,
        device: &mut Device,
        prefix: &mut PrefixCache,
        system_prefix: bool,
    ) -> Result<(), DeviceError> {
        let Prefill { seq, done, .. } = self.prefill;
        self.saved = done;
        let info = SaveInfo {
            system_prefix,
            session: self.prompt.next.session.as_ref(),
            from_warmup: true,
        };
        let tokens = &self.prompt.next.tokens[..done];
        prefix.save(device.runner(), seq, tokens, info)
    }
}

/// Drops a refusal, since no job waits for warm-up. A lost device is an error.
fn ignore_unless_lost(error: DeviceError) -> Result<(), DeviceError> {
    if let DeviceError::DeviceLost { .. } = error {
        return Err(error);
    }
    tracing::debug!(%error, "prefix warm-up dropped");
    Ok(())
}
