//! Compaction: what stays of a conversation, and what a later request makes of it.

use serde_json::{Value, json};

use super::CompactRequest;
use super::tests::{read, refused};
use crate::conversation::Role;
use crate::reply::Usage;
use crate::request::ToolChoice;

fn compact(body: &Value) -> (crate::request::ChatRequest, CompactRequest) {
    CompactRequest::from_json(body.to_string().as_bytes()).unwrap()
}

#[test]
fn compaction_asks_for_a_summary_and_keeps_the_latest_messages() {
    let long = "x".repeat(40_000);
    let body = json!({"instructions": "be kind", "tools": [{"type": "function", "name": "f"}],
    "input": [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": long},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "O"},
        {"role": "user", "content": "second"},
    ]});
    let (request, own) = compact(&body);
    assert_eq!(request.messages[0].content, "be kind");
    let last = request.messages.last().unwrap();
    assert_eq!(last.role, Role::User);
    assert!(last.content.contains("Write a summary"), "{}", last.content);
    assert_eq!(request.tool_choice, ToolChoice::None);
    assert_eq!(request.thinking.enable, Some(false));
    assert_eq!(request.sampling.max_tokens, Some(4096));
    let usage = Usage {
        prompt_tokens: 9,
        completion_tokens: 3,
        ..Usage::default()
    };
    let whole = own.response("stem", "all of it", 7, usage);
    assert_eq!(whole["object"], "response.compaction");
    assert_eq!(
        (&whole["id"], &whole["created_at"]),
        (&json!("resp_stem"), &json!(7))
    );
    assert_eq!(whole["usage"]["total_tokens"], 12);
    let output = whole["output"].as_array().unwrap();
    let texts: Vec<(&Value, &Value)> = output[..3]
        .iter()
        .map(|item| (&item["role"], &item["content"][0]["text"]))
        .collect();
    let expected = [("system", "rules"), ("user", "first"), ("user", "second")];
    let expected = expected.map(|(role, text)| (json!(role), json!(text)));
    assert_eq!(texts, expected.each_ref().map(|(role, text)| (role, text)));
    assert_eq!(output.len(), 4);
    assert_eq!(
        (&output[3]["type"], &output[3]["id"]),
        (&json!("compaction"), &json!("cmp_stem"))
    );
}

#[test]
fn compaction_item_becomes_the_summary_it_holds() {
    let (_, own) = compact(&json!({"input": "one"}));
    let whole = own.response("a", "we agreed on 42", 0, Usage::default());
    let mut input = whole["output"].as_array().unwrap().clone();
    input.push(json!({"role": "user", "content": "go on"}));
    let (request, _) = read(json!({ "input": input })).unwrap();
    let seen: Vec<&str> = request
        .messages
        .iter()
        .map(|m| m.content.as_str())
        .collect();
    assert_eq!(seen.len(), 3);
    assert_eq!((seen[0], seen[2]), ("one", "go on"));
    assert!(seen[1].ends_with("\n\nwe agreed on 42"), "{seen:?}");
    assert_eq!(request.messages[1].role, Role::User);
    // A second compaction folds the first summary into its own.
    let (request, own) = compact(&json!({ "input": input }));
    assert!(
        request
            .messages
            .iter()
            .any(|m| m.content.contains("we agreed on 42"))
    );
    let output = own.response("b", "newer", 0, Usage::default())["output"].clone();
    let kinds: Vec<&Value> = output
        .as_array()
        .unwrap()
        .iter()
        .map(|i| &i["type"])
        .collect();
    assert_eq!(kinds, ["message", "message", "compaction"]);
}

#[test]
fn foreign_compactions_are_refused_by_place() {
    let foreign = json!({"type": "compaction", "encrypted_content": "gAAAAA=="});
    refused(json!({"input": [foreign]}), "input[0].encrypted_content");
    refused(
        json!({"input": [{"type": "compaction"}]}),
        "input[0].encrypted_content",
    );
    refused(
        json!({"input": [{"type": "compaction_trigger"}]}),
        "input[0].type",
    );
    let managed = json!([{"type": "compaction", "compact_threshold": 1000}]);
    refused(
        json!({"input": "x", "context_management": managed}),
        "context_management",
    );
    for (body, param) in [
        (json!({"input": "x", "stream": true}), "stream"),
        (json!({"instructions": "x"}), "input"),
        (
            json!({"previous_response_id": "r", "input": "x"}),
            "previous_response_id",
        ),
    ] {
        let error = CompactRequest::from_json(body.to_string().as_bytes()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{error}");
    }
}

#[test]
fn echoed_sampling_is_what_was_used() {
    let (_, own) = read(json!({"input": "x", "top_p": 0.5})).unwrap();
    let echo = own.echo.with_defaults(0.6, 0.95, 1.5);
    let of = |key: &str| {
        let mut fields = echo.fields.iter();
        fields
            .find(|(name, _)| *name == key)
            .map(|(_, value)| value.clone())
    };
    assert_eq!(of("temperature"), Some(json!(0.6)));
    assert_eq!(of("top_p"), Some(json!(0.5)));
    assert_eq!(of("presence_penalty"), Some(json!(1.5)));
}
