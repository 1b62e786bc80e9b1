//! Several models on one server: chosen by the request, loaded on demand, unloaded for others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use conformance::fake::{FaultKind, FaultTrigger, InjectedFault, RunnerMethod};
use serde_json::{Value, json};

use crate::client::{self, MAX_WAIT};
use crate::models_server::{ModelsServer, TestModel, post, reply};
use crate::test_server::{chat_body, until_true};

#[tokio::test]
async fn requests_load_the_model_that_they_name() {
    let (one, two) = (
        TestModel::new("one", "first"),
        TestModel::new("two", "second"),
    );
    let server = ModelsServer::open(&[&one, &two], 1, |_, _| {}).await;
    assert_eq!(server.state(0).await, "unloaded");
    let health = client::send(server.address, "GET", "/health", &[], b"").await;
    assert_eq!(health.status, 200);
    let slots = client::send(server.address, "GET", "/slots/summary", &[], b"").await;
    assert_eq!(slots.status, 503);
    assert_eq!(server.reply("two").await.unwrap(), "second");
    let list = server.list().await;
    assert_eq!(
        (&list["first_id"], &list["last_id"]),
        (&json!("one"), &json!("two"))
    );
    let (first, second) = (&list["data"][0], &list["data"][1]);
    assert_eq!(
        (&first["status"]["value"], &first["meta"]),
        (&json!("unloaded"), &Value::Null)
    );
    assert_eq!(second["status"], json!({"value": "loaded", "requests": 0}));
    assert_eq!(second["context_length"], 4096);
    // An unknown name is the default's, and names are alike but for case.
    assert_eq!(server.reply("any").await.unwrap(), "first");
    assert_eq!(
        (server.state(0).await, server.state(1).await),
        ("loaded".into(), "unloaded".into())
    );
    assert_eq!(server.reply("TWO").await.unwrap(), "second");
    let unnamed = server.chat(json!({"model": null})).await.json().await;
    assert_eq!(unnamed["model"], "one");
    // The tokenizer's routes choose as well.
    let tokens = server
        .post("/tokenize", &json!({"model": "two", "content": "ab"}))
        .await;
    assert_eq!(tokens.json().await["count"], 2);
    assert_eq!((one.loads(), two.loads()), (2, 3));
    server.end().await.unwrap();
}

/// The value of a metric without labels.
async fn metric(server: &ModelsServer, name: &str) -> f64 {
    let page = client::send(server.address, "GET", "/metrics", &[], b"").await;
    let page = page.text().await;
    let value = page
        .lines()
        .find_map(|line| line.strip_prefix(&format!("{name} ")));
    value
        .unwrap_or_else(|| panic!("{name} in {page}"))
        .parse()
        .unwrap()
}

#[tokio::test]
async fn counters_outlive_a_swap_and_new_models_are_found_by_name() {
    let [a, b, late] = ["a", "b", "late"].map(|name| TestModel::new(name, name));
    let server = ModelsServer::open(&[&a, &b], 1, |_, _| {}).await;
    let looks = Arc::new(AtomicUsize::new(0));
    let (new, counted) = (late.clone(), Arc::clone(&looks));
    server.host.find_new_by(Arc::new(move || {
        counted.fetch_add(1, Ordering::SeqCst);
        vec![new.hosted()]
    }));
    assert_eq!(server.reply("a").await.unwrap(), "a");
    // The engine publishes its counters behind a step.
    let steps = async || metric(&server, "hearth_decode_steps_total").await;
    until_true("the counters of one engine", async || steps().await >= 1.0).await;
    let of_one = steps().await;
    assert_eq!(server.reply("b").await.unwrap(), "b");
    assert_eq!(server.state(0).await, "unloaded");
    until_true("the sum", async || steps().await >= 2.0 * of_one).await;
    assert_eq!(server.reply("Late").await.unwrap(), "late");
    assert_eq!(server.list().await["last_id"], "late");
    // A known name needs no look, and an unknown one none so soon.
    assert_eq!(server.reply("late").await.unwrap(), "late");
    assert_eq!(server.reply("other").await.unwrap(), "a");
    assert_eq!(looks.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn the_least_recently_used_model_makes_room() {
    let [a, b, c] = ["a", "b", "c"].map(|name| TestModel::new(name, name));
    let mut large = TestModel::new("large", "alone");
    large.is_large = true;
    let server = ModelsServer::open(&[&a, &b, &c, &large], 2, |_, _| {}).await;
    let states = async || {
        let list = server.list().await;
        let models = list["data"].as_array().unwrap().iter();
        let is_loaded = |model: &Value| model["status"]["value"] == "loaded";
        models.map(is_loaded).collect::<Vec<_>>()
    };
    for name in ["a", "b", "a", "c"] {
        assert_eq!(server.reply(name).await.unwrap(), name);
    }
    assert_eq!(states().await, [true, false, true, false]);
    // All others go where the model does not fit beside them.
    assert_eq!(server.reply("large").await.unwrap(), "alone");
    assert_eq!(states().await, [false, false, false, true]);
    assert_eq!((a.loads(), b.loads(), c.loads()), (1, 1, 1));
    server.end().await.unwrap();
}

#[tokio::test]
async fn a_strict_server_refuses_unknown_names_with_the_known_ones() {
    let (one, two) = (
        TestModel::new("one", "first"),
        TestModel::new("two", "second"),
    );
    let server = ModelsServer::open(&[&one, &two], 1, |config, _| config.strict_model = true).await;
    let refused = server.chat(json!({"model": "three"})).await;
    assert_eq!(refused.status, 404);
    let error = refused.json().await;
    assert_eq!(error["error"]["code"], "model_not_found");
    let message = error["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("three") && message.contains("one, two"),
        "{message}"
    );
    assert_eq!(server.reply("two").await.unwrap(), "second");
    assert_eq!(one.loads(), 0);
    server.end().await.unwrap();
}

#[tokio::test]
async fn several_models_answer_at_once_while_there_is_room() {
    let mut slow = TestModel::new("slow", &"x".repeat(2000));
    slow.step = Duration::from_millis(2);
    let quick = TestModel::new("quick", "done");
    let server = ModelsServer::open(&[&slow, &quick], 2, |_, _| {}).await;
    let mut stream = server
        .chat(json!({"model": "slow", "stream": true, "max_tokens": 2000}))
        .await;
    while !stream.event().await.unwrap().starts_with("data: ") {}
    assert_eq!(server.reply("quick").await.unwrap(), "done");
    assert_eq!(server.state(0).await, "loaded");
    assert_eq!(server.list().await["data"][0]["status"]["requests"], 1);
    stream.chunks().await;
    assert_eq!((slow.loads(), quick.loads()), (1, 1));
    server.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn fifty_swaps_under_load_lose_nothing() {
    let (one, two) = (
        TestModel::new("one", "first"),
        TestModel::new("two", "second"),
    );
    let server = ModelsServer::open(&[&one, &two], 1, |_, _| {}).await;
    let address = server.address;
    let answered = Arc::new(AtomicUsize::new(0));
    let asked = Arc::new(AtomicUsize::new(0));
    let ends = Arc::new(AtomicBool::new(false));
    let clients = (0..8).map(|client: usize| {
        let (answered, asked, ends) = (answered.clone(), asked.clone(), ends.clone());
        tokio::spawn(async move {
            let mut turn = client;
            while !ends.load(Ordering::SeqCst) {
                let (name, text) = [("one", "first"), ("two", "second")][turn % 2];
                asked.fetch_add(1, Ordering::SeqCst);
                if turn.is_multiple_of(3) {
                    let fields = json!({"model": name, "stream": true});
                    let body = chat_body(fields);
                    let stream = post(address, "/v1/chat/completions", &body).await;
                    let text_of = |chunk: &Value| {
                        let text = chunk["choices"][0]["delta"]["content"].as_str();
                        text.unwrap_or_default().to_owned()
                    };
                    let chunks = stream.chunks().await;
                    assert_eq!(chunks.iter().map(text_of).collect::<String>(), text);
                } else {
                    assert_eq!(reply(address, name).await.unwrap(), text);
                }
                answered.fetch_add(1, Ordering::SeqCst);
                turn += 1;
            }
        })
    });
    let clients: Vec<_> = clients.collect();
    until_true("fifty swaps", async || one.loads() + two.loads() >= 51).await;
    ends.store(true, Ordering::SeqCst);
    for client in clients {
        tokio::time::timeout(MAX_WAIT, client)
            .await
            .expect("in time")
            .unwrap();
    }
    let (asked, answered) = (
        asked.load(Ordering::SeqCst),
        answered.load(Ordering::SeqCst),
    );
    assert_eq!(asked, answered);
    // A model that was loaded served who waited: swaps are fewer than requests.
    assert!(answered > one.loads() + two.loads(), "{answered}");
    server.end().await.unwrap();
    for watch in one
        .watches
        .lock()
        .unwrap()
        .iter()
        .chain(two.watches.lock().unwrap().iter())
    {
        assert_eq!(watch.open_now(), 0, "no runner keeps a sequence");
    }
}

#[tokio::test]
async fn a_stream_that_waits_for_its_model_begins_with_the_progress() {
    let mut slow = TestModel::new("slow", "late");
    slow.load_time = Duration::from_millis(1300);
    let server = ModelsServer::open(&[&slow], 1, |_, _| {}).await;
    let begun = Instant::now();
    let mut stream = server.chat(json!({"model": "slow", "stream": true})).await;
    assert_eq!(
        (stream.status, stream.header("content-type")),
        (200, Some("text/event-stream; charset=utf-8"))
    );
    assert_eq!(stream.event().await.unwrap(), ": waiting for slow");
    assert!(
        begun.elapsed() < slow.load_time,
        "the head comes before the model"
    );
    let progress = stream.event().await.unwrap();
    assert_eq!(progress, ": loading slow 50 %");
    let list = server.list().await;
    let status = &list["data"][0]["status"];
    assert_eq!(
        (&status["value"], &status["progress_percent"]),
        (&json!("loading"), &json!(50))
    );
    let chunks = stream.chunks().await;
    assert_eq!(
        chunks[chunks.len() - 1]["choices"][0]["finish_reason"],
        "stop"
    );
    server.end().await.unwrap();
}

#[tokio::test]
async fn a_load_failure_is_an_error_of_its_requests_and_the_server_lives_on() {
    let (good, broken) = (
        TestModel::new("good", "fine"),
        TestModel::new("broken", "mended"),
    );
    broken.fails.store(true, Ordering::SeqCst);
    let server = ModelsServer::open(&[&good, &broken], 2, |_, _| {}).await;
    let whole = server.chat(json!({"model": "broken"})).await;
    assert_eq!(whole.status, 500);
    let message = whole.json().await["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(
        message.contains("broken") && message.contains("the file is broken"),
        "{message}"
    );
    let streamed = server
        .chat(json!({"model": "broken", "stream": true}))
        .await
        .chunks()
        .await;
    assert_eq!(streamed.len(), 1);
    assert_eq!(streamed[0]["error"]["message"], message);
    let body = json!({"model": "broken", "input": "hi", "stream": true});
    let events = server.post("/v1/responses", &body).await.events().await;
    assert_eq!(
        (events[0].0.as_str(), &events[0].1["type"]),
        ("error", &json!("error"))
    );
    let body = json!({"model": "broken", "max_tokens": 4, "stream": true,
        "messages": [{"role": "user", "content": "hi"}]});
    let events = server.post("/v1/messages", &body).await.events().await;
    let after_pings = events.iter().find(|(name, _)| name != "ping");
    assert_eq!(after_pings.unwrap().1["error"]["type"], "api_error");
    let list = server.list().await;
    let status = &list["data"][1]["status"];
    assert_eq!(
        (&status["value"], &status["failed"]),
        (&json!("unloaded"), &json!(true))
    );
    assert_eq!(status["error"], "the file is broken");
    assert_eq!(server.reply("good").await.unwrap(), "fine");
    // The next request tries again.
    broken.fails.store(false, Ordering::SeqCst);
    assert_eq!(server.reply("broken").await.unwrap(), "mended");
    assert_eq!(
        server.list().await["data"][1]["status"]["failed"],
        Value::Null
    );
    server.end().await.unwrap();
}

#[tokio::test]
async fn a_lost_engine_is_opened_again_by_the_next_request() {
    let (one, two) = (
        TestModel::new("one", "first"),
        TestModel::new("two", "second"),
    );
    let server = ModelsServer::open(&[&one, &two], 2, |_, _| {}).await;
    assert_eq!(server.reply("two").await.unwrap(), "second");
    assert_eq!(server.reply("one").await.unwrap(), "first");
    one.latest().fake.fail(InjectedFault {
        call: RunnerMethod::Verify,
        when: FaultTrigger::From(0),
        kind: FaultKind::DeviceLost,
    });
    assert_eq!(server.reply("one").await, Err(500));
    assert_eq!(server.reply("two").await.unwrap(), "second");
    let health = client::send(server.address, "GET", "/health", &[], b"").await;
    assert_eq!(health.status, 200);
    assert_eq!(server.reply("one").await.unwrap(), "first");
    assert_eq!((one.loads(), two.loads()), (2, 1));
    server.end().await.unwrap();
}

#[tokio::test]
async fn idle_models_are_unloaded_and_a_request_sets_its_own_time() {
    let (one, two) = (
        TestModel::new("one", "first"),
        TestModel::new("two", "second"),
    );
    let idle = Duration::from_millis(300);
    let server = ModelsServer::open(&[&one, &two], 2, |_, policy| policy.idle = Some(idle)).await;
    assert_eq!(server.reply("one").await.unwrap(), "first");
    assert_eq!(server.state(0).await, "loaded");
    server.until_state(0, "unloaded").await;
    let kept = server.chat(json!({"model": "one", "keep_alive": -1})).await;
    assert_eq!(kept.status, 200);
    let gone = server.chat(json!({"model": "two", "keep_alive": 0})).await;
    gone.json().await;
    server.until_state(1, "unloaded").await;
    tokio::time::sleep(2 * idle).await;
    assert_eq!(server.state(0).await, "loaded");
    let timed = server
        .chat(json!({"model": "one", "keep_alive": "10m"}))
        .await;
    timed.json().await;
    let left = &server.list().await["data"][0]["status"]["expires_in_s"];
    assert!((590..=600).contains(&left.as_u64().unwrap()), "{left}");
    let wrong = server
        .chat(json!({"model": "one", "keep_alive": "soon"}))
        .await;
    assert_eq!(wrong.status, 400);
    assert_eq!(wrong.json().await["error"]["param"], "keep_alive");
    server.end().await.unwrap();
}

#[tokio::test]
async fn unloading_waits_for_running_requests() {
    let mut slow = TestModel::new("slow", &"x".repeat(300));
    slow.step = Duration::from_millis(2);
    let server = ModelsServer::open(&[&slow], 1, |_, _| {}).await;
    let loaded = server
        .post("/v1/models/load", &json!({"model": "slow"}))
        .await;
    assert_eq!(
        loaded.json().await,
        json!({"success": true, "model": "slow"})
    );
    let mut stream = server
        .chat(json!({"stream": true, "max_tokens": 400}))
        .await;
    stream.event().await.unwrap();
    let unload = tokio::spawn({
        let address = server.address;
        async move {
            post(address, "/v1/models/unload", &json!({"model": "slow"}))
                .await
                .status
        }
    });
    server.until_state(0, "unloading").await;
    // A request that comes now waits for the next load.
    let next = tokio::spawn({
        let address = server.address;
        async move { reply(address, "slow").await }
    });
    let chunks = stream.chunks().await;
    assert_eq!(
        chunks[chunks.len() - 1]["choices"][0]["finish_reason"],
        "stop"
    );
    assert_eq!(unload.await.unwrap(), 200);
    assert_eq!(next.await.unwrap().unwrap().len(), 300);
    assert_eq!(slow.loads(), 2);
    let unknown = server
        .post("/v1/models/unload", &json!({"model": "x"}))
        .await;
    assert_eq!(unknown.status, 404);
    server.end().await.unwrap();
}

#[tokio::test]
async fn requests_that_leave_while_a_model_loads_hold_nothing() {
    let mut slow = TestModel::new("slow", "late");
    slow.load_time = Duration::from_millis(200);
    let other = TestModel::new("other", "here");
    let server = ModelsServer::open(&[&slow, &other], 1, |_, _| {}).await;
    for _ in 0..3 {
        let mut stream = server.chat(json!({"model": "slow", "stream": true})).await;
        stream.event().await.unwrap();
        drop(stream);
    }
    // The swap would wait for ever for a lease that nobody gives back.
    assert_eq!(server.reply("other").await.unwrap(), "here");
    assert_eq!(server.host.list()[1].leases, 0);
    server.end().await.unwrap();
}

#[tokio::test]
async fn requests_for_a_model_that_loads_fail_when_the_server_stops() {
    let mut slow = TestModel::new("slow", "late");
    slow.load_time = Duration::from_secs(20);
    let server = ModelsServer::open(&[&slow], 1, |_, _| {}).await;
    let mut stream = server.chat(json!({"stream": true})).await;
    assert_eq!(stream.event().await.unwrap(), ": waiting for slow");
    server.until_state(0, "loading").await;
    let begun = Instant::now();
    server.stop.trigger();
    let chunks = stream.chunks().await;
    assert_eq!(chunks[0]["error"]["code"], "unavailable");
    server.end().await.unwrap();
    assert!(begun.elapsed() < slow.load_time / 2);
}

#[tokio::test]
async fn a_shutdown_lets_running_requests_of_all_models_finish() {
    let (mut one, mut two) = (
        TestModel::new("one", &"x".repeat(200)),
        TestModel::new("two", &"y".repeat(200)),
    );
    one.step = Duration::from_millis(2);
    two.step = Duration::from_millis(2);
    let server = ModelsServer::open(&[&one, &two], 2, |_, _| {}).await;
    let mut streams = Vec::new();
    for name in ["one", "two"] {
        let fields = json!({"model": name, "stream": true, "max_tokens": 300});
        let mut stream = server.chat(fields).await;
        // The first is the opening; the second has text, so the request runs.
        for _ in 0..2 {
            while !stream.event().await.unwrap().starts_with("data: ") {}
        }
        streams.push(stream);
    }
    server.stop.trigger();
    for stream in streams {
        let chunks = stream.chunks().await;
        assert_eq!(
            chunks[chunks.len() - 1]["choices"][0]["finish_reason"],
            "stop"
        );
    }
    server.ended().await.unwrap();
}
