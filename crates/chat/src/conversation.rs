//! A conversation as templates see it, whichever dialect it came in.

use serde_json::{Map, Value, json};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions; also what some clients call `developer`.
    System,
    /// The person, or a program speaking for one.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name templates use.
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
    /// Who speaks.
    pub role: Role,
    /// The text; empty when the client sent none.
    pub content: String,
    /// What the assistant thought before this reply, if the client sent it back.
    pub reasoning: Option<String>,
    /// Calls the assistant made.
    pub tool_calls: Vec<ToolCall>,
    /// Which call a tool message answers.
    pub tool_call_id: Option<String>,
    /// The speaker's or the tool's name.
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

    /// The message as the JSON object handed to a template; absent parts stay undefined.
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

/// A call the assistant made in an earlier turn.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// The id the client uses for it.
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

/// Everything a template needs to write a prompt.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Conversation {
    /// Messages in order, already normalised.
    pub messages: Vec<Message>,
    /// Declared tools, each `{"type": "function", "function": {..}}` in the client's key order.
    pub tools: Vec<Value>,
    /// Further template variables.
    pub variables: Map<String, Value>,
    /// Whether the model should think; undefined leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// How hard, for templates that ask.
    pub effort: Option<ReasoningEffort>,
    /// Whether the prompt ends with the opening of an assistant turn.
    pub add_generation_prompt: bool,
    /// Whether the last message is an assistant's that the model continues.
    pub continue_final_message: bool,
    /// Seconds since 1970-01-01 UTC, for templates that print the date.
    pub now_unix: i64,
}

/// How hard to think.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReasoningEffort {
    /// Also `minimal`.
    Low,
    /// The middle tier.
    Medium,
    /// The default tier, and what an unknown name means.
    High,
    /// Also `x-high`.
    XHigh,
    /// As much as the model can use.
    Max,
}

impl ReasoningEffort {
    /// The tier of a name; an unknown name is `High`. `none` is not a tier.
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
