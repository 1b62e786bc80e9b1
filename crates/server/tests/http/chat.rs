//! Chat completions: the response, whole and streamed.

use serde_json::{Value, json};

use crate::test_server::{ServerSetup, TestServer, chat_body};

/// All content deltas of choice `index`, joined.
fn content(chunks: &[Value], index: usize) -> String {
    deltas(chunks, index, "content")
}

fn deltas(chunks: &[Value], index: usize, field: &str) -> String {
    let choices = chunks.iter().flat_map(|c| c["choices"].as_array().unwrap());
    let of = choices.filter(|c| c["index"] == index);
    of.filter_map(|c| c["delta"][field].as_str()).collect()
}

fn finish_reason(chunks: &[Value], index: usize) -> String {
    let choices = chunks.iter().flat_map(|c| c["choices"].as_array().unwrap());
    let reasons = choices.filter(|c| c["index"] == index && !c["finish_reason"].is_null());
    let reasons: Vec<&str> = reasons
        .map(|c| c["finish_reason"].as_str().unwrap())
        .collect();
    assert_eq!(reasons.len(), 1, "exactly one end: {reasons:?}");
    reasons[0].to_owned()
}

#[tokio::test]
async fn whole_response_has_all_fields() {
    let server = ServerSetup::saying("Hello there.").open().await;
    let answer = server.chat(json!({"model": "whatever"})).await;
    assert_eq!(answer.status, 200);
    let body = answer.json().await;
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "whatever");
    assert!(body["created"].as_u64().unwrap() > 1_700_000_000);
    let choice = &body["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["message"]["content"], "Hello there.");
    assert_eq!(choice["finish_reason"], "stop");
    assert!(choice["message"].get("tool_calls").is_none());
    assert!(choice["message"].get("reasoning_content").is_none());
    let usage = &body["usage"];
    // The end token counts as a completion token.
    assert_eq!(usage["completion_tokens"], 13);
    assert_eq!(
        usage["total_tokens"].as_u64().unwrap(),
        usage["prompt_tokens"].as_u64().unwrap() + 13
    );
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    assert!(body["timings"]["prefill_ms"].is_number());
    assert!(body["timings"]["decode_tokens_per_sec"].is_number());
}

#[tokio::test]
async fn streamed_response_equals_the_whole_response() {
    let server = ServerSetup::saying("Hello there.").open().await;
    let answer = server.chat(json!({"stream": true})).await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.header("content-type"),
        Some("text/event-stream; charset=utf-8")
    );
    assert_eq!(answer.header("cache-control"), Some("no-cache"));
    assert_eq!(answer.header("x-accel-buffering"), Some("no"));
    let chunks = answer.chunks().await;
    let first = &chunks[0]["choices"][0];
    assert_eq!(first["delta"], json!({"role": "assistant", "content": ""}));
    assert!(first["finish_reason"].is_null());
    assert_eq!(content(&chunks, 0), "Hello there.");
    assert_eq!(finish_reason(&chunks, 0), "stop");
    let last = &chunks[chunks.len() - 1];
    assert_eq!(last["choices"][0]["delta"], json!({}));
    for chunk in &chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], chunks[0]["id"]);
        assert_eq!(chunk["created"], chunks[0]["created"]);
        assert!(chunk.get("usage").is_none(), "usage was not asked for");
    }
}

#[tokio::test]
async fn requested_usage_is_last_and_null_before() {
    let server = ServerSetup::saying("Hi.").open().await;
    let fields = json!({"stream": true, "stream_options": {"include_usage": true}});
    let chunks = server.chat(fields).await.chunks().await;
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 4);
    assert!(
        before
            .iter()
            .all(|c| c.get("usage").is_some_and(Value::is_null))
    );
}

#[tokio::test]
async fn continuous_usage_is_sent_on_request() {
    let server = ServerSetup::saying("Hi.").open().await;
    let fields = json!({"stream": true, "stream_options": {"continuous_usage_stats": true}});
    let chunks = server.chat(fields).await.chunks().await;
    let counts: Vec<u64> = chunks
        .iter()
        .map(|c| c["usage"]["completion_tokens"].as_u64().unwrap())
        .collect();
    assert!(counts.is_sorted() && counts[0] == 0, "{counts:?}");
    assert_eq!(counts.last(), Some(&4));
}

#[tokio::test]
async fn length_limit_is_reported_whole_and_streamed() {
    let server = ServerSetup::saying("Hello there.").open().await;
    let body = server.chat(json!({"max_tokens": 5})).await.json().await;
    assert_eq!(body["choices"][0]["message"]["content"], "Hello");
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["usage"]["completion_tokens"], 5);
    let fields = json!({"max_completion_tokens": 5, "stream": true});
    let chunks = server.chat(fields).await.chunks().await;
    assert_eq!(content(&chunks, 0), "Hello");
    assert_eq!(finish_reason(&chunks, 0), "length");
}

#[tokio::test]
async fn max_tokens_beyond_the_context_end_with_length() {
    let server = ServerSetup {
        limits: contract::Limits {
            context: 64,
            ..ServerSetup::default().limits
        },
        ..ServerSetup::saying(&"x".repeat(500))
    }
    .open()
    .await;
    let body = server.chat(json!({"max_tokens": 32000})).await.json().await;
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["usage"]["total_tokens"], 64);
}

#[tokio::test]
async fn a_stop_string_across_tokens_ends_the_text_before_it() {
    let server = ServerSetup::saying("one STOP two").open().await;
    let body = server.chat(json!({"stop": ["STOP"]})).await.json().await;
    assert_eq!(body["choices"][0]["message"]["content"], "one ");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    // All tokens up to the stop string count; later ones do not.
    assert_eq!(body["usage"]["completion_tokens"], 8);
    let fields = json!({"stop": "STOP", "stream": true});
    let chunks = server.chat(fields).await.chunks().await;
    assert_eq!(content(&chunks, 0), "one ");
    assert_eq!(finish_reason(&chunks, 0), "stop");
}

#[tokio::test]
async fn a_stop_string_frees_the_device() {
    let script = crate::test_server::says(&"abc".repeat(100_000));
    let server = ServerSetup {
        script,
        step: std::time::Duration::from_millis(1),
        ..ServerSetup::default()
    }
    .open()
    .await;
    let body = server.chat(json!({"stop": ["ca"]})).await.json().await;
    assert_eq!(body["choices"][0]["message"]["content"], "ab");
    server
        .eventually("the sequence is closed", |w| w.open_now() == 0)
        .await;
}

#[tokio::test]
async fn a_stop_token_ends_the_text_and_is_not_shown() {
    let server = ServerSetup::saying("ab;cd").open().await;
    let fields = json!({"stop_token_ids": [u32::from(b';')]});
    let body = server.chat(fields).await.json().await;
    assert_eq!(body["choices"][0]["message"]["content"], "ab");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn characters_split_over_tokens_arrive_whole() {
    let text = "héllo 😀 日本語";
    let server = ServerSetup::saying(text).open().await;
    let chunks = server.chat(json!({"stream": true})).await.chunks().await;
    assert_eq!(content(&chunks, 0), text);
    assert!(chunks.iter().all(|c| {
        let text = c["choices"][0]["delta"]["content"].as_str();
        !text.unwrap_or("").contains('\u{fffd}')
    }));
    let body = server.chat(json!({})).await.json().await;
    assert_eq!(body["choices"][0]["message"]["content"], text);
}

#[tokio::test]
async fn choices_are_identified_by_index() {
    let server = ServerSetup::default().open().await;
    let fields = json!({"n": 4, "max_tokens": 6, "temperature": 1.0, "seed": 11});
    let body = server.chat(fields.clone()).await.json().await;
    let choices = body["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    let texts: Vec<&str> = choices
        .iter()
        .map(|c| c["message"]["content"].as_str().unwrap())
        .collect();
    let different: std::collections::HashSet<&&str> = texts.iter().collect();
    assert!(
        different.len() > 1,
        "each choice has its own seed: {texts:?}"
    );
    let mut streamed = fields;
    streamed["stream"] = json!(true);
    let chunks = server.chat(streamed).await.chunks().await;
    for (index, text) in texts.iter().enumerate() {
        assert_eq!(choices[index]["index"], index);
        assert_eq!(content(&chunks, index), *text, "same seed, same text");
        finish_reason(&chunks, index);
    }
}

#[tokio::test]
async fn the_same_seed_gives_the_same_text() {
    let server = ServerSetup::default().open().await;
    let ask = async |seed: u64| {
        let fields = json!({"max_tokens": 16, "temperature": 1.5, "seed": seed});
        let body = server.chat(fields).await.json().await;
        body["choices"][0]["message"]["content"].clone()
    };
    assert_eq!(ask(3).await, ask(3).await);
    assert_ne!(ask(3).await, ask(4).await);
}

#[tokio::test]
async fn reasoning_is_split_from_the_reply() {
    let server = ServerSetup::saying("first this\n</think>\n\nthen that")
        .open()
        .await;
    let fields = json!({"enable_thinking": true});
    let body = server.chat(fields.clone()).await.json().await;
    let message = &body["choices"][0]["message"];
    assert!(message.get("reasoning").is_none(), "one name is enough");
    assert_eq!(
        message["reasoning_content"].as_str().unwrap().trim(),
        "first this"
    );
    assert_eq!(message["content"], "then that");
    let details = &body["usage"]["completion_tokens_details"];
    let thinking = details["reasoning_tokens"].as_u64().unwrap();
    assert!((10..=14).contains(&thinking), "{thinking}");
    let finish = &body["choices"][0]["finish_details"];
    assert_eq!(finish["thinking_tokens"], thinking);
    let mut streamed = fields;
    streamed["stream"] = json!(true);
    let chunks = server.chat(streamed).await.chunks().await;
    assert_eq!(deltas(&chunks, 0, "reasoning_content").trim(), "first this");
    assert_eq!(content(&chunks, 0), "then that");
}

#[tokio::test]
async fn raw_reasoning_keeps_its_tags() {
    let server = ServerSetup::saying("a</think>b").open().await;
    let fields = json!({"enable_thinking": true, "reasoning_format": "none"});
    let body = server.chat(fields).await.json().await;
    assert_eq!(body["choices"][0]["message"]["content"], "a</think>b");
}

fn weather_tool() -> Value {
    json!([{"type": "function", "function": {
        "name": "weather",
        "description": "returns the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }}])
}

#[tokio::test]
async fn tool_call_is_parsed_whole_and_streamed() {
    let said =
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
    let server = ServerSetup::saying(said).open().await;
    let body = server
        .chat(json!({"tools": weather_tool()}))
        .await
        .json()
        .await;
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert!(choice["message"]["content"].is_null());
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["type"], "function");
    assert_eq!(call["function"]["name"], "weather");
    assert!(call["id"].as_str().unwrap().starts_with("call_"));
    let arguments: Value =
        serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"city": "Rome"}));

    let fields = json!({"tools": weather_tool(), "stream": true});
    let chunks = server.chat(fields).await.chunks().await;
    assert_eq!(finish_reason(&chunks, 0), "tool_calls");
    let calls: Vec<&Value> = chunks
        .iter()
        .filter_map(|c| c["choices"][0]["delta"]["tool_calls"].as_array())
        .flatten()
        .collect();
    assert_eq!(calls[0]["function"]["name"], "weather");
    assert_eq!(calls[0]["index"], 0);
    assert!(calls[1..].iter().all(|c| c.get("id").is_none()));
    let joined: String = calls
        .iter()
        .map(|c| c["function"]["arguments"].as_str().unwrap())
        .collect();
    let arguments: Value = serde_json::from_str(&joined).unwrap();
    assert_eq!(arguments, json!({"city": "Rome"}));
}

#[tokio::test]
async fn tool_choice_none_forbids_calls() {
    let said = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>";
    let server = ServerSetup::saying(said).open().await;
    let fields = json!({"tools": weather_tool(), "tool_choice": "none"});
    let body = server.chat(fields).await.json().await;
    let choice = &body["choices"][0];
    assert!(choice["message"].get("tool_calls").is_none());
    let content = choice["message"]["content"].as_str().unwrap();
    assert!(!content.contains("<tool_call>"), "{content}");
}

#[tokio::test]
async fn prefill_progress_is_sent_on_request() {
    let server = ServerSetup::saying("ok").open().await;
    let mut body = chat_body(json!({"stream": true, "return_progress": true}));
    body["messages"][0]["content"] = json!("y".repeat(300));
    let chunks = server
        .post("/v1/chat/completions", &body)
        .await
        .chunks()
        .await;
    let progress: Vec<&Value> = chunks
        .iter()
        .filter_map(|c| c.get("prompt_progress"))
        .collect();
    assert!(progress.len() >= 3, "{progress:?}");
    let last = progress[progress.len() - 1];
    assert_eq!(last["processed"], last["total"]);
    assert!(last["total"].as_u64().unwrap() > 300);
}

#[tokio::test]
async fn timings_are_sent_per_event_on_request() {
    let server = ServerSetup::saying("ok").open().await;
    let fields = json!({"stream": true, "timings_per_token": true});
    let chunks = server.chat(fields).await.chunks().await;
    assert!(chunks.iter().all(|c| c["timings"]["decode_ms"].is_number()));
}

#[tokio::test]
async fn timings_cover_device_time() {
    let server = ServerSetup {
        step: std::time::Duration::from_millis(20),
        ..ServerSetup::saying("abcd")
    }
    .open()
    .await;
    let body = server.chat(json!({})).await.json().await;
    let ms = |name: &str| body["timings"][name].as_f64().unwrap();
    assert!(ms("prefill_ms") >= 20.0, "{body}");
    assert!(ms("decode_ms") >= 4.0 * 20.0, "{body}");
    let rate = ms("decode_tokens_per_sec");
    assert!(rate > 0.0 && rate <= 50.0, "{body}");
}

#[tokio::test]
async fn ignore_eos_generates_up_to_the_limit() {
    let server = ServerSetup::saying("ab").open().await;
    let fields = json!({"ignore_eos": true, "max_tokens": 10});
    let body = server.chat(fields).await.json().await;
    assert_eq!(body["usage"]["completion_tokens"], 10);
    assert_eq!(body["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn logit_bias_forces_and_forbids_tokens() {
    let server = ServerSetup::saying("ok").open().await;
    let said = async |bias: Value| {
        let fields = json!({"max_tokens": 3, "logit_bias": bias});
        let body = server.chat(fields).await.json().await;
        body["choices"][0]["message"]["content"].clone()
    };
    // In this vocabulary each byte is a token.
    assert_eq!(said(json!({"120": 100})).await, "xxx");
    let barred = said(json!({"111": -100})).await;
    assert!(!barred.as_str().unwrap().starts_with('o'), "{barred}");
}

#[tokio::test]
async fn reply_has_at_least_min_tokens() {
    let server = ServerSetup::saying("ok").open().await;
    let fields = json!({"min_tokens": 8, "max_tokens": 20});
    let body = server.chat(fields).await.json().await;
    let tokens = body["usage"]["completion_tokens"].as_u64().unwrap();
    assert!(tokens >= 8, "{body}");
}

#[tokio::test]
async fn null_fields_are_absent_fields() {
    let server = ServerSetup::saying("ok").open().await;
    let fields = json!({
        "temperature": null, "top_p": null, "max_tokens": null, "stop": null, "tools": null,
        "n": null, "seed": null, "stream": null, "stream_options": null, "logprobs": null,
        "response_format": null, "logit_bias": null, "user": null, "model": null,
    });
    let answer = server.chat(fields).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json().await["model"], "tiny");
}

#[tokio::test]
async fn two_streams_at_once_do_not_mix() {
    let server: TestServer = ServerSetup::default().open().await;
    let ask = |text: &'static str| {
        let mut body = chat_body(json!({"max_tokens": 20, "stream": true}));
        body["messages"][0]["content"] = json!(text);
        body
    };
    let alone = async |text| {
        let answer = server.post("/v1/chat/completions", &ask(text)).await;
        content(&answer.chunks().await, 0)
    };
    let (one, two) = (alone("one").await, alone("two").await);
    assert_ne!(one, two);
    let together = tokio::join!(alone("one"), alone("two"));
    assert_eq!(together, (one, two));
}
