//! Tags that a model writes around its reasoning and its tool calls.

/// The tags that a model's template or card defines.
///
/// The default is that of the Qwen3 and Qwen3.5 templates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateMarkup {
    /// Around reasoning; `None` for a model that does not reason.
    pub reasoning: Option<ReasoningTags>,
    /// Around and inside tool calls; `None` for a model that writes none.
    pub tool_calls: Option<ToolCallTags>,
}

impl Default for TemplateMarkup {
    fn default() -> TemplateMarkup {
        TemplateMarkup {
            reasoning: Some(ReasoningTags::default()),
            tool_calls: Some(ToolCallTags::default()),
        }
    }
}

/// The tags that a reply parser and a grammar use, with defaults for undefined ones.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelMarkup {
    /// Around reasoning.
    pub reasoning: ReasoningTags,
    /// Around and inside tool calls.
    pub tool_calls: ToolCallTags,
}

impl From<TemplateMarkup> for ModelMarkup {
    fn from(defined: TemplateMarkup) -> ModelMarkup {
        ModelMarkup {
            reasoning: defined.reasoning.unwrap_or_default(),
            tool_calls: defined.tool_calls.unwrap_or_default(),
        }
    }
}

/// Tags around reasoning. The default is Qwen's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasoningTags {
    /// Starts reasoning.
    pub open: String,
    /// Ends reasoning.
    pub close: String,
}

/// Tags of tool calls. The default is Qwen's.
///
/// Inside `open` and `close`, a call is either a JSON object or
/// `<function=NAME> <parameter=KEY> value </parameter> </function>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCallTags {
    /// Starts a call.
    pub open: String,
    /// Ends a call.
    pub close: String,
    /// Another tag that may start a call in JSON.
    pub alternate_open: String,
    /// Ends a call that began with `alternate_open`.
    pub alternate_close: String,
    /// Precedes a function's name, which ends with `>`.
    pub function_open: String,
    /// Ends a function.
    pub function_close: String,
    /// Precedes a parameter's name, which ends with `>`.
    pub parameter_open: String,
    /// Ends a parameter's value.
    pub parameter_close: String,
}

impl ReasoningTags {
    /// Tags from their texts.
    pub fn new(open: &str, close: &str) -> ReasoningTags {
        ReasoningTags {
            open: open.to_owned(),
            close: close.to_owned(),
        }
    }
}

impl ToolCallTags {
    /// Call tags from their texts, with the default tags inside.
    pub fn new(open: &str, close: &str) -> ToolCallTags {
        ToolCallTags {
            open: open.to_owned(),
            close: close.to_owned(),
            ..ToolCallTags::default()
        }
    }
}

impl Default for ReasoningTags {
    fn default() -> ReasoningTags {
        ReasoningTags::new("<think>", "</think>")
    }
}

impl Default for ToolCallTags {
    fn default() -> ToolCallTags {
        ToolCallTags {
            open: "<tool_call>".to_owned(),
            close: "</tool_call>".to_owned(),
            alternate_open: "<tool_code>".to_owned(),
            alternate_close: "</tool_code>".to_owned(),
            function_open: "<function=".to_owned(),
            function_close: "</function>".to_owned(),
            parameter_open: "<parameter=".to_owned(),
            parameter_close: "</parameter>".to_owned(),
        }
    }
}
