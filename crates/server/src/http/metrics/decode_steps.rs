//! Metrics of decode steps and speculation, from the scheduler's counters.

use decode::{AcceptanceByDepth, Stats};
use metrics::{Counter, Gauge, Key, Label, Recorder};
use metrics_exporter_prometheus::PrometheusRecorder;

use super::{METADATA, Registrar};

const DEPTHS: &str = "hearth_draft_tokens_accepted_by_depth_total";
const TIME: &str = "hearth_decode_step_seconds";

/// Decode step counters since the start.
pub(super) struct DecodeStepMetrics {
    steps: Counter,
    batch_size_sum: Counter,
    drafted_steps: Counter,
    drafted: Counter,
    accepted: Counter,
    forced: Counter,
    undrafted: Counter,
    /// Per depth: drafted steps that accepted at least that many tokens.
    depths: [Counter; AcceptanceByDepth::COUNTED],
    /// Draft, verify, commit.
    times: [Gauge; 3],
}

impl DecodeStepMetrics {
    pub(super) fn new(recorder: &PrometheusRecorder) -> DecodeStepMetrics {
        let registrar = Registrar(recorder);
        recorder.describe_counter(
            DEPTHS.into(),
            None,
            "Decode steps of single sequences that accepted at least `depth` drafted tokens. The last depth includes deeper ones.".into(),
        );
        recorder.describe_gauge(
            TIME.into(),
            None,
            "Seconds of all decode steps since the start, by part: draft, verify or commit.".into(),
        );
        let labelled = |name: &'static str, label: &'static str, value: String| {
            Key::from_parts(name, vec![Label::new(label, value)])
        };
        let depth = |i: usize| labelled(DEPTHS, "depth", (i + 1).to_string());
        let part = |name: &str| labelled(TIME, "part", name.to_owned());
        DecodeStepMetrics {
            steps: registrar.counter("hearth_decode_steps_total", "Decode steps of the batch: one verify pass each."),
            batch_size_sum: registrar.counter(
                "hearth_decode_sequence_steps_total",
                "Decode steps summed over sequences. Generated tokens divided by this are tokens per step.",
            ),
            drafted_steps: registrar.counter(
                "hearth_drafted_steps_total",
                "Decode steps of single sequences that verified drafted tokens.",
            ),
            drafted: registrar.counter("hearth_draft_tokens_total", "Drafted tokens that were verified."),
            accepted: registrar.counter(
                "hearth_draft_tokens_accepted_total",
                "Drafted tokens that were accepted.",
            ),
            forced: registrar.counter("hearth_forced_tokens_total", "Tokens that a grammar or the reasoning budget forced."),
            undrafted: registrar.counter(
                "hearth_undrafted_steps_total",
                "Decode steps without drafts because the draft model ran out of memory.",
            ),
            depths: std::array::from_fn(|i| recorder.register_counter(&depth(i), &METADATA)),
            times: ["draft", "verify", "commit"]
                .map(|name| recorder.register_gauge(&part(name), &METADATA)),
        }
    }

    /// Updates the metrics.
    pub(super) fn set(&self, stats: &Stats) {
        self.steps.absolute(stats.decode_steps);
        self.batch_size_sum.absolute(stats.batch_size_sum);
        self.drafted_steps.absolute(stats.drafted_steps);
        self.drafted.absolute(stats.drafted_tokens);
        self.accepted.absolute(stats.accepted_tokens);
        self.forced.absolute(stats.forced_tokens);
        self.undrafted.absolute(stats.undrafted_steps);
        for (counter, kept) in self.depths.iter().zip(stats.accepted_by_depth) {
            counter.absolute(kept);
        }
        let times = stats.times;
        let times = [times.draft, times.verify, times.commit];
        for (gauge, time) in self.times.iter().zip(times) {
            gauge.set(time.as_secs_f64());
        }
    }
}
