use serde_json::json;

use super::{is_gbnf, to_lark};
use crate::openai::request::chat_request;
use crate::request::ResponseFormat;

#[track_caller]
fn check(gbnf: &str, lark: &str) {
    assert_eq!(to_lark(gbnf).unwrap(), lark, "{gbnf}");
}

#[track_caller]
fn refused(gbnf: &str, error: &str) {
    assert_eq!(to_lark(gbnf).unwrap_err(), error, "{gbnf}");
}

#[test]
fn gbnf_is_known_by_its_first_statement() {
    for gbnf in [
        "root ::= \"a\"",
        "# a comment\n\n root-1\n  ::= x",
        "root::=[a]",
    ] {
        assert!(is_gbnf(gbnf), "{gbnf}");
    }
    for lark in [
        "start: \"a ::= b\"",
        "%llguidance {}\nroot ::= x",
        "",
        "::= a",
        "# root ::= a",
    ] {
        assert!(!is_gbnf(lark), "{lark}");
    }
}

#[test]
fn request_with_gbnf_has_its_translation() {
    let body = json!({"messages": [{"role": "user", "content": "x"}],
        "grammar": "root ::= \"a\""});
    let request = chat_request(body.to_string().as_bytes()).unwrap();
    let lark = "start: R0\nR0: \"a\"\n".to_owned();
    let field = "grammar".to_owned();
    assert_eq!(
        request.response_format,
        ResponseFormat::Grammar { lark, field }
    );
}

#[test]
fn rules_without_recursion_become_terminals() {
    check(
        "root ::= \"a\\n\\x41\\\"\" [b-d\\]] word{2,3} # end\nword ::= [^\\t] | . \"\" ws*\nws ::= | \" \"",
        "start: R0\nR0: \"a\\nA\\\"\" /[\\x{62}-\\x{64}\\x{5D}]/ (R1){2,3}\n\
         R1: /[^\\x{9}]/ | /[\\x{0}-\\x{10FFFF}]/ \"\" R2*\nR2: \"\" | \" \"\n",
    );
    check(
        "root ::= (\n \"a\" | \"b\"\n )+\n | [x-]?? {2} \"c\"{0} \"d\"{3,}",
        "start: R0\nR0: (\"a\" | \"b\")+ | (((/[\\x{78}\\x{2D}]/?)?)){2,2} \"\" (\"d\"){3,}\n",
    );
}

#[test]
fn runs_inside_recursive_rules_become_terminals() {
    check(
        "root ::= \"[\" ws (root ws (\",\" root)*)? \"]\" | num\nws ::= \" \"*\nnum ::= [0-9]+",
        "start: r0\nr0: T0 (r0 T1 (T2 r0)*)? T3 | T4\nR1: \" \"*\nR2: /[\\x{30}-\\x{39}]/+\n\
         T0: \"[\" R1\nT1: R1\nT2: \",\"\nT3: \"]\"\nT4: R2\n",
    );
    check(
        "root ::= <[17]> \"a\" !<[3]>*",
        "start: r0\nr0: <[17]> T0 <[^3]>*\nT0: \"a\"\n",
    );
}

#[test]
fn mistakes_are_refused_with_their_place() {
    for (gbnf, error) in [
        ("", "the rule root is missing; it is the whole text"),
        (
            "root ::= a\na ::= b",
            "line 2, column 7: the rule b is not defined",
        ),
        (
            "root : \"a\"",
            "line 1, column 6: ::= must stand between a rule's name and its body",
        ),
        ("root ::= \"a", "line 1, column 10: this text has no end"),
        (
            "root ::= [a",
            "line 1, column 10: this class of characters has no end",
        ),
        (
            "root ::= []",
            "line 1, column 10: this class has no characters",
        ),
        (
            "root ::= [b-a]",
            "line 1, column 11: the range ends before it begins",
        ),
        (
            "root ::= ( \"a\"",
            "line 1, column 10: this group has no end",
        ),
        (
            "root ::= \"a\" )",
            "line 1, column 14: no group is open that ) could close",
        ),
        (
            "root ::= * \"a\"",
            "line 1, column 10: nothing stands before this that could be repeated",
        ),
        (
            "root ::= \"a\"{2001}",
            "line 1, column 14: a count up to 2000 must stand here",
        ),
        (
            "root ::= \"\\q\"",
            "line 1, column 11: this escape is unknown",
        ),
        (
            "root ::= \"\\u12\"",
            "line 1, column 11: this escape needs 4 hexadecimal digits",
        ),
        (
            "root ::= \"\\uD800\"",
            "line 1, column 11: this escape is no character, such as half of a surrogate pair",
        ),
        (
            "root ::= é",
            "line 1, column 10: the rule must go on with a term or end with its line",
        ),
        (
            "root ::= <think>",
            "line 1, column 10: a token must be named by its id, as <[17]>, or !<[17]> for all others",
        ),
    ] {
        refused(gbnf, error);
    }
    let deep = format!("root ::= {}", "(".repeat(1_000_000));
    assert!(to_lark(&deep).unwrap_err().contains("nested deeper"));
    let many: String = (0..2_000).map(|i| format!("r{i} ::= \"a\"\n")).collect();
    assert!(to_lark(&many).unwrap_err().contains("more than 1000 rules"));
    let half = to_lark("root ::= \"a\"{3,2}").unwrap_err();
    assert!(half.contains("below the first"), "{half}");
}
