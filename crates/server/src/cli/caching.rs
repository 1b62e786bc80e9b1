//! Flags of the prefix cache.

use std::path::PathBuf;

use clap::Args;

/// Size and place of the prefix cache.
#[derive(Debug, Clone, Args)]
pub struct CacheArgs {
    /// Maximum number of prompt states that the prefix cache keeps in memory; 0 turns it off.
    #[arg(
        long,
        alias = "prefix-cache-slots",
        env = "HEARTH_PREFIX_CACHE_ENTRIES",
        value_name = "N",
        default_value_t = 32
    )]
    pub prefix_cache_entries: usize,
    /// Memory for prompt states, such as 8G [default: a quarter of the memory free at the start].
    #[arg(long, env = "HEARTH_PREFIX_CACHE_BYTES", value_name = "SIZE")]
    pub prefix_cache_bytes: Option<String>,
    /// Tokens per conversation to prefill while idle, in the form its next prompt will have; 0
    /// turns warm-up off.
    #[arg(
        long,
        alias = "read-ahead",
        env = "HEARTH_PREFIX_WARMUP",
        value_name = "TOKENS",
        default_value_t = 65536
    )]
    pub prefix_warmup: usize,
    /// A directory that keeps prompt states across restarts; its files hold prompts [default:
    /// none].
    #[arg(long, env = "HEARTH_KV_CACHE_DIR", value_name = "DIR")]
    pub kv_cache_dir: Option<PathBuf>,
    /// Size limit of that directory, in MiB.
    #[arg(
        long,
        env = "HEARTH_KV_CACHE_BUDGET",
        value_name = "MIB",
        default_value_t = 4096
    )]
    pub kv_cache_budget: u64,
    /// The shortest prompt that is stored in that directory, in tokens.
    #[arg(
        long,
        env = "HEARTH_KV_CACHE_MIN_TOKENS",
        value_name = "TOKENS",
        default_value_t = 512
    )]
    pub kv_cache_min_tokens: usize,
}

/// Flags of `hearth inspect` for the memory table.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// Show the memory of the model by context length and KV cache type.
    #[arg(long)]
    pub plan: bool,
    /// Free memory to plan for, such as 24GiB, or of several GPUs, such as 24GiB,24GiB [default:
    /// the device's free memory].
    #[arg(long, value_name = "SIZES", value_delimiter = ',', requires = "plan")]
    pub vram: Vec<String>,
    /// The draft's device to plan for [default: the device of the LM head].
    #[arg(long, value_name = "DEVICE", requires = "plan")]
    pub draft_device: Option<String>,
    /// The scorer of prompt compression to plan for, as `--prefill-drafter` of `hearth serve`.
    #[arg(long, value_name = "MODEL", requires = "plan")]
    pub prefill_drafter: Option<PathBuf>,
}
