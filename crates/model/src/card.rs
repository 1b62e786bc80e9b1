//! Model cards: how long answers usually are, how to sample, how to think.
//!
//! A card is a small JSON file named after the model. It never prevents a start: what is missing or wrong is
//! reported as a warning and replaced by the value of the family, or else by one that suits any model.

use std::fmt;

use serde_json::{Map, Value};

use crate::ModelError;

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The model's own card.
    Card,
    /// The table of families.
    Family,
    /// Suits any model.
    Fallback,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Card => "model card",
            Source::Family => "family default",
            Source::Fallback => "fallback",
        })
    }
}

/// A value and where it comes from, so that a start can say so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sourced<T> {
    /// The value.
    pub value: T,
    /// Where it comes from.
    pub source: Source,
}

/// What is usual for one model.
#[derive(Debug, Clone, PartialEq)]
pub struct Card {
    /// The model's name.
    pub name: Option<String>,
    /// Where the values are published (a URL).
    pub source: Option<String>,
    /// When they were last compared with it (a date).
    pub verified_at: Option<String>,
    /// Where files of the model are.
    pub download_urls: Vec<String>,
    /// Longest answer when a request does not say, in tokens.
    pub max_tokens: Sourced<usize>,
    /// Longest answer to hard problems, in tokens.
    pub complex_problem_max_tokens: Option<usize>,
    /// Tokens kept for the reply when thinking is cut short.
    pub hard_limit_reply_budget: Sourced<usize>,
    /// The text that ends thinking.
    pub thinking_marker: Option<String>,
    /// What is put in the model's mouth to end thinking, the marker included.
    pub thinking_terminator_hint: Option<String>,
    /// How to sample when a request does not say.
    pub sampling: CardSampling,
    /// Thinking tokens per effort, where the card has them.
    pub reasoning_effort_tiers: CardTiers,
    /// For people.
    pub notes: Option<String>,
}

/// Sampling values of a card; what is `None` is neutral.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[expect(missing_docs, reason = "these are the names of the request fields")]
pub struct CardSampling {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<usize>,
    pub min_p: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

/// Thinking tokens per effort; what is `None` is computed from the lengths of answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(missing_docs, reason = "these are the names of the efforts")]
pub struct CardTiers {
    pub low: Option<usize>,
    pub medium: Option<usize>,
    pub high: Option<usize>,
    pub x_high: Option<usize>,
    pub max: Option<usize>,
}

const REPLY_BUDGET: usize = 4096;
const LEAST_REPLY_BUDGET: u64 = 256;

impl Card {
    /// The values of a family, by the architecture in the file.
    pub fn of_family(architecture: &str) -> Card {
        let by_family = match architecture {
            a if a.starts_with("qwen3") || a.starts_with("laguna") => Some(32_768),
            a if a.starts_with("gemma4") => Some(16_384),
            _ => None,
        };
        let source = if by_family.is_some() {
            Source::Family
        } else {
            Source::Fallback
        };
        Card {
            name: None,
            source: None,
            verified_at: None,
            download_urls: Vec::new(),
            max_tokens: Sourced {
                value: by_family.unwrap_or(16_000),
                source,
            },
            complex_problem_max_tokens: None,
            hard_limit_reply_budget: Sourced {
                value: REPLY_BUDGET,
                source,
            },
            thinking_marker: None,
            thinking_terminator_hint: None,
            sampling: CardSampling::default(),
            reasoning_effort_tiers: CardTiers::default(),
            notes: None,
        }
    }

    /// Reads a card's JSON over these values. Gives the warnings too, each naming its field.
    ///
    /// # Errors
    /// [`ModelError::Card`] when the text is not a JSON object; go on without the card.
    pub fn read(&self, json: &str) -> Result<(Card, Vec<String>), ModelError> {
        let object: Map<String, Value> =
            serde_json::from_str(json).map_err(|e| ModelError::Card {
                detail: e.to_string(),
            })?;
        let mut fields = Fields {
            object,
            path: String::new(),
            warnings: Vec::new(),
        };
        let mut card = self.clone();
        for required in ["name", "source", "verified_at", "max_tokens"] {
            if !fields.object.contains_key(required) {
                fields.warnings.push(format!("{required} is missing"));
            }
        }
        card.name = fields.text("name").or(card.name);
        card.source = fields.text("source").or(card.source);
        card.verified_at = fields.text("verified_at").or(card.verified_at);
        card.download_urls = fields.texts("download_urls").unwrap_or(card.download_urls);
        if let Some(value) = fields.count("max_tokens", 1) {
            card.max_tokens = Sourced {
                value,
                source: Source::Card,
            };
        }
        card.complex_problem_max_tokens = fields
            .count("complex_problem_max_tokens", 1)
            .or(card.complex_problem_max_tokens);
        if let Some(value) = fields.count("hard_limit_reply_budget", LEAST_REPLY_BUDGET) {
            card.hard_limit_reply_budget = Sourced {
                value,
                source: Source::Card,
            };
        }
        card.thinking_marker = fields.text("thinking_marker").or(card.thinking_marker);
        card.thinking_terminator_hint = fields
            .text("thinking_terminator_hint")
            .or(card.thinking_terminator_hint);
        card.notes = fields.text("notes").or(card.notes);
        if let Some(mut inner) = fields.object("sampling") {
            card.sampling = CardSampling {
                temperature: inner.float("temperature", 0.0..=100.0),
                top_p: inner.float("top_p", 0.0..=1.0),
                top_k: inner.count("top_k", 0),
                min_p: inner.float("min_p", 0.0..=1.0),
                presence_penalty: inner.float("presence_penalty", -2.0..=2.0),
                repetition_penalty: inner.float("repetition_penalty", 0.01..=100.0),
            };
            fields.warnings.extend(inner.finish());
        }
        if let Some(mut inner) = fields.object("reasoning_effort_tiers") {
            card.reasoning_effort_tiers = CardTiers {
                low: inner.count("low", 1),
                medium: inner.count("medium", 1),
                high: inner.count("high", 1),
                x_high: inner.count("x-high", 1),
                max: inner.count("max", 1),
            };
            fields.warnings.extend(inner.finish());
        }
        let warnings = fields.finish();
        Ok((card, warnings))
    }
}

/// The name of a model's card without its ending: lower case, blanks and underscores as dashes, and nothing
/// but letters, digits, dots and dashes.
pub fn card_stem(general_name: &str) -> String {
    let dashed = general_name.chars().map(|c| match c {
        ' ' | '\t' | '_' => '-',
        other => other.to_ascii_lowercase(),
    });
    dashed
        .filter(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || ".-".contains(*c))
        .collect()
}

/// An object whose fields are taken out one by one; what is left at the end is unknown.
struct Fields {
    object: Map<String, Value>,
    /// Prefix of names in warnings.
    path: String,
    warnings: Vec<String>,
}

impl Fields {
    fn take<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Option<T> {
        let value = self
            .object
            .shift_remove(name)
            .filter(|value| !value.is_null())?;
        let found = read(&value);
        if found.is_none() {
            self.warnings.push(format!(
                "{}{name} is {value}, expected {expected}",
                self.path
            ));
        }
        found
    }

    fn text(&mut self, name: &str) -> Option<String> {
        self.take(name, "a string", |value| value.as_str().map(str::to_owned))
    }

    /// Strings in an array, or as the values of an object.
    fn texts(&mut self, name: &str) -> Option<Vec<String>> {
        self.take(name, "strings", |value| match value {
            Value::Array(items) => items
                .iter()
                .map(|v| v.as_str().map(str::to_owned))
                .collect(),
            Value::Object(items) => items
                .values()
                .map(|v| v.as_str().map(str::to_owned))
                .collect(),
            _ => None,
        })
    }

    fn count(&mut self, name: &str, least: u64) -> Option<usize> {
        self.take(
            name,
            &format!("a whole number of at least {least}"),
            |value| {
                let value = value.as_u64().filter(|&v| v >= least)?;
                usize::try_from(value).ok()
            },
        )
    }

    fn float(&mut self, name: &str, range: std::ops::RangeInclusive<f64>) -> Option<f32> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        self.take(name, &expected, |value| {
            value
                .as_f64()
                .filter(|v| range.contains(v))
                .map(|v| v as f32)
        })
    }

    fn object(&mut self, name: &str) -> Option<Fields> {
        let path = format!("{}{name}.", self.path);
        let object = self.take(name, "an object", |value| value.as_object().cloned())?;
        Some(Fields {
            object,
            path,
            warnings: Vec::new(),
        })
    }

    fn finish(self) -> Vec<String> {
        let Fields {
            object,
            path,
            mut warnings,
        } = self;
        warnings.extend(
            object
                .keys()
                .map(|name| format!("{path}{name} is not a known field")),
        );
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_card_is_read_without_warnings() {
        let json = r#"{"name": "Q", "source": "https://example.org", "verified_at": "2026-01-01",
            "max_tokens": 32768, "complex_problem_max_tokens": 81920, "hard_limit_reply_budget": 4096,
            "download_urls": ["a", "b"], "thinking_marker": "</think>", "thinking_terminator_hint": "x",
            "sampling": {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "min_p": 0},
            "reasoning_effort_tiers": {"low": 4032, "medium": 16128, "high": 32256, "x-high": 56832,
            "max": 81408}, "notes": "n"}"#;
        let (card, warnings) = Card::of_family("qwen35").read(json).unwrap();
        assert_eq!(warnings, Vec::<String>::new());
        assert_eq!(
            card.max_tokens,
            Sourced {
                value: 32_768,
                source: Source::Card
            }
        );
        assert_eq!(card.sampling.temperature, Some(1.0));
        assert_eq!(card.sampling.top_k, Some(20));
        assert_eq!(card.sampling.presence_penalty, None);
        assert_eq!(card.reasoning_effort_tiers.x_high, Some(56_832));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named_and_replaced_by_the_family() {
        let json = r#"{"name": 3, "max_tokens": 0, "extra": 1, "sampling": {"top_p": 2, "tepmerature": 1}}"#;
        let (card, warnings) = Card::of_family("qwen3").read(json).unwrap();
        assert_eq!(
            card.max_tokens,
            Sourced {
                value: 32_768,
                source: Source::Family
            }
        );
        assert_eq!(card.sampling, CardSampling::default());
        for field in [
            "source is missing",
            "name is 3",
            "max_tokens is 0",
            "extra is not",
            "sampling.top_p",
            "sampling.tepmerature",
        ] {
            assert!(
                warnings.iter().any(|w| w.starts_with(field)),
                "{field} in {warnings:?}"
            );
        }
        assert_eq!(warnings.len(), 7);
    }

    #[test]
    fn a_card_that_is_not_an_object_is_refused() {
        for json in ["", "[]", "{", "\"x\""] {
            assert!(Card::of_family("qwen3").read(json).is_err(), "{json}");
        }
    }

    #[test]
    fn families_have_their_lengths_and_others_the_fallback() {
        for (architecture, value, source) in [
            ("qwen35", 32_768, Source::Family),
            ("laguna", 32_768, Source::Family),
            ("gemma4", 16_384, Source::Family),
            ("other", 16_000, Source::Fallback),
        ] {
            assert_eq!(
                Card::of_family(architecture).max_tokens,
                Sourced { value, source }
            );
        }
    }

    #[test]
    fn stems_are_lower_case_with_dashes() {
        assert_eq!(
            card_stem("Qwen3.6 27B_Instruct\t(é)!"),
            "qwen3.6-27b-instruct-"
        );
    }
}
