//! The thread that owns the scorer, so that scoring a prompt delays no decode step.

use std::ops::ControlFlow;
use std::sync::{Arc, mpsc};

use anyhow::Context;
use chat::CancelFlag;
use contract::{
    Backend, DeviceError, LoadProgress, ScoreSettings, Scorer, ScorerConfig, ScorerInfo, TokenId,
};
use cpu::CpuBackend;

use super::progress::{ActiveScorings, ScoringCounts, ScoringProgress};
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
    /// The text is longer than what the scorer has memory for.
    #[error("{tokens} tokens are more than the {most} that the scorer has memory for")]
    TooLong {
        /// Tokens of the text.
        tokens: usize,
        /// The most that the scorer reads.
        most: usize,
    },
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
    active: ActiveScorings,
}

/// Whose texts are scored.
#[derive(Clone, Copy)]
pub(super) struct ScoringClient<'a> {
    /// Set when the client leaves.
    pub(super) cancel: &'a CancelFlag,
    /// What the client sees meanwhile.
    pub(super) progress: &'a Arc<ScoringProgress>,
}

struct ScoringJob {
    tokens: Vec<TokenId>,
    settings: ScoreSettings,
    cancel: CancelFlag,
    progress: Arc<ScoringProgress>,
    reply: mpsc::Sender<Result<Vec<f32>, ScoringError>>,
}

impl ScorerHandle {
    /// Opens a scorer on a thread of its own: on the chosen device if that has one, else on the
    /// CPU.
    pub(super) fn open(config: ScorerConfig, choice: DeviceChoice) -> anyhow::Result<ScorerHandle> {
        let (jobs, inbox) = mpsc::channel();
        let (opened, result) = mpsc::channel();
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
                run(&mut *scorer, job);
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
            active: ActiveScorings::default(),
        })
    }

    pub(super) fn info(&self) -> &ScorerInfo {
        &self.info
    }

    /// Requests whose texts are scored or wait for it.
    pub(super) fn active(&self) -> Vec<ScoringCounts> {
        self.active.counts()
    }

    /// Scores a text; blocks until it is done or the client leaves.
    pub(super) fn score(
        &self,
        tokens: Vec<TokenId>,
        settings: ScoreSettings,
        client: ScoringClient<'_>,
    ) -> Result<Vec<f32>, ScoringError> {
        let (n, most) = (tokens.len(), self.info.max_tokens);
        if n > most {
            return Err(ScoringError::TooLong { tokens: n, most });
        }
        let (reply, result) = mpsc::channel();
        client.progress.begin(tokens.len());
        let _listed = self.active.enter(client.progress);
        let job = ScoringJob {
            tokens,
            settings,
            cancel: client.cancel.clone(),
            progress: Arc::clone(client.progress),
            reply,
        };
        match self.jobs.send(job) {
            Ok(()) => result.recv().unwrap_or(Err(ScoringError::Ended)),
            Err(_) => Err(ScoringError::Ended),
        }
    }
}

fn open_scorer(config: ScorerConfig, choice: &DeviceChoice) -> anyhow::Result<Box<dyn Scorer>> {
    let name = config.model.name.clone();
    let progress: &mut dyn FnMut(LoadProgress) = &mut |_| {};
    let backend = devices::choose(choice)?;
    match backend.open_scorer(config.clone(), progress) {
        Err(error @ DeviceError::Unsupported { .. }) => {
            tracing::warn!("{error}");
            let cpu = CpuBackend::new(choice.cpu_options());
            cpu.open_scorer(config, progress)
        }
        opened => opened,
    }
    .with_context(|| format!("the scorer {name} cannot be opened"))
}

fn run(scorer: &mut dyn Scorer, job: ScoringJob) {
    let result = if job.cancel.is_cancelled() {
        Err(ScoringError::Cancelled)
    } else {
        let scores = scorer.score(&job.tokens, &job.settings, &mut |at| {
            job.progress.advance(at.done, at.total);
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
    // A dropped receiver has left.
    let _ = job.reply.send(result);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_beyond_the_scorers_memory_are_refused_with_both_lengths() {
        let loaded = crate::open::tiny();
        let config = ScorerConfig {
            model: loaded.spec,
            weights: loaded.weights,
            exit_layer: None,
            max_tokens: 64,
        };
        let choice = DeviceChoice::default().on_the_cpu();
        let scorer = ScorerHandle::open(config, choice).unwrap();
        let (cancel, progress) = (CancelFlag::default(), Arc::default());
        let client = ScoringClient {
            cancel: &cancel,
            progress: &progress,
        };
        let score = |n| scorer.score(vec![TokenId(1); n], ScoreSettings::default(), client);
        assert_eq!(score(64).unwrap().len(), 8);
        let error = score(65).unwrap_err().to_string();
        assert!(
            error.starts_with("65 tokens are more than the 64"),
            "{error}"
        );
    }
}
