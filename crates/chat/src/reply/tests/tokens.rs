//! The parser over tokens: hidden tokens, code points, and where each token went.

use super::*;
use crate::tokenizer::Special;

fn parser(config: ReplyConfig) -> (Arc<Tokenizer>, ReplyParser) {
    let tokenizer = sample::tokenizer();
    (tokenizer.clone(), ReplyParser::new(tokenizer, config))
}

/// The text's tokens, each with where it went.
fn places(config: ReplyConfig, text: &str, end: End) -> (Vec<(String, Place)>, Summary) {
    let (tokenizer, mut parser) = parser(config);
    let ids = tokenizer.encode(text, Special::Match).unwrap();
    let mut placed = Vec::new();
    for id in &ids {
        parser.push(&[*id]);
        placed.extend(parser.take_placed());
    }
    parser.finish(end);
    placed.extend(parser.take_placed());
    let ordinals: Vec<usize> = placed.iter().map(|(ordinal, _)| *ordinal).collect();
    assert_eq!(
        ordinals,
        (0..parser.summary().tokens).collect::<Vec<_>>(),
        "each token once"
    );
    let named = placed
        .iter()
        .map(|(ordinal, place)| (tokenizer.decode(&ids[*ordinal..=*ordinal]), *place))
        .collect();
    (named, parser.summary())
}

#[test]
fn every_token_is_placed_once_and_in_order() {
    let config = ReplyConfig {
        starts_in_reasoning: true,
        ..config()
    };
    let text = "hello</think>\n\nhello<tool_call>{\"name\": \"get\", \"arguments\": {}}</tool_call><|im_end|>";
    let (placed, summary) = places(config, text, End::Eos);
    let of = |wanted: Place| -> String {
        placed
            .iter()
            .filter(|(_, place)| *place == wanted)
            .map(|(text, _)| text.as_str())
            .collect()
    };
    assert_eq!(of(Place::Reasoning), "hello");
    assert_eq!(of(Place::Content), "hello");
    assert_eq!(of(Place::Hidden), "</think>\n\n<|im_end|>");
    assert!(of(Place::Call).starts_with("<tool_call>{"));
    assert_eq!(
        (
            summary.reasoning_tokens,
            summary.content_tokens,
            summary.calls
        ),
        (1, 1, 1)
    );
    assert_eq!(summary.tokens, placed.len());
}

#[test]
fn the_bytes_of_content_tokens_are_the_content() {
    let text = "h\u{e9}llo \u{1f600} world";
    let (placed, _) = places(config(), text, End::Eos);
    assert!(placed.iter().all(|(_, place)| *place == Place::Content));
}

#[test]
fn tokens_behind_a_stop_are_not_counted() {
    let (tokenizer, mut parser) = parser(ReplyConfig {
        stop: vec!["lo".to_owned()],
        ..config()
    });
    let ids: Vec<TokenId> = "hello you"
        .bytes()
        .map(|byte| TokenId(u32::from(byte)))
        .collect();
    let mut reply = Reply::default();
    reply.extend(parser.push(&ids));
    reply.extend(parser.push(&ids));
    assert_eq!(parser.stopped(), Some(&Stop::StopString("lo".to_owned())));
    reply.extend(parser.finish(End::Stopped));
    assert_eq!(reply.content, "hel");
    assert_eq!(parser.summary().tokens, 5);
    assert!(tokenizer.n_tokens() > 256);
}

#[test]
fn stop_strings_wait_for_the_least_number_of_tokens() {
    let config = ReplyConfig {
        stop: vec!["b".to_owned()],
        min_tokens: 4,
        ..config()
    };
    let (_, mut parser) = parser(config);
    let ids: Vec<TokenId> = "abcbd"
        .bytes()
        .map(|byte| TokenId(u32::from(byte)))
        .collect();
    let mut reply = Reply::default();
    reply.extend(parser.push(&ids));
    reply.extend(parser.finish(End::Stopped));
    assert_eq!(reply.content, "abc");
}

#[test]
fn a_tag_that_is_a_control_token_is_still_seen() {
    let mut vocab = sample::vocab();
    for (token, kind) in vocab.tokens.iter().zip(&mut vocab.kinds) {
        if token.contains("think>") || token.contains("tool_call>") {
            *kind = TokenKind::Control;
        }
    }
    let tokenizer = Arc::new(Tokenizer::new(&vocab).unwrap());
    let mut parser = ReplyParser::new(tokenizer.clone(), config());
    let text = "<think>a</think>b<tool_call>{\"name\": \"get\", \"arguments\": {}}</tool_call>";
    let mut reply = Reply::default();
    reply.extend(parser.push(&tokenizer.encode(text, Special::Match).unwrap()));
    reply.extend(parser.finish(End::Eos));
    assert_eq!(
        (reply.reasoning.as_str(), reply.content.as_str()),
        ("a", "b")
    );
    assert_eq!(reply.tool_calls.len(), 1);
}

#[test]
fn an_unfinished_code_point_at_the_end_is_one_replacement() {
    let (_, mut parser) = parser(config());
    let mut reply = Reply::default();
    reply.extend(parser.push(&[TokenId(0x61), TokenId(0xf0), TokenId(0x9f)]));
    assert_eq!(reply.content, "a");
    reply.extend(parser.finish(End::Length));
    assert_eq!(reply.content, "a\u{fffd}");
    assert_eq!(parser.summary().content_tokens, 3);
    assert_eq!(parser.push(&[TokenId(0x61)]), []);
    assert_eq!(parser.finish(End::Length), []);
}

proptest! {
    #[test]
    fn grouping_of_tokens_does_not_show(text in any_text(), size in 1usize..9) {
        let run = |size: usize| {
            let (tokenizer, mut parser) = parser(config());
            let ids = tokenizer.encode(&text, Special::Match).unwrap();
            let mut reply = Reply::default();
            let mut placed = Vec::new();
            for group in ids.chunks(size) {
                reply.extend(parser.push(group));
                placed.extend(parser.take_placed());
            }
            reply.extend(parser.finish(End::Eos));
            placed.extend(parser.take_placed());
            (reply, placed, parser.summary())
        };
        let single = run(1);
        prop_assert_eq!(&run(size), &single);
        prop_assert_eq!(&run(usize::MAX), &single);
    }
}
