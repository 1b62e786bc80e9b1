//! Lines of a stream from the parts of a reply, and whole replies.

use super::response::{
    OllamaContent, OllamaEnding, OllamaFunction, OllamaMessage, OllamaReply, OllamaToolCall,
};
use crate::conversation::parse_arguments;
use crate::reply::{Reply, ReplyDelta, TokenLogprob};

/// The route of a reply, which decides on its form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OllamaRoute {
    /// `POST /api/chat`.
    Chat,
    /// `POST /api/generate`.
    Generate,
}

/// Writes the lines of one reply.
#[derive(Debug)]
pub struct OllamaWriter {
    model: String,
    route: OllamaRoute,
    /// A call whose arguments are not complete: its index, id, name and arguments.
    call: Option<(usize, String, String, String)>,
}

/// What a line shows.
#[derive(Debug, Default)]
struct Shown {
    text: String,
    thinking: String,
    tool_calls: Vec<OllamaToolCall>,
    logprobs: Vec<TokenLogprob>,
}

impl OllamaWriter {
    /// A writer of a reply under the client's name of the model.
    pub fn new(model: String, route: OllamaRoute) -> OllamaWriter {
        OllamaWriter {
            model,
            route,
            call: None,
        }
    }

    /// The lines that a part of the reply completes; `now` is the time in RFC 3339.
    pub fn push(
        &mut self,
        delta: ReplyDelta,
        logprobs: Vec<TokenLogprob>,
        now: &str,
    ) -> Vec<OllamaReply> {
        let mut lines = Vec::new();
        match delta {
            ReplyDelta::ToolArguments { fragment, .. } => {
                if let Some((.., arguments)) = &mut self.call {
                    arguments.push_str(&fragment);
                }
            }
            ReplyDelta::ToolCall { index, id, name } => {
                lines.extend(self.end_call(now));
                self.call = Some((index, id, name, String::new()));
            }
            ReplyDelta::Content(text) => {
                lines.extend(self.end_call(now));
                let shown = Shown {
                    text,
                    logprobs,
                    ..Shown::default()
                };
                lines.push(self.line(shown, None, now));
            }
            ReplyDelta::Reasoning(thinking) => {
                lines.extend(self.end_call(now));
                let shown = Shown {
                    thinking,
                    ..Shown::default()
                };
                lines.push(self.line(shown, None, now));
            }
        }
        lines
    }

    /// The last lines of the reply.
    pub fn finish(&mut self, ending: OllamaEnding, now: &str) -> Vec<OllamaReply> {
        let mut lines = Vec::from_iter(self.end_call(now));
        lines.push(self.line(Shown::default(), Some(ending), now));
        lines
    }

    /// The whole reply.
    pub fn whole(
        &self,
        reply: Reply,
        logprobs: Vec<TokenLogprob>,
        ending: OllamaEnding,
        now: &str,
    ) -> OllamaReply {
        let calls = reply.tool_calls.into_iter().enumerate();
        let calls =
            calls.map(|(index, call)| tool_call(index, call.id, call.name, &call.arguments));
        let shown = Shown {
            text: reply.content,
            thinking: reply.reasoning,
            tool_calls: calls.collect(),
            logprobs,
        };
        self.line(shown, Some(ending), now)
    }

    fn end_call(&mut self, now: &str) -> Option<OllamaReply> {
        let (index, id, name, arguments) = self.call.take()?;
        let shown = Shown {
            tool_calls: vec![tool_call(index, id, name, &arguments)],
            ..Shown::default()
        };
        Some(self.line(shown, None, now))
    }

    fn line(&self, shown: Shown, ending: Option<OllamaEnding>, now: &str) -> OllamaReply {
        OllamaReply {
            model: self.model.clone(),
            created_at: now.to_owned(),
            content: match self.route {
                OllamaRoute::Chat => OllamaContent::Chat {
                    message: OllamaMessage {
                        role: "assistant",
                        content: shown.text,
                        thinking: shown.thinking,
                        tool_calls: shown.tool_calls,
                    },
                },
                OllamaRoute::Generate => OllamaContent::Generate {
                    response: shown.text,
                    thinking: shown.thinking,
                },
            },
            logprobs: shown.logprobs,
            done: ending.is_some(),
            ending,
        }
    }
}

fn tool_call(index: usize, id: String, name: String, arguments: &str) -> OllamaToolCall {
    let arguments = parse_arguments(arguments, &name);
    OllamaToolCall {
        id,
        function: OllamaFunction {
            index,
            name,
            arguments,
        },
    }
}
