//! Flags of `hearth quantize` and `hearth imatrix`.

use std::path::PathBuf;

use clap::Args;

use super::{DeviceArgs, at_least_one};

/// `hearth quantize`.
#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// The GGUF file to read.
    pub input: PathBuf,
    /// The GGUF file to write.
    pub output: PathBuf,
    /// The recipe: q4_k_m, q8_0, q4_0, q5_k_m, q6_k, iq3_s, mxfp4, nvfp4, tq1_0, tq2_0, bf16, f16,
    /// f32; with --imatrix also iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq2_m, iq3_xxs.
    pub recipe: String,
    /// An importance matrix of the model, of `hearth imatrix` or llama-imatrix (GGUF or the older
    /// .dat); the IQ1, IQ2 and IQ3 types use it.
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,
    /// Threads [default: one per core].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Replace the output file if it exists.
    #[arg(long)]
    pub force: bool,
}

/// `hearth imatrix`.
#[derive(Debug, Args)]
pub struct ImatrixArgs {
    /// The GGUF file of the model, best with 16-bit weights.
    pub model: PathBuf,
    /// The GGUF file to write, for `hearth quantize --imatrix`.
    pub output: PathBuf,
    /// The text to run through the model: a megabyte of what the model will be used for.
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// Tokens of the text that are run together.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = at_least_one)]
    pub chunk_tokens: usize,
    /// Use only the first chunks of the text.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub chunks: Option<usize>,
    /// Replace the output file if it exists.
    #[arg(long)]
    pub force: bool,
    /// Context and threads; the device is the CPU.
    #[command(flatten)]
    pub device: DeviceArgs,
}
