//! Responses that are not streamed.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::EchoedFields;
use crate::reply::{Timings, Usage};

/// Status of a response or an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemStatus {
    /// In progress.
    InProgress,
    /// Complete.
    Completed,
    /// Cut off by the token limit.
    Incomplete,
    /// Failed.
    Failed,
}

/// An output item.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputItem {
    /// Reasoning; as a summary if requested, else as content.
    Reasoning {
        /// `rs_` and random characters.
        id: String,
        /// As a summary.
        summary: Vec<ContentPart>,
        /// As content.
        content: Vec<ContentPart>,
        /// How far it has come.
        status: ItemStatus,
    },
    /// Text.
    Message {
        /// `msg_` and random characters.
        id: String,
        /// How far it has come.
        status: ItemStatus,
        /// Always `assistant`.
        role: &'static str,
        /// Empty at first, then one part.
        content: Vec<ContentPart>,
    },
    /// A call.
    FunctionCall {
        /// `fc_` and random characters.
        id: String,
        /// `call_` and 24 hexadecimal digits.
        call_id: String,
        /// The function.
        name: String,
        /// The namespace it was declared in.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// A JSON object, as text.
        arguments: String,
        /// How far it has come.
        status: ItemStatus,
    },
    /// A call with free text.
    CustomToolCall {
        /// `ctc_` and random characters.
        id: String,
        /// `call_` and 24 hexadecimal digits.
        call_id: String,
        /// The tool.
        name: String,
        /// The text.
        input: String,
        /// How far it has come.
        status: ItemStatus,
    },
}

/// A part of an item's content.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentPart {
    /// Text of the reply.
    OutputText {
        /// The text.
        text: String,
        /// Always empty.
        annotations: Vec<Value>,
        /// Logprobs of its tokens, if requested.
        logprobs: Vec<Value>,
    },
    /// Reasoning.
    ReasoningText {
        /// The text.
        text: String,
    },
    /// Reasoning, as a summary.
    SummaryText {
        /// The text.
        text: String,
    },
}

impl ContentPart {
    /// Text of the reply.
    pub(super) fn output(text: &str, logprobs: &[Value]) -> ContentPart {
        ContentPart::OutputText {
            text: text.to_owned(),
            annotations: Vec::new(),
            logprobs: logprobs.to_vec(),
        }
    }
}

/// Fields that are equal in all states of one response.
#[derive(Debug, Clone)]
pub struct ResponseObject {
    /// `resp_` and random characters.
    pub id: String,
    /// Seconds since 1970-01-01 UTC.
    pub created_at: i64,
    /// The model as the client named it.
    pub model: String,
    /// Fields of the request that are repeated.
    pub echo: EchoedFields,
}

/// What is known once a response has ended.
#[derive(Debug, Default)]
struct Outcome {
    took: Option<(Usage, Timings)>,
    completed_at: Option<i64>,
    error: Option<Value>,
}

impl ResponseObject {
    /// The response before any output.
    pub fn in_progress(&self) -> Value {
        self.body(ItemStatus::InProgress, &[], Outcome::default())
    }

    /// The finished response; `hit_token_limit` marks it as incomplete. `completed_at` is in
    /// seconds since 1970-01-01 UTC.
    ///
    /// `timings` stands beside `usage`, as in OpenAI's other dialects; clients ignore the extra
    /// field.
    pub fn completed(
        &self,
        hit_token_limit: bool,
        output: &[OutputItem],
        took: (Usage, Timings),
        completed_at: i64,
    ) -> Value {
        let status = if hit_token_limit {
            ItemStatus::Incomplete
        } else {
            ItemStatus::Completed
        };
        let outcome = Outcome {
            took: Some(took),
            completed_at: Some(completed_at).filter(|_| !hit_token_limit),
            error: None,
        };
        self.body(status, output, outcome)
    }

    /// The failed response.
    pub fn failed(&self, output: &[OutputItem], code: &str, message: &str) -> Value {
        let error = json!({"code": code, "message": message});
        let outcome = Outcome {
            error: Some(error),
            ..Outcome::default()
        };
        self.body(ItemStatus::Failed, output, outcome)
    }

    fn body(&self, status: ItemStatus, output: &[OutputItem], outcome: Outcome) -> Value {
        let (usage, timings) = outcome.took.unzip();
        let incomplete = match status {
            ItemStatus::Incomplete => json!({"reason": "max_output_tokens"}),
            _ => Value::Null,
        };
        let mut body = Map::new();
        for (key, value) in [
            ("id", json!(self.id)),
            ("object", json!("response")),
            ("created_at", json!(self.created_at)),
            ("completed_at", json!(outcome.completed_at)),
            ("status", json!(status)),
            ("error", json!(outcome.error)),
            ("incomplete_details", incomplete),
            ("model", json!(self.model)),
            ("output", json!(output)),
            ("usage", json!(usage.map(counts))),
        ] {
            body.insert(key.to_owned(), value);
        }
        body.extend(timings.map(|timings| ("timings".to_owned(), json!(timings))));
        for (key, value) in &self.echo.fields {
            body.insert((*key).to_owned(), value.clone());
        }
        Value::Object(body)
    }
}

/// Token counts in Responses' form.
pub(super) fn counts(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            // The cache is free: nothing is billed for writing it.
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
        },
        "total_tokens": usage.total_tokens(),
    })
}
