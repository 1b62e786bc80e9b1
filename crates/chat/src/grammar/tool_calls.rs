//! Grammars of tool calls in the model's own tags, with arguments typed by the tools' schemas.

use std::fmt::Write;

use contract::ToolCallTags;
use serde_json::{Map, Value, json};

use super::json_schema::{prepare_schema, prepare_subschema};
use super::{OutputGrammar, ToolCallMarkup, literal, pattern_literal};
use crate::error::ChatError;
use crate::request::SchemaStrictness;
use crate::template::ToolCallFormat;
use crate::tools::{Tool, ToolSet, resolve_pointer};

/// The request field named in errors.
const FIELD: &str = "tools";

/// A reply of tool calls only: of the tool `only` or of any tool; several calls if `several`.
pub(super) fn tool_calls(
    markup: ToolCallMarkup<'_>,
    tools: &ToolSet,
    only: Option<&str>,
    several: bool,
) -> Result<OutputGrammar, ChatError> {
    let listed = || {
        tools
            .iter()
            .filter(|tool| only.is_none_or(|name| tool.name == name))
    };
    let write = |typing: Typing| {
        let more = if several { " (\"\\n\" call)*" } else { "" };
        let mut rules = GrammarWriter::new(markup, format!("start: call{more}\n"), typing);
        rules.call(listed())?;
        Ok(rules.text)
    };
    with_fallback(write, listed().any(Tool::is_strict))
}

/// Text with typed tool calls anywhere in it.
pub(super) fn text_with_tool_calls(
    markup: ToolCallMarkup<'_>,
    tools: &ToolSet,
) -> Result<OutputGrammar, ChatError> {
    let write = |typing: Typing| {
        let start = "start: TEXT? (call TEXT?)*\nTEXT: /(?s:.+)/\n";
        let mut rules = GrammarWriter::new(markup, start.to_owned(), typing);
        rules.call(tools.iter())?;
        Ok(rules.text)
    };
    with_fallback(write, true)
}

/// The grammar by schema, with a loose fallback unless `strict`.
fn with_fallback(
    write: impl Fn(Typing) -> Result<String, ChatError>,
    strict: bool,
) -> Result<OutputGrammar, ChatError> {
    let lark = match (write(Typing::BySchema), strict) {
        (Err(_), false) => return grammar_from(write(Typing::Loose)?, None),
        (lark, _) => lark?,
    };
    let fallback = if strict {
        None
    } else {
        Some(write(Typing::Loose)?)
    };
    grammar_from(lark, fallback)
}

fn grammar_from(lark: String, fallback: Option<String>) -> Result<OutputGrammar, ChatError> {
    Ok(OutputGrammar {
        lark,
        fallback,
        field: FIELD.to_owned(),
    })
}

/// Matches any text.
const ANY_TEXT: &str = "(?s:.*)";

/// How values are typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Typing {
    BySchema,
    /// Any JSON for values that are not text.
    Loose,
}

/// A grammar under construction.
struct GrammarWriter<'a> {
    markup: ToolCallMarkup<'a>,
    text: String,
    typing: Typing,
    n_values: usize,
    /// Whether the rules of unconstrained text exist.
    has_any_text: bool,
}

impl<'a> GrammarWriter<'a> {
    fn new(markup: ToolCallMarkup<'a>, start: String, typing: Typing) -> GrammarWriter<'a> {
        GrammarWriter {
            markup,
            text: start,
            typing,
            n_values: 0,
            has_any_text: false,
        }
    }

    fn tags(&self) -> &'a ToolCallTags {
        &self.markup.tokenizer.markup().tool_calls
    }

    /// Ends a parameter's value, line breaks included.
    fn parameter_close(&self) -> String {
        format!("\n{}\n", self.tags().parameter_close)
    }

    fn rule(&mut self, name: &str, body: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{name}: {body}");
    }

    /// The rule `call`, of any of `tools`.
    fn call<'t>(&mut self, tools: impl Iterator<Item = &'t Tool>) -> Result<(), ChatError> {
        let tokenizer = self.markup.tokenizer;
        let tags = self.tags();
        let mark = |text: &str| match tokenizer.id_of(text) {
            Some(id) => format!("<[{}]>", id.0),
            None => literal(text),
        };
        let mut names = Vec::new();
        for (i, tool) in tools.enumerate() {
            let name = format!("tool_{i}");
            let body = match self.markup.format {
                ToolCallFormat::JsonInTags => self.json_call(tool)?,
                ToolCallFormat::XmlParameters => self.xml_call(i, tool)?,
            };
            self.rule(&name, &body);
            names.push(name);
        }
        let (open, close) = (mark(&tags.open), mark(&tags.close));
        let body = format!("{open} \"\\n\" ({}) \"\\n\" {close}", names.join(" | "));
        self.rule("call", &body);
        Ok(())
    }

    fn json_call(&mut self, tool: &Tool) -> Result<String, ChatError> {
        let schema = match (&tool.parameters, self.typing) {
            (Some(parameters), Typing::BySchema) => {
                let mut schema = parameters.clone();
                if let Value::Object(map) = &mut schema {
                    map.insert("type".to_owned(), "object".into());
                }
                prepare_schema(&schema, strictness_of(tool), FIELD)?
            }
            _ => prepare_schema(
                &json!({"type": "object"}),
                SchemaStrictness::BestEffort,
                FIELD,
            )?,
        };
        let head = format!("{{\"name\": {}, \"arguments\": ", Value::from(&*tool.name));
        Ok(format!("{} %json {schema} \"}}\"", literal(&head)))
    }

    fn xml_call(&mut self, index: usize, tool: &Tool) -> Result<String, ChatError> {
        let tags = self.tags();
        let none = json!({});
        let root = tool.parameters.as_ref().filter(|root| root.is_object());
        let root = root.unwrap_or(&none);
        let properties = root.get("properties").and_then(Value::as_object);
        let required: Vec<&str> = match root.get("required").and_then(Value::as_array) {
            Some(names) => names.iter().filter_map(Value::as_str).collect(),
            None => Vec::new(),
        };
        let mut body = literal(&format!("{}{}>\n", tags.function_open, tool.name));
        for (i, (key, schema)) in properties.into_iter().flatten().enumerate() {
            let name = format!("value_{index}_{i}");
            let value = self.value(&name, schema, root, strictness_of(tool))?;
            self.rule(
                &name,
                &format!(
                    "{} {value}",
                    literal(&format!("{}{key}>\n", tags.parameter_open))
                ),
            );
            let mark = if required.contains(&key.as_str()) {
                ""
            } else {
                "?"
            };
            let _ = write!(body, " {name}{mark}");
        }
        let takes_any = properties.is_none_or(Map::is_empty)
            && match root.get("additionalProperties") {
                None => *root != none && properties.is_none(),
                Some(more) => *more != Value::Bool(false),
            };
        if takes_any {
            let name = format!("any_{index}");
            let value = self.text_value(&format!("{name}_text"), ANY_TEXT);
            let key = "/[A-Za-z_][A-Za-z0-9_.\\-]{0,63}/";
            self.rule(
                &name,
                &format!("{} {key} \">\\n\" {value}", literal(&tags.parameter_open)),
            );
            let _ = write!(body, " {name}*");
        }
        let _ = write!(body, " {}", literal(&tags.function_close));
        Ok(body)
    }

    /// A parameter's value and closing tag.
    fn value(
        &mut self,
        name: &str,
        schema: &Value,
        root: &Value,
        rules: SchemaStrictness,
    ) -> Result<String, ChatError> {
        let schema = resolve_ref(schema, root);
        let end = literal(&self.parameter_close());
        if let Some(texts) = enum_strings(schema) {
            let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
            return Ok(format!("({}) {end}", texts.join(" | ")));
        }
        if may_be_string(schema, root, 0) {
            let body = match self.typing {
                Typing::BySchema => text_pattern(schema),
                Typing::Loose => ANY_TEXT.to_owned(),
            };
            return Ok(self.text_value(&format!("{name}_text"), &body));
        }
        let schema = match self.typing {
            Typing::BySchema => prepare_subschema(schema, root, rules, FIELD)?,
            Typing::Loose => prepare_schema(&json!({}), rules, FIELD)?,
        };
        Ok(format!("%json {schema} {end}"))
    }

    /// Text up to the first closing tag.
    fn text_value(&mut self, name: &str, pattern: &str) -> String {
        if pattern == ANY_TEXT {
            return self.any_text();
        }
        self.n_values += 1;
        let terminal = format!("TEXT_{}", self.n_values);
        self.rule(&terminal, &format!("/{pattern}/"));
        let head = format!("{name}[suffix={}]", literal(&self.parameter_close()));
        self.rule(&head, &terminal);
        name.to_owned()
    }

    /// Any text up to the closing tag, line by line: the closing tag is not a line.
    ///
    /// A text with a suffix is the same language, but its mask tests every vocabulary entry at each
    /// token. A line admits all entries without a line break at once.
    fn any_text(&mut self) -> String {
        const NAME: &str = "any_text";
        if !self.has_any_text {
            self.has_any_text = true;
            let tag = pattern_literal(self.parameter_close().trim_end());
            self.rule("FIRST_LINE", r"/[^\n]+/");
            self.rule("NEXT_LINE", &format!(r"/\n[^\n]*/ & ~/{tag}/"));
            let end = literal(&self.parameter_close());
            self.rule(NAME, &format!("FIRST_LINE? NEXT_LINE* {end}"));
        }
        NAME.to_owned()
    }
}

fn strictness_of(tool: &Tool) -> SchemaStrictness {
    if tool.is_strict() {
        SchemaStrictness::Strict
    } else {
        SchemaStrictness::BestEffort
    }
}

/// Follows references, up to 8 of them.
fn resolve_ref<'a>(mut schema: &'a Value, root: &'a Value) -> &'a Value {
    for _ in 0..8 {
        let reference = schema.get("$ref").and_then(Value::as_str);
        match reference.and_then(|reference| resolve_pointer(root, reference)) {
            Some(led_to) => schema = led_to,
            None => break,
        }
    }
    schema
}

/// The allowed strings, if a value is an enumeration of strings.
fn enum_strings(schema: &Value) -> Option<Vec<&str>> {
    let values = match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => std::slice::from_ref(value),
        (None, Some(Value::Array(values))) => values,
        _ => return None,
    };
    let texts: Option<Vec<&str>> = values.iter().map(Value::as_str).collect();
    texts.filter(|texts| !texts.is_empty())
}

/// Whether a value may be a string, so that any text is valid.
fn may_be_string(schema: &Value, root: &Value, depth: usize) -> bool {
    let schema = resolve_ref(schema, root);
    let is_text = |name: &Value| name == "string";
    match schema.get("type") {
        Some(name @ Value::String(_)) => return is_text(name),
        Some(Value::Array(names)) => return names.iter().any(is_text),
        _ => {}
    }
    if let Some(value) = schema.get("const") {
        return value.is_string();
    }
    if let Some(Value::Array(values)) = schema.get("enum") {
        return values.iter().any(Value::is_string);
    }
    let alternatives = ["anyOf", "oneOf", "allOf"]
        .iter()
        .find_map(|key| schema.get(*key));
    match alternatives.and_then(Value::as_array) {
        Some(alternatives) if depth < 8 => alternatives
            .iter()
            .any(|schema| may_be_string(schema, root, depth + 1)),
        Some(_) => true,
        None => schema.get("properties").is_none() && schema.get("items").is_none(),
    }
}

/// The pattern of a string value. Bounds apply only if the type is `string` alone.
fn text_pattern(schema: &Value) -> String {
    if schema.get("type") != Some(&Value::from("string")) {
        return ANY_TEXT.to_owned();
    }
    if let Some(pattern) = schema.get("pattern").and_then(Value::as_str) {
        let (open, close) = (
            if pattern.starts_with('^') {
                ""
            } else {
                ANY_TEXT
            },
            if pattern.ends_with('$') { "" } else { ANY_TEXT },
        );
        return format!("{open}({}){close}", pattern_literal(pattern));
    }
    let bound = |key: &str| schema.get(key).and_then(Value::as_u64);
    // A bound costs as many automaton states as it counts.
    let bound = |key: &str| bound(key).filter(|n| *n <= 512);
    match (bound("minLength"), bound("maxLength")) {
        (None | Some(0), None) => ANY_TEXT.to_owned(),
        (least, Some(most)) => format!("(?s:.{{{},{most}}})", least.unwrap_or(0).min(most)),
        (Some(least), None) => format!("(?s:.{{{least},}})"),
    }
}
