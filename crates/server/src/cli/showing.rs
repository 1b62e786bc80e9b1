//! `hearth config`.

use clap::{Args, Subcommand};

use super::ServeArgs;

/// What to do about settings.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print every setting that `hearth serve` would run with, and where it comes from.
    #[command(
        after_help = "Examples:\n  hearth config show --config hearth.toml\n  \
        HEARTH_PORT=9000 hearth config show model.gguf --json\n\n\
        Takes the flags of `hearth serve`. A flag wins over the environment, that over the configuration file,\n\
        that over the model's card, and that over the default. Keys are counted, never shown."
    )]
    Show(Box<ShowArgs>),
}

/// `hearth config show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The settings.
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Print a JSON array of name, value and origin.
    #[arg(long)]
    pub json: bool,
}
