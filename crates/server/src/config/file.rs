//! The configuration file: TOML, one key for each flag of `serve`, without its dashes.

use std::path::Path;

use clap::Command;
use toml::{Table, Value};

use crate::config::{ConfigError, read_text};

/// What the file says of one flag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// The argument's id in the command.
    pub(super) id: String,
    /// Its values as they would be typed.
    pub(super) values: Vec<String>,
}

/// Flags that say what to do now, not how to serve.
const NOT_IN_FILES: [&str; 4] = ["config", "dry-run", "help", "version"];

/// Reads the file; every key must be a flag of `command`.
pub(super) fn read(path: &Path, command: &Command) -> Result<Vec<Entry>, ConfigError> {
    let wrong = |detail: String| ConfigError::File {
        path: path.to_owned(),
        detail,
    };
    let table: Table = read_text("--config", path)?
        .parse()
        .map_err(|error| wrong(format!("this is not TOML: {error}")))?;
    let flags: Vec<(&str, &str)> = command
        .get_arguments()
        .filter_map(|arg| Some((arg.get_long()?, arg.get_id().as_str())))
        .filter(|(long, _)| !NOT_IN_FILES.contains(long))
        .collect();
    let mut entries = Vec::new();
    for (key, value) in table {
        let name = key.replace('_', "-");
        let Some((_, id)) = flags.iter().find(|(long, _)| *long == name) else {
            let near = flags
                .iter()
                .map(|(long, _)| *long)
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
        entries.push(Entry {
            id: (*id).to_owned(),
            values,
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

/// The command line with the file's values as the defaults of `serve`.
pub(super) fn with_defaults(command: Command, entries: &[Entry]) -> Command {
    command.mut_subcommand("serve", |serve| {
        entries.iter().fold(serve, |serve, entry| {
            serve.mut_arg(&entry.id, |arg| arg.default_values(entry.values.clone()))
        })
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
