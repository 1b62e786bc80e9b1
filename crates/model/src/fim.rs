//! Tokens of a text with a gap (fill in the middle): by the file's keys, else by their texts.

use contract::{FimTokens, TokenId};

use crate::ModelError;

/// A token's key, its older key, and its texts in the vocabularies of several families.
struct FimToken {
    keys: &'static [&'static str],
    texts: &'static [&'static str],
}

const PREFIX: FimToken = FimToken {
    keys: &[
        "tokenizer.ggml.fim_pre_token_id",
        "tokenizer.ggml.prefix_token_id",
    ],
    texts: &[
        "<|fim_prefix|>",
        "<fim_prefix>",
        "<fim-prefix>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<｜fim▁begin｜>",
    ],
};
const SUFFIX: FimToken = FimToken {
    keys: &[
        "tokenizer.ggml.fim_suf_token_id",
        "tokenizer.ggml.suffix_token_id",
    ],
    texts: &[
        "<|fim_suffix|>",
        "<fim_suffix>",
        "<fim-suffix>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<｜fim▁hole｜>",
    ],
};
const MIDDLE: FimToken = FimToken {
    keys: &[
        "tokenizer.ggml.fim_mid_token_id",
        "tokenizer.ggml.middle_token_id",
    ],
    texts: &[
        "<|fim_middle|>",
        "<fim_middle>",
        "<fim-middle>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<｜fim▁end｜>",
    ],
};
const REPOSITORY: FimToken = FimToken {
    keys: &["tokenizer.ggml.fim_rep_token_id"],
    texts: &["<|repo_name|>", "<|fim_repo|>", "<fim-repo>", "<reponame>"],
};
const FILE: FimToken = FimToken {
    keys: &["tokenizer.ggml.fim_sep_token_id"],
    texts: &["<|file_sep|>", "<file_sep>"],
};

/// The tokens of a vocabulary, if it has the three that a gap needs. `by_key` reads a token's id.
pub(crate) fn tokens(
    texts: &[String],
    by_key: impl Fn(&str) -> Result<Option<TokenId>, ModelError>,
) -> Result<Option<FimTokens>, ModelError> {
    let find = |token: &FimToken| -> Result<Option<TokenId>, ModelError> {
        for key in token.keys {
            if let Some(id) = by_key(key)? {
                return Ok(Some(id));
            }
        }
        let position = |known: &&str| texts.iter().position(|text| text == known);
        let found = token.texts.iter().find_map(position);
        Ok(found.and_then(|id| u32::try_from(id).ok()).map(TokenId))
    };
    let parts = (find(&PREFIX)?, find(&SUFFIX)?, find(&MIDDLE)?);
    let (repository, file) = (find(&REPOSITORY)?, find(&FILE)?);
    Ok(match parts {
        (Some(prefix), Some(suffix), Some(middle)) => Some(FimTokens {
            prefix,
            suffix,
            middle,
            repository,
            file,
        }),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_by_key_then_by_text() {
        let texts = ["a", "<PRE>", "<SUF>", "<MID>", "<|file_sep|>", "b"].map(str::to_owned);
        let none = |_: &str| Ok(None);
        let found = tokens(&texts, none).unwrap().unwrap();
        let expected = FimTokens {
            prefix: TokenId(1),
            suffix: TokenId(2),
            middle: TokenId(3),
            repository: None,
            file: Some(TokenId(4)),
        };
        assert_eq!(found, expected);
        let older = |key: &str| Ok((key == "tokenizer.ggml.middle_token_id").then_some(TokenId(5)));
        let found = tokens(&texts, older).unwrap().unwrap();
        assert_eq!(found.middle, TokenId(5));
        assert_eq!(tokens(&texts[..3], none).unwrap(), None);
    }
}
