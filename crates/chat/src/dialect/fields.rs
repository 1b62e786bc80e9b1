//! Reads JSON fields; errors name the field.
//!
//! The rules of all dialects: `null` equals absent, `32.0` is an integer, the text of a number is
//! that number (`"32"`), unknown fields are ignored.

use std::borrow::Cow;
use std::fmt::Display;
use std::ops::RangeInclusive;

use serde_json::{Map, Number, Value};

use crate::error::ChatError;

/// The fields of one JSON object, with the object's path in the request.
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Empty for the body itself, else a path such as `messages[2]`.
    path: String,
}

/// Parses a body; nesting beyond serde_json's limit of 128 is an error like any other.
pub(crate) fn parse_body(body: &[u8]) -> Result<Map<String, Value>, ChatError> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(ChatError::invalid(format!(
            "the body must be a JSON object, not {}",
            kind_of(&other)
        ))),
        Err(err) => Err(ChatError::invalid(format!(
            "the body is not valid JSON: {err}"
        ))),
    }
}

impl<'a> Fields<'a> {
    pub(crate) fn body(map: &'a Map<String, Value>) -> Fields<'a> {
        Fields {
            map,
            path: String::new(),
        }
    }

    /// The fields of `value` at `path`.
    pub(crate) fn of(value: &'a Value, path: String) -> Result<Fields<'a>, ChatError> {
        match value {
            Value::Object(map) => Ok(Fields { map, path }),
            other => Err(ChatError::field(path, must_be("an object", other))),
        }
    }

    /// The path of a field of this object.
    pub(crate) fn path(&self, key: &str) -> String {
        if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        }
    }

    /// The path of this object.
    pub(crate) fn own_path(&self) -> &str {
        &self.path
    }

    pub(crate) fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    pub(crate) fn error(&self, key: &str, message: impl Display) -> ChatError {
        ChatError::field(self.path(key), message)
    }

    /// A field, unless it is absent or `null`.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// The first of several aliases that is present and not `null`.
    pub(crate) fn first<'k>(&self, keys: &[&'k str]) -> Option<&'k str> {
        keys.iter().copied().find(|key| self.get(key).is_some())
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, ChatError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(self.error(key, must_be("true or false", other))),
        }
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool, ChatError> {
        Ok(self.bool(key)?.unwrap_or(default))
    }

    pub(crate) fn string(&self, key: &str) -> Result<Option<&'a str>, ChatError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.error(key, must_be("a string", other))),
        }
    }

    pub(crate) fn array(&self, key: &str) -> Result<Option<&'a [Value]>, ChatError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(self.error(key, must_be("an array", other))),
        }
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Fields<'a>>, ChatError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => Fields::of(value, self.path(key)).map(Some),
        }
    }

    /// An integer in `range`; `32.0` counts as 32.
    pub(crate) fn int(
        &self,
        key: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ChatError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let number = integer(&number_of(value))
            .ok_or_else(|| self.error(key, must_be("an integer", value)))?;
        match i64::try_from(number) {
            Ok(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(self.error(key, out_of_range(&range, value))),
        }
    }

    /// An integer from 0 to `most`.
    pub(crate) fn count(&self, key: &str, most: usize) -> Result<Option<usize>, ChatError> {
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let count = self.int(key, 0..=most)?;
        Ok(count.map(|count| usize::try_from(count).expect("counts are not negative")))
    }

    /// A finite number inside `range`.
    pub(crate) fn number(
        &self,
        key: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, ChatError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match number_of(value).as_f64() {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            Some(_) => Err(self.error(key, out_of_range(&range, value))),
            None => Err(self.error(key, must_be("a number", value))),
        }
    }
}

/// The number that a text spells, or the value itself.
pub(crate) fn number_of(value: &Value) -> Cow<'_, Value> {
    let number = match value {
        Value::String(text) => serde_json::from_str::<Number>(text.trim()).ok(),
        _ => None,
    };
    match number {
        Some(number) => Cow::Owned(Value::Number(number)),
        None => Cow::Borrowed(value),
    }
}

/// The value as an integer: `3` or `3.0`.
pub(crate) fn integer(value: &Value) -> Option<i128> {
    let number = value.as_number()?;
    if let Some(whole) = number.as_i128() {
        return Some(whole);
    }
    let float = number.as_f64()?;
    // No field accepts values beyond 2^63, so exactness does not matter there.
    (float.fract() == 0.0 && float.abs() < 1e30).then_some(float as i128)
}

/// `must be X, not Y`.
pub(crate) fn must_be(wanted: &str, got: &Value) -> String {
    format!("must be {wanted}, not {}", kind_of(got))
}

fn out_of_range<T: Display>(range: &RangeInclusive<T>, got: &Value) -> String {
    format!(
        "must be between {} and {}, not {got}",
        range.start(),
        range.end()
    )
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.as_f64().is_none() => "a number beyond 1e308",
        Value::Number(_) if integer(value).is_none() => "a fractional number",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
