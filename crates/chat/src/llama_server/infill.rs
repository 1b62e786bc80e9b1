//! The body of `POST /infill`: a text with a gap, in llama-server's names.

use serde_json::Value;

use super::request::{LlamaServerFields, read_completion};
use crate::dialect::fields::{Fields, must_be, parse_body};
use crate::error::ChatError;
use crate::openai::request::{CompletionPrompt, CompletionRequest, ContextFile, GapContext};

/// Maximum number of files that give context.
const MAX_FILES: usize = 1_024;
/// Fields that editors always send and that this server does not have. They are left out, and the
/// reply's note says so.
const LEFT_OUT: [&str; 5] = [
    "samplers",
    "n_indent",
    "t_max_prompt_ms",
    "t_max_predict_ms",
    "min_keep",
];

/// Reads and checks a request body; errors as
/// [`chat_request`](crate::openai::request::chat_request).
pub fn infill_request(body: &[u8]) -> Result<(CompletionRequest, LlamaServerFields), ChatError> {
    let mut map = parse_body(body)?;
    let mut notes = Vec::new();
    for key in LEFT_OUT {
        let asks = match map.shift_remove(key) {
            None | Some(Value::Null) => false,
            Some(Value::Number(number)) => number.as_f64().is_none_or(|number| number > 0.0),
            Some(Value::Array(items)) => !items.is_empty(),
            Some(_) => true,
        };
        if asks {
            notes.push(format!("{key}: left out"));
        }
    }
    let (prompt, gap) = {
        let body = Fields::body(&map);
        let text = |key: &str| {
            let text = body.string(key)?;
            text.ok_or_else(|| body.error(key, "is missing"))
        };
        let prefix = text("input_prefix")?;
        let gap = GapContext {
            files: files(&body)?,
            ..GapContext::of_suffix(text("input_suffix")?, "input_suffix")
        };
        let typed = body.string("prompt")?.unwrap_or_default();
        (CompletionPrompt::Text(format!("{prefix}{typed}")), gap)
    };
    let (mut request, mut own) = read_completion(map, vec![prompt])?;
    request.gap = Some(gap);
    own.notes = notes;
    Ok((request, own))
}

/// `input_extra`: other files, or parts of them.
fn files(body: &Fields<'_>) -> Result<Vec<ContextFile>, ChatError> {
    let items = body.array("input_extra")?.unwrap_or_default();
    if items.len() > MAX_FILES {
        let n = items.len();
        let message = format!("must hold at most {MAX_FILES} files, not {n}");
        return Err(body.error("input_extra", message));
    }
    let file = |(index, item): (usize, &Value)| {
        let path = format!("input_extra[{index}]");
        let fields = match item {
            Value::Object(_) => Fields::of(item, path)?,
            other => return Err(ChatError::field(path, must_be("an object", other))),
        };
        let text = fields.string("text")?;
        let text = text.ok_or_else(|| fields.error("text", "is missing"))?;
        Ok(ContextFile {
            name: fields.string("filename")?.unwrap_or("tmp").to_owned(),
            text: text.to_owned(),
        })
    };
    items.iter().enumerate().map(file).collect()
}
