//! Responses: the response, whole and streamed.

use serde_json::{Value, json};

use crate::test_server::{ServerSetup, TestServer};

const RESPONSES: &str = "/v1/responses";

fn body(fields: Value) -> Value {
    let mut body = json!({"model": "any", "input": "hi"});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

/// The tools of a coding agent: functions, a namespace, a custom tool with free text, and unknown
/// kinds.
fn tools() -> Value {
    json!([
        {"type": "function", "name": "shell", "strict": false, "parameters": {
            "type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}}},
        {"type": "namespace", "name": "mcp__fs", "tools": [{"type": "function", "name": "read",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}]},
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
        {"type": "web_search"},
    ])
}

/// The events of a stream after common checks.
async fn events(server: &TestServer, fields: Value) -> Vec<Value> {
    let mut fields = body(fields);
    fields["stream"] = json!(true);
    let answer = server.post(RESPONSES, &fields).await;
    assert_eq!(answer.status, 200);
    let mut events = Vec::new();
    for (number, (name, data)) in answer.events().await.into_iter().enumerate() {
        assert_eq!(data["type"], name);
        assert_eq!(data["sequence_number"], number);
        events.push(data);
    }
    assert_eq!(events[0]["type"], "response.created");
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(events[1]["type"], "response.in_progress");
    let items = |kind: &str| -> Vec<Value> {
        let of = events.iter().filter(|event| event["type"] == kind);
        of.map(|event| json!([event["output_index"], event["item"]["id"]]))
            .collect()
    };
    let added = items("response.output_item.added");
    assert_eq!(added, items("response.output_item.done"));
    events
}

/// The items of the `done` events.
fn done(events: &[Value]) -> Vec<&Value> {
    let done = events
        .iter()
        .filter(|event| event["type"] == "response.output_item.done");
    done.map(|event| &event["item"]).collect()
}

fn joined(events: &[Value], kind: &str) -> String {
    let of = events.iter().filter(|event| event["type"] == kind);
    of.map(|event| event["delta"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn whole_response_has_all_fields() {
    let server = ServerSetup::saying("Hello 日本 😀.").open().await;
    let fields =
        json!({"instructions": "be short", "max_output_tokens": 100, "metadata": {"a": "b"}});
    let answer = server.post(RESPONSES, &body(fields.clone())).await;
    assert_eq!(answer.status, 200);
    let whole = answer.json().await;
    assert!(whole["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!(whole["object"], "response");
    assert_eq!(whole["status"], "completed");
    assert_eq!(whole["model"], "any");
    assert_eq!(whole["instructions"], "be short");
    assert_eq!(whole["max_output_tokens"], 100);
    assert_eq!(whole["metadata"], json!({"a": "b"}));
    assert_eq!(whole["tools"], json!([]));
    assert_eq!(whole["store"], true);
    for key in ["error", "incomplete_details", "previous_response_id"] {
        assert!(whole.get(key).is_some_and(Value::is_null), "{key}");
    }
    let item = &whole["output"][0];
    assert_eq!(item["type"], "message");
    assert_eq!(item["role"], "assistant");
    assert_eq!(item["status"], "completed");
    assert_eq!(
        item["content"],
        json!([{"type": "output_text", "text": "Hello 日本 😀.", "annotations": [], "logprobs": []}])
    );
    assert_eq!(whole["usage"]["output_tokens"], 19);
    assert!(whole["timings"]["prefill_ms"].is_number(), "{whole}");
    assert_eq!(whole["timings"]["draft_n"], 0, "{whole}");
    let counted = server
        .post("/v1/responses/input_tokens", &body(fields))
        .await
        .json()
        .await;
    assert_eq!(counted["input_tokens"], whole["usage"]["input_tokens"]);
}

#[tokio::test]
async fn streamed_response_equals_the_whole_response() {
    let text = "Hello 日本 😀.";
    let server = ServerSetup::saying(text).open().await;
    let events = events(&server, json!({})).await;
    assert_eq!(joined(&events, "response.output_text.delta"), text);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    let whole = &last["response"];
    assert_eq!(whole["output"][0], *done(&events)[0]);
    assert_eq!(whole["usage"]["total_tokens"].as_u64().unwrap(), {
        let usage = &whole["usage"];
        usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap()
    });
    assert!(whole["timings"]["decode_tokens_per_sec"].is_number());
    // A response that has just begun has no timings.
    assert_eq!(events[0]["response"].get("timings"), None);
}

#[tokio::test]
async fn reasoning_calls_and_text_are_separate_items() {
    let said = "setup\n</think>\n\nDoing it.\n\
        <tool_call>\n<function=shell>\n<parameter=command>\n[\"ls\", \"-l\"]\n</parameter>\n</function>\n</tool_call>\n\
        <tool_call>\n<function=mcp__fs__read>\n<parameter=path>\na\n</parameter>\n\
        </function>\n</tool_call>\n\
        <tool_call>\n<function=patch>\n<parameter=input>\nline \"1\"\nline 2\n</parameter>\n</function>\n</tool_call>";
    let server = ServerSetup {
        limits: contract::Limits {
            context: 1024,
            ..ServerSetup::default().limits
        },
        ..ServerSetup::saying(said)
    }
    .open()
    .await;
    let fields = json!({"tools": tools(), "reasoning": {"effort": "high"}, "tool_choice": "auto",
        "parallel_tool_calls": true, "store": false, "include": ["reasoning.encrypted_content"]});
    let events = events(&server, fields.clone()).await;
    let items = done(&events);
    let kinds: Vec<&Value> = items.iter().map(|item| &item["type"]).collect();
    assert_eq!(
        kinds,
        [
            "reasoning",
            "message",
            "function_call",
            "function_call",
            "custom_tool_call"
        ]
    );
    assert_eq!(
        joined(&events, "response.reasoning_text.delta").trim(),
        "setup"
    );
    assert!(items[0].get("encrypted_content").is_none());
    assert_eq!(items[1]["content"][0]["text"], "Doing it.");
    let arguments = |item: &Value| -> Value {
        serde_json::from_str(item["arguments"].as_str().unwrap()).unwrap()
    };
    assert_eq!(items[2]["name"], "shell");
    assert_eq!(arguments(items[2]), json!({"command": ["ls", "-l"]}));
    assert!(items[2].get("namespace").is_none());
    assert_eq!(items[3]["name"], "read");
    assert_eq!(items[3]["namespace"], "mcp__fs");
    assert_eq!(arguments(items[3]), json!({"path": "a"}));
    assert_eq!(items[4]["name"], "patch");
    assert_eq!(items[4]["input"], "line \"1\"\nline 2");
    assert_ne!(items[2]["call_id"], items[3]["call_id"]);
    let whole = server.post(RESPONSES, &body(fields)).await.json().await;
    let output = whole["output"].as_array().unwrap();
    assert_eq!(output.len(), 5, "text and calls both appear");
    assert_eq!(output[4]["input"], items[4]["input"]);
    let mut expected = tools();
    expected[0]["description"] = Value::Null;
    assert_eq!(whole["tools"], expected);
    assert!(whole["completed_at"].as_i64() >= whole["created_at"].as_i64());
}

#[tokio::test]
async fn length_limit_makes_the_response_incomplete() {
    let server = ServerSetup::saying("Hello there.").open().await;
    let fields = json!({"max_output_tokens": 5});
    let whole = server.post(RESPONSES, &body(fields.clone())).await;
    let whole = whole.json().await;
    assert_eq!(whole["status"], "incomplete");
    assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
    let events = events(&server, fields).await;
    assert_eq!(events.last().unwrap()["type"], "response.incomplete");
}

#[tokio::test]
async fn item_history_is_accepted() {
    let server = ServerSetup::saying("ok").open().await;
    let input = json!([
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}],
         "encrypted_content": null},
        {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": "{\"command\":[\"ls\"]}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a b"},
        {"type": "tomorrows_item", "x": 1},
    ]);
    let fields =
        json!({"input": input, "tools": tools(), "prompt_cache_key": "k", "client_metadata": {}});
    let whole = server.post(RESPONSES, &body(fields)).await;
    assert_eq!(whole.status, 200);
    let probe = json!({"instructions": "x", "max_output_tokens": 1});
    assert_eq!(server.post(RESPONSES, &probe).await.status, 200);
}

#[tokio::test]
async fn errors_precede_the_stream_and_failure_ends_it() {
    let server = ServerSetup::saying("Hello.").open().await;
    for (fields, code) in [
        (
            json!({"previous_response_id": "resp_1"}),
            json!("previous_response_not_found"),
        ),
        (
            json!({"input": "y".repeat(700)}),
            json!("context_length_exceeded"),
        ),
        (json!({"temperature": -3}), Value::Null),
    ] {
        let mut fields = body(fields);
        fields["stream"] = json!(true);
        let answer = server.post(RESPONSES, &fields).await;
        assert_eq!(answer.status, 400);
        assert_eq!(answer.json().await["error"]["code"], code);
    }
    server.watch.gate.panic_next();
    let answer = server.post(RESPONSES, &body(json!({"stream": true}))).await;
    assert_eq!(answer.status, 200);
    let events = answer.events().await;
    let (name, last) = events.last().unwrap();
    assert_eq!(name, "response.failed");
    assert_eq!(last["response"]["status"], "failed");
    assert_eq!(last["response"]["error"]["code"], "server_error");
}

#[tokio::test]
async fn unset_sampling_is_echoed_as_it_is_used() {
    // The test model's own default temperature is 0.
    let server = ServerSetup::saying("ok").open().await;
    let body = json!({"input": "hi", "top_p": 0.5});
    let whole = server.post("/v1/responses", &body).await.json().await;
    assert_eq!(whole["temperature"], 0.0, "{whole}");
    assert_eq!(whole["top_p"], 0.5);
    let body = json!({"input": "hi", "temperature": 0.25, "stream": true});
    let events = server.post("/v1/responses", &body).await.events().await;
    for (name, data) in &events {
        if matches!(name.as_str(), "response.created" | "response.completed") {
            assert_eq!(data["response"]["temperature"], 0.25, "{name}");
            assert_eq!(data["response"]["top_p"], 1.0, "{name}");
        }
    }
}

#[tokio::test]
async fn compacted_conversation_goes_on_in_a_later_request() {
    let server = ServerSetup::saying("They agreed on 42.").open().await;
    let body = json!({"model": "any", "input": [
        {"role": "user", "content": "which number?"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "42"}]},
    ]});
    let whole = server
        .post("/v1/responses/compact", &body)
        .await
        .json()
        .await;
    assert_eq!(whole["object"], "response.compaction", "{whole}");
    assert!(whole["id"].as_str().unwrap().starts_with("resp_"));
    assert!(whole["usage"]["output_tokens"].as_u64().unwrap() > 0);
    let mut input = whole["output"].as_array().unwrap().clone();
    assert_eq!(input.len(), 2);
    assert_eq!(input[0]["content"][0]["text"], "which number?");
    assert_eq!(input[1]["type"], "compaction");
    let summary = input[1]["encrypted_content"].as_str().unwrap();
    assert!(summary.ends_with("They agreed on 42."), "{summary}");
    input.push(json!({"role": "user", "content": "go on"}));
    let with_summary = json!({ "input": input });
    let count = async |body: &Value| {
        let counted = server.post("/v1/responses/input_tokens", body).await;
        counted.json().await["input_tokens"].as_u64().unwrap()
    };
    let without = json!({"input": [input[0], input[2]]});
    assert!(count(&with_summary).await > count(&without).await);
    let reply = server.post("/v1/responses", &with_summary).await;
    assert_eq!(reply.status, 200);
    let foreign = json!({"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]});
    let reply = server.post("/v1/responses", &foreign).await;
    assert_eq!(reply.status, 400);
}
