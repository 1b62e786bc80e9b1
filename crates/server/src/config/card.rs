//! Model cards: generation defaults of a model, found by its name and overridden by flags.

use std::path::Path;

use model::{CardSampling, ModelCard, ModelInfo};

use crate::config::{Origin, ResolvedSetting};
use crate::settings::GenerationDefaults;
use crate::settings::reasoning::{ReasoningDefaults, ReasoningFlags};
use crate::text::model_context::CardDescription;

/// Reasoning efforts as in flag names, in the order of a card's tiers.
const EFFORTS: [&str; 5] = ["low", "medium", "high", "x_high", "max"];
/// Directory of cards in a checkout of this project.
const CHECKOUT: &str = "models/cards";
/// Cards in the executable, by stem.
const BUILT_IN: [(&str, &str); 14] = [
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
        "qwen3.5-small",
        include_str!("../../../../models/cards/qwen3.5-small.json"),
    ),
    (
        "qwen3.6-35b-a3b",
        include_str!("../../../../models/cards/qwen3.6-35b-a3b.json"),
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
/// Models that share a card: their architecture without `moe`, how their names' stems begin, what
/// else is in them, and the card, if any. The first that fits counts.
const SERIES: [(&str, &str, &str, &str); 19] = [
    // Synthetic models of benchmarks.
    ("", "qwen3", "random-weights", ""),
    ("qwen35", "qwen3.8-", "", "qwen3.8"),
    ("qwen35", "qwen3.6-", "-base", ""),
    ("qwen35", "qwen3.6-", "35b-a3b", "qwen3.6-35b-a3b"),
    ("qwen35", "qwen3.6-", "", "qwen3.6"),
    ("qwen35", "qwen3.5-", "-base", ""),
    ("qwen35", "qwen3.5-0.8b", "", "qwen3.5-small"),
    ("qwen35", "qwen3.5-2b", "", "qwen3.5-small"),
    ("qwen35", "qwen3.5-", "", "qwen3.5"),
    ("qwen3", "qwen3-coder-", "", "qwen3-coder"),
    ("qwen3", "qwen3-", "instruct", "qwen3-instruct"),
    ("qwen3", "qwen3-", "thinking", "qwen3-thinking"),
    ("qwen3", "qwen3-", "base", ""),
    ("qwen3", "qwen3-", "", "qwen3"),
    ("qwen2", "qwen2.5-", "instruct", "qwen2.5-instruct"),
    ("llama", "smollm2-", "", "smollm2"),
    ("llama", "llama-3", "instruct", "llama-3"),
    ("llama", "meta-llama-3", "instruct", "llama-3"),
    ("gemma3", "gemma-3-", "-it", "gemma-3"),
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

/// Finds the card of a model in `dir`, in the checkout, or in the executable, by the names that its
/// file gives: its own, then those of the models it comes from.
///
/// An invalid value is logged and ignored. Without a card, the family's defaults are used.
pub fn find(info: &ModelInfo, dir: Option<&Path>) -> FoundCard {
    let others = info.other_names.iter().map(String::as_str);
    let names: Vec<&str> = std::iter::once(info.name.as_str()).chain(others).collect();
    find_by_names(&names, &info.architecture, dir)
}

fn find_by_names(names: &[&str], architecture: &str, dir: Option<&Path>) -> FoundCard {
    let stems: Vec<String> = names.iter().map(|name| ModelCard::stem(name)).collect();
    for stem in &stems {
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
    }
    // A series without a card ends the search: the model has none.
    let card = stems.iter().find_map(|stem| card_of(stem, architecture));
    let found = card.and_then(|card| BUILT_IN.iter().find(|(name, _)| *name == card));
    if let Some((name, json)) = found {
        return read(json, architecture, &format!("{name}, built in"));
    }
    if let Some(dir) = dir.filter(|dir| !dir.is_dir()) {
        tracing::warn!(dir = %dir.display(), "--model-cards-dir is not a directory");
    }
    let stem = stems.first().map_or("the model", String::as_str);
    FoundCard {
        card: ModelCard::of_architecture(architecture),
        place: format!("none for {stem}, so {architecture} defaults"),
        origin: Origin::Default,
        verbatim: None,
    }
}

/// The built-in card of a stem: its own or that of its series, which is empty if the series has
/// none.
fn card_of<'a>(stem: &'a str, architecture: &str) -> Option<&'a str> {
    if BUILT_IN.iter().any(|(name, _)| *name == stem) {
        return Some(stem);
    }
    let dense = architecture.strip_suffix("moe").unwrap_or(architecture);
    let fits = |(family, begin, part, _): &&(&str, &str, &str, &str)| {
        [dense, ""].contains(family) && stem.starts_with(begin) && stem.contains(part)
    };
    SERIES.iter().find(fits).map(|(.., card)| *card)
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
    let own = &found.card.non_thinking_sampling;
    // A flag holds for replies of both kinds.
    let non_thinking = CardSampling {
        temperature: own.temperature.filter(|_| by_flag.temperature.is_none()),
        top_p: own.top_p.filter(|_| by_flag.top_p.is_none()),
        top_k: own.top_k.filter(|_| by_flag.top_k.is_none()),
        min_p: own.min_p.filter(|_| by_flag.min_p.is_none()),
        ..*own
    };
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
        non_thinking,
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
        let found = find_by_names(&["A Model_1B"], "qwen35", Some(dir.path()));
        assert_eq!((found.card.max_tokens, found.origin), (100, Origin::Card));
        let of_base = find_by_names(&["B", "A Model 1B"], "qwen35", Some(dir.path()));
        assert_eq!(of_base.card, found.card);
        let none = find_by_names(&["B"], "qwen35", Some(dir.path()));
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
            find_by_names(&["../secret"], "qwen35", Some(&inner)).origin,
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
        let card = |names: &[&str], architecture| {
            find_by_names(names, architecture, None)
                .verbatim
                .and_then(|card| Some(card["name"].as_str()?.to_owned()))
        };
        for (architecture, name, expected) in [
            ("qwen3", "Qwen3 8B", "qwen3"),
            ("qwen3moe", "Qwen3-30B-A3B", "qwen3"),
            ("qwen3", "Qwen3 4B Instruct 2507", "qwen3-instruct"),
            ("qwen3moe", "Qwen3-30B-A3B-Instruct-2507", "qwen3-instruct"),
            ("qwen3moe", "Qwen3-30B-A3B-Thinking-2507", "qwen3-thinking"),
            ("qwen3moe", "Qwen3 Coder 30B A3B Instruct", "qwen3-coder"),
            ("qwen3", "Qwen3 8B Base", ""),
            ("qwen35", "Qwen3.5-0.8B", "qwen3.5-small"),
            ("qwen35", "Qwen3.5 2B", "qwen3.5-small"),
            ("qwen35", "Qwen3.5-4B", "qwen3.5"),
            ("qwen35", "Qwen3.5-9B", "qwen3.5"),
            ("qwen35", "Qwen3.5 4B Base", ""),
            ("qwen35", "Qwen3.5-27B", "qwen3.5"),
            ("qwen35moe", "Qwen3.5-35B-A3B", "qwen3.5"),
            ("qwen35moe", "Qwen3.5-122B-A10B", "qwen3.5"),
            ("qwen35", "Qwen3.6-27B", "qwen3.6"),
            ("qwen35moe", "Qwen3.6 35B A3B", "qwen3.6-35b-a3b"),
            ("qwen35", "Qwen3.8-27B", "qwen3.8"),
            ("qwen35", "qwen3.5-27b (random weights)", ""),
            ("qwen2", "Qwen2.5 7B Instruct", "qwen2.5-instruct"),
            ("qwen2", "Qwen2.5-7B", ""),
            ("llama", "Smollm2 135M 8k Lc100K Mix1 Ep2", "smollm2"),
            ("llama", "Llama 3.2 3B Instruct", "llama-3"),
            ("llama", "Llama-3.3-70B-Instruct", "llama-3"),
            ("llama", "Meta Llama 3.1 8B Instruct", "llama-3"),
            ("llama", "Llama 3.2 3B", ""),
            ("gemma3", "Gemma 3 4b It", "gemma-3"),
            ("gemma3", "Gemma 3 270m", ""),
            ("llama", "Qwen3.5-27B", ""),
            ("qwen3", "another", ""),
        ] {
            let expected = Some(expected.to_owned()).filter(|card| !card.is_empty());
            assert_eq!(card(&[name], architecture), expected, "{name}");
            let tuned = ["My finetune", name];
            assert_eq!(card(&tuned, architecture), expected, "made from {name}");
        }
        assert!(SERIES.iter().all(|(.., card)| {
            card.is_empty() || BUILT_IN.iter().any(|(stem, _)| stem == card)
        }));
    }

    #[test]
    fn non_thinking_replies_have_sampling_of_their_own_unless_a_flag_sets_it() {
        let found = find_by_names(&["Qwen3.8 27B"], "qwen35", None);
        let of = |flags: GenerationFlags| {
            let file = CardSampling::default();
            let defaults = generation_defaults(flags, &found, &file).0;
            let other = defaults.of_non_thinking();
            let pair = |d: &GenerationDefaults| (d.temperature, d.top_p, d.presence_penalty);
            (pair(&defaults), pair(&other))
        };
        let flags = GenerationFlags::default();
        assert_eq!(of(flags), ((1.0, 0.95, 0.0), (0.7, 0.8, 1.5)));
        let sampling = CardSampling {
            temperature: Some(0.5),
            ..CardSampling::default()
        };
        let flags = GenerationFlags { sampling, ..flags };
        assert_eq!(of(flags), ((0.5, 0.95, 0.0), (0.5, 0.8, 1.5)));
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
