//! OpenAI's Responses.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use chat::reply::FinishReason;
use chat::responses::ResponsesRequest;
use chat::responses::response::ResponseObject;
use chat::responses::stream::{OutputItemStream, ResponsesEvent};
use serde_json::{Value, json};

use crate::engine::in_flight::{News, Run};
use crate::error::ApiError;
use crate::http::dialect::{self, Talk, Voice};
use crate::http::sse::{Encoder, Silence};
use crate::http::state::App;
use crate::ids;
use crate::text::reply::Part;

/// `POST /v1/responses`.
pub(super) async fn responses(
    State(app): State<App>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let talk = Talk::read(&app, &headers, body, ResponsesRequest::from_json).await?;
    let mut run = talk.start(&app).await?;
    let mut voice = ResponsesVoice::new(&app, &talk);
    if talk.request.stream {
        return Ok(dialect::stream(&app, run, voice));
    }
    while let Some(news) = run.next().await? {
        for item in news {
            voice.take(&run, item);
        }
    }
    let hit_token_limit = voice.hit_token_limit();
    voice.items.finish(hit_token_limit);
    let took = (run.meter().usage(), run.meter().timings());
    let whole = voice
        .answer
        .completed(hit_token_limit, voice.items.done(), took);
    Ok(Json(whole).into_response())
}

/// `POST /v1/responses/input_tokens`: how long the prompt would be.
pub(super) async fn input_tokens(
    State(app): State<App>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let talk = Talk::read(&app, &headers, body, ResponsesRequest::from_json).await?;
    Ok(Json(json!({
        "object": "response.input_tokens",
        "input_tokens": talk.prompt.ids.len(),
    })))
}

/// One answer on its way.
struct ResponsesVoice {
    answer: ResponseObject,
    items: OutputItemStream,
    reason: FinishReason,
}

impl ResponsesVoice {
    fn new(app: &App, talk: &Talk<ResponsesRequest>) -> ResponsesVoice {
        let own = &talk.own;
        ResponsesVoice {
            answer: ResponseObject {
                id: ids::random("resp_"),
                created_at: i64::try_from(ids::unix_now()).unwrap_or(i64::MAX),
                model: talk.model_name(app),
                echo: own.echo.clone(),
            },
            items: OutputItemStream::new(own.names.clone(), own.summary, ids::random("")),
            reason: FinishReason::Stop,
        }
    }

    /// Takes news, and gives the events they make.
    fn take(&mut self, run: &Run, news: News) -> Vec<ResponsesEvent> {
        match news {
            News::Parts { choice, parts } => {
                let choice = run.choice(choice);
                let told = |part: &Part| choice.chat_logprobs(part).map(|told| told.content);
                let parts = parts.into_iter().map(|part| (told(&part), part.piece));
                let events = parts.flat_map(|(told, piece)| {
                    self.items.push_with(piece, told.unwrap_or_default())
                });
                events.collect()
            }
            News::End { reason, .. } => {
                self.reason = reason;
                Vec::new()
            }
            News::Progress { .. } | News::PromptLogprobs(_) => Vec::new(),
        }
    }

    fn hit_token_limit(&self) -> bool {
        self.reason == FinishReason::Length
    }

    /// An event about the answer as a whole.
    fn tell(&mut self, out: &mut Encoder, name: &'static str, answer: Value) {
        let event = self.items.next_event(name, json!({ "response": answer }));
        out.event(event.name, &event.data);
    }
}

impl Voice for ResponsesVoice {
    const SILENCE: Silence = Silence::Comment;

    fn begin(&mut self, out: &mut Encoder, _run: &Run) {
        let begun = self.answer.in_progress();
        self.tell(out, "response.created", begun.clone());
        self.tell(out, "response.in_progress", begun);
    }

    fn news(&mut self, out: &mut Encoder, run: &Run, news: News) {
        for event in self.take(run, news) {
            out.event(event.name, &event.data);
        }
    }

    fn end(&mut self, out: &mut Encoder, run: &Run) {
        let hit_token_limit = self.hit_token_limit();
        for event in self.items.finish(hit_token_limit) {
            out.event(event.name, &event.data);
        }
        let name = match hit_token_limit {
            true => "response.incomplete",
            false => "response.completed",
        };
        let took = (run.meter().usage(), run.meter().timings());
        let whole = self
            .answer
            .completed(hit_token_limit, self.items.done(), took);
        self.tell(out, name, whole);
    }

    fn fail(&mut self, out: &mut Encoder, _run: &Run, error: &ApiError) {
        let code = error.code().unwrap_or("server_error");
        let message = error.to_string();
        let failed = self.answer.failed(self.items.done(), code, &message);
        self.tell(out, "response.failed", failed);
    }
}
