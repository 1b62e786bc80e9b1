//! The configuration file: TOML, one key for each flag of `serve`, without its dashes.

use std::path::Path;

use clap::{Arg, Command};
use toml::{Table, Value};

use crate::cli::refused::goes_by;
use crate::config::{ConfigError, Origin, read_text};

/// What something other than the command line says of one flag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// The argument's id in the command.
    pub(super) id: String,
    /// Its values as they would be typed.
    pub(super) values: Vec<String>,
    /// What says it.
    pub(super) origin: Origin,
    /// The file or the variable that says it.
    pub(super) by: String,
}

/// Flags that say what to do now, not how to serve.
const NOT_IN_FILES: [&str; 5] = ["config", "dry-run", "json", "help", "version"];

/// Reads the file; every key must be a flag of `command`.
pub(super) fn read(path: &Path, command: &Command) -> Result<Vec<Entry>, ConfigError> {
    let wrong = |detail: String| ConfigError::File {
        path: path.to_owned(),
        detail,
    };
    let table: Table = read_text("--config", path)?
        .parse()
        .map_err(|error| wrong(format!("this is not TOML: {error}")))?;
    let flags: Vec<&Arg> = command
        .get_arguments()
        .filter(|arg| {
            arg.get_long()
                .is_some_and(|long| !NOT_IN_FILES.contains(&long))
        })
        .collect();
    let mut entries: Vec<Entry> = Vec::new();
    for (key, value) in table {
        let name = key.replace('_', "-");
        let Some(flag) = flags.iter().find(|flag| goes_by(flag, &name)) else {
            let shown = flags.iter().filter(|flag| !flag.is_hide_set());
            let near = shown
                .filter_map(|flag| flag.get_long())
                .min_by_key(|long| distance(&name, long));
            let near = near.filter(|long| distance(&name, long) <= 3);
            let hint = near.map_or(String::new(), |long| format!("; did you mean {long}?"));
            return Err(wrong(format!("{key} is not a setting{hint}")));
        };
        let values = match value {
            Value::Array(items) => items.into_iter().map(plain).collect::<Option<Vec<_>>>(),
            single => plain(single).map(|text| vec![text]),
        };
        let values = values
            .ok_or_else(|| wrong(format!("{key} must be a string, a number, true or false")))?;
        let id = flag.get_id().as_str().to_owned();
        if let Some(other) = entries.iter().find(|entry| entry.id == id) {
            let both = format!("{} says it already", other.by);
            return Err(wrong(format!("{key} is the same setting twice: {both}")));
        }
        entries.push(Entry {
            id,
            values,
            origin: Origin::File,
            by: format!("{}: {key}", path.display()),
        });
    }
    Ok(entries)
}

/// The value as it would be typed; `None` for tables and dates.
fn plain(value: Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        Value::Boolean(switch) => Some(switch.to_string()),
        Value::Datetime(_) | Value::Array(_) | Value::Table(_) => None,
    }
}

/// A command with what entries say of its own arguments as their defaults; a later entry wins over an earlier one.
pub(super) fn with_defaults(command: Command, entries: &[Entry]) -> Command {
    entries.iter().fold(command, |command, entry| {
        let has = command
            .get_arguments()
            .any(|arg| arg.get_id() == entry.id.as_str());
        match has {
            true => command.mut_arg(&entry.id, |arg| arg.default_values(entry.values.clone())),
            false => command,
        }
    })
}

/// Letters to insert, delete or replace (Levenshtein distance), for suggestions.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(left != *right);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_edits() {
        for (a, b, edits) in [
            ("port", "port", 0),
            ("prot", "port", 2),
            ("", "abc", 3),
            ("kv", "kw-type", 6),
        ] {
            assert_eq!((distance(a, b), distance(b, a)), (edits, edits), "{a} {b}");
        }
    }
}
