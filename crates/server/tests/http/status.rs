//! Health, models, metrics, API keys, cross-origin rules, request ids.

use std::time::Duration;

use serde_json::json;
use server::settings::ServerConfig;

use crate::client;
use crate::test_server::{ServerSetup, TestServer};

fn with_config(change: impl FnOnce(&mut ServerConfig)) -> ServerSetup {
    let mut setup = ServerSetup::saying("ok");
    change(&mut setup.config);
    setup
}

#[tokio::test]
async fn health_and_models_answer_under_all_three_prefixes() {
    let server = ServerSetup::saying("ok").open().await;
    for path in ["/", "/v1", "/health", "/v1/health", "/v1/v1/health"] {
        let answer = server.get(path).await;
        assert_eq!(answer.status, 200, "{path}");
        assert_eq!(answer.json().await, json!({"status": "ok"}));
    }
    for path in [
        "/models",
        "/v1/models",
        "/v1/models?client_version=1",
        "/v1/v1/models",
    ] {
        let body = server.get(path).await.json().await;
        let model = &body["data"][0];
        assert_eq!(model["id"], "tiny", "{path}");
        assert_eq!(model["context_length"], 512);
        assert_eq!(model["max_model_len"], 512);
        assert_eq!(model["meta"]["n_ctx_train"], 1024);
    }
    let one = server.get("/v1/models/tiny").await.json().await;
    assert_eq!(one["id"], "tiny");
    let other = server.get("/v1/models/some/other").await;
    assert_eq!(other.status, 404);
    assert_eq!(other.json().await["error"]["code"], "model_not_found");
    let head = client::send(server.address, "HEAD", "/", &[], b"").await;
    assert_eq!(head.status, 200);
}

#[tokio::test]
async fn codex_catalogue_has_all_required_fields() {
    let server = ServerSetup::saying("ok").open().await;
    let plain = server.get("/v1/models").await.json().await;
    assert!(plain.get("models").is_none());
    assert_eq!(plain["last_id"], "tiny");
    assert_eq!(plain["data"][0]["display_name"], "tiny");
    let body = server.get("/v1/models?a=b&client_version=0.169.0").await;
    let body = body.json().await;
    let model = &body["models"][0];
    for key in ["slug", "display_name", "description", "base_instructions"] {
        assert!(!model[key].as_str().unwrap().is_empty(), "{key}");
    }
    for key in [
        "supported_in_api",
        "supports_reasoning_summaries",
        "support_verbosity",
        "supports_parallel_tool_calls",
    ] {
        assert!(model[key].is_boolean(), "{key}");
    }
    for key in ["upgrade", "default_verbosity", "apply_patch_tool_type"] {
        assert!(
            model.get(key).is_some_and(serde_json::Value::is_null),
            "{key}"
        );
    }
    assert_eq!(model["shell_type"], "shell_command");
    assert_eq!(model["visibility"], "list");
    assert!(model["priority"].is_i64());
    assert_eq!(
        model["truncation_policy"],
        json!({"mode": "tokens", "limit": 10_000})
    );
    assert_eq!(model["experimental_supported_tools"], json!([]));
    assert_eq!(model["input_modalities"], json!(["text"]));
    assert_eq!(model["context_window"], 512);
    for level in model["supported_reasoning_levels"].as_array().unwrap() {
        let effort = level["effort"].as_str().unwrap();
        assert!(
            ["low", "medium", "high", "xhigh"].contains(&effort),
            "{effort}"
        );
        assert!(level["description"].is_string());
    }
}

#[tokio::test]
async fn the_root_is_a_page_for_browsers_and_health_for_the_rest() {
    let server = ServerSetup::saying("ok").open().await;
    let browser = [("accept", "text/html,application/xhtml+xml,*/*;q=0.8")];
    let page = client::send(server.address, "GET", "/", &browser, b"").await;
    assert_eq!(page.status, 200);
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    assert_eq!(page.header("vary"), Some("accept"));
    check_policy(page.header("content-security-policy").unwrap());
    let page = page.text().await;
    assert!(page.contains("<title>Hearth</title>"));
    let program = [("accept", "*/*")];
    let health = client::send(server.address, "GET", "/", &program, b"").await;
    assert_eq!(health.json().await, json!({"status": "ok"}));
    let described = server.get("/openapi.json").await.json().await;
    assert!(described["paths"]["/v1/messages"]["post"].is_object());
}

/// A page runs its own script only, connects to its own server only, and makes no HTML of text.
fn check_policy(policy: &str) {
    for (directive, value) in policy.split("; ").filter_map(|each| each.split_once(' ')) {
        let right = match directive {
            "default-src" | "base-uri" | "form-action" | "frame-ancestors" | "trusted-types" => {
                value == "'none'"
            }
            "script-src" | "style-src" => value.starts_with("'sha256-") && !value.contains(' '),
            "img-src" | "font-src" => value == "data:",
            "connect-src" => value == "'self'",
            "require-trusted-types-for" => value == "'script'",
            _ => false,
        };
        assert!(right, "{directive} {value}");
    }
    for needed in ["default-src ", "script-src ", "require-trusted-types-for "] {
        assert!(policy.contains(needed), "{policy}");
    }
}

#[tokio::test]
async fn a_known_page_is_not_sent_again() {
    let server = ServerSetup::saying("ok").open().await;
    let browser = ("accept", "text/html");
    let page = client::send(server.address, "GET", "/", &[browser], b"").await;
    assert_eq!(page.header("cache-control"), Some("no-cache"));
    let tag = page.header("etag").unwrap().to_owned();
    let weak = format!("\"other\", W/{tag}");
    for (known, status) in [(&*tag, 304), (&weak, 304), ("*", 304), ("\"other\"", 200)] {
        let headers = [browser, ("if-none-match", known)];
        let again = client::send(server.address, "GET", "/", &headers, b"").await;
        assert_eq!(again.status, status, "{known}");
        assert_eq!(again.header("etag"), Some(&*tag));
        assert_eq!(again.text().await.is_empty(), status == 304);
    }
}

#[tokio::test]
async fn props_has_all_keys() {
    let server = ServerSetup::saying("ok").open().await;
    let props = server.get("/props").await.json().await;
    for key in [
        "api",
        "budget_envelope",
        "build_info",
        "capabilities",
        "daemon",
        "default_generation_settings",
        "full_cache",
        "model",
        "model_alias",
        "model_path",
        "model_card",
        "non_thinking_generation_settings",
        "pflash",
        "prefix_cache",
        "reasoning",
        "runtime",
        "sampling",
        "server",
        "speculative",
        "speculative_mode",
        "tool_replay",
        "total_slots",
        "chat_template",
        "chat_template_caps",
        "modalities",
        "bos_token",
        "eos_token",
        "is_sleeping",
    ] {
        assert!(props.get(key).is_some(), "{key}");
    }
    let endpoints = props["api"]["endpoints"].as_array().unwrap();
    for path in ["/v1/messages", "/v1/responses", "/v1/chat/completions"] {
        assert!(endpoints.contains(&json!(path)), "{path}");
    }
}

#[tokio::test]
async fn loading_shows_in_health_and_requests_are_unavailable() {
    let setup = ServerSetup {
        load_time: Duration::from_secs(4),
        ..ServerSetup::saying("ok")
    };
    let server = setup.open().await;
    let health = server.get("/health").await;
    assert_eq!(health.status, 503);
    assert!(health.header("retry-after").is_some());
    assert_eq!(health.json().await["status"], "loading");
    let early = server.chat(json!({})).await;
    assert_eq!(early.status, 503);
    assert!(early.header("retry-after").is_some());
    assert_eq!(early.json().await["error"]["code"], "unavailable");
    assert_eq!(server.get("/v1/models").await.status, 200);
    server.until(200).await;
    assert_eq!(server.chat(json!({})).await.status, 200);
}

#[tokio::test]
async fn a_failed_load_ends_the_server_with_its_reason() {
    let server = ServerSetup {
        load_error: Some("weights.gguf: no such tensor"),
        ..ServerSetup::saying("ok")
    }
    .open()
    .await;
    let error = server.served.await.unwrap().unwrap_err();
    assert!(matches!(error, server::error::ServeError::Load(_)));
    assert_eq!(error.to_string(), "weights.gguf: no such tensor");
}

async fn with_key(server: &TestServer, name: &str, value: &str) -> u16 {
    let headers = [(name, value)];
    let answer = client::send(server.address, "GET", "/v1/models", &headers, b"").await;
    answer.status
}

#[tokio::test]
async fn keys_are_required_except_for_health_and_preflight() {
    let setup = with_config(|config| {
        config.api_keys = vec!["alpha".to_owned(), "beta".to_owned()];
    });
    let server = setup.open().await;
    let refused = server.chat(json!({})).await;
    assert_eq!(refused.status, 401);
    assert_eq!(
        refused.header("access-control-allow-origin"),
        Some("*"),
        "browsers must be able to read the error"
    );
    let error = refused.json().await;
    assert_eq!(error["error"]["type"], "authentication_error");
    assert_eq!(error["error"]["code"], "invalid_api_key");
    assert_eq!(server.get("/metrics").await.status, 401);
    assert_eq!(server.get("/nothing/here").await.status, 401);
    assert_eq!(server.get("/health").await.status, 200);
    let preflight = client::send(server.address, "OPTIONS", "/v1/models", &[], b"").await;
    assert_eq!(preflight.status, 204);
    assert_eq!(
        with_key(&server, "authorization", "Bearer alpha").await,
        200
    );
    assert_eq!(with_key(&server, "x-api-key", "beta").await, 200);
    assert_eq!(
        with_key(&server, "authorization", "Bearer gamma").await,
        401
    );
    assert_eq!(with_key(&server, "x-api-key", "alph").await, 401);
    let headers = [("x-api-key", "alpha")];
    let props = client::send(server.address, "GET", "/props", &headers, b"").await;
    assert_eq!(props.json().await["model_path"], "/models/tiny.gguf");
}

#[tokio::test]
async fn server_without_keys_hides_file_paths() {
    let server = ServerSetup::saying("ok").open().await;
    assert_eq!(
        with_key(&server, "authorization", "Bearer whatever").await,
        200
    );
    let props = server.get("/props").await.json().await;
    assert!(props["model_path"].is_null());
    assert_eq!(props["total_slots"], 4);
    assert_eq!(props["default_generation_settings"]["n_ctx"], 512);
    assert_eq!(props["speculative_mode"], "off");
    assert_eq!(props["eos_token"], "<|im_end|>");
    // The test's template has no tools, but it opens a reasoning block if asked to.
    assert_eq!(props["capabilities"]["tools_supported"], false);
    assert_eq!(props["capabilities"]["reasoning_supported"], true);
}

#[tokio::test]
async fn request_ids_are_echoed_or_generated() {
    let server = ServerSetup::saying("ok").open().await;
    let headers = [("x-request-id", "mine-1")];
    let answer = client::send(server.address, "GET", "/health", &headers, b"").await;
    assert_eq!(answer.header("x-request-id"), Some("mine-1"));
    assert!(answer.header("server").unwrap().starts_with("hearth/"));
    let one = server.get("/health").await;
    let two = server.get("/nothing").await;
    let id = one.header("x-request-id").unwrap();
    assert!(id.len() > 20);
    assert_ne!(Some(id), two.header("x-request-id"));
}

#[tokio::test]
async fn strict_model_rejects_other_names() {
    let server = with_config(|config| config.strict_model = true)
        .open()
        .await;
    let answer = server.chat(json!({"model": "gpt-9"})).await;
    assert_eq!(answer.status, 404);
    assert_eq!(answer.json().await["error"]["code"], "model_not_found");
    assert_eq!(server.chat(json!({"model": "tiny"})).await.status, 200);
}

#[tokio::test]
async fn always_usage_sends_usage_unrequested() {
    let server = with_config(|config| config.always_usage = true)
        .open()
        .await;
    let chunks = server.chat(json!({"stream": true})).await.chunks().await;
    assert_eq!(chunks[chunks.len() - 1]["usage"]["completion_tokens"], 3);
}

#[tokio::test]
async fn metrics_count_requests_and_tokens() {
    let server = ServerSetup::saying("ok").open().await;
    server.chat(json!({})).await.json().await;
    server.chat(json!({"max_tokens": 1})).await.json().await;
    server.get("/nothing").await;
    let answer = server.get("/metrics").await;
    let kind = answer.header("content-type").unwrap().to_owned();
    assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
    let text = answer.text().await;
    for line in [
        "hearth_request_success_total{finished_reason=\"stop\"} 1",
        "hearth_request_success_total{finished_reason=\"length\"} 1",
        "hearth_http_requests_total{endpoint=\"/v1/chat/completions\",status=\"200\"} 2",
        "hearth_http_requests_total{endpoint=\"none\",status=\"404\"} 1",
        "hearth_generation_tokens_total 4",
        "hearth_num_requests_running 0",
        "hearth_num_requests_waiting 0",
        "hearth_engine_up 1",
        "# TYPE hearth_time_to_first_token_seconds histogram",
        "hearth_time_to_first_token_seconds_count 2",
        "hearth_time_to_first_token_seconds_bucket{le=\"600\"} 2",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} in:\n{text}");
    }
    let slots = server.get("/slots/summary").await.json().await;
    assert_eq!(slots["total"], 4);
    assert_eq!(slots["sequences"], 0);
}

#[tokio::test]
async fn status_pages_show_requests_and_never_text() {
    let mut setup = with_config(|config| config.status_page = true);
    setup.step = Duration::from_millis(20);
    let server = setup.open().await;
    server.watch.gate.hold();
    let body = json!({"messages": [{"role": "user", "content": "secret words"}], "priority": 7, "max_tokens": 9});
    let waiting = {
        let address = server.address;
        let body = body.to_string();
        tokio::spawn(async move {
            let kind = [("content-type", "application/json")];
            client::send(
                address,
                "POST",
                "/v1/chat/completions",
                &kind,
                body.as_bytes(),
            )
            .await
        })
    };
    let request = loop {
        let slots = server.get("/slots/summary").await.json().await;
        if let Some(request) = slots["requests"].get(0) {
            break request.clone();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert_eq!(request["priority"], 7, "{request}");
    assert_eq!(request["max_tokens"], 9);
    assert!(request["prompt_tokens"].as_u64().unwrap() > 0);
    assert!(["waiting", "prefill"].contains(&request["state"].as_str().unwrap()));
    let status = server.get("/status/json").await.text().await;
    assert!(
        status.contains("\"priority\":7") && !status.contains("secret"),
        "{status}"
    );
    let page = server.get("/status").await;
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    check_policy(page.header("content-security-policy").unwrap());
    assert!(page.header("etag").is_some());
    server.watch.gate.release();
    assert_eq!(waiting.await.unwrap().status, 200);
    server.until_requests(0).await;
}

#[tokio::test]
async fn status_pages_are_opt_in_and_require_the_key() {
    let server = ServerSetup::saying("ok").open().await;
    for path in ["/status", "/status/json", "/v1/status/events"] {
        let answer = server.get(path).await;
        assert_eq!(answer.status, 404, "{path}");
        let error = answer.json().await;
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains("--status-page"), "{message}");
    }
    let closed = with_config(|config| {
        config.status_page = true;
        config.api_keys = vec!["k".to_owned()];
    });
    let server = closed.open().await;
    assert_eq!(server.get("/status/json").await.status, 401);
    let key = [("authorization", "Bearer k")];
    let open = client::send(server.address, "GET", "/status/json", &key, b"").await;
    assert_eq!(open.status, 200);
}

#[tokio::test]
async fn wrong_method_lists_allowed_methods() {
    let server = ServerSetup::saying("ok").open().await;
    for (method, path, right) in [
        ("GET", "/v1/messages", "POST"),
        ("DELETE", "/v1/models", "GET"),
    ] {
        let answer = client::send(server.address, method, path, &[], b"").await;
        assert_eq!(answer.status, 405, "{path}");
        let allowed = answer.header("allow").unwrap_or_default().to_owned();
        assert!(allowed.contains(right), "{path}: {allowed}");
    }
}
