//! The body of a text completion request.

use contract::TokenId;
use serde_json::Value;

use super::chat::stream_options;
use super::gap::GapContext;
use crate::dialect::fields::{Fields, must_be, parse_body};
use crate::dialect::{compression, priority, token_id};
use crate::error::ChatError;
use crate::request::{
    CompressionMode, MAX_TOP_LOGPROBS, ResponseFormat, SamplingParams, StreamOptions, TokenOptions,
};
use crate::tokenizer::{EncodeLimit, SpecialTokens, Tokenizer};

/// Maximum number of prompts in one request.
pub const MAX_PROMPTS: usize = 128;
/// Default maximum number of tokens, as in OpenAI's protocol.
pub const DEFAULT_MAX_TOKENS: usize = 16;

/// A text completion request with every field in range.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    /// The requested model; echoed in the reply.
    pub model: Option<String>,
    /// At least one.
    pub prompts: Vec<CompletionPrompt>,
    /// Whether the reply starts with the prompt.
    pub echo: bool,
    /// Whether to stream the reply.
    pub stream: bool,
    /// What stream events carry besides text.
    pub stream_options: StreamOptions,
    /// Sampling, lengths, stops and choices.
    pub sampling: SamplingParams,
    /// Alternatives per token (0..=20) if logprobs are requested.
    pub logprobs: Option<usize>,
    /// How prompts are cut, and which tokens the reply lists.
    pub tokens: TokenOptions,
    /// Required form of the text.
    pub response_format: ResponseFormat,
    /// Higher values are scheduled first.
    pub priority: i32,
    /// Whether the prefix cache may be used.
    pub use_prefix_cache: bool,
    /// When prompts are compressed; `None` is the server's default.
    pub compression: Option<CompressionMode>,
    /// What is behind the prompts, if the completion fills a gap.
    pub gap: Option<GapContext>,
}

/// A prompt of a text completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CompletionPrompt {
    /// Text; special strings in it become their tokens.
    Text(String),
    /// Token ids.
    Tokens(Vec<TokenId>),
    /// Texts and token ids, one behind the other.
    Mixed(Vec<CompletionPrompt>),
}

impl CompletionRequest {
    /// Reads and checks a request body; errors as [`chat_request`](super::chat_request).
    pub fn from_json(body: &[u8]) -> Result<CompletionRequest, ChatError> {
        let map = parse_body(body)?;
        let body = Fields::body(&map);
        CompletionRequest::read(&body, prompts(&body)?)
    }

    /// Reads the fields besides the prompts.
    pub(crate) fn read(
        body: &Fields<'_>,
        prompts: Vec<CompletionPrompt>,
    ) -> Result<CompletionRequest, ChatError> {
        let suffix = body.string("suffix")?.filter(|text| !text.is_empty());
        let echo = body.flag("echo", false)?;
        if echo && suffix.is_some() {
            return Err(body.error("echo", "cannot go with suffix"));
        }
        let sampling = SamplingParams::read(body, "stop")?;
        if let Some(best_of) = body.count("best_of", usize::MAX)?
            && best_of != sampling.n
        {
            return Err(body.error("best_of", format!("must equal n, which is {}", sampling.n)));
        }
        Ok(CompletionRequest {
            model: body.string("model")?.map(str::to_owned),
            prompts,
            echo,
            stream: body.flag("stream", false)?,
            stream_options: stream_options(body)?,
            sampling,
            logprobs: body.count("logprobs", MAX_TOP_LOGPROBS)?,
            tokens: TokenOptions::read(body)?,
            response_format: ResponseFormat::read(body)?,
            priority: priority(body)?,
            use_prefix_cache: body.flag("cache_prompt", true)?,
            compression: compression(body)?,
            gap: suffix.map(|suffix| GapContext::of_suffix(suffix, "suffix")),
        })
    }

    /// The tokens of a prompt; encoding stops at the limit. Rejects ids outside the vocabulary, and
    /// a gap if the model has no tokens for one.
    pub fn token_ids(
        &self,
        prompt: &CompletionPrompt,
        tokenizer: &Tokenizer,
        limit: EncodeLimit<'_>,
    ) -> Result<Vec<TokenId>, ChatError> {
        match &self.gap {
            Some(gap) => gap.token_ids(tokenizer, limit, |special| {
                prompt.token_ids(tokenizer, limit, special)
            }),
            None => prompt.token_ids(tokenizer, limit, SpecialTokens::Parse),
        }
    }
}

impl CompletionPrompt {
    /// The tokens of the prompt. Text whose special strings are parsed is a prompt of its own, with
    /// the beginning-of-text token.
    fn token_ids(
        &self,
        tokenizer: &Tokenizer,
        limit: EncodeLimit<'_>,
        special: SpecialTokens,
    ) -> Result<Vec<TokenId>, ChatError> {
        let ids = match self {
            CompletionPrompt::Text(text) => {
                return match special {
                    SpecialTokens::Parse => tokenizer.encode_prompt_up_to(text, limit),
                    SpecialTokens::AsText => tokenizer.encode_up_to(text, special, limit),
                };
            }
            CompletionPrompt::Tokens(ids) => ids,
            CompletionPrompt::Mixed(parts) => {
                let mut ids = Vec::new();
                for part in parts {
                    ids.extend(part.token_ids(tokenizer, limit, special)?);
                    if ids.len() > limit.tokens {
                        break;
                    }
                }
                return Ok(ids);
            }
        };
        match ids.iter().find(|id| id.index() >= tokenizer.n_tokens()) {
            None => Ok(ids.clone()),
            Some(id) => Err(ChatError::field(
                "prompt",
                format!(
                    "token id {id} is outside the vocabulary of {} tokens",
                    tokenizer.n_tokens()
                ),
            )),
        }
    }
}

fn prompts(body: &Fields<'_>) -> Result<Vec<CompletionPrompt>, ChatError> {
    let value = body
        .get("prompt")
        .ok_or_else(|| body.error("prompt", "is missing"))?;
    let items = match value {
        Value::String(text) => return Ok(vec![CompletionPrompt::Text(text.clone())]),
        Value::Array(items) => items,
        other => {
            return Err(body.error("prompt", must_be("a string or an array", other)));
        }
    };
    match items.first() {
        None => return Err(body.error("prompt", "must not be empty")),
        Some(Value::Number(_)) => {
            return Ok(vec![CompletionPrompt::Tokens(tokens(items, "prompt")?)]);
        }
        Some(_) => {}
    }
    if items.len() > MAX_PROMPTS {
        return Err(body.error(
            "prompt",
            format!(
                "must hold at most {MAX_PROMPTS} prompts, not {}",
                items.len()
            ),
        ));
    }
    let one = |(index, item): (usize, &Value)| {
        let path = format!("prompt[{index}]");
        match item {
            Value::String(text) => Ok(CompletionPrompt::Text(text.clone())),
            Value::Array(ids) if ids.is_empty() => Err(ChatError::field(path, "must not be empty")),
            Value::Array(ids) => Ok(CompletionPrompt::Tokens(tokens(ids, &path)?)),
            other => Err(ChatError::field(
                path,
                must_be("a string or an array of token ids", other),
            )),
        }
    };
    items.iter().enumerate().map(one).collect()
}

fn tokens(items: &[Value], path: &str) -> Result<Vec<TokenId>, ChatError> {
    items
        .iter()
        .enumerate()
        .map(|(index, item)| token_id(item, || format!("{path}[{index}]")))
        .collect()
}
