//! Grammars that constrain a reply: a JSON schema, a regular expression, or tool calls.
//!
//! An [`OutputGrammar`] is in Lark's notation, with JSON schemas inline and special tokens by id.
//! `decode` compiles it; this module builds it and names every unsupported part.

mod argument_values;
mod arguments;
pub(crate) mod gbnf;
mod json_schema;
mod schema_source;
mod search_pattern;
mod string_language;
mod tool_calls;
mod writer;

use serde_json::Value;

use crate::error::ChatError;
use crate::request::{ChatRequest, ResponseFormat, SchemaStrictness, ToolChoice};
use crate::template::ToolCallFormat;
use crate::tokenizer::Tokenizer;

/// A grammar and the request field that asks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputGrammar {
    /// In Lark's notation; the rule `start` is the reply.
    pub lark: String,
    /// A looser grammar to use if `lark` does not compile and the request is not strict.
    pub fallback: Option<String>,
    /// The request field that asks for it.
    pub field: String,
    /// What of the request the grammar does not keep, since it is not strict.
    pub notes: Vec<String>,
}

/// How the model writes tool calls.
#[derive(Debug, Clone, Copy)]
pub struct ToolCallMarkup<'a> {
    /// Knows which tags are single tokens, and the tags themselves.
    pub tokenizer: &'a Tokenizer,
    /// The format between the tags.
    pub format: ToolCallFormat,
}

impl ChatRequest {
    /// The grammar of the reply, if it is constrained.
    ///
    /// Fails with the field that cannot be satisfied.
    pub fn output_grammar(
        &self,
        markup: ToolCallMarkup<'_>,
    ) -> Result<Option<OutputGrammar>, ChatError> {
        let tools = self.callable_tools();
        let forced = match &self.tool_choice {
            ToolChoice::Required => Some(None),
            ToolChoice::Named(name) => Some(Some(name.as_str())),
            ToolChoice::Auto | ToolChoice::None => None,
        };
        if let Some(only) = forced {
            let several = only.is_none() && self.parallel_tool_calls;
            return tool_calls::tool_calls(markup, &tools, only, several).map(Some);
        }
        let strict = tools.iter().any(|tool| tool.is_strict());
        match &self.response_format {
            ResponseFormat::Text if strict => {
                tool_calls::text_with_tool_calls(markup, &tools).map(Some)
            }
            ResponseFormat::Text => Ok(None),
            format => {
                let shape = format.output_grammar()?;
                if tools.is_empty() || !format.is_json() {
                    return Ok(shape);
                }
                let calls = tool_calls::tool_calls(markup, &tools, None, self.parallel_tool_calls)?;
                Ok(shape.map(|shape| union(shape, &calls)))
            }
        }
    }
}

impl ResponseFormat {
    /// Whether the form is JSON.
    fn is_json(&self) -> bool {
        matches!(
            self,
            ResponseFormat::JsonObject | ResponseFormat::JsonSchema { .. }
        )
    }

    /// The grammar of this form; `None` for free text.
    pub fn output_grammar(&self) -> Result<Option<OutputGrammar>, ChatError> {
        let plain = |lark: String, field: &str| OutputGrammar {
            lark,
            fallback: None,
            field: field.to_owned(),
            notes: Vec::new(),
        };
        Ok(Some(match self {
            ResponseFormat::Text => return Ok(None),
            ResponseFormat::JsonObject => {
                let object = serde_json::json!({"type": "object"});
                let schema = json_schema::prepare_schema(
                    &object,
                    SchemaStrictness::Strict,
                    "response_format",
                )?;
                plain(format!("start: %json {schema}\n"), "response_format")
            }
            ResponseFormat::JsonSchema {
                schema,
                strictness,
                field,
            } => {
                let mut notes = Vec::new();
                let mut write = |schema: &Value| {
                    let (schema, left_out) =
                        json_schema::prepare_with_notes(schema, None, *strictness, field)?;
                    notes.extend(left_out);
                    Ok(format!("start: %json {schema}\n"))
                };
                let lark = write(schema)?;
                let wider = match strictness {
                    SchemaStrictness::Strict => None,
                    SchemaStrictness::BestEffort => {
                        Some(write(&json_schema::without_bounds(schema))?)
                    }
                };
                notes.sort();
                notes.dedup();
                OutputGrammar {
                    fallback: wider.filter(|wider| *wider != lark),
                    notes,
                    ..plain(lark, field)
                }
            }
            ResponseFormat::Regex { pattern, field } => {
                plain(format!("start: /{}/\n", pattern_literal(pattern)), field)
            }
            ResponseFormat::Choice { texts, field } => {
                let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
                plain(format!("start: {}\n", texts.join(" | ")), field)
            }
            ResponseFormat::Grammar { lark, field } => plain(lark.clone(), field),
        }))
    }
}

/// The union of both grammars; they differ in their first token.
fn union(shape: OutputGrammar, calls: &OutputGrammar) -> OutputGrammar {
    let join = |one: &str, other: &str| {
        let one = one.replacen("start:", "text_reply:", 1);
        let other = other.replacen("start:", "call_reply:", 1);
        format!("start: text_reply | call_reply\n{one}{other}")
    };
    let has_fallback = shape.fallback.is_some() || calls.fallback.is_some();
    let wider = |grammar: &OutputGrammar| {
        let fallback = grammar.fallback.as_ref();
        fallback.unwrap_or(&grammar.lark).clone()
    };
    OutputGrammar {
        fallback: has_fallback.then(|| join(&wider(&shape), &wider(calls))),
        lark: join(&shape.lark, &calls.lark),
        notes: [shape.notes.as_slice(), &calls.notes].concat(),
        field: shape.field,
    }
}

/// A text as a Lark literal.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// A regular expression between slashes: without anchors, which a whole match does not need, and
/// with slashes and line breaks escaped.
fn pattern_literal(pattern: &str) -> String {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    let dollar = pattern.strip_suffix('$').filter(|rest| {
        let slashes = rest.bytes().rev().take_while(|byte| *byte == b'\\').count();
        slashes % 2 == 0
    });
    let mut out = String::with_capacity(pattern.len());
    let mut letters = dollar.unwrap_or(pattern).chars();
    while let Some(letter) = letters.next() {
        match letter {
            '/' => out.push_str("\\/"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\\' => match letters.next() {
                Some('\n') => out.push_str("\\n"),
                Some(escaped) => out.extend(['\\', escaped]),
                None => out.push_str("\\\\"),
            },
            other => out.push(other),
        }
    }
    if out.is_empty() {
        // An empty expression is not allowed between slashes.
        "()".to_owned()
    } else {
        out
    }
}

#[cfg(test)]
mod tests;
