//! Graceful and forced shutdown.

use std::time::Duration;

use conformance::fake::{FaultKind, FaultTrigger, InjectedFault, RunnerMethod};
use contract::Limits;
use serde_json::{Value, json};
use server::error::ServeError;

use crate::client::{HttpResponse, MAX_WAIT};
use crate::test_server::{ServerSetup, TestServer, says};

fn steady(text: &str) -> ServerSetup {
    ServerSetup {
        script: says(text),
        step: Duration::from_millis(5),
        limits: Limits {
            context: 100_000,
            sequences: 1,
            ..ServerSetup::default().limits
        },
        ..ServerSetup::default()
    }
}

async fn begun(server: &TestServer) -> HttpResponse {
    let mut stream = server.chat(json!({"stream": true})).await;
    stream.event().await.expect("the opening");
    stream.event().await.expect("a token");
    stream
}

async fn end(server: TestServer) -> Result<(), ServeError> {
    tokio::time::timeout(MAX_WAIT, server.served)
        .await
        .expect("the server ends in time")
        .unwrap()
}

fn last_error(chunks: &[Value]) -> &Value {
    &chunks[chunks.len() - 1]["error"]
}

#[tokio::test]
async fn shutdown_finishes_running_requests_and_admits_none() {
    let server = steady(&"x".repeat(60)).open().await;
    let stream = begun(&server).await;
    let waiting = server.chat(json!({"stream": true})).await;
    server.stop.trigger();
    let refused = waiting.chunks().await;
    assert_eq!(last_error(&refused)["code"], "unavailable");
    let chunks = stream.chunks().await;
    assert_eq!(
        chunks[chunks.len() - 1]["choices"][0]["finish_reason"],
        "stop"
    );
    let address = server.address;
    assert!(end(server).await.is_ok());
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn requests_beyond_the_grace_period_fail() {
    let mut setup = steady(&"x".repeat(100_000));
    setup.config.timeouts.shutdown = Duration::from_millis(200);
    let server = setup.open().await;
    let stream = begun(&server).await;
    server.stop.trigger();
    let chunks = stream.chunks().await;
    assert_eq!(last_error(&chunks)["code"], "unavailable");
    let watch = server.watch.clone();
    assert!(end(server).await.is_ok());
    assert_eq!(watch.open_now(), 0, "the runner has no open sequences");
}

#[tokio::test]
async fn second_shutdown_request_returns_at_once() {
    let server = steady(&"x".repeat(100_000)).open().await;
    let _stream = begun(&server).await;
    server.stop.trigger();
    server.stop.trigger();
    assert!(matches!(end(server).await, Err(ServeError::Forced)));
}

#[tokio::test]
async fn an_idle_server_stops_without_delay() {
    let setup = steady("x");
    let grace = setup.config.timeouts.shutdown;
    let server = setup.open().await;
    let begun = std::time::Instant::now();
    server.stop.trigger();
    assert!(end(server).await.is_ok());
    assert!(begun.elapsed() < grace / 2);
}

#[tokio::test]
async fn stopping_while_loading_does_not_wait_for_the_load() {
    let server = ServerSetup {
        load_time: Duration::from_secs(240),
        ..ServerSetup::default()
    }
    .open()
    .await;
    let begun = std::time::Instant::now();
    server.stop.trigger();
    assert!(end(server).await.is_ok());
    assert!(begun.elapsed() < Duration::from_secs(60));
}

async fn check_lost(server: TestServer) {
    let mut stream = begun(&server).await;
    server.watch.fake.fail(InjectedFault {
        call: RunnerMethod::Verify,
        when: FaultTrigger::From(0),
        kind: FaultKind::DeviceLost,
    });
    let mut last = String::new();
    while let Some(event) = stream.event().await {
        if event == "data: [DONE]" {
            break;
        }
        last = event;
    }
    assert!(last.contains("server_error"), "{last}");
    lost_to_the_world(server).await;
}

async fn lost_to_the_world(server: TestServer) {
    let health = server.get("/health").await;
    assert_eq!(health.status, 503);
    assert_eq!(health.json().await["status"], "error");
    let next = server.chat(json!({})).await;
    assert_eq!(next.status, 500);
    assert!(matches!(end(server).await, Err(ServeError::EngineLost(_))));
}

#[tokio::test]
async fn lost_device_fails_all_requests_and_ends_the_server() {
    check_lost(steady(&"x".repeat(100_000)).open().await).await;
}

#[tokio::test]
async fn engine_panic_fails_all_requests_and_ends_the_server() {
    let server = steady(&"x".repeat(100_000)).open().await;
    let stream = begun(&server).await;
    server.watch.gate.panic_next();
    let chunks = stream.chunks().await;
    let error = last_error(&chunks);
    assert_eq!(error["type"], "server_error");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("requested by the test"), "{message}");
    lost_to_the_world(server).await;
}

#[tokio::test]
async fn lost_whole_response_is_a_500() {
    let server = steady(&"x".repeat(100_000)).open().await;
    server.watch.fake.fail(InjectedFault {
        call: RunnerMethod::Verify,
        when: FaultTrigger::Nth(3),
        kind: FaultKind::DeviceLost,
    });
    let answer = server.chat(json!({})).await;
    assert_eq!(answer.status, 500);
    assert_eq!(answer.json().await["error"]["type"], "server_error");
    lost_to_the_world(server).await;
}

#[tokio::test]
async fn stalled_step_shows_in_health() {
    let mut setup = steady("ok");
    setup.config.timeouts.stall = Duration::from_millis(100);
    let server = setup.open().await;
    server.watch.gate.hold();
    let stream = server.chat(json!({"stream": true})).await;
    server.until(503).await;
    let health = server.get("/health").await.json().await;
    assert_eq!(health["status"], "error");
    server.watch.gate.release();
    stream.chunks().await;
    server.until(200).await;
}
