//! Request fields that a response repeats.

use serde_json::{Map, Value, json};

use crate::dialect::fields::{Fields, number_of};
use crate::error::ChatError;

/// Request fields that the response repeats, as sent or with their defaults.
#[derive(Debug, Clone, PartialEq)]
pub struct EchoedFields {
    pub(super) fields: Vec<(&'static str, Value)>,
    /// Sampling parameters that were not sent.
    unsent: Vec<&'static str>,
}

/// Sampling parameters whose defaults depend on the model.
const SAMPLING: [&str; 3] = ["temperature", "top_p", "presence_penalty"];

impl EchoedFields {
    /// Reads them; a value that the protocol does not know is an error.
    pub(super) fn read(body: &Fields<'_>) -> Result<EchoedFields, ChatError> {
        let or = |key: &str, default: Value| body.get(key).cloned().unwrap_or(default);
        let number = |key: &str, default: f64| match body.get(key) {
            Some(value) => number_of(value).into_owned(),
            None => default.into(),
        };
        let text = |key: &str| body.string(key).map(|text| json!(text));
        let max_tool_calls = body.int("max_tool_calls", 1..=i64::from(i32::MAX))?;
        let reasoning = body.get("reasoning");
        let said = |key: &str| reasoning.and_then(|fields| fields.get(key));
        let is_unsent = |key: &&str| body.get(key).is_none();
        Ok(EchoedFields {
            unsent: SAMPLING.into_iter().filter(is_unsent).collect(),
            fields: vec![
                ("background", false.into()),
                ("frequency_penalty", number("frequency_penalty", 0.0)),
                ("instructions", or("instructions", Value::Null)),
                ("max_output_tokens", or("max_output_tokens", Value::Null)),
                ("max_tool_calls", json!(max_tool_calls)),
                (
                    "parallel_tool_calls",
                    or("parallel_tool_calls", true.into()),
                ),
                ("presence_penalty", number("presence_penalty", 0.0)),
                ("previous_response_id", Value::Null),
                ("prompt_cache_key", text("prompt_cache_key")?),
                (
                    "reasoning",
                    json!({"effort": said("effort"), "summary": said("summary")}),
                ),
                ("safety_identifier", text("safety_identifier")?),
                ("service_tier", service_tier(body)?),
                ("store", false.into()),
                ("temperature", number("temperature", 1.0)),
                ("text", text_format(body)),
                ("tool_choice", or("tool_choice", "auto".into())),
                ("tools", tools(body)),
                ("top_logprobs", or("top_logprobs", 0.into())),
                ("top_p", number("top_p", 1.0)),
                ("truncation", truncation(body)?),
                ("user", or("user", Value::Null)),
                ("metadata", or("metadata", json!({}))),
            ],
        })
    }
}

impl EchoedFields {
    /// The same with the response before this one, and whether this one is kept.
    #[must_use]
    pub fn with_state(mut self, previous: Option<&str>, is_kept: bool) -> EchoedFields {
        for (key, value) in &mut self.fields {
            match *key {
                "previous_response_id" => *value = json!(previous),
                "store" => *value = is_kept.into(),
                _ => {}
            }
        }
        self
    }

    /// The same with sampling parameters that were not sent as they are used.
    #[must_use]
    pub fn with_defaults(mut self, temperature: f32, top_p: f32, presence: f32) -> EchoedFields {
        for (key, used) in SAMPLING.into_iter().zip([temperature, top_p, presence]) {
            let mut fields = self.fields.iter_mut();
            if self.unsent.contains(&key)
                && let Some((_, value)) = fields.find(|(name, _)| *name == key)
            {
                // By its shortest spelling: 0.6, not 0.6000000238.
                *value = used
                    .to_string()
                    .parse::<f64>()
                    .map_or(Value::Null, Value::from);
            }
        }
        self
    }
}

/// One of a protocol's words, or the first of them.
fn word(body: &Fields<'_>, key: &str, words: &[&str]) -> Result<Value, ChatError> {
    match body.string(key)? {
        None => Ok(json!(words.first())),
        Some(word) if words.contains(&word) => Ok(word.into()),
        Some(other) => {
            let message = format!("must be one of {}, not {other:?}", words.join(", "));
            Err(body.error(key, message))
        }
    }
}

/// As asked. A prompt that does not fit is refused either way.
fn truncation(body: &Fields<'_>) -> Result<Value, ChatError> {
    word(body, "truncation", &["disabled", "auto"])
}

/// The tier that a request is served in: there is one.
fn service_tier(body: &Fields<'_>) -> Result<Value, ChatError> {
    let tiers = ["default", "auto", "flex", "priority", "scale"];
    word(body, "service_tier", &tiers).map(|_| "default".into())
}

/// `text` with a format.
fn text_format(body: &Fields<'_>) -> Value {
    let mut text = match body.get("text") {
        Some(Value::Object(text)) => text.clone(),
        _ => Map::new(),
    };
    if text.get("format").is_none_or(Value::is_null) {
        text.insert("format".to_owned(), json!({"type": "text"}));
    }
    Value::Object(text)
}

/// The tools; functions have all fields of the protocol.
fn tools(body: &Fields<'_>) -> Value {
    let Some(Value::Array(tools)) = body.get("tools") else {
        return json!([]);
    };
    let mut tools = tools.clone();
    for tool in tools.iter_mut().filter_map(Value::as_object_mut) {
        if tool.get("type") != Some(&Value::from("function")) || tool.contains_key("function") {
            continue;
        }
        for key in ["description", "parameters"] {
            tool.entry(key).or_insert(Value::Null);
        }
        if tool.get("strict").is_none_or(Value::is_null) {
            tool.insert("strict".to_owned(), false.into());
        }
    }
    Value::Array(tools)
}
