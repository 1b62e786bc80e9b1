//! Text completions: no template, no thinking, no tools; several prompts in one request.

use std::pin::Pin;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use chat::openai::request::CompletionRequest;
use chat::openai::response::{CompletionLogprobs, TextChoice, TextCompletion};
use chat::reply::{FinishReason, ReplyConfig, ReplyDelta, Usage};
use contract::TokenId;
use decode::Grammar;
use futures::{Stream, StreamExt, stream};

use crate::engine::Ready;
use crate::engine::handle::Order;
use crate::engine::in_flight::{InFlight, StreamEvent};
use crate::engine::request_stats::RequestStats;
use crate::error::{ApiError, Dialect};
use crate::http::body;
use crate::http::sse::{self, ClientGone, KeepAlive, SseEncoder, SseWriter};
use crate::http::state::App;
use crate::ids;
use crate::text::completion_logprobs::LogprobColumns;
use crate::text::reply::{Choice, ChoiceConfig, Part};
use crate::text::sampling_params;

/// `POST /v1/completions`.
pub(super) async fn completions(State(app): State<App>, body: Body) -> Result<Response, ApiError> {
    let bytes = body::read(body, app.config().body_limit_bytes).await?;
    let ready = app.ready()?;
    let model = Arc::clone(&ready);
    let (request, prompts) = body::run_sized(bytes.len(), move || {
        let request = CompletionRequest::from_json(&bytes)?;
        let mut prompts: Vec<Arc<[TokenId]>> = Vec::with_capacity(request.prompts.len());
        for prompt in &request.prompts {
            let ids = request.token_ids(prompt, &model.model.tokenizer)?;
            sampling_params::remaining_context(ids.len(), model.info.limits.context)?;
            prompts.push(ids.into());
        }
        Ok((request, prompts))
    })
    .await?;
    app.check_model(request.model.as_deref())?;
    let grammar = match request.response_format.output_grammar()? {
        None => None,
        Some(shape) => {
            let model = Arc::clone(&ready);
            let compiled = move || model.model.constraints.compile(&shape);
            Some(body::run_long(compiled).await?)
        }
    };
    let job = Job {
        envelope: Envelope::new(&app, &request),
        grammar,
        request: Arc::new(request),
        prompts,
        app: app.clone(),
        ready,
    };
    // The first prompt is handed over here, so that a refusal still has a status of its own.
    let first = job.start(0)?;
    if job.request.stream {
        let timeouts = app.config().timeouts;
        return Ok(sse::response(timeouts, KeepAlive::Comment, move |writer| {
            stream_all(writer, job, first)
        }));
    }
    whole(job, first).await.map(IntoResponse::into_response)
}

/// One request with all its prompts.
struct Job {
    app: App,
    ready: Arc<Ready>,
    request: Arc<CompletionRequest>,
    prompts: Vec<Arc<[TokenId]>>,
    /// What the texts must be, if they may not be anything.
    grammar: Option<Grammar>,
    envelope: Envelope,
}

#[derive(Clone)]
struct Envelope {
    id: String,
    created: i64,
    model: String,
    include_usage: bool,
    running_usage: bool,
}

impl Envelope {
    fn new(app: &App, request: &CompletionRequest) -> Envelope {
        let options = request.stream_options;
        Envelope {
            id: ids::random("cmpl-"),
            created: i64::try_from(ids::unix_now()).unwrap_or(i64::MAX),
            model: request
                .model
                .clone()
                .unwrap_or_else(|| app.config().model_name.clone()),
            include_usage: options.include_usage || app.config().always_usage,
            running_usage: options.continuous_usage_stats,
        }
    }

    fn completion(&self, choices: Vec<TextChoice>, usage: Option<Usage>) -> TextCompletion {
        TextCompletion {
            id: self.id.clone(),
            object: TextCompletion::OBJECT,
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: None,
            choices,
            usage,
            timings: None,
        }
    }
}

/// One prompt under way.
struct Line {
    request: InFlight,
    /// Which prompt.
    prompt: usize,
    /// Per choice; `None` if no logprobs were asked for.
    columns: Vec<Option<LogprobColumns>>,
    /// Per choice: whether the prompt has still to be shown.
    echo: Vec<bool>,
}

/// A change of one choice, and the counts of its prompt so far.
struct Step {
    choice: TextChoice,
    prompt: usize,
    stats: RequestStats,
}

type Steps = Pin<Box<dyn Stream<Item = Result<Step, ApiError>> + Send>>;

impl Job {
    fn order(&self, prompt: usize) -> Result<(Order, Vec<Choice>), ApiError> {
        let (request, model) = (&self.request, &self.ready.model);
        let fields = &request.sampling;
        let ids = &self.prompts[prompt];
        let room = sampling_params::remaining_context(ids.len(), self.ready.info.limits.context)?;
        let wanted = fields
            .max_tokens
            .unwrap_or(self.app.config().defaults.completion_max_tokens);
        let max_tokens = wanted.min(room);
        let vocab = self.ready.info.vocab;
        let mut settings =
            sampling_params::generation_params(fields, &model.defaults, max_tokens, vocab)?;
        settings.logprobs = request.logprobs;
        settings.window = self.app.config().window.of(false);
        settings.prompt_logprobs = request.logprobs.filter(|_| request.echo);
        let grammar = self.grammar.clone();
        settings.constraints = grammar.map(|grammar| model.constraints.for_text(grammar));
        let plan = ChoiceConfig {
            tokenizer: Arc::clone(&model.tokenizer),
            reply_config: ReplyConfig {
                stop: fields.stop.clone(),
                min_tokens: settings.min_tokens,
                ..ReplyConfig::default()
            },
            stop_tokens: fields.stop_token_ids.clone(),
            logprobs: request.logprobs.is_some(),
        };
        let order = Order {
            prompt: Arc::clone(ids),
            choices: fields.n,
            settings,
            priority: request.priority,
        };
        let choices = (0..fields.n).map(|_| Choice::new(&plan)).collect();
        Ok((order, choices))
    }

    fn line_of(&self, prompt: usize, in_flight: InFlight) -> Line {
        let (request, n) = (&self.request, self.request.sampling.n);
        let tokenizer = &self.ready.model.tokenizer;
        let columns = || {
            request
                .logprobs
                .map(|_| LogprobColumns::new(Arc::clone(tokenizer)))
        };
        Line {
            request: in_flight,
            prompt,
            columns: (0..n).map(|_| columns()).collect(),
            echo: vec![request.echo; n],
        }
    }

    fn start(&self, prompt: usize) -> Result<Line, ApiError> {
        let (order, choices) = self.order(prompt)?;
        let request = InFlight::start(&self.app, order, choices)?;
        Ok(self.line_of(prompt, request))
    }

    async fn start_later(&self, prompt: usize) -> Result<Line, ApiError> {
        let (order, choices) = self.order(prompt)?;
        let request = InFlight::start_later(&self.app, order, choices).await?;
        Ok(self.line_of(prompt, request))
    }

    /// All prompts' steps as they come; no more prompts at once than the device has places.
    fn steps(self: Arc<Job>, first: Line) -> impl Stream<Item = Result<Step, ApiError>> + Send {
        let places = self.ready.info.limits.sequences.max(1);
        let prompts = self.prompts.len();
        let job = Arc::clone(&self);
        let later = stream::iter(1..prompts).map(move |prompt| {
            let job = Arc::clone(&job);
            let started = stream::once(async move {
                match job.start_later(prompt).await {
                    Ok(line) => Arc::clone(&job).line(line),
                    Err(error) => Box::pin(stream::iter([Err(error)])) as Steps,
                }
            });
            Box::pin(started.flatten()) as Steps
        });
        let first = stream::iter([self.line(first)]);
        first.chain(later).flatten_unordered(places)
    }

    fn line(self: Arc<Job>, line: Line) -> Steps {
        let lines = stream::unfold(Some(line), move |line| {
            let job = Arc::clone(&self);
            async move {
                let mut line = line?;
                match line.request.next().await {
                    Ok(None) => None,
                    Err(error) => Some((vec![Err(error)], None)),
                    Ok(Some(events)) => {
                        let steps = events.into_iter().flat_map(|event| line.take(&job, event));
                        let steps = steps.map(Ok).collect();
                        Some((steps, Some(line)))
                    }
                }
            }
        });
        Box::pin(lines.flat_map(stream::iter))
    }
}

impl Line {
    fn take(&mut self, job: &Job, event: StreamEvent) -> Vec<Step> {
        match event {
            StreamEvent::Progress { .. } => Vec::new(),
            StreamEvent::PromptLogprobs(rows) => {
                let ids = &job.prompts[self.prompt];
                for columns in self.columns.iter_mut().flatten() {
                    columns.prompt(ids, &rows);
                }
                Vec::new()
            }
            StreamEvent::Parts { choice, parts } => {
                let parts = parts.into_iter();
                parts.map(|part| self.part(job, choice, part)).collect()
            }
            StreamEvent::End { choice, reason } => vec![self.step(job, choice, "", Some(reason))],
        }
    }

    fn part(&mut self, job: &Job, choice: usize, part: Part) -> Step {
        if let Some(columns) = &mut self.columns[choice] {
            columns.shown(&part.shown);
        }
        let text = match &part.piece {
            ReplyDelta::Content(text) => text.as_str(),
            _ => "",
        };
        self.step(job, choice, text, None)
    }

    fn step(
        &mut self,
        job: &Job,
        choice: usize,
        text: &str,
        finish_reason: Option<FinishReason>,
    ) -> Step {
        let text = match std::mem::take(&mut self.echo[choice]) {
            true => format!("{}{text}", job.echoed(self.prompt)),
            false => text.to_owned(),
        };
        let logprobs: Option<CompletionLogprobs> =
            self.columns[choice].as_mut().map(LogprobColumns::take);
        Step {
            choice: TextChoice {
                index: self.prompt * job.request.sampling.n + choice,
                text,
                logprobs,
                finish_reason,
            },
            prompt: self.prompt,
            stats: self.request.stats().clone(),
        }
    }
}

impl Job {
    /// The prompt's text; what its tokens say, where it came as tokens.
    fn echoed(&self, prompt: usize) -> String {
        self.ready.model.tokenizer.decode(&self.prompts[prompt])
    }
}

/// The counts of all prompts together, each as last seen.
#[derive(Default)]
struct Totals(Vec<Option<RequestStats>>);

impl Totals {
    fn note(&mut self, prompt: usize, stats: RequestStats) {
        if self.0.len() <= prompt {
            self.0.resize_with(prompt + 1, || None);
        }
        self.0[prompt] = Some(stats);
    }

    fn usage(&self) -> Usage {
        let mut sum = Usage::default();
        for stats in self.0.iter().flatten() {
            let one = stats.usage();
            sum.prompt_tokens += one.prompt_tokens;
            sum.completion_tokens += one.completion_tokens;
            sum.cached_tokens += one.cached_tokens;
        }
        sum
    }
}

async fn whole(job: Job, first: Line) -> Result<Json<TextCompletion>, ApiError> {
    let job = Arc::new(job);
    let n = job.prompts.len() * job.request.sampling.n;
    let with_logprobs = job.request.logprobs.is_some();
    let mut choices: Vec<TextChoice> = (0..n)
        .map(|index| TextChoice {
            index,
            text: String::new(),
            logprobs: with_logprobs.then(CompletionLogprobs::default),
            finish_reason: None,
        })
        .collect();
    let mut totals = Totals::default();
    let mut timings = None;
    let mut steps = Box::pin(Arc::clone(&job).steps(first));
    while let Some(step) = steps.next().await {
        let step = step?;
        let choice = &mut choices[step.choice.index];
        choice.text.push_str(&step.choice.text);
        if let (Some(all), Some(more)) = (&mut choice.logprobs, step.choice.logprobs) {
            all.tokens.extend(more.tokens);
            all.token_logprobs.extend(more.token_logprobs);
            all.top_logprobs.extend(more.top_logprobs);
            all.text_offset.extend(more.text_offset);
        }
        choice.finish_reason = choice.finish_reason.or(step.choice.finish_reason);
        timings = Some(step.stats.timings());
        totals.note(step.prompt, step.stats);
    }
    let mut completion = job.envelope.completion(choices, Some(totals.usage()));
    completion.timings = timings.filter(|_| job.prompts.len() == 1);
    Ok(Json(completion))
}

async fn stream_all(mut writer: SseWriter, job: Job, first: Line) -> Result<(), ClientGone> {
    let envelope = job.envelope.clone();
    let mut steps = Box::pin(Arc::new(job).steps(first)).ready_chunks(64);
    let mut out = SseEncoder::default();
    let mut totals = Totals::default();
    while let Some(ready) = writer.keep_alive_while(steps.next()).await? {
        for step in ready {
            let step = match step {
                Ok(step) => step,
                Err(error) => {
                    out.data(&error.body(Dialect::OpenAi, None));
                    out.done();
                    return send(&mut writer, &mut out).await;
                }
            };
            totals.note(step.prompt, step.stats);
            let usage = envelope.running_usage.then(|| totals.usage());
            out.data(&envelope.completion(vec![step.choice], usage));
        }
        send(&mut writer, &mut out).await?;
    }
    if envelope.include_usage {
        out.data(&envelope.completion(Vec::new(), Some(totals.usage())));
    }
    out.done();
    send(&mut writer, &mut out).await
}

async fn send(writer: &mut SseWriter, out: &mut SseEncoder) -> Result<(), ClientGone> {
    match out.take() {
        Some(part) => writer.send(part).await,
        None => Ok(()),
    }
}
