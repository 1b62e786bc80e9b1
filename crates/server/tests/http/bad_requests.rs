//! Bad requests always get a clear error, never a panic, a hang or a silent change.

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::client;
use crate::test_server::{ServerSetup, chat_body};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn malformed_bodies_are_rejected_with_a_reason() {
    let server = ServerSetup::saying("x").open().await;
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let deep_field = format!("{{\"messages\": {deep}}}");
    let invalid_utf8 = b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\xfe\"}]}";
    let bodies: [&[u8]; 8] = [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{\"messages\": [}",
        deep.as_bytes(),
        deep_field.as_bytes(),
        invalid_utf8,
    ];
    for path in [
        CHAT,
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/apply-template",
    ] {
        for body in bodies {
            let answer = server.post_bytes(path, body).await;
            assert_eq!(answer.status, 400, "{path} {}", body.len());
            let error = answer.json().await;
            assert_eq!(error["error"]["type"], "invalid_request_error");
            assert!(!error["error"]["message"].as_str().unwrap().is_empty());
        }
    }
    assert_eq!(server.chat(json!({})).await.status, 200);
}

#[tokio::test]
async fn fields_out_of_range_are_rejected_by_name() {
    let server = ServerSetup::saying("x").open().await;
    for (fields, param) in [
        (json!({"temperature": -1}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 1.5}), "top_p"),
        (json!({"n": 0}), "n"),
        (json!({"n": 129}), "n"),
        (json!({"max_tokens": "five"}), "max_tokens"),
        (json!({"stop": [""]}), "stop[0]"),
        (json!({"stop": vec!["x"; 1025]}), "stop"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"logit_bias": {"99999": 1}}), "logit_bias"),
        (json!({"stop_token_ids": [99999]}), "stop_token_ids"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (
            json!({"messages": [{"role": "wizard", "content": "hi"}]}),
            "messages[0].role",
        ),
        (json!({"audio": {}}), "audio"),
    ] {
        let answer = server.chat(fields.clone()).await;
        assert_eq!(answer.status, 400, "{fields}");
        let error = answer.json().await;
        assert_eq!(error["error"]["param"], param, "{fields}: {error}");
    }
}

#[tokio::test]
async fn images_are_rejected() {
    let server = ServerSetup::saying("x").open().await;
    let messages = json!([{"role": "user", "content": [
        {"type": "text", "text": "what is this"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]}]);
    let answer = server.chat(json!({"messages": messages})).await;
    assert_eq!(answer.status, 400);
    let error = answer.json().await;
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("image_url"), "{message}");
}

#[tokio::test]
async fn conversation_filling_the_context_is_rejected_with_both_lengths() {
    let server = ServerSetup::saying("x").open().await;
    let mut body = chat_body(json!({}));
    body["messages"][0]["content"] = json!("y".repeat(700));
    for stream in [false, true] {
        body["stream"] = json!(stream);
        let answer = server.post(CHAT, &body).await;
        assert_eq!(answer.status, 400, "before any header of a stream");
        let error = answer.json().await;
        assert_eq!(error["error"]["code"], "context_length_exceeded");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(
            message.contains("512") && message.contains("7"),
            "{message}"
        );
    }
}

#[tokio::test]
async fn template_exception_is_a_client_error() {
    let server = ServerSetup::saying("x").open().await;
    let messages = json!([{"role": "user", "content": "template, break"}]);
    let answer = server.chat(json!({"messages": messages})).await;
    assert_eq!(answer.status, 400);
    let error = answer.json().await;
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("no such talk"), "{message}");
}

#[tokio::test]
async fn template_failure_is_the_requests_error() {
    let server = ServerSetup::saying("x").open().await;
    let messages = json!([{"role": "user", "content": "template, fall"}]);
    let answer = server.chat(json!({"messages": messages})).await;
    assert_eq!(answer.status, 400);
    let error = answer.json().await;
    assert_eq!(error["error"]["type"], "invalid_request_error");
}

#[tokio::test]
async fn oversized_body_is_discarded_and_rejected() {
    let server = ServerSetup::saying("x").open().await;
    let mut body = b"{\"messages\": [{\"role\": \"user\", \"content\": \"".to_vec();
    body.resize(100 << 20, b'a');
    let answer = server.post_bytes(CHAT, &body).await;
    assert_eq!(answer.status, 413);
    let error = answer.json().await;
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains(&(64 << 20).to_string()), "{message}");
    assert_eq!(server.chat(json!({})).await.status, 200);
}

#[tokio::test]
async fn oversized_chunked_body_is_rejected() {
    let server = ServerSetup::saying("x").open().await;
    let mut socket = tokio::net::TcpStream::connect(server.address)
        .await
        .unwrap();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    let part = vec![b' '; 1 << 20];
    for _ in 0..100 {
        socket.write_all(b"100000\r\n").await.unwrap();
        socket.write_all(&part).await.unwrap();
        socket.write_all(b"\r\n").await.unwrap();
    }
    socket.write_all(b"0\r\n\r\n").await.unwrap();
    assert_eq!(client::read_head(socket).await.status, 413);
}

#[tokio::test]
async fn a_long_valid_body_is_served() {
    let server = ServerSetup::saying("ok").open().await;
    let mut body = chat_body(json!({}));
    body["metadata"] = json!({"padding": "z".repeat(8 << 20)});
    assert_eq!(server.post(CHAT, &body).await.status, 200);
}

#[tokio::test]
async fn unknown_paths_and_methods_get_json_errors() {
    let server = ServerSetup::saying("x").open().await;
    for path in [
        "/v1/embeddings",
        "/api/v0/models",
        "/api/v1/models",
        "/favicon.ico",
        "/v1/chat/nothing",
        "/v1/responses/x",
    ] {
        let answer = server.get(path).await;
        assert_eq!(answer.status, 404, "{path}");
        assert_eq!(answer.json().await["error"]["type"], "not_found_error");
    }
    let answer = server.get(CHAT).await;
    assert_eq!(answer.status, 405);
    assert_eq!(
        answer.json().await["error"]["type"],
        "invalid_request_error"
    );
    let answer = server.post("/v1/models", &Value::Null).await;
    assert_eq!(answer.status, 405);
}
