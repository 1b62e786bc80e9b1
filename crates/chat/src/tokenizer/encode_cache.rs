//! Caches the tokens of long text segments.
//!
//! A client sends the whole conversation with every turn, and all but its end was encoded before:
//! at 32,768 tokens that saves 10 to 20 ms per turn. Segments between special strings are cached by
//! their full text in two generations; segments not used while one generation fills are dropped
//! with the next.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use contract::TokenId;

/// Shorter segments are encoded as fast as they are looked up.
const MIN_CACHED_BYTES: usize = 256;
/// Bytes of text per generation.
const GENERATION_BYTES: usize = 8 << 20;

/// Text segments with their tokens.
#[derive(Default)]
pub(super) struct EncodeCache(Mutex<Generations>);

#[derive(Default)]
struct Generations {
    young: HashMap<Box<str>, Arc<[TokenId]>>,
    old: HashMap<Box<str>, Arc<[TokenId]>>,
    /// Bytes of text in `young`.
    bytes: usize,
}

impl Generations {
    fn keep(&mut self, text: Box<str>, tokens: Arc<[TokenId]>) {
        if self.bytes + text.len() > GENERATION_BYTES {
            self.old = std::mem::take(&mut self.young);
            self.bytes = 0;
        }
        self.bytes += text.len();
        self.young.insert(text, tokens);
    }
}

impl EncodeCache {
    fn lock(&self) -> MutexGuard<'_, Generations> {
        // Every state between two changes of the maps is valid.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tokens of a cached segment.
    pub(super) fn find(&self, text: &str) -> Option<Arc<[TokenId]>> {
        if text.len() < MIN_CACHED_BYTES {
            return None;
        }
        let mut all = self.lock();
        if let Some(tokens) = all.young.get(text) {
            return Some(Arc::clone(tokens));
        }
        let (text, tokens) = all.old.remove_entry(text)?;
        all.keep(text, Arc::clone(&tokens));
        Some(tokens)
    }

    /// Caches a segment, unless it is short or longer than a generation.
    pub(super) fn keep(&self, text: &str, tokens: &[TokenId]) {
        if (MIN_CACHED_BYTES..=GENERATION_BYTES).contains(&text.len()) {
            self.lock().keep(text.into(), tokens.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recently_used_segments_stay_cached() {
        let encode_cache = EncodeCache::default();
        let text = |i: usize| format!("{i:08}").repeat(1 << 17);
        encode_cache.keep("short", &[TokenId(1)]);
        assert!(encode_cache.find("short").is_none());
        encode_cache.keep(&text(0), &[TokenId(7)]);
        encode_cache.keep(&text(1), &[TokenId(8)]);
        // 1 MiB each, three generations in all; the first segment is used throughout.
        for i in 2..26 {
            encode_cache.keep(&text(i), &[TokenId(9)]);
            assert_eq!(
                encode_cache.find(&text(0)).as_deref(),
                Some(&[TokenId(7)][..])
            );
        }
        assert!(encode_cache.find(&text(1)).is_none());
        let all = encode_cache.lock();
        let bytes = all
            .young
            .keys()
            .chain(all.old.keys())
            .map(|text| text.len());
        assert!(bytes.sum::<usize>() <= 2 * GENERATION_BYTES);
    }
}
