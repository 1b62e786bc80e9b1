//! A running request: engine events in, stream events out.

use std::sync::Arc;
use std::time::Instant;

use chat::reply::{FinishReason, ReplyDelta};
use chat::request::ReasoningVisibility;
use decode::{Event, FinishReason as Ended, Job, Logprobs, OutputToken, ReasoningHandle};

use crate::compression::{CompressionOutcome, PromptCompressor};
use crate::engine::active_requests::EntryGuard;
use crate::engine::handle::{EngineEvent, Events, Timestamped};
use crate::engine::request_stats::RequestStats;
use crate::error::ApiError;
use crate::http::prefix_warmup::PrefixWarmup;
use crate::http::state::App;
use crate::text::reply::{Choice, Part};

/// Event of a response stream, independent of the dialect.
#[derive(Debug)]
pub enum StreamEvent {
    /// Prefill progress.
    Progress {
        /// Prompt tokens in the KV cache so far, cached ones included.
        done: usize,
        /// Prompt tokens in total.
        total: usize,
    },
    /// Log-probabilities of the prompt tokens.
    PromptLogprobs(Vec<Option<Logprobs>>),
    /// New text or tool-call parts of one choice.
    Parts {
        /// Index of the choice.
        choice: usize,
        /// Parts in order.
        parts: Vec<Part>,
    },
    /// A choice finished.
    End {
        /// Which choice.
        choice: usize,
        /// Finish reason.
        reason: FinishReason,
    },
}

/// Request in flight. Dropping it before its end cancels it.
pub struct InFlight {
    app: App,
    events: Events,
    choices: Vec<Choice>,
    choices_left: usize,
    /// Time of each choice's last tokens.
    last_step: Vec<Option<Instant>>,
    stats: RequestStats,
    /// Entry in the list of active requests.
    entry: EntryGuard,
    /// Error deferred until the events received before it are delivered.
    deferred_error: Option<ApiError>,
    /// Whether it ended by itself; otherwise its drop counts as a cancellation.
    finished: bool,
    last_reason: FinishReason,
    /// Whether reasoning is left out of the events.
    excludes_reasoning: bool,
    /// Prefix warm-up of the conversation's next prompt, if enabled.
    warmup: Option<PrefixWarmup>,
    /// The compressor of the prompt and its session, if the prompt was compressed.
    observed: Option<(Arc<PromptCompressor>, String)>,
    /// Span of the request, for log lines after the response has begun.
    span: tracing::Span,
}

/// Fresh statistics of a job; they name the attention window if the server limits it.
fn stats(app: &App, job: &Job) -> RequestStats {
    let mut stats = RequestStats::new(job.prompt.len());
    let looks = !app.config().window.window.is_full();
    stats.window = looks.then_some(job.params.window);
    stats
}

impl InFlight {
    /// Submits a job; `choices` holds one fresh choice per requested choice.
    pub fn start(app: &App, job: Job, choices: Vec<Choice>) -> Result<InFlight, ApiError> {
        let (stats, entry) = (stats(app, &job), app.active_requests().register(&job));
        let events = app.engine().submit(job, app.config().timeouts)?;
        Ok(InFlight::from_parts(app, events, choices, (stats, entry)))
    }

    /// As [`start`](InFlight::start), but waits for a queue permit.
    pub async fn start_waiting_for_queue(
        app: &App,
        job: Job,
        choices: Vec<Choice>,
    ) -> Result<InFlight, ApiError> {
        let (stats, entry) = (stats(app, &job), app.active_requests().register(&job));
        let events = app
            .engine()
            .submit_waiting_for_queue(job, app.config().timeouts)
            .await?;
        Ok(InFlight::from_parts(app, events, choices, (stats, entry)))
    }

    fn from_parts(
        app: &App,
        events: Events,
        choices: Vec<Choice>,
        (stats, entry): (RequestStats, EntryGuard),
    ) -> InFlight {
        InFlight {
            app: app.clone(),
            events,
            choices_left: choices.len(),
            last_step: vec![None; choices.len()],
            choices,
            stats,
            entry,
            deferred_error: None,
            finished: false,
            last_reason: FinishReason::Stop,
            excludes_reasoning: false,
            warmup: None,
            observed: None,
            span: tracing::Span::current(),
        }
    }

    /// Attaches the prefix warm-up of the next prompt.
    #[must_use]
    pub fn with_warmup(mut self, warmup: Option<PrefixWarmup>) -> InFlight {
        self.warmup = warmup;
        self
    }

    /// Adds what compression did with the prompt, and the compressor whose keep ratio of a session
    /// follows the accepted drafts.
    #[must_use]
    pub fn with_compression(
        mut self,
        outcome: Option<CompressionOutcome>,
        observed: Option<(Arc<PromptCompressor>, String)>,
    ) -> InFlight {
        self.observed = observed.filter(|_| outcome.as_ref().is_some_and(|of| of.is_compressed()));
        self.stats.compression = outcome;
        self
    }

    /// Leaves reasoning out of the events if `visibility` excludes it.
    #[must_use]
    pub fn with_reasoning(mut self, visibility: ReasoningVisibility) -> InFlight {
        self.excludes_reasoning = visibility == ReasoningVisibility::Excluded;
        self
    }

    /// Counts and times so far.
    pub fn stats(&self) -> &RequestStats {
        &self.stats
    }

    /// Number of choices.
    pub fn n_choices(&self) -> usize {
        self.choices.len()
    }

    /// Reasoning control handles of the choices that have one.
    pub fn reasoning_handles(&self) -> Vec<Arc<ReasoningHandle>> {
        let reasoning_handles = self.choices.iter().filter_map(Choice::reasoning_handle);
        reasoning_handles.map(Arc::clone).collect()
    }

    /// The choice at an index.
    pub fn choice(&self, index: usize) -> &Choice {
        &self.choices[index]
    }

    /// All events since the last call, at least one; `None` after the last choice's end.
    pub async fn next(&mut self) -> Result<Option<Vec<StreamEvent>>, ApiError> {
        if let Some(deferred_error) = self.deferred_error.take() {
            return Err(deferred_error);
        }
        let mut out = Vec::new();
        while self.choices_left > 0 {
            let timestamped = match self.events.try_next() {
                Some(timestamped) => timestamped,
                None if !out.is_empty() => break,
                None => match self.events.next().await {
                    Some(timestamped) => timestamped,
                    None => return Err(ApiError::internal("the engine forgot a choice")),
                },
            };
            if let Err(deferred_error) = self.take(timestamped, &mut out) {
                if out.is_empty() {
                    return Err(deferred_error);
                }
                self.deferred_error = Some(deferred_error);
                break;
            }
        }
        self.entry.update(&self.stats);
        if self.choices_left == 0 && self.deferred_error.is_none() && !self.finished {
            self.finish();
        }
        Ok((!out.is_empty()).then_some(out))
    }

    fn take(
        &mut self,
        timestamped: Timestamped,
        out: &mut Vec<StreamEvent>,
    ) -> Result<(), ApiError> {
        let event = match timestamped.event {
            EngineEvent::Scheduler(event) => event,
            EngineEvent::Error(deferred_error) => {
                self.finished = true;
                return Err(deferred_error.into());
            }
        };
        match event {
            Event::Started { cached } => {
                self.stats.start(timestamped.at, cached);
                self.stats.prefilled_tokens = cached;
                let total = self.stats.prompt_tokens;
                out.push(StreamEvent::Progress {
                    done: cached,
                    total,
                });
            }
            Event::Prefill { done, total } => {
                self.stats.prefilled_tokens = done;
                out.push(StreamEvent::Progress { done, total });
            }
            Event::PromptLogprobs(rows) => out.push(StreamEvent::PromptLogprobs(rows)),
            Event::Tokens { choice, tokens } => {
                if self.choices[choice].is_over() {
                    return Ok(());
                }
                self.tokens(choice, tokens, timestamped.at, out);
            }
            Event::Finished {
                choice,
                reason,
                stats,
            } => {
                self.stats.decode_steps.add(&stats);
                if !self.choices[choice].is_over() {
                    self.end(choice, reason, out);
                }
            }
            Event::Failed { error } => {
                self.finished = true;
                return Err(error.into());
            }
        }
        Ok(())
    }

    fn tokens(
        &mut self,
        choice: usize,
        tokens: Vec<OutputToken>,
        at: Instant,
        out: &mut Vec<StreamEvent>,
    ) {
        let state = &mut self.choices[choice];
        let before = state.n_tokens();
        let parts = state.push(tokens);
        // Tokens behind a stop string do not count as completion tokens.
        let count = state.n_tokens() - before;
        self.stats.tokens(at, count);
        if let Some(last) = self.last_step[choice].replace(at) {
            let since = at.saturating_duration_since(last);
            self.app.metrics().step(since, count);
        }
        let stops = state.has_stopped();
        self.emit(choice, parts, out);
        if stops {
            // The engine's further tokens of this choice are discarded.
            self.events.cancel_choice(choice);
            self.end(choice, Ended::Eos, out);
        }
    }

    fn end(&mut self, choice: usize, ended: Ended, out: &mut Vec<StreamEvent>) {
        let state = &mut self.choices[choice];
        let (parts, reason) = state.finish(ended);
        let summary = state.summary();
        self.stats.reasoning_tokens += summary.reasoning_tokens;
        self.stats.tool_calls += summary.calls;
        self.stats.malformed_calls += summary.malformed;
        self.choices_left -= 1;
        self.last_reason = reason;
        self.emit(choice, parts, out);
        out.push(StreamEvent::End { choice, reason });
    }

    fn emit(&mut self, choice: usize, mut parts: Vec<Part>, out: &mut Vec<StreamEvent>) {
        if let Some(warmup) = &mut self.warmup {
            parts.iter().for_each(|part| warmup.push(&part.delta));
        }
        if self.excludes_reasoning {
            parts.retain(|part| !matches!(part.delta, ReplyDelta::Reasoning(_)));
        }
        if !parts.is_empty() {
            out.push(StreamEvent::Parts { choice, parts });
        }
    }

    fn finish(&mut self) {
        self.finished = true;
        let decode_steps = &self.stats.decode_steps;
        if let Some((compressor, session)) = &self.observed
            && decode_steps.drafted > 0
        {
            let acceptance = decode_steps.accepted as f64 / decode_steps.drafted as f64;
            compressor.observe(session, acceptance);
        }
        if let Some(warmup) = self.warmup.take() {
            warmup.submit(&self.app.engine(), self.last_reason);
        }
        let finish = match self.last_reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
        };
        let summary = self.stats.summary();
        self.app.metrics().finished(finish, &summary);
        let _entered = self.span.enter();
        tracing::info!(
            prompt_tokens = summary.prompt_tokens,
            cached_tokens = summary.cached_tokens,
            completion_tokens = summary.completion_tokens,
            reasoning_tokens = summary.reasoning_tokens,
            queue_ms = summary.queue.as_secs_f64() * 1e3,
            first_token_ms = (summary.queue + summary.prefill).as_secs_f64() * 1e3,
            tokens_per_second = self.stats.timings().decode_tokens_per_sec,
            drafted_tokens = self.stats.decode_steps.drafted,
            accepted_tokens = self.stats.decode_steps.accepted,
            finish,
            "request finished"
        );
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if !self.finished {
            let stage = self.stats.stage();
            self.app.metrics().cancelled(stage);
            let _entered = self.span.enter();
            tracing::info!(
                stage = stage.name(),
                completion_tokens = self.stats.completion_tokens,
                "request cancelled"
            );
        }
    }
}
