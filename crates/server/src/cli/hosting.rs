//! Flags of several models, and of the commands that show and unload them.

use std::path::PathBuf;

use clap::Args;

use super::at_least_one;
use crate::settings::keep_alive;

/// Which models a server has, and how long they stay in memory.
#[derive(Debug, Clone, Args)]
pub struct HostingArgs {
    /// A folder whose GGUF files requests can name by their file names without ending; each is
    /// loaded when a request names it.
    #[arg(long, env = "HEARTH_MODELS_DIR", value_name = "DIR")]
    pub models_dir: Option<PathBuf>,
    /// Further models that requests can name: a file, a name to pull such as OWNER/REPO:Q4_K_M, or
    /// NAME=FILE; may be repeated.
    #[arg(
        long,
        env = "HEARTH_MODELS",
        value_name = "MODEL",
        value_delimiter = ','
    )]
    pub models: Vec<String>,
    /// The most models in memory. The least recently used one is unloaded for another, also where
    /// that does not fit into the free memory.
    #[arg(long, env = "HEARTH_MODELS_MAX", value_name = "N", default_value = "4",
        value_parser = at_least_one)]
    pub models_max: usize,
    /// Time without requests after which a model is unloaded, such as `10m`; the next request loads
    /// it again. A request's field `keep_alive` wins [default: never].
    #[arg(
        long,
        aliases = ["sleep-idle-seconds", "keep-alive", "keepalive"],
        env = "HEARTH_IDLE_UNLOAD",
        value_name = "TIME",
        value_parser = time
    )]
    pub idle_unload: Option<String>,
}

fn time(text: &str) -> Result<String, String> {
    keep_alive::parse(text)?;
    Ok(text.to_owned())
}

/// `hearth ps`.
#[derive(Debug, Args)]
pub struct PsArgs {
    /// The server's address.
    #[arg(long, env = "HEARTH_URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// The API key, if the server requires one.
    #[arg(long, env = "HEARTH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Print the server's list as JSON.
    #[arg(long)]
    pub json: bool,
}

/// `hearth stop`.
#[derive(Debug, Args)]
pub struct StopArgs {
    /// The models to unload [default: all that are loaded].
    #[arg(value_name = "MODEL")]
    pub models: Vec<String>,
    /// The server's address.
    #[arg(long, env = "HEARTH_URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// The API key, if the server requires one.
    #[arg(long, env = "HEARTH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
}
