//! Ids of hard texts by `tokenizers` and `sentencepiece`, from `harness/golden/text_ids.py`.

use std::path::Path;

use chat::{SpecialTokens, Tokenizer};
use contract::TokenId;
use serde_json::Value;

use super::{GEMMA3, SMOLLM2, weights};

fn check(file: &str, fixture: &str, special: SpecialTokens) {
    let Some(path) = weights(file) else { return };
    let tokenizer = Tokenizer::new(&model::load_vocab(&path).unwrap()).unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/fixtures/tokenizer");
    let json = std::fs::read(folder.join(fixture)).unwrap();
    let cases: Vec<Value> = serde_json::from_slice(&json).unwrap();
    assert!(cases.len() > 25);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ids = tokenizer.encode(text, special).unwrap();
        let expected = case["ids"].as_array().unwrap().iter();
        let expected: Vec<TokenId> = expected
            .map(|id| TokenId(id.as_u64().unwrap() as u32))
            .collect();
        assert_eq!(ids, expected, "{text:?}");
    }
}

#[test]
fn smollm2_ids_equal_those_of_tokenizers() {
    check(SMOLLM2, "real_smollm2.json", SpecialTokens::Parse);
}

#[test]
fn gemma3_ids_equal_those_of_sentencepiece() {
    check(GEMMA3, "real_gemma3.json", SpecialTokens::AsText);
}
