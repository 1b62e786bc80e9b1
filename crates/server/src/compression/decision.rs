//! Whether a prompt is compressed, and why not.

use chat::conversation::Role;
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

/// Fails with the reason why a request of `tokens` prompt tokens is not compressed.
pub(super) fn check(
    request: &ChatRequest,
    mode: CompressionMode,
    (tokens, threshold): (usize, usize),
) -> Result<(), CompressionReason> {
    if mode == CompressionMode::Off {
        return Err(CompressionReason::Off);
    }
    let options = &request.tokens;
    if options.prompt_logprobs.is_some() || options.truncation.is_some() {
        return Err(CompressionReason::ExactPrompt);
    }
    if mode == CompressionMode::Always {
        return Ok(());
    }
    if tokens < threshold {
        return Err(CompressionReason::Short { tokens, threshold });
    }
    let is_reply = |role: Role| matches!(role, Role::Assistant | Role::Tool);
    if request
        .messages
        .iter()
        .any(|message| is_reply(message.role))
    {
        return Err(CompressionReason::Continued);
    }
    if !request.tools.is_empty() {
        return Err(CompressionReason::Tools);
    }
    let last = request.messages.iter().rfind(|m| m.role == Role::User);
    if last.is_some_and(|message| message.content.contains("```")) {
        return Err(CompressionReason::Code);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(body: Value, mode: CompressionMode, tokens: usize) -> Result<(), CompressionReason> {
        let body = body.to_string();
        let request = chat::openai::request::chat_request(body.as_bytes()).unwrap();
        super::check(&request, mode, (tokens, 100))
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
}
