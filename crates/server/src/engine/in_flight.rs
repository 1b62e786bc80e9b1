//! One request while it runs: events of the engine in, news for the client out.

use std::sync::Arc;
use std::time::Instant;

use chat::reply::FinishReason;
use decode::{Event, FinishReason as Ended, Logprobs, OutputToken, ReasoningHandle};

use crate::engine::active_requests::EntryGuard;
use crate::engine::handle::{EngineEvent, Events, Order, Timestamped};
use crate::engine::prefix_warmup::PrefixWarmup;
use crate::engine::request_stats::RequestStats;
use crate::error::ApiError;
use crate::http::state::App;
use crate::text::reply::{Choice, Part};

/// Something a client may want to hear.
#[derive(Debug)]
pub enum StreamEvent {
    /// The prompt is being read.
    Progress {
        /// Tokens done, cached ones included.
        done: usize,
        /// Tokens in all.
        total: usize,
    },
    /// Logprobs of the prompt's tokens.
    PromptLogprobs(Vec<Option<Logprobs>>),
    /// New text or calls of one choice.
    Parts {
        /// Which choice.
        choice: usize,
        /// In order.
        parts: Vec<Part>,
    },
    /// One choice is over.
    End {
        /// Which choice.
        choice: usize,
        /// Why.
        reason: FinishReason,
    },
}

/// A request on its way. Dropping it before its end cancels it.
pub struct InFlight {
    app: App,
    events: Events,
    choices: Vec<Choice>,
    choices_left: usize,
    /// When each choice last got tokens.
    last_step: Vec<Option<Instant>>,
    stats: RequestStats,
    /// Where others see how far it is.
    entry: EntryGuard,
    /// An error that came right behind news; it is told after them.
    deferred_error: Option<ApiError>,
    /// Whether it ended by itself, well or not; else its client left.
    finished: bool,
    last_reason: FinishReason,
    /// Follows the reply for the sake of the next request, where that can be foreseen.
    warmup: Option<PrefixWarmup>,
    /// The request's, for what is logged after its response has begun.
    span: tracing::Span,
}

/// What follows a request, and says how far it looks back where the server was told that replies do not look all the way.
fn stats(app: &App, order: &Order) -> RequestStats {
    let mut stats = RequestStats::new(order.prompt.len());
    let looks = !app.config().window.window.is_full();
    stats.window = looks.then_some(order.settings.window);
    stats
}

impl InFlight {
    /// Hands the order over. `choices` are as many fresh ones as the order asks for.
    pub fn start(app: &App, order: Order, choices: Vec<Choice>) -> Result<InFlight, ApiError> {
        let (stats, entry) = (stats(app, &order), app.active_requests().register(&order));
        let events = app.engine().submit(order, app.config().timeouts)?;
        Ok(InFlight::from_parts(app, events, choices, (stats, entry)))
    }

    /// As [`start`](Run::start), but waits for a place in the queue instead of being refused.
    pub async fn start_later(
        app: &App,
        order: Order,
        choices: Vec<Choice>,
    ) -> Result<InFlight, ApiError> {
        let (stats, entry) = (stats(app, &order), app.active_requests().register(&order));
        let events = app
            .engine()
            .submit_later(order, app.config().timeouts)
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
            warmup: None,
            span: tracing::Span::current(),
        }
    }

    /// The same, followed for the sake of the request after it.
    #[must_use]
    pub fn with_warmup(mut self, warmup: Option<PrefixWarmup>) -> InFlight {
        self.warmup = warmup;
        self
    }

    /// Counts and times so far.
    pub fn stats(&self) -> &RequestStats {
        &self.stats
    }

    /// How many choices there are.
    pub fn n_choices(&self) -> usize {
        self.choices.len()
    }

    /// What holds the thinking of its choices, where there is anything to hold.
    pub fn reasoning_handles(&self) -> Vec<Arc<ReasoningHandle>> {
        let reasoning_handles = self.choices.iter().filter_map(Choice::reasoning_handle);
        reasoning_handles.map(Arc::clone).collect()
    }

    /// A choice, by its index.
    pub fn choice(&self, index: usize) -> &Choice {
        &self.choices[index]
    }

    /// All that has happened since the last call, at least one thing; `None` after the last choice's end.
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
                let total = self.stats.prompt_tokens;
                out.push(StreamEvent::Progress {
                    done: cached,
                    total,
                });
            }
            Event::Prefill { done, total } => out.push(StreamEvent::Progress { done, total }),
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
        // Tokens behind a stop string are not billed.
        let count = state.n_tokens() - before;
        self.stats.tokens(at, count);
        if let Some(last) = self.last_step[choice].replace(at) {
            let since = at.saturating_duration_since(last);
            self.app.metrics().step(since, count);
        }
        let stops = state.wants_no_more();
        self.emit(choice, parts, out);
        if stops {
            // What the engine still has under way for this choice is thrown away.
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

    fn emit(&mut self, choice: usize, parts: Vec<Part>, out: &mut Vec<StreamEvent>) {
        if let Some(warmup) = &mut self.warmup {
            parts.iter().for_each(|part| warmup.push(&part.piece));
        }
        if !parts.is_empty() {
            out.push(StreamEvent::Parts { choice, parts });
        }
    }

    fn finish(&mut self) {
        self.finished = true;
        if let Some(warmup) = self.warmup.take() {
            warmup.submit(self.app.engine(), self.last_reason);
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
