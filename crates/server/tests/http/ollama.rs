//! Ollama's protocol: replies as lines of JSON, loads and unloads, and lists.

use serde_json::{Value, json};

use crate::client::HttpResponse;
use crate::models_server::{ModelsServer, TestModel};
use crate::test_server::{ServerSetup, TestServer};

/// The lines of a stream; each is JSON, with the last one done.
async fn lines(answer: HttpResponse) -> Vec<Value> {
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("application/x-ndjson"));
    let text = answer.text().await;
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect();
    let (last, before) = lines.split_last().unwrap();
    assert_eq!(last["done"], true);
    assert!(
        before.iter().all(|line| line["done"] == false),
        "{before:?}"
    );
    lines
}

/// The texts at a path of all lines, joined.
fn joined(lines: &[Value], pointer: &str) -> String {
    let texts = lines
        .iter()
        .filter_map(|line| line.pointer(pointer)?.as_str());
    texts.collect()
}

fn chat(fields: Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

async fn whole(server: &TestServer, path: &str, mut body: Value) -> Value {
    body["stream"] = json!(false);
    let answer = server.post(path, &body).await;
    let status = answer.status;
    let reply = answer.json().await;
    assert_eq!(status, 200, "{reply}");
    reply
}

#[tokio::test]
async fn chat_streams_lines_and_ends_with_statistics() {
    let server = ServerSetup::saying("hm</think>Hello 日本.").open().await;
    let body = chat(json!({"think": true, "options": {"num_ctx": 4096}}));
    let answer = server.post("/api/chat", &body).await;
    let note = answer.header("x-hearth-note").map(str::to_owned);
    assert!(note.unwrap().contains("512 tokens, not 4096"));
    let lines = lines(answer).await;
    assert_eq!(joined(&lines, "/message/content"), "Hello 日本.");
    assert_eq!(joined(&lines, "/message/thinking"), "hm");
    let last = lines.last().unwrap();
    assert_eq!(
        (&last["model"], &last["done_reason"]),
        (&json!("tiny"), &json!("stop"))
    );
    // Reasoning, its end, 13 bytes and the end of the text.
    assert_eq!(last["eval_count"], 17);
    assert!(last["prompt_eval_count"].as_u64() > Some(0));
    for key in [
        "total_duration",
        "load_duration",
        "prompt_eval_duration",
        "eval_duration",
    ] {
        assert!(last[key].is_u64(), "{key}: {last}");
    }
    let reply = whole(&server, "/api/chat", body).await;
    assert_eq!(
        reply["message"],
        json!({"role": "assistant", "content": "Hello 日本.", "thinking": "hm"})
    );
    assert_eq!(reply["eval_count"], 17);
    let limited = whole(
        &server,
        "/api/chat",
        chat(json!({"options": {"num_predict": 3}})),
    )
    .await;
    assert_eq!(limited["done_reason"], "length");
    assert_eq!(limited["eval_count"], 3);
    let loaded = whole(
        &server,
        "/api/chat",
        json!({"model": "tiny", "messages": []}),
    )
    .await;
    assert_eq!(
        (&loaded["done"], &loaded["done_reason"]),
        (&json!(true), &json!("load"))
    );
}

#[tokio::test]
async fn generate_renders_a_prompt_unless_it_is_raw() {
    let server = ServerSetup::saying("ok").open().await;
    let rendered = server
        .post("/api/generate", &json!({"prompt": "hi", "system": "s"}))
        .await;
    let rendered = lines(rendered).await;
    assert_eq!(joined(&rendered, "/response"), "ok");
    let raw = json!({"prompt": "hi", "raw": true});
    let streamed = lines(server.post("/api/generate", &raw).await).await;
    assert_eq!(joined(&streamed, "/response"), "ok");
    assert_eq!(streamed.last().unwrap()["prompt_eval_count"], 2);
    let whole_raw = whole(&server, "/api/generate", raw).await;
    assert_eq!(
        (&whole_raw["response"], &whole_raw["eval_count"]),
        (&json!("ok"), &json!(3))
    );
    let gap = whole(
        &server,
        "/api/generate",
        json!({"prompt": "a", "suffix": "b"}),
    )
    .await;
    assert_eq!(gap["prompt_eval_count"], 5);
    let loaded = whole(&server, "/api/generate", json!({"model": "tiny"})).await;
    assert_eq!(
        (&loaded["response"], &loaded["done_reason"]),
        (&json!(""), &json!("load"))
    );
    let format = json!({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
        "additionalProperties": false});
    let held = whole(
        &server,
        "/api/generate",
        json!({"prompt": "hi", "format": format}),
    )
    .await;
    let held: Value = serde_json::from_str(held["response"].as_str().unwrap()).unwrap();
    assert_eq!(held, json!({"a": 1}));
}

#[tokio::test]
async fn tool_calls_are_whole_objects() {
    let said = "One.\n<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>";
    let server = ServerSetup::saying(said).open().await;
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer"}}}}}]);
    let lines = lines(
        server
            .post("/api/chat", &chat(json!({"tools": tools})))
            .await,
    )
    .await;
    let calls: Vec<&Value> = lines
        .iter()
        .filter_map(|line| line["message"]["tool_calls"].as_array())
        .flatten()
        .collect();
    assert_eq!(calls.len(), 1, "{lines:?}");
    assert_eq!(
        calls[0]["function"],
        json!({"index": 0, "name": "f", "arguments": {"n": 3}})
    );
    let reply = whole(&server, "/api/chat", chat(json!({"tools": tools}))).await;
    assert_eq!(
        reply["message"]["tool_calls"][0]["function"],
        calls[0]["function"]
    );
    assert_eq!(reply["done_reason"], "stop");
}

#[tokio::test]
async fn lists_describe_the_model_and_errors_are_texts() {
    let server = ServerSetup::saying("ok").open().await;
    let version = server.get("/api/version").await.json().await;
    assert!(version["version"].is_string());
    let tags = server.get("/api/tags").await.json().await;
    let entry = &tags["models"][0];
    assert_eq!(
        (&entry["name"], &entry["size"]),
        (&json!("tiny"), &json!(34))
    );
    assert_eq!(entry["details"]["family"], "script");
    assert_eq!(entry["details"]["quantization_level"], "Q4_K_M");
    // A model that is served needs no pull.
    let pulled = whole(&server, "/api/pull", json!({"model": "tiny:latest"})).await;
    assert_eq!(pulled, json!({"status": "success"}));
    let running = server.get("/api/ps").await.json().await;
    assert_eq!(running["models"][0]["context_length"], 512);
    assert!(running["models"][0]["expires_at"].is_string());
    let shown = server
        .post("/api/show", &json!({"model": "tiny:latest"}))
        .await
        .json()
        .await;
    assert_eq!(shown["model_info"]["script.context_length"], 512);
    let abilities = shown["capabilities"].as_array().unwrap();
    assert!(abilities.contains(&json!("completion")) && abilities.contains(&json!("insert")));
    for (path, body, status, words) in [
        (
            "/api/show",
            json!({"model": "no"}),
            404,
            "'no' does not exist",
        ),
        ("/api/show", json!({}), 400, "model: is missing"),
        ("/api/pull", json!({"model": "a/b"}), 403, "pulls no models"),
        (
            "/api/generate",
            json!({"prompt": "a", "images": ["AA=="]}),
            400,
            "images are not supported",
        ),
        (
            "/api/chat",
            chat(json!({"options": {"top_p": 2}})),
            400,
            "options.top_p",
        ),
        (
            "/api/chat",
            json!({"model": "tiny", "messages": [], "keep_alive": 0}),
            400,
            "keeps its one model",
        ),
    ] {
        let answer = server.post(path, &body).await;
        assert_eq!(answer.status, status, "{body}");
        let error = answer.json().await["error"].clone();
        assert!(error.as_str().unwrap().contains(words), "{error}");
    }
}

#[tokio::test]
async fn models_are_loaded_and_unloaded_by_empty_requests() {
    let mut slow = TestModel::new("b", "two");
    slow.load_time = std::time::Duration::from_millis(200);
    let first = TestModel::new("a", "one");
    let server = ModelsServer::open(&[&first, &slow], 2, |_, _| {}).await;
    let state = async |path: &str, keep_alive: Value| {
        let body = json!({"model": "b:latest", "keep_alive": keep_alive});
        let answer = server.post(path, &body).await;
        assert_eq!(answer.status, 200);
        answer.text().await
    };
    // A model that is not loaded is not loaded to be unloaded.
    let unloaded = state("/api/generate", json!(0)).await;
    assert!(
        unloaded.contains("\"done_reason\":\"unload\""),
        "{unloaded}"
    );
    assert_eq!(slow.loads(), 0);
    let body = json!({"model": "b", "messages": [{"role": "user", "content": "hi"}]});
    let streamed = lines(server.post("/api/chat", &body).await).await;
    assert_eq!(joined(&streamed, "/message/content"), "two");
    let waited = streamed.last().unwrap()["load_duration"].as_u64();
    assert!(waited >= Some(150_000_000), "{waited:?}");
    let loaded = state("/api/chat", json!("5m")).await;
    assert!(loaded.contains("\"done_reason\":\"load\""), "{loaded}");
    assert_eq!(slow.loads(), 1);
    state("/api/chat", json!(0)).await;
    assert_eq!(server.state(1).await, "unloaded");
}
