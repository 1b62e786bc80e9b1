//! Reads `response_format` and the fields of other servers that mean the same.

use serde_json::Value;

use super::fields::{Fields, must_be};
use crate::error::ChatError;
use crate::grammar::gbnf;
use crate::request::{ResponseFormat, SchemaStrictness};

/// Maximum number of texts of a choice.
const MAX_CHOICES: usize = 4_096;

/// What a field other than `response_format` holds.
#[derive(Clone, Copy)]
enum FormatField {
    Schema,
    Regex,
    Choice,
    Grammar,
    AnyObject,
    Nested,
}

/// Fields of other servers that constrain the reply.
const EXTENSIONS: [(&str, FormatField); 8] = [
    ("json_schema", FormatField::Schema),
    ("grammar", FormatField::Grammar),
    ("guided_json", FormatField::Schema),
    ("guided_regex", FormatField::Regex),
    ("guided_choice", FormatField::Choice),
    ("guided_grammar", FormatField::Grammar),
    ("structured_outputs", FormatField::Nested),
    ("regex", FormatField::Regex),
];
/// Fields inside `structured_outputs`.
const INNER: [(&str, FormatField); 5] = [
    ("json", FormatField::Schema),
    ("regex", FormatField::Regex),
    ("choice", FormatField::Choice),
    ("grammar", FormatField::Grammar),
    ("json_object", FormatField::AnyObject),
];

impl ResponseFormat {
    pub(crate) fn read(body: &Fields<'_>) -> Result<ResponseFormat, ChatError> {
        if let Some(format) = extension(body, &EXTENSIONS)? {
            return Ok(format);
        }
        let Some(format) = body.object("response_format")? else {
            return Ok(ResponseFormat::Text);
        };
        ResponseFormat::read_format(&format, SchemaStrictness::BestEffort)
    }

    /// Reads the object that names the form; `json_schema` may be inside or beside it. A schema
    /// without `strict` is held to as `unless_stated` says.
    pub(crate) fn read_format(
        format: &Fields<'_>,
        unless_stated: SchemaStrictness,
    ) -> Result<ResponseFormat, ChatError> {
        match format.string("type")? {
            Some("text") => Ok(ResponseFormat::Text),
            Some("json_object") => match format.get("schema") {
                // An older spelling.
                Some(schema) => Ok(ResponseFormat::JsonSchema {
                    schema: schema.clone(),
                    strictness: unless_stated,
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
                let strictness = match holder.bool("strict")? {
                    None => unless_stated,
                    Some(true) => SchemaStrictness::Strict,
                    Some(false) => SchemaStrictness::BestEffort,
                };
                Ok(ResponseFormat::JsonSchema {
                    schema,
                    strictness,
                    field: holder.path("schema"),
                })
            }
            Some("regex") => read(
                format,
                first(format, &["regex", "pattern"])?,
                FormatField::Regex,
            ),
            Some("grammar") => read(format, first(format, &["grammar"])?, FormatField::Grammar),
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
    fields: &[(&str, FormatField)],
) -> Result<Option<ResponseFormat>, ChatError> {
    // The newer way to ask wins over those it replaced.
    let newest = "structured_outputs";
    let is_newest = |key: &str| key == newest;
    let mut first: Option<(&str, ResponseFormat)> = None;
    let newest_first = fields.iter().filter(|(key, _)| is_newest(key));
    let others = fields.iter().filter(|(key, _)| !is_newest(key));
    for (key, kind) in newest_first.chain(others) {
        if body.get(key).is_none() {
            continue;
        }
        let format = read(body, key, *kind)?;
        match &first {
            Some((first, _)) if is_newest(first) && key.starts_with("guided_") => {}
            Some((_, other)) if other.is_same(&format) => {}
            Some((first, _)) => {
                let message = format!("cannot go with {first}: a reply has one shape");
                return Err(body.error(key, message));
            }
            // Without content it asks for nothing.
            None if format == ResponseFormat::Text => {}
            None => first = Some((key, format)),
        }
    }
    Ok(first.map(|(_, format)| format))
}

fn read(body: &Fields<'_>, key: &str, kind: FormatField) -> Result<ResponseFormat, ChatError> {
    let field = body.path(key);
    let text = || -> Result<String, ChatError> {
        let text = body.string(key)?.unwrap_or_default();
        Ok(text.to_owned())
    };
    Ok(match kind {
        FormatField::Regex => ResponseFormat::Regex {
            pattern: text()?,
            field,
        },
        FormatField::Grammar => {
            let grammar = text()?;
            let lark = if gbnf::is_gbnf(&grammar) {
                gbnf::to_lark(&grammar).map_err(|error| body.error(key, error))?
            } else {
                grammar
            };
            ResponseFormat::Grammar { lark, field }
        }
        FormatField::Schema => ResponseFormat::JsonSchema {
            schema: schema(body, key)?,
            strictness: SchemaStrictness::Strict,
            field,
        },
        FormatField::Choice => ResponseFormat::Choice {
            texts: choice(body, key)?,
            field,
        },
        FormatField::AnyObject => {
            if body.flag(key, false)? {
                ResponseFormat::JsonObject
            } else {
                ResponseFormat::Text
            }
        }
        FormatField::Nested => match body.object(key)? {
            Some(inner) => extension(&inner, &INNER)?.unwrap_or_default(),
            None => ResponseFormat::Text,
        },
    })
}

/// A schema, or its JSON text.
fn schema(body: &Fields<'_>, key: &str) -> Result<Value, ChatError> {
    match body.get(key) {
        Some(Value::String(text)) => serde_json::from_str(text)
            .map_err(|err| body.error(key, format!("is not valid JSON: {err}"))),
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
