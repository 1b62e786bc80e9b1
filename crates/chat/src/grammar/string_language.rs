//! The texts that a schema allows as strings, as expressions of a grammar's terminals.
//!
//! Tool calls in tags hold strings as they are, without quotes and escapes, so the compiler's own
//! reading of string keywords does not apply.

use serde_json::{Map, Value};

use super::literal;
use super::schema_source::SchemaSource;
use super::search_pattern::{ANY_TEXT, search_terminal};
use crate::error::ChatError;
use crate::request::SchemaStrictness;

/// Most references and alternatives to follow.
const MAX_DEPTH: usize = 16;
/// Longest bound of a schema that is not strict: a bound takes as many automaton states as it
/// counts.
const MAX_LOOSE_LENGTH: u64 = 512;

/// Some texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StringLanguage {
    /// Any text.
    Any,
    /// These texts; none of them, if there are none.
    Listed(Vec<String>),
    /// What an expression of terminals matches, in Lark's notation.
    Matching(String),
}

impl StringLanguage {
    /// The strings that `schema` allows. If it is strict, a keyword that cannot be kept is an
    /// error.
    pub(super) fn of(
        schema: &Value,
        source: &SchemaSource<'_>,
    ) -> Result<StringLanguage, ChatError> {
        read(schema, source, 0)
    }

    /// As an expression of terminals.
    pub(super) fn expression(&self) -> String {
        match self {
            StringLanguage::Any => format!("/{ANY_TEXT}/"),
            StringLanguage::Listed(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
                texts.join(" | ")
            }
            StringLanguage::Matching(expression) => expression.clone(),
        }
    }

    fn is_empty(&self) -> bool {
        matches!(self, StringLanguage::Listed(texts) if texts.is_empty())
    }

    fn and(self, other: StringLanguage) -> StringLanguage {
        use StringLanguage::{Any, Listed, Matching};
        match (self, other) {
            (Any, other) | (other, Any) => other,
            (Listed(mut texts), Listed(others)) => {
                texts.retain(|text| others.contains(text));
                Listed(texts)
            }
            (one, other) if one.is_empty() || other.is_empty() => Listed(Vec::new()),
            (one, other) => Matching(format!("({}) & ({})", one.expression(), other.expression())),
        }
    }

    fn or(self, other: StringLanguage) -> StringLanguage {
        use StringLanguage::{Any, Listed, Matching};
        match (self, other) {
            (Any, _) | (_, Any) => Any,
            (Listed(mut texts), Listed(others)) => {
                for other in others {
                    if !texts.contains(&other) {
                        texts.push(other);
                    }
                }
                Listed(texts)
            }
            (one, other) if one.is_empty() => other,
            (one, other) if other.is_empty() => one,
            (one, other) => Matching(format!("({}) | ({})", one.expression(), other.expression())),
        }
    }
}

fn read(
    schema: &Value,
    source: &SchemaSource<'_>,
    depth: usize,
) -> Result<StringLanguage, ChatError> {
    let map = match schema {
        Value::Bool(false) => return Ok(StringLanguage::Listed(Vec::new())),
        Value::Object(map) => map,
        _ => return Ok(StringLanguage::Any),
    };
    if depth >= MAX_DEPTH {
        return match source.strictness {
            SchemaStrictness::Strict => Err(source.error("references nest too deep for a string")),
            SchemaStrictness::BestEffort => Ok(StringLanguage::Any),
        };
    }
    if !allows_strings(map) {
        return Ok(StringLanguage::Listed(Vec::new()));
    }
    let mut texts = own_keywords(map, source)?;
    if let Some(target) = source.target(schema) {
        texts = texts.and(read(target, source, depth + 1)?);
    }
    for part in parts(map, "allOf") {
        texts = texts.and(read(part, source, depth + 1)?);
    }
    for keyword in ["anyOf", "oneOf"] {
        if !map.contains_key(keyword) {
            continue;
        }
        let mut union = StringLanguage::Listed(Vec::new());
        for part in parts(map, keyword) {
            let other = read(part, source, depth + 1)?;
            if keyword == "oneOf"
                && source.strictness == SchemaStrictness::Strict
                && !are_disjoint(&union, &other)
            {
                return Err(source.error("keyword 'oneOf' has string branches that may overlap"));
            }
            union = union.or(other);
        }
        texts = texts.and(union);
    }
    Ok(texts)
}

fn are_disjoint(one: &StringLanguage, other: &StringLanguage) -> bool {
    use StringLanguage::Listed;
    match (one, other) {
        (Listed(texts), Listed(others)) => !texts.iter().any(|text| others.contains(text)),
        (one, other) => one.is_empty() || other.is_empty(),
    }
}

fn allows_strings(map: &Map<String, Value>) -> bool {
    match map.get("type") {
        Some(Value::String(name)) => name == "string",
        Some(Value::Array(names)) => names.iter().any(|name| name == "string"),
        _ => true,
    }
}

fn parts<'a>(map: &'a Map<String, Value>, keyword: &str) -> &'a [Value] {
    map.get(keyword)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// What a schema's own string keywords allow.
fn own_keywords(
    map: &Map<String, Value>,
    source: &SchemaSource<'_>,
) -> Result<StringLanguage, ChatError> {
    let is_strict = source.strictness == SchemaStrictness::Strict;
    let mut texts = StringLanguage::Any;
    for values in [map.get("const").map(std::slice::from_ref), listed(map)] {
        let strings = values.map(|values| values.iter().filter_map(Value::as_str));
        if let Some(strings) = strings {
            texts = texts.and(StringLanguage::Listed(strings.map(str::to_owned).collect()));
        }
    }
    if let Some(Value::String(pattern)) = map.get("pattern") {
        match search_terminal(pattern) {
            Some(terminal) => {
                texts = texts.and(StringLanguage::Matching(format!("/{terminal}/")));
            }
            None if is_strict => {
                let message = format!("keyword 'pattern' cannot be kept for {pattern:?}");
                return Err(source.error(&message));
            }
            None => {}
        }
    }
    let bound = |key: &str| map.get(key).and_then(super::schema_source::whole_number);
    let bound = |key: &str| bound(key).filter(|n| is_strict || *n <= MAX_LOOSE_LENGTH);
    let length = match (bound("minLength"), bound("maxLength")) {
        (None | Some(0), None) => None,
        (least, Some(most)) => Some(format!("/(?s:.{{{},{most}}})/", least.unwrap_or(0))),
        (Some(least), None) => Some(format!("/(?s:.{{{least},}})/")),
    };
    if let Some(length) = length {
        texts = texts.and(StringLanguage::Matching(length));
    }
    if let Some(Value::String(name)) = map.get("format")
        && let Some(pattern) = format_pattern(name)
    {
        texts = texts.and(StringLanguage::Matching(format!("/{pattern}/")));
    }
    Ok(texts)
}

fn listed(map: &Map<String, Value>) -> Option<&[Value]> {
    map.get("enum").and_then(Value::as_array).map(Vec::as_slice)
}

/// Texts of a format, of those that JSON Schema defines; the usual spellings suffice.
fn format_pattern(name: &str) -> Option<String> {
    const DATE: &str = r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))";
    const TIME: &str = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
    const LABEL: &str = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?";
    const BYTE: &str = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    const GROUP: &str = "[0-9A-Fa-f]{1,4}";
    Some(match name {
        "date-time" => format!("{DATE}T{TIME}"),
        "date" => DATE.to_owned(),
        "time" => TIME.to_owned(),
        "duration" => {
            let time = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)";
            let date = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)";
            format!("P(?:{date}(?:{time})?|{time}|[0-9]+W)")
        }
        "email" => {
            let word = "[A-Za-z0-9!#$%&'*+=?^_`{|}~-]{1,20}";
            format!(r"{word}(?:\.{word}){{0,2}}@{LABEL}(?:\.{LABEL}){{0,2}}")
        }
        "hostname" => format!(r"{LABEL}(?:\.{LABEL}){{0,2}}"),
        "ipv4" => format!(r"(?:{BYTE}\.){{3}}{BYTE}"),
        "ipv6" => {
            format!("(?:{GROUP}:){{7}}{GROUP}|(?:{GROUP}:){{0,5}}{GROUP}::{GROUP}|::(?:{GROUP})?")
        }
        "uuid" => "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}".to_owned(),
        "uri" => {
            let letter = "[A-Za-z0-9._~!$&'()*+,;=:@-]";
            format!(
                r"[A-Za-z][A-Za-z0-9+.-]*:(?:\/\/{LABEL}(?:\.{LABEL}){{0,3}}(?::[0-9]{{1,5}})?)?(?:\/{letter}*)*(?:\?{letter}*)?(?:#{letter}*)?"
            )
        }
        _ => return None,
    })
}
