//! `hearth bench serve`: puts load on a server of OpenAI's protocol, and reports times as clients
//! see them.

mod load;
mod percentiles;

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use load::{Arrivals, LoadTest, Outcome, Sample};
use percentiles::Percentiles;

use super::plot::{self, Curve, Panel};
use crate::cli::BenchServeArgs;
use crate::commands::http_client::HttpClient;

/// The measurements of one load.
struct LoadResult {
    /// How requests arrived, such as `4 at a time`.
    name: String,
    samples: Vec<Sample>,
    failures: Vec<String>,
    took: Duration,
}

/// What a request contributes to a distribution, in milliseconds.
type ValuesOf = fn(&Sample) -> Vec<f64>;

/// The distributions that the table and the plot show.
const TABLE: [(&str, ValuesOf); 4] = [
    ("first token", |sample| vec![ms(sample.first_token)]),
    ("between parts", |sample| sample.gaps_ms.clone()),
    ("per token", |sample| {
        sample.ms_per_token().into_iter().collect()
    }),
    ("whole reply", |sample| vec![ms(sample.total)]),
];

pub(super) fn serve(args: &BenchServeArgs) -> anyhow::Result<()> {
    let timeout = Duration::from_secs(args.timeout);
    let client = HttpClient::new(&args.url, args.api_key.clone(), timeout)?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => first_model(&client)?,
    };
    let test = LoadTest {
        client: client.clone(),
        model: model.clone(),
        requests: args.requests,
        prompt_tokens: args.prompt_tokens,
        tokens: args.tokens,
        seed: args.seed,
    };
    // Loads the model and compiles what is compiled late.
    if let Outcome::Failed(error) = test.one(usize::MAX) {
        bail!("{}: the first request failed: {error}", client.base());
    }
    let arrivals: Vec<Arrivals> = match args.rate {
        Some(rate) => vec![Arrivals::Rate(rate)],
        None => args
            .concurrency
            .iter()
            .map(|n| Arrivals::AtATime(*n))
            .collect(),
    };
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{}, model {model}: {} requests per load, about {} prompt tokens, {} reply tokens",
        client.base(),
        args.requests,
        args.prompt_tokens,
        args.tokens
    )?;
    let mut results = Vec::new();
    for arrivals in arrivals {
        let result = test.run(arrivals);
        let result = LoadResult {
            name: arrivals.name(),
            samples: result.samples,
            failures: result.failures,
            took: result.took,
        };
        write!(out, "{}", table(&result))?;
        results.push(result);
    }
    if let Some(path) = &args.json {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let mut file = file.with_context(|| format!("--json {}", path.display()))?;
        for result in &results {
            let line = json_line(args, (client.base(), &model), result);
            writeln!(file, "{line}").with_context(|| format!("--json {}", path.display()))?;
        }
    }
    if let Some(path) = &args.svg {
        let title = format!("{model} at {}", client.base());
        let svg = plot::svg(&title, &panels(&results));
        std::fs::write(path, svg).with_context(|| format!("--svg {}", path.display()))?;
    }
    let failures: Vec<&String> = results.iter().flat_map(|result| &result.failures).collect();
    match failures.first() {
        None => Ok(()),
        Some(first) => bail!("{} requests failed; the first: {first}", failures.len()),
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The id of the first model that the server lists.
fn first_model(client: &HttpClient) -> anyhow::Result<String> {
    let list = client.get("/v1/models");
    let list = list.with_context(|| format!("{} does not respond", client.base()))?;
    let json = list.json();
    let id = json["data"][0]["id"].as_str();
    id.map(str::to_owned).with_context(|| {
        let status = list.status;
        format!(
            "{}: no model is listed (status {status}); name one by --model",
            client.base()
        )
    })
}

/// All values of a distribution over the requests of a load, in order.
fn values(result: &LoadResult, of: ValuesOf) -> Percentiles {
    Percentiles::new(result.samples.iter().flat_map(of).collect())
}

/// Tokens of all replies and prompts per second.
fn rates(result: &LoadResult) -> (f64, f64, f64) {
    let seconds = result.took.as_secs_f64().max(1e-9);
    let sum = |of: fn(&Sample) -> usize| result.samples.iter().map(of).sum::<usize>() as f64;
    (
        result.samples.len() as f64 / seconds,
        sum(|sample| sample.tokens) / seconds,
        sum(|sample| sample.prompt_tokens) / seconds,
    )
}

fn table(result: &LoadResult) -> String {
    let (requests, tokens, prompt) = rates(result);
    let mut text = format!(
        "\n{}: {} answered, {} failed in {:.1} s; {requests:.2} requests/s, \
         {tokens:.1} reply tokens/s, {prompt:.1} prompt tokens/s\n",
        result.name,
        result.samples.len(),
        result.failures.len(),
        result.took.as_secs_f64(),
    );
    text.push_str("ms                   mean      p50      p90      p95      p99      max\n");
    for (name, of) in TABLE {
        let values = values(result, of);
        text.push_str(&format!("{name:<16}"));
        let at = [50.0, 90.0, 95.0, 99.0, 100.0].map(|share| values.at(share));
        for value in std::iter::once(values.mean()).chain(at) {
            match value {
                Some(value) => text.push_str(&format!(" {value:>8.1}")),
                None => text.push_str("        -"),
            }
        }
        text.push('\n');
    }
    text
}

fn json_line(args: &BenchServeArgs, (url, model): (&str, &str), result: &LoadResult) -> Value {
    let (requests, tokens, prompt) = rates(result);
    let mut line = json!({
        "bench": "serve", "url": url, "model": model, "load": result.name,
        "requests": args.requests, "prompt_tokens": args.prompt_tokens, "tokens": args.tokens,
        "answered": result.samples.len(), "failed": result.failures.len(),
        "seconds": result.took.as_secs_f64(), "requests_per_second": requests,
        "tokens_per_second": tokens, "prompt_tokens_per_second": prompt,
    });
    for (name, of) in TABLE {
        let values = values(result, of);
        let key = format!("{}_ms", name.replace(' ', "_"));
        line[key] = json!({
            "mean": values.mean(), "p50": values.at(50.0), "p90": values.at(90.0),
            "p95": values.at(95.0), "p99": values.at(99.0), "max": values.at(100.0),
        });
    }
    line
}

/// The curves of the plot: times to the first token and between parts.
fn panels(results: &[LoadResult]) -> Vec<Panel<'static>> {
    let panel = |name, of: ValuesOf| {
        let curve = |result: &LoadResult| {
            let values = values(result, of);
            let point = |percent| Some((percent, values.at(percent)?));
            Curve {
                name: result.name.clone(),
                points: (0..=100).map(f64::from).filter_map(point).collect(),
            }
        };
        Panel {
            name,
            x_unit: "%",
            x_end: 100.0,
            curves: results.iter().map(curve).collect(),
        }
    };
    let names = ["first token (ms)", "between parts (ms)"];
    let of = TABLE.into_iter().map(|(_, of)| of);
    names
        .into_iter()
        .zip(of)
        .map(|(name, of)| panel(name, of))
        .collect()
}
