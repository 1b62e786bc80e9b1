//! What is typed after `hearth bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, value_parser};

use super::{DeviceArgs, OnOff, window_tokens};

/// What stands below the flags in `hearth bench --help`.
pub const BENCH_HELP: &str = "Examples:\n  hearth bench --synthetic qwen3.5-27b:q4_k_m --device cuda:0\n  \
    hearth bench --synthetic qwen3.5-0.8b:bf16 --pp 0 --tg 128 --verify '' --depth 0,4096\n  \
    hearth bench model.gguf --verify 1,24,4x8 --json lines.jsonl\n\n\
    Cases: pp N (N tokens of a prompt), tg N (N tokens one by one, row on the host), verify N (a tree of N\n\
    nodes) or SxN (S sequences with a tree of N each), draft. Medians over --reps runs, after one to warm up.\n\n  \
    hearth bench step --synthetic qwen3.5-27b:q4_k_m --draft q8_0 --accept 8.3 --device cuda:0\n  \
    hearth bench tune model.gguf --draft draft.gguf --device cuda:0\n  \
    hearth bench pay --device cpu --json lines.jsonl\n  \
    hearth bench depth --synthetic qwen3.5-27b:q4_k_m --draft q8_0 --device cuda:0 --vram-limit 24GiB --at 512,131072";

/// `hearth bench`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_value_name = "PART",
    subcommand_help_heading = "Parts"
)]
pub struct BenchArgs {
    /// Another thing to measure than single passes.
    #[command(subcommand)]
    pub part: Option<BenchPart>,
    /// The GGUF file to measure.
    #[arg(conflicts_with = "synthetic")]
    pub model: Option<PathBuf>,
    /// A made-up model instead: a shape and a recipe, as for `hearth synth`.
    #[arg(long, value_name = "SHAPE:TYPES")]
    pub synthetic: Option<String>,
    /// Where and how it runs.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Lengths of prompts; 0 for none.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "512,2048"
    )]
    pub pp: Vec<usize>,
    /// Tokens decoded one by one; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub tg: usize,
    /// Trees to verify: nodes, or sequences x nodes.
    #[arg(long, value_name = "LIST", default_value = "1,8,16,24,32,48,64,4x8")]
    pub verify: String,
    /// A draft to measure as well: a weight type such as q8_0 for a made-up one, or a file.
    #[arg(long, value_name = "WHAT")]
    pub draft: Option<String>,
    /// Committed tokens before each case.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "512"
    )]
    pub depth: Vec<usize>,
    /// How often each case runs.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub reps: usize,
    /// Append a JSON line for each case to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Seed of made-up weights and of tokens.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// What `hearth bench` measures besides single passes.
#[derive(Debug, Subcommand)]
pub enum BenchPart {
    /// Whole steps of speculation at real shapes, with made-up acceptance.
    Step(StepArgs),
    /// Sweep the budget of drafted nodes over real prompts and tell the best one.
    Tune(TuneArgs),
    /// Read one long prompt, measure passes on the way, and tell the memory that took.
    Depth(DepthArgs),
    /// Answer real prompts plainly and with drafting in turn, and tell what drafting brings.
    Pay(SpeculationAbArgs),
}

/// `hearth bench step`.
#[derive(Debug, Args)]
pub struct StepArgs {
    /// The GGUF file to measure [default: the bundled model].
    #[arg(conflicts_with = "synthetic")]
    pub model: Option<PathBuf>,
    /// A made-up model instead: a shape and a recipe, as for `hearth synth`.
    #[arg(long, value_name = "SHAPE:TYPES")]
    pub synthetic: Option<String>,
    /// Its draft: a weight type such as q8_0 for a made-up one, or a file [default: the bundled one for the
    /// bundled model].
    #[arg(long, value_name = "WHAT")]
    pub draft: Option<String>,
    /// Where and how it runs.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Tokens a step in the mean of a tree of --budget nodes, the one that the target adds included. Made up: the
    /// device does all its work, and is told what came true.
    #[arg(long, value_name = "TOKENS", default_value_t = 8.3)]
    pub accept: f64,
    /// Drafted nodes of each tree, at most.
    #[arg(long, value_name = "N", default_value = "22", value_parser = value_parser!(u8).range(1..=63))]
    pub budget: u8,
    /// Size trees by measured costs, as serving does, or give each the whole budget.
    #[arg(long, value_enum, value_name = "WHETHER", default_value = "on")]
    pub cost_stop: OnOff,
    /// Committed tokens before the first step.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub depth: usize,
    /// Sequences that speak at once.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2"
    )]
    pub sequences: Vec<usize>,
    /// Steps of one run.
    #[arg(long, value_name = "N", default_value_t = 12)]
    pub rounds: usize,
    /// Runs.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub reps: usize,
    /// Batch-invariant numerics.
    #[arg(long, alias = "exact")]
    pub batch_invariant: bool,
    /// Print every step that counts: nodes of its trees, for how many sequences it drafted, and its times.
    #[arg(long)]
    pub each: bool,
    /// Append a JSON line for each number of sequences to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// `hearth bench tune`.
#[derive(Debug, Args)]
pub struct TuneArgs {
    /// The GGUF file [default: the bundled model].
    pub model: Option<PathBuf>,
    /// Its draft [default: the bundled one for the bundled model].
    #[arg(long, value_name = "FILE")]
    pub draft: Option<String>,
    /// Where and how it runs.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Budgets to try, up to 63.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "4,8,12,15,18,22,26,30,40,63"
    )]
    pub budgets: Vec<usize>,
    /// The most tokens of an answer.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub tokens: usize,
    /// How often each prompt is answered; the fastest counts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub reps: usize,
    /// Prompts: a JSON array of objects with `class`, `messages` and perhaps `tools` [default: twenty of code,
    /// chat, questions and tools].
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Append a JSON line to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// `hearth bench depth`.
#[derive(Debug, Args)]
pub struct DepthArgs {
    /// The GGUF file to measure [default: the bundled model].
    #[arg(conflicts_with = "synthetic")]
    pub model: Option<PathBuf>,
    /// A made-up model instead: a shape and a recipe, as for `hearth synth`.
    #[arg(long, value_name = "SHAPE:TYPES")]
    pub synthetic: Option<String>,
    /// A draft beside it: a weight type such as q8_0 for a made-up one, or a file.
    #[arg(long, value_name = "WHAT")]
    pub draft: Option<String>,
    /// Where and how it runs.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Tokens of the prompt at which passes are measured, rising.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "512,16384"
    )]
    pub at: Vec<usize>,
    /// Tokens decoded one by one; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub tg: usize,
    /// Trees to verify.
    #[arg(long, value_name = "LIST", default_value = "1,23")]
    pub verify: String,
    /// Measure every case again with attention that sees only so many tokens before a new one (`--fa-window` of
    /// `hearth serve`); attention is then compiled for windows, as it is there.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = window_tokens)]
    pub fa_window: Vec<usize>,
    /// How often each case runs.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub reps: usize,
    /// Append a JSON line for each case to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// `hearth bench pay`.
#[derive(Debug, Args)]
pub struct SpeculationAbArgs {
    /// The GGUF file [default: the bundled model].
    pub model: Option<PathBuf>,
    /// Its draft [default: the bundled one for the bundled model].
    #[arg(long, value_name = "FILE")]
    pub draft: Option<String>,
    /// Where and how it runs.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Drafted nodes of each tree, at most.
    #[arg(long, value_name = "N", default_value = "22", value_parser = value_parser!(u8).range(1..=63))]
    pub budget: u8,
    /// The most tokens of an answer.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub tokens: usize,
    /// How often each prompt is answered either way.
    #[arg(long, value_name = "N", default_value_t = 9)]
    pub reps: usize,
    /// Draft nothing either way, to see how far two measurements of the same differ here.
    #[arg(long)]
    pub control: bool,
    /// Prompts: a JSON array of objects with `class`, `messages` and perhaps `tools` [default: twenty of code, chat,
    /// questions and tools, and beginnings of source files].
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Append a JSON line for each class to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}
