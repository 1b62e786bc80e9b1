//! Names the published draft of a model that is served without one.

use model::{CardDraft, ModelCard};

use crate::config;
use crate::open::drafting::Drafting;

/// One line about a published draft that is not used; `None` if a draft model is used, or the card
/// knows no draft.
pub(super) fn line(card: &ModelCard, model_name: &str, drafting: &Drafting) -> Option<String> {
    let draft = card.draft_of(model_name)?;
    if drafting.config.is_some() {
        return None;
    }
    let without = if drafting.mtp {
        "its own multi-token-prediction head drafts alone"
    } else {
        "it decodes plainly, at a part of the speed"
    };
    let CardDraft { kind, source, .. } = draft;
    let name = config::hub::name(source).map_or(source.clone(), |name| name.to_string());
    Some(format!(
        "this model has a published {kind} draft; without it {without}; --draft {name} downloads \
         and uses it"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(kind: &str) -> ModelCard {
        let json = format!(
            r#"{{"name": "A", "source": "s", "verified_at": "d", "max_tokens": 9,
                "drafts": [{{"model": "27b", "kind": "{kind}", "source": "https://huggingface.co/a/b"}}]}}"#
        );
        ModelCard::parse(&json, "qwen35").0
    }

    #[test]
    fn published_draft_is_named_only_where_it_is_missing() {
        let mut drafting = Drafting::none();
        let of = |kind: &str, name: &str, drafting: &Drafting| line(&card(kind), name, drafting);
        let named = of("DFlash2", "X-27B", &drafting).unwrap();
        for part in [
            "published DFlash2 draft;",
            "decodes plainly",
            "--draft a/b downloads",
        ] {
            assert!(named.contains(part), "{named}");
        }
        assert_eq!(of("DFlash2", "X-4B", &drafting), None);
        drafting.mtp = true;
        let named = of("DFlash", "X-27B", &drafting).unwrap();
        assert!(named.contains("drafts alone"), "{named}");
    }
}
