//! The dependency table: which workspace crates each crate may use, and which crates may use an
//! external package.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// The workspace crates and the workspace crates that each may ship with.
const OURS: [(&str, &[&str]); 11] = [
    ("contract", &[]),
    ("gguf", &["contract"]),
    ("model", &["contract", "gguf"]),
    ("chat", &["contract"]),
    ("compress", &[]),
    ("decode", &["contract"]),
    ("cpu", &["contract"]),
    ("cuda", &["contract"]),
    ("hub", &[]),
    ("conformance", &["contract", "gguf", "model"]),
    (
        "server",
        &[
            "contract", "gguf", "model", "chat", "compress", "decode", "cpu", "cuda", "hub",
        ],
    ),
];

/// Workspace crates that a crate may use in its tests only.
const OURS_IN_TESTS: [(&str, &[&str]); 5] = [
    ("chat", &["gguf", "model"]),
    ("decode", &["conformance"]),
    ("cpu", &["conformance", "cpu", "gguf", "model"]),
    ("cuda", &["conformance", "cpu", "cuda", "gguf", "model"]),
    ("server", &["conformance"]),
];

/// External packages and the only workspace crates that may ship with them.
const HOMES: [(&str, &[&str]); 57] = [
    ("anyhow", &["server"]),
    ("axum", &["server"]),
    ("blake3", &["cuda", "model", "server"]),
    ("bytes", &["server"]),
    ("clap", &["server"]),
    ("clap_complete", &["server"]),
    ("clap_mangen", &["server"]),
    ("cudarc", &["cuda"]),
    ("futures", &["server"]),
    ("half", &["contract", "cpu", "cuda"]),
    ("http-body-util", &["server"]),
    ("hyper", &["server"]),
    ("hyper-util", &["server"]),
    ("indicatif", &["server"]),
    ("jiff", &["chat", "server"]),
    ("libloading", &["cuda"]),
    ("listenfd", &["server"]),
    ("llguidance", &["decode"]),
    ("memmap2", &["gguf"]),
    ("metrics", &["server"]),
    ("metrics-exporter-prometheus", &["server"]),
    ("minijinja", &["chat"]),
    ("minijinja-contrib", &["chat"]),
    ("nvml-wrapper", &["cuda"]),
    ("opentelemetry", &["server"]),
    ("opentelemetry-http", &["server"]),
    ("opentelemetry-otlp", &["server"]),
    ("opentelemetry_sdk", &["server"]),
    ("percent-encoding", &["hub"]),
    ("rand", &["server"]),
    ("regex", &["chat"]),
    ("regex-syntax", &["chat"]),
    ("ring", &["hub"]),
    ("rustix", &["hub", "server"]),
    ("rustls", &["hub"]),
    ("rustyline", &["server"]),
    ("safetensors", &["model"]),
    ("sd-notify", &["server"]),
    ("serde", &["chat", "hub", "model", "server"]),
    ("serde_json", &["chat", "hub", "model", "server"]),
    ("strsim", &["hub", "server"]),
    (
        "thiserror",
        &[
            "contract",
            "gguf",
            "model",
            "chat",
            "compress",
            "decode",
            "cpu",
            "cuda",
            "hub",
            "conformance",
            "server",
        ],
    ),
    ("tokenizers", &["chat"]),
    ("tokio", &["server"]),
    ("tokio-io-timeout", &["server"]),
    ("tokio-stream", &["server"]),
    ("toml", &["server"]),
    ("tower-http", &["server"]),
    (
        "tracing",
        &[
            "model",
            "chat",
            "decode",
            "cpu",
            "cuda",
            "conformance",
            "server",
            "gguf",
        ],
    ),
    ("tracing-opentelemetry", &["server"]),
    ("tracing-subscriber", &["server"]),
    ("unicode-normalization", &["chat"]),
    ("ureq", &["hub", "server"]),
    ("utoipa", &["server"]),
    ("uuid", &["server"]),
    ("libc", &["gguf"]),
    ("tempfile", &["conformance", "cuda", "server"]),
];

struct Arrow {
    to: String,
    ships: bool,
}

/// `crate -> dependencies`, from the manifests.
fn arrows() -> BTreeMap<String, Vec<Arrow>> {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version",
            "1",
            "--no-deps",
            "--offline",
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let mut all = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let mut arrows = Vec::new();
        for dependency in package["dependencies"].as_array().unwrap() {
            let ships = dependency["kind"].as_str() != Some("dev");
            arrows.push(Arrow {
                to: text(&dependency["name"]),
                ships,
            });
        }
        all.insert(text(&package["name"]), arrows);
    }
    all
}

fn allowed<'a>(table: &'a [(&str, &'a [&'a str])], key: &str) -> Option<&'a [&'a str]> {
    table
        .iter()
        .find(|(name, _)| *name == key)
        .map(|(_, list)| *list)
}

/// Every dependency that the tables do not allow, as a sentence.
fn violations(arrows: &BTreeMap<String, Vec<Arrow>>) -> Vec<String> {
    let ours: BTreeSet<&str> = OURS.iter().map(|(name, _)| *name).collect();
    let mut found = Vec::new();
    for (name, _) in OURS {
        let Some(list) = arrows.get(name) else {
            found.push(format!("{name} is in the table but not in the workspace"));
            continue;
        };
        for Arrow { to, ships } in list {
            if ours.contains(to.as_str()) {
                let shipped = allowed(&OURS, name).is_some_and(|l| l.contains(&to.as_str()));
                let tested = !ships
                    && allowed(&OURS_IN_TESTS, name).is_some_and(|l| l.contains(&to.as_str()));
                if !shipped && !tested {
                    found.push(format!("{name} must not use {to}"));
                }
            } else if *ships {
                match allowed(&HOMES, to) {
                    Some(homes) if homes.contains(&name) => {}
                    Some(homes) => found.push(format!("{to} lives in {homes:?}, not in {name}")),
                    None => found.push(format!("{to} (in {name}) has no home in the table")),
                }
            }
        }
    }
    found
}

#[test]
fn every_dependency_arrow_is_in_the_table() {
    let found = violations(&arrows());
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn a_forbidden_arrow_is_noticed() {
    let mut arrows = arrows();
    let decode = arrows.get_mut("decode").unwrap();
    decode.push(Arrow {
        to: "cpu".to_owned(),
        ships: true,
    });
    decode.push(Arrow {
        to: "tokio".to_owned(),
        ships: true,
    });
    let found = violations(&arrows);
    assert!(
        found.contains(&"decode must not use cpu".to_owned()),
        "{found:?}"
    );
    assert!(
        found.iter().any(|line| line.starts_with("tokio lives in")),
        "{found:?}"
    );
}
