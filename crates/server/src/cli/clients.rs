//! Flags of `hearth connect` and `hearth probe`.

use clap::Args;

use super::at_least_one;

/// `hearth connect`.
#[derive(Debug, Args)]
pub struct ConnectArgs {
    /// The client to configure; without one, all clients are listed.
    #[arg(value_name = "CLIENT")]
    pub client: Option<String>,
    /// The server's address.
    #[arg(long, env = "HEARTH_URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// The model's id [default: as the server reports].
    #[arg(long)]
    pub model: Option<String>,
    /// The model's context in tokens [default: as the server reports].
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one)]
    pub context: Option<usize>,
    /// The API key, if the server requires one.
    #[arg(long, env = "HEARTH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Write the settings into the client's files instead of printing them. Other settings stay; a
    /// changed file is first copied to FILE.before-hearth.
    #[arg(long)]
    pub write: bool,
}

/// `hearth probe`.
#[derive(Debug, Args)]
pub struct ProbeArgs {
    /// Address of a server with OpenAI's or Anthropic's protocol.
    #[arg(long, env = "HEARTH_URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// The API key, if the server requires one.
    #[arg(long, env = "HEARTH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// The model that requests name [default: the first that the server lists].
    #[arg(long)]
    pub model: Option<String>,
    /// Longest silence of the server in a request, in seconds.
    #[arg(long, alias = "patience", value_name = "SECONDS", default_value = "600", value_parser = at_least_one)]
    pub timeout: usize,
    /// Print JSON lines instead of a table.
    #[arg(long)]
    pub json: bool,
}
