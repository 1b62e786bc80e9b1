//! Reads how the prompt is cut and which tokens the reply lists: fields of vLLM.

use super::fields::Fields;
use crate::error::ChatError;
use crate::request::{MAX_TOP_LOGPROBS, PromptTruncation, TokenOptions, TruncationSide};

impl TokenOptions {
    /// Reads the fields that every dialect has: how the prompt is cut.
    pub(crate) fn read_truncation(body: &Fields<'_>) -> Result<TokenOptions, ChatError> {
        Ok(TokenOptions {
            truncation: truncation(body)?,
            ..TokenOptions::default()
        })
    }

    /// Reads all fields; logprobs of a prompt are not streamed.
    pub(crate) fn read(body: &Fields<'_>) -> Result<TokenOptions, ChatError> {
        let prompt_logprobs = body.count("prompt_logprobs", MAX_TOP_LOGPROBS)?;
        if prompt_logprobs.is_some() && body.flag("stream", false)? {
            let message = "is not available in a stream; set stream to false";
            return Err(body.error("prompt_logprobs", message));
        }
        Ok(TokenOptions {
            truncation: truncation(body)?,
            prompt_logprobs,
            return_token_ids: body.flag("return_token_ids", false)?,
        })
    }
}

fn truncation(body: &Fields<'_>) -> Result<Option<PromptTruncation>, ChatError> {
    let side = match body.string("truncation_side")? {
        None | Some("left") => TruncationSide::Left,
        Some("right") => TruncationSide::Right,
        Some(other) => {
            let message = format!("must be left or right, not {other:?}");
            return Err(body.error("truncation_side", message));
        }
    };
    let keep = body.int("truncate_prompt_tokens", -1..=i64::from(u32::MAX))?;
    Ok(keep.map(|keep| PromptTruncation {
        keep: usize::try_from(keep).ok(),
        side,
    }))
}
