//! Values that a request states, in every dialect: none is replaced by a default.

use serde_json::{Value, json};

use crate::test_server::ServerSetup;

#[tokio::test]
async fn echo_without_new_tokens_returns_the_prompt_and_its_logprobs() {
    let server = ServerSetup::saying("alpha beta gamma delta epsilon")
        .open()
        .await;
    let body = json!({"prompt": "Once upon", "max_tokens": 0, "echo": true, "logprobs": 1});
    let answer = server.post("/v1/completions", &body).await.json().await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "Once upon");
    assert_eq!(choice["finish_reason"], "length");
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 9);
    assert!(logprobs["token_logprobs"][0].is_null());
    assert!(logprobs["token_logprobs"][8].is_number());
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    assert_eq!(answer["usage"]["prompt_tokens"], 9);
}

#[tokio::test]
async fn no_new_tokens_are_none_in_every_dialect() {
    let server = ServerSetup::saying("alpha").open().await;
    let chat = server.chat(json!({"max_tokens": 0})).await.json().await;
    assert_eq!(chat["choices"][0]["message"]["content"], "");
    assert_eq!(chat["choices"][0]["finish_reason"], "length");
    assert_eq!(chat["usage"]["completion_tokens"], 0);
    let body = json!({"max_tokens": 0, "messages": [{"role": "user", "content": "hi"}]});
    let message = server.post("/v1/messages", &body).await.json().await;
    assert_eq!(message["content"], json!([]));
    assert_eq!(message["usage"]["output_tokens"], 0);
    let body = json!({"max_output_tokens": 0, "input": "hi"});
    let response = server.post("/v1/responses", &body).await.json().await;
    assert_eq!(response["output"], json!([]));
    assert_eq!(response["usage"]["output_tokens"], 0);
}

#[tokio::test]
async fn minus_one_is_no_limit_and_not_the_default() {
    let text = "more than sixteen tokens of text";
    let server = ServerSetup::saying(text).open().await;
    let body = json!({"prompt": "a", "max_tokens": -1});
    let answer = server.post("/v1/completions", &body).await.json().await;
    assert_eq!(answer["choices"][0]["text"], text);
    let chat = server.chat(json!({"max_tokens": -1})).await.json().await;
    assert_eq!(chat["choices"][0]["message"]["content"], text);
}

#[tokio::test]
async fn empty_lists_are_accepted() {
    let server = ServerSetup::saying("a").open().await;
    for fields in [
        json!({"stop": [], "stop_token_ids": [], "tools": [], "logit_bias": {}}),
        json!({"chat_template_kwargs": {}, "reasoning": {}, "metadata": {}}),
        json!({"messages": [{"role": "user", "content": []}, {"role": "user", "content": "x"}]}),
    ] {
        assert_eq!(server.chat(fields.clone()).await.status, 200, "{fields}");
    }
}

#[tokio::test]
async fn message_start_carries_the_counts_of_the_cache() {
    let mut setup = ServerSetup::saying("ok");
    setup.prefix.max_entries = 8;
    let server = setup.open().await;
    let text = "word ".repeat(40);
    let body = json!({"max_tokens": 4, "stream": true,
        "messages": [{"role": "user", "content": text}]});
    let mut counts = Vec::new();
    for _ in 0..2 {
        let events = server.post("/v1/messages", &body).await.events().await;
        let first = &events[0].1;
        assert_eq!(first["type"], "message_start");
        let usage = first["message"]["usage"].clone();
        let (_, last) = events.iter().rev().nth(1).unwrap();
        for key in ["input_tokens", "cache_read_input_tokens"] {
            assert_eq!(usage[key], last["usage"][key], "{key}");
        }
        counts.push(usage["cache_read_input_tokens"].as_u64().unwrap());
    }
    assert_eq!(counts[0], 0);
    assert!(counts[1] > 0, "{counts:?}");
}

#[tokio::test]
async fn referred_items_are_not_found() {
    let server = ServerSetup::saying("a").open().await;
    let input =
        json!([{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]);
    let answer = server
        .post("/v1/responses", &json!({ "input": input }))
        .await;
    assert_eq!(answer.status, 404);
    let error = answer.json().await["error"].clone();
    assert_eq!(error["type"], "invalid_request_error");
    assert_eq!(error["param"], "input");
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("'msg_1' not found")
    );
}

#[tokio::test]
async fn excluded_reasoning_is_thought_and_not_shown() {
    let server = ServerSetup::saying("hm</think>hi").open().await;
    let thinks = json!({"enable_thinking": true, "reasoning": {"exclude": true}});
    let answer = server.chat(thinks.clone()).await.json().await;
    let message = &answer["choices"][0]["message"];
    assert_eq!(*message, json!({"role": "assistant", "content": "hi"}));
    let details = &answer["usage"]["completion_tokens_details"];
    assert_eq!(details["reasoning_tokens"], 2);
    let mut streamed = thinks.clone();
    streamed["stream"] = json!(true);
    for chunk in server.chat(streamed).await.chunks().await {
        assert!(
            chunk["choices"][0]["delta"]
                .get("reasoning_content")
                .is_none()
        );
    }
    let mut body = thinks;
    body["input"] = json!("hi");
    let response = server.post("/v1/responses", &body).await.json().await;
    let output = response["output"].as_array().unwrap();
    let kinds: Vec<&Value> = output.iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["message"]);
}

#[tokio::test]
async fn paths_of_other_servers_are_named() {
    let server = ServerSetup::saying("a").open().await;
    for (path, words) in [
        ("/api/v0/models", "LM Studio"),
        ("/api/v1/models", "LM Studio"),
        ("/v1/embeddings", "embeddings"),
    ] {
        let answer = server.get(path).await;
        assert_eq!(answer.status, 404);
        let error = answer.json().await["error"]["message"].clone();
        assert!(error.as_str().unwrap().contains(words), "{path}: {error}");
    }
    for (path, words) in [
        ("/api/embed", "embeddings"),
        ("/api/delete", "hearth rm"),
        ("/api/copy", "Ollama"),
    ] {
        let answer = server.post(path, &json!({})).await;
        assert_eq!(answer.status, 404);
        let error = answer.json().await["error"].clone();
        assert!(error.as_str().unwrap().contains(words), "{path}: {error}");
    }
}
