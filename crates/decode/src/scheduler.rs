//! Conducts: takes jobs, admits them, and gives each `step` to a prefill chunk or to a round.

use contract::{DeviceError, Runner, TokenId};

use crate::job::admit;
use crate::{Event, Failure, FinishReason, Job, JobId, Reject, Stats, TreeSource};

/// How a scheduler works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Sequences decoded at once; the runner's own limit applies too. A job takes one per choice.
    pub max_sequences: usize,
    /// Jobs that may wait; one more is refused.
    pub queue_limit: usize,
    /// Prompt tokens read per call; the runner's own limit and alignment apply too.
    pub prefill_chunk: usize,
    /// The model's own ending tokens.
    pub eos: Vec<TokenId>,
    /// Up to how many best tokens are fetched alone; beyond that whole rows are.
    pub top_limit: usize,
    /// Nodes of a drafted tree beyond its root; 0 turns speculation off. Without a draft it says nothing.
    pub draft_budget: usize,
}

impl Default for SchedulerConfig {
    fn default() -> SchedulerConfig {
        SchedulerConfig {
            max_sequences: 8,
            queue_limit: 64,
            prefill_chunk: 512,
            eos: Vec::new(),
            top_limit: 256,
            draft_budget: 22,
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

/// Many jobs on one runner.
pub struct Scheduler {
    runner: Box<dyn Runner>,
    config: SchedulerConfig,
    trees: Option<Box<dyn TreeSource>>,
    jobs: Vec<Job>,
    cancelled: Vec<(JobId, Option<usize>)>,
    stats: Stats,
}

impl Scheduler {
    /// Takes a freshly opened runner. Trees come from its draft, if it has one.
    pub fn new(runner: Box<dyn Runner>, config: SchedulerConfig) -> Scheduler {
        Scheduler {
            runner,
            config,
            trees: None,
            jobs: Vec::new(),
            cancelled: Vec::new(),
            stats: Stats::default(),
        }
    }

    /// As [`new`](Scheduler::new), with trees from elsewhere.
    pub fn with_trees(
        runner: Box<dyn Runner>,
        config: SchedulerConfig,
        trees: Box<dyn TreeSource>,
    ) -> Scheduler {
        Scheduler {
            trees: Some(trees),
            ..Scheduler::new(runner, config)
        }
    }

    /// Puts a job into the queue, or says why not.
    pub fn submit(&mut self, job: Job) -> Result<(), Reject> {
        let info = self.runner.info();
        admit(&job, info.vocab, info.limits.context)?;
        if self.jobs.len() >= self.config.queue_limit {
            return Err(Reject::QueueFull {
                queued: self.jobs.len(),
                limit: self.config.queue_limit,
            });
        }
        self.jobs.push(job);
        Ok(())
    }

    /// Ends a job; each open choice reports `Cancelled` at the next step. An unknown id is ignored.
    pub fn cancel(&mut self, job: JobId) {
        self.cancelled.push((job, None));
    }

    /// Ends one choice of a job, as [`cancel`](Scheduler::cancel) does all.
    pub fn cancel_choice(&mut self, job: JobId, choice: usize) {
        self.cancelled.push((job, Some(choice)));
    }

    /// Does one piece of work and appends what came of it to `out`.
    pub fn step(&mut self, out: &mut Vec<(JobId, Event)>) -> Result<Progress, DeviceError> {
        for job in self.jobs.drain(..) {
            let error = Failure::Device {
                detail: "no work yet".to_owned(),
            };
            out.push((job.id, Event::Failed { error }));
        }
        let _ = (&self.trees, FinishReason::Cancelled);
        Ok(Progress::Idle)
    }

    /// Whether no job is left, so that `step` would do nothing.
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// What it is doing and has done.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// The runner's own description.
    pub fn info(&self) -> &contract::RunnerInfo {
        self.runner.info()
    }
}
