//! The OpenAPI description of this server.

use axum::Json;
use serde_json::{Map, Value, json};

use super::status::VERSION;

/// `GET /openapi.json`.
pub(super) async fn openapi() -> Json<Value> {
    Json(document())
}

/// One operation.
struct Operation {
    path: &'static str,
    method: &'static str,
    summary: &'static str,
    /// Schema of the request body, if it takes one.
    body: Option<&'static str>,
    /// Content of a successful response.
    response: ResponseContent,
    /// Status codes of its errors, besides those of every operation.
    errors: &'static [u16],
}

/// Content of a successful response.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ResponseContent {
    /// A JSON object.
    Json,
    /// A JSON object, or server-sent events if the request sets `stream`.
    JsonOrEvents,
    /// Server-sent events.
    Events,
    /// An HTML page, or JSON if the client does not accept HTML.
    PageOrJson,
    /// An HTML page.
    Page,
    /// Plain text.
    Text,
}

impl ResponseContent {
    fn kinds(self) -> &'static [&'static str] {
        match self {
            ResponseContent::Json => &[JSON],
            ResponseContent::JsonOrEvents => &[JSON, EVENTS],
            ResponseContent::Events => &[EVENTS],
            ResponseContent::PageOrJson => &[JSON, "text/html"],
            ResponseContent::Page => &["text/html"],
            ResponseContent::Text => &["text/plain"],
        }
    }
}

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";
/// Errors of operations that take a body and generate.
const WORK: &[u16] = &[400, 404, 413, 429, 500, 503];
/// Errors of operations that take a body and do not enter the queue.
const COUNT: &[u16] = &[400, 404, 413, 500, 503];

const fn get(
    path: &'static str,
    summary: &'static str,
    response: ResponseContent,
    errors: &'static [u16],
) -> Operation {
    Operation {
        path,
        method: "get",
        summary,
        body: None,
        response,
        errors,
    }
}

const fn post(
    path: &'static str,
    summary: &'static str,
    body: &'static str,
    response: ResponseContent,
    errors: &'static [u16],
) -> Operation {
    Operation {
        path,
        method: "post",
        summary,
        body: Some(body),
        response,
        errors,
    }
}

use ResponseContent::{Events, Json as Object, JsonOrEvents, Page, PageOrJson, Text};

const OPERATIONS: [Operation; 25] = [
    get("/health", "Whether requests are taken", Object, &[503]),
    get("/models", "The model, as a list", Object, &[]),
    get("/models/{id}", "The model, by its id", Object, &[404]),
    get(
        "/props",
        "What is loaded and how it is set up",
        Object,
        &[500, 503],
    ),
    get("/slots", "Who is on the device now", Object, &[500, 503]),
    get("/status", "A page that shows who is served", Page, &[404]),
    get(
        "/status/json",
        "Who is served, and the server's state",
        Object,
        &[404],
    ),
    get("/status/events", "The same as it changes", Events, &[404]),
    get("/metrics", "Counters as Prometheus text", Text, &[404]),
    get("/version", "The program's version", Object, &[]),
    get("/openapi.json", "This document", Object, &[]),
    post(
        "/chat/completions",
        "A reply to a conversation",
        "ChatRequest",
        JsonOrEvents,
        WORK,
    ),
    post(
        "/chat/completions/input_tokens",
        "Tokens of a conversation",
        "ChatRequest",
        Object,
        COUNT,
    ),
    post(
        "/chat/completions/control",
        "A word to a reply under way",
        "ControlRequest",
        Object,
        COUNT,
    ),
    post(
        "/completions",
        "Text that goes on",
        "CompletionRequest",
        JsonOrEvents,
        WORK,
    ),
    post(
        "/responses",
        "A reply, in items",
        "ResponsesRequest",
        JsonOrEvents,
        WORK,
    ),
    post(
        "/responses/input_tokens",
        "Tokens of a conversation in items",
        "ResponsesRequest",
        Object,
        COUNT,
    ),
    post(
        "/messages",
        "A reply, in Anthropic's blocks",
        "MessagesRequest",
        JsonOrEvents,
        WORK,
    ),
    post(
        "/messages/count_tokens",
        "Tokens of a conversation in Anthropic's blocks",
        "MessagesRequest",
        Object,
        COUNT,
    ),
    post(
        "/tokenize",
        "Text to tokens",
        "TokenizeRequest",
        Object,
        COUNT,
    ),
    post(
        "/detokenize",
        "Tokens to text",
        "DetokenizeRequest",
        Object,
        COUNT,
    ),
    get(
        "/tokenizer_info",
        "The template and its marks",
        Object,
        &[500, 503],
    ),
    post(
        "/apply-template",
        "Messages to a prompt",
        "ChatRequest",
        Object,
        COUNT,
    ),
    get(
        "/",
        "A chat page for browsers, else as /health",
        PageOrJson,
        &[503],
    ),
    get("/v1", "As /health", Object, &[503]),
];

fn document() -> Value {
    let mut paths = Map::new();
    for operation in &OPERATIONS {
        let full = match operation.path {
            "/" | "/v1" => operation.path.to_owned(),
            path => format!("/v1{path}"),
        };
        paths.insert(
            full,
            json!({ operation.method: operation_object(operation) }),
        );
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

fn operation_object(operation: &Operation) -> Value {
    let anthropic = operation.path.starts_with("/messages");
    let open = matches!(operation.path, "/" | "/health" | "/status");
    let mut responses = Map::new();
    responses.insert("200".to_owned(), success(operation));
    // Health and the pages are open to everyone.
    let key = (!open).then_some(401);
    for status in operation.errors.iter().copied().chain(key) {
        let (status, description) = match status {
            400 => ("400", "The request is wrong; the message says where"),
            401 => ("401", "No key, or a wrong one"),
            404 => ("404", "Nothing of that name"),
            413 => ("413", "The body is too large"),
            429 if anthropic => ("529", "The queue is full"),
            429 => ("429", "The queue is full"),
            503 => ("503", "The model is loading, or the server is stopping"),
            _ => ("500", "A defect of the server or the model's file"),
        };
        let schema = match (operation.body, anthropic) {
            // Health reports its state in its own format.
            (None, _) if status == "503" && matches!(operation.path, "/" | "/v1" | "/health") => {
                json!({"type": "object", "required": ["status"]})
            }
            (_, true) => json!({"$ref": "#/components/schemas/AnthropicError"}),
            (_, false) => json!({"$ref": "#/components/schemas/Error"}),
        };
        let content = json!({ JSON: {"schema": schema} });
        let response = json!({"description": description, "content": content});
        responses.insert(status.to_owned(), response);
    }
    let mut object = json!({"summary": operation.summary, "responses": responses});
    if open {
        object["security"] = json!([]);
    }
    if operation.path.contains("{id}") {
        object["parameters"] = json!([
            {"name": "id", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}}
        ]);
    }
    if let Some(schema) = operation.body {
        let schema = json!({"$ref": format!("#/components/schemas/{schema}")});
        object["requestBody"] = json!({"required": true, "content": { JSON: {"schema": schema} }});
    }
    object
}

/// The successful response.
fn success(operation: &Operation) -> Value {
    let response = operation.response;
    let timings = json!({"timings": {"$ref": "#/components/schemas/Timings"}});
    let kinds = response.kinds().iter().map(|kind| {
        let schema = match *kind {
            JSON if operation.path == "/messages" => {
                let usage = json!({"type": "object", "properties": timings});
                json!({"type": "object", "properties": {"usage": usage}})
            }
            JSON if matches!(response, ResponseContent::JsonOrEvents) => {
                json!({"type": "object", "properties": timings})
            }
            JSON => json!({"type": "object"}),
            // Some clients apply the schema to the whole stream, some to each event, so it has no
            // type.
            EVENTS => {
                json!({"description": "server-sent events; the data of each is JSON or [DONE]"})
            }
            _ => json!({"type": "string"}),
        };
        ((*kind).to_owned(), json!({ "schema": schema }))
    });
    let description = match response {
        ResponseContent::JsonOrEvents => "The answer; a stream of events if one was asked for",
        _ => "The answer",
    };
    json!({"description": description, "content": kinds.collect::<Map<String, Value>>()})
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
        "reasoning": {"type": ["object", "boolean", "string", "null"]},
        "reasoning_budget_tokens": {"type": ["integer", "null"], "minimum": -1},
        "think": {"type": ["boolean", "string", "null"]},
        "include_reasoning": {"type": ["boolean", "null"]},
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
        "thinking": {"type": ["object", "boolean", "null"]},
    });
    let responses = json!({
        "input": {"type": ["string", "array"], "items": {"type": "object"}},
        "instructions": {"type": ["string", "null"]},
        "tools": {"type": "array", "items": {"type": "object"}},
        "max_output_tokens": {"type": ["integer", "null"], "minimum": -1},
        "reasoning": {"type": ["object", "boolean", "string", "null"]},
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
        "Timings": timings(),
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

/// Schema of `timings` in a response.
fn timings() -> Value {
    let required = ["prefill_ms", "decode_ms", "decode_tokens_per_sec"];
    let number = |what: &str| json!({"type": "number", "minimum": 0, "description": what});
    json!({
        "type": "object",
        "required": required,
        "properties": {
            "prefill_ms": number("milliseconds from admission to the first row"),
            "decode_ms": number("milliseconds of decoding"),
            "decode_tokens_per_sec": number("0 where nothing was decoded"),
            "steps": number("passes over the model after the prompt"),
            "tokens_per_step": number("tokens of each"),
            "draft_n": number("tokens drafted"),
            "draft_n_accepted": number("of these, kept"),
            "accept_rate": number("the share that was kept"),
        },
    })
}

/// A request schema: the fields `own` and the fields of every request.
fn request(own: Value, required: &[&str]) -> Value {
    let mut properties = json!({
        "model": {"type": ["string", "null"]},
        "stream": {"type": ["boolean", "null"]},
        "max_tokens": {"type": ["integer", "null"], "minimum": -1},
        "temperature": {"type": ["number", "null"], "minimum": 0},
        "top_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        "top_k": {"type": ["integer", "null"]},
        "min_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
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
    fn openapi_document_lists_exactly_the_routes() {
        let mut listed: Vec<String> = OPERATIONS
            .iter()
            .map(|operation| operation.path)
            .filter(|path| !matches!(*path, "/" | "/v1"))
            .map(|path| format!("/v1{}", path.replace("{id}", "{*id}")))
            .collect();
        let mut served: Vec<String> = super::super::paths().collect();
        listed.sort();
        served.sort();
        assert_eq!(listed, served);
    }

    #[test]
    fn openapi_references_resolve() {
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
