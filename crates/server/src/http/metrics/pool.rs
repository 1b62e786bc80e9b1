//! Metrics of the shared KV page pool, from the scheduler's counters.

use decode::Stats;
use metrics::{Counter, Gauge};
use metrics_exporter_prometheus::PrometheusRecorder;

use super::Registrar;

/// Use of the page pool.
pub(super) struct PoolMetrics {
    tokens: Gauge,
    used: Gauge,
    evictable: Gauge,
    waiting: Gauge,
    preempted: Gauge,
    preemptions: Counter,
}

impl PoolMetrics {
    pub(super) fn new(recorder: &PrometheusRecorder) -> PoolMetrics {
        let registrar = Registrar(recorder);
        PoolMetrics {
            tokens: registrar.gauge("hearth_kv_pool_tokens", "The KV pool holds at most this many tokens."),
            used: registrar.gauge(
                "hearth_kv_pool_used_tokens",
                "Sequences hold KV pages for this many tokens.",
            ),
            evictable: registrar.gauge(
                "hearth_kv_pool_evictable_tokens",
                "Only cached prefixes hold KV pages for this many tokens, which are evicted on demand.",
            ),
            waiting: registrar.gauge(
                "hearth_kv_pool_requests_waiting",
                "This many requests are queued while the first of them waits for KV pages.",
            ),
            preempted: registrar.gauge(
                "hearth_kv_pool_preempted",
                "This many prompts and replies are preempted now and resume later.",
            ),
            preemptions: registrar
                .counter("hearth_preemptions_total", "Prompts and replies were preempted this many times."),
        }
    }

    /// Updates the metrics.
    pub(super) fn set(&self, stats: &Stats) {
        self.tokens.set(stats.pool_tokens as f64);
        self.used
            .set((stats.pool_tokens - stats.free_tokens) as f64);
        self.evictable.set(stats.evictable_tokens as f64);
        let waiting = if stats.blocked_on_pool {
            stats.queued
        } else {
            0
        };
        self.waiting.set(waiting as f64);
        self.preempted.set(stats.preempted as f64);
        self.preemptions.absolute(stats.preemptions);
    }
}
