use contract::TokenId;
use serde_json::{Value, json};

use super::infill::infill_request;
use super::request::{LlamaServerFields, completion_request};
use super::response::StopType;
use crate::error::ChatError;
use crate::openai::request::{CompletionPrompt, CompletionRequest, ContextFile};
use crate::openai::response::MatchedStop;
use crate::reply::FinishReason;

fn read(body: Value) -> Result<(CompletionRequest, LlamaServerFields), ChatError> {
    completion_request(body.to_string().as_bytes())
}

fn refused(body: Value, param: &str, words: &str) {
    let error = read(body.clone()).expect_err(&body.to_string());
    assert_eq!(error.param.as_deref(), Some(param), "{body}: {error}");
    assert!(error.message.contains(words), "{body}: {error}");
}

#[test]
fn names_of_llama_server_become_those_of_a_completion() {
    let body = json!({"prompt": "a", "n_predict": 7, "n_probs": 3, "return_tokens": true,
        "id_slot": 2, "n_cmpl": 2, "logit_bias": [[5, 1.5], [6, false]], "cache_prompt": false,
        "repeat_penalty": 1.25, "stop": ["x"], "samplers": [], "seed": -1, "echo": true});
    let (request, own) = read(body).unwrap();
    assert_eq!(request.sampling.max_tokens, Some(7));
    assert_eq!(request.sampling.n, 2);
    assert_eq!(request.sampling.repetition_penalty, Some(1.25));
    assert_eq!(
        request.sampling.logit_bias,
        [(TokenId(5), 1.5), (TokenId(6), -100.0)]
    );
    assert_eq!(request.logprobs, Some(3));
    assert!(!request.use_prefix_cache && !request.echo && request.tokens.return_token_ids);
    assert_eq!((own.id_slot, own.return_tokens), (2, true));
    let (request, own) = read(json!({"prompt": "a", "n_probs": 0})).unwrap();
    assert_eq!(request.sampling.max_tokens, Some(usize::MAX));
    assert_eq!(request.logprobs, None);
    assert_eq!(own.id_slot, -1);
}

#[test]
fn prompts_are_texts_tokens_or_both() {
    let text = |text: &str| CompletionPrompt::Text(text.to_owned());
    let token = |id| CompletionPrompt::Tokens(vec![TokenId(id)]);
    for (prompt, expected) in [
        (json!("a"), vec![text("a")]),
        (json!(["a", "b"]), vec![text("a"), text("b")]),
        (
            json!([1, 2]),
            vec![CompletionPrompt::Mixed(vec![token(1), token(2)])],
        ),
        (
            json!([1, "b"]),
            vec![CompletionPrompt::Mixed(vec![token(1), text("b")])],
        ),
        (
            json!(["a", [3, "c"], {"prompt_string": "d"}]),
            vec![
                text("a"),
                CompletionPrompt::Mixed(vec![token(3), text("c")]),
                text("d"),
            ],
        ),
    ] {
        let (request, _) = read(json!({ "prompt": prompt })).unwrap();
        assert_eq!(request.prompts, expected, "{prompt}");
    }
    refused(json!({}), "prompt", "missing");
    refused(json!({"prompt": []}), "prompt", "empty");
    refused(json!({"prompt": [1, true]}), "prompt[1]", "token id");
    refused(json!({"prompt": ["a", []]}), "prompt[1]", "empty");
    let image = json!({"prompt": {"prompt_string": "a", "multimodal_data": ["AA=="]}});
    refused(image, "prompt", "Could not process image");
}

#[test]
fn fields_that_would_change_the_reply_are_refused() {
    for (key, wanted) in [
        ("samplers", json!(["top_k"])),
        ("post_sampling_probs", json!(true)),
        ("min_keep", json!(2)),
        ("mirostat", json!(1)),
        ("t_max_predict_ms", json!(5)),
    ] {
        let mut body = json!({"prompt": "a"});
        body[key] = wanted;
        refused(body, key, "not supported");
    }
    refused(json!({"prompt": "a", "n_probs": 21}), "n_probs", "20");
    refused(
        json!({"prompt": "a", "logit_bias": [["x", 1]]}),
        "logit_bias[0]",
        "token ids",
    );
    refused(
        json!({"prompt": "a", "logit_bias": [[1]]}),
        "logit_bias[0]",
        "a bias",
    );
}

fn infill(body: Value) -> Result<(CompletionRequest, LlamaServerFields), ChatError> {
    infill_request(body.to_string().as_bytes())
}

#[test]
fn infill_is_a_completion_with_a_gap() {
    let body = json!({"input_prefix": "fn a(", "prompt": "x: ", "input_suffix": ")",
        "input_extra": [{"filename": "b.rs", "text": "fn b() {}"}, {"text": "c"}],
        "n_predict": 9, "samplers": ["top_k", "infill"], "n_indent": 0, "t_max_predict_ms": 500,
        "response_fields": ["content", "timings/prompt_n"]});
    let (request, own) = infill(body).unwrap();
    assert_eq!(
        request.prompts,
        [CompletionPrompt::Text("fn a(x: ".to_owned())]
    );
    let file = |name: &str, text: &str| ContextFile {
        name: name.to_owned(),
        text: text.to_owned(),
    };
    let gap = request.gap.unwrap();
    assert_eq!(gap.suffix, ")");
    assert_eq!(gap.files, [file("b.rs", "fn b() {}"), file("tmp", "c")]);
    assert_eq!(request.sampling.max_tokens, Some(9));
    assert_eq!(
        own.notes,
        ["samplers: left out", "t_max_predict_ms: left out"]
    );
    assert_eq!(own.response_fields, ["content", "timings/prompt_n"]);
    for (body, param) in [
        (json!({"input_suffix": ""}), "input_prefix"),
        (json!({"input_prefix": ""}), "input_suffix"),
        (
            json!({"input_prefix": "", "input_suffix": "", "prompt": [1]}),
            "prompt",
        ),
        (
            json!({"input_prefix": "", "input_suffix": "", "input_extra": [{}]}),
            "input_extra[0].text",
        ),
        (
            json!({"input_prefix": "", "input_suffix": "", "input_extra": ["a"]}),
            "input_extra[0]",
        ),
        (
            json!({"input_prefix": "", "input_suffix": "", "response_fields": [1]}),
            "response_fields[0]",
        ),
    ] {
        let error = infill(body.clone()).expect_err(&body.to_string());
        assert_eq!(error.param.as_deref(), Some(param), "{body}: {error}");
    }
}

#[test]
fn stop_type_says_what_ended_the_text() {
    let word = MatchedStop::Text("x".to_owned());
    let token = MatchedStop::Token(1);
    for (reason, matched, expected) in [
        (FinishReason::Stop, None, "eos"),
        (FinishReason::Stop, Some(&token), "eos"),
        (FinishReason::Stop, Some(&word), "word"),
        (FinishReason::Length, None, "limit"),
    ] {
        assert_eq!(json!(StopType::new(reason, matched)), expected);
    }
}
