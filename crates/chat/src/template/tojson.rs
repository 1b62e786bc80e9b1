//! The `tojson` filter the models were trained with.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::value::large_integer;
use super::{limits, python};

/// The layout of JSON.
struct JsonLayout {
    ensure_ascii: bool,
    /// Indentation per level; `None` writes a single line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
    /// The longest text.
    limit_bytes: usize,
}

/// `value | tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, as Python's
/// `json.dumps`: separators `", "` and `": "`, no HTML escapes, keys in their own order.
pub(super) fn filter(
    state: &mut State,
    value: &Value,
    ensure_ascii: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let by_name: Option<bool> = options.get("ensure_ascii")?;
    let indent: Option<Value> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let indent = match indent {
        Some(indent) if !indent.is_none() && !indent.is_undefined() => Some(indent_text(&indent)?),
        _ => None,
    };
    let (item_separator, key_separator) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("tojson separators must be a pair")),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let layout = JsonLayout {
        ensure_ascii: ensure_ascii.or(by_name).unwrap_or(false),
        indent,
        item_separator,
        key_separator,
        sort_keys: sort_keys.unwrap_or(false),
        limit_bytes: usize::try_from(limits::left(state)).unwrap_or(usize::MAX),
    };
    let mut out = String::new();
    layout.write(value, 0, &mut out)?;
    Ok(Value::from_safe_string(out))
}

fn indent_text(indent: &Value) -> Result<String, Error> {
    match indent.as_str() {
        Some(text) if text.len() <= 64 => Ok(text.to_owned()),
        Some(_) => Err(invalid("tojson indent must have at most 64 bytes")),
        None => match indent.as_usize() {
            Some(width) if width <= 64 => Ok(" ".repeat(width)),
            _ => Err(invalid("tojson indent must be a text or a number up to 64")),
        },
    }
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

impl JsonLayout {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > python::MAX_NESTING || out.len() > self.limit_bytes {
            return Err(limits::over("it wrote JSON that is too long or too deep"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&python::float(f64::try_from(value.clone())?)),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_list('[', ']', items.len(), depth, out, |index, out| {
                    self.write(&items[index], depth + 1, out)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_list('{', '}', keys.len(), depth, out, |index, out| {
                    let key = &keys[index];
                    match key.as_str() {
                        Some(text) => self.write_string(text, out),
                        None => {
                            out.push('"');
                            self.write(key, depth + 1, out)?;
                            out.push('"');
                        }
                    }
                    out.push_str(&self.key_separator);
                    self.write(&value.get_item(key)?, depth + 1, out)
                })?;
            }
            _ => {
                if let Some(digits) = large_integer(value) {
                    out.push_str(digits);
                    return Ok(());
                }
                return Err(Error::new(
                    ErrorKind::BadSerialization,
                    format!("a value of kind {} cannot be written as JSON", value.kind()),
                ));
            }
        }
        Ok(())
    }

    fn write_list(
        &self,
        open: char,
        close: char,
        n_items: usize,
        depth: usize,
        out: &mut String,
        mut write_item: impl FnMut(usize, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for index in 0..n_items {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            self.break_line(depth + 1, out);
            write_item(index, out)?;
        }
        if n_items > 0 {
            self.break_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn break_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for letter in text.chars() {
            match letter {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                letter if letter < ' ' || (self.ensure_ascii && !letter.is_ascii()) => {
                    for unit in letter.encode_utf16(&mut [0; 2]) {
                        write!(out, "\\u{unit:04x}").expect("writing to a string cannot fail");
                    }
                }
                letter => out.push(letter),
            }
        }
        out.push('"');
    }
}
