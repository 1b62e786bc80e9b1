//! Whether a prompt is compressed, and why not.

use chat::conversation::{Message, Role};
use chat::request::{ChatRequest, CompressionMode};

/// Why a prompt was or was not compressed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompressionReason {
    /// It was.
    #[error("compressed")]
    Compressed,
    /// It was, with the scores of an equal request before.
    #[error("compressed with the scores of an earlier request")]
    Cached,
    /// Earlier messages of the conversation were, one by one.
    #[error("earlier messages compressed")]
    Aged,
    /// They were, with the scores of an earlier turn.
    #[error("earlier messages compressed with the scores of an earlier turn")]
    AgedCached,
    /// The first turn of a conversation whose earlier messages will be compressed later.
    #[error("the first turn stays whole, and later turns compress it")]
    FirstTurn,
    /// The earlier messages of a conversation are short.
    #[error("the earlier messages have {tokens} tokens only")]
    FewAged {
        /// Their tokens in total.
        tokens: usize,
    },
    /// The mode is off.
    #[error("off")]
    Off,
    /// The prompt is below the threshold of `auto`.
    #[error("{tokens} tokens are below the threshold of {threshold}")]
    Short {
        /// Tokens of the prompt.
        tokens: usize,
        /// The threshold.
        threshold: usize,
    },
    /// The conversation has earlier replies, whose cached prefix would be lost.
    #[error("a continued conversation")]
    Continued,
    /// The request has tools.
    #[error("the request has tools")]
    Tools,
    /// The last user message has code.
    #[error("the last message has code")]
    Code,
    /// The request wants the prompt's own tokens: their log-probabilities, or a cut of it.
    #[error("the request needs the exact prompt")]
    ExactPrompt,
    /// The prompt of a completion came as token ids.
    #[error("the prompt is token ids")]
    TokenIds,
    /// The prompt of a completion has control tokens, between which roles would be lost.
    #[error("the prompt has control tokens; send its messages as a chat")]
    ControlTokens,
    /// No content is long enough.
    #[error("no message content is long enough")]
    NothingToCut,
    /// The compressed prompt is not shorter.
    #[error("compression would not shorten the prompt")]
    NoGain,
    /// Scoring failed; the log has the error.
    #[error("scoring failed, so the whole prompt is used: {0}")]
    Failed(String),
}

/// How a prompt is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CompressionPlan {
    /// All contents, scored by the prompt's end.
    Whole,
    /// Earlier messages of a conversation, each scored by its own end.
    Aged,
}

/// Tokens that decide.
#[derive(Debug, Clone, Copy)]
pub(super) struct PromptSize {
    /// Of the prompt.
    pub(super) tokens: usize,
    /// The shortest prompt that `auto` compresses.
    pub(super) threshold: usize,
    /// The model's context.
    pub(super) context: usize,
}

/// How a request is compressed; fails with the reason why it is not. `ages` compresses earlier
/// messages of continued conversations.
pub(super) fn plan(
    request: &ChatRequest,
    mode: CompressionMode,
    size: PromptSize,
    ages: bool,
) -> Result<CompressionPlan, CompressionReason> {
    let PromptSize {
        tokens, threshold, ..
    } = size;
    if mode == CompressionMode::Off {
        return Err(CompressionReason::Off);
    }
    let options = &request.tokens;
    if options.prompt_logprobs.is_some() || options.truncation.is_some() {
        return Err(CompressionReason::ExactPrompt);
    }
    let is_reply = |message: &Message| matches!(message.role, Role::Assistant | Role::Tool);
    let is_continued = request.messages.iter().any(is_reply);
    if ages && is_continued {
        return Ok(CompressionPlan::Aged);
    }
    if ages && tokens < size.context {
        return Err(CompressionReason::FirstTurn);
    }
    if mode == CompressionMode::Always {
        return Ok(CompressionPlan::Whole);
    }
    if tokens < threshold {
        return Err(CompressionReason::Short { tokens, threshold });
    }
    if is_continued {
        return Err(CompressionReason::Continued);
    }
    if !request.tools.is_empty() {
        return Err(CompressionReason::Tools);
    }
    let last = request.messages.iter().rfind(|m| m.role == Role::User);
    if last.is_some_and(|message| message.content.contains("```")) {
        return Err(CompressionReason::Code);
    }
    Ok(CompressionPlan::Whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn plan(
        body: Value,
        mode: CompressionMode,
        tokens: usize,
        ages: bool,
    ) -> Result<CompressionPlan, CompressionReason> {
        let body = body.to_string();
        let request = chat::openai::request::chat_request(body.as_bytes()).unwrap();
        let size = PromptSize {
            tokens,
            threshold: 100,
            context: 1000,
        };
        super::plan(&request, mode, size, ages)
    }

    fn check(body: Value, mode: CompressionMode, tokens: usize) -> Result<(), CompressionReason> {
        plan(body, mode, tokens, false).map(|plan| assert_eq!(plan, CompressionPlan::Whole))
    }

    fn user(text: &str) -> Value {
        json!({"role": "user", "content": text})
    }

    #[test]
    fn auto_says_why_it_leaves_a_prompt_whole() {
        use CompressionMode::{Always, Auto, Off};
        let plain = json!({"messages": [user("a")]});
        assert_eq!(check(plain.clone(), Off, 500), Err(CompressionReason::Off));
        assert_eq!(check(plain.clone(), Auto, 100), Ok(()));
        let short = CompressionReason::Short {
            tokens: 99,
            threshold: 100,
        };
        assert_eq!(check(plain.clone(), Auto, 99), Err(short));
        assert_eq!(check(plain, Always, 99), Ok(()));
        let continued = json!({"messages":
            [user("a"), {"role": "assistant", "content": "b"}, user("c")]});
        let reason = CompressionReason::Continued;
        assert_eq!(check(continued.clone(), Auto, 500), Err(reason));
        assert_eq!(check(continued, Always, 500), Ok(()));
        let code = json!({"messages": [user("fix\n```\nf()\n```")]});
        assert_eq!(check(code.clone(), Auto, 500), Err(CompressionReason::Code));
        assert_eq!(check(code, Always, 500), Ok(()));
        let tools = json!({"messages": [user("a")], "tools":
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]});
        assert_eq!(
            check(tools.clone(), Auto, 500),
            Err(CompressionReason::Tools)
        );
        assert_eq!(check(tools, Always, 500), Ok(()));
        let exact = json!({"messages": [user("a")], "prompt_logprobs": 1});
        assert_eq!(
            check(exact, Always, 500),
            Err(CompressionReason::ExactPrompt)
        );
    }
    #[test]
    fn aging_keeps_first_turns_whole_and_compresses_earlier_messages_of_later_ones() {
        use CompressionMode::{Always, Auto, Off};
        let first = json!({"messages": [user("a")]});
        let later = json!({"messages":
            [user("a"), {"role": "assistant", "content": "b"}, user("c")],
            "tools": [{"type": "function",
                "function": {"name": "f", "parameters": {"type": "object"}}}]});
        for mode in [Auto, Always] {
            let first = |tokens: usize| plan(first.clone(), mode, tokens, true);
            assert_eq!(first(500), Err(CompressionReason::FirstTurn));
            // A prompt beyond the context has no other way.
            assert_eq!(first(1000), Ok(CompressionPlan::Whole));
            let found = plan(later.clone(), mode, 50, true);
            assert_eq!(found, Ok(CompressionPlan::Aged));
        }
        let off = plan(later, Off, 500, true);
        assert_eq!(off, Err(CompressionReason::Off));
    }
}
