//! Repairs JSON while it streams.
//!
//! No JSON library repairs partial input and passes strict JSON through byte for byte, so this is
//! our own.
//!
//! Repaired: single quotes, bare keys, Python's `True`, `False` and `None`, trailing commas, raw
//! line breaks and unknown escapes in strings, lone surrogates, `+1`, `.5` and `5.`.

/// Deeper nesting is rejected, as in request bodies.
const MAX_DEPTH: usize = 120;

/// A value being read. The output so far is always a prefix of valid JSON.
#[derive(Debug, Clone, Default)]
pub(crate) struct JsonRepair {
    stack: Vec<Frame>,
    state: RepairState,
    /// A comma and the blanks after it, until another item follows.
    comma: String,
    /// Characters of an unfinished number, word or escape.
    partial: String,
    /// A high surrogate that waits for the low one.
    high: Option<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Frame {
    Object,
    Array,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum RepairState {
    /// Expects a value.
    #[default]
    Value,
    /// Expects a value or the end of the array.
    ValueOrEnd,
    /// Expects a key or the end of the object.
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    /// Inside a string in these quotes; a key or a value.
    Text {
        quote: char,
        is_key: bool,
    },
    /// After a backslash.
    Escape {
        quote: char,
        is_key: bool,
    },
    /// Inside `\u` and its digits.
    Unicode {
        quote: char,
        is_key: bool,
    },
    Word {
        is_key: bool,
    },
    Number,
    Done,
}

/// The text cannot be repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Unrepairable;

/// The text cannot be repaired from this byte on; earlier text was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnrepairableAt(pub(crate) usize);

impl JsonRepair {
    /// Whether the value is complete.
    pub(crate) fn is_done(&self) -> bool {
        self.state == RepairState::Done
    }

    /// Reads `text` up to the end of the value and writes strict JSON to `out`; returns the bytes
    /// read. A top-level number or word ends at the next character, which is not read.
    pub(crate) fn push(&mut self, text: &str, out: &mut String) -> Result<usize, UnrepairableAt> {
        for (at, letter) in text.char_indices() {
            // The character that ends a number or word belongs to what surrounds it.
            if self.ends_before(letter) {
                self.end_partial(out)
                    .map_err(|Unrepairable| UnrepairableAt(at))?;
            }
            if self.is_done() {
                return Ok(at);
            }
            self.step(letter, out)
                .map_err(|Unrepairable| UnrepairableAt(at))?;
            if self.is_done() {
                return Ok(at + letter.len_utf8());
            }
        }
        Ok(text.len())
    }

    /// Closes everything open with as little as possible.
    pub(crate) fn close(&mut self, out: &mut String) {
        if let RepairState::Text { is_key, .. }
        | RepairState::Escape { is_key, .. }
        | RepairState::Unicode { is_key, .. } = self.state
        {
            self.partial.clear();
            self.flush_high(out);
            self.end_text(is_key, out);
        } else if self.end_partial(out).is_err() {
            self.write_comma(out);
            out.push_str("null");
            self.end_value();
        }
        match self.state {
            RepairState::Colon => out.push_str(": null"),
            RepairState::Value if self.comma.is_empty() => out.push_str("null"),
            _ => {}
        }
        self.comma.clear();
        while let Some(frame) = self.stack.pop() {
            out.push(if frame == Frame::Object { '}' } else { ']' });
        }
        self.state = RepairState::Done;
    }

    fn ends_before(&self, letter: char) -> bool {
        match self.state {
            RepairState::Word { .. } => !(letter.is_alphanumeric() || "_-$.".contains(letter)),
            RepairState::Number => !(letter.is_ascii_digit() || "+-.eE".contains(letter)),
            _ => false,
        }
    }

    fn step(&mut self, letter: char, out: &mut String) -> Result<(), Unrepairable> {
        match self.state {
            RepairState::Text { quote, is_key } => self.text(letter, quote, is_key, out),
            RepairState::Escape { quote, is_key } => self.escape(letter, quote, is_key, out),
            RepairState::Unicode { quote, is_key } => self.unicode(letter, quote, is_key, out),
            RepairState::Word { .. } | RepairState::Number => self.partial.push(letter),
            _ if letter.is_ascii_whitespace() => {
                if self.comma.is_empty() {
                    out.push(letter);
                } else {
                    self.comma.push(letter);
                }
            }
            RepairState::Value | RepairState::ValueOrEnd => return self.value(letter, out),
            RepairState::KeyOrEnd => match letter {
                '}' => self.end_container(Frame::Object, '}', out)?,
                '"' | '\'' => self.begin_text(letter, true, out),
                letter if letter.is_alphabetic() || letter == '_' => {
                    self.partial.push(letter);
                    self.state = RepairState::Word { is_key: true };
                }
                _ => return Err(Unrepairable),
            },
            RepairState::Colon => {
                if letter != ':' {
                    return Err(Unrepairable);
                }
                out.push(':');
                self.state = RepairState::Value;
            }
            RepairState::CommaOrEnd => match letter {
                ',' => {
                    self.comma.push(',');
                    self.state = match self.stack.last() {
                        Some(Frame::Object) => RepairState::KeyOrEnd,
                        _ => RepairState::ValueOrEnd,
                    };
                }
                '}' => self.end_container(Frame::Object, '}', out)?,
                ']' => self.end_container(Frame::Array, ']', out)?,
                _ => return Err(Unrepairable),
            },
            RepairState::Done => {}
        }
        Ok(())
    }

    fn value(&mut self, letter: char, out: &mut String) -> Result<(), Unrepairable> {
        match letter {
            '{' | '[' => {
                if self.stack.len() >= MAX_DEPTH {
                    return Err(Unrepairable);
                }
                self.write_comma(out);
                out.push(letter);
                let (frame, state) = match letter {
                    '{' => (Frame::Object, RepairState::KeyOrEnd),
                    _ => (Frame::Array, RepairState::ValueOrEnd),
                };
                self.stack.push(frame);
                self.state = state;
            }
            ']' if self.state == RepairState::ValueOrEnd => {
                self.end_container(Frame::Array, ']', out)?;
            }
            '"' | '\'' => self.begin_text(letter, false, out),
            letter if letter.is_ascii_digit() || "+-.".contains(letter) => {
                self.partial.push(letter);
                self.state = RepairState::Number;
            }
            letter if letter.is_ascii_alphabetic() => {
                self.partial.push(letter);
                self.state = RepairState::Word { is_key: false };
            }
            _ => return Err(Unrepairable),
        }
        Ok(())
    }

    fn begin_text(&mut self, quote: char, is_key: bool, out: &mut String) {
        self.write_comma(out);
        out.push('"');
        self.state = RepairState::Text { quote, is_key };
    }

    fn text(&mut self, letter: char, quote: char, is_key: bool, out: &mut String) {
        if letter == '\\' {
            self.state = RepairState::Escape { quote, is_key };
            return;
        }
        self.flush_high(out);
        if letter == quote {
            self.end_text(is_key, out);
        } else if letter == '"' {
            out.push_str("\\\"");
        } else {
            write_escaped(letter, out);
        }
    }

    fn escape(&mut self, letter: char, quote: char, is_key: bool, out: &mut String) {
        self.state = RepairState::Text { quote, is_key };
        if letter == 'u' {
            self.partial.clear();
            self.state = RepairState::Unicode { quote, is_key };
            return;
        }
        self.flush_high(out);
        match letter {
            '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => {
                out.push('\\');
                out.push(letter);
            }
            '\'' => out.push('\''),
            other => {
                out.push_str("\\\\");
                write_escaped(other, out);
            }
        }
    }

    fn unicode(&mut self, letter: char, quote: char, is_key: bool, out: &mut String) {
        if !letter.is_ascii_hexdigit() {
            // Not an escape: its characters are text, and this one is read again as text.
            self.flush_high(out);
            out.push_str("\\\\u");
            out.push_str(&std::mem::take(&mut self.partial));
            self.state = RepairState::Text { quote, is_key };
            self.text(letter, quote, is_key, out);
            return;
        }
        self.partial.push(letter);
        if self.partial.len() < 4 {
            return;
        }
        let digits = std::mem::take(&mut self.partial);
        let unit = u16::from_str_radix(&digits, 16).expect("four hexadecimal digits were read");
        match (self.high.take(), unit) {
            (Some(high), 0xdc00..=0xdfff) => {
                out.push_str(&format!("\\u{high:04x}\\u{digits}"));
            }
            (lone, unit) => {
                if lone.is_some() {
                    out.push_str("\\ufffd");
                }
                match unit {
                    0xd800..=0xdbff => self.high = Some(unit),
                    0xdc00..=0xdfff => out.push_str("\\ufffd"),
                    _ => {
                        out.push_str("\\u");
                        out.push_str(&digits);
                    }
                }
            }
        }
        self.state = RepairState::Text { quote, is_key };
    }

    fn flush_high(&mut self, out: &mut String) {
        if self.high.take().is_some() {
            out.push_str("\\ufffd");
        }
    }

    fn end_text(&mut self, is_key: bool, out: &mut String) {
        out.push('"');
        if is_key {
            self.state = RepairState::Colon;
        } else {
            self.end_value();
        }
    }

    /// Ends a number or a word.
    fn end_partial(&mut self, out: &mut String) -> Result<(), Unrepairable> {
        let partial = std::mem::take(&mut self.partial);
        match self.state {
            RepairState::Word { is_key: true } => {
                self.write_comma(out);
                out.push('"');
                out.push_str(&partial);
                out.push('"');
                self.state = RepairState::Colon;
            }
            RepairState::Word { is_key: false } => {
                let word = match partial.as_str() {
                    "true" | "True" => "true",
                    "false" | "False" => "false",
                    "null" | "None" => "null",
                    _ => return Err(Unrepairable),
                };
                self.write_comma(out);
                out.push_str(word);
                self.end_value();
            }
            RepairState::Number => {
                let number = strict_number(&partial).ok_or(Unrepairable)?;
                self.write_comma(out);
                out.push_str(&number);
                self.end_value();
            }
            _ => {}
        }
        Ok(())
    }

    fn end_container(
        &mut self,
        frame: Frame,
        close: char,
        out: &mut String,
    ) -> Result<(), Unrepairable> {
        if self.stack.last() != Some(&frame) {
            return Err(Unrepairable);
        }
        self.stack.pop();
        self.comma.clear();
        out.push(close);
        self.end_value();
        Ok(())
    }

    fn end_value(&mut self) {
        self.state = if self.stack.is_empty() {
            RepairState::Done
        } else {
            RepairState::CommaOrEnd
        };
    }

    fn write_comma(&mut self, out: &mut String) {
        out.push_str(&self.comma);
        self.comma.clear();
    }
}

/// `text` as strict JSON, if it is one repairable value.
pub(crate) fn repair(text: &str) -> Option<String> {
    let text = text.trim();
    let mut json = JsonRepair::default();
    let mut out = String::with_capacity(text.len());
    // The appended blank ends a top-level number.
    let read = json.push(&format!("{text} "), &mut out).ok()?;
    (json.is_done() && read >= text.len()).then_some(out)
}

/// The number in JSON's notation.
fn strict_number(text: &str) -> Option<String> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    let mut number = sign.to_owned();
    if digits.starts_with('.') {
        number.push('0');
    }
    number.push_str(digits);
    if number.ends_with('.') {
        number.push('0');
    }
    let value: serde_json::Value = serde_json::from_str(&number).ok()?;
    let is_integer = number
        .bytes()
        .all(|byte| byte == b'-' || byte.is_ascii_digit());
    // An integer of any size keeps its digits; another number must be in range.
    (is_integer || value.as_f64().is_some()).then_some(number)
}

/// `letter` as written inside a JSON string.
pub(crate) fn write_escaped(letter: char, out: &mut String) {
    match letter {
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        letter if letter < ' ' => out.push_str(&format!("\\u{:04x}", u32::from(letter))),
        letter => out.push(letter),
    }
}

/// `text` as written inside a JSON string.
pub(crate) fn write_json_string_body(text: &str, out: &mut String) {
    for letter in text.chars() {
        match letter {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            letter => write_escaped(letter, out),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    #[test]
    fn common_model_json_mistakes_are_repaired() {
        for (text, json) in [
            (
                r#"{"a": [1, 2.5, -3e2], "b": null}"#,
                r#"{"a": [1, 2.5, -3e2], "b": null}"#,
            ),
            ("{'a': 'it\\'s \"x\"'}", r#"{"a": "it's \"x\""}"#),
            (
                "{a: True, b_1: False, c: None,}",
                r#"{"a": true, "b_1": false, "c": null}"#,
            ),
            ("[1, 2, ]", "[1, 2]"),
            ("{\"a\": \"line\nbreak\"}", r#"{"a": "line\nbreak"}"#),
            (r#"{"a": "C:\dir"}"#, r#"{"a": "C:\\dir"}"#),
            (
                r#"["\ud83d\ude00", "\ud83d", "\ude00x", "\u12"]"#,
                r#"["\ud83d\ude00", "\ufffd", "\ufffdx", "\\u12"]"#,
            ),
            ("[+1, .5, 5.]", "[1, 0.5, 5.0]"),
            ("7", "7"),
            ("True", "true"),
        ] {
            assert_eq!(repair(text).as_deref(), Some(json), "{text}");
            serde_json::from_str::<Value>(json).unwrap();
        }
    }

    #[test]
    fn unrepairable_json_is_rejected() {
        let deep = "[".repeat(500);
        for text in [
            "",
            "{",
            "{]",
            "[}",
            "nothing",
            "{\"a\" 1}",
            "1 2",
            "{,}",
            "01",
            "1e999",
            &deep,
        ] {
            assert_eq!(repair(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn strict_json_is_unchanged_by_chunking(
            value in "[ -~\u{e9}\n\"\\\\]{0,12}",
            number in any::<i64>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let json = serde_json::json!({"k": [value, number, {"n": null, "f": 1.5}]}).to_string();
            let at = cut.index(json.len() + 1);
            prop_assume!(json.is_char_boundary(at));
            let mut reader = JsonRepair::default();
            let mut out = String::new();
            let first = reader.push(&json[..at], &mut out).unwrap();
            prop_assert_eq!(first, at);
            reader.push(&json[at..], &mut out).unwrap();
            prop_assert!(reader.is_done());
            prop_assert_eq!(out, json);
        }

        #[test]
        fn early_close_always_yields_valid_json(text in "[\\[\\]{}:,\"'a\\\\u0-9.\\- tT]{0,20}") {
            let mut reader = JsonRepair::default();
            let mut out = String::new();
            // Whether it broke or not, what was written must be a beginning that can be closed.
            let _ = reader.push(&format!("{{{text}"), &mut out);
            reader.close(&mut out);
            prop_assert!(serde_json::from_str::<Value>(&out).is_ok(), "{}", out);
        }
    }
}
