//! Statistics of one request: counts and times for `usage`, `timings`, metrics and the log.

use std::time::{Duration, Instant};

use crate::compression::CompressionOutcome;
use chat::reply::{
    CompressionTimings, LlamaServerTimings, SourceTimings, SpeculationTimings, Timings, Usage,
    WindowTimings,
};
use contract::AttentionWindow;
use decode::{AcceptanceByDepth, ChoiceStats, DraftSource, StepTimes, TokensBySource};

/// Stage of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestStage {
    /// In the queue.
    Queue,
    /// Prefill.
    Prefill,
    /// Decode.
    Decode,
}

impl RequestStage {
    /// Label value in metrics.
    pub fn name(self) -> &'static str {
        match self {
            RequestStage::Queue => "queue",
            RequestStage::Prefill => "prefill",
            RequestStage::Decode => "decode",
        }
    }
}

/// Final statistics of a request.
#[derive(Debug, Clone, Default)]
pub struct RequestSummary {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Of these, restored from the prefix cache.
    pub cached_tokens: usize,
    /// Generated tokens, reasoning included.
    pub completion_tokens: usize,
    /// Of these, reasoning tokens.
    pub reasoning_tokens: usize,
    /// Complete tool calls in the reply.
    pub tool_calls: usize,
    /// Repaired tool calls, and text that only began like one.
    pub malformed_calls: usize,
    /// From submission to start.
    pub queue: Duration,
    /// From start to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Total time.
    pub total: Duration,
}

/// Running statistics of one request.
#[derive(Debug, Clone)]
pub struct RequestStats {
    submitted: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    /// Prompt tokens, summed over prompts.
    pub prompt_tokens: usize,
    /// Of these, restored from the prefix cache.
    pub cached_tokens: usize,
    /// Prompt tokens in the KV cache so far, restored ones included.
    pub prefilled_tokens: usize,
    /// Tokens generated in all choices.
    pub completion_tokens: usize,
    /// Of these, thinking.
    pub reasoning_tokens: usize,
    /// Complete tool calls.
    pub tool_calls: usize,
    /// Calls that had to be mended, and text that only began like one.
    pub malformed_calls: usize,
    /// Decode steps of finished choices.
    pub decode_steps: DecodeSteps,
    /// Attention window, if the server limits it.
    pub window: Option<AttentionWindow>,
    /// What compression did with the prompt, if there is a scorer.
    pub compression: Option<CompressionOutcome>,
}

/// Decode steps of finished choices.
#[derive(Debug, Clone, Copy, Default)]
pub struct DecodeSteps {
    /// Verify passes.
    pub steps: usize,
    /// Tokens generated: all but the first of each choice.
    pub tokens: usize,
    /// Drafted tokens.
    pub drafted: usize,
    /// Of these, accepted.
    pub accepted: usize,
    /// Both by source.
    pub by_source: TokensBySource,
    /// Tokens forced by a constraint.
    pub forced: usize,
    /// Acceptance by draft depth.
    pub depths: AcceptanceByDepth,
    /// Time by part of a step.
    pub times: StepTimes,
}

impl DecodeSteps {
    /// Adds a finished choice.
    pub fn add(&mut self, stats: &ChoiceStats) {
        self.steps += stats.decode_steps;
        self.tokens += stats.generated_tokens.saturating_sub(1);
        self.drafted += stats.drafted_tokens;
        self.accepted += stats.accepted_tokens;
        self.by_source.add(stats.by_source);
        self.forced += stats.forced_tokens;
        self.depths.steps += stats.depths.steps;
        for (sum, kept) in self.depths.accepted.iter_mut().zip(stats.depths.accepted) {
            *sum += kept;
        }
        self.times.draft += stats.times.draft;
        self.times.verify += stats.times.verify;
        self.times.commit += stats.times.commit;
    }

    fn timings(&self) -> SpeculationTimings {
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let round = |value: f64, unit: f64| (value * unit).round() / unit;
        let ms = |time: Duration| round(time.as_secs_f64() * 1e3, 10.0);
        let drafted = f64::from(self.depths.steps);
        let mut by_depth: Vec<f64> = self
            .depths
            .accepted
            .iter()
            .map(|kept| round(share(f64::from(*kept), drafted), 1000.0))
            .collect();
        while by_depth.last() == Some(&0.0) {
            by_depth.pop();
        }
        SpeculationTimings {
            steps: self.steps,
            tokens_per_step: round(share(self.tokens as f64, self.steps as f64), 100.0),
            draft_n: self.drafted,
            draft_n_accepted: self.accepted,
            accept_rate: round(share(self.accepted as f64, self.drafted as f64), 1000.0),
            accept_by_depth: by_depth,
            draft_by_source: DraftSource::ALL
                .into_iter()
                .map(|source| {
                    let counts = SourceTimings {
                        draft_n: self.by_source.drafted(source),
                        draft_n_accepted: self.by_source.accepted(source),
                    };
                    (source.name(), counts)
                })
                .filter(|(_, counts)| counts.draft_n > 0)
                .collect(),
            forced_n: self.forced,
            draft_ms: ms(self.times.draft),
            verify_ms: ms(self.times.verify),
            commit_ms: ms(self.times.commit),
        }
    }
}

impl RequestStats {
    /// Statistics of a request submitted now.
    pub fn new(prompt_tokens: usize) -> RequestStats {
        RequestStats {
            submitted: Instant::now(),
            started: None,
            first_token: None,
            last_token: None,
            prompt_tokens,
            cached_tokens: 0,
            prefilled_tokens: 0,
            completion_tokens: 0,
            reasoning_tokens: 0,
            tool_calls: 0,
            malformed_calls: 0,
            decode_steps: DecodeSteps::default(),
            window: None,
            compression: None,
        }
    }

    /// The request started.
    pub fn start(&mut self, at: Instant, cached: usize) {
        self.started = Some(at);
        self.cached_tokens = cached;
    }

    /// Counts new tokens.
    pub fn tokens(&mut self, at: Instant, count: usize) {
        self.completion_tokens += count;
        self.first_token.get_or_insert(at);
        self.last_token = Some(at);
    }

    /// Current stage.
    pub fn stage(&self) -> RequestStage {
        match (self.started, self.first_token) {
            (None, _) => RequestStage::Queue,
            (Some(_), None) => RequestStage::Prefill,
            (Some(_), Some(_)) => RequestStage::Decode,
        }
    }

    /// Time since submission.
    pub fn elapsed(&self) -> Duration {
        self.submitted.elapsed()
    }

    fn prefill(&self) -> Duration {
        let until = self.first_token.unwrap_or_else(Instant::now);
        self.started.map_or(Duration::ZERO, |start| {
            until.saturating_duration_since(start)
        })
    }

    fn decode(&self) -> Duration {
        match (self.first_token, self.last_token) {
            (Some(first), Some(last)) => last.saturating_duration_since(first),
            _ => Duration::ZERO,
        }
    }

    /// OpenAI's `usage`. Its prompt is the one that was sent, before compression.
    pub fn usage(&self) -> Usage {
        let sent = self.compression.as_ref().map(|of| of.tokens_before);
        Usage {
            prompt_tokens: sent.unwrap_or(self.prompt_tokens),
            ..self.prefilled_usage()
        }
    }

    /// [`RequestStats::usage`] with the prompt as prefilled.
    fn prefilled_usage(&self) -> Usage {
        let mut usage = Usage {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.completion_tokens,
            reasoning_tokens: self.reasoning_tokens,
            ..Usage::default()
        };
        let DecodeSteps {
            drafted, accepted, ..
        } = self.decode_steps;
        if drafted > 0 {
            usage.accepted_draft_tokens = Some(accepted);
            usage.rejected_draft_tokens = Some(drafted.saturating_sub(accepted));
        }
        usage
    }

    /// The response's `timings`.
    pub fn timings(&self) -> Timings {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        // The first token is sampled from the prefill's last row.
        let decoded = self.completion_tokens.saturating_sub(1);
        let (prefill, decode) = (ms(self.prefill()), ms(self.decode()));
        Timings {
            llama_server: Some(LlamaServerTimings::new(
                &self.prefilled_usage(),
                prefill,
                decode,
            )),
            window: self.window.map(|window| {
                let reason = window.is_full().then_some("the request has tools");
                WindowTimings::new(window.tokens(), reason)
            }),
            speculation: (self.decode_steps.steps > 0).then(|| self.decode_steps.timings()),
            compression: self.compression.as_ref().map(compression_timings),
            ..Timings::new(prefill, decode, decoded)
        }
    }

    fn queue(&self) -> Duration {
        let until = self.started.unwrap_or_else(Instant::now);
        until.saturating_duration_since(self.submitted)
    }

    /// Final statistics for the metrics.
    pub fn summary(&self) -> RequestSummary {
        RequestSummary {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.completion_tokens,
            reasoning_tokens: self.reasoning_tokens,
            tool_calls: self.tool_calls,
            malformed_calls: self.malformed_calls,
            queue: self.queue(),
            prefill: self.prefill(),
            decode: self.decode(),
            total: self.elapsed(),
        }
    }
}

fn compression_timings(of: &CompressionOutcome) -> CompressionTimings {
    let kept = of.tokens_after as f64 / of.tokens_before.max(1) as f64;
    CompressionTimings {
        compressed_from_tokens: of.tokens_before,
        compressed_tokens: of.tokens_after,
        compression_kept: (kept * 1e3).round() / 1e3,
        compression_ms: (of.scoring.as_secs_f64() * 1e4).round() / 10.0,
        compression_reason: of.reason.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_without_measurements_are_finite() {
        let timings = RequestStats::new(3).timings();
        assert_eq!(timings.decode_tokens_per_sec, 0.0);
        assert_eq!(timings.decode_ms, 0.0);
    }

    #[test]
    fn usage_totals_are_sums() {
        let mut stats = RequestStats::new(10);
        let at = Instant::now();
        stats.start(at, 4);
        stats.tokens(at, 2);
        stats.tokens(at + Duration::from_millis(50), 3);
        let usage = stats.usage();
        assert_eq!(usage.total_tokens(), 15);
        assert_eq!(usage.cached_tokens, 4);
        assert_eq!(stats.timings().decode_tokens_per_sec, 80.0);
        assert_eq!(stats.stage(), RequestStage::Decode);
    }
}
