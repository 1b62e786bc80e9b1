//! `hearth ps` and `hearth stop`: the models of a running server, and their unloading.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::cli::{PsArgs, StopArgs};
use crate::commands::http_client::{HttpClient, HttpResponse};
use crate::progress::bytes_text;

/// Longest wait for the model list.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for the end of a model's requests.
const STOP_TIMEOUT: Duration = Duration::from_secs(3600);

pub(super) fn ps(args: &PsArgs) -> anyhow::Result<()> {
    let client = HttpClient::new(&args.url, args.api_key.clone(), LIST_TIMEOUT)?;
    let list = list(&client)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let text = serde_json::to_string_pretty(&list).context("cannot format the list")?;
        writeln!(out, "{text}")?;
        return Ok(());
    }
    let models = entries(&list);
    let names = models.iter().map(|model| id(model).chars().count());
    let width = names.max().unwrap_or(0).max("NAME".len());
    writeln!(
        out,
        "{:width$}  {:14}  {:>10}  {:>8}  {:>8}  UNTIL",
        "NAME", "STATE", "SIZE", "CONTEXT", "REQUESTS"
    )?;
    for model in models {
        let status = &model["status"];
        let size = model["meta"]["size"].as_u64().map(bytes_text);
        let text = |value: &Value| value.as_u64().map_or("-".to_owned(), |n| n.to_string());
        writeln!(
            out,
            "{:width$}  {:14}  {:>10}  {:>8}  {:>8}  {}",
            id(model),
            state(model),
            size.unwrap_or("-".to_owned()),
            text(&model["context_length"]),
            text(&status["requests"]),
            until(status)
        )?;
        if let Some(error) = status["error"].as_str() {
            writeln!(out, "    {error}")?;
        }
    }
    Ok(())
}

pub(super) fn stop(args: &StopArgs) -> anyhow::Result<()> {
    let client = HttpClient::new(&args.url, args.api_key.clone(), STOP_TIMEOUT)?;
    let list = list(&client)?;
    let loaded = entries(&list)
        .into_iter()
        .filter(|model| state(model) != "unloaded")
        .map(|model| id(model).to_owned());
    let models: Vec<String> = if args.models.is_empty() {
        loaded.collect()
    } else {
        args.models.clone()
    };
    if models.is_empty() {
        tracing::info!("no model is loaded");
    }
    for model in models {
        let body = json!({"model": model});
        let response = answered(&client, client.post("/v1/models/unload", &body))?;
        if response.status != 200 {
            let error = response.json();
            let message = error["error"]["message"].as_str().unwrap_or_default();
            bail!("{model}: {message} (status {})", response.status);
        }
        tracing::info!("{model}: unloaded");
    }
    Ok(())
}

fn list(client: &HttpClient) -> anyhow::Result<Value> {
    let response = answered(client, client.get("/v1/models"))?;
    let list = response.json();
    if !list["data"].is_array() {
        let base = client.base();
        bail!(
            "{base}/v1/models is no list of models (status {})",
            response.status
        );
    }
    Ok(list)
}

/// The response; a missing server and a missing key are named.
fn answered(
    client: &HttpClient,
    response: Result<HttpResponse, ureq::Error>,
) -> anyhow::Result<HttpResponse> {
    let base = client.base();
    let response = response.with_context(|| {
        format!("{base} does not respond; start `hearth serve`, or give its address with --url")
    })?;
    if response.status == 401 {
        bail!("{base} requires a key; give it with --api-key");
    }
    Ok(response)
}

fn entries(list: &Value) -> Vec<&Value> {
    list["data"].as_array().into_iter().flatten().collect()
}

fn id(model: &Value) -> &str {
    model["id"].as_str().unwrap_or("-")
}

/// The state; a server of one model reports none, and has it loaded or is loading it.
fn state(model: &Value) -> String {
    let status = &model["status"];
    match (
        status["value"].as_str(),
        status["progress_percent"].as_u64(),
    ) {
        (Some(value), Some(percent)) => format!("{value} {percent} %"),
        (Some(value), None) if status["failed"] == true => format!("{value}, failed"),
        (Some(value), None) => value.to_owned(),
        (None, _) if model["context_length"].is_null() => "loading".to_owned(),
        (None, _) => "loaded".to_owned(),
    }
}

/// When an idle model is unloaded.
fn until(status: &Value) -> String {
    match status["expires_in_s"].as_u64() {
        None => "-".to_owned(),
        Some(seconds @ 0..120) => format!("in {seconds} s"),
        Some(seconds) => format!("in {} min", seconds / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_servers_with_one_model_and_with_several_are_named() {
        let of = |status: Value| state(&json!({"id": "m", "status": status}));
        assert_eq!(
            of(json!({"value": "loading", "progress_percent": 43})),
            "loading 43 %"
        );
        assert_eq!(
            of(json!({"value": "unloaded", "failed": true})),
            "unloaded, failed"
        );
        assert_eq!(of(json!({"value": "loaded"})), "loaded");
        assert_eq!(state(&json!({"id": "m"})), "loading");
        assert_eq!(state(&json!({"id": "m", "context_length": 5})), "loaded");
        assert_eq!(until(&json!({"expires_in_s": 300})), "in 5 min");
    }
}
