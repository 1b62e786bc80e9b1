//! Maps tools of every kind to functions and back.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::dialect::fields::{Fields, must_be};
use crate::dialect::{ToolFields, tool_choice, tool_items};
use crate::error::ChatError;
use crate::request::ToolChoice;
use crate::tools::Tool;

/// The client's name of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientToolName {
    /// A function.
    Function {
        /// Its name within the namespace.
        name: String,
        /// Its namespace.
        namespace: Option<String>,
    },
    /// A tool with free text instead of arguments.
    Custom {
        /// Its name.
        name: String,
    },
}

/// The client's names of tools, by the model's names. Functions without a namespace have no entry.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ToolNames {
    by_qualified_name: HashMap<String, ClientToolName>,
}

impl ToolNames {
    /// The client's name of the tool that the model calls `name`.
    pub fn client_name(&self, name: &str) -> ClientToolName {
        let known = self.by_qualified_name.get(name).cloned();
        known.unwrap_or_else(|| ClientToolName::Function {
            name: name.to_owned(),
            namespace: None,
        })
    }
}

/// The model's name of a tool in a namespace.
pub(super) fn qualified_name(namespace: &str, name: &str) -> String {
    if namespace.ends_with("__") {
        format!("{namespace}{name}")
    } else {
        format!("{namespace}__{name}")
    }
}

/// Reads the declared tools and the choice among them. Tools that OpenAI's servers run are left
/// out.
pub(super) fn read(body: &Fields<'_>) -> Result<(ToolFields, ToolNames), ChatError> {
    let mut found = ToolCollector::default();
    for (index, value) in tool_items(body, "tools")?.iter().enumerate() {
        found.tool(&Fields::of(value, format!("tools[{index}]"))?, None)?;
    }
    let (choice, allowed) = match body.get("tool_choice") {
        None => (ToolChoice::Auto, None),
        Some(value) => match value.get("type").and_then(Value::as_str) {
            Some("custom") => {
                let fields = Fields::of(value, "tool_choice".to_owned())?;
                (ToolChoice::Named(needed(&fields, "name")?.to_owned()), None)
            }
            _ => tool_choice(body, "tool_choice", value)?,
        },
    };
    let fields = ToolFields {
        tools: found.tools,
        choice,
        allowed,
        parallel: body.flag("parallel_tool_calls", true)?,
    };
    Ok((fields.checked()?, found.names))
}

#[derive(Default)]
struct ToolCollector {
    tools: Vec<Tool>,
    names: ToolNames,
}

impl ToolCollector {
    fn tool(&mut self, fields: &Fields<'_>, namespace: Option<&str>) -> Result<(), ChatError> {
        match fields.string("type")?.unwrap_or("function") {
            "function" => self.function(fields, namespace),
            "custom" => self.custom(fields, namespace),
            "namespace" if namespace.is_none() => {
                let space = needed(fields, "name")?;
                for (index, value) in tool_items(fields, "tools")?.iter().enumerate() {
                    let path = format!("{}[{index}]", fields.path("tools"));
                    self.tool(&Fields::of(value, path)?, Some(space))?;
                }
                Ok(())
            }
            other => {
                tracing::debug!(kind = other, at = fields.own_path(), "tool left out");
                Ok(())
            }
        }
    }

    fn function(&mut self, fields: &Fields<'_>, space: Option<&str>) -> Result<(), ChatError> {
        let nested = fields.object("function")?;
        let fields = nested.as_ref().unwrap_or(fields);
        let name = needed(fields, "name")?;
        let parameters = match fields.get("parameters") {
            None | Some(Value::Object(_)) => fields.get("parameters"),
            Some(other) => return Err(fields.error("parameters", must_be("an object", other))),
        };
        let description = fields.string("description")?;
        let flat = match space {
            None => name.to_owned(),
            Some(space) => {
                let flat = qualified_name(space, name);
                let client_name = ClientToolName::Function {
                    name: name.to_owned(),
                    namespace: Some(space.to_owned()),
                };
                self.names
                    .by_qualified_name
                    .insert(flat.clone(), client_name);
                flat
            }
        };
        let strict = fields.flag("strict", false)?;
        self.tools
            .push(Tool::declare(&flat, description, parameters, strict));
        Ok(())
    }

    /// A tool of free text, declared as a function with one text parameter.
    fn custom(&mut self, fields: &Fields<'_>, space: Option<&str>) -> Result<(), ChatError> {
        let name = needed(fields, "name")?;
        let mut description = fields.string("description")?.unwrap_or_default().to_owned();
        if let Some(format) = fields.object("format")?
            && let Some(grammar) = format.string("definition")?
        {
            let syntax = format.string("syntax")?.unwrap_or("grammar");
            description.push_str(&format!(
                "\n\nThe input must follow this {syntax} grammar:\n{grammar}"
            ));
        }
        let parameters = json!({
            "type": "object",
            "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
            "required": ["input"],
        });
        let flat = space.map_or_else(|| name.to_owned(), |space| qualified_name(space, name));
        let client_name = ClientToolName::Custom {
            name: name.to_owned(),
        };
        self.names
            .by_qualified_name
            .insert(flat.clone(), client_name);
        let description = description.trim();
        let parameters = Some(&parameters);
        self.tools
            .push(Tool::declare(&flat, Some(description), parameters, false));
        Ok(())
    }
}

fn needed<'a>(fields: &Fields<'a>, key: &str) -> Result<&'a str, ChatError> {
    fields
        .string(key)?
        .filter(|text| !text.is_empty())
        .ok_or_else(|| fields.error(key, "is missing"))
}
