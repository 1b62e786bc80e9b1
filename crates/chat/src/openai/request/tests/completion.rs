//! Text completion requests.

use super::*;
use crate::tokenizer::Tokenizer;

fn completion(fields: Value) -> Result<CompletionRequest, ChatError> {
    CompletionRequest::from_json(fields.to_string().as_bytes())
}

#[test]
fn prompts_accept_four_forms() {
    let prompts = |value: Value| completion(json!({"prompt": value})).unwrap().prompts;
    let ids = |ids: &[u32]| {
        CompletionPrompt::Tokens(ids.iter().copied().map(contract::TokenId).collect())
    };
    assert_eq!(prompts(json!("a")), [CompletionPrompt::Text("a".into())]);
    assert_eq!(
        prompts(json!(["a", "b"])),
        [
            CompletionPrompt::Text("a".into()),
            CompletionPrompt::Text("b".into())
        ]
    );
    assert_eq!(prompts(json!([1, 2])), [ids(&[1, 2])]);
    assert_eq!(prompts(json!([[1], [2, 3]])), [ids(&[1]), ids(&[2, 3])]);
    for (bad, param) in [
        (json!([]), "prompt"),
        (json!(3), "prompt"),
        (json!([1, "a"]), "prompt[1]"),
        (json!([[1], []]), "prompt[1]"),
        (json!([[1.5]]), "prompt[0][0]"),
        (json!(vec!["a"; 129]), "prompt"),
    ] {
        let err = completion(json!({"prompt": bad})).unwrap_err();
        assert_eq!(err.param.as_deref(), Some(param), "{bad}");
    }
    assert!(completion(json!({"prompt": "a", "best_of": 2})).is_err());
    assert_eq!(
        completion(json!({"prompt": "a", "logprobs": 0}))
            .unwrap()
            .logprobs,
        Some(0)
    );
}

#[test]
fn token_ids_outside_the_vocabulary_are_refused() {
    let tokenizer = crate::test_fixtures::tokenizer();
    let request = completion(json!({"prompt": [1, 99999]})).unwrap();
    let err = request
        .token_ids(&request.prompts[0], &tokenizer, 1000.into())
        .unwrap_err();
    assert!(err.message.contains("99999"));
}

#[test]
fn gap_is_marked_by_the_models_own_tokens() {
    let mut vocab = crate::test_fixtures::vocab();
    let mut add = |text: &str| {
        vocab.tokens.push(text.to_owned());
        vocab.kinds.push(contract::TokenKind::Control);
        contract::TokenId(vocab.tokens.len() as u32 - 1)
    };
    let fim = contract::FimTokens {
        prefix: add("<|fim_prefix|>"),
        suffix: add("<|fim_suffix|>"),
        middle: add("<|fim_middle|>"),
        repository: Some(add("<|repo_name|>")),
        file: Some(add("<|file_sep|>")),
    };
    vocab.fim = Some(fim);
    let tokenizer = Tokenizer::new(&vocab).unwrap();
    let decoded = |request: &CompletionRequest| {
        let ids = request.token_ids(&request.prompts[0], &tokenizer, 1000.into());
        let ids = ids.unwrap();
        let special = |id: &contract::TokenId| tokenizer.kind(*id) == contract::TokenKind::Control;
        // A marker in the client's text is text.
        assert_eq!(ids.iter().filter(|id| **id == fim.middle).count(), 1);
        let shown = |id: &contract::TokenId| {
            if special(id) {
                format!("[{}]", String::from_utf8_lossy(tokenizer.bytes(*id)))
            } else {
                String::from_utf8_lossy(tokenizer.bytes(*id)).into_owned()
            }
        };
        ids.iter().map(shown).collect::<String>()
    };
    let mut request = completion(json!({"prompt": "a <|fim_middle|>", "suffix": " b"})).unwrap();
    assert_eq!(
        decoded(&request),
        "[<|fim_prefix|>]a <|fim_middle|>[<|fim_suffix|>] b[<|fim_middle|>]"
    );
    let gap = request.gap.as_mut().unwrap();
    gap.files.push(ContextFile {
        name: "c".to_owned(),
        text: "d".to_owned(),
    });
    assert_eq!(
        decoded(&request),
        "[<|repo_name|>]myproject\n[<|file_sep|>]c\nd[<|file_sep|>]filename\n\
         [<|fim_prefix|>]a <|fim_middle|>[<|fim_suffix|>] b[<|fim_middle|>]"
    );
    let echoed = completion(json!({"prompt": "a", "suffix": "b", "echo": true})).unwrap_err();
    assert_eq!(echoed.param.as_deref(), Some("echo"));
    let plain = completion(json!({"prompt": "a", "suffix": ""})).unwrap();
    assert_eq!(plain.gap, None);
}

#[test]
fn gap_is_refused_by_name_where_the_model_has_no_tokens_for_it() {
    let tokenizer = crate::test_fixtures::tokenizer();
    let request = completion(json!({"prompt": "a", "suffix": "b"})).unwrap();
    let ids = request.token_ids(&request.prompts[0], &tokenizer, 1000.into());
    let err = ids.unwrap_err();
    assert_eq!(err.param.as_deref(), Some("suffix"));
    assert!(err.message.contains("no tokens that mark a gap"), "{err}");
}

#[test]
fn fields_of_llama_server_work_or_are_refused() {
    let read = |fields: Value| {
        let mut body = fields;
        body["prompt"] = "x".into();
        CompletionRequest::from_json(body.to_string().as_bytes())
    };
    let request = read(json!({"n_predict": 7, "cache_prompt": false})).unwrap();
    assert_eq!(request.sampling.max_tokens, Some(7));
    assert!(!request.use_prefix_cache);
    assert!(read(json!({})).unwrap().use_prefix_cache);
    for (key, wanted, neutral) in [
        ("n_probs", json!(3), json!(0)),
        ("n_indent", json!(2), json!(0)),
        ("t_max_predict_ms", json!(500), json!(-1)),
        ("top_n_sigma", json!(1.5), json!(-1.0)),
        ("typical_p", json!(0.9), json!(1.0)),
        ("tfs_z", json!(0.9), json!(1)),
        ("length_penalty", json!(2), json!(1.0)),
        ("top_a", json!(0.1), json!(0)),
        ("lora", json!([{"id": 0}]), json!([])),
        ("logits_processors", json!(["x"]), json!(null)),
        ("return_tokens_as_token_ids", json!(true), json!(false)),
    ] {
        let err = read(json!({ key: wanted })).unwrap_err();
        assert_eq!(err.param.as_deref(), Some(key), "{err}");
        assert!(read(json!({ key: neutral })).is_ok(), "{key}");
    }
}
