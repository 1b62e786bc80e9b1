//! Constraints of replies: compiled grammars per model and reasoning control per request.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use chat::grammar::OutputGrammar;
use chat::{SpecialTokens, Tokenizer};
use contract::{TokenId, TokenKind, TokenMask};
use decode::{
    Constraint, Constraints, Grammar, GrammarCompiler, GrammarError, InitialPhase, ReasoningBudget,
    ReasoningConfig, ReasoningHandle, ReasoningMachine, ReasoningTags, VocabEntry,
};

use crate::error::ApiError;
use crate::settings::reasoning::{ReasoningDefaults, close_text};

/// Cache size of compiled grammars.
const MAX_COMPILED: usize = 64;

/// Constraint data of a model. Token tables are built on first use.
pub struct ModelConstraints {
    tokenizer: Arc<Tokenizer>,
    eos: Vec<TokenId>,
    /// Vocabulary size of a logits row.
    vocab: usize,
    tags: Option<ReasoningTags>,
    call_tags: Option<(TokenId, TokenId)>,
    closing: Arc<[TokenId]>,
    gap: Arc<[TokenId]>,
    soft_end_boost: f32,
    sentence_ends: OnceLock<Arc<TokenMask>>,
    grammars: OnceLock<Result<GrammarCompiler, GrammarError>>,
    /// Compiled grammars by source text, most recently used last.
    compiled: Mutex<VecDeque<(String, Grammar)>>,
}

/// A grammar of replies, ready to use.
#[derive(Debug)]
pub struct CompiledGrammar {
    /// The grammar.
    pub grammar: Grammar,
    /// What of the request it does not keep.
    pub notes: Vec<String>,
}

impl ModelConstraints {
    /// For a model with `vocab` logits per row and end tokens `eos`.
    pub fn new(
        tokenizer: &Arc<Tokenizer>,
        eos: &[TokenId],
        vocab: usize,
        reasoning: &ReasoningDefaults,
    ) -> ModelConstraints {
        let pair = |open: &str, close: &str| tokenizer.id_of(open).zip(tokenizer.id_of(close));
        let markup = Arc::clone(tokenizer.markup());
        let tags = tokenizer.reasoning_tags();
        let tags = tags.and_then(|tags| pair(&tags.open, &tags.close));
        let tags = tags.map(|(open, close)| ReasoningTags { open, close });
        let encode = |text: &str| {
            tokenizer
                .encode(text, SpecialTokens::Parse)
                .unwrap_or_default()
        };
        let mut closing = encode(&close_text(
            reasoning.close_hint.as_deref(),
            &markup.reasoning,
        ));
        if let Some(tags) = tags
            && !closing.contains(&tags.close)
        {
            closing.push(tags.close);
        }
        ModelConstraints {
            eos: eos.to_vec(),
            vocab: vocab.max(tokenizer.n_tokens()),
            tags,
            call_tags: pair(&markup.tool_calls.open, &markup.tool_calls.close),
            closing: closing.into(),
            gap: encode("\n\n").into(),
            soft_end_boost: reasoning.soft_end_boost,
            sentence_ends: OnceLock::new(),
            grammars: OnceLock::new(),
            compiled: Mutex::new(VecDeque::new()),
            tokenizer: Arc::clone(tokenizer),
        }
    }

    /// Compiles an output grammar, in up to a second; errors name the request's field.
    pub fn compile(&self, shape: &OutputGrammar) -> Result<CompiledGrammar, ApiError> {
        let refused = |error: &GrammarError| {
            ApiError::invalid_param(&shape.field, format!("{}: {error}", shape.field))
        };
        let mut notes = shape.notes.clone();
        let grammar = match (self.grammar(&shape.lark), &shape.fallback) {
            (Ok(grammar), _) => grammar,
            (Err(error), None) => return Err(refused(&error)),
            (Err(error), Some(wider)) => {
                let note = format!("{}: kept without bounds and types: {error}", shape.field);
                tracing::info!("{note}");
                notes.push(note);
                self.grammar(wider).map_err(|error| refused(&error))?
            }
        };
        Ok(CompiledGrammar { grammar, notes })
    }

    fn grammar(&self, lark: &str) -> Result<Grammar, GrammarError> {
        let compiled = || self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        let mut kept = compiled();
        if let Some(at) = kept.iter().position(|(text, _)| text == lark)
            && let Some(found) = kept.remove(at)
        {
            let grammar = found.1.clone();
            kept.push_back(found);
            return Ok(grammar);
        }
        // The lock is released during compilation.
        drop(kept);
        let grammars = self.grammars.get_or_init(|| self.tables());
        let grammar = grammars.as_ref().map_err(Clone::clone)?.compile(lark)?;
        grammar.check()?;
        let mut kept = compiled();
        kept.push_back((lark.to_owned(), grammar.clone()));
        if kept.len() > MAX_COMPILED {
            kept.pop_front();
        }
        Ok(grammar)
    }

    fn tables(&self) -> Result<GrammarCompiler, GrammarError> {
        let word = |id: usize| {
            let id = TokenId(u32::try_from(id).unwrap_or(u32::MAX));
            match self.tokenizer.kind(id) {
                TokenKind::Normal | TokenKind::Byte if !self.eos.contains(&id) => {
                    VocabEntry::Text(self.tokenizer.bytes(id).to_vec())
                }
                _ => VocabEntry::Special,
            }
        };
        let words: Vec<VocabEntry> = (0..self.tokenizer.n_tokens()).map(word).collect();
        let tokenizer = Arc::clone(&self.tokenizer);
        let encode = move |text: &str| {
            // Text that does not encode is spelled byte by byte instead.
            tokenizer
                .encode(text, SpecialTokens::AsText)
                .unwrap_or_default()
        };
        GrammarCompiler::new(&words, self.vocab, &self.eos, Arc::new(encode))
    }

    /// Constraint of a text completion: the grammar from the first token.
    pub fn for_text(&self, grammar: Grammar) -> Constraints {
        let plan = Arc::new(ReasoningConfig {
            initial_phase: InitialPhase::Answer,
            tags: None,
            budget: None,
            end_sequence: Arc::default(),
            separator: Arc::default(),
            allowed_in_reasoning: None,
            tool_call_tags: None,
            grammar: Some(grammar),
        });
        Constraints::new(move |_| {
            Box::new(ReasoningMachine::new(Arc::clone(&plan), Arc::default()))
        })
    }

    /// Constraints and control handles of a request's `n` replies; `None` if nothing is
    /// constrained.
    pub fn for_chat(
        &self,
        (initial_phase, reasoning_budget): (InitialPhase, Option<usize>),
        grammar: Option<Grammar>,
        n: usize,
    ) -> Option<(Constraints, Vec<Arc<ReasoningHandle>>)> {
        let thinks = self.tags.is_some() && initial_phase != InitialPhase::Answer;
        if !thinks && grammar.is_none() {
            return None;
        }
        let budget = reasoning_budget.map(|tokens| ReasoningBudget {
            tokens,
            soft_window: ReasoningDefaults::soft_tokens(tokens),
            boost: self.soft_end_boost,
            sentence_ends: Arc::clone(
                self.sentence_ends
                    .get_or_init(|| Arc::new(self.sentence_end_mask())),
            ),
        });
        let plan = Arc::new(ReasoningConfig {
            initial_phase,
            tags: self.tags,
            budget,
            end_sequence: Arc::clone(&self.closing),
            separator: Arc::clone(&self.gap),
            allowed_in_reasoning: grammar.is_some().then(|| Arc::new(self.reasoning_mask())),
            tool_call_tags: self.call_tags.filter(|_| grammar.is_none()),
            grammar,
        });
        let handles: Vec<Arc<ReasoningHandle>> = (0..n).map(|_| Arc::default()).collect();
        let shared = handles.clone();
        let machine = Constraints::new(move |choice| -> Box<dyn Constraint> {
            let handles = shared.get(choice).map(Arc::clone).unwrap_or_default();
            Box::new(ReasoningMachine::new(Arc::clone(&plan), handles))
        });
        Some((machine, handles))
    }

    /// Tokens allowed within reasoning that precedes a grammar: all but end tokens and tool-call
    /// openers.
    fn reasoning_mask(&self) -> TokenMask {
        let mut mask = TokenMask::all(self.vocab);
        self.eos.iter().for_each(|id| mask.remove(*id));
        if let Some((open, _)) = self.call_tags {
            mask.remove(open);
        }
        mask
    }

    /// Tokens that end a sentence or line.
    fn sentence_end_mask(&self) -> TokenMask {
        let mut mask = TokenMask::none(self.vocab);
        for id in (0..self.tokenizer.n_tokens()).filter_map(|id| u32::try_from(id).ok()) {
            let bytes = self.tokenizer.bytes(TokenId(id));
            let ends = match std::str::from_utf8(bytes) {
                Ok(text) if text.ends_with('\n') => true,
                Ok(text) => text.trim_end().ends_with(['.', '!', '?', '。', '！', '？']),
                Err(_) => false,
            };
            if ends {
                mask.insert(TokenId(id));
            }
        }
        mask
    }
}

#[cfg(test)]
mod json_schemas;
#[cfg(test)]
mod strict_tools;
#[cfg(test)]
mod tests;
