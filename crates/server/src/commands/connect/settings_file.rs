//! One settings file of a client: its text, and its change on disk.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};

use super::merge::{self, Merged};
use crate::config::directories::Directories;

/// A file and the settings that it must hold.
pub(super) struct SettingsFile {
    /// The file.
    pub(super) file: PathBuf,
    /// The settings, in the file's format.
    pub(super) format: FileFormat,
}

/// Settings, by the format of their file.
pub(super) enum FileFormat {
    /// An object, merged into the file's.
    Json {
        /// The settings.
        value: Value,
        /// JSON pointers to values that the user's own value overrides.
        choices: &'static [&'static str],
    },
    /// Top-level keys and a table.
    Toml {
        /// The keys, with values in TOML notation.
        top: Vec<(&'static str, String)>,
        /// The table's name.
        name: &'static str,
        /// Its lines.
        table: String,
    },
    /// Top-level keys, each with its whole block.
    Yaml(Vec<(&'static str, String)>),
    /// Items of a top-level list.
    YamlItems(String),
    /// The text of a file that only Hearth writes.
    Own(String),
    /// The text of a file that a shell sources, which only Hearth writes.
    Variables(String),
}

/// The result of writing a settings file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Written {
    /// The copy of the old file, if there was one and it changed.
    pub(super) backup: Option<PathBuf>,
    /// Whether the file changed.
    pub(super) changed: bool,
    /// Settings that keep the user's value, as `name stays value`.
    pub(super) kept: Vec<String>,
}

impl SettingsFile {
    /// The text of a file that holds these settings only.
    pub(super) fn text(&self) -> anyhow::Result<String> {
        Ok(self.merged("")?.text)
    }

    /// Merges the settings into the file: copies the old file aside, then replaces it atomically.
    pub(super) fn write(&self) -> anyhow::Result<Written> {
        let name = self.file.display().to_string();
        let old = match fs::read_to_string(&self.file) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error).with_context(|| format!("cannot read {name}")),
        };
        let Merged { text, kept } = self
            .merged(old.as_deref().unwrap_or_default())
            .with_context(|| format!("{name} is unchanged; add the settings by hand"))?;
        if old.as_deref() == Some(text.as_str()) {
            return Ok(Written {
                backup: None,
                changed: false,
                kept,
            });
        }
        let backup = match old {
            Some(old) => {
                let copy = copy_aside(&self.file, &old);
                Some(copy.with_context(|| format!("cannot copy {name} to a backup"))?)
            }
            None => None,
        };
        replace(&self.file, &text).with_context(|| format!("cannot write {name}"))?;
        Ok(Written {
            backup,
            changed: true,
            kept,
        })
    }

    fn merged(&self, old: &str) -> anyhow::Result<Merged> {
        match &self.format {
            FileFormat::Json { value, choices } => {
                let mut merged = merge::json(old, value, choices)?;
                if old.is_empty() {
                    merged.text = serde_json::to_string_pretty(value)? + "\n";
                }
                Ok(merged)
            }
            FileFormat::Toml { top, name, table } => merge::toml(old, top, (name, table)),
            FileFormat::Yaml(keys) => merge::yaml(old, keys),
            FileFormat::YamlItems(items) => merge::yaml_items(old, items),
            FileFormat::Own(text) | FileFormat::Variables(text) => Ok(Merged {
                text: text.clone(),
                kept: Vec::new(),
            }),
        }
    }
}

/// Copies the old text to a new name beside the file; an earlier copy is kept.
fn copy_aside(file: &Path, old: &str) -> io::Result<PathBuf> {
    let mut name = file.as_os_str().to_owned();
    name.push(".before-hearth");
    for n in 1.. {
        let mut path = name.clone();
        if n > 1 {
            path.push(format!("-{n}"));
        }
        let path = PathBuf::from(path);
        match fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&path)
        {
            Ok(mut copy) => {
                fs::set_permissions(&path, fs::metadata(file)?.permissions())?;
                copy.write_all(old.as_bytes())?;
                return Ok(path);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Writes a file whole or not at all. It may hold a key, so only the user can read a new file.
fn replace(file: &Path, text: &str) -> io::Result<()> {
    // A link is followed, so that its target changes and not the link.
    let file = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    let dir = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir)?;
    let mut new = tempfile::NamedTempFile::new_in(dir)?;
    new.write_all(text.as_bytes())?;
    if let Ok(old) = fs::metadata(&file) {
        new.as_file().set_permissions(old.permissions())?;
    }
    new.as_file().sync_all()?;
    new.persist(&file)?;
    Ok(())
}

/// A file of `export` lines for a shell to source.
pub(super) fn variables(
    directories: &Directories,
    name: &str,
    pairs: &[(&str, String)],
) -> Vec<SettingsFile> {
    let lines = pairs
        .iter()
        .map(|(name, value)| format!("export {name}='{}'\n", value.replace('\'', "'\\''")));
    vec![SettingsFile {
        file: hearth_file(directories, &format!("{name}.env")),
        format: FileFormat::Variables(lines.collect()),
    }]
}

/// A file in Hearth's own directory.
pub(super) fn hearth_file(directories: &Directories, name: &str) -> PathBuf {
    directories.config.join("hearth").join(name)
}

/// A quoted string that JSON, TOML and YAML read alike.
pub(super) fn quoted(text: &str) -> String {
    json!(text).to_string()
}
