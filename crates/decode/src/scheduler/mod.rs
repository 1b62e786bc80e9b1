//! Conducts: takes jobs, admits them, and gives each `step` to a prefill chunk or to a round.

mod accept;
mod admission;
mod cancel;
mod decode_step;
mod preemption;
mod prefill;
mod queue;
mod running;
mod sequence;
mod validate;
mod warmup;

use std::mem;
use std::time::Duration;

use contract::checked::CheckedRunner;
use contract::{Capacity, DeviceError, Runner, RunnerInfo, TokenId};

use self::decode_step::{SequenceOutcome, decode_step};
use self::preemption::pool_exhausted;
use self::prefill::chunk_size;
use self::queue::WaitingQueue;
use self::running::{ModelLimits, Preempted, RunningJob};
use self::sequence::Sequence;
use self::validate::validate;
pub use self::warmup::NextPrompt;
use self::warmup::PrefixWarmup;
use crate::error::lost_again;
use crate::error::{JobError, SubmitError};
use crate::event::{Event, FinishReason, OutputToken};
use crate::job::{Job, JobId};
use crate::prefix::{PrefixCache, PrefixConfig, Store};
use crate::speculation::Clock;
use crate::speculation::{DraftModelSource, NoDraft, Speculation, TreeSource};
use crate::stats::Stats;

/// How a scheduler works.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Sequences decoded at once, at least 1; the runner's own limit applies too. A job takes one per choice.
    pub max_sequences: usize,
    /// Jobs that may wait; one more is refused.
    pub queue_limit: usize,
    /// Tokens that each text is thought to grow by: a job is let in where the pool has room for its prompt and so many
    /// tokens more, beside as many for each text that is being said; fewer where its `max_tokens` are. A pool that
    /// runs exhausted all the same costs time, never a token.
    pub reserve: usize,
    /// Prompt tokens read per call; the runner's own limit and alignment apply too.
    pub prefill_chunk: usize,
    /// The model's own finish_reason tokens.
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
    pub(crate) queue: WaitingQueue,
    /// Freed with the runner.
    pub(crate) prefix: PrefixCache,
    /// What is read while nothing else is to be done.
    pub(crate) warmup: PrefixWarmup,
    /// In order of admission.
    pub(crate) running: Vec<RunningJob>,
    /// News that came up between steps.
    pub(crate) pending_events: Events,
    last_phase: Phase,
    /// What the device said when it last had no room, in the step being done.
    last_out_of_memory: Option<JobError>,
    /// The call and the words with which the device was lost.
    pub(crate) lost: Option<DeviceError>,
    pub(crate) stats: Stats,
}

/// What a step may be given to; the two take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Prefill,
    Decode,
}

/// What came of an outcome to work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepOutcome {
    /// There was nothing to do.
    NothingToDo,
    /// Something got further, or ended.
    Advanced,
    /// The device had no room.
    OutOfMemory,
}

impl Scheduler {
    /// Takes a freshly opened runner. Trees come from its draft, if it has one.
    pub fn new(runner: Box<dyn Runner>, config: SchedulerConfig) -> Scheduler {
        let drafts = runner.info().draft_depth.is_some() && config.speculation.budget > 0;
        let trees: Box<dyn TreeSource> = if drafts {
            Box::new(DraftModelSource::new(config.speculation.clone()))
        } else {
            Box::new(NoDraft)
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
            queue: WaitingQueue::default(),
            warmup: PrefixWarmup::default(),
            running: Vec::new(),
            pending_events: Vec::new(),
            last_phase: Phase::Decode,
            last_out_of_memory: None,
            lost: None,
            stats: Stats::default(),
        }
    }

    /// Gives the prefix cache something that keeps states beyond the process.
    #[must_use]
    pub fn with_store(mut self, store: Box<dyn Store>) -> Scheduler {
        self.prefix.with_store(store);
        self
    }

    /// Whether [`persist_next`](Scheduler::persist_next) has something to look at.
    pub fn has_unpersisted(&self) -> bool {
        self.lost.is_none() && self.prefix.has_unpersisted()
    }

    /// Does one piece of work that nobody waits for: one saved state goes to the store, if it is worth it. To be
    /// called while [`is_idle`](Scheduler::is_idle).
    ///
    /// The only error is [`DeviceError::DeviceLost`].
    pub fn persist_next(&mut self) -> Result<(), DeviceError> {
        match self.lost {
            Some(_) => Ok(()),
            None => self.prefix.persist_next(&mut *self.runner),
        }
    }

    /// Gives the store every state worth keeping that it lacks, before the process ends.
    ///
    /// The only error is [`DeviceError::DeviceLost`].
    pub fn flush(&mut self) -> Result<(), DeviceError> {
        if self.lost.is_some() {
            return Ok(());
        }
        self.pause_warmup()?;
        self.prefix.flush(&mut *self.runner)
    }

    /// Puts a job into the queue, or says why not.
    pub fn submit(&mut self, job: Job) -> Result<(), SubmitError> {
        if let Some(error) = &self.lost {
            return Err(SubmitError::lost(error));
        }
        let info = self.runner.info();
        validate(&job, info.vocab, info.limits.context)?;
        let live = self.running.iter().any(|running| running.id == job.id);
        if live || self.queue.find(job.id).is_some() {
            return Err(SubmitError::Duplicate(job.id));
        }
        if self.queue.len() >= self.config.queue_limit {
            return Err(SubmitError::QueueFull {
                queued: self.queue.len(),
                limit: self.config.queue_limit,
            });
        }
        self.stats.submitted += 1;
        self.warmup.drop_superseded(&job);
        self.queue.push(job);
        Ok(())
    }

    /// Does one piece of device work, a prefill chunk or a round in key, and appends what came of it to
    /// `out`. One piece and not both, so that neither's tokens wait for the other.
    ///
    /// The only error is [`DeviceError::DeviceLost`]: every job has then got its `Failed`, and no more are taken.
    pub fn step(&mut self, out: &mut Vec<(JobId, Event)>) -> Result<Progress, DeviceError> {
        out.append(&mut self.pending_events);
        if let Some(error) = &self.lost {
            return Err(lost_again(error));
        }
        if let Err(error) = self.run_step(out) {
            self.fail_all(&error, out);
            return Err(error);
        }
        if self.is_idle() {
            self.check_for_leaks();
            return Ok(Progress::Idle);
        }
        Ok(Progress::Working)
    }

    /// Whether no job is left and no pending_events waits, so that `step` would do nothing.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.running.is_empty() && self.pending_events.is_empty()
    }

    /// What it is doing and has done.
    pub fn stats(&self) -> Stats {
        let room = self.runner.capacity();
        Stats {
            queued: self.queue.len(),
            running: self.running.len(),
            sequences: self.n_open_sequences(),
            prefilling: self.running.iter().filter(|r| r.prefill.is_some()).count(),
            pool_tokens: self.runner.info().pool.tokens(),
            free_tokens: room.tokens,
            evictable_tokens: room.evictable_tokens,
            preempted: self.running.iter().map(|r| r.preempted.len()).sum(),
            prefix: self.prefix.stats(&*self.runner),
            ..self.stats
        }
    }

    /// The runner's own description.
    pub fn info(&self) -> &RunnerInfo {
        self.runner.info()
    }

    fn run_step(&mut self, out: &mut Events) -> Result<(), DeviceError> {
        self.last_out_of_memory = None;
        self.stats.pool_waits = false;
        if !self.queue.is_empty() {
            self.pause_warmup()?;
        }
        self.prepare()?;
        // Whoever was in goes on before anyone begins.
        let mut out_of_memory = self.resume(out)? == StepOutcome::OutOfMemory;
        out_of_memory |= self.start_pending_choices(out)? == StepOutcome::OutOfMemory;
        if !self.stats.pool_waits {
            out_of_memory |= self.admit_queued(out)? == StepOutcome::OutOfMemory;
        }
        let order = match self.last_phase {
            Phase::Decode => [Phase::Prefill, Phase::Decode],
            Phase::Prefill => [Phase::Decode, Phase::Prefill],
        };
        for phase in order {
            let outcome = match phase {
                Phase::Prefill => self.run_prefill_chunk(out)?,
                Phase::Decode => self.run_decode_step(out)?,
            };
            match outcome {
                StepOutcome::NothingToDo => {}
                StepOutcome::OutOfMemory => out_of_memory = true,
                StepOutcome::Advanced => {
                    self.last_phase = phase;
                    return Ok(());
                }
            }
        }
        if out_of_memory {
            // Where the device itself lacked something, saved states go before anyone fails.
            let device_memory = self.last_out_of_memory.is_some();
            if !device_memory || !self.prefix.evict_one(&mut *self.runner)? {
                self.fail_last_admitted(out);
            }
        }
        Ok(())
    }

    /// Lets the source of trees get ready for the first job that may be drafted for.
    fn prepare(&mut self) -> Result<(), DeviceError> {
        let first = self.queue.first().filter(|_| self.running.is_empty());
        let (Some(clock), Some(true)) = (self.config.clock, first.map(|job| job.params.speculate))
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
    pub(crate) fn emit(
        &mut self,
        sequence: &Sequence,
        tokens: Vec<OutputToken>,
        finish_reason: Option<FinishReason>,
        out: &mut Events,
    ) {
        let (id, choice) = (sequence.job, sequence.choice);
        self.stats.generated_tokens += tokens.len() as u64;
        out.push((id, Event::Tokens { choice, tokens }));
        if let Some(reason) = finish_reason {
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
    fn run_decode_step(&mut self, out: &mut Events) -> Result<StepOutcome, DeviceError> {
        let mut batch: Vec<&mut Sequence> = self
            .running
            .iter_mut()
            .flat_map(|running| &mut running.sequences)
            .collect();
        if batch.is_empty() {
            return Ok(StepOutcome::NothingToDo);
        }
        let _span = tracing::trace_span!("round", sequences = batch.len()).entered();
        let clock = self.config.clock.unwrap_or(|| Duration::ZERO);
        let decoded = decode_step(&mut *self.runner, &mut *self.trees, &mut batch, clock)?;
        let owners: Vec<(JobId, usize)> = batch.iter().map(|s| (s.job, s.choice)).collect();
        self.stats.decode_steps += 1;
        self.stats.undrafted_steps += u64::from(decoded.undrafted);
        self.stats.drafted_tokens += decoded.counts.drafted;
        self.stats.accepted_tokens += decoded.counts.accepted;
        self.stats.forced_tokens += decoded.counts.forced;
        self.stats.drafted_steps += u64::from(decoded.counts.depths.steps);
        let kept = self.stats.accepted_by_depth.iter_mut();
        for (sum, round) in kept.zip(decoded.counts.depths.accepted) {
            *sum += u64::from(round);
        }
        self.stats.times.add(decoded.times);
        let mut advanced = 0;
        let mut outcome = StepOutcome::OutOfMemory;
        let mut exhausted = false;
        for ((id, choice), sequence_outcome) in owners.into_iter().zip(decoded.outcomes) {
            // A choice that failed earlier in this loop took its whole job with it.
            let Some(at) = self.running.iter().position(|running| running.id == id) else {
                continue;
            };
            match sequence_outcome {
                SequenceOutcome::OutOfMemory(error) => {
                    exhausted |= pool_exhausted(&error);
                    self.note_out_of_memory(&error);
                }
                SequenceOutcome::Failed(error) => {
                    outcome = StepOutcome::Advanced;
                    self.fail(at, &error, out)?;
                }
                SequenceOutcome::Advanced(result) => {
                    outcome = StepOutcome::Advanced;
                    advanced += 1;
                    self.finish_sequence_step(at, choice, result, out);
                }
            }
        }
        self.stats.batched += advanced as u64;
        self.stats.largest_batch = self.stats.largest_batch.max(advanced);
        self.remove_finished();
        if exhausted && self.preempt_last()? {
            outcome = StepOutcome::Advanced;
        }
        Ok(outcome)
    }

    /// Tells what a round gave a choice, and lets it go if it ended.
    fn finish_sequence_step(
        &mut self,
        at: usize,
        choice: usize,
        result: crate::scheduler::accept::AcceptResult,
        out: &mut Events,
    ) {
        let sequences = &mut self.running[at].sequences;
        let Some(i) = sequences.iter().position(|s| s.choice == choice) else {
            return;
        };
        if let Some(fault) = sequences[i].fault() {
            let detail = fault.to_owned();
            return self.remove_failed(at, JobError::Constraint { detail }, out);
        }
        let sequence = sequences.remove(i);
        self.emit(&sequence, result.tokens, result.finish_reason, out);
        if result.finish_reason.is_none() {
            self.running[at].sequences.insert(i, sequence);
        }
    }

    /// Nothing could move for want of room: the job that came last gives up its own.
    fn fail_last_admitted(&mut self, out: &mut Events) {
        let latest = self.running.iter().enumerate();
        let evictee = latest.max_by_key(|(_, running)| running.key);
        let (prompt, max_tokens) = match (evictee, self.queue.first()) {
            (Some((_, running)), _) => (running.prompt.len(), running.params.max_tokens),
            (None, Some(job)) => (job.prompt.len(), job.params.max_tokens),
            (None, None) => return,
        };
        let evictee = evictee.map(|(at, _)| at);
        let context = self.runner.info().limits.context;
        let wanted = prompt.saturating_add(max_tokens).min(context);
        let failure = self
            .last_out_of_memory
            .take()
            .unwrap_or(JobError::OutOfMemory {
                what: "context tokens",
                wanted: wanted as u64,
                free: self.runner.capacity().tokens as u64,
            });
        match evictee {
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
    pub(crate) fn note_out_of_memory(&mut self, error: &DeviceError) {
        self.stats.waits += 1;
        self.last_out_of_memory = Some(JobError::from(error));
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
        self.remove_failed(at, JobError::from(error), out);
        Ok(())
    }

    pub(crate) fn remove_failed(&mut self, at: usize, error: JobError, out: &mut Events) {
        let running = self.running.remove(at);
        tracing::warn!(job = running.id.0, %error, "job failed");
        running.open_seqs().for_each(|seq| self.runner.close(seq));
        let states = running.preempted.iter().filter_map(Preempted::state);
        let ends = running.prompt_state.iter().map(|end| end.snapshot);
        states
            .chain(ends)
            .for_each(|snapshot| self.runner.free_snapshot(snapshot));
        self.stats.failed += 1;
        out.push((running.id, Event::Failed { error }));
    }

    /// Tells every job that the device is lost.
    fn fail_all(&mut self, error: &DeviceError, out: &mut Events) {
        tracing::error!(%error, "every job fails");
        let running = mem::take(&mut self.running).into_iter().map(|r| r.id);
        let queued = mem::take(&mut self.queue);
        for id in running.chain(queued.into_ids()) {
            self.stats.failed += 1;
            let error = JobError::from(error);
            out.push((id, Event::Failed { error }));
        }
        self.lost = Some(lost_again(error));
    }

    /// Frees saved prompt ends nobody waits for, and forgets jobs that are done.
    pub(crate) fn remove_finished(&mut self) {
        for running in &mut self.running {
            if running.pending_choices.is_empty()
                && let Some(end) = running.prompt_state.take()
            {
                self.runner.free_snapshot(end.snapshot);
            }
        }
        self.running.retain(|running| !running.is_done());
    }

    /// An idle scheduler holds nothing, so the runner must be as empty as at the start.
    fn check_for_leaks(&mut self) {
        if self.warmup.is_active() {
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

    pub(crate) fn n_open_sequences(&self) -> usize {
        self.running.iter().map(|r| r.open_seqs().count()).sum()
    }

    pub(crate) fn model(&self) -> ModelLimits<'_> {
        let info = self.runner.info();
        ModelLimits {
            eos: &self.config.eos,
            vocab: info.vocab,
            context: info.limits.context,
            top_limit: self.config.top_limit,
        }
    }
}
