//! The thread that owns the scorer, so that scoring a prompt delays no decode step.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use anyhow::Context;
use chat::CancelFlag;
use contract::{
    Backend, DeviceError, LoadProgress, ScoreSettings, Scorer, ScorerConfig, ScorerInfo, TokenId,
};
use cpu::CpuBackend;

use crate::open::devices::{self, DeviceChoice};

/// Why a prompt has no scores.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum ScoringError {
    /// The device failed or refused the call.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The scorer's tokenizer cannot encode the prompt.
    #[error("{0}")]
    Text(String),
    /// The client left.
    #[error("the request was given up")]
    Cancelled,
    /// The thread has ended.
    #[error("the scorer's thread has ended")]
    Ended,
}

/// Handle to the scorer's thread. The thread ends when the last handle is dropped.
pub(super) struct ScorerHandle {
    jobs: mpsc::Sender<ScoringJob>,
    info: ScorerInfo,
    progress: Arc<ScoringProgress>,
}

/// What the scorer is doing.
#[derive(Debug, Default)]
pub(super) struct ScoringProgress {
    /// Prompts that are scored or wait for it.
    prompts: AtomicUsize,
    /// Token rows of the current prompt that have passed a layer, and their total.
    done: AtomicUsize,
    total: AtomicUsize,
}

impl ScoringProgress {
    /// Prompts, and rows done and in total of the current one.
    pub(super) fn counts(&self) -> [usize; 3] {
        [&self.prompts, &self.done, &self.total].map(|count| count.load(Ordering::Relaxed))
    }
}

struct ScoringJob {
    tokens: Vec<TokenId>,
    settings: ScoreSettings,
    cancel: CancelFlag,
    reply: mpsc::Sender<Result<Vec<f32>, ScoringError>>,
}

impl ScorerHandle {
    /// Opens a scorer on a thread of its own: on the chosen device if that has one, else on the
    /// CPU.
    pub(super) fn open(config: ScorerConfig, choice: DeviceChoice) -> anyhow::Result<ScorerHandle> {
        let (jobs, inbox) = mpsc::channel();
        let (opened, result) = mpsc::channel();
        let progress = Arc::<ScoringProgress>::default();
        let shared = Arc::clone(&progress);
        let work = move || {
            let mut scorer = match open_scorer(config, &choice) {
                Ok(scorer) => scorer,
                Err(error) => {
                    // A dropped receiver has given up the start.
                    let _ = opened.send(Err(error));
                    return;
                }
            };
            let _ = opened.send(Ok(scorer.info().clone()));
            while let Ok(job) = inbox.recv() {
                run(&mut *scorer, job, &shared);
            }
        };
        std::thread::Builder::new()
            .name("scorer".to_owned())
            .spawn(work)
            .context("the scorer's thread cannot start")?;
        let info = result
            .recv()
            .context("the scorer's thread ended at its start")??;
        Ok(ScorerHandle {
            jobs,
            info,
            progress,
        })
    }

    pub(super) fn info(&self) -> &ScorerInfo {
        &self.info
    }

    pub(super) fn progress(&self) -> &ScoringProgress {
        &self.progress
    }

    /// Scores a prompt; blocks until it is done or `cancel` is set.
    pub(super) fn score(
        &self,
        tokens: Vec<TokenId>,
        settings: ScoreSettings,
        cancel: &CancelFlag,
    ) -> Result<Vec<f32>, ScoringError> {
        let (reply, result) = mpsc::channel();
        let job = ScoringJob {
            tokens,
            settings,
            cancel: cancel.clone(),
            reply,
        };
        self.progress.prompts.fetch_add(1, Ordering::Relaxed);
        let sent = self.jobs.send(job);
        let scores = match sent {
            Ok(()) => result.recv().unwrap_or(Err(ScoringError::Ended)),
            Err(_) => Err(ScoringError::Ended),
        };
        self.progress.prompts.fetch_sub(1, Ordering::Relaxed);
        scores
    }
}

fn open_scorer(config: ScorerConfig, choice: &DeviceChoice) -> anyhow::Result<Box<dyn Scorer>> {
    let name = config.model.name.clone();
    let progress: &mut dyn FnMut(LoadProgress) = &mut |_| {};
    let backend = devices::choose(choice)?;
    match backend.open_scorer(config.clone(), progress) {
        Err(error @ DeviceError::Unsupported { .. }) => {
            tracing::info!("{error}");
            let cpu = CpuBackend::new(choice.cpu_options());
            cpu.open_scorer(config, progress)
        }
        opened => opened,
    }
    .with_context(|| format!("the scorer {name} cannot be opened"))
}

fn run(scorer: &mut dyn Scorer, job: ScoringJob, progress: &ScoringProgress) {
    let result = if job.cancel.is_cancelled() {
        Err(ScoringError::Cancelled)
    } else {
        let scores = scorer.score(&job.tokens, &job.settings, &mut |at| {
            progress.done.store(at.done, Ordering::Relaxed);
            progress.total.store(at.total, Ordering::Relaxed);
            if job.cancel.is_cancelled() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        scores
            .map_err(ScoringError::from)
            .and_then(|scores| scores.ok_or(ScoringError::Cancelled))
    };
    progress.done.store(0, Ordering::Relaxed);
    progress.total.store(0, Ordering::Relaxed);
    // A dropped receiver has left.
    let _ = job.reply.send(result);
}
