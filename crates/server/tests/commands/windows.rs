//! Tests of `--attention-window`: masked tokens, exempt requests, and reports.

use serde_json::{Value, json};

use crate::client::ServerProcess;
use crate::process::{good, hearth, model};

/// A prompt of a few hundred tokens.
fn body(tools: bool) -> String {
    let words: Vec<String> = (0..150).map(|i| format!("w{}", i * 37 % 101)).collect();
    let mut body = json!({
        "messages": [{"role": "user", "content": words.join(" ")}],
        "max_tokens": 12,
        "temperature": 0,
    });
    if tools {
        body["tools"] = json!([{"type": "function", "function": {
            "name": "look", "parameters": {"type": "object", "properties": {}}}}]);
    }
    body.to_string()
}

fn serve(flags: &[&str]) -> ServerProcess {
    let model = model();
    let mut args = vec![model.to_str().unwrap(), "--max-ctx", "2048"];
    args.extend(flags);
    ServerProcess::start(&args)
}

/// The reply to [`body`].
fn send(server: &ServerProcess, tools: bool) -> Value {
    let reply = server.request("/v1/chat/completions", &body(tools));
    assert_eq!(reply.status, 200, "{}", reply.body);
    let reply = reply.json();
    assert!(reply["usage"]["prompt_tokens"].as_u64().unwrap() > 200);
    reply
}

fn message(reply: &Value) -> &Value {
    &reply["choices"][0]["message"]
}

#[test]
fn window_is_reported_and_requests_with_tools_are_exempt() {
    let plain = serve(&[]);
    let [whole, with_tools] = [false, true].map(|tools| send(&plain, tools));
    assert_eq!(whole["timings"].get("attention_window"), None, "{whole}");
    assert_eq!(
        plain.request("/props", "").json()["runtime"]["attention_window"],
        0
    );
    drop(plain);

    let narrow = serve(&["--attention-window", "64", "--attention-window-sinks", "3"]);
    assert!(
        narrow.log.contains("--attention-window 64"),
        "{}",
        narrow.log
    );
    let runtime = &narrow.request("/props", "").json()["runtime"];
    assert_eq!(
        (
            &runtime["attention_window"],
            &runtime["attention_window_sinks"]
        ),
        (&json!(64), &json!(3))
    );
    for part in ["", "_sinks", "_force"] {
        let [new, old] = ["attention", "fa"].map(|name| &runtime[format!("{name}_window{part}")]);
        assert_eq!(new, old, "{part}");
    }
    let reply = send(&narrow, false);
    assert_eq!(reply["timings"]["attention_window"], 64);
    assert_eq!(
        reply["timings"].get("attention_window_override_reason"),
        None
    );
    assert_ne!(message(&reply), message(&whole), "no token was masked");
    let reply = send(&narrow, true);
    assert_eq!(reply["timings"]["attention_window"], 0);
    let why = reply["timings"]["attention_window_override_reason"]
        .as_str()
        .unwrap();
    for (new, old) in [
        ("attention_window", "fa_window"),
        ("attention_window_override_reason", "fa_window_full"),
    ] {
        assert_eq!(reply["timings"][new], reply["timings"][old]);
    }
    assert!(why.contains("tools"), "{why}");
    assert_eq!(message(&reply), message(&with_tools));
    drop(narrow);

    let forced = serve(&["--attention-window", "64", "--attention-window-force"]);
    let reply = send(&forced, true);
    assert_eq!(reply["timings"]["attention_window"], 64);
    assert_ne!(message(&reply), message(&with_tools), "no token was masked");
    drop(forced);

    let wide = serve(&["--attention-window", "2048"]);
    let reply = send(&wide, false);
    assert_eq!(reply["timings"]["attention_window"], 2048);
    assert_eq!(message(&reply), message(&whole));
}

#[test]
fn window_narrower_than_a_tree_is_refused() {
    let done = hearth(&["serve", "--attention-window", "63"]);
    assert_eq!(done.code, Some(2), "{}", done.err);
    assert!(done.err.contains("at least 64"), "{}", done.err);
}

#[test]
fn bench_depth_measures_windows_and_full_attention() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("depth.jsonl");
    good(
        "bench depth {} --device cpu --at 256 --tg 2 --verify 4 --reps 1 --attention-window 0,64 --json {}",
        &[&model(), &json],
    );
    let lines = std::fs::read_to_string(&json).unwrap();
    let lines: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let bytes = |case: &str| {
        let line = lines.iter().find(|line| line["case"] == case);
        let line = line.unwrap_or_else(|| panic!("no {case} in {lines:?}"));
        line["bytes"].as_f64().unwrap()
    };
    assert!(bytes("verify 4, window 64") < bytes("verify 4"));
    assert!(bytes("tg 2, window 64") < bytes("tg 2"));
}
