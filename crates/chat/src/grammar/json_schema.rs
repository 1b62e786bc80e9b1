//! Rewrites JSON schemas for the grammar compiler: an unsupported keyword is an error in strict
//! mode and is removed otherwise.

use serde_json::{Map, Value, json};

use super::schema_source::whole_number;
use crate::error::ChatError;
use crate::request::SchemaStrictness;
use crate::tools::{percent_decoded, with_plain_references};

/// Keywords that constrain values and that the compiler does not support.
const UNSUPPORTED_KEYWORDS: [&str; 18] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
];
/// Formats that the compiler holds strings to. Any other is a note to the reader (JSON Schema
/// 2020-12, validation, section 7.2.1).
const FORMATS: [&str; 10] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];
/// Keywords that bound values without giving them their structure.
const BOUNDS: [&str; 15] = [
    "format",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "patternProperties",
    "contentEncoding",
];
/// Keywords whose value is a schema.
const SCHEMA_KEYWORDS: [&str; 3] = ["items", "additionalProperties", "additionalItems"];
/// Keywords whose value is an array of schemas.
const SCHEMA_ARRAY_KEYWORDS: [&str; 4] = ["anyOf", "oneOf", "allOf", "prefixItems"];
/// Keywords whose value is an object of schemas.
const SCHEMA_MAP_KEYWORDS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
/// Keywords whose value counts something.
const COUNT_KEYWORDS: [&str; 6] = [
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
];
/// Keywords that hold an object to something.
const OBJECT_KEYWORDS: [&str; 6] = [
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
];
/// Keywords whose schemas apply to the same value as their own.
const SAME_VALUE_KEYWORDS: [&str; 4] = ["$ref", "allOf", "anyOf", "oneOf"];
/// Whitespace between the parts of a value: none, a space, or a line break with bounded
/// indentation. Without the bound a model could emit blanks forever.
const WHITESPACE_PATTERN: &str = r" |\r?\n( {0,48}|\t{0,12})";
/// Deeper schemas are rejected.
const MAX_DEPTH: usize = 96;

/// The schema to compile; an error names what is unsupported. `field` is its path in the request.
pub(super) fn prepare_schema(
    schema: &Value,
    rules: SchemaStrictness,
    field: &str,
) -> Result<Value, ChatError> {
    prepare_with_notes(schema, None, rules, field).map(|(schema, _)| schema)
}

/// The same, with what is left out because the schema is not strict. A schema that is a part of
/// a document has its references `around` it.
pub(super) fn prepare_with_notes(
    schema: &Value,
    around: Option<&Value>,
    rules: SchemaStrictness,
    field: &str,
) -> Result<(Value, Vec<String>), ChatError> {
    let mut schema = match schema {
        Value::Bool(true) => Value::Object(Map::new()),
        Value::Object(_) if around.is_none() => with_plain_references(schema),
        Value::Object(_) => schema.clone(),
        _ => return Err(ChatError::field(field, "a schema must be an object")),
    };
    let mut rewriter = SchemaRewriter {
        rules,
        field,
        hoisted: Vec::new(),
        notes: Vec::new(),
        is_part: around.is_some(),
        root: around.unwrap_or(&schema).clone(),
    };
    rewriter.schema(&mut schema, "#", 0, Sharing::Alone)?;
    // Targets of references that the compiler cannot follow are copied into `$defs`; a copy may add
    // more.
    let mut next = 0;
    while let Some((target, sharing)) = rewriter.hoisted.get(next).cloned() {
        let mut copy = rewriter
            .root
            .pointer(&target)
            .cloned()
            .unwrap_or(Value::Bool(true));
        rewriter.schema(&mut copy, &format!("#{target}"), 0, sharing)?;
        let definitions = schema.as_object_mut().map(|map| {
            map.entry("$defs")
                .or_insert_with(|| Value::Object(Map::new()))
        });
        if let Some(Value::Object(definitions)) = definitions {
            definitions.insert(hoisted_name(next), copy);
        }
        next += 1;
    }
    if let Value::Object(map) = &mut schema {
        let lenient = rules == SchemaStrictness::BestEffort;
        map.insert(
            "x-guidance".to_owned(),
            json!({
                "whitespace_pattern": WHITESPACE_PATTERN,
                "lenient": lenient,
                "coerce_one_of": lenient,
            }),
        );
    }
    Ok((schema, rewriter.notes))
}

/// The schema without bounds of values: what can be kept of it if the compiler cannot keep all.
pub(super) fn without_bounds(schema: &Value) -> Value {
    let Value::Object(map) = schema else {
        return schema.clone();
    };
    let mut kept = Map::new();
    for (key, value) in map {
        let key_text = key.as_str();
        if BOUNDS.contains(&key_text) {
            continue;
        }
        let value =
            if SCHEMA_KEYWORDS.contains(&key_text) || SCHEMA_ARRAY_KEYWORDS.contains(&key_text) {
                match value {
                    Value::Array(items) => items.iter().map(without_bounds).collect(),
                    one => without_bounds(one),
                }
            } else if SCHEMA_MAP_KEYWORDS.contains(&key_text) {
                match value {
                    Value::Object(items) => {
                        let items = items.iter();
                        items
                            .map(|(name, item)| (name.clone(), without_bounds(item)))
                            .collect()
                    }
                    other => other.clone(),
                }
            } else {
                value.clone()
            };
        kept.insert(key.clone(), value);
    }
    Value::Object(kept)
}

fn hoisted_name(index: usize) -> String {
    format!("moved-{index}")
}

/// Whether a schema alone says what a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    Alone,
    /// Other schemas speak of the same value.
    Shared,
}

struct SchemaRewriter<'a> {
    rules: SchemaStrictness,
    field: &'a str,
    /// Pointers of the hoisted parts, by number, and what each stands beside.
    hoisted: Vec<(String, Sharing)>,
    /// What is left out.
    notes: Vec<String>,
    /// The document that references point into, and whether only a part of it is compiled, so that
    /// every target is hoisted.
    root: Value,
    is_part: bool,
}

impl SchemaRewriter<'_> {
    fn error_at(&self, path: &str, message: &str) -> ChatError {
        ChatError::field(self.field, format!("the schema's {message} at {path}"))
    }

    fn note(&mut self, what: &str, path: &str) {
        let note = format!("{}: the schema's {what} at {path} is not kept", self.field);
        tracing::info!("{note}");
        self.notes.push(note);
    }

    fn schema(
        &mut self,
        schema: &mut Value,
        path: &str,
        depth: usize,
        sharing: Sharing,
    ) -> Result<(), ChatError> {
        let Value::Object(map) = schema else {
            return match schema {
                Value::Bool(_) => Ok(()),
                _ => Err(self.error_at(path, "part that is no schema stands")),
            };
        };
        if depth > MAX_DEPTH {
            return Err(self.error_at(path, "parts are nested too deep"));
        }
        for keyword in UNSUPPORTED_KEYWORDS {
            if map
                .get(keyword)
                .is_some_and(|value| constrains_values(keyword, value))
            {
                if self.rules == SchemaStrictness::Strict {
                    let message = format!("keyword '{keyword}' is not supported; it stands");
                    return Err(self.error_at(path, &message));
                }
                self.note(&format!("keyword '{keyword}'"), path);
            }
            map.shift_remove(keyword);
        }
        map.shift_remove("x-guidance");
        if let Some(Value::String(format)) = map.get("format")
            && !FORMATS.contains(&format.as_str())
        {
            map.shift_remove("format");
        }
        for keyword in COUNT_KEYWORDS {
            if let Some(count) = map.get(keyword).and_then(whole_number) {
                map.insert(keyword.to_owned(), count.into());
            }
        }
        let inner_sharing = sharing_of_parts(map, sharing);
        if let Some(Value::String(reference)) = map.get("$ref") {
            if self.rules == SchemaStrictness::BestEffort && !reference.starts_with('#') {
                self.note(&format!("reference {reference:?}"), path);
                map.shift_remove("$ref");
            } else {
                let reference = self.reference(reference, path, inner_sharing)?;
                map.insert("$ref".to_owned(), reference.into());
            }
        }
        if !map.contains_key("type") && !map.contains_key("$ref") {
            if map.contains_key("properties") {
                map.insert("type".to_owned(), "object".into());
            } else if map.contains_key("items") || map.contains_key("prefixItems") {
                map.insert("type".to_owned(), "array".into());
            }
        }
        if sharing == Sharing::Alone {
            close_object(map);
        }
        for keyword in SCHEMA_KEYWORDS {
            match map.get_mut(keyword) {
                // An older spelling of `prefixItems`.
                Some(Value::Array(items)) => {
                    for (i, item) in items.iter_mut().enumerate() {
                        let path = format!("{path}/{keyword}/{i}");
                        self.schema(item, &path, depth + 1, Sharing::Alone)?;
                    }
                }
                Some(inner) => {
                    let path = format!("{path}/{keyword}");
                    self.schema(inner, &path, depth + 1, Sharing::Alone)?;
                }
                None => {}
            }
        }
        for keyword in SCHEMA_ARRAY_KEYWORDS {
            if let Some(Value::Array(items)) = map.get_mut(keyword) {
                let sharing = match keyword {
                    "prefixItems" => Sharing::Alone,
                    "allOf" if items.len() > 1 => Sharing::Shared,
                    _ => inner_sharing,
                };
                for (i, item) in items.iter_mut().enumerate() {
                    self.schema(item, &format!("{path}/{keyword}/{i}"), depth + 1, sharing)?;
                }
            }
        }
        for keyword in SCHEMA_MAP_KEYWORDS {
            if let Some(Value::Object(items)) = map.get_mut(keyword) {
                for (name, item) in items {
                    let path = format!("{path}/{keyword}/{name}");
                    self.schema(item, &path, depth + 1, Sharing::Alone)?;
                }
            }
        }
        Ok(())
    }

    /// A reference in the form the compiler follows: plain names between slashes.
    fn reference(
        &mut self,
        reference: &str,
        path: &str,
        sharing: Sharing,
    ) -> Result<String, ChatError> {
        let Some(pointer) = reference.strip_prefix('#') else {
            let message = format!("reference {reference:?} leads out of it; it stands");
            return Err(self.error_at(path, &message));
        };
        let pointer = percent_decoded(pointer);
        if self.root.pointer(&pointer).is_none() {
            let message = format!("reference {reference:?} leads nowhere; it stands");
            return Err(self.error_at(path, &message));
        }
        let is_plain = pointer.is_empty() || !(pointer.contains('~') || reference.contains('%'));
        if is_plain && !self.is_part && sharing == Sharing::Alone {
            return Ok(format!("#{pointer}"));
        }
        let target = (pointer, sharing);
        let known = self.hoisted.iter().position(|other| *other == target);
        let index = known.unwrap_or_else(|| {
            self.hoisted.push(target);
            self.hoisted.len() - 1
        });
        Ok(format!("#/$defs/{}", hoisted_name(index)))
    }
}

/// What the schemas inside a schema stand beside, if they apply to the same value.
fn sharing_of_parts(map: &Map<String, Value>, sharing: Sharing) -> Sharing {
    let n_kinds = SAME_VALUE_KEYWORDS
        .iter()
        .filter(|key| map.contains_key(**key));
    let has_own = OBJECT_KEYWORDS.iter().any(|key| map.contains_key(*key));
    if sharing == Sharing::Shared || has_own || n_kinds.count() > 1 {
        Sharing::Shared
    } else {
        Sharing::Alone
    }
}

/// Allows no properties but those that an object lists or requires, if it says nothing of others.
fn close_object(map: &mut Map<String, Value>) {
    let says_more = ["additionalProperties", "patternProperties"];
    let mut others = says_more.iter().chain(&SAME_VALUE_KEYWORDS);
    if !map.contains_key("properties") || others.any(|keyword| map.contains_key(*keyword)) {
        return;
    }
    let required = map.get("required").and_then(Value::as_array).cloned();
    if let Some(Value::Object(properties)) = map.get_mut("properties") {
        for name in required.iter().flatten().filter_map(Value::as_str) {
            properties.entry(name).or_insert(Value::Bool(true));
        }
    }
    map.insert("additionalProperties".to_owned(), false.into());
}

/// Whether an unsupported keyword constrains anything here: `uniqueItems: false` does not.
fn constrains_values(keyword: &str, value: &Value) -> bool {
    match (keyword, value) {
        ("uniqueItems", Value::Bool(unique)) => *unique,
        ("unevaluatedProperties" | "unevaluatedItems" | "propertyNames", Value::Bool(true)) => {
            false
        }
        ("propertyNames", Value::Object(map)) => {
            // Names are always strings; typed maps are often written this way.
            !(map.len() == 1 && map.get("type") == Some(&Value::from("string")))
        }
        ("then" | "else" | "$dynamicAnchor" | "$recursiveAnchor", _) => false,
        _ => true,
    }
}
