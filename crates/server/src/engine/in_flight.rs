//! One request while it runs: events of the engine in, news for the client out.

use std::sync::Arc;
use std::time::Instant;

use chat::reply::FinishReason;
use decode::{Event, FinishReason as Ended, Logprobs, OutputToken, ReasoningHandle};

use crate::engine::active_requests::Place;
use crate::engine::handle::{Events, Order, Stamped, Update};
use crate::engine::prefix_warmup::Foresight;
use crate::engine::usage::Meter;
use crate::error::ApiError;
use crate::http::state::App;
use crate::text::reply::{Choice, Part};

/// Something a client may want to hear.
#[derive(Debug)]
pub enum News {
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
pub struct Run {
    app: App,
    events: Events,
    choices: Vec<Choice>,
    choices_left: usize,
    /// When each choice last got tokens.
    last_step: Vec<Option<Instant>>,
    meter: Meter,
    /// Where others see how far it is.
    place: Place,
    /// An error that came right behind news; it is told after them.
    fault: Option<ApiError>,
    /// Whether it ended by itself, well or not; else its client left.
    settled: bool,
    last_reason: FinishReason,
    /// Follows the reply for the sake of the next request, where that can be foreseen.
    foresight: Option<Foresight>,
    /// The request's, for what is logged after its response has begun.
    span: tracing::Span,
}

/// What follows a request, and says how far it looks back where the server was told that replies do not look all the way.
fn meter(app: &App, order: &Order) -> Meter {
    let mut meter = Meter::new(order.prompt.len());
    let looks = !app.config().window.window.is_full();
    meter.window = looks.then_some(order.settings.window);
    meter
}

impl Run {
    /// Hands the order over. `choices` are as many fresh ones as the order asks for.
    pub fn start(app: &App, order: Order, choices: Vec<Choice>) -> Result<Run, ApiError> {
        let (meter, place) = (meter(app, &order), app.board().enter(&order));
        let events = app.engine().submit(order, app.config().times)?;
        Ok(Run::following(app, events, choices, (meter, place)))
    }

    /// As [`start`](Run::start), but waits for a place in the queue instead of being refused.
    pub async fn start_later(
        app: &App,
        order: Order,
        choices: Vec<Choice>,
    ) -> Result<Run, ApiError> {
        let (meter, place) = (meter(app, &order), app.board().enter(&order));
        let events = app.engine().submit_later(order, app.config().times).await?;
        Ok(Run::following(app, events, choices, (meter, place)))
    }

    fn following(
        app: &App,
        events: Events,
        choices: Vec<Choice>,
        (meter, place): (Meter, Place),
    ) -> Run {
        Run {
            app: app.clone(),
            events,
            choices_left: choices.len(),
            last_step: vec![None; choices.len()],
            choices,
            meter,
            place,
            fault: None,
            settled: false,
            last_reason: FinishReason::Stop,
            foresight: None,
            span: tracing::Span::current(),
        }
    }

    /// The same, followed for the sake of the request after it.
    #[must_use]
    pub fn foreseeing(mut self, foresight: Option<Foresight>) -> Run {
        self.foresight = foresight;
        self
    }

    /// Counts and times so far.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// How many choices there are.
    pub fn n_choices(&self) -> usize {
        self.choices.len()
    }

    /// What holds the thinking of its choices, where there is anything to hold.
    pub fn reins(&self) -> Vec<Arc<ReasoningHandle>> {
        let reins = self.choices.iter().filter_map(Choice::reins);
        reins.map(Arc::clone).collect()
    }

    /// A choice, by its index.
    pub fn choice(&self, index: usize) -> &Choice {
        &self.choices[index]
    }

    /// All that has happened since the last call, at least one thing; `None` after the last choice's end.
    pub async fn next(&mut self) -> Result<Option<Vec<News>>, ApiError> {
        if let Some(fault) = self.fault.take() {
            return Err(fault);
        }
        let mut news = Vec::new();
        while self.choices_left > 0 {
            let stamped = match self.events.try_next() {
                Some(stamped) => stamped,
                None if !news.is_empty() => break,
                None => match self.events.next().await {
                    Some(stamped) => stamped,
                    None => return Err(ApiError::internal("the engine forgot a choice")),
                },
            };
            if let Err(fault) = self.take(stamped, &mut news) {
                if news.is_empty() {
                    return Err(fault);
                }
                self.fault = Some(fault);
                break;
            }
        }
        self.place.show(&self.meter);
        if self.choices_left == 0 && self.fault.is_none() && !self.settled {
            self.settle();
        }
        Ok((!news.is_empty()).then_some(news))
    }

    fn take(&mut self, stamped: Stamped, news: &mut Vec<News>) -> Result<(), ApiError> {
        let event = match stamped.update {
            Update::Event(event) => event,
            Update::Fault(fault) => {
                self.settled = true;
                return Err(fault.into());
            }
        };
        match event {
            Event::Started { cached } => {
                self.meter.start(stamped.at, cached);
                let total = self.meter.prompt_tokens;
                news.push(News::Progress {
                    done: cached,
                    total,
                });
            }
            Event::Prefill { done, total } => news.push(News::Progress { done, total }),
            Event::PromptLogprobs(rows) => news.push(News::PromptLogprobs(rows)),
            Event::Tokens { choice, tokens } => {
                if self.choices[choice].is_over() {
                    return Ok(());
                }
                self.tokens(choice, tokens, stamped.at, news);
            }
            Event::Finished {
                choice,
                reason,
                stats,
            } => {
                self.meter.rounds.add(&stats);
                if !self.choices[choice].is_over() {
                    self.end(choice, reason, news);
                }
            }
            Event::Failed { error } => {
                self.settled = true;
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
        news: &mut Vec<News>,
    ) {
        let state = &mut self.choices[choice];
        let before = state.n_tokens();
        let parts = state.push(tokens);
        // Tokens behind a stop string are not billed.
        let count = state.n_tokens() - before;
        self.meter.tokens(at, count);
        if let Some(last) = self.last_step[choice].replace(at) {
            let since = at.saturating_duration_since(last);
            self.app.metrics().step(since, count);
        }
        let stops = state.wants_no_more();
        self.tell(choice, parts, news);
        if stops {
            // What the engine still has under way for this choice is thrown away.
            self.events.cancel_choice(choice);
            self.end(choice, Ended::Eos, news);
        }
    }

    fn end(&mut self, choice: usize, ended: Ended, news: &mut Vec<News>) {
        let state = &mut self.choices[choice];
        let (parts, reason) = state.finish(ended);
        let summary = state.summary();
        self.meter.reasoning_tokens += summary.reasoning_tokens;
        self.meter.tool_calls += summary.calls;
        self.meter.malformed_calls += summary.malformed;
        self.choices_left -= 1;
        self.last_reason = reason;
        self.tell(choice, parts, news);
        news.push(News::End { choice, reason });
    }

    fn tell(&mut self, choice: usize, parts: Vec<Part>, news: &mut Vec<News>) {
        if let Some(foresight) = &mut self.foresight {
            parts.iter().for_each(|part| foresight.push(&part.piece));
        }
        if !parts.is_empty() {
            news.push(News::Parts { choice, parts });
        }
    }

    fn settle(&mut self) {
        self.settled = true;
        if let Some(foresight) = self.foresight.take() {
            foresight.tell(self.app.engine(), self.last_reason);
        }
        let finish = match self.last_reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
        };
        let summary = self.meter.summary();
        self.app.metrics().finished(finish, &summary);
        let _entered = self.span.enter();
        tracing::info!(
            prompt_tokens = summary.prompt_tokens,
            cached_tokens = summary.cached_tokens,
            completion_tokens = summary.completion_tokens,
            reasoning_tokens = summary.reasoning_tokens,
            queue_ms = summary.queue.as_secs_f64() * 1e3,
            first_token_ms = (summary.queue + summary.prefill).as_secs_f64() * 1e3,
            tokens_per_second = self.meter.timings().decode_tokens_per_sec,
            drafted_tokens = self.meter.rounds.drafted,
            accepted_tokens = self.meter.rounds.accepted,
            finish,
            "request finished"
        );
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if !self.settled {
            let stage = self.meter.stage();
            self.app.metrics().cancelled(stage);
            let _entered = self.span.enter();
            tracing::info!(
                stage = stage.name(),
                completion_tokens = self.meter.completion_tokens,
                "request cancelled"
            );
        }
    }
}
