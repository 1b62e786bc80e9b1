//! The settings and the counters of the prefix cache.

use contract::SnapshotLocation;

use super::save_points::SavePointConfig;

/// Settings of the prefix cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixConfig {
    /// Maximum number of entries; 0 disables the cache.
    pub max_entries: usize,
    /// Maximum bytes of all snapshots of the runner.
    pub bytes: u64,
    /// The positions of a prompt at which its state is saved.
    pub save_points: SavePointConfig,
    /// The memory that keeps snapshots.
    pub location: SnapshotLocation,
    /// Shortest prefix given to the store, in tokens.
    pub min_store_tokens: usize,
    /// Maximum number of tokens that prefix warm-up prefills for one expected prompt; 0 disables
    /// warm-up.
    pub warmup_tokens: usize,
}

impl Default for PrefixConfig {
    /// Disabled.
    fn default() -> PrefixConfig {
        PrefixConfig {
            max_entries: 0,
            bytes: u64::MAX,
            save_points: SavePointConfig::default(),
            location: SnapshotLocation::Host,
            min_store_tokens: 512,
            warmup_tokens: 0,
        }
    }
}

/// State and counters of the prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixStats {
    /// Entries now.
    pub entries: usize,
    /// Bytes of the runner's snapshots now.
    pub bytes: u64,
    /// Prompts looked up.
    pub lookups: u64,
    /// Prompts that resumed from an entry.
    pub hits: u64,
    /// Hits on entries that came from the store.
    pub store_hits: u64,
    /// Prompt tokens taken from entries.
    pub cached_tokens: u64,
    /// Entries saved.
    pub saved: u64,
    /// Entries evicted.
    pub evicted: u64,
    /// Entries given to the store.
    pub stored: u64,
    /// Entries that could not be saved, restored or imported. Each is a miss and no more.
    pub failed: u64,
    /// Tokens prefilled by warm-up.
    pub warmup_tokens: u64,
    /// Entries saved by warm-up.
    pub warmup_saved: u64,
    /// Warm-up entries that a prompt resumed from.
    pub warmup_hits: u64,
}
