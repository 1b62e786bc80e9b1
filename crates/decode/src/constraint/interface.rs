//! The interface of constraints.

use std::fmt;
use std::sync::Arc;

use contract::{TokenId, TokenMask};

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
