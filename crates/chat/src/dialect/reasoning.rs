//! Reads the fields that turn reasoning on and bound it.

use serde_json::{Map, Value};

use super::fields::Fields;
use crate::conversation::ReasoningEffort;
use crate::error::ChatError;
use crate::request::ReasoningOptions;

impl ReasoningOptions {
    /// Reads every spelling; the source of highest precedence decides, the others still set
    /// budgets.
    ///
    /// Precedence: `chat_template_kwargs.enable_thinking`, `enable_thinking`, `thinking.type`, an
    /// effort, a bare `reasoning` object.
    pub(crate) fn read(
        body: &Fields<'_>,
        kwargs: &Map<String, Value>,
    ) -> Result<ReasoningOptions, ChatError> {
        let reasoning = body.object("reasoning")?;
        let effort_name = effort_name(body, reasoning.as_ref())?;
        let thinking = body.object("thinking")?;
        let omitted = match &thinking {
            None => false,
            Some(thinking) => is_omitted(thinking)?,
        };
        let (by_type, mut budget_tokens, reply_budget) = match &thinking {
            None => (None, None, None),
            Some(thinking) => (
                by_type(thinking)?,
                budget(thinking, "budget_tokens")?,
                budget(thinking, "reply_budget")?,
            ),
        };
        if budget_tokens.is_none() {
            let aliases = [
                "thinking_budget_tokens",
                "thinking_token_budget",
                "thinking_budget",
            ];
            if let Some(key) = body.first(&aliases) {
                budget_tokens = budget(body, key)?;
            }
        }
        let by_kwargs = match kwargs.get("enable_thinking") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(enable)) => Some(*enable),
            Some(_) => {
                return Err(ChatError::field(
                    "chat_template_kwargs.enable_thinking",
                    "must be true or false",
                ));
            }
        };
        let enable = by_kwargs
            .or(body.bool("enable_thinking")?)
            .or(by_type)
            .or(effort_name.map(|name| name != "none"))
            .or(reasoning.is_some().then_some(true));
        // A budget of 0 tokens turns reasoning off.
        let enable = if budget_tokens == Some(0) {
            Some(false)
        } else {
            enable
        };
        let effort = effort_name
            .filter(|name| *name != "none")
            .map(ReasoningEffort::parse);
        Ok(ReasoningOptions {
            enable,
            effort,
            budget_tokens,
            reply_budget,
            omitted,
        })
    }
}

fn effort_name<'a>(
    body: &Fields<'a>,
    reasoning: Option<&Fields<'a>>,
) -> Result<Option<&'a str>, ChatError> {
    if let Some(reasoning) = reasoning
        && let Some(name) = reasoning.string("effort")?
    {
        return Ok(Some(name));
    }
    if let Some(config) = body.object("output_config")?
        && let Some(name) = config.string("effort")?
    {
        return Ok(Some(name));
    }
    match body.string("reasoning_effort")? {
        Some(name) => Ok(Some(name)),
        None => body.string("effort"),
    }
}

fn by_type(thinking: &Fields<'_>) -> Result<Option<bool>, ChatError> {
    match thinking.string("type")? {
        None => Ok(None),
        Some("enabled" | "adaptive") => Ok(Some(true)),
        Some("disabled") => Ok(Some(false)),
        Some(other) => Err(thinking.error(
            "type",
            format!("must be enabled, adaptive or disabled, not {other:?}"),
        )),
    }
}

/// Whether the reasoning text is hidden. Clients send other values too (Claude Code sends
/// `updates`); all of them except `omitted` show it.
fn is_omitted(thinking: &Fields<'_>) -> Result<bool, ChatError> {
    Ok(thinking.string("display")? == Some("omitted"))
}

fn budget(fields: &Fields<'_>, key: &str) -> Result<Option<usize>, ChatError> {
    let tokens = fields.int(key, -1..=i64::from(u32::MAX))?;
    // Some clients send -1 for no limit.
    Ok(tokens.and_then(|tokens| usize::try_from(tokens).ok()))
}
