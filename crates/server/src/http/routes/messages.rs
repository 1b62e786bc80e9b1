//! Anthropic Messages.

use axum::body::Body;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use chat::ChatError;
use chat::anthropic;
use chat::anthropic::response::{MessageResponse, MessageUsage, StopReason, content_blocks};
use chat::anthropic::stream::{ContentBlockStream, MessageDelta, MessagesEvent};
use chat::reply::FinishReason;
use chat::request::ChatRequest;
use serde_json::{Value, json};

use crate::error::{ApiError, Dialect};
use crate::http::dialect::{self, ParsedRequest, StreamFormat};
use crate::http::in_flight::{InFlight, StreamEvent};
use crate::http::middleware::RequestId;
use crate::http::model_choice::Selected;
use crate::http::sse::{KeepAlive, SseEncoder};
use crate::http::state::App;
use crate::http::stream_error::ErrorFormat;
use crate::ids;

/// `POST /v1/messages`.
pub(super) async fn messages(
    Selected(app): Selected,
    Extension(request_id): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let mut parsed = ParsedRequest::read(&app, &headers, body, parse).await?;
    let visibility = parsed.request.thinking.visibility;
    if parsed.request.stream {
        let errors = ErrorFormat::new(Dialect::Anthropic).with_id(&request_id);
        let format = move |app: &App, parsed: &ParsedRequest<()>, request: &InFlight| {
            let blocks = ContentBlockStream::new(ids::random(""));
            MessagesFormat {
                message: Some(opening(app, parsed, request)),
                blocks: blocks.with_reasoning(visibility),
                reason: FinishReason::Stop,
                request_id,
            }
        };
        return dialect::stream(&app, parsed, errors, format).await;
    }
    let mut request = parsed.start(&app).await?;
    let mut message = opening(&app, &parsed, &request);
    let whole = dialect::whole(&mut request).await?;
    for (whole, reason) in whole.choices {
        let ending = ending(&request, reason);
        message.stop_reason = Some(ending.stop_reason);
        message.stop_sequence = ending.stop_sequence;
        message.content = content_blocks(whole.reply, &ids::random(""), visibility);
    }
    message.usage = final_usage(&request);
    Ok(parsed.with_notes(Json(message).into_response()))
}

/// The message before its content.
fn opening(app: &App, parsed: &ParsedRequest<()>, request: &InFlight) -> MessageResponse {
    let usage = MessageUsage::new(request.stats().usage(), None);
    MessageResponse::new(ids::random("msg_"), parsed.model_name(app), usage)
}

/// `POST /v1/messages/count_tokens`: prompt length in tokens.
pub(super) async fn count_tokens(
    Selected(app): Selected,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let parsed = ParsedRequest::read(&app, &headers, body, parse).await?;
    Ok(Json(json!({ "input_tokens": parsed.prompt.ids.len() })))
}

fn parse(bytes: &[u8]) -> Result<(ChatRequest, ()), ChatError> {
    Ok((anthropic::chat_request(bytes)?, ()))
}

fn final_usage(request: &InFlight) -> MessageUsage {
    let stats = request.stats();
    MessageUsage::new(stats.usage(), Some(stats.timings()))
}

fn ending(request: &InFlight, reason: FinishReason) -> MessageDelta {
    let stop_string = request.choice(0).stop_string();
    let stop_reason = StopReason::new(reason, stop_string);
    MessageDelta {
        stop_sequence: match stop_reason {
            StopReason::StopSequence => stop_string.map(str::to_owned),
            _ => None,
        },
        stop_reason,
    }
}

/// Stream of one message.
struct MessagesFormat {
    /// The message without content, until it is sent.
    message: Option<MessageResponse>,
    blocks: ContentBlockStream,
    reason: FinishReason,
    request_id: RequestId,
}

fn write(out: &mut SseEncoder, event: &MessagesEvent) {
    out.event(event.name(), event);
}

impl MessagesFormat {
    /// Writes the first event, once. It carries the cache's counts, which are known from the first
    /// stream event on.
    fn start(&mut self, out: &mut SseEncoder, request: &InFlight) {
        let Some(mut message) = self.message.take() else {
            return;
        };
        message.usage = MessageUsage::new(request.stats().usage(), None);
        // The protocol counts the first token in advance.
        message.usage.output_tokens = 1;
        write(out, &MessagesEvent::MessageStart { message });
        write(out, &MessagesEvent::Ping {});
    }
}

impl StreamFormat for MessagesFormat {
    const KEEP_ALIVE: KeepAlive = KeepAlive::Ping;

    fn begin(&mut self, _out: &mut SseEncoder, _request: &InFlight) {}

    fn event(&mut self, out: &mut SseEncoder, request: &InFlight, event: StreamEvent) {
        self.start(out, request);
        match event {
            StreamEvent::Progress { .. } | StreamEvent::PromptLogprobs(_) => {}
            StreamEvent::Parts { parts, .. } => {
                for part in parts {
                    for event in self.blocks.push(part.delta) {
                        write(out, &event);
                    }
                }
            }
            StreamEvent::End { reason, .. } => self.reason = reason,
        }
    }

    fn end(&mut self, out: &mut SseEncoder, request: &InFlight) {
        self.start(out, request);
        for event in self.blocks.finish() {
            write(out, &event);
        }
        let (delta, usage) = (ending(request, self.reason), final_usage(request));
        write(out, &MessagesEvent::MessageDelta { delta, usage });
        write(out, &MessagesEvent::MessageStop {});
    }

    fn fail(&mut self, out: &mut SseEncoder, _request: &InFlight, error: &ApiError) {
        let body = error.body(Dialect::Anthropic, Some(&self.request_id.0));
        out.event("error", &body);
    }
}
