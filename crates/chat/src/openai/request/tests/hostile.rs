//! Hostile request bodies.

use crate::grammar::ToolCallMarkup;
use crate::template::ToolCallFormat;
use proptest::prelude::*;

use super::*;

#[test]
fn hostile_bodies_are_request_errors() {
    let deep = format!(
        "{{\"messages\":{}1{}}}",
        "[".repeat(10_000),
        "]".repeat(10_000)
    );
    for body in [
        deep.as_bytes(),
        b"",
        b"null",
        b"[]",
        b"{\"messages\":",
        b"{\"messages\":\"\xff\xfe\"}",
        b"{\"messages\":[{\"role\":\"user\",\"content\":\"\\ud800\"}]}",
    ] {
        for err in [
            chat_request(body).unwrap_err(),
            CompletionRequest::from_json(body).unwrap_err(),
        ] {
            assert_eq!(err.kind, ErrorKind::InvalidRequest);
            assert!(!err.message.is_empty());
        }
    }
    let many = vec![json!({"role": "user", "content": ""}); MAX_MESSAGES + 1];
    assert!(
        with_messages(Value::Array(many))
            .unwrap_err()
            .message
            .contains("16384")
    );
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z_]{0,8}".prop_map(Value::from),
        prop::sample::select(vec![
            "user",
            "assistant",
            "tool",
            "function",
            "text",
            "auto",
            "enabled"
        ])
        .prop_map(Value::from),
    ];
    let keys = prop::sample::select(vec![
        "role",
        "content",
        "type",
        "text",
        "function",
        "name",
        "arguments",
        "tool_calls",
        "parameters",
        "mode",
        "tools",
        "schema",
        "effort",
        "scope",
        "x",
    ]);
    leaf.prop_recursive(4, 40, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((keys.clone(), inner), 0..5).prop_map(|pairs| {
                Value::Object(
                    pairs
                        .into_iter()
                        .map(|(key, value)| (key.to_owned(), value))
                        .collect(),
                )
            }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn arbitrary_json_in_known_fields_never_panics(
        fields in prop::collection::vec(
            (
                prop::sample::select(vec![
                    "messages", "tools", "tool_choice", "functions", "function_call", "stop", "n",
                    "seed", "logit_bias", "thinking", "reasoning", "response_format", "prompt",
                    "chat_template_kwargs", "stream_options", "prefix_cache", "stop_token_ids",
                    "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "prompt_logprobs",
                    "max_tokens", "top_k", "rep_window", "priority", "extra_body", "suffix",
                ]),
                any_json(),
            ),
            0..6,
        ),
    ) {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "prompt": "p"});
        for (key, value) in fields {
            body[key] = value;
        }
        let bytes = body.to_string().into_bytes();
        if let Ok(request) = chat_request(&bytes) {
            let tokenizer = crate::test_fixtures::tokenizer();
            for format in [ToolCallFormat::JsonInTags, ToolCallFormat::XmlParameters] {
                let _ = request.output_grammar(ToolCallMarkup { tokenizer: &tokenizer, format });
            }
            let _ = request.callable_tools();
            prop_assert!(request.conversation(&ConversationPolicy::default()).is_ok());
        }
        let _ = CompletionRequest::from_json(&bytes);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = chat_request(&bytes);
        let _ = CompletionRequest::from_json(&bytes);
    }
}
