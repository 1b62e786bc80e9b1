//! The prefix cache as clients see it: in the usage of every dialect, in `/props`, in the metrics.

use conformance::fake::RunnerMethod;
use contract::Limits;
use decode::{PrefixConfig, SavePointConfig};
use serde_json::{Value, json};

use crate::client;
use crate::test_server::{ServerSetup, TestServer, special};

fn setup() -> ServerSetup {
    let setup = ServerSetup::saying("Fine.");
    ServerSetup {
        limits: Limits {
            context: 2048,
            ..setup.limits
        },
        prefix: PrefixConfig {
            max_entries: 8,
            save_points: SavePointConfig {
                turn_starts: vec![special("<|im_start|>")],
                min_distance: 8,
                ..SavePointConfig::default()
            },
            ..PrefixConfig::default()
        },
        ..setup
    }
}

/// The first `n` turns of one conversation.
fn messages(n: usize) -> Vec<Value> {
    let turn = |i: usize| {
        let role = if i.is_multiple_of(2) {
            "user"
        } else {
            "assistant"
        };
        json!({"role": role, "content": format!("{i}: {}", "words and more words, ".repeat(4 + i))})
    };
    (0..n).map(turn).collect()
}

/// Sends the conversation's first `n` turns; returns the prompt tokens and the cached ones.
async fn ask(server: &TestServer, dialect: &str, n: usize) -> (u64, u64) {
    let messages = messages(n);
    let (path, body) = match dialect {
        "chat" => (
            "/v1/chat/completions",
            json!({"model": "m", "messages": messages}),
        ),
        "messages" => (
            "/v1/messages",
            json!({"model": "m", "max_tokens": 20, "messages": messages}),
        ),
        _ => ("/v1/responses", json!({"model": "m", "input": messages})),
    };
    let answer = server.post(path, &body).await;
    assert_eq!(answer.status, 200, "{dialect}");
    let usage = &answer.json().await["usage"];
    let count = |value: &Value| value.as_u64().unwrap();
    match dialect {
        "chat" => (
            count(&usage["prompt_tokens"]),
            count(&usage["prompt_tokens_details"]["cached_tokens"]),
        ),
        // This dialect counts cached tokens separately.
        "messages" => {
            let cached = count(&usage["cache_read_input_tokens"]);
            (count(&usage["input_tokens"]) + cached, cached)
        }
        _ => (
            count(&usage["input_tokens"]),
            count(&usage["input_tokens_details"]["cached_tokens"]),
        ),
    }
}

#[tokio::test]
async fn second_turn_hits_the_prefix_cache_in_every_dialect() {
    for dialect in ["chat", "messages", "responses"] {
        let server = setup().open().await;
        let (first, cold) = ask(&server, dialect, 3).await;
        assert_eq!(cold, 0, "{dialect}");
        let (second, cached) = ask(&server, dialect, 5).await;
        // All tokens up to the first reply, less what alignment costs.
        assert!(
            cached + 64 + 24 > first && cached < first,
            "{dialect}: {cached} of {first}"
        );
        assert!(second > first);
        let props = server.get("/props").await.json().await;
        assert_eq!(props["prefix_cache"]["lifetime_hits"], 1, "{dialect}");
        assert_eq!(props["prefix_cache"]["capacity"], 8);
        let metrics = server.get("/metrics").await.text().await;
        assert!(metrics.contains("hearth_prefix_hits_total 1"), "{metrics}");
        assert!(metrics.contains(&format!("hearth_prompt_tokens_cached_total {cached}")));
    }
}

#[tokio::test]
async fn prefix_cache_is_shared_between_dialects() {
    let server = setup().open().await;
    ask(&server, "chat", 3).await;
    let (_, by_messages) = ask(&server, "messages", 5).await;
    let (_, by_responses) = ask(&server, "responses", 5).await;
    assert!(by_messages > 0 && by_responses > by_messages);
}

#[tokio::test]
async fn disabled_cache_reports_no_cached_tokens() {
    let server = ServerSetup {
        prefix: PrefixConfig::default(),
        ..setup()
    }
    .open()
    .await;
    ask(&server, "chat", 3).await;
    assert_eq!(ask(&server, "chat", 5).await.1, 0);
}

/// Cached tokens of a chat request with additional fields and headers.
async fn cached(
    server: &TestServer,
    messages: Vec<Value>,
    fields: &Value,
    headers: &[(&str, &str)],
) -> u64 {
    let mut body = json!({"messages": messages});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    let headers = [&[("content-type", "application/json")], headers].concat();
    let body = body.to_string();
    let path = "/v1/chat/completions";
    let answer = client::send(server.address, "POST", path, &headers, body.as_bytes()).await;
    assert_eq!(answer.status, 200, "{fields}");
    let usage = answer.json().await["usage"].clone();
    let count = &usage["prompt_tokens_details"]["cached_tokens"];
    count.as_u64().unwrap()
}

#[tokio::test]
async fn request_without_cache_neither_reads_nor_writes_it() {
    for off in [
        json!({"cache_prompt": false}),
        json!({"prefix_cache": {"scope": "off"}}),
    ] {
        let server = setup().open().await;
        cached(&server, messages(3), &off, &[]).await;
        let after = cached(&server, messages(5), &json!({}), &[]).await;
        assert_eq!(after, 0, "{off} wrote to the cache");
        let without = cached(&server, messages(7), &off, &[]).await;
        assert_eq!(without, 0, "{off} read from the cache");
        let with = cached(&server, messages(7), &json!({}), &[]).await;
        assert!(with > 0, "the cache held a prefix");
    }
}

#[tokio::test]
async fn most_specific_session_id_wins() {
    let long = "n".repeat(300);
    let server = setup().open().await;
    for (fields, headers, expected) in [
        (
            json!({"session_id": "a", "prompt_cache_key": "c"}),
            vec![("x-session-id", "b")],
            json!("a"),
        ),
        (
            json!({"prompt_cache_key": "c"}),
            vec![("session_id", "b"), ("x-session-affinity", "first")],
            json!("first"),
        ),
        (json!({"prompt_cache_key": "c"}), vec![], json!("c")),
        (json!({}), vec![("x-session-id", "")], json!(null)),
        (json!({"session_id": long}), vec![], json!("n".repeat(256))),
    ] {
        server.watch.gate.hold();
        let shown = async {
            loop {
                let slots = server.get("/slots/summary").await.json().await;
                if let Some(request) = slots["requests"].get(0) {
                    let session = request["session"].clone();
                    server.watch.gate.release();
                    return session;
                }
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        };
        let (_, session) = tokio::join!(cached(&server, messages(1), &fields, &headers), shown);
        assert_eq!(session, expected, "{fields} {headers:?}");
    }
}

#[tokio::test]
async fn conversation_survives_six_other_requests_in_four_slots() {
    let name = [("x-claude-code-session-id", "main")];
    // With one session from the first turn; without any from the second.
    for (own, beside, turns) in [
        (&name[..], &[][..], 3),
        (&name[..], &name[..], 3),
        (&[][..], &[][..], 5),
    ] {
        let setup = setup();
        let prefix = PrefixConfig {
            max_entries: 4,
            ..setup.prefix
        };
        let server = ServerSetup { prefix, ..setup }.open().await;
        for n in (3..=turns).step_by(2) {
            cached(&server, messages(n), &json!({}), own).await;
        }
        for side in 0..6 {
            let instruction = format!(
                "Side request {side}: {}",
                "make a title of this, ".repeat(4)
            );
            let text = format!("{side} {}", "some of what was said, ".repeat(3));
            let side_request = vec![
                json!({"role": "system", "content": instruction}),
                json!({"role": "user", "content": text}),
            ];
            // Side requests are shorter than the conversation but long enough to be cached.
            let found = cached(&server, side_request, &json!({"max_tokens": 4}), beside).await;
            assert_eq!(found, 0);
        }
        let next = cached(&server, messages(turns + 2), &json!({}), own).await;
        let whole = ask(&server, "chat", turns).await.0;
        assert!(
            next + 64 + 24 > whole,
            "{own:?} beside {beside:?}: {next} of {whole} tokens were still cached"
        );
    }
}

/// A server with a prefix warm-up of `warmup_tokens` whose replies have some hundred tokens.
fn warming(warmup_tokens: usize) -> ServerSetup {
    let setup = setup();
    ServerSetup {
        script: crate::test_server::says(&"A long answer, of many words. ".repeat(8)),
        prefix: PrefixConfig {
            warmup_tokens,
            ..setup.prefix
        },
        ..setup
    }
}

/// The value of a counter.
async fn counter(server: &TestServer, name: &str) -> u64 {
    let metrics = server.get("/metrics").await.text().await;
    let mut lines = metrics.lines().filter_map(|line| line.split_once(' '));
    let value = lines.find(|(named, _)| *named == name);
    value.expect("the counter exists").1.parse().unwrap()
}

/// The conversation with the reply and the client's next message.
fn continued(answer: &Value) -> Vec<Value> {
    let mut messages = messages(3);
    messages.push(answer["choices"][0]["message"].clone());
    messages.push(json!({"role": "user", "content": "And now?"}));
    messages
}

#[tokio::test]
async fn finished_reply_is_prefilled_while_idle() {
    let mut found = Vec::new();
    for warmup_tokens in [0, 2048] {
        let server = warming(warmup_tokens).open().await;
        let body = json!({"messages": messages(3), "max_tokens": 400});
        let answer = server.post("/v1/chat/completions", &body).await;
        let answer = answer.json().await;
        let reply = answer["usage"]["completion_tokens"].as_u64().unwrap();
        assert!(reply > 200);
        if warmup_tokens > 0 {
            let prefilled = async {
                while counter(&server, "hearth_prefix_warmup_saved_total").await == 0 {
                    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                }
            };
            let prefilled = tokio::time::timeout(client::MAX_WAIT, prefilled).await;
            prefilled.expect("the reply is prefilled in time");
            let tokens = counter(&server, "hearth_prefix_warmup_tokens_total").await;
            assert!(tokens + 64 > reply, "{tokens} of {reply}");
        } else {
            tokio::time::sleep(std::time::Duration::from_millis(600)).await;
            assert_eq!(
                counter(&server, "hearth_prefix_warmup_tokens_total").await,
                0
            );
        }
        let next = continued(&answer);
        let cached = cached(&server, next, &json!({"max_tokens": 4}), &[]).await;
        let hits = counter(&server, "hearth_prefix_warmup_hits_total").await;
        assert_eq!(hits, u64::from(warmup_tokens > 0));
        let props = server.get("/props").await.json().await;
        let warmup = &props["prefix_cache"]["prefix_warmup"];
        assert_eq!(
            (&warmup["most_tokens"], &warmup["hits"]),
            (&json!(warmup_tokens), &json!(hits))
        );
        assert_eq!(&props["prefix_cache"]["read_ahead"], warmup);
        found.push((cached, reply));
    }
    let [(without, reply), (with, _)] = found[..] else {
        panic!("expected two runs");
    };
    assert!(
        with + 64 > without + reply,
        "{with} for {without} tokens and a reply of {reply}"
    );
}

#[tokio::test]
async fn request_during_warmup_waits_for_one_chunk() {
    let server = warming(2048).open().await;
    let body = json!({"messages": messages(3), "max_tokens": 400});
    server
        .post("/v1/chat/completions", &body)
        .await
        .json()
        .await;
    let chunks = |watch: &crate::script::Watch| watch.fake.record().prefills.len();
    let before = chunks(&server.watch);
    server.watch.gate.hold();
    // The warm-up's chunk, the second opened sequence, is held at the gate when the request comes.
    let begins = |watch: &crate::script::Watch| watch.fake.record().count(RunnerMethod::Open) == 2;
    server.eventually("the warm-up has begun", begins).await;
    let other = vec![json!({"role": "user", "content": "Something else."})];
    let (no_fields, no_headers) = (json!({"max_tokens": 4}), []);
    let answered = cached(&server, other, &no_fields, &no_headers);
    let release = async {
        server.until_requests(1).await;
        // It is listed a moment before the engine has it.
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        server.watch.gate.release();
    };
    let (cached, ()) = tokio::join!(answered, release);
    assert_eq!(cached, 0);
    let record = server.watch.fake.record();
    let between = &record.prefills[before..];
    // One chunk of the predicted prompt, then the request's prompt from its start.
    assert_eq!(between[1].1, 0, "{between:?}");
}
