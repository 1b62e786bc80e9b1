//! Renders a conversation to a prompt with the model's chat template.
//!
//! A template is foreign code over foreign data: it runs with bounded fuel and depth, and control
//! strings inside the data stay data (see [`RenderedPrompt::literals`]).

mod bounded;
mod builtin;
mod clock;
mod engine;
mod filters;
mod limits;
mod mask;
mod probe;
mod python;
mod tojson;
mod value;

use std::ops::Range;

use contract::{ReasoningTags, Vocab};
use serde_json::{Map, Value};

use self::engine::{CompiledTemplate, RenderContext};
use self::mask::{SpecialStringMask, SpecialStringTable};
pub use self::probe::{Capabilities, ToolCallFormat};
use crate::conversation::{Conversation, Role};
use crate::error::ChatError;

/// A prompt, and which control strings in it are plain text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RenderedPrompt {
    /// The prompt.
    pub text: String,
    /// Byte ranges, in order, of special strings from a client's text, which are plain text.
    pub literals: Vec<Range<usize>>,
}

impl RenderedPrompt {
    /// Whether the prompt ends inside reasoning, so that the reply starts there.
    pub fn opens_reasoning(&self, tags: Option<&ReasoningTags>) -> bool {
        tags.is_some_and(|tags| self.text.trim_end().ends_with(&tags.open))
    }

    /// Whether the prompt ends with closed reasoning, so that the reply has none.
    pub fn closes_reasoning(&self, tags: Option<&ReasoningTags>) -> bool {
        tags.is_some_and(|tags| self.text.trim_end().ends_with(&tags.close))
    }
}

/// A compiled chat template with its probed capabilities. Share it by `Arc`.
#[derive(Debug)]
pub struct ChatTemplate {
    program: CompiledTemplate,
    /// The file's template for conversations with tools, if it has one.
    tool_program: Option<CompiledTemplate>,
    words: SpecialStringTable,
    bos_token: String,
    eos_token: String,
    capabilities: Capabilities,
}

impl ChatTemplate {
    /// The file's template, or the built-in one of its family.
    ///
    /// Fails with [`ErrorKind::Setup`](crate::ErrorKind::Setup) if the template does not compile or
    /// goes over a limit on a small conversation. Without a template and without the built-in one's
    /// turn markers, every conversation is refused.
    pub fn from_vocab(vocab: &Vocab) -> Result<ChatTemplate, ChatError> {
        let tool_use = vocab
            .named_templates
            .iter()
            .find(|(name, _)| name == "tool_use");
        match (&vocab.chat_template, tool_use) {
            (Some(source), tool_use) => {
                ChatTemplate::new(vocab, source, tool_use.map(|(_, source)| source.as_str()))
            }
            (None, Some((_, source))) => ChatTemplate::new(vocab, source, None),
            (None, None) => ChatTemplate::new(vocab, builtin::source(vocab), None),
        }
    }

    /// A template from the user; errors as in [`ChatTemplate::from_vocab`].
    pub fn from_source(source: &str, vocab: &Vocab) -> Result<ChatTemplate, ChatError> {
        ChatTemplate::new(vocab, source, None)
    }

    fn new(
        vocab: &Vocab,
        source: &str,
        tool_source: Option<&str>,
    ) -> Result<ChatTemplate, ChatError> {
        let token = |id: Option<contract::TokenId>| {
            id.and_then(|id| vocab.tokens.get(id.index()))
                .cloned()
                .unwrap_or_default()
        };
        let mut template = ChatTemplate {
            program: CompiledTemplate::compile(source)?,
            tool_program: tool_source.map(CompiledTemplate::compile).transpose()?,
            words: SpecialStringTable::new(vocab),
            bos_token: token(vocab.bos_token),
            eos_token: token(vocab.eos_token),
            capabilities: Capabilities::default(),
        };
        template.capabilities = probe::probe(&template, &vocab.markup)?;
        Ok(template)
    }

    /// What the template can express.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// The source, for prompts without tools.
    pub fn source(&self) -> &str {
        self.program.source()
    }

    /// The beginning-of-text token; empty if there is none.
    pub fn bos_token(&self) -> &str {
        &self.bos_token
    }

    /// The end-of-turn token; empty if there is none.
    pub fn eos_token(&self) -> &str {
        &self.eos_token
    }

    /// Renders the prompt of `conversation`.
    ///
    /// Fails with [`ErrorKind::TemplateRefused`](crate::ErrorKind::TemplateRefused) if the template
    /// raises an exception, with [`ErrorKind::TemplateFailed`](crate::ErrorKind::TemplateFailed) if
    /// it fails, and with [`ErrorKind::TemplateLimit`](crate::ErrorKind::TemplateLimit) if it goes
    /// over a limit of steps, bytes, nesting or time.
    pub fn render(&self, conversation: &Conversation) -> Result<RenderedPrompt, ChatError> {
        let input = TemplateInput::new(self, conversation);
        let mut mask = SpecialStringMask::new(&self.words, &input, self.source())?;
        let mut scope = MaskScope {
            all_in_content: false,
            within: None,
        };
        let mut prompt = self.render_masked(conversation, &input, &mut mask, scope)?;
        // Some templates read the strings that these scopes mask, such as a result tag, so masking
        // them is right only if the prompt text stays the same.
        if mask.has_user_defined(&input) {
            let all = MaskScope {
                all_in_content: true,
                ..scope
            };
            let masked = self.render_masked(conversation, &input, &mut mask, all);
            if let Ok(masked) = masked
                && masked.text == prompt.text
            {
                (prompt, scope) = (masked, all);
            }
        }
        if let Some(words) = mask.around_values(&input, &prompt.text) {
            let inner = MaskScope {
                within: Some(&words),
                ..scope
            };
            let masked = self.render_masked(conversation, &input, &mut mask, inner);
            if let Ok(masked) = masked
                && masked.text == prompt.text
            {
                prompt = masked;
            }
        }
        Ok(prompt)
    }

    fn render_masked<'w>(
        &'w self,
        conversation: &Conversation,
        input: &TemplateInput,
        mask: &mut SpecialStringMask<'w>,
        scope: MaskScope<'_, 'w>,
    ) -> Result<RenderedPrompt, ChatError> {
        let mut messages: Vec<Value> = Vec::with_capacity(input.messages.len());
        for (role, message) in &input.messages {
            let all = scope.all_in_content && *role != Role::Assistant;
            let message = mask.mask_message(message, all);
            messages.push(mask.mask_within(message, scope));
        }
        let end = conversation
            .continue_final_message
            .then(|| mask.end_placeholder());
        if let Some(end) = end
            && let Some(Value::Object(last)) = messages.last_mut()
            && let Some(Value::String(content)) = last.get_mut("content")
        {
            content.push(end);
        }
        let has_tools = !input.tools.is_empty();
        let tools = if has_tools {
            Value::Array(
                input
                    .tools
                    .iter()
                    .map(|tool| {
                        let tool = mask.mask_value(tool);
                        mask.mask_within(tool, scope)
                    })
                    .collect(),
            )
        } else {
            Value::Null
        };
        let mut variables = Map::new();
        for (name, value) in &input.variables {
            // The server's own variables are the template's text, such as the end-of-turn token.
            let masked = if conversation.variables.contains_key(name) {
                mask.mask_value(value)
            } else {
                value.clone()
            };
            variables.insert(name.clone(), masked);
        }
        let program = match &self.tool_program {
            Some(program) if has_tools => program,
            _ => &self.program,
        };
        let text = program.run(&RenderContext {
            messages: &Value::Array(messages),
            tools: &tools,
            add_generation_prompt: conversation.add_generation_prompt,
            further: &variables,
            now_unix: conversation.now_unix,
        })?;
        let text = match end {
            None => text.as_str(),
            Some(end) => text
                .split_once(end)
                .map(|(before, _)| before)
                .ok_or_else(|| {
                    ChatError::template_failed(
                        "the chat template drops the message to be continued",
                    )
                })?,
        };
        Ok(mask.unmask(text))
    }
}

/// What is masked in a client's text beside control strings and their parts at its ends.
#[derive(Debug, Clone, Copy)]
struct MaskScope<'a, 'w> {
    /// User-defined strings, in the contents of system, user and tool messages.
    all_in_content: bool,
    /// Values that lie within one of these control strings.
    within: Option<&'a [&'w str]>,
}

/// A conversation as the template's JSON.
struct TemplateInput {
    messages: Vec<(Role, Value)>,
    tools: Vec<Value>,
    variables: Map<String, Value>,
}

impl TemplateInput {
    fn new(template: &ChatTemplate, conversation: &Conversation) -> TemplateInput {
        let mut variables = Map::new();
        variables.insert("bos_token".to_owned(), template.bos_token.as_str().into());
        variables.insert("eos_token".to_owned(), template.eos_token.as_str().into());
        variables.insert("add_vision_id".to_owned(), false.into());
        if let Some(effort) = conversation.effort
            && template.source().contains("reasoning_effort")
        {
            variables.insert("reasoning_effort".to_owned(), effort.template_name().into());
        }
        for (name, value) in &conversation.variables {
            variables.insert(name.clone(), value.clone());
        }
        if let Some(enable) = conversation.enable_thinking {
            variables.insert("enable_thinking".to_owned(), enable.into());
        }
        TemplateInput {
            messages: conversation
                .messages
                .iter()
                .map(|message| (message.role, message.to_json()))
                .collect(),
            tools: conversation.tools.clone(),
            variables,
        }
    }
}

#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod tests;
