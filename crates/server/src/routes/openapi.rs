//! The description of this server for programs that read such descriptions.

use axum::Json;
use serde_json::{Map, Value, json};

use super::status::VERSION;

/// `GET /openapi.json`.
pub(super) async fn openapi() -> Json<Value> {
    Json(document())
}

/// One operation: path, method, what it does, and the schema of its body.
type Operation = (
    &'static str,
    &'static str,
    &'static str,
    Option<&'static str>,
);

const OPERATIONS: [Operation; 22] = [
    ("/health", "get", "Whether requests are taken", None),
    ("/models", "get", "The model, as a list", None),
    ("/models/{id}", "get", "The model, by its id", None),
    ("/props", "get", "What is loaded and how it is set up", None),
    ("/slots", "get", "Who is on the device now", None),
    ("/metrics", "get", "Counters as Prometheus text", None),
    ("/version", "get", "The program's version", None),
    ("/openapi.json", "get", "This document", None),
    (
        "/chat/completions",
        "post",
        "A reply to a conversation",
        Some("ChatRequest"),
    ),
    (
        "/chat/completions/input_tokens",
        "post",
        "Tokens of a conversation",
        Some("ChatRequest"),
    ),
    (
        "/chat/completions/control",
        "post",
        "A word to a reply under way",
        Some("ControlRequest"),
    ),
    (
        "/completions",
        "post",
        "Text that goes on",
        Some("CompletionRequest"),
    ),
    (
        "/responses",
        "post",
        "A reply, in items",
        Some("ResponsesRequest"),
    ),
    (
        "/responses/input_tokens",
        "post",
        "Tokens of a conversation in items",
        Some("ResponsesRequest"),
    ),
    (
        "/messages",
        "post",
        "A reply, in Anthropic's blocks",
        Some("MessagesRequest"),
    ),
    (
        "/messages/count_tokens",
        "post",
        "Tokens of a conversation in Anthropic's blocks",
        Some("MessagesRequest"),
    ),
    (
        "/tokenize",
        "post",
        "Text to tokens",
        Some("TokenizeRequest"),
    ),
    (
        "/detokenize",
        "post",
        "Tokens to text",
        Some("DetokenizeRequest"),
    ),
    ("/tokenizer_info", "get", "The template and its marks", None),
    (
        "/apply-template",
        "post",
        "Messages to a prompt",
        Some("ChatRequest"),
    ),
    (
        "/",
        "get",
        "A chat page for browsers, else as /health",
        None,
    ),
    ("/v1", "get", "As /health", None),
];

fn document() -> Value {
    let mut paths = Map::new();
    for (path, method, summary, schema) in OPERATIONS {
        let full = match path {
            "/" | "/v1" => path.to_owned(),
            path => format!("/v1{path}"),
        };
        let operation = operation(&full, summary, schema);
        paths.insert(full, json!({ method: operation }));
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Hearth",
            "version": VERSION,
            "description": "A local language model server. Every path behind /v1 is served without it too.",
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}, {"header": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": schemas(),
        },
    })
}

fn operation(path: &str, summary: &str, schema: Option<&str>) -> Value {
    let anthropic = path.starts_with("/v1/messages");
    let text = |description: &str| json!({"description": description});
    let mut responses = Map::new();
    responses.insert(
        "200".to_owned(),
        text("The answer; a stream of events if one was asked for"),
    );
    let mut errors = vec![
        ("401", "No key, or a wrong one"),
        ("404", "Nothing of that name"),
        ("500", "A defect of the server or the model's file"),
        ("503", "The model is loading, or the server is stopping"),
    ];
    if schema.is_some() {
        errors.push(("400", "The request is wrong; the message says where"));
        errors.push(("413", "The body is too large"));
        errors.push(match anthropic {
            true => ("529", "The queue is full"),
            false => ("429", "The queue is full"),
        });
    }
    let error = match anthropic {
        true => "AnthropicError",
        false => "Error",
    };
    for (status, description) in errors {
        let mut response = text(description);
        // Health says in its own words why it is not well.
        if !(status == "503" && schema.is_none()) {
            let schema = json!({"$ref": format!("#/components/schemas/{error}")});
            response["content"] = json!({"application/json": {"schema": schema}});
        }
        responses.insert(status.to_owned(), response);
    }
    let mut operation = json!({"summary": summary, "responses": responses});
    if path.contains("{id}") {
        operation["parameters"] = json!([
            {"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}
        ]);
    }
    if let Some(schema) = schema {
        let schema = json!({"$ref": format!("#/components/schemas/{schema}")});
        operation["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    operation
}

fn schemas() -> Value {
    let chat = json!({
        "messages": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/ChatMessage"}},
        "tools": {"type": "array", "items": {"type": "object"}},
        "tool_choice": {"type": ["string", "object", "null"]},
        "max_completion_tokens": {"type": ["integer", "null"], "minimum": -1},
        "logprobs": {"type": ["boolean", "null"]},
        "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
        "reasoning_effort": {"type": ["string", "null"]},
        "enable_thinking": {"type": ["boolean", "null"]},
    });
    let completion = json!({
        "prompt": {"type": ["string", "array"], "items": {"type": ["string", "integer", "array"]}},
        "echo": {"type": ["boolean", "null"]},
        "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
    });
    let messages = json!({
        "messages": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Message"}},
        "system": {"type": ["string", "array"], "items": {"type": "object"}},
        "tools": {"type": "array", "items": {"type": "object"}},
        "stop_sequences": {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}},
        "thinking": {"type": ["object", "null"]},
    });
    let responses = json!({
        "input": {"type": ["string", "array"], "items": {"type": "object"}},
        "instructions": {"type": ["string", "null"]},
        "tools": {"type": "array", "items": {"type": "object"}},
        "max_output_tokens": {"type": ["integer", "null"], "minimum": -1},
        "reasoning": {"type": ["object", "null"]},
    });
    let text = json!({"type": ["string", "array", "null"], "items": {"type": "object"}});
    json!({
        "ChatRequest": request(chat, &["messages"]),
        "CompletionRequest": request(completion, &["prompt"]),
        "MessagesRequest": request(messages, &["messages"]),
        "ResponsesRequest": request(responses, &["input"]),
        "ChatMessage": {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
                "content": text,
            },
        },
        "Message": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": text},
        },
        "TokenizeRequest": {
            "type": "object",
            "properties": {
                "content": {"type": "string"},
                "parse_special": {"type": "boolean"},
                "with_pieces": {"type": "boolean"},
            },
        },
        "DetokenizeRequest": {
            "type": "object",
            "required": ["tokens"],
            "properties": {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
        },
        "ControlRequest": {
            "type": "object",
            "required": ["id", "action"],
            "properties": {
                "id": {"type": "string"},
                "action": {"type": "string", "enum": ["reasoning_end"]},
            },
        },
        "Error": {
            "type": "object",
            "required": ["error"],
            "properties": {"error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }},
        },
        "AnthropicError": {
            "type": "object",
            "required": ["type", "error"],
            "properties": {
                "type": {"const": "error"},
                "error": {
                    "type": "object",
                    "required": ["type", "message"],
                    "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
                },
                "request_id": {"type": ["string", "null"]},
            },
        },
    })
}

/// A request with these fields of its own beside those that all requests share.
fn request(own: Value, required: &[&str]) -> Value {
    let mut properties = json!({
        "model": {"type": ["string", "null"]},
        "stream": {"type": ["boolean", "null"]},
        "max_tokens": {"type": ["integer", "null"], "minimum": -1},
        "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
        "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": ["integer", "null"], "minimum": -1},
        "min_p": {"type": ["number", "null"], "minimum": 0, "exclusiveMaximum": 1},
        "seed": {"type": ["integer", "null"]},
    });
    if let (Value::Object(all), Value::Object(own)) = (&mut properties, own) {
        all.extend(own);
    }
    json!({"type": "object", "required": required, "properties": properties})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_lists_exactly_what_is_served() {
        let mut listed: Vec<String> = OPERATIONS
            .iter()
            .map(|(path, ..)| *path)
            .filter(|path| !matches!(*path, "/" | "/v1"))
            .map(|path| format!("/v1{}", path.replace("{id}", "{*id}")))
            .collect();
        let mut served: Vec<String> = super::super::paths().collect();
        listed.sort();
        served.sort();
        assert_eq!(listed, served);
    }

    #[test]
    fn every_reference_leads_somewhere() {
        fn walk(value: &Value, found: &mut Vec<String>) {
            match value {
                Value::Object(map) => {
                    if let Some(Value::String(to)) = map.get("$ref") {
                        found.push(to.trim_start_matches('#').to_owned());
                    }
                    map.values().for_each(|value| walk(value, found));
                }
                Value::Array(items) => items.iter().for_each(|value| walk(value, found)),
                _ => {}
            }
        }
        let document = document();
        let mut found = Vec::new();
        walk(&document, &mut found);
        assert!(found.len() > 20);
        for to in found {
            assert!(document.pointer(&to).is_some(), "{to}");
        }
    }
}
