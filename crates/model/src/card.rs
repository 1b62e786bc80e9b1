//! Model cards: a model's usual sampling, token limits and reasoning, as its makers recommend.
//!
//! A card is a JSON file named after the model; `models/cards/` holds the bundled ones. An invalid
//! card never prevents a start: invalid fields are reported as warnings and ignored.

use gguf::GgufFile;
use serde_json::{Map, Value};

use crate::markup::{CardMarkup, CardTags};

/// The values of a card, with defaults for missing ones.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelCard {
    /// The card's own name for the model, or where the values come from.
    pub name: String,
    /// Tokens of a reply if a request sets no limit, reasoning included.
    pub max_tokens: usize,
    /// The same for hard problems, if the card has it.
    pub complex_problem_max_tokens: Option<usize>,
    /// Tokens kept for the reply after reasoning.
    pub hard_limit_reply_budget: usize,
    /// The tag that starts reasoning, if the card has it.
    pub thinking_marker: Option<String>,
    /// Text that ends reasoning when its budget is used up, if the card has it.
    pub thinking_terminator_hint: Option<String>,
    /// Recommended sampling.
    pub sampling: CardSampling,
    /// The same for replies that do not reason, where it differs.
    pub non_thinking_sampling: CardSampling,
    /// Reasoning tokens by effort: low, medium, high, x-high, max.
    pub effort_tiers: [Option<usize>; 5],
    /// Tags around reasoning and tool calls, which override those of the chat template.
    pub markup: CardMarkup,
    /// Published draft models of the models that share the card.
    pub drafts: Vec<CardDraft>,
}

/// A published draft model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CardDraft {
    /// A part of the names of the models that it drafts for, between dashes, such as `27b`.
    pub model: String,
    /// Its kind, such as `DFlash2`.
    pub kind: String,
    /// Where it is published.
    pub source: String,
}

/// Recommended sampling; `None` for values that the card does not have.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CardSampling {
    /// Sampling temperature.
    pub temperature: Option<f32>,
    /// Nucleus mass.
    pub top_p: Option<f32>,
    /// Candidates kept.
    pub top_k: Option<usize>,
    /// Minimum probability relative to the best.
    pub min_p: Option<f32>,
    /// Presence penalty.
    pub presence_penalty: Option<f32>,
    /// Repetition penalty.
    pub repetition_penalty: Option<f32>,
}

const EFFORTS: [&str; 5] = ["low", "medium", "high", "x-high", "max"];
/// Tokens of a reply by the beginning of an architecture's name, and for all others.
const FAMILIES: [(&str, usize); 3] = [("qwen3", 32_768), ("laguna", 32_768), ("gemma4", 16_384)];
const FALLBACK_TOKENS: usize = 16_000;
/// Reply tokens kept if the card sets none.
const REPLY_BUDGET: usize = 4096;
const LEAST_REPLY_BUDGET: usize = 256;
const KNOWN_KEYS: [&str; 16] = [
    "name",
    "source",
    "verified_at",
    "max_tokens",
    "download_urls",
    "complex_problem_max_tokens",
    "hard_limit_reply_budget",
    "thinking_marker",
    "thinking_terminator_hint",
    "sampling",
    "non_thinking_sampling",
    "reasoning_effort_tiers",
    "reasoning_tags",
    "tool_call_tags",
    "drafts",
    "notes",
];

impl CardSampling {
    /// The sampling that a file recommends by its `general.sampling.*` keys. A value that is not
    /// one is warned of and left away: it never prevents a start.
    pub(crate) fn of_file(file: &GgufFile) -> CardSampling {
        let meta = file.meta();
        let warn = |key: &str| {
            let file = file.name();
            tracing::warn!(key, file, "a sampling value of the file is not used");
        };
        let number = |name: &str, least: f32, most: f32| {
            let key = format!("general.sampling.{name}");
            let float = meta.float(&key).ok().flatten().map(|value| value as f32);
            let value = float.filter(|value| (least..=most).contains(value));
            if value.is_none() && meta.get(&key).is_some() {
                warn(&key);
            }
            value
        };
        let top_k = || {
            const KEY: &str = "general.sampling.top_k";
            let value = meta.integer(KEY).ok().flatten();
            if value.is_none() && meta.get(KEY).is_some() {
                warn(KEY);
            }
            usize::try_from(value?).ok()
        };
        CardSampling {
            temperature: number("temp", 0.0, f32::MAX),
            top_p: number("top_p", 0.0, 1.0),
            top_k: top_k(),
            min_p: number("min_p", 0.0, 1.0),
            presence_penalty: None,
            repetition_penalty: number("penalty_repeat", f32::MIN_POSITIVE, f32::MAX),
        }
    }
}

impl ModelCard {
    /// Defaults of a family without a card.
    pub fn of_architecture(architecture: &str) -> ModelCard {
        let max_tokens = FAMILIES
            .iter()
            .find(|(prefix, _)| architecture.starts_with(prefix))
            .map_or(FALLBACK_TOKENS, |&(_, tokens)| tokens);
        ModelCard {
            name: format!("{architecture} defaults"),
            max_tokens,
            complex_problem_max_tokens: None,
            hard_limit_reply_budget: REPLY_BUDGET,
            thinking_marker: None,
            thinking_terminator_hint: None,
            sampling: CardSampling::default(),
            non_thinking_sampling: CardSampling::default(),
            effort_tiers: [None; 5],
            markup: CardMarkup::default(),
            drafts: Vec::new(),
        }
    }

    /// Reads a card over the defaults of `architecture`. Warnings say which values were ignored and
    /// why.
    pub fn parse(json: &str, architecture: &str) -> (ModelCard, Vec<String>) {
        let mut card = ModelCard::of_architecture(architecture);
        let mut warnings = Vec::new();
        let fields = match serde_json::from_str(json) {
            Ok(Value::Object(fields)) => fields,
            Ok(_) => {
                warnings.push("the card is not a JSON object".to_owned());
                return (card, warnings);
            }
            Err(error) => {
                warnings.push(format!("the card is not JSON: {error}"));
                return (card, warnings);
            }
        };
        let mut reader = CardFields {
            fields: &fields,
            warnings: &mut warnings,
        };
        for required in ["name", "source", "verified_at", "max_tokens"] {
            if !fields.contains_key(required) {
                reader.warnings.push(format!("{required} is missing"));
            }
        }
        for key in fields
            .keys()
            .filter(|key| !KNOWN_KEYS.contains(&key.as_str()))
        {
            reader
                .warnings
                .push(format!("{key} is not a field of a card"));
        }
        if let Some(name) = reader.text("name") {
            card.name = name;
        }
        if let Some(tokens) = reader.count("max_tokens", 1) {
            card.max_tokens = tokens;
        }
        card.complex_problem_max_tokens = reader.count("complex_problem_max_tokens", 1);
        if let Some(tokens) = reader.count("hard_limit_reply_budget", LEAST_REPLY_BUDGET) {
            card.hard_limit_reply_budget = tokens;
        }
        card.thinking_marker = reader.text("thinking_marker");
        card.thinking_terminator_hint = reader.text("thinking_terminator_hint");
        card.markup = CardMarkup {
            reasoning: reader.tags("reasoning_tags"),
            tool_calls: reader.tags("tool_call_tags"),
        };
        card.drafts = reader.drafts();
        card.sampling = reader.sampling("sampling");
        card.non_thinking_sampling = reader.sampling("non_thinking_sampling");
        if let Some(tiers) = reader.object("reasoning_effort_tiers") {
            let mut inner = CardFields {
                fields: tiers,
                warnings: reader.warnings,
            };
            card.effort_tiers = EFFORTS.map(|effort| inner.count(effort, 1));
        }
        (card, warnings)
    }

    /// The published draft of a model by its name; of several, the first in the card.
    pub fn draft_of(&self, model_name: &str) -> Option<&CardDraft> {
        let stem = ModelCard::stem(model_name);
        let fits = |draft: &&CardDraft| stem.split('-').any(|part| part == draft.model);
        self.drafts.iter().find(fits)
    }

    /// The file stem of a model's card: the model's name in lower case, with dashes for blanks and
    /// underscores, reduced to letters, digits, dots and dashes.
    pub fn stem(model_name: &str) -> String {
        model_name
            .to_lowercase()
            .chars()
            .map(|c| {
                if matches!(c, ' ' | '\t' | '_') {
                    '-'
                } else {
                    c
                }
            })
            .filter(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '-'))
            .collect()
    }
}

struct CardFields<'a, 'w> {
    fields: &'a Map<String, Value>,
    warnings: &'w mut Vec<String>,
}

impl<'a> CardFields<'a, '_> {
    fn present(&self, key: &str) -> Option<&'a Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    fn warn<T>(&mut self, key: &str, expected: &str) -> Option<T> {
        self.warnings.push(format!("{key} is not {expected}"));
        None
    }

    fn text(&mut self, key: &str) -> Option<String> {
        match self.present(key)? {
            Value::String(text) => Some(text.clone()),
            _ => self.warn(key, "a string"),
        }
    }

    fn count(&mut self, key: &str, least: usize) -> Option<usize> {
        let count = self
            .present(key)?
            .as_u64()
            .and_then(|n| usize::try_from(n).ok());
        match count.filter(|n| *n >= least) {
            Some(count) => Some(count),
            None => self.warn(key, &format!("a whole number of at least {least}")),
        }
    }

    fn number(&mut self, key: &str, least: f32, most: f32) -> Option<f32> {
        let number = self.present(key)?.as_f64().map(|x| x as f32);
        match number.filter(|x| (least..=most).contains(x)) {
            Some(number) => Some(number),
            None => self.warn(key, &format!("a number from {least} to {most}")),
        }
    }

    /// An object of sampling values; all absent without it.
    fn sampling(&mut self, key: &str) -> CardSampling {
        let Some(fields) = self.object(key) else {
            return CardSampling::default();
        };
        let mut inner = CardFields {
            fields,
            warnings: self.warnings,
        };
        CardSampling {
            temperature: inner.number("temperature", 0.0, 2.0),
            top_p: inner.number("top_p", f32::MIN_POSITIVE, 1.0),
            top_k: inner.count("top_k", 0),
            min_p: inner.number("min_p", 0.0, 1.0),
            presence_penalty: inner.number("presence_penalty", -2.0, 2.0),
            repetition_penalty: inner.number("repetition_penalty", f32::MIN_POSITIVE, 10.0),
        }
    }

    /// `[open, close]`, or `[]` for a model without such tags.
    fn tags(&mut self, key: &str) -> CardTags {
        let Some(value) = self.present(key) else {
            return CardTags::FromTemplate;
        };
        let texts = value.as_array().map(Vec::as_slice);
        match texts {
            Some([]) => CardTags::Absent,
            Some([Value::String(open), Value::String(close)])
                if !open.is_empty() && !close.is_empty() =>
            {
                CardTags::Pair {
                    open: open.clone(),
                    close: close.clone(),
                }
            }
            _ => {
                let expected = "an opening and a closing tag, or an empty list";
                self.warn(key, expected).unwrap_or_default()
            }
        }
    }

    /// The drafts of the card; an invalid one is left out.
    fn drafts(&mut self) -> Vec<CardDraft> {
        const KEY: &str = "drafts";
        let Some(value) = self.present(KEY) else {
            return Vec::new();
        };
        let draft = |value: &Value| {
            let text = |key: &str| value.get(key)?.as_str().map(str::to_owned);
            Some(CardDraft {
                model: text("model")?,
                kind: text("kind")?,
                source: text("source")?,
            })
        };
        let list = value.as_array().map_or(&[][..], Vec::as_slice);
        let found: Vec<CardDraft> = list.iter().filter_map(draft).collect();
        if found.len() != list.len() || !value.is_array() {
            let expected = "a list of objects with the texts model, kind and source";
            let _: Option<()> = self.warn(KEY, expected);
        }
        found
    }

    fn object(&mut self, key: &str) -> Option<&'a Map<String, Value>> {
        match self.present(key)? {
            Value::Object(fields) => Some(fields),
            _ => self.warn(key, "an object"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"name": "A", "source": "s", "verified_at": "d", "max_tokens": 100,
        "sampling": {"temperature": 0.7, "top_k": 20}, "non_thinking_sampling": {"top_k": 5},
        "reasoning_effort_tiers": {"low": 5, "max": 50}}"#;

    #[test]
    fn valid_cards_load_without_warning() {
        let (card, warnings) = ModelCard::parse(GOOD, "qwen35");
        assert_eq!(warnings, Vec::<String>::new());
        assert_eq!(
            (card.max_tokens, card.hard_limit_reply_budget),
            (100, REPLY_BUDGET)
        );
        assert_eq!(card.sampling.temperature, Some(0.7));
        assert_eq!(card.sampling.top_k, Some(20));
        assert_eq!(card.non_thinking_sampling.top_k, Some(5));
        assert_eq!(card.effort_tiers, [Some(5), None, None, None, Some(50)]);
    }

    #[test]
    fn published_drafts_are_found_by_a_part_of_the_name() {
        let json = r#"{"name": "A", "source": "s", "verified_at": "d", "max_tokens": 100,
            "drafts": [{"model": "4b", "kind": "DFlash", "source": "small"},
                       {"model": "27b", "kind": "DFlash2", "source": "large"}]}"#;
        let (card, warnings) = ModelCard::parse(json, "qwen35");
        assert_eq!(warnings, Vec::<String>::new());
        let source = |name: &str| card.draft_of(name).map(|draft| draft.source.as_str());
        assert_eq!(source("Qwen3.8 27B"), Some("large"));
        assert_eq!(source("Qwen3.8-4B-Q4_K_M"), Some("small"));
        assert_eq!(source("Qwen3.8-14B"), None);
        let json = json.replace(r#""kind": "DFlash", "#, "");
        let (card, warnings) = ModelCard::parse(&json, "qwen35");
        assert_eq!((card.drafts.len(), warnings.len()), (1, 1), "{warnings:?}");
    }

    #[test]
    fn invalid_card_fields_are_reported_and_ignored() {
        let (card, warnings) = ModelCard::parse(
            r#"{"name": 3, "max_tokens": 0, "sampling": {"temperature": "hot"}, "colour": 1}"#,
            "qwen3",
        );
        assert_eq!(card, ModelCard::of_architecture("qwen3"));
        let warnings = warnings.join("; ");
        for part in [
            "source is missing",
            "colour is not a field",
            "name is not",
            "max_tokens is not",
            "temperature is not",
        ] {
            assert!(warnings.contains(part), "{part} in {warnings}");
        }
        assert_eq!(ModelCard::parse("[", "x").0.max_tokens, 16_000);
        assert_eq!(
            ModelCard::parse("[]", "x").1,
            ["the card is not a JSON object"]
        );
    }

    #[test]
    fn tags_are_pairs_or_absent() {
        let of = |tags: &str| {
            let json = GOOD.replacen('{', &format!(r#"{{"reasoning_tags": {tags}, "#), 1);
            let (card, warnings) = ModelCard::parse(&json, "qwen35");
            (card.markup.reasoning, warnings.len())
        };
        let pair = CardTags::Pair {
            open: "[T]".to_owned(),
            close: "[/T]".to_owned(),
        };
        assert_eq!(of(r#"["[T]", "[/T]"]"#), (pair, 0));
        assert_eq!(of("[]"), (CardTags::Absent, 0));
        assert_eq!(of("null"), (CardTags::FromTemplate, 0));
        for wrong in [r#"["a"]"#, r#"["", "b"]"#, r#""a""#, "[1, 2]"] {
            assert_eq!(of(wrong), (CardTags::FromTemplate, 1), "{wrong}");
        }
    }

    #[test]
    fn families_have_their_own_reply_budget() {
        for (architecture, tokens) in [
            ("qwen35", 32_768),
            ("laguna", 32_768),
            ("gemma4", 16_384),
            ("other", 16_000),
        ] {
            assert_eq!(ModelCard::of_architecture(architecture).max_tokens, tokens);
        }
    }

    #[test]
    fn stems_follow_the_published_rule() {
        assert_eq!(
            ModelCard::stem("Qwen3.6 27B_Instruct (x)"),
            "qwen3.6-27b-instruct-x"
        );
    }
}
