//! Flags of speculative decoding, and of the commands that check models and drafts.

use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{Args, ValueEnum, value_parser};

use super::{DeviceArgs, OnOff, at_least_one};

/// Flags of speculative decoding.
#[derive(Debug, Clone, Args)]
pub struct DraftArgs {
    /// The draft model: a GGUF file, a directory with config.json and model.safetensors, or a name
    /// to pull such as OWNER/REPO [default: none; for the bundled model, its bundled draft].
    #[arg(long, aliases = ["model-draft", "hf-repo-draft", "spec-draft-model"], env = "HEARTH_DRAFT",
        value_name = "FILE")]
    pub draft: Option<PathBuf>,
    /// Verify trees of drafted tokens (the default).
    #[arg(long, env = "HEARTH_DDTREE", value_parser = FalseyValueParser::new(), conflicts_with = "no_ddtree")]
    pub ddtree: bool,
    /// Verify chains of drafted tokens instead of trees.
    #[arg(long, env = "HEARTH_NO_DDTREE", value_parser = FalseyValueParser::new())]
    pub no_ddtree: bool,
    /// Decode without drafting.
    #[arg(long, env = "HEARTH_NO_SPECULATION", value_parser = FalseyValueParser::new())]
    pub no_speculation: bool,
    /// The most drafted tokens in a sequence's tree, 0 to 63 [default: 22].
    #[arg(long, env = "HEARTH_DDTREE_BUDGET", value_name = "N",
        value_parser = value_parser!(u8).range(0..=63))]
    pub ddtree_budget: Option<u8>,
    /// Temperature of the draft's probabilities when trees are built, 0.01 to 100.
    #[arg(long, env = "HEARTH_DDTREE_TEMP", value_name = "T", default_value = "1.0", value_parser = draft_temperature)]
    pub ddtree_temp: f32,
    /// Begin each tree with the draft's greedy chain before other branches compete for nodes.
    #[arg(long, env = "HEARTH_DDTREE_CHAIN_SEED", value_parser = FalseyValueParser::new())]
    pub ddtree_chain_seed: bool,
    /// Measure step costs at the start; cut trees and pause drafting where they do not pay off.
    #[arg(
        long,
        env = "HEARTH_DDTREE_COST_STOP",
        value_enum,
        value_name = "WHETHER",
        default_value = "on"
    )]
    pub ddtree_cost_stop: OnOff,
    /// What may draft, if the model has it: `mtp` (the model's own multi-token-prediction head),
    /// `block` (the draft model) and `suffix` (earlier places of the same text). Several draft one
    /// tree together, chosen per request by what pays [default: all].
    #[arg(
        long,
        env = "HEARTH_DRAFT_SOURCES",
        value_name = "LIST",
        value_enum,
        value_delimiter = ','
    )]
    pub draft_sources: Vec<DraftSourceName>,
    /// Leave the model's multi-token-prediction head unused.
    #[arg(long, env = "HEARTH_NO_MTP", value_parser = FalseyValueParser::new())]
    pub no_mtp: bool,
    /// Tokens at the end of a text that must have occurred before, so that what followed them
    /// then is drafted (suffix matches); 0 turns it off.
    #[arg(
        long,
        alias = "lookup",
        env = "HEARTH_LOOKUP_NGRAM",
        value_name = "N",
        default_value_t = decode::SpeculationConfig::MIN_MATCH
    )]
    pub lookup_ngram: usize,
    /// Reserve the draft's memory at the start and load its weights at their first use.
    #[arg(long, env = "HEARTH_LAZY_DRAFT", value_parser = FalseyValueParser::new())]
    pub lazy_draft: bool,
    /// The device of the draft model and of the model's multi-token-prediction head [default: that
    /// of the LM head]. Hidden states go there with each pass, candidates come back. Beside GPUs it
    /// may be another GPU, or `cpu`, which saves GPU memory and costs speed.
    #[arg(long, env = "HEARTH_DRAFT_DEVICE", value_name = "DEVICE")]
    pub draft_device: Option<String>,
    /// Sliding window of all draft layers but the last, for files that lack it; 0 uses the file's.
    #[arg(
        long,
        env = "HEARTH_DRAFT_SWA",
        value_name = "TOKENS",
        default_value_t = 0
    )]
    pub draft_swa: usize,
    /// Rows of a pass of the draft model, from its block to twice as many; 0 uses its block. More
    /// rows draft longer paths, for text that is easy to predict, such as code.
    #[arg(
        long,
        env = "HEARTH_DRAFT_WIDTH",
        value_name = "ROWS",
        default_value_t = 0
    )]
    pub draft_width: usize,
    /// Give bit-identical replies with and without drafting, alone and in a batch, and for any
    /// prefill chunks, even where that is slower. Without the flag, the CPU guarantees all of it,
    /// and GPUs all except for chunks and for a KV cache in f32. /props reports it.
    #[arg(
        long,
        alias = "exact",
        env = "HEARTH_BATCH_INVARIANT",
        value_parser = FalseyValueParser::new()
    )]
    pub batch_invariant: bool,
}

/// A source of drafted tokens, by its name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DraftSourceName {
    /// The model's multi-token-prediction head.
    Mtp,
    /// The draft model.
    Block,
    /// Earlier places of the same text.
    Suffix,
}

/// `hearth eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// The GGUF file.
    pub model: PathBuf,
    /// Device and numerics.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Input tokens: a JSON array of ids.
    #[arg(long, value_name = "FILE")]
    pub ids: PathBuf,
    /// Write the logits after every token as a NumPy file, f32 `[n, vocab]`.
    #[arg(
        long,
        value_name = "FILE",
        required_unless_present_any = ["greedy", "draft_logits", "draft_chain"]
    )]
    pub logits: Option<PathBuf>,
    /// The draft model: a GGUF file, or a directory with config.json and model.safetensors; `mtp`
    /// for the model's own multi-token-prediction head.
    #[arg(long, value_name = "FILE", requires = "at")]
    pub draft: Option<PathBuf>,
    /// Sliding window of all draft layers but the last, for files that lack it; 0 uses the file's.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub draft_swa: usize,
    /// Rows of a pass of the draft model, from its block to twice as many; 0 uses its block.
    #[arg(long, value_name = "ROWS", default_value_t = 0)]
    pub draft_width: usize,
    /// Write the draft's logits as a NumPy file, f32 `[depth, vocab]`. The root is the id at --at,
    /// behind the ids before it. Of a DFlash draft: without the root's row, `[block - 1, vocab]`.
    /// Of a DFlash2 draft: the same, before pairs are scored. Of a DSpark draft: after the bias
    /// along its greedy chain, `[block, vocab]` where it samples at the root. Of the model's own
    /// head: along its greedy chain. Tokens that the draft lacks have minus infinity.
    #[arg(long, value_name = "FILE", requires_all = ["draft", "at"])]
    pub draft_logits: Option<PathBuf>,
    /// Write the draft's greedy chain behind that root as a JSON array of ids.
    #[arg(long, value_name = "FILE", requires_all = ["draft", "at"])]
    pub draft_chain: Option<PathBuf>,
    /// Depth of the chain of `--draft mtp`, 1 to 7.
    #[arg(long, value_name = "N", default_value = "3", value_parser = value_parser!(u8).range(1..=7))]
    pub draft_depth: u8,
    /// Index of the block's root in the ids.
    #[arg(long, value_name = "INDEX", requires = "draft")]
    pub at: Option<usize>,
    /// Then generate N tokens greedily.
    #[arg(long, value_name = "N", requires = "out_ids", value_parser = at_least_one)]
    pub greedy: Option<usize>,
    /// Write the generated ids to this file, as a JSON array.
    #[arg(long, value_name = "FILE", requires = "greedy")]
    pub out_ids: Option<PathBuf>,
}

/// `hearth tree`.
#[derive(Debug, Args)]
pub struct TreeArgs {
    /// Draft logits of successive positions: a NumPy file, f32 `[depth, vocab]`.
    #[arg(long, value_name = "FILE")]
    pub logits: PathBuf,
    /// Drafted nodes, without the root.
    #[arg(long, value_name = "N", default_value = "22", value_parser = value_parser!(u8).range(0..=63))]
    pub budget: u8,
    /// Candidates per position.
    #[arg(long, value_name = "K", default_value = "8", value_parser = at_least_one)]
    pub top_k: usize,
    /// Order all nodes by probability instead of beginning with the greedy chain.
    #[arg(long)]
    pub no_chain_seed: bool,
    /// Temperature of the logits, 0.01 to 100.
    #[arg(long, value_name = "T", default_value = "1.0", value_parser = draft_temperature)]
    pub temperature: f32,
}

fn draft_temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if (0.01..=100.0).contains(&value) => Ok(value),
        _ => Err("use a number from 0.01 to 100".to_owned()),
    }
}
