use proptest::prelude::*;

use super::*;
use crate::test_fixtures;

fn stream(ids: &[TokenId], cuts: &[usize]) -> String {
    let mut detokenizer = Detokenizer::new(test_fixtures::tokenizer());
    let mut text = String::new();
    let mut start = 0;
    for end in cuts.iter().copied().chain([ids.len()]) {
        text.push_str(&detokenizer.push(&ids[start..end]));
        start = end;
    }
    text + &detokenizer.finish()
}

#[test]
fn split_code_point_waits_for_its_last_byte() {
    let mut detokenizer = Detokenizer::new(test_fixtures::tokenizer());
    let bytes: Vec<TokenId> = "\u{1f600}"
        .bytes()
        .map(|byte| TokenId(u32::from(byte)))
        .collect();
    for id in &bytes[..3] {
        assert_eq!(detokenizer.push(&[*id]), "");
        assert!(detokenizer.is_waiting());
    }
    assert_eq!(detokenizer.push(&bytes[3..]), "\u{1f600}");
    assert_eq!(detokenizer.finish(), "");
}

#[test]
fn control_tokens_are_hidden_and_user_defined_ones_shown() {
    let tokenizer = test_fixtures::tokenizer();
    let end = tokenizer.id_of("<|im_end|>").unwrap();
    let think = tokenizer.id_of("<think>").unwrap();
    assert_eq!(stream(&[think, end], &[]), "<think>");
}

#[test]
fn streamed_text_equals_the_published_decoding() {
    for pre in ["qwen35", "qwen2"] {
        let vocab = test_fixtures::fixture_vocab(&format!("tokenizer/reduced_{pre}.json"));
        let tokenizer = Arc::new(Tokenizer::new(&vocab).unwrap());
        let cases = test_fixtures::fixture_json(&format!("tokenizer/decode_{pre}.json"));
        for case in cases.as_array().unwrap() {
            let mut detokenizer = Detokenizer::new(tokenizer.clone());
            let mut text = String::new();
            for id in test_fixtures::ids(&case["ids"]) {
                text.push_str(&detokenizer.push(&[id]));
            }
            text.push_str(&detokenizer.finish());
            assert_eq!(text, case["text_without_control"].as_str().unwrap());
        }
    }
}

proptest! {
    #[test]
    fn detokenized_text_ignores_token_batching(
        bytes in prop::collection::vec(any::<u8>(), 0..40),
        cut in any::<prop::sample::Index>(),
    ) {
        let ids: Vec<TokenId> = bytes.iter().map(|byte| TokenId(u32::from(*byte))).collect();
        let whole = stream(&ids, &[]);
        prop_assert_eq!(&whole, &String::from_utf8_lossy(&bytes).into_owned());
        prop_assert_eq!(&whole, &stream(&ids, &[cut.index(ids.len() + 1)]));
        let singly: Vec<usize> = (0..ids.len()).collect();
        prop_assert_eq!(&whole, &stream(&ids, &singly));
    }
}
