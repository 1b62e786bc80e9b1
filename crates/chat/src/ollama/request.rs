//! Request bodies. A stream is the default; sampling is in `options`.

use serde_json::{Map, Value, json};

use crate::conversation::{Message, Role};
use crate::dialect::fields::{Fields, must_be, parse_body};
use crate::dialect::{
    DialectFields, ToolFields, asks_for_something, logprobs, refuse_completions_only,
};
use crate::error::ChatError;
use crate::openai::request::messages;
use crate::openai::request::{CompletionPrompt, CompletionRequest, GapContext};
use crate::request::{ChatRequest, ResponseFormat, SamplingParams, SchemaStrictness};

/// What a body asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OllamaTask {
    /// To load the model, or to unload it: there is nothing to reply to.
    Load,
    /// A reply to a conversation.
    Chat,
    /// Text that goes on as it is, or that fills a gap.
    Completion,
}

/// Fields that only this dialect has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OllamaFields {
    /// The context that the client asks for, in tokens; the server's own is fixed.
    pub num_ctx: Option<usize>,
}

impl OllamaTask {
    /// What the body of `POST /api/chat` asks for.
    ///
    /// # Errors
    /// If it is no JSON object.
    pub fn of_chat(body: &[u8]) -> Result<OllamaTask, ChatError> {
        let map = parse_body(body)?;
        let messages = Fields::body(&map).get("messages");
        Ok(match messages {
            None => OllamaTask::Load,
            Some(Value::Array(items)) if items.is_empty() => OllamaTask::Load,
            Some(_) => OllamaTask::Chat,
        })
    }

    /// What the body of `POST /api/generate` asks for.
    ///
    /// # Errors
    /// If it is no JSON object, or `prompt`, `raw` or `suffix` has another type.
    pub fn of_generate(body: &[u8]) -> Result<OllamaTask, ChatError> {
        let map = parse_body(body)?;
        let body = Fields::body(&map);
        let has = |key: &str| Ok(body.string(key)?.is_some_and(|text| !text.is_empty()));
        let (has_prompt, has_suffix) = (has("prompt")?, has("suffix")?);
        Ok(if body.flag("raw", false)? || has_suffix {
            OllamaTask::Completion
        } else if has_prompt {
            OllamaTask::Chat
        } else {
            OllamaTask::Load
        })
    }
}

/// Reads and checks the body of `POST /api/chat`; errors as
/// [`chat_request`](crate::openai::request::chat_request).
pub fn chat_request(body: &[u8]) -> Result<(ChatRequest, OllamaFields), ChatError> {
    let mut map = parse_body(body)?;
    if let Some(Value::Array(items)) = map.get_mut("messages") {
        for (index, item) in items.iter_mut().enumerate() {
            if let Value::Object(message) = item {
                rename(message, index)?;
            }
        }
    }
    let messages = messages::read(&Fields::body(&map))?;
    read_chat(&map, messages)
}

/// Reads and checks the body of `POST /api/generate` with a prompt that the template renders.
/// Errors as [`chat_request`].
pub fn generate_request(body: &[u8]) -> Result<(ChatRequest, OllamaFields), ChatError> {
    let map = parse_body(body)?;
    let body = Fields::body(&map);
    refuse_generate_fields(&body)?;
    let mut messages = Vec::new();
    if let Some(system) = body.string("system")?.filter(|text| !text.is_empty()) {
        messages.push(Message::new(Role::System, system));
    }
    let prompt = body.string("prompt")?.unwrap_or_default();
    messages.push(Message::new(Role::User, prompt));
    read_chat(&map, messages)
}

/// Reads and checks the body of `POST /api/generate` with a prompt that goes on as it is, or before
/// a gap. Errors as [`chat_request`].
pub fn completion_request(body: &[u8]) -> Result<(CompletionRequest, OllamaFields), ChatError> {
    let map = parse_body(body)?;
    let own = Fields::body(&map);
    refuse_generate_fields(&own)?;
    let suffix = own.string("suffix")?.filter(|text| !text.is_empty());
    for key in ["system", "think"] {
        // Without a template there is no reasoning to switch on or off.
        let is_flag = matches!(own.get(key), Some(Value::Bool(_)));
        if !is_flag && asks_for_something(&own, key) {
            let message = "needs the model's template; leave out raw and suffix";
            return Err(own.error(key, message));
        }
    }
    let options = options(&own)?;
    let prompt = own.string("prompt")?.unwrap_or_default().to_owned();
    let no_fields = Map::new();
    let shared = CompletionRequest::read(
        &Fields::body(&no_fields),
        vec![CompletionPrompt::Text(prompt)],
    )?;
    let request = CompletionRequest {
        model: own.string("model")?.map(str::to_owned),
        stream: own.flag("stream", true)?,
        sampling: sampling(&options)?,
        logprobs: logprobs(&own)?,
        response_format: response_format(&own)?,
        gap: suffix.map(|suffix| GapContext::of_suffix(suffix, "suffix")),
        ..shared
    };
    Ok((request, own_fields(&options)?))
}

/// Gives the fields of a message the names of a chat completion.
fn rename(message: &mut Map<String, Value>, index: usize) -> Result<(), ChatError> {
    refuse_images(message.get("images"), &format!("messages[{index}].images"))?;
    for (own, other) in [("thinking", "reasoning_content"), ("tool_name", "name")] {
        if let Some(value) = message.shift_remove(own)
            && !message.contains_key(other)
        {
            message.insert(other.to_owned(), value);
        }
    }
    Ok(())
}

fn refuse_images(images: Option<&Value>, path: &str) -> Result<(), ChatError> {
    match images {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Array(items)) if items.is_empty() => Ok(()),
        Some(_) => Err(ChatError::field(
            path,
            "images are not supported: the server reads text only; leave them out",
        )),
    }
}

fn refuse_generate_fields(body: &Fields<'_>) -> Result<(), ChatError> {
    refuse_images(body.get("images"), "images")?;
    for (key, message) in [
        (
            "template",
            "is not supported; the model has its own, or use raw",
        ),
        (
            "context",
            "is not supported; send the conversation to /api/chat",
        ),
    ] {
        if asks_for_something(body, key) {
            return Err(body.error(key, message));
        }
    }
    Ok(())
}

/// The request of a conversation, with the fields besides the messages.
fn read_chat(
    map: &Map<String, Value>,
    messages: Vec<Message>,
) -> Result<(ChatRequest, OllamaFields), ChatError> {
    let body = Fields::body(map);
    refuse_completions_only(&body)?;
    let options = options(&body)?;
    let dialect = DialectFields {
        messages,
        sampling: sampling(&options)?,
        logprobs: logprobs(&body)?,
        tools: ToolFields::read(&body)?,
        response_format: response_format(&body)?,
        continue_final_message: false,
    };
    let mut request = crate::dialect::chat_request(&body, dialect)?;
    request.thinking.exclude_omitted();
    request.stream = body.flag("stream", true)?;
    Ok((request, own_fields(&options)?))
}

/// `options`, with the names of a chat completion.
fn options(body: &Fields<'_>) -> Result<Value, ChatError> {
    let mut options = match body.object("options")? {
        Some(options) => options.map().clone(),
        None => Map::new(),
    };
    if let Some(limit) = options.shift_remove("num_predict") {
        let fields = Map::from_iter([("num_predict".to_owned(), limit)]);
        let fields = Value::Object(fields);
        let fields = Fields::of(&fields, "options".to_owned())?;
        // Values that are not positive have no limit but the context.
        let limit = fields.int("num_predict", i64::from(i32::MIN)..=i64::from(u32::MAX))?;
        let limit = limit.map(|limit| if limit > 0 { limit } else { -1 });
        options.insert("max_tokens".to_owned(), json!(limit));
    }
    Ok(Value::Object(options))
}

fn sampling(options: &Value) -> Result<SamplingParams, ChatError> {
    let options = Fields::of(options, "options".to_owned())?;
    let mut sampling = SamplingParams::read(&options, "stop")?;
    sampling.n = 1;
    // Without a limit, a reply ends by itself or with the context.
    sampling.max_tokens.get_or_insert(usize::MAX);
    Ok(sampling)
}

fn own_fields(options: &Value) -> Result<OllamaFields, ChatError> {
    let options = Fields::of(options, "options".to_owned())?;
    Ok(OllamaFields {
        num_ctx: options.count("num_ctx", u32::MAX as usize)?,
    })
}

/// `format`: `json`, or a schema.
fn response_format(body: &Fields<'_>) -> Result<ResponseFormat, ChatError> {
    match body.get("format") {
        None => Ok(ResponseFormat::Text),
        Some(Value::String(text)) if text.is_empty() => Ok(ResponseFormat::Text),
        Some(Value::String(text)) if text == "json" => Ok(ResponseFormat::JsonObject),
        Some(schema @ Value::Object(_)) => Ok(ResponseFormat::JsonSchema {
            schema: schema.clone(),
            strictness: SchemaStrictness::BestEffort,
            field: "format".to_owned(),
        }),
        Some(Value::String(other)) => {
            Err(body.error("format", format!("must be json or a schema, not {other:?}")))
        }
        Some(other) => Err(body.error("format", must_be("json or a schema", other))),
    }
}
