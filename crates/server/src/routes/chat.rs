//! Chat completions.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use chat::openai::request::{ChatRequest, ReasoningFormat};
use chat::openai::response::{ChatChoice, ChatCompletion, CloseKind, FinishDetails, FinishReason};
use chat::openai::stream::{ChatChunk, ChunkChoice, Delta, PromptProgress, UsageField};
use chat::reply::ReplyConfig;
use serde_json::{Value, json};

use crate::body;
use crate::engine::Ready;
use crate::error::{ApiError, Dialect};
use crate::handle::Order;
use crate::ids;
use crate::order;
use crate::prepare::{self, Prompt};
use crate::reply::{Choice, ChoicePlan, Collected};
use crate::run::{News, Run};
use crate::sse::{self, Encoder, Gone, Writer};
use crate::state::App;

/// `POST /v1/chat/completions`.
pub(super) async fn completions(State(app): State<App>, body: Body) -> Result<Response, ApiError> {
    let (ready, request, prompt) = read(&app, body).await?;
    request.refuse_unenforced()?;
    let run = start(&app, &ready, &request, prompt)?;
    let envelope = Envelope::new(&app, &request);
    if request.stream {
        let times = app.config().times;
        return Ok(sse::response(times, move |writer| {
            stream(writer, run, envelope)
        }));
    }
    whole(run, &envelope).await.map(IntoResponse::into_response)
}

/// `POST /v1/chat/completions/input_tokens`: how long the prompt would be.
pub(super) async fn input_tokens(
    State(app): State<App>,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let (_, _, prompt) = read(&app, body).await?;
    Ok(Json(json!({
        "object": "response.input_tokens",
        "input_tokens": prompt.ids.len(),
    })))
}

async fn read(app: &App, body: Body) -> Result<(Arc<Ready>, ChatRequest, Prompt), ApiError> {
    let bytes = body::read(body, app.config().body_limit_bytes).await?;
    let ready = app.ready()?;
    let policy = prepare::policy(app.config());
    let (model, log) = (Arc::clone(&ready), app.config().log_prompts);
    let (request, prompt) = body::run_sized(bytes.len(), move || {
        let request = ChatRequest::from_json(&bytes)?;
        let prompt = prepare::chat(&model.model, &policy, &request)?;
        Ok((request, prompt))
    })
    .await?;
    app.check_model(request.model.as_deref())?;
    if log {
        tracing::info!(prompt = %prompt.text, "prompt");
    }
    Ok((ready, request, prompt))
}

fn start(app: &App, ready: &Ready, request: &ChatRequest, prompt: Prompt) -> Result<Run, ApiError> {
    let model = &ready.model;
    let fields = &request.sampling;
    let room = order::room(prompt.ids.len(), ready.info.limits.context)?;
    let wanted = fields.max_tokens.or(model.defaults.max_tokens);
    let max_tokens = wanted.unwrap_or(room).min(room);
    let mut settings = order::settings(fields, &model.defaults, max_tokens, ready.info.vocab)?;
    settings.logprobs = request.logprobs;
    if let Some(token) = prepare::barred_token(model, request) {
        settings.sampling.bias.retain(|(other, _)| *other != token);
        settings.sampling.bias.push((token, f32::NEG_INFINITY));
    }
    let plan = ChoicePlan {
        tokenizer: Arc::clone(&model.tokenizer),
        reading: ReplyConfig {
            starts_in_reasoning: prompt.opens_reasoning,
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
    let choices = (0..fields.n).map(|_| Choice::new(&plan)).collect();
    let order = Order {
        prompt: prompt.ids,
        choices: fields.n,
        settings,
        priority: request.priority,
    };
    Run::start(app, order, choices)
}

/// What is the same on all events of one answer.
struct Envelope {
    id: String,
    created: i64,
    model: String,
    n: usize,
    include_usage: bool,
    running_usage: bool,
    progress: bool,
    timings: bool,
    details: bool,
    logprobs: bool,
}

impl Envelope {
    fn new(app: &App, request: &ChatRequest) -> Envelope {
        let options = request.stream_options;
        Envelope {
            id: ids::random("chatcmpl-"),
            created: i64::try_from(ids::unix_now()).unwrap_or(i64::MAX),
            model: request
                .model
                .clone()
                .unwrap_or_else(|| app.config().model_name.clone()),
            n: request.sampling.n,
            include_usage: options.include_usage || app.config().always_usage,
            running_usage: options.continuous_usage_stats,
            progress: request.return_progress,
            timings: request.timings_per_token,
            details: request.thinking.opted_in(),
            logprobs: request.logprobs.is_some(),
        }
    }

    fn details(&self, run: &Run, choice: usize) -> Option<FinishDetails> {
        if !self.details {
            return None;
        }
        let choice = run.choice(choice);
        let (thinking, total) = (choice.summary().reasoning_tokens, choice.n_tokens());
        Some(FinishDetails {
            close_kind: CloseKind::Natural,
            thinking_tokens: thinking,
            content_tokens: total.saturating_sub(thinking),
            total_tokens: total,
        })
    }

    /// An event with these choices; `usage` and `timings` as the request wants them on every event.
    fn chunk(&self, run: &Run, choices: Vec<ChunkChoice>) -> ChatChunk<'_> {
        let usage = match (self.running_usage, self.include_usage) {
            (true, _) => UsageField::Counts(run.meter().usage()),
            (false, true) => UsageField::Null,
            (false, false) => UsageField::Absent,
        };
        ChatChunk {
            id: &self.id,
            object: ChatChunk::OBJECT,
            created: self.created,
            model: &self.model,
            system_fingerprint: None,
            choices,
            usage,
            timings: self.timings.then(|| run.meter().timings()),
            prompt_progress: None,
        }
    }
}

async fn whole(mut run: Run, envelope: &Envelope) -> Result<Json<ChatCompletion>, ApiError> {
    let mut collected: Vec<Collected> = (0..envelope.n).map(|_| Collected::default()).collect();
    let mut reasons = vec![FinishReason::Stop; envelope.n];
    while let Some(news) = run.next().await? {
        for item in news {
            match item {
                News::Parts { choice, parts } => {
                    for part in parts {
                        collected[choice].push(run.choice(choice), part);
                    }
                }
                News::End { choice, reason } => reasons[choice] = reason,
                News::Progress { .. } | News::PromptLogprobs(_) => {}
            }
        }
    }
    let parts = collected.into_iter().zip(reasons).enumerate();
    let choices = parts.map(|(index, (whole, finish_reason))| ChatChoice {
        index,
        message: whole.reply.into(),
        logprobs: envelope.logprobs.then_some(whole.logprobs),
        finish_reason,
        finish_details: envelope.details(&run, index),
    });
    Ok(Json(ChatCompletion {
        id: envelope.id.clone(),
        object: ChatCompletion::OBJECT,
        created: envelope.created,
        model: envelope.model.clone(),
        system_fingerprint: None,
        choices: choices.collect(),
        usage: run.meter().usage(),
        timings: Some(run.meter().timings()),
    }))
}

async fn stream(mut writer: Writer, mut run: Run, envelope: Envelope) -> Result<(), Gone> {
    let mut out = Encoder::default();
    for index in 0..envelope.n {
        let opening = ChunkChoice::new(index, Delta::opening());
        out.data(&envelope.chunk(&run, vec![opening]));
    }
    loop {
        if let Some(part) = out.take() {
            writer.send(part).await?;
        }
        match writer.while_waiting(run.next()).await? {
            Ok(Some(news)) => {
                for item in news {
                    write(&mut out, &run, &envelope, item);
                }
            }
            Ok(None) => break,
            Err(error) => {
                out.data(&error.body(Dialect::OpenAi, None));
                out.done();
                return send_rest(&mut writer, &mut out).await;
            }
        }
    }
    if envelope.include_usage {
        let mut last = envelope.chunk(&run, Vec::new());
        last.usage = UsageField::Counts(run.meter().usage());
        last.timings = Some(run.meter().timings());
        out.data(&last);
    }
    out.done();
    send_rest(&mut writer, &mut out).await
}

async fn send_rest(writer: &mut Writer, out: &mut Encoder) -> Result<(), Gone> {
    match out.take() {
        Some(part) => writer.send(part).await,
        None => Ok(()),
    }
}

fn write(out: &mut Encoder, run: &Run, envelope: &Envelope, news: News) {
    match news {
        News::Progress { done, total } => {
            if envelope.progress {
                // An empty part, since clients look at the first choice of every event.
                let nothing = ChunkChoice::new(0, Delta::default());
                let mut chunk = envelope.chunk(run, vec![nothing]);
                let elapsed = run.meter().elapsed().as_millis();
                chunk.prompt_progress = Some(PromptProgress {
                    total,
                    cache: run.meter().cached_tokens,
                    processed: done,
                    time_ms: u64::try_from(elapsed).unwrap_or(u64::MAX),
                });
                out.data(&chunk);
            }
        }
        News::PromptLogprobs(_) => {}
        News::Parts { choice, parts } => {
            for part in parts {
                let logprobs = run.choice(choice).chat_logprobs(&part);
                let mut of = ChunkChoice::new(choice, part.piece.into());
                of.logprobs = logprobs;
                out.data(&envelope.chunk(run, vec![of]));
            }
        }
        News::End { choice, reason } => {
            let mut of = ChunkChoice::new(choice, Delta::default());
            of.finish_reason = Some(reason);
            of.finish_details = envelope.details(run, choice);
            let mut chunk = envelope.chunk(run, vec![of]);
            chunk.timings = Some(run.meter().timings());
            out.data(&chunk);
        }
    }
}
