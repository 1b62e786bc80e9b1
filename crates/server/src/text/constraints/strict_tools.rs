//! Calls of strict tools: what a grammar allows, parsed as replies are, matches the tool's schema.

use std::path::Path;
use std::sync::LazyLock;

use chat::grammar::ToolCallMarkup;
use chat::openai::request::chat_request;
use chat::reply::{Reply, ReplyConfig, ReplyParser};
use chat::template::ToolCallFormat;
use chat::tools::{ReplyEnd, ToolSet};
use serde_json::{Value, json};

use super::tests::dice;
use super::*;

pub(super) static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/ember/ember.gguf");
    Arc::new(Tokenizer::new(&model::load_vocab(&path).unwrap()).unwrap())
});
pub(super) static CONSTRAINTS: LazyLock<ModelConstraints> = LazyLock::new(|| {
    let tokenizer = &TOKENIZER;
    ModelConstraints::new(
        tokenizer,
        tokenizer.eos(),
        tokenizer.n_tokens(),
        &ReasoningDefaults::default(),
    )
});
/// Texts to write where a grammar allows them: ends of values, and what looks like one.
const PIECES: [&str; 29] = [
    "12/a",
    "<tool_call>\n",
    "<tool_call>",
    "\n</parameter>\n",
    "\n</parameter>\n",
    "\n</parameter>\n",
    "\"",
    "\"",
    "}",
    "]",
    "</function>\n</tool_call>",
    "</parameter>",
    "\n</function>\n</tool_call>",
    "\n<parameter=a>\n",
    "x</parameter>\n",
    "<tool_call>\n<function=f>\n<parameter=a>\nno\n</parameter>\n</function>\n</tool_call>",
    "\n<function=f>\n<parameter=a>\nno\n</parameter>\n</function>\n",
    "\n",
    "\r",
    " ",
    "null",
    "None",
    "True",
    "1e3",
    "-7",
    "0.5",
    "{\"a\": 1}",
    "[1]",
    "ab",
];

/// The grammar and the callable tools of a request with one strict tool.
fn strict_tool(
    parameters: &Value,
    choice: &str,
    format: ToolCallFormat,
) -> Result<(Grammar, ToolSet), ApiError> {
    let body = json!({"messages": [{"role": "user", "content": "x"}], "tool_choice": choice,
        "parallel_tool_calls": false, "tools": [{"type": "function",
            "function": {"name": "f", "parameters": parameters, "strict": true}}]});
    let request = chat_request(body.to_string().as_bytes()).unwrap();
    let markup = ToolCallMarkup {
        tokenizer: &TOKENIZER,
        format,
    };
    let shape = request.output_grammar(markup).map_err(ApiError::from)?;
    let grammar = CONSTRAINTS.compile(&shape.unwrap())?.grammar;
    Ok((grammar, request.callable_tools()))
}

/// The tokens of `text`, if they may all follow.
fn spelled(constraint: &mut dyn Constraint, text: &str) -> Option<Vec<TokenId>> {
    let mut path = Vec::new();
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let next = match constraint.forced(&path) {
            Some(token) => Some(token).filter(|token| is_next(*token, rest)),
            None => {
                let mask = constraint.allowed(&path);
                let all = (0..TOKENIZER.n_tokens() as u32).map(TokenId);
                let fitting = all
                    .filter(|id| is_next(*id, rest))
                    .filter(|id| mask.as_ref().is_none_or(|mask| mask.contains(*id)));
                fitting.max_by_key(|id| TOKENIZER.bytes(*id).len())
            }
        };
        let token = next?;
        rest = &rest[TOKENIZER.bytes(token).len()..];
        path.push(token);
    }
    Some(path)
}

fn is_next(token: TokenId, rest: &[u8]) -> bool {
    let bytes = TOKENIZER.bytes(token);
    !bytes.is_empty() && rest.starts_with(bytes)
}

/// A reply that the constraint allows; `None` if it does not end soon.
fn random_reply(
    constraint: &mut dyn Constraint,
    dice: &mut impl FnMut(usize) -> usize,
) -> Option<Vec<TokenId>> {
    let mut reply = Vec::new();
    while reply.len() < 600 {
        let tokens = match constraint.forced(&[]) {
            Some(token) => vec![token],
            None => random_step(constraint, dice),
        };
        assert_eq!(constraint.error(), None);
        if tokens.iter().any(|token| TOKENIZER.eos().contains(token)) {
            return Some(reply);
        }
        constraint.advance(&tokens);
        reply.extend(tokens);
    }
    None
}

fn random_step(
    constraint: &mut dyn Constraint,
    dice: &mut impl FnMut(usize) -> usize,
) -> Vec<TokenId> {
    if dice(4) != 0
        && let Some(path) = spelled(constraint, PIECES[dice(PIECES.len())])
    {
        return path;
    }
    let mask = constraint.allowed(&[]).unwrap();
    let allowed: Vec<TokenId> = (0..TOKENIZER.n_tokens() as u32)
        .map(TokenId)
        .filter(|id| mask.contains(*id))
        .collect();
    assert!(!allowed.is_empty(), "nothing may follow");
    let end = allowed.iter().find(|id| TOKENIZER.eos().contains(id));
    match end {
        Some(end) if dice(4) == 0 => vec![*end],
        _ => vec![allowed[dice(allowed.len())]],
    }
}

fn parsed(tokens: &[TokenId], tools: &ToolSet) -> Reply {
    let config = ReplyConfig {
        tools: tools.clone(),
        parallel_tool_calls: true,
        ..ReplyConfig::default()
    };
    let mut parser = ReplyParser::new(Arc::clone(&TOKENIZER), config);
    let mut reply = Reply::default();
    for delta in parser.push(tokens) {
        reply.push(delta);
    }
    for delta in parser.finish(ReplyEnd::Eos) {
        reply.push(delta);
    }
    reply
}

/// Checks `n` replies against the schema and returns the arguments of their calls.
#[track_caller]
fn check(parameters: &Value, choice: &str, format: ToolCallFormat, n: usize) -> Vec<Value> {
    let compiled = strict_tool(parameters, choice, format);
    let (grammar, tools) = compiled.unwrap_or_else(|error| panic!("{parameters}: {error:?}"));
    let constraints = CONSTRAINTS.for_text(grammar);
    let options = jsonschema::options().should_validate_formats(true);
    let validator = options.build(parameters).unwrap();
    let mut dice = dice();
    let mut all = Vec::new();
    for _ in 0..n {
        let Some(tokens) = random_reply(&mut *constraints.begin(0), &mut dice) else {
            continue;
        };
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|id| TOKENIZER.bytes(*id).to_vec())
            .collect();
        let text = String::from_utf8_lossy(&bytes);
        let reply = parsed(&tokens, &tools);
        if choice == "required" {
            assert_eq!(reply.tool_calls.len(), 1, "{parameters}\n{text}");
            assert_eq!(reply.content, "", "{parameters}\n{text}");
        }
        for call in reply.tool_calls {
            let arguments: Value = serde_json::from_str(&call.arguments)
                .unwrap_or_else(|error| panic!("{error}: {}\n{text}", call.arguments));
            if let Err(error) = validator.validate(&arguments) {
                panic!("{error}: {arguments}\n{parameters}\n{text}");
            }
            all.push(arguments);
        }
    }
    all
}

/// Schemas of one parameter `a`, in the ways that clients write them.
fn values() -> Vec<Value> {
    let text = json!({"type": "string"});
    vec![
        text.clone(),
        json!({}),
        json!({"type": ["string", "null"], "enum": ["ab", "c", null]}),
        json!({"anyOf": [{"type": "string", "enum": ["ab", "null"]}, {"type": "null"}]}),
        json!({"type": ["string", "null"], "pattern": "^[a-z]+$"}),
        json!({"type": ["null", "string"], "minLength": 3}),
        json!({"type": "string", "minLength": 3}),
        json!({"type": "string", "minLength": 2, "maxLength": 4}),
        json!({"type": "string", "minLength": 30, "maxLength": 700}),
        json!({"type": "string", "pattern": "b$", "maxLength": 5}),
        json!({"type": "string", "pattern": "^a|b$", "minLength": 2}),
        json!({"type": "string", "pattern": "\\d{2}/\\w"}),
        json!({"type": "string", "pattern": "\n"}),
        json!({"type": "string", "format": "date-time"}),
        json!({"type": "string", "format": "email", "maxLength": 30}),
        json!({"type": "string", "format": "ipv6"}),
        json!({"type": "string", "format": "uuid"}),
        json!({"type": "string", "format": "uri"}),
        json!({"type": "string", "format": "duration"}),
        json!({"type": "string", "format": "hostname"}),
        json!({"type": "string", "enum": ["", "a\nb", "a", "</parameter>", "x\r"]}),
        json!({"enum": ["auto", 1, 2.5, true, null, {"a": [1]}, "1", "true"]}),
        json!({"const": "ab"}),
        json!({"const": 7}),
        json!({"type": ["integer", "string"], "minLength": 2}),
        json!({"type": ["string", "integer"], "minLength": 2}),
        json!({"type": ["integer", "string"], "minimum": 5, "maxLength": 3}),
        json!({"type": ["boolean", "string"], "minLength": 2}),
        json!({"type": ["boolean", "integer", "null"]}),
        json!({"type": ["number", "string", "null"], "pattern": "^x"}),
        json!({"type": ["array", "string"], "items": {"type": "integer"}, "maxLength": 4}),
        json!({"anyOf": [{"type": "integer", "minimum": 3}, {"type": "string", "maxLength": 3}]}),
        json!({"anyOf": [{"const": false}, {"type": "string"}]}),
        json!({"anyOf": [{"type": "object", "properties": {"k": text}, "required": ["k"]}, text]}),
        json!({"oneOf": [{"type": "string", "minLength": 3}, {"type": "null"}]}),
        json!({"oneOf": [{"enum": ["ab"]}, {"enum": ["c", null]}]}),
        json!({"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]}),
        json!({"$ref": "#/$defs/word"}),
        json!({"$ref": "#/$defs/word", "maxLength": 3}),
        json!({"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]}),
        json!({"type": "array", "items": {"$ref": "#/$defs/word"}, "maxItems": 2}),
        json!({"type": "integer", "minimum": 3, "maximum": 40, "multipleOf": 4}),
        json!({"type": "number"}),
        json!({"type": "boolean"}),
        json!({"type": "object", "additionalProperties": {"type": "integer"}}),
    ]
}

#[test]
fn strict_argument_matches_its_schema_whatever_is_written() {
    let mut n_checked = 0;
    for (i, value) in values().into_iter().enumerate() {
        let mut parameters = json!({"type": "object",
            "properties": {"a": value, "b": {"type": "integer"}}, "required": ["a", "b"],
            "$defs": {"word": {"type": "string", "pattern": "^[a-z]{2,}$"}}});
        if i % 2 == 1 {
            parameters["additionalProperties"] = false.into();
        }
        let calls = check(&parameters, "required", ToolCallFormat::XmlParameters, 20);
        assert!(calls.len() > 5, "{parameters}: {}", calls.len());
        n_checked += calls.len();
    }
    assert!(n_checked > 600, "{n_checked}");
}

/// Whole schemas, with what their calls must show at least once.
fn roots() -> Vec<(Value, &'static str)> {
    let text = json!({"type": "string"});
    let whole = json!({"type": "integer"});
    let defs = json!({"args": {"type": "object", "properties": {"a": whole}, "required": ["a"]}});
    vec![
        (json!({"$ref": "#/$defs/args", "$defs": defs}), "a"),
        (
            json!({"$ref": "#/$defs/args", "$defs": defs, "properties": {"b": text}}),
            "b",
        ),
        (
            json!({"type": "object", "allOf": [{"$ref": "#/$defs/args"},
            {"properties": {"b": text}, "required": ["b"]}], "$defs": defs}),
            "b",
        ),
        (
            json!({"type": "object", "properties": {"a": whole, "b": text},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}),
            "b",
        ),
        (
            json!({"anyOf": [{"properties": {"a": whole}, "required": ["a"]},
            {"properties": {"b": {"type": "string", "minLength": 2}}, "required": ["b"]}]}),
            "b",
        ),
        (
            json!({"oneOf": [
            {"properties": {"kind": {"const": "x"}, "a": whole}, "required": ["kind", "a"]},
            {"properties": {"kind": {"const": "y"}, "b": text}, "required": ["kind"]}]}),
            "kind",
        ),
        (
            json!({"type": "object", "additionalProperties": whole}),
            "other",
        ),
        (
            json!({"type": "object", "properties": {"a": text}, "required": ["a"],
            "additionalProperties": {"type": "string", "maxLength": 3}}),
            "other",
        ),
        (
            json!({"type": "object", "patternProperties": {"^n": whole, "^s": text},
            "additionalProperties": false}),
            "other",
        ),
        (
            json!({"type": "object", "properties": {"na": {"type": "number"}},
            "patternProperties": {"^n": {"maximum": 9}}, "required": ["na"]}),
            "na",
        ),
        (
            json!({"type": "object", "properties": {"a": text}, "required": ["a", "b"]}),
            "b",
        ),
        (
            json!({"type": "object", "required": ["b"], "additionalProperties": whole}),
            "b",
        ),
        (
            json!({"type": "object", "properties": {"a": text}, "additionalProperties": false,
            "anyOf": [{"required": ["a"]}, {"properties": {"b": whole}, "required": ["b"]}]}),
            "a",
        ),
        (
            json!({"type": "object", "properties": {"a": text}, "required": ["a"],
            "minProperties": 1, "maxProperties": 1}),
            "a",
        ),
        (json!({"type": "object"}), "other"),
        (json!({"type": "object", "properties": {}}), "none"),
    ]
}

#[test]
fn strict_root_keywords_hold() {
    for (parameters, shows) in roots() {
        let calls = check(&parameters, "required", ToolCallFormat::XmlParameters, 30);
        let named = |call: &Value, key: &str| call.get(key).is_some();
        let is_shown = calls.iter().any(|call| match shows {
            "none" => *call == json!({}),
            "other" => call.as_object().unwrap().keys().any(|key| key != "a"),
            key => named(call, key),
        });
        assert!(is_shown, "{parameters}: {calls:?}");
    }
}

#[test]
fn strict_arguments_in_json_match_their_schema() {
    for (parameters, _) in roots() {
        // The compiler takes no `minProperties` there.
        let calls = check(&parameters, "required", ToolCallFormat::JsonInTags, 5);
        assert!(!calls.is_empty(), "{parameters}");
    }
}

#[test]
fn call_that_is_written_in_text_is_held_to_its_schema() {
    let parameters = json!({"type": "object", "required": ["a"], "additionalProperties": false,
        "properties": {"a": {"type": "string", "enum": ["yes", "maybe"]}}});
    let calls = check(&parameters, "auto", ToolCallFormat::XmlParameters, 300);
    assert!(calls.len() > 20, "{}", calls.len());
}

#[test]
fn schema_that_a_strict_tool_cannot_keep_is_refused_with_its_keyword() {
    let property = |schema: Value| json!({"type": "object", "properties": {"a": schema}});
    for (parameters, keyword) in [
        (property(json!({"not": {"type": "null"}})), "'not'"),
        (
            property(json!({"type": "string", "pattern": "(?=a)b"})),
            "'pattern'",
        ),
        (
            property(json!({"type": "array", "uniqueItems": true})),
            "'uniqueItems'",
        ),
        (
            property(json!({"oneOf": [{"type": "string"}, {"minLength": 2}]})),
            "'oneOf'",
        ),
        (
            json!({"type": "object", "minProperties": 1}),
            "'minProperties'",
        ),
        (
            json!({"type": "object", "maxProperties": 1}),
            "'maxProperties'",
        ),
        (
            json!({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}),
            "'oneOf'",
        ),
        (
            json!({"if": {"required": ["a"]}, "then": {"required": ["b"]}}),
            "'if'",
        ),
        (
            json!({"type": "object", "patternProperties": {"(?=a)": {}}}),
            "'patternProperties'",
        ),
        (
            json!({"dependentRequired": {"a": ["b"]}}),
            "'dependentRequired'",
        ),
    ] {
        let refused = strict_tool(&parameters, "auto", ToolCallFormat::XmlParameters);
        let error = refused
            .err()
            .unwrap_or_else(|| panic!("{parameters} is kept"));
        let text = format!("{error:?}");
        assert!(text.contains(keyword), "{parameters}: {text}");
    }
}
