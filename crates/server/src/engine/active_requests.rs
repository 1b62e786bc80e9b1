//! Who is being served now, for `/slots` and the status pages: counts and times, never text.
//!
//! Each request writes its own entry and nobody waits: numbers are atomics, and the list is locked only for as
//! long as it takes to put an entry in or out.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::engine::handle::Order;
use crate::engine::request_stats::RequestStats;
use crate::http::metrics::RequestStage;

/// All requests of one server.
#[derive(Debug, Default)]
pub struct ActiveRequests {
    entries: Mutex<Vec<Arc<RequestEntry>>>,
    last_id: AtomicU64,
}

/// One request as it is shown.
#[derive(Debug)]
pub struct RequestEntry {
    /// Counted from the server's start.
    pub id: u64,
    /// Higher goes first in the queue.
    pub priority: i32,
    /// The conversation it says it belongs to.
    pub session: Option<Arc<str>>,
    /// Replies wanted.
    pub choices: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// The most tokens of each reply.
    pub max_tokens: usize,
    since: Instant,
    stage: AtomicUsize,
    cached: AtomicUsize,
    generated: AtomicUsize,
}

const STAGES: [RequestStage; 3] = [
    RequestStage::Queue,
    RequestStage::Prefill,
    RequestStage::Decode,
];

impl RequestEntry {
    /// How far it has come.
    pub fn stage(&self) -> RequestStage {
        STAGES[self.stage.load(Ordering::Relaxed).min(2)]
    }

    /// Tokens of the prompt that a saved state held.
    pub fn cached_tokens(&self) -> usize {
        self.cached.load(Ordering::Relaxed)
    }

    /// Tokens generated, by all choices.
    pub fn generated_tokens(&self) -> usize {
        self.generated.load(Ordering::Relaxed)
    }

    /// Seconds since it came.
    pub fn age_s(&self) -> f64 {
        self.since.elapsed().as_secs_f64()
    }
}

impl ActiveRequests {
    /// Puts a request on; it is taken off when the place is dropped.
    pub fn register(self: &Arc<ActiveRequests>, order: &Order) -> EntryGuard {
        let entry = Arc::new(RequestEntry {
            id: self.last_id.fetch_add(1, Ordering::Relaxed) + 1,
            priority: order.priority,
            session: order.settings.session.clone(),
            choices: order.choices,
            prompt_tokens: order.prompt.len(),
            max_tokens: order.settings.max_tokens,
            since: Instant::now(),
            stage: AtomicUsize::new(0),
            cached: AtomicUsize::new(0),
            generated: AtomicUsize::new(0),
        });
        self.lock().push(Arc::clone(&entry));
        EntryGuard {
            requests: Arc::clone(self),
            entry,
        }
    }

    /// Everyone on it, in the order they came.
    pub fn entries(&self) -> Vec<Arc<RequestEntry>> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<RequestEntry>>> {
        // Nothing can panic while it is held, and a list is never half changed.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request's place on the board.
#[derive(Debug)]
pub struct EntryGuard {
    requests: Arc<ActiveRequests>,
    entry: Arc<RequestEntry>,
}

impl EntryGuard {
    /// Shows how far the request has come.
    pub fn update(&self, stats: &RequestStats) {
        let stage = STAGES.iter().position(|stage| *stage == stats.stage());
        let entry = &self.entry;
        entry.stage.store(stage.unwrap_or(0), Ordering::Relaxed);
        entry.cached.store(stats.cached_tokens, Ordering::Relaxed);
        let generated = stats.completion_tokens;
        entry.generated.store(generated, Ordering::Relaxed);
    }
}

impl Drop for EntryGuard {
    fn drop(&mut self) {
        self.requests
            .lock()
            .retain(|entry| entry.id != self.entry.id);
    }
}
