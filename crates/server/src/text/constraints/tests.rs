use std::path::Path;

use chat::grammar::ToolCallMarkup;
use chat::openai::request::chat_request;
use chat::template::ToolCallFormat;
use serde_json::{Value, json};

use super::*;

/// Constraint of a reply that must call a tool with these parameters.
fn call_with(parameters: &Value, strict: bool) -> (Arc<Tokenizer>, Constraints) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/ember/ember.gguf");
    let tokenizer = Arc::new(Tokenizer::new(&model::load_vocab(&path).unwrap()).unwrap());
    let constraints = ModelConstraints::new(
        &tokenizer,
        tokenizer.eos(),
        tokenizer.n_tokens(),
        &ReasoningDefaults::default(),
    );
    let body = json!({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required", "parallel_tool_calls": false,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}]});
    let request = chat_request(body.to_string().as_bytes()).unwrap();
    let markup = ToolCallMarkup {
        tokenizer: &tokenizer,
        format: ToolCallFormat::XmlParameters,
    };
    let shape = request.output_grammar(markup).unwrap().unwrap();
    let grammar = constraints.compile(&shape).unwrap().grammar;
    (tokenizer, constraints.for_text(grammar))
}

/// Deterministic numbers below a bound.
pub(super) fn dice() -> impl FnMut(usize) -> usize {
    let mut state = 7_u64;
    move |n| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    }
}

/// Whether the constraint allows `text` and then nothing but the end, in allowed tokens that
/// `dice` picks.
pub(super) fn may_be_said(
    tokenizer: &Tokenizer,
    constraint: &mut dyn Constraint,
    text: &str,
    dice: &mut impl FnMut(usize) -> usize,
) -> bool {
    let said = may_begin(tokenizer, constraint, text, dice);
    let over = constraint.forced(&[]);
    assert_eq!(constraint.error(), None);
    said && over.is_some_and(|id| tokenizer.eos().contains(&id))
}

/// Whether the constraint allows `text` as the beginning of a reply.
fn may_begin(
    tokenizer: &Tokenizer,
    constraint: &mut dyn Constraint,
    text: &str,
    dice: &mut impl FnMut(usize) -> usize,
) -> bool {
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let forced = constraint.forced(&[]);
        let mask = match forced {
            None => constraint.allowed(&[]),
            Some(_) => None,
        };
        let words: Vec<TokenId> = (0..tokenizer.n_tokens() as u32)
            .map(TokenId)
            .filter(|id| forced.is_none_or(|forced| forced == *id))
            .filter(|id| mask.as_ref().is_none_or(|mask| mask.contains(*id)))
            .filter(|id| {
                let bytes = tokenizer.bytes(*id);
                !bytes.is_empty() && rest.starts_with(bytes)
            })
            .collect();
        if words.is_empty() {
            return false;
        }
        let word = words[dice(words.len())];
        rest = &rest[tokenizer.bytes(word).len()..];
        constraint.advance(&[word]);
    }
    true
}

/// Whether a reply may end here.
fn may_end(tokenizer: &Tokenizer, constraint: &mut dyn Constraint) -> bool {
    let eos = tokenizer.eos();
    match constraint.forced(&[]) {
        Some(forced) => eos.contains(&forced),
        None => {
            let mask = constraint.allowed(&[]);
            mask.is_none_or(|mask| eos.iter().any(|id| mask.contains(*id)))
        }
    }
}

#[test]
fn string_argument_allows_any_text_up_to_its_closing_tag() {
    const END: &str = "\n</parameter>\n";
    const PIECES: [&str; 14] = [
        "\n",
        "\n",
        "</parameter>",
        "</para",
        "\n</parameter",
        "<",
        ">",
        "x",
        " word",
        "\r",
        "\"",
        "日本",
        "<parameter=s>\n",
        END,
    ];
    let (tokenizer, constraints) = call_with(
        &json!({"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}),
        false,
    );
    let mut dice = dice();
    let (mut whole, mut cut) = (0, 0);
    for _ in 0..300 {
        let text: String = (0..dice(9)).map(|_| PIECES[dice(PIECES.len())]).collect();
        let value = format!("{text}{END}");
        let ends_first_at_the_end = value.find(END) == Some(text.len());
        let reply =
            format!("<tool_call>\n<function=f>\n<parameter=s>\n{value}</function>\n</tool_call>");
        let said = may_be_said(&tokenizer, &mut *constraints.begin(0), &reply, &mut dice);
        assert_eq!(said, ends_first_at_the_end, "{text:?}");
        if said { whole += 1 } else { cut += 1 }
    }
    assert!(whole > 50 && cut > 50, "{whole} {cut}");
}

#[test]
fn schema_reference_in_a_parameter_resolves_in_all_parameters() {
    let parameters = json!({
        "type": "object", "$defs": {"a/b": {"type": "integer"}}, "required": ["one", "inner"],
        "properties": {"one": {"$ref": "#/$defs/a~1b"}, "inner": {"type": "array", "items": {"$ref": "#"}}}
    });
    let (tokenizer, constraints) = call_with(&parameters, true);
    let mut dice = dice();
    for (one, inner, expected) in [
        ("5", "[]", true),
        ("five", "[]", false),
        ("5", "[[]]", false),
        ("5", r#"[{"one": 6, "inner": []}]"#, true),
        ("5", r#"[{"one": "6", "inner": []}]"#, false),
    ] {
        let reply = format!(
            "<tool_call>\n<function=f>\n<parameter=one>\n{one}\n</parameter>\n<parameter=inner>\n{inner}\n</parameter>\n</function>\n</tool_call>"
        );
        let said = may_be_said(&tokenizer, &mut *constraints.begin(0), &reply, &mut dice);
        assert_eq!(said, expected, "{one} {inner}");
    }
}

/// llama.cpp's own example of a grammar of JSON.
const JSON_GBNF: &str = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"#;

/// Whether a grammar in GBNF allows a text.
#[track_caller]
fn check_gbnf(gbnf: &str, allowed: &[&str], refused: &[&str]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/ember/ember.gguf");
    let tokenizer = Arc::new(Tokenizer::new(&model::load_vocab(&path).unwrap()).unwrap());
    let constraints = ModelConstraints::new(
        &tokenizer,
        tokenizer.eos(),
        tokenizer.n_tokens(),
        &ReasoningDefaults::default(),
    );
    let body = json!({"messages": [{"role": "user", "content": "x"}], "grammar": gbnf});
    let request = chat_request(body.to_string().as_bytes()).unwrap();
    let shape = request.response_format.output_grammar().unwrap().unwrap();
    let grammar = constraints.compile(&shape).unwrap().grammar;
    let constraint = constraints.for_text(grammar);
    let mut dice = dice();
    let texts = allowed.iter().map(|text| (text, true));
    for (text, expected) in texts.chain(refused.iter().map(|text| (text, false))) {
        let mut constraint = constraint.begin(0);
        let said = may_begin(&tokenizer, constraint.as_mut(), text, &mut dice)
            && may_end(&tokenizer, constraint.as_mut());
        assert_eq!(said, expected, "{text:?} of {gbnf}");
    }
}

#[test]
fn gbnf_allows_what_llama_cpp_allows() {
    check_gbnf(
        JSON_GBNF,
        &[
            "{}",
            "{\"a\": [1, -2.5e3, \"\\u00e9\\n\", {}], \"b\":null}",
            "{\"a\":\n  true}",
        ],
        &[
            "[]",
            "{\"a\":}",
            "{\"a\": 01}",
            "{a: 1}",
            "{}  ",
            "{\"a\"  : 1}",
        ],
    );
    // A regular grammar is one expression: a repetition gives way to what follows it.
    check_gbnf(
        "root ::= [a-z ]+ \" end\" | \"x\"{2,3} \"y\"?\n",
        &["go on end", "xx", "xxxy", "x end end"],
        &["end", "x", "xxxxy", "go on"],
    );
    check_gbnf(
        "root ::= \"(\" root? \")\" | [^()\\n]{1,2}",
        &["()", "((ab))", "é"],
        &["(()", "abc", "(\n)"],
    );
}

#[test]
fn long_chains_of_rules_compile() {
    let chain = |last: &str| -> String {
        let rules = (1..990).map(|i| format!("r{i} ::= r{}\n", i + 1));
        format!(
            "root ::= r1\n{}r990 ::= {last}\n",
            rules.collect::<String>()
        )
    };
    check_gbnf(&chain("\"a\""), &["a"], &["b"]);
    check_gbnf(&chain("\"a\" root?"), &["aaa"], &["ab"]);
}
