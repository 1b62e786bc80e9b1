//! Anthropic messages.

use axum::body::Body;
use axum::extract::State;
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

use crate::engine::in_flight::{News, Run};
use crate::error::{ApiError, Dialect};
use crate::http::dialect::{self, Talk, Voice};
use crate::http::middleware::RequestId;
use crate::http::sse::{Encoder, Silence};
use crate::http::state::App;
use crate::ids;

/// `POST /v1/messages`.
pub(super) async fn messages(
    State(app): State<App>,
    Extension(request_id): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let talk = Talk::read(&app, &headers, body, parse).await?;
    let mut run = talk.start(&app).await?;
    let usage = MessageUsage::new(run.meter().usage(), None);
    let mut message = MessageResponse::new(ids::random("msg_"), talk.model_name(&app), usage);
    let omits = talk.request.thinking.omitted;
    if talk.request.stream {
        let voice = MessageVoice {
            message,
            blocks: ContentBlockStream::new(ids::random("")).with_thinking_omitted(omits),
            reason: FinishReason::Stop,
            request_id,
        };
        return Ok(dialect::stream(&app, run, voice));
    }
    let choices = dialect::whole(&mut run).await?;
    for (whole, reason) in choices {
        let ending = ending(&run, reason);
        message.stop_reason = Some(ending.stop_reason);
        message.stop_sequence = ending.stop_sequence;
        message.content = content_blocks(whole.reply, &ids::random(""), omits);
    }
    message.usage = final_usage(&run);
    Ok(Json(message).into_response())
}

/// `POST /v1/messages/count_tokens`: how long the prompt would be.
pub(super) async fn count_tokens(
    State(app): State<App>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let talk = Talk::read(&app, &headers, body, parse).await?;
    Ok(Json(json!({ "input_tokens": talk.prompt.ids.len() })))
}

fn parse(bytes: &[u8]) -> Result<(ChatRequest, ()), ChatError> {
    Ok((anthropic::chat_request(bytes)?, ()))
}

fn final_usage(run: &Run) -> MessageUsage {
    let meter = run.meter();
    MessageUsage::new(meter.usage(), Some(meter.timings()))
}

fn ending(run: &Run, reason: FinishReason) -> MessageDelta {
    let stop_string = run.choice(0).stop_string();
    let stop_reason = StopReason::new(reason, stop_string);
    MessageDelta {
        stop_sequence: match stop_reason {
            StopReason::StopSequence => stop_string.map(str::to_owned),
            _ => None,
        },
        stop_reason,
    }
}

/// One streamed message.
struct MessageVoice {
    message: MessageResponse,
    blocks: ContentBlockStream,
    reason: FinishReason,
    request_id: RequestId,
}

fn write(out: &mut Encoder, event: &MessagesEvent) {
    out.event(event.name(), event);
}

impl Voice for MessageVoice {
    const SILENCE: Silence = Silence::Ping;

    fn begin(&mut self, out: &mut Encoder, _run: &Run) {
        let mut message = self.message.clone();
        // As the protocol has it: the first token is counted before it is there.
        message.usage.output_tokens = 1;
        write(out, &MessagesEvent::MessageStart { message });
        write(out, &MessagesEvent::Ping {});
    }

    fn news(&mut self, out: &mut Encoder, _run: &Run, news: News) {
        match news {
            News::Progress { .. } | News::PromptLogprobs(_) => {}
            News::Parts { parts, .. } => {
                for part in parts {
                    for event in self.blocks.push(part.piece) {
                        write(out, &event);
                    }
                }
            }
            News::End { reason, .. } => self.reason = reason,
        }
    }

    fn end(&mut self, out: &mut Encoder, run: &Run) {
        for event in self.blocks.finish() {
            write(out, &event);
        }
        let (delta, usage) = (ending(run, self.reason), final_usage(run));
        write(out, &MessagesEvent::MessageDelta { delta, usage });
        write(out, &MessagesEvent::MessageStop {});
    }

    fn fail(&mut self, out: &mut Encoder, _run: &Run, error: &ApiError) {
        let body = error.body(Dialect::Anthropic, Some(&self.request_id.0));
        out.event("error", &body);
    }
}
