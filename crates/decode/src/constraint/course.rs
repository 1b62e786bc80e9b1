//! The course of a reply: thinking, which may have to end, then a text, which may have to obey a grammar.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use contract::{TokenId, TokenMask};

use super::grammar::{Follower, Grammar};
use super::{Constraint, Lean};

/// Where a reply begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// In a thinking block that the prompt opened.
    Thinking,
    /// In the text, unless its first token opens a thinking block.
    Either,
    /// In the text.
    Text,
}

/// What is the same for all choices of a request.
#[derive(Debug, Clone)]
pub struct CoursePlan {
    /// Where a reply begins.
    pub opening: Opening,
    /// The tokens around thinking; without them nothing is known of thinking, and all is text.
    pub tags: Option<ThinkTags>,
    /// How long thinking may be; `None` for as long as it likes.
    pub budget: Option<Budget>,
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
pub struct ThinkTags {
    /// Opens it.
    pub open: TokenId,
    /// Closes it.
    pub close: TokenId,
}

/// How long thinking may be.
#[derive(Debug, Clone)]
pub struct Budget {
    /// After so many tokens it is closed.
    pub tokens: usize,
    /// Over so many tokens before that, the closing tag is leaned towards where a sentence ends.
    pub soft: usize,
    /// How much the closing tag's logit is lifted at most, at the end of the budget.
    pub lift: f32,
    /// Tokens after which a sentence or a line is over.
    pub sentence_ends: Arc<TokenMask>,
}

/// How thinking ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Close {
    /// By itself, or not at all.
    #[default]
    Natural,
    /// By itself, where it was leaned towards its end.
    Soft,
    /// It was closed.
    Hard,
}

/// The strings between a choice's course and those who watch it. Shared; one for each choice.
#[derive(Debug, Default)]
pub struct Reins {
    close_now: AtomicBool,
    close: AtomicU8,
}

impl Reins {
    /// Closes thinking as soon as possible, if the choice is thinking then.
    pub fn close_thinking(&self) {
        self.close_now.store(true, Ordering::Relaxed);
    }

    /// How thinking ended.
    pub fn close(&self) -> Close {
        match self.close.load(Ordering::Relaxed) {
            1 => Close::Soft,
            2 => Close::Hard,
            _ => Close::Natural,
        }
    }

    fn note(&self, close: Close) {
        let code = match close {
            Close::Natural => 0,
            Close::Soft => 1,
            Close::Hard => 2,
        };
        self.close.store(code, Ordering::Relaxed);
    }
}

/// How far a reply has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing has been said, and thinking may be opened.
    Open,
    /// `n` tokens of thinking.
    Thinking {
        n: usize,
        /// A sentence ended with the last of them.
        at_end: bool,
    },
    /// A call in the middle of thinking.
    Call,
    /// `n` tokens of what closes thinking.
    Closing { n: usize },
    /// `n` tokens of the gap.
    Gap { n: usize },
    /// `n` tokens of text.
    Text { n: usize },
}

/// A choice's course.
pub struct Course {
    plan: Arc<CoursePlan>,
    stage: Stage,
    reins: Arc<Reins>,
    follower: Option<Follower>,
}

impl Course {
    /// A choice that has said nothing.
    pub fn new(plan: Arc<CoursePlan>, reins: Arc<Reins>) -> Course {
        let stage = match (plan.opening, plan.tags) {
            (Opening::Thinking, Some(_)) => Stage::Thinking {
                n: 0,
                at_end: false,
            },
            (Opening::Either, Some(_)) => Stage::Open,
            _ => Stage::Text { n: 0 },
        };
        Course {
            follower: plan.grammar.as_ref().map(Grammar::begin),
            stage,
            plan,
            reins,
        }
    }

    /// The stage after `path`, and how many tokens at the end of `path` are text.
    fn after(&self, path: &[TokenId]) -> (Stage, usize) {
        let mut stage = self.stage;
        let mut text = 0;
        for token in path {
            stage = self.plan.step(stage, *token);
            text = match stage {
                Stage::Text { n } => n.min(text + 1),
                _ => 0,
            };
        }
        (stage, text)
    }
}

impl CoursePlan {
    /// The stage one token later.
    fn step(&self, stage: Stage, token: TokenId) -> Stage {
        let is = |tag: fn(ThinkTags) -> TokenId| self.tags.map(tag) == Some(token);
        match stage {
            Stage::Open if is(|tags| tags.open) => Stage::Thinking {
                n: 0,
                at_end: false,
            },
            Stage::Open => Stage::Text { n: 1 },
            Stage::Thinking { n, .. } if self.is_over(n) => self.closing_after(1),
            Stage::Thinking { .. } if is(|tags| tags.close) => self.gap_after(0),
            Stage::Thinking { .. } if self.call_tags.is_some_and(|(open, _)| open == token) => {
                Stage::Call
            }
            Stage::Thinking { n, .. } => Stage::Thinking {
                n: n + 1,
                at_end: self
                    .budget
                    .as_ref()
                    .is_some_and(|budget| budget.sentence_ends.contains(token)),
            },
            Stage::Call if self.call_tags.is_some_and(|(_, close)| close == token) => {
                Stage::Text { n: 0 }
            }
            Stage::Call if is(|tags| tags.close) => self.gap_after(0),
            Stage::Call => Stage::Call,
            Stage::Closing { n } => self.closing_after(n + 1),
            Stage::Gap { n } => self.gap_after(n + 1),
            Stage::Text { n } => Stage::Text { n: n + 1 },
        }
    }

    fn is_over(&self, thinking_tokens: usize) -> bool {
        self.budget
            .as_ref()
            .is_some_and(|budget| thinking_tokens >= budget.tokens)
    }

    fn closing_after(&self, n: usize) -> Stage {
        match n < self.closing.len() {
            true => Stage::Closing { n },
            false => Stage::Text { n: 0 },
        }
    }

    fn gap_after(&self, n: usize) -> Stage {
        match self.grammar.is_some() && n < self.gap.len() {
            true => Stage::Gap { n },
            false => Stage::Text { n: 0 },
        }
    }

    /// Whether `n` tokens of thinking lie where its end is leaned towards, and how far in, above 0 up to 1.
    fn softness(&self, n: usize) -> Option<f32> {
        let budget = self.budget.as_ref().filter(|budget| budget.soft > 0)?;
        let into = (n + budget.soft).checked_sub(budget.tokens)?;
        Some((into + 1).min(budget.soft) as f32 / budget.soft as f32)
    }
}

impl Constraint for Course {
    fn forced(&mut self, path: &[TokenId]) -> Option<TokenId> {
        let (stage, text) = self.after(path);
        match stage {
            Stage::Thinking { n, .. } if self.plan.is_over(n) => self.plan.closing.first().copied(),
            Stage::Closing { n } => self.plan.closing.get(n).copied(),
            Stage::Gap { n } => self.plan.gap.get(n).copied(),
            Stage::Text { .. } => {
                let tail = &path[path.len() - text..];
                self.follower.as_mut()?.forced(tail)
            }
            Stage::Open | Stage::Thinking { .. } | Stage::Call => None,
        }
    }

    fn allowed(&mut self, path: &[TokenId]) -> Option<Arc<TokenMask>> {
        let (stage, text) = self.after(path);
        match stage {
            Stage::Thinking { .. } => self.plan.in_thinking.clone(),
            Stage::Call | Stage::Closing { .. } | Stage::Gap { .. } => None,
            Stage::Open => {
                let mask = self.follower.as_mut()?.allowed(&[]);
                let Some(tags) = self.plan.tags else {
                    return Some(mask);
                };
                let mut mask = Arc::unwrap_or_clone(mask);
                mask.insert(tags.open);
                Some(Arc::new(mask))
            }
            Stage::Text { .. } => {
                let tail = &path[path.len() - text..];
                Some(self.follower.as_mut()?.allowed(tail))
            }
        }
    }

    fn lean(&mut self, path: &[TokenId]) -> Option<Lean> {
        let (Stage::Thinking { n, at_end: true }, _) = self.after(path) else {
            return None;
        };
        let softness = self.plan.softness(n)?;
        Some(Lean {
            token: self.plan.tags?.close,
            lift: softness * self.plan.budget.as_ref()?.lift,
        })
    }

    fn advance(&mut self, tokens: &[TokenId]) {
        for token in tokens {
            let before = self.stage;
            self.stage = self.plan.step(before, *token);
            match (before, self.stage) {
                (Stage::Thinking { n, .. }, Stage::Gap { .. } | Stage::Text { .. })
                    if !self.plan.is_over(n) =>
                {
                    let soft = self.plan.softness(n).is_some();
                    self.reins.note(match soft {
                        true => Close::Soft,
                        false => Close::Natural,
                    });
                }
                (Stage::Thinking { n, .. }, _) if self.plan.is_over(n) => {
                    self.reins.note(Close::Hard);
                }
                (Stage::Open, Stage::Text { .. }) | (Stage::Text { .. }, _) => {
                    if let Some(follower) = &mut self.follower {
                        follower.advance(&[*token]);
                    }
                }
                _ => {}
            }
        }
        let thinks = matches!(self.stage, Stage::Thinking { .. });
        if thinks && self.reins.close_now.load(Ordering::Relaxed) {
            self.reins.note(Close::Hard);
            self.stage = Stage::Closing { n: 0 };
        }
    }

    fn fault(&self) -> Option<&str> {
        self.follower.as_ref()?.fault()
    }
}

#[cfg(test)]
mod tests;
