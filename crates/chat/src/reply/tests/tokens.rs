//! The parser over tokens: hidden tokens, code points, and where each token went.

use super::*;
use crate::tokenizer::SpecialTokens;

fn parser(config: ReplyConfig) -> (Arc<Tokenizer>, ReplyParser) {
    let tokenizer = test_fixtures::tokenizer();
    (tokenizer.clone(), ReplyParser::new(tokenizer, config))
}

/// The text's tokens, each with where it went.
fn places(
    config: ReplyConfig,
    text: &str,
    end: ReplyEnd,
) -> (Vec<(String, TokenPart)>, ReplyStats) {
    let (tokenizer, mut parser) = parser(config);
    let ids = tokenizer.encode(text, SpecialTokens::Parse).unwrap();
    let mut attributed = Vec::new();
    for id in &ids {
        parser.push(&[*id]);
        attributed.extend(parser.take_token_parts());
    }
    parser.finish(end);
    attributed.extend(parser.take_token_parts());
    let ordinals: Vec<usize> = attributed.iter().map(|(ordinal, _)| *ordinal).collect();
    assert_eq!(
        ordinals,
        (0..parser.summary().tokens).collect::<Vec<_>>(),
        "each token once"
    );
    let named = attributed
        .iter()
        .map(|(ordinal, place)| (tokenizer.decode(&ids[*ordinal..=*ordinal]), *place))
        .collect();
    (named, parser.summary())
}

#[test]
fn every_token_is_attributed_once_in_order() {
    let config = ReplyConfig {
        starts_in_reasoning: true,
        ..config()
    };
    let text = "hello</think>\n\nhello<tool_call>{\"name\": \"get\", \"arguments\": {}}</tool_call><|im_end|>";
    let (attributed, summary) = places(config, text, ReplyEnd::Eos);
    let of = |wanted: TokenPart| -> String {
        attributed
            .iter()
            .filter(|(_, place)| *place == wanted)
            .map(|(text, _)| text.as_str())
            .collect()
    };
    assert_eq!(of(TokenPart::Reasoning), "hello");
    assert_eq!(of(TokenPart::Content), "hello");
    assert_eq!(of(TokenPart::Hidden), "</think>\n\n<|im_end|>");
    assert!(of(TokenPart::Call).starts_with("<tool_call>{"));
    assert_eq!(
        (
            summary.reasoning_tokens,
            summary.content_tokens,
            summary.calls
        ),
        (1, 1, 1)
    );
    assert_eq!(summary.tokens, attributed.len());
}

#[test]
fn content_tokens_join_to_the_content() {
    let text = "h\u{e9}llo \u{1f600} world";
    let (attributed, _) = places(config(), text, ReplyEnd::Eos);
    assert!(
        attributed
            .iter()
            .all(|(_, place)| *place == TokenPart::Content)
    );
}

#[test]
fn tokens_after_a_stop_are_not_counted() {
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
    assert_eq!(
        parser.stopped(),
        Some(&EarlyStop::StopString("lo".to_owned()))
    );
    reply.extend(parser.finish(ReplyEnd::Stopped));
    assert_eq!(reply.content, "hel");
    assert_eq!(parser.summary().tokens, 5);
    assert!(tokenizer.n_tokens() > 256);
}

#[test]
fn stop_strings_are_ignored_before_min_tokens() {
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
    reply.extend(parser.finish(ReplyEnd::Stopped));
    assert_eq!(reply.content, "abc");
}

#[test]
fn control_token_tags_are_recognised() {
    let mut vocab = test_fixtures::vocab();
    for (token, kind) in vocab.tokens.iter().zip(&mut vocab.kinds) {
        if token.contains("think>") || token.contains("tool_call>") {
            *kind = TokenKind::Control;
        }
    }
    let tokenizer = Arc::new(Tokenizer::new(&vocab).unwrap());
    let mut parser = ReplyParser::new(tokenizer.clone(), config());
    let text = "<think>a</think>b<tool_call>{\"name\": \"get\", \"arguments\": {}}</tool_call>";
    let mut reply = Reply::default();
    reply.extend(parser.push(&tokenizer.encode(text, SpecialTokens::Parse).unwrap()));
    reply.extend(parser.finish(ReplyEnd::Eos));
    assert_eq!(
        (reply.reasoning.as_str(), reply.content.as_str()),
        ("a", "b")
    );
    assert_eq!(reply.tool_calls.len(), 1);
}

#[test]
fn incomplete_final_code_point_becomes_one_replacement() {
    let (_, mut parser) = parser(config());
    let mut reply = Reply::default();
    reply.extend(parser.push(&[TokenId(0x61), TokenId(0xf0), TokenId(0x9f)]));
    assert_eq!(reply.content, "a");
    reply.extend(parser.finish(ReplyEnd::Length));
    assert_eq!(reply.content, "a\u{fffd}");
    assert_eq!(parser.summary().content_tokens, 3);
    assert_eq!(parser.push(&[TokenId(0x61)]), []);
    assert_eq!(parser.finish(ReplyEnd::Length), []);
}

proptest! {
    #[test]
    fn token_batching_does_not_change_the_reply(text in any_text(), size in 1usize..9) {
        let run = |size: usize| {
            let (tokenizer, mut parser) = parser(config());
            let ids = tokenizer.encode(&text, SpecialTokens::Parse).unwrap();
            let mut reply = Reply::default();
            let mut attributed = Vec::new();
            for group in ids.chunks(size) {
                reply.extend(parser.push(group));
                attributed.extend(parser.take_token_parts());
            }
            reply.extend(parser.finish(ReplyEnd::Eos));
            attributed.extend(parser.take_token_parts());
            (reply, attributed, parser.summary())
        };
        let single = run(1);
        prop_assert_eq!(&run(size), &single);
        prop_assert_eq!(&run(usize::MAX), &single);
    }
}
