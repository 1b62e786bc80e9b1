//! The required form of a reply.

use serde_json::Value;

/// The required form of a reply; `field` is the request field that asks for it.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum ResponseFormat {
    /// Free text.
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that matches a schema.
    JsonSchema {
        /// The schema.
        schema: Value,
        /// How much of the schema must hold.
        strictness: SchemaStrictness,
        /// Path of the schema in the request.
        field: String,
    },
    /// Text that a regular expression matches as a whole.
    Regex {
        /// The expression.
        pattern: String,
        /// Path of the expression in the request.
        field: String,
    },
    /// One of these texts.
    Choice {
        /// The texts, at least one.
        texts: Vec<String>,
        /// Path of the texts in the request.
        field: String,
    },
    /// Text of a grammar.
    Grammar {
        /// The grammar in Lark's notation.
        lark: String,
        /// Path of the grammar in the request.
        field: String,
    },
}

impl ResponseFormat {
    /// Whether both ask for the same, in whichever field.
    pub(crate) fn is_same(&self, other: &ResponseFormat) -> bool {
        use ResponseFormat::{Choice, Grammar, JsonSchema, Regex};
        match (self, other) {
            (JsonSchema { schema: one, .. }, JsonSchema { schema: other, .. }) => one == other,
            (Regex { pattern: one, .. }, Regex { pattern: other, .. }) => one == other,
            (Choice { texts: one, .. }, Choice { texts: other, .. }) => one == other,
            (Grammar { lark: one, .. }, Grammar { lark: other, .. }) => one == other,
            (one, other) => one == other,
        }
    }
}

/// How much of a JSON schema must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchemaStrictness {
    /// All of it: an unsupported keyword is an error.
    Strict,
    /// As much as is supported.
    BestEffort,
}
