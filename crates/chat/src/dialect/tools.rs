//! Reads declared tools and the choice among them.

use serde_json::{Value, json};

use super::fields::{Fields, must_be};
use crate::error::ChatError;
use crate::request::{MAX_TOOLS, ToolChoice};
use crate::tools::{Tool, with_plain_references};

/// The fields of a request about tools.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct ToolFields {
    pub(crate) tools: Vec<Tool>,
    pub(crate) choice: ToolChoice,
    /// Names of the callable tools, if `allowed_tools` narrows them.
    pub(crate) allowed: Option<Vec<String>>,
    pub(crate) parallel: bool,
}

impl ToolFields {
    pub(crate) fn read(body: &Fields<'_>) -> Result<ToolFields, ChatError> {
        let mut tools = Vec::new();
        for (index, value) in items(body, "tools")?.iter().enumerate() {
            tools.push(tool(value, format!("tools[{index}]"))?);
        }
        if tools.is_empty() {
            for (index, value) in items(body, "functions")?.iter().enumerate() {
                tools.push(function(value, format!("functions[{index}]"), None)?);
            }
        }
        let (choice, allowed) = match (body.get("tool_choice"), body.get("function_call")) {
            (Some(value), _) => choice(body, "tool_choice", value)?,
            (None, Some(value)) => choice(body, "function_call", value)?,
            (None, None) => (ToolChoice::Auto, None),
        };
        ToolFields {
            tools,
            choice,
            allowed,
            parallel: body.flag("parallel_tool_calls", true)?,
        }
        .checked()
    }

    /// Rejects a choice that names an undeclared tool.
    pub(crate) fn checked(self) -> Result<ToolFields, ChatError> {
        let named = match &self.choice {
            ToolChoice::Named(name) => std::slice::from_ref(name),
            _ => &[],
        };
        for name in named.iter().chain(self.allowed.iter().flatten()) {
            if !self.tools.iter().any(|tool| tool.name == *name) {
                return Err(ChatError::field(
                    "tool_choice",
                    format!("names {name:?}, which is not among the tools"),
                ));
            }
        }
        if self.choice == ToolChoice::Required && self.tools.is_empty() {
            return Err(ChatError::field(
                "tool_choice",
                "needs tools, and there are none",
            ));
        }
        Ok(self)
    }
}

/// The entries of an array of tools, at most [`MAX_TOOLS`].
pub(crate) fn items<'a>(body: &Fields<'a>, key: &str) -> Result<&'a [Value], ChatError> {
    let items = body.array(key)?.unwrap_or_default();
    if items.len() > MAX_TOOLS {
        return Err(body.error(
            key,
            format!("must hold at most {MAX_TOOLS} tools, not {}", items.len()),
        ));
    }
    Ok(items)
}

fn tool(value: &Value, path: String) -> Result<Tool, ChatError> {
    let fields = Fields::of(value, path)?;
    match fields.string("type")? {
        None | Some("function") => {}
        Some(other) => {
            return Err(fields.error("type", format!("unsupported tool type '{other}'")));
        }
    }
    match fields.get("function") {
        Some(inner) => function(inner, fields.path("function"), Some(value)),
        None => function(value, fields.own_path().to_owned(), None),
    }
}

/// A function declaration; `whole` is the enclosing tool object, if the client sent one.
fn function(value: &Value, path: String, whole: Option<&Value>) -> Result<Tool, ChatError> {
    let fields = Fields::of(value, path)?;
    let name = fields
        .string("name")?
        .ok_or_else(|| fields.error("name", "is missing"))?;
    if name.is_empty() {
        return Err(fields.error("name", "must not be empty"));
    }
    fields.string("description")?;
    let parameters = match fields.get("parameters") {
        None => None,
        Some(schema @ Value::Object(_)) => Some(with_plain_references(schema)),
        Some(other) => return Err(fields.error("parameters", must_be("an object", other))),
    };
    let declaration = match whole {
        Some(Value::Object(map)) if map.contains_key("type") => Value::Object(map.clone()),
        _ => {
            let mut inner = fields.map().clone();
            inner.shift_remove("type");
            json!({ "type": "function", "function": inner })
        }
    };
    Ok(Tool {
        name: name.to_owned(),
        parameters,
        declaration,
    })
}

/// A tool choice and the names it is narrowed to.
pub(crate) type Choice = (ToolChoice, Option<Vec<String>>);

/// Reads a tool choice in any spelling of OpenAI's two protocols.
pub(crate) fn choice(body: &Fields<'_>, key: &str, value: &Value) -> Result<Choice, ChatError> {
    if let Value::String(word) = value {
        let choice = match word.as_str() {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" | "any" => ToolChoice::Required,
            other => {
                return Err(body.error(
                    key,
                    format!("must be auto, none, required or an object, not {other:?}"),
                ));
            }
        };
        return Ok((choice, None));
    }
    let fields = Fields::of(value, body.path(key))?;
    match fields.string("type")? {
        Some("auto") => return Ok((ToolChoice::Auto, None)),
        Some("none") => return Ok((ToolChoice::None, None)),
        Some("required" | "any") => return Ok((ToolChoice::Required, None)),
        Some("allowed_tools") => return allowed_tools(&fields),
        None | Some("function" | "tool") => {}
        Some(other) => return Err(fields.error("type", format!("{other:?} is not supported"))),
    }
    let holder = fields.object("function")?;
    let holder = holder.as_ref().unwrap_or(&fields);
    let name = holder
        .string("name")?
        .ok_or_else(|| holder.error("name", "is missing"))?;
    Ok((ToolChoice::Named(name.to_owned()), None))
}

fn allowed_tools(fields: &Fields<'_>) -> Result<Choice, ChatError> {
    let inner = fields.object("allowed_tools")?;
    let holder = inner.as_ref().unwrap_or(fields);
    let choice = match holder.string("mode")? {
        None | Some("auto") => ToolChoice::Auto,
        Some("required") => ToolChoice::Required,
        Some(other) => {
            return Err(holder.error("mode", format!("must be auto or required, not {other:?}")));
        }
    };
    let listed = holder
        .array("tools")?
        .ok_or_else(|| holder.error("tools", "is missing"))?;
    let mut names = Vec::with_capacity(listed.len());
    for (index, value) in listed.iter().enumerate() {
        let entry = Fields::of(value, format!("{}[{index}]", holder.path("tools")))?;
        let nested = entry.object("function")?;
        let entry = nested.as_ref().unwrap_or(&entry);
        let name = entry
            .string("name")?
            .ok_or_else(|| entry.error("name", "is missing"))?;
        names.push(name.to_owned());
    }
    Ok((choice, Some(names)))
}
