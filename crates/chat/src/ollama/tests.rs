use std::time::Duration;

use serde_json::{Value, json};

use super::request::{
    OllamaFields, OllamaTask, chat_request, completion_request, generate_request,
};
use super::response::{DoneReason, OllamaContent, OllamaEnding, OllamaReply};
use crate::conversation::{ReasoningEffort, Role};
use crate::error::ChatError;
use crate::openai::request::CompletionPrompt;
use crate::request::{ChatRequest, ResponseFormat};

fn bytes(body: &Value) -> Vec<u8> {
    body.to_string().into_bytes()
}

fn chat(fields: Value) -> Result<(ChatRequest, OllamaFields), ChatError> {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    chat_request(&bytes(&body))
}

#[test]
fn options_become_sampling_and_a_stream_is_the_default() {
    let (request, own) = chat(json!({"options": {"temperature": 0.5, "num_predict": 7,
        "num_ctx": 4096, "top_k": 3, "repeat_penalty": 1.25, "stop": ["x"], "num_gpu": 99}}))
    .unwrap();
    assert!(request.stream);
    assert_eq!(request.sampling.temperature, Some(0.5));
    assert_eq!(request.sampling.max_tokens, Some(7));
    assert_eq!(request.sampling.top_k, Some(3));
    assert_eq!(request.sampling.repetition_penalty, Some(1.25));
    assert_eq!(request.sampling.stop, ["x"]);
    assert_eq!(own.num_ctx, Some(4096));
    for options in [
        json!({}),
        json!({"num_predict": -1}),
        json!({"num_predict": -2}),
    ] {
        let (request, _) = chat(json!({"stream": false, "options": options})).unwrap();
        assert!(!request.stream);
        assert_eq!(request.sampling.max_tokens, Some(usize::MAX));
    }
}

#[test]
fn messages_carry_thinking_calls_and_results() {
    let messages = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u", "images": []},
        {"role": "assistant", "content": "", "thinking": "t",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "r", "tool_name": "f"},
    ]);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let (request, _) =
        chat(json!({"messages": messages, "tools": tools, "think": "high"})).unwrap();
    let roles: Vec<Role> = request
        .messages
        .iter()
        .map(|message| message.role)
        .collect();
    assert_eq!(
        roles,
        [Role::System, Role::User, Role::Assistant, Role::Tool]
    );
    let assistant = &request.messages[2];
    assert_eq!(assistant.reasoning.as_deref(), Some("t"));
    assert_eq!(assistant.tool_calls[0].name, "f");
    assert_eq!(assistant.tool_calls[0].arguments["a"], 1);
    assert_eq!(request.messages[3].name.as_deref(), Some("f"));
    assert_eq!(request.thinking.enable, Some(true));
    assert_eq!(request.thinking.effort, Some(ReasoningEffort::High));
    assert_eq!(request.tools.len(), 1);
}

#[test]
fn format_is_json_or_a_schema() {
    let format = |format: Value| chat(json!({"format": format})).unwrap().0.response_format;
    assert_eq!(format(json!("")), ResponseFormat::Text);
    assert_eq!(format(json!("json")), ResponseFormat::JsonObject);
    let schema = format(json!({"type": "object"}));
    assert!(
        matches!(schema, ResponseFormat::JsonSchema { field, .. } if field == "format"),
        "a schema"
    );
}

#[test]
fn wrong_and_unsupported_fields_are_refused_by_name() {
    let generate = |body: Value| generate_request(&bytes(&body)).map(|_| ());
    let raw = |body: Value| completion_request(&bytes(&body)).map(|_| ());
    let image = json!([{"role": "user", "content": "a", "images": ["AA=="]}]);
    for (error, param) in [
        (
            chat(json!({"messages": image})).map(|_| ()),
            "messages[0].images",
        ),
        (chat(json!({"format": "xml"})).map(|_| ()), "format"),
        (chat(json!({"format": 1})).map(|_| ()), "format"),
        (
            chat(json!({"options": {"temperature": "hot"}})).map(|_| ()),
            "options.temperature",
        ),
        (
            chat(json!({"options": {"num_predict": "x"}})).map(|_| ()),
            "options.num_predict",
        ),
        (
            chat(json!({"options": {"mirostat": 1}})).map(|_| ()),
            "options.mirostat",
        ),
        (chat(json!({"options": []})).map(|_| ()), "options"),
        (chat(json!({"stream": "yes"})).map(|_| ()), "stream"),
        (chat(json!({"top_logprobs": 2})).map(|_| ()), "top_logprobs"),
        (
            generate(json!({"prompt": "a", "images": ["AA=="]})),
            "images",
        ),
        (
            generate(json!({"prompt": "a", "template": "{{ x }}"})),
            "template",
        ),
        (generate(json!({"prompt": "a", "context": [1]})), "context"),
        (
            raw(json!({"prompt": "a", "raw": true, "system": "s"})),
            "system",
        ),
    ] {
        let error = error.expect_err(param);
        assert_eq!(error.param.as_deref(), Some(param), "{error}");
    }
}

#[test]
fn generate_is_a_conversation_a_completion_or_a_load() {
    let task = |body: Value| OllamaTask::of_generate(&bytes(&body)).unwrap();
    assert_eq!(task(json!({})), OllamaTask::Load);
    assert_eq!(task(json!({"prompt": ""})), OllamaTask::Load);
    assert_eq!(task(json!({"prompt": "a"})), OllamaTask::Chat);
    assert_eq!(
        task(json!({"prompt": "a", "raw": true})),
        OllamaTask::Completion
    );
    assert_eq!(
        task(json!({"prompt": "a", "suffix": "b"})),
        OllamaTask::Completion
    );
    let of_chat = |body: Value| OllamaTask::of_chat(&bytes(&body)).unwrap();
    assert_eq!(of_chat(json!({"messages": []})), OllamaTask::Load);
    assert_eq!(of_chat(json!({"messages": [{}]})), OllamaTask::Chat);
    let body = json!({"prompt": "p", "system": "s"});
    let (request, _) = generate_request(&bytes(&body)).unwrap();
    let texts: Vec<&str> = request
        .messages
        .iter()
        .map(|m| m.content.as_str())
        .collect();
    assert_eq!(texts, ["s", "p"]);
    let body = json!({"prompt": "p", "suffix": "s", "options": {"seed": 3}, "stream": false});
    let (request, _) = completion_request(&bytes(&body)).unwrap();
    assert_eq!(request.prompts, [CompletionPrompt::Text("p".to_owned())]);
    assert_eq!(request.gap.unwrap().suffix, "s");
    assert_eq!(request.sampling.seed, Some(3));
    assert!(!request.stream);
}

#[test]
fn last_line_has_the_statistics_in_nanoseconds() {
    let reply = OllamaReply {
        model: "m".to_owned(),
        created_at: "t".to_owned(),
        content: OllamaContent::Generate {
            response: String::new(),
            thinking: String::new(),
        },
        logprobs: Vec::new(),
        done: true,
        ending: Some(OllamaEnding {
            done_reason: DoneReason::Length,
            total_duration: Duration::from_micros(5),
            load_duration: Duration::ZERO,
            prompt_eval_count: 2,
            prompt_eval_duration: Duration::from_nanos(7),
            eval_count: 3,
            eval_duration: Duration::from_millis(1),
        }),
    };
    assert_eq!(
        serde_json::to_value(&reply).unwrap(),
        json!({"model": "m", "created_at": "t", "response": "", "done": true,
            "done_reason": "length", "total_duration": 5000, "load_duration": 0,
            "prompt_eval_count": 2, "prompt_eval_duration": 7, "eval_count": 3,
            "eval_duration": 1_000_000})
    );
}
