//! Flags of prompt compression.

use std::path::PathBuf;

use chat::request::CompressionMode;
use clap::builder::FalseyValueParser;
use clap::{Args, ValueEnum};

/// When and how prompts are compressed.
#[derive(Debug, Clone, Args)]
pub struct CompressionArgs {
    /// Shorten the message contents of long prompts before prefill: a small model scores them, and
    /// the best sentences, lines and functions stay. System messages, tools and the question stay
    /// whole. `auto` skips prompts below --prefill-threshold, continued conversations, requests
    /// with tools, and questions with code. Facts can be lost.
    #[arg(
        long,
        env = "HEARTH_PREFILL_COMPRESSION",
        value_enum,
        default_value = "off"
    )]
    pub prefill_compression: CompressionArg,
    /// The shortest prompt that `auto` compresses, in tokens.
    #[arg(
        long,
        env = "HEARTH_PREFILL_THRESHOLD",
        value_name = "TOKENS",
        default_value_t = 32_000
    )]
    pub prefill_threshold: usize,
    /// Share of the message contents' tokens to keep.
    #[arg(
        long,
        env = "HEARTH_PREFILL_KEEP_RATIO",
        value_name = "RATIO",
        default_value_t = 0.05,
        value_parser = ratio
    )]
    pub prefill_keep_ratio: f64,
    /// The same by the prompt's length, as points such as 10000:0.5 40000:0.2 100000:0.1, linear
    /// between them [default: --prefill-keep-ratio].
    #[arg(
        long,
        env = "HEARTH_PREFILL_CURVE",
        value_name = "TOKENS:RATIO",
        num_args = 1..,
        value_delimiter = ','
    )]
    pub prefill_curve: Vec<String>,
    /// Let each session's ratio follow how well its drafts are accepted, from 0.10 within 0.025 and
    /// 0.20.
    #[arg(long, env = "HEARTH_PREFILL_KEEP_BY_SESSION", value_parser = FalseyValueParser::new())]
    pub prefill_keep_by_session: bool,
    /// Compress earlier messages of continued conversations one by one, and leave first turns whole
    /// if they fit. An earlier message has --prefill-threshold tokens or more; with `always`, it
    /// may be shorter. The system prompt and the last two messages stay whole, so later turns hit
    /// the prefix cache. Needs --prefill-compression.
    #[arg(
        long,
        alias = "disk-prefix-cache-compress",
        env = "HEARTH_PREFILL_AGED",
        value_parser = FalseyValueParser::new()
    )]
    pub prefill_aged: bool,
    /// The model that scores prompts: a GGUF file, or a name to pull such as OWNER/REPO:Q8_0
    /// [default: the served model, if it has under 2 billion weights].
    #[arg(long, env = "HEARTH_PREFILL_DRAFTER", value_name = "MODEL")]
    pub prefill_drafter: Option<PathBuf>,
    /// The device of the scorer, such as `cuda:1` or `cpu` [default: that of the model; beside a
    /// model on several devices, the CPU].
    #[arg(long, env = "HEARTH_PREFILL_DEVICE", value_name = "DEVICE")]
    pub prefill_device: Option<String>,
    /// The layer after whose attention scoring ends [default: at two thirds of a hybrid model's
    /// attention layers, at half of another's, if it has at least six].
    #[arg(long, env = "HEARTH_PREFILL_EXIT_LAYER", value_name = "LAYER")]
    pub prefill_exit_layer: Option<usize>,
    /// Attend to key blocks of 128 tokens whose weight is at least this share of the best block's
    /// while scoring; 0 attends to all.
    #[arg(
        long,
        env = "HEARTH_PREFILL_ALPHA",
        value_name = "SHARE",
        default_value_t = 0.12,
        value_parser = share
    )]
    pub prefill_alpha: f32,
    /// Log the time of each stage of compression.
    #[arg(long, env = "HEARTH_PREFILL_PROFILE", value_parser = FalseyValueParser::new())]
    pub prefill_profile: bool,
    /// Accepted without effect: no model is ever unloaded for scoring.
    #[arg(long, env = "HEARTH_PREFILL_SKIP_PARK", value_parser = FalseyValueParser::new())]
    pub prefill_skip_park: bool,
}

/// When prompts are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CompressionArg {
    /// Never.
    Off,
    /// If they are long and nothing in the request is against it.
    Auto,
    /// Always.
    Always,
}

impl CompressionArg {
    /// The mode.
    pub fn mode(self) -> CompressionMode {
        match self {
            CompressionArg::Off => CompressionMode::Off,
            CompressionArg::Auto => CompressionMode::Auto,
            CompressionArg::Always => CompressionMode::Always,
        }
    }
}

pub(super) fn ratio(text: &str) -> Result<f64, String> {
    compress::keep_ratio::ratio(text).map_err(|error| error.to_string())
}

pub(super) fn share(text: &str) -> Result<f32, String> {
    let share = text.trim().parse().ok();
    share
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or_else(|| "use a number between 0 and 1".to_owned())
}
