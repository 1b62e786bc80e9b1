//! Tokenizer and template routes; they need neither queue nor device.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use bytes::Bytes;
use chat::openai::request::chat_request;
use chat::{CancelFlag, EncodeLimit, SpecialTokens};
use contract::TokenId;
use serde_json::{Map, Value, json};

use crate::engine::ModelHandle;
use crate::error::ApiError;
use crate::http::body;
use crate::http::model_choice::Selected;
use crate::http::state::App;
use crate::text::model_context::ModelContext;
use crate::text::prepare;

/// `POST /tokenize`: text (`content` or `prompt`), or `messages` as a prompt.
pub(super) async fn tokenize(Selected(app): Selected, body: Body) -> Result<Json<Value>, ApiError> {
    let (handle, bytes) = take(&app, body).await?;
    let policy = prepare::policy(app.config());
    let answer = body::run_sized(bytes.len(), move |cancel| {
        let map = object(&bytes)?;
        let model = &handle.model;
        let most_tokens = prepare::most_tokens(handle.info.limits.context);
        let ids: Vec<TokenId> = if map.get("messages").is_some_and(Value::is_array) {
            let request = chat_request(&bytes)?;
            prepare::chat(handle.text_side(), &policy, &request, cancel)?
                .ids
                .to_vec()
        } else {
            let text = string(&map, &["content", "prompt"])?;
            let special = if flag(&map, "parse_special", true)? {
                SpecialTokens::Parse
            } else {
                SpecialTokens::AsText
            };
            encode(model, (text, special), most_tokens, cancel)?
        };
        let with_pieces = flag(&map, "with_pieces", false)?;
        let tokens = ids.iter().map(|id| {
            if with_pieces {
                match std::str::from_utf8(model.tokenizer.bytes(*id)) {
                    Ok(piece) => json!({"id": id.0, "piece": piece}),
                    Err(_) => json!({"id": id.0, "piece": model.tokenizer.bytes(*id)}),
                }
            } else {
                json!(id.0)
            }
        });
        Ok(json!({
            "tokens": tokens.collect::<Vec<Value>>(),
            "count": ids.len(),
            "max_model_len": handle.info.limits.context,
        }))
    })
    .await?;
    Ok(Json(answer))
}

/// `POST /detokenize`.
pub(super) async fn detokenize(
    Selected(app): Selected,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let (handle, bytes) = take(&app, body).await?;
    let answer = body::run_sized(bytes.len(), move |_| {
        let map = object(&bytes)?;
        let Some(tokens) = map.get("tokens").and_then(Value::as_array) else {
            return Err(ApiError::invalid_param(
                "tokens",
                "tokens: must be an array of token ids",
            ));
        };
        let mut ids = Vec::with_capacity(tokens.len());
        for (index, token) in tokens.iter().enumerate() {
            let id = token.as_u64().and_then(|id| u32::try_from(id).ok());
            match id.map(TokenId) {
                Some(id) if id.index() < handle.info.vocab => ids.push(id),
                _ => {
                    let field = format!("tokens[{index}]");
                    let vocab = handle.info.vocab;
                    let message = format!("{field}: {token} is no token id below {vocab}");
                    return Err(ApiError::invalid_param(&field, message));
                }
            }
        }
        let text = handle.model.tokenizer.decode(&ids);
        // Two protocols have this route with different field names.
        Ok(json!({"content": text, "prompt": text}))
    })
    .await?;
    Ok(Json(answer))
}

/// `GET /tokenizer_info`: data for clients that render prompts themselves.
pub(super) async fn tokenizer_info(Selected(app): Selected) -> Result<Json<Value>, ApiError> {
    let handle = app.model()?;
    let template = &handle.model.template;
    let named = |text: &str| match text {
        "" => Value::Null,
        text => text.into(),
    };
    Ok(Json(json!({
        "tokenizer_class": "hearth",
        "vocab_size": handle.model.tokenizer.n_tokens(),
        "model_max_length": handle.info.limits.context,
        "bos_token": named(template.bos_token()),
        "eos_token": named(template.eos_token()),
        "pad_token": Value::Null,
        "chat_template": template.source(),
    })))
}

/// `POST /apply-template`: the prompt of a chat request.
pub(super) async fn apply_template(
    Selected(app): Selected,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let (handle, bytes) = take(&app, body).await?;
    let policy = prepare::policy(app.config());
    let prompt = body::run_sized(bytes.len(), move |cancel| {
        let request = chat_request(&bytes)?;
        prepare::chat(handle.text_side(), &policy, &request, cancel)
    })
    .await?;
    Ok(Json(json!({"prompt": prompt.text})))
}

/// The tokens of a text; one of more than `most` tokens is refused.
fn encode(
    model: &ModelContext,
    (text, special): (&str, SpecialTokens),
    most: usize,
    cancel: &CancelFlag,
) -> Result<Vec<TokenId>, ApiError> {
    let limit = EncodeLimit {
        tokens: most,
        cancel: Some(cancel),
    };
    let at_least = model.tokenizer.min_token_count(text);
    if at_least <= most {
        let ids = model.tokenizer.encode_up_to(text, special, limit)?;
        if ids.len() <= most {
            return Ok(ids);
        }
    }
    let message =
        format!("content: more than {most} tokens, the most that are counted; send parts");
    Err(ApiError::invalid_param("content", message))
}

async fn take(app: &App, body: Body) -> Result<(Arc<ModelHandle>, Bytes), ApiError> {
    let bytes = body::read(body, app.config().body_limit_bytes).await?;
    Ok((app.model()?, bytes))
}

fn object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ApiError::invalid("the body must be a JSON object")),
        Err(error) => Err(ApiError::invalid(format!(
            "the body is not valid JSON: {error}"
        ))),
    }
}

fn string<'a>(map: &'a Map<String, Value>, names: &[&str]) -> Result<&'a str, ApiError> {
    for name in names {
        match map.get(*name) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) => return Ok(text),
            Some(_) => {
                return Err(ApiError::invalid_param(
                    name,
                    format!("{name}: must be a string"),
                ));
            }
        }
    }
    let name = names.first().copied().unwrap_or("content");
    Err(ApiError::invalid_param(name, format!("{name}: is missing")))
}

fn flag(map: &Map<String, Value>, name: &str, default: bool) -> Result<bool, ApiError> {
    match map.get(name) {
        None | Some(Value::Null) => Ok(default),
        Some(Value::Bool(value)) => Ok(*value),
        Some(_) => Err(ApiError::invalid_param(
            name,
            format!("{name}: must be true or false"),
        )),
    }
}
