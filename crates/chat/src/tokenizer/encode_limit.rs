//! When encoding stops before the end of a text.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set when the result of some work is no longer wanted; all clones are one flag.
#[derive(Debug, Clone, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// Asks the work to end.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the work must end.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Ends encoding once there are more than `tokens`, or fails once `cancel` is set.
#[derive(Debug, Clone, Copy)]
pub struct EncodeLimit<'a> {
    /// The most tokens that matter.
    pub tokens: usize,
    /// The flag of the request that the text belongs to.
    pub cancel: Option<&'a CancelFlag>,
}

impl EncodeLimit<'_> {
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(CancelFlag::is_cancelled)
    }
}

impl From<usize> for EncodeLimit<'_> {
    fn from(tokens: usize) -> Self {
        EncodeLimit {
            tokens,
            cancel: None,
        }
    }
}
