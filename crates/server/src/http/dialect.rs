//! What every chat dialect does alike: read a request, hand it over, and write what comes back.
//!
//! A dialect brings two things: a function that reads its body into a [`ChatRequest`], and a [`Voice`] that
//! writes the news of a run in its own words.

use std::sync::Arc;

use axum::body::Body;
use axum::http::HeaderMap;
use axum::response::Response;
use chat::ChatError;
use chat::reply::{FinishReason, ReplyConfig};
use chat::request::{ChatRequest, ReasoningFormat};
use decode::{Grammar, InitialPhase};

use crate::engine::Ready;
use crate::engine::handle::Order;
use crate::engine::in_flight::{InFlight, StreamEvent};
use crate::engine::prefix_warmup::PrefixWarmup;
use crate::error::ApiError;
use crate::http::body;
use crate::http::sse::{self, ClientGone, KeepAlive, SseEncoder, SseWriter};
use crate::http::state::App;
use crate::text::prepare::{self, Prompt};
use crate::text::reply::{Choice, ChoiceConfig, CollectedReply};
use crate::text::sampling_params;

/// How a dialect reads a body: the request all dialects share, and what only this one knows of it.
pub type Parse<T> = fn(&[u8]) -> Result<(ChatRequest, T), ChatError>;

/// A request that was read and made into a prompt, but not handed over yet.
pub struct ParsedRequest<T> {
    ready: Arc<Ready>,
    /// The request in the form all dialects share.
    pub request: ChatRequest,
    /// What only its dialect knows of it.
    pub own: T,
    /// Its prompt.
    pub prompt: Prompt,
}

impl<T: Send + 'static> ParsedRequest<T> {
    /// Reads a body with the dialect's function `parse`, and makes the prompt.
    pub async fn read(
        app: &App,
        headers: &HeaderMap,
        body: Body,
        parse: Parse<T>,
    ) -> Result<ParsedRequest<T>, ApiError> {
        let bytes = body::read(body, app.config().body_limit_bytes).await?;
        let ready = app.ready()?;
        let policy = prepare::policy(app.config());
        let model = Arc::clone(&ready);
        let (mut request, own, prompt) = body::run_sized(bytes.len(), move || {
            let (request, own) = parse(&bytes)?;
            let prompt = prepare::chat(&model, &policy, &request)?;
            Ok((request, own, prompt))
        })
        .await?;
        app.check_model(request.model.as_deref())?;
        let hints = &mut request.cache;
        hints.session = hints
            .session
            .take()
            .or_else(|| session(headers))
            .or_else(|| hints.group.clone());
        if app.config().log_prompts {
            tracing::info!(prompt = %prompt.text, "prompt");
        }
        Ok(ParsedRequest {
            ready,
            request,
            own,
            prompt,
        })
    }

    /// What the reply must be, if it may not be anything.
    async fn grammar(&self) -> Result<Option<Grammar>, ApiError> {
        let markup = prepare::call_markup(&self.ready.model);
        let Some(shape) = self.request.output_grammar(markup)? else {
            return Ok(None);
        };
        let ready = Arc::clone(&self.ready);
        let compiled = move || ready.model.constraints.compile(&shape);
        body::run_long(compiled).await.map(Some)
    }

    /// Hands the request over; refuses what cannot be promised or does not fit.
    pub async fn start(&self, app: &App) -> Result<InFlight, ApiError> {
        let grammar = self.grammar().await?;
        let (request, model) = (&self.request, &self.ready.model);
        let fields = &request.sampling;
        let room = sampling_params::remaining_context(
            self.prompt.ids.len(),
            self.ready.info.limits.context,
        )?;
        let max_tokens = prepare::max_reply_tokens(model, request, room);
        let vocab = self.ready.info.vocab;
        let mut settings =
            sampling_params::generation_params(fields, &model.defaults, max_tokens, vocab)?;
        settings.logprobs = request.logprobs;
        settings.session = request.cache.session.as_deref().map(Arc::from);
        settings.use_saved = request.cache.enabled;
        settings.window = app.config().window.of(!request.tools.is_empty());
        if let Some(token) = prepare::forbidden_call_token(model, request) {
            settings.sampling.bias.retain(|(other, _)| *other != token);
            settings.sampling.bias.push((token, f32::NEG_INFINITY));
        }
        let constraints = model.constraints.for_chat(&self.prompt, grammar, fields.n);
        let (constraints, reasoning_handles) = constraints.unzip();
        settings.constraints = constraints;
        let reasoning_handles = reasoning_handles.unwrap_or_default();
        let plan = ChoiceConfig {
            tokenizer: Arc::clone(&model.tokenizer),
            reply_config: ReplyConfig {
                starts_in_reasoning: self.prompt.initial_phase == InitialPhase::Reasoning,
                split_reasoning: request.reasoning_format == ReasoningFormat::Split,
                tools: request.callable_tools(),
                parallel_tool_calls: request.parallel_tool_calls,
                stop: fields.stop.clone(),
                min_tokens: settings.min_tokens,
                call_id_seed: 0,
            },
            stop_tokens: fields.stop_token_ids.clone(),
            logprobs: request.logprobs.is_some(),
        };
        let choice =
            |i: usize| Choice::new(&plan).with_reasoning(reasoning_handles.get(i).cloned());
        let choices = (0..fields.n).map(choice).collect();
        let order = Order {
            prompt: Arc::clone(&self.prompt.ids),
            choices: fields.n,
            settings,
            priority: request.priority,
        };
        let warmup = PrefixWarmup::new(app, &self.ready, request);
        InFlight::start(app, order, choices).map(|request| request.with_warmup(warmup))
    }

    /// The model as the client named it, or as it is served.
    pub fn model_name(&self, app: &App) -> String {
        let asked = self.request.model.clone();
        asked.unwrap_or_else(|| app.config().model_name.clone())
    }
}

/// Headers in which clients name a conversation, the surest first.
const SESSIONS: [&str; 9] = [
    "x-session-affinity",
    "x-session-id",
    "x-claude-code-session-id",
    "session_id",
    "session-id",
    "thread-id",
    "conversation_id",
    "conversation-id",
    "x-hermes-session-id",
];

/// The conversation that headers name: a hint, never a right.
fn session(headers: &HeaderMap) -> Option<String> {
    let named = SESSIONS
        .iter()
        .filter_map(|name| headers.get(*name)?.to_str().ok());
    let mut named = named.filter(|text| !text.is_empty());
    named.next().map(|text| text.chars().take(256).collect())
}

/// How a dialect writes a stream.
pub trait StreamFormat: Send + 'static {
    /// What fills silence.
    const KEEP_ALIVE: KeepAlive;

    /// The events before the first news.
    fn begin(&mut self, out: &mut SseEncoder, request: &InFlight);

    /// The events of one piece of news.
    fn event(&mut self, out: &mut SseEncoder, request: &InFlight, event: StreamEvent);

    /// The events after the last news.
    fn end(&mut self, out: &mut SseEncoder, request: &InFlight);

    /// The events of a failure; nothing follows them.
    fn fail(&mut self, out: &mut SseEncoder, request: &InFlight, error: &ApiError);
}

/// Answers with events in the words of `voice`. Headers go out at once.
pub fn stream<V: StreamFormat>(app: &App, request: InFlight, format: V) -> Response {
    let timeouts = app.config().timeouts;
    sse::response(timeouts, V::KEEP_ALIVE, move |writer| {
        write_stream(writer, request, format)
    })
}

async fn write_stream<V: StreamFormat>(
    mut writer: SseWriter,
    mut request: InFlight,
    mut format: V,
) -> Result<(), ClientGone> {
    let mut out = SseEncoder::default();
    format.begin(&mut out, &request);
    loop {
        if let Some(part) = out.take() {
            writer.send(part).await?;
        }
        match writer.keep_alive_while(request.next()).await? {
            Ok(Some(events)) => {
                for event in events {
                    format.event(&mut out, &request, event);
                }
            }
            Ok(None) => {
                format.end(&mut out, &request);
                break;
            }
            Err(error) => {
                format.fail(&mut out, &request, &error);
                break;
            }
        }
    }
    match out.take() {
        Some(part) => writer.send(part).await,
        None => Ok(()),
    }
}

/// Waits for the end and gives each choice whole.
pub async fn whole(
    request: &mut InFlight,
) -> Result<Vec<(CollectedReply, FinishReason)>, ApiError> {
    let mut choices: Vec<(CollectedReply, FinishReason)> = (0..request.n_choices())
        .map(|_| (CollectedReply::default(), FinishReason::Stop))
        .collect();
    while let Some(events) = request.next().await? {
        for event in events {
            match event {
                StreamEvent::Parts { choice, parts } => {
                    for part in parts {
                        choices[choice].0.push(request.choice(choice), part);
                    }
                }
                StreamEvent::End { choice, reason } => choices[choice].1 = reason,
                StreamEvent::Progress { .. } | StreamEvent::PromptLogprobs(_) => {}
            }
        }
    }
    Ok(choices)
}
