//! Flags about states of prompts that are kept for prompts that begin alike.

use std::path::PathBuf;

use clap::Args;

/// How much of prompts is kept, and where.
#[derive(Debug, Clone, Args)]
pub struct CacheArgs {
    /// States of prompts kept in memory at most; 0 keeps none.
    #[arg(
        long,
        env = "HEARTH_PREFIX_CACHE_SLOTS",
        value_name = "N",
        default_value_t = 32
    )]
    pub prefix_cache_slots: usize,
    /// Memory they may take, such as 8G [default: a quarter of what is free at the start].
    #[arg(long, env = "HEARTH_PREFIX_CACHE_BYTES", value_name = "SIZE")]
    pub prefix_cache_bytes: Option<String>,
    /// Tokens read ahead at most while nobody asks for anything, of a conversation as its next message will show it; 0
    /// reads nothing ahead.
    #[arg(
        long,
        env = "HEARTH_READ_AHEAD",
        value_name = "TOKENS",
        default_value_t = 65536
    )]
    pub read_ahead: usize,
    /// A folder in which they outlive the server; the files hold prompts [default: none].
    #[arg(long, env = "HEARTH_KV_CACHE_DIR", value_name = "DIR")]
    pub kv_cache_dir: Option<PathBuf>,
    /// What all files in that folder may take, in MiB.
    #[arg(
        long,
        env = "HEARTH_KV_CACHE_BUDGET",
        value_name = "MIB",
        default_value_t = 4096
    )]
    pub kv_cache_budget: u64,
    /// Prompts shorter than this stay out of that folder, in tokens.
    #[arg(
        long,
        env = "HEARTH_KV_CACHE_MIN_TOKENS",
        value_name = "TOKENS",
        default_value_t = 512
    )]
    pub kv_cache_min_tokens: usize,
}

/// The memory table of `hearth inspect`.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// Show what the model takes for any context and storage of keys and values.
    #[arg(long)]
    pub plan: bool,
    /// Plan for a card with so much memory free, such as 24GiB [default: what the device has free].
    #[arg(long, value_name = "SIZE", requires = "plan")]
    pub vram: Option<String>,
}
