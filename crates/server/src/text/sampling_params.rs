//! From request fields to the scheduler's generation parameters.

use std::sync::Arc;

use chat::request::{RepetitionWindow, SamplingParams};
use contract::{AttentionWindow, TokenId};
use decode::{GenerationParams, Sampling};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::ids;
use crate::settings::GenerationDefaults;

/// Default repetition window in tokens.
const REPETITION_WINDOW: usize = 256;

/// Context tokens left after a prompt; an error if none are left or the prompt is empty.
pub fn remaining_context(prompt_tokens: usize, context: usize) -> Result<usize, ApiError> {
    if prompt_tokens == 0 {
        return Err(ApiError::invalid_param(
            "prompt",
            "prompt: has no tokens, so there is nothing to continue",
        ));
    }
    match context.checked_sub(prompt_tokens) {
        None | Some(0) => Err(ApiError::ContextLength {
            prompt: prompt_tokens,
            limit: context,
        }),
        Some(remaining) => Ok(remaining),
    }
}

/// Generation parameters of a request.
///
/// `max_tokens` is already limited to the remaining context; clients often request more than fits.
pub fn generation_params(
    fields: &SamplingParams,
    defaults: &GenerationDefaults,
    max_tokens: usize,
    vocab: usize,
) -> Result<GenerationParams, ApiError> {
    for (token, _) in &fields.logit_bias {
        check_token(*token, vocab, "logit_bias")?;
    }
    for token in &fields.stop_token_ids {
        check_token(*token, vocab, "stop_token_ids")?;
    }
    let window = match fields.rep_window {
        None => Some(REPETITION_WINDOW),
        Some(RepetitionWindow::Last(tokens)) => Some(tokens),
        Some(RepetitionWindow::All) => None,
    };
    let mut bias = fields.logit_bias.clone();
    bias.sort_by_key(|(token, _)| *token);
    bias.dedup_by_key(|(token, _)| *token);
    Ok(GenerationParams {
        sampling: Sampling {
            temperature: fields.temperature.unwrap_or(defaults.temperature),
            top_k: fields.top_k.unwrap_or(defaults.top_k),
            top_p: fields.top_p.unwrap_or(defaults.top_p),
            min_p: fields.min_p.unwrap_or(defaults.min_p),
            repetition: fields
                .repetition_penalty
                .unwrap_or(defaults.repetition_penalty),
            frequency: fields.frequency_penalty.unwrap_or(0.0),
            presence: fields.presence_penalty.unwrap_or(defaults.presence_penalty),
            window,
            bias,
            seed: fields.seed.unwrap_or_else(ids::random_seed),
        },
        max_tokens,
        min_tokens: fields.min_tokens.min(max_tokens),
        stop_tokens: fields.stop_token_ids.clone(),
        allowed_tokens: None,
        bad_words: Arc::default(),
        ignore_eos: fields.ignore_eos,
        logprobs: None,
        prompt_logprobs: None,
        speculate: !fields.disable_speculation,
        window: AttentionWindow::FULL,
        constraints: None,
        session: None,
        use_prefix_cache: true,
    })
}

/// The parameters as used, in llama-server's names; -1 is no limit. Shows no text.
pub fn shown(params: &GenerationParams) -> Value {
    let sampling = &params.sampling;
    json!({
        "n_predict": params.max_tokens,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_last_n": sampling.window.map_or(-1, |n| i64::try_from(n).unwrap_or(i64::MAX)),
        "repeat_penalty": sampling.repetition,
        "presence_penalty": sampling.presence,
        "frequency_penalty": sampling.frequency,
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs.unwrap_or(0),
        "speculative": params.speculate,
    })
}

/// Fails, naming `field`, if a token is outside the vocabulary.
pub(super) fn check_token(token: TokenId, vocab: usize, field: &str) -> Result<(), ApiError> {
    if token.index() < vocab {
        return Ok(());
    }
    Err(ApiError::invalid_param(
        field,
        format!("{field}: token id {token} is outside the vocabulary of {vocab} tokens"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(fields: SamplingParams) -> GenerationParams {
        generation_params(&fields, &GenerationDefaults::default(), 100, 1000).unwrap()
    }

    #[test]
    fn absent_sampling_fields_default_to_the_model() {
        let defaults = GenerationDefaults {
            temperature: 0.6,
            top_k: 20,
            min_p: 0.1,
            ..GenerationDefaults::default()
        };
        let fields = SamplingParams {
            top_k: Some(0),
            ..SamplingParams::default()
        };
        let params = generation_params(&fields, &defaults, 100, 1000).unwrap();
        assert_eq!(params.sampling.temperature, 0.6);
        assert_eq!(params.sampling.min_p, 0.1);
        assert_eq!(params.sampling.top_k, 0);
        assert_eq!(params.sampling.window, Some(REPETITION_WINDOW));
    }

    #[test]
    fn min_tokens_never_exceed_max_tokens() {
        let fields = SamplingParams {
            min_tokens: 500,
            ..SamplingParams::default()
        };
        assert_eq!(check(fields).min_tokens, 100);
    }

    #[test]
    fn seed_is_random_unless_given() {
        let one = check(SamplingParams::default()).sampling.seed;
        let two = check(SamplingParams::default()).sampling.seed;
        assert_ne!(one, two);
        let fields = SamplingParams {
            seed: Some(7),
            ..SamplingParams::default()
        };
        assert_eq!(check(fields).sampling.seed, 7);
    }

    #[test]
    fn token_ids_outside_the_vocabulary_are_rejected_by_field() {
        let fields = SamplingParams {
            stop_token_ids: vec![TokenId(1000)],
            ..SamplingParams::default()
        };
        let error =
            generation_params(&fields, &GenerationDefaults::default(), 1, 1000).unwrap_err();
        assert!(matches!(error, ApiError::Invalid { param: Some(p), .. } if p == "stop_token_ids"));
    }

    #[test]
    fn full_context_is_an_error_and_one_free_token_is_not() {
        assert_eq!(remaining_context(99, 100), Ok(1));
        let full = ApiError::ContextLength {
            prompt: 100,
            limit: 100,
        };
        assert_eq!(remaining_context(100, 100), Err(full));
        assert!(remaining_context(101, 100).is_err());
    }
}
