//! The prefix cache: finds, restores, saves, evicts and persists entries.

use std::sync::Arc;

use contract::{DeviceError, Runner, SeqId, TokenId};

use super::config::{PrefixConfig, PrefixStats};
use super::entry::{PrefixEntry, Restored, SaveInfo};
use super::eviction;
use super::radix::{Key, RadixTree};
use super::save_points::SavePoint;
use super::store::Store;

/// Cached prefixes of one runner.
pub(crate) struct PrefixCache {
    config: PrefixConfig,
    radix: RadixTree<PrefixEntry>,
    store: Option<Box<dyn Store>>,
    /// Logical time of uses; the algorithm has no clock.
    use_counter: u64,
    stats: PrefixStats,
}

impl PrefixCache {
    pub(crate) fn new(config: PrefixConfig) -> PrefixCache {
        PrefixCache {
            config,
            radix: RadixTree::default(),
            store: None,
            use_counter: 0,
            stats: PrefixStats::default(),
        }
    }

    /// Adds a store that keeps entries beyond the process.
    pub(crate) fn set_store(&mut self, store: Box<dyn Store>) {
        self.store = Some(store);
    }

    /// Whether the cache may save anything.
    pub(crate) fn is_on(&self) -> bool {
        self.config.max_entries > 0
    }

    /// Whether the cache has no entry.
    pub(crate) fn is_empty(&self) -> bool {
        self.radix.len() == 0
    }

    pub(crate) fn stats(&self, runner: &dyn Runner) -> PrefixStats {
        PrefixStats {
            entries: self.radix.len(),
            bytes: runner.capacity().snapshot_bytes,
            ..self.stats
        }
    }

    /// Positions at which to save a prompt whose first `prefilled` tokens are cached.
    pub(crate) fn save_points(
        &self,
        prompt: &[TokenId],
        prefilled: usize,
        align: usize,
    ) -> Vec<SavePoint> {
        if self.is_on() {
            self.config
                .save_points
                .save_points(prompt, prefilled, align)
        } else {
            Vec::new()
        }
    }

    /// Restores the longest cached prefix of `prompt` into a fresh sequence.
    ///
    /// The only error is a lost device.
    pub(crate) fn restore(
        &mut self,
        runner: &mut dyn Runner,
        seq: SeqId,
        prompt: &[TokenId],
        session: Option<&Arc<str>>,
    ) -> Result<Restored, DeviceError> {
        if !self.is_on() {
            return Ok(Restored::NotFound);
        }
        self.stats.lookups += 1;
        self.use_counter += 1;
        // The last token is always prefilled, since its logits are needed.
        let usable = &prompt[..prompt.len().saturating_sub(1)];
        self.import_from_store(runner, usable, session)?;
        let prefixes = self.radix.prefixes_of(usable);
        let Some(&key) = prefixes.last() else {
            return Ok(Restored::NotFound);
        };
        let restored = self.restore_entry(runner, seq, key)?;
        let Restored::At(position) = restored else {
            return Ok(restored);
        };
        for passed in prefixes {
            let shared = passed == key
                || self
                    .radix
                    .child_entries(passed, PrefixEntry::is_from_prompt)
                    .len()
                    > 1;
            if let Some(entry) = self.radix.get_mut(passed)
                && (shared || entry.system_prefix)
            {
                entry.used = self.use_counter;
            }
        }
        if let Some(entry) = self.radix.get_mut(key) {
            entry.hit = true;
            self.stats.warmup_hits += u64::from(std::mem::take(&mut entry.from_warmup));
            if let Some(session) = session {
                entry.session = Some(Arc::clone(session));
            }
        }
        self.stats.hits += 1;
        self.stats.cached_tokens += position as u64;
        Ok(Restored::At(position))
    }

    /// Restores an entry into a fresh sequence.
    fn restore_entry(
        &mut self,
        runner: &mut dyn Runner,
        seq: SeqId,
        key: Key,
    ) -> Result<Restored, DeviceError> {
        let Some(entry) = self.radix.get(key) else {
            return Ok(Restored::NotFound);
        };
        match runner.restore(seq, entry.snapshot) {
            Ok(()) => Ok(Restored::At(self.radix.depth(key))),
            Err(lost @ DeviceError::DeviceLost { .. }) => Err(lost),
            Err(error) => {
                tracing::warn!(%error, "cannot restore a cached prefix; full prefill");
                self.stats.failed += 1;
                self.remove_entry(runner, key);
                Ok(Restored::Broken)
            }
        }
    }

    /// Saves the state of a sequence that holds exactly `tokens`, unless it is cached already.
    ///
    /// The only error is a lost device.
    pub(crate) fn save(
        &mut self,
        runner: &mut dyn Runner,
        seq: SeqId,
        tokens: &[TokenId],
        mark: SaveInfo<'_>,
    ) -> Result<(), DeviceError> {
        let SaveInfo {
            system_prefix,
            session,
            ..
        } = mark;
        self.use_counter += 1;
        let prefixes = self.radix.prefixes_of(tokens);
        let there = prefixes.last().copied();
        if let Some(key) = there.filter(|key| self.radix.depth(*key) == tokens.len()) {
            if let Some(entry) = self.radix.get_mut(key) {
                entry.used = self.use_counter;
                entry.system_prefix |= system_prefix;
                entry.from_warmup &= mark.from_warmup;
            }
            return Ok(());
        }
        let info = match runner.snapshot(seq, self.config.location) {
            Ok(info) if info.position == tokens.len() => info,
            Ok(info) => {
                let detail = format!("position {} for {} tokens", info.position, tokens.len());
                tracing::error!(%detail, "snapshot at a wrong position dropped");
                runner.free_snapshot(info.id);
                self.stats.failed += 1;
                return Ok(());
            }
            Err(lost @ DeviceError::DeviceLost { .. }) => return Err(lost),
            Err(error) => {
                tracing::warn!(%error, "cannot save a prefix");
                self.stats.failed += 1;
                return Ok(());
            }
        };
        self.stats.saved += 1;
        self.stats.warmup_saved += u64::from(mark.from_warmup);
        // Any conversation may resume from a system prefix. Only the same one resumes from a later
        // turn.
        let is_conversation =
            |entry: &PrefixEntry| !entry.system_prefix && (entry.hit || entry.multi_turn);
        let mut earlier = prefixes.iter().filter_map(|key| self.radix.get(*key));
        let entry = PrefixEntry {
            snapshot: info.id,
            used: self.use_counter,
            session: session.cloned(),
            system_prefix,
            hit: false,
            multi_turn: earlier.any(is_conversation),
            offered_to_store: false,
            from_warmup: mark.from_warmup,
        };
        self.insert(runner, tokens, entry);
        self.enforce_limits(runner)
    }

    /// Evicts the entry of the lowest class, exporting it first if the store should keep it.
    /// Returns false if there is none.
    pub(crate) fn evict_one(&mut self, runner: &mut dyn Runner) -> Result<bool, DeviceError> {
        let Some(key) = eviction::choose_evictee(&self.radix) else {
            return Ok(false);
        };
        if eviction::worth_persisting(&self.radix).contains(&key) {
            self.export_to_store(runner, key, ExportRule::AnyNew)?;
        }
        self.stats.evicted += 1;
        self.remove_entry(runner, key);
        Ok(true)
    }

    /// Whether an entry has not been examined for the store.
    pub(crate) fn has_unpersisted(&self) -> bool {
        let unoffered = |entry: &PrefixEntry, depth| {
            !entry.offered_to_store && depth >= self.config.min_store_tokens
        };
        self.store.is_some()
            && self
                .radix
                .entries()
                .any(|(_, depth, entry)| unoffered(entry, depth))
    }

    /// Exports one entry that the store should keep, if there is one.
    pub(crate) fn persist_next(&mut self, runner: &mut dyn Runner) -> Result<(), DeviceError> {
        let worth_persisting = eviction::worth_persisting(&self.radix);
        for key in &worth_persisting {
            if self.export_to_store(runner, *key, ExportRule::EighthNew)? {
                return Ok(());
            }
        }
        // Interior entries are not worth storing.
        let all: Vec<Key> = self.radix.entries().map(|(key, ..)| key).collect();
        for key in all {
            if let Some(entry) = self.radix.get_mut(key) {
                entry.offered_to_store = true;
            }
        }
        Ok(())
    }

    /// Exports everything worth keeping that the store lacks, the most recently used first.
    pub(crate) fn flush(&mut self, runner: &mut dyn Runner) -> Result<(), DeviceError> {
        let worth_persisting = eviction::worth_persisting(&self.radix);
        if let Some(store) = &mut self.store {
            let by_use: Vec<_> = worth_persisting
                .iter()
                .map(|key| self.radix.tokens(*key))
                .collect();
            store.begin_shutdown(&by_use);
        }
        for key in worth_persisting {
            self.export_to_store(runner, key, ExportRule::AnyNew)?;
        }
        Ok(())
    }

    /// Imports the longest stored prefix, if it is longer than the cached one.
    fn import_from_store(
        &mut self,
        runner: &mut dyn Runner,
        usable: &[TokenId],
        session: Option<&Arc<str>>,
    ) -> Result<(), DeviceError> {
        loop {
            let there = self.radix.prefixes_of(usable).last().copied();
            let held = there.map_or(0, |key| self.radix.depth(key));
            let Some(store) = &mut self.store else {
                return Ok(());
            };
            let Some(found) = store.find(usable, held, usable.len()) else {
                return Ok(());
            };
            let tokens = &usable[..found.position];
            match runner.import_at(&*found.source) {
                Ok(info) if info.position == tokens.len() => {
                    self.stats.store_hits += 1;
                    let entry = PrefixEntry {
                        snapshot: info.id,
                        used: self.use_counter,
                        session: session.cloned(),
                        system_prefix: false,
                        hit: false,
                        multi_turn: false,
                        offered_to_store: true,
                        from_warmup: false,
                    };
                    self.insert(runner, tokens, entry);
                    return self.enforce_limits(runner);
                }
                Ok(info) => {
                    runner.free_snapshot(info.id);
                    store.forget(tokens);
                }
                Err(lost @ DeviceError::DeviceLost { .. }) => return Err(lost),
                Err(error) if error.is_out_of_memory() => {
                    self.stats.failed += 1;
                    return Ok(());
                }
                Err(error) => {
                    tracing::warn!(%error, "stored prefix rejected and deleted");
                    store.forget(tokens);
                }
            }
            self.stats.failed += 1;
        }
    }

    fn insert(&mut self, runner: &mut dyn Runner, tokens: &[TokenId], entry: PrefixEntry) {
        let (_, before) = self.radix.insert(tokens, entry);
        if let Some(before) = before {
            runner.free_snapshot(before.snapshot);
        }
    }

    /// Evicts entries until the limits on their number and bytes hold.
    fn enforce_limits(&mut self, runner: &mut dyn Runner) -> Result<(), DeviceError> {
        while self.radix.len() > self.config.max_entries
            || (!self.is_empty() && runner.capacity().snapshot_bytes > self.config.bytes)
        {
            self.evict_one(runner)?;
        }
        Ok(())
    }

    /// Exports an entry to the store, if it is long enough and `rule` allows it. Returns whether it
    /// was exported.
    fn export_to_store(
        &mut self,
        runner: &mut dyn Runner,
        key: Key,
        rule: ExportRule,
    ) -> Result<bool, DeviceError> {
        let depth = self.radix.depth(key);
        let (Some(store), Some(entry)) = (&mut self.store, self.radix.get_mut(key)) else {
            return Ok(false);
        };
        let ignores_offered = matches!(rule, ExportRule::AnyNew);
        if depth < self.config.min_store_tokens || (entry.offered_to_store && !ignores_offered) {
            return Ok(false);
        }
        entry.offered_to_store = true;
        let snapshot = entry.snapshot;
        let tokens = self.radix.tokens(key);
        let new = depth - store.longest_prefix_len(&tokens).min(depth);
        let enough = match rule {
            ExportRule::AnyNew => new > 0,
            ExportRule::EighthNew => new >= depth / 8,
        };
        if !enough {
            return Ok(false);
        }
        match runner.detach(snapshot) {
            Ok(detached) => {
                self.stats.stored += 1;
                store.put(&tokens, detached);
                Ok(true)
            }
            Err(lost @ DeviceError::DeviceLost { .. }) => Err(lost),
            Err(error) => {
                tracing::warn!(%error, "cannot export a prefix");
                self.stats.failed += 1;
                Ok(false)
            }
        }
    }

    fn remove_entry(&mut self, runner: &mut dyn Runner, key: Key) {
        if let Some(entry) = self.radix.remove(key) {
            runner.free_snapshot(entry.snapshot);
        }
    }
}

/// Queries and counters for prefix warm-up. They do not count as uses of an entry.
impl PrefixCache {
    /// Whether warm-up is on.
    pub(crate) fn warmup_enabled(&self) -> bool {
        self.is_on() && self.config.warmup_tokens > 0
    }

    /// Tokens that warm-up may still prefill of a prompt of which `prefilled` tokens are done.
    pub(crate) fn warmup_budget_left(&self, prefilled: usize) -> usize {
        self.config.warmup_tokens.saturating_sub(prefilled)
    }

    /// Fewest tokens that are worth a warm-up.
    pub(crate) fn min_warmup_tokens(&self) -> usize {
        self.config.save_points.min_distance.max(1)
    }

    /// Start of the last turn but one, which is the reply in an expected prompt; the end if there
    /// is none.
    pub(crate) fn last_reply(&self, tokens: &[TokenId]) -> usize {
        let starts = &self.config.save_points.turn_starts;
        let mut turns = tokens.iter().enumerate().rev();
        let mut turn = || turns.find(|(_, token)| starts.contains(token));
        turn()
            .and_then(|_| turn())
            .map_or(tokens.len(), |(at, _)| at)
    }

    /// Counts warmed-up tokens.
    pub(crate) fn count_warmup(&mut self, tokens: usize) {
        self.stats.warmup_tokens += tokens as u64;
    }

    /// Length of the longest cached prefix of a prompt.
    pub(crate) fn longest_prefix_len(&self, tokens: &[TokenId]) -> usize {
        let prefixes = self.radix.prefixes_of(tokens);
        prefixes.last().map_or(0, |key| self.radix.depth(*key))
    }

    /// Restores the longest cached prefix of an expected prompt into a fresh sequence.
    ///
    /// The only error is a lost device.
    pub(crate) fn restore_for_warmup(
        &mut self,
        runner: &mut dyn Runner,
        seq: SeqId,
        tokens: &[TokenId],
    ) -> Result<Restored, DeviceError> {
        match self.radix.prefixes_of(tokens).last() {
            Some(key) => self.restore_entry(runner, seq, *key),
            None => Ok(Restored::NotFound),
        }
    }
}

/// How much longer than the stored prefix an entry must be to be exported.
#[derive(Debug, Clone, Copy)]
enum ExportRule {
    /// By one token: the entry is about to be lost.
    AnyNew,
    /// By an eighth of its length, so that a growing conversation is not written at every turn.
    EighthNew,
}
