//! Replies as models write them, with what they mean; each text is cut at every place.

use super::*;

/// The tools of the cases.
fn case_tools() -> ToolSet {
    let tool = |name: &str, parameters: Value| Tool {
        name: name.to_owned(),
        parameters: Some(parameters),
        declaration: Value::Null,
    };
    let text = json!({"type": "string"});
    ToolSet::new([
        tool(
            "read",
            json!({"type": "object", "properties": {
                "path": text, "n": {"type": "integer"}, "flag": {"type": "boolean"},
            }}),
        ),
        tool(
            "write",
            json!({"type": "object", "properties": {"content": text}}),
        ),
        tool(
            "env",
            json!({"properties": {"name": text}, "additionalProperties": text}),
        ),
        tool(
            "find",
            json!({"type": "object", "anyOf": [
                {"properties": {"code": text, "zip": text}, "required": ["code"]},
                {"properties": {"id": {"type": "integer"}}},
            ]}),
        ),
    ])
}

#[test]
fn replies_mean_the_same_however_they_are_cut() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("cases.json")).unwrap();
    assert!(cases.len() > 30, "the file holds cases");
    for case in cases {
        let (name, text) = (&case["name"], case["text"].as_str().unwrap());
        let config = ReplyConfig {
            starts_in_reasoning: case["starts_in_reasoning"] == true,
            tools: case_tools(),
            ..config()
        };
        let got = run(&config, &[text], ReplyEnd::Eos);
        let expected: Vec<(String, Value)> = case["calls"]
            .as_array()
            .unwrap()
            .iter()
            .map(|call| (call[0].as_str().unwrap().to_owned(), call[1].clone()))
            .collect();
        assert_eq!(calls(&got.reply), expected, "{name}");
        assert_eq!(got.reply.content, case["content"], "{name}");
        let reasoning = case["reasoning"].as_str().unwrap_or_default();
        assert_eq!(got.reply.reasoning, reasoning, "{name}");
        let reason = got.summary.finish_reason(ReplyEnd::Eos);
        let is_call = reason == FinishReason::ToolCalls;
        assert_eq!(is_call, !expected.is_empty(), "{name}");
        for at in (1..text.len()).filter(|at| text.is_char_boundary(*at)) {
            let (one, two) = text.split_at(at);
            let cut = run(&config, &[one, two], ReplyEnd::Eos);
            assert_eq!(cut.reply, got.reply, "{name}, cut at {at}");
        }
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        let each = run(&config, &letters, ReplyEnd::Eos);
        assert_eq!(each.reply, got.reply, "{name}, letter by letter");
    }
}
