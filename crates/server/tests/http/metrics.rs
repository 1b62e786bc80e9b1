//! The metrics page, by the rules of `promtool check metrics` and some of its own.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use crate::test_server::ServerSetup;

/// A family of metrics as the page shows it.
#[derive(Debug, Default)]
struct Family {
    help: String,
    kind: String,
    /// Names and labels of its samples, with their values.
    samples: Vec<(String, String, f64)>,
}

/// Families by name; each is described once and before its samples.
fn families(page: &str) -> BTreeMap<String, Family> {
    let mut all: BTreeMap<String, Family> = BTreeMap::new();
    for line in page.lines().filter(|line| !line.is_empty()) {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "HELP", name, help] => {
                let family = all.entry(name.to_owned()).or_default();
                assert!(family.help.is_empty(), "{name} is described twice");
                family.help = help.to_owned();
            }
            ["#", "TYPE", name, kind] => {
                let family = all.entry(name.to_owned()).or_default();
                assert!(
                    family.kind.is_empty() && family.samples.is_empty(),
                    "{line}"
                );
                family.kind = kind.to_owned();
            }
            _ => {
                let (series, value) = line.rsplit_once(' ').unwrap();
                let (name, labels) = series.split_once('{').unwrap_or((series, ""));
                let of = ["_bucket", "_sum", "_count"]
                    .iter()
                    .filter_map(|suffix| name.strip_suffix(suffix))
                    .find(|of| all.contains_key(*of));
                let family = all.get_mut(of.unwrap_or(name));
                let family = family.unwrap_or_else(|| panic!("{line} is not described"));
                let sample = (name.to_owned(), labels.to_owned(), value.parse().unwrap());
                family.samples.push(sample);
            }
        }
    }
    all
}

async fn page() -> BTreeMap<String, Family> {
    let server = ServerSetup::saying("ok").open().await;
    server.chat(json!({})).await.json().await;
    let gone = server.chat(json!({"stream": true, "max_tokens": 400, "ignore_eos": true}));
    drop(gone.await);
    server
        .eventually("a closed sequence", |watch| watch.open_now() == 0)
        .await;
    families(&server.get("/metrics").await.text().await)
}

/// Words that make a sentence of a help text.
const VERBS: [&str; 15] = [
    "is", "are", "was", "were", "has", "had", "hold", "holds", "held", "could", "took", "came",
    "began", "wait", "left",
];

#[tokio::test]
async fn help_texts_are_sentences_of_their_own() {
    let all = page().await;
    assert!(all.len() > 40, "{}", all.len());
    let mut seen = BTreeSet::new();
    for (name, family) in &all {
        let help = &family.help;
        assert!(
            help.starts_with(|c: char| c.is_ascii_uppercase()),
            "{name}: {help}"
        );
        assert!(
            help.ends_with('.') && !help.ends_with(".."),
            "{name}: {help}"
        );
        assert!(!help.contains(name.as_str()), "{name}: {help}");
        let words: Vec<&str> = help.split([' ', ',', ';', '.', ':']).collect();
        assert!(words.len() > 4, "{name}: {help}");
        let verbs = words
            .iter()
            .filter(|word| VERBS.contains(word) || word.ends_with("ed"));
        assert!(verbs.count() > 0, "{name}: no verb in {help:?}");
        assert!(
            seen.insert(help),
            "{name}: {help:?} describes another metric too"
        );
    }
}

#[tokio::test]
async fn metric_types_fit_names_and_samples() {
    /// Words of types, and units that are not base units.
    const NOT_IN_NAMES: [&str; 17] = [
        "counter",
        "gauge",
        "histogram",
        "summary",
        "ms",
        "us",
        "ns",
        "s",
        "sec",
        "secs",
        "milliseconds",
        "microseconds",
        "minutes",
        "kb",
        "mb",
        "gb",
        "percent",
    ];
    for (name, family) in page().await {
        let rest = name
            .strip_prefix("hearth_")
            .unwrap_or_else(|| panic!("{name}"));
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        assert!(rest.chars().all(is_plain), "{name}");
        let wrong = rest.split('_').find(|part| NOT_IN_NAMES.contains(part));
        assert_eq!(wrong, None, "{name}");
        assert_eq!(
            family.kind == "counter",
            name.ends_with("_total"),
            "{name} {}",
            family.kind
        );
        let reserved = ["_count", "_sum", "_bucket"];
        assert!(
            reserved.iter().all(|suffix| !name.ends_with(suffix)),
            "{name}"
        );
        assert!(!family.samples.is_empty(), "{name} has no samples");
        let has = |suffix: &str| {
            let full = format!("{name}{suffix}");
            family.samples.iter().any(|(sample, ..)| *sample == full)
        };
        match family.kind.as_str() {
            "counter" | "gauge" => {
                assert!(
                    family.samples.iter().all(|(sample, ..)| *sample == name),
                    "{name}"
                );
                let labels = |label: &str| family.samples.iter().any(|(_, l, _)| l.contains(label));
                assert!(!labels("le=") && !labels("quantile="), "{name}");
            }
            "histogram" => {
                assert!(has("_bucket") && has("_sum") && has("_count"), "{name}");
                let value = |suffix: &str, label: &str| {
                    let full = format!("{name}{suffix}");
                    let mut found = family.samples.iter();
                    found
                        .find(|(sample, labels, _)| *sample == full && labels.contains(label))
                        .map(|(.., value)| *value)
                };
                assert_eq!(
                    value("_bucket", "le=\"+Inf\""),
                    value("_count", ""),
                    "{name}"
                );
            }
            "summary" => assert!(has("_sum") && has("_count") && !has("_bucket"), "{name}"),
            other => panic!("{name}: {other:?}"),
        }
        let by_series: BTreeSet<(&String, &String)> = family
            .samples
            .iter()
            .map(|(sample, labels, _)| (sample, labels))
            .collect();
        assert_eq!(
            by_series.len(),
            family.samples.len(),
            "{name} repeats a series"
        );
    }
}

#[tokio::test]
async fn decode_time_is_a_summary_by_part() {
    let all = page().await;
    let family = &all["hearth_decode_step_seconds"];
    assert_eq!(family.kind, "summary");
    let steps = all["hearth_decode_steps_total"].samples[0].2;
    assert!(steps > 0.0);
    for part in ["draft", "verify", "commit"] {
        let label = format!("part=\"{part}\"}}");
        let of = |suffix: &str| {
            let full = format!("hearth_decode_step_seconds{suffix}");
            let mut samples = family.samples.iter();
            samples
                .find(|(name, labels, _)| *name == full && *labels == label)
                .unwrap()
                .2
        };
        assert_eq!(of("_count"), steps, "{part}");
        assert!(of("_sum") >= 0.0, "{part}");
    }
}

/// The names of our metrics in a text.
fn names_in(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_lowercase() && !c.is_ascii_digit() && c != '_');
    words.filter(|word| word.starts_with("hearth_")).collect()
}

#[tokio::test]
async fn dashboard_and_alerts_name_metrics_that_exist() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("service");
    let dashboard = std::fs::read_to_string(folder.join("grafana.json")).unwrap();
    let alerts = std::fs::read_to_string(folder.join("alerts.yml")).unwrap();
    let all = page().await;
    for (file, text, at_least) in [("grafana.json", &dashboard, 30), ("alerts.yml", &alerts, 6)] {
        let names = names_in(text);
        assert!(names.len() >= at_least, "{file}: {names:?}");
        for name in names {
            let exists = all.contains_key(name)
                || all.iter().any(|(family, found)| {
                    let suffix = name.strip_prefix(family.as_str()).unwrap_or_default();
                    matches!(
                        (found.kind.as_str(), suffix),
                        ("histogram", "_bucket") | ("histogram" | "summary", "_sum" | "_count")
                    )
                });
            assert!(exists, "{file}: no metric {name}");
        }
    }
    let dashboard: serde_json::Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels
        .iter()
        .map(|panel| panel["id"].as_u64().unwrap())
        .collect();
    assert_eq!(ids.len(), panels.len());
    for panel in panels {
        for target in panel["targets"].as_array().unwrap() {
            let query = target["expr"].as_str().unwrap();
            let open = query.matches('(').count();
            assert_eq!(open, query.matches(')').count(), "{query}");
            assert!(!names_in(query).is_empty(), "{query}");
        }
    }
}
