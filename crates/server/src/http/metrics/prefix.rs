//! Metrics of the prefix cache, from the scheduler's counters.

use decode::PrefixStats;
use metrics::{Counter, Gauge};
use metrics_exporter_prometheus::PrometheusRecorder;

use super::Registrar;

/// Contents and use of the prefix cache.
pub(super) struct PrefixMetrics {
    snapshots: Gauge,
    bytes: Gauge,
    lookups: Counter,
    hits: Counter,
    store_hits: Counter,
    saved: Counter,
    evicted: Counter,
    stored: Counter,
    failed: Counter,
    warmup_tokens: Counter,
    warmup_saved: Counter,
    warmup_hits: Counter,
}

impl PrefixMetrics {
    pub(super) fn new(recorder: &PrometheusRecorder) -> PrefixMetrics {
        let registrar = Registrar(recorder);
        PrefixMetrics {
            snapshots: registrar.gauge(
                "hearth_prefix_cache_snapshots",
                "The prefix cache holds this many states of prompts in memory.",
            ),
            bytes: registrar.gauge(
                "hearth_prefix_cache_bytes",
                "All snapshots hold this many bytes; bytes that several share are counted once.",
            ),
            lookups: registrar.counter("hearth_prefix_lookups_total", "This many prompts were looked up in the prefix cache."),
            hits: registrar.counter(
                "hearth_prefix_hits_total",
                "This many prompts began with a saved state.",
            ),
            store_hits: registrar.counter(
                "hearth_prefix_store_hits_total",
                "This many states were read from disk for a prompt.",
            ),
            saved: registrar.counter("hearth_prefix_saved_total", "The prefix cache saved this many states."),
            evicted: registrar.counter(
                "hearth_prefix_evicted_total",
                "This many states were evicted for want of memory.",
            ),
            stored: registrar.counter("hearth_prefix_stored_total", "This many states were handed to the disk."),
            failed: registrar.counter(
                "hearth_prefix_failed_total",
                "This many states could not be saved, restored or read.",
            ),
            warmup_tokens: registrar.counter(
                "hearth_prefix_warmup_tokens_total",
                "This many tokens were prefilled while idle, because a conversation's next prompt begins with them.",
            ),
            warmup_saved: registrar.counter(
                "hearth_prefix_warmup_saved_total",
                "Prefix warm-up saved this many states.",
            ),
            warmup_hits: registrar.counter(
                "hearth_prefix_warmup_hits_total",
                "This many prompts began with a state that prefix warm-up saved.",
            ),
        }
    }

    /// Updates the metrics.
    pub(super) fn set(&self, stats: &PrefixStats) {
        self.snapshots.set(stats.entries as f64);
        self.bytes.set(stats.bytes as f64);
        self.lookups.absolute(stats.lookups);
        self.hits.absolute(stats.hits);
        self.store_hits.absolute(stats.store_hits);
        self.saved.absolute(stats.saved);
        self.evicted.absolute(stats.evicted);
        self.stored.absolute(stats.stored);
        self.failed.absolute(stats.failed);
        self.warmup_tokens.absolute(stats.warmup_tokens);
        self.warmup_saved.absolute(stats.warmup_saved);
        self.warmup_hits.absolute(stats.warmup_hits);
    }
}
