//! The shape a reply must have, and the refusal of shapes that are not enforced.

use serde_json::Value;

use super::chat::ChatRequest;
use super::tools::ToolChoice;
use crate::error::ChatError;
use crate::fields::Fields;

/// The shape asked for by `response_format` or one of its equivalents.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum ResponseFormat {
    /// Free text.
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that obeys a schema.
    JsonSchema(Value),
    /// A grammar, pattern or list of choices under the extension field named here.
    Extension(&'static str),
}

const EXTENSIONS: [&str; 8] = [
    "json_schema",
    "grammar",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "regex",
];

impl ResponseFormat {
    pub(crate) fn read(body: &Fields<'_>) -> Result<ResponseFormat, ChatError> {
        if let Some(name) = EXTENSIONS.into_iter().find(|name| body.get(name).is_some()) {
            return Ok(ResponseFormat::Extension(name));
        }
        let Some(format) = body.object("response_format")? else {
            return Ok(ResponseFormat::Text);
        };
        ResponseFormat::read_format(&format)
    }

    /// Reads the object that names the shape; `json_schema` may hold it inside or beside it.
    pub(crate) fn read_format(format: &Fields<'_>) -> Result<ResponseFormat, ChatError> {
        match format.string("type")? {
            Some("text") => Ok(ResponseFormat::Text),
            Some("json_object") => Ok(ResponseFormat::JsonObject),
            Some("json_schema") => {
                let schema = match format.object("json_schema")? {
                    Some(wrapper) => wrapper.get("schema").cloned(),
                    None => format.get("schema").cloned(),
                };
                let schema = schema
                    .ok_or_else(|| format.error("json_schema", "must hold a field 'schema'"))?;
                Ok(ResponseFormat::JsonSchema(schema))
            }
            Some(other) => Err(format.error(
                "type",
                format!("must be text, json_object or json_schema, not {other:?}"),
            )),
            None => Err(format.error("type", "is missing")),
        }
    }

    /// The request field that asks for this shape.
    fn field(&self) -> &'static str {
        match self {
            ResponseFormat::Extension(name) => name,
            _ => "response_format",
        }
    }
}

impl ChatRequest {
    /// Refuses what only constrained decoding can promise: a JSON shape, or a call that must happen.
    ///
    /// A request that passes gets what it asked for. A server that constrains decoding need not call
    /// this.
    pub fn refuse_unenforced(&self) -> Result<(), ChatError> {
        if self.response_format != ResponseFormat::Text {
            return Err(ChatError::field(
                self.response_format.field(),
                "output cannot be constrained by this server; leave the field out or ask for text",
            ));
        }
        match &self.tool_choice {
            ToolChoice::Auto | ToolChoice::None => Ok(()),
            ToolChoice::Required | ToolChoice::Named(_) => Err(ChatError::field(
                "tool_choice",
                "a tool call cannot be forced by this server; use auto or none",
            )),
        }
    }
}
