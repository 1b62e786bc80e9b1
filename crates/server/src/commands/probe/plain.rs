//! Checks of the requests that clients send before they generate text.

use serde_json::json;
use ureq::http::Method;

use super::{Check, CheckFailure, Finding, Probe, check, no_response, require, success};

pub(super) const CHECKS: [Check; 8] = [
    check("health", health),
    check("models", models),
    check("models: context length", context),
    check("models: one by its id", one),
    check("models: Codex's catalogue", catalogue),
    check("HEAD of /", head),
    check("tokenize and detokenize", tokens),
    check("template", template),
];

fn health(probe: &Probe) -> Finding {
    let response = success(probe.get("/health")?)?;
    Ok(response.body.trim().to_owned())
}

fn models(probe: &Probe) -> Finding {
    let list = success(probe.get("/v1/models")?)?.json();
    require(list["object"] == "list", || {
        "object is not \"list\"".to_owned()
    })?;
    let id = list["data"][0]["id"].as_str();
    let id = id.ok_or_else(|| CheckFailure::Wrong("data[0].id is not a string".to_owned()))?;
    Ok(id.to_owned())
}

fn context(probe: &Probe) -> Finding {
    match probe.context {
        Some(tokens) => Ok(format!("{tokens} tokens")),
        None => Err(CheckFailure::Absent(
            "no entry has it; clients must guess".to_owned(),
        )),
    }
}

fn one(probe: &Probe) -> Finding {
    let entry = success(probe.get(&format!("/v1/models/{}", probe.model))?)?.json();
    require(entry["id"] == probe.model.as_str(), || {
        format!("id is {}", entry["id"])
    })?;
    Ok(String::new())
}

fn catalogue(probe: &Probe) -> Finding {
    let list = success(probe.get("/v1/models?client_version=0.169.0")?)?.json();
    let Some(entry) = list["models"].get(0) else {
        return Err(CheckFailure::Absent(
            "Codex uses its own defaults".to_owned(),
        ));
    };
    for key in [
        "slug",
        "display_name",
        "base_instructions",
        "shell_type",
        "visibility",
    ] {
        require(entry[key].is_string(), || {
            format!("models[0].{key} is not a string")
        })?;
    }
    Ok(format!("window of {}", entry["context_window"]))
}

fn head(probe: &Probe) -> Finding {
    let response = probe.client.send(Method::HEAD, "/", &[], b"");
    let response = response.map_err(|error| no_response(&error))?;
    require(response.status < 500 && response.body.is_empty(), || {
        format!(
            "status {}, {} bytes of body",
            response.status,
            response.body.len()
        )
    })?;
    Ok(format!("status {}", response.status))
}

fn tokens(probe: &Probe) -> Finding {
    let text = "A cat \u{1F408}\u{200D}\u{2B1B}, 漢字, e\u{301}.";
    let response = probe
        .post_ok("/tokenize", &json!({"content": text}))?
        .json();
    let ids = response["tokens"].clone();
    let n = ids.as_array().map_or(0, Vec::len);
    require(n > 0, || format!("no tokens: {response}"))?;
    let back = probe
        .post_ok("/detokenize", &json!({"tokens": ids}))?
        .json();
    // Unicode normalisation may have composed the letter and its accent.
    let is = back["content"].as_str().unwrap_or_default();
    require(
        is.starts_with("A cat \u{1F408}\u{200D}\u{2B1B}, 漢字, "),
        || format!("{is} came back"),
    )?;
    Ok(format!("{n} tokens"))
}

fn template(probe: &Probe) -> Finding {
    let body = json!({"messages": [{"role": "system", "content": "SYS-1"}, {"role": "user", "content": "USR-2"}]});
    let prompt = probe.post_ok("/apply-template", &body)?.json();
    let prompt = prompt["prompt"].as_str().unwrap_or_default();
    let at = |part: &str| prompt.find(part);
    require(at("SYS-1").is_some() && at("SYS-1") < at("USR-2"), || {
        format!("{prompt:?}")
    })?;
    Ok(format!("{} characters", prompt.chars().count()))
}
