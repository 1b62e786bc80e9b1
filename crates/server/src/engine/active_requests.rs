//! Who is being served now, for `/slots` and the status pages: counts and times, never text.
//!
//! Each request writes its own entry and nobody waits: numbers are atomics, and the list is locked only for as
//! long as it takes to put an entry in or out.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::engine::handle::Order;
use crate::engine::usage::Meter;
use crate::http::metrics::Stage;

/// All requests of one server.
#[derive(Debug, Default)]
pub struct Board {
    entries: Mutex<Vec<Arc<Entry>>>,
    last_id: AtomicU64,
}

/// One request as it is shown.
#[derive(Debug)]
pub struct Entry {
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

const STAGES: [Stage; 3] = [Stage::Queue, Stage::Prefill, Stage::Decode];

impl Entry {
    /// How far it has come.
    pub fn stage(&self) -> Stage {
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

impl Board {
    /// Puts a request on; it is taken off when the place is dropped.
    pub fn enter(self: &Arc<Board>, order: &Order) -> Place {
        let entry = Arc::new(Entry {
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
        Place {
            board: Arc::clone(self),
            entry,
        }
    }

    /// Everyone on it, in the order they came.
    pub fn entries(&self) -> Vec<Arc<Entry>> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Entry>>> {
        // Nothing can panic while it is held, and a list is never half changed.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request's place on the board.
#[derive(Debug)]
pub struct Place {
    board: Arc<Board>,
    entry: Arc<Entry>,
}

impl Place {
    /// Shows how far the request has come.
    pub fn show(&self, meter: &Meter) {
        let stage = STAGES.iter().position(|stage| *stage == meter.stage());
        let entry = &self.entry;
        entry.stage.store(stage.unwrap_or(0), Ordering::Relaxed);
        entry.cached.store(meter.cached_tokens, Ordering::Relaxed);
        let generated = meter.completion_tokens;
        entry.generated.store(generated, Ordering::Relaxed);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.board.lock().retain(|entry| entry.id != self.entry.id);
    }
}
