//! The scheduler: takes jobs, admits them, and spends each step on a prefill chunk or on a decode
//! step.
//!
//! It composes objects that own their state: [`WaitingQueue`], [`RunningSet`], [`PrefixCache`],
//! [`PrefixWarmup`] and [`Device`]. Admission, preemption and cancellation are methods over them, a
//! file each.
//!
//! # A job's life
//!
//! 1. [`Scheduler::submit`] validates a job (`validate`) and puts it into the waiting queue
//!    (`queue`).
//! 2. `admission` takes it out once the pool has capacity, and opens a sequence from the longest
//!    cached prefix.
//! 3. `prefill` reads the prompt in chunks. The prefix cache saves a snapshot at each save point.
//! 4. At the end of the prompt `admission` samples each choice's first token from one shared logits
//!    row.
//! 5. `decoding` advances all decoding sequences, together or in two groups that alternate
//!    (`alternation`): propose trees, verify, `accept`, commit (`decode_step`).
//! 6. If the KV pool runs out, `preemption` saves the lowest-priority sequence and resumes it
//!    later.
//! 7. An end token, a limit, `cancel` or an error ends a choice; its last event is `Finished` or
//!    `Failed`.
//! 8. While idle, the caller may run `warmup` (prefill expected prompts) and persist cached
//!    prefixes.

mod accept;
mod admission;
mod alternation;
mod cancel;
mod config;
mod decode_step;
mod decoding;
mod device;
mod outcome;
mod preemption;
mod prefill;
mod queue;
mod running;
mod running_set;
mod sequence;
mod validate;
mod warmup;

use std::mem;

use contract::{DeviceError, Runner, RunnerInfo};

use crate::error::{JobError, SubmitError};
use crate::event::{Event, FinishReason, OutputToken};
use crate::job::{Job, JobId};
use crate::prefix::{PrefixCache, Store};
use crate::speculation::{MixedProposer, NoDraft, TreeProposer};
use crate::stats::Stats;

use self::alternation::Alternation;
pub use self::config::SchedulerConfig;
use self::decode_step::ProposedStep;
use self::device::Device;
pub use self::outcome::SchedulerState;
use self::outcome::{Events, StepOutcome};
use self::queue::WaitingQueue;
use self::running::{ModelLimits, Preempted};
use self::running_set::RunningSet;
use self::sequence::Sequence;
use self::validate::validate;
pub use self::warmup::NextPrompt;
use self::warmup::PrefixWarmup;

/// Many jobs on one runner.
pub struct Scheduler {
    config: SchedulerConfig,
    device: Device,
    trees: Box<dyn TreeProposer>,
    queue: WaitingQueue,
    running: RunningSet,
    prefix: PrefixCache,
    warmup: PrefixWarmup,
    /// The step of one of two groups of sequences, whose verify has begun.
    in_flight: Option<ProposedStep>,
    alternation: Alternation,
    /// Events raised between steps.
    pending_events: Events,
    last_phase: StepPhase,
    stats: Stats,
}

/// The two kinds of device work. They alternate if both have something to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StepPhase {
    Prefill,
    Decode,
}

impl Scheduler {
    /// Takes a freshly opened runner. Trees come from the sources of
    /// [`SpeculationConfig::active_sources`](crate::SpeculationConfig::active_sources).
    pub fn new(runner: Box<dyn Runner>, config: SchedulerConfig) -> Scheduler {
        let sources = config.speculation.active_sources(runner.info());
        let trees: Box<dyn TreeProposer> = if sources.is_empty() {
            Box::new(NoDraft)
        } else {
            Box::new(MixedProposer::new(config.speculation.clone(), sources))
        };
        Scheduler::with_trees(runner, config, trees)
    }

    /// As [`new`](Scheduler::new), with another source of trees.
    pub fn with_trees(
        runner: Box<dyn Runner>,
        config: SchedulerConfig,
        trees: Box<dyn TreeProposer>,
    ) -> Scheduler {
        let device = Device::new(runner, config.prefill_chunk);
        Scheduler {
            alternation: Alternation::new(config.groups, device.info().begins_verify),
            in_flight: None,
            queue: WaitingQueue::new(device.chunk()),
            device,
            trees,
            prefix: PrefixCache::new(config.prefix.clone()),
            config,
            warmup: PrefixWarmup::default(),
            running: RunningSet::default(),
            pending_events: Vec::new(),
            last_phase: StepPhase::Decode,
            stats: Stats::default(),
        }
    }

    /// Adds a store that keeps prefixes beyond the process.
    #[must_use]
    pub fn with_store(mut self, store: Box<dyn Store>) -> Scheduler {
        self.prefix.set_store(store);
        self
    }

    /// Validates a job and queues it.
    pub fn submit(&mut self, job: Job) -> Result<(), SubmitError> {
        if let Some(error) = self.device.lost() {
            return Err(SubmitError::device_lost(error));
        }
        let info = self.device.info();
        validate(&job, info.vocab, info.limits.context)?;
        if self.running.position(job.id).is_some() || self.queue.find(job.id).is_some() {
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

    /// Does one piece of device work and appends its events to `out`.
    ///
    /// A step runs a prefill chunk or a decode step, in alternation, so that neither delays the
    /// other's tokens. The only error is [`DeviceError::DeviceLost`]: every job has then failed,
    /// and no more are taken.
    pub fn step(&mut self, out: &mut Vec<(JobId, Event)>) -> Result<SchedulerState, DeviceError> {
        out.append(&mut self.pending_events);
        if let Some(error) = self.device.lost() {
            return Err(error.clone());
        }
        if let Err(error) = self.run_step(out) {
            self.fail_all(&error, out);
            return Err(error);
        }
        if !self.is_idle() {
            return Ok(SchedulerState::Working);
        }
        if !self.warmup.is_active() && self.device.has_leaked(!self.prefix.is_empty()) {
            self.stats.leaks += 1;
        }
        Ok(SchedulerState::Idle)
    }

    /// Whether no job and no event is left, so that `step` would do nothing.
    pub fn is_idle(&self) -> bool {
        let has_events = !self.pending_events.is_empty();
        let has_work = !self.running.is_empty() || self.in_flight.is_some();
        self.queue.is_empty() && !has_work && !has_events
    }

    /// Whether [`persist_next`](Scheduler::persist_next) has a prefix to examine.
    pub fn has_unpersisted(&self) -> bool {
        self.device.lost().is_none() && self.prefix.has_unpersisted()
    }

    /// Exports one cached prefix that the store should keep, if there is one. Call it while
    /// [`is_idle`](Scheduler::is_idle).
    ///
    /// The only error is [`DeviceError::DeviceLost`].
    pub fn persist_next(&mut self) -> Result<(), DeviceError> {
        if self.device.lost().is_some() {
            return Ok(());
        }
        self.prefix.persist_next(self.device.runner())
    }

    /// Exports every prefix worth keeping that the store lacks, before the process ends.
    ///
    /// The only error is [`DeviceError::DeviceLost`].
    pub fn flush(&mut self) -> Result<(), DeviceError> {
        if self.device.lost().is_some() {
            return Ok(());
        }
        self.pause_warmup()?;
        self.prefix.flush(self.device.runner())
    }

    /// Queues the expected start of a conversation's next prompt for warm-up. Dropped if warm-up is
    /// off.
    pub fn queue_warmup(&mut self, next: NextPrompt) {
        if self.prefix.warmup_enabled() && self.device.lost().is_none() {
            self.warmup.push(next, &self.prefix);
        }
    }

    /// Whether [`warmup_step`](Scheduler::warmup_step) has something to do.
    pub fn has_warmup(&self) -> bool {
        self.device.lost().is_none() && self.warmup.has_work()
    }

    /// Prefills at most one chunk of an expected prompt. Does nothing unless
    /// [`is_idle`](Scheduler::is_idle).
    ///
    /// The only error is [`DeviceError::DeviceLost`].
    pub fn warmup_step(&mut self) -> Result<(), DeviceError> {
        if !self.has_warmup() || !self.is_idle() {
            return Ok(());
        }
        self.warmup.step(&mut self.device, &mut self.prefix)
    }

    /// Current state and counters.
    pub fn stats(&self) -> Stats {
        let capacity = self.device.capacity();
        Stats {
            queued: self.queue.len(),
            running: self.running.len(),
            sequences: self.running.n_open_sequences(),
            prefilling: self.running.n_prefilling(),
            pool_tokens: self.device.info().pool.tokens(),
            free_tokens: capacity.tokens,
            evictable_tokens: capacity.evictable_tokens,
            preempted: self.running.n_preempted(),
            prefix: self.prefix.stats(self.device.as_runner()),
            ..self.stats
        }
    }

    /// The runner's description.
    pub fn info(&self) -> &RunnerInfo {
        self.device.info()
    }

    fn run_step(&mut self, out: &mut Events) -> Result<(), DeviceError> {
        self.device.take_out_of_memory();
        self.stats.blocked_on_pool = false;
        if self.in_flight.is_some() && !self.running.is_decoding() {
            self.land_all(out)?;
        }
        if !self.queue.is_empty() {
            self.pause_warmup()?;
        }
        self.prepare_trees()?;
        // Admitted work resumes before new work starts.
        let mut out_of_memory = self.resume(out)? == StepOutcome::OutOfMemory;
        out_of_memory |= self.start_pending_choices(out)? == StepOutcome::OutOfMemory;
        if !self.stats.blocked_on_pool {
            out_of_memory |= self.admit_queued(out)? == StepOutcome::OutOfMemory;
        }
        if self.in_flight.is_some() && self.running.has_prefill() {
            self.last_phase = StepPhase::Decode;
            self.land_all(out)?;
            return Ok(());
        }
        let order = match self.last_phase {
            StepPhase::Decode => [StepPhase::Prefill, StepPhase::Decode],
            StepPhase::Prefill => [StepPhase::Decode, StepPhase::Prefill],
        };
        for phase in order {
            let outcome = match phase {
                StepPhase::Prefill => {
                    let outcome = self.run_prefill_chunk(out)?;
                    if outcome != StepOutcome::NothingToDo {
                        self.alternation.interrupt();
                    }
                    outcome
                }
                StepPhase::Decode => self.run_decode_step(out)?,
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
            // If the device itself refused a call, cached prefixes are evicted before a job fails.
            let refused = self.device.ran_out_of_memory();
            if !refused || !self.prefix.evict_one(self.device.runner())? {
                self.fail_last_admitted(out);
            }
        }
        Ok(())
    }

    /// Lets the source of trees prepare before the first job that may use it.
    fn prepare_trees(&mut self) -> Result<(), DeviceError> {
        let first = self.queue.first().filter(|_| self.running.is_empty());
        let (Some(clock), Some(true)) = (self.config.clock, first.map(|job| job.params.speculate))
        else {
            return Ok(());
        };
        match self.trees.prepare(self.device.runner(), clock) {
            Err(lost @ DeviceError::DeviceLost { .. }) => Err(lost),
            // The job meets the same error at its own call and fails there if it must.
            Err(error) => {
                tracing::warn!(%error, "cannot measure the costs of passes");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    fn pause_warmup(&mut self) -> Result<(), DeviceError> {
        let queue = &self.queue;
        self.warmup
            .pause(&mut self.device, &mut self.prefix, || queue.jobs())
    }

    /// Emits new tokens and, if the sequence ends with them, its `Finished`; then the sequence is
    /// closed.
    fn emit(
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
            self.device.close(sequence.seq);
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

    /// Nothing advanced for lack of memory: the last job in priority order fails and frees its
    /// memory.
    fn fail_last_admitted(&mut self, out: &mut Events) {
        let last = self.running.last();
        let (prompt, max_tokens) = match (last, self.queue.first()) {
            (Some(at), _) => {
                let job = &self.running[at];
                (job.prompt.len(), job.params.max_tokens)
            }
            (None, Some(job)) => (job.prompt.len(), job.params.max_tokens),
            (None, None) => return,
        };
        let context = self.device.info().limits.context;
        let wanted = prompt.saturating_add(max_tokens).min(context);
        let refused = self.device.take_out_of_memory();
        let error = refused.unwrap_or(JobError::OutOfMemory {
            what: "context tokens",
            wanted: wanted as u64,
            free: self.device.capacity().tokens as u64,
        });
        if let Some(at) = last {
            self.remove_failed(at, error, out);
        } else if let Some((_, queued)) = self.queue.pop() {
            self.stats.failed += 1;
            out.push((queued.job.id, Event::Failed { error }));
        }
    }

    /// Counts an out-of-memory error and keeps it for the job that may have to fail.
    fn note_out_of_memory(&mut self, error: &DeviceError) {
        self.stats.out_of_memory_calls += 1;
        self.device.set_out_of_memory(error);
    }

    /// Fails one job for a device error. A lost device is returned, since it fails every job.
    fn fail(&mut self, at: usize, error: DeviceError, out: &mut Events) -> Result<(), DeviceError> {
        if let DeviceError::DeviceLost { .. } = error {
            return Err(error);
        }
        self.remove_failed(at, JobError::from(&error), out);
        Ok(())
    }

    fn remove_failed(&mut self, at: usize, error: JobError, out: &mut Events) {
        let job = self.running.remove(at);
        tracing::warn!(job = job.id.0, %error, "job failed");
        job.open_seqs().for_each(|seq| self.device.close(seq));
        let states = job.preempted.iter().filter_map(Preempted::state);
        let prompt_states = job.prompt_state.iter().map(|state| state.snapshot);
        states
            .chain(prompt_states)
            .for_each(|snapshot| self.device.free_snapshot(snapshot));
        self.stats.failed += 1;
        out.push((job.id, Event::Failed { error }));
    }

    /// Fails every job because the device is lost.
    fn fail_all(&mut self, error: &DeviceError, out: &mut Events) {
        tracing::error!(%error, "device lost, all jobs fail");
        self.in_flight = None;
        let running = self.running.take_ids();
        let queued = mem::take(&mut self.queue);
        for id in running.into_iter().chain(queued.into_ids()) {
            self.stats.failed += 1;
            let error = JobError::from(error);
            out.push((id, Event::Failed { error }));
        }
        self.device.set_lost(error.clone());
    }

    fn model(&self) -> ModelLimits<'_> {
        let info = self.device.info();
        ModelLimits {
            eos: &self.config.eos,
            vocab: info.vocab,
            context: info.limits.context,
            max_fetched_top_k: self.config.max_fetched_top_k,
        }
    }
}
