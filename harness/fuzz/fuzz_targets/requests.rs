//! Parses any bytes as a chat request and as a text completion request. A parsed request must
//! render to a prompt and its tokens, or return an error.
//!
//! A panic, a hang, or memory out of proportion to the input is a finding.

#![no_main]

use std::sync::LazyLock;

use chat::Tokenizer;
use chat::openai::request::{CompletionRequest, chat_request};
use chat::request::{ConversationPolicy, LateSystem};
use chat::template::{ChatTemplate, RenderedPrompt};
use contract::{TokenId, TokenKind};
use gguf::FileBytes;
use libfuzzer_sys::fuzz_target;
use model::synth::SynthSpec;

/// Encoding of a text completion's prompt may stop beyond this many tokens.
const CONTEXT: usize = 4096;

/// Tokenizer and template of a tiny synthetic model.
struct Model {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    control_strings: Vec<String>,
}

static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let spec = SynthSpec::parse("tiny-hybrid:q8_0").expect("a known preset");
    let bytes = spec.bytes().expect("a preset can be written");
    let loaded =
        model::load_bytes("tiny", FileBytes::shared(bytes.into())).expect("a preset can be loaded");
    let tokenizer = Tokenizer::new(&loaded.vocab).expect("a preset's vocabulary is whole");
    let template = ChatTemplate::from_vocab(&loaded.vocab).expect("a preset's template compiles");
    let tokens = loaded.vocab.tokens.iter().zip(&loaded.vocab.kinds);
    let control = tokens.filter(|(_, kind)| **kind == TokenKind::Control);
    let control_strings = control.map(|(token, _)| token.clone()).collect();
    Model {
        tokenizer,
        template,
        control_strings,
    }
});

fuzz_target!(|bytes: &[u8]| {
    let tokenizer = &MODEL.tokenizer;
    match chat_request(bytes) {
        Ok(request) => {
            for late_system in [LateSystem::User, LateSystem::Hoist, LateSystem::Refuse] {
                let policy = ConversationPolicy {
                    late_system,
                    ..ConversationPolicy::default()
                };
                let Ok(conversation) = request.conversation(&policy) else {
                    continue;
                };
                if let Ok(rendered) = MODEL.template.render(&conversation) {
                    let ids = tokenizer
                        .encode_rendered(&rendered)
                        .expect("text has tokens");
                    check_control(&rendered, &ids);
                }
            }
            let _ = request.callable_tools();
        }
        Err(error) => assert!(!error.message.is_empty()),
    }
    match CompletionRequest::from_json(bytes) {
        Ok(request) => {
            assert!(!request.prompts.is_empty());
            for prompt in &request.prompts {
                if let Ok(ids) = request.token_ids(prompt, tokenizer, CONTEXT.into()) {
                    assert!(ids.iter().all(|id| id.index() < tokenizer.n_tokens()));
                }
            }
        }
        Err(error) => assert!(!error.message.is_empty()),
    }
});

/// Asserts that control tokens come from the template only, never from a client's text.
fn check_control(rendered: &RenderedPrompt, ids: &[TokenId]) {
    let is_control = |id: &&TokenId| MODEL.tokenizer.kind(**id) == TokenKind::Control;
    let mut written = rendered.text.clone();
    for literal in rendered.literals.iter().rev() {
        written.replace_range(literal.clone(), "");
    }
    let strings = MODEL.control_strings.iter();
    let written: usize = strings.map(|string| written.matches(string).count()).sum();
    assert!(ids.iter().filter(is_control).count() <= written);
}
