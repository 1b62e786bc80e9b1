//! Flags of `hearth doctor`.

use clap::Args;

use super::ServeArgs;

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
