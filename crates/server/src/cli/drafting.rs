//! Flags about drafted tokens, and of the commands for people who check models and drafts.

use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{Args, value_parser};

use super::{DeviceArgs, OnOff, at_least_one};

/// How tokens are drafted.
#[derive(Debug, Clone, Args)]
pub struct DraftArgs {
    /// The draft of the model: a GGUF file, or a folder with config.json and model.safetensors
    /// [default: none, and the bundled one for the bundled model].
    #[arg(long, env = "HEARTH_DRAFT", value_name = "FILE")]
    pub draft: Option<PathBuf>,
    /// Verify trees of drafted tokens, which is what is done anyway.
    #[arg(long, env = "HEARTH_DDTREE", value_parser = FalseyValueParser::new(), conflicts_with = "no_ddtree")]
    pub ddtree: bool,
    /// Verify chains of drafted tokens instead of trees.
    #[arg(long, env = "HEARTH_NO_DDTREE", value_parser = FalseyValueParser::new())]
    pub no_ddtree: bool,
    /// Draft nothing.
    #[arg(long, env = "HEARTH_NO_SPECULATION", value_parser = FalseyValueParser::new())]
    pub no_speculation: bool,
    /// The most drafted tokens of one verify and sequence, 0 to 63 [default: 22].
    #[arg(long, env = "HEARTH_DDTREE_BUDGET", value_name = "N",
        value_parser = value_parser!(u8).range(0..=63))]
    pub ddtree_budget: Option<u8>,
    /// Flattens what the draft is sure of above 1, sharpens it below.
    #[arg(long, env = "HEARTH_DDTREE_TEMP", value_name = "T", default_value = "1.0", value_parser = draft_temperature)]
    pub ddtree_temp: f32,
    /// Begin each tree with the draft's best chain, whatever the rest is worth.
    #[arg(long, env = "HEARTH_DDTREE_CHAIN_SEED", value_parser = FalseyValueParser::new())]
    pub ddtree_chain_seed: bool,
    /// Measure at the start what passes cost, and let trees stop, and drafting rest, where they do not pay.
    #[arg(
        long,
        env = "HEARTH_DDTREE_COST_STOP",
        value_enum,
        value_name = "WHETHER",
        default_value = "on"
    )]
    pub ddtree_cost_stop: OnOff,
    /// Tokens that must repeat for what followed them earlier in the text to be tried too; 0 never tries.
    #[arg(long, env = "HEARTH_LOOKUP", value_name = "N", default_value_t = 0)]
    pub lookup: usize,
    /// Reserve the draft's memory at the start, and load its weights at their first use.
    #[arg(long, env = "HEARTH_LAZY_DRAFT", value_parser = FalseyValueParser::new())]
    pub lazy_draft: bool,
    /// Where the draft runs: where the model does; another device is refused.
    #[arg(long, env = "HEARTH_DRAFT_DEVICE", value_name = "DEVICE")]
    pub draft_device: Option<String>,
    /// Sliding window of the draft's layers but the last, for files that lost it; 0 goes by the file.
    #[arg(
        long,
        env = "HEARTH_DRAFT_SWA",
        value_name = "TOKENS",
        default_value_t = 0
    )]
    pub draft_swa: usize,
    /// Give bit for bit the same answers with and without drafting, beside others and alone, and wherever the reading of a
    /// prompt was cut, where that costs speed. Without it, cards of compute capability 9.0 promise all but the last for
    /// models with heads of 256 values, and the CPU all of it; /props tells.
    #[arg(
        long,
        alias = "exact",
        env = "HEARTH_BATCH_INVARIANT",
        value_parser = FalseyValueParser::new()
    )]
    pub batch_invariant: bool,
}

/// `hearth eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// The GGUF file.
    pub model: PathBuf,
    /// Where and how it runs.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// A JSON array of token ids.
    #[arg(long, value_name = "FILE")]
    pub ids: PathBuf,
    /// Write the logits after every token, f32 `[n, vocab]`, as a NumPy file.
    #[arg(long, value_name = "FILE", required_unless_present_any = ["greedy", "draft_logits"])]
    pub logits: Option<PathBuf>,
    /// The model's draft: a GGUF file, or a folder with config.json and model.safetensors.
    #[arg(long, value_name = "FILE", requires = "draft_logits")]
    pub draft: Option<PathBuf>,
    /// Sliding window of the draft's layers but the last, for files that lost it; 0 goes by the file.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub draft_swa: usize,
    /// Write what the draft makes of the block whose root is the id at --at, after the ids before it: logits
    /// of all positions but the root's, f32 `[block - 1, vocab]`, as a NumPy file.
    #[arg(long, value_name = "FILE", requires_all = ["draft", "at"])]
    pub draft_logits: Option<PathBuf>,
    /// Index of the id that is the root of the block.
    #[arg(long, value_name = "INDEX", requires = "draft_logits")]
    pub at: Option<usize>,
    /// Then continue with the likeliest token, this many times.
    #[arg(long, value_name = "N", requires = "out_ids", value_parser = at_least_one)]
    pub greedy: Option<usize>,
    /// Where the continuation's ids go, as a JSON array.
    #[arg(long, value_name = "FILE", requires = "greedy")]
    pub out_ids: Option<PathBuf>,
}

/// `hearth tree`.
#[derive(Debug, Args)]
pub struct TreeArgs {
    /// Logits of successive positions, f32 `[depth, vocab]`, as a NumPy file.
    #[arg(long, value_name = "FILE")]
    pub logits: PathBuf,
    /// Nodes beyond the root.
    #[arg(long, value_name = "N", default_value = "22", value_parser = value_parser!(u8).range(0..=63))]
    pub budget: u8,
    /// Candidates of each position.
    #[arg(long, value_name = "K", default_value = "8", value_parser = at_least_one)]
    pub top_k: usize,
    /// Take the likeliest prefixes from the first node on, not the best chain first.
    #[arg(long)]
    pub no_chain_seed: bool,
    /// Flattens the logits above 1, sharpens them below.
    #[arg(long, value_name = "T", default_value = "1.0", value_parser = draft_temperature)]
    pub temperature: f32,
}

fn draft_temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if (0.01..=100.0).contains(&value) => Ok(value),
        _ => Err("use a number from 0.01 to 100".to_owned()),
    }
}
