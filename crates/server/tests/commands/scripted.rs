//! Tests of `hearth serve --script`.

use std::fs;

use serde_json::{Value, json};

use crate::client::ServerProcess;
use crate::process::hearth;

const SCRIPT: &str = r##"# the replies of a test
{"last": "<tool_response>", "say": "The file says MARKER-7."}
{"when": "read_file", "last": "Look into", "think": "I should read it.", "say": "I look.\n\n<tool_call>\n<function=read_file>\n<parameter=path>\na/é.txt\n</parameter>\n</function>\n</tool_call>"}
{"last": "draw", "say": "A cat: 🐈‍⬛, and 漢字."}
{"say": "Hello."}
"##;

fn server() -> (tempfile::TempDir, ServerProcess) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("replies.jsonl");
    fs::write(&file, SCRIPT).unwrap();
    let server = ServerProcess::start(&["--script", file.to_str().unwrap()]);
    (dir, server)
}

fn tool() -> Value {
    json!({"type": "function", "function": {"name": "read_file", "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}})
}

fn chat(server: &ServerProcess, body: &Value) -> Value {
    let response = server.request("/v1/chat/completions", &body.to_string());
    assert_eq!(response.status, 200, "{}", response.body);
    response.json()
}

#[test]
fn scripted_replies_pass_through_template_parser_and_streams() {
    let (_dir, server) = server();
    assert!(
        server.log.contains("not from a model") && server.log.contains("4 replies"),
        "{}",
        server.log
    );
    let props = server.request("/props", "").json();
    assert!(
        props["warning"].as_str().unwrap().contains("script"),
        "{props}"
    );
    assert_eq!(props["runtime"]["backend"], "script");

    let question = json!({"role": "user", "content": "Look into a/é.txt"});
    let first = chat(&server, &json!({"messages": [question], "tools": [tool()]}));
    let message = &first["choices"][0]["message"];
    let reasoning = message["reasoning_content"].as_str().unwrap();
    assert_eq!(reasoning.trim_end(), "I should read it.", "{first}");
    assert_eq!(message["content"], "I look.", "{first}");
    let call = &message["tool_calls"][0];
    assert_eq!(call["function"]["name"], "read_file");
    assert_eq!(call["function"]["arguments"], "{\"path\": \"a/é.txt\"}");
    assert_eq!(first["choices"][0]["finish_reason"], "tool_calls");

    let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "MARKER-7"});
    let history = json!({"messages": [question, message, result], "tools": [tool()]});
    let second = chat(&server, &history);
    let content = &second["choices"][0]["message"]["content"];
    assert_eq!(content, "The file says MARKER-7.", "{second}");
}

#[test]
fn scripted_stream_keeps_characters_whole_and_ignores_sampling() {
    let (_dir, server) = server();
    let body = json!({"messages": [{"role": "user", "content": "draw"}], "stream": true, "temperature": 2,
        "frequency_penalty": 2, "repetition_penalty": 1.5, "chat_template_kwargs": {"enable_thinking": false}});
    let response = server.request("/v1/chat/completions", &body.to_string());
    let mut text = String::new();
    for line in response
        .body
        .lines()
        .filter_map(|l| l.strip_prefix("data: {"))
    {
        let chunk: Value = serde_json::from_str(&format!("{{{line}")).unwrap();
        text += chunk["choices"][0]["delta"]["content"]
            .as_str()
            .unwrap_or("");
    }
    assert_eq!(text, "A cat: 🐈‍⬛, and 漢字.", "{}", response.body);
}

#[test]
fn disabled_reasoning_is_dropped_and_n_replies_are_equal() {
    let (_dir, server) = server();
    let question = json!({"role": "user", "content": "Look into a.txt"});
    let body = json!({"messages": [question], "tools": [tool()], "enable_thinking": false, "n": 2});
    let reply = chat(&server, &body);
    for choice in reply["choices"].as_array().unwrap() {
        assert!(
            choice["message"].get("reasoning_content").is_none(),
            "{reply}"
        );
        assert_eq!(choice["message"]["content"], "I look.", "{reply}");
    }
    let body = json!({"model": "x", "max_tokens": 99, "messages": [question],
        "tools": [{"name": "read_file", "input_schema": {"type": "object"}}]});
    let reply = server.request("/v1/messages", &body.to_string()).json();
    assert_eq!(reply["stop_reason"], "tool_use", "{reply}");
}

#[test]
fn invalid_script_line_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "{\"say\": \"a\"}\n{\"says\": \"b\"}\n").unwrap();
    let path = file.path().to_str().unwrap();
    let done = hearth(&["serve", "--port", "0", "--script", path]);
    assert_eq!(done.code, Some(1));
    for part in [path, "line 2", "says"] {
        assert!(done.err.contains(part), "{part} in {}", done.err);
    }
}
