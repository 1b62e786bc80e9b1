//! The configuration file: TOML, one key for each flag of `serve`, without its dashes.

use std::error::Error;
use std::path::Path;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command};
use strsim::levenshtein;
use toml::{Table, Value};

use crate::cli::refused::goes_by;
use crate::config::{ConfigError, Origin, read_text};

/// The value of a flag from the configuration file or an old variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// The argument's id in the command.
    pub(super) id: String,
    /// Its values as they would be typed.
    pub(super) values: Vec<String>,
    /// Whether it is from the file or the environment.
    pub(super) origin: Origin,
    /// The file and key, or the variable.
    pub(super) source: String,
}

/// Flags of one run, which are not settings.
const NOT_IN_FILES: [&str; 5] = ["config", "dry-run", "json", "help", "version"];

/// Reads the configuration file; every key must be a flag of `command`.
///
/// # Errors
/// If the file cannot be read or is not TOML, or a key is unknown, repeated or of a wrong type.
pub(super) fn read(path: &Path, command: &Command) -> Result<Vec<Entry>, ConfigError> {
    let wrong = |detail: String| ConfigError::File {
        path: path.to_owned(),
        detail,
    };
    let table: Table = read_text("--config", path)?
        .parse()
        .map_err(|error| wrong(format!("the file is not TOML: {error}")))?;
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
                .min_by_key(|long| levenshtein(&name, long));
            let near = near.filter(|long| levenshtein(&name, long) <= 3);
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
            let other = format!("{} sets it too", other.source);
            return Err(wrong(format!("{key} is the same setting twice: {other}")));
        }
        entries.push(Entry {
            id,
            values,
            origin: Origin::File,
            source: format!("{}: {key}", path.display()),
        });
    }
    Ok(entries)
}

/// The value as on the command line; `None` for tables and dates.
fn plain(value: Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        Value::Boolean(switch) => Some(switch.to_string()),
        Value::Datetime(_) | Value::Array(_) | Value::Table(_) => None,
    }
}

/// The error of `command` with the entries' values, which says where the invalid value stands.
/// `error` stays as it is if no entry has the value.
pub(super) fn located(error: clap::Error, command: &Command, entries: &[Entry]) -> ConfigError {
    let value = match error.get(ContextKind::InvalidValue) {
        Some(ContextValue::String(value)) => value.clone(),
        _ => return ConfigError::Usage(error),
    };
    let flag = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(flag)) => flag.clone(),
        _ => return ConfigError::Usage(error),
    };
    let is_of = |entry: &&Entry| {
        let arg = command
            .get_arguments()
            .find(|arg| arg.get_id() == entry.id.as_str());
        arg.is_some_and(|arg| arg.to_string() == flag)
    };
    let Some(entry) = entries.iter().rev().find(is_of) else {
        return ConfigError::Usage(error);
    };
    let reason = match (error.get(ContextKind::ValidValue), error.source()) {
        (Some(ContextValue::Strings(valid)), _) => format!("use one of {}", valid.join(", ")),
        (_, Some(cause)) => cause.to_string(),
        _ => error.kind().to_string(),
    };
    ConfigError::Value {
        source_name: entry.source.clone(),
        value,
        reason,
    }
}

/// A command whose arguments have the entries' values as defaults; a later entry wins.
pub(super) fn with_defaults(command: Command, entries: &[Entry]) -> Command {
    entries.iter().fold(command, |command, entry| {
        let has = command
            .get_arguments()
            .any(|arg| arg.get_id() == entry.id.as_str());
        if has {
            command.mut_arg(&entry.id, |arg| arg.default_values(entry.values.clone()))
        } else {
            command
        }
    })
}
