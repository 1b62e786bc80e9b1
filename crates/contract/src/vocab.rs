//! A vocabulary as data: `model` reads it from a file, `chat` builds a tokenizer from it.

use crate::{TemplateMarkup, TokenId};

/// A vocabulary with its special tokens and chat templates.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Vocab {
    /// Token strings in id order. Ordinary tokens of a byte-level BPE are in the byte-mapped
    /// alphabet, those of SentencePiece have U+2581 for a space.
    pub tokens: Vec<String>,
    /// What each token is, in id order.
    pub kinds: Vec<TokenKind>,
    /// Scores of a SentencePiece vocabulary; `None` for a byte-level BPE.
    pub pieces: Option<SentencePieces>,
    /// Merge rules of a byte-level BPE, best first.
    pub merges: Vec<(String, String)>,
    /// Pre-tokenizer of a byte-level BPE, which splits text before merging.
    pub pre: PreTokenizer,
    /// Tokens that end a generation: the file's own and the family's. Never empty for a chat model.
    pub eos: Vec<TokenId>,
    /// The token the file names as its end of text.
    pub eos_token: Option<TokenId>,
    /// The beginning-of-text token, if the file has one.
    pub bos_token: Option<TokenId>,
    /// The padding token, if the file has one.
    pub pad_token: Option<TokenId>,
    /// Whether the file wants `bos_token` before every text.
    pub add_bos: bool,
    /// The chat template (Jinja), if the file has one.
    pub chat_template: Option<String>,
    /// Further templates by name, such as `tool_use`.
    pub named_templates: Vec<(String, String)>,
    /// Tags that the model writes around reasoning and tool calls.
    pub markup: TemplateMarkup,
    /// The tokens of a text with a gap, if the model has them.
    pub fim: Option<FimTokens>,
}

/// Tokens that mark the parts of a text with a gap, for a model that fills it (fill in the middle).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FimTokens {
    /// Before the text in front of the gap.
    pub prefix: TokenId,
    /// Before the text behind the gap.
    pub suffix: TokenId,
    /// After both; the filling follows.
    pub middle: TokenId,
    /// Before the name of a repository.
    pub repository: Option<TokenId>,
    /// Before the name of a file.
    pub file: Option<TokenId>,
}

/// What only a SentencePiece vocabulary has.
#[derive(Debug, Clone, PartialEq)]
pub struct SentencePieces {
    /// The score of each token, in id order; pairs of the best token are merged first.
    pub scores: Vec<f32>,
    /// Whether every text begins with a space.
    pub space_prefix: bool,
    /// The token that the file names for text without a token.
    pub unknown: Option<TokenId>,
}

/// What a token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum TokenKind {
    /// A piece of text in the byte-mapped alphabet.
    #[default]
    Normal,
    /// Replaces text that cannot be encoded.
    Unknown,
    /// A control token such as a turn marker: matched as literal text in templates, hidden from
    /// output.
    Control,
    /// A literal string that the model's authors added, such as a reasoning tag: matched and shown.
    UserDefined,
    /// A filler that pads the table.
    Unused,
    /// A single byte.
    Byte,
}

/// The regular expression that splits text before merging, by its GGUF name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PreTokenizer {
    /// Qwen2, Qwen2.5 and Qwen3.
    #[default]
    Qwen2,
    /// Qwen3.5 and Qwen3.6: combining marks join letter runs.
    Qwen35,
    /// Llama 3: up to three digits together; a piece that is a token is never merged from others.
    LlamaBpe,
    /// GPT-2: digits together, a space joins what follows.
    Gpt2,
    /// SmolLM2 and StarCoder: as GPT-2, with single digits.
    Smollm,
}
