//! The reasoning state machine of a reply: reasoning, which may have to end, then an answer, which
//! may have to match a grammar.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use contract::{TokenId, TokenMask};

use super::grammar::{Grammar, GrammarState};
use super::interface::{Constraint, LogitBoost};

/// The phase in which a reply starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitialPhase {
    /// Within a reasoning block that the prompt opened.
    Reasoning,
    /// In the answer, unless the first token opens a reasoning block.
    Undecided,
    /// In the answer.
    Answer,
}

/// What all choices of a request share.
#[derive(Debug, Clone)]
pub struct ReasoningConfig {
    /// The phase in which a reply starts.
    pub initial_phase: InitialPhase,
    /// The tokens around reasoning; without them all text is answer.
    pub tags: Option<ReasoningTags>,
    /// The length limit of reasoning; `None` for no limit.
    pub budget: Option<ReasoningBudget>,
    /// Tokens that end reasoning by force, the closing tag included; at least one if there are
    /// tags.
    pub end_sequence: Arc<[TokenId]>,
    /// Tokens between reasoning that ended by itself and an answer that matches a grammar.
    pub separator: Arc<[TokenId]>,
    /// Tokens allowed in reasoning; `None` allows all.
    pub allowed_in_reasoning: Option<Arc<TokenMask>>,
    /// The tokens around a tool call. A call within reasoning ends the reasoning and is not
    /// constrained.
    pub tool_call_tags: Option<(TokenId, TokenId)>,
    /// The language of the answer.
    pub grammar: Option<Grammar>,
}

/// The tokens around reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReasoningTags {
    /// The opening tag.
    pub open: TokenId,
    /// The closing tag.
    pub close: TokenId,
}

/// The length limit of reasoning.
#[derive(Debug, Clone)]
pub struct ReasoningBudget {
    /// Reasoning is ended after this many tokens.
    pub tokens: usize,
    /// Over this many tokens before the limit, the closing tag's logit is raised at sentence ends.
    pub soft_window: usize,
    /// The largest boost of the closing tag's logit, at the limit.
    pub boost: f32,
    /// Tokens that end a sentence or a line.
    pub sentence_ends: Arc<TokenMask>,
}

/// How reasoning ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReasoningEnd {
    /// By itself, or there was none.
    #[default]
    Natural,
    /// By itself, while the closing tag was boosted.
    Soft,
    /// By force.
    Hard,
}

/// The control handle of a choice's reasoning, shared with other threads.
#[derive(Debug, Default)]
pub struct ReasoningHandle {
    end_requested: AtomicBool,
    end: AtomicU8,
}

impl ReasoningHandle {
    /// Ends reasoning as soon as possible, if the choice is reasoning then.
    pub fn end_reasoning(&self) {
        self.end_requested.store(true, Ordering::Relaxed);
    }

    /// How reasoning ended.
    pub fn end(&self) -> ReasoningEnd {
        match self.end.load(Ordering::Relaxed) {
            1 => ReasoningEnd::Soft,
            2 => ReasoningEnd::Hard,
            _ => ReasoningEnd::Natural,
        }
    }

    fn note(&self, end: ReasoningEnd) {
        let code = match end {
            ReasoningEnd::Natural => 0,
            ReasoningEnd::Soft => 1,
            ReasoningEnd::Hard => 2,
        };
        self.end.store(code, Ordering::Relaxed);
    }
}

/// The phase of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReasoningPhase {
    /// Nothing is generated, and reasoning may open.
    Undecided,
    /// `n` tokens of reasoning.
    Reasoning {
        n: usize,
        /// Whether the last of them ended a sentence.
        at_end: bool,
    },
    /// A tool call within reasoning.
    ToolCall,
    /// `n` tokens of the forced end.
    Closing { n: usize },
    /// `n` tokens of the separator.
    Separator { n: usize },
    /// `n` tokens of the answer.
    Answer { n: usize },
}

/// The reasoning state machine of one choice.
pub struct ReasoningMachine {
    plan: Arc<ReasoningConfig>,
    phase: ReasoningPhase,
    handle: Arc<ReasoningHandle>,
    grammar_state: Option<GrammarState>,
}

impl ReasoningMachine {
    /// The machine of a choice that has generated nothing.
    pub fn new(plan: Arc<ReasoningConfig>, handle: Arc<ReasoningHandle>) -> ReasoningMachine {
        let phase = match (plan.initial_phase, plan.tags) {
            (InitialPhase::Reasoning, Some(_)) => ReasoningPhase::Reasoning {
                n: 0,
                at_end: false,
            },
            (InitialPhase::Undecided, Some(_)) => ReasoningPhase::Undecided,
            _ => ReasoningPhase::Answer { n: 0 },
        };
        ReasoningMachine {
            grammar_state: plan.grammar.as_ref().map(Grammar::begin),
            phase,
            plan,
            handle,
        }
    }

    /// The phase after `path`, and the number of answer tokens at the end of `path`.
    fn after(&self, path: &[TokenId]) -> (ReasoningPhase, usize) {
        let mut phase = self.phase;
        let mut text = 0;
        for token in path {
            phase = self.plan.step(phase, *token);
            text = match phase {
                ReasoningPhase::Answer { n } => n.min(text + 1),
                _ => 0,
            };
        }
        (phase, text)
    }
}

impl ReasoningConfig {
    /// The phase one token later.
    fn step(&self, phase: ReasoningPhase, token: TokenId) -> ReasoningPhase {
        let is = |tag: fn(ReasoningTags) -> TokenId| self.tags.map(tag) == Some(token);
        match phase {
            ReasoningPhase::Undecided if is(|tags| tags.open) => ReasoningPhase::Reasoning {
                n: 0,
                at_end: false,
            },
            ReasoningPhase::Undecided => ReasoningPhase::Answer { n: 1 },
            ReasoningPhase::Reasoning { n, .. } if self.budget_used(n) => {
                self.end_sequence_after(1)
            }
            ReasoningPhase::Reasoning { .. } if is(|tags| tags.close) => self.separator_after(0),
            ReasoningPhase::Reasoning { .. }
                if self.tool_call_tags.is_some_and(|(open, _)| open == token) =>
            {
                ReasoningPhase::ToolCall
            }
            ReasoningPhase::Reasoning { n, .. } => ReasoningPhase::Reasoning {
                n: n + 1,
                at_end: self
                    .budget
                    .as_ref()
                    .is_some_and(|budget| budget.sentence_ends.contains(token)),
            },
            ReasoningPhase::ToolCall
                if self.tool_call_tags.is_some_and(|(_, close)| close == token) =>
            {
                ReasoningPhase::Answer { n: 0 }
            }
            ReasoningPhase::ToolCall if is(|tags| tags.close) => self.separator_after(0),
            ReasoningPhase::ToolCall => ReasoningPhase::ToolCall,
            ReasoningPhase::Closing { n } => self.end_sequence_after(n + 1),
            ReasoningPhase::Separator { n } => self.separator_after(n + 1),
            ReasoningPhase::Answer { n } => ReasoningPhase::Answer { n: n + 1 },
        }
    }

    fn budget_used(&self, thinking_tokens: usize) -> bool {
        self.budget
            .as_ref()
            .is_some_and(|budget| thinking_tokens >= budget.tokens)
    }

    fn end_sequence_after(&self, n: usize) -> ReasoningPhase {
        if n < self.end_sequence.len() {
            ReasoningPhase::Closing { n }
        } else {
            ReasoningPhase::Answer { n: 0 }
        }
    }

    fn separator_after(&self, n: usize) -> ReasoningPhase {
        if self.grammar.is_some() && n < self.separator.len() {
            ReasoningPhase::Separator { n }
        } else {
            ReasoningPhase::Answer { n: 0 }
        }
    }

    /// How far `n` reasoning tokens lie within the boosted window, above 0 up to 1; `None` outside
    /// of it.
    fn boost_fraction(&self, n: usize) -> Option<f32> {
        let budget = self
            .budget
            .as_ref()
            .filter(|budget| budget.soft_window > 0)?;
        let into = (n + budget.soft_window).checked_sub(budget.tokens)?;
        Some((into + 1).min(budget.soft_window) as f32 / budget.soft_window as f32)
    }
}

impl Constraint for ReasoningMachine {
    fn forced(&mut self, path: &[TokenId]) -> Option<TokenId> {
        let (phase, text) = self.after(path);
        match phase {
            ReasoningPhase::Reasoning { n, .. } if self.plan.budget_used(n) => {
                self.plan.end_sequence.first().copied()
            }
            ReasoningPhase::Closing { n } => self.plan.end_sequence.get(n).copied(),
            ReasoningPhase::Separator { n } => self.plan.separator.get(n).copied(),
            ReasoningPhase::Answer { .. } => {
                let tail = &path[path.len() - text..];
                self.grammar_state.as_mut()?.forced(tail)
            }
            ReasoningPhase::Undecided
            | ReasoningPhase::Reasoning { .. }
            | ReasoningPhase::ToolCall => None,
        }
    }

    fn allowed(&mut self, path: &[TokenId]) -> Option<Arc<TokenMask>> {
        let (phase, text) = self.after(path);
        match phase {
            ReasoningPhase::Reasoning { .. } => self.plan.allowed_in_reasoning.clone(),
            ReasoningPhase::ToolCall
            | ReasoningPhase::Closing { .. }
            | ReasoningPhase::Separator { .. } => None,
            ReasoningPhase::Undecided => {
                let mask = self.grammar_state.as_mut()?.allowed(&[]);
                let Some(tags) = self.plan.tags else {
                    return Some(mask);
                };
                let mut mask = Arc::unwrap_or_clone(mask);
                mask.insert(tags.open);
                Some(Arc::new(mask))
            }
            ReasoningPhase::Answer { .. } => {
                let tail = &path[path.len() - text..];
                Some(self.grammar_state.as_mut()?.allowed(tail))
            }
        }
    }

    fn logit_boost(&mut self, path: &[TokenId]) -> Option<LogitBoost> {
        let (ReasoningPhase::Reasoning { n, at_end: true }, _) = self.after(path) else {
            return None;
        };
        let boost_fraction = self.plan.boost_fraction(n)?;
        Some(LogitBoost {
            token: self.plan.tags?.close,
            boost: boost_fraction * self.plan.budget.as_ref()?.boost,
        })
    }

    fn advance(&mut self, tokens: &[TokenId]) {
        for token in tokens {
            let before = self.phase;
            self.phase = self.plan.step(before, *token);
            match (before, self.phase) {
                (
                    ReasoningPhase::Reasoning { n, .. },
                    ReasoningPhase::Separator { .. } | ReasoningPhase::Answer { .. },
                ) if !self.plan.budget_used(n) => {
                    let soft = self.plan.boost_fraction(n).is_some();
                    self.handle.note(if soft {
                        ReasoningEnd::Soft
                    } else {
                        ReasoningEnd::Natural
                    });
                }
                (ReasoningPhase::Reasoning { n, .. }, _) if self.plan.budget_used(n) => {
                    self.handle.note(ReasoningEnd::Hard);
                }
                (ReasoningPhase::Undecided, ReasoningPhase::Answer { .. })
                | (ReasoningPhase::Answer { .. }, _) => {
                    if let Some(grammar_state) = &mut self.grammar_state {
                        grammar_state.advance(&[*token]);
                    }
                }
                _ => {}
            }
        }
        let thinks = matches!(self.phase, ReasoningPhase::Reasoning { .. });
        if thinks && self.handle.end_requested.load(Ordering::Relaxed) {
            self.handle.note(ReasoningEnd::Hard);
            self.phase = ReasoningPhase::Closing { n: 0 };
        }
    }

    fn error(&self) -> Option<&str> {
        self.grammar_state.as_ref()?.error()
    }
}

#[cfg(test)]
mod tests;
