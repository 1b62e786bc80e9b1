//! Flags of `hearth pull`, `hearth list` and `hearth rm`.

use clap::Args;

/// `hearth pull`.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// The model: OWNER/REPO, OWNER/REPO:QUANT, OWNER/REPO:FILE.gguf, hf://OWNER/REPO/FILE.gguf, or
    /// the https address of a GGUF file.
    #[arg(required = true)]
    pub names: Vec<String>,
    /// Print a JSON object for each model instead of its path.
    #[arg(long)]
    pub json: bool,
}

/// `hearth list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Print a JSON array of objects with name, quant, size_bytes, used (seconds since 1970) and
    /// path.
    #[arg(long)]
    pub json: bool,
}

/// `hearth rm`.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// The model, as `hearth list` names it; OWNER/REPO alone removes all files of the repository.
    #[arg(required = true)]
    pub names: Vec<String>,
}
