//! The prompts of one completion request: submitted, and their updates as they arrive.

use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use chat::openai::request::CompletionRequest;
use chat::openai::response::{CompletionLogprobs, TextChoice};
use chat::reply::{FinishReason, ReplyConfig, ReplyDelta};
use chat::{ChatError, EncodeLimit};
use contract::TokenId;
use decode::{GenerationParams, Grammar, Job, Logprobs};
use futures::{Stream, StreamExt, stream};

use crate::compression::{CompressionOutcome, RawPrompt};
use crate::engine::ModelHandle;
use crate::engine::request_stats::RequestStats;
use crate::error::ApiError;
use crate::http::body;
use crate::http::in_flight::{InFlight, StreamEvent};
use crate::http::state::App;
use crate::text::completion_logprobs::LogprobColumns;
use crate::text::constraints::CompiledGrammar;
use crate::text::logprobs::SentToken;
use crate::text::reply::{Choice, ChoiceConfig, Part};
use crate::text::{prepare, prompt_logprobs, sampling_params, token_rules};

/// Parser of a body: the completion request, and the dialect's own fields.
pub type ParseCompletion<T> = fn(&[u8]) -> Result<(CompletionRequest, T), ChatError>;

/// One request with all its prompts.
pub struct CompletionJob {
    app: App,
    ready: Arc<ModelHandle>,
    /// The request.
    pub request: Arc<CompletionRequest>,
    /// Its prompts as tokens.
    pub prompts: Vec<Arc<[TokenId]>>,
    /// What compression did with each; empty without a scorer.
    compressions: Vec<CompressionOutcome>,
    /// Grammar of the completions, if the request constrains them.
    grammar: Option<Grammar>,
    /// What of the request the completions are not held to.
    pub notes: Vec<String>,
}

impl CompletionJob {
    /// Parses a body with `parse`, tokenises the prompts, compiles the grammar and compresses the
    /// prompts.
    pub async fn read<T: Send + 'static>(
        app: &App,
        body: Body,
        parse: ParseCompletion<T>,
    ) -> Result<(CompletionJob, T), ApiError> {
        let bytes = body::read(body, app.config().body_limit_bytes).await?;
        let ready = app.model()?;
        let model = Arc::clone(&ready);
        let default_max_tokens = app.config().defaults.completion_max_tokens;
        let (request, own, prompts) = body::run_sized(bytes.len(), move |cancel| {
            let (request, own) = parse(&bytes)?;
            let mut prompts: Vec<Arc<[TokenId]>> = Vec::with_capacity(request.prompts.len());
            for prompt in &request.prompts {
                let context = model.info.limits.context;
                let truncation = request.tokens.truncation.as_ref();
                let shortens = truncation.is_some() || model.model.compressor.is_some();
                let limit = EncodeLimit {
                    tokens: if shortens {
                        prepare::most_tokens(context)
                    } else {
                        context
                    },
                    cancel: Some(cancel),
                };
                let mut ids = request.token_ids(prompt, &model.model.tokenizer, limit)?;
                if let Some(truncation) = truncation.filter(|_| ids.len() <= limit.tokens) {
                    let wanted = request.sampling.max_tokens.unwrap_or(default_max_tokens);
                    ids = truncation.apply(ids, context, Some(wanted));
                }
                if model.model.compressor.is_none() {
                    sampling_params::remaining_context(ids.len(), context)?;
                }
                prompts.push(ids.into());
            }
            Ok((request, own, prompts))
        })
        .await?;
        app.check_model(request.model.as_deref())?;
        let (grammar, notes) = match request.response_format.output_grammar()? {
            None => (None, Vec::new()),
            Some(shape) => {
                let model = Arc::clone(&ready);
                let compiled = move || model.model.constraints.compile(&shape);
                let CompiledGrammar { grammar, notes } = body::run_long(compiled).await?;
                (Some(grammar), notes)
            }
        };
        let request = Arc::new(request);
        let (prompts, compressions) = compressed(&ready, &request, prompts).await?;
        let context = ready.info.limits.context;
        for prompt in &prompts {
            sampling_params::remaining_context(prompt.len(), context)?;
        }
        let job = CompletionJob {
            app: app.clone(),
            ready,
            request,
            prompts,
            compressions,
            grammar,
            notes,
        };
        Ok((job, own))
    }

    /// Model name to echo: the client's, else the served one.
    pub fn model_name(&self) -> String {
        let asked = self.request.model.clone();
        asked.unwrap_or_else(|| self.app.model_name().to_owned())
    }

    /// Tokens of prompt and completion that fit together.
    pub fn context(&self) -> usize {
        self.ready.info.limits.context
    }

    /// The model and its tokenizer.
    pub fn model(&self) -> &ModelHandle {
        &self.ready
    }

    /// Text of a prompt, decoded from its tokens.
    pub fn prompt_text(&self, prompt: usize) -> String {
        self.ready.model.tokenizer.decode(&self.prompts[prompt])
    }
}

/// The prompts as they are prefilled, and what compression did with each if there is a scorer.
async fn compressed(
    ready: &Arc<ModelHandle>,
    request: &Arc<CompletionRequest>,
    mut prompts: Vec<Arc<[TokenId]>>,
) -> Result<(Vec<Arc<[TokenId]>>, Vec<CompressionOutcome>), ApiError> {
    let Some(compressor) = ready.model.compressor.clone() else {
        return Ok((prompts, Vec::new()));
    };
    let (ready, request) = (Arc::clone(ready), Arc::clone(request));
    body::run_cancellable(move |cancel| {
        let sent = prompts.iter_mut().zip(&request.prompts);
        let outcomes = sent.map(|(ids, prompt)| {
            let of = RawPrompt {
                tokenizer: &ready.model.tokenizer,
                request: &request,
                prompt,
                ids,
            };
            let (shorter, outcome) = compressor.compress_raw(of, cancel);
            if let Some(shorter) = shorter {
                *ids = shorter.into();
            }
            outcome
        });
        let outcomes = outcomes.collect();
        Ok((prompts, outcomes))
    })
    .await
}

/// Stream of one prompt.
pub struct PromptStream {
    request: InFlight,
    /// How it is continued.
    params: Arc<GenerationParams>,
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

/// An update of one prompt, with its statistics so far.
pub struct CompletionUpdate {
    /// Index of the prompt.
    pub prompt: usize,
    /// What is new.
    pub change: CompletionChange,
    /// Counts and times of the prompt.
    pub stats: RequestStats,
}

/// What is new of a prompt.
pub enum CompletionChange {
    /// More of its prefill.
    Prefill {
        /// Prompt tokens in the KV cache so far, cached ones included.
        done: usize,
    },
    /// More of a choice.
    Choice(Box<ChoiceUpdate>),
}

/// More of one choice.
pub struct ChoiceUpdate {
    /// The new part in OpenAI's form; its index counts over prompts and choices.
    pub choice: TextChoice,
    /// The tokens of the new text, if logprobs were requested.
    pub tokens: Vec<SentToken>,
    /// Tokens of the choice so far.
    pub n_tokens: usize,
    /// How its prompt is continued.
    pub params: Arc<GenerationParams>,
}

type Updates = Pin<Box<dyn Stream<Item = Result<CompletionUpdate, ApiError>> + Send>>;

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

    fn prompt_stream(
        &self,
        prompt: usize,
        in_flight: InFlight,
        params: Arc<GenerationParams>,
    ) -> PromptStream {
        let (request, n) = (&self.request, self.request.sampling.n);
        let tokenizer = &self.ready.model.tokenizer;
        let columns = || {
            request
                .logprobs
                .map(|top| LogprobColumns::new(Arc::clone(tokenizer), top))
        };
        let compression = self.compressions.get(prompt).cloned();
        PromptStream {
            request: in_flight.with_compression(compression, None),
            params,
            prompt,
            columns: (0..n).map(|_| columns()).collect(),
            prompt_logprobs: Vec::new(),
            sent: vec![SentChoice::default(); n],
        }
    }

    /// Submits a prompt; fails if a parameter is invalid or the queue is full.
    pub fn start(&self, prompt: usize) -> Result<PromptStream, ApiError> {
        let (job, choices) = self.job(prompt)?;
        let params = Arc::new(job.params.clone());
        let request = InFlight::start(&self.app, job, choices)?;
        Ok(self.prompt_stream(prompt, request, params))
    }

    async fn start_waiting_for_queue(&self, prompt: usize) -> Result<PromptStream, ApiError> {
        let (job, choices) = self.job(prompt)?;
        let params = Arc::new(job.params.clone());
        let request = InFlight::start_waiting_for_queue(&self.app, job, choices).await?;
        Ok(self.prompt_stream(prompt, request, params))
    }

    /// Updates of all prompts as they arrive; at most as many prompts run at once as the device has
    /// sequences.
    pub fn updates(
        self: Arc<CompletionJob>,
        first: PromptStream,
    ) -> impl Stream<Item = Result<CompletionUpdate, ApiError>> + Send {
        let concurrent = self.ready.info.limits.sequences.max(1);
        let prompts = self.prompts.len();
        let job = Arc::clone(&self);
        let later = stream::iter(1..prompts).map(move |prompt| {
            let job = Arc::clone(&job);
            let started = stream::once(async move {
                match job.start_waiting_for_queue(prompt).await {
                    Ok(stream) => Arc::clone(&job).updates_of(stream),
                    Err(error) => Box::pin(stream::iter([Err(error)])) as Updates,
                }
            });
            Box::pin(started.flatten()) as Updates
        });
        let first = stream::iter([self.updates_of(first)]);
        first.chain(later).flatten_unordered(concurrent)
    }

    fn updates_of(self: Arc<CompletionJob>, first: PromptStream) -> Updates {
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
    fn take(&mut self, job: &CompletionJob, event: StreamEvent) -> Vec<CompletionUpdate> {
        match event {
            StreamEvent::Progress { done, .. } => {
                vec![self.update(CompletionChange::Prefill { done })]
            }
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
            StreamEvent::End { choice, reason } => {
                vec![self.step(job, choice, ("", Vec::new()), Some(reason))]
            }
        }
    }

    fn update(&self, change: CompletionChange) -> CompletionUpdate {
        CompletionUpdate {
            prompt: self.prompt,
            change,
            stats: self.request.stats().clone(),
        }
    }

    fn part(&mut self, job: &CompletionJob, choice: usize, part: Part) -> CompletionUpdate {
        if let Some(columns) = &mut self.columns[choice] {
            columns.shown(&part.tokens);
        }
        let text = match &part.delta {
            ReplyDelta::Content(text) => text.as_str(),
            _ => "",
        };
        self.step(job, choice, (text, part.tokens), None)
    }

    fn step(
        &mut self,
        job: &CompletionJob,
        choice: usize,
        (text, sent_tokens): (&str, Vec<SentToken>),
        finish_reason: Option<FinishReason>,
    ) -> CompletionUpdate {
        let tokens = &job.request.tokens;
        let sent = &mut self.sent[choice];
        let begins = !std::mem::replace(&mut sent.has_begun, true);
        let text = if begins && job.request.echo {
            format!("{}{text}", job.prompt_text(self.prompt))
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
        let update = ChoiceUpdate {
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
            tokens: sent_tokens,
            n_tokens: self.request.choice(choice).n_tokens(),
            params: Arc::clone(&self.params),
        };
        self.update(CompletionChange::Choice(Box::new(update)))
    }
}
