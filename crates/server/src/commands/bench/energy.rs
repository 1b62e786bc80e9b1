//! `hearth bench energy`: speed and tokens per joule of each case over the power limits under which
//! `hearth bench --json` has run.
//!
//! The limit is the one in force during the run, as the GPU reports it. Nothing here changes it.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use serde_json::Value;

use super::plot::{self, Curve, Panel, round_up};
use crate::cli::EnergyArgs;

/// The runs of a case under one power limit.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Point {
    limit_watts: f64,
    tokens_per_s: f64,
    joules_per_token: f64,
}

impl Point {
    fn tokens_per_joule(&self) -> f64 {
        1.0 / self.joules_per_token
    }
}

/// Cases by name, each with its points by rising power limit.
type Cases = BTreeMap<String, Vec<Point>>;

pub(super) fn energy(args: &EnergyArgs) -> anyhow::Result<()> {
    let mut text = String::new();
    for path in &args.files {
        let read = std::fs::read_to_string(path);
        text += &read.with_context(|| path.display().to_string())?;
        text.push('\n');
    }
    let cases = cases(&text, &args.cases)?;
    if cases.is_empty() {
        bail!(
            "no line has a power limit and an energy per token: write them with `hearth bench \
             --json FILE` on a GPU that reports both"
        );
    }
    std::io::stdout().write_all(table(&cases).as_bytes())?;
    if let Some(path) = &args.svg {
        write_plot(path, &cases)?;
    }
    Ok(())
}

/// The cases of JSON lines whose names begin with one of `wanted`. Of several lines of a case under
/// one limit, the last counts.
fn cases(text: &str, wanted: &[String]) -> anyhow::Result<Cases> {
    let mut cases: BTreeMap<String, BTreeMap<u64, Point>> = BTreeMap::new();
    let lines = text.lines().enumerate();
    for (i, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
        let line: Value =
            serde_json::from_str(line).with_context(|| format!("line {}: not JSON", i + 1))?;
        let number = |field: &str| line[field].as_f64().filter(|number| *number > 0.0);
        let case = line["case"].as_str().unwrap_or_default();
        let is_wanted = wanted.is_empty() || wanted.iter().any(|name| case.starts_with(name));
        let (Some(limit_watts), Some(tokens_per_s), Some(joules_per_token)) = (
            number("power_limit_w"),
            number("tokens_per_s"),
            number("joules_per_token"),
        ) else {
            continue;
        };
        if !is_wanted {
            continue;
        }
        let text = |field: &str| line[field].as_str().unwrap_or("?").to_owned();
        let depth = line["depth"].as_u64().unwrap_or(0);
        // A quantisation is not part of a model's name; the bytes that it reads keep it apart.
        let read = number("bytes").map_or_else(String::new, |bytes| {
            let each = bytes / number("tokens").unwrap_or(1.0);
            format!(", {:.3} GB read per token", each / 1e9)
        });
        let name = format!(
            "{} on {}, {case} at depth {depth}{read}",
            text("model"),
            text("device")
        );
        let point = Point {
            limit_watts,
            tokens_per_s,
            joules_per_token,
        };
        let points = cases.entry(name).or_default();
        points.insert((limit_watts * 1e3) as u64, point);
    }
    let sorted = cases.into_iter();
    Ok(sorted
        .map(|(name, points)| (name, points.into_values().collect()))
        .collect())
}

/// A Markdown table per case. Shares are of the highest speed of the case; `*` marks the limit with
/// the most tokens per joule.
fn table(cases: &Cases) -> String {
    let mut out = String::new();
    for (name, points) in cases {
        let fastest = points.iter().map(|point| point.tokens_per_s);
        let fastest = fastest.fold(0.0, f64::max);
        let best = points.iter().map(Point::tokens_per_joule);
        let best = best.fold(0.0, f64::max);
        out += &format!(
            "{name}\n\n| power limit, W | tokens/s | % of the fastest | J/token | tokens/J |\n\
             |---|---|---|---|---|\n"
        );
        for point in points {
            let per_joule = point.tokens_per_joule();
            let mark = if per_joule >= best { " *" } else { "" };
            out += &format!(
                "| {:.0} | {:.1} | {:.0} | {:.4} | {per_joule:.3}{mark} |\n",
                point.limit_watts,
                point.tokens_per_s,
                100.0 * point.tokens_per_s / fastest,
                point.joules_per_token,
            );
        }
        out.push('\n');
    }
    out
}

fn write_plot(path: &Path, cases: &Cases) -> anyhow::Result<()> {
    let points = cases.values().flatten();
    let most = points.fold(0.0, |most, point| point.limit_watts.max(most));
    let panel = |name, y: fn(&Point) -> f64| Panel {
        name,
        x_unit: "W",
        x_end: round_up(most),
        curves: cases
            .iter()
            .map(|(name, points)| Curve {
                name: name.clone(),
                points: points.iter().map(|at| (at.limit_watts, y(at))).collect(),
            })
            .collect(),
    };
    let panels = [
        panel("tokens per joule", Point::tokens_per_joule),
        panel("tokens per second", |point| point.tokens_per_s),
    ];
    let svg = plot::svg("Power limits", &panels);
    std::fs::write(path, svg).with_context(|| format!("--svg {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = r#"
{"model":"small","device":"a GPU","case":"tg 128","depth":512,"power_limit_w":350.0,"tokens_per_s":1000.0,"joules_per_token":0.25}
{"model":"small","device":"a GPU","case":"tg 128","depth":512,"power_limit_w":220.0,"tokens_per_s":900.0,"joules_per_token":0.9}
{"model":"small","device":"a GPU","case":"tg 128","depth":512,"power_limit_w":220.0,"tokens_per_s":900.0,"joules_per_token":0.2}
{"model":"small","device":"a GPU","case":"pp 512","depth":0,"power_limit_w":220.0,"tokens_per_s":9000.0,"joules_per_token":0.02}
{"model":"small","device":"CPU","case":"tg 128","depth":512,"power_limit_w":0.0,"tokens_per_s":9.0,"joules_per_token":0.0}
{"model":"small","device":"a GPU","case":"memory","depth":0}
"#;

    #[test]
    fn table_has_each_limit_once_and_marks_the_most_tokens_per_joule() {
        let cases = cases(LINES, &["tg".to_owned()]).unwrap();
        let expected = "small on a GPU, tg 128 at depth 512\n\n\
            | power limit, W | tokens/s | % of the fastest | J/token | tokens/J |\n\
            |---|---|---|---|---|\n\
            | 220 | 900.0 | 90 | 0.2000 | 5.000 * |\n\
            | 350 | 1000.0 | 100 | 0.2500 | 4.000 |\n\n";
        assert_eq!(table(&cases), expected);
    }

    #[test]
    fn quantisations_of_a_model_stay_apart() {
        let line = |bytes: u64| {
            format!(
                r#"{{"model":"small","device":"a GPU","case":"tg 64","depth":0,"power_limit_w":300.0,"tokens_per_s":9.0,"joules_per_token":0.5,"tokens":64,"bytes":{bytes}}}"#
            )
        };
        let both = [line(64_000_000_000), line(32_000_000_000)].join("\n");
        let cases = cases(&both, &[]).unwrap();
        let names: Vec<&str> = cases.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [
                "small on a GPU, tg 64 at depth 0, 0.500 GB read per token",
                "small on a GPU, tg 64 at depth 0, 1.000 GB read per token",
            ]
        );
    }

    #[test]
    fn plot_has_a_curve_per_case_in_both_panels() {
        let cases = cases(LINES, &[]).unwrap();
        assert_eq!(cases.len(), 2);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sweep.svg");
        write_plot(&path, &cases).unwrap();
        let svg = std::fs::read_to_string(path).unwrap();
        assert_eq!(svg.matches("<polyline").count(), 4);
        assert!(svg.contains("500 W") && svg.contains("tokens per joule"));
    }

    #[test]
    fn line_that_is_not_json_is_named() {
        let error = cases("{}\n{", &[]).unwrap_err();
        assert!(format!("{error:#}").starts_with("line 2: not JSON"));
    }
}
