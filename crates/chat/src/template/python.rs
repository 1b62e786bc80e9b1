//! Python's formatting of values and its set of blanks.

use std::borrow::Cow;

use minijinja::value::{Value, ValueKind};

/// Deepest nesting of a value. JSON of a request nests up to 128 levels.
pub(super) const MAX_NESTING: usize = 200;

/// Which sides to strip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StripSide {
    Left,
    Right,
    Both,
}

/// `text` without leading or trailing characters of `set`; without blanks if there is no set.
pub(super) fn strip<'t>(text: &'t str, set: Option<&str>, ends: StripSide) -> &'t str {
    let drop = |letter: char| match set {
        Some(set) => set.contains(letter),
        None => is_space(letter),
    };
    match ends {
        StripSide::Left => text.trim_start_matches(drop),
        StripSide::Right => text.trim_end_matches(drop),
        StripSide::Both => text.trim_matches(drop),
    }
}

/// Python counts the four information separators as blanks; Unicode does not.
fn is_space(letter: char) -> bool {
    letter.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&letter)
}

/// `str(value)`; an undefined value is empty. `None` if it is longer than about `limit_bytes`, or
/// nested deeper than any value of a template.
pub(super) fn str_within(value: &Value, limit_bytes: u64) -> Option<Cow<'_, str>> {
    match (value.kind(), value.as_str()) {
        (ValueKind::Undefined, _) => Some(Cow::Borrowed("")),
        (_, Some(text)) => (text.len() as u64 <= limit_bytes).then_some(Cow::Borrowed(text)),
        _ => {
            let mut out = String::new();
            let limit = usize::try_from(limit_bytes).unwrap_or(usize::MAX);
            write_repr(value, MAX_NESTING, limit, &mut out)?;
            Some(Cow::Owned(out))
        }
    }
}

/// `repr(value)`.
fn write_repr(value: &Value, levels: usize, limit: usize, out: &mut String) -> Option<()> {
    if out.len() > limit {
        return None;
    }
    let levels = levels.checked_sub(1)?;
    match value.kind() {
        ValueKind::String => write_quoted(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.push_str(&float(number)),
            Err(_) => out.push_str(&value.to_string()),
        },
        ValueKind::Seq => {
            let (open, close) = if value.is_tuple() {
                ('(', ')')
            } else {
                ('[', ']')
            };
            out.push(open);
            let mut n_items = 0;
            for item in value.try_iter().into_iter().flatten() {
                if n_items > 0 {
                    out.push_str(", ");
                }
                write_repr(&item, levels, limit, out)?;
                n_items += 1;
            }
            if value.is_tuple() && n_items == 1 {
                out.push(',');
            }
            out.push(close);
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(&key, levels, limit, out)?;
                out.push_str(": ");
                write_repr(
                    &value.get_item(&key).unwrap_or_default(),
                    levels,
                    limit,
                    out,
                )?;
            }
            out.push('}');
        }
        ValueKind::Undefined => out.push_str("Undefined"),
        // minijinja formats booleans and none as Python does.
        _ => out.push_str(&value.to_string()),
    }
    Some(())
}

fn write_quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for letter in text.chars() {
        match letter {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            letter if letter == quote => {
                out.push('\\');
                out.push(letter);
            }
            letter if letter < ' ' || letter == '\u{7f}' => {
                out.push_str(&format!("\\x{:02x}", u32::from(letter)));
            }
            letter => out.push(letter),
        }
    }
    out.push(quote);
}

/// `repr` of a float: the shortest digits, an exponent from 1e16 up and below 1e-4.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) || number == 0.0 {
        let mut plain = number.to_string();
        if !plain.contains('.') {
            plain.push_str(".0");
        }
        return plain;
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_formatted_like_python() {
        for (number, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (123456789.125, "123456789.125"),
        ] {
            assert_eq!(float(number), text);
        }
    }

    #[test]
    fn containers_are_formatted_like_python() {
        let value = Value::from_pairs([
            (
                "a",
                Value::from(vec![Value::from(1), Value::from(true), Value::from(())]),
            ),
            ("it's", Value::from("x'y\"\n")),
        ]);
        assert_eq!(
            str_within(&value, 1000).unwrap(),
            "{'a': [1, True, None], \"it's\": 'x\\'y\"\\n'}"
        );
    }
}
