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
use crate::engine::in_flight::{News, Run};
use crate::engine::prefix_warmup::Foresight;
use crate::error::ApiError;
use crate::http::body;
use crate::http::sse::{self, Encoder, Gone, Silence, Writer};
use crate::http::state::App;
use crate::text::prepare::{self, Prompt};
use crate::text::reply::{Choice, ChoicePlan, Collected};
use crate::text::sampling_params;

/// How a dialect reads a body: the request all dialects share, and what only this one knows of it.
pub type Parse<T> = fn(&[u8]) -> Result<(ChatRequest, T), ChatError>;

/// A request that was read and made into a prompt, but not handed over yet.
pub struct Talk<T> {
    ready: Arc<Ready>,
    /// The request in the form all dialects share.
    pub request: ChatRequest,
    /// What only its dialect knows of it.
    pub own: T,
    /// Its prompt.
    pub prompt: Prompt,
}

impl<T: Send + 'static> Talk<T> {
    /// Reads a body with the dialect's function `parse`, and makes the prompt.
    pub async fn read(
        app: &App,
        headers: &HeaderMap,
        body: Body,
        parse: Parse<T>,
    ) -> Result<Talk<T>, ApiError> {
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
        Ok(Talk {
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
        let compiled = move || ready.model.constrain.compile(&shape);
        body::run_long(compiled).await.map(Some)
    }

    /// Hands the request over; refuses what cannot be promised or does not fit.
    pub async fn start(&self, app: &App) -> Result<Run, ApiError> {
        let grammar = self.grammar().await?;
        let (request, model) = (&self.request, &self.ready.model);
        let fields = &request.sampling;
        let room = sampling_params::room(self.prompt.ids.len(), self.ready.info.limits.context)?;
        let max_tokens = prepare::most_tokens(model, request, room);
        let vocab = self.ready.info.vocab;
        let mut settings = sampling_params::settings(fields, &model.defaults, max_tokens, vocab)?;
        settings.logprobs = request.logprobs;
        settings.session = request.cache.session.as_deref().map(Arc::from);
        settings.use_saved = request.cache.enabled;
        settings.window = app.config().window.of(!request.tools.is_empty());
        if let Some(token) = prepare::barred_token(model, request) {
            settings.sampling.bias.retain(|(other, _)| *other != token);
            settings.sampling.bias.push((token, f32::NEG_INFINITY));
        }
        let course = model.constrain.course(&self.prompt, grammar, fields.n);
        let (constraints, reins) = course.unzip();
        settings.constraints = constraints;
        let reins = reins.unwrap_or_default();
        let plan = ChoicePlan {
            tokenizer: Arc::clone(&model.tokenizer),
            reading: ReplyConfig {
                starts_in_reasoning: self.prompt.opening == InitialPhase::Reasoning,
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
        let choice = |i: usize| Choice::new(&plan).held(reins.get(i).cloned());
        let choices = (0..fields.n).map(choice).collect();
        let order = Order {
            prompt: Arc::clone(&self.prompt.ids),
            choices: fields.n,
            settings,
            priority: request.priority,
        };
        let foresight = Foresight::new(app, &self.ready, request);
        Run::start(app, order, choices).map(|run| run.foreseeing(foresight))
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
pub trait Voice: Send + 'static {
    /// What fills silence.
    const SILENCE: Silence;

    /// The events before the first news.
    fn begin(&mut self, out: &mut Encoder, run: &Run);

    /// The events of one piece of news.
    fn news(&mut self, out: &mut Encoder, run: &Run, news: News);

    /// The events after the last news.
    fn end(&mut self, out: &mut Encoder, run: &Run);

    /// The events of a failure; nothing follows them.
    fn fail(&mut self, out: &mut Encoder, run: &Run, error: &ApiError);
}

/// Answers with events in the words of `voice`. Headers go out at once.
pub fn stream<V: Voice>(app: &App, run: Run, voice: V) -> Response {
    let times = app.config().times;
    sse::response(times, V::SILENCE, move |writer| speak(writer, run, voice))
}

async fn speak<V: Voice>(mut writer: Writer, mut run: Run, mut voice: V) -> Result<(), Gone> {
    let mut out = Encoder::default();
    voice.begin(&mut out, &run);
    loop {
        if let Some(part) = out.take() {
            writer.send(part).await?;
        }
        match writer.while_waiting(run.next()).await? {
            Ok(Some(news)) => {
                for item in news {
                    voice.news(&mut out, &run, item);
                }
            }
            Ok(None) => {
                voice.end(&mut out, &run);
                break;
            }
            Err(error) => {
                voice.fail(&mut out, &run, &error);
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
pub async fn whole(run: &mut Run) -> Result<Vec<(Collected, FinishReason)>, ApiError> {
    let mut choices: Vec<(Collected, FinishReason)> = (0..run.n_choices())
        .map(|_| (Collected::default(), FinishReason::Stop))
        .collect();
    while let Some(news) = run.next().await? {
        for item in news {
            match item {
                News::Parts { choice, parts } => {
                    for part in parts {
                        choices[choice].0.push(run.choice(choice), part);
                    }
                }
                News::End { choice, reason } => choices[choice].1 = reason,
                News::Progress { .. } | News::PromptLogprobs(_) => {}
            }
        }
    }
    Ok(choices)
}
