//! llama-server's own completions: `POST /completion` and `POST /infill`.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use chat::Tokenizer;
use chat::llama_server::infill::infill_request;
use chat::llama_server::request::{LlamaServerFields, completion_request};
use chat::llama_server::response::{
    LlamaCompletion, LlamaEnding, StopType, TokenEntry, TokenProbability,
};
use chat::openai::response::MatchedStop;
use chat::openai::stream::PromptProgress;
use chat::reply::TopLogprob;
use decode::GenerationParams;
use futures::StreamExt;
use serde_json::{Map, Value, json};

use crate::engine::request_stats::RequestStats;
use crate::error::{ApiError, Dialect};
use crate::http::completion_job::{
    ChoiceUpdate, CompletionChange, CompletionJob, CompletionUpdate, ParseCompletion, PromptStream,
};
use crate::http::model_choice::Selected;
use crate::http::notes;
use crate::http::sse::{self, ClientGone, KeepAlive, SseEncoder, SseWriter};
use crate::http::state::App;
use crate::text::logprobs::SentToken;
use crate::text::sampling_params;

/// `POST /completion`.
pub(super) async fn completion(Selected(app): Selected, body: Body) -> Result<Response, ApiError> {
    answer(&app, body, completion_request).await
}

/// `POST /infill`.
pub(super) async fn infill(Selected(app): Selected, body: Body) -> Result<Response, ApiError> {
    answer(&app, body, infill_request).await
}

async fn answer(
    app: &App,
    body: Body,
    parse: ParseCompletion<LlamaServerFields>,
) -> Result<Response, ApiError> {
    let (job, own) = CompletionJob::read(app, body, parse).await?;
    let notes = [job.notes.as_slice(), &own.notes].concat();
    let first = job.start(0)?;
    let format = LlamaFormat::new(&job, own);
    if job.request.stream {
        let timeouts = app.config().timeouts;
        let stream = sse::response(timeouts, KeepAlive::Comment, move |writer| {
            stream_all(writer, (job, format), first)
        });
        return Ok(notes::with_notes(stream, &notes));
    }
    let whole = whole((job, format), first).await?;
    Ok(notes::with_notes(whole.into_response(), &notes))
}

/// Writes updates in llama-server's form.
struct LlamaFormat {
    own: LlamaServerFields,
    model: String,
    /// Text of each prompt.
    prompts: Vec<String>,
    /// Whether each choice has more than one line so far.
    lines: BTreeMap<usize, bool>,
    n: usize,
    context: usize,
    stop: Vec<String>,
    stream: bool,
}

impl LlamaFormat {
    fn new(job: &CompletionJob, own: LlamaServerFields) -> LlamaFormat {
        LlamaFormat {
            own,
            model: job.model_name(),
            prompts: (0..job.prompts.len()).map(|i| job.prompt_text(i)).collect(),
            lines: BTreeMap::new(),
            n: job.request.sampling.n,
            context: job.context(),
            stop: job.request.sampling.stop.clone(),
            stream: job.request.stream,
        }
    }

    fn update(
        &mut self,
        update: CompletionUpdate,
        tokenizer: &Tokenizer,
    ) -> Option<LlamaCompletion> {
        let stats = update.stats;
        match update.change {
            CompletionChange::Prefill { done } => {
                let shows = self.own.return_progress && self.stream;
                shows.then(|| self.progress(update.prompt, done, &stats))
            }
            CompletionChange::Choice(more) => {
                Some(self.choice(update.prompt, *more, &stats, tokenizer))
            }
        }
    }

    fn progress(&self, prompt: usize, done: usize, stats: &RequestStats) -> LlamaCompletion {
        let elapsed = stats.elapsed().as_millis();
        LlamaCompletion {
            prompt_progress: Some(PromptProgress {
                total: stats.prompt_tokens,
                cache: stats.cached_tokens,
                processed: done,
                time_ms: u64::try_from(elapsed).unwrap_or(u64::MAX),
            }),
            ..self.empty(prompt * self.n, stats)
        }
    }

    fn empty(&self, index: usize, stats: &RequestStats) -> LlamaCompletion {
        LlamaCompletion {
            index,
            content: String::new(),
            tokens: Vec::new(),
            id_slot: self.own.id_slot,
            stop: false,
            tokens_predicted: 0,
            tokens_evaluated: stats.prompt_tokens,
            ending: None,
            completion_probabilities: None,
            timings: self.own.timings_per_token.then(|| stats.timings()),
            prompt_progress: None,
        }
    }

    fn choice(
        &mut self,
        prompt: usize,
        more: ChoiceUpdate,
        stats: &RequestStats,
        tokenizer: &Tokenizer,
    ) -> LlamaCompletion {
        let choice = more.choice;
        let has_new_line = self.lines.entry(choice.index).or_default();
        *has_new_line |= choice.text.contains('\n');
        let has_new_line = *has_new_line;
        let lists = more.params.logprobs.is_some() && !more.tokens.is_empty();
        let ending = choice.finish_reason.map(|reason| LlamaEnding {
            model: self.model.clone(),
            generation_settings: self.settings(&more.params),
            prompt: self.prompts.get(prompt).cloned().unwrap_or_default(),
            has_new_line,
            truncated: stats.prompt_tokens + more.n_tokens >= self.context,
            stop_type: StopType::new(reason, choice.stop_reason.as_ref()),
            stopping_word: match &choice.stop_reason {
                Some(MatchedStop::Text(word)) => word.clone(),
                _ => String::new(),
            },
            // The last token is generated but not in the cache.
            tokens_cached: stats.prompt_tokens + more.n_tokens.saturating_sub(1),
        });
        let timed = ending.is_some() || self.own.timings_per_token;
        LlamaCompletion {
            content: choice.text,
            tokens: choice.token_ids.unwrap_or_default(),
            stop: ending.is_some(),
            tokens_predicted: more.n_tokens,
            ending,
            completion_probabilities: lists.then(|| probabilities(&more.tokens, tokenizer)),
            timings: timed.then(|| stats.timings()),
            ..self.empty(choice.index, stats)
        }
    }

    /// A completion that has ended, cut to the fields that the request names by their paths.
    fn shown(&self, completion: &LlamaCompletion) -> Value {
        let whole = json!(completion);
        if self.own.response_fields.is_empty() {
            return whole;
        }
        let mut cut = Map::new();
        for path in &self.own.response_fields {
            let found = path
                .split('/')
                .try_fold(&whole, |value, key| value.get(key));
            if let Some(value) = found {
                let name = path.rsplit('/').next().unwrap_or(path);
                cut.insert(name.to_owned(), value.clone());
            }
        }
        Value::Object(cut)
    }

    /// Parameters as used, with those of the whole request.
    fn settings(&self, params: &GenerationParams) -> Value {
        let mut settings = sampling_params::shown(params);
        settings["n_ctx"] = json!(self.context);
        settings["stop"] = json!(self.stop);
        settings["stream"] = json!(self.stream);
        settings["timings_per_token"] = json!(self.own.timings_per_token);
        settings
    }
}

fn probabilities(tokens: &[SentToken], tokenizer: &Tokenizer) -> Vec<TokenProbability> {
    let one = |token: &SentToken| TokenProbability {
        token: TokenEntry {
            id: token.id.0,
            logprob: TopLogprob::new(&token.bytes, token.logprobs.logprob),
        },
        top_logprobs: token
            .logprobs
            .top
            .iter()
            .map(|(id, logprob)| TokenEntry {
                id: id.0,
                logprob: TopLogprob::new(tokenizer.bytes(*id), *logprob),
            })
            .collect(),
    };
    tokens.iter().map(one).collect()
}

/// One object for one completion, an array for several.
async fn whole(
    (job, mut format): (CompletionJob, LlamaFormat),
    first: PromptStream,
) -> Result<Json<Value>, ApiError> {
    let job = Arc::new(job);
    let tokenizer = &job.model().model.tokenizer;
    let mut all: BTreeMap<usize, LlamaCompletion> = BTreeMap::new();
    let mut updates = Box::pin(Arc::clone(&job).updates(first));
    while let Some(update) = updates.next().await {
        let Some(more) = format.update(update?, tokenizer) else {
            continue;
        };
        match all.get_mut(&more.index) {
            Some(one) => append(one, more),
            None => {
                all.insert(more.index, more);
            }
        }
    }
    let lists_tokens = format.own.return_tokens;
    let mut all: Vec<LlamaCompletion> = all.into_values().collect();
    all.iter_mut()
        .filter(|_| !lists_tokens)
        .for_each(|one| one.tokens.clear());
    Ok(Json(match <[LlamaCompletion; 1]>::try_from(all) {
        Ok([one]) => format.shown(&one),
        Err(several) => several.iter().map(|one| format.shown(one)).collect(),
    }))
}

/// Adds more of a completion to what came before.
fn append(one: &mut LlamaCompletion, mut more: LlamaCompletion) {
    more.content.insert_str(0, &one.content);
    more.tokens.splice(0..0, one.tokens.drain(..));
    let before = one.completion_probabilities.take();
    let probabilities = [before, more.completion_probabilities.take()];
    let probabilities: Vec<Vec<TokenProbability>> = probabilities.into_iter().flatten().collect();
    more.completion_probabilities =
        (!probabilities.is_empty()).then(|| probabilities.into_iter().flatten().collect());
    *one = more;
}

async fn stream_all(
    mut writer: SseWriter,
    (job, mut format): (CompletionJob, LlamaFormat),
    first: PromptStream,
) -> Result<(), ClientGone> {
    let job = Arc::new(job);
    let mut updates = Box::pin(Arc::clone(&job).updates(first)).ready_chunks(64);
    let mut out = SseEncoder::default();
    while let Some(ready) = writer.keep_alive_while(updates.next()).await? {
        for update in ready {
            match update {
                Ok(update) => {
                    let more = format.update(update, &job.model().model.tokenizer);
                    match &more {
                        Some(more) if more.stop => out.data(&format.shown(more)),
                        Some(more) => out.data(more),
                        None => {}
                    }
                }
                Err(error) => {
                    out.data(&error.body(Dialect::OpenAi, None));
                    return writer.send_encoded(&mut out).await;
                }
            }
        }
        writer.send_encoded(&mut out).await?;
    }
    // Streams of this dialect end without a mark of their own.
    Ok(())
}
