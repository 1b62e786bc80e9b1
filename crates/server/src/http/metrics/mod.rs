//! Metrics and their Prometheus text.
//!
//! Names follow vLLM's with our prefix. Each server has its own recorder, so that several servers
//! can run in one process.

mod decode_steps;
mod pool;
mod prefix;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::http::StatusCode;
use metrics::{
    Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, SharedString, Unit,
};
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};

use crate::engine::request_stats::{RequestStage, RequestSummary};
use crate::engine::{EnginePhase, EngineStatus};
use crate::progress;
use decode_steps::DecodeStepMetrics;
use pool::PoolMetrics;
use prefix::PrefixMetrics;

static METADATA: Metadata<'static> = Metadata::new("server", Level::INFO, None);

const SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0, 600.0,
];
const TOKENS: &[f64] = &[
    1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0,
];
const RATES: &[f64] = &[
    1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0,
];

/// Steps and finished requests between two foldings of their samples.
const UPKEEP_EVERY: u64 = 4096;

const HTTP_REQUESTS: &str = "hearth_http_requests_total";
const SUCCESS: &str = "hearth_request_success_total";
const CANCELLED: &str = "hearth_request_cancelled_total";

/// All metrics of one server.
pub struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generation_tokens: Counter,
    reasoning_tokens: Counter,
    tool_calls: Counter,
    malformed_calls: Counter,
    running: Gauge,
    waiting: Gauge,
    up: Gauge,
    lost_log_lines: Counter,
    /// Steps and requests recorded.
    records: AtomicU64,
    queue_time: Histogram,
    time_to_first_token: Histogram,
    inter_token: Histogram,
    prefill_time: Histogram,
    decode_time: Histogram,
    whole_time: Histogram,
    prefill_rate: Histogram,
    decode_rate: Histogram,
    prompt_size: Histogram,
    generation_size: Histogram,
    decode_steps: DecodeStepMetrics,
    prefix: PrefixMetrics,
    pool: PoolMetrics,
}

impl Metrics {
    /// New metrics, all zero.
    pub fn new() -> Metrics {
        let buckets = [
            (Matcher::Suffix("_seconds".to_owned()), SECONDS),
            (Matcher::Suffix("_tokens".to_owned()), TOKENS),
            (Matcher::Suffix("_tokens_per_second".to_owned()), RATES),
        ];
        let mut builder = PrometheusBuilder::new();
        for (matcher, bounds) in buckets {
            builder = builder
                .set_buckets_for_metric(matcher, bounds)
                .expect("the bounds are not empty");
        }
        let recorder = builder.build_recorder();
        let handle = recorder.handle();
        let registrar = Registrar(&recorder);
        let metrics = Metrics {
            prompt_tokens: registrar.counter("hearth_prompt_tokens_total", "Finished requests had this many prompt tokens."),
            cached_tokens: registrar.counter(
                "hearth_prompt_tokens_cached_total",
                "The prefix cache restored this many prompt tokens of finished requests.",
            ),
            generation_tokens: registrar.counter(
                "hearth_generation_tokens_total",
                "Finished requests generated this many tokens, reasoning included.",
            ),
            reasoning_tokens: registrar.counter(
                "hearth_reasoning_tokens_total",
                "Finished requests generated this many tokens of reasoning.",
            ),
            tool_calls: registrar
                .counter("hearth_tool_calls_total", "Replies held this many complete tool calls."),
            malformed_calls: registrar.counter(
                "hearth_tool_calls_malformed_total",
                "This many tool calls were mended, or text only began like one.",
            ),
            running: registrar.gauge("hearth_num_requests_running", "This many requests are on the device now."),
            waiting: registrar.gauge(
                "hearth_num_requests_waiting",
                "This many requests wait for a place on the device.",
            ),
            records: AtomicU64::new(0),
            lost_log_lines: registrar.counter(
                "hearth_log_lines_lost_total",
                "This many log lines could not be written, for example to a full disk.",
            ),
            up: registrar.gauge("hearth_engine_up", "The value is 1 while the engine takes requests, else 0."),
            queue_time: registrar.histogram(
                "hearth_request_queue_time_seconds",
                "A request waited this long from its arrival to its start.",
            ),
            time_to_first_token: registrar.histogram(
                "hearth_time_to_first_token_seconds",
                "The first token came this long after the arrival of its request.",
            ),
            inter_token: registrar.histogram(
                "hearth_inter_token_latency_seconds",
                "A token came this long after the one before; tokens of one engine step share its time.",
            ),
            prefill_time: registrar.histogram(
                "hearth_request_prefill_time_seconds",
                "The first token came this long after the start of its request.",
            ),
            decode_time: registrar.histogram(
                "hearth_request_decode_time_seconds",
                "The last token came this long after the first.",
            ),
            whole_time: registrar.histogram(
                "hearth_e2e_request_latency_seconds",
                "A request took this long from its arrival to its end.",
            ),
            prefill_rate: registrar.histogram(
                "hearth_prefill_tokens_per_second",
                "A request had this many prompt tokens computed in each second of prefill.",
            ),
            decode_rate: registrar.histogram(
                "hearth_decode_tokens_per_second",
                "A request had this many tokens generated in each second of decoding.",
            ),
            prompt_size: registrar.histogram("hearth_request_prompt_tokens", "A prompt had this many tokens."),
            generation_size: registrar.histogram(
                "hearth_request_generation_tokens",
                "A request generated this many tokens.",
            ),
            decode_steps: DecodeStepMetrics::new(&recorder),
            prefix: PrefixMetrics::new(&recorder),
            pool: PoolMetrics::new(&recorder),
            recorder,
            handle,
        };
        let describe = |name: &'static str, text: &'static str| {
            metrics
                .recorder
                .describe_counter(name.into(), None, text.into());
        };
        describe(
            HTTP_REQUESTS,
            "Requests to this endpoint were answered with this status so often.",
        );
        describe(SUCCESS, "This many requests finished for this reason.");
        describe(
            CANCELLED,
            "This many clients left while their request was in this phase.",
        );
        let version = [Label::new("version", env!("CARGO_PKG_VERSION"))];
        metrics.recorder.describe_gauge(
            "hearth_build_info".into(),
            None,
            "The value is always 1; the label names the version.".into(),
        );
        metrics
            .recorder
            .register_gauge(
                &Key::from_parts("hearth_build_info", version.to_vec()),
                &METADATA,
            )
            .set(1.0);
        metrics
    }

    /// Counts an HTTP response.
    pub fn http_request(&self, route: &str, status: StatusCode) {
        let labels = vec![
            Label::new("endpoint", route.to_owned()),
            Label::new("status", status.as_str().to_owned()),
        ];
        self.count(HTTP_REQUESTS, labels);
    }

    /// Counts a cancelled request.
    pub fn cancelled(&self, stage: RequestStage) {
        self.count(CANCELLED, vec![Label::new("phase", stage.name())]);
    }

    /// Records the inter-token latency of one step of one request.
    pub fn step(&self, since_last: Duration, tokens: usize) {
        if tokens > 0 {
            self.inter_token
                .record(since_last.as_secs_f64() / tokens as f64);
            self.fold_samples();
        }
    }

    /// Folds samples into the histograms once in a while.
    ///
    /// The exporter keeps each sample until then; unread metrics would grow with every answer.
    fn fold_samples(&self) {
        let records = self.records.fetch_add(1, Ordering::Relaxed);
        if records % UPKEEP_EVERY == UPKEEP_EVERY - 1 {
            self.handle.run_upkeep();
        }
    }

    /// Records a finished request.
    pub fn finished(&self, reason: &'static str, summary: &RequestSummary) {
        self.count(SUCCESS, vec![Label::new("finished_reason", reason)]);
        self.fold_samples();
        self.prompt_tokens.increment(summary.prompt_tokens as u64);
        self.cached_tokens.increment(summary.cached_tokens as u64);
        self.generation_tokens
            .increment(summary.completion_tokens as u64);
        self.reasoning_tokens
            .increment(summary.reasoning_tokens as u64);
        self.tool_calls.increment(summary.tool_calls as u64);
        self.malformed_calls
            .increment(summary.malformed_calls as u64);
        self.queue_time.record(summary.queue);
        self.prefill_time.record(summary.prefill);
        self.time_to_first_token
            .record(summary.queue + summary.prefill);
        self.decode_time.record(summary.decode);
        self.whole_time.record(summary.total);
        self.prompt_size.record(summary.prompt_tokens as f64);
        self.generation_size
            .record(summary.completion_tokens as f64);
        let run = summary.prompt_tokens.saturating_sub(summary.cached_tokens);
        if run > 0 && !summary.prefill.is_zero() {
            self.prefill_rate
                .record(run as f64 / summary.prefill.as_secs_f64());
        }
        if summary.completion_tokens > 1 && !summary.decode.is_zero() {
            let tokens = (summary.completion_tokens - 1) as f64;
            self.decode_rate
                .record(tokens / summary.decode.as_secs_f64());
        }
    }

    /// Prometheus text with current gauges.
    pub fn render(&self, engine: &EngineStatus, waiting: usize) -> String {
        self.running.set(engine.running as f64);
        self.waiting.set(waiting as f64);
        let up = engine.phase == EnginePhase::Ready;
        self.up.set(f64::from(u8::from(up)));
        self.lost_log_lines.absolute(progress::lost_log_lines());
        self.decode_steps.set(&engine.stats);
        self.prefix.set(&engine.stats.prefix);
        self.pool.set(&engine.stats);
        self.handle.run_upkeep();
        let mut text = self.handle.render();
        text += &DecodeStepMetrics::times(&engine.stats);
        text
    }

    fn count(&self, name: &'static str, labels: Vec<Label>) {
        self.recorder
            .register_counter(&Key::from_parts(name, labels), &METADATA)
            .increment(1);
    }
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new()
    }
}

/// Registers metrics with descriptions.
struct Registrar<'a>(&'a PrometheusRecorder);

impl Registrar<'_> {
    fn counter(&self, name: &'static str, text: &'static str) -> Counter {
        let unit: Option<Unit> = None;
        self.0
            .describe_counter(name.into(), unit, SharedString::const_str(text));
        self.0
            .register_counter(&Key::from_static_name(name), &METADATA)
    }

    fn gauge(&self, name: &'static str, text: &'static str) -> Gauge {
        self.0
            .describe_gauge(name.into(), None, SharedString::const_str(text));
        self.0
            .register_gauge(&Key::from_static_name(name), &METADATA)
    }

    fn histogram(&self, name: &'static str, text: &'static str) -> Histogram {
        self.0
            .describe_histogram(name.into(), None, SharedString::const_str(text));
        self.0
            .register_histogram(&Key::from_static_name(name), &METADATA)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_folded_while_nobody_reads_the_metrics() {
        let metrics = Metrics::new();
        // The exporter shows only in its debug text what it has folded without rendering.
        let folded = format!("Histogram {{ count: {UPKEEP_EVERY},");
        let has_folded = || format!("{:?}", metrics.handle).contains(&folded);
        for _ in 1..UPKEEP_EVERY {
            metrics.step(Duration::from_millis(1), 1);
        }
        assert!(!has_folded());
        metrics.step(Duration::from_millis(1), 1);
        assert!(has_folded(), "{:?}", metrics.handle);
    }
}
