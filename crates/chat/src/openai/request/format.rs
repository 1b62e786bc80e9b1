//! The shape a reply must have.

use serde_json::Value;

use crate::error::ChatError;
use crate::fields::{Fields, must_be};
use crate::shape::JsonRules;

/// Most texts a reply may be chosen from.
const MAX_CHOICES: usize = 4_096;

/// The shape asked for by `response_format` or one of its equivalents; `field` is the one that asks.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum ResponseFormat {
    /// Free text.
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that obeys a schema.
    JsonSchema {
        /// The schema.
        schema: Value,
        /// How much of it has to be kept.
        rules: JsonRules,
        /// Where it stands.
        field: String,
    },
    /// Text that a regular expression matches as a whole.
    Pattern {
        /// The expression.
        pattern: String,
        /// Where it stands.
        field: String,
    },
    /// One of these texts.
    Choice {
        /// The texts, at least one.
        texts: Vec<String>,
        /// Where they stand.
        field: String,
    },
    /// Text in a language.
    Grammar {
        /// The language in Lark's notation.
        lark: String,
        /// Where it stands.
        field: String,
    },
}

/// What a field beside `response_format` holds.
#[derive(Clone, Copy)]
enum Kind {
    Schema,
    Pattern,
    Choice,
    Grammar,
    AnyObject,
    Several,
}

/// Fields of other servers' protocols that ask for a shape.
const EXTENSIONS: [(&str, Kind); 8] = [
    ("json_schema", Kind::Schema),
    ("grammar", Kind::Grammar),
    ("guided_json", Kind::Schema),
    ("guided_regex", Kind::Pattern),
    ("guided_choice", Kind::Choice),
    ("guided_grammar", Kind::Grammar),
    ("structured_outputs", Kind::Several),
    ("regex", Kind::Pattern),
];
/// The same inside `structured_outputs`.
const INNER: [(&str, Kind); 5] = [
    ("json", Kind::Schema),
    ("regex", Kind::Pattern),
    ("choice", Kind::Choice),
    ("grammar", Kind::Grammar),
    ("json_object", Kind::AnyObject),
];

impl ResponseFormat {
    pub(crate) fn read(body: &Fields<'_>) -> Result<ResponseFormat, ChatError> {
        if let Some(format) = extension(body, &EXTENSIONS)? {
            return Ok(format);
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
            Some("json_object") => match format.get("schema") {
                // An older spelling of some servers.
                Some(schema) => Ok(ResponseFormat::JsonSchema {
                    schema: schema.clone(),
                    rules: JsonRules::Kept,
                    field: format.path("schema"),
                }),
                None => Ok(ResponseFormat::JsonObject),
            },
            Some("json_schema") => {
                let wrapper = format.object("json_schema")?;
                let holder = wrapper.as_ref().unwrap_or(format);
                let schema = holder
                    .get("schema")
                    .cloned()
                    .ok_or_else(|| format.error("json_schema", "must hold a field 'schema'"))?;
                // Whoever says nothing wants the schema kept; whoever says no wants what can be had.
                let rules = match holder.flag("strict", true)? {
                    true => JsonRules::Kept,
                    false => JsonRules::BestEffort,
                };
                Ok(ResponseFormat::JsonSchema {
                    schema,
                    rules,
                    field: holder.path("schema"),
                })
            }
            Some("regex") => read(format, first(format, &["regex", "pattern"])?, Kind::Pattern),
            Some("grammar") => read(format, first(format, &["grammar"])?, Kind::Grammar),
            Some(other) => Err(format.error(
                "type",
                format!("must be text, json_object, json_schema, regex or grammar, not {other:?}"),
            )),
            None => Err(format.error("type", "is missing")),
        }
    }
}

fn first<'k>(format: &Fields<'_>, keys: &[&'k str]) -> Result<&'k str, ChatError> {
    format
        .first(keys)
        .ok_or_else(|| format.error(keys[0], "is missing"))
}

fn extension(
    body: &Fields<'_>,
    fields: &[(&str, Kind)],
) -> Result<Option<ResponseFormat>, ChatError> {
    let mut given = fields.iter().filter(|(key, _)| body.get(key).is_some());
    let Some((key, kind)) = given.next() else {
        return Ok(None);
    };
    if let Some((other, _)) = given.next() {
        return Err(body.error(
            other,
            format!("cannot go with {key}: a reply has one shape"),
        ));
    }
    read(body, key, *kind).map(Some)
}

fn read(body: &Fields<'_>, key: &str, kind: Kind) -> Result<ResponseFormat, ChatError> {
    let field = body.path(key);
    let text = || -> Result<String, ChatError> {
        let text = body.string(key)?.unwrap_or_default();
        Ok(text.to_owned())
    };
    Ok(match kind {
        Kind::Pattern => ResponseFormat::Pattern {
            pattern: text()?,
            field,
        },
        Kind::Grammar => {
            let lark = text()?;
            if lark.contains("::=") {
                return Err(body.error(
                    key,
                    "looks like GBNF; write it in Lark's notation: 'start: ...' for 'root ::= ...'",
                ));
            }
            ResponseFormat::Grammar { lark, field }
        }
        Kind::Schema => ResponseFormat::JsonSchema {
            schema: schema(body, key)?,
            rules: JsonRules::Kept,
            field,
        },
        Kind::Choice => ResponseFormat::Choice {
            texts: choice(body, key)?,
            field,
        },
        Kind::AnyObject => match body.flag(key, false)? {
            true => ResponseFormat::JsonObject,
            false => ResponseFormat::Text,
        },
        Kind::Several => match body.object(key)? {
            Some(inner) => extension(&inner, &INNER)?.unwrap_or_default(),
            None => ResponseFormat::Text,
        },
    })
}

/// A schema, or the JSON text of one.
fn schema(body: &Fields<'_>, key: &str) -> Result<Value, ChatError> {
    match body.get(key) {
        Some(Value::String(text)) => serde_json::from_str(text)
            .map_err(|fault| body.error(key, format!("is not valid JSON: {fault}"))),
        Some(wrapper @ Value::Object(map))
            if map.contains_key("schema") && !map.contains_key("type") =>
        {
            Ok(wrapper["schema"].clone())
        }
        Some(other) => Ok(other.clone()),
        None => Ok(Value::Bool(true)),
    }
}

fn choice(body: &Fields<'_>, key: &str) -> Result<Vec<String>, ChatError> {
    let items = body.array(key)?.unwrap_or_default();
    if items.is_empty() || items.len() > MAX_CHOICES {
        return Err(body.error(
            key,
            format!("must hold 1 to {MAX_CHOICES} texts, not {}", items.len()),
        ));
    }
    let one = |(index, item): (usize, &Value)| match item {
        Value::String(text) => Ok(text.clone()),
        other => Err(ChatError::field(
            format!("{}[{index}]", body.path(key)),
            must_be("a string", other),
        )),
    };
    items.iter().enumerate().map(one).collect()
}
