//! `POST /api/generate` with a raw prompt, or with a suffix behind a gap.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use chat::ollama::request::completion_request;
use chat::ollama::stream::{OllamaRoute, OllamaWriter};
use chat::reply::{FinishReason, Reply, ReplyDelta};
use futures::StreamExt;

use super::ending::{context_note, ending, now};
use crate::engine::request_stats::RequestStats;
use crate::error::{ApiError, Dialect};
use crate::http::completion_job::{CompletionChange, CompletionJob, PromptStream};
use crate::http::model_choice::LoadTime;
use crate::http::notes;
use crate::http::sse::{self, ClientGone, KeepAlive, SseEncoder, SseWriter};
use crate::http::state::App;

pub(super) async fn completion(
    app: &App,
    bytes: Bytes,
    load: LoadTime,
) -> Result<Response, ApiError> {
    let (job, own) = CompletionJob::read(app, Body::from(bytes), completion_request).await?;
    let mut noted = job.notes.clone();
    noted.extend(context_note(own, job.context()));
    let first = job.start(0)?;
    let writer = OllamaWriter::new(job.model_name(), OllamaRoute::Generate);
    if job.request.stream {
        let timeouts = app.config().timeouts;
        let stream = sse::response(timeouts, KeepAlive::Space, move |lines| {
            stream_lines(lines, writer, job, first, load)
        });
        return Ok(notes::with_notes(stream, &noted));
    }
    let whole = whole(&writer, job, first, load).await?;
    Ok(notes::with_notes(whole, &noted))
}

/// The end of the text so far.
#[derive(Default)]
struct End(Option<(FinishReason, RequestStats)>);

async fn whole(
    writer: &OllamaWriter,
    job: CompletionJob,
    first: PromptStream,
    load: LoadTime,
) -> Result<Response, ApiError> {
    let mut reply = Reply::default();
    let mut end = End::default();
    let mut updates = Box::pin(Arc::new(job).updates(first));
    while let Some(update) = updates.next().await {
        let update = update?;
        if let CompletionChange::Choice(more) = update.change {
            reply.push(ReplyDelta::Content(more.choice.text));
            let reason = more.choice.finish_reason;
            end.0 = reason.map(|reason| (reason, update.stats)).or(end.0);
        }
    }
    let (reason, stats) = end
        .0
        .ok_or_else(|| ApiError::internal("the text has no end"))?;
    let ending = ending(reason, &stats, load);
    let whole = writer.whole(reply, Vec::new(), ending, &now());
    Ok(Json(whole).into_response())
}

async fn stream_lines(
    mut out: SseWriter,
    mut writer: OllamaWriter,
    job: CompletionJob,
    first: PromptStream,
    load: LoadTime,
) -> Result<(), ClientGone> {
    let mut updates = Box::pin(Arc::new(job).updates(first)).ready_chunks(64);
    let mut lines = SseEncoder::default();
    let mut end = End::default();
    while let Some(ready) = out.keep_alive_while(updates.next()).await? {
        let now = now();
        for update in ready {
            let update = match update {
                Ok(update) => update,
                Err(error) => {
                    lines.line(&error.body(Dialect::Ollama, None));
                    return out.send_encoded(&mut lines).await;
                }
            };
            let CompletionChange::Choice(more) = update.change else {
                continue;
            };
            let choice = more.choice;
            if !choice.text.is_empty() {
                let delta = ReplyDelta::Content(choice.text);
                for line in writer.push(delta, Vec::new(), &now) {
                    lines.line(&line);
                }
            }
            let reason = choice.finish_reason;
            end.0 = reason.map(|reason| (reason, update.stats)).or(end.0);
        }
        out.send_encoded(&mut lines).await?;
    }
    if let Some((reason, stats)) = end.0 {
        for line in writer.finish(ending(reason, &stats, load), &now()) {
            lines.line(&line);
        }
    }
    out.send_encoded(&mut lines).await
}
