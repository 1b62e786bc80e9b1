//! Tool calls in every form a model writes them.

use super::*;

/// The text must give these calls and this content.
fn check(text: &str, expected: Value, content: &str) {
    let reply = whole(text);
    let expected: Vec<(String, Value)> = expected
        .as_array()
        .unwrap()
        .iter()
        .map(|call| (call[0].as_str().unwrap().to_owned(), call[1].clone()))
        .collect();
    assert_eq!(calls(&reply), expected, "{text}");
    assert_eq!(reply.content, content, "{text}");
}

#[test]
fn json_in_tags_is_a_call() {
    for text in [
        "<tool_call>\n{\"name\": \"get\", \"arguments\": {\"s\": \"a\", \"n\": [1, {}]}}\n</tool_call>",
        "<tool_call>{\"arguments\": {\"s\": \"a\", \"n\": [1, {}]}, \"name\": \"get\"}</tool_call>",
        "<tool_call>{\"name\": \"get\", \"parameters\": {\"s\": \"a\", \"n\": [1, {}]}}</tool_call>",
        "<tool_call>{\"name\": \"get\", \"arguments\": \"{\\\"s\\\": \\\"a\\\", \\\"n\\\": [1, {}]}\"}</tool_call>",
        "<tool_call>{\"function\": {\"name\": \"get\", \"arguments\": {\"s\": \"a\", \"n\": [1, {}]}}}</tool_call>",
        "<tool_call>{'name': 'get', 'arguments': {'s': 'a', 'n': [1, {}]}}</tool_call>",
        "<tool_call>{\"name\": \"get\", \"arguments\": {\"s\": \"a\", \"n\": [1, {}]}, \"id\": \"}\"}</tool_call>",
        "<tool_call>{\"name\": \"get\", \"arguments\": {\"s\": \"a\", \"n\": [1, {}]}}}\n</tool_call>",
        "<tool_code>{\"name\": \"get\", \"arguments\": {\"s\": \"a\", \"n\": [1, {}]}}</tool_code>",
        "{\"name\": \"get\", \"arguments\": {\"s\": \"a\", \"n\": [1, {}]}}",
    ] {
        check(text, json!([["get", {"s": "a", "n": [1, {}]}]]), "");
    }
    check(
        "<tool_call>{\"name\": \"get\"}</tool_call>",
        json!([["get", {}]]),
        "",
    );
}

#[test]
fn tagged_parameters_are_a_call() {
    let inner = "<function=get>\n<parameter=s>\nline one\n  line two\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>";
    let expected = json!([["get", {"s": "line one\n  line two", "n": 7}]]);
    check(
        &format!("<tool_call>\n{inner}\n</tool_call>"),
        expected.clone(),
        "",
    );
    check(inner, expected.clone(), "");
    check(
        &inner.replace("<function=get>", "<get>"),
        expected.clone(),
        "",
    );
    check(
        &inner
            .replace("<function=get>", "<get>")
            .replace("</function>", "</get>"),
        expected,
        "",
    );
    check(
        "<tool_call>\n<function=get>\n</function>\n</tool_call>",
        json!([["get", {}]]),
        "",
    );
    check(
        "<function=get(s=\"a, b\", n=1)></function>",
        json!([["get", {"s": "a, b", "n": 1}]]),
        "",
    );
    check(
        "<tool_call><function=get><parameter=n>5</parameter></function></tool_call>",
        json!([["get", {"n": 5}]]),
        "",
    );
}

#[test]
fn several_calls_keep_the_text_around_them() {
    let text = "Let me look.\n\n<tool_call>\n<function=get>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n{\"name\": \"get\", \"arguments\": {\"n\": 2}}\n</tool_call>\n\nDone.";
    check(
        text,
        json!([["get", {"n": 1}], ["get", {"n": 2}]]),
        "Let me look.Done.",
    );
    let reply = whole(text);
    assert_ne!(reply.tool_calls[0].id, reply.tool_calls[1].id);
    let single = ReplyConfig {
        parallel_tool_calls: false,
        ..config()
    };
    let got = run(&single, &[text], ReplyEnd::Stopped);
    assert_eq!(got.reply.tool_calls.len(), 1);
    assert_eq!(got.stopped, Some(EarlyStop::AfterCall));
    assert_eq!(got.reply.content, "Let me look.");
    assert_eq!(
        got.summary.finish_reason(ReplyEnd::Stopped),
        FinishReason::ToolCalls
    );
}

#[test]
fn text_parameters_stream_before_the_call_ends() {
    let mut machine = ReplyStateMachine::new(config(), Arc::default());
    let mut attribution = TokenAttribution::default();
    let mut deltas = Vec::new();
    let begin = "<tool_call>\n<function=put_file>\n<parameter=content>\n";
    machine.take(begin, 1, &mut attribution, &mut deltas);
    assert!(
        matches!(&deltas[0], ReplyDelta::ToolCall { index: 0, name, .. } if name == "put_file")
    );
    deltas.clear();
    machine.take("first \"line\"\nsecond", 2, &mut attribution, &mut deltas);
    let fragment = "first \\\"line\\\"\\nsecond".to_owned();
    assert_eq!(deltas, [ReplyDelta::ToolArguments { index: 0, fragment }]);
}

#[test]
fn json_arguments_stream_before_the_call_ends() {
    let mut machine = ReplyStateMachine::new(config(), Arc::default());
    let mut attribution = TokenAttribution::default();
    let mut deltas = Vec::new();
    machine.take(
        "<tool_call>{\"name\": \"put_file\", \"arguments\": {\"content\": \"abc",
        1,
        &mut attribution,
        &mut deltas,
    );
    let fragment = "{\"content\": \"abc".to_owned();
    assert_eq!(
        deltas.last(),
        Some(&ReplyDelta::ToolArguments { index: 0, fragment })
    );
}

#[test]
fn value_may_contain_its_own_delimiter_tags() {
    let value = "see <parameter=x>\nand </parameter> and </function> in prose\n<function=get>";
    let text = format!(
        "<tool_call>\n<function=put_file>\n<parameter=content>\n{value}\n</parameter>\n<parameter=path>\n/a\n</parameter>\n</function>\n</tool_call>"
    );
    check(
        &text,
        json!([["put_file", {"content": value, "path": "/a"}]]),
        "",
    );
}

#[test]
fn tags_in_the_strings_of_a_json_value_are_text() {
    let call = |list: &str| {
        format!(
            "<tool_call>\n<function=get>\n<parameter=l>\n{list}\n</parameter>\n<parameter=s>\nx\n\
             </parameter>\n</function>\n</tool_call>"
        )
    };
    for list in [
        r#"["a</parameter></function></tool_call>", "b\"</parameter><tool_call>"]"#,
        r#"["</function></tool_call><tool_call><function=get>"]"#,
    ] {
        let expected: Value = serde_json::from_str(list).unwrap();
        check(&call(list), json!([["get", {"l": expected, "s": "x"}]]), "");
    }
    // A quote that is missing hides no tag.
    check(&call("[\"a"), json!([["get", {"l": "[\"a", "s": "x"}]]), "");
}

#[test]
fn value_loses_one_newline_at_each_end() {
    let text = "<function=get>\n<parameter=s>\n\n x \n\n</parameter>\n</function>";
    check(text, json!([["get", {"s": "\n x \n"}]]), "");
    let text = "<function=get>\r\n<parameter=s>\r\nx\r\n</parameter>\r\n</function>";
    check(text, json!([["get", {"s": "x"}]]), "");
}

#[test]
fn missing_closing_tag_is_implied() {
    check(
        "<tool_call>\n<function=get>\n<parameter=s>\na\n<parameter=n>\n3\n</function>\n</tool_call>",
        json!([["get", {"s": "a", "n": 3}]]),
        "",
    );
    check(
        "<tool_call>\n<function=get>\n<parameter=n>\n3\n</parameter>\n</tool_call>",
        json!([["get", {"n": 3}]]),
        "",
    );
}

#[test]
fn duplicate_and_stray_closing_tags_are_dropped() {
    check(
        "<tool_call>\n<function=get>\n<parameter=n>\n3\n</parameter>\n</parameter>\n</function>\n</function>\n</tool_call>",
        json!([["get", {"n": 3}]]),
        "",
    );
}

#[test]
fn eos_inside_a_call_closes_it_and_length_does_not() {
    let text = "<tool_call>\n<function=get>\n<parameter=s>\nabc";
    check(text, json!([["get", {"s": "abc"}]]), "");
    let got = run(&config(), &[text], ReplyEnd::Length);
    assert_eq!(got.reply.tool_calls[0].arguments, "{\"s\": \"abc");
    assert!(got.summary.open_call);
    assert_eq!(
        got.summary.finish_reason(ReplyEnd::Length),
        FinishReason::Length
    );
    check(
        "<tool_call>{\"name\": \"get\", \"arguments\": {\"s\": \"abc",
        json!([["get", {"s": "abc"}]]),
        "",
    );
}

#[test]
fn duplicate_parameter_last_value_wins() {
    check(
        "<function=get>\n<parameter=n>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>",
        json!([["get", {"n": 2}]]),
        "",
    );
}

#[test]
fn undeclared_tool_name_in_call_tags_is_a_call() {
    for text in [
        "<tool_call>\n<function=other>\n</function>\n</tool_call>",
        "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"other\"}</tool_call>",
    ] {
        check(text, json!([["other", {}]]), "");
    }
}

#[test]
fn what_only_looks_like_a_call_is_text() {
    for text in [
        "<tool_call>\n<function=...>\n</function>\n</tool_call>",
        "<tool_call>\n<function=a name>\n</function>\n</tool_call>",
        "<function=other>\n<parameter=a>\n1\n</parameter>\n</function>",
        "<tool_call> is a tag",
        "<tool_call>",
        "<tool_call>{not json}</tool_call>",
        "<tool_call>{\"name\": ",
        "<function=get",
        "<get> is a tag",
        "{\"name\": \"other\", \"arguments\": {}}",
        "{\"answer\": 42}",
        "{\"name\": \"get\", \"age\": 3}",
    ] {
        let got = run(&config(), &[text], ReplyEnd::Eos);
        assert_eq!(got.reply.content, text);
        assert!(got.reply.tool_calls.is_empty(), "{text}");
    }
}

#[test]
fn tool_name_matches_ignoring_case_and_dashes() {
    check(
        "<function=Put-File></function>",
        json!([["put_file", {}]]),
        "",
    );
    let two = ToolSet::new(["a-b", "a_b"].map(|name| Tool {
        name: name.to_owned(),
        parameters: None,
        declaration: Value::Null,
    }));
    assert!(two.find("A_B").is_none(), "two names fold to the same");
    assert_eq!(two.find("a-b").unwrap().name, "a-b");
}

#[test]
fn calls_in_code_are_text() {
    let call = "<tool_call>\n{\"name\": \"get\", \"arguments\": {}}\n</tool_call>";
    for text in [
        format!("Like this:\n```\n{call}\n```\nSee?"),
        format!("Write `{call}` to call."),
        "Write <function=get></function> in a line.".to_owned(),
    ] {
        let reply = whole(&text);
        assert!(reply.tool_calls.is_empty(), "{text}");
        assert_eq!(reply.content, text);
    }
}

#[test]
fn malformed_arguments_are_repaired_or_closed() {
    check(
        "<tool_call>{\"name\": \"get\", \"arguments\": {'s': 'a\nb', n: 1,}}</tool_call>",
        json!([["get", {"s": "a\nb", "n": 1}]]),
        "",
    );
    let text =
        "<tool_call>{\"name\": \"get\", \"arguments\": {\"s\": \"a\" oops}}</tool_call> tail";
    check(text, json!([["get", {"s": "a"}]]), "tail");
    assert_eq!(run(&config(), &[text], ReplyEnd::Eos).summary.malformed, 1);
}

#[test]
fn text_after_malformed_arguments_ignores_chunking() {
    check(
        "{\"name\": \"get\", \"arguments\": {\"s\": \"a\" oops",
        json!([["get", {"s": "a"}]]),
        "oops",
    );
    check(
        "<tool_call>{\"name\": \"get\", \"arguments\": {}, \"id\" oops</tool_call>",
        json!([["get", {}]]),
        "oops</tool_call>",
    );
}

#[test]
fn complete_call_inside_reasoning_ends_it() {
    let config = ReplyConfig {
        starts_in_reasoning: true,
        ..config()
    };
    let call =
        "<tool_call>\n<function=get>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>";
    let got = run(
        &config,
        &[&format!("I should look.\n{call}")],
        ReplyEnd::Eos,
    );
    assert_eq!(got.reply.reasoning, "I should look.\n");
    assert_eq!(calls(&got.reply), [("get".to_owned(), json!({"s": "x"}))]);
    assert_eq!(got.reply.content, "");

    for text in [
        "I could write\n<tool_call>\n<function=get>\n but I will not",
        "I could write\n<tool_call> or not",
        "inline <tool_call>{\"name\": \"get\", \"arguments\": {}}</tool_call> is no call",
    ] {
        let got = run(&config, &[&format!("{text}</think>\n\nNo.")], ReplyEnd::Eos);
        assert_eq!(got.reply.reasoning, text);
        assert_eq!(got.reply.content, "No.");
        assert!(got.reply.tool_calls.is_empty());
    }
}

#[test]
fn call_tags_are_text_without_tools() {
    let config = ReplyConfig {
        tools: ToolSet::default(),
        ..config()
    };
    let text = "<tool_call>\n{\"name\": \"get\", \"arguments\": {}}\n</tool_call>";
    assert_eq!(run(&config, &[text], ReplyEnd::Eos).reply.content, text);
}

#[test]
fn loose_calls_of_a_strict_tool_are_text() {
    let tool = |strict| {
        let parameters = json!({"type": "object", "properties": {"s": {"type": "string"}}});
        Tool::declare("get", None, Some(&parameters), strict)
    };
    let loose = "{\"name\": \"get\", \"arguments\": {\"n\": 1}}";
    let named = "<get>\n<parameter=s>\nx\n</parameter>\n</get>";
    let tagged = format!("<tool_call>\n{loose}\n</tool_call>");
    let in_reasoning = format!("<think>\n{tagged}\n</think>\n\nok");
    for (text, strict, calls, content) in [
        (loose, false, 1, ""),
        (loose, true, 0, loose),
        (named, false, 1, ""),
        (named, true, 0, named),
        // A grammar holds calls in tags to the schema, but not within reasoning.
        (&tagged, true, 1, ""),
        (&in_reasoning, false, 1, "ok"),
        (&in_reasoning, true, 0, "ok"),
    ] {
        let config = ReplyConfig {
            tools: ToolSet::new([tool(strict)]),
            ..config()
        };
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        for parts in [&[text][..], &letters] {
            let reply = run(&config, parts, ReplyEnd::Eos).reply;
            assert_eq!(reply.tool_calls.len(), calls, "{text} {strict}");
            assert_eq!(reply.content, content, "{text} {strict}");
        }
    }
}
