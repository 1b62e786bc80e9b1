//! What clients ask before they ask for text.

use serde_json::json;

use super::{Check, Fault, Finding, Probe, check, good, must};

pub(super) const CHECKS: [Check; 8] = [
    check("health", health),
    check("models", models),
    check("models: context length", context),
    check("models: one by its id", one),
    check("models: Codex's catalogue", catalogue),
    check("head of the root", head),
    check("tokens there and back", tokens),
    check("template", template),
];

fn health(probe: &Probe) -> Finding {
    let answer = good(probe.get("/health")?)?;
    Ok(answer.body.trim().to_owned())
}

fn models(probe: &Probe) -> Finding {
    let list = good(probe.get("/v1/models")?)?.json();
    must(list["object"] == "list", || {
        "object is not \"list\"".to_owned()
    })?;
    let id = list["data"][0]["id"].as_str();
    let id = id.ok_or_else(|| Fault::Wrong("data[0].id is no string".to_owned()))?;
    Ok(id.to_owned())
}

fn context(probe: &Probe) -> Finding {
    match probe.context {
        Some(tokens) => Ok(format!("{tokens} tokens")),
        None => Err(Fault::Absent("clients have to guess it".to_owned())),
    }
}

fn one(probe: &Probe) -> Finding {
    let entry = good(probe.get(&format!("/v1/models/{}", probe.model))?)?.json();
    must(entry["id"] == probe.model.as_str(), || {
        format!("id is {}", entry["id"])
    })?;
    Ok(String::new())
}

fn catalogue(probe: &Probe) -> Finding {
    let list = good(probe.get("/v1/models?client_version=0.169.0")?)?.json();
    let Some(entry) = list["models"].get(0) else {
        return Err(Fault::Absent("Codex takes its own defaults".to_owned()));
    };
    for key in [
        "slug",
        "display_name",
        "base_instructions",
        "shell_type",
        "visibility",
    ] {
        must(entry[key].is_string(), || {
            format!("models[0].{key} is no string")
        })?;
    }
    Ok(format!("window of {}", entry["context_window"]))
}

fn head(probe: &Probe) -> Finding {
    let answer = probe.server.send(("HEAD", "/"), &[], b"");
    let answer = answer.map_err(|error| super::broken(&error))?;
    must(answer.status < 500 && answer.body.is_empty(), || {
        format!(
            "status {}, {} bytes of body",
            answer.status,
            answer.body.len()
        )
    })?;
    Ok(format!("status {}", answer.status))
}

fn tokens(probe: &Probe) -> Finding {
    let text = "A cat \u{1F408}\u{200D}\u{2B1B}, 漢字, e\u{301}.";
    let answer = probe.good("/tokenize", &json!({"content": text}))?.json();
    let ids = answer["tokens"].clone();
    let n = ids.as_array().map_or(0, Vec::len);
    must(n > 0, || format!("no tokens: {answer}"))?;
    let back = probe.good("/detokenize", &json!({"tokens": ids}))?.json();
    // Composing may have joined the letter and its accent.
    let is = back["content"].as_str().unwrap_or_default();
    must(
        is.starts_with("A cat \u{1F408}\u{200D}\u{2B1B}, 漢字, "),
        || format!("{is} came back"),
    )?;
    Ok(format!("{n} tokens"))
}

fn template(probe: &Probe) -> Finding {
    let body = json!({"messages": [{"role": "system", "content": "SYS-1"}, {"role": "user", "content": "USR-2"}]});
    let prompt = probe.good("/apply-template", &body)?.json();
    let prompt = prompt["prompt"].as_str().unwrap_or_default();
    let at = |part: &str| prompt.find(part);
    must(at("SYS-1").is_some() && at("SYS-1") < at("USR-2"), || {
        format!("{prompt:?}")
    })?;
    Ok(format!("{} characters", prompt.chars().count()))
}
