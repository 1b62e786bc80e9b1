//! The values of tool-call arguments, each between its tags.
//!
//! A string stands as it is; any other value stands as JSON. A text that the parser would read as
//! another value, or in which it would see the end of the value, is therefore no string.

use serde_json::{Value, json};

use super::json_schema::prepare_with_notes;
use super::schema_source::SchemaSource;
use super::search_pattern::ANY_TEXT;
use super::string_language::StringLanguage;
use super::writer::{GrammarWriter, Typing};
use super::{literal, pattern_literal};
use crate::error::ChatError;
use crate::request::SchemaStrictness;
use crate::tools::{JsonType, ParameterType};

/// Keywords that bound or list numbers.
const NUMERIC_BOUNDS: [&str; 8] = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "const",
    "enum",
    "not",
];
/// Any integer, and any number that a double holds.
const INTEGER: &str = "/-?(0|[1-9][0-9]*)/";
const NUMBER: &str = "/-?(0|[1-9][0-9]{0,17})([.][0-9]+)?([eE][+-]?[0-9]{1,2})?/";

/// A value and what the parser makes of its text.
pub(super) struct ArgumentValue<'a> {
    /// The value's schema.
    pub(super) schema: &'a Value,
    /// The document that it is part of.
    pub(super) source: SchemaSource<'a>,
    /// How the parser reads it.
    pub(super) read_as: ParameterType,
}

impl GrammarWriter<'_> {
    /// The body of the rule `name`: a value and its closing tag; `None` if no value can be written.
    pub(super) fn argument_value(
        &mut self,
        name: &str,
        value: &ArgumentValue<'_>,
    ) -> Result<Option<String>, ChatError> {
        let ArgumentValue {
            schema,
            source,
            read_as,
        } = value;
        let schema = source.resolved(schema);
        let is_strict = source.strictness == SchemaStrictness::Strict;
        let end = literal(&self.parameter_close());
        let kinds = read_as.kinds();
        let may_be_text = kinds.is_none_or(|kinds| kinds.contains(&JsonType::Text));
        if self.typing == Typing::Loose {
            return Ok(Some(if may_be_text {
                self.any_text(false)
            } else {
                format!("%json {} {end}", self.json(&json!({}), source)?)
            }));
        }
        let Some(kinds) = kinds else {
            // Valid JSON is read as such, and other text as a string.
            return Ok(Some(if is_strict && !is_unconstrained(schema) {
                format!("%json {} {end}", self.json(schema, source)?)
            } else {
                self.any_text(is_strict)
            }));
        };
        if !may_be_text {
            let body = if kinds == [JsonType::Null] {
                literal("null")
            } else if schema.get("type").is_some() {
                format!("%json {}", self.json(schema, source)?)
            } else {
                let schema = typed(schema, kinds);
                format!("%json {}", self.json(&schema, source)?)
            };
            return Ok(Some(format!("{body} {end}")));
        }
        // The parser tries the types in order, and every text is a string.
        let others: Vec<JsonType> = kinds
            .iter()
            .enumerate()
            .filter(|(i, kind)| **kind == JsonType::Null || !kinds[..*i].contains(&JsonType::Text))
            .map(|(_, kind)| *kind)
            .filter(|kind| *kind != JsonType::Text)
            .collect();
        match StringLanguage::of(schema, source)? {
            StringLanguage::Listed(texts) => {
                let keeps = |text: &&String| {
                    read_as.reads_as_text(text) && !(is_strict && self.breaks_markup(text))
                };
                let mut parts: Vec<String> = texts
                    .iter()
                    .filter(keeps)
                    .map(|text| literal(text))
                    .collect();
                self.add_json(&mut parts, schema, source, &others)?;
                Ok((!parts.is_empty()).then(|| format!("({}) {end}", parts.join(" | "))))
            }
            _ if !is_strict && kinds != [JsonType::Text] => Ok(Some(self.any_text(false))),
            StringLanguage::Any if kinds == [JsonType::Text] => Ok(Some(self.any_text(is_strict))),
            texts => {
                let text = self.text_and_scalars(name, schema, &texts, &others, is_strict);
                let structured: Vec<JsonType> = others
                    .into_iter()
                    .filter(|kind| !is_free_scalar(*kind, schema))
                    .collect();
                let mut parts = Vec::new();
                self.add_json(&mut parts, schema, source, &structured)?;
                Ok(Some(if parts.is_empty() {
                    text
                } else {
                    format!("({text} | ({}) {end})", parts.join(" | "))
                }))
            }
        }
    }

    /// A rule for the texts, and for values of other types that are a matter of spelling, up to the
    /// first closing tag.
    fn text_and_scalars(
        &mut self,
        name: &str,
        schema: &Value,
        texts: &StringLanguage,
        others: &[JsonType],
        is_strict: bool,
    ) -> String {
        let mut excluded: Vec<String> = others
            .iter()
            .map(|kind| claimed_by(*kind, is_free_scalar(*kind, schema)))
            .collect();
        if is_strict {
            excluded.push(self.broken_text());
        }
        let mut body = texts.expression();
        if !excluded.is_empty() {
            body = format!("({body})");
        }
        for pattern in excluded {
            body.push_str(&format!(" & ~/{pattern}/"));
        }
        for kind in others.iter().filter(|kind| is_free_scalar(**kind, schema)) {
            let spelled = match kind {
                JsonType::Integer => INTEGER,
                JsonType::Number => NUMBER,
                JsonType::Boolean => "\"true\" | \"false\"",
                _ => "\"null\"",
            };
            body = format!("({body}) | {spelled}");
        }
        self.n_values += 1;
        let terminal = format!("TEXT_{}", self.n_values);
        self.rule(&terminal, &body);
        let rule = format!("{name}_text");
        let head = format!("{rule}[suffix={}]", literal(&self.parameter_close()));
        self.rule(&head, &terminal);
        rule
    }

    /// Adds the values of these types, as JSON.
    fn add_json(
        &self,
        parts: &mut Vec<String>,
        schema: &Value,
        source: &SchemaSource<'_>,
        kinds: &[JsonType],
    ) -> Result<(), ChatError> {
        if kinds.contains(&JsonType::Null) {
            parts.push(literal("null"));
        }
        let rest: Vec<JsonType> = kinds
            .iter()
            .copied()
            .filter(|kind| *kind != JsonType::Null)
            .collect();
        if !rest.is_empty() {
            let schema = typed(schema, &rest);
            parts.push(format!("%json {}", self.json(&schema, source)?));
        }
        Ok(())
    }

    fn json(&self, schema: &Value, source: &SchemaSource<'_>) -> Result<Value, ChatError> {
        let SchemaSource {
            root,
            strictness,
            field,
        } = *source;
        // The notes of the whole schema are taken once.
        prepare_with_notes(schema, Some(root), strictness, field).map(|(schema, _)| schema)
    }

    /// Any text up to the closing tag, line by line: the closing tag is not a line.
    ///
    /// A text with a suffix is the same language, but its mask tests every vocabulary entry at each
    /// token. A line admits all entries without a line break at once. With `keeps_markup`, no line
    /// holds what the parser may read as the end of the value.
    fn any_text(&mut self, keeps_markup: bool) -> String {
        let end = literal(&self.parameter_close());
        if keeps_markup {
            if !self.has_marked_text {
                self.has_marked_text = true;
                let broken = self.broken_line();
                self.rule("FIRST_WHOLE_LINE", &format!(r"/[^\n]+/ & ~/{broken}/"));
                self.rule("NEXT_WHOLE_LINE", &format!(r"/\n[^\n]*/ & ~/\n{broken}/"));
                let body = format!("FIRST_WHOLE_LINE? NEXT_WHOLE_LINE* {end}");
                self.rule("whole_text", &body);
            }
            return "whole_text".to_owned();
        }
        const NAME: &str = "any_text";
        if !self.has_any_text {
            self.has_any_text = true;
            let tag = pattern_literal(self.parameter_close().trim_end());
            self.rule("FIRST_LINE", r"/[^\n]+/");
            self.rule("NEXT_LINE", &format!(r"/\n[^\n]*/ & ~/{tag}/"));
            self.rule(NAME, &format!("FIRST_LINE? NEXT_LINE* {end}"));
        }
        NAME.to_owned()
    }

    /// Closing tags, and tags that may follow them, as alternatives of an expression.
    fn tag_patterns(&self) -> (String, String) {
        let tags = self.tags();
        let escaped = |tags: &[&String]| {
            let tags: Vec<String> = tags
                .iter()
                .map(|tag| pattern_literal(&regex::escape(tag)))
                .collect();
            tags.join("|")
        };
        let closing = [&tags.parameter_close, &tags.function_close, &tags.close];
        let opening = [&tags.parameter_open, &tags.function_open, &tags.open];
        (escaped(&closing), escaped(&opening))
    }

    /// Lines in which the parser may see the end of a value: a tag begins the line, a closing tag
    /// ends it, or a tag follows a closing tag.
    fn broken_line(&self) -> String {
        let (closing, opening) = self.tag_patterns();
        let blank = r"[^\S\n]*";
        format!(
            r"({blank}({closing}|{opening})[^\n]*|[^\n]*({closing}){blank}(({closing}|{opening})[^\n]*)?)"
        )
    }

    /// Texts that hold the beginning of a tag, or a carriage return, which the parser drops at the
    /// end. They are more than the parser misreads, but beside bounds an automaton of whole tags
    /// would be too large.
    fn broken_text(&self) -> String {
        let tags = self.tags();
        let all = [
            &tags.parameter_close,
            &tags.function_close,
            &tags.close,
            &tags.parameter_open,
            &tags.function_open,
            &tags.open,
        ];
        let mut heads: Vec<String> = all
            .iter()
            .map(|tag| tag.chars().take(3).collect::<String>())
            .map(|head| pattern_literal(&regex::escape(&head)))
            .collect();
        heads.sort();
        heads.dedup();
        format!(r"(?s:.*)({}|\r)(?s:.*)", heads.join("|"))
    }

    fn breaks_markup(&self, text: &str) -> bool {
        let broken = regex::Regex::new(&format!("^(?:{})$", self.broken_text()));
        broken.is_ok_and(|broken| broken.is_match(text))
    }
}

/// The schema for values of these types.
fn typed(schema: &Value, kinds: &[JsonType]) -> Value {
    let mut map = match schema {
        Value::Object(map) => map.clone(),
        _ => serde_json::Map::new(),
    };
    let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
    map.insert("type".to_owned(), json!(names));
    Value::Object(map)
}

/// Whether values of this type, beside strings, are held to nothing but their spelling.
fn is_free_scalar(kind: JsonType, schema: &Value) -> bool {
    match kind {
        JsonType::Null => true,
        JsonType::Boolean => !mentions(schema, &["const", "enum", "not"]),
        JsonType::Integer | JsonType::Number => !mentions(schema, &NUMERIC_BOUNDS),
        JsonType::Text | JsonType::Object | JsonType::Array => false,
    }
}

/// Whether a keyword, or a reference that may lead to one, occurs anywhere in a schema.
fn mentions(schema: &Value, keywords: &[&str]) -> bool {
    match schema {
        Value::Object(map) => {
            let names = |key: &String| key == "$ref" || keywords.contains(&key.as_str());
            map.keys().any(names) || map.values().any(|part| mentions(part, keywords))
        }
        Value::Array(parts) => parts.iter().any(|part| mentions(part, keywords)),
        _ => false,
    }
}

/// Texts that the parser reads, or may read, as a value of this type. If the type is not a matter
/// of spelling, all texts that begin like one are its own: the lexer decides early.
fn claimed_by(kind: JsonType, is_free_scalar: bool) -> String {
    let rest = if is_free_scalar { r"\s*" } else { ANY_TEXT };
    match kind {
        JsonType::Null => r"\s*(null|None)\s*".to_owned(),
        JsonType::Boolean => format!(r"\s*((?i:true|false)|[01]){rest}"),
        JsonType::Integer | JsonType::Number if is_free_scalar => {
            r"\s*[+-]?[0-9._]+([eE][+-]?[0-9_]+)?\s*".to_owned()
        }
        JsonType::Integer | JsonType::Number => format!(r"\s*[+-]?[0-9._]{ANY_TEXT}"),
        JsonType::Object => format!(r"\s*\{{{ANY_TEXT}"),
        JsonType::Array => format!(r"\s*\[{ANY_TEXT}"),
        // A string claims no text.
        JsonType::Text => "[^\\s\\S]".to_owned(),
    }
}

/// Whether a schema has no keyword that a value could break.
fn is_unconstrained(schema: &Value) -> bool {
    const NOTES: [&str; 9] = [
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "nullable",
    ];
    match schema {
        Value::Object(map) => map.keys().all(|key| NOTES.contains(&key.as_str())),
        other => *other == Value::Bool(true),
    }
}
