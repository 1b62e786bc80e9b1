//! Flags of `hearth bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum, value_parser};

use super::compression::{ratio, share};
use super::{DeviceArgs, OnOff, at_least_one, window_tokens};

/// The text below the flags in `hearth bench --help`.
pub(super) const BENCH_HELP: &str = "Examples:\n  hearth bench --synthetic qwen3.5-27b:q4_k_m --device cuda:0\n  \
    hearth bench --synthetic qwen3.5-0.8b:bf16 --pp 0 --tg 128 --verify '' --depth 0,4096\n  \
    hearth bench model.gguf --verify 1,24,4x8 --json lines.jsonl\n\n\
    Cases: pp N (prefill of N tokens), tg N (decode of N tokens, logits on the host), verify N (a\n\
    tree of N nodes) or SxN (S sequences with N nodes each), draft, mtp. Times are medians over\n\
    --reps runs, after a warm-up run.\n\n  \
    hearth bench step --synthetic qwen3.5-27b:q4_k_m --draft q8_0 --accept 8.3 --device cuda:0\n  \
    hearth bench tune model.gguf --draft draft.gguf --device cuda:0\n  \
    hearth bench speculation --device cpu --json lines.jsonl\n  \
    hearth bench prompts humaneval.jsonl model.gguf --draft draft.gguf\n  \
    hearth bench serve http://127.0.0.1:8000 --concurrency 1,8 --svg load.svg\n  \
    hearth bench energy sweep.jsonl --cases tg --svg sweep.svg\n  \
    hearth bench depth --synthetic qwen3.5-27b:q4_k_m --draft q8_0 --device cuda:0 \
    --vram-limit 24GiB --at 512,131072\n  \
    hearth bench score --synthetic qwen3.5-0.8b:bf16 --device cuda --target qwen3.5-27b:q4_k_m";

/// `hearth bench`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_value_name = "BENCHMARK",
    subcommand_help_heading = "Benchmarks"
)]
pub struct BenchArgs {
    /// A benchmark other than single passes.
    #[command(subcommand)]
    pub benchmark: Option<BenchCommand>,
    /// The GGUF file to measure [default: the bundled model].
    #[arg(conflicts_with = "synthetic")]
    pub model: Option<PathBuf>,
    /// A random-weight model instead: a shape and a recipe, as for `hearth synth`.
    #[arg(long, value_name = "SHAPE:TYPES")]
    pub synthetic: Option<String>,
    /// Device and numerics.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Prompt lengths to prefill, in tokens; 0 for none.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "512,2048"
    )]
    pub pp: Vec<usize>,
    /// Tokens to decode one by one; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub tg: usize,
    /// Trees to verify: nodes, or sequences x nodes per tree.
    #[arg(long, value_name = "LIST", default_value = "1,8,16,24,32,48,64,4x8")]
    pub verify: String,
    /// A draft model to measure too: a file, or random weights of a type such as q8_0 or
    /// dflash2:q8_0, or dflash2:q8_0:16 for blocks of 16 rows.
    #[arg(long, value_name = "WHAT")]
    pub draft: Option<String>,
    /// The device of the draft and of the model's multi-token-prediction head [default: that of the
    /// LM head].
    #[arg(long, value_name = "DEVICE")]
    pub draft_device: Option<String>,
    /// Context lengths before each case, in tokens.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "512"
    )]
    pub depth: Vec<usize>,
    /// Timed runs of each case.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub reps: usize,
    /// Append a JSON line per case to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Seed of random weights and tokens.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Benchmarks other than single passes.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Time whole speculative steps at real shapes with simulated acceptance.
    Step(StepArgs),
    /// Sweep the node budget over real prompts and report the best one.
    Tune(TuneArgs),
    /// Prefill one long prompt, time passes on the way, and report the peak memory.
    Depth(DepthArgs),
    /// Compare plain decoding with drafting on real prompts, interleaved, and report the speed-up.
    #[command(alias = "pay")]
    Speculation(SpeculationAbArgs),
    /// Answer the prompts of a file plainly, with each source of drafts and with all of them, and
    /// print tokens per second, tokens per step and speed-up per task.
    Prompts(PromptsArgs),
    /// Time the scorer of prompt compression, and the first token of a compressed prompt.
    Score(ScoreArgs),
    /// Put load on a running server of OpenAI's protocol, and report the times that clients see.
    Serve(BenchServeArgs),
    /// Compare the power limits under which `hearth bench --json` has run: speed and tokens per
    /// joule of each case. Reads files only, and changes no setting.
    Energy(EnergyArgs),
}

/// `hearth bench energy`.
#[derive(Debug, Args)]
pub struct EnergyArgs {
    /// Files of JSON lines of `hearth bench --json`.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// The cases to compare, by the beginning of their names; none: all.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub cases: Vec<String>,
    /// Write a plot of tokens per joule and of speed over the power limit to this file.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// `hearth bench serve`.
#[derive(Debug, Args)]
pub struct BenchServeArgs {
    /// The server's address.
    #[arg(default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// The model that requests name [default: the first that the server lists].
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// The API key, if the server requires one.
    #[arg(long, env = "HEARTH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Requests of each load.
    #[arg(long, value_name = "N", default_value = "32", value_parser = at_least_one)]
    pub requests: usize,
    /// Loads: requests at a time.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,4",
        value_parser = at_least_one)]
    pub concurrency: Vec<usize>,
    /// Instead, requests that arrive at random times, so many in a second.
    #[arg(long, value_name = "N", conflicts_with = "concurrency", value_parser = positive)]
    pub rate: Option<f64>,
    /// Words of each prompt, which are about as many tokens. No two prompts begin alike.
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub prompt_tokens: usize,
    /// Tokens of each reply.
    #[arg(long, value_name = "N", default_value = "128", value_parser = at_least_one)]
    pub tokens: usize,
    /// Seconds of silence after which a request has failed.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub timeout: u64,
    /// Seed of prompts and arrivals.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Append a JSON line per load to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a plot of the percentiles to this file.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err(format!("{text} is not a number above 0")),
    }
}

/// `hearth bench prompts`.
#[derive(Debug, Args)]
pub struct PromptsArgs {
    /// Prompts as JSON lines: a string, or an object with `prompt` (a user's text), `messages` or
    /// `text` (continued as it stands, without the chat template), `task` and optional `tools`.
    #[arg(value_name = "FILE.jsonl")]
    pub file: PathBuf,
    /// The GGUF file [default: the bundled model].
    pub model: Option<PathBuf>,
    /// The draft model [default: the bundled draft for the bundled model, else none].
    #[arg(long, value_name = "FILE")]
    pub draft: Option<String>,
    /// Device and numerics.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// The most drafted nodes of each tree.
    #[arg(long, value_name = "N", default_value = "22", value_parser = value_parser!(u8).range(1..=63))]
    pub budget: u8,
    /// Size trees by measured step costs, as `serve` does. With `off` every tree fills the budget,
    /// so that tokens per step show the drafts' acceptance, alike on every machine.
    #[arg(long, value_enum, value_name = "WHETHER", default_value = "on")]
    pub cost_stop: OnOff,
    /// The most tokens of a reply.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub tokens: usize,
    /// Passes over the file. With more than one, the model is opened once for each method, and all
    /// methods answer each prompt in turn, so that they share the machine's changes of speed.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub passes: usize,
    /// Append a JSON line per task and method to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// `hearth bench step`.
#[derive(Debug, Args)]
pub struct StepArgs {
    /// The GGUF file to measure [default: the bundled model].
    #[arg(conflicts_with = "synthetic")]
    pub model: Option<PathBuf>,
    /// A random-weight model instead: a shape and a recipe, as for `hearth synth`.
    #[arg(long, value_name = "SHAPE:TYPES")]
    pub synthetic: Option<String>,
    /// The draft model: a file, or a weight type such as q8_0 for random weights [default: the
    /// bundled draft for the bundled model].
    #[arg(long, value_name = "WHAT")]
    pub draft: Option<String>,
    /// The device of the draft and of the model's multi-token-prediction head [default: that of the
    /// LM head].
    #[arg(long, value_name = "DEVICE")]
    pub draft_device: Option<String>,
    /// Device and numerics.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Mean accepted tokens per step of a tree of --budget nodes, the target's own token included.
    /// Acceptance is simulated; the device does all its work.
    #[arg(long, value_name = "TOKENS", default_value_t = 8.3)]
    pub accept: f64,
    /// The most drafted nodes of each tree.
    #[arg(long, value_name = "N", default_value = "22", value_parser = value_parser!(u8).range(1..=63))]
    pub budget: u8,
    /// Size trees by measured step costs, as `serve` does, instead of the whole budget.
    #[arg(long, value_enum, value_name = "WHETHER", default_value = "on")]
    pub cost_stop: OnOff,
    /// Context length before the first step, in tokens.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub depth: usize,
    /// Sequences in the batch.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2"
    )]
    pub sequences: Vec<usize>,
    /// How several sequences step on devices that can work on two groups of them; `serve` takes
    /// what it measures to be faster. In turn, a step is one of a group.
    #[arg(long, value_enum, value_name = "HOW", default_value = "together")]
    pub groups: GroupsArg,
    /// Steps per run.
    #[arg(long, alias = "rounds", value_name = "N", default_value_t = 12)]
    pub steps: usize,
    /// Timed runs.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub reps: usize,
    /// Use batch-invariant numerics.
    #[arg(long, alias = "exact")]
    pub batch_invariant: bool,
    /// Print each timed step: nodes per tree, drafted sequences, and times.
    #[arg(long)]
    pub each: bool,
    /// Append a JSON line per number of sequences to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// How several sequences step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GroupsArg {
    /// All in one step.
    Together,
    /// In two groups, one of which is drafted or in the lower stages while the other is verified.
    InTurn,
    /// As is measured to be faster.
    Measured,
}

/// `hearth bench tune`.
#[derive(Debug, Args)]
pub struct TuneArgs {
    /// The GGUF file [default: the bundled model].
    pub model: Option<PathBuf>,
    /// The draft model [default: the bundled draft for the bundled model].
    #[arg(long, value_name = "FILE")]
    pub draft: Option<String>,
    /// Device and numerics.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Node budgets to measure, up to 63.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "4,8,12,15,18,22,26,30,40,63"
    )]
    pub budgets: Vec<usize>,
    /// The most tokens of a reply.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub tokens: usize,
    /// Runs of each prompt; the fastest counts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub reps: usize,
    /// Prompts: a JSON array of objects with `class`, `messages` and optional `tools` [default:
    /// twenty prompts of code, chat, questions and tools].
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
    /// A random-weight model instead: a shape and a recipe, as for `hearth synth`.
    #[arg(long, value_name = "SHAPE:TYPES")]
    pub synthetic: Option<String>,
    /// A draft model to measure too: a file, or random weights of a type such as q8_0 or
    /// dflash2:q8_0, or dflash2:q8_0:16 for blocks of 16 rows.
    #[arg(long, value_name = "WHAT")]
    pub draft: Option<String>,
    /// Device and numerics.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Context lengths at which passes are timed, in rising order.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "512,16384"
    )]
    pub at: Vec<usize>,
    /// Tokens to decode one by one; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub tg: usize,
    /// Trees to verify: nodes, or sequences x nodes per tree.
    #[arg(long, value_name = "LIST", default_value = "1,23")]
    pub verify: String,
    /// Measure every case again with these attention windows (`--attention-window` of `hearth
    /// serve`), with attention compiled for windows.
    #[arg(
        long,
        alias = "fa-window",
        value_name = "LIST",
        value_delimiter = ',',
        value_parser = window_tokens
    )]
    pub attention_window: Vec<usize>,
    /// Timed runs of each case.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub reps: usize,
    /// Append a JSON line per case to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// `hearth bench score`.
#[derive(Debug, Args)]
pub struct ScoreArgs {
    /// The GGUF file of the scorer [default: the bundled model].
    #[arg(conflicts_with = "synthetic")]
    pub model: Option<PathBuf>,
    /// A random-weight scorer instead: a shape and a recipe, as for `hearth synth`.
    #[arg(long, value_name = "SHAPE:TYPES")]
    pub synthetic: Option<String>,
    /// Device and numerics.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Lengths of the prompts, in tokens.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "32768,131072",
        value_parser = at_least_one)]
    pub tokens: Vec<usize>,
    /// As `--prefill-exit-layer` of `hearth serve`.
    #[arg(long, value_name = "LAYER")]
    pub exit_layer: Option<usize>,
    /// As `--prefill-alpha` of `hearth serve`.
    #[arg(long, value_name = "SHARE", default_value_t = 0.12, value_parser = share)]
    pub alpha: f32,
    /// Time the first token of this model instead, behind compressed text: tokenising, scoring,
    /// selecting, and prefilling what stays. A file, or random weights of SHAPE:TYPES.
    #[arg(long, value_name = "WHAT")]
    pub target: Option<String>,
    /// Share of the text to keep for the target.
    #[arg(long, value_name = "RATIO", default_value_t = 0.05, value_parser = ratio)]
    pub keep: f64,
    /// Timed runs of each length, after one that warms up.
    #[arg(long, value_name = "N", default_value = "3", value_parser = at_least_one)]
    pub reps: usize,
    /// Append a JSON line per case to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Seed of random weights, tokens and text.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// `hearth bench speculation`.
#[derive(Debug, Args)]
pub struct SpeculationAbArgs {
    /// The GGUF file [default: the bundled model].
    pub model: Option<PathBuf>,
    /// The draft model [default: the bundled draft for the bundled model].
    #[arg(long, value_name = "FILE")]
    pub draft: Option<String>,
    /// Device and numerics.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// The most drafted nodes of each tree.
    #[arg(long, value_name = "N", default_value = "22", value_parser = value_parser!(u8).range(1..=63))]
    pub budget: u8,
    /// The most tokens of a reply.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub tokens: usize,
    /// Runs of each prompt with either method.
    #[arg(long, value_name = "N", default_value_t = 9)]
    pub reps: usize,
    /// Decode plainly with both methods, to measure the noise.
    #[arg(long)]
    pub control: bool,
    /// Prompts: a JSON array of objects with `class`, `messages` and optional `tools` [default:
    /// twenty prompts of code, chat, questions and tools, and beginnings of source files].
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Append a JSON line per class to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn parse(line: &str) -> Command {
        Cli::try_parse_from(line.split(' ')).unwrap().command
    }

    #[test]
    fn old_names_of_benchmarks_and_flags_still_parse() {
        let Command::Bench(bench) = parse("hearth bench pay --reps 3") else {
            panic!("not a bench");
        };
        let Some(BenchCommand::Speculation(args)) = bench.benchmark else {
            panic!("{:?}", bench.benchmark);
        };
        assert_eq!(args.reps, 3);
        let Command::Bench(bench) = parse("hearth bench step --rounds 5") else {
            panic!("not a bench");
        };
        let Some(BenchCommand::Step(args)) = bench.benchmark else {
            panic!("{:?}", bench.benchmark);
        };
        assert_eq!(args.steps, 5);
        let Command::Probe(args) = parse("hearth probe --patience 7") else {
            panic!("not a probe");
        };
        assert_eq!(args.timeout, 7);
    }
}
