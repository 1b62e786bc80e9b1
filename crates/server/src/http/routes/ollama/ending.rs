//! The end of a reply and its statistics.

use std::time::{SystemTime, UNIX_EPOCH};

use chat::ollama::request::OllamaFields;
use chat::ollama::response::OllamaEnding;
use chat::reply::FinishReason;
use jiff::Timestamp;

use crate::engine::request_stats::RequestStats;
use crate::http::model_choice::LoadTime;

/// The time.
pub(super) fn timestamp() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let since = since.unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    let nanoseconds = i32::try_from(since.subsec_nanos()).unwrap_or(0);
    Timestamp::new(seconds, nanoseconds).unwrap_or(Timestamp::MAX)
}

/// The time in RFC 3339.
pub(super) fn now() -> String {
    timestamp().to_string()
}

/// The note of a reply to a request whose context is longer than the server's.
pub(super) fn context_note(fields: OllamaFields, context: usize) -> Option<String> {
    let asked = fields.num_ctx.filter(|asked| *asked > context)?;
    Some(format!(
        "options.num_ctx: the context has {context} tokens, not {asked}"
    ))
}

/// The end of a reply with its statistics.
pub(super) fn ending(reason: FinishReason, stats: &RequestStats, load: LoadTime) -> OllamaEnding {
    let summary = stats.summary();
    OllamaEnding {
        done_reason: reason.into(),
        total_duration: summary.total + load.0,
        load_duration: load.0,
        prompt_eval_count: stats.usage().prompt_tokens,
        prompt_eval_duration: summary.prefill,
        eval_count: summary.completion_tokens,
        eval_duration: summary.decode,
    }
}
