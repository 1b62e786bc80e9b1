//! Anthropic messages: the response, whole and streamed.

use std::time::Duration;

use serde_json::{Value, json};
use server::settings::ServerConfig;

use crate::client;
use crate::test_server::{ServerSetup, TestServer};

const MESSAGES: &str = "/v1/messages?beta=true";

fn body(fields: Value) -> Value {
    let mut body = json!({
        "model": "claude-x",
        "max_tokens": 300,
        "messages": [{"role": "user", "content": "hi"}],
    });
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

/// A tool as clients of this dialect declare it.
fn tools() -> Value {
    json!([{"name": "Read", "input_schema": {
        "type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}
    }}])
}

/// The events of a stream after common checks: the event name equals the type, block indices
/// increase, each block opens and closes once, `message_start` is first and `message_stop` last.
async fn events(server: &TestServer, fields: Value) -> Vec<Value> {
    let mut fields = body(fields);
    fields["stream"] = json!(true);
    let answer = server.post(MESSAGES, &fields).await;
    assert_eq!(answer.status, 200);
    let mut events = Vec::new();
    for (name, data) in answer.events().await {
        assert_eq!(data["type"], name);
        events.push(data);
    }
    assert_eq!(events[0]["type"], "message_start");
    assert_eq!(events[1]["type"], "ping");
    assert_eq!(events[events.len() - 2]["type"], "message_delta");
    assert_eq!(events[events.len() - 1]["type"], "message_stop");
    let (mut next, mut open) = (0, None);
    for event in &events {
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(open, None, "{event}");
                assert_eq!(event["index"], next);
                open = Some(next);
                next += 1;
            }
            "content_block_delta" => assert_eq!(event["index"].as_u64(), open, "{event}"),
            "content_block_stop" => {
                assert_eq!(event["index"].as_u64(), open, "{event}");
                open = None;
            }
            _ => {}
        }
    }
    assert_eq!(open, None);
    events
}

/// All deltas of one kind in block `index`, joined.
fn joined(events: &[Value], index: usize, field: &str) -> String {
    let of = events.iter().filter(|event| event["index"] == index);
    of.filter_map(|event| event["delta"][field].as_str())
        .collect()
}

fn starts(events: &[Value]) -> Vec<&Value> {
    let starts = events
        .iter()
        .filter(|event| event["type"] == "content_block_start");
    starts.map(|event| &event["content_block"]).collect()
}

#[tokio::test]
async fn whole_message_has_all_fields() {
    let server = ServerSetup::saying("Hello 日本 😀.").open().await;
    let answer = server.post(MESSAGES, &body(json!({}))).await;
    assert_eq!(answer.status, 200);
    let id = answer.header("request-id").unwrap().to_owned();
    assert_eq!(answer.header("x-request-id"), Some(id.as_str()));
    let message = answer.json().await;
    assert!(message["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(message["type"], "message");
    assert_eq!(message["role"], "assistant");
    assert_eq!(message["model"], "claude-x");
    assert_eq!(
        message["content"],
        json!([{"type": "text", "text": "Hello 日本 😀."}])
    );
    assert_eq!(message["stop_reason"], "end_turn");
    assert!(message.get("stop_sequence").is_some_and(Value::is_null));
    let usage = &message["usage"];
    assert_eq!(usage["output_tokens"], 19);
    assert_eq!(usage["cache_creation_input_tokens"], 0);
    assert_eq!(usage["cache_read_input_tokens"], 0);
    let counted = server
        .post("/v1/messages/count_tokens?beta=true", &body(json!({})))
        .await
        .json()
        .await;
    assert_eq!(counted, json!({"input_tokens": usage["input_tokens"]}));
}

#[tokio::test]
async fn streamed_message_equals_the_whole_message() {
    let text = "Hello 日本 😀.";
    let server = ServerSetup::saying(text).open().await;
    let events = events(&server, json!({})).await;
    let message = &events[0]["message"];
    assert_eq!(message["content"], json!([]));
    assert!(message["stop_reason"].is_null());
    assert!(message["usage"]["input_tokens"].as_u64().unwrap() > 0);
    assert_eq!(starts(&events), [&json!({"type": "text", "text": ""})]);
    assert_eq!(joined(&events, 0, "text"), text);
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], "end_turn");
    assert_eq!(end["usage"]["output_tokens"], 19);
    assert_eq!(
        end["usage"]["input_tokens"],
        message["usage"]["input_tokens"]
    );
}

#[tokio::test]
async fn reasoning_is_a_signed_block_before_the_text() {
    let server = ServerSetup::saying("first this\n</think>\n\nthen that")
        .open()
        .await;
    let thinking = json!({"thinking": {"type": "adaptive", "display": "summarized"}});
    let events = events(&server, thinking.clone()).await;
    let kinds: Vec<&Value> = starts(&events).iter().map(|b| &b["type"]).collect();
    assert_eq!(kinds, ["thinking", "text"]);
    assert_eq!(joined(&events, 0, "thinking"), "first this");
    assert!(joined(&events, 0, "signature").len() > 8);
    assert_eq!(joined(&events, 1, "text"), "then that");
    let message = server.post(MESSAGES, &body(thinking)).await.json().await;
    let blocks = &message["content"];
    assert_eq!(blocks[0]["thinking"].as_str().unwrap().trim(), "first this");
    assert!(!blocks[0]["signature"].as_str().unwrap().is_empty());
    assert_eq!(blocks[1], json!({"type": "text", "text": "then that"}));
}

#[tokio::test]
async fn tool_calls_are_tool_use_blocks_whole_and_streamed() {
    let said = "Reading.\n<tool_call>\n<function=Read>\n<parameter=path>\na \"b\"\n</parameter>\n\
                <parameter=n>\n7\n</parameter>\n</function>\n</tool_call>\n\
                <tool_call>\n{\"name\": \"Read\", \"arguments\": {\"path\": \"c\"}}\n</tool_call>";
    let server = ServerSetup::saying(said).open().await;
    let fields = json!({"tools": tools()});
    let first = json!({"path": "a \"b\"", "n": 7});
    let events = events(&server, fields.clone()).await;
    let blocks = starts(&events);
    assert_eq!(blocks.len(), 3);
    assert_eq!(joined(&events, 0, "text"), "Reading.");
    for (index, input) in [(1, first.clone()), (2, json!({"path": "c"}))] {
        assert_eq!(blocks[index]["type"], "tool_use");
        assert_eq!(blocks[index]["name"], "Read");
        assert_eq!(blocks[index]["input"], json!({}));
        assert!(blocks[index]["id"].as_str().unwrap().starts_with("toolu_"));
        let streamed = joined(&events, index, "partial_json");
        assert_eq!(serde_json::from_str::<Value>(&streamed).unwrap(), input);
    }
    assert_ne!(blocks[1]["id"], blocks[2]["id"]);
    let end = &events[events.len() - 2]["delta"];
    assert_eq!(end["stop_reason"], "tool_use");
    let message = server.post(MESSAGES, &body(fields)).await.json().await;
    assert_eq!(message["stop_reason"], "tool_use");
    assert_eq!(message["content"][1]["input"], first);
    assert_eq!(message["content"][2]["input"], json!({"path": "c"}));
}

#[tokio::test]
async fn matched_stop_sequence_is_reported() {
    let server = ServerSetup::saying("one STOP two").open().await;
    let fields = json!({"stop_sequences": ["NEVER", "STOP"]});
    let message = server.post(MESSAGES, &body(fields.clone())).await;
    let message = message.json().await;
    assert_eq!(message["content"][0]["text"], "one ");
    assert_eq!(message["stop_reason"], "stop_sequence");
    assert_eq!(message["stop_sequence"], "STOP");
    let events = events(&server, fields).await;
    let end = &events[events.len() - 2]["delta"];
    assert_eq!(
        end,
        &json!({"stop_reason": "stop_sequence", "stop_sequence": "STOP"})
    );
    let short = body(json!({"max_tokens": 3}));
    let message = server.post(MESSAGES, &short).await.json().await;
    assert_eq!(message["stop_reason"], "max_tokens");
}

#[tokio::test]
async fn message_history_with_calls_and_late_system_message_is_accepted() {
    let server = ServerSetup::saying("ok").open().await;
    let line = "x-anthropic-billing-header: cc_version=2.1; cch=";
    let turns = |nonce: &str| {
        body(json!({
            "system": [{"type": "text", "text": format!("{line}{nonce};")},
                       {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
            "tools": [tools()[0], {"type": "web_search_20250305", "name": "web_search"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "read a"}]},
                {"role": "system", "content": "a reminder"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "so", "signature": "x"},
                    {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "A"}]}]},
            ],
        }))
    };
    assert_eq!(server.post(MESSAGES, &turns("1a")).await.status, 200);
    let count = async |nonce: &str| {
        let answer = server
            .post("/v1/messages/count_tokens", &turns(nonce))
            .await;
        answer.json().await["input_tokens"].as_u64().unwrap()
    };
    assert_eq!(count("1a").await, count("a much longer nonce").await);
}

#[tokio::test]
async fn errors_use_the_dialects_format() {
    let server = ServerSetup::saying("x").open().await;
    let long = json!([{"role": "user", "content": "y".repeat(700)}]);
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    for (fields, words) in [
        (json!({"messages": long}), "prompt is too long: 7"),
        (json!({"messages": image}), "image"),
        (json!({"temperature": -3}), "temperature"),
        (
            json!({"tool_choice": {"type": "tool", "name": "x"}}),
            "tool_choice",
        ),
    ] {
        let answer = server.post(MESSAGES, &body(fields)).await;
        assert_eq!(answer.status, 400, "{words}");
        let id = answer.header("request-id").unwrap().to_owned();
        let error = answer.json().await;
        assert_eq!(error["type"], "error");
        assert_eq!(error["error"]["type"], "invalid_request_error");
        assert_eq!(error["request_id"], id);
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{message}");
    }
    let answer = server.get("/v1/messages").await;
    assert_eq!(answer.status, 405);
    assert_eq!(answer.json().await["type"], "error");
    let header = [("anthropic-version", "2023-06-01")];
    let answer = client::send(server.address, "GET", "/v1/models/other", &header, b"").await;
    assert_eq!(answer.status, 404);
    let error = answer.json().await;
    assert_eq!(error["error"]["type"], "not_found_error");
}

#[tokio::test]
async fn missing_key_error_uses_the_dialects_format() {
    let server = ServerSetup {
        config: ServerConfig {
            api_keys: vec!["k".to_owned()],
            ..ServerSetup::default().config
        },
        ..ServerSetup::saying("x")
    }
    .open()
    .await;
    let answer = server.post(MESSAGES, &body(json!({}))).await;
    assert_eq!(answer.status, 401);
    assert_eq!(answer.json().await["error"]["type"], "authentication_error");
}

#[tokio::test]
async fn idle_message_stream_gets_pings_and_failure_is_an_error_event() {
    let mut setup = ServerSetup::saying("Hello.");
    setup.config.timeouts.keep_alive = Duration::from_millis(20);
    let server = setup.open().await;
    server.watch.gate.hold();
    let mut answer = server.post(MESSAGES, &body(json!({"stream": true}))).await;
    assert_eq!(answer.status, 200, "headers come before the prompt is read");
    let ping = "event: ping\ndata: {\"type\":\"ping\"}";
    // The message starts with its prompt, when the counts of the cache are known.
    for _ in 0..3 {
        assert_eq!(answer.event().await.as_deref(), Some(ping));
    }
    server.watch.gate.panic_next();
    server.watch.gate.release();
    let events = answer.events().await;
    let (name, error) = events.last().unwrap();
    assert_eq!(name, "error");
    assert_eq!(error["type"], "error");
    assert_eq!(error["error"]["type"], "api_error");
    assert!(error["request_id"].is_string());
}
