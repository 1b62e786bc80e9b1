//! The models of a server that has several, from the flags.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};

use crate::cli::ServeArgs;
use crate::config::server::{model_path, server_config};
use crate::open::model_path::{check_model, name_of};
use crate::open::{self, by_name, devices};
use crate::settings::keep_alive;

/// Memory of a model beside its weights, at least, in bytes.
const BESIDE_WEIGHTS: u64 = 512 << 20;

/// A model that requests can name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ModelEntry {
    /// Its id in the API.
    pub(super) name: String,
    /// Its file or the name to pull; `None` for the bundled model.
    pub(super) path: Option<PathBuf>,
    /// Whether it is the one that MODEL names, which has the flags' draft and template.
    pub(super) is_main: bool,
}

/// The models of the flags, the default first; `None` if the server has one that stays loaded.
///
/// # Errors
/// If a file or the folder cannot be used, or two models have one name.
pub(super) fn entries(args: &ServeArgs) -> anyhow::Result<Option<Vec<ModelEntry>>> {
    let hosting = &args.hosting;
    let has_others = hosting.models_dir.is_some() || !hosting.models.is_empty();
    if !has_others && hosting.idle_unload.is_none() {
        return Ok(None);
    }
    if args.script.is_some() {
        bail!("--script replaces one model; remove --models, --models-dir and --idle-unload");
    }
    let mut entries = Vec::new();
    if model_path(args).is_some() || !has_others {
        entries.push(ModelEntry {
            name: server_config(args)?.model_name,
            path: model_path(args).cloned(),
            is_main: true,
        });
    }
    for model in &hosting.models {
        entries.push(listed(model)?);
    }
    let mut names = HashSet::new();
    for entry in &entries {
        if !names.insert(entry.name.to_lowercase()) {
            bail!("--models: {} names two models; use NAME=FILE", entry.name);
        }
    }
    if let Some(dir) = &hosting.models_dir {
        let found = in_folder(dir).with_context(|| format!("--models-dir {}", dir.display()))?;
        if found.is_empty() && entries.is_empty() {
            bail!(
                "--models-dir {}: the folder has no GGUF file",
                dir.display()
            );
        }
        // A file that is listed by name is not listed twice.
        let is_new = |entry: &ModelEntry| names.insert(entry.name.to_lowercase());
        entries.extend(found.into_iter().filter(is_new));
    }
    Ok(Some(entries))
}

/// A model of --models.
fn listed(model: &str) -> anyhow::Result<ModelEntry> {
    let (name, path) = match model.split_once('=') {
        Some((name, path)) if !name.contains('/') => (Some(name), path),
        _ => (None, model),
    };
    let path = crate::config::tilde::expanded(Path::new(path));
    let by_hub = path.to_str().and_then(name_of).is_some();
    if !by_hub {
        check_model(&path).context("--models")?;
    }
    let name = match name {
        Some(name) if !name.is_empty() => name.to_owned(),
        _ if by_hub => path.display().to_string(),
        _ => stem(&path),
    };
    Ok(ModelEntry {
        name,
        path: Some(path),
        is_main: false,
    })
}

/// The models in a folder and in the folders in it, by name. Of a split file the first part counts;
/// files of image encoders are left out.
fn in_folder(dir: &Path) -> anyhow::Result<Vec<ModelEntry>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            // A folder that cannot be read has no models for this user.
            let inner = fs::read_dir(&path).into_iter().flatten().flatten();
            files.extend(inner.map(|entry| entry.path()));
        } else {
            files.push(path);
        }
    }
    let mut models: Vec<ModelEntry> = files
        .into_iter()
        .filter(|path| is_model(path))
        .map(|path| ModelEntry {
            name: stem(&path),
            path: Some(path),
            is_main: false,
        })
        .collect();
    models.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(models)
}

fn is_model(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_gguf = name.to_lowercase().ends_with(".gguf") && path.is_file();
    let is_later_part = name.contains("-of-") && !name.contains("-00001-of-");
    is_gguf && !is_later_part && !name.to_lowercase().contains("mmproj")
}

/// The file's name without its ending, and without the number of a first part.
fn stem(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    match stem.split_once("-00001-of-") {
        Some((name, _)) => name.to_owned(),
        None => stem.into_owned(),
    }
}

/// The flags of one model: the main model's are those of the command line, the others share all but
/// the draft, the template and the name.
pub(super) fn args_of(args: &ServeArgs, entry: &ModelEntry) -> ServeArgs {
    let mut own = args.clone();
    own.model_flag = None;
    own.model.clone_from(&entry.path);
    if !entry.is_main {
        own.draft.draft = None;
        own.chat_template_file = None;
    }
    own
}

/// The idle time of --idle-unload.
///
/// # Errors
/// If it is no time.
pub(super) fn idle(args: &ServeArgs) -> anyhow::Result<Option<Duration>> {
    let Some(text) = &args.hosting.idle_unload else {
        return Ok(None);
    };
    keep_alive::parse(text).map_err(|reason| anyhow::anyhow!("--idle-unload: {reason}"))
}

/// Whether the weights of a model and what it needs at least fit into the free memory. A model
/// whose file or device is unknown does; its load says what is wrong.
pub(super) fn fits(args: &ServeArgs) -> bool {
    let known = || {
        let path = by_name::in_cache(model_path(args)?);
        let bytes = weight_bytes(&path)?;
        let choice = open::choice(&args.device).ok()?;
        let free = devices::choose(&choice).ok()?.probe().ok()?.free_bytes;
        Some(bytes + bytes / 4 + BESIDE_WEIGHTS <= free)
    };
    known().unwrap_or(true)
}

/// The bytes of a model's file, all parts included.
fn weight_bytes(path: &Path) -> Option<u64> {
    let first = path.file_name()?.to_str()?;
    let Some((start, _)) = first.split_once("-00001-of-") else {
        return Some(fs::metadata(path).ok()?.len());
    };
    let parts = fs::read_dir(path.parent()?).ok()?.flatten();
    let is_part = |name: &str| name.starts_with(start) && name.contains("-of-");
    let parts = parts.filter(|part| part.file_name().to_str().is_some_and(is_part));
    Some(
        parts
            .filter_map(|part| part.metadata().ok())
            .map(|part| part.len())
            .sum(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn args(words: &[&str]) -> ServeArgs {
        let words = ["hearth", "serve"].iter().chain(words);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Serve(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    fn names(words: &[&str]) -> Vec<String> {
        let entries = entries(&args(words)).unwrap().unwrap();
        entries.into_iter().map(|entry| entry.name).collect()
    }

    #[test]
    fn a_server_without_the_flags_has_one_model() {
        assert_eq!(entries(&args(&["a.gguf"])).unwrap(), None);
        assert_eq!(names(&["a.gguf", "--idle-unload", "5m"]), ["a"]);
        assert_eq!(names(&["--idle-unload", "5m"]), ["ember"]);
    }

    #[test]
    fn models_come_from_the_word_the_list_and_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("in")).unwrap();
        for file in [
            "b.gguf",
            "a.GGUF",
            "in/c-00001-of-00002.gguf",
            "in/c-00002-of-00002.gguf",
            "mmproj-b.gguf",
            "readme.md",
        ] {
            fs::write(at(file), "").unwrap();
        }
        let folder = dir.path().to_str().unwrap();
        assert_eq!(names(&["--models-dir", folder]), ["a", "b", "c"]);
        let b = at("b.gguf").display().to_string();
        let listed = format!("small={b},owner/repo:Q4_K_M");
        assert_eq!(
            names(&["m.gguf", "--models", &listed, "--models-dir", folder]),
            ["m", "small", "owner/repo:Q4_K_M", "a", "b", "c"]
        );
        let twice = format!("{b},B={b}");
        let error = entries(&args(&["--models", &twice])).unwrap_err();
        assert!(error.to_string().contains("names two models"), "{error}");
        let none = entries(&args(&["--models", "/no/such.gguf"])).unwrap_err();
        assert_eq!(none.to_string(), "--models");
        let parts = at("in/c-00001-of-00002.gguf");
        fs::write(&parts, "12345").unwrap();
        fs::write(at("in/c-00002-of-00002.gguf"), "123").unwrap();
        assert_eq!(weight_bytes(&parts), Some(8));
    }

    #[test]
    fn other_models_have_no_part_of_the_main_models_own_flags() {
        let words = [
            "m.gguf", "--draft", "d.gguf", "--models", "a/b", "-c", "512",
        ];
        let args = args(&words);
        let entries = entries(&args).unwrap().unwrap();
        let (main, other) = (args_of(&args, &entries[0]), args_of(&args, &entries[1]));
        assert!(main.draft.draft.is_some() && other.draft.draft.is_none());
        assert_eq!(other.model.unwrap(), Path::new("a/b"));
        assert_eq!(other.device.max_ctx, Some(512));
    }
}
