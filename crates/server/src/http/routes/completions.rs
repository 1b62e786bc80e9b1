//! Text completions: no chat template, no reasoning, no tools; several prompts per request.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use chat::openai::request::CompletionRequest;
use chat::openai::response::{CompletionLogprobs, TextChoice, TextCompletion};
use chat::reply::{Timings, Usage};
use futures::StreamExt;

use crate::engine::request_stats::RequestStats;
use crate::error::{ApiError, Dialect};
use crate::http::completion_job::{CompletionChange, CompletionJob, PromptStream};
use crate::http::model_choice::Selected;
use crate::http::notes;
use crate::http::sse::{self, ClientGone, KeepAlive, SseEncoder, SseWriter};
use crate::http::state::App;
use crate::ids;

/// `POST /v1/completions`.
pub(super) async fn completions(Selected(app): Selected, body: Body) -> Result<Response, ApiError> {
    let parse = |bytes: &[u8]| Ok((CompletionRequest::from_json(bytes)?, ()));
    let (job, ()) = CompletionJob::read(&app, body, parse).await?;
    let envelope = Envelope::new(&app, &job);
    let notes = job.notes.clone();
    // The first prompt is submitted before the response starts, so that a failure has its own
    // status.
    let first = job.start(0)?;
    if job.request.stream {
        let timeouts = app.config().timeouts;
        let stream = sse::response(timeouts, KeepAlive::Comment, move |writer| {
            stream_all(writer, (job, envelope), first)
        });
        return Ok(notes::with_notes(stream, &notes));
    }
    let whole = whole((job, envelope), first).await?;
    Ok(notes::with_notes(whole.into_response(), &notes))
}

/// Fields common to all events of one response.
struct Envelope {
    id: String,
    created: i64,
    model: String,
    fingerprint: String,
    include_usage: bool,
    running_usage: bool,
}

impl Envelope {
    fn new(app: &App, job: &CompletionJob) -> Envelope {
        let options = job.request.stream_options;
        Envelope {
            id: ids::random("cmpl-"),
            created: i64::try_from(ids::unix_now()).unwrap_or(i64::MAX),
            model: job.model_name(),
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

    /// Times of a single prompt.
    fn timings(&self) -> Option<Timings> {
        match self.0.as_slice() {
            [Some(stats)] => Some(stats.timings()),
            _ => None,
        }
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

async fn whole(
    (job, envelope): (CompletionJob, Envelope),
    first: PromptStream,
) -> Result<Json<TextCompletion>, ApiError> {
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
        if let CompletionChange::Choice(more) = update.change {
            append(&mut choices[more.choice.index], more.choice);
        }
        timings = Some(update.stats.timings());
        totals.note(update.prompt, update.stats);
    }
    let mut completion = envelope.completion(choices, Some(totals.usage()));
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
    (job, envelope): (CompletionJob, Envelope),
    first: PromptStream,
) -> Result<(), ClientGone> {
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
                    return writer.send_encoded(&mut out).await;
                }
            };
            totals.note(update.prompt, update.stats);
            if let CompletionChange::Choice(more) = update.change {
                let usage = envelope.running_usage.then(|| totals.usage());
                out.data(&envelope.completion(vec![more.choice], usage));
            }
        }
        writer.send_encoded(&mut out).await?;
    }
    if envelope.include_usage {
        let mut last = envelope.completion(Vec::new(), Some(totals.usage()));
        last.timings = totals.timings();
        out.data(&last);
    }
    out.done();
    writer.send_encoded(&mut out).await
}
