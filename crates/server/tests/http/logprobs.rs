//! Logprobs of chat responses.

use serde_json::{Value, json};

use crate::test_server::ServerSetup;

fn bytes(entries: &[Value]) -> Vec<u8> {
    let of = |entry: &Value| -> Vec<u8> {
        let bytes = entry["bytes"].as_array().unwrap();
        bytes.iter().map(|b| b.as_u64().unwrap() as u8).collect()
    };
    entries.iter().flat_map(of).collect()
}

#[tokio::test]
async fn responses_carry_logprobs_with_their_text() {
    let text = "héllo 😀!";
    let server = ServerSetup::saying(text).open().await;
    let fields = json!({"input": "hi", "top_logprobs": 2});
    let body = server.post("/v1/responses", &fields).await.json().await;
    let part = &body["output"][0]["content"][0];
    let entries = part["logprobs"].as_array().unwrap();
    assert_eq!(bytes(entries), text.as_bytes());
    assert_eq!(entries[0]["top_logprobs"].as_array().unwrap().len(), 2);
    let named = json!({"input": "hi", "include": ["message.output_text.logprobs"], "stream": true});
    let events = server.post("/v1/responses", &named).await.events().await;
    let deltas = events
        .iter()
        .filter(|(name, _)| name == "response.output_text.delta");
    for (_, delta) in deltas {
        let logprobs = delta["logprobs"].as_array().unwrap();
        assert_eq!(bytes(logprobs), delta["delta"].as_str().unwrap().as_bytes());
        assert_eq!(logprobs[0]["top_logprobs"], json!([]));
    }
    let plain = server
        .post("/v1/responses", &json!({"input": "hi"}))
        .await
        .json()
        .await;
    assert_eq!(plain["output"][0]["content"][0]["logprobs"], json!([]));
}

#[tokio::test]
async fn tokens_join_to_the_content_whole_and_streamed() {
    let text = "héllo 😀!";
    let server = ServerSetup::saying(text).open().await;
    let fields = json!({"logprobs": true, "top_logprobs": 3});
    let body = server.chat(fields).await.json().await;
    let entries = body["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert_eq!(bytes(entries), text.as_bytes());
    for entry in entries {
        assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        let chances: Vec<f64> = top.iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
        assert!(chances.is_sorted_by(|a, b| a >= b));
    }
    let fields = json!({"logprobs": true, "stream": true});
    let chunks = server.chat(fields).await.chunks().await;
    for chunk in &chunks {
        let choice = &chunk["choices"][0];
        let Some(content) = choice["delta"]["content"]
            .as_str()
            .filter(|t| !t.is_empty())
        else {
            continue;
        };
        let entries = choice["logprobs"]["content"].as_array().unwrap();
        assert_eq!(
            bytes(entries),
            content.as_bytes(),
            "text and logprobs of each chunk agree"
        );
        assert_eq!(entries[0]["top_logprobs"], json!([]));
    }
}

#[tokio::test]
async fn stop_string_also_cuts_logprob_tokens() {
    let server = ServerSetup::saying("one STOP two").open().await;
    let fields = json!({"logprobs": true, "stop": ["STOP"]});
    let body = server.chat(fields).await.json().await;
    let entries = body["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert_eq!(bytes(entries), b"one ");
}

#[tokio::test]
async fn reasoning_logprobs_have_their_own_list() {
    let server = ServerSetup::saying("hm\n</think>\n\nyes").open().await;
    let fields = json!({"logprobs": true, "enable_thinking": true});
    let body = server.chat(fields).await.json().await;
    let logprobs = &body["choices"][0]["logprobs"];
    assert_eq!(bytes(logprobs["content"].as_array().unwrap()), b"yes");
    let thinking = bytes(logprobs["reasoning_content"].as_array().unwrap());
    assert_eq!(
        thinking,
        body["choices"][0]["message"]["reasoning_content"]
            .as_str()
            .unwrap()
            .as_bytes()
    );
}

#[tokio::test]
async fn top_logprobs_without_logprobs_are_rejected() {
    let server = ServerSetup::saying("x").open().await;
    let answer = server.chat(json!({"top_logprobs": 3})).await;
    assert_eq!(answer.status, 400);
    let answer = server
        .chat(json!({"logprobs": true, "top_logprobs": 21}))
        .await;
    assert_eq!(answer.status, 400);
}

#[tokio::test]
async fn certain_token_has_logprob_near_zero() {
    let server = ServerSetup::saying("ab").open().await;
    let body = server.chat(json!({"logprobs": true})).await.json().await;
    let entries = body["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    for entry in entries {
        assert!(entry["logprob"].as_f64().unwrap() > -1e-3, "{entry}");
    }
}
