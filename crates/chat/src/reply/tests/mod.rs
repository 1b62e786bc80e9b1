use proptest::prelude::*;
use serde_json::{Value, json};

use super::state_machine::ReplyStateMachine;
use super::*;
use crate::test_fixtures;
use crate::tools::Tool;

mod calls;
mod cases;
mod markup;
mod tokens;

/// Two tools: `get` with a text, a number and a list; `put_file` with two texts.
fn tools() -> ToolSet {
    let tool = |name: &str, properties: Value| Tool {
        name: name.to_owned(),
        parameters: Some(json!({"type": "object", "properties": properties, "required": ["s"]})),
        declaration: Value::Null,
    };
    ToolSet::new([
        tool(
            "get",
            json!({"s": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}}),
        ),
        tool(
            "put_file",
            json!({"path": {"type": "string"}, "content": {"type": "string"}}),
        ),
    ])
}

fn config() -> ReplyConfig {
    ReplyConfig {
        split_reasoning: true,
        tools: tools(),
        parallel_tool_calls: true,
        ..ReplyConfig::default()
    }
}

/// What came of a text given in these cuts.
#[derive(Debug, Clone, PartialEq)]
struct Got {
    reply: Reply,
    summary: ReplyStats,
    stopped: Option<EarlyStop>,
    n_pieces: usize,
}

fn run(config: &ReplyConfig, parts: &[&str], end: ReplyEnd) -> Got {
    let mut machine = ReplyStateMachine::new(config.clone(), Arc::default());
    let mut attribution = TokenAttribution::default();
    let mut deltas = Vec::new();
    for part in parts {
        machine.take(part, usize::MAX, &mut attribution, &mut deltas);
    }
    machine.finish(end, &mut attribution, &mut deltas);
    let mut reply = Reply::default();
    let n_pieces = deltas.len();
    reply.extend(deltas);
    let summary = ReplyStats {
        calls: machine.calls(),
        malformed: machine.malformed(),
        open_call: machine.is_inside_call(),
        ..ReplyStats::default()
    };
    Got {
        reply,
        summary,
        stopped: machine.stopped().cloned(),
        n_pieces,
    }
}

/// The reply of a whole text, which must also be that of its letters one by one.
fn whole(text: &str) -> Reply {
    let reply = run(&config(), &[text], ReplyEnd::Eos).reply;
    let letters: Vec<String> = text.chars().map(String::from).collect();
    let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
    assert_eq!(
        run(&config(), &letters, ReplyEnd::Eos).reply,
        reply,
        "{text}"
    );
    reply
}

/// Name and parsed arguments of each call.
fn calls(reply: &Reply) -> Vec<(String, Value)> {
    let call = |call: &ReplyToolCall| {
        let arguments = &call.arguments;
        let value =
            serde_json::from_str(arguments).unwrap_or_else(|err| panic!("{arguments:?}: {err}"));
        (call.name.clone(), value)
    };
    reply.tool_calls.iter().map(call).collect()
}

#[test]
fn reasoning_is_split_from_content() {
    for (text, starts_in_reasoning, reasoning, content) in [
        ("\n<think>\nhm\n</think>\n\nhi", false, "hm", "hi"),
        ("hm</think>\n\nhi", true, "hm", "hi"),
        ("\nhm</think>hi", true, "hm", "hi"),
        ("just text", false, "", "just text"),
        ("text <think> more", false, "", "text <think> more"),
        ("never closed", true, "never closed", ""),
        ("almost </thin", true, "almost </thin", ""),
        ("a</think>b</think>c", true, "a", "b</think>c"),
        ("<think></think>\n \n  indented", false, "", "  indented"),
        ("<thi", false, "", "<thi"),
    ] {
        let config = ReplyConfig {
            starts_in_reasoning,
            tools: ToolSet::default(),
            ..config()
        };
        let reply = run(&config, &[text], ReplyEnd::Eos).reply;
        assert_eq!(
            (reply.reasoning.as_str(), reply.content.as_str()),
            (reasoning, content),
            "{text}"
        );
    }
}

#[test]
fn tags_are_content_when_split_reasoning_is_off() {
    let config = ReplyConfig {
        starts_in_reasoning: true,
        ..ReplyConfig::default()
    };
    let text = "<think>a</think> b</think> <tool_call>";
    assert_eq!(run(&config, &[text], ReplyEnd::Eos).reply.content, text);
}

#[test]
fn stop_strings_end_content_and_not_reasoning() {
    let config = ReplyConfig {
        starts_in_reasoning: true,
        stop: vec!["END".to_owned(), "\n\n\n".to_owned()],
        ..config()
    };
    let got = run(
        &config,
        &["so END not", " yet</thi", "nk>text E", "ND more"],
        ReplyEnd::Stopped,
    );
    assert_eq!(got.reply.reasoning, "so END not yet");
    assert_eq!(got.reply.content, "text ");
    assert_eq!(got.stopped, Some(EarlyStop::StopString("END".to_owned())));
    assert_eq!(
        got.summary.finish_reason(ReplyEnd::Stopped),
        FinishReason::Stop
    );
}

#[test]
fn blank_stop_string_matches_before_text_arrives() {
    let config = ReplyConfig {
        stop: vec!["\n\n".to_owned()],
        ..config()
    };
    let got = run(&config, &["\n", "\n"], ReplyEnd::Stopped);
    assert_eq!(got.stopped, Some(EarlyStop::StopString("\n\n".to_owned())));
    assert_eq!(got.reply.content, "");
}

/// Stretches that texts of the laws below are made of.
fn stretches() -> Vec<&'static str> {
    vec![
        "<tool_call>\n<function=get>\n<parameter=s>\n",
        "<function=put_file>\n<parameter=content>\n",
        "\n</parameter>\n<parameter=n>\n",
        "\n</parameter>\n",
        "\n</function>\n</tool_call>",
        "<tool_call>",
        "</tool_call>",
        "\n",
        "{\"name\": \"get\", \"arguments\": ",
        "{\"s\": 1}",
        "}",
        "{",
        "<function=get>",
        "<function=nope>",
        "<function=put_file>",
        "<parameter=s>",
        "<parameter=n>",
        "<parameter=l>",
        "<parameter=content>",
        "</parameter>",
        "</function>",
        "<think>",
        "</think>",
        "hello ",
        "`",
        "```\n",
        "STOP",
        "\u{e9}\u{1f600}",
        "  ",
        "<get>",
        "</get>",
        "null",
        "5",
        "{'a': 1}",
        "[1, 2",
        "]",
        "<tool_code>",
        "</tool_code>",
        "\r\n",
        "<function=get(s=\"x\", n=1)>",
        "\"",
        "\\",
        "{\"arguments\": {}, \"name\": \"get\"}",
        "<",
        "</",
    ]
}

fn any_text() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(stretches()), 0..16).prop_map(|parts| parts.concat())
}

fn cut<'t>(text: &'t str, cuts: &[prop::sample::Index]) -> Vec<&'t str> {
    let places: Vec<usize> = text
        .char_indices()
        .map(|(at, _)| at)
        .chain([text.len()])
        .collect();
    let mut at: Vec<usize> = cuts
        .iter()
        .map(|cut| places[cut.index(places.len())])
        .collect();
    at.extend([0, text.len()]);
    at.sort_unstable();
    at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn text_chunking_does_not_change_the_reply(
        text in any_text(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        starts_in_reasoning in any::<bool>(),
        parallel_tool_calls in any::<bool>(),
        has_tools in any::<bool>(),
        end in prop::sample::select(vec![ReplyEnd::Eos, ReplyEnd::Length, ReplyEnd::Stopped]),
    ) {
        let config = ReplyConfig {
            starts_in_reasoning,
            parallel_tool_calls,
            tools: if has_tools { tools() } else { ToolSet::default() },
            stop: vec!["STOP".to_owned(), "lo 5".to_owned()],
            ..config()
        };
        let mut one = run(&config, &[&text], end);
        let mut many = run(&config, &cut(&text, &cuts), end);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        let mut each = run(&config, &letters, end);
        for got in [&mut one, &mut many, &mut each] {
            got.n_pieces = 0;
        }
        prop_assert_eq!(&one, &many);
        prop_assert_eq!(&one, &each);
        for (index, call) in one.reply.tool_calls.iter().enumerate() {
            let is_open = one.summary.open_call && index + 1 == one.reply.tool_calls.len();
            let arguments = &call.arguments;
            let value = serde_json::from_str::<Value>(arguments);
            prop_assert!(is_open || value.is_ok_and(|value| value.is_object()), "{}", arguments);
        }
    }

    #[test]
    fn reply_loses_only_tags_and_adjacent_blanks(text in any_text(), inside in any::<bool>()) {
        let config = ReplyConfig {
            starts_in_reasoning: inside,
            tools: ToolSet::default(),
            ..config()
        };
        let reply = run(&config, &[&text], ReplyEnd::Eos).reply;
        let bare = |text: &str| -> String {
            text.replace("</think>", "").split_whitespace().collect::<String>().replace("<think>", "")
        };
        prop_assert_eq!(bare(&(reply.reasoning + &reply.content)), bare(&text));
        let raw = run(&ReplyConfig::default(), &[&text], ReplyEnd::Eos).reply;
        prop_assert_eq!(raw.content, text);
    }

    #[test]
    fn text_without_a_call_is_returned_whole(text in "[a-z <>{}\"/_=\n]{0,60}") {
        let config = ReplyConfig { split_reasoning: false, ..config() };
        let got = run(&config, &[&text], ReplyEnd::Eos);
        prop_assume!(got.summary.calls == 0 && !got.summary.open_call);
        prop_assert_eq!(got.reply.content, text);
    }
}
