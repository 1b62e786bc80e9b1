//! Active requests, for `/slots` and the status pages: counts and times, never text.
//!
//! Each request updates its own atomics without waiting; the list is locked only to add or remove
//! an entry.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use decode::Job;
use serde_json::Value;

use crate::engine::request_stats::{RequestStage, RequestStats};
use crate::text::sampling_params;

/// All active requests of one server.
#[derive(Debug, Default)]
pub struct ActiveRequests {
    entries: Mutex<Vec<Arc<RequestEntry>>>,
    last_id: AtomicU64,
}

/// One active request as the status pages show it.
#[derive(Debug)]
pub struct RequestEntry {
    /// Serial number since the server's start.
    pub id: u64,
    /// Higher priority runs first.
    pub priority: i32,
    /// Session id that the client sent.
    pub session: Option<Arc<str>>,
    /// Number of choices.
    pub choices: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Maximum tokens of each choice.
    pub max_tokens: usize,
    /// Sampling parameters in llama-server's names.
    pub settings: Value,
    since: Instant,
    stage: AtomicUsize,
    cached: AtomicUsize,
    prefilled: AtomicUsize,
    generated: AtomicUsize,
}

const STAGES: [RequestStage; 3] = [
    RequestStage::Queue,
    RequestStage::Prefill,
    RequestStage::Decode,
];

impl RequestEntry {
    /// Stage of the request.
    pub fn stage(&self) -> RequestStage {
        STAGES[self.stage.load(Ordering::Relaxed).min(2)]
    }

    /// Prompt tokens restored from the prefix cache.
    pub fn cached_tokens(&self) -> usize {
        self.cached.load(Ordering::Relaxed)
    }

    /// Prompt tokens in the KV cache so far, restored ones included.
    pub fn prefilled_tokens(&self) -> usize {
        self.prefilled.load(Ordering::Relaxed)
    }

    /// Tokens generated in all choices.
    pub fn generated_tokens(&self) -> usize {
        self.generated.load(Ordering::Relaxed)
    }

    /// Seconds since arrival.
    pub fn age_s(&self) -> f64 {
        self.since.elapsed().as_secs_f64()
    }
}

impl ActiveRequests {
    /// Registers a request; dropping the guard removes it.
    pub fn register(self: &Arc<ActiveRequests>, job: &Job) -> EntryGuard {
        let entry = Arc::new(RequestEntry {
            id: self.last_id.fetch_add(1, Ordering::Relaxed) + 1,
            priority: job.priority,
            session: job.params.session.clone(),
            choices: job.choices,
            prompt_tokens: job.prompt.len(),
            max_tokens: job.params.max_tokens,
            settings: sampling_params::shown(&job.params),
            since: Instant::now(),
            stage: AtomicUsize::new(0),
            cached: AtomicUsize::new(0),
            prefilled: AtomicUsize::new(0),
            generated: AtomicUsize::new(0),
        });
        self.lock().push(Arc::clone(&entry));
        EntryGuard {
            requests: Arc::clone(self),
            entry,
        }
    }

    /// All active requests in arrival order.
    pub fn entries(&self) -> Vec<Arc<RequestEntry>> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<RequestEntry>>> {
        // No code panics while it is locked.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Guard of an entry: removes it on drop.
#[derive(Debug)]
pub struct EntryGuard {
    requests: Arc<ActiveRequests>,
    entry: Arc<RequestEntry>,
}

impl EntryGuard {
    /// Updates the entry from the request's statistics.
    pub fn update(&self, stats: &RequestStats) {
        let stage = STAGES.iter().position(|stage| *stage == stats.stage());
        let entry = &self.entry;
        entry.stage.store(stage.unwrap_or(0), Ordering::Relaxed);
        entry.cached.store(stats.cached_tokens, Ordering::Relaxed);
        let prefilled = stats.prefilled_tokens;
        entry.prefilled.store(prefilled, Ordering::Relaxed);
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
