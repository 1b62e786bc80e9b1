//! `hearth probe`: asks a running server what clients ask, and tells what works.
//!
//! A path that a server does not have is reported as absent and fails nothing, as servers speak different
//! protocols; a path that answers wrongly fails.

mod chat;
mod errors;
mod others;
mod plain;

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::bail;
use serde_json::{Value, json};

use crate::cli::ProbeArgs;
use crate::commands::http_client::{HttpResponse, Server};

/// What checks need to know.
pub(super) struct Probe {
    server: Server,
    model: String,
    /// What the server says of its context, in tokens.
    context: Option<u64>,
}

/// Why a check did not pass.
enum Fault {
    /// The server does not have it.
    Absent(String),
    /// It has it, and it is wrong.
    Wrong(String),
}

/// What a check found, in a few words.
type Finding = Result<String, Fault>;

/// One check.
struct Check {
    name: &'static str,
    run: fn(&Probe) -> Finding,
}

const fn check(name: &'static str, run: fn(&Probe) -> Finding) -> Check {
    Check { name, run }
}

/// All checks, in the order they are made.
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
    let mut server = Server::parse(&args.url)?;
    server.key = args.api_key.clone();
    server.patience = Duration::from_secs(args.patience as u64);
    let mut probe = Probe {
        model: args.model.clone().unwrap_or_default(),
        context: None,
        server,
    };
    probe.learn(args.model.is_none())?;
    let mut out = std::io::stdout().lock();
    let (mut failed, mut absent, mut passed) = (0, 0, 0);
    for check in checks() {
        let begun = Instant::now();
        let finding = (check.run)(&probe);
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        let (word, detail) = match finding {
            Ok(detail) => {
                passed += 1;
                ("ok", detail)
            }
            Err(Fault::Absent(detail)) => {
                absent += 1;
                ("absent", detail)
            }
            Err(Fault::Wrong(detail)) => {
                failed += 1;
                ("FAILED", detail)
            }
        };
        match args.json {
            true => {
                let line = json!({"check": check.name, "result": word.to_lowercase(), "ms": ms.round(), "detail": detail});
                writeln!(out, "{line}")?;
            }
            false => writeln!(out, "{word:7} {:34} {ms:8.0} ms  {detail}", check.name)?,
        }
    }
    if !args.json {
        writeln!(out, "{passed} ok, {absent} absent, {failed} failed")?;
    }
    if failed > 0 {
        bail!("{failed} checks failed at {}", probe.server.base());
    }
    Ok(())
}

impl Probe {
    /// Asks for the model and its context; a server that does not answer at all ends the probe.
    fn learn(&mut self, takes_first: bool) -> anyhow::Result<()> {
        let base = self.server.base();
        let answer = self.server.ask("/v1/models", None);
        let list = match answer {
            Ok(answer) => answer.json(),
            Err(error) => bail!("{base} does not answer: {error}"),
        };
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

    /// A GET.
    fn get(&self, path: &str) -> Result<HttpResponse, Fault> {
        self.server.ask(path, None).map_err(|error| broken(&error))
    }

    /// A POST.
    fn post(&self, path: &str, body: &Value) -> Result<HttpResponse, Fault> {
        let answer = self.server.ask(path, Some(body));
        answer.map_err(|error| broken(&error))
    }

    /// A POST that must be answered with 200.
    fn good(&self, path: &str, body: &Value) -> Result<HttpResponse, Fault> {
        let answer = self.post(path, body)?;
        good(answer)
    }

    /// A conversation of one message, with further fields.
    fn chat(&self, text: &str, more: Value) -> Value {
        let mut body = json!({
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 32,
            "temperature": 0,
        });
        join(&mut body, more);
        body
    }
}

/// Adds the fields of one object to another.
fn join(into: &mut Value, more: Value) {
    if let (Value::Object(into), Value::Object(more)) = (into, more) {
        into.extend(more);
    }
}

fn broken(error: &std::io::Error) -> Fault {
    Fault::Wrong(format!("the connection broke: {error}"))
}

/// An answer with status 200; a path that is not there is absent.
fn good(answer: HttpResponse) -> Result<HttpResponse, Fault> {
    match answer.status {
        200 => Ok(answer),
        404 | 405 | 501 => Err(Fault::Absent(format!("status {}", answer.status))),
        status => {
            let text: String = answer.body.chars().take(160).collect();
            Err(Fault::Wrong(format!("status {status}: {text}")))
        }
    }
}

/// A wrong answer, unless `holds`.
fn must(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), Fault> {
    match holds {
        true => Ok(()),
        false => Err(Fault::Wrong(otherwise())),
    }
}

/// The beginning of a text, to be shown.
fn shown(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(48) {
        Some((at, _)) => format!("\"{}...\"", &line[..at]),
        None => format!("\"{line}\""),
    }
}
