//! Flags of `hearth run`.

use std::path::PathBuf;

use clap::{Args, Command};

use super::{DeviceArgs, DraftArgs, OnOff, at_least_one, sampling};

/// `hearth run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The GGUF file, or a name to pull such as OWNER/REPO:Q4_K_M, and the prompt; a single
    /// argument that is neither is the prompt.
    #[arg(value_name = "MODEL] [PROMPT", num_args = 0..=2)]
    pub words: Vec<String>,
    /// The GGUF file or name, as a flag.
    #[arg(long, short = 'm', alias = "hf-repo", value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// The file in the repository that MODEL names, as in OWNER/REPO:FILE.
    #[arg(long, value_name = "FILE", requires = "model")]
    pub hf_file: Option<String>,
    /// The prompt, as a flag.
    #[arg(long, short = 'p')]
    pub prompt: Option<String>,
    /// Device and numerics.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Speculative decoding.
    #[command(flatten)]
    pub draft: DraftArgs,
    /// A system message.
    #[arg(long)]
    pub system: Option<String>,
    /// A chat template that replaces the model's.
    #[arg(long, value_name = "FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// A directory of model cards, searched before the built-in ones.
    #[arg(long, env = "HEARTH_MODEL_CARDS_DIR", value_name = "DIR")]
    pub model_cards_dir: Option<PathBuf>,
    /// The most tokens of a reply, reasoning included [default: the model card's].
    #[arg(long, short = 'n', aliases = ["predict", "n-predict"], value_name = "TOKENS",
        value_parser = at_least_one)]
    pub max_tokens: Option<usize>,
    /// Sampling temperature, 0 for greedy [default: the model card's].
    #[arg(long, alias = "temp", value_parser = temperature)]
    pub temperature: Option<f32>,
    /// Probability mass of the tokens to draw from; 1 is all [default: the model card's].
    #[arg(long, value_name = "NUMBER", value_parser = sampling::probability)]
    pub top_p: Option<f32>,
    /// Number of tokens to draw from; 0 is all [default: the model card's].
    #[arg(long, value_name = "N")]
    pub top_k: Option<usize>,
    /// Least probability of a token relative to the likeliest [default: the model card's].
    #[arg(long, value_name = "NUMBER", value_parser = sampling::probability)]
    pub min_p: Option<f32>,
    /// Sampling seed; the same seed repeats a reply [default: random].
    #[arg(long)]
    pub seed: Option<u64>,
    /// The server whose model replies, if it runs the model that is named or none is named
    /// [default: http://127.0.0.1:8000 if a server of Hearth runs there].
    #[arg(long, env = "HEARTH_URL")]
    pub url: Option<String>,
    /// The API key, if the server requires one.
    #[arg(long, env = "HEARTH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Load the model in this process even if a server runs it. Flags of the device and of drafts
    /// mean the same.
    #[arg(long)]
    pub local: bool,
    /// Keep no typed messages for later conversations [default: they are kept in the user's state
    /// directory].
    #[arg(long)]
    pub no_history: bool,
    /// Whether a flag or a variable of the device or of drafts is set.
    #[arg(skip)]
    pub is_local: bool,
    /// Whether to reason [default: the chat template decides].
    #[arg(long, value_enum, value_name = "WHETHER")]
    pub thinking: Option<OnOff>,
}

impl RunArgs {
    /// Whether an argument that only a model in this process obeys is set.
    pub(crate) fn is_for_own_model(is_set: impl Fn(&str) -> bool) -> bool {
        let own = DeviceArgs::augment_args(DraftArgs::augment_args(Command::new("")));
        let ids = own.get_arguments().map(|arg| arg.get_id().as_str());
        let files = ["chat_template_file", "model_cards_dir"];
        ids.chain(files).any(is_set)
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if (0.0..=2.0).contains(&value) => Ok(value),
        _ => Err("use a number from 0 to 2".to_owned()),
    }
}
