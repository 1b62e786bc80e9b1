//! Metrics of decode steps and speculation, from the scheduler's counters.

use decode::{AcceptanceByDepth, DraftSource, Stats};
use metrics::{Counter, Key, Label, Recorder};
use metrics_exporter_prometheus::PrometheusRecorder;

use super::{METADATA, Registrar};

const DEPTHS: &str = "hearth_draft_tokens_accepted_by_depth_total";
const DRAFTED_BY: &str = "hearth_draft_tokens_by_source_total";
const ACCEPTED_BY: &str = "hearth_draft_tokens_accepted_by_source_total";
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
    /// Per source: drafted and accepted tokens.
    by_source: [(Counter, Counter); DraftSource::ALL.len()],
}

impl DecodeStepMetrics {
    pub(super) fn new(recorder: &PrometheusRecorder) -> DecodeStepMetrics {
        let registrar = Registrar(recorder);
        recorder.describe_counter(
            DEPTHS.into(),
            None,
            "Single sequences accepted at least `depth` drafted tokens in this many decode steps; the last depth includes deeper ones.".into(),
        );
        recorder.describe_counter(
            DRAFTED_BY.into(),
            None,
            "The source (block, mtp or suffix) drafted this many verified tokens; a token of several counts for each.".into(),
        );
        recorder.describe_counter(
            ACCEPTED_BY.into(),
            None,
            "The source drafted this many accepted tokens; a token of several counts for each."
                .into(),
        );
        let labelled = |name: &'static str, label: &'static str, value: String| {
            Key::from_parts(name, vec![Label::new(label, value)])
        };
        let depth = |i: usize| labelled(DEPTHS, "depth", (i + 1).to_string());
        let by = |name, source: DraftSource| {
            let key = labelled(name, "source", source.name().to_owned());
            recorder.register_counter(&key, &METADATA)
        };
        DecodeStepMetrics {
            steps: registrar.counter("hearth_decode_steps_total", "The batch took this many decode steps, with one verify pass each."),
            batch_size_sum: registrar.counter(
                "hearth_decode_sequence_steps_total",
                "Sequences took this many decode steps in sum; generated tokens divided by this are tokens per step.",
            ),
            drafted_steps: registrar.counter(
                "hearth_drafted_steps_total",
                "Single sequences verified drafted tokens in this many decode steps.",
            ),
            drafted: registrar.counter("hearth_draft_tokens_total", "This many drafted tokens were verified."),
            accepted: registrar.counter(
                "hearth_draft_tokens_accepted_total",
                "This many drafted tokens were accepted.",
            ),
            forced: registrar.counter("hearth_forced_tokens_total", "A grammar or the reasoning budget forced this many tokens."),
            undrafted: registrar.counter(
                "hearth_undrafted_steps_total",
                "This many decode steps had no drafts because the draft model ran out of memory.",
            ),
            depths: std::array::from_fn(|i| recorder.register_counter(&depth(i), &METADATA)),
            by_source: DraftSource::ALL
                .map(|source| (by(DRAFTED_BY, source), by(ACCEPTED_BY, source))),
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
        for (source, (drafted, accepted)) in DraftSource::ALL.into_iter().zip(&self.by_source) {
            drafted.absolute(stats.by_source.drafted(source));
            accepted.absolute(stats.by_source.accepted(source));
        }
    }

    /// Prometheus text of the seconds of all decode steps, by part of a step.
    ///
    /// A summary without quantiles: the scheduler keeps sums, and the exporter's counters hold
    /// whole numbers only.
    pub(super) fn times(stats: &Stats) -> String {
        let help = "Decode steps took this long, by part: draft, verify or commit.";
        let mut text = format!("# HELP {TIME} {help}\n# TYPE {TIME} summary\n");
        let (times, steps) = (stats.times, stats.decode_steps);
        let parts = [
            ("draft", times.draft),
            ("verify", times.verify),
            ("commit", times.commit),
        ];
        for (part, time) in parts {
            let seconds = time.as_secs_f64();
            text += &format!("{TIME}_sum{{part=\"{part}\"}} {seconds}\n");
            text += &format!("{TIME}_count{{part=\"{part}\"}} {steps}\n");
        }
        text
    }
}
