//! What a server says to what it cannot do.

use serde_json::{Value, json};

use super::{Check, Fault, Finding, Probe, broken, check, must, shown};

const CHAT: &str = "/v1/chat/completions";
/// Prompts longer than this are not sent, in tokens.
const LONGEST: u64 = 300_000;

pub(super) const CHECKS: [Check; 8] = [
    check("error: no JSON", no_json),
    check("error: messages missing", no_messages),
    check("error: value out of range", out_of_range),
    check("error: prompt too long", too_long),
    check("error: unknown path", no_path),
    check("error: wrong method", wrong_method),
    check("error: Anthropic's words", anthropic),
    check("error: wrong key", wrong_key),
];

/// An error of OpenAI's form.
fn worded(body: &Value) -> Result<String, Fault> {
    let message = body["error"]["message"].as_str().unwrap_or_default();
    must(!message.is_empty(), || format!("no error.message: {body}"))?;
    Ok(shown(message))
}

fn refused(probe: &Probe, body: &[u8]) -> Finding {
    let answer = probe.server.send(("POST", CHAT), &[], body);
    let answer = answer.map_err(|error| broken(&error))?;
    must(answer.status == 400 || answer.status == 422, || {
        format!("status {}", answer.status)
    })?;
    worded(&answer.json())
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
    let Some(context) = probe.context.filter(|tokens| *tokens <= LONGEST) else {
        return Err(Fault::Absent(
            "the context is unknown, or too long to fill".to_owned(),
        ));
    };
    // Digits are a token each in the vocabularies of these models, and never less than a third of one.
    let digits = "7 ".repeat(context as usize * 3 + 16);
    let body = probe.chat(&digits, json!({}));
    let answer = probe.post(CHAT, &body)?;
    must(answer.status == 400, || format!("status {}", answer.status))?;
    let error = answer.json();
    must(error["error"]["code"] == "context_length_exceeded", || {
        format!("code {}", error["error"]["code"])
    })?;
    worded(&error)
}

fn no_path(probe: &Probe) -> Finding {
    let answer = probe.get("/v1/no-such-thing")?;
    must(answer.status == 404, || format!("status {}", answer.status))?;
    Ok(format!("{:.0} ms", answer.first_byte.as_secs_f64() * 1e3))
}

fn wrong_method(probe: &Probe) -> Finding {
    let answer = probe.get(CHAT)?;
    must([404, 405].contains(&answer.status), || {
        format!("status {}", answer.status)
    })?;
    Ok(format!("status {}", answer.status))
}

fn anthropic(probe: &Probe) -> Finding {
    let answer = probe.post("/v1/messages", &json!({"model": probe.model}))?;
    if [404, 405].contains(&answer.status) {
        return Err(Fault::Absent(format!("status {}", answer.status)));
    }
    let error = answer.json();
    must(answer.status == 400 && error["type"] == "error", || {
        format!("status {}: {error}", answer.status)
    })?;
    must(error["error"]["type"] == "invalid_request_error", || {
        format!("{error}")
    })?;
    worded(&error)
}

fn wrong_key(probe: &Probe) -> Finding {
    if probe.server.key.is_none() {
        return Err(Fault::Absent(
            "no key was given, so none is tried".to_owned(),
        ));
    }
    let mut other = probe.server.clone();
    other.key = Some("not-the-key".to_owned());
    let answer = other
        .ask("/v1/models", None)
        .map_err(|error| broken(&error))?;
    must(answer.status == 401, || format!("status {}", answer.status))?;
    worded(&answer.json())
}
