//! The text side of the loaded model, shared by all requests.

use std::sync::Arc;

use chat::Tokenizer;
use chat::template::ChatTemplate;
use contract::TokenId;

use crate::settings::GenerationDefaults;
use crate::text::constraints::ModelConstraints;

/// What requests need to know of a model: how text becomes tokens and back, and what is usual.
pub struct ModelContext {
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Messages to a prompt.
    pub template: ChatTemplate,
    /// Tokens that end a reply.
    pub eos: Vec<TokenId>,
    /// What a request gets that does not say: the card's values where it has them.
    pub defaults: GenerationDefaults,
    /// What its replies can be held to.
    pub constraints: ModelConstraints,
    /// What is shown of it.
    pub facts: ModelDescription,
}

/// What `/v1/models` and `/props` tell.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelDescription {
    /// The longest context the model was trained for, in tokens.
    pub trained_context: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Number of weights.
    pub parameters: u64,
    /// Bytes of the weights as stored.
    pub size_bytes: u64,
    /// The family's name in the file.
    pub architecture: String,
    /// Where it was loaded from; shown only to those with the key.
    pub path: Option<String>,
    /// The draft's file, if one was named; shown as `path` is.
    pub draft_path: Option<String>,
    /// Whether the draft is loaded at its first use.
    pub lazy_draft: bool,
    /// Why keys and values are stored as they are, and the context is as long as it is, if somebody chose.
    pub kv_choice: Option<String>,
    /// Its card.
    pub card: Option<CardDescription>,
}

/// What is shown of a model's card.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CardDescription {
    /// Where it was found, or what stands in for it.
    pub source: String,
    /// The card as it was read, if there is one.
    pub verbatim: Option<serde_json::Value>,
}
