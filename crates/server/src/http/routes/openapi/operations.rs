//! Every operation of the API.

/// One operation.
pub(super) struct Operation {
    pub(super) path: &'static str,
    pub(super) method: &'static str,
    pub(super) summary: &'static str,
    /// Schema of the request body, if it takes one.
    pub(super) body: Option<&'static str>,
    /// Content of a successful response.
    pub(super) response: ResponseContent,
    /// Schema of its JSON.
    pub(super) reply: &'static str,
    /// Status codes of its errors, besides those of every operation.
    pub(super) errors: &'static [u16],
}

/// Content of a successful response.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ResponseContent {
    /// A JSON object.
    Json,
    /// A JSON object, or server-sent events if the request sets `stream`.
    JsonOrEvents,
    /// A JSON object, or lines of JSON unless the request switches `stream` off.
    JsonOrLines,
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
    pub(super) fn kinds(self) -> &'static [&'static str] {
        match self {
            ResponseContent::Json => &[JSON],
            ResponseContent::JsonOrEvents => &[JSON, EVENTS],
            ResponseContent::JsonOrLines => &[JSON, "application/x-ndjson"],
            ResponseContent::Events => &[EVENTS],
            ResponseContent::PageOrJson => &[JSON, "text/html"],
            ResponseContent::Page => &["text/html"],
            ResponseContent::Text => &["text/plain"],
        }
    }
}

pub(super) const JSON: &str = "application/json";
pub(super) const EVENTS: &str = "text/event-stream";
/// Errors of operations that take a body and generate.
const WORK: &[u16] = &[400, 404, 413, 429, 500, 503];
/// The same in Ollama's protocol, where a full queue is 503.
const OLLAMA_WORK: &[u16] = &[400, 404, 413, 500, 503];
/// Errors of operations that take a body and do not enter the queue.
const COUNT: &[u16] = &[400, 404, 413, 500, 503];

/// Errors of a pull.
const PULL: &[u16] = &[400, 403, 404, 413, 500, 503];

const fn get(
    path: &'static str,
    summary: &'static str,
    (response, reply): (ResponseContent, &'static str),
    errors: &'static [u16],
) -> Operation {
    Operation {
        path,
        method: "get",
        summary,
        body: None,
        response,
        reply,
        errors,
    }
}

const fn post(
    path: &'static str,
    summary: &'static str,
    body: &'static str,
    (response, reply): (ResponseContent, &'static str),
    errors: &'static [u16],
) -> Operation {
    Operation {
        path,
        method: "post",
        summary,
        body: Some(body),
        response,
        reply,
        errors,
    }
}

use ResponseContent::{Events, Json as Object, JsonOrEvents, JsonOrLines, Page, PageOrJson, Text};

pub(super) const OPERATIONS: [Operation; 41] = [
    get(
        "/health",
        "Whether requests are taken",
        (Object, "Health"),
        &[503],
    ),
    get(
        "/models",
        "The models, as a list, with what each is doing",
        (Object, "ModelList"),
        &[],
    ),
    post(
        "/models/load",
        "Load one of several models",
        "ModelRequest",
        (Object, "ModelChanged"),
        COUNT,
    ),
    post(
        "/models/unload",
        "Unload one of several models when its requests have ended",
        "ModelRequest",
        (Object, "ModelChanged"),
        COUNT,
    ),
    get(
        "/models/{id}",
        "The model, by its id",
        (Object, "Model"),
        &[404],
    ),
    get(
        "/props",
        "What is loaded and how it is set up",
        (Object, "Properties"),
        &[500, 503],
    ),
    get(
        "/slots",
        "The device's sequences and who holds them, in llama-server's form",
        (Object, "Slots"),
        &[500, 503],
    ),
    get(
        "/slots/summary",
        "Who is on the device now, and how full it is",
        (Object, "SlotsSummary"),
        &[500, 503],
    ),
    get(
        "/status",
        "A page that shows who is served",
        (Page, ""),
        &[404],
    ),
    get(
        "/status/json",
        "Who is served, and the server's state",
        (Object, "Status"),
        &[404],
    ),
    get(
        "/status/events",
        "The same as it changes",
        (Events, ""),
        &[404],
    ),
    get(
        "/metrics",
        "Counters as Prometheus text",
        (Text, ""),
        &[404],
    ),
    get(
        "/version",
        "The program's version",
        (Object, "Version"),
        &[],
    ),
    get("/openapi.json", "This document", (Object, "Document"), &[]),
    post(
        "/chat/completions",
        "A reply to a conversation",
        "ChatRequest",
        (JsonOrEvents, "ChatCompletion"),
        WORK,
    ),
    post(
        "/chat/completions/input_tokens",
        "Tokens of a conversation",
        "ChatRequest",
        (Object, "InputTokens"),
        COUNT,
    ),
    post(
        "/chat/completions/control",
        "A word to a reply under way",
        "ControlRequest",
        (Object, "Controlled"),
        COUNT,
    ),
    post(
        "/completions",
        "Text that goes on",
        "CompletionRequest",
        (JsonOrEvents, "TextCompletion"),
        WORK,
    ),
    post(
        "/completion",
        "Text that goes on, in llama-server's form",
        "LlamaCompletionRequest",
        (JsonOrEvents, "LlamaCompletion"),
        WORK,
    ),
    post(
        "/infill",
        "Text that fills a gap, in llama-server's form",
        "InfillRequest",
        (JsonOrEvents, "LlamaCompletion"),
        WORK,
    ),
    post(
        "/responses",
        "A reply, in items",
        "ResponsesRequest",
        (JsonOrEvents, "Response"),
        WORK,
    ),
    post(
        "/responses/input_tokens",
        "Tokens of a conversation in items",
        "ResponsesRequest",
        (Object, "InputTokens"),
        COUNT,
    ),
    post(
        "/responses/compact",
        "A conversation in items, cut to its latest messages and a summary",
        "ResponsesRequest",
        (Object, "Compaction"),
        WORK,
    ),
    get(
        "/responses/{id}",
        "A kept response",
        (Object, "Response"),
        &[404],
    ),
    Operation {
        method: "delete",
        ..get(
            "/responses/{id}",
            "Forget a kept response",
            (Object, "ResponseDeleted"),
            &[404],
        )
    },
    get(
        "/responses/{id}/input_items",
        "The input of a kept response, the last item first",
        (Object, "InputItems"),
        &[404],
    ),
    post(
        "/messages",
        "A reply, in Anthropic's blocks",
        "MessagesRequest",
        (JsonOrEvents, "MessageReply"),
        WORK,
    ),
    post(
        "/messages/count_tokens",
        "Tokens of a conversation in Anthropic's blocks",
        "MessagesRequest",
        (Object, "TokenCount"),
        COUNT,
    ),
    post(
        "/tokenize",
        "Text to tokens",
        "TokenizeRequest",
        (Object, "Tokens"),
        COUNT,
    ),
    post(
        "/detokenize",
        "Tokens to text",
        "DetokenizeRequest",
        (Object, "Text"),
        COUNT,
    ),
    get(
        "/tokenizer_info",
        "The template and its marks",
        (Object, "TokenizerInfo"),
        &[500, 503],
    ),
    post(
        "/apply-template",
        "Messages to a prompt",
        "ChatRequest",
        (Object, "Prompt"),
        COUNT,
    ),
    get(
        "/",
        "A chat page for browsers, else as /health",
        (PageOrJson, "Health"),
        &[503],
    ),
    get("/v1", "As /health", (Object, "Health"), &[503]),
    get(
        "/api/version",
        "The version of Ollama whose protocol this is",
        (Object, "Version"),
        &[],
    ),
    get(
        "/api/tags",
        "The models, in Ollama's form",
        (Object, "OllamaModels"),
        &[],
    ),
    get(
        "/api/ps",
        "The loaded models, in Ollama's form",
        (Object, "OllamaModels"),
        &[],
    ),
    post(
        "/api/show",
        "What a model is and what it can",
        "ModelRequest",
        (Object, "OllamaModel"),
        COUNT,
    ),
    post(
        "/api/pull",
        "Pulls a model into the cache, with progress in lines",
        "OllamaPullRequest",
        (JsonOrLines, "OllamaPullStatus"),
        PULL,
    ),
    post(
        "/api/chat",
        "A reply to a conversation, in Ollama's form",
        "OllamaChatRequest",
        (JsonOrLines, "OllamaReply"),
        OLLAMA_WORK,
    ),
    post(
        "/api/generate",
        "A reply to a prompt, in Ollama's form",
        "OllamaGenerateRequest",
        (JsonOrLines, "OllamaReply"),
        OLLAMA_WORK,
    ),
];
