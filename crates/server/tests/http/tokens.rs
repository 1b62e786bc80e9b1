//! Fields of vLLM over tokens: what ended a text, which tokens may come, which are listed.

use serde_json::{Value, json};

use crate::test_server::{ServerSetup, TestServer, chat_body, special, tokens};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn ids(text: &str) -> Vec<u32> {
    tokens(text).iter().map(|token| token.0).collect()
}

/// A body for either dialect with the same fields.
fn body(path: &str, fields: &Value) -> Value {
    match path {
        CHAT => chat_body(fields.clone()),
        _ => {
            let mut body = json!({"prompt": "hi"});
            body.as_object_mut()
                .unwrap()
                .extend(fields.as_object().unwrap().clone());
            body
        }
    }
}

/// What a first choice comes to, whole or streamed.
#[derive(Debug, PartialEq)]
struct Seen {
    text: String,
    stop_reason: Value,
    token_ids: Vec<Value>,
    prompt_token_ids: Value,
}

async fn whole(server: &TestServer, path: &str, fields: &Value) -> Seen {
    let reply = server.post(path, &body(path, fields)).await.json().await;
    let choice = &reply["choices"][0];
    let prompt = match path {
        CHAT => &reply["prompt_token_ids"],
        _ => &choice["prompt_token_ids"],
    };
    let text = match path {
        CHAT => &choice["message"]["content"],
        _ => &choice["text"],
    };
    assert!(
        choice.as_object().unwrap().contains_key("stop_reason"),
        "{reply}"
    );
    Seen {
        text: text
            .as_str()
            .unwrap_or_else(|| panic!("{reply}"))
            .to_owned(),
        stop_reason: choice["stop_reason"].clone(),
        token_ids: choice["token_ids"].as_array().cloned().unwrap_or_default(),
        prompt_token_ids: prompt.clone(),
    }
}

async fn streamed(server: &TestServer, path: &str, fields: &Value) -> Seen {
    let mut body = body(path, fields);
    body["stream"] = json!(true);
    let chunks = server.post(path, &body).await.chunks().await;
    let mut seen = Seen {
        text: String::new(),
        stop_reason: json!("never sent"),
        token_ids: Vec::new(),
        prompt_token_ids: match path {
            CHAT => chunks[0]["prompt_token_ids"].clone(),
            _ => chunks[0]["choices"][0]["prompt_token_ids"].clone(),
        },
    };
    for chunk in &chunks {
        let choice = &chunk["choices"][0];
        let text = match path {
            CHAT => &choice["delta"]["content"],
            _ => &choice["text"],
        };
        seen.text.push_str(text.as_str().unwrap_or_default());
        seen.token_ids
            .extend(choice["token_ids"].as_array().cloned().unwrap_or_default());
        if !choice["finish_reason"].is_null() {
            assert!(
                choice.as_object().unwrap().contains_key("stop_reason"),
                "{chunk}"
            );
            seen.stop_reason = choice["stop_reason"].clone();
        }
    }
    seen
}

/// The same reply whole and streamed, in both dialects.
async fn check(says: &str, fields: Value, text: &str, stop_reason: Value) {
    let server = ServerSetup::saying(says).open().await;
    for path in [CHAT, TEXT] {
        let whole = whole(&server, path, &fields).await;
        assert_eq!(
            (whole.text.as_str(), &whole.stop_reason),
            (text, &stop_reason),
            "{path}"
        );
        assert_eq!(
            streamed(&server, path, &fields).await,
            whole,
            "{path} {fields}"
        );
    }
}

#[tokio::test]
async fn stop_reason_is_the_matched_string_or_token() {
    let stop = |key: &str, value: Value| json!({ key: value, "max_tokens": 40 });
    check(
        "one STOP two",
        stop("stop", json!(["x", "STOP"])),
        "one ",
        json!("STOP"),
    )
    .await;
    check(
        "xTy",
        stop("stop_token_ids", json!([ids("T")[0]])),
        "x",
        json!(84),
    )
    .await;
    check("all", json!({}), "all", json!(null)).await;
    check("longer", json!({"max_tokens": 3}), "lon", json!(null)).await;
    // The model's own end token ends a text by itself.
    let end = special("<|im_end|>").0;
    check(
        "all",
        stop("stop_token_ids", json!([end])),
        "all",
        json!(null),
    )
    .await;
}

#[tokio::test]
async fn stop_is_shown_if_the_request_includes_it() {
    let include = |key: &str, value: Value| json!({ key: value, "include_stop_str_in_output": true, "max_tokens": 40 });
    check(
        "one STOP two",
        include("stop", json!("STOP")),
        "one STOP",
        json!("STOP"),
    )
    .await;
    let fields = include("stop_token_ids", json!([ids("T")[0]]));
    check("xTy", fields, "xT", json!(84)).await;
    let fields = json!({"stop": ["STOP"], "include_stop_str_in_output": false, "max_tokens": 40});
    check("one STOP two", fields, "one ", json!("STOP")).await;
}

#[tokio::test]
async fn included_stop_is_counted_once_and_has_logprobs() {
    let server = ServerSetup::saying("xTy").open().await;
    for include in [false, true] {
        let fields = json!({"stop_token_ids": [84], "include_stop_str_in_output": include,
            "logprobs": true});
        let reply = server.chat(fields).await.json().await;
        assert_eq!(reply["usage"]["completion_tokens"], 2, "{reply}");
        let listed = reply["choices"][0]["logprobs"]["content"]
            .as_array()
            .unwrap();
        assert_eq!(listed.len(), 1 + usize::from(include), "{reply}");
    }
}

#[tokio::test]
async fn other_dialects_include_the_stop_string_too() {
    let server = ServerSetup::saying("one STOP two").open().await;
    let fields = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40,
        "stop_sequences": ["STOP"], "include_stop_str_in_output": true});
    let reply = server.post("/v1/messages", &fields).await.json().await;
    assert_eq!(reply["content"][0]["text"], "one STOP");
    assert_eq!(reply["stop_sequence"], "STOP");
    let fields = json!({"input": "hi", "stop": "STOP", "include_stop_str_in_output": true});
    let reply = server.post("/v1/responses", &fields).await.json().await;
    assert_eq!(reply["output"][0]["content"][0]["text"], "one STOP");
}

#[tokio::test]
async fn zero_logprobs_give_the_chosen_token() {
    let server = ServerSetup::saying("ab").open().await;
    let fields = json!({"prompt": "hi", "logprobs": 0});
    let reply = server.post(TEXT, &fields).await.json().await;
    let logprobs = &reply["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["a", "b"]));
    let own = &logprobs["token_logprobs"];
    assert!(own[0].as_f64().unwrap() > -1e-3, "{reply}");
    let expected = json!([{"a": own[0]}, {"b": own[1]}]);
    assert_eq!(logprobs["top_logprobs"], expected);
    let fields = json!({"logprobs": true, "top_logprobs": 0});
    let reply = server.chat(fields).await.json().await;
    let listed = reply["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert_eq!(listed.len(), 2);
    assert!(
        listed
            .iter()
            .all(|entry| entry["top_logprobs"] == json!([]))
    );
}

#[tokio::test]
async fn chosen_token_is_listed_beside_its_alternatives() {
    // The bias chooses `b`, which is not the likeliest by raw logits.
    let server = ServerSetup::saying("a").open().await;
    let fields = json!({"prompt": "hi", "logprobs": 1, "max_tokens": 1, "logit_bias": {"98": 50}});
    let reply = server.post(TEXT, &fields).await.json().await;
    let top = &reply["choices"][0]["logprobs"]["top_logprobs"][0];
    let mut listed: Vec<&String> = top.as_object().unwrap().keys().collect();
    listed.sort();
    assert_eq!(listed, ["a", "b"], "{reply}");
}

#[tokio::test]
async fn only_allowed_tokens_are_generated() {
    let fields = json!({"allowed_token_ids": [98, 97], "max_tokens": 4});
    // Where the model would write another token, the better of the two comes.
    check("bxay", fields, "baaa", json!(null)).await;
    let server = ServerSetup::saying("x").open().await;
    for path in [CHAT, TEXT] {
        for wrong in [json!([]), json!([99_999])] {
            let fields = json!({"allowed_token_ids": wrong});
            let reply = server.post(path, &body(path, &fields)).await;
            assert_eq!(reply.status, 400);
            let param = reply.json().await["error"]["param"].clone();
            assert_eq!(param, "allowed_token_ids");
        }
    }
}

#[tokio::test]
async fn bad_words_are_not_generated() {
    let words = |words: Value| json!({"bad_words": words, "max_tokens": 8});
    check("abc", words(json!(["b"])), "a\u{0}c", json!(null)).await;
    // A word of several tokens may begin, not complete.
    check("abc", words(json!(["bc"])), "ab\u{0}", json!(null)).await;
    check("abc", words(json!(["zz", "abc"])), "ab\u{0}", json!(null)).await;
    check("abc", words(json!([])), "abc", json!(null)).await;
    let server = ServerSetup::saying("abc").open().await;
    let fields = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8,
        "bad_words": ["bc"]});
    let reply = server.post("/v1/messages", &fields).await.json().await;
    assert_eq!(reply["content"][0]["text"], "ab\u{0}");
    let fields = json!({"input": "hi", "bad_words": ["bc"]});
    let reply = server.post("/v1/responses", &fields).await.json().await;
    assert_eq!(reply["output"][0]["content"][0]["text"], "ab\u{0}");
}

#[tokio::test]
async fn token_ids_are_those_of_prompt_and_output() {
    let server = ServerSetup::saying("one STOP two").open().await;
    let rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    for (path, prompt) in [(CHAT, rendered), (TEXT, "hi")] {
        for (fields, output) in [
            (json!({"stop": "STOP"}), "one STOP"),
            (json!({"max_tokens": 5}), "one S"),
            (json!({"max_tokens": 40}), "one STOP two<|im_end|>"),
            (json!({"stop_token_ids": [84]}), "one ST"),
            (
                json!({"stop": "STOP", "include_stop_str_in_output": true}),
                "one STOP",
            ),
        ] {
            let mut fields = fields;
            fields["return_token_ids"] = json!(true);
            let whole = whole(&server, path, &fields).await;
            assert_eq!(
                json!(whole.token_ids),
                json!(ids(output)),
                "{path} {fields}"
            );
            assert_eq!(
                whole.prompt_token_ids,
                json!(ids(prompt)),
                "{path} {fields}"
            );
            assert_eq!(
                streamed(&server, path, &fields).await,
                whole,
                "{path} {fields}"
            );
        }
        let plain = whole(&server, path, &json!({})).await;
        assert!(plain.token_ids.is_empty() && plain.prompt_token_ids.is_null());
    }
}

#[tokio::test]
async fn prompt_logprobs_list_each_prompt_token_by_its_id() {
    // Every row of the script favours the first token of its text.
    let server = ServerSetup::saying("b!").open().await;
    let fields = json!({"prompt": "abc", "prompt_logprobs": 1, "max_tokens": 1});
    let reply = server.post(TEXT, &fields).await.json().await;
    let rows = reply["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    assert!(rows[0].is_null(), "nothing comes before the first token");
    assert_eq!(rows[1].as_object().unwrap().len(), 1);
    assert_eq!(
        (&rows[1]["98"]["rank"], &rows[1]["98"]["decoded_token"]),
        (&json!(1), &json!("b"))
    );
    assert!(rows[1]["98"]["logprob"].as_f64().unwrap() > -1e-3);
    assert_eq!(rows[2].as_object().unwrap().len(), 2);
    assert!(rows[2]["99"]["rank"].is_null() && rows[2]["99"]["logprob"].as_f64().unwrap() < -19.0);
    assert_eq!(rows[2]["98"]["rank"], 1);
    let fields = json!({"prompt_logprobs": 0});
    let reply = server.chat(fields).await.json().await;
    let rows = reply["prompt_logprobs"].as_array().unwrap();
    assert_eq!(
        rows.len() as u64,
        reply["usage"]["prompt_tokens"].as_u64().unwrap()
    );
    assert!(
        rows[1..]
            .iter()
            .all(|row| row.as_object().unwrap().len() == 1)
    );
    for path in [CHAT, TEXT] {
        let fields = json!({"prompt_logprobs": 1, "stream": true});
        let reply = server.post(path, &body(path, &fields)).await;
        assert_eq!(reply.status, 400);
        assert_eq!(reply.json().await["error"]["param"], "prompt_logprobs");
    }
}

#[tokio::test]
async fn prompt_logprobs_and_an_echo_keep_their_own_counts() {
    let server = ServerSetup::saying("b").open().await;
    let fields = json!({"prompt": "ac", "prompt_logprobs": 3, "logprobs": 1, "echo": true,
        "max_tokens": 1});
    let reply = server.post(TEXT, &fields).await.json().await;
    let choice = &reply["choices"][0];
    assert_eq!(choice["text"], "acb");
    let rows = choice["prompt_logprobs"].as_array().unwrap();
    assert_eq!(rows[1].as_object().unwrap().len(), 4);
    // The token and one alternative.
    let top = choice["logprobs"]["top_logprobs"][1].as_object().unwrap();
    assert_eq!(top.len(), 2, "{reply}");
}

#[tokio::test]
async fn prompts_are_cut_as_asked() {
    let server = ServerSetup::saying("!").open().await;
    for (cut, side, expected) in [(2, "left", "ef"), (2, "right", "ab"), (9, "left", "abcdef")] {
        let fields = json!({"prompt": "abcdef", "truncate_prompt_tokens": cut,
            "truncation_side": side, "echo": true, "max_tokens": 0});
        let reply = server.post(TEXT, &fields).await.json().await;
        assert_eq!(reply["choices"][0]["text"], expected, "{reply}");
    }
    let fields = json!({"truncate_prompt_tokens": 5, "return_token_ids": true});
    let reply = server.chat(fields).await.json().await;
    let end = ids("<|im_start|>assistant\n");
    assert_eq!(reply["prompt_token_ids"], json!(end[end.len() - 5..]));
    assert_eq!(reply["usage"]["prompt_tokens"], 5);
    // The context holds 512 tokens; -1 leaves room for the reply.
    let fields = json!({"prompt": "y".repeat(600), "truncate_prompt_tokens": -1, "max_tokens": 10});
    let reply = server.post(TEXT, &fields).await.json().await;
    assert_eq!(reply["usage"]["prompt_tokens"], 502, "{reply}");
    let long = json!([{"role": "user", "content": "y".repeat(600)}]);
    let fields = json!({"messages": long, "truncate_prompt_tokens": -1, "max_tokens": 10});
    let reply = server.post("/v1/messages", &fields).await.json().await;
    assert_eq!(reply["usage"]["input_tokens"], 502, "{reply}");
    let fields = json!({"input": "y".repeat(600), "truncate_prompt_tokens": 20});
    let reply = server.post("/v1/responses", &fields).await.json().await;
    assert_eq!(reply["usage"]["input_tokens"], 20, "{reply}");
    let fields = json!({"prompt": "abc", "truncate_prompt_tokens": 0});
    let reply = server.post(TEXT, &fields).await;
    assert_eq!(reply.status, 400);
}

#[tokio::test]
async fn chat_echo_prepends_the_message_that_is_continued() {
    let server = ServerSetup::saying(" upon").open().await;
    let messages =
        json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "Once"}]);
    for (fields, expected) in [
        (
            json!({"messages": messages, "continue_final_message": true, "echo": true}),
            "Once upon",
        ),
        (
            json!({"messages": messages, "continue_final_message": true}),
            " upon",
        ),
        (json!({"echo": true}), " upon"),
        (
            json!({"echo": true, "add_generation_prompt": false}),
            "hi upon",
        ),
    ] {
        assert_eq!(
            whole(&server, CHAT, &fields).await.text,
            expected,
            "{fields}"
        );
        assert_eq!(
            streamed(&server, CHAT, &fields).await.text,
            expected,
            "{fields}"
        );
    }
}
