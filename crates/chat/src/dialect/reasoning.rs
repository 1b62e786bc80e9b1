//! Reads the fields that turn reasoning on, bound it and hide it.

use serde_json::{Map, Value};

use super::fields::{Fields, must_be};
use crate::conversation::ReasoningEffort;
use crate::error::ChatError;
use crate::request::{ReasoningOptions, ReasoningVisibility};

/// Budgets in the body, in the spellings of several servers.
const BUDGETS: [&str; 5] = [
    "thinking_budget_tokens",
    "thinking_token_budget",
    "thinking_budget",
    "reasoning_budget_tokens",
    "reasoning_budget",
];

/// What one field says about reasoning.
#[derive(Debug, Clone, Default)]
struct Switch<'a> {
    enable: Option<bool>,
    effort: Option<&'a str>,
    budget_tokens: Option<usize>,
}

impl ReasoningOptions {
    /// Reads every spelling; the source of highest precedence decides, the others still set
    /// budgets. A field that says nothing of reasoning, such as `reasoning.exclude`, does not turn
    /// it on.
    ///
    /// Precedence: `chat_template_kwargs`, `enable_thinking`, `think`, `thinking`,
    /// `reasoning.enabled`, an effort, `reasoning.max_tokens`.
    pub(crate) fn read(
        body: &Fields<'_>,
        kwargs: &Map<String, Value>,
    ) -> Result<ReasoningOptions, ChatError> {
        let think = word_or_bool(body, "think")?;
        let thinking = thinking(body)?;
        let reasoning = reasoning(body)?;
        let reply_budget = match thinking_object(body)? {
            Some(thinking) => budget(&thinking, "reply_budget")?,
            None => None,
        };
        let mut budget_tokens = thinking.budget_tokens.or(reasoning.budget_tokens);
        if budget_tokens.is_none()
            && let Some(key) = body.first(&BUDGETS)
        {
            budget_tokens = budget(body, key)?;
        }
        let effort = match reasoning.effort {
            Some(name) => Some(name),
            None => effort_name(body)?.or(think.effort),
        };
        let enable = by_kwargs(kwargs)?
            .or(body.bool("enable_thinking")?)
            .or(think.enable)
            .or(thinking.enable)
            .or(reasoning.enable)
            .or(effort.map(|name| !is_off(name)))
            .or(reasoning.budget_tokens.map(|tokens| tokens > 0));
        // A budget of 0 tokens turns reasoning off.
        let enable = if budget_tokens == Some(0) {
            Some(false)
        } else {
            enable
        };
        Ok(ReasoningOptions {
            enable,
            effort: effort
                .filter(|name| !is_off(name))
                .map(ReasoningEffort::parse),
            budget_tokens,
            reply_budget,
            visibility: visibility(body)?,
        })
    }
}

/// Whether the template's own variables switch reasoning.
fn by_kwargs(kwargs: &Map<String, Value>) -> Result<Option<bool>, ChatError> {
    for key in ["enable_thinking", "thinking"] {
        match kwargs.get(key) {
            None | Some(Value::Null) => {}
            Some(Value::Bool(enable)) => return Ok(Some(*enable)),
            // A template may have a variable `thinking` of its own.
            Some(_) if key == "thinking" => {}
            Some(_) => {
                return Err(ChatError::field(
                    format!("chat_template_kwargs.{key}"),
                    "must be true or false",
                ));
            }
        }
    }
    Ok(None)
}

/// Whether the name of an effort stands for no reasoning.
fn is_off(name: &str) -> bool {
    matches!(name, "none" | "off" | "disabled" | "false")
}

/// A field that is a boolean or the name of an effort.
fn word_or_bool<'a>(body: &Fields<'a>, key: &str) -> Result<Switch<'a>, ChatError> {
    Ok(match body.get(key) {
        None => Switch::default(),
        Some(Value::Bool(enable)) => Switch {
            enable: Some(*enable),
            ..Switch::default()
        },
        Some(Value::String(name)) => Switch {
            enable: Some(!is_off(name)),
            effort: Some(name),
            ..Switch::default()
        },
        Some(other) => {
            let wanted = must_be("true, false or the name of an effort", other);
            return Err(body.error(key, wanted));
        }
    })
}

/// `reasoning`: a boolean, the name of an effort, or an object.
fn reasoning<'a>(body: &Fields<'a>) -> Result<Switch<'a>, ChatError> {
    let Some(Value::Object(_)) = body.get("reasoning") else {
        return word_or_bool(body, "reasoning");
    };
    let Some(fields) = body.object("reasoning")? else {
        return Ok(Switch::default());
    };
    Ok(Switch {
        enable: fields.bool("enabled")?,
        effort: fields.string("effort")?,
        budget_tokens: budget(&fields, "max_tokens")?,
    })
}

fn effort_name<'a>(body: &Fields<'a>) -> Result<Option<&'a str>, ChatError> {
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

/// `thinking`, unless it is a boolean.
fn thinking_object<'a>(body: &Fields<'a>) -> Result<Option<Fields<'a>>, ChatError> {
    match body.get("thinking") {
        Some(Value::Bool(_)) => Ok(None),
        _ => body.object("thinking"),
    }
}

fn thinking<'a>(body: &Fields<'a>) -> Result<Switch<'a>, ChatError> {
    let Some(fields) = thinking_object(body)? else {
        return Ok(Switch {
            enable: body.bool("thinking")?,
            ..Switch::default()
        });
    };
    let enable = match fields.string("type")? {
        None => None,
        Some("enabled" | "adaptive") => Some(true),
        Some("disabled") => Some(false),
        Some(other) => {
            return Err(fields.error(
                "type",
                format!("must be enabled, adaptive or disabled, not {other:?}"),
            ));
        }
    };
    Ok(Switch {
        enable,
        effort: None,
        budget_tokens: budget(&fields, "budget_tokens")?,
    })
}

/// Whether the reply shows reasoning. Clients send other values of `display` too (Claude Code sends
/// `updates`); all of them except `omitted` show it.
fn visibility(body: &Fields<'_>) -> Result<ReasoningVisibility, ChatError> {
    if !body.flag("include_reasoning", true)? {
        return Ok(ReasoningVisibility::Excluded);
    }
    if let Some(Value::Object(_)) = body.get("reasoning")
        && let Some(reasoning) = body.object("reasoning")?
        && reasoning.flag("exclude", false)?
    {
        return Ok(ReasoningVisibility::Excluded);
    }
    let omitted = match thinking_object(body)? {
        Some(thinking) => thinking.string("display")? == Some("omitted"),
        None => false,
    };
    Ok(if omitted {
        ReasoningVisibility::Omitted
    } else {
        ReasoningVisibility::Shown
    })
}

fn budget(fields: &Fields<'_>, key: &str) -> Result<Option<usize>, ChatError> {
    let tokens = fields.int(key, -1..=i64::from(u32::MAX))?;
    // Some clients send -1 for no limit.
    Ok(tokens.and_then(|tokens| usize::try_from(tokens).ok()))
}
