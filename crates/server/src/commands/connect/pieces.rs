//! One file of a client: shown, or written beside what stands in it.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::Value;

use super::merge::{self, Merged};

/// What goes into one file.
pub(super) struct Piece {
    /// The file.
    pub(super) file: PathBuf,
    /// What goes in.
    pub(super) form: FileFormat,
}

/// What goes into a file, by the kind of file.
pub(super) enum FileFormat {
    /// A JSON object, joined with what is there.
    Json {
        /// Ours.
        value: Value,
        /// Where the user's own choice stays, as JSON pointers.
        choices: &'static [&'static str],
    },
    /// Keys before all tables, and a table.
    Toml {
        /// The keys, with values as written.
        top: Vec<(&'static str, String)>,
        /// The table's name.
        name: &'static str,
        /// Its lines.
        table: String,
    },
    /// Top-level keys, each with its block.
    Yaml(Vec<(&'static str, String)>),
    /// Items of a top-level list.
    YamlItems(String),
    /// A whole file of our own.
    Own(String),
    /// A file of our own that a shell reads.
    Variables(String),
}

/// What writing a piece came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Written {
    /// The copy of what stood there, if a file was changed.
    pub(super) backup: Option<PathBuf>,
    /// Whether anything was written.
    pub(super) changed: bool,
    /// What of ours was left out for the user's own.
    pub(super) kept: Vec<String>,
}

impl Piece {
    /// What a file with nothing else in it would hold.
    pub(super) fn text(&self) -> anyhow::Result<String> {
        Ok(self.merged("")?.text)
    }

    /// Puts it into the file. The old text is copied aside first, and the new one replaces it at once.
    pub(super) fn write(&self) -> anyhow::Result<Written> {
        let name = self.file.display().to_string();
        let old = match fs::read_to_string(&self.file) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error).with_context(|| format!("{name} cannot be read")),
        };
        let Merged { text, kept } = self
            .merged(old.as_deref().unwrap_or_default())
            .with_context(|| format!("{name} is left as it is; put this in by hand"))?;
        if old.as_deref() == Some(text.as_str()) {
            return Ok(Written {
                backup: None,
                changed: false,
                kept,
            });
        }
        let backup = match old {
            Some(old) => Some(keep(&self.file, &old).with_context(|| format!("{name}: no copy"))?),
            None => None,
        };
        replace(&self.file, &text).with_context(|| format!("{name} cannot be written"))?;
        Ok(Written {
            backup,
            changed: true,
            kept,
        })
    }

    fn merged(&self, old: &str) -> anyhow::Result<Merged> {
        match &self.form {
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

/// Copies the old text to a new name beside the file; an earlier copy is never written over.
fn keep(file: &Path, old: &str) -> io::Result<PathBuf> {
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

/// Writes a file whole or not at all; it may hold a key, so a new one is the user's alone.
fn replace(file: &Path, text: &str) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    // A link is followed, so that the file it leads to changes and not the link.
    let file = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".new-{}", std::process::id()));
    let fresh = PathBuf::from(name);
    let mut options = fs::OpenOptions::new();
    let mut out = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&fresh)?;
    let written = out
        .write_all(text.as_bytes())
        .and_then(|()| out.sync_all())
        .and_then(|()| match fs::metadata(&file) {
            Ok(old) => fs::set_permissions(&fresh, old.permissions()),
            Err(_) => Ok(()),
        })
        .and_then(|()| fs::rename(&fresh, &file));
    if written.is_err() {
        // What is left of it helps nobody.
        let _ = fs::remove_file(&fresh);
    }
    written
}
