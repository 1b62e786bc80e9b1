//! Tags a model writes around its reasoning and its tool calls.

/// The tags of one model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelMarkup {
    /// Around reasoning.
    pub reasoning: ReasoningTags,
    /// Around and inside tool calls.
    pub tool_calls: ToolCallTags,
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

impl Default for ReasoningTags {
    fn default() -> ReasoningTags {
        ReasoningTags {
            open: "<think>".to_owned(),
            close: "</think>".to_owned(),
        }
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
