//! The interface of constraints.

use std::fmt;
use std::sync::Arc;

use contract::{TokenId, TokenMask};

/// Decides over the next token of one choice. A `path` holds tokens after those passed to
/// `advance`.
///
/// Answers must depend only on the advanced tokens and `path`. Otherwise speculation would change
/// the output.
pub trait Constraint: Send {
    /// The token that must follow `path`, if there is only one. It is generated whatever the logits
    /// are.
    fn forced(&mut self, path: &[TokenId]) -> Option<TokenId>;

    /// The tokens that may follow `path`; `None` allows all. Called only if nothing is forced. An
    /// empty mask is a bug: complete text allows its end token.
    fn allowed(&mut self, path: &[TokenId]) -> Option<Arc<TokenMask>>;

    /// The token to make likelier after `path`. Called only if nothing is forced.
    fn logit_boost(&mut self, _path: &[TokenId]) -> Option<LogitBoost> {
        None
    }

    /// Advances over accepted tokens.
    fn advance(&mut self, tokens: &[TokenId]);

    /// Why it can decide nothing more, if it failed; its answers are then meaningless.
    fn error(&self) -> Option<&str> {
        None
    }
}

/// A token whose logit is raised.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitBoost {
    /// The token.
    pub token: TokenId,
    /// Added to its logit.
    pub boost: f32,
}

/// Creates the constraint of each choice of a job.
#[derive(Clone)]
pub struct Constraints(Arc<dyn Fn(usize) -> Box<dyn Constraint> + Send + Sync>);

impl Constraints {
    /// `make` is called with the choice's number.
    pub fn new(make: impl Fn(usize) -> Box<dyn Constraint> + Send + Sync + 'static) -> Constraints {
        Constraints(Arc::new(make))
    }

    /// The constraint of one choice that has generated nothing.
    pub fn begin(&self, choice: usize) -> Box<dyn Constraint> {
        (self.0)(choice)
    }
}

impl fmt::Debug for Constraints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Constraints")
    }
}

/// Equality is identity.
impl PartialEq for Constraints {
    fn eq(&self, other: &Constraints) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
