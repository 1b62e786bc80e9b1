//! Flags on the device that runs a model, and its memory.

use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{Args, ValueEnum};

use super::at_least_one;

/// Device and numerics of a model.
#[derive(Debug, Clone, Args)]
pub struct DeviceArgs {
    /// Device: `auto` (a GPU if there is one, else the CPU), `cpu`, `cuda`, or `cuda:N`.
    #[arg(
        long,
        alias = "target-device",
        env = "HEARTH_DEVICE",
        default_value = "auto"
    )]
    pub device: String,
    /// The devices of the layers, such as `cuda:0,cuda:1`: each runs a range of layers, the
    /// last one also the LM head. `hearth inspect FILE --plan` shows what would go where.
    #[arg(
        long,
        env = "HEARTH_TARGET_DEVICES",
        value_name = "LIST",
        value_delimiter = ',',
        conflicts_with = "device"
    )]
    pub target_devices: Vec<String>,
    /// What each of --target-devices has of the model. `tensor` needs two GPUs that reach each
    /// other's memory, and runs one sequence on both at once [default: layer].
    #[arg(
        long,
        alias = "target-split-mode",
        env = "HEARTH_SPLIT_MODE",
        value_name = "MODE"
    )]
    pub split_mode: Option<SplitModeArg>,
    /// The share of the layers of each of --target-devices, as weights or layers, such as `40,24`
    /// [default: so that the fullest device has the lowest share of its memory in use].
    #[arg(
        long,
        env = "HEARTH_TARGET_LAYER_SPLIT",
        value_name = "LIST",
        value_delimiter = ','
    )]
    pub target_layer_split: Vec<f64>,
    /// Require that the GPUs of --target-devices and --draft-device reach each other's memory, and
    /// refuse others [default: rows go through host memory where they do not].
    #[arg(long, env = "HEARTH_PEER_ACCESS", value_parser = FalseyValueParser::new())]
    pub peer_access: bool,
    /// Run the CPU's scalar reference, which is slow; all other paths are checked against it.
    #[arg(long, env = "HEARTH_CPU_REFERENCE", value_parser = FalseyValueParser::new())]
    pub cpu_reference: bool,
    /// Threads of the CPU device [default: one per core].
    #[arg(long, short = 't', env = "HEARTH_THREADS", value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// The longest context, in tokens [default: the model's training context as far as memory
    /// allows; on the CPU at most 32768].
    #[arg(long, short = 'c', aliases = ["ctx-size", "max-model-len"], env = "HEARTH_MAX_CTX",
        value_name = "TOKENS", value_parser = at_least_one)]
    pub max_ctx: Option<usize>,
    /// Tokens of the KV cache that all sequences share, at least one context, or
    /// 512 without --max-ctx [default: one context per sequence as far as memory allows].
    #[arg(long, env = "HEARTH_KV_POOL", value_name = "TOKENS", value_parser = at_least_one)]
    pub kv_pool: Option<usize>,
    /// Type of the cached keys.
    #[arg(long, env = "HEARTH_CACHE_TYPE_K", value_name = "TYPE")]
    pub cache_type_k: Option<String>,
    /// Type of the cached values.
    #[arg(long, env = "HEARTH_CACHE_TYPE_V", value_name = "TYPE")]
    pub cache_type_v: Option<String>,
    /// KV cache type if --cache-type-k/-v are unset; given a list such as `tq3_0,q4_0`, the first
    /// supported type that fits [default: q8_0,q4_0,tq3_0 on a GPU; f16 on the CPU, f32 for its
    /// reference].
    #[arg(long, env = "HEARTH_KV_TYPE", value_name = "TYPE")]
    pub kv_type: Option<String>,
    /// Tokens of a prefill chunk, a multiple of 64 [default: 512 on the CPU, 2048 on a GPU].
    #[arg(
        long,
        alias = "ubatch-size",
        env = "HEARTH_CHUNK",
        value_name = "TOKENS"
    )]
    pub chunk: Option<usize>,
    /// The most GPU memory to use, such as `24G` [default: all free memory less --vram-headroom].
    /// Experts of a mixture that do not fit stay in host memory.
    #[arg(long, env = "HEARTH_VRAM_LIMIT", value_name = "SIZE")]
    pub vram_limit: Option<String>,
    /// GPU memory to leave free, such as `1G`, or `0` [default: 512 MiB or 3 % of what is free,
    /// whichever is more; nothing with --vram-limit].
    #[arg(long, env = "HEARTH_VRAM_HEADROOM", value_name = "SIZE")]
    pub vram_headroom: Option<String>,
    /// Launch kernels one by one instead of as CUDA graphs, for debugging.
    #[arg(long, alias = "enforce-eager", env = "HEARTH_EAGER", value_parser = FalseyValueParser::new())]
    pub eager: bool,
    /// Run the GPU with the kernels, launch features and shared memory of another class, such as
    /// `sm_86` (RTX 3090), `sm_89` (4090) or `sm_120` (5090), to check and time it.
    #[arg(
        long,
        env = "HEARTH_GPU_LIKE",
        value_name = "ARCH",
        hide_short_help = true
    )]
    pub gpu_like: Option<String>,
    /// Multiprocessors to use with --gpu-like [default: all].
    #[arg(
        long,
        env = "HEARTH_GPU_SMS",
        value_name = "N",
        requires = "gpu_like",
        hide_short_help = true
    )]
    pub gpu_sms: Option<u32>,
    /// Run each GEMM of a layer as a launch of its own in decode steps, to compare with fused
    /// layers.
    #[arg(
        long,
        env = "HEARTH_SEPARATE_GEMMS",
        value_parser = FalseyValueParser::new(),
        hide_short_help = true
    )]
    pub separate_gemms: bool,
    /// Numerics of a GPU's decode steps without --batch-invariant: `batch-invariant` or `fastest`
    /// [default: the former where it costs little]. With `fastest`, rounding depends on the batch
    /// and on drafting. On an H200, a verify step of 24 nodes of the 27B takes 5.60 ms with it and
    /// 5.74 ms without.
    #[arg(
        long,
        alias = "sums",
        env = "HEARTH_NUMERICS",
        value_name = "NUMERICS",
        value_enum
    )]
    pub numerics: Option<NumericsArg>,
    /// Run decode steps of small models, of one sequence and up to 16 rows, as one persistent
    /// launch: `on`, `off`, `clocks` (`on`; the GPU prints where the time of one launch goes), or
    /// `auto`: before compute capability 9.0, without an MTP head and without a draft that reads
    /// the model's layers, where it has been measured to be faster. A token's bits are the same.
    #[arg(
        long,
        env = "HEARTH_ONE_LAUNCH",
        value_name = "SWITCH",
        value_enum,
        default_value = "auto",
        hide_short_help = true
    )]
    pub one_launch: OneLaunchArg,
    /// Compilation of kernels.
    #[command(flatten)]
    pub compiler: CompilerArgs,
}

/// Whether the bits of a token's logits may depend on the rest of its decode step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NumericsArg {
    /// A token's bits depend on neither the batch nor drafting.
    #[value(alias = "by-path")]
    BatchInvariant,
    /// The fastest kernels; a token's bits may depend on the batch and on drafting.
    #[value(alias = "fast")]
    Fastest,
}

/// What each of several devices has of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SplitModeArg {
    /// All of it: one device.
    None,
    /// A range of its layers.
    Layer,
    /// Half of the heads and channels of every layer: tensor parallelism.
    Tensor,
}

/// Whether steps of few rows run as one persistent launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OneLaunchArg {
    /// Where it has been measured to be faster.
    Auto,
    /// Wherever the model has one.
    On,
    /// The same; the GPU prints where the time of one launch goes.
    Clocks,
    /// Never.
    Off,
}

/// Flags on the compilation of CUDA kernels.
#[derive(Debug, Clone, Args)]
pub struct CompilerArgs {
    /// The libnvrtc that compiles CUDA kernels [default: searched in the usual directories].
    #[arg(long, env = "HEARTH_NVRTC", value_name = "FILE")]
    pub nvrtc: Option<PathBuf>,
    /// Cache directory of compiled CUDA kernels [default: hearth/kernels in the user's cache
    /// directory].
    #[arg(long, env = "HEARTH_KERNEL_CACHE", value_name = "DIR")]
    pub kernel_cache: Option<PathBuf>,
}
