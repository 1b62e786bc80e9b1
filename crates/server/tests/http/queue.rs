//! The queue, client disconnects and timeouts.

use std::time::Duration;

use conformance::fake::RunnerMethod;
use contract::Limits;
use serde_json::json;

use crate::client::HttpResponse;
use crate::test_server::{ServerSetup, TestServer, chat_body, says};

const CHAT: &str = "/v1/chat/completions";
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

/// One sequence on the device and an endless reply.
fn narrow() -> ServerSetup {
    let mut setup = ServerSetup {
        script: says(&"abc ".repeat(100_000)),
        limits: Limits {
            sequences: 1,
            context: 100_000,
            ..ServerSetup::default().limits
        },
        step: Duration::from_millis(1),
        ..ServerSetup::default()
    };
    setup.config.queue_limit = 1;
    setup
}

/// A started stream that holds the only sequence.
async fn occupy(server: &TestServer) -> HttpResponse {
    let mut stream = server.chat(json!({"stream": true})).await;
    assert_eq!(stream.status, 200);
    stream.event().await.expect("the first event");
    stream.event().await.expect("a token");
    stream
}

async fn idle(server: &TestServer) {
    server
        .eventually("no sequence is open", |w| w.open_now() == 0)
        .await;
    assert!(server.watch.count(RunnerMethod::Open) > 0);
}

#[tokio::test]
async fn full_queue_is_rejected_with_retry_after() {
    let server = narrow().open().await;
    let running = occupy(&server).await;
    let waiting = server.chat(json!({"stream": true, "max_tokens": 2})).await;
    assert_eq!(
        waiting.status, 200,
        "headers are sent while the request waits"
    );
    let refused = server.chat(json!({"stream": true})).await;
    assert_eq!(refused.status, 429);
    let ask = json!({"max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]});
    let overloaded = server.post("/v1/messages", &ask).await;
    assert_eq!(overloaded.status, 529);
    assert!(overloaded.header("retry-after").is_some());
    assert_eq!(overloaded.json().await["error"]["type"], "overloaded_error");
    assert!(refused.header("retry-after").is_some());
    let error = refused.json().await;
    assert_eq!(error["error"]["type"], "rate_limit_error");
    assert_eq!(error["error"]["code"], "queue_full");
    drop(running);
    let chunks = waiting.chunks().await;
    assert_eq!(
        chunks[chunks.len() - 1]["choices"][0]["finish_reason"],
        "length"
    );
    let next = server.chat(json!({"max_tokens": 1})).await;
    assert_eq!(next.status, 200, "the queue permit is free again");
}

#[tokio::test]
async fn dropped_stream_frees_the_device() {
    let server = narrow().open().await;
    let stream = occupy(&server).await;
    assert_eq!(server.watch.open_now(), 1);
    drop(stream);
    idle(&server).await;
}

#[tokio::test]
async fn dropped_whole_response_frees_the_device() {
    let server = narrow().open().await;
    let address = server.address;
    let asked = tokio::spawn(async move {
        let body = chat_body(json!({})).to_string();
        crate::client::send(address, "POST", CHAT, &JSON, body.as_bytes()).await
    });
    server
        .eventually("decoding has begun", |w| w.count(RunnerMethod::Verify) > 3)
        .await;
    asked.abort();
    idle(&server).await;
}

#[tokio::test]
async fn disconnect_during_prefill_stops_it() {
    let server = narrow().open().await;
    let mut body = chat_body(json!({"stream": true}));
    body["messages"][0]["content"] = json!("x".repeat(6400));
    server.watch.gate.hold();
    let stream = server.post(CHAT, &body).await;
    server
        .eventually("its sequence is open", |w| w.open_now() == 1)
        .await;
    drop(stream);
    // Nothing is written that could fail: the server must notice the disconnect itself.
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.watch.gate.release();
    idle(&server).await;
    assert!(server.watch.count(RunnerMethod::Prefill) < 10);
    assert_eq!(server.watch.count(RunnerMethod::Verify), 0);
}

#[tokio::test]
async fn disconnect_in_queue_leaves_running_requests_alone() {
    let server = narrow().open().await;
    let mut running = occupy(&server).await;
    let waiting = server.chat(json!({"stream": true})).await;
    drop(waiting);
    for _ in 0..50 {
        let event = running.event().await.expect("the running stream continues");
        assert!(event.contains("\"content\""), "{event}");
    }
    let retry = async {
        while server.chat(json!({"stream": true})).await.status == 429 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let patience = crate::client::MAX_WAIT;
    tokio::time::timeout(patience, retry)
        .await
        .expect("the queue permit is returned");
}

#[tokio::test]
async fn idle_stream_gets_comments() {
    let mut setup = ServerSetup::saying("ok");
    setup.config.timeouts.keep_alive = Duration::from_millis(30);
    let server = setup.open().await;
    server.watch.gate.hold();
    let mut stream = server.chat(json!({"stream": true})).await;
    let mut event = stream.event().await.unwrap();
    // A slow machine may take longer to the first event.
    while event == ": keepalive" {
        event = stream.event().await.unwrap();
    }
    assert!(event.starts_with("data: "));
    for _ in 0..3 {
        assert_eq!(stream.event().await.unwrap(), ": keepalive");
    }
    server.watch.gate.release();
    let chunks = stream.chunks().await;
    let text: String = chunks
        .iter()
        .filter_map(|c| c["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(text, "ok");
}

#[tokio::test]
async fn queue_timeout_is_an_error_or_a_stream_event() {
    let mut setup = narrow();
    setup.config.queue_limit = 8;
    setup.config.timeouts.queue = Some(Duration::from_millis(100));
    let server = setup.open().await;
    let running = occupy(&server).await;
    let late = server.chat(json!({})).await;
    assert_eq!(late.status, 503);
    let error = late.json().await;
    assert_eq!(error["error"]["code"], "unavailable");
    let stream = server.chat(json!({"stream": true})).await;
    assert_eq!(stream.status, 200);
    let chunks = stream.chunks().await;
    let error = &chunks[chunks.len() - 1]["error"];
    assert_eq!(error["type"], "server_error");
    drop(running);
}

#[tokio::test]
async fn request_timeout_ends_with_length() {
    let mut setup = narrow();
    setup.config.timeouts.request = Some(Duration::from_secs(2));
    let server = setup.open().await;
    let body = server.chat(json!({})).await.json().await;
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert!(
        choice["message"]["content"]
            .as_str()
            .unwrap()
            .starts_with("abc ")
    );
    idle(&server).await;
    let chunks = server.chat(json!({"stream": true})).await.chunks().await;
    let last = &chunks[chunks.len() - 1];
    assert_eq!(last["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn cancellations_are_counted_by_stage() {
    let server = narrow().open().await;
    drop(occupy(&server).await);
    idle(&server).await;
    let line = "hearth_request_cancelled_total{phase=\"decode\"} 1";
    server.until_metric(line).await;
}

#[tokio::test]
async fn higher_priority_runs_first() {
    let mut setup = narrow();
    setup.config.queue_limit = 8;
    let server = setup.open().await;
    let running = occupy(&server).await;
    // The low one takes so much longer that a slow machine cannot swap the ends.
    let ask = |priority: i32, max_tokens: u32| {
        let fields = json!({"max_tokens": max_tokens, "priority": priority});
        let server = &server;
        async move {
            server.chat(fields).await.json().await;
            std::time::Instant::now()
        }
    };
    let (low, high, ()) = tokio::join!(
        ask(0, 2000),
        async {
            server.until_requests(2).await;
            ask(5, 20).await
        },
        async {
            server.until_requests(3).await;
            // They are listed a moment before the engine has them.
            tokio::time::sleep(Duration::from_millis(200)).await;
            drop(running);
        }
    );
    assert!(high < low);
}

#[tokio::test]
async fn more_choices_than_sequences_all_finish() {
    let server = narrow().open().await;
    let answer = server.chat(json!({"n": 4, "max_tokens": 5})).await;
    assert_eq!(answer.status, 200);
    let body = answer.json().await;
    for choice in body["choices"].as_array().unwrap() {
        assert_eq!(choice["message"]["content"], "abc a");
        assert_eq!(choice["finish_reason"], "length");
    }
    assert_eq!(body["choices"].as_array().unwrap().len(), 4);
}

#[tokio::test]
async fn further_prompts_wait_for_a_queue_permit() {
    let mut setup = narrow();
    setup.limits.sequences = 4;
    let server = setup.open().await;
    let prompts: Vec<String> = (0..40).map(|i| format!("p{i}")).collect();
    let ask = || async {
        let body = json!({"prompt": prompts, "max_tokens": 3});
        server.post("/v1/completions", &body).await
    };
    let both = tokio::join!(ask(), async {
        tokio::time::sleep(Duration::from_millis(30)).await;
        ask().await
    });
    for answer in [both.0, both.1] {
        match answer.status {
            200 => {
                let body = answer.json().await;
                assert_eq!(body["choices"].as_array().unwrap().len(), 40);
            }
            // Only the first prompt can find a full queue.
            429 => {}
            status => panic!("{status}"),
        }
    }
}

#[tokio::test]
async fn stalled_reader_is_disconnected() {
    let mut setup = narrow();
    setup.step = Duration::ZERO;
    setup.config.timeouts.write = Duration::from_millis(200);
    let server = setup.open().await;
    // Reads only the headers: the body is never read and fills the socket's buffers.
    let stream = server.chat(json!({"stream": true})).await;
    assert_eq!(stream.status, 200);
    server
        .eventually("decoding has begun", |w| w.count(RunnerMethod::Verify) > 0)
        .await;
    idle(&server).await;
    let line = "hearth_request_cancelled_total{phase=\"decode\"} 1";
    server.until_metric(line).await;
    drop(stream);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_cancelled_requests_leave_no_state() {
    let mut setup = narrow();
    setup.limits.sequences = 3;
    setup.config.queue_limit = 16;
    let server = setup.open().await;
    let address = server.address;
    let clients = (0..60_u64).map(|i| {
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(i * 7 % 90)).await;
            let fields = json!({"stream": i % 3 != 0, "max_tokens": 5 + i, "n": 1 + i % 2});
            let body = chat_body(fields).to_string();
            let stay = Duration::from_millis(i * 13 % 110);
            let read_all = async {
                let mut answer =
                    crate::client::send(address, "POST", CHAT, &JSON, body.as_bytes()).await;
                while answer.event().await.is_some() {}
            };
            // Some clients read to the end; some disconnect in the queue, in prefill or in decode.
            let _ = tokio::time::timeout(stay, read_all).await;
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    idle(&server).await;
    let slots = server.get("/slots/summary").await.json().await;
    assert_eq!(slots["sequences"], 0, "{slots}");
    assert_eq!(slots["requests_waiting"], 0, "{slots}");
    assert_eq!(slots["requests_running"], 0, "{slots}");
    assert_eq!(server.chat(json!({"max_tokens": 1})).await.status, 200);
}

#[tokio::test]
async fn request_waiting_for_kv_pages_is_reported_and_admitted_later() {
    let mut setup = narrow();
    setup.config.queue_limit = 4;
    setup.step = Duration::from_millis(20);
    // Three sequences, but pages for only one of full length.
    setup.limits = Limits {
        sequences: 3,
        context: 1000,
        pool_tokens: Some(0),
        ..setup.limits
    };
    let server = setup.open().await;
    let running = occupy(&server).await;
    let waiting = server.chat(json!({"stream": true, "max_tokens": 2})).await;
    let pool = async || server.get("/props").await.json().await["runtime"]["kv_pool"].clone();
    let mut pool_status = pool().await;
    for _ in 0..1000 {
        if pool_status["queue_blocked_on_pool"] == true {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        pool_status = pool().await;
    }
    for key in ["queue_blocked_on_pool", "queue_waits_for_it"] {
        assert_eq!(pool_status[key], true, "{pool_status}");
    }
    let used = pool_status["in_use"].as_u64().unwrap();
    assert!(
        used > 0 && used < pool_status["tokens"].as_u64().unwrap(),
        "{pool_status}"
    );
    let metrics = server.get("/metrics").await.text().await;
    assert!(
        metrics.contains("hearth_kv_pool_requests_waiting 1"),
        "{metrics}"
    );
    let slots = server.get("/slots/summary").await.json().await;
    for key in ["queue_blocked_on_pool", "pool_waits"] {
        assert_eq!(slots[key], true, "{slots}");
    }
    for (new, old) in [
        ("evictable_context_tokens", "kept_context_tokens"),
        ("preempted", "parked"),
    ] {
        assert!(slots[new].is_u64(), "{slots}");
        assert_eq!(slots[new], slots[old]);
    }
    drop(running);
    assert!(waiting.text().await.contains("[DONE]"));
    idle(&server).await;
    // The engine publishes its figures after the device has closed the sequence.
    let mut pool_status = pool().await;
    for _ in 0..1000 {
        if pool_status["in_use"] == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        pool_status = pool().await;
    }
    assert_eq!(
        (&pool_status["in_use"], &pool_status["preempted"]),
        (&json!(0), &json!(0))
    );
    for (new, old) in [
        ("evictable", "kept_by_cache"),
        ("preempted", "parked"),
        ("preemptions", "lifetime_parked"),
    ] {
        assert!(pool_status[new].is_u64(), "{pool_status}");
        assert_eq!(pool_status[new], pool_status[old]);
    }
}
