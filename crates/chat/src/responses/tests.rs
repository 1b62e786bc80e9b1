use serde_json::{Value, json};

use super::response::ResponseObject;
use super::stream::{OutputItemStream, ResponsesEvent};
use super::{ClientToolName, ResponsesRequest};
use crate::conversation::Role;
use crate::error::{ChatError, ErrorKind};
use crate::reply::{ReplyDelta, Timings, Usage};
use crate::request::{ChatRequest, ResponseFormat, ToolChoice};

pub(super) fn read(body: Value) -> Result<(ChatRequest, ResponsesRequest), ChatError> {
    ResponsesRequest::from_json(body.to_string().as_bytes())
}

pub(super) fn refused(body: Value, param: &str) {
    let err = read(body.clone()).expect_err(&body.to_string());
    assert_eq!(err.kind, ErrorKind::InvalidRequest);
    assert_eq!(err.param.as_deref(), Some(param), "{body}: {err}");
}

#[test]
fn items_of_one_turn_become_one_message() {
    let (request, _) = read(json!({"instructions": "be short", "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"role": "user", "content": "read both"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": null,
         "content": [{"type": "reasoning_text", "text": "two files"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "reading"}]},
        {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": "{\"path\":\"a\"}"},
        {"type": "function_call", "call_id": "call_2", "namespace": "mcp__fs__", "name": "read", "arguments": ""},
        {"type": "function_call_output", "call_id": "call_1", "output": "A"},
        {"type": "function_call_output", "call_id": "call_2",
         "output": [{"type": "input_text", "text": "B"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "enough"}]},
        {"type": "custom_tool_call", "call_id": "call_3", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "call_3", "output": "done"},
    ]}))
    .unwrap();
    let seen: Vec<(Role, &str)> = request
        .messages
        .iter()
        .map(|message| (message.role, message.content.as_str()))
        .collect();
    assert_eq!(
        seen,
        [
            (Role::System, "be short"),
            (Role::System, "rules"),
            (Role::User, "read both"),
            (Role::Assistant, "reading"),
            (Role::Tool, "A"),
            (Role::Tool, "B"),
            (Role::Assistant, ""),
            (Role::Tool, "done"),
        ]
    );
    let first = &request.messages[3];
    assert_eq!(first.reasoning.as_deref(), Some("two files"));
    assert_eq!(first.tool_calls.len(), 2);
    assert_eq!(first.tool_calls[0].arguments["path"], "a");
    assert_eq!(first.tool_calls[1].name, "mcp__fs__read");
    assert_eq!(request.messages[5].tool_call_id.as_deref(), Some("call_2"));
    let second = &request.messages[6];
    assert_eq!(second.reasoning.as_deref(), Some("enough"));
    assert_eq!(second.tool_calls[0].arguments["input"], "*** Begin");
}

#[test]
fn consecutive_replies_stay_separate() {
    let (request, _) = read(json!({"input": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]}))
    .unwrap();
    assert_eq!(request.messages.len(), 3);
    assert!(!request.continue_final_message);
}

#[test]
fn instructions_without_input_are_accepted() {
    let (request, _) = read(json!({"instructions": "x", "max_output_tokens": 1})).unwrap();
    assert_eq!(request.messages.last().unwrap().role, Role::User);
    assert_eq!(request.sampling.max_tokens, Some(1));
    refused(json!({}), "input");
}

#[test]
fn tools_become_functions_or_are_skipped() {
    let (request, own) = read(json!({"input": "x", "tool_choice": "auto", "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "strict": false,
         "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
        {"type": "custom", "name": "patch", "description": "Edits.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
        {"type": "namespace", "name": "mcp__fs", "description": "Files.", "tools": [
            {"type": "function", "name": "read", "parameters": {"type": "object"}}]},
        {"type": "web_search"}, {"type": "local_shell"}, {"type": "image_generation"},
        {"type": "tomorrows_tool", "name": "x"},
    ]}))
    .unwrap();
    let names: Vec<&str> = request
        .tools
        .iter()
        .map(|tool| tool.name.as_str())
        .collect();
    assert_eq!(names, ["shell", "patch", "mcp__fs__read"]);
    let patch = &request.tools[1].declaration["function"];
    let description = patch["description"].as_str().unwrap();
    assert!(description.starts_with("Edits.") && description.contains("start: x"));
    assert_eq!(patch["parameters"]["required"], json!(["input"]));
    assert_eq!(
        own.names.client_name("mcp__fs__read"),
        ClientToolName::Function {
            name: "read".to_owned(),
            namespace: Some("mcp__fs".to_owned()),
        }
    );
    let patch = "patch".to_owned();
    assert_eq!(
        own.names.client_name("patch"),
        ClientToolName::Custom { name: patch }
    );
}

#[test]
fn tool_choice_effort_and_format_are_translated() {
    let tools = json!([{"type": "function", "name": "shell"}]);
    let choice = json!({"type": "function", "name": "shell"});
    let schema = json!({"type": "object"});
    let (request, own) = read(json!({
        "input": "x", "tools": tools, "tool_choice": choice, "parallel_tool_calls": false,
        "reasoning": {"effort": "low", "summary": "auto"}, "store": false,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": {"a": 1},
        "text": {"verbosity": "low",
                 "format": {"type": "json_schema", "name": "n", "schema": schema, "strict": true}},
    }))
    .unwrap();
    assert_eq!(request.tool_choice, ToolChoice::Named("shell".to_owned()));
    assert!(!request.parallel_tool_calls);
    let ResponseFormat::JsonSchema {
        schema: found,
        field,
        ..
    } = request.response_format
    else {
        panic!("{:?}", request.response_format);
    };
    assert_eq!((found, &*field), (schema, "text.format.schema"));
    assert_eq!(request.thinking.enable, Some(true));
    assert_eq!(request.cache.group.as_deref(), Some("k"));
    assert!(own.summary);
}

#[test]
fn stateful_and_image_requests_name_the_field() {
    refused(
        json!({"input": "x", "previous_response_id": "resp_1"}),
        "previous_response_id",
    );
    refused(
        json!({"input": "x", "conversation": "conv_1"}),
        "conversation",
    );
    refused(json!({"input": "x", "background": true}), "background");
    refused(json!({"input": "x", "prompt": {"id": "p"}}), "prompt");
    refused(json!({"input": 7}), "input");
    refused(
        json!({"input": [{"role": "wizard", "content": ""}]}),
        "input[0].role",
    );
    let image = json!([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]);
    refused(json!({"input": image}), "input[0].content[0]");
    let tools = json!([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]);
    refused(
        json!({"input": "x", "tools": tools}),
        "tools[0].tools[0].name",
    );
    assert!(read(json!({"input": "x", "previous_response_id": null, "background": false})).is_ok());
}

/// Events of a reply to a request with these tools, checked for what holds of every stream.
fn events(
    fields: Value,
    pieces: Vec<ReplyDelta>,
    hit_token_limit: bool,
) -> (Vec<ResponsesEvent>, Value) {
    let mut body = json!({"input": "x"});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    let (_, own) = read(body).unwrap();
    let mut items = OutputItemStream::new(own.names, own.summary, "stem".to_owned());
    let mut events: Vec<ResponsesEvent> = pieces
        .into_iter()
        .flat_map(|piece| items.push(piece))
        .collect();
    events.extend(items.finish(hit_token_limit));
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event.data["type"], event.name);
        assert_eq!(event.data["sequence_number"], number);
    }
    let of = |name: &str| -> Vec<u64> {
        let of = events.iter().filter(|event| event.name == name);
        of.map(|event| event.data["output_index"].as_u64().unwrap())
            .collect()
    };
    let added = of("response.output_item.added");
    assert_eq!(added, of("response.output_item.done"));
    assert_eq!(added, (0..added.len() as u64).collect::<Vec<u64>>());
    let answer = ResponseObject {
        id: "resp_1".to_owned(),
        created_at: 0,
        model: "m".to_owned(),
        echo: own.echo,
    };
    assert_eq!(answer.in_progress().get("timings"), None);
    let took = (
        Usage {
            prompt_tokens: 5,
            cached_tokens: 2,
            completion_tokens: 7,
            reasoning_tokens: 3,
            ..Usage::default()
        },
        Timings::new(12.34, 500.0, 6),
    );
    let whole = answer.completed(hit_token_limit, items.done(), took, 9);
    (events, whole)
}

fn names(events: &[ResponsesEvent]) -> Vec<&str> {
    events
        .iter()
        .map(|event| event.name.strip_prefix("response.").unwrap())
        .collect()
}

fn call(index: usize, name: &str, fragments: &[&str]) -> Vec<ReplyDelta> {
    let mut pieces = vec![ReplyDelta::ToolCall {
        index,
        id: format!("call_{index}"),
        name: name.to_owned(),
    }];
    pieces.extend(fragments.iter().map(|fragment| ReplyDelta::ToolArguments {
        index,
        fragment: (*fragment).to_owned(),
    }));
    pieces
}

#[test]
fn reasoning_text_and_calls_become_items_in_order() {
    let mut pieces = vec![
        ReplyDelta::Reasoning("hm".to_owned()),
        ReplyDelta::Content("a".to_owned()),
        ReplyDelta::Content("b".to_owned()),
    ];
    pieces.extend(call(0, "ns__f", &["{\"x\":", "1}"]));
    let tools =
        json!([{"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f"}]}]);
    let (events, whole) = events(json!({ "tools": tools }), pieces, false);
    assert_eq!(
        names(&events),
        [
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ]
    );
    let output = &whole["output"];
    assert_eq!(
        output[0]["content"],
        json!([{"type": "reasoning_text", "text": "hm"}])
    );
    assert_eq!(output[0]["summary"], json!([]));
    assert_eq!(output[1]["content"][0]["text"], "ab");
    let done = &events[17].data["item"];
    assert_eq!(done, &output[2]);
    assert_eq!(done["name"], "f");
    assert_eq!(done["namespace"], "ns");
    assert_eq!(done["call_id"], "call_0");
    assert_eq!(done["arguments"], "{\"x\":1}");
    assert_eq!(done["id"], events[13].data["item"]["id"]);
    assert_eq!(whole["status"], "completed");
    assert_eq!(
        whole["usage"]["output_tokens_details"]["reasoning_tokens"],
        3
    );
    assert_eq!(whole["usage"]["input_tokens_details"]["cached_tokens"], 2);
    assert_eq!(
        whole["timings"],
        json!({"prefill_ms": 12.3, "decode_ms": 500.0, "decode_tokens_per_sec": 12.0})
    );
}

#[test]
fn reasoning_is_a_summary_when_requested() {
    let fields = json!({"reasoning": {"summary": "auto"}});
    let (events, whole) = events(fields, vec![ReplyDelta::Reasoning("hm".to_owned())], false);
    assert_eq!(
        names(&events),
        [
            "output_item.added",
            "reasoning_summary_part.added",
            "reasoning_summary_text.delta",
            "reasoning_summary_text.done",
            "reasoning_summary_part.done",
            "output_item.done",
        ]
    );
    assert_eq!(events[2].data["summary_index"], 0);
    let summary = json!([{"type": "summary_text", "text": "hm"}]);
    assert_eq!(whole["output"][0]["summary"], summary);
}

#[test]
fn custom_tool_input_is_unwrapped() {
    let tools = json!([{"type": "custom", "name": "patch"}]);
    let pieces = call(0, "patch", &["{\"input\": \"a\\n", "b\"}"]);
    let (events, whole) = events(json!({ "tools": tools }), pieces, false);
    assert_eq!(
        names(&events),
        [
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
        ]
    );
    assert_eq!(whole["output"][0]["type"], "custom_tool_call");
    assert_eq!(whole["output"][0]["input"], "a\nb");
}

#[test]
fn reply_at_the_token_limit_is_incomplete() {
    let (_, whole) = events(json!({}), vec![ReplyDelta::Content("a".to_owned())], true);
    assert_eq!(whole["status"], "incomplete");
    assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(whole["output"][0]["status"], "incomplete");
}

#[test]
fn every_field_of_the_resource_has_its_type() {
    let asked = json!({"tools": [{"type": "function", "name": "f"}], "truncation": "auto",
        "max_tool_calls": 3, "safety_identifier": "s", "prompt_cache_key": "k",
        "service_tier": "auto", "text": {"verbosity": "low"}, "temperature": "0.5"});
    for (fields, is_asked) in [(json!({}), false), (asked, true)] {
        let (_, whole) = events(fields, vec![ReplyDelta::Reasoning("a".to_owned())], false);
        for key in [
            "id",
            "object",
            "status",
            "model",
            "truncation",
            "service_tier",
        ] {
            assert!(whole[key].is_string(), "{key}: {whole}");
        }
        for key in [
            "created_at",
            "completed_at",
            "temperature",
            "top_p",
            "presence_penalty",
            "frequency_penalty",
            "top_logprobs",
        ] {
            assert!(whole[key].is_number(), "{key}: {whole}");
        }
        for key in ["background", "store", "parallel_tool_calls"] {
            assert!(whole[key].is_boolean(), "{key}: {whole}");
        }
        for key in ["max_tool_calls", "safety_identifier", "prompt_cache_key"] {
            assert_eq!(
                whole.get(key).map(Value::is_null),
                Some(!is_asked),
                "{key}: {whole}"
            );
        }
        for key in [
            "error",
            "incomplete_details",
            "instructions",
            "previous_response_id",
        ] {
            assert_eq!(whole.get(key), Some(&Value::Null), "{key}: {whole}");
        }
        assert_eq!(whole["text"]["format"]["type"], "text");
        assert_eq!(whole["service_tier"], "default");
        assert_eq!(
            whole["truncation"],
            if is_asked { "auto" } else { "disabled" }
        );
        assert_eq!(
            whole["usage"]["input_tokens_details"]["cache_write_tokens"],
            0
        );
        assert!(whole["output"][0].get("encrypted_content").is_none());
        if is_asked {
            let tool = json!({"type": "function", "name": "f", "description": null,
                "parameters": null, "strict": false});
            assert_eq!(whole["tools"], json!([tool]));
            assert_eq!(whole["temperature"], 0.5);
        }
    }
    refused(json!({"input": "x", "truncation": "middle"}), "truncation");
    refused(
        json!({"input": "x", "service_tier": "best"}),
        "service_tier",
    );
    refused(json!({"input": "x", "max_tool_calls": 0}), "max_tool_calls");
}

#[test]
fn incomplete_response_is_not_completed() {
    let (_, whole) = events(json!({}), vec![ReplyDelta::Content("a".to_owned())], true);
    assert_eq!(whole["completed_at"], Value::Null);
}

#[test]
fn item_reference_is_not_found() {
    let input =
        json!([{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]);
    let err = read(json!({ "input": input })).unwrap_err();
    assert_eq!(err.kind, ErrorKind::NotFound);
    assert_eq!(err.param.as_deref(), Some("input"));
    assert!(err.message.contains("'msg_1'"), "{err}");
}

#[test]
fn strict_tools_are_strict() {
    for (strict, expected) in [
        (json!(true), true),
        (json!(false), false),
        (Value::Null, false),
    ] {
        let tools = json!([{"type": "function", "name": "f", "strict": strict}]);
        let (request, _) = read(json!({"input": "x", "tools": tools})).unwrap();
        assert_eq!(request.tools[0].is_strict(), expected, "{strict}");
    }
}

#[test]
fn image_in_a_tool_result_becomes_a_placeholder() {
    let image =
        json!([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}]);
    for output in [image.clone(), json!({ "content": image })] {
        let input = json!([
            {"role": "user", "content": "x"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": output},
        ]);
        let (request, _) = read(json!({ "input": input })).unwrap();
        let result = &request.messages[2].content;
        assert_eq!(result, "a[image left out: this model reads text only]");
    }
}

#[test]
fn reasoning_switches_are_those_of_chat() {
    for (fields, enable) in [
        (json!({"reasoning": false}), Some(false)),
        (json!({"reasoning": {"enabled": false}}), Some(false)),
        (json!({"think": false}), Some(false)),
        (json!({"reasoning": {"summary": "auto"}}), None),
        (json!({"reasoning": {"exclude": true}}), None),
        (json!({"reasoning": {"effort": "none"}}), Some(false)),
        (json!({"reasoning_budget_tokens": 0}), Some(false)),
    ] {
        let mut body = fields.clone();
        body["input"] = json!("x");
        assert_eq!(read(body).unwrap().0.thinking.enable, enable, "{fields}");
    }
}
