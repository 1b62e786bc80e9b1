//! Schemas of reply bodies.

use serde_json::{Map, Value, json};

/// Schemas by name.
pub(super) fn schemas() -> Map<String, Value> {
    let count = json!({"type": "integer", "minimum": 0});
    let text = json!({"type": "string"});
    let items = json!({"type": "array", "items": {"type": "object"}});
    let nullable = json!({"type": ["string", "null"]});
    let usage = json!({
        "type": "object",
        "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
        "properties": {
            "prompt_tokens": count,
            "completion_tokens": count,
            "total_tokens": count,
        },
    });
    let timings_ref = json!({"$ref": "#/components/schemas/Timings"});
    let schemas = json!({
        "ChatCompletion": object(
            &["id", "object", "created", "model", "choices", "usage"],
            json!({
                "id": text, "object": {"const": "chat.completion"}, "created": count,
                "model": text, "system_fingerprint": nullable,
                "choices": {"type": "array", "items": chat_choice()},
                "usage": usage, "timings": timings_ref,
                "prompt_logprobs": prompt_logprobs(), "prompt_token_ids": token_ids(),
            }),
        ),
        "TextCompletion": object(
            &["id", "object", "created", "model", "choices"],
            json!({
                "id": text, "object": {"const": "text_completion"}, "created": count,
                "model": text, "system_fingerprint": nullable,
                "choices": {"type": "array", "items": text_choice()},
                "usage": usage, "timings": timings_ref,
            }),
        ),
        "Response": response(),
        "ResponseDeleted": object(
            &["id", "object", "deleted"],
            json!({"id": text, "object": {"const": "response"}, "deleted": {"const": true}}),
        ),
        "InputItems": object(
            &["object", "data", "has_more"],
            json!({
                "object": {"const": "list"}, "data": items, "has_more": {"type": "boolean"},
                "first_id": nullable, "last_id": nullable,
            }),
        ),
        "Compaction": object(
            &["id", "object", "created_at", "output", "usage"],
            json!({
                "id": text, "object": {"const": "response.compaction"}, "created_at": count,
                "output": items, "usage": {"type": "object"},
            }),
        ),
        "MessageReply": object(
            &["id", "type", "role", "model", "content", "stop_reason", "usage"],
            json!({
                "id": text, "type": {"const": "message"}, "role": {"const": "assistant"},
                "model": text, "content": items, "stop_reason": nullable,
                "stop_sequence": nullable,
                "usage": object(
                    &["input_tokens", "output_tokens"],
                    json!({"input_tokens": count, "output_tokens": count, "timings": timings_ref}),
                ),
            }),
        ),
        "InputTokens": object(
            &["object", "input_tokens"],
            json!({"object": {"const": "response.input_tokens"}, "input_tokens": count}),
        ),
        "TokenCount": object(&["input_tokens"], json!({"input_tokens": count})),
        "Controlled": object(
            &["id", "success"],
            json!({"id": text, "success": {"type": "boolean"}}),
        ),
        "Tokens": object(
            &["tokens", "count", "max_model_len"],
            json!({"tokens": {"type": "array"}, "count": count, "max_model_len": count}),
        ),
        "Text": object(&["content", "prompt"], json!({"content": text, "prompt": text})),
        "Prompt": object(&["prompt"], json!({"prompt": text})),
        "TokenizerInfo": object(
            &["tokenizer_class", "vocab_size", "model_max_length", "chat_template"],
            json!({
                "tokenizer_class": text, "vocab_size": count, "model_max_length": count,
                "chat_template": text, "bos_token": nullable, "eos_token": nullable, "pad_token": nullable,
            }),
        ),
        "ModelList": object(
            &["object", "data"],
            json!({"object": {"const": "list"}, "data": {
                "type": "array", "items": {"$ref": "#/components/schemas/Model"}}}),
        ),
        "Model": object(
            &["id", "object", "created", "owned_by"],
            json!({"id": text, "object": {"const": "model"}, "created": count, "owned_by": text}),
        ),
        "ModelChanged": object(
            &["success", "model"],
            json!({"success": {"const": true}, "model": text}),
        ),
        "Health": object(&["status"], json!({"status": text})),
        "Version": object(&["version"], json!({"version": text})),
        "Document": object(
            &["openapi", "info", "paths"],
            json!({"openapi": text, "info": {"type": "object"}, "paths": {"type": "object"}}),
        ),
        "Properties": {"type": "object", "description": "what is loaded and how it is set up"},
        "Slots": slots(),
        "SlotsSummary": object(
            &["sequences", "requests_running", "requests_waiting", "requests"],
            json!({
                "total": count, "context": count, "sequences": count,
                "requests_running": count, "requests_waiting": count, "requests": items,
            }),
        ),
        "LlamaCompletion": llama_completion(),
        "Status": {"type": "object", "description": "requests on the device, and the server's state"},
        "Timings": timings(),
        "Error": object(
            &["error"],
            json!({"error": object(
                &["message", "type", "param", "code"],
                json!({"message": text, "type": text, "param": nullable, "code": nullable}),
            )}),
        ),
        "OllamaError": object(&["error"], json!({"error": text})),
        "OllamaModels": object(&["models"], json!({"models": items})),
        "OllamaModel": object(
            &["details", "model_info", "capabilities"],
            json!({
                "modelfile": text, "parameters": text, "template": text, "modified_at": text,
                "details": {"type": "object"}, "model_info": {"type": "object"},
                "capabilities": {"type": "array", "items": text},
            }),
        ),
        "OllamaPullStatus": object(
            &["status"],
            json!({
                "status": text, "digest": text,
                "total": {"type": "integer"}, "completed": {"type": "integer"},
            }),
        ),
        "OllamaReply": ollama_reply(),
        "AnthropicError": object(
            &["type", "error"],
            json!({
                "type": {"const": "error"},
                "error": object(&["type", "message"], json!({"type": text, "message": text})),
                "request_id": nullable,
            }),
        ),
    });
    match schemas {
        Value::Object(schemas) => schemas,
        _ => Map::new(),
    }
}

fn object(required: &[&str], properties: Value) -> Value {
    json!({"type": "object", "required": required, "properties": properties})
}

/// The device's sequences in llama-server's form.
fn slots() -> Value {
    let count = json!({"type": "integer", "minimum": 0});
    let slot = object(
        &["id", "n_ctx", "speculative", "is_processing"],
        json!({
            "id": count, "id_task": count, "n_ctx": count,
            "speculative": {"type": "boolean"}, "is_processing": {"type": "boolean"},
            "n_prompt_tokens": count, "n_prompt_tokens_processed": count,
            "n_prompt_tokens_cache": count, "params": {"type": "object"},
            "next_token": {"type": "array", "items": {"type": "object"}},
        }),
    );
    json!({"type": "array", "items": slot})
}

/// llama-server's completion; several come as an array.
fn llama_completion() -> Value {
    let count = json!({"type": "integer", "minimum": 0});
    let text = json!({"type": "string"});
    let items = json!({"type": "array", "items": {"type": "object"}});
    let one = object(
        &[
            "index",
            "content",
            "tokens",
            "stop",
            "tokens_predicted",
            "tokens_evaluated",
        ],
        json!({
            "index": count, "content": text, "tokens": token_ids(),
            "id_slot": {"type": "integer", "minimum": -1}, "stop": {"type": "boolean"},
            "tokens_predicted": count, "tokens_evaluated": count, "tokens_cached": count,
            "model": text, "prompt": text, "generation_settings": {"type": "object"},
            "has_new_line": {"type": "boolean"}, "truncated": {"type": "boolean"},
            "stop_type": {"enum": ["eos", "limit", "word"]}, "stopping_word": text,
            "completion_probabilities": items,
            "timings": {"$ref": "#/components/schemas/Timings"},
        }),
    );
    json!({"anyOf": [one, {"type": "array", "items": {"type": "object"}}]})
}

/// Fields of a choice that chat and text completions share.
fn choice(own: Value) -> Value {
    let mut fields = json!({
        "index": {"type": "integer", "minimum": 0},
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"enum": ["stop", "length", "tool_calls", null]},
        "stop_reason": {
            "type": ["string", "integer", "null"],
            "description": "the stop string or stop token of the request that ended it",
        },
        "token_ids": token_ids(),
    });
    if let (Value::Object(fields), Value::Object(own)) = (&mut fields, own) {
        fields.extend(own);
    }
    object(&["index", "logprobs", "finish_reason"], fields)
}

fn chat_choice() -> Value {
    choice(json!({"message": {"type": "object"}, "finish_details": {"type": "object"}}))
}

fn text_choice() -> Value {
    choice(json!({
        "text": {"type": "string"},
        "prompt_logprobs": prompt_logprobs(),
        "prompt_token_ids": token_ids(),
    }))
}

fn token_ids() -> Value {
    json!({"type": "array", "items": {"type": "integer", "minimum": 0}})
}

/// A prompt token and its alternatives by token id; `null` for the first token.
fn prompt_logprobs() -> Value {
    let entry = object(
        &["logprob", "rank", "decoded_token"],
        json!({
            "logprob": {"type": "number", "maximum": 0},
            "rank": {"type": ["integer", "null"], "minimum": 1},
            "decoded_token": {"type": "string"},
        }),
    );
    json!({
        "type": "array",
        "items": {"type": ["object", "null"], "additionalProperties": entry},
    })
}

/// The resource of the Responses protocol.
fn response() -> Value {
    let text = json!({"type": "string"});
    let nullable = json!({"type": ["string", "null"]});
    let number = json!({"type": "number"});
    let count = json!({"type": ["integer", "null"]});
    let object_or_null = json!({"type": ["object", "null"]});
    object(
        &[
            "id",
            "object",
            "created_at",
            "status",
            "model",
            "output",
            "tools",
            "usage",
        ],
        json!({
            "id": text, "object": {"const": "response"}, "created_at": {"type": "integer"},
            "completed_at": count,
            "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
            "error": object_or_null, "incomplete_details": object_or_null, "model": text,
            "output": {"type": "array", "items": {"type": "object"}},
            "usage": object_or_null, "timings": {"$ref": "#/components/schemas/Timings"},
            "background": {"type": "boolean"}, "store": {"type": "boolean"},
            "parallel_tool_calls": {"type": ["boolean", "null"]},
            "frequency_penalty": number, "presence_penalty": number,
            "temperature": number, "top_p": number, "top_logprobs": count,
            "max_output_tokens": count, "max_tool_calls": count,
            "instructions": nullable, "previous_response_id": nullable,
            "prompt_cache_key": nullable, "safety_identifier": nullable, "user": nullable,
            "reasoning": {"type": "object"}, "text": {"type": "object"},
            "tools": {"type": "array", "items": {"type": "object"}},
            "service_tier": {"const": "default"}, "truncation": {"enum": ["auto", "disabled"]},
        }),
    )
}

/// A reply or a line of a stream in Ollama's protocol.
fn ollama_reply() -> Value {
    let count = json!({"type": "integer", "minimum": 0});
    let text = json!({"type": "string"});
    object(
        &["model", "created_at", "done"],
        json!({
            "model": text, "created_at": text, "done": {"type": "boolean"},
            "message": {"type": "object"}, "response": text, "thinking": text,
            "logprobs": {"type": "array", "items": {"type": "object"}},
            "done_reason": {"enum": ["stop", "length", "load", "unload"]},
            "total_duration": count, "load_duration": count,
            "prompt_eval_count": count, "prompt_eval_duration": count,
            "eval_count": count, "eval_duration": count,
        }),
    )
}

/// Schema of `timings` in a response.
fn timings() -> Value {
    let number = |what: &str| json!({"type": "number", "minimum": 0, "description": what});
    object(
        &["prefill_ms", "decode_ms", "decode_tokens_per_sec"],
        json!({
            "prefill_ms": number("milliseconds from admission to the first row"),
            "decode_ms": number("milliseconds of decoding"),
            "decode_tokens_per_sec": number("0 where nothing was decoded"),
            "cache_n": number("prompt tokens from the cache"),
            "prompt_n": number("prompt tokens that were computed"),
            "prompt_ms": number("as prefill_ms"),
            "prompt_per_token_ms": number("milliseconds of each"),
            "prompt_per_second": number("prompt tokens a second"),
            "predicted_n": number("tokens generated"),
            "predicted_ms": number("as decode_ms"),
            "predicted_per_token_ms": number("milliseconds of each"),
            "predicted_per_second": number("tokens generated a second"),
            "steps": number("passes over the model after the prompt"),
            "tokens_per_step": number("tokens of each"),
            "draft_n": number("tokens drafted"),
            "draft_n_accepted": number("of these, kept"),
            "accept_rate": number("the share that was kept"),
            "draft_by_source": {
                "type": "object",
                "description": "draft_n and draft_n_accepted of each source: block, mtp or suffix",
            },
        }),
    )
}
