//! `hearth bench serve` against a server whose log is JSON.

use std::fs;

use serde_json::Value;

use crate::client::ServerProcess;
use crate::process::{good, hearth};

#[test]
fn load_is_measured_and_the_log_names_requests_by_id() {
    let mut server = ServerProcess::start(&["--log-format", "json", "--max-ctx", "2048"]);
    let dir = tempfile::tempdir().unwrap();
    let (json, svg) = (dir.path().join("load.jsonl"), dir.path().join("load.svg"));
    let line = format!(
        "bench serve http://{} --requests 4 --concurrency 1,2 --prompt-tokens 24 --tokens 6 \
         --json {{}} --svg {{}}",
        server.address
    );
    let done = good(&line, &[&json, &svg]);
    for part in [
        "model ember",
        "1 at a time: 4 answered, 0 failed",
        "2 at a time",
        "first token",
    ] {
        assert!(done.out.contains(part), "{part}: {}", done.out);
    }
    let lines = fs::read_to_string(&json).unwrap();
    let lines: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 2);
    for line in &lines {
        let at = |key: &str| line["first_token_ms"][key].as_f64().unwrap();
        assert!(0.0 < at("p50") && at("p50") <= at("max"), "{line}");
        assert!(line["tokens_per_second"].as_f64() > Some(0.0), "{line}");
        assert!(
            line["prompt_tokens_per_second"].as_f64() > Some(0.0),
            "{line}"
        );
    }
    assert!(fs::read_to_string(&svg).unwrap().starts_with("<svg"));
    let body = r#"{"messages":[{"role":"user","content":"Hello"}],"max_tokens":2}"#;
    let headers = [("x-request-id", "req-77")];
    let reply = server.request_with("/v1/chat/completions", body, &headers);
    assert_eq!(reply.status, 200);
    let logged = server.wait_for("req-77");
    let logged: Value = serde_json::from_str(&logged).unwrap();
    assert_eq!(logged["span"]["id"], "req-77", "{logged}");
    assert_eq!(logged["fields"]["message"], "request finished", "{logged}");
    assert_eq!(logged["fields"]["completion_tokens"], 2, "{logged}");
}

#[test]
fn load_on_no_server_is_refused() {
    let done = hearth(&["bench", "serve", "http://127.0.0.1:1"]);
    assert_eq!(done.code, Some(1), "{}", done.err);
    assert!(done.err.contains("does not respond"), "{}", done.err);
    let done = hearth(&["bench", "serve", "--rate", "0"]);
    assert_eq!(done.code, Some(2), "{}", done.err);
}
