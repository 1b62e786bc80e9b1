//! Replies of models that define no reasoning tags.

use contract::{TemplateMarkup, Vocab};

use super::*;

fn parsed(markup: TemplateMarkup) -> Reply {
    let vocab = Vocab {
        markup,
        ..test_fixtures::vocab()
    };
    let tokenizer = Arc::new(Tokenizer::new(&vocab).unwrap());
    let text = "<think>\nmaybe\n</think>\n\nyes";
    let ids = tokenizer.encode(text, crate::SpecialTokens::Parse).unwrap();
    let mut parser = ReplyParser::new(tokenizer, config());
    let mut reply = Reply::default();
    reply.extend(parser.push(&ids));
    reply.extend(parser.finish(ReplyEnd::Eos));
    reply
}

#[test]
fn undefined_reasoning_tags_stay_text() {
    let split = parsed(TemplateMarkup::default());
    assert_eq!((&*split.reasoning, &*split.content), ("maybe", "yes"));
    let whole = parsed(TemplateMarkup {
        reasoning: None,
        ..TemplateMarkup::default()
    });
    assert_eq!(whole.reasoning, "");
    assert_eq!(whole.content, "<think>\nmaybe\n</think>\n\nyes");
}
