//! Converts parameter text to JSON by the parameter's schema.

use serde_json::Value;

use super::json_repair;

/// Most references and alternatives to follow.
const MAX_DEPTH: usize = 16;

/// A JSON type, as schemas name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JsonType {
    Text,
    Integer,
    Number,
    Boolean,
    Null,
    Object,
    Array,
}

/// The parameter schemas of one tool.
#[derive(Debug, Clone, Default)]
pub(crate) struct ParameterSchemas {
    /// The whole schema; references point into it.
    root: Value,
}

impl ParameterSchemas {
    pub(crate) fn new(schema: Option<&Value>) -> ParameterSchemas {
        ParameterSchemas {
            root: schema.cloned().unwrap_or_default(),
        }
    }

    /// The schema of one parameter.
    fn schema(&self, key: &str) -> Option<&Value> {
        resolve(&self.root, &self.root, 0)?
            .get("properties")?
            .get(key)
    }

    /// Whether the tool declares a parameter of that name.
    pub(crate) fn declares(&self, key: &str) -> bool {
        self.schema(key).is_some()
    }

    /// Whether the parameter is only a string, so that it can be streamed.
    pub(crate) fn is_text(&self, key: &str) -> bool {
        let Some(schema) = self.schema(key) else {
            return false;
        };
        let mut types = Vec::new();
        collect_types(schema, &self.root, 0, &mut types);
        !types.is_empty() && types.iter().all(|kind| *kind == JsonType::Text)
    }

    /// The allowed types are tried in the schema's order; text that fits none stays a string.
    /// Without a schema, valid JSON is taken as such.
    pub(crate) fn value(&self, key: &str, text: &str) -> String {
        let mut types = Vec::new();
        if let Some(schema) = self.schema(key) {
            collect_types(schema, &self.root, 0, &mut types);
        }
        let trimmed = text.trim();
        if types.is_empty() {
            return match serde_json::from_str::<Value>(trimmed) {
                Ok(_) => trimmed.to_owned(),
                Err(_) => quoted(text),
            };
        }
        if types.contains(&JsonType::Null) && matches!(trimmed, "null" | "None") {
            return "null".to_owned();
        }
        types
            .iter()
            .find_map(|kind| kind.read(text))
            .unwrap_or_else(|| quoted(text))
    }
}

impl JsonType {
    fn of(name: &str) -> Option<JsonType> {
        Some(match name {
            "string" => JsonType::Text,
            "integer" => JsonType::Integer,
            "number" => JsonType::Number,
            "boolean" => JsonType::Boolean,
            "null" => JsonType::Null,
            "object" => JsonType::Object,
            "array" => JsonType::Array,
            _ => return None,
        })
    }

    fn of_value(value: &Value) -> JsonType {
        match value {
            Value::Null => JsonType::Null,
            Value::Bool(_) => JsonType::Boolean,
            Value::Number(number) if number.is_f64() => JsonType::Number,
            Value::Number(_) => JsonType::Integer,
            Value::String(_) => JsonType::Text,
            Value::Array(_) => JsonType::Array,
            Value::Object(_) => JsonType::Object,
        }
    }

    /// `text` as a JSON value of this type, if it is one.
    fn read(self, text: &str) -> Option<String> {
        let trimmed = text.trim();
        let json = || serde_json::from_str::<Value>(trimmed).ok();
        match self {
            JsonType::Text => Some(quoted(text)),
            JsonType::Integer => match json()? {
                Value::Number(number) if !number.is_f64() => Some(trimmed.to_owned()),
                Value::Number(number) => {
                    let whole = number.as_f64()?;
                    // Up to 2^53 every whole number is exact.
                    (whole.fract() == 0.0 && whole.abs() <= 9_007_199_254_740_992.0)
                        .then(|| format!("{whole:.0}"))
                }
                _ => None,
            },
            JsonType::Number => json()?.is_number().then(|| trimmed.to_owned()),
            JsonType::Boolean => match trimmed {
                "true" | "True" | "1" => Some("true".to_owned()),
                "false" | "False" | "0" => Some("false".to_owned()),
                _ => None,
            },
            JsonType::Null => None,
            JsonType::Object | JsonType::Array => {
                let open = if self == JsonType::Object { '{' } else { '[' };
                if !trimmed.starts_with(open) {
                    return None;
                }
                match json() {
                    Some(_) => Some(trimmed.to_owned()),
                    None => json_repair::repair(trimmed),
                }
            }
        }
    }
}

fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    json_repair::write_json_string_body(text, &mut out);
    out.push('"');
    out
}

/// The target of a reference.
pub(crate) fn resolve_pointer<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    root.pointer(&percent_decoded(reference.strip_prefix('#')?))
}

/// The pointer in a reference's fragment.
pub(crate) fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|d| std::str::from_utf8(d).ok());
        let code = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match (first, code) {
            (b'%', Some(code)) => {
                bytes.push(code);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Resolves references; those outside the document resolve to nothing.
fn resolve<'a>(schema: &'a Value, root: &'a Value, depth: usize) -> Option<&'a Value> {
    match schema.get("$ref").and_then(Value::as_str) {
        None => Some(schema),
        Some(_) if depth >= MAX_DEPTH => None,
        Some(reference) => resolve(resolve_pointer(root, reference)?, root, depth + 1),
    }
}

/// Adds the types that `schema` allows, in its order, each once.
fn collect_types(schema: &Value, root: &Value, depth: usize, types: &mut Vec<JsonType>) {
    let Some(schema) = resolve(schema, root, depth) else {
        return;
    };
    if depth >= MAX_DEPTH {
        return;
    }
    let mut add = |kind: Option<JsonType>| {
        if let Some(kind) = kind
            && !types.contains(&kind)
        {
            types.push(kind);
        }
    };
    match schema.get("type") {
        Some(Value::String(name)) => return add(JsonType::of(name)),
        Some(Value::Array(names)) => {
            return names
                .iter()
                .filter_map(Value::as_str)
                .for_each(|name| add(JsonType::of(name)));
        }
        _ => {}
    }
    if let Some(value) = schema.get("const") {
        return add(Some(JsonType::of_value(value)));
    }
    if let Some(Value::Array(values)) = schema.get("enum") {
        // Any value is a valid string, so strings are tried last.
        let (texts, others): (Vec<JsonType>, Vec<JsonType>) = values
            .iter()
            .map(JsonType::of_value)
            .partition(|kind| *kind == JsonType::Text);
        return others
            .into_iter()
            .chain(texts)
            .for_each(|kind| add(Some(kind)));
    }
    let mut found = false;
    for key in ["anyOf", "oneOf", "allOf"] {
        for alternative in schema
            .get(key)
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            collect_types(alternative, root, depth + 1, types);
            found = true;
        }
    }
    if found {
        return;
    }
    let implied = match schema {
        Value::Object(map) if map.contains_key("properties") => Some(JsonType::Object),
        Value::Object(map) if map.contains_key("items") => Some(JsonType::Array),
        _ => None,
    };
    if let Some(kind) = implied
        && !types.contains(&kind)
    {
        types.push(kind);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(schema: Value, text: &str, expected: &str) {
        let root = json!({
            "type": "object",
            "properties": {"p": schema},
            "$defs": {"count": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
        });
        let parameters = ParameterSchemas::new(Some(&root));
        assert_eq!(parameters.value("p", text), expected, "{root} {text}");
    }

    #[test]
    fn string_parameter_is_unchanged() {
        check(json!({"type": "string"}), " 5\n", "\" 5\\n\"");
        check(json!({"type": "string"}), "null", "\"null\"");
        check(json!({"type": "string"}), "a \"b\" \\", r#""a \"b\" \\""#);
    }

    #[test]
    fn values_are_coerced_to_their_schema_type() {
        check(json!({"type": "integer"}), "42", "42");
        check(json!({"type": "integer"}), "42.0", "42");
        check(json!({"type": "integer"}), "4.5", "\"4.5\"");
        check(json!({"type": "integer"}), "many", "\"many\"");
        check(json!({"type": "number"}), "1e3", "1e3");
        check(json!({"type": "boolean"}), "True", "true");
        check(json!({"type": "boolean"}), "0", "false");
        check(json!({"type": "boolean"}), "perhaps", "\"perhaps\"");
        check(json!({"type": "object"}), "{'a': None}", "{\"a\": null}");
        check(json!({"type": "array"}), "[1, 2]", "[1, 2]");
        check(json!({"type": "array"}), "[oops", "\"[oops\"");
        check(json!({"items": {}}), "[1]", "[1]");
    }

    #[test]
    fn null_requires_a_nullable_schema() {
        check(json!({"type": ["string", "null"]}), "null", "null");
        check(json!({"type": "integer"}), "null", "\"null\"");
        check(
            json!({"anyOf": [{"type": "integer"}, {"type": "null"}]}),
            "None",
            "null",
        );
    }

    #[test]
    fn alternative_types_are_tried_in_order() {
        check(json!({"type": ["integer", "string"]}), "5", "5");
        check(json!({"type": ["string", "integer"]}), "5", "\"5\"");
        check(
            json!({"oneOf": [{"type": "boolean"}, {"type": "string"}]}),
            "yes",
            "\"yes\"",
        );
        check(json!({"enum": ["auto", 1]}), "1", "1");
        check(json!({"enum": ["auto", 1]}), "auto", "\"auto\"");
        check(json!({"const": 3}), "3", "3");
    }

    #[test]
    fn cyclic_references_terminate() {
        check(json!({"$ref": "#/$defs/count"}), "7", "7");
        check(json!({"$ref": "#/$defs/loop"}), "7", "7");
        check(json!({"$ref": "http://elsewhere"}), "x", "\"x\"");
    }

    #[test]
    fn value_without_schema_is_json_if_valid_else_string() {
        let parameters = ParameterSchemas::new(None);
        assert_eq!(parameters.value("p", "5"), "5");
        assert_eq!(parameters.value("p", "five"), "\"five\"");
        assert!(!parameters.is_text("p"));
    }
}
