//! Schemas of request bodies.
//!
//! A field that is not named here is ignored, unless the reply would differ and it is refused.

use serde_json::{Map, Value, json};

/// Schemas by name.
pub(super) fn schemas() -> Map<String, Value> {
    let text = json!({"type": ["string", "array", "null"], "items": {"type": "object"}});
    let schemas = json!({
        "ChatRequest": request(&[thinking(), chat()], &["messages"]),
        "CompletionRequest": request(&[completion()], &["prompt"]),
        "LlamaCompletionRequest": request(&[llama_completion()], &["prompt"]),
        "InfillRequest": request(
            &[llama_completion(), infill()],
            &["input_prefix", "input_suffix"],
        ),
        "OllamaChatRequest": ollama(json!({
            "messages": {"type": "array", "items": {"type": "object"}},
            "tools": {"type": ["array", "null"], "items": {"type": "object"}},
        })),
        "OllamaGenerateRequest": ollama(json!({
            "prompt": {"type": ["string", "null"]},
            "suffix": {"type": ["string", "null"]},
            "system": {"type": ["string", "null"]},
            "raw": {"type": ["boolean", "null"]},
        })),
        "MessagesRequest": request(&[thinking(), messages()], &["messages"]),
        "ResponsesRequest": request(&[thinking(), responses()], &["input"]),
        "ChatMessage": {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
                "content": text,
                "name": {"type": ["string", "null"]},
                "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
                "tool_call_id": {"type": ["string", "null"]},
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
        "ModelRequest": {
            "type": "object",
            "required": ["model"],
            "properties": {"model": {"type": "string"}},
        },
        "OllamaPullRequest": {
            "type": "object",
            "required": ["model"],
            "properties": {"model": {"type": "string"}, "stream": {"type": "boolean"}},
        },
        "ControlRequest": {
            "type": "object",
            "required": ["id", "action"],
            "properties": {
                "id": {"type": "string"},
                "action": {"type": "string", "enum": ["reasoning_end"]},
            },
        },
    });
    match schemas {
        Value::Object(schemas) => schemas,
        _ => Map::new(),
    }
}

/// A request schema: these fields and the fields of every request.
fn request(own: &[Value], required: &[&str]) -> Value {
    let mut properties = Map::new();
    for fields in [&[shared(), rules()], own].concat() {
        if let Value::Object(fields) = fields {
            properties.extend(fields);
        }
    }
    json!({"type": "object", "required": required, "properties": properties})
}

/// Sampling, lengths and the cache.
fn shared() -> Value {
    let flag = json!({"type": ["boolean", "null"]});
    let number = json!({"type": ["number", "string", "null"]});
    let limit = json!({"type": ["integer", "null"], "minimum": -1});
    let text = json!({"type": ["string", "null"]});
    let object = json!({"type": ["object", "null"]});
    json!({
        "model": text,
        "stream": flag,
        "max_tokens": limit,
        "max_completion_tokens": limit,
        "max_output_tokens": limit,
        "n_predict": limit,
        "min_tokens": {"type": ["integer", "null"], "minimum": 0},
        "temperature": {"type": ["number", "null"], "minimum": 0},
        "top_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        "top_k": {"type": ["integer", "null"]},
        "min_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        "frequency_penalty": number,
        "presence_penalty": number,
        "repetition_penalty": number,
        "repeat_penalty": number,
        "repeat_last_n": limit,
        "rep_window": limit,
        "seed": {"type": ["integer", "null"]},
        "logit_bias": object,
        "ignore_eos": flag,
        "n": {"type": ["integer", "null"], "minimum": 1},
        "speculative": flag,
        "priority": {"type": ["integer", "null"]},
        "cache_prompt": flag,
        "prefill_compression": {"type": ["string", "null"], "enum": ["off", "auto", "always", null]},
    })
}

/// Stops, token rules and forms of the reply.
fn rules() -> Value {
    let flag = json!({"type": ["boolean", "null"]});
    let text = json!({"type": ["string", "null"]});
    let object = json!({"type": ["object", "null"]});
    let schema = json!({"type": ["object", "string", "boolean", "null"]});
    json!({
        "stop": {"type": ["string", "array", "null"], "items": {"type": "string"}},
        "stop_token_ids": {"type": ["array", "null"], "items": {"type": "integer"}},
        "include_stop_str_in_output": flag,
        "allowed_token_ids": {
            "type": ["array", "null"], "items": {"type": "integer"}, "minItems": 1,
        },
        "bad_words": {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}},
        "truncate_prompt_tokens": {"type": ["integer", "null"], "minimum": -1},
        "truncation_side": {"enum": ["left", "right", null]},
        "response_format": object,
        "structured_outputs": object,
        "guided_json": schema,
        "guided_regex": text,
        "guided_choice": {"type": ["array", "null"], "items": {"type": "string"}},
        "guided_grammar": text,
        "json_schema": schema,
        "grammar": text,
        "regex": text,
    })
}

/// How long a model thinks, in all spellings, and hints for the template and the cache.
fn thinking() -> Value {
    let flag = json!({"type": ["boolean", "null"]});
    let text = json!({"type": ["string", "null"]});
    let budget = json!({"type": ["integer", "null"], "minimum": -1});
    json!({
        "reasoning": {"type": ["object", "boolean", "string", "null"]},
        "reasoning_effort": text,
        "reasoning_budget": budget,
        "reasoning_budget_tokens": budget,
        "thinking": {"type": ["object", "boolean", "null"]},
        "thinking_budget": budget,
        "thinking_budget_tokens": budget,
        "thinking_token_budget": budget,
        "enable_thinking": flag,
        "think": {"type": ["boolean", "string", "null"]},
        "include_reasoning": flag,
        "output_config": {"type": ["object", "null"]},
        "chat_template_kwargs": {"type": ["object", "null"]},
        "prefix_cache": {"type": ["object", "null"]},
        "session_id": text,
        "prompt_cache_key": text,
        "parallel_tool_calls": flag,
        "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
    })
}

fn chat() -> Value {
    let flag = json!({"type": ["boolean", "null"]});
    json!({
        "messages": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/ChatMessage"}},
        "tools": {"type": "array", "items": {"type": "object"}},
        "functions": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_choice": {"type": ["string", "object", "null"]},
        "function_call": {"type": ["string", "object", "null"]},
        "logprobs": flag,
        "stream_options": {"type": ["object", "null"]},
        "reasoning_format": {"type": ["string", "null"]},
        "echo": flag,
        "prompt_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
        "return_token_ids": flag,
        "add_generation_prompt": flag,
        "continue_final_message": flag,
        "return_progress": flag,
        "timings_per_token": flag,
    })
}

fn completion() -> Value {
    json!({
        "prompt": {"type": ["string", "array"], "items": {"type": ["string", "integer", "array"]}},
        "echo": {"type": ["boolean", "null"]},
        "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
        "prompt_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
        "return_token_ids": {"type": ["boolean", "null"]},
        "suffix": {"type": ["string", "null"]},
        "best_of": {"type": ["integer", "null"], "minimum": 0},
        "stream_options": {"type": ["object", "null"]},
    })
}

/// llama-server's own names.
fn llama_completion() -> Value {
    json!({
        "prompt": {
            "type": ["string", "array", "object"],
            "items": {"type": ["string", "integer", "array", "object"]},
        },
        "n_probs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
        "n_cmpl": {"type": ["integer", "null"], "minimum": 1},
        "id_slot": {"type": ["integer", "null"], "minimum": -1},
        "return_tokens": {"type": ["boolean", "null"]},
        "response_fields": {"type": ["array", "null"], "items": {"type": "string"}},
        "return_progress": {"type": ["boolean", "null"]},
        "timings_per_token": {"type": ["boolean", "null"]},
        "logit_bias": {"type": ["object", "array", "null"], "items": {"type": "array"}},
    })
}

fn infill() -> Value {
    json!({
        "input_prefix": {"type": "string"},
        "input_suffix": {"type": "string"},
        "prompt": {"type": ["string", "null"]},
        "input_extra": {"type": ["array", "null"], "items": {
            "type": "object",
            "required": ["text"],
            "properties": {"filename": {"type": ["string", "null"]}, "text": {"type": "string"}},
        }},
        "response_fields": {"type": ["array", "null"], "items": {"type": "string"}},
    })
}

/// A request in Ollama's protocol: these fields and those of both routes.
fn ollama(own: Value) -> Value {
    let mut properties = json!({
        "model": {"type": ["string", "null"]},
        "stream": {"type": ["boolean", "null"], "default": true},
        "format": {"type": ["string", "object", "null"]},
        "options": {"type": ["object", "null"]},
        "think": {"type": ["boolean", "string", "null"]},
        "keep_alive": {"type": ["string", "number", "null"]},
        "logprobs": {"type": ["boolean", "null"]},
        "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
    });
    if let (Value::Object(all), Value::Object(own)) = (&mut properties, own) {
        all.extend(own);
    }
    json!({"type": "object", "properties": properties})
}

fn messages() -> Value {
    json!({
        "messages": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Message"}},
        "system": {"type": ["string", "array"], "items": {"type": "object"}},
        "tools": {"type": "array", "items": {"type": "object"}},
        "tool_choice": {"type": ["object", "null"]},
        "stop_sequences": {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}},
        "output_format": {"type": ["object", "null"]},
        "metadata": {"type": ["object", "null"]},
    })
}

fn responses() -> Value {
    let text = json!({"type": ["string", "null"]});
    json!({
        "input": {"type": ["string", "array"], "items": {"type": "object"}},
        "instructions": text,
        "previous_response_id": text,
        "store": {"type": ["boolean", "null"], "default": true},
        "tools": {"type": "array", "items": {"type": "object"}},
        "tool_choice": {"type": ["string", "object", "null"]},
        "text": {"type": ["object", "null"]},
        "include": {"type": ["array", "null"], "items": {"type": "string"}},
        "max_tool_calls": {"type": ["integer", "null"], "minimum": 1},
        "truncation": text,
        "service_tier": text,
        "safety_identifier": text,
        "metadata": {"type": ["object", "null"]},
        "user": text,
    })
}
