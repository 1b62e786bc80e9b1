//! The body of a completion request, in llama-server's names.
//!
//! Its fields become those of a text completion; the rest is in [`LlamaServerFields`].

use serde_json::{Map, Value, json};

use crate::dialect::fields::{Fields, must_be, parse_body};
use crate::dialect::{asks_for_something, refuse_media, token_id};
use crate::error::ChatError;
use crate::openai::request::{CompletionPrompt, CompletionRequest, MAX_PROMPTS};
use crate::request::MAX_TOP_LOGPROBS;

/// Fields that only this dialect has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LlamaServerFields {
    /// Whether a whole reply lists its tokens; a stream always does.
    pub return_tokens: bool,
    /// The slot that the client asks for. There are none; the reply repeats it.
    pub id_slot: i64,
    /// Whether every event carries timings.
    pub timings_per_token: bool,
    /// Whether to send progress events during prefill.
    pub return_progress: bool,
    /// The paths of fields, such as `timings/prompt_n`, that a whole reply is cut to; all if empty.
    pub response_fields: Vec<String>,
    /// What of the request is left out.
    pub notes: Vec<String>,
}

/// Fields that would change the reply and that this server does not have.
const UNSUPPORTED: [&str; 3] = ["samplers", "post_sampling_probs", "min_keep"];
/// Maximum number of response fields.
const MAX_RESPONSE_FIELDS: usize = 256;

/// Reads and checks a request body; errors as
/// [`chat_request`](crate::openai::request::chat_request).
pub fn completion_request(
    body: &[u8],
) -> Result<(CompletionRequest, LlamaServerFields), ChatError> {
    let map = parse_body(body)?;
    let prompts = {
        let body = Fields::body(&map);
        refuse_unsupported(&body)?;
        prompts(&body)?
    };
    read_completion(map, prompts)
}

/// Reads the fields besides the prompts.
pub(super) fn read_completion(
    mut map: Map<String, Value>,
    prompts: Vec<CompletionPrompt>,
) -> Result<(CompletionRequest, LlamaServerFields), ChatError> {
    let own = {
        let body = Fields::body(&map);
        LlamaServerFields {
            return_tokens: body.flag("return_tokens", false)?,
            id_slot: body.int("id_slot", -1..=i64::from(i32::MAX))?.unwrap_or(-1),
            timings_per_token: body.flag("timings_per_token", false)?,
            return_progress: body.flag("return_progress", false)?,
            response_fields: response_fields(&body)?,
            notes: Vec::new(),
        }
    };
    translate(&mut map)?;
    let mut request = CompletionRequest::read(&Fields::body(&map), prompts)?;
    // Without a limit, a completion ends by itself or with the context.
    request.sampling.max_tokens.get_or_insert(usize::MAX);
    Ok((request, own))
}

fn response_fields(body: &Fields<'_>) -> Result<Vec<String>, ChatError> {
    let items = body.array("response_fields")?.unwrap_or_default();
    if items.len() > MAX_RESPONSE_FIELDS {
        let message = format!("must hold at most {MAX_RESPONSE_FIELDS} paths");
        return Err(body.error("response_fields", message));
    }
    let one = |(index, item): (usize, &Value)| match item {
        Value::String(path) => Ok(path.clone()),
        other => {
            let path = format!("response_fields[{index}]");
            Err(ChatError::field(path, must_be("a string", other)))
        }
    };
    items.iter().enumerate().map(one).collect()
}

fn refuse_unsupported(body: &Fields<'_>) -> Result<(), ChatError> {
    for key in UNSUPPORTED {
        if asks_for_something(body, key) {
            return Err(body.error(key, "is not supported; leave it out"));
        }
    }
    Ok(())
}

/// Replaces the dialect's names by those of a text completion.
fn translate(map: &mut Map<String, Value>) -> Result<(), ChatError> {
    let (n_probs, bias) = {
        let body = Fields::body(map);
        (body.count("n_probs", MAX_TOP_LOGPROBS)?, logit_bias(&body)?)
    };
    // Fields of a text completion that this dialect does not have are ignored, as unknown ones.
    for key in [
        "prompt",
        "n_probs",
        "return_tokens",
        "logprobs",
        "echo",
        "suffix",
        "best_of",
    ] {
        map.remove(key);
    }
    if let Some(n) = n_probs.filter(|n| *n > 0) {
        map.insert("logprobs".to_owned(), json!(n));
    }
    if let Some(n) = map.remove("n_cmpl") {
        map.insert("n".to_owned(), n);
    }
    if let Some(bias) = bias {
        map.insert("logit_bias".to_owned(), Value::Object(bias));
    }
    map.insert("return_token_ids".to_owned(), json!(true));
    Ok(())
}

/// `logit_bias` as pairs, in the form of an object; `None` if it has that form already.
fn logit_bias(body: &Fields<'_>) -> Result<Option<Map<String, Value>>, ChatError> {
    let Some(Value::Array(pairs)) = body.get("logit_bias") else {
        return Ok(None);
    };
    let mut bias = Map::new();
    for (index, pair) in pairs.iter().enumerate() {
        let path = || format!("logit_bias[{index}]");
        match pair.as_array().map(Vec::as_slice) {
            Some([Value::String(_), _]) => {
                let message = "texts are not supported; send token ids";
                return Err(ChatError::field(path(), message));
            }
            Some([token, value]) => {
                let id = token_id(token, path)?;
                bias.insert(id.to_string(), value.clone());
            }
            _ => return Err(ChatError::field(path(), "must be a token id and a bias")),
        }
    }
    Ok(Some(bias))
}

/// One prompt, or several: an array with numbers is one prompt of tokens and texts.
fn prompts(body: &Fields<'_>) -> Result<Vec<CompletionPrompt>, ChatError> {
    let value = body
        .get("prompt")
        .ok_or_else(|| body.error("prompt", "is missing"))?;
    match value {
        Value::Array(items) if items.is_empty() => Err(body.error("prompt", "must not be empty")),
        Value::Array(items) if items.len() > MAX_PROMPTS && !items.iter().any(Value::is_number) => {
            let n = items.len();
            Err(body.error(
                "prompt",
                format!("must hold at most {MAX_PROMPTS} prompts, not {n}"),
            ))
        }
        Value::Array(items) if !items.iter().any(Value::is_number) => {
            let one = |(index, item)| prompt(item, &format!("prompt[{index}]"));
            items.iter().enumerate().map(one).collect()
        }
        one => Ok(vec![prompt(one, "prompt")?]),
    }
}

fn prompt(value: &Value, path: &str) -> Result<CompletionPrompt, ChatError> {
    match value {
        Value::String(text) => Ok(CompletionPrompt::Text(text.clone())),
        Value::Array(parts) if parts.is_empty() => Err(ChatError::field(path, "must not be empty")),
        Value::Array(parts) => {
            let part = |(index, part): (usize, &Value)| match part {
                Value::String(text) => Ok(CompletionPrompt::Text(text.clone())),
                other => {
                    let id = token_id(other, || format!("{path}[{index}]"))?;
                    Ok(CompletionPrompt::Tokens(vec![id]))
                }
            };
            let parts: Result<Vec<_>, _> = parts.iter().enumerate().map(part).collect();
            Ok(CompletionPrompt::Mixed(parts?))
        }
        Value::Object(_) => {
            let fields = Fields::of(value, path.to_owned())?;
            if fields
                .array("multimodal_data")?
                .is_some_and(|data| !data.is_empty())
            {
                return Err(refuse_media(&fields, "image"));
            }
            let text = fields.string("prompt_string")?;
            let text = text.ok_or_else(|| fields.error("prompt_string", "is missing"))?;
            Ok(CompletionPrompt::Text(text.to_owned()))
        }
        other => {
            let wanted = "a string, an array of token ids and strings, or an object";
            Err(ChatError::field(path, must_be(wanted, other)))
        }
    }
}
