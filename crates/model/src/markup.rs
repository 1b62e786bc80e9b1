//! The tags that a model writes, found in its chat template and overridden by its card.

use contract::{ReasoningTags, TemplateMarkup, ToolCallTags};

/// Reasoning tags of known templates, as `(open, close)`.
const REASONING: [(&str, &str); 5] = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
];
/// Tags around a call in JSON or in function tags, as `(open, close)`.
const TOOL_CALLS: [(&str, &str); 3] = [
    ("<tool_call>", "</tool_call>"),
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<function_call>", "</function_call>"),
];

/// The tags that occur in a model's templates; the defaults if it has no template.
///
/// A template that only removes reasoning from earlier replies names the closing tag alone.
pub fn of_templates<'a>(sources: impl IntoIterator<Item = &'a str>) -> TemplateMarkup {
    let sources: Vec<&str> = sources.into_iter().collect();
    if sources.is_empty() {
        return TemplateMarkup::default();
    }
    let has = |tag: &str| sources.iter().any(|source| source.contains(tag));
    let reasoning = REASONING.iter().find(|(_, close)| has(close));
    let tool_calls = TOOL_CALLS
        .iter()
        .find(|(open, close)| has(open) && has(close));
    TemplateMarkup {
        reasoning: reasoning.map(|(open, close)| ReasoningTags::new(open, close)),
        tool_calls: tool_calls.map(|(open, close)| ToolCallTags::new(open, close)),
    }
}

/// Tags of a model card.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum CardTags {
    /// The card has none, so the template decides.
    #[default]
    FromTemplate,
    /// The model writes no such tags.
    Absent,
    /// These tags.
    Pair {
        /// The opening tag.
        open: String,
        /// The closing tag.
        close: String,
    },
}

/// The tags of a model card, which override those of the template.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CardMarkup {
    /// Around reasoning.
    pub reasoning: CardTags,
    /// Around tool calls.
    pub tool_calls: CardTags,
}

impl CardMarkup {
    /// The template's tags with the card's overrides.
    pub fn over(&self, template: TemplateMarkup) -> TemplateMarkup {
        TemplateMarkup {
            reasoning: match &self.reasoning {
                CardTags::FromTemplate => template.reasoning,
                CardTags::Absent => None,
                CardTags::Pair { open, close } => Some(ReasoningTags::new(open, close)),
            },
            tool_calls: match &self.tool_calls {
                CardTags::FromTemplate => template.tool_calls,
                CardTags::Absent => None,
                CardTags::Pair { open, close } => Some(ToolCallTags::new(open, close)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEMPLATES: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../conformance/fixtures/templates"
    );

    fn pairs(markup: &TemplateMarkup) -> [Option<(&str, &str)>; 2] {
        [
            markup
                .reasoning
                .as_ref()
                .map(|tags| (&*tags.open, &*tags.close)),
            markup
                .tool_calls
                .as_ref()
                .map(|tags| (&*tags.open, &*tags.close)),
        ]
    }

    #[test]
    fn every_template_fixture_gives_its_tags() {
        let think = Some(("<think>", "</think>"));
        let call = Some(("<tool_call>", "</tool_call>"));
        let mut checked = 0;
        for entry in std::fs::read_dir(TEMPLATES).unwrap() {
            let path = entry.unwrap().path();
            if path
                .extension()
                .is_none_or(|extension| extension != "jinja")
            {
                continue;
            }
            let source = std::fs::read_to_string(&path).unwrap();
            let expected = match path.file_stem().and_then(|stem| stem.to_str()).unwrap() {
                "qwen3" | "qwen3_5" => [think, call],
                "qwen2_5" | "qwen3_coder" => [None, call],
                other => panic!("{other} has no expected tags"),
            };
            let markup = of_templates([&*source]);
            assert_eq!(pairs(&markup), expected, "{}", path.display());
            checked += 1;
        }
        assert!(checked >= 4, "only {checked} templates");
    }

    #[test]
    fn other_families_tags_are_found_by_their_closing_tag() {
        for (source, expected) in [
            (
                "{{ content.split('</think>')[-1] }}",
                [Some(("<think>", "</think>")), None],
            ),
            (
                "<seed:think></seed:think><seed:tool_call>\n</seed:tool_call>",
                [
                    Some(("<seed:think>", "</seed:think>")),
                    Some(("<seed:tool_call>", "</seed:tool_call>")),
                ],
            ),
            (
                "[THINK]{{ thoughts }}[/THINK]",
                [Some(("[THINK]", "[/THINK]")), None],
            ),
            ("{{ messages }} <tool_call> without an end", [None, None]),
            ("", [None, None]),
        ] {
            assert_eq!(pairs(&of_templates([source])), expected, "{source}");
        }
    }

    #[test]
    fn a_second_template_adds_tags_and_no_template_means_the_defaults() {
        let both = of_templates(["<think></think>", "<tool_call></tool_call>"]);
        assert_eq!(both, TemplateMarkup::default());
        assert_eq!(of_templates([]), TemplateMarkup::default());
    }

    #[test]
    fn card_tags_override_those_of_the_template() {
        let card = CardMarkup {
            reasoning: CardTags::Absent,
            tool_calls: CardTags::Pair {
                open: "[CALL]".to_owned(),
                close: "[/CALL]".to_owned(),
            },
        };
        let markup = card.over(TemplateMarkup::default());
        assert_eq!(pairs(&markup), [None, Some(("[CALL]", "[/CALL]"))]);
        let kept = CardMarkup::default().over(TemplateMarkup::default());
        assert_eq!(kept, TemplateMarkup::default());
    }
}
