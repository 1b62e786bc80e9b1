//! A grammar of tool calls under construction.

use std::fmt::Write;

use contract::ToolCallTags;

use super::ToolCallMarkup;

/// How the values of tools that are not strict are typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Typing {
    BySchema,
    /// Any JSON for values that are not text.
    Loose,
}

/// A grammar under construction.
pub(super) struct GrammarWriter<'a> {
    /// How the model writes calls.
    pub(super) markup: ToolCallMarkup<'a>,
    /// The rules so far, in Lark's notation.
    pub(super) text: String,
    /// Of the tool that is being written.
    pub(super) typing: Typing,
    /// Number of terminals of values.
    pub(super) n_values: usize,
    /// Whether the rules of unconstrained text exist.
    pub(super) has_any_text: bool,
    /// Whether the rules of text without tags exist.
    pub(super) has_marked_text: bool,
    /// What is left out of tools that are not strict.
    pub(super) notes: Vec<String>,
}

impl<'a> GrammarWriter<'a> {
    pub(super) fn new(
        markup: ToolCallMarkup<'a>,
        start: String,
        typing: Typing,
    ) -> GrammarWriter<'a> {
        GrammarWriter {
            markup,
            text: start,
            typing,
            n_values: 0,
            has_any_text: false,
            has_marked_text: false,
            notes: Vec::new(),
        }
    }

    pub(super) fn tags(&self) -> &'a ToolCallTags {
        &self.markup.tokenizer.markup().tool_calls
    }

    /// Ends a parameter's value, line breaks included.
    pub(super) fn parameter_close(&self) -> String {
        format!("\n{}\n", self.tags().parameter_close)
    }

    pub(super) fn rule(&mut self, name: &str, body: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{name}: {body}");
    }
}
