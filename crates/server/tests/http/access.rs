//! Who may use a server without a key: foreign hosts, web pages, content types.
//! And which paths need no key.

use serde_json::json;

use crate::client::{self, HttpResponse};
use crate::test_server::{ServerSetup, TestServer, chat_body};

const CHAT: &str = "/v1/chat/completions";

fn setup(change: impl FnOnce(&mut server::settings::ServerConfig)) -> ServerSetup {
    let mut setup = ServerSetup::saying("ok");
    change(&mut setup.config);
    setup
}

/// A chat as a page or a foreign client would send it.
async fn chat(server: &TestServer, headers: &[(&str, &str)]) -> HttpResponse {
    let body = chat_body(json!({})).to_string();
    client::send(server.address, "POST", CHAT, headers, body.as_bytes()).await
}

async fn chat_from(server: &TestServer, origin: &str) -> HttpResponse {
    let headers = [("content-type", "application/json"), ("origin", origin)];
    chat(server, &headers).await
}

async fn models_at(server: &TestServer, host: &str) -> u16 {
    let headers = [("host", host)];
    client::send(server.address, "GET", "/v1/models", &headers, b"")
        .await
        .status
}

#[tokio::test]
async fn foreign_hosts_are_refused_without_a_key() {
    let server = setup(|_| {}).open().await;
    for host in ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000"] {
        assert_eq!(models_at(&server, host).await, 200, "{host}");
    }
    for host in [
        "evil.example",
        "localhost.evil.example:8000",
        "10.0.0.1",
        "",
    ] {
        assert_eq!(models_at(&server, host).await, 403, "{host}");
    }
    let headers = [("host", "evil.example")];
    for path in ["/slots", "/metrics", "/v1/props", "/openapi.json", "/none"] {
        let answer = client::send(server.address, "GET", path, &headers, b"").await;
        assert_eq!(answer.status, 403, "{path}");
    }
    let absolute = "http://evil.example/v1/models";
    let answer = client::send(server.address, "GET", absolute, &[], b"").await;
    assert_eq!(answer.status, 403, "the target's own host counts");
    let answer = client::send(server.address, "GET", "/v1/models", &headers, b"").await;
    let error = answer.json().await;
    assert_eq!(error["error"]["type"], "permission_error");
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("--allowed-host evil.example"), "{message}");
    // Probes of containers go to the container's address.
    let answer = client::send(server.address, "GET", "/health", &headers, b"").await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn listed_hosts_and_the_listen_address_are_allowed() {
    let server = setup(|config| {
        config.allowed_hosts = vec!["Host.Docker.Internal".to_owned()];
        config.host = "10.1.2.3".to_owned();
    })
    .open()
    .await;
    for (host, status) in [
        ("host.docker.internal:8000", 200),
        ("10.1.2.3:8000", 200),
        ("10.1.2.4:8000", 403),
        ("docker.internal", 403),
    ] {
        assert_eq!(models_at(&server, host).await, status, "{host}");
    }
    let any = setup(|config| config.allowed_hosts = vec!["*".to_owned()]);
    assert_eq!(models_at(&any.open().await, "box.lan").await, 200);
}

#[tokio::test]
async fn pages_of_foreign_origins_are_refused_without_a_key() {
    let server = setup(|_| {}).open().await;
    for origin in [
        "http://localhost:3000",
        "https://127.0.0.1",
        "http://[::1]:8080",
        "tauri://localhost",
    ] {
        let answer = chat_from(&server, origin).await;
        assert_eq!(answer.status, 200, "{origin}");
        assert_eq!(
            answer.header("access-control-allow-origin"),
            Some(origin),
            "{origin}"
        );
        assert_eq!(answer.header("vary"), Some("origin"));
    }
    for origin in [
        "https://evil.example",
        "http://localhost.evil.example",
        "null",
        "http://10.0.0.1",
    ] {
        let answer = chat_from(&server, origin).await;
        assert_eq!(answer.status, 403, "{origin}");
        assert_eq!(answer.header("access-control-allow-origin"), None);
        let headers = [("origin", origin)];
        let preflight = client::send(server.address, "OPTIONS", CHAT, &headers, b"").await;
        assert_eq!(preflight.header("access-control-allow-origin"), None);
        let slots = client::send(server.address, "GET", "/slots", &headers, b"").await;
        assert_eq!(slots.status, 403, "{origin}");
    }
}

#[tokio::test]
async fn listed_origins_may_use_the_server() {
    let ui = "https://chat.example";
    let server = setup(|config| config.cors_origins = vec![ui.to_owned()])
        .open()
        .await;
    let headers = [
        ("origin", ui),
        ("access-control-request-method", "POST"),
        (
            "access-control-request-headers",
            "authorization,content-type",
        ),
        ("access-control-request-private-network", "true"),
    ];
    let preflight = client::send(server.address, "OPTIONS", CHAT, &headers, b"").await;
    assert_eq!(preflight.status, 204);
    for (name, value) in [
        ("access-control-allow-origin", ui),
        ("access-control-allow-methods", "GET, POST, DELETE, OPTIONS"),
        ("access-control-allow-headers", "*, authorization"),
        ("access-control-allow-private-network", "true"),
    ] {
        assert_eq!(preflight.header(name), Some(value));
    }
    assert_eq!(chat_from(&server, ui).await.status, 200);
    let json = [("content-type", "application/json"), ("origin", ui)];
    let body = chat_body(json!({"stream": true})).to_string();
    let stream = client::send(server.address, "POST", CHAT, &json, body.as_bytes()).await;
    assert_eq!(stream.header("access-control-allow-origin"), Some(ui));
    assert_eq!(
        chat_from(&server, "https://other.example").await.status,
        403
    );
    let any = setup(|config| config.cors_origins = vec!["*".to_owned()])
        .open()
        .await;
    let answer = chat_from(&any, "https://other.example").await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
}

#[tokio::test]
async fn page_served_under_an_allowed_host_may_use_its_own_server() {
    let server = setup(|config| config.allowed_hosts = vec!["box.lan".to_owned()])
        .open()
        .await;
    for (origin, status) in [("http://box.lan:8000", 200), ("http://box.lan:81", 403)] {
        let headers = [
            ("host", "box.lan:8000"),
            ("content-type", "application/json"),
            ("origin", origin),
        ];
        assert_eq!(chat(&server, &headers).await.status, status, "{origin}");
    }
}

#[tokio::test]
async fn posts_of_other_content_types_are_refused_without_a_key() {
    let server = setup(|_| {}).open().await;
    for kind in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
    ] {
        for path in [CHAT, "/v1/messages", "/v1/responses", "/tokenize"] {
            let headers = [("content-type", kind)];
            let answer = client::send(server.address, "POST", path, &headers, b"{}").await;
            assert_eq!(answer.status, 415, "{path} {kind}");
        }
    }
    assert_eq!(chat(&server, &[]).await.status, 415, "none at all");
    let form = ("content-type", "application/x-www-form-urlencoded");
    let curl = [form, ("user-agent", "curl/8.5.0")];
    assert_eq!(chat(&server, &curl).await.status, 200);
    let headers = [("content-type", "application/json; charset=utf-8")];
    assert_eq!(chat(&server, &headers).await.status, 200);
}

#[tokio::test]
async fn server_with_a_key_checks_the_key_alone() {
    let server = setup(|config| config.api_keys = vec!["k".to_owned()])
        .open()
        .await;
    let headers = [
        ("host", "far.example"),
        ("origin", "https://chat.example"),
        ("content-type", "text/plain"),
        ("authorization", "Bearer k"),
    ];
    let answer = chat(&server, &headers).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
}

#[tokio::test]
async fn no_cors_sends_no_cors_header_at_all() {
    for cors_origins in [vec![], vec!["*".to_owned()]] {
        let server = setup(|config| {
            config.cors = false;
            config.cors_origins = cors_origins;
        })
        .open()
        .await;
        let headers = [("origin", "http://localhost:3000")];
        for method in ["OPTIONS", "GET"] {
            let answer = client::send(server.address, method, "/v1/models", &headers, b"").await;
            let sent: Vec<_> = answer.header_names_starting("access-control-");
            assert!(sent.is_empty(), "{method}: {sent:?}");
        }
    }
}

#[tokio::test]
async fn only_pages_and_exact_health_paths_need_no_key() {
    let server = setup(|config| {
        config.api_keys = vec!["k".to_owned()];
        config.status_page = true;
    })
    .open()
    .await;
    let key = [("x-api-key", "k")];
    let openapi = client::send(server.address, "GET", "/openapi.json", &key, b"").await;
    let document = openapi.json().await;
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() > 20, "the table has every route");
    let open = ["/", "/status", "/health", "/v1/health", "/v1/v1/health"];
    for path in open {
        assert_eq!(server.get(path).await.status, 200, "{path}");
    }
    let mut n_checked = 0;
    for path in paths.keys() {
        let path = path.trim_start_matches("/v1").replace("{id}", "tiny");
        for base in ["", "/v1", "/v1/v1"] {
            for tail in [
                "",
                "/",
                "/health",
                "/health/",
                "//health",
                "/x/health",
                "%2Fhealth",
            ] {
                let path = format!("{base}{path}{tail}");
                if !path.starts_with('/') || open.contains(&&*path) {
                    continue;
                }
                for method in ["GET", "POST"] {
                    let answer = client::send(server.address, method, &path, &[], b"").await;
                    assert_eq!(answer.status, 401, "{method} {path}");
                    n_checked += 1;
                }
            }
        }
    }
    assert!(n_checked > 500, "{n_checked}");
}
