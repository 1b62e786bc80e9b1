//! Validation of a submitted job.

use crate::error::SubmitError;
use crate::job::{GenerationParams, Job};

/// Rejects jobs that cannot run. `vocab` is the length of a row, `context` the most tokens of a
/// sequence.
pub(super) fn validate(job: &Job, vocab: usize, context: usize) -> Result<(), SubmitError> {
    let invalid = |field, detail: String| Err(SubmitError::Invalid { field, detail });
    let prompt = job.prompt.len();
    if prompt == 0 {
        return Err(SubmitError::EmptyPrompt);
    }
    // A prompt that fills the context can be prefilled but not continued.
    let longest = context.saturating_sub(usize::from(job.params.max_tokens > 0));
    if prompt > longest {
        return Err(SubmitError::TooLong {
            prompt_tokens: prompt,
            context_tokens: context,
        });
    }
    if job.choices == 0 || job.choices > Job::MAX_CHOICES {
        let (n, most) = (job.choices, Job::MAX_CHOICES);
        return invalid("n", format!("{n} is not between 1 and {most}"));
    }
    let params = &job.params;
    for (field, count) in [
        ("logprobs", params.logprobs),
        ("prompt_logprobs", params.prompt_logprobs),
    ] {
        let most = GenerationParams::MAX_LOGPROBS;
        if let Some(n) = count.filter(|n| *n > most) {
            return invalid(field, format!("{n} is more than {most}"));
        }
    }
    let s = &params.sampling;
    let ranges: [(&'static str, f32, f32, f32); 6] = [
        ("temperature", s.temperature, 0.0, f32::MAX),
        ("top_p", s.top_p, 0.0, 1.0),
        ("min_p", s.min_p, 0.0, 1.0),
        (
            "repetition_penalty",
            s.repetition,
            f32::MIN_POSITIVE,
            f32::MAX,
        ),
        ("frequency_penalty", s.frequency, f32::MIN, f32::MAX),
        ("presence_penalty", s.presence, f32::MIN, f32::MAX),
    ];
    for (field, value, least, most) in ranges {
        if !(least..=most).contains(&value) {
            return invalid(field, format!("{value} is not between {least} and {most}"));
        }
    }
    if let Some(token) = job.prompt.iter().find(|t| t.index() >= vocab) {
        return invalid(
            "prompt",
            format!("token {token} is beyond the vocabulary of {vocab}"),
        );
    }
    let allowed = params.allowed_tokens.as_deref();
    if allowed.is_some_and(<[_]>::is_empty) {
        return invalid("allowed_token_ids", "no token is allowed".to_owned());
    }
    let mut allowed = allowed.unwrap_or_default().iter();
    if let Some(token) = allowed.find(|token| token.index() >= vocab) {
        return invalid(
            "allowed_token_ids",
            format!("token {token} is beyond the vocabulary of {vocab}"),
        );
    }
    for (i, (token, bias)) in s.bias.iter().enumerate() {
        if bias.is_nan() {
            return invalid(
                "logit_bias",
                format!("the bias of token {token} is no number"),
            );
        }
        if token.index() >= vocab {
            return invalid(
                "logit_bias",
                format!("token {token} is beyond the vocabulary of {vocab}"),
            );
        }
        if s.bias[..i].iter().any(|(other, _)| other == token) {
            return invalid("logit_bias", format!("token {token} occurs twice"));
        }
    }
    Ok(())
}
