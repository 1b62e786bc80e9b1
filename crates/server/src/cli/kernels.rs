//! Flags of `hearth kernels`.

use clap::{Args, Subcommand};

use super::{CompilerArgs, NumericsArg, at_least_one};

/// `hearth kernels`.
#[derive(Debug, Args)]
pub struct KernelsArgs {
    /// The command.
    #[command(subcommand)]
    pub what: KernelsCommand,
}

/// Commands of `hearth kernels`.
#[derive(Debug, Subcommand)]
pub enum KernelsCommand {
    /// Compile the standard kernels into the cache.
    Build(KernelsBuildArgs),
    /// Show registers, spills and shared memory of the standard kernels.
    List(KernelsListArgs),
    /// Print which kernels run a model, for how many rows, and why; needs neither a GPU nor
    /// libnvrtc.
    Explain(KernelsExplainArgs),
    /// Predict the time of a decode step on a home GPU from the machine code of its kernels; needs
    /// no GPU, but libnvrtc and nvdisasm.
    #[command(hide = true)]
    Cost(KernelsCostArgs),
}

/// `hearth kernels explain`.
#[derive(Debug, Args)]
pub struct KernelsExplainArgs {
    /// A GGUF file, or a shape and recipe as for `hearth synth`, such as `qwen3.5-27b:q4_k_m`.
    pub model: String,
    /// Architectures, such as `sm_86,sm_90a` [default: sm_80, sm_86, sm_89, sm_90a and sm_120a].
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub arch: Vec<String>,
    /// KV cache type.
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub kv_type: String,
    /// Explain a model opened with --batch-invariant.
    #[arg(long)]
    pub batch_invariant: bool,
    /// Numerics of decode steps [default: as `serve` chooses].
    #[arg(long, value_enum, value_name = "NUMERICS")]
    pub numerics: Option<NumericsArg>,
    /// Print JSON lines instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// `hearth kernels cost`.
#[derive(Debug, Args)]
pub struct KernelsCostArgs {
    /// Architectures: `sm_86` (RTX 3090), `sm_89` (4090), `sm_120` (5090).
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "sm_86,sm_89,sm_120"
    )]
    pub arch: Vec<String>,
    /// A GGUF file, or a shape and recipe as for `hearth synth`.
    #[arg(long, value_name = "MODEL", default_value = "qwen3.5-27b:q4_k_m")]
    pub model: String,
    /// Rows of a step.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,16,24"
    )]
    pub rows: Vec<usize>,
    /// Count a chunk of 2,048 tokens of a prompt in place of decode steps.
    #[arg(long)]
    pub prompt: bool,
    /// Fit the constants to three measured steps, and predict those that were measured besides; the
    /// model is that of the measurements.
    #[arg(long)]
    pub check: bool,
    /// Disassembler of NVIDIA's CUDA toolkit [default: searched in PATH].
    #[arg(
        long,
        env = "HEARTH_NVDISASM",
        value_name = "FILE",
        default_value = "nvdisasm"
    )]
    pub nvdisasm: std::path::PathBuf,
    /// Compilation of kernels.
    #[command(flatten)]
    pub compiler: CompilerArgs,
}

/// `hearth kernels build`.
#[derive(Debug, Args)]
pub struct KernelsBuildArgs {
    /// Architectures, such as `sm_86,sm_90a` [default: the GPUs of this machine].
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub arch: Vec<String>,
    /// Fail if a kernel's spills differ from `kernels/spills.txt`.
    #[arg(long)]
    pub deny_spills: bool,
    /// Compiler threads [default: one per core].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Models: files, or shapes and recipes as for `hearth synth` [default: well-known models].
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub models: Vec<String>,
    /// Step widths of kernels that are compiled per width, such as `1,24` [default: all].
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub widths: Vec<usize>,
    /// Numerics of decode steps [default: as `serve` chooses].
    #[arg(long, alias = "sums", value_enum, value_name = "NUMERICS")]
    pub numerics: Option<NumericsArg>,
    /// Compilation of kernels.
    #[command(flatten)]
    pub compiler: CompilerArgs,
}

/// `hearth kernels list`.
#[derive(Debug, Args)]
pub struct KernelsListArgs {
    /// The architecture [default: the first GPU of this machine].
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<String>,
    /// Print JSON lines instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Models: files, or shapes and recipes as for `hearth synth` [default: well-known models].
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub models: Vec<String>,
    /// Numerics of decode steps [default: as `serve` chooses].
    #[arg(long, alias = "sums", value_enum, value_name = "NUMERICS")]
    pub numerics: Option<NumericsArg>,
    /// Compilation of kernels.
    #[command(flatten)]
    pub compiler: CompilerArgs,
}
