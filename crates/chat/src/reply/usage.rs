//! Why a reply ended, what it used and how long it took.

use std::collections::BTreeMap;

use serde::Serialize;

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end token or a stop string.
    Stop,
    /// The token limit or the end of the context.
    Length,
    /// At least one complete tool call.
    ToolCalls,
}

/// Token counts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens restored from the prefix cache.
    pub cached_tokens: usize,
    /// Generated tokens over all choices, hidden ones included.
    pub completion_tokens: usize,
    /// Generated tokens of reasoning.
    pub reasoning_tokens: usize,
    /// Accepted draft tokens, if any token was drafted.
    pub accepted_draft_tokens: Option<usize>,
    /// Rejected draft tokens, if any token was drafted.
    pub rejected_draft_tokens: Option<usize>,
}

impl Usage {
    /// Prompt and generated tokens.
    pub fn total_tokens(&self) -> usize {
        self.prompt_tokens + self.completion_tokens
    }
}

/// Timings of a reply; every dialect writes them the same way, as an extension.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Timings {
    /// Milliseconds from admission to the first logits row, one decimal.
    pub prefill_ms: f64,
    /// Milliseconds of decoding, one decimal.
    pub decode_ms: f64,
    /// One decimal; 0.0 if nothing was decoded.
    pub decode_tokens_per_sec: f64,
    /// The same in llama-server's names, with the counts.
    #[serde(flatten)]
    pub llama_server: Option<LlamaServerTimings>,
    /// The attention window, if the server has one.
    #[serde(flatten)]
    pub window: Option<WindowTimings>,
    /// Decode steps and drafting, once the reply is complete.
    #[serde(flatten)]
    pub speculation: Option<SpeculationTimings>,
    /// Prompt compression, if the server has a scorer.
    #[serde(flatten)]
    pub compression: Option<CompressionTimings>,
}

/// What prompt compression did with a prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CompressionTimings {
    /// Tokens of the prompt as sent.
    pub compressed_from_tokens: usize,
    /// Tokens of the prompt as prefilled; equal to the former if it was not compressed.
    pub compressed_tokens: usize,
    /// Share of the prompt that was kept, three decimals.
    pub compression_kept: f64,
    /// Milliseconds of scoring, one decimal; 0.0 for scores of an earlier request.
    pub compression_ms: f64,
    /// Why the prompt was or was not compressed.
    pub compression_reason: String,
}

/// Counts and times of a reply in the names that llama-server's clients read.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct LlamaServerTimings {
    /// Prompt tokens restored from the cache.
    pub cache_n: usize,
    /// Prompt tokens that were computed.
    pub prompt_n: usize,
    /// Milliseconds of prefill.
    pub prompt_ms: f64,
    /// Milliseconds per computed prompt token; 0.0 for none.
    pub prompt_per_token_ms: f64,
    /// Computed prompt tokens per second; 0.0 for none.
    pub prompt_per_second: f64,
    /// Generated tokens.
    pub predicted_n: usize,
    /// Milliseconds of decoding.
    pub predicted_ms: f64,
    /// Milliseconds per generated token; 0.0 for none.
    pub predicted_per_token_ms: f64,
    /// Generated tokens per second; 0.0 for none.
    pub predicted_per_second: f64,
}

impl LlamaServerTimings {
    /// From the counts and the milliseconds of prefill and decoding.
    pub fn new(usage: &Usage, prefill_ms: f64, decode_ms: f64) -> LlamaServerTimings {
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let round = |value: f64| (value * 1000.0).round() / 1000.0;
        let prompt_n = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
        let predicted_n = usage.completion_tokens;
        LlamaServerTimings {
            cache_n: usage.cached_tokens,
            prompt_n,
            prompt_ms: round(prefill_ms),
            prompt_per_token_ms: round(share(prefill_ms, prompt_n as f64)),
            prompt_per_second: round(share(prompt_n as f64 * 1e3, prefill_ms)),
            predicted_n,
            predicted_ms: round(decode_ms),
            predicted_per_token_ms: round(share(decode_ms, predicted_n as f64)),
            predicted_per_second: round(share(predicted_n as f64 * 1e3, decode_ms)),
        }
    }
}

/// The attention window of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct WindowTimings {
    /// Earlier tokens that each new token attends to; 0 for all.
    attention_window: usize,
    /// Why attention was full despite the server's window.
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_window_override_reason: Option<&'static str>,
    /// The key of version 0.1 for `attention_window`.
    fa_window: usize,
    /// The key of version 0.1 for `attention_window_override_reason`.
    #[serde(skip_serializing_if = "Option::is_none")]
    fa_window_full: Option<&'static str>,
}

impl WindowTimings {
    /// A window of `tokens`, 0 for full attention, and why the server's window was overridden.
    pub fn new(tokens: usize, override_reason: Option<&'static str>) -> WindowTimings {
        WindowTimings {
            attention_window: tokens,
            attention_window_override_reason: override_reason,
            fa_window: tokens,
            fa_window_full: override_reason,
        }
    }
}

/// Decode steps of a reply and the effect of drafting.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct SpeculationTimings {
    /// Verify passes.
    pub steps: usize,
    /// Tokens per pass after the first token, two decimals.
    pub tokens_per_step: f64,
    /// Drafted tokens.
    pub draft_n: usize,
    /// Accepted draft tokens.
    pub draft_n_accepted: usize,
    /// Acceptance rate, three decimals; 0.0 if nothing was drafted.
    pub accept_rate: f64,
    /// Entry `i`: share of drafted passes that accepted more than `i` draft tokens. Three decimals,
    /// without trailing zeros.
    pub accept_by_depth: Vec<f64>,
    /// Drafted and accepted tokens by source. A token that several sources proposed counts for
    /// each.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub draft_by_source: BTreeMap<&'static str, SourceTimings>,
    /// Forced tokens.
    pub forced_n: usize,
    /// Milliseconds of drafting, one decimal; the passes may be shared with other requests.
    pub draft_ms: f64,
    /// Milliseconds of verification, one decimal.
    pub verify_ms: f64,
    /// Milliseconds of committing, one decimal.
    pub commit_ms: f64,
}

/// Drafted tokens of one source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct SourceTimings {
    /// Drafted tokens.
    pub draft_n: u64,
    /// Accepted draft tokens.
    pub draft_n_accepted: u64,
}

impl Timings {
    /// Rounds to one decimal; whatever is not finite becomes 0.0.
    pub fn new(prefill_ms: f64, decode_ms: f64, decoded_tokens: usize) -> Timings {
        let round = |value: f64| {
            if value.is_finite() {
                (value * 10.0).round() / 10.0
            } else {
                0.0
            }
        };
        let rate = if decode_ms > 0.0 {
            decoded_tokens as f64 * 1000.0 / decode_ms
        } else {
            0.0
        };
        Timings {
            prefill_ms: round(prefill_ms),
            decode_ms: round(decode_ms),
            decode_tokens_per_sec: round(rate),
            llama_server: None,
            window: None,
            speculation: None,
            compression: None,
        }
    }
}

/// A token with its log-probability and its alternatives.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenLogprob {
    /// The token.
    #[serde(flatten)]
    pub token: TopLogprob,
    /// Alternatives, best first.
    pub top_logprobs: Vec<TopLogprob>,
}

/// A token with its log-probability.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TopLogprob {
    /// Its text; bytes that are not UTF-8 by themselves show as U+FFFD.
    pub token: String,
    /// Natural logarithm; -9999 for minus infinity.
    pub logprob: f32,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl TopLogprob {
    /// A token by its bytes. Minus infinity and NaN become -9999.
    pub fn new(bytes: &[u8], logprob: f32) -> TopLogprob {
        TopLogprob {
            token: String::from_utf8_lossy(bytes).into_owned(),
            logprob: if logprob.is_nan() {
                -9999.0
            } else {
                logprob.max(-9999.0)
            },
            bytes: bytes.to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timings_have_the_names_of_llama_server() {
        let usage = Usage {
            prompt_tokens: 12,
            cached_tokens: 2,
            completion_tokens: 4,
            ..Usage::default()
        };
        let timings = Timings {
            llama_server: Some(LlamaServerTimings::new(&usage, 20.0, 0.0)),
            ..Timings::new(20.0, 0.0, 3)
        };
        let json = serde_json::to_value(&timings).unwrap();
        for (key, expected) in [
            ("cache_n", 2.0),
            ("prompt_n", 10.0),
            ("prompt_ms", 20.0),
            ("prompt_per_token_ms", 2.0),
            ("prompt_per_second", 500.0),
            ("predicted_n", 4.0),
            ("predicted_ms", 0.0),
            ("predicted_per_token_ms", 0.0),
            ("predicted_per_second", 0.0),
        ] {
            assert_eq!(json[key].as_f64(), Some(expected), "{key}");
        }
    }
}
