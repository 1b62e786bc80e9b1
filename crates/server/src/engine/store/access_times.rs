//! When states were used last, as their files tell it once the process ends.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use contract::TokenId;

/// When states count as used, once the process ends: in the order told, a step apart, and all others before them.
/// However long the disk takes, a state takes the place of none that was used after it.
pub(super) struct AccessTimes {
    by_use: Vec<Arc<[TokenId]>>,
    end: SystemTime,
}

impl AccessTimes {
    /// Between two states: more than what ext4, XFS, Btrfs or APFS round times to. On a file system that keeps whole seconds
    /// states of one end count as used together.
    const STEP: Duration = Duration::from_millis(1);

    /// States by their tokens, the one used last first.
    pub(super) fn new(by_use: &[Vec<TokenId>], end: SystemTime) -> AccessTimes {
        AccessTimes {
            by_use: by_use
                .iter()
                .map(|tokens| tokens.as_slice().into())
                .collect(),
            end,
        }
    }

    /// When a state was used last.
    pub(super) fn of(&self, tokens: &[TokenId]) -> SystemTime {
        let place = self.by_use.iter().position(|of| **of == *tokens);
        let steps = place.unwrap_or(self.by_use.len()) as u32;
        self.end.checked_sub(steps * Self::STEP).unwrap_or(self.end)
    }
}
