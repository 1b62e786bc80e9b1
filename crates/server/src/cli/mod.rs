//! The command line and its environment variables, as typed.
//!
//! [`config`](crate::config) turns them into settings. Every flag of `serve` has an environment
//! variable `HEARTH_<FLAG>` and a key in the configuration file. Precedence: flag, environment,
//! file, model card, default.

mod bench;
mod caching;
mod clients;
mod compression;
mod device;
mod doctor;
mod drafting;
pub(crate) mod headings;
mod hosting;
mod installing;
mod kernels;
mod listening;
mod models;
mod quantize;
mod reasoning;
mod refusal;
pub mod refused;
mod refused_servers;
mod responses;
mod running;
mod sampling;
mod showing;
pub(crate) mod spellings;
mod window;

use std::path::PathBuf;

use bench::BENCH_HELP;
pub use bench::{
    BenchArgs, BenchCommand, BenchServeArgs, DepthArgs, EnergyArgs, GroupsArg, PromptsArgs,
    ScoreArgs, SpeculationAbArgs, StepArgs, TuneArgs,
};
pub use caching::{CacheArgs, PlanArgs};
use clap::{Args, Parser, Subcommand, ValueEnum, builder::FalseyValueParser, value_parser};
pub use clients::{ConnectArgs, ProbeArgs};
pub use compression::CompressionArgs;
pub use device::{CompilerArgs, DeviceArgs, NumericsArg, OneLaunchArg, SplitModeArg};
use doctor::DOCTOR_HELP;
pub use doctor::DoctorArgs;
pub use drafting::{DraftArgs, DraftSourceName, EvalArgs, TreeArgs};
pub use hosting::{HostingArgs, PsArgs, StopArgs};
use installing::{COMPLETIONS_HELP, LAUNCH_HELP, MAN_HELP};
pub use installing::{CompletionsArgs, LaunchArgs, ManArgs};
pub use kernels::{
    KernelsArgs, KernelsBuildArgs, KernelsCommand, KernelsCostArgs, KernelsExplainArgs,
    KernelsListArgs,
};
pub use listening::ListenArgs;
pub use models::{ListArgs, PullArgs, RmArgs};
pub use quantize::{ImatrixArgs, QuantizeArgs};
pub use reasoning::ReasoningArgs;
pub use responses::ResponsesArgs;
pub use running::RunArgs;
pub use sampling::SamplingArgs;
pub use showing::{ConfigCommand, ShowArgs};
pub use window::{WindowArgs, tokens as window_tokens};

/// A local LLM server with an OpenAI-compatible API.
#[derive(Debug, Parser)]
#[command(
    name = "hearth",
    version = crate::version::VERSION,
    propagate_version = true,
    about,
    max_term_width = 100,
    arg_required_else_help = true
)]
#[command(after_help = "Example:\n  hearth serve qwen3.5-0.8b-q4_k_m.gguf\n  \
    curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\\n    \
    -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'")]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
    /// Log level: error, warn, info, debug, trace, or a filter such as `server=debug`.
    #[arg(
        long,
        global = true,
        env = "HEARTH_LOG",
        default_value = "info",
        value_name = "FILTER"
    )]
    pub log: String,
    /// Format of log lines.
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        env = "HEARTH_LOG_FORMAT",
        value_enum,
        default_value = "text"
    )]
    pub log_format: LogFormat,
    /// Send no requests to the Hugging Face hub; only models in the cache can be named.
    #[arg(long, global = true, hide_short_help = true, env = "HEARTH_OFFLINE", value_parser = FalseyValueParser::new())]
    pub offline: bool,
    /// Write no colours.
    #[arg(long, global = true, hide_short_help = true, env = "NO_COLOR", value_parser = FalseyValueParser::new())]
    pub no_color: bool,
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// JSON lines.
    Json,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP.
    #[command(
        after_help = "Examples:\n  hearth serve model.gguf --port 8000 --max-ctx 16384\n  \
        hearth serve owner/repo:Q4_K_M           (downloads the model if needed)\n  \
        hearth serve --models-dir ~/models       (requests name the model)\n  \
        hearth serve model.gguf --dry-run        (prints the memory plan and exits)\n\n\
        `-h` shows the flags that most people need, `--help` all of them.\n\
        Without MODEL, the bundled toy model is served.\n\
        A configuration file holds flags without their dashes: port = 9000, no-cors = true.\n\
        SIGINT or SIGTERM stops the server after running requests; a second one stops it at once.\n\
        Exit status: 0 stopped by a signal, 1 error, 2 wrong command line, 74 model file\n\
        shortened while in use, 130 second signal."
    )]
    Serve(Box<ServeArgs>),
    /// Show the server's settings.
    #[command(subcommand)]
    #[command(after_help = "Example:\n  hearth config show --config hearth.toml")]
    Config(ConfigCommand),
    /// Report what would stop the server or make it slow: GPU, compiler, folders, port, models.
    #[command(after_help = DOCTOR_HELP)]
    Doctor(Box<DoctorArgs>),
    /// Configure a client for the server: print its settings, or write them to its files.
    #[command(
        after_help = "Examples:\n  hearth connect                          (lists the clients)\n  \
        hearth connect codex                    (prints; changes nothing)\n  \
        hearth connect claude-code --write --url http://127.0.0.1:8000"
    )]
    Connect(ConnectArgs),
    /// Start a client on the server for one run, and the server too if none runs.
    #[command(after_help = LAUNCH_HELP)]
    Launch(LaunchArgs),
    /// Send a running server the requests of clients, and report which ones work.
    #[command(
        after_help = "Examples:\n  hearth probe --url http://127.0.0.1:8000\n  hearth probe --url http://127.0.0.1:8080 --json\n\n\
        Exit status: 0 all checks passed, 1 a check failed."
    )]
    Probe(ProbeArgs),
    /// Generate a reply to one prompt, or chat on the terminal without a prompt.
    #[command(
        after_help = "Examples:\n  hearth run model.gguf \"Why is the sky blue?\"\n  \
        hearth run model.gguf < question.txt\n  \
        hearth run model.gguf            (interactive; /help lists its commands)\n\n\
        A server that runs the model already is used; --local loads it here.\n\
        Ctrl-C ends the reply. The reply goes to standard output, timings to standard error."
    )]
    Run(RunArgs),
    /// Download a model by name into the cache that other programs of the Hugging Face hub share.
    #[command(
        after_help = "Examples:\n  hearth pull unsloth/Qwen3.5-9B-GGUF             (Q4_K_M, else Q8_0)\n  \
        hearth pull unsloth/Qwen3.5-9B-GGUF:Q6_K\n  \
        hearth serve unsloth/Qwen3.5-9B-GGUF:Q6_K       (pulls it if needed)\n\n\
        A pull that was cut continues where it ended. The hash of each file is checked.\n\
        Variables: HF_HOME or HF_HUB_CACHE (the cache), HF_TOKEN (gated and private models),\n\
        HF_ENDPOINT (a mirror), HF_HUB_OFFLINE=1 (no network), HTTPS_PROXY, SSL_CERT_FILE."
    )]
    Pull(PullArgs),
    /// List the models in the cache.
    #[command(visible_alias = "ls", after_help = "Example:\n  hearth list --json")]
    List(ListArgs),
    /// Remove a model from the cache.
    #[command(after_help = "Example:\n  hearth rm unsloth/Qwen3.5-9B-GGUF:Q6_K")]
    Rm(RmArgs),
    /// List the models of a running server: which are loaded, and until when.
    #[command(after_help = "Example:\n  hearth ps --url http://127.0.0.1:8000")]
    Ps(PsArgs),
    /// Unload models of a running server when their requests have ended.
    #[command(
        after_help = "Examples:\n  hearth stop             (all models; the server runs on)\n  \
        hearth stop qwen3.5-9b-q4_k_m"
    )]
    Stop(StopArgs),
    /// Show the contents of a GGUF file and the memory to run it.
    #[command(
        alias = "show",
        after_help = "Example:\n  hearth inspect model.gguf --max-ctx 32768 --kv-type q8_0"
    )]
    Inspect(InspectArgs),
    /// Convert a GGUF file to other weight types.
    #[command(
        after_help = "Examples:\n  hearth quantize model-bf16.gguf model-q4_k_m.gguf q4_k_m\n  \
        hearth quantize model-bf16.gguf model-iq2_xs.gguf iq2_xs --imatrix model.imatrix.gguf"
    )]
    Quantize(QuantizeArgs),
    /// Run a text through a model and write the importance matrix that low-bit types need.
    #[command(
        after_help = "Example:\n  hearth imatrix model-bf16.gguf --text calibration.txt model.imatrix.gguf"
    )]
    Imatrix(ImatrixArgs),
    /// Write a GGUF file with a real model's shapes and random weights.
    #[command(
        after_help = "Examples:\n  hearth synth qwen3.5-0.8b:q4_k_m synthetic.gguf\n  \
        hearth synth tiny-hybrid:q8_0 tiny.gguf --seed 7"
    )]
    Synth(SynthArgs),
    /// Run token ids through a model and write the logits, to check a model.
    #[command(
        after_help = "Examples:\n  hearth eval model.gguf --ids ids.json --logits logits.npy\n  \
        hearth eval model.gguf --ids ids.json --greedy 64 --out-ids continuation.json"
    )]
    Eval(EvalArgs),
    /// Build a draft tree from draft logits and print it as JSON, to check a draft.
    #[command(
        after_help = "Example:\n  hearth eval model.gguf --draft draft.gguf --ids ids.json --at 40 --draft-logits block.npy\n  \
        hearth tree --logits block.npy --budget 22 --top-k 8"
    )]
    Tree(TreeArgs),
    /// Tokenize standard input and print the ids as a JSON array.
    #[command(after_help = "Example:\n  printf 'Hello world' | hearth tokenize model.gguf")]
    Tokenize(TokenizeArgs),
    /// Compile the CUDA kernels ahead of time, or show their resource use.
    #[command(
        after_help = "Examples:\n  hearth kernels build                 (for the GPUs of this machine)\n  \
        hearth kernels build --arch sm_86,sm_89,sm_90a,sm_120a\n  \
        hearth kernels list --arch sm_86\n  \
        hearth kernels explain qwen3.5-27b:q4_k_m --arch sm_86\n\n\
        Building needs libnvrtc but no GPU; `pip install nvidia-cuda-nvrtc` has it."
    )]
    Kernels(KernelsArgs),
    /// Time a model on this machine.
    #[command(after_help = BENCH_HELP)]
    Bench(Box<BenchArgs>),
    /// Print the completions of a shell.
    #[command(after_help = COMPLETIONS_HELP)]
    Completions(CompletionsArgs),
    /// Print the manual page, or write those of all commands.
    #[command(after_help = MAN_HELP)]
    Man(ManArgs),
}

/// The longest time of a setting: ten years. Larger sums of times overflow.
const MAX_SECONDS: u64 = 10 * 365 * 86_400;

/// `hearth serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// The GGUF file to serve, or a name to pull such as OWNER/REPO:Q4_K_M [default: the bundled
    /// toy model].
    #[arg(env = "HEARTH_MODEL", conflicts_with = "model_flag")]
    pub model: Option<PathBuf>,
    /// The GGUF file or name to serve, as a flag.
    #[arg(long = "model", short = 'm', alias = "hf-repo", value_name = "MODEL")]
    pub model_flag: Option<PathBuf>,
    /// The file in the repository that MODEL names, as in OWNER/REPO:FILE.
    #[arg(long, env = "HEARTH_HF_FILE", value_name = "FILE")]
    pub hf_file: Option<String>,
    /// Device and numerics.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Speculative decoding.
    #[command(flatten)]
    pub draft: DraftArgs,
    /// Prefix cache.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// Several models.
    #[command(flatten)]
    pub hosting: HostingArgs,
    /// Prompt compression.
    #[command(flatten)]
    pub compression: CompressionArgs,
    /// The model's id in the API [default: the file's stem].
    #[arg(long, short_alias = 'a', aliases = ["alias", "served-model-name"],
        env = "HEARTH_MODEL_NAME", value_name = "NAME")]
    pub model_name: Option<String>,
    /// A chat template that replaces the model's.
    #[arg(long, env = "HEARTH_CHAT_TEMPLATE_FILE", value_name = "FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// A directory of model cards, searched before the built-in ones.
    #[arg(long, env = "HEARTH_MODEL_CARDS_DIR", value_name = "DIR")]
    pub model_cards_dir: Option<PathBuf>,
    /// The most sequences in a batch.
    #[arg(long, aliases = ["parallel", "max-num-seqs"], env = "HEARTH_MAX_SEQUENCES", value_name = "N",
        default_value = "4", value_parser = at_least_one)]
    pub max_sequences: usize,
    /// Growth that admission expects of each sequence, in tokens: less admits and preempts more.
    #[arg(
        long,
        env = "HEARTH_KV_RESERVE",
        value_name = "TOKENS",
        default_value = "1024"
    )]
    pub kv_reserve: usize,
    /// Lengths of reasoning and replies.
    #[command(flatten)]
    pub reasoning: ReasoningArgs,
    /// How tokens are drawn.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Treatment of a system message after the first turn.
    #[arg(long, env = "HEARTH_LATE_SYSTEM", value_enum, default_value = "user")]
    pub late_system: LateSystemArg,
    /// The field of a chat completion that carries reasoning.
    #[arg(
        long,
        env = "HEARTH_REASONING_FIELD",
        value_enum,
        default_value = "reasoning_content"
    )]
    pub reasoning_field: ReasoningFieldArg,
    /// Address to listen on.
    #[arg(long, env = "HEARTH_HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on.
    #[arg(long, env = "HEARTH_PORT", default_value_t = 8000)]
    pub port: u16,
    /// An API key that clients must send; may be repeated [default: no key is required].
    #[arg(
        long,
        env = "HEARTH_API_KEY",
        hide_env_values = true,
        value_delimiter = ','
    )]
    pub api_key: Vec<String>,
    /// A file with an API key per line.
    #[arg(long, env = "HEARTH_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Allowed hosts, allowed origins and connections.
    #[command(flatten)]
    pub listen: ListenArgs,
    /// Attention window.
    #[command(flatten)]
    pub window: WindowArgs,
    /// Respond with 404 to a request that names another model.
    #[arg(long, env = "HEARTH_STRICT_MODEL", value_parser = FalseyValueParser::new())]
    pub strict_model: bool,
    /// Send a usage chunk in every stream, even if the request does not ask for it.
    #[arg(long, env = "HEARTH_ALWAYS_USAGE", value_parser = FalseyValueParser::new())]
    pub always_usage: bool,
    /// The most waiting requests; further ones get status 429.
    #[arg(long, env = "HEARTH_QUEUE_LIMIT", value_name = "N", default_value = "64",
        value_parser = at_least_one)]
    pub queue_limit: usize,
    /// The longest wait in the queue, in seconds; 0 for no limit.
    #[arg(
        long,
        env = "HEARTH_QUEUE_TIMEOUT",
        value_name = "SECONDS",
        default_value_t = 600,
        value_parser = value_parser!(u64).range(..=MAX_SECONDS)
    )]
    pub queue_timeout: u64,
    /// The longest time of a request, in seconds; 0 for no limit.
    #[arg(
        long,
        env = "HEARTH_REQUEST_TIMEOUT",
        value_name = "SECONDS",
        default_value_t = 0,
        value_parser = value_parser!(u64).range(..=MAX_SECONDS)
    )]
    pub request_timeout: u64,
    /// Seconds after which a client that reads nothing is disconnected.
    #[arg(long, env = "HEARTH_WRITE_TIMEOUT", value_name = "SECONDS", default_value_t = 120,
        value_parser = value_parser!(u64).range(1..=MAX_SECONDS))]
    pub write_timeout: u64,
    /// Seconds that running requests have after a stop signal.
    #[arg(
        long,
        env = "HEARTH_SHUTDOWN_TIMEOUT",
        value_name = "SECONDS",
        default_value_t = 30,
        value_parser = value_parser!(u64).range(..=MAX_SECONDS)
    )]
    pub shutdown_timeout: u64,
    /// Seconds without an event after which a stream gets a keep-alive.
    #[arg(long, env = "HEARTH_SSE_PING_INTERVAL", value_name = "SECONDS", default_value_t = 10,
        value_parser = value_parser!(u64).range(1..=MAX_SECONDS))]
    pub sse_ping_interval: u64,
    /// Serve Prometheus metrics at /metrics.
    #[arg(
        long,
        env = "HEARTH_METRICS",
        value_enum,
        value_name = "WHETHER",
        default_value = "on",
        num_args = 0..=1,
        default_missing_value = "on"
    )]
    pub metrics: OnOff,
    /// Serve pages at /status that show active requests, but no prompts or replies.
    #[arg(long, env = "HEARTH_STATUS_PAGE", value_parser = FalseyValueParser::new())]
    pub status_page: bool,
    /// The longest request body, in MiB.
    #[arg(long, env = "HEARTH_MAX_BODY", value_name = "MIB", default_value_t = 64,
        value_parser = value_parser!(u32).range(1..=4096))]
    pub max_body: u32,
    /// Log prompts and replies.
    #[arg(long, env = "HEARTH_LOG_PROMPTS", value_parser = FalseyValueParser::new())]
    pub log_prompts: bool,
    /// Send a span per request to this OpenTelemetry collector, such as http://localhost:4318
    /// (OTLP in JSON).
    #[arg(long, env = "HEARTH_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// A TOML file of settings; environment variables and flags override it.
    #[arg(long, env = "HEARTH_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Reply from a file instead of running the model, to test clients; `server::scripted`
    /// documents the format.
    #[arg(long, env = "HEARTH_SCRIPT", value_name = "FILE", conflicts_with_all = ["draft", "dry_run"])]
    pub script: Option<PathBuf>,
    /// Print the memory plan and exit.
    #[arg(long)]
    pub dry_run: bool,
}

/// A switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnOff {
    /// Yes.
    On,
    /// No.
    Off,
}

/// Treatment of a system message after the first turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LateSystemArg {
    /// Turn it into a user message in place.
    User,
    /// Move it to the start of the conversation.
    Hoist,
    /// Refuse the request.
    Error,
}

/// The field of a chat completion that carries reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum ReasoningFieldArg {
    /// As llama.cpp and DeepSeek name it.
    ReasoningContent,
    /// As vLLM and OpenRouter name it.
    Reasoning,
    /// Under both names.
    Both,
}

/// `hearth inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// The GGUF file, or a name such as OWNER/REPO:Q4_K_M; of a name that is not in the cache only
    /// the header is read.
    pub file: PathBuf,
    /// Device and numerics to plan for.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// A draft model to plan for.
    #[arg(long, value_name = "FILE")]
    pub draft: Option<PathBuf>,
    /// Sequences to plan for.
    #[arg(long, value_name = "N", default_value = "4", value_parser = at_least_one)]
    pub max_sequences: usize,
    /// Memory table.
    #[command(flatten)]
    pub plan: PlanArgs,
    /// List every tensor.
    #[arg(long)]
    pub tensors: bool,
    /// List every metadata key.
    #[arg(long)]
    pub metadata: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// `hearth synth`.
#[derive(Debug, Args)]
pub struct SynthArgs {
    /// A model's shape and a recipe, such as `qwen3.5-0.8b:q4_k_m`; shapes: qwen3.5-0.8b,
    /// qwen3.5-2b, qwen3.5-4b, qwen3.5-9b, qwen3.5-27b, qwen3.5-35b-a3b, qwen3-0.6b,
    /// qwen3-30b-a3b, llama-3.2-1b, llama-3.1-8b, smollm2-135m, qwen2.5-7b, gemma-3-270m,
    /// gemma-3-4b, small-moe, tiny-hybrid, tiny-dense, tiny-llama, tiny-qwen2, tiny-gemma3,
    /// tiny-hybrid-moe, tiny-dense-moe.
    pub what: String,
    /// The GGUF file to write.
    pub output: PathBuf,
    /// Seed of the random weights.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Replace the output file if it exists.
    #[arg(long)]
    pub force: bool,
}

/// `hearth tokenize`.
#[derive(Debug, Args)]
pub struct TokenizeArgs {
    /// The GGUF file.
    pub model: PathBuf,
    /// Encode special tokens in the text as ordinary text.
    #[arg(long)]
    pub no_special: bool,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("use at least 1".to_owned()),
        Ok(count) => Ok(count),
        Err(error) => Err(format!("use a whole number: {error}")),
    }
}
