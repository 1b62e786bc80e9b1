//! Steps common to all chat dialects: parse a request, submit it, write the response.
//!
//! A dialect supplies a function that parses its body into a [`ChatRequest`], and a
//! [`StreamFormat`] that encodes [`StreamEvent`]s as its own server-sent events.
//!
//! Headers are sent once a request is admitted. A stream whose prompt is scored for compression
//! begins before that, with comments on the progress.

use std::borrow::Cow;
use std::sync::Arc;

use axum::body::Body;
use axum::http::HeaderMap;
use axum::response::Response;
use chat::reply::{FinishReason, ReplyConfig};
use chat::request::{ChatRequest, ReasoningFormat};
use chat::tools::ToolSet;
use chat::{ChatError, Tokenizer};
use decode::{Grammar, InitialPhase, Job, Logprobs};
use tracing::Instrument;

use crate::compression::{CompressionOutcome, PromptToCompress, ScoringProgress};
use crate::engine::ModelHandle;
use crate::error::ApiError;
use crate::http::body;
use crate::http::in_flight::{InFlight, StreamEvent};
use crate::http::notes;
use crate::http::prefix_warmup::PrefixWarmup;
use crate::http::sse::{self, ClientGone, KeepAlive, SseEncoder, SseWriter};
use crate::http::state::App;
use crate::http::stream_error::ErrorFormat;
use crate::settings::GenerationDefaults;
use crate::text::constraints::CompiledGrammar;
use crate::text::prepare::{self, PreparedPrompt};
use crate::text::reply::{Choice, ChoiceConfig, CollectedReply};
use crate::text::sampling_params;
use crate::text::token_rules;

/// Parser of a dialect's body: the neutral request, and the dialect's own fields.
pub type Parse<T> = fn(&[u8]) -> Result<(ChatRequest, T), ChatError>;

/// Parsed request with its prompt, not yet submitted.
pub struct ParsedRequest<T> {
    ready: Arc<ModelHandle>,
    /// Neutral request.
    pub request: ChatRequest,
    /// The dialect's own fields.
    pub own: T,
    /// Rendered and tokenised prompt.
    pub prompt: PreparedPrompt,
    /// How far the scoring of its prompt is, for compression.
    scoring: Arc<ScoringProgress>,
    /// What of the request the reply is not held to.
    notes: Vec<String>,
}

impl<T: Send + 'static> ParsedRequest<T> {
    /// Parses a body with `parse`, then renders and tokenises the prompt.
    pub async fn read(
        app: &App,
        headers: &HeaderMap,
        body: Body,
        parse: Parse<T>,
    ) -> Result<ParsedRequest<T>, ApiError> {
        let bytes = body::read(body, app.config().body_limit_bytes).await?;
        let ready = app.model()?;
        let policy = prepare::policy(app.config());
        let model = Arc::clone(&ready);
        let (mut request, own, prompt) = body::run_sized(bytes.len(), move |cancel| {
            let (request, own) = parse(&bytes)?;
            let prompt = prepare::chat(model.text_side(), &policy, &request, cancel)?;
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
            // Escaped: a terminal must not obey what a client sent.
            tracing::info!(prompt = ?prompt.text, "prompt");
        }
        Ok(ParsedRequest {
            ready,
            request,
            own,
            prompt,
            scoring: Arc::default(),
            notes: Vec::new(),
        })
    }

    /// Grammar of the reply, if the request constrains it.
    async fn grammar(&mut self) -> Result<Option<Grammar>, ApiError> {
        let markup = prepare::call_markup(&self.ready.model);
        let Some(shape) = self.request.output_grammar(markup)? else {
            return Ok(None);
        };
        let ready = Arc::clone(&self.ready);
        let compiled = move || ready.model.constraints.compile(&shape);
        let CompiledGrammar { grammar, notes } = body::run_long(compiled).await?;
        self.notes.extend(notes);
        Ok(Some(grammar))
    }

    /// The response with a header that names what the reply is not held to.
    pub fn with_notes(&self, response: Response) -> Response {
        notes::with_notes(response, &self.notes)
    }

    /// Whether the prompt will be scored for compression.
    fn is_scored(&self, app: &App) -> bool {
        let policy = prepare::policy(app.config());
        let of = PromptToCompress {
            model: self.ready.text_side(),
            policy: &policy,
            request: &self.request,
            prompt: &self.prompt,
        };
        let compressor = self.ready.model.compressor.as_ref();
        compressor.is_some_and(|compressor| compressor.will_score(of))
    }

    /// Compresses the prompt, if there is a scorer and the request and its prompt allow it.
    async fn compress(&mut self, app: &App) -> Result<Option<CompressionOutcome>, ApiError> {
        let Some(compressor) = self.ready.model.compressor.clone() else {
            return Ok(None);
        };
        let (ready, request) = (Arc::clone(&self.ready), self.request.clone());
        let (prompt, policy) = (self.prompt.clone(), prepare::policy(app.config()));
        let progress = Arc::clone(&self.scoring);
        let (shorter, outcome) = body::run_cancellable(move |cancel| {
            let of = PromptToCompress {
                model: ready.text_side(),
                policy: &policy,
                request: &request,
                prompt: &prompt,
            };
            Ok(compressor.compress(of, cancel, &progress))
        })
        .await?;
        if let Some(shorter) = shorter {
            self.prompt = shorter;
        }
        Ok(Some(outcome))
    }

    /// Submits the request; fails if a parameter is invalid or the prompt does not fit.
    pub async fn start(&mut self, app: &App) -> Result<InFlight, ApiError> {
        let grammar = self.grammar().await?;
        self.submit(app, grammar).await
    }

    async fn submit(&mut self, app: &App, grammar: Option<Grammar>) -> Result<InFlight, ApiError> {
        let compression = self.compress(app).await?;
        let (request, model) = (&self.request, &self.ready.model);
        let fields = &request.sampling;
        let room = sampling_params::remaining_context(
            self.prompt.ids.len(),
            self.ready.info.limits.context,
        )?;
        let max_tokens = prepare::max_reply_tokens(model, request, room);
        let vocab = self.ready.info.vocab;
        let mut params =
            sampling_params::generation_params(fields, &self.defaults(), max_tokens, vocab)?;
        token_rules::restrict(&mut params, fields, &model.tokenizer, vocab)?;
        params.logprobs = request.logprobs;
        params.prompt_logprobs = request.tokens.prompt_logprobs;
        params.session = request.cache.session.as_deref().map(Arc::from);
        params.use_prefix_cache = request.cache.enabled;
        params.window = app.config().window.of(!request.tools.is_empty());
        if let Some(token) = prepare::forbidden_call_token(model, request) {
            params.sampling.bias.retain(|(other, _)| *other != token);
            params.sampling.bias.push((token, f32::NEG_INFINITY));
        }
        // Without tags of its own, a model writes calls only where the grammar demands them.
        let parses_calls = model.tokenizer.defines_tool_calls() || grammar.is_some();
        let constraints = model.constraints.for_chat(
            (self.prompt.initial_phase, self.prompt.reasoning_budget),
            grammar,
            fields.n,
        );
        let (constraints, reasoning_handles) = constraints.unzip();
        params.constraints = constraints;
        let reasoning_handles = reasoning_handles.unwrap_or_default();
        let plan = ChoiceConfig {
            tokenizer: Arc::clone(&model.tokenizer),
            reply_config: ReplyConfig {
                starts_in_reasoning: self.prompt.initial_phase == InitialPhase::Reasoning,
                split_reasoning: request.reasoning_format == ReasoningFormat::Split,
                tools: if parses_calls {
                    request.callable_tools()
                } else {
                    ToolSet::default()
                },
                parallel_tool_calls: request.parallel_tool_calls,
                stop: fields.stop.clone(),
                include_stop: fields.include_stop,
                min_tokens: params.min_tokens,
                call_id_seed: 0,
            },
            stop_tokens: token_rules::reported_stop_tokens(fields, &model.eos),
            keeps_token_ids: request.tokens.return_token_ids,
            logprobs: request.logprobs.is_some(),
        };
        let choice =
            |i: usize| Choice::new(&plan).with_reasoning(reasoning_handles.get(i).cloned());
        let choices = (0..fields.n).map(choice).collect();
        let job = Job {
            id: app.engine().new_job_id(),
            prompt: Arc::clone(&self.prompt.ids),
            choices: fields.n,
            params,
            priority: request.priority,
        };
        // After a compressed first prompt, the next one does not begin with the same tokens.
        let keeps_prefix = compression.as_ref().is_none_or(|of| of.keeps_prefix());
        let warmup = PrefixWarmup::new(app, &self.ready, request).filter(|_| keeps_prefix);
        let observed = model.compressor.clone().zip(request.cache.session.clone());
        let in_flight = InFlight::start(app, job, choices)?;
        Ok(in_flight
            .with_compression(compression, observed)
            .with_warmup(warmup)
            .with_reasoning(request.thinking.visibility))
    }

    /// Sampling defaults of the model, for a reply that begins as the prompt makes it.
    pub fn defaults(&self) -> Cow<'_, GenerationDefaults> {
        self.ready
            .model
            .defaults
            .of_reply(self.prompt.initial_phase)
    }

    /// Adds what of the request the reply does not keep.
    pub fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// Tokens of prompt and reply that fit together.
    pub fn context(&self) -> usize {
        self.ready.info.limits.context
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.ready.model.tokenizer
    }

    /// Model name to echo: the client's, else the served one.
    pub fn model_name(&self, app: &App) -> String {
        let asked = self.request.model.clone();
        asked.unwrap_or_else(|| app.model_name().to_owned())
    }
}

/// Headers that carry a session id, most specific first.
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

/// Session id from the headers; a cache hint only.
fn session(headers: &HeaderMap) -> Option<String> {
    let named = SESSIONS
        .iter()
        .filter_map(|name| headers.get(*name)?.to_str().ok());
    let mut named = named.filter(|text| !text.is_empty());
    named.next().map(|text| text.chars().take(256).collect())
}

/// Encoder of a dialect's stream.
pub trait StreamFormat: Send + 'static {
    /// Keep-alive bytes of an idle stream.
    const KEEP_ALIVE: KeepAlive;

    /// Encodes the events that open the stream.
    fn begin(&mut self, out: &mut SseEncoder, request: &InFlight);

    /// Encodes one stream event.
    fn event(&mut self, out: &mut SseEncoder, request: &InFlight, event: StreamEvent);

    /// Encodes the events that close the stream.
    fn end(&mut self, out: &mut SseEncoder, request: &InFlight);

    /// Encodes an error; nothing follows it.
    fn fail(&mut self, out: &mut SseEncoder, request: &InFlight, error: &ApiError);
}

/// Starts a request and streams its reply in the format that `format` makes once it has started.
///
/// If its prompt is scored first, the stream begins meanwhile. `errors` is for errors after that
/// and before the format.
pub async fn stream<T, V, F>(
    app: &App,
    mut parsed: ParsedRequest<T>,
    errors: ErrorFormat,
    format: F,
) -> Result<Response, ApiError>
where
    T: Send + Sync + 'static,
    V: StreamFormat,
    F: FnOnce(&App, &ParsedRequest<T>, &InFlight) -> V + Send + 'static,
{
    let timeouts = app.config().timeouts;
    let grammar = parsed.grammar().await?;
    if !parsed.is_scored(app) {
        let request = parsed.submit(app, grammar).await?;
        let format = format(app, &parsed, &request);
        let response = sse::response(timeouts, V::KEEP_ALIVE, move |writer| {
            write_stream(writer, request, format)
        });
        return Ok(parsed.with_notes(response));
    }
    app.engine().check_room()?;
    let notes = parsed.notes.clone();
    let (app, span) = (app.clone(), tracing::Span::current());
    let response = sse::response(timeouts, V::KEEP_ALIVE, move |mut writer| {
        async move {
            let progress = Arc::clone(&parsed.scoring);
            let start = parsed.submit(&app, grammar);
            let started = writer.comment_while(start, || progress.counts().to_string());
            match started.await? {
                Ok(request) => {
                    let format = format(&app, &parsed, &request);
                    write_stream(writer, request, format).await
                }
                Err(error) => writer.send(errors.bytes(&error)).await,
            }
        }
        .instrument(span)
    });
    Ok(notes::with_notes(response, &notes))
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

/// All choices of a request that has ended.
pub struct WholeReply {
    /// Each choice with its finish reason.
    pub choices: Vec<(CollectedReply, FinishReason)>,
    /// Logprobs of the prompt's tokens, if they were requested.
    pub prompt_logprobs: Vec<Option<Logprobs>>,
}

/// Runs the request to its end and collects each choice.
pub async fn whole(request: &mut InFlight) -> Result<WholeReply, ApiError> {
    let mut choices: Vec<(CollectedReply, FinishReason)> = (0..request.n_choices())
        .map(|_| (CollectedReply::default(), FinishReason::Stop))
        .collect();
    let mut prompt_logprobs = Vec::new();
    while let Some(events) = request.next().await? {
        for event in events {
            match event {
                StreamEvent::Parts { choice, parts } => {
                    for part in parts {
                        choices[choice].0.push(request.choice(choice), part);
                    }
                }
                StreamEvent::End { choice, reason } => choices[choice].1 = reason,
                StreamEvent::PromptLogprobs(rows) => prompt_logprobs = rows,
                StreamEvent::Progress { .. } => {}
            }
        }
    }
    Ok(WholeReply {
        choices,
        prompt_logprobs,
    })
}
