//! What connections may hold, and for how long.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::{self, MAX_WAIT};
use crate::test_server::{ServerSetup, TestServer, chat_body};

const READ: Duration = Duration::from_millis(300);

async fn impatient() -> TestServer {
    let mut setup = ServerSetup::saying("ok");
    setup.config.timeouts.read = READ;
    setup.open().await
}

/// Sends `text`, and gives what came until the server closed the connection.
async fn until_closed(server: &TestServer, text: &str) -> String {
    let begun = Instant::now();
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    socket.write_all(text.as_bytes()).await.unwrap();
    let mut came = Vec::new();
    tokio::time::timeout(MAX_WAIT, socket.read_to_end(&mut came))
        .await
        .unwrap_or_else(|_| panic!("the server keeps the connection after {text:?}"))
        .unwrap();
    assert!(begun.elapsed() >= READ / 2, "not before the timeout");
    String::from_utf8(came).unwrap()
}

#[tokio::test]
async fn half_sent_head_ends_the_connection() {
    let server = impatient().await;
    until_closed(&server, "").await;
    until_closed(&server, "POST /v1/chat/comp").await;
    until_closed(&server, "GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: ").await;
}

#[tokio::test]
async fn half_sent_body_is_answered_408_and_ends_the_connection() {
    let server = impatient().await;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n\
                content-type: application/json\r\n";
    let bodies = [
        "content-length: 1000\r\n\r\n{\"mod",
        "transfer-encoding: chunked\r\n\r\n5\r\n{\"m",
    ];
    for body in bodies {
        let came = until_closed(&server, &format!("{head}{body}")).await;
        assert!(came.starts_with("HTTP/1.1 408"), "{came}");
        assert!(came.contains("did not arrive in time"), "{came}");
    }
}

#[tokio::test]
async fn idle_connection_ends_after_its_reply() {
    let server = impatient().await;
    let came = until_closed(&server, "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert!(came.starts_with("HTTP/1.1 200"), "{came}");
}

#[tokio::test]
async fn read_timeout_does_not_end_a_long_reply() {
    let mut setup = ServerSetup::saying(&"x".repeat(100));
    setup.config.timeouts.read = READ;
    setup.step = Duration::from_millis(10);
    let server = setup.open().await;
    let begun = Instant::now();
    let chunks = server.chat(json!({"stream": true})).await.chunks().await;
    assert!(begun.elapsed() > 2 * READ, "the reply took long");
    assert_eq!(
        chunks[chunks.len() - 1]["choices"][0]["finish_reason"],
        "stop"
    );
    assert_eq!(
        server.chat(json!({})).await.status,
        200,
        "a whole reply too"
    );
}

#[tokio::test]
async fn connections_beyond_the_limit_wait_for_one_to_end() {
    let mut setup = ServerSetup::saying("ok");
    setup.config.max_connections = 2;
    let server = setup.open().await;
    let first = TcpStream::connect(server.address).await.unwrap();
    let _second = TcpStream::connect(server.address).await.unwrap();
    // Both must have been accepted before the third.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let third = server.get("/health");
    tokio::pin!(third);
    let early = tokio::time::timeout(Duration::from_millis(300), &mut third).await;
    assert!(early.is_err(), "a third connection is not served");
    drop(first);
    assert_eq!(third.await.status, 200);
}

/// Virtual memory of this process in KiB.
fn virtual_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmSize:"));
    let figure = line.and_then(|line| line.split_whitespace().nth(1));
    figure.unwrap().parse().unwrap()
}

#[tokio::test]
async fn announced_lengths_reserve_next_to_nothing() {
    let server = ServerSetup::saying("ok").open().await;
    let before = virtual_kib();
    let mut sockets = Vec::new();
    for _ in 0..200 {
        let mut socket = TcpStream::connect(server.address).await.unwrap();
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n\
                    content-type: application/json\r\ncontent-length: 60000000\r\n\r\n{";
        socket.write_all(head.as_bytes()).await.unwrap();
        sockets.push(socket);
    }
    // All bodies are being read once a later request was answered.
    assert_eq!(server.get("/health").await.status, 200);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let grown = virtual_kib().saturating_sub(before);
    // Eagerly, 200 bodies would take 12 GB; other tests of this process take some.
    assert!(grown < 4 << 20, "{grown} KiB");
    let body = chat_body(json!({})).to_string();
    let headers = [("content-type", "application/json")];
    let path = "/v1/chat/completions";
    let answer = client::send(server.address, "POST", path, &headers, body.as_bytes()).await;
    assert_eq!(answer.status, 200);
}

/// How many times longer than alone a calculation takes, because the machine has other work.
fn slowness() -> f64 {
    let used = || -> Option<u64> {
        let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        stat.split_whitespace().next()?.parse().ok()
    };
    let (begun, before) = (Instant::now(), used());
    while begun.elapsed() < Duration::from_millis(500) {
        std::hint::spin_loop();
    }
    let took = begun.elapsed().as_nanos() as f64;
    let on_core = used().zip(before).map(|(after, before)| after - before);
    on_core.map_or(1.0, |ns| (took / ns.max(1) as f64).max(1.0))
}

#[tokio::test]
async fn text_far_beyond_the_context_is_refused_in_seconds() {
    let server = ServerSetup::saying("ok").open().await;
    let text = "many words in a row ".repeat(15 << 20 >> 4);
    for (path, body) in [
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": text}]}),
        ),
        ("/v1/completions", json!({"prompt": text})),
        (
            "/v1/messages",
            json!({"max_tokens": 9, "messages": [{"role": "user", "content": text}]}),
        ),
        ("/v1/responses", json!({"input": text})),
    ] {
        let begun = Instant::now();
        let answer = server.post(path, &body).await;
        assert_eq!(answer.status, 400, "{path}");
        let error = answer.json().await["error"]["message"].to_string();
        assert!(
            error.contains("too long") || error.contains("maximum context"),
            "{error}"
        );
        let took = begun.elapsed();
        let limit = Duration::from_secs(10).mul_f64(slowness());
        assert!(took < limit, "{path}: {took:?}, limit {limit:?}");
    }
}
