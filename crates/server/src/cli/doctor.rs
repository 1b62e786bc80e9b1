//! Flags of `hearth doctor`.

use clap::Args;

use super::ServeArgs;

/// The end of `hearth doctor --help`.
pub(super) const DOCTOR_HELP: &str = "Examples:\n  hearth doctor\n  hearth doctor --config /etc/hearth/hearth.toml\n  \
        hearth doctor model.gguf --max-ctx 32768 --json\n\n\
        Takes the flags of `hearth serve`. Nothing is changed, downloaded or sent.\n\
        Exit status: 0 nothing stops serving, 1 a problem does.";

/// `hearth doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The flags of `hearth serve`.
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Print a JSON object with the machine and the findings.
    #[arg(long)]
    pub json: bool,
}
