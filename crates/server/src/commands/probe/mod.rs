//! `hearth probe`: sends a running server the requests of clients, and reports which ones work.
//!
//! A path that a server lacks is reported as absent and is no failure, because servers have
//! different protocols. A path with a wrong response is a failure.

mod chat;
mod errors;
mod others;
mod plain;

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::cli::ProbeArgs;
use crate::commands::http_client::{HttpClient, HttpResponse};

/// A server under test.
pub(super) struct Probe {
    client: HttpClient,
    /// The model that requests name.
    model: String,
    /// The context length that the server reports, in tokens.
    context: Option<u64>,
}

/// Why a check did not pass.
enum CheckFailure {
    /// The server lacks the feature.
    Absent(String),
    /// The response is wrong.
    Wrong(String),
}

/// A short description of what a check found.
type Finding = Result<String, CheckFailure>;

/// One check.
struct Check {
    name: &'static str,
    run: fn(&Probe) -> Finding,
}

const fn check(name: &'static str, run: fn(&Probe) -> Finding) -> Check {
    Check { name, run }
}

/// All checks, in the order in which they run.
fn checks() -> impl Iterator<Item = Check> {
    let groups: [&[Check]; 4] = [
        &plain::CHECKS,
        &chat::CHECKS,
        &others::CHECKS,
        &errors::CHECKS,
    ];
    groups
        .into_iter()
        .flatten()
        .map(|known| check(known.name, known.run))
}

pub(super) fn probe(args: &ProbeArgs) -> anyhow::Result<()> {
    let timeout = Duration::from_secs(args.timeout as u64);
    let mut probe = Probe {
        model: args.model.clone().unwrap_or_default(),
        context: None,
        client: HttpClient::new(&args.url, args.api_key.clone(), timeout)?,
    };
    probe.fetch_model(args.model.is_none())?;
    let mut out = std::io::stdout().lock();
    let (mut failed, mut absent, mut passed) = (0, 0, 0);
    for check in checks() {
        let start = Instant::now();
        let finding = (check.run)(&probe);
        let ms = start.elapsed().as_secs_f64() * 1e3;
        let (word, detail) = match finding {
            Ok(detail) => {
                passed += 1;
                ("ok", detail)
            }
            Err(CheckFailure::Absent(detail)) => {
                absent += 1;
                ("absent", detail)
            }
            Err(CheckFailure::Wrong(detail)) => {
                failed += 1;
                ("FAILED", detail)
            }
        };
        if args.json {
            let line = json!({
                "check": check.name, "result": word.to_lowercase(), "ms": ms.round(), "detail": detail,
            });
            writeln!(out, "{line}")?;
        } else {
            writeln!(out, "{word:7} {:34} {ms:8.0} ms  {detail}", check.name)?;
        }
    }
    if !args.json {
        writeln!(out, "{passed} ok, {absent} absent, {failed} failed")?;
    }
    if failed > 0 {
        bail!("{failed} checks failed at {}", probe.client.base());
    }
    Ok(())
}

impl Probe {
    /// Reads the model list: the context, and the first model's id if `takes_first`.
    ///
    /// # Errors
    /// If the server does not respond at all.
    fn fetch_model(&mut self, takes_first: bool) -> anyhow::Result<()> {
        let response = self.client.get("/v1/models");
        let response = response
            .with_context(|| format!("{} does not respond; check --url", self.client.base()))?;
        let list = response.json();
        let listed = list["data"].as_array().into_iter().flatten();
        let entry = listed
            .into_iter()
            .find(|entry| takes_first || entry["id"] == self.model.as_str());
        if let Some(entry) = entry {
            if takes_first {
                self.model = entry["id"].as_str().unwrap_or_default().to_owned();
            }
            let keys = ["context_length", "max_model_len", "max_context_length"];
            self.context = keys
                .iter()
                .find_map(|key| entry[*key].as_u64())
                .or_else(|| entry["meta"]["n_ctx"].as_u64());
        }
        Ok(())
    }

    /// A GET, with any status.
    fn get(&self, path: &str) -> Result<HttpResponse, CheckFailure> {
        let response = self.client.get(path);
        response.map_err(|error| no_response(&error))
    }

    /// A POST, with any status.
    fn post(&self, path: &str, body: &Value) -> Result<HttpResponse, CheckFailure> {
        let response = self.client.post(path, body);
        response.map_err(|error| no_response(&error))
    }

    /// A POST whose status must be 200.
    fn post_ok(&self, path: &str, body: &Value) -> Result<HttpResponse, CheckFailure> {
        success(self.post(path, body)?)
    }

    /// The body of a chat request with one user message and `more` fields.
    fn chat(&self, text: &str, more: Value) -> Value {
        let mut body = json!({
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 32,
            "temperature": 0,
        });
        add_fields(&mut body, more);
        body
    }
}

/// Adds the fields of `more` to the object `into`.
fn add_fields(into: &mut Value, more: Value) {
    if let (Value::Object(into), Value::Object(more)) = (into, more) {
        into.extend(more);
    }
}

fn no_response(error: &ureq::Error) -> CheckFailure {
    CheckFailure::Wrong(format!("no complete response: {error}"))
}

/// The response if its status is 200; a missing path counts as absent.
fn success(response: HttpResponse) -> Result<HttpResponse, CheckFailure> {
    match response.status {
        200 => Ok(response),
        404 | 405 | 501 => Err(CheckFailure::Absent(format!("status {}", response.status))),
        status => {
            let text: String = response.body.chars().take(160).collect();
            Err(CheckFailure::Wrong(format!("status {status}: {text}")))
        }
    }
}

/// A failure with the reason `otherwise`, unless `holds`.
fn require(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), CheckFailure> {
    if holds {
        Ok(())
    } else {
        Err(CheckFailure::Wrong(otherwise()))
    }
}

/// The beginning of a text in quotes, on one line.
fn excerpt(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(48) {
        Some((at, _)) => format!("\"{}...\"", &line[..at]),
        None => format!("\"{line}\""),
    }
}
