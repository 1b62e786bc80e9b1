//! Text completions: no chat template, no reasoning, no tools; several prompts per request.

use std::pin::Pin;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use chat::EncodeLimit;
use chat::openai::request::CompletionRequest;
use chat::openai::response::{CompletionLogprobs, TextChoice, TextCompletion};
use chat::reply::{FinishReason, ReplyConfig, ReplyDelta, Usage};
use contract::TokenId;
use decode::{Grammar, Job, Logprobs};
use futures::{Stream, StreamExt, stream};

use crate::engine::ModelHandle;
use crate::engine::request_stats::RequestStats;
use crate::error::{ApiError, Dialect};
use crate::http::body;
use crate::http::in_flight::{InFlight, StreamEvent};
use crate::http::notes;
use crate::http::sse::{self, ClientGone, KeepAlive, SseEncoder, SseWriter};
use crate::http::state::App;
use crate::ids;
use crate::text::completion_logprobs::LogprobColumns;
use crate::text::constraints::CompiledGrammar;
use crate::text::reply::{Choice, ChoiceConfig, Part};
use crate::text::{prepare, prompt_logprobs, sampling_params, token_rules};

/// `POST /v1/completions`.
pub(super) async fn completions(State(app): State<App>, body: Body) -> Result<Response, ApiError> {
    let bytes = body::read(body, app.config().body_limit_bytes).await?;
    let ready = app.model()?;
    let model = Arc::clone(&ready);
    let default_max_tokens = app.config().defaults.completion_max_tokens;
    let (request, prompts) = body::run_sized(bytes.len(), move |cancel| {
        let request = CompletionRequest::from_json(&bytes)?;
        let mut prompts: Vec<Arc<[TokenId]>> = Vec::with_capacity(request.prompts.len());
        for prompt in &request.prompts {
            let context = model.info.limits.context;
            let truncation = request.tokens.truncation.as_ref();
            let limit = EncodeLimit {
                tokens: truncation.map_or(context, |_| prepare::most_tokens(context)),
                cancel: Some(cancel),
            };
            let mut ids = request.token_ids(prompt, &model.model.tokenizer, limit)?;
            if let Some(truncation) = truncation.filter(|_| ids.len() <= limit.tokens) {
                let wanted = request.sampling.max_tokens.unwrap_or(default_max_tokens);
                ids = truncation.apply(ids, context, Some(wanted));
            }
            sampling_params::remaining_context(ids.len(), context)?;
            prompts.push(ids.into());
        }
        Ok((request, prompts))
    })
    .await?;
    app.check_model(request.model.as_deref())?;
    let (grammar, left_out) = match request.response_format.output_grammar()? {
        None => (None, Vec::new()),
        Some(shape) => {
            let model = Arc::clone(&ready);
            let compiled = move || model.model.constraints.compile(&shape);
            let CompiledGrammar { grammar, notes } = body::run_long(compiled).await?;
            (Some(grammar), notes)
        }
    };
    let job = CompletionJob {
        envelope: Envelope::new(&app, &request),
        grammar,
        request: Arc::new(request),
        prompts,
        app: app.clone(),
        ready,
    };
    // The first prompt is submitted before the response starts, so that a failure has its own
    // status.
    let first = job.start(0)?;
    if job.request.stream {
        let timeouts = app.config().timeouts;
        let stream = sse::response(timeouts, KeepAlive::Comment, move |writer| {
            stream_all(writer, job, first)
        });
        return Ok(notes::with_notes(stream, &left_out));
    }
    let whole = whole(job, first).await?;
    Ok(notes::with_notes(whole.into_response(), &left_out))
}

/// One request with all its prompts.
struct CompletionJob {
    app: App,
    ready: Arc<ModelHandle>,
    request: Arc<CompletionRequest>,
    prompts: Vec<Arc<[TokenId]>>,
    /// Grammar of the completions, if the request constrains them.
    grammar: Option<Grammar>,
    envelope: Envelope,
}

#[derive(Clone)]
struct Envelope {
    id: String,
    created: i64,
    model: String,
    fingerprint: String,
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
            fingerprint: app.fingerprint().to_owned(),
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
            system_fingerprint: Some(self.fingerprint.clone()),
            choices,
            usage,
            timings: None,
        }
    }
}

/// Stream of one prompt.
struct PromptStream {
    request: InFlight,
    /// Index of the prompt.
    prompt: usize,
    /// Per choice; `None` without logprobs.
    columns: Vec<Option<LogprobColumns>>,
    /// Logprobs of the prompt's tokens, if they were requested.
    prompt_logprobs: Vec<Option<Logprobs>>,
    /// Per choice, what was sent.
    sent: Vec<SentChoice>,
}

/// What of a choice was sent.
#[derive(Debug, Clone, Copy, Default)]
struct SentChoice {
    /// Whether anything was, the prompt included.
    has_begun: bool,
    /// Number of token ids.
    token_ids: usize,
}

/// Update of one choice, with its prompt's statistics so far.
struct ChoiceUpdate {
    choice: TextChoice,
    prompt: usize,
    stats: RequestStats,
}

type ChoiceUpdates = Pin<Box<dyn Stream<Item = Result<ChoiceUpdate, ApiError>> + Send>>;

impl CompletionJob {
    fn job(&self, prompt: usize) -> Result<(Job, Vec<Choice>), ApiError> {
        let (request, model) = (&self.request, &self.ready.model);
        let fields = &request.sampling;
        let ids = &self.prompts[prompt];
        let room = sampling_params::remaining_context(ids.len(), self.ready.info.limits.context)?;
        let wanted = fields
            .max_tokens
            .unwrap_or(self.app.config().defaults.completion_max_tokens);
        let max_tokens = wanted.min(room);
        let vocab = self.ready.info.vocab;
        let mut params =
            sampling_params::generation_params(fields, &model.defaults, max_tokens, vocab)?;
        token_rules::restrict(&mut params, fields, &model.tokenizer, vocab)?;
        params.logprobs = request.logprobs;
        params.use_prefix_cache = request.use_prefix_cache;
        params.window = self.app.config().window.of(false);
        let echoed = request.logprobs.filter(|_| request.echo);
        params.prompt_logprobs = request.tokens.prompt_logprobs.max(echoed);
        let grammar = self.grammar.clone();
        params.constraints = grammar.map(|grammar| model.constraints.for_text(grammar));
        let config = ChoiceConfig {
            tokenizer: Arc::clone(&model.tokenizer),
            reply_config: ReplyConfig {
                stop: fields.stop.clone(),
                include_stop: fields.include_stop,
                min_tokens: params.min_tokens,
                ..ReplyConfig::default()
            },
            stop_tokens: token_rules::reported_stop_tokens(fields, &model.eos),
            keeps_token_ids: request.tokens.return_token_ids,
            logprobs: request.logprobs.is_some(),
        };
        let job = Job {
            id: self.app.engine().new_job_id(),
            prompt: Arc::clone(ids),
            choices: fields.n,
            params,
            priority: request.priority,
        };
        let choices = (0..fields.n).map(|_| Choice::new(&config)).collect();
        Ok((job, choices))
    }

    fn prompt_stream(&self, prompt: usize, in_flight: InFlight) -> PromptStream {
        let (request, n) = (&self.request, self.request.sampling.n);
        let tokenizer = &self.ready.model.tokenizer;
        let columns = || {
            request
                .logprobs
                .map(|top| LogprobColumns::new(Arc::clone(tokenizer), top))
        };
        PromptStream {
            request: in_flight,
            prompt,
            columns: (0..n).map(|_| columns()).collect(),
            prompt_logprobs: Vec::new(),
            sent: vec![SentChoice::default(); n],
        }
    }

    fn start(&self, prompt: usize) -> Result<PromptStream, ApiError> {
        let (job, choices) = self.job(prompt)?;
        let request = InFlight::start(&self.app, job, choices)?;
        Ok(self.prompt_stream(prompt, request))
    }

    async fn start_waiting_for_queue(&self, prompt: usize) -> Result<PromptStream, ApiError> {
        let (job, choices) = self.job(prompt)?;
        let request = InFlight::start_waiting_for_queue(&self.app, job, choices).await?;
        Ok(self.prompt_stream(prompt, request))
    }

    /// Updates of all prompts as they arrive; at most as many prompts run at once as the device has
    /// sequences.
    fn updates(
        self: Arc<CompletionJob>,
        first: PromptStream,
    ) -> impl Stream<Item = Result<ChoiceUpdate, ApiError>> + Send {
        let concurrent = self.ready.info.limits.sequences.max(1);
        let prompts = self.prompts.len();
        let job = Arc::clone(&self);
        let later = stream::iter(1..prompts).map(move |prompt| {
            let job = Arc::clone(&job);
            let started = stream::once(async move {
                match job.start_waiting_for_queue(prompt).await {
                    Ok(stream) => Arc::clone(&job).updates_of(stream),
                    Err(error) => Box::pin(stream::iter([Err(error)])) as ChoiceUpdates,
                }
            });
            Box::pin(started.flatten()) as ChoiceUpdates
        });
        let first = stream::iter([self.updates_of(first)]);
        first.chain(later).flatten_unordered(concurrent)
    }

    fn updates_of(self: Arc<CompletionJob>, first: PromptStream) -> ChoiceUpdates {
        let batches = stream::unfold(Some(first), move |stream| {
            let job = Arc::clone(&self);
            async move {
                let mut stream = stream?;
                match stream.request.next().await {
                    Ok(None) => None,
                    Err(error) => Some((vec![Err(error)], None)),
                    Ok(Some(events)) => {
                        let updates = events
                            .into_iter()
                            .flat_map(|event| stream.take(&job, event));
                        let updates = updates.map(Ok).collect();
                        Some((updates, Some(stream)))
                    }
                }
            }
        });
        Box::pin(batches.flat_map(stream::iter))
    }
}

impl PromptStream {
    fn take(&mut self, job: &CompletionJob, event: StreamEvent) -> Vec<ChoiceUpdate> {
        match event {
            StreamEvent::Progress { .. } => Vec::new(),
            StreamEvent::PromptLogprobs(rows) => {
                let ids = &job.prompts[self.prompt];
                if job.request.echo {
                    for columns in self.columns.iter_mut().flatten() {
                        columns.prompt(ids, &rows);
                    }
                }
                self.prompt_logprobs = rows;
                Vec::new()
            }
            StreamEvent::Parts { choice, parts } => {
                let parts = parts.into_iter();
                parts.map(|part| self.part(job, choice, part)).collect()
            }
            StreamEvent::End { choice, reason } => vec![self.step(job, choice, "", Some(reason))],
        }
    }

    fn part(&mut self, job: &CompletionJob, choice: usize, part: Part) -> ChoiceUpdate {
        if let Some(columns) = &mut self.columns[choice] {
            columns.shown(&part.tokens);
        }
        let text = match &part.delta {
            ReplyDelta::Content(text) => text.as_str(),
            _ => "",
        };
        self.step(job, choice, text, None)
    }

    fn step(
        &mut self,
        job: &CompletionJob,
        choice: usize,
        text: &str,
        finish_reason: Option<FinishReason>,
    ) -> ChoiceUpdate {
        let tokens = &job.request.tokens;
        let sent = &mut self.sent[choice];
        let begins = !std::mem::replace(&mut sent.has_begun, true);
        let text = if begins && job.request.echo {
            format!("{}{text}", job.echoed(self.prompt))
        } else {
            text.to_owned()
        };
        let logprobs: Option<CompletionLogprobs> =
            self.columns[choice].as_mut().map(LogprobColumns::take);
        let ids = self.request.choice(choice).token_ids();
        let new_ids = ids.get(sent.token_ids..).unwrap_or_default();
        sent.token_ids = ids.len();
        let prompt = &job.prompts[self.prompt];
        let tokenizer = &job.ready.model.tokenizer;
        let prompt_ids = || prompt.iter().map(|id| id.0).collect();
        let prompt_logprobs =
            |top| prompt_logprobs::by_token(tokenizer, prompt, &self.prompt_logprobs, top);
        ChoiceUpdate {
            choice: TextChoice {
                index: self.prompt * job.request.sampling.n + choice,
                text,
                logprobs,
                stop_reason: finish_reason.and_then(|_| self.request.choice(choice).matched_stop()),
                finish_reason,
                token_ids: tokens.return_token_ids.then(|| new_ids.to_vec()),
                prompt_token_ids: (begins && tokens.return_token_ids).then(prompt_ids),
                prompt_logprobs: tokens
                    .prompt_logprobs
                    .filter(|_| begins)
                    .map(prompt_logprobs),
            },
            prompt: self.prompt,
            stats: self.request.stats().clone(),
        }
    }
}

impl CompletionJob {
    /// Text of the prompt, decoded from its tokens.
    fn echoed(&self, prompt: usize) -> String {
        self.ready.model.tokenizer.decode(&self.prompts[prompt])
    }
}

/// Latest statistics of every prompt.
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

async fn whole(job: CompletionJob, first: PromptStream) -> Result<Json<TextCompletion>, ApiError> {
    let job = Arc::new(job);
    let n = job.prompts.len() * job.request.sampling.n;
    let with_logprobs = job.request.logprobs.is_some();
    let mut choices: Vec<TextChoice> = (0..n)
        .map(|index| TextChoice {
            index,
            text: String::new(),
            logprobs: with_logprobs.then(CompletionLogprobs::default),
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
        })
        .collect();
    let mut totals = Totals::default();
    let mut timings = None;
    let mut updates = Box::pin(Arc::clone(&job).updates(first));
    while let Some(update) = updates.next().await {
        let update = update?;
        append(&mut choices[update.choice.index], update.choice);
        timings = Some(update.stats.timings());
        totals.note(update.prompt, update.stats);
    }
    let mut completion = job.envelope.completion(choices, Some(totals.usage()));
    completion.timings = timings.filter(|_| job.prompts.len() == 1);
    Ok(Json(completion))
}

/// Adds an update to the choice it belongs to.
fn append(choice: &mut TextChoice, more: TextChoice) {
    choice.text.push_str(&more.text);
    if let (Some(all), Some(more)) = (&mut choice.logprobs, more.logprobs) {
        all.tokens.extend(more.tokens);
        all.token_logprobs.extend(more.token_logprobs);
        all.top_logprobs.extend(more.top_logprobs);
        all.text_offset.extend(more.text_offset);
    }
    if let Some(more) = more.token_ids {
        choice.token_ids.get_or_insert_default().extend(more);
    }
    choice.finish_reason = choice.finish_reason.or(more.finish_reason);
    choice.stop_reason = choice.stop_reason.take().or(more.stop_reason);
    choice.prompt_token_ids = choice.prompt_token_ids.take().or(more.prompt_token_ids);
    choice.prompt_logprobs = choice.prompt_logprobs.take().or(more.prompt_logprobs);
}

async fn stream_all(
    mut writer: SseWriter,
    job: CompletionJob,
    first: PromptStream,
) -> Result<(), ClientGone> {
    let envelope = job.envelope.clone();
    let mut updates = Box::pin(Arc::new(job).updates(first)).ready_chunks(64);
    let mut out = SseEncoder::default();
    let mut totals = Totals::default();
    while let Some(ready) = writer.keep_alive_while(updates.next()).await? {
        for update in ready {
            let update = match update {
                Ok(update) => update,
                Err(error) => {
                    out.data(&error.body(Dialect::OpenAi, None));
                    out.done();
                    return send(&mut writer, &mut out).await;
                }
            };
            totals.note(update.prompt, update.stats);
            let usage = envelope.running_usage.then(|| totals.usage());
            out.data(&envelope.completion(vec![update.choice], usage));
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
