//! Flags of `hearth config`.

use clap::{Args, Subcommand};

use super::ServeArgs;

/// Commands of `hearth config`.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print every setting of `hearth serve` and its origin.
    #[command(
        after_help = "Examples:\n  hearth config show --config hearth.toml\n  \
        HEARTH_PORT=9000 hearth config show model.gguf --json\n\n\
        Takes the flags of `hearth serve`. Precedence: flag, environment, configuration file,\n\
        model card, default. API keys are counted, never shown."
    )]
    Show(Box<ShowArgs>),
}

/// `hearth config show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The flags of `hearth serve`.
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Print a JSON array of objects with name, value and origin.
    #[arg(long)]
    pub json: bool,
}
