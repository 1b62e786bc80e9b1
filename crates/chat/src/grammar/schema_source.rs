//! A schema document and where its references lead.

use serde_json::Value;

use crate::error::ChatError;
use crate::request::SchemaStrictness;
use crate::tools::resolve_pointer;

/// Most references to follow in a row.
const MAX_HOPS: usize = 16;

/// The document that a schema is part of.
#[derive(Debug, Clone, Copy)]
pub(super) struct SchemaSource<'a> {
    /// References point into it.
    pub(super) root: &'a Value,
    /// How much of it must hold.
    pub(super) strictness: SchemaStrictness,
    /// Its path in the request.
    pub(super) field: &'a str,
}

impl<'a> SchemaSource<'a> {
    /// The target of a schema's `$ref`, if it has one that leads somewhere.
    pub(super) fn target(&self, schema: &Value) -> Option<&'a Value> {
        resolve_pointer(self.root, schema.get("$ref")?.as_str()?)
    }

    /// The schema that a chain of references without other keywords leads to.
    pub(super) fn resolved(&self, mut schema: &'a Value) -> &'a Value {
        for _ in 0..MAX_HOPS {
            let is_only_reference = schema.as_object().is_some_and(|map| map.len() == 1);
            match self.target(schema).filter(|_| is_only_reference) {
                Some(target) => schema = target,
                None => break,
            }
        }
        schema
    }

    /// An error in the document.
    pub(super) fn error(&self, message: &str) -> ChatError {
        ChatError::field(self.field, format!("the schema's {message}"))
    }
}

/// A count, which may be written with a fraction of zero.
pub(super) fn whole_number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        // Up to 2^53 every whole number is exact.
        let is_count = number >= 0.0 && number.fract() == 0.0 && number <= 9_007_199_254_740_992.0;
        is_count.then_some(number as u64)
    })
}
