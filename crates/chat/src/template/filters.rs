//! Bounded forms of minijinja's filters and methods whose result is a multiple of their operands.
//!
//! Each estimates the size of its result, charges it, and then calls the original.

use minijinja::value::{Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, filters};
use minijinja_contrib::pycompat;

use super::limits::{self, PIECE_BYTES, charge};

/// The largest number that a filter or a method takes as a width or a count.
const MAX_COUNT: u64 = 10_000;

type Estimate = fn(&mut State, &[Value]) -> Result<(), Error>;

/// Replaces the filters, and removes those that only serve to find faults in templates.
pub(super) fn register(environment: &mut Environment<'static>) {
    let bounded: [(&'static str, Value, Estimate); 8] = [
        ("indent", Value::from_function(filters::indent), indent),
        ("replace", Value::from_function(filters::replace), replace),
        ("join", Value::from_function(filters::join), join),
        ("format", Value::from_function(filters::format), format),
        ("map", Value::from_function(filters::map), map),
        ("batch", Value::from_function(filters::batch), counted),
        ("slice", Value::from_function(filters::slice), counted),
        ("round", Value::from_function(filters::round), counted),
    ];
    for (name, original, estimate) in bounded {
        let filter = move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            estimate(state, &args)?;
            original.call(state, &args)
        };
        environment.add_filter(name, filter);
    }
    environment.remove_filter("pprint");
    environment.remove_global("debug");
}

/// Calls a method of Python's types.
pub(super) fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if value.kind() == ValueKind::String {
        let mut all = vec![value.clone()];
        all.extend_from_slice(args);
        match name {
            "replace" => replace(state, &all)?,
            "join" => {
                all.swap(0, 1.min(args.len()));
                join(state, &all)?;
            }
            "format" => format(state, &all)?,
            "split" | "splitlines" => pieces(state, &all)?,
            _ => {}
        }
    }
    pycompat::unknown_method_callback(state, value, name, args)
}

fn text(args: &[Value], index: usize) -> &str {
    args.get(index).and_then(Value::as_str).unwrap_or_default()
}

/// Refuses numbers that are no width or count of a prompt, also by keyword.
fn counted(_: &mut State, args: &[Value]) -> Result<(), Error> {
    fn check(value: &Value) -> Result<(), Error> {
        match i64::try_from(value.clone()) {
            Ok(number) if value.is_integer() && number.unsigned_abs() > MAX_COUNT => {
                Err(limits::over(format!(
                    "it used {number} as a width; at most {MAX_COUNT} is taken"
                )))
            }
            _ => Ok(()),
        }
    }
    for value in args.iter().skip(1) {
        check(value)?;
        if value.kind() == ValueKind::Map {
            for key in value.try_iter()? {
                check(&value.get_item(&key)?)?;
            }
        }
    }
    Ok(())
}

fn indent(state: &mut State, args: &[Value]) -> Result<(), Error> {
    counted(state, args)?;
    let width = match args.iter().skip(1).find_map(Value::as_usize) {
        Some(width) => width as u64,
        // The width may come by keyword.
        None if args.len() > 1 => MAX_COUNT,
        None => 4,
    };
    let lines = text(args, 0).split('\n').count() as u64;
    charge(state, lines * width)
}

fn replace(state: &mut State, args: &[Value]) -> Result<(), Error> {
    let from = text(args, 1);
    let matches = text(args, 0).matches(from).count() as u64;
    charge(state, matches.saturating_mul(text(args, 2).len() as u64))
}

/// `items | join(separator)`.
fn join(state: &mut State, args: &[Value]) -> Result<(), Error> {
    let Some(items) = args.first() else {
        return Ok(());
    };
    let mut n_items = 0_u64;
    if items.kind() != ValueKind::Undefined {
        limits::charge_whole(state, items)?;
        n_items = match items.as_str() {
            Some(text) => text.len() as u64,
            None => items.try_iter()?.count() as u64,
        };
    }
    charge(state, n_items.saturating_mul(text(args, 1).len() as u64))
}

/// `pattern | format(...)` and `pattern.format(...)`: a field may print any argument.
fn format(state: &mut State, args: &[Value]) -> Result<(), Error> {
    let pattern = text(args, 0);
    let fields = pattern.matches(['%', '{']).count() as u64;
    let mut digits = 0;
    for letter in pattern.chars() {
        digits = if letter.is_ascii_digit() {
            digits + 1
        } else {
            0
        };
        // A width of five digits is 10,000 or more.
        if digits > 4 || letter == '*' {
            return Err(limits::over(
                "it formatted with a width of more than four digits, or one from an argument",
            ));
        }
    }
    let before = limits::left(state);
    for arg in args.iter().skip(1) {
        limits::charge_whole(state, arg)?;
    }
    let of_arguments = before - limits::left(state);
    let widest = if pattern.contains(|letter: char| letter.is_ascii_digit()) {
        MAX_COUNT
    } else {
        0
    };
    charge(
        state,
        fields.saturating_mul(of_arguments.saturating_add(widest)),
    )
}

/// `items | map("filter")`: the filter may make lists of letters.
fn map(state: &mut State, args: &[Value]) -> Result<(), Error> {
    let by_filter = args.get(1).and_then(Value::as_str);
    if let (Some(items), Some(name)) = (args.first(), by_filter)
        && limits::bound::of_operand(name).is_some()
    {
        let before = limits::left(state);
        limits::charge_whole(state, items)?;
        let bytes = before - limits::left(state);
        charge(state, bytes.saturating_mul(PIECE_BYTES))?;
    }
    Ok(())
}

/// The pieces of a split text.
fn pieces(state: &mut State, args: &[Value]) -> Result<(), Error> {
    let (whole, separator) = (text(args, 0), text(args, 1));
    let n_pieces = if separator.is_empty() {
        whole.split(char::is_whitespace).count()
    } else {
        whole.matches(separator).count() + 1
    };
    charge(state, whole.len() as u64 + n_pieces as u64 * PIECE_BYTES)
}
