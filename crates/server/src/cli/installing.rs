//! Flags of `hearth launch`, `hearth completions` and `hearth man`.

use std::path::PathBuf;

use clap::Args;

use super::at_least_one;

/// The end of `hearth launch --help`.
pub(super) const LAUNCH_HELP: &str = "Examples:\n  hearth launch codex\n  \
        hearth launch claude-code --model unsloth/Qwen3.5-9B-GGUF:Q4_K_M\n  \
        hearth launch openai-sdk python chat.py\n\n\
        The client's own files stay as they are; `hearth connect CLIENT --write` changes them.\n\
        A server that is started here ends with the client. It takes the HEARTH_ variables of\n\
        `hearth serve`. Flags of `launch` stand before the words of the client.";
/// The end of `hearth completions --help`.
pub(super) const COMPLETIONS_HELP: &str = "Examples:\n  \
        hearth completions bash > ~/.local/share/bash-completion/completions/hearth\n  \
        hearth completions zsh > ~/.zfunc/_hearth\n  \
        hearth completions fish > ~/.config/fish/completions/hearth.fish";
/// The end of `hearth man --help`.
pub(super) const MAN_HELP: &str = "Examples:\n  hearth man | man -l -\n  \
        hearth man --dir ~/.local/share/man/man1";

/// `hearth launch`.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// The client to start; `hearth connect` lists them.
    #[arg(value_name = "CLIENT")]
    pub client: String,
    /// Words for the client; for an SDK, the program and its words.
    #[arg(
        value_name = "ARGS",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub words: Vec<String>,
    /// The server's address. Without a server there, one is started if it is on this machine.
    #[arg(long, env = "HEARTH_URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// The API key, if the server requires one.
    #[arg(long, env = "HEARTH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// The model to serve if no server runs, else the id of the model to use [default: as the
    /// server reports].
    #[arg(long, short = 'm')]
    pub model: Option<String>,
    /// The model's context in tokens [default: as the server reports].
    #[arg(long, short = 'c', value_name = "TOKENS", value_parser = at_least_one)]
    pub context: Option<usize>,
    /// The configuration file of a server that is started.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print what would be started, and start nothing; a server must run.
    #[arg(long)]
    pub dry_run: bool,
}

/// `hearth completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// `hearth man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Write the pages of all commands into this directory instead of printing the first.
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}
