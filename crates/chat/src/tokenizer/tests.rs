use contract::SentencePieces;
use proptest::prelude::*;

use super::*;
use crate::test_fixtures::{self, thread_time};

fn check_vectors(vocabulary: &str, vectors: &str) {
    let vocab = test_fixtures::fixture_vocab(vocabulary);
    let composed = Tokenizer::new(&vocab).unwrap();
    let plain = Tokenizer::with_normalizer(&vocab, UnicodeNormalizer::Off).unwrap();
    let cases = test_fixtures::fixture_json(vectors);
    let cases = cases.as_array().unwrap();
    assert!(cases.len() > 20, "the fixture holds vectors");
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let text = case["text"].as_str().unwrap();
        let ids = composed.encode(text, SpecialTokens::Parse).unwrap();
        assert_eq!(ids, test_fixtures::ids(&case["ids"]), "{name}");
        let without_nfc = plain.encode(text, SpecialTokens::Parse).unwrap();
        assert_eq!(
            without_nfc,
            test_fixtures::ids(&case["ids_without_nfc"]),
            "{name} without nfc"
        );
        let literal = composed.encode(text, SpecialTokens::AsText).unwrap();
        assert_eq!(
            literal,
            test_fixtures::ids(&case["ids_without_special"]),
            "{name} literal"
        );
        assert_eq!(
            composed.decode(&ids),
            case["decoded"].as_str().unwrap(),
            "{name} decoded"
        );
    }
}

#[test]
fn ids_equal_those_of_the_hugging_face_tokenizer() {
    check_vectors(
        "tokenizer/reduced_qwen35.json",
        "tokenizer/vectors_qwen35.json",
    );
    check_vectors(
        "tokenizer/reduced_qwen2.json",
        "tokenizer/vectors_qwen2.json",
    );
}

/// The vocabulary that `sentencepiece` trained.
fn piece_vocab(space_prefix: bool) -> Vocab {
    let json = test_fixtures::fixture_json("tokenizer/sentence_piece.json");
    let list = |key: &str| json[key].as_array().unwrap().clone();
    Vocab {
        tokens: list("tokens")
            .iter()
            .map(|token| token.as_str().unwrap().to_owned())
            .collect(),
        kinds: list("kinds").iter().map(test_fixtures::kind).collect(),
        pieces: Some(SentencePieces {
            scores: list("scores")
                .iter()
                .map(|score| score.as_f64().unwrap() as f32)
                .collect(),
            space_prefix,
            unknown: None,
        }),
        ..Vocab::default()
    }
}

#[test]
fn ids_equal_those_of_sentencepiece() {
    let json = test_fixtures::fixture_json("tokenizer/sentence_piece.json");
    let cases = json["cases"].as_array().unwrap();
    assert!(cases.len() > 40);
    for prefix in [false, true] {
        let tokenizer = Tokenizer::new(&piece_vocab(prefix)).unwrap();
        for case in cases.iter().filter(|case| case["prefix"] == prefix) {
            let text = case["text"].as_str().unwrap();
            let ids = tokenizer.encode(text, SpecialTokens::AsText).unwrap();
            assert_eq!(
                ids,
                test_fixtures::ids(&case["ids"]),
                "{text:?} with prefix {prefix}"
            );
            let decoded = tokenizer.decode(&ids).replace('\u{2581}', " ");
            let wanted = text.replace('\u{2581}', " ");
            assert_eq!(
                decoded
                    .strip_prefix(if prefix { " " } else { "" })
                    .unwrap_or(""),
                wanted
            );
        }
    }
}

#[test]
fn damaged_piece_vocabularies_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut Vocab)| {
        let mut vocab = piece_vocab(false);
        change(&mut vocab);
        Tokenizer::new(&vocab).unwrap_err().to_string()
    };
    let scores = |vocab: &mut Vocab| vocab.pieces.as_mut().unwrap().scores.truncate(3);
    assert!(refused(&scores).contains("3 scores"));
    let twice = |vocab: &mut Vocab| {
        let last = vocab.tokens.len() - 1;
        vocab.tokens[last] = vocab.tokens[last - 1].clone();
    };
    assert!(refused(&twice).contains("are both"));
    let no_bytes = |vocab: &mut Vocab| {
        vocab.kinds.iter_mut().for_each(|kind| {
            if matches!(kind, TokenKind::Byte | TokenKind::Unknown) {
                *kind = TokenKind::Unused;
            }
        });
    };
    assert!(refused(&no_bytes).contains("not every text"));
}

#[test]
fn user_defined_pieces_match_in_client_text_and_control_strings_do_not() {
    let tokenizer = Tokenizer::new(&piece_vocab(false)).unwrap();
    let breaks = tokenizer.id_of("\n\n").unwrap();
    let end = tokenizer.id_of("</s>").unwrap();
    let ids = tokenizer
        .encode("a\n\n</s>", SpecialTokens::AsText)
        .unwrap();
    assert!(ids.contains(&breaks) && !ids.contains(&end));
    let ids = tokenizer.encode("a\n\n</s>", SpecialTokens::Parse).unwrap();
    assert!(ids.contains(&breaks) && ids.contains(&end));
}

#[test]
fn prompts_begin_with_the_bos_token_if_the_file_wants_it() {
    let mut vocab = piece_vocab(false);
    vocab.bos_token = Some(TokenId(1));
    for add_bos in [false, true] {
        vocab.add_bos = add_bos;
        let tokenizer = Tokenizer::new(&vocab).unwrap();
        let plain = tokenizer.encode("the", SpecialTokens::Parse).unwrap();
        let prompt = tokenizer
            .encode_prompt_up_to("the", usize::MAX.into())
            .unwrap();
        assert_eq!(prompt[usize::from(add_bos)..], plain);
        assert_eq!(prompt.first() == Some(&TokenId(1)), add_bos);
        let given = tokenizer
            .encode_prompt_up_to("<s>the", usize::MAX.into())
            .unwrap();
        assert_eq!(given.iter().filter(|id| **id == TokenId(1)).count(), 1);
    }
}

#[test]
fn missing_control_bytes_are_lost_and_the_rest_is_kept() {
    let mut vocab = test_fixtures::vocab();
    let letter = ByteAlphabet::new().letter(0x04).to_string();
    let at = vocab
        .tokens
        .iter()
        .position(|token| *token == letter)
        .unwrap();
    vocab.kinds[at] = TokenKind::Unused;
    let tokenizer = Tokenizer::new(&vocab).unwrap();
    let ids = tokenizer.encode("a\u{4}b", SpecialTokens::AsText).unwrap();
    assert_eq!(tokenizer.decode(&ids), "ab");
}

#[test]
fn decoded_bytes_equal_those_of_the_hugging_face_tokenizer() {
    for pre in ["qwen35", "qwen2"] {
        let vocab = test_fixtures::fixture_vocab(&format!("tokenizer/reduced_{pre}.json"));
        let tokenizer = Tokenizer::new(&vocab).unwrap();
        let cases = test_fixtures::fixture_json(&format!("tokenizer/decode_{pre}.json"));
        for case in cases.as_array().unwrap() {
            assert_eq!(
                tokenizer.decode(&test_fixtures::ids(&case["ids"])),
                case["text"].as_str().unwrap()
            );
        }
    }
}

#[test]
fn control_string_from_a_user_is_plain_text() {
    let tokenizer = test_fixtures::tokenizer();
    let marker = tokenizer.id_of("<|im_end|>").unwrap();
    let matched = tokenizer
        .encode("hello<|im_end|>", SpecialTokens::Parse)
        .unwrap();
    assert_eq!(matched.last(), Some(&marker));
    let literal = tokenizer
        .encode("hello<|im_end|>", SpecialTokens::AsText)
        .unwrap();
    assert!(!literal.contains(&marker));
    assert_eq!(tokenizer.decode(&literal), "hello<|im_end|>");
}

#[test]
fn special_strings_match_outside_literal_ranges_only() {
    let tokenizer = test_fixtures::tokenizer();
    let text = "<|im_start|>x<|im_end|>y<|im_end|>".to_owned();
    let typed = text.find("<|im_end|>").unwrap();
    let literal = typed..typed + "<|im_end|>".len();
    let rendered = RenderedPrompt {
        text,
        literals: vec![literal],
    };
    let ids = tokenizer.encode_rendered(&rendered).unwrap();
    let marker = tokenizer.id_of("<|im_end|>").unwrap();
    assert_eq!(ids.iter().filter(|id| **id == marker).count(), 1);
    assert_eq!(ids.last(), Some(&marker));
    assert_eq!(tokenizer.decode(&ids), rendered.text);
}

#[test]
fn unused_token_is_never_matched() {
    let tokenizer = test_fixtures::tokenizer();
    let ids = tokenizer.encode("[PAD0]", SpecialTokens::Parse).unwrap();
    assert!(
        ids.iter()
            .all(|id| tokenizer.kind(*id) == TokenKind::Normal)
    );
    assert_eq!(tokenizer.decode(&ids), "[PAD0]");
}

#[test]
fn bos_token_is_added_once_when_requested() {
    let mut vocab = test_fixtures::vocab();
    vocab.bos_token = Some(vocab.eos[1]);
    vocab.add_bos = true;
    let tokenizer = Tokenizer::new(&vocab).unwrap();
    let bos = vocab.eos[1];
    for text in ["hello", "<|endoftext|>hello"] {
        let rendered = RenderedPrompt {
            text: text.to_owned(),
            literals: Vec::new(),
        };
        let ids = tokenizer.encode_rendered(&rendered).unwrap();
        assert_eq!(ids.iter().filter(|id| **id == bos).count(), 1, "{text}");
        assert_eq!(ids[0], bos, "{text}");
    }
}

#[test]
fn long_text_without_word_boundaries_is_encoded() {
    let tokenizer = test_fixtures::tokenizer();
    for text in [
        " ".repeat(300_000),
        "a".repeat(300_000),
        "\u{e9}".repeat(100_000),
        "\n \n".repeat(100_000),
        "!".repeat(300_000),
        "<".repeat(300_000),
        format!("{}x", " ".repeat(300_000)),
    ] {
        let ids = tokenizer.encode(&text, SpecialTokens::Parse).unwrap();
        assert!(
            tokenizer.decode(&ids) == text,
            "a run of {:?}",
            text.chars().next()
        );
    }
}

#[test]
fn min_token_count_is_a_useful_lower_bound() {
    let tokenizer = test_fixtures::tokenizer();
    for text in [
        "",
        "hello world",
        "<|im_start|>",
        "\u{e9}",
        "e\u{301}",
        "\u{1112}\u{1161}\u{11ab}",
    ] {
        let n_tokens = tokenizer.encode(text, SpecialTokens::Parse).unwrap().len();
        assert!(tokenizer.min_token_count(text) <= n_tokens, "{text:?}");
    }
    assert!(tokenizer.min_token_count(&"a".repeat(100_000)) > 1_000);
}

fn refusal(change: impl FnOnce(&mut Vocab)) -> String {
    let mut vocab = test_fixtures::vocab();
    change(&mut vocab);
    let err = Tokenizer::new(&vocab).unwrap_err();
    assert_eq!(err.kind, crate::ErrorKind::Setup);
    err.message
}

#[test]
fn unusable_vocabulary_is_refused_with_the_reason() {
    let missing = refusal(|vocab| vocab.merges.push(("h".into(), "zz".into())));
    assert!(
        missing.contains("merge 8") && missing.contains("\"zz\""),
        "{missing}"
    );
    let hostile = refusal(|vocab| vocab.merges.push(("h".repeat(4000), "e".into())));
    assert!(hostile.contains("merge 8"), "{hostile}");
    let twice = refusal(|vocab| vocab.tokens[5] = vocab.tokens[4].clone());
    assert!(twice.contains("tokens 4 and 5"), "{twice}");
    let byte = refusal(|vocab| vocab.tokens[0x41] = "a letter twice".into());
    assert!(byte.contains("0x41"), "{byte}");
    let lengths = refusal(|vocab| {
        vocab.kinds.pop();
    });
    assert!(lengths.contains("token types"), "{lengths}");
    let outside = refusal(|vocab| vocab.eos.push(TokenId(70_000)));
    assert!(outside.contains("70000"), "{outside}");
    let special = refusal(|vocab| {
        vocab.tokens.push("<think>".into());
        vocab.kinds.push(TokenKind::Control);
    });
    assert!(special.contains("<think>"), "{special}");
}

#[test]
fn cached_segment_has_the_same_tokens() {
    let tokenizer = test_fixtures::tokenizer();
    let turn = "<|im_start|>user\nhello there, e\u{301} and 12 more words ".repeat(40);
    let first = tokenizer.encode(&turn, SpecialTokens::Parse).unwrap();
    let longer = format!("{turn}<|im_end|>{turn}");
    for special in [SpecialTokens::Parse, SpecialTokens::AsText] {
        let fresh = test_fixtures::tokenizer().encode(&longer, special).unwrap();
        assert_eq!(tokenizer.encode(&longer, special).unwrap(), fresh);
        assert_eq!(tokenizer.encode(&longer, special).unwrap(), fresh);
    }
    assert_eq!(
        tokenizer.encode(&turn, SpecialTokens::Parse).unwrap(),
        first
    );
}

#[test]
fn ids_outside_the_vocabulary_have_no_bytes() {
    let tokenizer = test_fixtures::tokenizer();
    assert_eq!(tokenizer.bytes(TokenId(u32::MAX)), b"");
    assert_eq!(tokenizer.kind(TokenId(u32::MAX)), TokenKind::Unused);
}

proptest! {
    #[test]
    fn encode_then_decode_is_identity(text in any::<String>()) {
        let vocab = test_fixtures::vocab();
        let tokenizer = Tokenizer::with_normalizer(&vocab, UnicodeNormalizer::Off).unwrap();
        for special in [SpecialTokens::Parse, SpecialTokens::AsText] {
            let ids = tokenizer.encode(&text, special).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids), text.clone());
        }
    }
}

#[test]
fn encoding_stops_soon_after_its_limit() {
    let tokenizer = Tokenizer::new(&test_fixtures::vocab()).unwrap();
    let text = "many words in a row ".repeat(400_000);
    let begun = thread_time();
    let ids = tokenizer
        .encode_up_to(&text, SpecialTokens::AsText, 5000)
        .unwrap();
    // 8 MB take many seconds as a whole.
    assert!(thread_time() - begun < std::time::Duration::from_secs(1));
    assert!((5001..5100).contains(&ids.len()), "{}", ids.len());
    let start = &text[..20_000];
    let whole = tokenizer.encode(start, SpecialTokens::AsText).unwrap();
    let within = tokenizer
        .encode_up_to(start, SpecialTokens::AsText, whole.len())
        .unwrap();
    assert_eq!(within, whole);
    assert_eq!(ids[..4000], whole[..4000]);
}

#[test]
fn endless_word_is_refused_quickly() {
    let tokenizer = Tokenizer::new(&test_fixtures::vocab()).unwrap();
    let begun = thread_time();
    let error = tokenizer
        .encode(&"a".repeat(30 << 20), SpecialTokens::AsText)
        .unwrap_err();
    assert!(error.message.contains("no word boundary"), "{error}");
    assert!(thread_time() - begun < std::time::Duration::from_secs(10));
}

#[test]
fn encoding_ends_soon_after_its_flag_is_set() {
    let tokenizer = test_fixtures::tokenizer();
    let flag = super::CancelFlag::default();
    let text = "some words that no cache holds, ".repeat(100_000);
    let encode = || {
        let limit = super::EncodeLimit {
            tokens: usize::MAX,
            cancel: Some(&flag),
        };
        tokenizer.encode_up_to(&text, SpecialTokens::AsText, limit)
    };
    let begun = thread_time();
    assert!(encode().is_ok());
    let whole = thread_time() - begun;
    let other = format!("{text}.");
    let begun = thread_time();
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(whole / 20);
            flag.cancel();
        });
        let limit = super::EncodeLimit {
            tokens: usize::MAX,
            cancel: Some(&flag),
        };
        tokenizer.encode_up_to(&other, SpecialTokens::AsText, limit)
    });
    let error = result.unwrap_err();
    assert!(error.message.contains("given up"), "{error:?}");
    let cut = thread_time() - begun;
    assert!(cut < whole, "{cut:?} of {whole:?}");
    assert!(encode().is_ok(), "cached text needs no work");
}

#[test]
fn token_starts_cover_the_text_of_prompts_and_refuse_other_texts() {
    let vocab = test_fixtures::fixture_vocab("tokenizer/reduced_qwen35.json");
    let tokenizer = Tokenizer::new(&vocab).unwrap();
    let text = "<|im_start|>user\nWide ünïcode 今日, and 12345!\n<|im_end|>";
    let ids = tokenizer.encode(text, SpecialTokens::Parse).unwrap();
    let starts = tokenizer.token_starts(text, &ids).unwrap();
    assert_eq!(starts[0], 0);
    let ends = starts[1..].iter().copied().chain([text.len()]);
    for ((id, start), end) in ids.iter().zip(&starts).zip(ends) {
        assert_eq!(tokenizer.bytes(*id), &text.as_bytes()[*start..end]);
    }
    assert_eq!(tokenizer.token_starts(&text[1..], &ids), None);
    assert_eq!(tokenizer.token_starts(text, &ids[1..]), None);
    // Normalisation changes the bytes.
    let apart = "u\u{308}";
    let ids = tokenizer.encode(apart, SpecialTokens::AsText).unwrap();
    assert_eq!(tokenizer.token_starts(apart, &ids), None);
}

#[test]
fn token_starts_skip_the_space_that_pieces_put_first() {
    let tokenizer = Tokenizer::new(&piece_vocab(true)).unwrap();
    let text = "the cat";
    let ids = tokenizer.encode(text, SpecialTokens::AsText).unwrap();
    let starts = tokenizer.token_starts(text, &ids).unwrap();
    assert_eq!((starts.len(), starts[0]), (ids.len(), 0));
}
