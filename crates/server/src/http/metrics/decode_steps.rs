//! Metrics of decode steps and speculation, from the scheduler's counters.

use decode::{AcceptanceByDepth, Stats};
use metrics::{Counter, Gauge, Key, Label, Recorder};
use metrics_exporter_prometheus::PrometheusRecorder;

use super::{METADATA, Registrar};

const DEPTHS: &str = "hearth_draft_kept_depth_total";
const TIME: &str = "hearth_round_seconds";

/// Decode step counters since the start.
pub(super) struct DecodeStepMetrics {
    steps: Counter,
    batched: Counter,
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
            "Drafted steps that kept at least so many drafted tokens; the last depth counts all deeper ones.".into(),
        );
        recorder.describe_gauge(
            TIME.into(),
            None,
            "Seconds that rounds took since the start, by part.".into(),
        );
        let labelled = |name: &'static str, label: &'static str, value: String| {
            Key::from_parts(name, vec![Label::new(label, value)])
        };
        let depth = |i: usize| labelled(DEPTHS, "depth", (i + 1).to_string());
        let part = |name: &str| labelled(TIME, "part", name.to_owned());
        DecodeStepMetrics {
            steps: registrar.counter("hearth_decode_rounds_total", "Verify passes."),
            batched: registrar.counter(
                "hearth_decode_steps_total",
                "Verify passes of single sequences: generated tokens by steps are tokens per step.",
            ),
            drafted_steps: registrar.counter(
                "hearth_drafted_steps_total",
                "Of these, passes that carried drafted tokens.",
            ),
            drafted: registrar.counter("hearth_draft_tokens_total", "Tokens drafted."),
            accepted: registrar.counter(
                "hearth_draft_tokens_accepted_total",
                "Drafted tokens that were kept.",
            ),
            forced: registrar.counter("hearth_forced_tokens_total", "Tokens forced upon answers."),
            undrafted: registrar.counter(
                "hearth_undrafted_rounds_total",
                "Rounds that decoded plainly because there was no room to draft.",
            ),
            depths: std::array::from_fn(|i| recorder.register_counter(&depth(i), &METADATA)),
            times: ["draft", "verify", "commit"]
                .map(|name| recorder.register_gauge(&part(name), &METADATA)),
        }
    }

    /// Updates the metrics.
    pub(super) fn set(&self, stats: &Stats) {
        self.steps.absolute(stats.decode_steps);
        self.batched.absolute(stats.batched);
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
