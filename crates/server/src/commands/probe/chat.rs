//! Checks of OpenAI's chat and completions.

use serde_json::{Value, json};

use super::{Check, CheckFailure, Finding, Probe, add_fields, check, excerpt, require};

const CHAT: &str = "/v1/chat/completions";
const QUESTION: &str = "Say hello.";

pub(super) const CHECKS: [Check; 12] = [
    check("chat", plain),
    check("chat: stream", stream),
    check("chat: stream equals whole reply", same),
    check("chat: absent fields as null", nulls),
    check("chat: late system message", late_system),
    check("chat: tool offered", tool_offered),
    check("chat: tool required", tool_demanded),
    check("chat: tool result used", tool_result),
    check("chat: JSON by schema", schema),
    check("chat: logprobs", logprobs),
    check("completions", completions),
    check("completions: tokens, echo, logprobs", scored),
];

/// Reasoning and content of a message or a delta.
fn message_text(message: &Value) -> String {
    let part = |key: &str| message[key].as_str().unwrap_or_default();
    let reasoning = match part("reasoning_content") {
        "" => part("reasoning"),
        text => text,
    };
    format!("{reasoning}{}", part("content"))
}

fn plain(probe: &Probe) -> Finding {
    let reply = probe
        .post_ok(CHAT, &probe.chat(QUESTION, json!({})))?
        .json();
    let choice = &reply["choices"][0];
    let text = message_text(&choice["message"]);
    require(!text.is_empty(), || {
        format!("the message is empty: {reply}")
    })?;
    require(reply["object"] == "chat.completion", || {
        format!("object is {}", reply["object"])
    })?;
    let reason = choice["finish_reason"].as_str().unwrap_or_default();
    require(["stop", "length", "tool_calls"].contains(&reason), || {
        format!("finish_reason is {}", choice["finish_reason"])
    })?;
    let usage = &reply["usage"];
    let sum = usage["prompt_tokens"]
        .as_u64()
        .zip(usage["completion_tokens"].as_u64());
    let sum = sum.map(|(prompt, completion)| prompt + completion);
    require(
        sum.is_some() && sum == usage["total_tokens"].as_u64(),
        || format!("usage does not add up: {usage}"),
    )?;
    Ok(excerpt(&text))
}

/// The chunks of a streamed chat, which must end with `[DONE]`.
fn chunks(probe: &Probe, more: Value) -> Result<Vec<Value>, CheckFailure> {
    let mut body = probe.chat(QUESTION, json!({
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
        "stop": ["\n\n\n"], "stream": true, "stream_options": {"include_usage": true},
    }));
    add_fields(&mut body, more);
    let response = probe.post_ok(CHAT, &body)?;
    let kind = response.header("content-type").unwrap_or_default();
    require(kind.starts_with("text/event-stream"), || {
        format!("content-type {kind}")
    })?;
    let mut events = response.events();
    let last = events.pop().map(|(_, data)| data);
    require(last.as_deref() == Some("[DONE]"), || {
        "the stream does not end with [DONE]".to_owned()
    })?;
    events
        .iter()
        .map(|(_, data)| {
            serde_json::from_str(data)
                .map_err(|error| CheckFailure::Wrong(format!("{error} in {data}")))
        })
        .collect()
}

fn stream(probe: &Probe) -> Finding {
    let chunks = chunks(probe, json!({}))?;
    let deltas = || chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
    require(
        deltas()
            .next()
            .is_some_and(|delta| delta["role"] == "assistant"),
        || "the first chunk has no role".to_owned(),
    )?;
    let text: String = deltas().map(message_text).collect();
    require(!text.is_empty(), || "no chunk has text".to_owned())?;
    let id = &chunks[0]["id"];
    require(chunks.iter().all(|chunk| chunk["id"] == *id), || {
        "the id changes".to_owned()
    })?;
    let ends = chunks
        .iter()
        .filter(|chunk| chunk["choices"][0]["finish_reason"].is_string());
    require(ends.count() == 1, || {
        "not exactly one finish_reason".to_owned()
    })?;
    let usage = chunks
        .iter()
        .any(|chunk| chunk["usage"]["completion_tokens"].is_u64());
    require(usage, || {
        "include_usage is set, but no chunk has usage".to_owned()
    })?;
    Ok(format!("{} chunks", chunks.len()))
}

fn same(probe: &Probe) -> Finding {
    let streamed: String = chunks(probe, json!({"stop": null}))?
        .iter()
        .map(|chunk| message_text(&chunk["choices"][0]["delta"]))
        .collect();
    let messages =
        json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]);
    let whole = probe
        .post_ok(CHAT, &probe.chat(QUESTION, json!({"messages": messages})))?
        .json();
    let whole = message_text(&whole["choices"][0]["message"]);
    require(whole == streamed, || {
        format!("{} streamed, {} whole", excerpt(&streamed), excerpt(&whole))
    })?;
    Ok(excerpt(&whole))
}

fn nulls(probe: &Probe) -> Finding {
    let more = json!({"top_p": null, "stop": null, "tools": null, "seed": null, "logprobs": null, "response_format": null});
    probe.post_ok(CHAT, &probe.chat(QUESTION, more))?;
    Ok(String::new())
}

fn late_system(probe: &Probe) -> Finding {
    let messages = json!([
        {"role": "user", "content": QUESTION},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go on."},
    ]);
    probe.post_ok(CHAT, &probe.chat(QUESTION, json!({"messages": messages})))?;
    Ok(String::new())
}

fn tools() -> Value {
    json!([{"type": "function", "function": {
        "name": "read_note",
        "description": "Reads a note.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "The note's name."}},
            "required": ["name"],
        },
    }}])
}

fn tool_offered(probe: &Probe) -> Finding {
    let more = json!({"tools": tools(), "tool_choice": "auto", "max_tokens": 256});
    let body = probe.chat("Please read the note with name alpha", more);
    let reply = probe.post_ok(CHAT, &body)?.json();
    let message = &reply["choices"][0]["message"];
    match message.get("tool_calls") {
        None => Ok(format!(
            "replied with text: {}",
            excerpt(&message_text(message))
        )),
        Some(calls) => called(calls),
    }
}

fn tool_demanded(probe: &Probe) -> Finding {
    let choice = json!({"type": "function", "function": {"name": "read_note"}});
    let more = json!({"tools": tools(), "tool_choice": choice, "max_tokens": 512});
    let reply = probe
        .post_ok(
            CHAT,
            &probe.chat("Please read the note with name alpha", more),
        )?
        .json();
    let message = &reply["choices"][0]["message"];
    require(message["tool_calls"][0].is_object(), || {
        format!("no call; the text is {}", excerpt(&message_text(message)))
    })?;
    called(&message["tool_calls"])
}

/// Requires an id, the tool's name, and arguments that are a JSON object.
fn called(calls: &Value) -> Finding {
    let call = &calls[0];
    require(call["id"].as_str().is_some_and(|id| !id.is_empty()), || {
        format!("no id: {calls}")
    })?;
    require(call["function"]["name"] == "read_note", || {
        format!("wrong name: {calls}")
    })?;
    let arguments = call["function"]["arguments"].as_str().unwrap_or_default();
    let parsed: Option<Value> = serde_json::from_str(arguments).ok();
    require(parsed.is_some_and(|value| value.is_object()), || {
        format!("the arguments are not a JSON object: {arguments:?}")
    })?;
    Ok(format!("read_note({arguments})"))
}

fn tool_result(probe: &Probe) -> Finding {
    let call = json!({"id": "call_1", "type": "function",
        "function": {"name": "read_note", "arguments": "{\"name\": \"alpha\"}"}});
    let messages = json!([
        {"role": "user", "content": "Please read the note with name alpha"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "MARKER-7"},
    ]);
    let more = json!({"messages": messages, "tools": tools(), "max_tokens": 256});
    let reply = probe.post_ok(CHAT, &probe.chat(QUESTION, more))?.json();
    let text = message_text(&reply["choices"][0]["message"]);
    let read = if text.contains("MARKER-7") {
        "repeats it"
    } else {
        "does not repeat it"
    };
    Ok(format!("{read}: {}", excerpt(&text)))
}

fn schema(probe: &Probe) -> Finding {
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
        "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": true}});
    let more = json!({"response_format": format, "max_tokens": 512, "chat_template_kwargs": {"enable_thinking": false}});
    let reply = probe
        .post_ok(CHAT, &probe.chat("Is water wet? Answer in JSON.", more))?
        .json();
    let choice = &reply["choices"][0];
    let text = choice["message"]["content"].as_str().unwrap_or_default();
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    require(
        value["ok"].is_boolean() || choice["finish_reason"] == "length",
        || format!("does not match the schema: {text:?}"),
    )?;
    Ok(excerpt(text))
}

fn logprobs(probe: &Probe) -> Finding {
    let more = json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 4,
        "chat_template_kwargs": {"enable_thinking": false}});
    let reply = probe.post_ok(CHAT, &probe.chat(QUESTION, more))?.json();
    let entries = reply["choices"][0]["logprobs"]["content"].as_array();
    let Some(entries) = entries.filter(|entries| !entries.is_empty()) else {
        return Err(CheckFailure::Absent("the reply has none".to_owned()));
    };
    for entry in entries {
        let own = entry["logprob"].as_f64().unwrap_or(1.0);
        require(
            own <= 0.0
                && entry["top_logprobs"]
                    .as_array()
                    .is_some_and(|top| top.len() == 2),
            || format!("{entry}"),
        )?;
    }
    Ok(format!("{} tokens", entries.len()))
}

fn completions(probe: &Probe) -> Finding {
    let body = json!({"model": probe.model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0});
    let reply = probe.post_ok("/v1/completions", &body)?.json();
    let text = reply["choices"][0]["text"].as_str();
    let text = text.ok_or_else(|| CheckFailure::Wrong(format!("no text: {reply}")))?;
    Ok(excerpt(text))
}

fn scored(probe: &Probe) -> Finding {
    let body = json!({"model": probe.model, "prompt": [[100, 200, 300]], "max_tokens": 1, "temperature": 0,
        "echo": true, "logprobs": 1});
    let reply = probe.post_ok("/v1/completions", &body)?.json();
    let scores = reply["choices"][0]["logprobs"]["token_logprobs"].as_array();
    let n = scores.map_or(0, Vec::len);
    require(n == 4, || {
        format!("{n} logprobs for three echoed tokens and a new one")
    })?;
    Ok("3 + 1 tokens".to_owned())
}
