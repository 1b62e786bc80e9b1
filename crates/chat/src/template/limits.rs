//! What one rendering may use: bytes, nesting and time.
//!
//! Every value that a template makes is counted once, at its size when printed: a list of two
//! references to one text counts the text twice. All later operations on it, such as printing,
//! comparing and dropping, are then bounded as well. minijinja bounds steps and macro depth.

use std::time::{Duration, Instant};

use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

use super::python::{self, MAX_NESTING};

/// Bytes that a rendering may make in sum, beside its multiple of the input.
const BASE_BYTES: u64 = 64 << 20;
/// Bytes per byte of input. Published templates make about ten: they split, strip and print.
const BYTES_PER_INPUT_BYTE: u64 = 64;
/// The most of both.
const MAX_BYTES: u64 = 4 << 30;
/// Time of a rendering, beside its share of the input.
const BASE_TIME: Duration = Duration::from_secs(5);
/// Input bytes that allow one more second.
const BYTES_PER_SECOND: u64 = 2 << 20;
/// What a value takes beside its text.
const VALUE_BYTES: u64 = 16;
/// Bytes per letter or piece of a text that becomes a list.
pub(super) const PIECE_BYTES: u64 = 48;
/// The variable that carries the input's size into a rendering; no template can write this name.
pub(super) const INPUT_BYTES: &str = "#input_bytes";

/// The internal filters; no template can write these names.
pub(super) mod bound {
    /// Counts all of a value.
    pub(in super::super) const WHOLE: &str = "#whole";
    /// Counts a text's bytes, or a container's entry for itself.
    pub(in super::super) const LENGTH: &str = "#length";
    /// Turns an operand of `~` into text, and counts it.
    pub(in super::super) const TEXT: &str = "#text";
    /// Checks the time only.
    pub(in super::super) const TIME: &str = "#time";
    /// Refuses namespaces: one that held itself would never end.
    pub(in super::super) const ATTRIBUTE: &str = "#attribute";
    /// Counts a text as a list of its letters.
    pub(in super::super) const LETTERS: &str = "#letters";

    /// Filters whose result is not larger than about their operand.
    const PLAIN: [&str; 25] = [
        "abs",
        "attr",
        "bool",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "e",
        "escape",
        "first",
        "float",
        "format",
        "indent",
        "int",
        "items",
        "join",
        "length",
        "lower",
        "replace",
        "round",
        "safe",
        "string",
        "tojson",
        "trim",
    ];

    /// The internal filter for the operand of the filter `name`, if it needs one.
    pub(in super::super) fn of_operand(name: &str) -> Option<&'static str> {
        let plain = PLAIN.contains(&name) || matches!(name, "upper" | "title" | "last");
        (!plain).then_some(LETTERS)
    }
}

/// A template that went over a limit.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct OverLimit(pub(super) String);

pub(super) fn over(what: impl Into<String>) -> Error {
    let what = what.into();
    Error::new(ErrorKind::InvalidOperation, what.clone()).with_source(OverLimit(what))
}

/// What is left of a rendering's limits.
#[derive(Debug)]
struct Allowance {
    bytes: u64,
    left: u64,
    time: Duration,
    begun: Instant,
}

impl Allowance {
    fn new(input_bytes: u64) -> Allowance {
        let bytes = BYTES_PER_INPUT_BYTE
            .saturating_mul(input_bytes)
            .saturating_add(BASE_BYTES)
            .min(MAX_BYTES);
        Allowance {
            bytes,
            left: bytes,
            time: BASE_TIME + Duration::from_secs(input_bytes / BYTES_PER_SECOND),
            begun: Instant::now(),
        }
    }

    fn check_time(&self) -> Result<(), Error> {
        if self.begun.elapsed() > self.time {
            let seconds = self.time.as_secs();
            return Err(over(format!("it ran for more than {seconds} seconds")));
        }
        Ok(())
    }

    fn charge(&mut self, bytes: u64) -> Result<(), Error> {
        match self.left.checked_sub(bytes) {
            Some(left) => self.left = left,
            None => {
                let limit = self.bytes;
                return Err(over(format!("it made more than {limit} bytes")));
            }
        }
        self.check_time()
    }

    /// Charges the printed size of a value.
    fn charge_whole(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_NESTING {
            let limit = MAX_NESTING;
            return Err(over(format!("it nested values deeper than {limit} levels")));
        }
        let bytes = value.as_bytes().map_or(0, |text| text.len() as u64);
        self.charge(VALUE_BYTES + bytes)?;
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()? {
                    self.charge_whole(&item, depth + 1)?;
                }
            }
            ValueKind::Map => {
                for key in value.try_iter()? {
                    self.charge_whole(&key, depth + 1)?;
                    let item = value.get_item(&key).unwrap_or_default();
                    self.charge_whole(&item, depth + 1)?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn allowance<'s>(state: &'s mut State) -> &'s mut Allowance {
    let input = state.lookup(INPUT_BYTES).and_then(|bytes| bytes.as_usize());
    state.get_or_insert_extension_with(|| Allowance::new(input.unwrap_or(0) as u64))
}

/// Charges bytes before they are made.
pub(super) fn charge(state: &mut State, bytes: u64) -> Result<(), Error> {
    allowance(state).charge(bytes)
}

/// `str(value)` within what is left.
pub(super) fn text<'v>(
    state: &mut State,
    value: &'v Value,
) -> Result<std::borrow::Cow<'v, str>, Error> {
    let allowance = allowance(state);
    let text = python::str_within(value, allowance.left)
        .ok_or_else(|| over(format!("it made more than {} bytes", allowance.bytes)))?;
    allowance.charge(text.len() as u64)?;
    Ok(text)
}

/// Bytes that are left.
pub(super) fn left(state: &mut State) -> u64 {
    allowance(state).left
}

/// Charges the printed size of a value.
pub(super) fn charge_whole(state: &mut State, value: &Value) -> Result<(), Error> {
    allowance(state).charge_whole(value, 0)
}

/// Adds the internal filters.
pub(super) fn register(environment: &mut Environment<'static>) {
    environment.add_filter(bound::WHOLE, |state: &mut State, value: Value| {
        allowance(state).charge_whole(&value, 0).map(|()| value)
    });
    environment.add_filter(bound::LENGTH, |state: &mut State, value: Value| {
        let bytes = value.as_bytes().map_or(0, |text| text.len() as u64);
        charge(state, VALUE_BYTES + bytes).map(|()| value)
    });
    environment.add_filter(bound::TEXT, |state: &mut State, value: Value| {
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {
                text(state, &value).map(|text| Value::from(text.into_owned()))
            }
            _ => Ok(value),
        }
    });
    environment.add_filter(bound::TIME, |state: &mut State, value: Value| {
        allowance(state).check_time().map(|()| value)
    });
    environment.add_filter(bound::ATTRIBUTE, |state: &mut State, value: Value| {
        check_attribute(&value, 0)?;
        allowance(state).check_time().map(|()| value)
    });
    environment.add_filter(bound::LETTERS, |state: &mut State, value: Value| {
        let letters = value.as_str().map_or(0, |text| text.len() as u64);
        charge(state, letters.saturating_mul(PIECE_BYTES)).map(|()| value)
    });
}

/// Refuses a namespace anywhere in the value of a namespace's attribute.
fn check_attribute(value: &Value, depth: usize) -> Result<(), Error> {
    let Some(object) = value.as_object() else {
        return Ok(());
    };
    if object.type_name().ends_with("::Namespace") || depth > MAX_NESTING {
        return Err(over("it put a namespace into a namespace"));
    }
    match value.kind() {
        ValueKind::Seq => {
            for item in value.try_iter()? {
                check_attribute(&item, depth + 1)?;
            }
        }
        ValueKind::Map => {
            for key in value.try_iter()? {
                check_attribute(&value.get_item(&key).unwrap_or_default(), depth + 1)?;
            }
        }
        _ => {}
    }
    Ok(())
}
