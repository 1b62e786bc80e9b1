//! Flags of kept responses.

use std::path::PathBuf;

use clap::{Args, value_parser};

/// Where responses of `/v1/responses` are kept by their ids.
#[derive(Debug, Clone, Args)]
pub struct ResponsesArgs {
    /// Memory of responses that later requests can name by their ids, in MiB; 0 keeps none there.
    #[arg(long, env = "HEARTH_RESPONSES_MEMORY", value_name = "MIB", default_value_t = 64,
        value_parser = value_parser!(u64).range(0..=1 << 20))]
    pub responses_memory: u64,
    /// A directory that keeps responses across restarts; its files hold conversations [default:
    /// none].
    #[arg(long, env = "HEARTH_RESPONSES_DIR", value_name = "DIR")]
    pub responses_dir: Option<PathBuf>,
    /// Size limit of that directory, in MiB.
    #[arg(long, env = "HEARTH_RESPONSES_BUDGET", value_name = "MIB", default_value_t = 1024,
        value_parser = value_parser!(u64).range(1..=1 << 30))]
    pub responses_budget: u64,
}
