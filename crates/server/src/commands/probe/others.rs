//! Checks of Anthropic's messages, OpenAI's responses, Ollama's chat and llama-server's gaps.

use serde_json::{Value, json};
use ureq::http::Method;

use super::{
    Check, CheckFailure, Finding, Probe, add_fields, check, excerpt, no_response, require, success,
};
use crate::commands::http_client::HttpResponse;

const MESSAGES: &str = "/v1/messages?beta=true";
const RESPONSES: &str = "/v1/responses";

pub(super) const CHECKS: [Check; 9] = [
    check("messages", messages),
    check("messages: stream", messages_stream),
    check("messages: count tokens", count_tokens),
    check("messages: tool result used", messages_tools),
    check("responses", responses),
    check("responses: stream", responses_stream),
    check("ollama: models", ollama_models),
    check("ollama: chat stream", ollama_chat),
    check("infill", infill),
];

/// The response to a messages request with `more` fields.
fn send(probe: &Probe, path: &str, more: Value) -> Result<HttpResponse, CheckFailure> {
    let tool = json!({"name": "read_note", "description": "Reads a note.",
        "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}}});
    let mut body = json!({
        "model": probe.model,
        "max_tokens": 64,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}],
        "tools": [tool],
        "stop_sequences": ["\n\n\n"],
        "temperature": 0,
    });
    add_fields(&mut body, more);
    let headers = [
        ("anthropic-version", "2023-06-01"),
        ("x-api-key", probe.client.key().unwrap_or("none")),
    ];
    let response = probe
        .client
        .send(Method::POST, path, &headers, body.to_string().as_bytes());
    success(response.map_err(|error| no_response(&error))?)
}

fn messages(probe: &Probe) -> Finding {
    let reply = send(probe, MESSAGES, json!({}))?.json();
    let blocks = reply["content"].as_array().into_iter().flatten();
    let text: String = blocks
        .filter_map(|block| {
            block["text"]
                .as_str()
                .or_else(|| block["thinking"].as_str())
        })
        .collect();
    require(
        reply["type"] == "message" && reply["role"] == "assistant",
        || format!("{reply}"),
    )?;
    require(
        !text.is_empty() || reply["stop_reason"] == "tool_use",
        || format!("no text: {reply}"),
    )?;
    require(reply["usage"]["output_tokens"].is_u64(), || {
        format!("usage {}", reply["usage"])
    })?;
    Ok(excerpt(&text))
}

fn messages_stream(probe: &Probe) -> Finding {
    let response = send(probe, MESSAGES, json!({"stream": true}))?;
    let events = response.events();
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    require(names.first() == Some(&"message_start"), || {
        format!("begins with {:?}", names.first())
    })?;
    require(names.last() == Some(&"message_stop"), || {
        format!("ends with {:?}", names.last())
    })?;
    let count = |name: &str| names.iter().filter(|other| **other == name).count();
    let (starts, stops) = (count("content_block_start"), count("content_block_stop"));
    require(starts == stops && starts > 0, || {
        format!("{starts} blocks started, {stops} ended")
    })?;
    require(count("message_delta") == 1, || {
        "not exactly one message_delta".to_owned()
    })?;
    for (name, data) in &events {
        let value: Value = serde_json::from_str(data).unwrap_or_default();
        require(value["type"] == name.as_str(), || {
            format!("event {name} has type {}", value["type"])
        })?;
    }
    Ok(format!("{} events", events.len()))
}

fn count_tokens(probe: &Probe) -> Finding {
    let reply = send(probe, "/v1/messages/count_tokens", json!({}))?.json();
    let n = reply["input_tokens"].as_u64().unwrap_or(0);
    require(n > 0, || format!("{reply}"))?;
    Ok(format!("{n} tokens"))
}

fn messages_tools(probe: &Probe) -> Finding {
    let input = json!({"name": "alpha"});
    let messages = json!([
        {"role": "user", "content": "Please read the note with name alpha"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "read_note", "input": input}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1",
            "content": [{"type": "text", "text": "MARKER-7"}]}]},
        {"role": "system", "content": "Be brief."},
    ]);
    let reply = send(
        probe,
        MESSAGES,
        json!({"messages": messages, "thinking": {"type": "adaptive"}}),
    )?
    .json();
    require(reply["stop_reason"].is_string(), || format!("{reply}"))?;
    Ok(format!("stop_reason {}", reply["stop_reason"]))
}

fn response_body(probe: &Probe, more: Value) -> Value {
    let mut body = json!({
        "model": probe.model,
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Say hello."}]}],
        "tools": [
            {"type": "function", "name": "read_note", "parameters": {"type": "object", "properties": {}}},
            {"type": "web_search"},
        ],
        "reasoning": {"effort": "low", "summary": "auto"},
        "max_output_tokens": 32,
        "store": false,
    });
    add_fields(&mut body, more);
    body
}

fn responses(probe: &Probe) -> Finding {
    let reply = probe
        .post_ok(RESPONSES, &response_body(probe, json!({})))?
        .json();
    let items = reply["output"].as_array().into_iter().flatten();
    let text: String = items
        .filter(|item| item["type"] == "message")
        .filter_map(|item| item["content"][0]["text"].as_str())
        .collect();
    require(reply["object"] == "response", || {
        format!("object is {}", reply["object"])
    })?;
    require(!text.is_empty(), || {
        format!("no text within 32 tokens: {}", reply["output"])
    })?;
    Ok(excerpt(&text))
}

fn responses_stream(probe: &Probe) -> Finding {
    let response = probe.post_ok(RESPONSES, &response_body(probe, json!({"stream": true})))?;
    let events = response.events();
    let first = events.first().map(|(name, _)| name.as_str());
    require(first == Some("response.created"), || {
        format!("begins with {first:?}")
    })?;
    let last = events
        .last()
        .map(|(name, _)| name.as_str())
        .unwrap_or_default();
    require(
        ["response.completed", "response.incomplete"].contains(&last),
        || format!("ends with {last}"),
    )?;
    for (n, (_, data)) in events.iter().enumerate() {
        let value: Value = serde_json::from_str(data).unwrap_or_default();
        require(value["sequence_number"] == n, || {
            format!("event {n} has number {}", value["sequence_number"])
        })?;
    }
    require(
        events.iter().any(|(name, _)| name.ends_with(".delta")),
        || "no delta".to_owned(),
    )?;
    Ok(format!("{} events", events.len()))
}

fn ollama_models(probe: &Probe) -> Finding {
    let reply = success(probe.get("/api/tags")?)?.json();
    let name = reply["models"][0]["name"].as_str();
    require(name.is_some(), || format!("{reply}"))?;
    Ok(name.unwrap_or_default().to_owned())
}

fn ollama_chat(probe: &Probe) -> Finding {
    let body = json!({
        "model": probe.model,
        "messages": [{"role": "user", "content": "Say hello."}],
        "options": {"num_predict": 16, "temperature": 0},
    });
    let response = probe.post_ok("/api/chat", &body)?;
    let lines: Vec<Value> = response
        .body
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_default())
        .collect();
    let texts = lines.iter().map(|line| &line["message"]);
    let texts = texts.flat_map(|message| [&message["content"], &message["thinking"]]);
    let text: String = texts.filter_map(Value::as_str).collect();
    let last = lines.last().unwrap_or(&Value::Null);
    require(last["done"] == true && last["eval_count"].is_u64(), || {
        format!("the last line is {last}")
    })?;
    require(!text.is_empty(), || "no text".to_owned())?;
    Ok(excerpt(&text))
}

fn infill(probe: &Probe) -> Finding {
    let body = json!({"input_prefix": "fn main() {", "input_suffix": "}", "n_predict": 8});
    let response = probe.post("/infill", &body)?;
    if response.status == 400 && response.json()["error"]["param"] == "input_suffix" {
        return Ok("refused: the model has no tokens for a gap".to_owned());
    }
    let reply = success(response)?.json();
    let text = reply["content"].as_str();
    require(text.is_some(), || format!("{reply}"))?;
    Ok(excerpt(text.unwrap_or_default()))
}
