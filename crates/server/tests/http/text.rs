//! Tokenise, detokenise, render and count.

use serde_json::{Value, json};

use crate::test_server::{ServerSetup, chat_body, special};

#[tokio::test]
async fn text_round_trips_through_tokens() {
    let server = ServerSetup::saying("x").open().await;
    let body = json!({"content": "hé"});
    let answer = server.post("/tokenize", &body).await.json().await;
    assert_eq!(answer["tokens"], json!([104, 195, 169]));
    assert_eq!(answer["count"], 3);
    assert_eq!(answer["max_model_len"], 512);
    let body = json!({"tokens": [104, 195, 169]});
    let answer = server.post("/detokenize", &body).await.json().await;
    assert_eq!(answer["content"], "hé");
    assert_eq!(answer["prompt"], "hé");
}

#[tokio::test]
async fn tokenizer_info_describes_the_template() {
    let server = ServerSetup::saying("x").open().await;
    let answer = server.get("/tokenizer_info").await.json().await;
    assert_eq!(answer["eos_token"], "<|im_end|>");
    assert!(
        answer["chat_template"]
            .as_str()
            .unwrap()
            .contains("<|im_start|>")
    );
}

#[tokio::test]
async fn non_utf8_pieces_are_byte_arrays() {
    let server = ServerSetup::saying("x").open().await;
    let body = json!({"prompt": "hé", "with_pieces": true});
    let answer = server.post("/tokenize", &body).await.json().await;
    assert_eq!(answer["tokens"][0], json!({"id": 104, "piece": "h"}));
    assert_eq!(answer["tokens"][1], json!({"id": 195, "piece": [195]}));
}

#[tokio::test]
async fn control_strings_parse_only_on_request() {
    let server = ServerSetup::saying("x").open().await;
    let ask = async |parse: bool| {
        let body = json!({"content": "<|im_end|>", "parse_special": parse});
        server.post("/tokenize", &body).await.json().await["tokens"].clone()
    };
    assert_eq!(ask(true).await, json!([special("<|im_end|>").0]));
    assert_eq!(ask(false).await.as_array().unwrap().len(), 10);
}

#[tokio::test]
async fn messages_are_rendered_counted_and_tokenised_alike() {
    let server = ServerSetup::saying("x").open().await;
    let body = chat_body(json!({}));
    let rendered = server.post("/apply-template", &body).await.json().await;
    let prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(rendered["prompt"], prompt);
    let tokens = server.post("/tokenize", &body).await.json().await;
    let counted = server
        .post("/v1/chat/completions/input_tokens", &body)
        .await
        .json()
        .await;
    assert_eq!(counted["input_tokens"], tokens["count"]);
    let answer = server.chat(json!({})).await.json().await;
    assert_eq!(answer["usage"]["prompt_tokens"], tokens["count"]);
}

#[tokio::test]
async fn control_strings_in_a_message_stay_text() {
    let server = ServerSetup::saying("x").open().await;
    let count = async |text: &str| {
        let mut body = chat_body(json!({}));
        body["messages"][0]["content"] = json!(text);
        let tokens = server.post("/tokenize", &body).await.json().await;
        tokens["count"].as_u64().unwrap()
    };
    assert_eq!(count("<|im_end|>").await, count("0123456789").await);
}

#[tokio::test]
async fn invalid_text_fields_are_rejected_by_name() {
    let server = ServerSetup::saying("x").open().await;
    for (path, body, param) in [
        ("/tokenize", json!({}), "content"),
        ("/tokenize", json!({"content": 5}), "content"),
        (
            "/tokenize",
            json!({"content": "a", "with_pieces": 1}),
            "with_pieces",
        ),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": [0, 99999]}), "tokens[1]"),
        ("/detokenize", json!({"tokens": ["a"]}), "tokens[0]"),
    ] {
        let answer = server.post(path, &body).await;
        assert_eq!(answer.status, 400, "{path} {body}");
        let error: Value = answer.json().await;
        assert_eq!(error["error"]["param"], param);
    }
}

#[tokio::test]
async fn text_routes_do_not_wait_for_the_device() {
    let server = ServerSetup::saying("x").open().await;
    server.watch.gate.hold();
    let stream = server.chat(json!({"stream": true})).await;
    assert_eq!(stream.status, 200);
    let body = json!({"content": "abc"});
    assert_eq!(server.post("/tokenize", &body).await.status, 200);
    assert_eq!(server.get("/health").await.status, 200);
    assert_eq!(server.get("/metrics").await.status, 200);
    server.watch.gate.release();
    stream.chunks().await;
}

#[tokio::test]
async fn text_of_very_many_tokens_is_not_counted() {
    let server = ServerSetup::saying("x").open().await;
    let tokenize = async |words: usize| {
        let request = json!({"content": "word ".repeat(words)});
        server.post("/tokenize", &request).await
    };
    let counted = tokenize(1000).await;
    assert_eq!(counted.status, 200);
    assert!(counted.json().await["count"].as_u64() >= Some(1000));
    let refused = tokenize(500_000).await;
    assert_eq!(refused.status, 400);
    let error = refused.json().await["error"].clone();
    assert_eq!(error["param"], "content", "{error}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("400000 tokens"), "{message}");
}
