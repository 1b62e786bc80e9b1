//! A small vocabulary and the published fixtures.

use std::sync::{Arc, LazyLock};

use contract::{PreTokenizer, TokenId, TokenKind, Vocab};
use serde_json::Value;

use crate::tokenizer::Tokenizer;

/// 256 bytes, a handful of merges, and the control strings of the family.
pub(crate) fn vocab() -> Vocab {
    let mut tokens: Vec<String> = Vec::new();
    let mut next = 0x100;
    for byte in 0..=255u32 {
        let code = match byte {
            0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => byte,
            _ => {
                next += 1;
                next - 1
            }
        };
        tokens.push(char::from_u32(code).unwrap().to_string());
    }
    let mut merges = Vec::new();
    for pair in [
        "h e",
        "l l",
        "he ll",
        "hell o",
        "\u{120} w",
        "o r",
        "\u{120}w or",
        "l d",
    ] {
        let (left, right) = pair.split_once(' ').unwrap();
        merges.push((left.to_owned(), right.to_owned()));
        tokens.push(format!("{left}{right}"));
    }
    let mut kinds = vec![TokenKind::Normal; tokens.len()];
    for control in ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] {
        tokens.push(control.to_owned());
        kinds.push(TokenKind::Control);
    }
    for tag in [
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    ] {
        tokens.push(tag.to_owned());
        kinds.push(TokenKind::UserDefined);
    }
    tokens.push("[PAD0]".to_owned());
    kinds.push(TokenKind::Unused);
    let id = |text: &str| {
        TokenId(u32::try_from(tokens.iter().position(|token| token == text).unwrap()).unwrap())
    };
    Vocab {
        eos: vec![id("<|im_end|>"), id("<|endoftext|>")],
        eos_token: Some(id("<|im_end|>")),
        pre: PreTokenizer::Qwen35,
        kinds,
        merges,
        tokens: tokens.clone(),
        ..Vocab::default()
    }
}

static TOKENIZER: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| Arc::new(Tokenizer::new(&vocab()).unwrap()));

pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    TOKENIZER.clone()
}

/// A file of the conformance fixtures.
pub(crate) fn fixture(path: &str) -> String {
    let file = format!(
        "{}/../conformance/fixtures/{path}",
        env!("CARGO_MANIFEST_DIR")
    );
    std::fs::read_to_string(&file).unwrap_or_else(|err| panic!("{file}: {err}"))
}

pub(crate) fn fixture_json(path: &str) -> Value {
    serde_json::from_str(&fixture(path)).unwrap()
}

/// A token's kind by its number in GGUF files.
pub(crate) fn kind(json: &Value) -> TokenKind {
    match json.as_u64() {
        Some(1) => TokenKind::Normal,
        Some(2) => TokenKind::Unknown,
        Some(3) => TokenKind::Control,
        Some(4) => TokenKind::UserDefined,
        Some(5) => TokenKind::Unused,
        Some(6) => TokenKind::Byte,
        other => panic!("token type {other:?}"),
    }
}

/// The cut-down vocabulary of a fixture such as `reduced_qwen35.json`.
pub(crate) fn fixture_vocab(path: &str) -> Vocab {
    let json = fixture_json(path);
    let texts = |key: &str| -> Vec<String> {
        json[key]
            .as_array()
            .unwrap()
            .iter()
            .map(|text| text.as_str().unwrap().to_owned())
            .collect()
    };
    let kinds = json["token_type"].as_array().unwrap().iter().map(kind);
    Vocab {
        tokens: texts("tokens"),
        kinds: kinds.collect(),
        merges: texts("merges")
            .iter()
            .map(|merge| {
                // The first character may itself be a space, so the search begins behind it.
                let first = merge.chars().next().unwrap().len_utf8();
                let at = merge[first..].find(' ').unwrap() + first;
                (merge[..at].to_owned(), merge[at + 1..].to_owned())
            })
            .collect(),
        pre: match json["pre"].as_str() {
            Some("qwen35") => PreTokenizer::Qwen35,
            Some("qwen2") => PreTokenizer::Qwen2,
            other => panic!("pre-tokenizer {other:?}"),
        },
        ..Vocab::default()
    }
}

/// The ids in a JSON array.
pub(crate) fn ids(json: &Value) -> Vec<TokenId> {
    json.as_array()
        .unwrap()
        .iter()
        .map(|id| TokenId(u32::try_from(id.as_u64().unwrap()).unwrap()))
        .collect()
}

/// Time that this thread has had a core. What other programs use is not in it.
pub(crate) fn thread_time() -> std::time::Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let on_core = stat.split_whitespace().next().unwrap();
    std::time::Duration::from_nanos(on_core.parse().unwrap())
}
