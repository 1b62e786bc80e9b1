//! Model cards: generation defaults of a model, found by its name and overridden by flags.

use std::path::Path;

use model::{CardSampling, ModelCard};

use crate::config::{Origin, ResolvedSetting};
use crate::settings::GenerationDefaults;
use crate::settings::reasoning::{ReasoningDefaults, ReasoningFlags};
use crate::text::model_context::CardDescription;

/// Reasoning efforts as in flag names, in the order of a card's tiers.
const EFFORTS: [&str; 5] = ["low", "medium", "high", "x_high", "max"];
/// Directory of cards in a checkout of this project.
const CHECKOUT: &str = "models/cards";
/// Cards in the executable, by stem.
const BUILT_IN: [(&str, &str); 12] = [
    ("ember", include_str!("../../../../models/cards/ember.json")),
    ("qwen3", include_str!("../../../../models/cards/qwen3.json")),
    (
        "qwen3-instruct",
        include_str!("../../../../models/cards/qwen3-instruct.json"),
    ),
    (
        "qwen3-thinking",
        include_str!("../../../../models/cards/qwen3-thinking.json"),
    ),
    (
        "qwen3-coder",
        include_str!("../../../../models/cards/qwen3-coder.json"),
    ),
    (
        "qwen3.5",
        include_str!("../../../../models/cards/qwen3.5.json"),
    ),
    (
        "qwen3.6",
        include_str!("../../../../models/cards/qwen3.6.json"),
    ),
    (
        "qwen3.8",
        include_str!("../../../../models/cards/qwen3.8.json"),
    ),
    (
        "qwen2.5-instruct",
        include_str!("../../../../models/cards/qwen2.5-instruct.json"),
    ),
    (
        "smollm2",
        include_str!("../../../../models/cards/smollm2.json"),
    ),
    (
        "llama-3",
        include_str!("../../../../models/cards/llama-3.json"),
    ),
    (
        "gemma-3",
        include_str!("../../../../models/cards/gemma-3.json"),
    ),
];
/// Series of models that share a card: how their stems begin, what else is in them, and the card.
/// The first that fits counts.
const SERIES: [(&str, &str, &str); 14] = [
    // Synthetic models of benchmarks.
    ("qwen3", "random-weights", ""),
    ("qwen3.8-", "", "qwen3.8"),
    ("qwen3.6-", "", "qwen3.6"),
    ("qwen3.5-", "", "qwen3.5"),
    ("qwen3-coder-", "", "qwen3-coder"),
    ("qwen3-", "instruct", "qwen3-instruct"),
    ("qwen3-", "thinking", "qwen3-thinking"),
    ("qwen3-", "base", ""),
    ("qwen3-", "", "qwen3"),
    ("qwen2.5-", "instruct", "qwen2.5-instruct"),
    ("smollm2-", "", "smollm2"),
    ("llama-3", "instruct", "llama-3"),
    ("meta-llama-3", "instruct", "llama-3"),
    ("gemma-3-", "-it", "gemma-3"),
];

/// A card and where it was found.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundCard {
    /// The card, or the family's defaults.
    pub card: ModelCard,
    /// The file, or a description of the source.
    pub place: String,
    /// The origin of its values.
    pub origin: Origin,
    /// The card's JSON, if a card was found.
    pub verbatim: Option<serde_json::Value>,
}

impl FoundCard {
    /// The card's description for `/props`.
    pub fn description(&self) -> CardDescription {
        CardDescription {
            source: self.place.clone(),
            verbatim: self.verbatim.clone(),
        }
    }
}

/// Generation settings of the flags, which override a card.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GenerationFlags {
    /// The most tokens of a reply.
    pub max_tokens: Option<usize>,
    /// Whether to reason.
    pub thinking: Option<bool>,
    /// Limits of reasoning.
    pub reasoning: ReasoningFlags,
    /// How tokens are drawn.
    pub sampling: CardSampling,
}

/// Finds the card of a model in `dir`, in the checkout, or in the executable.
///
/// An invalid value is logged and ignored. Without a card, the family's defaults are used.
pub fn find(model_name: &str, architecture: &str, dir: Option<&Path>) -> FoundCard {
    let stem = ModelCard::stem(model_name);
    let dirs = dir.into_iter().chain([Path::new(CHECKOUT)]);
    for path in dirs.map(|dir| dir.join(format!("{stem}.json"))) {
        match std::fs::read_to_string(&path) {
            Ok(json) => return read(&json, architecture, &path.display().to_string()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(card = %path.display(), %error, "cannot read the model card")
            }
        }
    }
    let series = SERIES
        .iter()
        .find(|(begin, part, _)| stem.starts_with(begin) && stem.contains(part))
        .map_or(&*stem, |(_, _, card)| card);
    if let Some((name, json)) = BUILT_IN.iter().find(|(name, _)| *name == series) {
        return read(json, architecture, &format!("{name}, built in"));
    }
    if let Some(dir) = dir.filter(|dir| !dir.is_dir()) {
        tracing::warn!(dir = %dir.display(), "--model-cards-dir is not a directory");
    }
    FoundCard {
        card: ModelCard::of_architecture(architecture),
        place: format!("none for {stem}, so {architecture} defaults"),
        origin: Origin::Default,
        verbatim: None,
    }
}

fn read(json: &str, architecture: &str, place: &str) -> FoundCard {
    let (card, warnings) = ModelCard::parse(json, architecture);
    for warning in warnings {
        tracing::warn!(card = place, "model card: {warning}");
    }
    FoundCard {
        card,
        place: place.to_owned(),
        origin: Origin::Card,
        verbatim: serde_json::from_str(json).ok(),
    }
}

/// Defaults of requests, each with its origin: flag, card, model file, or neutral value.
pub fn generation_defaults(
    flags: GenerationFlags,
    found: &FoundCard,
    by_file: &CardSampling,
) -> (GenerationDefaults, Vec<ResolvedSetting>) {
    let neutral = GenerationDefaults::default();
    let (by_flag, by_card) = (&flags.sampling, &found.card.sampling);
    let mut settings = Vec::new();
    let mut add = |name: &str, value: String, origin| {
        settings.push(ResolvedSetting {
            name: name.to_owned(),
            value,
            origin,
        });
    };
    fn chosen<T: Copy + ToString>(
        name: &str,
        (by_flag, by_card, by_file): (Option<T>, Option<T>, Option<T>),
        neutral: T,
        add: &mut impl FnMut(&str, String, Origin),
    ) -> T {
        let (value, origin) = match (by_flag, by_card, by_file) {
            // The flag is shown as a flag.
            (Some(value), _, _) => return value,
            (None, Some(value), _) => (value, Origin::Card),
            (None, None, Some(value)) => (value, Origin::ModelFile),
            (None, None, None) => (neutral, Origin::Default),
        };
        add(name, value.to_string(), origin);
        value
    }
    let max_tokens = flags.max_tokens.unwrap_or(found.card.max_tokens);
    let defaults = GenerationDefaults {
        max_tokens: Some(max_tokens),
        thinking: flags.thinking,
        reasoning: ReasoningDefaults::of_card(&found.card, &flags.reasoning, max_tokens),
        markup: found.card.markup.clone(),
        temperature: chosen(
            "temperature",
            (
                by_flag.temperature,
                by_card.temperature,
                by_file.temperature,
            ),
            neutral.temperature,
            &mut add,
        ),
        top_p: chosen(
            "top_p",
            (by_flag.top_p, by_card.top_p, by_file.top_p),
            neutral.top_p,
            &mut add,
        ),
        top_k: chosen(
            "top_k",
            (by_flag.top_k, by_card.top_k, by_file.top_k),
            neutral.top_k,
            &mut add,
        ),
        min_p: chosen(
            "min_p",
            (by_flag.min_p, by_card.min_p, by_file.min_p),
            neutral.min_p,
            &mut add,
        ),
        repetition_penalty: chosen(
            "repetition_penalty",
            (
                by_flag.repetition_penalty,
                by_card.repetition_penalty,
                by_file.repetition_penalty,
            ),
            neutral.repetition_penalty,
            &mut add,
        ),
        presence_penalty: chosen(
            "presence_penalty",
            (
                by_flag.presence_penalty,
                by_card.presence_penalty,
                by_file.presence_penalty,
            ),
            neutral.presence_penalty,
            &mut add,
        ),
        ..neutral
    };
    if flags.max_tokens.is_none() {
        add(
            "default_max_tokens",
            found.card.max_tokens.to_string(),
            found.origin,
        );
    }
    add_reasoning(&flags.reasoning, &defaults.reasoning, found, &mut add);
    (defaults, settings)
}

/// Adds the reasoning settings that no flag sets, under the names of their flags.
fn add_reasoning(
    flags: &ReasoningFlags,
    values: &ReasoningDefaults,
    found: &FoundCard,
    add: &mut impl FnMut(&str, String, Origin),
) {
    let budget = values.reply_budget.to_string();
    if flags.reply_budget.is_none() {
        add("hard_limit_reply_budget", budget, found.origin);
    }
    let Some(tiers) = values.tiers else { return };
    for (i, effort) in EFFORTS.iter().enumerate() {
        if flags.tiers[i].is_none() {
            // A tier that the card lacks is derived from its lengths.
            let origin = match found.card.effort_tiers[i] {
                Some(_) => Origin::Card,
                None => Origin::Default,
            };
            add(
                &format!("reasoning_effort_{effort}"),
                tiers[i].to_string(),
                origin,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CARD: &str = r#"{"name": "A", "source": "s", "verified_at": "d", "max_tokens": 100,
        "sampling": {"temperature": 0.25, "top_k": 20}}"#;

    #[test]
    fn card_is_found_by_the_stem_of_the_model_name() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a-model-1b.json"), CARD).unwrap();
        let found = find("A Model_1B", "qwen35", Some(dir.path()));
        assert_eq!((found.card.max_tokens, found.origin), (100, Origin::Card));
        let none = find("B", "qwen35", Some(dir.path()));
        assert_eq!(
            (none.card, none.origin),
            (ModelCard::of_architecture("qwen35"), Origin::Default)
        );
    }

    #[test]
    fn model_name_cannot_leave_the_card_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("secret.json"), CARD).unwrap();
        let inner = dir.path().join("cards");
        std::fs::create_dir(&inner).unwrap();
        assert_eq!(
            find("../secret", "qwen35", Some(&inner)).origin,
            Origin::Default
        );
    }

    #[test]
    fn flags_override_the_card_and_the_card_overrides_the_model_file() {
        let found = read(CARD, "qwen35", "a file");
        let by_file = CardSampling {
            temperature: Some(0.75),
            min_p: Some(0.125),
            ..CardSampling::default()
        };
        let (by_card, settings) = generation_defaults(GenerationFlags::default(), &found, &by_file);
        assert_eq!(
            (by_card.temperature, by_card.top_k, by_card.top_p),
            (0.25, 20, 1.0)
        );
        assert_eq!(by_card.min_p, 0.125);
        assert_eq!(by_card.max_tokens, Some(100));
        let origin = |name: &str| {
            settings
                .iter()
                .find(|setting| setting.name == name)
                .unwrap()
                .origin
        };
        assert_eq!(origin("temperature"), Origin::Card);
        assert_eq!(origin("min_p"), Origin::ModelFile);
        assert_eq!(origin("top_p"), Origin::Default);
        let flags = GenerationFlags {
            max_tokens: Some(7),
            thinking: Some(false),
            sampling: CardSampling {
                temperature: Some(0.5),
                ..CardSampling::default()
            },
            ..GenerationFlags::default()
        };
        let (by_flag, settings) = generation_defaults(flags, &found, &by_file);
        assert_eq!((by_flag.temperature, by_flag.top_k), (0.5, 20));
        assert!(settings.iter().all(|setting| setting.name != "temperature"));
        assert_eq!(
            (by_flag.max_tokens, by_flag.thinking),
            (Some(7), Some(false))
        );
    }

    #[test]
    fn models_of_a_series_share_its_card() {
        let temperature = |name: &str| find(name, "qwen3", None).card.sampling.temperature;
        for (name, expected) in [
            ("Qwen3 8B", Some(0.6)),
            ("Qwen3-30B-A3B", Some(0.6)),
            ("Qwen3 4B Instruct 2507", Some(0.7)),
            ("Qwen3-235B-A22B-Thinking-2507", Some(0.6)),
            ("Qwen3 Coder 30B A3B Instruct", Some(0.7)),
            ("Qwen3.5-27B", Some(1.0)),
            ("Qwen3.6 35B A3B", Some(1.0)),
            ("Qwen3 8B Base", None),
            ("qwen3.5-27b (random weights)", None),
            ("Qwen2.5 7B Instruct", Some(0.7)),
            ("Qwen2.5-7B", None),
            ("Smollm2 135M 8k Lc100K Mix1 Ep2", Some(0.2)),
            ("Llama 3.2 3B Instruct", Some(0.6)),
            ("Meta Llama 3.1 8B Instruct", Some(0.6)),
            ("Llama 3.2 3B", None),
            ("Gemma 3 4b It", Some(1.0)),
            ("Gemma 3 270m", None),
            ("another", None),
        ] {
            assert_eq!(temperature(name), expected, "{name}");
        }
        assert!(SERIES.iter().all(|(_, _, card)| {
            card.is_empty() || BUILT_IN.iter().any(|(stem, _)| stem == card)
        }));
    }

    #[test]
    fn built_in_cards_parse_without_warnings() {
        for (stem, json) in BUILT_IN {
            let (card, warnings) = ModelCard::parse(json, "qwen35");
            assert!(warnings.is_empty(), "{stem}: {warnings:?}");
            assert_eq!(ModelCard::stem(&card.name), stem);
        }
    }
}
