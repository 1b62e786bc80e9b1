//! Reads sampling, length and stop fields; chat and text completions share them.

use std::ops::RangeInclusive;

use contract::TokenId;
use serde_json::Value;

use super::fields::{Fields, integer, must_be, number_of};
use crate::error::ChatError;
use crate::request::{
    MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, MAX_CHOICES, MAX_STOPS, RepetitionWindow, SamplingParams,
};

impl SamplingParams {
    /// Reads the fields; the stop strings are in `stop_key`.
    pub(crate) fn read(body: &Fields<'_>, stop_key: &str) -> Result<SamplingParams, ChatError> {
        refuse_unsupported(body)?;
        Ok(SamplingParams {
            max_tokens: max_tokens(body)?,
            temperature: float(body, "temperature", 0.0..=MAX_FLOAT)?,
            top_p: float(body, "top_p", 0.0..=1.0)?,
            top_k: top_k(body)?,
            min_p: float(body, "min_p", 0.0..=1.0)?,
            frequency_penalty: float(body, "frequency_penalty", -MAX_FLOAT..=MAX_FLOAT)?,
            presence_penalty: float(body, "presence_penalty", -MAX_FLOAT..=MAX_FLOAT)?,
            repetition_penalty: repetition_penalty(body)?,
            rep_window: rep_window(body)?,
            seed: seed(body)?,
            logit_bias: logit_bias(body)?,
            ignore_eos: body.flag("ignore_eos", false)?,
            min_tokens: body.count("min_tokens", u32::MAX as usize)?.unwrap_or(0),
            stop: stop(body, stop_key)?,
            stop_token_ids: token_ids(body, "stop_token_ids", MAX_STOPS)?.unwrap_or_default(),
            include_stop: body.flag("include_stop_str_in_output", false)?,
            allowed_token_ids: allowed_token_ids(body)?,
            bad_words: bad_words(body)?,
            n: choices(body)?,
            disable_speculation: !body.flag("speculative", true)?,
        })
    }
}

/// Fields of llama.cpp and vLLM that would change the reply and that this server does not have.
const UNSUPPORTED: [&str; 16] = [
    "use_beam_search",
    "logprob_token_ids",
    "return_prompt_text",
    "documents",
    "chat_template",
    "vllm_xargs",
    "watermarking",
    "repetition_detection",
    "dry_multiplier",
    "xtc_probability",
    "mirostat",
    "dynatemp_range",
    "logits_processors",
    "return_tokens_as_token_ids",
    "return_tokens",
    "lora",
];
/// Fields that only change the replies of chat and text completions.
const COMPLETIONS_ONLY: [&str; 3] = ["prompt_logprobs", "return_token_ids", "echo"];
/// Such fields that ask for nothing up to 0.
const UNSUPPORTED_ABOVE_ZERO: [&str; 4] =
    ["n_probs", "n_indent", "t_max_predict_ms", "top_n_sigma"];
/// Such fields that ask for nothing at one value.
const UNSUPPORTED_UNLESS: [(&str, f64); 4] = [
    ("typical_p", 1.0),
    ("tfs_z", 1.0),
    ("length_penalty", 1.0),
    ("top_a", 0.0),
];

/// Refuses fields whose results the replies of a dialect have no place for.
pub(crate) fn refuse_completions_only(body: &Fields<'_>) -> Result<(), ChatError> {
    for key in COMPLETIONS_ONLY {
        let is_logprobs = key == "prompt_logprobs" && body.get(key).is_some();
        if is_logprobs || asks_for_something(body, key) {
            let message = "is not supported in this dialect; leave it out, or use a completion";
            return Err(body.error(key, message));
        }
    }
    Ok(())
}

/// Whether a field is there with a value that means more than its absence.
pub(crate) fn asks_for_something(body: &Fields<'_>, key: &str) -> bool {
    match body.get(key) {
        None | Some(Value::Bool(false)) => false,
        Some(Value::Number(number)) => number.as_f64() != Some(0.0),
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(items)) => !items.is_empty(),
        Some(_) => true,
    }
}

/// Refuses an unsupported field by name, unless its value asks for nothing.
fn refuse_unsupported(body: &Fields<'_>) -> Result<(), ChatError> {
    for key in UNSUPPORTED {
        if asks_for_something(body, key) {
            return Err(body.error(key, "is not supported; leave it out"));
        }
    }
    if body.bool("skip_special_tokens")? == Some(false) {
        let message = "false is not supported: control tokens are never text; leave it out";
        return Err(body.error("skip_special_tokens", message));
    }
    for key in UNSUPPORTED_ABOVE_ZERO {
        let value = body.number(key, -MAX_FLOAT..=MAX_FLOAT)?;
        if value.is_some_and(|value| value > 0.0) {
            return Err(body.error(key, "is not supported; leave it out"));
        }
    }
    for (key, neutral) in UNSUPPORTED_UNLESS {
        let value = body.number(key, -MAX_FLOAT..=MAX_FLOAT)?;
        if value.is_some_and(|value| value != neutral) {
            let message = format!("is not supported; leave it out, or send {neutral}");
            return Err(body.error(key, message));
        }
    }
    Ok(())
}

/// The largest finite value of a parameter.
const MAX_FLOAT: f64 = f32::MAX as f64;

fn float(
    body: &Fields<'_>,
    key: &str,
    range: RangeInclusive<f64>,
) -> Result<Option<f32>, ChatError> {
    Ok(body.number(key, range)?.map(|value| value as f32))
}

fn max_tokens(body: &Fields<'_>) -> Result<Option<usize>, ChatError> {
    let aliases = [
        "max_completion_tokens",
        "max_tokens",
        "max_output_tokens",
        "n_predict",
    ];
    let Some(key) = body.first(&aliases) else {
        return Ok(None);
    };
    let count = body.int(key, -1..=i64::from(u32::MAX))?;
    // -1 is no limit but the context's; 0 is a limit like any other.
    Ok(count.map(|count| usize::try_from(count).unwrap_or(usize::MAX)))
}

fn top_k(body: &Fields<'_>) -> Result<Option<usize>, ChatError> {
    let value = body.int("top_k", i64::from(i32::MIN)..=i64::from(u32::MAX))?;
    // Any negative value is off too.
    Ok(value.map(|value| usize::try_from(value).unwrap_or(0)))
}

fn repetition_penalty(body: &Fields<'_>) -> Result<Option<f32>, ChatError> {
    let aliases = ["repetition_penalty", "rep_pen", "repeat_penalty"];
    let Some(key) = body.first(&aliases) else {
        return Ok(None);
    };
    match body.number(key, 0.0..=MAX_FLOAT)? {
        // Smaller positive values would round to 0 in f32, by which nothing can be divided.
        Some(value) if value < f64::from(f32::MIN_POSITIVE) => {
            Err(body.error(key, "must be above 0"))
        }
        value => Ok(value.map(|value| value as f32)),
    }
}

fn rep_window(body: &Fields<'_>) -> Result<Option<RepetitionWindow>, ChatError> {
    let Some(key) = body.first(&["rep_window", "repeat_last_n"]) else {
        return Ok(None);
    };
    let window = body.int(key, -1..=i64::from(u32::MAX))?;
    Ok(window.map(|window| match usize::try_from(window) {
        Ok(last) => RepetitionWindow::Last(last),
        Err(_) => RepetitionWindow::All,
    }))
}

fn seed(body: &Fields<'_>) -> Result<Option<u64>, ChatError> {
    let Some(value) = body.get("seed") else {
        return Ok(None);
    };
    let seed = integer(&number_of(value))
        .ok_or_else(|| body.error("seed", must_be("an integer", value)))?;
    if seed < 0 {
        return Ok(None);
    }
    let seed = u64::try_from(seed)
        .map_err(|_| body.error("seed", format!("must be below 2^64, not {value}")))?;
    Ok(Some(seed))
}

/// The largest bias; beyond it a token is certain or forbidden anyway.
const MAX_BIAS: f32 = 100.0;

fn logit_bias(body: &Fields<'_>) -> Result<Vec<(TokenId, f32)>, ChatError> {
    let Some(bias) = body.object("logit_bias")? else {
        return Ok(Vec::new());
    };
    let mut edits = Vec::with_capacity(bias.map().len());
    for key in bias.map().keys() {
        let id: u32 = key
            .parse()
            .map_err(|_| body.error("logit_bias", format!("{key:?} is not a token id")))?;
        // `false` forbids the token, as in llama.cpp.
        if let Some(Value::Bool(false)) = bias.get(key) {
            edits.push((TokenId(id), -MAX_BIAS));
        } else if let Some(value) = float(&bias, key, -MAX_FLOAT..=MAX_FLOAT)? {
            edits.push((TokenId(id), value.clamp(-MAX_BIAS, MAX_BIAS)));
        }
    }
    Ok(edits)
}

fn stop(body: &Fields<'_>, key: &str) -> Result<Vec<String>, ChatError> {
    let one = |value: &Value, path: String| match value {
        Value::String(text) if text.is_empty() => {
            Err(ChatError::field(path, "must not be an empty string"))
        }
        Value::String(text) => Ok(text.clone()),
        other => Err(ChatError::field(
            path,
            must_be("a string or an array of strings", other),
        )),
    };
    match body.get(key) {
        None => Ok(Vec::new()),
        Some(Value::Array(items)) => {
            if items.len() > MAX_STOPS {
                return Err(body.error(
                    key,
                    format!("must hold at most {MAX_STOPS} strings, not {}", items.len()),
                ));
            }
            let with_path = |(index, item)| one(item, format!("{}[{index}]", body.path(key)));
            items.iter().enumerate().map(with_path).collect()
        }
        Some(value) => Ok(vec![one(value, body.path(key))?]),
    }
}

/// Token ids, at most `most`.
fn token_ids(body: &Fields<'_>, key: &str, most: usize) -> Result<Option<Vec<TokenId>>, ChatError> {
    let Some(items) = body.array(key)? else {
        return Ok(None);
    };
    if items.len() > most {
        return Err(body.error(
            key,
            format!("must hold at most {most} ids, not {}", items.len()),
        ));
    }
    let one = |(index, item)| token_id(item, || format!("{}[{index}]", body.path(key)));
    items
        .iter()
        .enumerate()
        .map(one)
        .collect::<Result<_, _>>()
        .map(Some)
}

fn allowed_token_ids(body: &Fields<'_>) -> Result<Option<Vec<TokenId>>, ChatError> {
    let key = "allowed_token_ids";
    let ids = token_ids(body, key, MAX_ALLOWED_TOKENS)?;
    if ids.as_ref().is_some_and(Vec::is_empty) {
        return Err(body.error(key, "must not be empty: no token could be generated"));
    }
    Ok(ids)
}

fn bad_words(body: &Fields<'_>) -> Result<Vec<String>, ChatError> {
    let key = "bad_words";
    let items = body.array(key)?.unwrap_or_default();
    if items.len() > MAX_BAD_WORDS {
        let n = items.len();
        return Err(body.error(
            key,
            format!("must hold at most {MAX_BAD_WORDS} words, not {n}"),
        ));
    }
    let one = |(index, item): (usize, &Value)| {
        let path = format!("{}[{index}]", body.path(key));
        match item {
            Value::String(word) if word.trim().is_empty() => {
                Err(ChatError::field(path, "must not be empty or blank"))
            }
            Value::String(word) => Ok(word.clone()),
            other => Err(ChatError::field(path, must_be("a string", other))),
        }
    };
    items.iter().enumerate().map(one).collect()
}

/// A token id in an array; `path` is its path, for errors.
pub(crate) fn token_id(value: &Value, path: impl FnOnce() -> String) -> Result<TokenId, ChatError> {
    match integer(value).map(u32::try_from) {
        Some(Ok(id)) => Ok(TokenId(id)),
        _ => Err(ChatError::field(path(), must_be("a token id", value))),
    }
}

fn choices(body: &Fields<'_>) -> Result<usize, ChatError> {
    match body.count("n", i64::MAX as usize)? {
        None => Ok(1),
        Some(n) if (1..=MAX_CHOICES).contains(&n) => Ok(n),
        Some(n) => Err(body.error("n", format!("must be between 1 and {MAX_CHOICES}, not {n}"))),
    }
}
