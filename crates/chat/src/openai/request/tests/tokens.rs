//! Fields of vLLM over tokens: what is refused, and what is read.

use serde_json::json;

use super::*;
use crate::anthropic;
use crate::responses::ResponsesRequest;

#[test]
fn unsupported_sampling_is_refused_and_neutral_values_pass() {
    for (key, wanted) in [
        ("use_beam_search", json!(true)),
        ("logprob_token_ids", json!([1])),
        ("documents", json!([{"text": "a"}])),
        ("chat_template", json!("{{ messages }}")),
        ("repetition_detection", json!({"max_pattern_size": 4})),
        ("dry_multiplier", json!(0.8)),
        ("xtc_probability", json!(0.5)),
        ("mirostat", json!(2)),
    ] {
        refused(json!({ key: wanted }), key, "not supported");
        for neutral in [json!(null), json!(false), json!(0), json!(0.0), json!([])] {
            assert!(chat(json!({ key: neutral })).is_ok(), "{key}: {neutral}");
        }
    }
}

#[test]
fn control_tokens_are_never_shown_as_text() {
    refused(
        json!({"skip_special_tokens": false}),
        "skip_special_tokens",
        "not supported",
    );
    assert!(chat(json!({"skip_special_tokens": true})).is_ok());
}

#[test]
fn allowed_tokens_and_bad_words_are_read_or_refused_by_place() {
    let fields = json!({"allowed_token_ids": [3, 1.0], "bad_words": ["a b"],
        "include_stop_str_in_output": true});
    let sampling = chat(fields).unwrap().sampling;
    let ids = vec![contract::TokenId(3), contract::TokenId(1)];
    assert_eq!(sampling.allowed_token_ids, Some(ids));
    assert_eq!(sampling.bad_words, ["a b"]);
    assert!(sampling.include_stop);
    refused(
        json!({"allowed_token_ids": []}),
        "allowed_token_ids",
        "empty",
    );
    refused(
        json!({"allowed_token_ids": [-1]}),
        "allowed_token_ids[0]",
        "token id",
    );
    refused(json!({"bad_words": ["a", ""]}), "bad_words[1]", "empty");
    refused(json!({"bad_words": [7]}), "bad_words[0]", "a string");
    let sampling = chat(json!({"bad_words": []})).unwrap().sampling;
    assert!(sampling.bad_words.is_empty() && sampling.allowed_token_ids.is_none());
}

#[test]
fn truncation_is_read_in_every_dialect() {
    let expected = |keep, side| Some(PromptTruncation { keep, side });
    let fields = json!({"truncate_prompt_tokens": 7, "truncation_side": "right"});
    let tokens = chat(fields).unwrap().tokens;
    assert_eq!(tokens.truncation, expected(Some(7), TruncationSide::Right));
    let body = json!({"input": "x", "truncate_prompt_tokens": -1}).to_string();
    let (request, _) = ResponsesRequest::from_json(body.as_bytes()).unwrap();
    let to_room = expected(None, TruncationSide::Left);
    assert_eq!(request.tokens.truncation, to_room);
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4,
        "truncate_prompt_tokens": -1})
    .to_string();
    let request = anthropic::chat_request(body.as_bytes()).unwrap();
    assert_eq!(request.tokens.truncation, to_room);
    refused(
        json!({"truncate_prompt_tokens": -2}),
        "truncate_prompt_tokens",
        "between -1",
    );
    refused(
        json!({"truncation_side": "top"}),
        "truncation_side",
        "left or right",
    );
}

#[test]
fn prompt_logprobs_are_not_streamed() {
    let tokens = chat(json!({"prompt_logprobs": 0, "return_token_ids": true}))
        .unwrap()
        .tokens;
    assert_eq!(
        (tokens.prompt_logprobs, tokens.return_token_ids),
        (Some(0), true)
    );
    let fields = json!({"prompt_logprobs": 1, "stream": true});
    refused(fields, "prompt_logprobs", "stream");
    refused(json!({"prompt_logprobs": 21}), "prompt_logprobs", "20");
}

#[test]
fn dialects_without_a_place_for_tokens_refuse_them() {
    for (key, wanted) in [
        ("prompt_logprobs", json!(0)),
        ("return_token_ids", json!(true)),
        ("echo", json!(true)),
    ] {
        let mut body = json!({"input": "x"});
        body[key] = wanted.clone();
        let error = ResponsesRequest::from_json(body.to_string().as_bytes()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(key), "{error}");
        let mut body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4});
        body[key] = wanted;
        let error = anthropic::chat_request(body.to_string().as_bytes()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(key), "{error}");
    }
}

#[test]
fn echo_is_the_last_message_if_the_reply_has_its_role() {
    let messages = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]);
    for (fields, expected) in [
        (json!({"echo": true, "messages": messages}), Some("a")),
        (json!({"messages": messages}), None),
        (json!({"echo": true}), None),
        (
            json!({"echo": true, "add_generation_prompt": false}),
            Some("hi"),
        ),
        (
            json!({"echo": true, "messages": messages, "continue_final_message": true}),
            Some("a"),
        ),
    ] {
        let request = chat(fields.clone()).unwrap();
        assert_eq!(request.echoed(), expected, "{fields}");
    }
}
