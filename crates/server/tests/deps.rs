//! The dependency table: which workspace crates each crate may use, and which crates may use an
//! external package. Every dependency of a manifest is used.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
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
    ("cuda", &["conformance", "cpu", "cuda", "model"]),
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
    ("libc", &["cpu", "gguf"]),
    ("tempfile", &["conformance", "cuda", "server"]),
];

struct Arrow {
    to: String,
    ships: bool,
}

/// The packages of a workspace, as `cargo metadata` lists them. `root` is relative to the root.
fn packages(root: &str) -> Vec<serde_json::Value> {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version",
            "1",
            "--no-deps",
            "--offline",
        ])
        .current_dir(
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../..")
                .join(root),
        )
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

/// `crate -> dependencies`, from the manifests.
fn arrows() -> BTreeMap<String, Vec<Arrow>> {
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let mut all = BTreeMap::new();
    for package in packages(".") {
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

/// Appends the code of the Rust files below `folder` to `code`.
fn read_code(folder: &Path, with_tests: bool, code: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() {
            let is_source = !["target", "node_modules"].contains(&name);
            if is_source && (with_tests || name != "tests") {
                read_code(&path, with_tests, code);
            }
        } else if name.ends_with(".rs") {
            read_file(&path, code);
        }
    }
}

/// Appends the code of a file and of the modules that it takes from elsewhere to `code`, without
/// lines that are comments.
fn read_file(path: &Path, code: &mut String) {
    let text = fs::read_to_string(path).unwrap();
    let lines = text.lines().map(str::trim_start);
    for line in lines.filter(|line| !line.starts_with("//")) {
        code.push_str(line);
        code.push('\n');
        let module = line.strip_prefix("#[path = \"");
        if let Some(module) = module.and_then(|line| line.strip_suffix("\"]")) {
            read_file(&path.parent().unwrap().join(module), code);
        }
    }
}

/// Whether `code` has a path that begins with `name`, or imports it.
fn is_used(code: &str, name: &str) -> bool {
    code.match_indices(name).any(|(at, _)| {
        let (before, after) = (&code[..at], &code[at + name.len()..]);
        let within = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let begins_path = after.starts_with("::") && !before.ends_with(within);
        let is_import = after.starts_with([';', ' ']) && before.ends_with("use ");
        begins_path || is_import
    })
}

/// Dependencies that the code of their package does not use, as `package: dependency`. Code of
/// tests uses those for tests only.
fn unused(packages: &[serde_json::Value]) -> Vec<String> {
    let mut found = Vec::new();
    for package in packages {
        let manifest = Path::new(package["manifest_path"].as_str().unwrap());
        let [shipped, all] = [false, true].map(|with_tests| {
            let mut code = String::new();
            read_code(manifest.parent().unwrap(), with_tests, &mut code);
            code
        });
        for dependency in package["dependencies"].as_array().unwrap() {
            let package_name = dependency["name"].as_str().unwrap();
            let name = dependency["rename"].as_str().unwrap_or(package_name);
            let is_dev = dependency["kind"].as_str() == Some("dev");
            let code = if is_dev { &all } else { &shipped };
            if !is_used(code, &name.replace('-', "_")) {
                let package = package["name"].as_str().unwrap();
                found.push(format!("{package}: {package_name}"));
            }
        }
    }
    found
}

#[test]
fn every_dependency_is_used() {
    let packages = [".", "harness/fuzz"].map(packages).concat();
    assert!(packages.len() > OURS.len());
    let found = unused(&packages);
    assert!(found.is_empty(), "nothing uses:\n{}", found.join("\n"));
}

#[test]
fn an_unused_dependency_is_noticed() {
    let mut packages = packages(".");
    let decode = packages
        .iter_mut()
        .find(|package| package["name"] == "decode");
    let dependencies = decode.unwrap()["dependencies"].as_array_mut().unwrap();
    for name in ["tokio-stream", "code"] {
        dependencies.push(serde_json::json!({ "name": name, "kind": null }));
    }
    assert_eq!(unused(&packages), ["decode: tokio-stream", "decode: code"]);
}
