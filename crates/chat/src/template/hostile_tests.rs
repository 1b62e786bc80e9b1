//! Templates that try to take the process down: each is refused, or renders, within bounds.

use std::time::{Duration, Instant};

use super::*;
use crate::conversation::Message;
use crate::error::ErrorKind;
use crate::test_fixtures::{self, thread_time};

/// No template may take longer than this to be refused, in an unoptimised build beside other tests.
const PATIENCE: Duration = Duration::from_secs(60);

/// Compiles, probes and renders on a thread with the stack of a server's worker.
fn outcome(source: &str) -> Result<String, ChatError> {
    let source = source.to_owned();
    let run = move || {
        let template = ChatTemplate::from_source(&source, &test_fixtures::vocab())?;
        let conversation = Conversation {
            messages: vec![Message::new(Role::User, "hi")],
            add_generation_prompt: true,
            ..Conversation::default()
        };
        template.render(&conversation).map(|prompt| prompt.text)
    };
    let thread = std::thread::Builder::new().stack_size(2 << 20).spawn(run);
    thread.unwrap().join().expect("no panic")
}

fn check_refused(name: &str, source: &str) {
    let begun = Instant::now();
    match outcome(source) {
        Err(err) => assert!(
            matches!(err.kind, ErrorKind::Setup | ErrorKind::TemplateFailed),
            "{name}: {err:?}"
        ),
        Ok(text) => panic!("{name}: rendered {} bytes", text.len()),
    }
    let took = begun.elapsed();
    assert!(took < PATIENCE, "{name} took {took:?}");
}

/// `{% set x %}` inside a loop reaches the next pass by a namespace only.
fn grown(start: &str, step: &str, n: usize) -> String {
    format!(
        "{{% set ns = namespace(x={start}) %}}{{% for i in range({n}) %}}\
         {{% set ns.x = {step} %}}{{% endfor %}}{{{{ ns.x | length }}}}"
    )
}

#[test]
fn templates_that_grow_texts_are_refused() {
    let lines = "'a\\n' * 1000000";
    let long = "'a' * 30000000";
    for (name, source) in [
        ("doubling by ~", grown("'a'", "ns.x ~ ns.x", 60)),
        ("doubling by +", grown("'a'", "ns.x + ns.x", 60)),
        ("doubling by *", grown("'a'", "ns.x * 2", 60)),
        ("repetition", "{{ 'a' * 99999999 }}".to_owned()),
        (
            "repetition of repetition",
            "{{ ('a' * 9999) * 99999 }}".to_owned(),
        ),
        (
            "constants",
            format!(
                "{{% set x = [{}] %}}",
                vec!["'a' * 99999999"; 200].join(", ")
            ),
        ),
        (
            "straight doubling",
            format!("{{% set x = 'aa' %}}{}", "{% set x = x ~ x %}".repeat(60)),
        ),
        ("indent", "{{ 'a\\nb' | indent(99999999999) }}".to_owned()),
        (
            "indent by keyword",
            "{{ 'a\\nb' | indent(width=99999999999) }}".to_owned(),
        ),
        (
            "indent of lines",
            format!("{{{{ ({lines}) | indent(9999) }}}}"),
        ),
        (
            "format width",
            "{{ '%99999999999d' | format(1) }}".to_owned(),
        ),
        (
            "format precision",
            "{{ '%.999999999f' | format(1.5) }}".to_owned(),
        ),
        (
            "format width argument",
            "{{ '%*d' | format(999999999, 1) }}".to_owned(),
        ),
        (
            "format method",
            "{{ '{:>999999999}'.format(1) }}".to_owned(),
        ),
        (
            "format fields",
            "{{ ('%(a)s' * 100000) | format(a='a' * 100000) }}".to_owned(),
        ),
        (
            "replace",
            format!("{{{{ ({long}) | replace('a', {long}) }}}}"),
        ),
        (
            "replace method",
            format!("{{{{ ({long}).replace('', {long}) }}}}"),
        ),
        ("join", format!("{{{{ range(100000) | join({long}) }}}}")),
        (
            "join method",
            format!("{{{{ ({long}).join(['a'] * 100000) }}}}"),
        ),
        (
            "join of letters",
            format!("{{{{ ({long}) | join('abcdef') }}}}"),
        ),
        ("letters", format!("{{{{ ({long}) | list | length }}}}")),
        (
            "letters by map",
            format!("{{{{ [{long}] | map('list') | list | length }}}}"),
        ),
        ("split", format!("{{{{ ({long}).split('a') | length }}}}")),
        (
            "split filter",
            format!("{{{{ ({long}) | split('a') | length }}}}"),
        ),
        (
            "splitlines",
            "{{ ('\\n' * 30000000).splitlines() | length }}".to_owned(),
        ),
        (
            "capture",
            format!(
                "{{% set ns = namespace(n=0) %}}{{% set x %}}{{% for i in range(100000) %}}{}{{% endfor %}}{{% endset %}}{{{{ x | length }}}}",
                "a".repeat(10_000)
            ),
        ),
        (
            "macro",
            format!(
                "{{% macro f(s) %}}{{{{ s }}}}{{{{ s }}}}{{% endmacro %}}{{% set x = 'aa' %}}{}",
                "{% set x = f(x) %}".repeat(60)
            ),
        ),
        (
            "filter block",
            format!(
                "{{% filter replace('a', {long}) %}}{}{{% endfilter %}}",
                "a".repeat(100_000)
            ),
        ),
        (
            "output",
            "{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}".to_owned(),
        ),
        (
            "json indent",
            format!(
                "{{{{ [[[[[1]]]]] | tojson(indent='{}') }}}}",
                "a".repeat(1_000)
            ),
        ),
    ] {
        check_refused(name, &source);
    }
}

#[test]
fn templates_that_grow_containers_are_refused() {
    for (name, source) in [
        ("nesting lists", grown("[]", "[ns.x]", 90_000)),
        ("nesting maps", grown("{}", "{'a': ns.x}", 90_000)),
        ("nesting tuples", grown("()", "(ns.x,)", 90_000)),
        ("doubling by reference", grown("['a']", "[ns.x, ns.x]", 90)),
        ("doubling by key", grown("{}", "{'a': ns.x, 'b': ns.x}", 90)),
        ("doubling lists", grown("['a']", "ns.x + ns.x", 90)),
        ("repeating lists", grown("['a']", "ns.x * 9", 90)),
        (
            "doubling chains",
            grown("['a']", "ns.x | chain(ns.x) | list", 90),
        ),
        (
            "doubling lazy chains",
            grown("['a']", "ns.x | chain(ns.x)", 90),
        ),
        (
            "list of one long text",
            "{{ (['a' * 9999999] * 9999999) | join }}".to_owned(),
        ),
        (
            "doubling by dict",
            grown("dict()", "dict(a=ns.x, b=ns.x)", 90),
        ),
        (
            "batch",
            "{{ [1] | batch(99999999999, 0) | list }}".to_owned(),
        ),
        ("slice", "{{ [1] | slice(99999999999) | list }}".to_owned()),
        (
            "list of list",
            "{{ ([[1] * 99999999] * 99999999) | length }}".to_owned(),
        ),
        (
            "printing one text often",
            "{% set t = 'a' * 999999 %}{{ [t, t, t, t, t, t, t, t] * 9999 }}".to_owned(),
        ),
    ] {
        check_refused(name, &source);
    }
}

#[test]
fn templates_that_refer_to_themselves_are_refused() {
    for (name, end) in [
        ("json", "{{ ns | tojson }}"),
        ("text", "{{ ns }}"),
        ("string", "{{ ns | string }}"),
        ("concatenation", "{{ ns ~ 'a' }}"),
        ("comparison", "{{ ns == ns }}"),
        ("order", "{{ [ns, ns] | sort }}"),
        ("format", "{{ '%s' | format(ns) }}"),
        ("join", "{{ [ns] | join }}"),
        ("in", "{{ ns in [ns] }}"),
        ("unique", "{{ [ns, ns] | unique | list }}"),
        ("pprint", "{{ ns | pprint }}"),
    ] {
        for set in [
            "{% set ns.a = ns %}",
            "{% set ns.a = [ns] %}",
            "{% set ns.a = {'b': (ns,)} %}",
            "{% set other = namespace(b=ns) %}{% set ns.a = other %}",
        ] {
            let source = format!("{{% set ns = namespace() %}}{set}{end}");
            check_refused(name, &source);
        }
    }
}

#[test]
fn templates_that_exhaust_the_parser_are_refused() {
    let n = 100_000;
    let chain = |part: &str| part.repeat(n);
    for (name, source) in [
        ("minus signs", format!("{{{{ {}1 }}}}", chain("-"))),
        ("not", format!("{{{{ {}1 }}}}", chain("not "))),
        (
            "parentheses",
            format!("{{{{ {}1{} }}}}", chain("("), chain(")")),
        ),
        ("lists", format!("{{{{ {}1{} }}}}", chain("["), chain("]"))),
        ("attributes", format!("{{{{ a{} }}}}", chain(".a"))),
        ("items", format!("{{{{ a{} }}}}", chain("[0]"))),
        ("calls", format!("{{{{ a{} }}}}", chain("()"))),
        ("filters", format!("{{{{ a{} }}}}", chain("|e"))),
        ("tests", format!("{{{{ a{} }}}}", chain(" is none"))),
        ("concatenations", format!("{{{{ a{} }}}}", chain("~a"))),
        ("additions", format!("{{{{ 1{} }}}}", chain("+1"))),
        ("powers", format!("{{{{ 1{} }}}}", chain("**1"))),
        ("comparisons", format!("{{{{ 1{} }}}}", chain("<1"))),
        (
            "conditions",
            format!("{{{{ 1{} }}}}", chain(" if 1 else 1")),
        ),
        ("or", format!("{{{{ 1{} }}}}", chain(" or 1"))),
        ("ifs", chain("{% if 1 %}")),
        (
            "elifs",
            format!("{{% if 1 %}}{}{{% endif %}}", chain("{% elif 1 %}")),
        ),
        ("fors", chain("{% for a in b %}")),
        ("macros", chain("{% macro f() %}")),
        ("source", "a".repeat(2 << 20)),
    ] {
        check_refused(name, &source);
    }
}

#[test]
fn templates_that_recurse_or_run_long_are_refused() {
    let long = "('a' * 9999999)";
    for (name, source) in [
        (
            "macro",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned(),
        ),
        (
            "caller",
            "{% macro f() %}{% call f() %}{% endcall %}{% endmacro %}{{ f() }}".to_owned(),
        ),
        (
            "loop",
            "{% set a = [1] %}{% for x in a recursive %}{{ loop(a) }}{% endfor %}".to_owned(),
        ),
        ("include", "{% include 'chat' %}".to_owned()),
        ("import", "{% import 'chat' as m %}".to_owned()),
        (
            "block",
            "{% block a %}{{ self.a() }}{% endblock %}".to_owned(),
        ),
        (
            "loops",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
                .to_owned(),
        ),
        (
            "comparisons",
            format!(
                "{{% set a = {long} %}}{{% set b = {long} %}}{{% for i in range(99999) %}}{{% for j in range(99) %}}{{% if a == b %}}{{% endif %}}{{% endfor %}}{{% endfor %}}"
            ),
        ),
        (
            "searches",
            format!(
                "{{% set a = {long} %}}{{% for i in range(99999) %}}{{% if 'b' in a %}}{{% endif %}}{{% endfor %}}"
            ),
        ),
        (
            "counts",
            format!(
                "{{% set a = {long} %}}{{% for i in range(99999) %}}{{% if a | length %}}{{% endif %}}{{% endfor %}}"
            ),
        ),
    ] {
        check_refused(name, &source);
    }
}

#[test]
fn long_conversations_stay_within_the_limits() {
    let text = "word ".repeat(20_000);
    let mut messages = Vec::new();
    for _ in 0..100 {
        messages.push(Message::new(Role::User, text.as_str()));
        messages.push(Message::new(Role::Assistant, text.as_str()));
    }
    messages.push(Message::new(Role::User, "so?"));
    let conversation = Conversation {
        messages,
        add_generation_prompt: true,
        ..Conversation::default()
    };
    for file in ["qwen3_5", "qwen3", "qwen2_5"] {
        let source = test_fixtures::fixture(&format!("templates/{file}.jinja"));
        let template = ChatTemplate::from_source(&source, &test_fixtures::vocab()).unwrap();
        let prompt = template.render(&conversation).unwrap();
        assert!(prompt.text.len() > 20_000_000, "{file}");
    }
}

/// Values that lie within a control string, and messages that end with the start of one.
#[test]
fn conversations_of_many_messages_render_in_linear_time() {
    let source = "{% for m in messages %}{{ '<|im_start|>' ~ m.content }}{% endfor %}";
    let template = ChatTemplate::from_source(source, &test_fixtures::vocab()).unwrap();
    let messages = (0..24_000).map(|n| {
        let content = if n % 2 == 0 { "start" } else { "text <|im_" };
        Message::new(Role::User, content)
    });
    let conversation = Conversation {
        messages: messages.collect(),
        ..Conversation::default()
    };
    let begun = thread_time();
    let prompt = template.render(&conversation).unwrap();
    assert_eq!(prompt.text.matches("<|im_start|>start").count(), 12_000);
    // A second in this build; quadratic work takes minutes.
    let took = thread_time() - begun;
    assert!(took < Duration::from_secs(20), "{took:?}");
}
