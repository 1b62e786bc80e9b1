//! Metrics of the shared KV page pool, from the scheduler's counters.

use decode::Stats;
use metrics::{Counter, Gauge};
use metrics_exporter_prometheus::PrometheusRecorder;

use super::Registrar;

/// Use of the page pool.
pub(super) struct PoolMetrics {
    tokens: Gauge,
    used: Gauge,
    kept: Gauge,
    waiting: Gauge,
    preempted: Gauge,
    preemptions: Counter,
}

impl PoolMetrics {
    pub(super) fn new(recorder: &PrometheusRecorder) -> PoolMetrics {
        let registrar = Registrar(recorder);
        PoolMetrics {
            tokens: registrar.gauge("hearth_kv_pool_tokens", "Tokens that sequences share."),
            used: registrar.gauge(
                "hearth_kv_pool_used_tokens",
                "Tokens of pages that sequences hold.",
            ),
            kept: registrar.gauge(
                "hearth_kv_pool_kept_tokens",
                "Tokens of pages that saved states hold and sequences can have.",
            ),
            waiting: registrar.gauge(
                "hearth_kv_pool_requests_waiting",
                "Requests in the queue while the next of them waits for pages.",
            ),
            preempted: registrar.gauge(
                "hearth_kv_pool_parked",
                "Prompts and replies that gave their place up to others and wait to go on.",
            ),
            preemptions: registrar.counter(
                "hearth_kv_pool_parked_total",
                "Times one did, because another could not grow.",
            ),
        }
    }

    /// Updates the metrics.
    pub(super) fn set(&self, stats: &Stats) {
        self.tokens.set(stats.pool_tokens as f64);
        self.used
            .set((stats.pool_tokens - stats.free_tokens) as f64);
        self.kept.set(stats.evictable_tokens as f64);
        let waiting = if stats.pool_waits { stats.queued } else { 0 };
        self.waiting.set(waiting as f64);
        self.preempted.set(stats.preempted as f64);
        self.preemptions.absolute(stats.preemptions);
    }
}
