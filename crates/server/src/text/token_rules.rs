//! Allowed tokens, bad words and stop tokens: from a request's fields to token ids.

use std::sync::Arc;

use chat::request::SamplingParams;
use chat::{SpecialTokens, Tokenizer};
use contract::TokenId;
use decode::GenerationParams;

use super::sampling_params::check_token;
use crate::error::ApiError;

/// Restricts `params` to the allowed tokens of a request, without its bad words. `vocab` is the
/// length of a logits row.
pub fn restrict(
    params: &mut GenerationParams,
    fields: &SamplingParams,
    tokenizer: &Tokenizer,
    vocab: usize,
) -> Result<(), ApiError> {
    if let Some(allowed) = &fields.allowed_token_ids {
        for token in allowed {
            check_token(*token, vocab, "allowed_token_ids")?;
        }
        params.allowed_tokens = Some(allowed.as_slice().into());
    }
    let mut words: Vec<Vec<TokenId>> = Vec::new();
    for word in &fields.bad_words {
        words.extend(spellings(word, tokenizer)?);
    }
    params.bad_words = Arc::from(words);
    Ok(())
}

/// The tokens of a bad word at the start of a text, and behind a blank if that is another token.
///
/// As in vLLM, the second spelling counts only if it has as many tokens as the first: else it
/// begins with a token for the blank alone, which must stay possible.
fn spellings(word: &str, tokenizer: &Tokenizer) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let word = word.trim_start();
    let plain = tokenizer.encode(word, SpecialTokens::Parse)?;
    let spaced = tokenizer.encode(&format!(" {word}"), SpecialTokens::Parse)?;
    let differs = spaced.len() == plain.len() && spaced.first() != plain.first();
    let mut spellings = vec![plain];
    if differs {
        spellings.push(spaced);
    }
    spellings.retain(|tokens| !tokens.is_empty());
    Ok(spellings)
}

/// The stop tokens whose match is reported: an end token of the model ends a text by itself.
pub fn reported_stop_tokens(fields: &SamplingParams, eos: &[TokenId]) -> Vec<TokenId> {
    let stops = fields.stop_token_ids.iter().copied();
    stops
        .filter(|token| fields.ignore_eos || !eos.contains(token))
        .collect()
}
