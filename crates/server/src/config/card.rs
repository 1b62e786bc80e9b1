//! Model cards: generation defaults of a model, found by its name and overridden by flags.

use std::path::Path;

use model::ModelCard;

use crate::config::{Origin, ResolvedSetting};
use crate::settings::GenerationDefaults;
use crate::settings::reasoning::{ReasoningDefaults, ReasoningFlags};
use crate::text::model_context::CardDescription;

/// Reasoning efforts as in flag names, in the order of a card's tiers.
const EFFORTS: [&str; 5] = ["low", "medium", "high", "x_high", "max"];
/// Directory of cards in a checkout of this project.
const CHECKOUT: &str = "models/cards";
/// Cards in the executable, by stem.
const BUILT_IN: [(&str, &str); 1] =
    [("ember", include_str!("../../../../models/cards/ember.json"))];

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
    pub fn facts(&self) -> CardDescription {
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
    if let Some((name, json)) = BUILT_IN.iter().find(|(name, _)| *name == stem) {
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

/// Defaults of requests, each with its origin: flag, card, or neutral value.
pub fn generation_defaults(
    flags: GenerationFlags,
    found: &FoundCard,
) -> (GenerationDefaults, Vec<ResolvedSetting>) {
    let neutral = GenerationDefaults::default();
    let sampling = &found.card.sampling;
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
        card: Option<T>,
        neutral: T,
        add: &mut impl FnMut(&str, String, Origin),
    ) -> T {
        let value = card.unwrap_or(neutral);
        let origin = if card.is_some() {
            Origin::Card
        } else {
            Origin::Default
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
            sampling.temperature,
            neutral.temperature,
            &mut add,
        ),
        top_p: chosen("top_p", sampling.top_p, neutral.top_p, &mut add),
        top_k: chosen("top_k", sampling.top_k, neutral.top_k, &mut add),
        min_p: chosen("min_p", sampling.min_p, neutral.min_p, &mut add),
        repetition_penalty: chosen(
            "repetition_penalty",
            sampling.repetition_penalty,
            neutral.repetition_penalty,
            &mut add,
        ),
        presence_penalty: chosen(
            "presence_penalty",
            sampling.presence_penalty,
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
    fn flags_override_the_card_and_the_card_overrides_neutral_values() {
        let found = read(CARD, "qwen35", "a file");
        let (by_card, settings) = generation_defaults(GenerationFlags::default(), &found);
        assert_eq!(
            (by_card.temperature, by_card.top_k, by_card.top_p),
            (0.25, 20, 1.0)
        );
        assert_eq!(by_card.max_tokens, Some(100));
        let origin = |name: &str| {
            settings
                .iter()
                .find(|setting| setting.name == name)
                .unwrap()
                .origin
        };
        assert_eq!(origin("temperature"), Origin::Card);
        assert_eq!(origin("top_p"), Origin::Default);
        let flags = GenerationFlags {
            max_tokens: Some(7),
            thinking: Some(false),
            ..GenerationFlags::default()
        };
        let (by_flag, _) = generation_defaults(flags, &found);
        assert_eq!(
            (by_flag.max_tokens, by_flag.thinking),
            (Some(7), Some(false))
        );
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
