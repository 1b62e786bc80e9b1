//! The reply cases of `chat` through every dialect, whole and streamed.

use serde_json::{Value, json};

use crate::test_server::{ServerSetup, TestServer};

const CASES: &str = include_str!("../../../chat/src/reply/tests/cases.json");

/// The parts of a reply, whatever the dialect.
#[derive(Debug, Default, PartialEq)]
struct Parts {
    reasoning: String,
    content: String,
    /// Names and arguments.
    calls: Vec<(String, Value)>,
    ends_with_calls: bool,
}

impl Parts {
    fn of_case(case: &Value) -> Parts {
        let text = |key: &str| case[key].as_str().unwrap_or_default().to_owned();
        let calls = case["calls"].as_array().unwrap().iter();
        let calls: Vec<(String, Value)> = calls
            .map(|call| (call[0].as_str().unwrap().to_owned(), call[1].clone()))
            .collect();
        Parts {
            reasoning: text("reasoning"),
            content: text("content"),
            ends_with_calls: !calls.is_empty(),
            calls,
        }
    }

    fn call(&mut self, name: &Value, arguments: &str) {
        let arguments = serde_json::from_str(arguments).unwrap();
        let name = name.as_str().unwrap().to_owned();
        self.calls.push((name, arguments));
    }
}

/// Name and schema of each tool of the cases.
fn schemas() -> [(&'static str, Value); 4] {
    let text = json!({"type": "string"});
    [
        (
            "read",
            json!({"type": "object", "properties": {
                "path": text, "n": {"type": "integer"}, "flag": {"type": "boolean"},
            }}),
        ),
        (
            "write",
            json!({"type": "object", "properties": {"content": text}}),
        ),
        (
            "env",
            json!({"type": "object", "properties": {"name": text}, "additionalProperties": text}),
        ),
        (
            "find",
            json!({"type": "object", "anyOf": [
                {"properties": {"code": text, "zip": text}, "required": ["code"]},
                {"properties": {"id": {"type": "integer"}}},
            ]}),
        ),
    ]
}

fn tools(declare: impl Fn(&str, Value) -> Value) -> Value {
    let tools = schemas().into_iter();
    tools.map(|(name, schema)| declare(name, schema)).collect()
}

async fn chat(server: &TestServer, thinks: bool, stream: bool) -> Parts {
    let tools = tools(
        |name, schema| json!({"type": "function", "function": {"name": name, "parameters": schema}}),
    );
    let fields = json!({"tools": tools, "stream": stream, "enable_thinking": thinks});
    let answer = server.chat(fields).await;
    assert_eq!(answer.status, 200);
    let mut parts = Parts::default();
    if !stream {
        let choice = answer.json().await["choices"][0].clone();
        let message = &choice["message"];
        let text = |key: &str| message[key].as_str().unwrap_or_default().to_owned();
        (parts.reasoning, parts.content) = (text("reasoning_content"), text("content"));
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            let function = &call["function"];
            parts.call(&function["name"], function["arguments"].as_str().unwrap());
        }
        let only_calls = parts.content.is_empty() && !parts.calls.is_empty();
        assert_eq!(message["content"].is_null(), only_calls);
        assert!(message.get("reasoning").is_none());
        parts.ends_with_calls = choice["finish_reason"] == "tool_calls";
        return parts;
    }
    let mut calls: Vec<(Value, String)> = Vec::new();
    for chunk in answer.chunks().await {
        let choice = &chunk["choices"][0];
        let delta = &choice["delta"];
        let text = |key: &str| delta[key].as_str().unwrap_or_default();
        parts.reasoning.push_str(text("reasoning_content"));
        parts.content.push_str(text("content"));
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let function = &call["function"];
            if call.get("id").is_some() {
                calls.push((function["name"].clone(), String::new()));
            }
            let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            calls[index]
                .1
                .push_str(function["arguments"].as_str().unwrap());
        }
        parts.ends_with_calls |= choice["finish_reason"] == "tool_calls";
    }
    calls
        .iter()
        .for_each(|(name, arguments)| parts.call(name, arguments));
    parts
}

async fn messages(server: &TestServer, thinks: bool, stream: bool) -> Parts {
    let tools = tools(|name, schema| json!({"name": name, "input_schema": schema}));
    let kind = if thinks { "enabled" } else { "disabled" };
    let body = json!({"model": "m", "max_tokens": 1500, "stream": stream, "tools": tools,
        "thinking": {"type": kind}, "messages": [{"role": "user", "content": "hi"}]});
    let answer = server.post("/v1/messages", &body).await;
    assert_eq!(answer.status, 200);
    let mut blocks: Vec<(Value, String)> = Vec::new();
    let mut stop_reason = Value::Null;
    if stream {
        for (_, event) in answer.events().await {
            match event["type"].as_str().unwrap() {
                "content_block_start" => {
                    blocks.push((event["content_block"].clone(), String::new()));
                }
                "content_block_delta" => {
                    let delta = &event["delta"];
                    let keys = ["text", "thinking", "partial_json"];
                    let text = keys.iter().find_map(|key| delta[*key].as_str());
                    blocks
                        .last_mut()
                        .unwrap()
                        .1
                        .push_str(text.unwrap_or_default());
                }
                "message_delta" => stop_reason = event["delta"]["stop_reason"].clone(),
                _ => {}
            }
        }
    } else {
        let message = answer.json().await;
        for block in message["content"].as_array().unwrap() {
            let keys = ["text", "thinking"];
            let text = keys.iter().find_map(|key| block[*key].as_str());
            let text = text.map_or_else(|| block["input"].to_string(), str::to_owned);
            blocks.push((block.clone(), text));
        }
        stop_reason = message["stop_reason"].clone();
    }
    let mut parts = Parts::default();
    for (block, text) in blocks {
        match block["type"].as_str().unwrap() {
            "thinking" => parts.reasoning.push_str(&text),
            "text" => parts.content.push_str(&text),
            _ => parts.call(&block["name"], &text),
        }
    }
    parts.ends_with_calls = stop_reason == "tool_use";
    parts
}

async fn responses(server: &TestServer, thinks: bool, stream: bool) -> Parts {
    let tools =
        tools(|name, schema| json!({"type": "function", "name": name, "parameters": schema}));
    let effort = if thinks { "high" } else { "none" };
    let body = json!({"model": "m", "input": "hi", "stream": stream, "tools": tools,
        "reasoning": {"effort": effort}});
    let answer = server.post("/v1/responses", &body).await;
    assert_eq!(answer.status, 200);
    let mut parts = Parts::default();
    let mut streamed = (String::new(), String::new());
    let response = if stream {
        let mut last = Value::Null;
        for (name, event) in answer.events().await {
            let delta = event["delta"].as_str().unwrap_or_default();
            match name.as_str() {
                "response.output_text.delta" => streamed.0.push_str(delta),
                "response.reasoning_text.delta" => streamed.1.push_str(delta),
                "response.completed" => last = event["response"].clone(),
                _ => {}
            }
        }
        last
    } else {
        answer.json().await
    };
    for item in response["output"].as_array().unwrap() {
        let text = item["content"][0]["text"].as_str().unwrap_or_default();
        match item["type"].as_str().unwrap() {
            "reasoning" => parts.reasoning.push_str(text),
            "message" => parts.content.push_str(text),
            _ => parts.call(&item["name"], item["arguments"].as_str().unwrap()),
        }
    }
    if stream {
        assert_eq!(streamed, (parts.content.clone(), parts.reasoning.clone()));
    }
    parts.ends_with_calls = !parts.calls.is_empty();
    parts
}

#[tokio::test]
async fn reply_cases_mean_the_same_in_every_dialect_whole_and_streamed() {
    let cases: Vec<Value> = serde_json::from_str(CASES).unwrap();
    for case in &cases {
        let mut setup = ServerSetup::saying(case["text"].as_str().unwrap());
        setup.limits.context = 2048;
        let server = setup.open().await;
        let thinks = case["starts_in_reasoning"] == true;
        let expected = Parts::of_case(case);
        for stream in [false, true] {
            let name = format!("{}, streamed: {stream}", case["name"]);
            assert_eq!(
                chat(&server, thinks, stream).await,
                expected,
                "chat: {name}"
            );
            let got = messages(&server, thinks, stream).await;
            assert_eq!(got, expected, "messages: {name}");
            let got = responses(&server, thinks, stream).await;
            assert_eq!(got, expected, "responses: {name}");
        }
    }
}
