//! The settings and the counters of the prefix cache.

use contract::SnapshotLocation;

use super::save_points::SavePointConfig;

/// How much is saved, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixConfig {
    /// States at most; 0 saves nothing.
    pub slots: usize,
    /// Bytes that all snapshots of the runner may hold.
    pub bytes: u64,
    /// What of a prompt is saved.
    pub boundaries: SavePointConfig,
    /// Where snapshots are kept.
    pub place: SnapshotLocation,
    /// Shorter beginnings are not given to the store.
    pub least_stored: usize,
    /// Tokens that are read at most of what a next prompt is thought to begin with, while nothing else is to be done; 0
    /// reads nothing ahead.
    pub warmup_tokens: usize,
}

impl Default for PrefixConfig {
    /// Off.
    fn default() -> PrefixConfig {
        PrefixConfig {
            slots: 0,
            bytes: u64::MAX,
            boundaries: SavePointConfig::default(),
            place: SnapshotLocation::Host,
            least_stored: 512,
            warmup_tokens: 0,
        }
    }
}

/// What the cache holds and has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixStats {
    /// States held now.
    pub entries: usize,
    /// Bytes that the runner's snapshots hold now.
    pub bytes: u64,
    /// Prompts looked up.
    pub lookups: u64,
    /// Of these, prompts that began with a saved state.
    pub hits: u64,
    /// Of these, hits of states that came from the store.
    pub store_hits: u64,
    /// Tokens that need not be read because a state held them.
    pub cached_tokens: u64,
    /// States saved.
    pub saved: u64,
    /// States given up for want of room.
    pub evicted: u64,
    /// States given to the store.
    pub stored: u64,
    /// States that could not be saved, restored or read from the store. Each was a miss and no more.
    pub failed: u64,
    /// Tokens read ahead, while nothing else was to be done.
    pub warmup_tokens: u64,
    /// States saved of what was read ahead.
    pub warmup_saved: u64,
    /// Of these, states that a prompt went on from.
    pub warmup_hits: u64,
}
