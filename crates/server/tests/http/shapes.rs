//! Constrained replies: JSON, patterns, choices, grammars and calls, in every dialect, against a
//! model that prefers other text.

use serde_json::{Value, json};

use crate::test_server::{ServerSetup, TestServer};

/// Neither JSON nor a call.
const STUBBORN: &str = "I would rather tell you about the weather. It is fine today, and warm.";

fn schema() -> Value {
    json!({"type": "object", "properties": {
        "ok": {"type": "boolean"}, "kind": {"enum": ["a", "bc"]}, "n": {"type": "integer", "minimum": 3, "maximum": 17}},
        "required": ["ok", "kind", "n"], "additionalProperties": false})
}

#[track_caller]
fn check(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
    let mut keys: Vec<&String> = value.as_object().unwrap().keys().collect();
    keys.sort();
    assert_eq!(keys, ["kind", "n", "ok"], "{text}");
    assert!(value["ok"].is_boolean(), "{text}");
    assert!(value["kind"] == "a" || value["kind"] == "bc", "{text}");
    assert!((3..=17).contains(&value["n"].as_i64().unwrap()), "{text}");
}

async fn post(server: &TestServer, path: &str, body: Value) -> Value {
    let answer = server.post(path, &body).await;
    let status = answer.status;
    let body = answer.json().await;
    assert_eq!(status, 200, "{path}: {body}");
    body
}

fn format() -> Value {
    json!({"type": "json_schema", "name": "n", "schema": schema(), "strict": true})
}

/// The reply text in each dialect for a request with the schema.
async fn texts(server: &TestServer) -> Vec<String> {
    let wrapped = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema(), "strict": true}});
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let user = json!([{"role": "user", "content": "hi"}]);
    let chat = post(
        server,
        "/v1/chat/completions",
        json!({"messages": user, "response_format": wrapped}),
    )
    .await;
    assert_eq!(chat["choices"][0]["finish_reason"], "stop");
    let messages = post(
        server,
        "/v1/messages",
        json!({"messages": user, "max_tokens": 300, "output_config": {"format": format()}}),
    )
    .await;
    assert_eq!(messages["stop_reason"], "end_turn");
    let responses = post(
        server,
        "/v1/responses",
        json!({"input": "hi", "text": {"format": format()}}),
    )
    .await;
    assert_eq!(responses["status"], "completed");
    let completions = post(
        server,
        "/v1/completions",
        json!({"prompt": "hi", "max_tokens": 300, "response_format": wrapped}),
    )
    .await;
    vec![
        text(&chat["choices"][0]["message"]["content"]),
        text(&messages["content"][0]["text"]),
        text(&responses["output"][0]["content"][0]["text"]),
        text(&completions["choices"][0]["text"]),
    ]
}

#[tokio::test]
async fn schema_is_enforced_in_every_dialect() {
    // One model prefers other text; the other's logits are arbitrary.
    for setup in [ServerSetup::saying(STUBBORN), ServerSetup::default()] {
        let server = setup.open().await;
        for text in texts(&server).await {
            check(&text);
        }
    }
}

#[tokio::test]
async fn schema_is_enforced_in_streams_and_in_every_choice() {
    let server = ServerSetup::default().open().await;
    let wanted = json!({"type": "json_schema", "json_schema": {"schema": schema()}});
    for seed in 0..6 {
        let fields = json!({"response_format": wanted, "temperature": 1.0, "seed": seed, "n": 2});
        let whole = server.chat(fields.clone()).await.json().await;
        let mut streamed = fields;
        streamed["stream"] = json!(true);
        let chunks = server.chat(streamed).await.chunks().await;
        for index in 0..2 {
            let whole = whole["choices"][index]["message"]["content"]
                .as_str()
                .unwrap();
            check(whole);
            let parts = chunks.iter().filter(|c| c["choices"][0]["index"] == index);
            let parts = parts.filter_map(|c| c["choices"][0]["delta"]["content"].as_str());
            assert_eq!(parts.collect::<String>(), whole);
        }
    }
}

#[tokio::test]
async fn patterns_choices_and_grammars_are_enforced() {
    let server = ServerSetup::saying(STUBBORN).open().await;
    let said = async |fields: Value| {
        let body = server.chat(fields).await.json().await;
        body["choices"][0]["message"]["content"]
            .as_str()
            .unwrap_or_else(|| panic!("{body}"))
            .to_owned()
    };
    let date = said(json!({"guided_regex": "^[0-9]{4}/[01][0-9]$"})).await;
    assert!(date.len() == 7 && date.as_bytes()[4] == b'/', "{date}");
    let choice = said(json!({"structured_outputs": {"choice": ["yes \"sir\"", "no"]}})).await;
    assert!(["yes \"sir\"", "no"].contains(&&*choice), "{choice}");
    let lark =
        "start: greeting \" \" NAME \"!\"\ngreeting: \"hello\" | \"bye\"\nNAME: /[A-Z][a-z]{2}/\n";
    let greeting = said(json!({"grammar": lark})).await;
    assert!(
        greeting.starts_with("hello ") || greeting.starts_with("bye "),
        "{greeting}"
    );
    assert!(greeting.ends_with('!'), "{greeting}");
    let object = said(json!({"response_format": {"type": "json_object"}, "max_tokens": 200})).await;
    assert!(object.starts_with('{'), "{object}");
}

#[tokio::test]
async fn reasoning_precedes_the_constrained_reply() {
    let said = format!("let me see.\n</think>{STUBBORN}");
    let server = ServerSetup::saying(&said).open().await;
    let fields = json!({"enable_thinking": true, "max_tokens": 400,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema()}}});
    let body = server.chat(fields).await.json().await;
    let message = &body["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "let me see.");
    check(message["content"].as_str().unwrap());
    assert_eq!(
        body["choices"][0]["finish_details"]["close_kind"],
        "natural"
    );
}

#[tokio::test]
async fn length_limit_truncates_a_constrained_reply() {
    let server = ServerSetup::saying(STUBBORN).open().await;
    let fields = json!({"max_tokens": 9, "response_format": {"type": "json_schema", "json_schema": {"schema": schema()}}});
    let body = server.chat(fields).await.json().await;
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert!(
        body["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .starts_with('{')
    );
}

#[tokio::test]
async fn logprobs_of_a_constrained_reply_are_the_models() {
    let server = ServerSetup::saying(STUBBORN).open().await;
    let fields = json!({"logprobs": true, "top_logprobs": 1, "guided_choice": ["yes", "no"]});
    let body = server.chat(fields).await.json().await;
    let first = &body["choices"][0]["logprobs"]["content"][0];
    assert_eq!(first["top_logprobs"][0]["token"], "I", "{first}");
    assert!(first["logprob"].as_f64().unwrap() < -19.0, "{first}");
}

#[tokio::test]
async fn unsupported_schemas_are_rejected_by_name_in_each_dialect() {
    let server = ServerSetup::saying("x").open().await;
    let bad = json!({"type": "object", "properties": {"a": {"not": {"type": "null"}}}});
    let user = json!([{"role": "user", "content": "hi"}]);
    let plain = json!({"type": "json_schema", "schema": bad});
    let strict = json!({"type": "json_schema", "schema": bad, "strict": true});
    let wrapped = json!({"type": "json_schema", "json_schema": {"schema": bad, "strict": true}});
    let cases = [
        (
            "/v1/chat/completions",
            json!({"messages": user, "response_format": wrapped}),
        ),
        (
            "/v1/messages",
            json!({"messages": user, "max_tokens": 9, "output_config": {"format": plain}}),
        ),
        (
            "/v1/responses",
            json!({"input": "hi", "text": {"format": strict}}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "hi", "guided_json": bad}),
        ),
    ];
    for (path, body) in cases {
        let answer = server.post(path, &body).await;
        assert_eq!(answer.status, 400, "{path}");
        let body = answer.json().await;
        assert_eq!(body["error"]["type"], "invalid_request_error");
        let message = body["error"]["message"].as_str().unwrap();
        assert!(
            message.contains("'not'") && message.contains("#/properties/a"),
            "{path}: {message}"
        );
    }
    // Errors that only the grammar compiler finds are also the request's fault.
    for (fields, param) in [
        (json!({"guided_regex": "(a"}), "guided_regex"),
        (json!({"grammar": "start: nothing"}), "grammar"),
        (
            json!({"guided_json": {"type": "integer", "minimum": 3, "maximum": 2}}),
            "guided_json",
        ),
    ] {
        let answer = server.chat(fields).await;
        assert_eq!(answer.status, 400);
        let body = answer.json().await;
        assert_eq!(body["error"]["param"], param, "{body}");
    }
}

/// Objects that differ in their only key: after the brace, a matcher follows all of them, more than
/// its limit allows.
fn too_wide() -> Value {
    let object = |i: usize| {
        let key = format!("k{i}");
        json!({"type": "object", "properties": {key.clone(): {"const": i}}, "required": [key], "additionalProperties": false})
    };
    json!({"anyOf": (0..2500).map(object).collect::<Vec<Value>>()})
}

#[tokio::test]
async fn grammar_over_a_limit_is_rejected_before_the_stream_in_every_dialect() {
    let server = ServerSetup::saying("x").open().await;
    let schema = too_wide();
    let user = json!([{"role": "user", "content": "hi"}]);
    let format = json!({"type": "json_schema", "name": "n", "schema": schema, "strict": true});
    let wrapped = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}});
    let cases = [
        (
            "/v1/chat/completions",
            json!({"messages": user, "response_format": wrapped}),
        ),
        (
            "/v1/messages",
            json!({"messages": user, "max_tokens": 9, "output_config": {"format": format}}),
        ),
        (
            "/v1/responses",
            json!({"input": "hi", "text": {"format": format}}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "hi", "guided_json": schema}),
        ),
    ];
    for (path, mut body) in cases {
        for stream in [false, true] {
            body["stream"] = json!(stream);
            let answer = server.post(path, &body).await;
            assert_eq!(answer.status, 400, "{path}, stream {stream}");
            let error = answer.json().await["error"].clone();
            assert_eq!(error["type"], "invalid_request_error", "{path}");
            let message = error["message"].as_str().unwrap();
            assert!(
                message.contains("limit") || message.contains("max is"),
                "{path}: {message}"
            );
        }
    }
}

#[tokio::test]
async fn grammar_that_meets_a_limit_while_decoding_is_the_requests_error() {
    let server = ServerSetup::saying("aaaa").open().await;
    let rules: Vec<String> = (0..2500).map(|i| format!("r{i}")).collect();
    let bodies: Vec<String> = rules
        .iter()
        .map(|rule| format!("{rule}: first \"{rule}\" first\n"))
        .collect();
    let (rules, bodies) = (rules.join(" | "), bodies.concat());
    let lark = format!("start: {rules}\n{bodies}first: \"a\" | \"b\"\n");
    let is_named = |error: &Value| {
        assert_eq!(error["type"], "invalid_request_error", "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("max is 2000"), "{message}");
    };
    let whole = server.chat(json!({"grammar": lark})).await;
    assert_eq!(whole.status, 400);
    is_named(&whole.json().await["error"]);
    let text = json!({"prompt": "hi", "grammar": lark});
    let whole = server.post("/v1/completions", &text).await;
    assert_eq!(whole.status, 400);
    is_named(&whole.json().await["error"]);
    // The choice of the first token is the model's, so a stream has begun before.
    let streamed = server.chat(json!({"grammar": lark, "stream": true})).await;
    assert_eq!(streamed.status, 200);
    let chunks = streamed.chunks().await;
    is_named(&chunks.last().unwrap()["error"]);
}

#[tokio::test]
async fn schema_that_is_not_strict_is_kept_as_far_as_possible() {
    let server = ServerSetup::saying(STUBBORN).open().await;
    let schema = json!({"type": "object", "required": ["v"], "properties": {
        "v": {"type": "array", "items": {"type": "integer"}, "uniqueItems": true, "maxItems": 2},
    }});
    let password = json!({"type": "object", "required": ["v"], "properties": {
        "v": {"type": "string", "format": "password", "maxLength": 3}}});
    for (schema, strict) in [
        (schema.clone(), Value::Null),
        (schema, json!(false)),
        (password.clone(), Value::Null),
        (password, json!(true)),
    ] {
        let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}});
        let answer = server.chat(json!({ "response_format": format })).await;
        assert_eq!(answer.status, 200, "{schema}");
        let note = answer.header("x-hearth-note");
        let has_unique = schema.to_string().contains("uniqueItems");
        assert_eq!(
            note.is_some_and(|note| note.contains("'uniqueItems'")),
            has_unique
        );
        let text = answer.json().await["choices"][0]["message"]["content"].clone();
        let value: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
        assert!(value.get("v").is_some(), "{text}");
    }
}

#[tokio::test]
async fn every_dialect_notes_what_is_not_kept() {
    let server = ServerSetup::saying(STUBBORN).open().await;
    let schema = json!({"type": "object", "properties": {"v": {"not": {"type": "null"}}}});
    let user = json!([{"role": "user", "content": "x"}]);
    let wrapped = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    let flat = json!({"type": "json_schema", "name": "a", "schema": schema});
    let tools = json!([{"name": "f", "input_schema": schema}]);
    for (path, body) in [
        (
            "/v1/chat/completions",
            json!({"messages": user, "response_format": wrapped, "max_tokens": 5}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "x", "response_format": wrapped, "max_tokens": 5}),
        ),
        (
            "/v1/responses",
            json!({"input": "x", "text": {"format": flat}, "max_output_tokens": 5}),
        ),
        (
            "/v1/messages",
            json!({"messages": user, "max_tokens": 5, "tools": tools,
            "tool_choice": {"type": "any"}}),
        ),
    ] {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = stream.into();
            let answer = server.post(path, &body).await;
            assert_eq!(answer.status, 200, "{path}");
            let note = answer.header("x-hearth-note").unwrap_or_default();
            assert!(note.contains("'not' at #"), "{path}: {note:?}");
        }
    }
    let plain = server.chat(json!({"max_tokens": 2})).await;
    assert_eq!(plain.header("x-hearth-note"), None);
}

fn parameters() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"], "additionalProperties": false})
}

#[track_caller]
fn check_call(name: &Value, arguments: &Value) {
    assert_eq!(name, "weather");
    assert!(arguments["city"].is_string(), "{arguments}");
    assert!(
        (1..=9).contains(&arguments["days"].as_i64().unwrap()),
        "{arguments}"
    );
    assert_eq!(arguments.as_object().unwrap().len(), 2);
}

#[tokio::test]
async fn forced_tool_call_follows_its_schema_in_every_dialect() {
    for setup in [ServerSetup::saying(STUBBORN), ServerSetup::default()] {
        let server = setup.open().await;
        let user = json!([{"role": "user", "content": "hi"}]);
        let nested = json!([
            {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}},
            {"type": "function", "function": {"name": "weather", "parameters": parameters()}},
        ]);
        let chat = post(
            &server,
            "/v1/chat/completions",
            json!({"messages": user, "tools": nested,
            "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
        )
        .await;
        let choice = &chat["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{chat}");
        assert_eq!(choice["message"]["content"], Value::Null);
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1);
        let function = &calls[0]["function"];
        check_call(
            &function["name"],
            &serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap(),
        );

        let tools = json!([{"name": "weather", "input_schema": parameters()}]);
        let messages = post(
            &server,
            "/v1/messages",
            json!({"messages": user, "max_tokens": 400, "tools": tools,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": true}}),
        )
        .await;
        assert_eq!(messages["stop_reason"], "tool_use");
        let block = &messages["content"][0];
        assert_eq!(block["type"], "tool_use");
        check_call(&block["name"], &block["input"]);

        let flat = json!([{"type": "function", "name": "weather", "parameters": parameters()}]);
        let responses = post(
            &server,
            "/v1/responses",
            json!({"input": "hi", "tools": flat,
            "tool_choice": "required", "parallel_tool_calls": false}),
        )
        .await;
        let item = &responses["output"][0];
        assert_eq!(item["type"], "function_call");
        check_call(
            &item["name"],
            &serde_json::from_str(item["arguments"].as_str().unwrap()).unwrap(),
        );
    }
}

#[tokio::test]
async fn strict_tool_is_enforced_in_voluntary_calls() {
    let call = "Let me look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": 7, \"days\": \"many\"}}\n</tool_call>";
    let server = ServerSetup::saying(call).open().await;
    let tool = |strict: bool| json!([{"type": "function", "function": {"name": "weather", "strict": strict, "parameters": parameters()}}]);
    let body = server
        .chat(json!({"tools": tool(true), "max_tokens": 300}))
        .await
        .json()
        .await;
    let message = &body["choices"][0]["message"];
    assert_eq!(message["content"], "Let me look.");
    let function = &message["tool_calls"][0]["function"];
    check_call(
        &function["name"],
        &serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap(),
    );
    let body = server
        .chat(json!({"tools": tool(false), "max_tokens": 300}))
        .await
        .json()
        .await;
    let function = &body["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!(function["arguments"], "{\"city\": 7, \"days\": \"many\"}");
}

#[tokio::test]
async fn schema_and_tools_combine() {
    let wanted = json!({"type": "json_schema", "json_schema": {"schema": schema()}});
    let tools =
        json!([{"type": "function", "function": {"name": "weather", "parameters": parameters()}}]);
    let fields = json!({"response_format": wanted, "tools": tools, "max_tokens": 300});
    let server = ServerSetup::saying("<tool_call>\nhm").open().await;
    let body = server.chat(fields.clone()).await.json().await;
    assert_eq!(body["choices"][0]["finish_reason"], "tool_calls", "{body}");
    let server = ServerSetup::saying(STUBBORN).open().await;
    let body = server.chat(fields).await.json().await;
    check(body["choices"][0]["message"]["content"].as_str().unwrap());
}
