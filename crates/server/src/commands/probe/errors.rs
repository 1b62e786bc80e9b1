//! Checks of error responses.

use serde_json::{Value, json};
use ureq::http::Method;

use super::{Check, CheckFailure, Finding, Probe, check, excerpt, no_response, require};

const CHAT: &str = "/v1/chat/completions";
/// The longest prompt to send, in tokens.
const MAX_PROMPT_TOKENS: u64 = 300_000;

pub(super) const CHECKS: [Check; 8] = [
    check("error: invalid JSON", no_json),
    check("error: messages missing", no_messages),
    check("error: value out of range", out_of_range),
    check("error: prompt too long", too_long),
    check("error: unknown path", no_path),
    check("error: wrong method", wrong_method),
    check("error: Anthropic's format", anthropic),
    check("error: wrong key", wrong_key),
];

/// The message of an error in OpenAI's format.
fn error_message(body: &Value) -> Result<String, CheckFailure> {
    let message = body["error"]["message"].as_str().unwrap_or_default();
    require(!message.is_empty(), || format!("no error.message: {body}"))?;
    Ok(excerpt(message))
}

fn refused(probe: &Probe, body: &[u8]) -> Finding {
    let response = probe.client.send(Method::POST, CHAT, &[], body);
    let response = response.map_err(|error| no_response(&error))?;
    require(response.status == 400 || response.status == 422, || {
        format!("status {}", response.status)
    })?;
    error_message(&response.json())
}

fn no_json(probe: &Probe) -> Finding {
    refused(probe, b"{\"messages\": [")
}

fn no_messages(probe: &Probe) -> Finding {
    refused(probe, json!({"model": probe.model}).to_string().as_bytes())
}

fn out_of_range(probe: &Probe) -> Finding {
    let body = probe.chat("Hello", json!({"temperature": -1}));
    refused(probe, body.to_string().as_bytes())
}

fn too_long(probe: &Probe) -> Finding {
    let Some(context) = probe.context.filter(|tokens| *tokens <= MAX_PROMPT_TOKENS) else {
        return Err(CheckFailure::Absent(
            "the context is unknown, or too long to fill".to_owned(),
        ));
    };
    // A digit is one token in the vocabularies of these models, and at least a third of one
    // elsewhere.
    let digits = "7 ".repeat(context as usize * 3 + 16);
    let body = probe.chat(&digits, json!({}));
    let response = probe.post(CHAT, &body)?;
    require(response.status == 400, || {
        format!("status {}", response.status)
    })?;
    let error = response.json();
    require(error["error"]["code"] == "context_length_exceeded", || {
        format!("code {}", error["error"]["code"])
    })?;
    error_message(&error)
}

fn no_path(probe: &Probe) -> Finding {
    let response = probe.get("/v1/no-such-thing")?;
    require(response.status == 404, || {
        format!("status {}", response.status)
    })?;
    Ok(format!("{:.0} ms", response.first_byte.as_secs_f64() * 1e3))
}

fn wrong_method(probe: &Probe) -> Finding {
    let response = probe.get(CHAT)?;
    require([404, 405].contains(&response.status), || {
        format!("status {}", response.status)
    })?;
    Ok(format!("status {}", response.status))
}

fn anthropic(probe: &Probe) -> Finding {
    let response = probe.post("/v1/messages", &json!({"model": probe.model}))?;
    if [404, 405].contains(&response.status) {
        return Err(CheckFailure::Absent(format!("status {}", response.status)));
    }
    let error = response.json();
    require(response.status == 400 && error["type"] == "error", || {
        format!("status {}: {error}", response.status)
    })?;
    require(error["error"]["type"] == "invalid_request_error", || {
        format!("{error}")
    })?;
    error_message(&error)
}

fn wrong_key(probe: &Probe) -> Finding {
    if probe.client.key().is_none() {
        return Err(CheckFailure::Absent("--api-key is not given".to_owned()));
    }
    let other = probe.client.with_key("not-the-key");
    let response = other
        .get("/v1/models")
        .map_err(|error| no_response(&error))?;
    require(response.status == 401, || {
        format!("status {}", response.status)
    })?;
    error_message(&response.json())
}
