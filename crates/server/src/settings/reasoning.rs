//! Reasoning limits: effort tiers, the budget kept for the reply, and the text that ends reasoning.
//!
//! Each value comes from a flag, else from the model card, else from the card's lengths.

use std::sync::Arc;

use chat::conversation::ReasoningEffort;
use chat::request::ReasoningOptions;
use contract::ReasoningTags;
use model::ModelCard;

/// Minimum reasoning budget; below it reasoning is disabled, since ending it costs about half as
/// much.
pub const MIN_REASONING_TOKENS: usize = 64;
/// Maximum logit boost of the end tag near the end of a budget.
const SOFT_END_BOOST: f32 = 8.0;
/// Maximum boost window in tokens, and its share of the budget.
const SOFT_TOKENS: usize = 256;
const SOFT_PART: usize = 8;

/// Reasoning flags; they override the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReasoningFlags {
    /// Maximum reasoning tokens.
    pub think_max_tokens: Option<usize>,
    /// Tokens reserved for the reply; 0 disables the limit.
    pub reply_budget: Option<usize>,
    /// Reasoning tokens per effort: low, medium, high, x-high, max.
    pub tiers: [Option<usize>; 5],
}

/// Reasoning defaults of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct ReasoningDefaults {
    /// Tokens reserved for the reply; 0 disables the limit.
    pub reply_budget: usize,
    /// Maximum reasoning tokens, if limited besides the reply length.
    pub think_max_tokens: Option<usize>,
    /// Reasoning tokens per effort: low, medium, high, x-high, max.
    pub tiers: Option<[usize; 5]>,
    /// Maximum tokens of any reply, reasoning included.
    pub max_total_tokens: Option<usize>,
    /// Text that ends reasoning, from the model card; `None` writes the closing tag alone.
    pub close_hint: Option<Arc<str>>,
    /// Maximum logit boost of the end tag near the end of a budget; 0 disables it.
    pub soft_end_boost: f32,
}

impl Default for ReasoningDefaults {
    fn default() -> ReasoningDefaults {
        ReasoningDefaults {
            reply_budget: 4096,
            think_max_tokens: None,
            tiers: None,
            max_total_tokens: None,
            close_hint: None,
            soft_end_boost: SOFT_END_BOOST,
        }
    }
}

impl ReasoningDefaults {
    /// Defaults from a card and flags; `max_tokens` is the default reply length.
    pub fn of_card(
        card: &ModelCard,
        flags: &ReasoningFlags,
        max_tokens: usize,
    ) -> ReasoningDefaults {
        let reply_budget = flags.reply_budget.unwrap_or(card.hard_limit_reply_budget);
        let usual = card.max_tokens.saturating_sub(reply_budget);
        let complex = card.complex_problem_max_tokens;
        let longest = complex.map_or(usual, |tokens| tokens.saturating_sub(reply_budget));
        let worked_out = [
            rounded(usual, 8),
            rounded(usual, 2),
            usual,
            if complex.is_some() {
                (usual + longest) / 2
            } else {
                usual
            },
            longest,
        ];
        let mut tiers = worked_out;
        for (i, tier) in tiers.iter_mut().enumerate() {
            *tier = flags.tiers[i]
                .or(card.effort_tiers[i])
                .filter(|tokens| *tokens > 0)
                .unwrap_or(*tier);
        }
        for i in 1..tiers.len() {
            tiers[i] = tiers[i].max(tiers[i - 1]);
        }
        ReasoningDefaults {
            reply_budget,
            think_max_tokens: flags.think_max_tokens,
            tiers: Some(tiers),
            max_total_tokens: Some(max_tokens.max(complex.unwrap_or(0)).max(card.max_tokens)),
            close_hint: card.thinking_terminator_hint.as_deref().map(Arc::from),
            soft_end_boost: SOFT_END_BOOST,
        }
    }

    /// Reasoning budget of a reply of at most `max_tokens`; `None` is unlimited.
    pub fn budget(&self, asked: &ReasoningOptions, max_tokens: usize) -> Option<usize> {
        if self.reply_budget == 0 {
            return None;
        }
        let kept = asked.reply_budget.unwrap_or(usize::MAX);
        let kept = kept.min(self.reply_budget).min(max_tokens.div_ceil(2));
        let most = self.think_max_tokens.unwrap_or(usize::MAX);
        let wanted = match (asked.budget_tokens, asked.effort, self.tiers) {
            (Some(tokens), _, _) => tokens.min(most),
            (None, Some(effort), Some(tiers)) => tiers[tier(effort)],
            _ => most,
        };
        Some(wanted.min(max_tokens - kept))
    }

    /// Length of the boost window at the end of a budget.
    pub fn soft_tokens(budget: usize) -> usize {
        SOFT_TOKENS.min(budget / SOFT_PART)
    }
}

fn rounded(tokens: usize, parts: usize) -> usize {
    (tokens + parts / 2) / parts
}

fn tier(effort: ReasoningEffort) -> usize {
    match effort {
        ReasoningEffort::Low => 0,
        ReasoningEffort::Medium => 1,
        ReasoningEffort::High => 2,
        ReasoningEffort::XHigh => 3,
        ReasoningEffort::Max => 4,
    }
}

/// Text that ends reasoning: the card's `hint`, with the closing tag added if it lacks one.
pub fn close_text(hint: Option<&str>, tags: &ReasoningTags) -> String {
    let close = &tags.close;
    match hint {
        None => format!(
            "
{close}

"
        ),
        Some(hint) if hint.contains(close.as_str()) => hint.to_owned(),
        Some(hint) => format!(
            "{}
{close}

",
            hint.trim_end()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(json: &str) -> ModelCard {
        let (mut card, _) = ModelCard::parse(json, "qwen35");
        card.name = "a".to_owned();
        card
    }

    /// The 27B model's card.
    fn large() -> ReasoningDefaults {
        let card = card(
            r#"{"name": "a", "source": "s", "verified_at": "d", "max_tokens": 32768,
                "complex_problem_max_tokens": 81920}"#,
        );
        ReasoningDefaults::of_card(&card, &ReasoningFlags::default(), 32768)
    }

    #[test]
    fn effort_tiers_derive_from_the_card_lengths() {
        let defaults = large();
        assert_eq!(defaults.tiers, Some([3584, 14336, 28672, 53248, 77824]));
        assert_eq!(defaults.max_total_tokens, Some(81920));
        let short = card(r#"{"name": "a", "source": "s", "verified_at": "d", "max_tokens": 8192}"#);
        let defaults = ReasoningDefaults::of_card(&short, &ReasoningFlags::default(), 8192);
        assert_eq!(defaults.tiers, Some([512, 2048, 4096, 4096, 4096]));
    }

    #[test]
    fn flags_override_the_card_and_tiers_are_monotonic() {
        let card = card(
            r#"{"name": "a", "source": "s", "verified_at": "d", "max_tokens": 32768,
                "reasoning_effort_tiers": {"low": 4032, "high": 100}}"#,
        );
        let flags = ReasoningFlags {
            reply_budget: Some(768),
            tiers: [None, Some(5000), None, None, Some(9)],
            ..ReasoningFlags::default()
        };
        let defaults = ReasoningDefaults::of_card(&card, &flags, 32768);
        assert_eq!(defaults.reply_budget, 768);
        assert_eq!(defaults.tiers, Some([4032, 5000, 5000, 32000, 32000]));
    }

    #[track_caller]
    fn check(asked: ReasoningOptions, max_tokens: usize, expected: Option<usize>) {
        assert_eq!(large().budget(&asked, max_tokens), expected, "{asked:?}");
    }

    #[test]
    fn reasoning_budget_reserves_the_reply() {
        let effort = |effort| ReasoningOptions {
            effort: Some(effort),
            ..ReasoningOptions::default()
        };
        let tokens = |tokens, reply_budget| ReasoningOptions {
            budget_tokens: Some(tokens),
            reply_budget,
            ..ReasoningOptions::default()
        };
        check(ReasoningOptions::default(), 32768, Some(28672));
        check(effort(ReasoningEffort::Low), 32768, Some(3584));
        check(effort(ReasoningEffort::Max), 81920, Some(77824));
        check(effort(ReasoningEffort::Low), 32, Some(16));
        check(tokens(1000, None), 32768, Some(1000));
        check(tokens(99_999, None), 6000, Some(3000));
        check(tokens(99_999, Some(500)), 6000, Some(5500));
        check(tokens(99_999, Some(9999)), 16_000, Some(11_904));
        let never = ReasoningDefaults {
            reply_budget: 0,
            ..large()
        };
        assert_eq!(never.budget(&ReasoningOptions::default(), 100), None);
    }

    #[test]
    fn reasoning_end_text_contains_the_tag() {
        assert_eq!(
            close_text(None, &ReasoningTags::default()),
            "\n</think>\n\n"
        );
        assert_eq!(
            close_text(Some("Enough.\n</think>\n"), &ReasoningTags::default()),
            "Enough.\n</think>\n"
        );
        assert_eq!(
            close_text(Some("Enough. "), &ReasoningTags::default()),
            "Enough.\n</think>\n\n"
        );
    }
}
