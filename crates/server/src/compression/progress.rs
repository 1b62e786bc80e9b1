//! How far the scoring of a request's texts is, for its stream and for `/slots`.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Progress of one request: the text that is scored or waits for it.
#[derive(Debug, Default)]
pub struct ScoringProgress {
    /// Texts begun: the prompt, or earlier messages one by one.
    texts: AtomicUsize,
    tokens: AtomicUsize,
    /// Token rows that have passed a layer, and their total; 0 of 0 while the text waits.
    done: AtomicUsize,
    total: AtomicUsize,
}

/// Values of a [`ScoringProgress`] at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScoringCounts {
    /// Texts begun, the current one included.
    pub texts: usize,
    /// Tokens of the current text.
    pub tokens: usize,
    /// Token rows of the current text that have passed a layer.
    pub done: usize,
    /// Its token rows in total; 0 while it waits for the scorer.
    pub total: usize,
}

impl ScoringProgress {
    /// A text of this many tokens waits for the scorer.
    pub(super) fn begin(&self, tokens: usize) {
        self.texts.fetch_add(1, Ordering::Relaxed);
        self.tokens.store(tokens, Ordering::Relaxed);
        self.advance(0, 0);
    }

    pub(super) fn advance(&self, done: usize, total: usize) {
        self.done.store(done, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    /// The values now.
    pub fn counts(&self) -> ScoringCounts {
        let [texts, tokens, done, total] =
            [&self.texts, &self.tokens, &self.done, &self.total].map(|n| n.load(Ordering::Relaxed));
        ScoringCounts {
            texts,
            tokens,
            done,
            total,
        }
    }
}

/// The comment of a stream that waits.
impl fmt::Display for ScoringCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ScoringCounts {
            texts,
            tokens,
            done,
            total,
        } = *self;
        if total == 0 {
            return f.write_str("waiting for the scorer");
        }
        let percent = 100 * done / total;
        match texts {
            0 | 1 => f.write_str("scoring the prompt for compression")?,
            _ => write!(f, "scoring text {texts} for compression")?,
        }
        write!(f, ", {percent} % of {tokens} tokens")
    }
}

/// The requests whose texts are scored or wait for it, in order of arrival.
#[derive(Debug, Default)]
pub(super) struct ActiveScorings(Mutex<Vec<Arc<ScoringProgress>>>);

impl ActiveScorings {
    /// Lists a request until the guard is dropped.
    pub(super) fn enter(&self, progress: &Arc<ScoringProgress>) -> ScoringEntry<'_> {
        self.lock().push(Arc::clone(progress));
        ScoringEntry {
            list: self,
            progress: Arc::clone(progress),
        }
    }

    /// The values of all.
    pub(super) fn counts(&self) -> Vec<ScoringCounts> {
        self.lock()
            .iter()
            .map(|progress| progress.counts())
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<ScoringProgress>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A listed request.
pub(super) struct ScoringEntry<'a> {
    list: &'a ActiveScorings,
    progress: Arc<ScoringProgress>,
}

impl Drop for ScoringEntry<'_> {
    fn drop(&mut self) {
        let mut list = self.list.lock();
        if let Some(at) = list.iter().position(|of| Arc::ptr_eq(of, &self.progress)) {
            list.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_name_the_share_and_later_texts() {
        let progress = ScoringProgress::default();
        let text = || progress.counts().to_string();
        progress.begin(8000);
        assert_eq!(text(), "waiting for the scorer");
        progress.advance(3, 8);
        assert_eq!(
            text(),
            "scoring the prompt for compression, 37 % of 8000 tokens"
        );
        progress.begin(500);
        assert_eq!(text(), "waiting for the scorer");
        progress.advance(8, 8);
        assert_eq!(
            text(),
            "scoring text 2 for compression, 100 % of 500 tokens"
        );
    }

    #[test]
    fn requests_are_listed_until_their_guard_is_dropped() {
        let (list, progress) = (ActiveScorings::default(), Arc::<ScoringProgress>::default());
        let first = list.enter(&progress);
        let second = list.enter(&Arc::default());
        progress.begin(7);
        assert_eq!(list.counts().len(), 2);
        assert_eq!(list.counts()[0].tokens, 7);
        drop(first);
        assert_eq!(list.counts(), [ScoringCounts::default()]);
        drop(second);
        assert_eq!(list.counts(), []);
    }
}
