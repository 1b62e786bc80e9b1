//! Replies in the form of a JSON schema: what schemas mean, by texts that they allow and refuse.

use chat::grammar::ToolCallMarkup;
use chat::openai::request::chat_request;
use chat::template::ToolCallFormat;
use serde_json::{Value, json};

use super::strict_tools::{CONSTRAINTS, TOKENIZER};
use super::tests::{dice, may_be_said};
use super::*;

fn compiled(schema: &Value) -> Result<Constraints, ApiError> {
    let body = json!({"messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema":
            {"name": "n", "strict": true, "schema": schema}}});
    let request = chat_request(body.to_string().as_bytes()).unwrap();
    let markup = ToolCallMarkup {
        tokenizer: &TOKENIZER,
        format: ToolCallFormat::XmlParameters,
    };
    let shape = request.output_grammar(markup)?.unwrap();
    Ok(CONSTRAINTS.for_text(CONSTRAINTS.compile(&shape)?.grammar))
}

#[test]
fn satisfiable_schema_is_kept() {
    let whole = json!({"type": "integer"});
    let defs = json!({"base": {"type": "object", "properties": {"a": whole}, "required": ["a"]}});
    let mut dice = dice();
    for (schema, allowed, refused) in [
        // `required` names what `properties` does not.
        (
            json!({"properties": {"a": whole}, "required": ["a", "b"]}),
            r#"{"a":1,"b":"x"}"#,
            r#"{"a":1}"#,
        ),
        // Branches name the properties of the schema around them.
        (
            json!({"properties": {"a": whole, "b": whole}, "anyOf": [
                {"required": ["a"]}, {"properties": {"b": {"minimum": 5}}, "required": ["b"]}]}),
            r#"{"b":7}"#,
            r#"{"b":3}"#,
        ),
        (
            json!({"properties": {"a": whole}, "required": ["a"],
                "oneOf": [{"properties": {"b": {"const": 1}}, "required": ["b"]}]}),
            r#"{"a":2,"b":1}"#,
            r#"{"b":1}"#,
        ),
        // Keywords beside a reference.
        (
            json!({"$ref": "#/$defs/base", "properties": {"b": whole}, "required": ["b"], "$defs": defs}),
            r#"{"a":2,"b":1}"#,
            r#"{"b":1}"#,
        ),
        (
            json!({"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": whole}, "required": ["b"]}],
                "$defs": defs}),
            r#"{"a":1,"b":2}"#,
            r#"{"a":1}"#,
        ),
        // References by name.
        (
            json!({"properties": {"a": {"$ref": "#n"}}, "required": ["a"], "$defs": {"n": {"$anchor": "n", "type": "integer"}}}),
            r#"{"a":1}"#,
            r#"{"a":"1"}"#,
        ),
        (
            json!({"$id": "https://a.org/root", "properties": {"a": {"$ref": "item"}}, "required": ["a"],
                "$defs": {"i": {"$id": "item", "type": "integer"}}}),
            r#"{"a":1}"#,
            r#"{"a":"1"}"#,
        ),
        // Counts with a fraction of zero.
        (
            json!({"type": "array", "items": whole, "maxItems": 2.0}),
            "[1, 2]",
            "[1, 2, 3]",
        ),
        (
            json!({"type": "string", "minLength": 2.0}),
            "\"ab\"",
            "\"a\"",
        ),
    ] {
        let constraints = compiled(&schema).unwrap_or_else(|error| panic!("{schema}: {error:?}"));
        for (text, expected) in [(allowed, true), (refused, false)] {
            let constraint = &mut *constraints.begin(0);
            let said = may_be_said(&TOKENIZER, constraint, text, &mut dice);
            assert_eq!(said, expected, "{schema} {text}");
        }
    }
}

#[test]
fn refusal_names_a_keyword_and_no_option() {
    let schema = json!({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]});
    let text = format!("{:?}", compiled(&schema).unwrap_err());
    assert!(
        text.contains("'oneOf'") && !text.contains("coerce"),
        "{text}"
    );
}
