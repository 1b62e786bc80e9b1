//! Settings of downloads, by the variables that all programs of the Hugging Face hub read.

#![allow(clippy::disallowed_methods, reason = "this file reads the environment")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::error::ErrorKind;
use hub::{Hub, HubError, HubSettings, ModelName};

use crate::cli::{Command, ConfigCommand};

/// The hub whose pages are names, if no settings say otherwise.
const ENDPOINT: &str = "https://huggingface.co";

/// The variable of all programs of the hub for no requests.
const OFFLINE_VARIABLE: &str = "HF_HUB_OFFLINE";
/// Whether --offline was given.
static OFFLINE: AtomicBool = AtomicBool::new(false);

/// From now on no hub of this process sends a request.
pub fn set_offline() {
    OFFLINE.store(true, Ordering::Relaxed);
}

/// The hub and the cache of this user.
///
/// # Errors
/// If a variable is wrong, or no folder is known.
pub fn of_user() -> Result<Hub, HubError> {
    let settings = HubSettings::from_variables(|name| {
        if name == OFFLINE_VARIABLE && OFFLINE.load(Ordering::Relaxed) {
            return Some("1".into());
        }
        std::env::var_os(name)
    })?;
    Ok(Hub::new(&settings))
}

/// Adds the file of --hf-file to the model's name in the flags of `serve`.
///
/// # Errors
/// If no model is named.
pub(super) fn name_file(parsed: &mut Command, root: &mut clap::Command) -> Result<(), clap::Error> {
    let args = match parsed {
        Command::Serve(args) => &mut **args,
        Command::Config(ConfigCommand::Show(args)) => &mut args.serve,
        Command::Doctor(args) => &mut args.serve,
        _ => return Ok(()),
    };
    let Some(file) = args.hf_file.take() else {
        return Ok(());
    };
    let Some(model) = args.model.as_mut().or(args.model_flag.as_mut()) else {
        let message = "--hf-file names a file of a repository; name the repository with --model";
        return Err(root.error(ErrorKind::MissingRequiredArgument, message));
    };
    *model = named_file(model, &file);
    Ok(())
}

/// The name of a file in the repository that a model's name has, in place of its quantisation.
pub fn named_file(model: &Path, file: &str) -> PathBuf {
    let model = model.to_string_lossy();
    let owner = model.rfind('/').unwrap_or(0);
    let repository = match model[owner..].split_once(':') {
        Some((name, _)) => format!("{}{name}", &model[..owner]),
        None => model.into_owned(),
    };
    format!("{repository}:{file}").into()
}

/// The model that a word names, if it is a name; wrong settings are reported where it is used.
pub fn name(word: &str) -> Option<ModelName> {
    let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_default();
    let endpoint = match endpoint.trim_end_matches('/') {
        "" => ENDPOINT,
        endpoint => endpoint,
    };
    ModelName::parse(word, endpoint).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_replaces_the_quantisation_of_a_name() {
        for (model, expected) in [
            ("a/b", "a/b:c.gguf"),
            ("a/b:Q4_K_M", "a/b:c.gguf"),
            ("hf:a/b", "hf:a/b:c.gguf"),
            ("hf://a/b:Q8_0", "hf://a/b:c.gguf"),
        ] {
            assert_eq!(named_file(Path::new(model), "c.gguf"), Path::new(expected));
        }
    }
}
