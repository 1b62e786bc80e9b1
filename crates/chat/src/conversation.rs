//! A conversation, as templates read it.

use serde_json::{Map, Value, json};

/// The role of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions; also what some clients call `developer`.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name in templates.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One message, with its content flattened to text.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// Its role.
    pub role: Role,
    /// The text; empty if the client sent none.
    pub content: String,
    /// The assistant's reasoning, if the client sent it back.
    pub reasoning: Option<String>,
    /// Calls the assistant made.
    pub tool_calls: Vec<ToolCall>,
    /// Id of the call that a tool message answers.
    pub tool_call_id: Option<String>,
    /// Name of the speaker or of the tool.
    pub name: Option<String>,
}

impl Message {
    /// A message with text only.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message {
            role,
            content: content.into(),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// The message as a template's JSON object; absent parts stay undefined.
    pub fn to_json(&self) -> Value {
        let mut map = Map::new();
        map.insert("role".to_owned(), self.role.name().into());
        map.insert("content".to_owned(), self.content.as_str().into());
        if let Some(reasoning) = &self.reasoning {
            map.insert("reasoning_content".to_owned(), reasoning.as_str().into());
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(ToolCall::to_json).collect();
            map.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        if let Some(id) = &self.tool_call_id {
            map.insert("tool_call_id".to_owned(), id.as_str().into());
        }
        if let Some(name) = &self.name {
            map.insert("name".to_owned(), name.as_str().into());
        }
        Value::Object(map)
    }
}

/// A tool call of an earlier assistant message.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// The client's id of the call.
    pub id: Option<String>,
    /// The tool.
    pub name: String,
    /// Arguments by name. A string that was no JSON object is kept under `_raw`.
    pub arguments: Map<String, Value>,
}

impl ToolCall {
    fn to_json(&self) -> Value {
        let mut map = Map::new();
        if let Some(id) = &self.id {
            map.insert("id".to_owned(), id.as_str().into());
        }
        map.insert("type".to_owned(), "function".into());
        map.insert(
            "function".to_owned(),
            json!({ "name": self.name, "arguments": self.arguments }),
        );
        Value::Object(map)
    }
}

/// What a template needs to render a prompt.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Conversation {
    /// Messages in order, already normalised.
    pub messages: Vec<Message>,
    /// Declared tools, each `{"type": "function", "function": {..}}` in the client's key order.
    pub tools: Vec<Value>,
    /// Further template variables.
    pub variables: Map<String, Value>,
    /// Whether to reason; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Reasoning effort, for templates that read it.
    pub effort: Option<ReasoningEffort>,
    /// Whether the prompt ends with the header of an assistant turn.
    pub add_generation_prompt: bool,
    /// Whether the model continues the last message, which is the assistant's.
    pub continue_final_message: bool,
    /// Seconds since 1970-01-01 UTC, for templates that print the date.
    pub now_unix: i64,
}

/// Reasoning effort.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReasoningEffort {
    /// Also `minimal`.
    Low,
    /// The middle tier.
    Medium,
    /// The default, also for unknown names.
    High,
    /// Also `x-high`.
    XHigh,
    /// The maximum.
    Max,
}

impl ReasoningEffort {
    /// The effort of a name; unknown names are `High`. `none` is not an effort.
    pub fn parse(name: &str) -> ReasoningEffort {
        match name {
            "minimal" | "low" => ReasoningEffort::Low,
            "medium" => ReasoningEffort::Medium,
            "xhigh" | "x-high" => ReasoningEffort::XHigh,
            "max" => ReasoningEffort::Max,
            _ => ReasoningEffort::High,
        }
    }

    /// The name a Qwen template accepts: `low`, `medium` or `xhigh`.
    pub(crate) fn template_name(self) -> &'static str {
        match self {
            ReasoningEffort::Low => "low",
            ReasoningEffort::Medium => "medium",
            ReasoningEffort::High | ReasoningEffort::XHigh | ReasoningEffort::Max => "xhigh",
        }
    }
}

/// Arguments of an earlier call as an object, since templates iterate over them.
///
/// A string that is no JSON object is kept under `_raw`.
pub(crate) fn parse_arguments(text: &str, tool: &str) -> Map<String, Value> {
    if text.trim().is_empty() {
        return Map::new();
    }
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => map,
        Ok(Value::Null) => Map::new(),
        _ => {
            tracing::warn!(
                tool,
                "arguments of an earlier call are not a JSON object; kept as _raw"
            );
            Map::from_iter([("_raw".to_owned(), Value::from(text))])
        }
    }
}
