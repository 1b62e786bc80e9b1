use serde_json::{Value, json};

use super::*;
use crate::openai::response::{AssistantMessage, ReasoningField};
use crate::reply::Reply;
use crate::reply::{TokenLogprob, TopLogprob};

fn json_of(value: impl Serialize) -> Value {
    serde_json::to_value(value).unwrap()
}

fn pieces() -> Vec<ReplyDelta> {
    vec![
        ReplyDelta::Reasoning("hm".into()),
        ReplyDelta::Content("so".into()),
        ReplyDelta::ToolCall {
            index: 0,
            id: "call_1".into(),
            name: "f".into(),
        },
        ReplyDelta::ToolArguments {
            index: 0,
            fragment: "{\"x\":".into(),
        },
        ReplyDelta::ToolArguments {
            index: 0,
            fragment: " 1}".into(),
        },
    ]
}

#[test]
fn deltas_match_the_protocol() {
    let deltas: Vec<Value> = pieces()
        .into_iter()
        .map(|piece| json_of(Delta::new(piece, ReasoningField::default())))
        .collect();
    assert_eq!(
        deltas,
        [
            json!({"reasoning_content": "hm"}),
            json!({"content": "so"}),
            json!({"tool_calls": [{"index": 0, "id": "call_1", "type": "function",
                "function": {"name": "f", "arguments": ""}}]}),
            json!({"tool_calls": [{"index": 0, "function": {"arguments": "{\"x\":"}}]}),
            json!({"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]}),
        ]
    );
    assert_eq!(
        json_of(Delta::first()),
        json!({"role": "assistant", "content": ""})
    );
    assert_eq!(json_of(Delta::default()), json!({}));
}

#[test]
fn usage_is_absent_null_or_present() {
    let mut chunk = ChatChunk {
        id: "chatcmpl-1",
        object: ChatChunk::OBJECT,
        created: 1,
        model: "m",
        system_fingerprint: None,
        choices: Vec::new(),
        usage: UsageField::Absent,
        timings: None,
        prompt_token_ids: None,
        prompt_progress: None,
    };
    assert_eq!(json_of(&chunk).get("usage"), None);
    chunk.usage = UsageField::Null;
    assert_eq!(json_of(&chunk).get("usage"), Some(&Value::Null));
    chunk.usage = UsageField::Counts(Usage {
        prompt_tokens: 3,
        cached_tokens: 1,
        completion_tokens: 2,
        reasoning_tokens: 1,
        ..Usage::default()
    });
    assert_eq!(
        json_of(&chunk)["usage"],
        json!({
            "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 1},
        })
    );
}

#[test]
fn message_omits_empty_lists_and_has_null_content_beside_calls() {
    let mut reply = Reply::default();
    reply.extend(pieces());
    assert_eq!(
        json_of(AssistantMessage::new(reply, ReasoningField::default())),
        json!({
            "role": "assistant", "content": "so", "reasoning_content": "hm",
            "tool_calls": [{"id": "call_1", "type": "function",
                "function": {"name": "f", "arguments": "{\"x\": 1}"}}],
        })
    );
    assert_eq!(
        json_of(AssistantMessage::new(
            Reply::default(),
            ReasoningField::default()
        )),
        json!({"role": "assistant", "content": ""})
    );
    let mut calls = Reply::default();
    calls.extend(pieces().into_iter().skip(2));
    assert_eq!(
        json_of(AssistantMessage::new(calls, ReasoningField::default()))["content"],
        Value::Null
    );
}

#[test]
fn logprobs_are_finite_and_carry_bytes() {
    let token = TokenLogprob {
        token: TopLogprob::new(&[0xc3], f32::NEG_INFINITY),
        top_logprobs: vec![TopLogprob::new(b"a", -0.5)],
    };
    assert_eq!(
        json_of(token),
        json!({
            "token": "\u{fffd}", "logprob": -9999.0, "bytes": [195],
            "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
        })
    );
}

#[test]
fn reasoning_comes_under_the_chosen_name() {
    let hm = || ReplyDelta::Reasoning("hm".into());
    for (field, expected) in [
        (
            ReasoningField::ReasoningContent,
            json!({"reasoning_content": "hm"}),
        ),
        (ReasoningField::Reasoning, json!({"reasoning": "hm"})),
        (
            ReasoningField::Both,
            json!({"reasoning_content": "hm", "reasoning": "hm"}),
        ),
    ] {
        assert_eq!(json_of(Delta::new(hm(), field)), expected);
        let mut reply = Reply::default();
        reply.push(hm());
        let mut whole = json_of(AssistantMessage::new(reply, field));
        for key in ["role", "content"] {
            whole.as_object_mut().unwrap().remove(key);
        }
        assert_eq!(whole, expected);
    }
}

#[test]
fn blank_content_beside_calls_is_null() {
    let mut reply = Reply::default();
    reply.extend(pieces());
    for (content, expected) in [(" \n\n", Value::Null), ("x ", json!("x "))] {
        reply.content = content.to_owned();
        let message = AssistantMessage::new(reply.clone(), ReasoningField::default());
        assert_eq!(json_of(message)["content"], expected);
    }
}
