//! Prefix warm-up: queues the start of a conversation's next prompt as soon as a reply is complete.
//!
//! Chat templates re-render past turns (for example without reasoning), so the cached prefix would
//! miss. This module renders the conversation with the reply and two different next messages, with
//! aged messages compressed as the next prompt will have them. The
//! engine prefills their common prefix while it is idle
//! ([`Scheduler::queue_warmup`](decode::Scheduler::queue_warmup)). A wrong guess costs idle time
//! only.

use std::sync::Arc;

use chat::ChatError;
use chat::conversation::{Message, Role};
use chat::reply::{FinishReason, Reply, ReplyDelta};
use chat::request::{ChatRequest, ConversationPolicy};
use contract::TokenId;
use decode::NextPrompt;

use crate::engine::ModelHandle;
use crate::engine::handle::EngineHandle;
use crate::http::state::App;
use crate::text::prepare;

/// Warm-up of one conversation, fed with the reply as it streams.
pub struct PrefixWarmup {
    handle: Arc<ModelHandle>,
    policy: ConversationPolicy,
    request: ChatRequest,
    /// The reply so far.
    reply: Reply,
}

impl PrefixWarmup {
    /// Warm-up of a request; `None` if disabled, if caching is off for it, or if it has several
    /// choices or continues a message.
    pub fn new(
        app: &App,
        handle: &Arc<ModelHandle>,
        request: &ChatRequest,
    ) -> Option<PrefixWarmup> {
        let on = handle.prefix.max_entries > 0
            && handle.prefix.warmup_tokens > 0
            && request.cache.enabled;
        let plain = request.sampling.n == 1
            && request.add_generation_prompt
            && !request.continue_final_message;
        (on && plain).then(|| PrefixWarmup {
            handle: Arc::clone(handle),
            policy: prepare::policy(app.config()),
            request: request.clone(),
            reply: Reply::default(),
        })
    }

    /// Adds the next part of the reply.
    pub fn push(&mut self, piece: &ReplyDelta) {
        self.reply.push(piece.clone());
    }

    /// Renders the next prompt's start on the blocking pool and queues it. Returns at once; must
    /// run within a runtime.
    pub fn submit(self, engine: &EngineHandle, reason: FinishReason) {
        let next = match reason {
            FinishReason::ToolCalls => Role::Tool,
            FinishReason::Stop | FinishReason::Length => Role::User,
        };
        let engine = engine.clone();
        tokio::task::spawn_blocking(move || match self.tokens(next) {
            Ok(tokens) => {
                let session = self.request.cache.session.as_deref().map(Arc::from);
                let tokens = tokens.into();
                engine.warm_prefix(NextPrompt { tokens, session });
            }
            Err(error) => tracing::debug!(%error, "the next prompt cannot be predicted"),
        });
    }

    /// Common token prefix of all prompts that continue the conversation with a message of role
    /// `next`.
    fn tokens(&self, next: Role) -> Result<Vec<TokenId>, ChatError> {
        let model = &self.handle.model;
        let [one, other] = ["a", "b"].map(|text| {
            let request = self.continued(next, text);
            let request = match &model.compressor {
                Some(compressor) => compressor.with_aged_compressed(model, request),
                None => request,
            };
            let conversation = request.conversation(&self.policy)?;
            let rendered = model.template.render(&conversation)?;
            model.tokenizer.encode_rendered(&rendered)
        });
        let (mut one, other) = (one?, other?);
        let common = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
        one.truncate(common);
        Ok(one)
    }

    /// The next request, if its new message is `text`.
    fn continued(&self, next: Role, text: &str) -> ChatRequest {
        let mut request = self.request.clone();
        // A client that returns reasoning has returned it in earlier turns.
        let echoes = request.messages.iter().any(|m| m.reasoning.is_some());
        let reply = self.reply.to_message(echoes);
        let calls: Vec<Option<String>> = reply.tool_calls.iter().map(|c| c.id.clone()).collect();
        request.messages.push(reply);
        if next == Role::Tool {
            request.messages.extend(calls.into_iter().map(|id| Message {
                tool_call_id: id,
                ..Message::new(Role::Tool, text)
            }));
        } else {
            request.messages.push(Message::new(next, text));
        }
        request
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::tiny_model;
    use conformance::fake::{FakeRunner, FakeSpec};
    use contract::Runner;
    use decode::PrefixConfig;
    use serde_json::{Value, json};

    fn handle() -> Arc<ModelHandle> {
        Arc::new(ModelHandle {
            model: tiny_model(),
            info: FakeRunner::new(FakeSpec::default()).info().clone(),
            prefix: PrefixConfig::default(),
            store: None,
        })
    }

    fn request(messages: &[Value]) -> ChatRequest {
        let tool = json!({"type": "function", "function": {"name": "add", "parameters": {
            "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}});
        let body = json!({"messages": messages, "tools": [tool]});
        chat::openai::request::chat_request(body.to_string().as_bytes()).unwrap()
    }

    fn said(content: &str, thoughts: &str, call: Option<&str>) -> Reply {
        let mut reply = Reply::default();
        reply.push(ReplyDelta::Reasoning(thoughts.to_owned()));
        reply.push(ReplyDelta::Content(content.to_owned()));
        if let Some(arguments) = call {
            let (id, name) = ("call_1".to_owned(), "add".to_owned());
            let index = 0;
            reply.push(ReplyDelta::ToolCall { index, id, name });
            let fragment = arguments.to_owned();
            reply.push(ReplyDelta::ToolArguments { index, fragment });
        }
        reply
    }

    fn text(handle: &ModelHandle, tokens: &[TokenId]) -> String {
        let bytes = tokens
            .iter()
            .flat_map(|id| handle.model.tokenizer.bytes(*id));
        String::from_utf8_lossy(&bytes.copied().collect::<Vec<u8>>()).into_owned()
    }

    /// The predicted prefix after `asked` was answered with `reply`, and the real next prompt.
    fn check(asked: &[Value], reply: Reply, next: Role, came: &[Value]) -> (String, String) {
        let handle = handle();
        let warmup = PrefixWarmup {
            handle: Arc::clone(&handle),
            policy: ConversationPolicy::default(),
            request: request(asked),
            reply,
        };
        let found = warmup.tokens(next).unwrap();
        let conversation = request(&[asked, came].concat());
        let conversation = conversation.conversation(&ConversationPolicy::default());
        let rendered = handle
            .model
            .template
            .render(&conversation.unwrap())
            .unwrap();
        let prompt = handle.model.tokenizer.encode_rendered(&rendered).unwrap();
        let found_text = text(&handle, &found);
        assert!(
            prompt.starts_with(&found),
            "{found_text}\n\n{}",
            rendered.text
        );
        (found_text, rendered.text)
    }

    fn calls(thoughts: Option<&str>) -> Vec<Value> {
        let call = json!({"id": "call_0", "type": "function",
            "function": {"name": "add", "arguments": "{\"a\": 1, \"b\": 2}"}});
        let mut message = json!({"role": "assistant", "content": "I add.", "tool_calls": [call]});
        if let Some(thoughts) = thoughts {
            message["reasoning_content"] = thoughts.into();
        }
        vec![
            json!({"role": "user", "content": "What is 1 + 2?"}),
            message,
            json!({"role": "tool", "tool_call_id": "call_0", "content": "3"}),
        ]
    }

    #[test]
    fn predicted_prefix_starts_the_next_user_prompt() {
        for thoughts in [None, Some("One and two.")] {
            let asked = calls(thoughts);
            let came = [
                json!({"role": "assistant", "content": "It is 3."}),
                json!({"role": "user", "content": "Thanks!\n\nAnd 4 + 5?"}),
            ];
            let reply = said("It is 3.", "The tool says 3.", None);
            let (found, _) = check(&asked, reply, Role::User, &came);
            assert!(
                found.ends_with("It is 3.<|im_end|>\n<|im_start|>user\n"),
                "{found}"
            );
            // Reasoning of the earlier turn is gone, as in the real next prompt.
            assert!(!found.contains("<think>") && found.contains("<function=add>"));
        }
    }

    #[test]
    fn predicted_prefix_starts_the_next_tool_result_prompt() {
        for thoughts in [None, Some("Three and four.")] {
            let mut asked = calls(thoughts);
            asked[0]["content"] = "Add all.".into();
            let mut came = calls(thoughts)[1..].to_vec();
            came[0]["tool_calls"][0]["function"]["arguments"] = "{\"a\":3,\"b\":4}".into();
            let reply = said("I add.", "Three and four.", Some("{\"a\": 3, \"b\": 4}"));
            let (found, _) = check(&asked, reply, Role::Tool, &came);
            assert!(
                found.ends_with("<|im_start|>user\n<tool_response>\n"),
                "{found}"
            );
            let thinks = found.contains("Three and four.\n</think>\n\nI add.\n\n<tool_call>");
            assert_eq!(thinks, thoughts.is_some(), "{found}");
        }
    }
}
