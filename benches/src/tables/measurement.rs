//! Lines of a results file, each with the header of its benchmark run.

use std::fs;
use std::path::Path;

use anyhow::Context;
use serde_json::{Map, Value};

/// Values of `bench` in run headers: the present one, and an older one that is retired elsewhere.
const RUN_HEADERS: [&str; 2] = ["run", concat!("sit", "ting")];
/// Names of cases in older results, and their present names.
const CASE_NAMES: [(&str, &str); 2] = [
    ("the next wish", "the next user message"),
    ("read from 0", "prefill from 0"),
];
/// Fields of a run header that apply to the lines after it.
const INHERITED: [&str; 5] = ["utc", "date", "machine", "commit", "command"];

/// One measurement.
#[derive(Debug, Clone)]
pub struct Measurement {
    fields: Map<String, Value>,
}

impl Measurement {
    /// The field at `path`; `a.b` is the field `b` of the object `a`.
    pub fn get(&self, path: &str) -> Option<&Value> {
        let mut parts = path.split('.');
        let mut value = self.fields.get(parts.next()?)?;
        for part in parts {
            value = value.get(part)?;
        }
        Some(value)
    }

    /// The field at `path` as a number.
    pub fn number(&self, path: &str) -> Option<f64> {
        self.get(path)?.as_f64()
    }

    /// The field at `path` as text; empty where it is absent. Lists are joined with `/`.
    pub fn text(&self, path: &str) -> String {
        match self.get(path) {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(list)) => {
                let parts: Vec<String> = list.iter().map(as_text).collect();
                parts.join("/")
            }
            Some(other) => other.to_string(),
        }
    }

    /// Whether the text at `path` begins with `prefix`.
    pub fn begins(&self, path: &str, prefix: &str) -> bool {
        self.text(path).starts_with(prefix)
    }

    /// Whether the commit is a plain hash, without a note about uncommitted changes.
    pub fn is_of_a_commit(&self) -> bool {
        let commit = self.text("commit");
        (7..=40).contains(&commit.len()) && commit.bytes().all(|byte| byte.is_ascii_hexdigit())
    }
}

fn as_text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// All measurements of a results file, in order.
///
/// # Errors
/// Names the file, and the line that is not a JSON object.
pub fn read_results(path: &Path) -> anyhow::Result<Vec<Measurement>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let mut header = Map::new();
    let mut all = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let fields: Map<String, Value> = serde_json::from_str(line)
            .with_context(|| format!("{}:{}", path.display(), index + 1))?;
        let bench = fields.get("bench").and_then(Value::as_str);
        if bench.is_some_and(|bench| RUN_HEADERS.contains(&bench)) {
            header = fields;
            continue;
        }
        let mut inherited = Map::new();
        for key in INHERITED {
            if let Some(value) = header.get(key) {
                inherited.insert(key.to_owned(), value.clone());
            }
        }
        inherited.extend(fields);
        if let Some(Value::String(case)) = inherited.get_mut("case")
            && let Some((_, name)) = CASE_NAMES.iter().find(|(old, _)| old == case)
        {
            *case = (*name).to_owned();
        }
        all.push(Measurement { fields: inherited });
    }
    Ok(all)
}
