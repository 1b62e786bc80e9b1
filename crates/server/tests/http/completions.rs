//! Text completions.

use serde_json::{Value, json};

use crate::test_server::{ServerSetup, tokens};

#[tokio::test]
async fn a_string_is_continued() {
    let server = ServerSetup::saying(" upon a time").open().await;
    let body = json!({"prompt": "Once", "max_tokens": 64});
    let body = server.post("/v1/completions", &body).await.json().await;
    assert_eq!(body["object"], "text_completion");
    assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(body["choices"][0]["text"], " upon a time");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert!(body["choices"][0]["logprobs"].is_null());
    assert_eq!(body["usage"]["prompt_tokens"], 4);
}

#[tokio::test]
async fn completion_default_is_sixteen_tokens() {
    let server = ServerSetup::saying(&"x".repeat(100)).open().await;
    let body = json!({"prompt": "Once"});
    let body = server.post("/v1/completions", &body).await.json().await;
    assert_eq!(body["usage"]["completion_tokens"], 16);
    assert_eq!(body["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn prompts_may_be_strings_tokens_or_lists() {
    let server = ServerSetup::saying("!").open().await;
    let ids: Vec<u32> = tokens("ab").iter().map(|t| t.0).collect();
    for (prompt, choices) in [
        (json!("ab"), 1),
        (json!(["ab", "cd", "ef"]), 3),
        (json!(ids), 1),
        (json!([ids, ids]), 2),
    ] {
        let body = json!({"prompt": prompt});
        let body = server.post("/v1/completions", &body).await.json().await;
        let found = body["choices"].as_array().unwrap();
        assert_eq!(found.len(), choices, "{body}");
        for (index, choice) in found.iter().enumerate() {
            assert_eq!(choice["index"], index);
            assert_eq!(choice["text"], "!");
        }
        assert_eq!(body["usage"]["prompt_tokens"], 2 * choices);
        assert_eq!(body["usage"]["completion_tokens"], 2 * choices);
    }
}

#[tokio::test]
async fn more_prompts_than_sequences_all_finish() {
    let server = ServerSetup::saying("!").open().await;
    let prompts: Vec<String> = (0..100).map(|i| format!("p{i}")).collect();
    let body = json!({"prompt": prompts});
    let answer = server.post("/v1/completions", &body).await;
    assert_eq!(answer.status, 200);
    let body = answer.json().await;
    assert_eq!(body["choices"].as_array().unwrap().len(), 100);
}

#[tokio::test]
async fn stream_gives_text_then_the_finish_reason() {
    let server = ServerSetup::saying("abc").open().await;
    let body =
        json!({"prompt": ["x", "y"], "stream": true, "stream_options": {"include_usage": true}});
    let chunks = server.post("/v1/completions", &body).await.chunks().await;
    let mut texts = [String::new(), String::new()];
    let mut reasons = [Value::Null, Value::Null];
    let (last, before) = chunks.split_last().unwrap();
    for chunk in before {
        assert_eq!(chunk["object"], "text_completion");
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().unwrap() as usize;
        texts[index].push_str(choice["text"].as_str().unwrap());
        if !choice["finish_reason"].is_null() {
            reasons[index] = choice["finish_reason"].clone();
        }
    }
    assert_eq!(texts, ["abc", "abc"]);
    assert_eq!(reasons, [json!("stop"), json!("stop")]);
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 8);
}

#[tokio::test]
async fn an_echo_begins_with_the_prompt() {
    let server = ServerSetup::saying(" there").open().await;
    let body = json!({"prompt": "Hi", "echo": true});
    let whole = server.post("/v1/completions", &body).await.json().await;
    assert_eq!(whole["choices"][0]["text"], "Hi there");
    let body = json!({"prompt": "Hi", "echo": true, "stream": true});
    let chunks = server.post("/v1/completions", &body).await.chunks().await;
    let text: String = chunks
        .iter()
        .map(|c| c["choices"][0]["text"].as_str().unwrap())
        .collect();
    assert_eq!(text, "Hi there");
}

#[tokio::test]
async fn echo_with_logprobs_includes_prompt_logprobs() {
    let server = ServerSetup::saying("é!").open().await;
    let body =
        json!({"prompt": "aé", "echo": true, "logprobs": 2, "max_tokens": 3, "temperature": 0});
    let body = server.post("/v1/completions", &body).await.json().await;
    let choice = &body["choices"][0];
    assert_eq!(choice["text"], "aéé!");
    let logprobs = &choice["logprobs"];
    let column = |name: &str| logprobs[name].as_array().unwrap().clone();
    let offsets = column("text_offset");
    assert_eq!(offsets, [0, 1, 2, 2, 3, 3].map(|n| json!(n)));
    assert_eq!(column("tokens").len(), 6);
    let chances = column("token_logprobs");
    assert!(chances[0].is_null(), "nothing comes before the first token");
    assert!(chances[1..].iter().all(|c| c.as_f64().unwrap() <= 0.0));
    let top = column("top_logprobs");
    assert!(top[0].is_null());
    assert!(!top[5].as_object().unwrap().is_empty());
}

#[tokio::test]
async fn several_choices_of_several_prompts_are_numbered_through() {
    let server = ServerSetup::default().open().await;
    // Sampled without a seed, so one of the twelve may be an end-of-text token.
    let body = json!({"prompt": ["a", "b"], "n": 2, "best_of": 2, "temperature": 1,
        "max_tokens": 3, "ignore_eos": true});
    let body = server.post("/v1/completions", &body).await.json().await;
    let indices: Vec<u64> = body["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["index"].as_u64().unwrap())
        .collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(body["usage"]["completion_tokens"], 12);
}

#[tokio::test]
async fn suffix_is_what_follows_the_gap() {
    let server = ServerSetup::saying("x").open().await;
    let body = json!({"prompt": "ab", "suffix": "c", "return_token_ids": true});
    let body = server.post("/v1/completions", &body).await.json().await;
    let ids: Vec<u32> = tokens("<|fim_prefix|>ab<|fim_suffix|>c<|fim_middle|>")
        .iter()
        .map(|id| id.0)
        .collect();
    assert_eq!(body["choices"][0]["prompt_token_ids"], json!(ids));
    assert_eq!(body["choices"][0]["text"], "x");
}

#[tokio::test]
async fn unsupported_completion_fields_are_rejected() {
    let server = ServerSetup::saying("x").open().await;
    for (body, param) in [
        (json!({"prompt": "a", "suffix": 1}), "suffix"),
        (json!({"prompt": "a", "suffix": "b", "echo": true}), "echo"),
        (json!({"prompt": "a", "n": 1, "best_of": 3}), "best_of"),
        (json!({"prompt": [99999]}), "prompt"),
        (json!({"prompt": [1, "x"]}), "prompt[1]"),
        (json!({"prompt": ""}), "prompt"),
        (json!({}), "prompt"),
    ] {
        let answer = server.post("/v1/completions", &body).await;
        assert_eq!(answer.status, 400, "{body}");
        let error = answer.json().await;
        assert_eq!(error["error"]["param"], param, "{error}");
    }
}

#[tokio::test]
async fn prompt_filling_the_context_is_rejected_with_both_lengths() {
    let server = ServerSetup::saying("x").open().await;
    let body = json!({"prompt": "y".repeat(600)});
    let answer = server.post("/v1/completions", &body).await;
    assert_eq!(answer.status, 400);
    let error = answer.json().await;
    assert_eq!(error["error"]["code"], "context_length_exceeded");
    let message = error["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("600") && message.contains("512"),
        "{message}"
    );
}
