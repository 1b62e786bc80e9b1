//! JSON as values of the template language; integers keep all their digits.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, Value as Jinja};
use serde_json::{Number, Value};

/// An integer beyond 128 bits, as its digits.
#[derive(Debug)]
struct LargeInteger(String);

impl Object for LargeInteger {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The value that a template sees.
pub(super) fn from_json(value: &Value) -> Jinja {
    match value {
        Value::Null => Jinja::from(()),
        Value::Bool(value) => Jinja::from(*value),
        Value::Number(number) => from_number(number),
        Value::String(text) => Jinja::from(text.as_str()),
        Value::Array(items) => items.iter().map(from_json).collect(),
        Value::Object(map) => Jinja::from_pairs(
            map.iter()
                .map(|(key, item)| (key.as_str(), from_json(item))),
        ),
    }
}

fn from_number(number: &Number) -> Jinja {
    if let Some(integer) = number.as_i128() {
        // Small integers as the language's own literals, so that they compare and hash alike.
        return match i64::try_from(integer) {
            Ok(small) => Jinja::from(small),
            Err(_) => Jinja::from(integer),
        };
    }
    match number.as_f64() {
        Some(float) if number.is_f64() => Jinja::from(float),
        // Python reads a float beyond its range as infinity, which is no JSON.
        _ => Jinja::from_object(LargeInteger(number.to_string())),
    }
}

/// The digits of an integer beyond 128 bits.
pub(super) fn large_integer(value: &Jinja) -> Option<&str> {
    let object = value.downcast_object_ref::<LargeInteger>()?;
    Some(&object.0)
}
