use serde_json::{Value, json};

use super::*;
use crate::conversation::Role;
use crate::error::{ChatError, ErrorKind};
use crate::request::*;

mod completion;
mod hostile;
mod tokens;

fn chat(fields: Value) -> Result<ChatRequest, ChatError> {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    chat_request(body.to_string().as_bytes())
}

/// The request must be refused, naming `param`, with `words` in the message.
fn refused(fields: Value, param: &str, words: &str) {
    let shown = fields.to_string();
    let err = chat(fields).expect_err(&shown);
    assert_eq!(err.kind, ErrorKind::InvalidRequest, "{shown}");
    assert_eq!(err.param.as_deref(), Some(param), "{shown}: {err}");
    assert!(err.message.contains(words), "{shown}: {err}");
}

#[test]
fn null_equals_absent_for_every_field() {
    let keys = [
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "rep_window",
        "seed",
        "stop",
        "stop_token_ids",
        "n",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "reasoning_effort",
        "reasoning",
        "thinking",
        "enable_thinking",
        "chat_template_kwargs",
        "reasoning_format",
        "add_generation_prompt",
        "continue_final_message",
        "prefix_cache",
        "cache_prompt",
        "session_id",
        "prompt_cache_key",
        "ignore_eos",
        "min_tokens",
        "priority",
        "return_progress",
        "timings_per_token",
        "functions",
        "function_call",
        "audio",
        "grammar",
        "extra_body",
        "thinking_budget",
        "echo",
        "allowed_token_ids",
        "bad_words",
        "include_stop_str_in_output",
        "truncate_prompt_tokens",
        "truncation_side",
        "prompt_logprobs",
        "return_token_ids",
        "skip_special_tokens",
    ];
    let plain = chat(json!({})).unwrap();
    for key in keys {
        assert_eq!(chat(json!({key: null})).unwrap(), plain, "{key}");
    }
}

#[test]
fn unknown_fields_are_ignored() {
    let request = chat(json!({"user": "u", "metadata": {"a": 1}, "zzz": [1, {"b": null}]}));
    assert_eq!(request.unwrap(), chat(json!({})).unwrap());
}

#[test]
fn integral_floats_are_integers_and_texts_of_numbers_are_numbers() {
    assert_eq!(
        chat(json!({"max_tokens": 32.0}))
            .unwrap()
            .sampling
            .max_tokens,
        Some(32)
    );
    refused(json!({"max_tokens": 32.5}), "max_tokens", "an integer");
    let texts = json!({"max_tokens": "20", "temperature": " 0.5", "seed": "7", "n": "2"});
    let sampling = chat(texts).unwrap().sampling;
    assert_eq!(sampling.max_tokens, Some(20));
    assert_eq!(sampling.temperature, Some(0.5));
    assert_eq!((sampling.seed, sampling.n), (Some(7), 2));
    refused(json!({"max_tokens": "many"}), "max_tokens", "not a string");
    refused(json!({"temperature": ""}), "temperature", "not a string");
    refused(json!({"stream": "true"}), "stream", "true or false");
}

#[test]
fn out_of_range_values_name_the_field() {
    for (key, good, bad) in [
        ("temperature", json!([0, 2.5, 100]), json!([-0.1, 1e300])),
        ("top_p", json!([0, 1, 0.01]), json!([1.1, -1])),
        ("top_k", json!([0, -1, -2, 40]), json!([1.5])),
        ("min_p", json!([0, 0.99, 1.0]), json!([1.1, -0.1])),
        ("frequency_penalty", json!([-2, 2.01]), json!([1e39, "x"])),
        ("presence_penalty", json!([-3, 2]), json!([-1e39, []])),
        (
            "repetition_penalty",
            json!([1.1, 0.5]),
            json!([0, -1, 1e-60]),
        ),
        ("rep_window", json!([-1, 0, 64]), json!([-2])),
        ("n", json!([1, 9, 128]), json!([0, 129, -1])),
        ("min_tokens", json!([0, 5]), json!([-1])),
        (
            "seed",
            json!([-5, 0, 18446744073709551615u64]),
            json!([1.5, 1e30]),
        ),
        ("priority", json!([-3, 3]), json!([3000000000u64])),
        (
            "stop_token_ids",
            json!([[1, 2]]),
            json!([[-1], ["a"], [4294967296u64]]),
        ),
        (
            "logit_bias",
            json!([{"5": -100}, {"5": 101}, {"5": false}]),
            json!([{"5": 1e39}, {"x": 1}, {"-1": 1}, [1], {"5": true}]),
        ),
    ] {
        for value in good.as_array().unwrap() {
            chat(json!({key: value})).unwrap_or_else(|err| panic!("{key} {value}: {err}"));
        }
        for value in bad.as_array().unwrap() {
            let err = chat(json!({key: value})).expect_err(&format!("{key} {value}"));
            assert!(err.param.unwrap().starts_with(key), "{key} {value}");
        }
    }
}

#[test]
fn first_length_alias_wins_and_definite_lengths_are_kept() {
    let length = |fields| chat(fields).unwrap().sampling.max_tokens;
    assert_eq!(
        length(json!({"max_completion_tokens": 5, "max_tokens": 7})),
        Some(5)
    );
    assert_eq!(
        length(json!({"max_completion_tokens": null, "max_tokens": 7})),
        Some(7)
    );
    assert_eq!(length(json!({"max_output_tokens": 9})), Some(9));
    assert_eq!(length(json!({"max_tokens": 0})), Some(0));
    assert_eq!(length(json!({"max_tokens": -1})), Some(usize::MAX));
    refused(json!({"max_tokens": -2}), "max_tokens", "-2");
}

#[test]
fn negative_seed_means_random() {
    assert_eq!(chat(json!({"seed": -1})).unwrap().sampling.seed, None);
    assert_eq!(chat(json!({"seed": 7.0})).unwrap().sampling.seed, Some(7));
}

#[test]
fn stop_accepts_one_to_many_strings() {
    assert_eq!(chat(json!({"stop": "a"})).unwrap().sampling.stop, ["a"]);
    assert_eq!(
        chat(json!({"stop": ["a", "b"]})).unwrap().sampling.stop,
        ["a", "b"]
    );
    refused(json!({"stop": ""}), "stop", "empty");
    refused(json!({"stop": ["a", ""]}), "stop[1]", "empty");
    let many = chat(json!({"stop": vec!["a"; 17]})).unwrap();
    assert_eq!(many.sampling.stop.len(), 17);
    assert!(chat(json!({"stop": []})).unwrap().sampling.stop.is_empty());
    refused(json!({"stop": vec!["a"; 1025]}), "stop", "1024");
    refused(json!({"stop": 3}), "stop", "a string");
}

#[test]
fn top_logprobs_requires_logprobs() {
    assert_eq!(chat(json!({"logprobs": true})).unwrap().logprobs, Some(0));
    assert_eq!(
        chat(json!({"logprobs": true, "top_logprobs": 20}))
            .unwrap()
            .logprobs,
        Some(20)
    );
    refused(json!({"top_logprobs": 3}), "top_logprobs", "logprobs");
    refused(
        json!({"logprobs": true, "top_logprobs": 21}),
        "top_logprobs",
        "20",
    );
}

fn with_messages(messages: Value) -> Result<ChatRequest, ChatError> {
    chat_request(json!({"messages": messages}).to_string().as_bytes())
}

#[test]
fn invalid_messages_name_the_field() {
    for (messages, param, words) in [
        (json!([]), "messages", "at least one"),
        (json!("hi"), "messages", "an array"),
        (json!([{"content": "x"}]), "messages[0].role", "missing"),
        (
            json!([{"role": "wizard", "content": "x"}]),
            "messages[0].role",
            "unknown role 'wizard'",
        ),
        (
            json!([{"role": "user", "content": 3}]),
            "messages[0].content",
            "a string",
        ),
        (
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            "messages[0].content[0]",
            "unsupported content part 'image_url'",
        ),
        (
            json!([{"role": "user", "content": [{"type": "input_audio"}]}]),
            "messages[0].content[0]",
            "unsupported content part 'input_audio'",
        ),
        (
            json!([{"role": "assistant", "tool_calls": [{"function": {}}]}]),
            "messages[0].tool_calls[0].function.name",
            "missing",
        ),
    ] {
        let err = with_messages(messages.clone()).expect_err(&messages.to_string());
        assert_eq!(err.param.as_deref(), Some(param), "{messages}: {err}");
        assert!(err.message.contains(words), "{messages}: {err}");
    }
    let err = chat_request(b"{}").unwrap_err();
    assert_eq!(err.param.as_deref(), Some("messages"));
}

#[test]
fn message_variants_become_one_form() {
    let request = with_messages(json!([
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]},
        {"role": "assistant", "content": null, "reasoning": "hm", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}},
            {"id": "3", "type": "function", "function": {"name": "h", "arguments": {"y": 2}}},
            {"id": "4", "type": "function", "function": {"name": "i", "arguments": "not json"}},
        ]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}]},
        {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "43"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "output_text", "text": "o"}]},
    ]))
    .unwrap();
    let messages = &request.messages;
    assert_eq!(messages[0].role, Role::System);
    assert_eq!(messages[1].content, "abc");
    assert_eq!(messages[2].content, "");
    assert_eq!(messages[2].reasoning.as_deref(), Some("hm"));
    let arguments: Vec<Value> = messages[2]
        .tool_calls
        .iter()
        .map(|call| Value::Object(call.arguments.clone()))
        .collect();
    assert_eq!(
        arguments,
        [
            json!({"x": 1}),
            json!({}),
            json!({"y": 2}),
            json!({"_raw": "not json"})
        ]
    );
    assert_eq!(messages[3].content, "42");
    assert_eq!(messages[3].tool_call_id.as_deref(), Some("1"));
    assert_eq!(messages[4].tool_calls[0].name, "f");
    assert_eq!(
        (messages[5].role, messages[5].name.as_deref()),
        (Role::Tool, Some("f"))
    );
    assert_eq!(messages[6].reasoning.as_deref(), Some("t"));
    assert_eq!(messages[6].content, "o");
}

#[test]
fn tools_keep_key_order_and_legacy_functions_are_wrapped() {
    let request = chat(json!({"tools": [
        {"type": "function", "function": {"parameters": {"z": 1, "a": 2}, "name": "f"}},
    ]}))
    .unwrap();
    assert_eq!(
        request.tools[0].declaration.to_string(),
        r#"{"type":"function","function":{"parameters":{"z":1,"a":2},"name":"f"}}"#
    );
    let legacy = chat(json!({"functions": [{"name": "f"}], "function_call": "auto"})).unwrap();
    assert_eq!(
        legacy.tools[0].declaration,
        json!({"type": "function", "function": {"name": "f"}})
    );
    refused(
        json!({"tools": [{"type": "custom"}]}),
        "tools[0].type",
        "'custom'",
    );
    refused(
        json!({"tools": [{"type": "function", "function": {}}]}),
        "tools[0].function.name",
        "missing",
    );
    refused(
        json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}),
        "tools[0].function.parameters",
        "an object",
    );
}

#[test]
fn tool_choice_accepts_every_spelling() {
    let tool = json!([{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]);
    let choice = |value: Value| chat(json!({"tools": tool, "tool_choice": value})).unwrap();
    assert_eq!(choice(json!("none")).tool_choice, ToolChoice::None);
    assert!(choice(json!("none")).callable_tools().is_empty());
    assert_eq!(choice(json!("any")).tool_choice, ToolChoice::Required);
    for named in [
        json!({"type": "function", "function": {"name": "g"}}),
        json!({"type": "function", "name": "g"}),
        json!({"type": "tool", "name": "g"}),
        json!({"name": "g"}),
    ] {
        assert_eq!(choice(named).tool_choice, ToolChoice::Named("g".to_owned()));
    }
    let allowed = choice(json!({"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}));
    assert_eq!(allowed.tools.len(), 2, "all stay in the prompt");
    assert!(allowed.callable_tools().find("g").is_some());
    assert!(allowed.callable_tools().find("f").is_none());
    refused(
        json!({"tools": tool, "tool_choice": {"name": "h"}}),
        "tool_choice",
        "\"h\"",
    );
    refused(json!({"tool_choice": "required"}), "tool_choice", "no");
    refused(
        json!({"tools": tool, "tool_choice": "maybe"}),
        "tool_choice",
        "maybe",
    );
}

#[test]
fn response_format_accepts_every_spelling() {
    let format = |fields: Value| chat(fields).unwrap().response_format;
    let schema = json!({"type": "integer"});
    let schema_in = |field: &str, strictness| ResponseFormat::JsonSchema {
        schema: schema.clone(),
        strictness,
        field: field.to_owned(),
    };
    let kept = |field: &str| schema_in(field, SchemaStrictness::Strict);
    let object = json!({"response_format": {"type": "json_object"}});
    assert_eq!(format(object), ResponseFormat::JsonObject);
    let of =
        |inner: Value| json!({"response_format": {"type": "json_schema", "json_schema": inner}});
    let field = "response_format.json_schema.schema";
    for (strict, strictness) in [
        (Value::Null, SchemaStrictness::BestEffort),
        (json!(false), SchemaStrictness::BestEffort),
        (json!(true), SchemaStrictness::Strict),
    ] {
        let format = format(of(json!({"name": "n", "schema": schema, "strict": strict})));
        assert_eq!(format, schema_in(field, strictness));
    }
    for name in ["guided_json", "json_schema"] {
        assert_eq!(format(json!({name: schema})), kept(name));
        assert_eq!(format(json!({name: schema.to_string()})), kept(name));
    }
    assert_eq!(
        format(json!({"structured_outputs": {"json": schema}})),
        kept("structured_outputs.json")
    );
    assert_eq!(
        format(json!({"guided_regex": "a+", "guided_json": null})),
        ResponseFormat::Regex {
            pattern: "a+".to_owned(),
            field: "guided_regex".to_owned()
        }
    );
    assert_eq!(
        format(json!({"guided_choice": ["a", "b"]})),
        ResponseFormat::Choice {
            texts: vec!["a".to_owned(), "b".to_owned()],
            field: "guided_choice".to_owned()
        }
    );
    refused(
        json!({"response_format": {"type": "yaml"}}),
        "response_format.type",
        "yaml",
    );
    refused(
        json!({"response_format": {"type": "json_schema"}}),
        "response_format.json_schema",
        "schema",
    );
    refused(json!({"guided_choice": []}), "guided_choice", "1 to");
    refused(json!({"guided_choice": [1]}), "guided_choice[0]", "string");
    refused(json!({"grammar": "root ::= \"a"}), "grammar", "line 1");
    refused(
        json!({"grammar": "start: /a/", "guided_regex": "a"}),
        "guided_regex",
        "one shape",
    );
    for (older, newer, pattern) in [
        (json!("a"), json!({"regex": "a"}), "a"),
        (json!("a"), json!({"regex": "b"}), "b"),
        (json!("a"), json!({}), "a"),
        (Value::Null, json!({"regex": "b"}), "b"),
    ] {
        let both = format(json!({"guided_regex": older, "structured_outputs": newer}));
        assert!(
            matches!(&both, ResponseFormat::Regex { pattern: got, .. } if got == pattern),
            "{both:?}"
        );
    }
    let twice = format(json!({"guided_json": schema, "json_schema": schema}));
    assert_eq!(twice, kept("json_schema"));
    refused(
        json!({"structured_outputs": {"regex": "a", "json": schema}}),
        "structured_outputs.regex",
        "one shape",
    );
}

#[test]
fn highest_precedence_source_enables_reasoning() {
    let enable = |fields| chat(fields).unwrap().thinking.enable;
    assert_eq!(enable(json!({})), None);
    for silent in [
        json!({"reasoning": {}}),
        json!({"reasoning": {"exclude": true}}),
        json!({"reasoning": {"summary": "auto"}}),
        json!({"thinking": {"display": "omitted"}}),
        json!({"include_reasoning": false}),
        json!({"reasoning_budget_tokens": -1}),
    ] {
        assert_eq!(enable(silent.clone()), None, "{silent}");
    }
    for off in [
        json!({"reasoning": false}),
        json!({"reasoning": "none"}),
        json!({"reasoning": {"enabled": false}}),
        json!({"reasoning": {"effort": "none"}}),
        json!({"reasoning": {"max_tokens": 0}}),
        json!({"reasoning_budget_tokens": 0}),
        json!({"reasoning_budget": 0}),
        json!({"thinking_budget": 0}),
        json!({"think": false}),
        json!({"thinking": false}),
        json!({"enable_thinking": false}),
        json!({"reasoning_effort": "off"}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
        json!({"chat_template_kwargs": {"thinking": false}}),
    ] {
        assert_eq!(enable(off.clone()), Some(false), "{off}");
    }
    for on in [
        json!({"reasoning": true}),
        json!({"reasoning": "high"}),
        json!({"reasoning": {"enabled": true}}),
        json!({"reasoning": {"max_tokens": 100}}),
        json!({"think": true}),
        json!({"think": "low"}),
        json!({"thinking": true}),
    ] {
        assert_eq!(enable(on.clone()), Some(true), "{on}");
    }
    let budget = |fields| chat(fields).unwrap().thinking.budget_tokens;
    assert_eq!(budget(json!({"reasoning_budget_tokens": 9})), Some(9));
    assert_eq!(budget(json!({"reasoning": {"max_tokens": 9}})), Some(9));
    let visibility = |fields| chat(fields).unwrap().thinking.visibility;
    for excluded in [
        json!({"reasoning": {"exclude": true}}),
        json!({"include_reasoning": false}),
    ] {
        assert_eq!(visibility(excluded), ReasoningVisibility::Excluded);
    }
    refused(json!({"reasoning": [1]}), "reasoning", "an effort");
    refused(json!({"think": 3}), "think", "an effort");
    assert_eq!(enable(json!({"reasoning_effort": "none"})), Some(false));
    assert_eq!(enable(json!({"reasoning_effort": "low"})), Some(true));
    assert_eq!(
        enable(json!({"reasoning_effort": "low", "thinking": {"type": "disabled"}})),
        Some(false)
    );
    assert_eq!(
        enable(json!({"enable_thinking": true, "thinking": {"type": "disabled"}})),
        Some(true)
    );
    assert_eq!(
        enable(
            json!({"enable_thinking": true, "chat_template_kwargs": {"enable_thinking": false}})
        ),
        Some(false)
    );
    assert_eq!(
        enable(json!({"thinking": {"type": "enabled", "budget_tokens": 0}})),
        Some(false)
    );
    let thinking = chat(json!({"reasoning": {"effort": "x-high"}, "thinking_budget": 100}))
        .unwrap()
        .thinking;
    assert_eq!(
        thinking.effort,
        Some(crate::conversation::ReasoningEffort::XHigh)
    );
    assert_eq!(thinking.budget_tokens, Some(100));
    refused(
        json!({"thinking": {"type": "loud"}}),
        "thinking.type",
        "loud",
    );
    refused(
        json!({"chat_template_kwargs": {"messages": []}}),
        "chat_template_kwargs.messages",
        "reserved",
    );
}

#[test]
fn continue_final_message_requires_an_assistant_message() {
    refused(
        json!({"continue_final_message": true}),
        "continue_final_message",
        "assistant",
    );
}

#[test]
fn image_in_a_tool_result_becomes_a_placeholder() {
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}});
    let request = with_messages(json!([
        {"role": "user", "content": "x"},
        {"role": "tool", "content": [{"type": "text", "text": "a"}, image]},
    ]))
    .unwrap();
    let expected = "a[image left out: this model reads text only]";
    assert_eq!(request.messages[1].content, expected);
    let err = with_messages(json!([{"role": "user", "content": [image]}])).unwrap_err();
    assert!(err.message.contains("Could not process image"), "{err}");
}

#[test]
fn usage_that_is_not_wanted_is_not_sent_in_between() {
    for (include, continuous) in [
        (json!(null), true),
        (json!(true), true),
        (json!(false), false),
    ] {
        let options = json!({"include_usage": include, "continuous_usage_stats": true});
        let request = chat(json!({ "stream_options": options })).unwrap();
        assert_eq!(request.stream_options.continuous_usage_stats, continuous);
    }
}
