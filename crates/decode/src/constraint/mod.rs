//! What may or must come next, besides what the sampler wants: grammars, thinking budgets, forced prefixes.
//!
//! A [`Constraint`] follows one choice. It is asked about positions that may never come true, the nodes of a
//! tree, and told of tokens that did. What it forces is verified and committed like any other token, a whole
//! run of it in one pass, with and without a draft.

mod grammar;
mod reasoning;

use std::fmt;
use std::sync::Arc;

use contract::{TokenId, TokenMask};

pub use grammar::{Grammar, GrammarCompiler, GrammarError, Tokenize, VocabEntry};
pub use reasoning::{
    InitialPhase, ReasoningBudget, ReasoningConfig, ReasoningEnd, ReasoningHandle,
    ReasoningMachine, ReasoningTags,
};

/// Decides over the tokens of one choice, in the words of tokens that follow those it was told of.
///
/// Both answers must depend on nothing but what it was told and `path`, or speculation would show.
pub trait Constraint: Send {
    /// The token that must come after `path`, if there is only one. It is said whatever the target thinks.
    fn forced(&mut self, path: &[TokenId]) -> Option<TokenId>;

    /// The tokens that may come after `path`; `None` allows all. Asked only where nothing is forced. An empty
    /// mask is a defect: where a text is complete, its end is what may come.
    fn allowed(&mut self, path: &[TokenId]) -> Option<Arc<TokenMask>>;

    /// The token that is to be likelier than it is after `path`. Asked only where nothing is forced.
    fn logit_boost(&mut self, _path: &[TokenId]) -> Option<LogitBoost> {
        None
    }

    /// Tells of tokens that have come.
    fn advance(&mut self, tokens: &[TokenId]);

    /// Why it can decide no more, if something went wrong; its answers mean nothing then.
    fn fault(&self) -> Option<&str> {
        None
    }
}

/// A token made likelier.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitBoost {
    /// The token.
    pub token: TokenId,
    /// Added to its logit.
    pub boost: f32,
}

/// Makes the constraint of each choice of a job, fresh.
#[derive(Clone)]
pub struct Constraints(Arc<dyn Fn(usize) -> Box<dyn Constraint> + Send + Sync>);

impl Constraints {
    /// `make` is called with the number of the choice.
    pub fn new(make: impl Fn(usize) -> Box<dyn Constraint> + Send + Sync + 'static) -> Constraints {
        Constraints(Arc::new(make))
    }

    /// The constraint of one choice that has said nothing.
    pub fn begin(&self, choice: usize) -> Box<dyn Constraint> {
        (self.0)(choice)
    }
}

impl fmt::Debug for Constraints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Constraints")
    }
}

/// Two are equal when they are one.
impl PartialEq for Constraints {
    fn eq(&self, other: &Constraints) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Forces a text once a number of tokens has come: a prefix, or what closes a text that has grown too long.
#[derive(Debug, Clone)]
pub struct ForcedText {
    /// Tokens until the text, as of those told of.
    wait: usize,
    text: Arc<[TokenId]>,
    /// Tokens of the text that have come.
    done: usize,
}

impl ForcedText {
    /// `text` after `wait` tokens; with 0, the text begins the answer.
    pub fn after(wait: usize, text: Arc<[TokenId]>) -> ForcedText {
        ForcedText {
            wait,
            text,
            done: 0,
        }
    }
}

impl Constraint for ForcedText {
    fn forced(&mut self, path: &[TokenId]) -> Option<TokenId> {
        let into = path.len().checked_sub(self.wait)?;
        self.text.get(self.done + into).copied()
    }

    fn allowed(&mut self, _path: &[TokenId]) -> Option<Arc<TokenMask>> {
        None
    }

    fn advance(&mut self, tokens: &[TokenId]) {
        let waited = tokens.len().min(self.wait);
        self.wait -= waited;
        self.done += tokens.len() - waited;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forced_text_is_complete_for_any_split() {
        let text: Vec<TokenId> = (10..15).map(TokenId).collect();
        for cut in 0..9 {
            let mut forced = ForcedText::after(3, text.clone().into());
            let mut said = Vec::new();
            let say = |forced: &mut ForcedText, path: &[TokenId]| {
                forced.forced(path).unwrap_or(TokenId(0))
            };
            for _ in 0..cut {
                let token = say(&mut forced, &said);
                said.push(token);
            }
            forced.advance(&said);
            let mut path = Vec::new();
            for _ in cut..9 {
                let token = say(&mut forced, &path);
                path.push(token);
            }
            said.extend(path);
            let ids: Vec<u32> = said.iter().map(|t| t.0).collect();
            assert_eq!(ids, [0, 0, 0, 10, 11, 12, 13, 14, 0], "cut at {cut}");
        }
    }
}
