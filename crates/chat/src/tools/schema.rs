//! Converts parameter text to JSON by the parameter's schema.

use regex::Regex;
use serde_json::Value;

use super::references::resolve_pointer;
use super::{json_repair, literals};

/// Maximum number of references and alternatives to follow.
const MAX_DEPTH: usize = 16;

/// A JSON type, as schemas name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JsonType {
    Text,
    Integer,
    Number,
    Boolean,
    Null,
    Object,
    Array,
}

/// The types that a schema allows, in its order; `None` if it allows all.
type AllowedTypes = Option<Vec<JsonType>>;

/// The parameter schemas of one tool.
#[derive(Debug, Clone, Default)]
pub(crate) struct ParameterSchemas {
    /// The whole schema; references point into it.
    root: Value,
}

/// What a parameter's text may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ParameterType {
    types: AllowedTypes,
}

impl ParameterSchemas {
    pub(crate) fn new(schema: Option<&Value>) -> ParameterSchemas {
        ParameterSchemas {
            root: schema.cloned().unwrap_or_default(),
        }
    }

    /// Whether the tool declares a parameter of that name.
    pub(crate) fn declares(&self, key: &str) -> bool {
        self.named(&self.root, key, 0).is_some()
    }

    /// The type of a parameter. Without a schema it is text.
    pub(crate) fn parameter(&self, key: &str) -> ParameterType {
        match self.named(&self.root, key, 0) {
            Some(types) => ParameterType { types },
            None => self.additional_type(),
        }
    }

    /// The type of a parameter that the tool does not declare.
    pub(crate) fn additional_type(&self) -> ParameterType {
        let types = self.additional(&self.root, 0).filter(Option::is_some);
        let types = types.unwrap_or(Some(vec![JsonType::Text]));
        ParameterType { types }
    }

    /// The type of a parameter with this schema, which is a part of the tool's.
    pub(crate) fn type_of(&self, schema: &Value) -> ParameterType {
        let types = types_of(schema, &self.root, 0);
        ParameterType { types }
    }

    /// The types of the property `key`, if `schema` names it: in any alternative, by name or by
    /// pattern.
    fn named(&self, schema: &Value, key: &str, depth: usize) -> Option<AllowedTypes> {
        if depth >= MAX_DEPTH {
            return None;
        }
        let mut found: Option<AllowedTypes> = None;
        let mut restrict = |types: AllowedTypes| {
            found = Some(match found.take() {
                None => types,
                Some(other) => intersection(other, types),
            });
        };
        if let Some(property) = schema.get("properties").and_then(|map| map.get(key)) {
            restrict(types_of(property, &self.root, 0));
        }
        for (pattern, property) in members(schema, "patternProperties") {
            if Regex::new(pattern).is_ok_and(|pattern| pattern.is_match(key)) {
                restrict(types_of(property, &self.root, 0));
            }
        }
        if let Some(target) = reference(schema, &self.root)
            && let Some(types) = self.named(target, key, depth + 1)
        {
            restrict(types);
        }
        for part in items(schema, "allOf") {
            if let Some(types) = self.named(part, key, depth + 1) {
                restrict(types);
            }
        }
        for types in alternatives(schema, |part| self.named(part, key, depth + 1)) {
            restrict(types);
        }
        found
    }

    /// The types of properties without a name of their own.
    fn additional(&self, schema: &Value, depth: usize) -> Option<AllowedTypes> {
        if depth >= MAX_DEPTH {
            return None;
        }
        for key in ["additionalProperties", "unevaluatedProperties"] {
            if let Some(more) = schema.get(key).filter(|more| more.is_object()) {
                return Some(types_of(more, &self.root, 0));
            }
        }
        let target = reference(schema, &self.root);
        if let Some(types) = target.and_then(|target| self.additional(target, depth + 1)) {
            return Some(types);
        }
        let mut parts = items(schema, "allOf").iter();
        if let Some(types) = parts.find_map(|part| self.additional(part, depth + 1)) {
            return Some(types);
        }
        alternatives(schema, |part| self.additional(part, depth + 1)).pop()
    }
}

impl ParameterType {
    /// Whether the parameter is only a string, so that it can be streamed.
    pub(crate) fn is_text(&self) -> bool {
        self.types.as_deref() == Some(&[JsonType::Text])
    }

    /// The types to try, in order; `None` if all are allowed.
    pub(crate) fn kinds(&self) -> Option<&[JsonType]> {
        self.types.as_deref()
    }

    /// Whether a value that begins like `text` is JSON with parts of its own.
    pub(crate) fn reads_as_json(&self, text: &str) -> bool {
        let allows = |kind| {
            self.types
                .as_ref()
                .is_none_or(|types| types.contains(&kind))
        };
        match text.trim_start().bytes().next() {
            Some(b'{') => allows(JsonType::Object),
            Some(b'[') => allows(JsonType::Array),
            Some(b'"') => self.types.is_none(),
            _ => false,
        }
    }

    /// Whether the value of `text` is `text` itself, as a string.
    pub(crate) fn reads_as_text(&self, text: &str) -> bool {
        self.value(text) == quoted(text)
    }

    /// The allowed types are tried in the schema's order; text that fits none stays a string. JSON
    /// of a type before `string` is taken as such, and any JSON if all types are allowed.
    pub(crate) fn value(&self, text: &str) -> String {
        let trimmed = text.trim();
        let Some(types) = &self.types else {
            return match serde_json::from_str::<Value>(trimmed) {
                Ok(_) => trimmed.to_owned(),
                Err(_) => quoted(text),
            };
        };
        if types.contains(&JsonType::Null) && matches!(trimmed, "null" | "None") {
            return "null".to_owned();
        }
        let before_text = types.iter().take_while(|kind| **kind != JsonType::Text);
        if let Ok(json) = serde_json::from_str::<Value>(trimmed)
            && before_text.into_iter().any(|kind| kind.holds(&json))
        {
            return trimmed.to_owned();
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

    /// The type's name in schemas.
    pub(crate) fn name(self) -> &'static str {
        match self {
            JsonType::Text => "string",
            JsonType::Integer => "integer",
            JsonType::Number => "number",
            JsonType::Boolean => "boolean",
            JsonType::Null => "null",
            JsonType::Object => "object",
            JsonType::Array => "array",
        }
    }

    /// Whether a JSON value has this type.
    fn holds(self, value: &Value) -> bool {
        let kind = JsonType::of_value(value);
        kind == self || (kind == JsonType::Integer && self == JsonType::Number)
    }

    /// `text` as a JSON value of this type, if it is one.
    fn read(self, text: &str) -> Option<String> {
        let trimmed = text.trim();
        let json = || serde_json::from_str::<Value>(trimmed).ok();
        match self {
            JsonType::Text => Some(quoted(text)),
            JsonType::Integer => literals::integer(trimmed).or_else(|| {
                let whole: f64 = literals::number(trimmed)?.parse().ok()?;
                // Up to 2^53 every whole number is exact.
                (whole.fract() == 0.0 && whole.abs() <= 9_007_199_254_740_992.0)
                    .then(|| format!("{whole:.0}"))
            }),
            JsonType::Number => literals::number(trimmed),
            JsonType::Boolean => literals::boolean(trimmed).map(str::to_owned),
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

/// The target of a schema's reference; one that leads out of the document has none.
fn reference<'a>(schema: &Value, root: &'a Value) -> Option<&'a Value> {
    resolve_pointer(root, schema.get("$ref")?.as_str()?)
}

/// The schemas of an array keyword.
fn items<'a>(schema: &'a Value, keyword: &str) -> &'a [Value] {
    match schema.get(keyword) {
        Some(Value::Array(items)) => items,
        _ => &[],
    }
}

/// The schemas of an object keyword, by name.
fn members<'a>(schema: &'a Value, keyword: &str) -> impl Iterator<Item = (&'a String, &'a Value)> {
    let map = schema.get(keyword).and_then(Value::as_object);
    map.into_iter().flatten()
}

/// What the alternatives of each kind say, joined per kind; those that say nothing do not count.
fn alternatives(
    schema: &Value,
    read: impl Fn(&Value) -> Option<AllowedTypes>,
) -> Vec<AllowedTypes> {
    let branches = ["then", "else"].iter().filter_map(|key| schema.get(*key));
    let dependent = members(schema, "dependentSchemas").map(|(_, part)| part);
    let kinds: [Vec<&Value>; 3] = [
        items(schema, "anyOf").iter().collect(),
        items(schema, "oneOf").iter().collect(),
        branches.chain(dependent).collect(),
    ];
    let joined = kinds.into_iter().map(|parts| {
        let said = parts.into_iter().filter_map(&read);
        said.reduce(union)
    });
    joined.flatten().collect()
}

fn union(one: AllowedTypes, other: AllowedTypes) -> AllowedTypes {
    let (mut types, other) = (one?, other?);
    for kind in other {
        if !types.contains(&kind) {
            types.push(kind);
        }
    }
    Some(types)
}

/// The types that both allow, in the order of the first; every integer is a number.
fn intersection(one: AllowedTypes, other: AllowedTypes) -> AllowedTypes {
    let (one, other) = match (one, other) {
        (None, types) | (types, None) => return types,
        (Some(one), Some(other)) => (one, other),
    };
    let mut types = Vec::new();
    for kind in &one {
        let kind = match kind {
            JsonType::Number if !other.contains(kind) && other.contains(&JsonType::Integer) => {
                JsonType::Integer
            }
            JsonType::Integer if other.contains(&JsonType::Number) => JsonType::Integer,
            kind if other.contains(kind) => *kind,
            _ => continue,
        };
        if !types.contains(&kind) {
            types.push(kind);
        }
    }
    // Nothing fits a contradiction, so the first schema decides.
    Some(if types.is_empty() { one } else { types })
}

/// The types that `schema` allows.
fn types_of(schema: &Value, root: &Value, depth: usize) -> AllowedTypes {
    if depth >= MAX_DEPTH {
        return None;
    }
    let mut types = stated_types(schema);
    let inner = |part: &Value| types_of(part, root, depth + 1);
    let mut restrict = |other: AllowedTypes| types = intersection(types.take(), other);
    if let Some(target) = reference(schema, root) {
        restrict(inner(target));
    }
    items(schema, "allOf")
        .iter()
        .for_each(|part| restrict(inner(part)));
    for keyword in ["anyOf", "oneOf"] {
        let parts = items(schema, keyword).iter().map(inner);
        if let Some(joined) = parts.reduce(union) {
            restrict(joined);
        }
    }
    let types = types.or_else(|| implied_type(schema).map(|kind| vec![kind]));
    if schema.get("nullable") == Some(&Value::Bool(true)) {
        return union(types, Some(vec![JsonType::Null]));
    }
    types
}

/// The types that `type`, `const` and `enum` name.
fn stated_types(schema: &Value) -> AllowedTypes {
    let named = match schema.get("type") {
        Some(Value::String(name)) => JsonType::of(name).map(|kind| vec![kind]),
        Some(Value::Array(names)) => {
            let names = names.iter().filter_map(Value::as_str);
            Some(names.filter_map(JsonType::of).collect())
        }
        _ => None,
    };
    let named = named.filter(|types: &Vec<JsonType>| !types.is_empty());
    let values = match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => std::slice::from_ref(value),
        (None, Some(Value::Array(values))) => values,
        _ => return named,
    };
    // Any value is a valid string, so strings are tried last.
    let (texts, mut kinds): (Vec<JsonType>, Vec<JsonType>) = values
        .iter()
        .map(JsonType::of_value)
        .partition(|kind| *kind == JsonType::Text);
    kinds.extend(texts);
    kinds.dedup();
    intersection(named, Some(kinds))
}

/// The type whose keywords a schema without a type uses.
fn implied_type(schema: &Value) -> Option<JsonType> {
    const KEYWORDS: [(JsonType, &[&str]); 4] = [
        (
            JsonType::Object,
            &["properties", "patternProperties", "additionalProperties"],
        ),
        (JsonType::Array, &["items", "prefixItems"]),
        (JsonType::Text, &["pattern", "minLength", "maxLength"]),
        (JsonType::Number, &["minimum", "maximum", "multipleOf"]),
    ];
    let has = |keywords: &[&str]| keywords.iter().any(|key| schema.get(key).is_some());
    let mut kinds = KEYWORDS.iter().filter(|(_, keywords)| has(keywords));
    kinds.next().map(|(kind, _)| *kind)
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
        let got = parameters.parameter("p").value(text);
        assert_eq!(got, expected, "{root} {text}");
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
    fn value_of_a_schema_without_types_is_json_if_valid_else_string() {
        check(json!({}), "5", "5");
        check(json!({"description": "any"}), "five", "\"five\"");
        check(json!(true), "[1]", "[1]");
    }

    #[test]
    fn unknown_parameter_is_text() {
        for schema in [
            None,
            Some(json!({"type": "object"})),
            Some(json!({"type": "object", "additionalProperties": true})),
            Some(json!({"properties": {"other": {"type": "integer"}}})),
        ] {
            let parameters = ParameterSchemas::new(schema.as_ref());
            assert_eq!(parameters.parameter("p").value("5"), "\"5\"", "{schema:?}");
            assert!(parameters.parameter("p").is_text());
            assert!(!parameters.declares("p"));
        }
    }

    /// AllowedTypes of the parameter `p` by a whole schema.
    fn check_root(root: Value, text: &str, expected: &str) {
        let got = ParameterSchemas::new(Some(&root))
            .parameter("p")
            .value(text);
        assert_eq!(got, expected, "{root} {text}");
    }

    #[test]
    fn types_come_from_the_whole_schema() {
        let text = json!({"type": "string"});
        let whole = json!({"type": "integer"});
        check_root(json!({"additionalProperties": text}), "8080", "\"8080\"");
        check_root(json!({"additionalProperties": whole}), "8080", "8080");
        check_root(json!({"patternProperties": {"^p$": whole}}), "7", "7");
        check_root(
            json!({"patternProperties": {"^q$": text}, "additionalProperties": whole}),
            "7",
            "7",
        );
        for keyword in ["anyOf", "oneOf", "allOf"] {
            let branches = json!([{"properties": {"q": whole}}, {"properties": {"p": text}}]);
            check_root(json!({keyword: branches}), "90210", "\"90210\"");
            let branches = json!([{"properties": {"p": whole}}]);
            check_root(json!({keyword: branches}), "90210", "90210");
            check_root(json!({"properties": {"p": {keyword: [whole]}}}), "5", "5");
            let more = json!([{"additionalProperties": whole}]);
            check_root(json!({keyword: more}), "5", "5");
        }
        let union =
            json!([{"properties": {"p": {"type": "boolean"}}}, {"properties": {"p": text}}]);
        check_root(json!({"anyOf": union}), "true", "true");
        check_root(json!({"anyOf": union}), "maybe", "\"maybe\"");
        let defs = json!({"args": {"properties": {"p": whole}}});
        check_root(json!({"$ref": "#/$defs/args", "$defs": defs}), "5", "5");
        check_root(
            json!({"if": {}, "then": {"properties": {"p": whole}}}),
            "5",
            "5",
        );
        check_root(
            json!({"properties": {"p": {}}, "allOf": [{"properties": {"p": text}}]}),
            "5",
            "\"5\"",
        );
        check(json!({"$ref": "#/$defs/count", "type": "number"}), "5", "5");
        check(
            json!({"allOf": [{"type": ["string", "integer"]}, whole]}),
            "5",
            "5",
        );
        check(json!({"type": "string", "nullable": true}), "null", "null");
        check(json!({"type": "string", "enum": ["1", "2"]}), "1", "\"1\"");
    }

    #[test]
    fn spelled_scalars_are_read_as_python_reads_them() {
        check(json!({"type": "integer"}), "03106", "3106");
        check(json!({"type": "integer"}), "+1_000", "1000");
        check(json!({"type": "integer"}), "1e3", "1000");
        check(json!({"type": "number"}), ".5", "0.5");
        check(json!({"type": "number"}), "inf", "\"inf\"");
        check(json!({"type": "boolean"}), "TRUE", "true");
        for digits in ["123456789012345678901234567890", "-9223372036854775809"] {
            for kind in ["integer", "number"] {
                check(json!({"type": kind}), digits, digits);
            }
            let list = format!("[{digits}]");
            check(json!({"type": "array"}), &list, &list);
            check(json!({}), digits, digits);
        }
    }
}
