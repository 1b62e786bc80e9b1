use serde_json::{Value, json};

use super::chat_request;
use super::response::{StopReason, content_blocks};
use super::stream::ContentBlockStream;
use crate::conversation::{Message, Role};
use crate::error::{ChatError, ErrorKind};
use crate::reply::{FinishReason, Reply, ReplyDelta};
use crate::request::{
    ChatRequest, ConversationPolicy, LateSystem, ReasoningVisibility, ResponseFormat, ToolChoice,
};

fn read(fields: Value) -> Result<ChatRequest, ChatError> {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    chat_request(body.to_string().as_bytes())
}

fn refused(fields: Value, param: &str) {
    let err = read(fields.clone()).expect_err(&fields.to_string());
    assert_eq!(err.kind, ErrorKind::InvalidRequest);
    assert_eq!(err.param.as_deref(), Some(param), "{fields}: {err}");
}

fn roles(messages: &[Message]) -> Vec<(Role, &str)> {
    messages
        .iter()
        .map(|message| (message.role, message.content.as_str()))
        .collect()
}

#[test]
fn tool_results_precede_the_text_of_their_message() {
    let read = read(json!({"system": "be short", "messages": [
        {"role": "user", "content": "read a and b"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "two files", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "reading"},
            {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a", "n": 1}},
            {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"path": "b"}},
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "and now?"},
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "A"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": true,
             "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "such file"}]},
        ]},
    ]}))
    .unwrap();
    assert_eq!(
        roles(&read.messages),
        [
            (Role::System, "be short"),
            (Role::User, "read a and b"),
            (Role::Assistant, "reading"),
            (Role::Tool, "A"),
            (Role::Tool, "no\nsuch file"),
            (Role::User, "and now?"),
        ]
    );
    let assistant = &read.messages[2];
    assert_eq!(assistant.reasoning.as_deref(), Some("two files"));
    assert_eq!(assistant.tool_calls.len(), 2);
    assert_eq!(assistant.tool_calls[0].id.as_deref(), Some("toolu_1"));
    assert_eq!(assistant.tool_calls[0].arguments["n"], 1);
    assert_eq!(read.messages[3].tool_call_id.as_deref(), Some("toolu_1"));
    assert!(!read.continue_final_message);
}

#[test]
fn tool_results_alone_add_no_user_message() {
    let read = read(json!({"messages": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "x", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
    ]}))
    .unwrap();
    assert_eq!(read.messages.len(), 3);
    assert_eq!(read.messages[2].role, Role::Tool);
}

#[test]
fn billing_blocks_are_removed_from_system_text_only() {
    let line = "x-anthropic-billing-header: cc_version=2; cch=1a;";
    let read = read(json!({"system": [
        {"type": "text", "text": format!(" {line}\nrest of the block")},
        {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ], "messages": [
        {"role": "user", "content": line},
        {"role": "system", "content": [{"type": "text", "text": line}, {"type": "text", "text": "late"}]},
    ]}))
    .unwrap();
    assert_eq!(
        roles(&read.messages),
        [
            (Role::System, "You help.\nBe kind."),
            (Role::User, line),
            (Role::System, "late"),
        ]
    );
    let policy = ConversationPolicy {
        late_system: LateSystem::User,
        ..ConversationPolicy::default()
    };
    let conversation = read.conversation(&policy).unwrap();
    assert_eq!(conversation.messages[2].role, Role::User);
}

#[test]
fn client_tools_become_functions_and_server_tools_are_skipped() {
    let read = read(json!({"tools": [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"name": "Read", "description": "Reads.", "defer_loading": true,
         "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
         "cache_control": {"type": "ephemeral"}},
        {"type": "custom", "name": "Now", "input_schema": {"type": "object"}},
    ], "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}}))
    .unwrap();
    assert_eq!(read.tools.len(), 2);
    assert_eq!(
        read.tools[0].declaration,
        json!({"type": "function", "function": {"name": "Read", "description": "Reads.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}})
    );
    assert!(!read.parallel_tool_calls);
    assert!(read.callable_tools().find("Read").is_some());
}

#[test]
fn tool_choice_and_format_are_translated() {
    let tools = json!([{"name": "Read", "input_schema": {"type": "object"}}]);
    let choice = |choice: Value| {
        let fields = json!({"tools": tools, "tool_choice": choice});
        read(fields).unwrap().tool_choice
    };
    assert_eq!(choice(json!({"type": "any"})), ToolChoice::Required);
    assert_eq!(choice(json!({"type": "none"})), ToolChoice::None);
    assert_eq!(
        choice(json!({"type": "tool", "name": "Read"})),
        ToolChoice::Named("Read".to_owned())
    );
    let schema = json!({"type": "object"});
    let format = json!({"format": {"type": "json_schema", "schema": schema}, "effort": "low"});
    let read = read(json!({"output_config": format})).unwrap();
    assert!(
        matches!(&read.response_format, ResponseFormat::JsonSchema { schema: found, .. } if
            *found == schema)
    );
    assert_eq!(read.thinking.enable, Some(true));
}

#[test]
fn undocumented_fields_are_accepted() {
    let read = read(json!({
        "model": "claude-x", "max_tokens": 32000, "stop_sequences": ["END"], "temperature": null,
        "thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"},
        "context_management": {"edits": []}, "betas": ["x"], "service_tier": "auto",
        "metadata": {"user_id": "user_1"}, "n": 3,
    }))
    .unwrap();
    assert_eq!(read.sampling.max_tokens, Some(32000));
    assert_eq!(read.sampling.stop, ["END"]);
    assert_eq!(read.sampling.n, 1);
    assert_eq!(read.thinking.enable, Some(true));
    assert_eq!(read.cache.group.as_deref(), Some("user_1"));
}

#[test]
fn thinking_is_returned_unless_omitted() {
    for (display, omitted) in [
        ("omitted", true),
        ("summarized", false),
        ("full", false),
        ("updates", false),
    ] {
        let thinking = json!({"thinking": {"type": "adaptive", "display": display}});
        assert_eq!(
            read(thinking).unwrap().thinking.visibility == ReasoningVisibility::Omitted,
            omitted,
            "{display}"
        );
    }
}

#[test]
fn final_assistant_message_is_continued() {
    let turns = |last: Value| json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": last}]});
    assert!(read(turns(json!("I say"))).unwrap().continue_final_message);
    let call = json!([{"type": "tool_use", "id": "t", "name": "x", "input": {}}]);
    refused(turns(call), "messages");
}

#[test]
fn invalid_requests_name_the_field() {
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    refused(json!({"messages": []}), "messages");
    refused(json!({"messages": null}), "messages");
    refused(
        json!({"messages": [{"role": "wizard", "content": ""}]}),
        "messages[0].role",
    );
    refused(user(json!(7)), "messages[0].content");
    refused(
        user(json!([{"type": "image", "source": {}}])),
        "messages[0].content[0]",
    );
    refused(
        user(json!([{"type": "document", "source": {"type": "base64"}}])),
        "messages[0].content[0].source.type",
    );
    refused(json!({"tools": [{"input_schema": {}}]}), "tools[0].name");
    refused(
        json!({"tool_choice": {"type": "tool", "name": "x"}}),
        "tool_choice",
    );
    refused(json!({"stop_sequences": [""]}), "stop_sequences[0]");
}

fn events(pieces: Vec<ReplyDelta>) -> Vec<Value> {
    let mut stream = ContentBlockStream::new("sig".to_owned());
    let mut events: Vec<_> = pieces
        .into_iter()
        .flat_map(|piece| stream.push(piece))
        .collect();
    events.extend(stream.finish());
    events
        .iter()
        .map(|event| {
            let json = serde_json::to_value(event).unwrap();
            assert_eq!(json["type"], event.name());
            json
        })
        .collect()
}

fn call(index: usize, id: &str, name: &str) -> ReplyDelta {
    let (id, name) = (id.to_owned(), name.to_owned());
    ReplyDelta::ToolCall { index, id, name }
}

fn arguments(index: usize, fragment: &str) -> ReplyDelta {
    let fragment = fragment.to_owned();
    ReplyDelta::ToolArguments { index, fragment }
}

#[test]
fn blocks_open_late_close_once_and_are_numbered() {
    let events = events(vec![
        ReplyDelta::Reasoning("hm".to_owned()),
        ReplyDelta::Content("a".to_owned()),
        ReplyDelta::Content("b".to_owned()),
        call(0, "call_12", "Read"),
        arguments(0, "{\"path\": "),
        arguments(0, "\"a\"}"),
        call(1, "call_34", "Now"),
        arguments(1, "{}"),
    ]);
    let shown: Vec<(&str, u64)> = events
        .iter()
        .map(|e| (e["type"].as_str().unwrap(), e["index"].as_u64().unwrap()))
        .collect();
    let (start, delta, stop) = (
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    );
    assert_eq!(
        shown,
        [
            (start, 0),
            (delta, 0),
            (delta, 0),
            (stop, 0),
            (start, 1),
            (delta, 1),
            (delta, 1),
            (stop, 1),
            (start, 2),
            (delta, 2),
            (delta, 2),
            (stop, 2),
            (start, 3),
            (delta, 3),
            (stop, 3),
        ]
    );
    assert_eq!(
        events[0]["content_block"],
        json!({"type": "thinking", "thinking": "", "signature": ""})
    );
    assert_eq!(
        events[2]["delta"],
        json!({"type": "signature_delta", "signature": "sig"})
    );
    assert_eq!(
        events[8]["content_block"],
        json!({"type": "tool_use", "id": "toolu_12", "name": "Read", "input": {}})
    );
    assert_eq!(
        events[9]["delta"],
        json!({"type": "input_json_delta", "partial_json": "{\"path\": "})
    );
}

#[test]
fn empty_reply_has_no_blocks() {
    assert_eq!(events(Vec::new()), Vec::<Value>::new());
    assert!(content_blocks(Reply::default(), "s", ReasoningVisibility::Shown).is_empty());
}

#[test]
fn whole_reply_equals_its_stream() {
    let mut reply = Reply::default();
    reply.extend([
        ReplyDelta::Reasoning("hm".to_owned()),
        ReplyDelta::Content("a".to_owned()),
        call(0, "call_12", "Read"),
        arguments(0, "{\"path\": \"a\"}"),
        call(1, "call_34", "Read"),
        arguments(1, "{\"pa"),
    ]);
    let blocks =
        serde_json::to_value(content_blocks(reply, "sig", ReasoningVisibility::Shown)).unwrap();
    assert_eq!(
        blocks,
        json!([
            {"type": "thinking", "thinking": "hm", "signature": "sig"},
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "toolu_12", "name": "Read", "input": {"path": "a"}},
        ])
    );
}

#[test]
fn stop_reasons_are_translated() {
    for (reason, stop, expected) in [
        (FinishReason::Stop, None, StopReason::EndTurn),
        (FinishReason::Stop, Some("x"), StopReason::StopSequence),
        (FinishReason::Length, None, StopReason::MaxTokens),
        (FinishReason::ToolCalls, None, StopReason::ToolUse),
    ] {
        assert_eq!(StopReason::new(reason, stop), expected);
    }
}

#[test]
fn strict_tools_are_strict() {
    for (strict, expected) in [
        (json!(true), true),
        (json!(false), false),
        (Value::Null, false),
    ] {
        let tools = json!([{"name": "f", "input_schema": {"type": "object"}, "strict": strict}]);
        let request = read(json!({ "tools": tools })).unwrap();
        assert_eq!(request.tools[0].is_strict(), expected, "{strict}");
    }
}

#[test]
fn image_in_a_tool_result_becomes_a_placeholder() {
    let image = json!({"type": "image", "source": {"type": "base64", "data": "iVBORw0KGgo="}});
    let pdf = json!({"type": "document", "source": {"type": "base64", "data": "JVBERi0="}});
    let result = json!([{"type": "text", "text": "a"}, image, pdf]);
    let request = read(json!({"messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": result}]},
    ]}))
    .unwrap();
    let left_out = |what: &str| format!("[{what} left out: this model reads text only]");
    let expected = format!("a\n{}\n{}", left_out("image"), left_out("document"));
    assert_eq!(request.messages[2].content, expected);
    let message = json!({"messages": [{"role": "user", "content": [image]}]});
    let err = read(message).unwrap_err();
    assert!(err.message.contains("Could not process image"), "{err}");
}

#[test]
fn thinking_is_shown_only_when_asked_for() {
    for (fields, shown) in [
        (json!({}), false),
        (json!({"thinking": {"type": "disabled"}}), false),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}),
            true,
        ),
        (json!({"thinking": {"type": "adaptive"}}), true),
        (
            json!({"reasoning": {"exclude": true}, "enable_thinking": true}),
            false,
        ),
        (json!({"reasoning": false}), false),
        (json!({"think": true}), true),
        (json!({"reasoning_effort": "low"}), true),
    ] {
        let visibility = read(fields.clone()).unwrap().thinking.visibility;
        assert_eq!(visibility == ReasoningVisibility::Shown, shown, "{fields}");
    }
    let reply = || {
        let mut reply = Reply::default();
        reply.push(ReplyDelta::Reasoning("hm".into()));
        reply.push(ReplyDelta::Content("hi".into()));
        reply
    };
    let blocks = content_blocks(reply(), "s", ReasoningVisibility::Excluded);
    assert_eq!(json!(blocks), json!([{"type": "text", "text": "hi"}]));
    let mut stream =
        ContentBlockStream::new("s".into()).with_reasoning(ReasoningVisibility::Excluded);
    assert_eq!(stream.push(ReplyDelta::Reasoning("hm".into())), []);
}
