//! llama-server's own routes: `/completion` and `/slots`.

use std::time::Duration;

use serde_json::{Value, json};

use crate::test_server::{ServerSetup, TestServer, tokens};

const PATH: &str = "/completion";

fn ids(text: &str) -> Vec<u32> {
    tokens(text).iter().map(|token| token.0).collect()
}

/// Events of a stream, which has no mark at its end.
async fn events(server: &TestServer, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let mut reply = server.post(PATH, &body).await;
    assert_eq!(reply.status, 200);
    let mut events = Vec::new();
    while let Some(event) = reply.event().await {
        let Some(data) = event.strip_prefix("data: ") else {
            assert!(event.starts_with(':'), "{event}");
            continue;
        };
        events.push(serde_json::from_str(data).unwrap_or_else(|e| panic!("{e}: {data}")));
    }
    events
}

/// A completion whole, and the same from its stream.
async fn check(says: &str, fields: Value, content: &str, stop_type: &str, predicted: usize) {
    let server = ServerSetup::saying(says).open().await;
    let mut body = fields;
    body["prompt"] = json!("hi");
    body["return_tokens"] = json!(true);
    let whole = server.post(PATH, &body).await.json().await;
    assert_eq!(whole["content"], content, "{whole}");
    assert_eq!(whole["stop"], true);
    assert_eq!(whole["stop_type"], stop_type);
    assert_eq!(whole["tokens_predicted"], predicted);
    assert_eq!(whole["tokens_evaluated"], 2);
    assert_eq!(whole["tokens"].as_array().unwrap().len(), predicted);
    assert_eq!(whole["tokens_cached"], 2 + predicted.saturating_sub(1));
    assert_eq!(whole["timings"]["predicted_n"], predicted);
    let events = events(&server, &body).await;
    let (last, before) = events.split_last().unwrap();
    let texts = events
        .iter()
        .map(|event| event["content"].as_str().unwrap());
    assert_eq!(texts.collect::<String>(), content);
    let listed = events
        .iter()
        .flat_map(|event| event["tokens"].as_array().unwrap());
    assert!(listed.eq(whole["tokens"].as_array().unwrap()), "{events:?}");
    for event in before {
        assert_eq!(event["stop"], false, "{event}");
        assert!(event.get("stop_type").is_none(), "{event}");
    }
    for key in [
        "stop",
        "stop_type",
        "stopping_word",
        "tokens_predicted",
        "tokens_evaluated",
        "index",
        "id_slot",
        "model",
        "prompt",
        "truncated",
        "has_new_line",
        "tokens_cached",
    ] {
        assert_eq!(last[key], whole[key], "{key}");
    }
}

#[tokio::test]
async fn completion_ends_by_word_end_token_or_limit() {
    check("one STOP two", json!({"stop": ["STOP"]}), "one ", "word", 8).await;
    check("ok", json!({"n_predict": -1}), "ok", "eos", 3).await;
    check("a\nbcd", json!({"n_predict": 3}), "a\nb", "limit", 3).await;
    check("ok", json!({"n_predict": 0}), "", "limit", 0).await;
}

#[tokio::test]
async fn completion_reply_has_the_fields_of_llama_server() {
    let server = ServerSetup::saying("one STOP\ntwo").open().await;
    let body = json!({"prompt": [104, "i"], "stop": ["two"], "id_slot": 3, "seed": 7,
        "cache_prompt": false, "temperature": 0.5, "n_predict": 40});
    let whole = server.post(PATH, &body).await.json().await;
    assert_eq!(whole["content"], "one STOP\n");
    assert_eq!(whole["stopping_word"], "two");
    assert_eq!(whole["prompt"], "hi");
    assert_eq!((&whole["id_slot"], &whole["index"]), (&json!(3), &json!(0)));
    assert_eq!(whole["model"], "tiny");
    assert_eq!(whole["tokens"], json!([]), "only if asked for");
    assert_eq!(
        (&whole["has_new_line"], &whole["truncated"]),
        (&json!(true), &json!(false))
    );
    let settings = &whole["generation_settings"];
    for (key, expected) in [
        ("seed", json!(7)),
        ("temperature", json!(0.5)),
        ("n_predict", json!(40)),
        ("n_ctx", json!(512)),
        ("stop", json!(["two"])),
        ("stream", json!(false)),
    ] {
        assert_eq!(settings[key], expected, "{key}");
    }
    let full = json!({"prompt": "y".repeat(505)});
    let whole = server.post(PATH, &full).await.json().await;
    assert_eq!(
        (&whole["truncated"], &whole["stop_type"]),
        (&json!(true), &json!("limit"))
    );
}

#[tokio::test]
async fn several_completions_come_as_an_array() {
    let server = ServerSetup::saying("!").open().await;
    let body = json!({"prompt": ["ab", "cde"], "n_cmpl": 2});
    let all = server.post(PATH, &body).await.json().await;
    let seen: Vec<(u64, u64)> = all
        .as_array()
        .unwrap()
        .iter()
        .map(|one| {
            assert_eq!(one["content"], "!");
            let evaluated = one["tokens_evaluated"].as_u64().unwrap();
            (one["index"].as_u64().unwrap(), evaluated)
        })
        .collect();
    assert_eq!(seen, [(0, 2), (1, 2), (2, 3), (3, 3)]);
}

#[tokio::test]
async fn probabilities_and_progress_come_if_asked_for() {
    let server = ServerSetup::saying("ok").open().await;
    let body = json!({"prompt": "hi", "n_probs": 2, "return_progress": true});
    let whole = server.post(PATH, &body).await.json().await;
    let listed = whole["completion_probabilities"].as_array().unwrap();
    let shown: Vec<&Value> = listed.iter().map(|entry| &entry["id"]).collect();
    assert_eq!(json!(shown), json!(ids("ok")));
    assert_eq!(listed[0]["token"], "o");
    assert_eq!(listed[0]["bytes"], json!(b"o"));
    let top = listed[0]["top_logprobs"].as_array().unwrap();
    assert_eq!(top.len(), 2);
    assert_eq!(
        (&top[0]["id"], &top[0]["logprob"]),
        (&listed[0]["id"], &listed[0]["logprob"])
    );
    let events = events(&server, &body).await;
    let streamed: Vec<&Value> = events
        .iter()
        .filter_map(|event| event["completion_probabilities"].as_array())
        .flatten()
        .collect();
    assert_eq!(json!(streamed), json!(listed));
    let progress: Vec<&Value> = events
        .iter()
        .filter_map(|event| event.get("prompt_progress"))
        .collect();
    assert!(!progress.is_empty());
    assert_eq!(progress.last().unwrap()["processed"], 2);
    let plain = server
        .post(PATH, &json!({"prompt": "hi"}))
        .await
        .json()
        .await;
    assert!(plain.get("completion_probabilities").is_none());
}

#[tokio::test]
async fn completion_refuses_what_would_change_the_reply() {
    let server = ServerSetup::saying("ok").open().await;
    for (fields, param) in [
        (json!({"prompt": "a", "samplers": ["top_k"]}), "samplers"),
        (
            json!({"prompt": "a", "lora": [{"id": 0, "scale": 1.0}]}),
            "lora",
        ),
        (json!({"prompt": [99_999]}), "prompt"),
        (json!({}), "prompt"),
    ] {
        let reply = server.post(PATH, &fields).await;
        assert_eq!(reply.status, 400, "{fields}");
        assert_eq!(reply.json().await["error"]["param"], param);
    }
}

#[tokio::test]
async fn infill_fills_the_gap_of_a_text() {
    let server = ServerSetup::saying("a, b").open().await;
    let body = json!({"input_prefix": "f(", "prompt": "x", "input_suffix": ")", "n_predict": 50,
        "input_extra": [{"filename": "g", "text": "h"}], "samplers": ["infill"],
        "t_max_predict_ms": 500});
    let answer = server.post("/infill", &body).await;
    assert_eq!(answer.status, 200);
    let note = answer.header("x-hearth-note").map(str::to_owned);
    assert_eq!(
        note.unwrap(),
        "samplers: left out; t_max_predict_ms: left out"
    );
    let whole = answer.json().await;
    assert_eq!(whole["content"], "a, b");
    let prompt = "\n\n--- g ---\n\nh<|fim_prefix|>f(x<|fim_suffix|>)<|fim_middle|>";
    assert_eq!(whole["prompt"], prompt);
    let mut cut = body.clone();
    cut["response_fields"] = json!(["content", "timings/predicted_n", "no/such"]);
    let whole = server.post("/infill", &cut).await.json().await;
    assert_eq!(whole, json!({"content": "a, b", "predicted_n": 5}));
    let wrong = server.post("/infill", &json!({"input_prefix": "a"})).await;
    assert_eq!(wrong.status, 400);
    assert_eq!(wrong.json().await["error"]["param"], "input_suffix");
}

#[tokio::test]
async fn slots_are_the_sequences_of_the_device() {
    let mut setup = ServerSetup::saying(&"x".repeat(400));
    setup.step = Duration::from_millis(50);
    setup.limits.sequences = 2;
    let server = setup.open().await;
    let idle = server.get("/slots").await.json().await;
    let expected =
        |id: usize| json!({"id": id, "n_ctx": 512, "speculative": false, "is_processing": false});
    assert_eq!(idle, json!([expected(0), expected(1)]));
    let body = json!({"prompt": "hello", "max_tokens": 300, "temperature": 0.25, "stream": true});
    let running = server.post("/v1/completions", &body).await;
    let busy = loop {
        let slots = server.get("/slots").await.json().await;
        if slots[0]["next_token"][0]["n_decoded"].as_u64() > Some(0) {
            break slots;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let slot = &busy[0];
    assert_eq!(
        (&slot["is_processing"], &slot["id"]),
        (&json!(true), &json!(0))
    );
    assert_eq!(slot["n_prompt_tokens"], 5);
    assert_eq!(slot["n_prompt_tokens_processed"], 5);
    assert_eq!(slot["n_prompt_tokens_cache"], 0);
    assert_eq!(slot["params"]["temperature"], 0.25);
    assert_eq!(slot["params"]["n_predict"], 300);
    let next = &slot["next_token"][0];
    let (done, left) = (next["n_decoded"].as_u64(), next["n_remain"].as_u64());
    assert_eq!(done.unwrap() + left.unwrap(), 300);
    assert_eq!(busy[1], expected(1));
    assert!(!busy.to_string().contains("hello"), "no text is shown");
    assert_eq!(server.get("/slots?fail_on_no_slot=1").await.status, 200);
    let body = json!({"prompt": "more", "max_tokens": 300, "stream": true});
    let other = server.post("/v1/completions", &body).await;
    let mut status = 200;
    for _ in 0..400 {
        status = server.get("/slots?fail_on_no_slot=1").await.status;
        if status == 503 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(status, 503);
    drop((running, other));
}
