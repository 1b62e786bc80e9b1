//! The machine of a reply: thinking, which may have to end, then a text, which may have to obey a grammar.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use contract::{TokenId, TokenMask};

use super::grammar::{Grammar, GrammarState};
use super::interface::{Constraint, LogitBoost};

/// Where a reply begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitialPhase {
    /// In a thinking block that the prompt opened.
    Reasoning,
    /// In the text, unless its first token opens a thinking block.
    Either,
    /// In the text.
    Answer,
}

/// What is the same for all choices of a request.
#[derive(Debug, Clone)]
pub struct ReasoningConfig {
    /// Where a reply begins.
    pub opening: InitialPhase,
    /// The tokens around thinking; without them nothing is known of thinking, and all is text.
    pub tags: Option<ReasoningTags>,
    /// How long thinking may be; `None` for as long as it likes.
    pub budget: Option<ReasoningBudget>,
    /// What closes thinking when it has to be closed, the closing tag included; at least one token where there
    /// are tags.
    pub closing: Arc<[TokenId]>,
    /// What comes between thinking that ended by itself and a text that obeys a grammar.
    pub gap: Arc<[TokenId]>,
    /// What may come in thinking; `None` allows all.
    pub in_thinking: Option<Arc<TokenMask>>,
    /// The tokens around a call: one in the middle of thinking ends the thinking, and is left alone.
    pub call_tags: Option<(TokenId, TokenId)>,
    /// The language of the text.
    pub grammar: Option<Grammar>,
}

/// The tokens around thinking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReasoningTags {
    /// Opens it.
    pub open: TokenId,
    /// Closes it.
    pub close: TokenId,
}

/// How long thinking may be.
#[derive(Debug, Clone)]
pub struct ReasoningBudget {
    /// After so many tokens it is closed.
    pub tokens: usize,
    /// Over so many tokens before that, the closing tag is leaned towards where a sentence ends.
    pub soft: usize,
    /// How much the closing tag's logit is lifted at most, at the end of the budget.
    pub boost: f32,
    /// Tokens after which a sentence or a line is over.
    pub sentence_ends: Arc<TokenMask>,
}

/// How thinking ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReasoningEnd {
    /// By itself, or not at all.
    #[default]
    Natural,
    /// By itself, where it was leaned towards its end.
    Soft,
    /// It was closed.
    Hard,
}

/// The strings between a choice's machine and those who watch it. Shared; one for each choice.
#[derive(Debug, Default)]
pub struct ReasoningHandle {
    end_requested: AtomicBool,
    end: AtomicU8,
}

impl ReasoningHandle {
    /// Closes thinking as soon as possible, if the choice is thinking then.
    pub fn end_reasoning(&self) {
        self.end_requested.store(true, Ordering::Relaxed);
    }

    /// How thinking ended.
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

/// How far a reply has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Nothing has been said, and thinking may be opened.
    Undecided,
    /// `n` tokens of thinking.
    Reasoning {
        n: usize,
        /// A sentence ended with the last of them.
        at_end: bool,
    },
    /// A call in the middle of thinking.
    ToolCall,
    /// `n` tokens of what closes thinking.
    Closing { n: usize },
    /// `n` tokens of the gap.
    Separator { n: usize },
    /// `n` tokens of text.
    Answer { n: usize },
}

/// A choice's machine.
pub struct ReasoningMachine {
    plan: Arc<ReasoningConfig>,
    phase: Phase,
    handle: Arc<ReasoningHandle>,
    grammar_state: Option<GrammarState>,
}

impl ReasoningMachine {
    /// A choice that has said nothing.
    pub fn new(plan: Arc<ReasoningConfig>, handle: Arc<ReasoningHandle>) -> ReasoningMachine {
        let phase = match (plan.opening, plan.tags) {
            (InitialPhase::Reasoning, Some(_)) => Phase::Reasoning {
                n: 0,
                at_end: false,
            },
            (InitialPhase::Either, Some(_)) => Phase::Undecided,
            _ => Phase::Answer { n: 0 },
        };
        ReasoningMachine {
            grammar_state: plan.grammar.as_ref().map(Grammar::begin),
            phase,
            plan,
            handle,
        }
    }

    /// The phase after `path`, and how many tokens at the end of `path` are text.
    fn after(&self, path: &[TokenId]) -> (Phase, usize) {
        let mut phase = self.phase;
        let mut text = 0;
        for token in path {
            phase = self.plan.step(phase, *token);
            text = match phase {
                Phase::Answer { n } => n.min(text + 1),
                _ => 0,
            };
        }
        (phase, text)
    }
}

impl ReasoningConfig {
    /// The phase one token later.
    fn step(&self, phase: Phase, token: TokenId) -> Phase {
        let is = |tag: fn(ReasoningTags) -> TokenId| self.tags.map(tag) == Some(token);
        match phase {
            Phase::Undecided if is(|tags| tags.open) => Phase::Reasoning {
                n: 0,
                at_end: false,
            },
            Phase::Undecided => Phase::Answer { n: 1 },
            Phase::Reasoning { n, .. } if self.budget_used(n) => self.end_sequence_after(1),
            Phase::Reasoning { .. } if is(|tags| tags.close) => self.separator_after(0),
            Phase::Reasoning { .. } if self.call_tags.is_some_and(|(open, _)| open == token) => {
                Phase::ToolCall
            }
            Phase::Reasoning { n, .. } => Phase::Reasoning {
                n: n + 1,
                at_end: self
                    .budget
                    .as_ref()
                    .is_some_and(|budget| budget.sentence_ends.contains(token)),
            },
            Phase::ToolCall if self.call_tags.is_some_and(|(_, close)| close == token) => {
                Phase::Answer { n: 0 }
            }
            Phase::ToolCall if is(|tags| tags.close) => self.separator_after(0),
            Phase::ToolCall => Phase::ToolCall,
            Phase::Closing { n } => self.end_sequence_after(n + 1),
            Phase::Separator { n } => self.separator_after(n + 1),
            Phase::Answer { n } => Phase::Answer { n: n + 1 },
        }
    }

    fn budget_used(&self, thinking_tokens: usize) -> bool {
        self.budget
            .as_ref()
            .is_some_and(|budget| thinking_tokens >= budget.tokens)
    }

    fn end_sequence_after(&self, n: usize) -> Phase {
        if n < self.closing.len() {
            Phase::Closing { n }
        } else {
            Phase::Answer { n: 0 }
        }
    }

    fn separator_after(&self, n: usize) -> Phase {
        if self.grammar.is_some() && n < self.gap.len() {
            Phase::Separator { n }
        } else {
            Phase::Answer { n: 0 }
        }
    }

    /// Whether `n` tokens of thinking lie where its end is leaned towards, and how far in, above 0 up to 1.
    fn boost_fraction(&self, n: usize) -> Option<f32> {
        let budget = self.budget.as_ref().filter(|budget| budget.soft > 0)?;
        let into = (n + budget.soft).checked_sub(budget.tokens)?;
        Some((into + 1).min(budget.soft) as f32 / budget.soft as f32)
    }
}

impl Constraint for ReasoningMachine {
    fn forced(&mut self, path: &[TokenId]) -> Option<TokenId> {
        let (phase, text) = self.after(path);
        match phase {
            Phase::Reasoning { n, .. } if self.plan.budget_used(n) => {
                self.plan.closing.first().copied()
            }
            Phase::Closing { n } => self.plan.closing.get(n).copied(),
            Phase::Separator { n } => self.plan.gap.get(n).copied(),
            Phase::Answer { .. } => {
                let tail = &path[path.len() - text..];
                self.grammar_state.as_mut()?.forced(tail)
            }
            Phase::Undecided | Phase::Reasoning { .. } | Phase::ToolCall => None,
        }
    }

    fn allowed(&mut self, path: &[TokenId]) -> Option<Arc<TokenMask>> {
        let (phase, text) = self.after(path);
        match phase {
            Phase::Reasoning { .. } => self.plan.in_thinking.clone(),
            Phase::ToolCall | Phase::Closing { .. } | Phase::Separator { .. } => None,
            Phase::Undecided => {
                let mask = self.grammar_state.as_mut()?.allowed(&[]);
                let Some(tags) = self.plan.tags else {
                    return Some(mask);
                };
                let mut mask = Arc::unwrap_or_clone(mask);
                mask.insert(tags.open);
                Some(Arc::new(mask))
            }
            Phase::Answer { .. } => {
                let tail = &path[path.len() - text..];
                Some(self.grammar_state.as_mut()?.allowed(tail))
            }
        }
    }

    fn logit_boost(&mut self, path: &[TokenId]) -> Option<LogitBoost> {
        let (Phase::Reasoning { n, at_end: true }, _) = self.after(path) else {
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
                (Phase::Reasoning { n, .. }, Phase::Separator { .. } | Phase::Answer { .. })
                    if !self.plan.budget_used(n) =>
                {
                    let soft = self.plan.boost_fraction(n).is_some();
                    self.handle.note(if soft {
                        ReasoningEnd::Soft
                    } else {
                        ReasoningEnd::Natural
                    });
                }
                (Phase::Reasoning { n, .. }, _) if self.plan.budget_used(n) => {
                    self.handle.note(ReasoningEnd::Hard);
                }
                (Phase::Undecided, Phase::Answer { .. }) | (Phase::Answer { .. }, _) => {
                    if let Some(grammar_state) = &mut self.grammar_state {
                        grammar_state.advance(&[*token]);
                    }
                }
                _ => {}
            }
        }
        let thinks = matches!(self.phase, Phase::Reasoning { .. });
        if thinks && self.handle.end_requested.load(Ordering::Relaxed) {
            self.handle.note(ReasoningEnd::Hard);
            self.phase = Phase::Closing { n: 0 };
        }
    }

    fn fault(&self) -> Option<&str> {
        self.grammar_state.as_ref()?.fault()
    }
}

#[cfg(test)]
mod tests;
