//! Tool declarations, and the parser of tool calls in the model's output.

mod call;
mod event;
mod json_call;
mod json_repair;
mod literals;
mod prefix;
mod references;
mod schema;
mod xml_call;
mod xml_value;

use std::collections::HashMap;

use serde_json::{Map, Value, json};

pub(crate) use self::call::{CallParser, CallScope, CallStart};
pub use self::event::ReplyEnd;
pub(crate) use self::event::{CallEvent, CallStatus};
pub(crate) use self::references::{percent_decoded, resolve_pointer, with_plain_references};
pub(crate) use self::schema::{JsonType, ParameterSchemas, ParameterType};

/// A declared tool.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// JSON schema of its arguments, if declared.
    pub parameters: Option<Value>,
    /// The declaration for templates, in the client's key order.
    pub declaration: Value,
}

impl Tool {
    /// A tool, declared in the form that templates read.
    pub(crate) fn declare(
        name: &str,
        description: Option<&str>,
        parameters: Option<&Value>,
        strict: bool,
    ) -> Tool {
        let mut function = Map::new();
        function.insert("name".to_owned(), name.into());
        if let Some(description) = description {
            function.insert("description".to_owned(), description.into());
        }
        if let Some(parameters) = parameters {
            function.insert("parameters".to_owned(), parameters.clone());
        }
        if strict {
            function.insert("strict".to_owned(), true.into());
        }
        Tool {
            name: name.to_owned(),
            parameters: parameters.map(with_plain_references),
            declaration: json!({ "type": "function", "function": function }),
        }
    }

    /// Whether its calls must match its schema exactly.
    pub fn is_strict(&self) -> bool {
        let function = self
            .declaration
            .get("function")
            .unwrap_or(&self.declaration);
        function.get("strict") == Some(&Value::Bool(true))
    }
}

/// The callable tools of a reply.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ToolSet {
    tools: Vec<Tool>,
    /// Index into `tools`, by the exact name; the first of two equal names.
    by_name: HashMap<String, usize>,
    /// Index into `tools`, by the folded name; none where two names fold to the same.
    by_folded_name: HashMap<String, Option<usize>>,
}

impl ToolSet {
    /// The set of these tools.
    pub fn new(tools: impl IntoIterator<Item = Tool>) -> ToolSet {
        let mut set = ToolSet::default();
        for tool in tools {
            if set.by_name.contains_key(&tool.name) {
                continue;
            }
            let index = set.tools.len();
            set.by_name.insert(tool.name.clone(), index);
            set.by_folded_name
                .entry(fold(&tool.name))
                .and_modify(|other| *other = None)
                .or_insert(Some(index));
            set.tools.push(tool);
        }
        set
    }

    /// Whether there are no tools.
    pub fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }

    /// The tool named `name`, or the only one whose name differs just in case, dashes and
    /// underscores.
    pub fn find(&self, name: &str) -> Option<&Tool> {
        let index = match self.by_name.get(name) {
            Some(index) => *index,
            None => (*self.by_folded_name.get(&fold(name))?)?,
        };
        self.tools.get(index)
    }

    /// The tools, as declared.
    pub fn iter(&self) -> impl Iterator<Item = &Tool> {
        self.tools.iter()
    }
}

/// Whether a tool could have this name, declared or not.
fn may_name_a_tool(name: &str) -> bool {
    let is_part = |letter: char| letter.is_alphanumeric() || "_-.:/".contains(letter);
    name.starts_with(|letter: char| letter.is_alphanumeric() || letter == '_')
        && name.chars().all(is_part)
}

fn fold(name: &str) -> String {
    name.chars()
        .map(|letter| if letter == '-' { '_' } else { letter })
        .flat_map(char::to_lowercase)
        .collect()
}
