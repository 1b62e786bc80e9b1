//! The decode time of a greedy reply.

use std::time::Instant;

use super::cpu_time::cpu_seconds;
use anyhow::bail;
use contract::TokenId;
use decode::{Event, GenerationParams, Job, JobId, Sampling, Scheduler, SchedulerState};

/// Time and counts of a reply.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ReplyTiming {
    /// From the first token to the last.
    pub(super) seconds: f64,
    /// Processor time of all threads meanwhile; 0 where the system does not count it.
    pub(super) cpu_seconds: f64,
    /// Tokens after the first.
    pub(super) tokens: usize,
    /// Decode steps after the first token.
    pub(super) steps: usize,
    /// Decode steps that drafted.
    pub(super) drafted: usize,
}

impl ReplyTiming {
    /// Tokens per second.
    pub(super) fn per_s(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(1e-9)
    }
}

/// Generates a greedy reply; returns its timing and its tokens.
///
/// # Errors
/// If the prompt is refused or the device fails.
pub(super) fn time_reply(
    scheduler: &mut Scheduler,
    prompt: &[TokenId],
    max_tokens: usize,
) -> anyhow::Result<(ReplyTiming, Vec<TokenId>)> {
    scheduler.submit(Job {
        id: JobId(0),
        prompt: prompt.into(),
        choices: 1,
        params: GenerationParams {
            sampling: Sampling::greedy(),
            max_tokens,
            // Only decoding is timed, so the prefix cache is not used.
            use_prefix_cache: false,
            ..GenerationParams::default()
        },
        priority: 0,
    })?;
    let mut events = Vec::new();
    let (mut start, mut cpu_start, mut reply) = (None, 0.0, Vec::new());
    let mut timing = ReplyTiming::default();
    loop {
        let progress = scheduler.step(&mut events)?;
        for (_, event) in events.drain(..) {
            match event {
                Event::Tokens { tokens, .. } => {
                    reply.extend(tokens.iter().map(|token| token.id));
                    match start {
                        None => {
                            cpu_start = cpu_seconds();
                            start = Some(Instant::now());
                        }
                        Some(start) => {
                            timing.tokens += tokens.len();
                            timing.steps += 1;
                            timing.seconds = start.elapsed().as_secs_f64();
                        }
                    }
                }
                Event::Finished { stats, .. } => timing.drafted = stats.depths.steps as usize,
                Event::Failed { error } => bail!("a reply failed: {error}"),
                _ => {}
            }
        }
        if progress == SchedulerState::Idle {
            timing.cpu_seconds = cpu_seconds() - cpu_start;
            return Ok((timing, reply));
        }
    }
}
