//! Tests of a server with several models: swaps keep sessions and memory, and commands show and
//! unload models.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use serde_json::{Value, json};

use crate::client::{ServerProcess, request};
use crate::process::{Done, hearth, model};

/// A prompt of some hundred tokens.
fn long_prompt() -> String {
    (0..60)
        .map(|i| format!("Line {i} of a long text. "))
        .collect()
}

fn ember() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/ember/ember.gguf")
}

/// A server of the bundled model's file and a tiny one, of which one fits.
fn server(more: &[&str]) -> ServerProcess {
    let small = format!("small={}", model().display());
    let ember = ember();
    let mut args = vec![ember.to_str().unwrap(), "--models", &small];
    args.extend(["--device", "cpu", "--max-ctx", "2048", "--models-max", "1"]);
    args.extend(["--kv-cache-min-tokens", "16"]);
    args.extend(more);
    ServerProcess::start(&args)
}

fn chat(address: &str, model: &str, text: &str) -> Value {
    let body = json!({
        "model": model, "max_tokens": 8, "temperature": 0,
        "messages": [{"role": "user", "content": text}],
    });
    let response = request(address, "/v1/chat/completions", &body.to_string(), &[]);
    assert_eq!(response.status, 200, "{}", response.body);
    response.json()
}

/// A number of kilobytes in the process's status.
fn kilobytes(server: &ServerProcess, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn fifty_swaps_keep_sessions_and_memory() {
    // With drafts: stored states depend on those that were opened.
    let server = server(&[]);
    let address = &server.address;
    let (text, state) = (long_prompt(), |server: &ServerProcess, model: usize| {
        let list = server.request("/v1/models", "").json();
        list["data"][model]["status"]["value"]
            .as_str()
            .unwrap()
            .to_owned()
    });
    let first = chat(address, "ember", &text);
    let prompt_tokens = first["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(prompt_tokens > 200, "{first}");
    let mut warm = (0, 0);
    for round in 0..25 {
        assert_eq!(chat(address, "small", "Hi")["model"], "small");
        assert_eq!(
            (state(&server, 0).as_str(), state(&server, 1).as_str()),
            ("unloaded", "loaded")
        );
        let again = chat(address, "ember", &text);
        let cached = &again["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert!(
            cached.as_u64().unwrap() > prompt_tokens / 2,
            "{round}: {again}"
        );
        assert_eq!(again["choices"], first["choices"], "{round}");
        let now = (kilobytes(&server, "RssAnon"), kilobytes(&server, "Threads"));
        if round == 4 {
            warm = now;
        }
        if round > 4 {
            assert!(
                now.0 < warm.0 * 5 / 4 + 8192,
                "{round}: {now:?} after {warm:?}"
            );
            assert!(now.1 <= warm.1 + 4, "{round}: {now:?} after {warm:?}");
        }
    }
    server.signal("TERM");
    let (code, log) = server.wait();
    assert_eq!(code, Some(0), "{log}");
    // Each of the two models is measured once, and opens the same drafts from then on.
    assert_eq!(log.matches("measured what passes cost").count(), 2, "{log}");
}

#[test]
fn concurrent_requests_for_two_models_are_all_answered() {
    let server = server(&["--idle-unload", "1h", "--no-speculation"]);
    thread::scope(|scope| {
        for client in 0..6 {
            let address = &server.address;
            scope.spawn(move || {
                for turn in 0..6 {
                    let name = ["ember", "small"][(client + turn) % 2];
                    assert_eq!(chat(address, name, "Hello")["model"], name);
                }
            });
        }
    });
}

#[test]
fn models_are_listed_and_unloaded_by_commands() {
    let mut server = server(&["--api-key", "k", "--no-speculation"]);
    let url = format!("http://{}", server.address);
    server.wait_for("ember: loaded in");
    let run = |words: &[&str]| -> Done {
        let mut all = words.to_vec();
        all.extend(["--url", &url, "--api-key", "k"]);
        hearth(&all)
    };
    let line = |shown: &str, name: &str| {
        let found = shown.lines().find(|line| line.starts_with(name));
        found
            .unwrap_or_else(|| panic!("{name} in {shown}"))
            .to_owned()
    };
    let shown = run(&["ps"]).out;
    assert!(line(&shown, "ember ").contains(" loaded "), "{shown}");
    assert!(line(&shown, "ember ").contains(" 2048 "), "{shown}");
    assert!(line(&shown, "small ").contains(" unloaded "), "{shown}");
    let stopped = run(&["stop"]);
    assert_eq!(stopped.code, Some(0), "{}", stopped.err);
    assert!(stopped.err.contains("ember: unloaded"), "{}", stopped.err);
    let list: Value = serde_json::from_str(&run(&["ps", "--json"]).out).unwrap();
    assert_eq!(list["data"][0]["status"]["value"], "unloaded");
    let unknown = run(&["stop", "nothing"]);
    assert_eq!(unknown.code, Some(1));
    assert!(unknown.err.contains("nothing"), "{}", unknown.err);
    let keyless = hearth(&["ps", "--url", &url]);
    assert!(keyless.err.contains("--api-key"), "{}", keyless.err);
    // A stop removes the states of this run.
    let (_, folder) = server.log.split_once(" on disk in ").unwrap();
    let folder = PathBuf::from(folder.split(", at most").next().unwrap());
    assert!(folder.is_dir(), "{}", folder.display());
    server.signal("TERM");
    let (code, log) = server.wait();
    assert_eq!(code, Some(0), "{log}");
    assert!(!folder.exists(), "{}", folder.display());
    assert!(!folder.parent().unwrap().exists(), "{}", folder.display());
}

#[test]
fn a_server_of_one_model_keeps_it_loaded() {
    let server = ServerProcess::start(&[model().to_str().unwrap()]);
    let url = format!("http://{}", server.address);
    let shown = hearth(&["ps", "--url", &url]).out;
    assert!(shown.contains(" loaded "), "{shown}");
    let stopped = hearth(&["stop", "--url", &url]);
    assert_eq!(stopped.code, Some(1), "{}", stopped.err);
    assert!(stopped.err.contains("--models-dir"), "{}", stopped.err);
    let list = server.request("/v1/models", "").json();
    assert_eq!(list["data"][0]["status"], Value::Null);
}

#[test]
fn wrong_lists_of_models_are_refused_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    for (words, part) in [
        (vec!["--models", "/no/such.gguf"], "--models: /no/such.gguf"),
        (vec!["--models-dir", "/no/such"], "--models-dir /no/such"),
        (vec!["--models-dir", folder], "no GGUF file"),
        (vec!["--idle-unload", "soon"], "is no time"),
        (vec!["--models", "a/b,A/B"], "names two models"),
    ] {
        let mut all = vec!["serve", "--port", "0"];
        all.extend(&words);
        let done = hearth(&all);
        assert_ne!(done.code, Some(0), "{words:?}");
        assert!(done.err.contains(part), "{part} in {}", done.err);
    }
}
