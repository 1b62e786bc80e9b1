//! Reasoning within a budget, and reasoning that a client ends.

use std::time::Duration;

use serde_json::{Value, json};

use crate::test_server::{ServerSetup, TestServer, chat_body};

/// A model that reasons endlessly and continues to write its steps after the reasoning block ends.
fn thinker() -> ServerSetup {
    let steps = (0..100).map(|n| format!("step {n}: {}. ", n * n * 7919));
    ServerSetup::saying(&steps.collect::<String>())
}

async fn thought(fields: Value) -> Value {
    let server = thinker().open().await;
    let body = server.chat(fields).await.json().await;
    body["choices"][0].clone()
}

#[tokio::test]
async fn budget_ends_reasoning_and_the_reply_continues() {
    let choice =
        thought(json!({"thinking": {"type": "enabled", "budget_tokens": 100}, "max_tokens": 240}))
            .await;
    let details = &choice["finish_details"];
    assert_eq!(details["close_kind"], "hard", "{choice}");
    let thinking = choice["message"]["reasoning_content"].as_str().unwrap();
    assert_eq!(
        thinking.len(),
        100,
        "one byte is a token here: {thinking:?}"
    );
    assert!(
        choice["message"]["content"]
            .as_str()
            .unwrap()
            .contains("step")
    );
    assert_eq!(details["total_tokens"], 240);
    assert_eq!(choice["finish_reason"], "length");
}

#[tokio::test]
async fn effort_tiers_and_length_bound_reasoning_without_budget() {
    let choice = thought(json!({"reasoning_effort": "low", "max_tokens": 200})).await;
    assert_eq!(choice["finish_details"]["close_kind"], "hard");
    let thinking = choice["message"]["reasoning_content"].as_str().unwrap();
    assert_eq!(thinking.len(), 100, "half of the reply is kept free");
}

#[tokio::test]
async fn too_small_reasoning_budget_disables_reasoning() {
    let server = thinker().open().await;
    let prompt = async |fields: Value| {
        let body = server
            .post("/apply-template", &chat_body(fields))
            .await
            .json()
            .await;
        body["prompt"].as_str().unwrap().ends_with("<think>\n")
    };
    assert!(prompt(json!({"enable_thinking": true})).await);
    assert!(!prompt(json!({"enable_thinking": true, "max_tokens": 32})).await);
    assert!(!prompt(json!({"enable_thinking": true, "thinking_budget": 63})).await);
    let short = json!({"reasoning_effort": "low", "max_tokens": 32});
    let body = server.chat(short).await.json().await;
    assert!(
        !body["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .is_empty()
    );
    assert_eq!(body["choices"][0]["message"].get("reasoning_content"), None);
}

#[tokio::test]
async fn natural_reasoning_end_frees_the_budget() {
    let said = format!("hm.</think>\n\n{}", "word ".repeat(80));
    let server = ServerSetup::saying(&said).open().await;
    let fields = json!({"thinking": {"type": "enabled", "budget_tokens": 64}, "max_tokens": 300});
    let choice = server.chat(fields).await.json().await["choices"][0].clone();
    assert_eq!(choice["finish_details"]["close_kind"], "natural");
    assert_eq!(choice["finish_details"]["thinking_tokens"], 3);
    assert!(
        choice["message"]["content"].as_str().unwrap().len() > 290,
        "{choice}"
    );
}

#[tokio::test]
async fn line_break_before_the_end_tag_is_not_reasoning() {
    for (said, expected) in [
        ("hm.\n</think>\n\nhi", "hm."),
        ("a\n\nb\r\n</think>hi", "a\n\nb"),
    ] {
        let server = ServerSetup::saying(said).open().await;
        let fields = json!({"enable_thinking": true, "stream": true});
        let chunks = server.chat(fields.clone()).await.chunks().await;
        let parts = chunks
            .iter()
            .filter_map(|c| c["choices"][0]["delta"]["reasoning_content"].as_str());
        assert_eq!(parts.collect::<String>(), expected);
        let mut whole = fields;
        whole["stream"] = json!(false);
        let body = server.chat(whole).await.json().await;
        assert_eq!(body["choices"][0]["message"]["reasoning_content"], expected);
        assert_eq!(body["choices"][0]["message"]["content"], "hi");
    }
}

#[tokio::test]
async fn control_request_ends_running_reasoning() {
    let mut setup = thinker();
    setup.step = Duration::from_millis(3);
    let server = setup.open().await;
    let mut stream = server
        .chat(json!({"enable_thinking": true, "stream": true, "max_tokens": 420}))
        .await;
    let mut id = String::new();
    let mut thought = String::new();
    let mut said = String::new();
    let mut asked = false;
    while let Some(event) = stream.event().await {
        let Some(data) = event.strip_prefix("data: {") else {
            continue;
        };
        let chunk: Value = serde_json::from_str(&format!("{{{data}")).unwrap();
        id = chunk["id"].as_str().unwrap().to_owned();
        let delta = &chunk["choices"][0]["delta"];
        thought.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
        said.push_str(delta["content"].as_str().unwrap_or_default());
        if thought.len() > 10 && !asked {
            asked = true;
            let order = json!({"id": id, "action": "reasoning_end"});
            let answer = server.post("/v1/chat/completions/control", &order).await;
            assert_eq!(answer.status, 200);
        }
    }
    assert!(thought.len() < 200, "{thought}");
    assert!(!said.is_empty());
    let order = |id: &str| json!({"id": id, "action": "reasoning_end"});
    let over = server
        .post("/v1/chat/completions/control", &order(&id))
        .await;
    assert_eq!(over.status, 404, "it is over");
    let bad = json!({"id": id, "action": "louder"});
    assert_eq!(
        server
            .post("/v1/chat/completions/control", &bad)
            .await
            .status,
        400
    );
}

#[tokio::test]
async fn repetition_after_cut_reasoning_ends_the_reply() {
    // Sixteen letters, repeated.
    let round = "abcdefghijklmno.".repeat(60);
    let server = ServerSetup::saying(&round).open().await;
    let fields = json!({"thinking": {"type": "enabled", "budget_tokens": 70}, "max_tokens": 400});
    let choice = server.chat(fields).await.json().await["choices"][0].clone();
    assert_eq!(
        choice["finish_details"]["degenerate_decode"], true,
        "{choice}"
    );
    assert_eq!(choice["finish_reason"], "length");
    assert!(
        choice["finish_details"]["total_tokens"].as_u64().unwrap() < 150,
        "{choice}"
    );
}

#[tokio::test]
async fn anthropic_reasoning_is_signed_and_can_be_omitted() {
    let server = ServerSetup::saying("hm.</think>\n\nhi").open().await;
    let body = |display: Option<&str>| {
        let mut thinking = json!({"type": "enabled", "budget_tokens": 100});
        if let Some(display) = display {
            thinking["display"] = json!(display);
        }
        json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "thinking": thinking})
    };
    let shown = server.post("/v1/messages", &body(None)).await.json().await;
    assert_eq!(shown["content"][0]["thinking"], "hm.");
    assert!(
        !shown["content"][0]["signature"]
            .as_str()
            .unwrap()
            .is_empty()
    );
    let hidden = server
        .post("/v1/messages", &body(Some("omitted")))
        .await
        .json()
        .await;
    assert_eq!(hidden["content"][0]["type"], "thinking", "{hidden}");
    assert_eq!(hidden["content"][0]["thinking"], "");
    assert!(
        !hidden["content"][0]["signature"]
            .as_str()
            .unwrap()
            .is_empty()
    );
    assert_eq!(hidden["content"][1]["text"], "hi");
    let mut streamed = body(Some("omitted"));
    streamed["stream"] = json!(true);
    let events = server.post("/v1/messages", &streamed).await.events().await;
    let deltas: Vec<&str> = events
        .iter()
        .filter_map(|(_, data)| data["delta"]["type"].as_str())
        .collect();
    assert!(!deltas.contains(&"thinking_delta"), "{deltas:?}");
    assert!(deltas.contains(&"signature_delta"), "{deltas:?}");
    // Other values of this setting show the reasoning.
    let unknown = server.post("/v1/messages", &body(Some("updates"))).await;
    let shown = unknown.json().await;
    assert_eq!(shown["content"][0]["thinking"], "hm.");
}

/// Text of the prompt that a request comes to.
async fn prompt_of(server: &TestServer, fields: Value) -> String {
    let mut fields = fields;
    fields["return_token_ids"] = json!(true);
    let reply = server.chat(fields).await.json().await;
    let ids = reply["prompt_token_ids"].as_array().unwrap();
    let ids = json!({ "tokens": ids });
    let text = server.post("/detokenize", &ids).await.json().await;
    text["content"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn reply_too_short_for_reasoning_is_rendered_without_it() {
    let server = ServerSetup::saying("hm</think>\n\nyes").open().await;
    let opens = |prompt: &str| prompt.ends_with("<think>\n");
    let thinking = |fields: Value| {
        let mut all = json!({"enable_thinking": true});
        let fields = fields.as_object().unwrap().clone();
        all.as_object_mut().unwrap().extend(fields);
        all
    };
    // Known before the text is tokenised: the limit is short, whatever the context.
    let short = prompt_of(&server, thinking(json!({"max_tokens": 4}))).await;
    assert!(short.ends_with("assistant\n"), "{short}");
    let long = prompt_of(&server, thinking(json!({"max_tokens": 300}))).await;
    assert!(opens(&long), "{long}");
    // Known only afterwards: the prompt leaves little of the context of 512 tokens.
    let message = |n: usize| json!([{"role": "user", "content": "y".repeat(n)}]);
    let full = prompt_of(&server, thinking(json!({"messages": message(455)}))).await;
    assert!(!opens(&full), "{full}");
    let roomy = prompt_of(&server, thinking(json!({"messages": message(50)}))).await;
    assert!(opens(&roomy), "{roomy}");
}
