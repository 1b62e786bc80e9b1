use serde_json::{Value, json};

use super::json_schema::prepare_schema;
use super::*;
use crate::openai::request::chat_request;
use crate::test_fixtures::tokenizer;

fn chat(fields: Value) -> ChatRequest {
    let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    chat_request(body.to_string().as_bytes()).unwrap()
}

fn output_grammar(format: ToolCallFormat, fields: Value) -> Option<OutputGrammar> {
    let tokenizer = tokenizer();
    let markup = ToolCallMarkup {
        tokenizer: &tokenizer,
        format,
    };
    chat(fields).output_grammar(markup).unwrap()
}

fn tools(strict: bool) -> Value {
    json!([{"type": "function", "function": {"name": "f", "strict": strict, "parameters": {
        "type": "object", "required": ["n"],
        "properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "of": {"enum": ["a", "b\""]}}}}}])
}

#[track_caller]
fn refused(schema: Value, strictness: SchemaStrictness, expected: &[&str]) {
    let err = prepare_schema(&schema, strictness, "field").unwrap_err();
    assert_eq!(err.param.as_deref(), Some("field"));
    for part in expected {
        assert!(err.message.contains(part), "{}", err.message);
    }
}

#[test]
fn unsupported_keyword_is_refused_with_its_path() {
    let schema =
        json!({"type": "object", "properties": {"a": {"items": {"not": {"type": "null"}}}}});
    refused(
        schema.clone(),
        SchemaStrictness::Strict,
        &["'not'", "#/properties/a/items"],
    );
    let prepared = prepare_schema(&schema, SchemaStrictness::BestEffort, "field").unwrap();
    assert_eq!(
        prepared["properties"]["a"],
        json!({"items": {}, "type": "array"})
    );
    refused(
        json!({"uniqueItems": true}),
        SchemaStrictness::Strict,
        &["'uniqueItems'"],
    );
    refused(
        json!({"$ref": "https://a/b"}),
        SchemaStrictness::Strict,
        &["https://a/b"],
    );
    refused(
        json!({"$ref": "#/$defs/no"}),
        SchemaStrictness::BestEffort,
        &["#/$defs/no", "nowhere"],
    );
    refused(json!([1]), SchemaStrictness::BestEffort, &["object"]);
}

#[test]
fn unknown_format_is_an_annotation() {
    for strictness in [SchemaStrictness::Strict, SchemaStrictness::BestEffort] {
        for format in [
            "password",
            "path",
            "byte",
            "uri-reference",
            "regex",
            "phone",
            "",
        ] {
            let schema = json!({"properties": {"format": {"type": "string", "format": format}}});
            let prepared = prepare_schema(&schema, strictness, "field").unwrap();
            assert_eq!(prepared["properties"]["format"], json!({"type": "string"}));
        }
        let known = json!({"type": "string", "format": "date"});
        let prepared = prepare_schema(&known, strictness, "field").unwrap();
        assert_eq!(prepared["format"], "date");
    }
}

#[test]
fn schema_that_is_not_strict_is_kept_as_far_as_possible() {
    let xml = ToolCallFormat::XmlParameters;
    let format = |strict: Value| {
        json!({"response_format": {"type": "json_schema", "json_schema": {"strict": strict,
            "schema": {"type": "object", "properties": {
                "format": {"type": "string", "pattern": "a", "$ref": "https://a/b"},
                "v": {"type": "array", "uniqueItems": true, "items": {"minimum": 1}}}}}}})
    };
    for strict in [Value::Null, json!(false)] {
        let grammar = output_grammar(xml, format(strict)).unwrap();
        assert!(!grammar.lark.contains("uniqueItems"), "{}", grammar.lark);
        assert!(!grammar.lark.contains("https"), "{}", grammar.lark);
        assert!(
            grammar.lark.contains(r#""pattern":"a""#),
            "{}",
            grammar.lark
        );
        let wider = grammar.fallback.unwrap();
        assert!(!wider.contains(r#""pattern":"#), "{wider}");
        assert!(!wider.contains("minimum"), "{wider}");
        assert!(wider.contains(r#""format":{"type":"string"}"#), "{wider}");
    }
    let tokenizer = tokenizer();
    let markup = ToolCallMarkup {
        tokenizer: &tokenizer,
        format: xml,
    };
    let err = chat(format(json!(true)))
        .output_grammar(markup)
        .unwrap_err();
    let param = "response_format.json_schema.schema";
    assert_eq!(err.param.as_deref(), Some(param));
}

#[test]
fn property_names_and_enum_values_are_not_keywords() {
    let schema = json!({"type": "object", "properties": {"not": {"const": {"if": 1}}, "if": {"enum": [{"not": 1}]}},
        "default": {"contains": 1}, "uniqueItems": false, "propertyNames": {"type": "string"}});
    prepare_schema(&schema, SchemaStrictness::Strict, "field").unwrap();
}

#[test]
fn objects_are_closed_unless_all_of_requires_more() {
    let closed = |schema: Value| {
        prepare_schema(&schema, SchemaStrictness::Strict, "f").unwrap()["additionalProperties"]
            .clone()
    };
    assert_eq!(closed(json!({"properties": {"a": {}}})), json!(false));
    assert_eq!(
        closed(json!({"properties": {}, "additionalProperties": {"type": "null"}})),
        json!({"type": "null"})
    );
    assert_eq!(
        closed(json!({"properties": {}, "allOf": [{"properties": {"b": {}}}]})),
        Value::Null
    );
    assert_eq!(closed(json!({"type": "object"})), Value::Null);
}

#[test]
fn escaped_references_are_hoisted_into_defs() {
    let schema =
        json!({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"items": {"$ref": "#/%24defs/a~1b"}}}});
    let prepared = prepare_schema(&schema, SchemaStrictness::Strict, "f").unwrap();
    assert_eq!(prepared["$ref"], "#/$defs/moved-0");
    assert_eq!(
        prepared["$defs"]["moved-0"]["items"]["$ref"],
        "#/$defs/moved-0"
    );
}

#[test]
fn pattern_literal_drops_anchors_and_escapes_slashes() {
    let check = |pattern: &str, expected: &str| assert_eq!(pattern_literal(pattern), expected);
    check("^a/b$", "a\\/b");
    check("a\\$", "a\\$");
    check("a\\\\$", "a\\\\");
    check("a\nb\\/", "a\\nb\\/");
    check("^$", "()");
}

#[test]
fn forced_call_grammar_uses_the_models_tags() {
    let fields = |choice: &str| json!({"tools": tools(false), "tool_choice": choice});
    let xml = output_grammar(ToolCallFormat::XmlParameters, fields("required")).unwrap();
    let open = tokenizer().id_of("<tool_call>").unwrap();
    for part in [
        "start: call (\"\\n\" call)*\n",
        &format!("call: <[{}]> \"\\n\" (tool_0) \"\\n\" <[", open.0),
        r#"tool_0: "<function=f>\n" value_0_0 value_0_1? value_0_2? "</function>""#,
        r#"value_0_0: "<parameter=n>\n" %json {"type":"integer""#,
        r#"any_text: FIRST_LINE? NEXT_LINE* "\n</parameter>\n""#,
        r#"value_0_1: "<parameter=s>\n" any_text"#,
        r#"value_0_2: "<parameter=of>\n" ("a" | "b\"") "\n</parameter>\n""#,
    ] {
        assert!(xml.lark.contains(part), "{part}\n{}", xml.lark);
    }
    assert!(xml.fallback.is_some());
    let bounded = json!([{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"s": {"type": "string", "maxLength": 9}}}}}]);
    let xml = output_grammar(
        ToolCallFormat::XmlParameters,
        json!({"tools": bounded, "tool_choice": "required"}),
    )
    .unwrap();
    for part in [
        r#"value_0_0_text[suffix="\n</parameter>\n"]: TEXT_1"#,
        "TEXT_1: /(?s:.{0,9})/",
    ] {
        assert!(xml.lark.contains(part), "{part}\n{}", xml.lark);
    }
    let json = output_grammar(ToolCallFormat::JsonInTags, fields("required")).unwrap();
    let head =
        r#"tool_0: "{\"name\": \"f\", \"arguments\": " %json {"type":"object","required":["n"]"#;
    assert!(json.lark.contains(head), "{}", json.lark);
    let named = json!({"tools": tools(true), "tool_choice": {"type": "function", "function": {"name": "f"}}});
    let one = output_grammar(ToolCallFormat::JsonInTags, named).unwrap();
    assert!(one.lark.starts_with("start: call\n"));
    assert_eq!(one.fallback, None, "what is strict is kept");
}

#[test]
fn parameter_references_resolve_in_the_tool_schema() {
    let parameters = json!({"type": "object", "$defs": {"a/b": {"type": "integer"}}, "properties": {
        "n": {"$ref": "#/$defs/a~1b"}, "m": {"$ref": "#/%24defs/a~1b"},
        "inner": {"type": "array", "items": {"$ref": "#"}}, "like": {"$ref": "#/properties/inner"}}});
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let asked = output_grammar(
        ToolCallFormat::XmlParameters,
        json!({"tools": tools, "tool_choice": "required"}),
    );
    let lark = asked.unwrap().lark;
    let array = r##"%json {"type":"array","items":{"$ref":"#/$defs/moved-0"},"$defs":{"moved-0":{"type":"object","##;
    for part in [
        r#"value_0_0: "<parameter=n>\n" %json {"type":"integer","#,
        r#"value_0_1: "<parameter=m>\n" %json {"type":"integer","#,
        &format!("value_0_2: \"<parameter=inner>\\n\" {array}"),
        &format!("value_0_3: \"<parameter=like>\\n\" {array}"),
    ] {
        assert!(lark.contains(part), "{part}\n{lark}");
    }
}

#[test]
fn unconstrained_request_has_no_grammar() {
    let xml = ToolCallFormat::XmlParameters;
    assert_eq!(output_grammar(xml, json!({})), None);
    assert_eq!(output_grammar(xml, json!({"tools": tools(false)})), None);
    let strict = output_grammar(xml, json!({"tools": tools(true)})).unwrap();
    assert!(strict.lark.starts_with("start: TEXT?"), "{}", strict.lark);
    let object = json!({"response_format": {"type": "json_object"}, "tools": tools(false)});
    let either = output_grammar(xml, object).unwrap();
    assert!(
        either
            .lark
            .starts_with("start: text_reply | call_reply\ntext_reply: %json"),
        "{}",
        either.lark
    );
    let none = json!({"guided_choice": ["a"], "tools": tools(false), "tool_choice": "none"});
    assert_eq!(output_grammar(xml, none).unwrap().lark, "start: \"a\"\n");
}

#[test]
fn strict_tools_have_one_grammar_in_all_dialects() {
    let schema = json!({"type": "object", "required": ["a"], "additionalProperties": false,
        "properties": {"a": {"type": ["string", "null"], "enum": ["x", null]}}});
    let tokenizer = tokenizer();
    let markup = ToolCallMarkup {
        tokenizer: &tokenizer,
        format: ToolCallFormat::XmlParameters,
    };
    let function = json!({"name": "f", "parameters": schema, "strict": true});
    let mut flat = function.clone();
    flat["type"] = "function".into();
    let message = json!([{"role": "user", "content": "x"}]);
    let chat = json!({"messages": message, "tools": [{"type": "function", "function": function}]});
    let responses = json!({"input": "x", "tools": [flat]});
    let messages = json!({"max_tokens": 9, "messages": message,
        "tools": [{"name": "f", "input_schema": schema, "strict": true}]});
    let chat = chat_request(chat.to_string().as_bytes()).unwrap();
    let responses = responses.to_string();
    let responses = crate::responses::ResponsesRequest::from_json(responses.as_bytes()).unwrap();
    let messages = crate::anthropic::chat_request(messages.to_string().as_bytes()).unwrap();
    let grammar = |request: &ChatRequest| request.output_grammar(markup).unwrap().unwrap();
    let expected = grammar(&chat);
    for part in [
        r#"("x" | "null") "\n</parameter>\n""#,
        "value_0_0 \"</function>\"",
    ] {
        assert!(expected.lark.contains(part), "{part}\n{}", expected.lark);
    }
    assert_eq!(grammar(&responses.0), expected);
    assert_eq!(grammar(&messages), expected);
}
