//! `hearth connect` and `hearth probe`: this server as clients meet it.

use clap::Args;

use super::at_least_one;

/// `hearth connect`.
#[derive(Debug, Args)]
pub struct ConnectArgs {
    /// The client; without one, all are listed.
    #[arg(value_name = "CLIENT")]
    pub client: Option<String>,
    /// Where the server is.
    #[arg(long, env = "HEARTH_URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// The model's id [default: the one the server tells].
    #[arg(long)]
    pub model: Option<String>,
    /// Its context in tokens [default: the one the server tells].
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one)]
    pub context: Option<usize>,
    /// The key the server asks for, if it asks for one.
    #[arg(long, env = "HEARTH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Write it into the client's own files instead of printing it. What stands there is kept; a file that
    /// changes is first copied to FILE.before-hearth.
    #[arg(long)]
    pub write: bool,
}

/// `hearth probe`.
#[derive(Debug, Args)]
pub struct ProbeArgs {
    /// Where the server is; any that speaks OpenAI's or Anthropic's protocol.
    #[arg(long, env = "HEARTH_URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// The key it asks for, if it asks for one.
    #[arg(long, env = "HEARTH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// The model to ask [default: the first it lists].
    #[arg(long)]
    pub model: Option<String>,
    /// Longest wait for anything to come, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = at_least_one)]
    pub patience: usize,
    /// Print the results as JSON, one object a line.
    #[arg(long)]
    pub json: bool,
}
