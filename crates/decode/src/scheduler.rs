//! Conducts: takes jobs, admits them, and gives each `step` to a prefill chunk or to a round.

use std::mem;
use std::time::Duration;

use contract::checked::CheckedRunner;
use contract::{Capacity, DeviceError, Runner, RunnerInfo, TokenId};

use crate::ahead::Ahead;
use crate::error::lost_again;
use crate::job::admit;
use crate::parking::is_dry;
use crate::prefill::chunk_size;
use crate::prefix::{PrefixCache, PrefixConfig, Store};
use crate::queue::Queue;
use crate::round::{Verdict, round};
use crate::running::{Model, Parked, Running};
use crate::sequence::Sequence;
use crate::tree_build::{Drafted, Roots, Speculation, TreeSource};
use crate::{Clock, Event, Failure, FinishReason, Job, JobId, OutToken, Reject, Stats};

/// How a scheduler works.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Sequences decoded at once, at least 1; the runner's own limit applies too. A job takes one per choice.
    pub max_sequences: usize,
    /// Jobs that may wait; one more is refused.
    pub queue_limit: usize,
    /// Tokens that each text is thought to grow by: a job is let in where the pool has room for its prompt and so many
    /// tokens more, beside as many for each text that is being said; fewer where its `max_tokens` are. A pool that
    /// runs dry all the same costs time, never a token.
    pub reserve: usize,
    /// Prompt tokens read per call; the runner's own limit and alignment apply too.
    pub prefill_chunk: usize,
    /// The model's own ending tokens.
    pub eos: Vec<TokenId>,
    /// Up to how many best tokens are fetched alone; beyond that whole rows are.
    pub top_limit: usize,
    /// How trees are drafted. Without a draft it says nothing.
    pub speculation: Speculation,
    /// What of prompts is saved for prompts that begin alike.
    pub prefix: PrefixConfig,
    /// What rounds are timed with; `None` leaves their times at zero.
    pub clock: Option<Clock>,
}

impl Default for SchedulerConfig {
    fn default() -> SchedulerConfig {
        SchedulerConfig {
            max_sequences: 8,
            queue_limit: 64,
            reserve: 1024,
            prefill_chunk: 512,
            eos: Vec::new(),
            top_limit: 256,
            speculation: Speculation::default(),
            prefix: PrefixConfig::default(),
            clock: None,
        }
    }
}

/// Whether there is more to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Something was done; call again.
    Working,
    /// No job is left; nothing will happen until one is submitted.
    Idle,
}

/// News of jobs, oldest first.
pub(crate) type Events = Vec<(JobId, Event)>;

/// Many jobs on one runner.
pub struct Scheduler {
    /// Dropped with the scheduler, and with it everything on the device.
    pub(crate) runner: Box<dyn Runner>,
    pub(crate) trees: Box<dyn TreeSource>,
    pub(crate) config: SchedulerConfig,
    /// What all chunks are cut by.
    pub(crate) chunk: usize,
    /// The room of the empty runner, which an idle scheduler must have got back.
    empty: Capacity,
    pub(crate) queue: Queue,
    /// Freed with the runner.
    pub(crate) prefix: PrefixCache,
    /// What is read while nothing else is to be done.
    pub(crate) ahead: Ahead,
    /// In order of admission.
    pub(crate) running: Vec<Running>,
    /// News that came up between steps.
    pub(crate) news: Events,
    last: Work,
    /// What the device said when it last had no room, in the step being done.
    refusal: Option<Failure>,
    /// The call and the words with which the device was lost.
    pub(crate) lost: Option<DeviceError>,
    pub(crate) stats: Stats,
}

/// What a step may be given to; the two take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Read,
    Speak,
}

/// What came of an attempt to work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// There was nothing to do.
    Nothing,
    /// Something got further, or ended.
    Moved,
    /// The device had no room.
    Refused,
}

impl Scheduler {
    /// Takes a freshly opened runner. Trees come from its draft, if it has one.
    pub fn new(runner: Box<dyn Runner>, config: SchedulerConfig) -> Scheduler {
        let drafts = runner.info().draft_depth.is_some() && config.speculation.budget > 0;
        let trees: Box<dyn TreeSource> = if drafts {
            Box::new(Drafted::new(config.speculation.clone()))
        } else {
            Box::new(Roots)
        };
        Scheduler::with_trees(runner, config, trees)
    }

    /// As [`new`](Scheduler::new), with trees from elsewhere.
    pub fn with_trees(
        runner: Box<dyn Runner>,
        config: SchedulerConfig,
        trees: Box<dyn TreeSource>,
    ) -> Scheduler {
        let runner: Box<dyn Runner> = if cfg!(debug_assertions) {
            Box::new(CheckedRunner::new(runner))
        } else {
            runner
        };
        let info = runner.info();
        let limit = config.prefill_chunk.min(info.limits.prefill_chunk);
        Scheduler {
            chunk: chunk_size(limit, info.prefill_align),
            empty: runner.capacity(),
            runner,
            trees,
            prefix: PrefixCache::new(config.prefix.clone()),
            config,
            queue: Queue::default(),
            ahead: Ahead::default(),
            running: Vec::new(),
            news: Vec::new(),
            last: Work::Speak,
            refusal: None,
            lost: None,
            stats: Stats::default(),
        }
    }

    /// Gives the prefix cache something that keeps states beyond the process.
    #[must_use]
    pub fn keep_in(mut self, store: Box<dyn Store>) -> Scheduler {
        self.prefix.keep_in(store);
        self
    }

    /// Whether [`upkeep`](Scheduler::upkeep) has something to look at.
    pub fn has_upkeep(&self) -> bool {
        self.lost.is_none() && self.prefix.has_upkeep()
    }

    /// Does one piece of work that nobody waits for: one saved state goes to the store, if it is worth it. To be
    /// called while [`is_idle`](Scheduler::is_idle).
    ///
    /// The only error is [`DeviceError::DeviceLost`].
    pub fn upkeep(&mut self) -> Result<(), DeviceError> {
        match self.lost {
            Some(_) => Ok(()),
            None => self.prefix.upkeep(&mut *self.runner),
        }
    }

    /// Gives the store every state worth keeping that it lacks, before the process ends.
    ///
    /// The only error is [`DeviceError::DeviceLost`].
    pub fn flush(&mut self) -> Result<(), DeviceError> {
        if self.lost.is_some() {
            return Ok(());
        }
        self.put_ahead_aside()?;
        self.prefix.flush(&mut *self.runner)
    }

    /// Puts a job into the queue, or says why not.
    pub fn submit(&mut self, job: Job) -> Result<(), Reject> {
        if let Some(error) = &self.lost {
            return Err(Reject::lost(error));
        }
        let info = self.runner.info();
        admit(&job, info.vocab, info.limits.context)?;
        let live = self.running.iter().any(|running| running.id == job.id);
        if live || self.queue.find(job.id).is_some() {
            return Err(Reject::Duplicate(job.id));
        }
        if self.queue.len() >= self.config.queue_limit {
            return Err(Reject::QueueFull {
                queued: self.queue.len(),
                limit: self.config.queue_limit,
            });
        }
        self.stats.submitted += 1;
        self.ahead.see(&job);
        self.queue.push(job);
        Ok(())
    }

    /// Does one piece of device work, a prefill chunk or a round in turn, and appends what came of it to
    /// `out`. One piece and not both, so that neither's tokens wait for the other.
    ///
    /// The only error is [`DeviceError::DeviceLost`]: every job has then got its `Failed`, and no more are taken.
    pub fn step(&mut self, out: &mut Vec<(JobId, Event)>) -> Result<Progress, DeviceError> {
        out.append(&mut self.news);
        if let Some(error) = &self.lost {
            return Err(lost_again(error));
        }
        if let Err(error) = self.work(out) {
            self.lose(&error, out);
            return Err(error);
        }
        if self.is_idle() {
            self.check_returned();
            return Ok(Progress::Idle);
        }
        Ok(Progress::Working)
    }

    /// Whether no job is left and no news waits, so that `step` would do nothing.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.running.is_empty() && self.news.is_empty()
    }

    /// What it is doing and has done.
    pub fn stats(&self) -> Stats {
        let room = self.runner.capacity();
        Stats {
            queued: self.queue.len(),
            running: self.running.len(),
            sequences: self.open_sequences(),
            prefilling: self.running.iter().filter(|r| r.prefill.is_some()).count(),
            pool_tokens: self.runner.info().pool.tokens(),
            free_tokens: room.tokens,
            kept_tokens: room.evictable_tokens,
            parked: self.running.iter().map(|r| r.parked.len()).sum(),
            prefix: self.prefix.stats(&*self.runner),
            ..self.stats
        }
    }

    /// The runner's own description.
    pub fn info(&self) -> &RunnerInfo {
        self.runner.info()
    }

    fn work(&mut self, out: &mut Events) -> Result<(), DeviceError> {
        self.refusal = None;
        self.stats.pool_waits = false;
        if !self.queue.is_empty() {
            self.put_ahead_aside()?;
        }
        self.prepare()?;
        // Whoever was in goes on before anyone begins.
        let mut refused = self.resume(out)? == Attempt::Refused;
        refused |= self.begin_choices(out)? == Attempt::Refused;
        if !self.stats.pool_waits {
            refused |= self.admit_queued(out)? == Attempt::Refused;
        }
        let order = match self.last {
            Work::Speak => [Work::Read, Work::Speak],
            Work::Read => [Work::Speak, Work::Read],
        };
        for work in order {
            let attempt = match work {
                Work::Read => self.read(out)?,
                Work::Speak => self.speak(out)?,
            };
            match attempt {
                Attempt::Nothing => {}
                Attempt::Refused => refused = true,
                Attempt::Moved => {
                    self.last = work;
                    return Ok(());
                }
            }
        }
        if refused {
            // Where the device itself lacked something, saved states go before anyone fails.
            let lacking = self.refusal.is_some();
            if !lacking || !self.prefix.shed(&mut *self.runner)? {
                self.make_room(out);
            }
        }
        Ok(())
    }

    /// Lets the source of trees get ready for the first job that may be drafted for.
    fn prepare(&mut self) -> Result<(), DeviceError> {
        let first = self.queue.first().filter(|_| self.running.is_empty());
        let (Some(clock), Some(true)) =
            (self.config.clock, first.map(|job| job.settings.speculate))
        else {
            return Ok(());
        };
        match self.trees.prepare(&mut *self.runner, clock) {
            // Whatever the device refused here, the job will hear of it when it asks for the same.
            Err(lost @ DeviceError::DeviceLost { .. }) => Err(lost),
            Err(error) => {
                tracing::warn!(%error, "the costs of passes could not be measured");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Tells of new tokens, and of the end where they bring it; then the sequence's place is closed.
    pub(crate) fn tell(
        &mut self,
        sequence: &Sequence,
        tokens: Vec<OutToken>,
        ending: Option<FinishReason>,
        out: &mut Events,
    ) {
        let (id, choice) = (sequence.job, sequence.choice);
        self.stats.generated_tokens += tokens.len() as u64;
        out.push((id, Event::Tokens { choice, tokens }));
        if let Some(reason) = ending {
            self.runner.close(sequence.seq);
            self.stats.finished += 1;
            let stats = sequence.stats;
            let event = Event::Finished {
                choice,
                reason,
                stats,
            };
            out.push((id, event));
        }
    }

    /// Takes every sequence that speaks one round further.
    fn speak(&mut self, out: &mut Events) -> Result<Attempt, DeviceError> {
        let mut batch: Vec<&mut Sequence> = self
            .running
            .iter_mut()
            .flat_map(|running| &mut running.sequences)
            .collect();
        if batch.is_empty() {
            return Ok(Attempt::Nothing);
        }
        let _span = tracing::trace_span!("round", sequences = batch.len()).entered();
        let clock = self.config.clock.unwrap_or(|| Duration::ZERO);
        let outcome = round(&mut *self.runner, &mut *self.trees, &mut batch, clock)?;
        let whose: Vec<(JobId, usize)> = batch.iter().map(|s| (s.job, s.choice)).collect();
        self.stats.rounds += 1;
        self.stats.undrafted_rounds += u64::from(outcome.undrafted);
        self.stats.drafted_tokens += outcome.counts.drafted;
        self.stats.accepted_tokens += outcome.counts.accepted;
        self.stats.forced_tokens += outcome.counts.forced;
        self.stats.drafted_rounds += u64::from(outcome.counts.depths.rounds);
        let kept = self.stats.kept_depths.iter_mut();
        for (sum, round) in kept.zip(outcome.counts.depths.kept) {
            *sum += u64::from(round);
        }
        self.stats.times.add(outcome.times);
        let mut went = 0;
        let mut attempt = Attempt::Refused;
        let mut dry = false;
        for ((id, choice), verdict) in whose.into_iter().zip(outcome.verdicts) {
            // A choice that failed earlier in this loop took its whole job with it.
            let Some(at) = self.running.iter().position(|running| running.id == id) else {
                continue;
            };
            match verdict {
                Verdict::Waits(error) => {
                    dry |= is_dry(&error);
                    self.refused(&error);
                }
                Verdict::Fails(error) => {
                    attempt = Attempt::Moved;
                    self.fail(at, &error, out)?;
                }
                Verdict::Went(walk) => {
                    attempt = Attempt::Moved;
                    went += 1;
                    self.settle(at, choice, walk, out);
                }
            }
        }
        self.stats.batched += went as u64;
        self.stats.largest_batch = self.stats.largest_batch.max(went);
        self.retire();
        if dry && self.park()? {
            attempt = Attempt::Moved;
        }
        Ok(attempt)
    }

    /// Tells what a round gave a choice, and lets it go if it ended.
    fn settle(&mut self, at: usize, choice: usize, walk: crate::accept::Walk, out: &mut Events) {
        let sequences = &mut self.running[at].sequences;
        let Some(i) = sequences.iter().position(|s| s.choice == choice) else {
            return;
        };
        if let Some(fault) = sequences[i].fault() {
            let detail = fault.to_owned();
            return self.remove_failed(at, Failure::Constraint { detail }, out);
        }
        let sequence = sequences.remove(i);
        self.tell(&sequence, walk.tokens, walk.ending, out);
        if walk.ending.is_none() {
            self.running[at].sequences.insert(i, sequence);
        }
    }

    /// Nothing could move for want of room: the job that came last gives up its own.
    fn make_room(&mut self, out: &mut Events) {
        let latest = self.running.iter().enumerate();
        let victim = latest.max_by_key(|(_, running)| running.turn);
        let (prompt, max_tokens) = match (victim, self.queue.first()) {
            (Some((_, running)), _) => (running.prompt.len(), running.settings.max_tokens),
            (None, Some(job)) => (job.prompt.len(), job.settings.max_tokens),
            (None, None) => return,
        };
        let victim = victim.map(|(at, _)| at);
        let context = self.runner.info().limits.context;
        let wanted = prompt.saturating_add(max_tokens).min(context);
        let failure = self.refusal.take().unwrap_or(Failure::OutOfMemory {
            what: "context tokens",
            wanted: wanted as u64,
            free: self.runner.capacity().tokens as u64,
        });
        match victim {
            Some(at) => self.remove_failed(at, failure, out),
            None => {
                if let Some((_, entry)) = self.queue.pop() {
                    self.stats.failed += 1;
                    let error = failure;
                    out.push((entry.job.id, Event::Failed { error }));
                }
            }
        }
    }

    /// Counts a refusal for want of room and keeps its words.
    pub(crate) fn refused(&mut self, error: &DeviceError) {
        self.stats.waits += 1;
        self.refusal = Some(Failure::from(error));
    }

    /// Fails one job for a device's refusal; a lost device is everyone's.
    pub(crate) fn fail(
        &mut self,
        at: usize,
        error: &DeviceError,
        out: &mut Events,
    ) -> Result<(), DeviceError> {
        if let DeviceError::DeviceLost { .. } = error {
            return Err(lost_again(error));
        }
        self.remove_failed(at, Failure::from(error), out);
        Ok(())
    }

    pub(crate) fn remove_failed(&mut self, at: usize, error: Failure, out: &mut Events) {
        let running = self.running.remove(at);
        tracing::warn!(job = running.id.0, %error, "job failed");
        running.places().for_each(|seq| self.runner.close(seq));
        let states = running.parked.iter().filter_map(Parked::state);
        let ends = running.prompt_end.iter().map(|end| end.snapshot);
        states
            .chain(ends)
            .for_each(|snapshot| self.runner.free_snapshot(snapshot));
        self.stats.failed += 1;
        out.push((running.id, Event::Failed { error }));
    }

    /// Tells every job that the device is lost.
    fn lose(&mut self, error: &DeviceError, out: &mut Events) {
        tracing::error!(%error, "every job fails");
        let running = mem::take(&mut self.running).into_iter().map(|r| r.id);
        let queued = mem::take(&mut self.queue);
        for id in running.chain(queued.into_ids()) {
            self.stats.failed += 1;
            let error = Failure::from(error);
            out.push((id, Event::Failed { error }));
        }
        self.lost = Some(lost_again(error));
    }

    /// Frees saved prompt ends nobody waits for, and forgets jobs that are done.
    pub(crate) fn retire(&mut self) {
        for running in &mut self.running {
            if running.unbegun.is_empty()
                && let Some(end) = running.prompt_end.take()
            {
                self.runner.free_snapshot(end.snapshot);
            }
        }
        self.running.retain(|running| !running.is_done());
    }

    /// An idle scheduler holds nothing, so the runner must be as empty as at the start.
    fn check_returned(&mut self) {
        if self.ahead.is_reading() {
            return;
        }
        let mut room = self.runner.capacity();
        if !self.prefix.is_empty() {
            // How much saved states hold is the runner's business.
            room.snapshot_bytes = self.empty.snapshot_bytes;
            room.evictable_tokens = self.empty.evictable_tokens;
        }
        if room != self.empty {
            self.stats.leaks += 1;
            tracing::error!(?room, empty = ?self.empty, "the device has not got everything back");
            // Told once for each loss.
            self.empty = room;
        }
    }

    pub(crate) fn open_sequences(&self) -> usize {
        self.running.iter().map(|r| r.places().count()).sum()
    }

    pub(crate) fn model(&self) -> Model<'_> {
        let info = self.runner.info();
        Model {
            eos: &self.config.eos,
            vocab: info.vocab,
            context: info.limits.context,
            top_limit: self.config.top_limit,
        }
    }
}
