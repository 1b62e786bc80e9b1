//! Access times of stored states, recorded as file times at shutdown.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use contract::TokenId;

/// Access times at shutdown: by order of use, one step apart, all other states before them. A slow
/// write therefore never evicts a state that was used later.
pub(super) struct AccessTimes {
    by_use: Vec<Arc<[TokenId]>>,
    end: SystemTime,
}

impl AccessTimes {
    /// Step between two states: more than the time resolution of ext4, XFS, Btrfs and APFS. With a
    /// resolution of whole seconds, all states of one shutdown count as used together.
    const STEP: Duration = Duration::from_millis(1);

    /// States by their tokens, most recently used first.
    pub(super) fn new(by_use: &[Vec<TokenId>], end: SystemTime) -> AccessTimes {
        AccessTimes {
            by_use: by_use
                .iter()
                .map(|tokens| tokens.as_slice().into())
                .collect(),
            end,
        }
    }

    /// Access time of a state.
    pub(super) fn of(&self, tokens: &[TokenId]) -> SystemTime {
        let place = self.by_use.iter().position(|of| **of == *tokens);
        let steps = place.unwrap_or(self.by_use.len()) as u32;
        self.end.checked_sub(steps * Self::STEP).unwrap_or(self.end)
    }
}
