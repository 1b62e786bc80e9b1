//! The prefix cache: snapshots of prompt prefixes, found again when another prompt starts with the
//! same tokens.
//!
//! `radix` finds entries, `save_points` decides where prompts are saved, `eviction` ranks the
//! entries, and a [`Store`] keeps entries beyond the process. An entry is a snapshot of the runner.
//! The runner shares pages between snapshots and counts their bytes
//! ([`Capacity::snapshot_bytes`](contract::Capacity)).
//!
//! An entry is used only for a prompt that starts with exactly its tokens and has more. Entries are
//! saved at chunk boundaries, so resuming from one gives the same bits as reading the whole prompt.

mod cache;
mod config;
mod entry;
mod eviction;
mod radix;
mod save_points;
mod store;

pub(crate) use cache::PrefixCache;
pub use config::{PrefixConfig, PrefixStats};
pub(crate) use entry::{Restored, SaveInfo};
pub(crate) use save_points::SavePoint;
pub use save_points::SavePointConfig;
pub use store::{Store, StoreHit};
