//! OpenAI's conversations and completions.

use serde_json::{Value, json};

use super::{Check, Fault, Finding, Probe, check, join, must, shown};

const CHAT: &str = "/v1/chat/completions";
const QUESTION: &str = "Say hello.";

pub(super) const CHECKS: [Check; 12] = [
    check("chat", plain),
    check("chat: stream", stream),
    check("chat: stream says the same", same),
    check("chat: absent fields as null", nulls),
    check("chat: late system message", late_system),
    check("chat: tool offered", tool_offered),
    check("chat: tool demanded", tool_demanded),
    check("chat: tool result read", tool_result),
    check("chat: JSON by schema", schema),
    check("chat: logprobs", logprobs),
    check("completions", completions),
    check("completions: tokens, echo, logprobs", scored),
];

/// What a reply says, reasoning included.
fn said(message: &Value) -> String {
    let part = |key: &str| message[key].as_str().unwrap_or_default();
    let reasoning = match part("reasoning_content") {
        "" => part("reasoning"),
        text => text,
    };
    format!("{reasoning}{}", part("content"))
}

fn plain(probe: &Probe) -> Finding {
    let reply = probe.good(CHAT, &probe.chat(QUESTION, json!({})))?.json();
    let choice = &reply["choices"][0];
    let text = said(&choice["message"]);
    must(!text.is_empty(), || format!("nothing was said: {reply}"))?;
    must(reply["object"] == "chat.completion", || {
        format!("object is {}", reply["object"])
    })?;
    let reason = choice["finish_reason"].as_str().unwrap_or_default();
    must(["stop", "length", "tool_calls"].contains(&reason), || {
        format!("finish_reason is {}", choice["finish_reason"])
    })?;
    let usage = &reply["usage"];
    let sum = usage["prompt_tokens"]
        .as_u64()
        .zip(usage["completion_tokens"].as_u64());
    let sum = sum.map(|(prompt, completion)| prompt + completion);
    must(
        sum.is_some() && sum == usage["total_tokens"].as_u64(),
        || format!("usage does not add up: {usage}"),
    )?;
    Ok(shown(&text))
}

/// The chunks of a stream, which must end as streams do.
fn chunks(probe: &Probe, more: Value) -> Result<Vec<Value>, Fault> {
    let mut body = probe.chat(QUESTION, json!({
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
        "stop": ["\n\n\n"], "stream": true, "stream_options": {"include_usage": true},
    }));
    join(&mut body, more);
    let answer = probe.good(CHAT, &body)?;
    let kind = answer.header("content-type").unwrap_or_default();
    must(kind.starts_with("text/event-stream"), || {
        format!("content-type {kind}")
    })?;
    let mut events = answer.events();
    let last = events.pop().map(|(_, data)| data);
    must(last.as_deref() == Some("[DONE]"), || {
        "the stream does not end with [DONE]".to_owned()
    })?;
    events
        .iter()
        .map(|(_, data)| {
            serde_json::from_str(data).map_err(|error| Fault::Wrong(format!("{error} in {data}")))
        })
        .collect()
}

fn stream(probe: &Probe) -> Finding {
    let chunks = chunks(probe, json!({}))?;
    let deltas = || chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
    must(
        deltas()
            .next()
            .is_some_and(|delta| delta["role"] == "assistant"),
        || "the first chunk has no role".to_owned(),
    )?;
    let text: String = deltas().map(said).collect();
    must(!text.is_empty(), || "no text came".to_owned())?;
    let id = &chunks[0]["id"];
    must(chunks.iter().all(|chunk| chunk["id"] == *id), || {
        "the id changes".to_owned()
    })?;
    let ends = chunks
        .iter()
        .filter(|chunk| chunk["choices"][0]["finish_reason"].is_string());
    must(ends.count() == 1, || {
        "not exactly one finish_reason".to_owned()
    })?;
    let usage = chunks
        .iter()
        .any(|chunk| chunk["usage"]["completion_tokens"].is_u64());
    must(usage, || "no usage, though it was asked for".to_owned())?;
    Ok(format!("{} chunks", chunks.len()))
}

fn same(probe: &Probe) -> Finding {
    let streamed: String = chunks(probe, json!({"stop": null}))?
        .iter()
        .map(|chunk| said(&chunk["choices"][0]["delta"]))
        .collect();
    let messages =
        json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]);
    let whole = probe
        .good(CHAT, &probe.chat(QUESTION, json!({"messages": messages})))?
        .json();
    let whole = said(&whole["choices"][0]["message"]);
    must(whole == streamed, || {
        format!("{} streamed, {} whole", shown(&streamed), shown(&whole))
    })?;
    Ok(shown(&whole))
}

fn nulls(probe: &Probe) -> Finding {
    let more = json!({"top_p": null, "stop": null, "tools": null, "seed": null, "logprobs": null, "response_format": null});
    probe.good(CHAT, &probe.chat(QUESTION, more))?;
    Ok(String::new())
}

fn late_system(probe: &Probe) -> Finding {
    let messages = json!([
        {"role": "user", "content": QUESTION},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go on."},
    ]);
    probe.good(CHAT, &probe.chat(QUESTION, json!({"messages": messages})))?;
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
    let reply = probe.good(CHAT, &body)?.json();
    let message = &reply["choices"][0]["message"];
    match message.get("tool_calls") {
        None => Ok(format!("answered in words: {}", shown(&said(message)))),
        Some(calls) => called(calls),
    }
}

fn tool_demanded(probe: &Probe) -> Finding {
    let choice = json!({"type": "function", "function": {"name": "read_note"}});
    let more = json!({"tools": tools(), "tool_choice": choice, "max_tokens": 512});
    let reply = probe
        .good(
            CHAT,
            &probe.chat("Please read the note with name alpha", more),
        )?
        .json();
    let message = &reply["choices"][0]["message"];
    must(message["tool_calls"][0].is_object(), || {
        format!("no call, but {}", shown(&said(message)))
    })?;
    called(&message["tool_calls"])
}

/// A list of calls with an id, a name, and arguments that are JSON.
fn called(calls: &Value) -> Finding {
    let call = &calls[0];
    must(call["id"].as_str().is_some_and(|id| !id.is_empty()), || {
        format!("no id: {calls}")
    })?;
    must(call["function"]["name"] == "read_note", || {
        format!("another name: {calls}")
    })?;
    let arguments = call["function"]["arguments"].as_str().unwrap_or_default();
    let parsed: Option<Value> = serde_json::from_str(arguments).ok();
    must(parsed.is_some_and(|value| value.is_object()), || {
        format!("the arguments are no JSON object: {arguments:?}")
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
    let reply = probe.good(CHAT, &probe.chat(QUESTION, more))?.json();
    let text = said(&reply["choices"][0]["message"]);
    let read = if text.contains("MARKER-7") {
        "repeats it"
    } else {
        "does not repeat it"
    };
    Ok(format!("{read}: {}", shown(&text)))
}

fn schema(probe: &Probe) -> Finding {
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
        "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": true}});
    let more = json!({"response_format": format, "max_tokens": 512, "chat_template_kwargs": {"enable_thinking": false}});
    let reply = probe
        .good(CHAT, &probe.chat("Is water wet? Answer in JSON.", more))?
        .json();
    let choice = &reply["choices"][0];
    let text = choice["message"]["content"].as_str().unwrap_or_default();
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    must(
        value["ok"].is_boolean() || choice["finish_reason"] == "length",
        || format!("not by the schema: {text:?}"),
    )?;
    Ok(shown(text))
}

fn logprobs(probe: &Probe) -> Finding {
    let more = json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 4,
        "chat_template_kwargs": {"enable_thinking": false}});
    let reply = probe.good(CHAT, &probe.chat(QUESTION, more))?.json();
    let entries = reply["choices"][0]["logprobs"]["content"].as_array();
    let Some(entries) = entries.filter(|entries| !entries.is_empty()) else {
        return Err(Fault::Absent("none came".to_owned()));
    };
    for entry in entries {
        let own = entry["logprob"].as_f64().unwrap_or(1.0);
        must(
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
    let reply = probe.good("/v1/completions", &body)?.json();
    let text = reply["choices"][0]["text"].as_str();
    let text = text.ok_or_else(|| Fault::Wrong(format!("no text: {reply}")))?;
    Ok(shown(text))
}

fn scored(probe: &Probe) -> Finding {
    let body = json!({"model": probe.model, "prompt": [[100, 200, 300]], "max_tokens": 1, "temperature": 0,
        "echo": true, "logprobs": 1});
    let reply = probe.good("/v1/completions", &body)?.json();
    let scores = reply["choices"][0]["logprobs"]["token_logprobs"].as_array();
    let n = scores.map_or(0, Vec::len);
    must(n == 4, || {
        format!("{n} scores for three tokens and one more")
    })?;
    Ok("3 + 1 tokens".to_owned())
}
