//! The metadata of a file: keys in file order, with typed access.

use std::collections::HashMap;

use crate::value::shown;
use crate::{Array, GgufError, GgufString, Value};

/// The key-value pairs of a file, in file order, each key once.
#[derive(Debug, Clone, Default)]
pub struct Meta {
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Meta {
    /// Adds a pair; returns the value if the key exists.
    pub(crate) fn insert(&mut self, key: &str, value: Value) -> Result<(), Value> {
        if self.index.contains_key(key) {
            return Err(value);
        }
        self.index.insert(key.to_owned(), self.entries.len());
        self.entries.push((key.to_owned(), value));
        Ok(())
    }

    /// All pairs, in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries
            .iter()
            .map(|(key, value)| (key.as_str(), value))
    }

    /// Number of pairs.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no pairs.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&i| &self.entries[i].1)
    }

    /// A non-negative integer of any width; producers differ in the width they write.
    ///
    /// # Errors
    /// [`GgufError::Meta`] if the key holds another type.
    pub fn integer(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.read(key, "a whole number, not negative", Value::as_integer)
    }

    /// A float of either width.
    ///
    /// # Errors
    /// [`GgufError::Meta`] if the key holds another type.
    pub fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.read(key, "a float", |value| match *value {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        })
    }

    /// A boolean.
    ///
    /// # Errors
    /// [`GgufError::Meta`] if the key holds another type.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.read(key, "a bool", |value| match value {
            Value::Bool(v) => Some(*v),
            _ => None,
        })
    }

    /// A UTF-8 text.
    ///
    /// # Errors
    /// [`GgufError::Meta`] if the key holds another type, or bytes that are not UTF-8.
    pub fn text(&self, key: &str) -> Result<Option<&str>, GgufError> {
        let found = self.read(key, "a string", |value| match value {
            Value::String(text) => Some(text),
            _ => None,
        })?;
        found.map(|text| utf8(key, text)).transpose()
    }

    /// UTF-8 texts.
    ///
    /// # Errors
    /// [`GgufError::Meta`] if the key holds another type, or an element is not UTF-8; the error
    /// names the element.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&str>>, GgufError> {
        let found = self.read(key, "an array of strings", |value| match value {
            Value::Array(Array::String(texts)) => Some(texts),
            _ => None,
        })?;
        let Some(texts) = found else { return Ok(None) };
        let one = |(i, text)| utf8(&format!("{key}[{i}]"), text);
        texts
            .iter()
            .enumerate()
            .map(one)
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// Non-negative integers of any width. A single number counts as an array of one.
    ///
    /// # Errors
    /// [`GgufError::Meta`] if the key holds another type.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<u64>>, GgufError> {
        self.read(key, "whole numbers, not negative", |value| match value {
            Value::Array(array) => array.as_integers(),
            other => other.as_integer().map(|v| vec![v]),
        })
    }

    /// Floats of single precision.
    ///
    /// # Errors
    /// [`GgufError::Meta`] if the key holds another type.
    pub fn floats(&self, key: &str) -> Result<Option<&[f32]>, GgufError> {
        self.read(key, "an array of f32", |value| match value {
            Value::Array(Array::F32(v)) => Some(v.as_slice()),
            _ => None,
        })
    }

    /// Booleans.
    ///
    /// # Errors
    /// [`GgufError::Meta`] if the key holds another type.
    pub fn booleans(&self, key: &str) -> Result<Option<&[bool]>, GgufError> {
        self.read(key, "an array of bools", |value| match value {
            Value::Array(Array::Bool(v)) => Some(v.as_slice()),
            _ => None,
        })
    }

    fn read<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match read(value) {
            Some(found) => Ok(Some(found)),
            None => {
                let found = format!("{} ({})", value.type_name(), cut(&value.to_string()));
                Err(GgufError::Meta {
                    key: key.to_owned(),
                    expected,
                    found,
                })
            }
        }
    }
}

fn utf8<'a>(key: &str, text: &'a GgufString) -> Result<&'a str, GgufError> {
    text.as_str().map_err(|e| GgufError::Meta {
        key: key.to_owned(),
        expected: "UTF-8 text",
        found: format!(
            "bytes that are not UTF-8 from byte {} on ({})",
            e.valid_up_to(),
            cut(&shown(text.as_bytes()))
        ),
    })
}

/// The beginning of a value's text, for messages.
fn cut(text: &str) -> String {
    const SHOWN: usize = 60;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
