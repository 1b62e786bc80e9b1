//! Probes at start what a template can express, by rendering small conversations.

use contract::TemplateMarkup;
use serde_json::{Map, Value, json};

use super::ChatTemplate;
use crate::conversation::{Conversation, Message, Role, ToolCall};
use crate::error::{ChatError, ErrorKind};

/// What a template can express.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Capabilities {
    /// Whether a system message appears in the prompt.
    pub system: bool,
    /// Whether declared tools appear in the prompt.
    pub tools: bool,
    /// Whether earlier calls and their results appear in the prompt.
    pub tool_results: bool,
    /// How earlier calls are written.
    pub call_format: Option<ToolCallFormat>,
    /// Whether `enable_thinking` changes the prompt.
    pub thinking_switch: bool,
    /// Whether the prompt opens reasoning by default.
    pub opens_reasoning: bool,
    /// Whether the model opens reasoning itself: the prompt closes it only if reasoning is off.
    pub model_opens_reasoning: bool,
    /// Whether the template reads an effort.
    pub effort: bool,
}

/// How a template writes an earlier call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ToolCallFormat {
    /// JSON between call tags.
    JsonInTags,
    /// A function tag with parameter tags.
    XmlParameters,
}

const QUESTION: &str = "probe-question";
const SYSTEM: &str = "probe-system";
const TOOL: &str = "probe_tool";
const RESULT: &str = "probe-result";

/// Fails if the template goes over a limit, or if it fails on a plain question with and without a
/// system message: it would on every conversation.
pub(super) fn probe(
    template: &ChatTemplate,
    markup: &TemplateMarkup,
) -> Result<Capabilities, ChatError> {
    let tags = markup.reasoning.as_ref();
    let user = || Message::new(Role::User, QUESTION);
    let mut failures = Vec::new();
    let mut render = |what: &str, conversation: Conversation| match template.render(&conversation) {
        Ok(rendered) => Ok(Some(rendered)),
        Err(err) if err.kind == ErrorKind::TemplateLimit => Err(ChatError::setup(err.message)),
        Err(err) => {
            tracing::warn!(what, %err, "the chat template cannot express this");
            if err.kind == ErrorKind::TemplateFailed {
                failures.push(err.message);
            }
            Ok(None)
        }
    };
    let says = |rendered: &Option<super::RenderedPrompt>, word: &str| {
        rendered
            .as_ref()
            .is_some_and(|rendered| rendered.text.contains(word))
    };

    let plain = render("a question", conversation_of(vec![user()]))?;
    let system = render(
        "a system message",
        conversation_of(vec![Message::new(Role::System, SYSTEM), user()]),
    )?;
    let declared = json!({
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "probe",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    });
    let tools = render(
        "tools",
        Conversation {
            tools: vec![declared.clone()],
            ..conversation_of(vec![user()])
        },
    )?;
    let mut call = Message::new(Role::Assistant, "");
    call.tool_calls.push(ToolCall {
        id: Some("call_0".to_owned()),
        name: TOOL.to_owned(),
        arguments: Map::from_iter([("x".to_owned(), Value::from("probe-value"))]),
    });
    let mut result = Message::new(Role::Tool, RESULT);
    result.tool_call_id = Some("call_0".to_owned());
    let without_result = tools.as_ref().map_or(0, |rendered| rendered.text.len());
    let called = render(
        "a call and its result",
        Conversation {
            tools: vec![declared],
            ..conversation_of(vec![user(), call, result])
        },
    )?;
    let mut thinking = |enable: bool| {
        let conversation = Conversation {
            enable_thinking: Some(enable),
            ..conversation_of(vec![user()])
        };
        render("the thinking switch", conversation)
    };
    let (with_thinking, without_thinking) = (thinking(true)?, thinking(false)?);
    if plain.is_none()
        && system.is_none()
        && let Some(failure) = failures.into_iter().next()
    {
        return Err(ChatError::setup(failure));
    }

    Ok(Capabilities {
        system: says(&system, SYSTEM),
        tools: says(&tools, TOOL),
        tool_results: says(&called, RESULT) && says(&called, "probe-value"),
        call_format: called.as_ref().and_then(|rendered| {
            // Only after the tool list, which shows the format too.
            let tail = rendered.text.get(without_result.saturating_sub(64)..)?;
            let tags = markup.tool_calls.as_ref();
            let has_parameter = |tags: &contract::ToolCallTags| {
                tail.contains(&format!("{}x>", tags.parameter_open))
            };
            if tags.is_some_and(has_parameter) {
                Some(ToolCallFormat::XmlParameters)
            } else {
                tail.contains("\"probe-value\"")
                    .then_some(ToolCallFormat::JsonInTags)
            }
        }),
        thinking_switch: with_thinking != without_thinking,
        model_opens_reasoning: without_thinking
            .is_some_and(|rendered| rendered.closes_reasoning(tags))
            && plain.as_ref().is_some_and(|rendered| {
                !rendered.opens_reasoning(tags) && !rendered.closes_reasoning(tags)
            }),
        opens_reasoning: plain.is_some_and(|rendered| rendered.opens_reasoning(tags)),
        effort: template.source().contains("reasoning_effort"),
    })
}

fn conversation_of(messages: Vec<Message>) -> Conversation {
    Conversation {
        messages,
        add_generation_prompt: true,
        ..Conversation::default()
    }
}
