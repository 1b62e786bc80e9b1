//! Settings of downloads, by the variables that all programs of the Hugging Face hub read.

#![allow(clippy::disallowed_methods, reason = "this file reads the environment")]

use hub::{Hub, HubError, HubSettings, ModelName};

/// The hub whose pages are names, if no settings say otherwise.
const ENDPOINT: &str = "https://huggingface.co";

/// The hub and the cache of this user.
///
/// # Errors
/// If a variable is wrong, or no folder is known.
pub fn of_user() -> Result<Hub, HubError> {
    let settings = HubSettings::from_variables(|name| std::env::var_os(name))?;
    Ok(Hub::new(&settings))
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
