//! Text side of the loaded model, shared by all requests.

use std::sync::Arc;

use chat::Tokenizer;
use chat::template::ChatTemplate;
use contract::TokenId;

use crate::compression::PromptCompressor;
use crate::settings::GenerationDefaults;
use crate::text::constraints::ModelConstraints;

/// Tokenizer, template, defaults and constraints of a model.
pub struct ModelContext {
    /// Tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Chat template.
    pub template: ChatTemplate,
    /// End-of-sequence tokens.
    pub eos: Vec<TokenId>,
    /// Defaults of a request; the model card's values where it has them.
    pub defaults: GenerationDefaults,
    /// Constraint compiler.
    pub constraints: ModelConstraints,
    /// Prompt compression, if there is a scorer.
    pub compressor: Option<Arc<PromptCompressor>>,
    /// Public description.
    pub description: ModelDescription,
}

/// Description shown by `/v1/models` and `/props`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelDescription {
    /// Trained context length in tokens.
    pub trained_context: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Number of weights.
    pub parameters: u64,
    /// Bytes of the weights as stored.
    pub size_bytes: u64,
    /// Architecture name in the file.
    pub architecture: String,
    /// Name of the quantisation, such as `Q4_K_M`.
    pub quantization: String,
    /// File path; shown only with an API key.
    pub path: Option<String>,
    /// Draft file path, if any; shown only with an API key.
    pub draft_path: Option<String>,
    /// Whether the draft model is loaded on first use.
    pub lazy_draft: bool,
    /// What drafts.
    pub draft_sources: decode::SourceSet,
    /// Why the KV cache type and context length were chosen, if not requested.
    pub kv_choice: Option<String>,
    /// Model card.
    pub card: Option<CardDescription>,
}

/// Public description of a model card.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CardDescription {
    /// Source of the card.
    pub source: String,
    /// The card's JSON, if there is a card.
    pub verbatim: Option<serde_json::Value>,
}
