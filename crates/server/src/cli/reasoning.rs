//! Flags on the length of reasoning and replies.

use clap::Args;

use super::{OnOff, at_least_one};
use crate::settings::reasoning::ReasoningFlags;

/// Lengths of reasoning and replies for requests that set none.
#[derive(Debug, Clone, Args)]
pub struct ReasoningArgs {
    /// The most tokens of a reply if the request sets no limit [default: the model card's].
    #[arg(long, short_alias = 'n', aliases = ["predict", "n-predict"], env = "HEARTH_DEFAULT_MAX_TOKENS",
        value_name = "TOKENS", value_parser = at_least_one)]
    pub default_max_tokens: Option<usize>,
    /// Older name of --default-max-tokens, which wins if both are given.
    #[arg(long, env = "HEARTH_MAX_TOKENS", value_name = "TOKENS", value_parser = at_least_one)]
    pub max_tokens: Option<usize>,
    /// Whether to reason if the request does not say [default: the chat template decides].
    #[arg(
        long,
        env = "HEARTH_THINKING_DEFAULT",
        value_enum,
        value_name = "WHETHER"
    )]
    pub thinking_default: Option<OnOff>,
    /// The most reasoning tokens of any request [default: only the reply's limit].
    #[arg(long, env = "HEARTH_THINK_MAX_TOKENS", value_name = "TOKENS", value_parser = at_least_one)]
    pub think_max_tokens: Option<usize>,
    /// Tokens reserved for the answer after reasoning; 0 never ends reasoning early [default: the
    /// model card's].
    #[arg(long, env = "HEARTH_HARD_LIMIT_REPLY_BUDGET", value_name = "TOKENS")]
    pub hard_limit_reply_budget: Option<usize>,
    /// Reasoning tokens at low effort [default: the model card's].
    #[arg(long, env = "HEARTH_REASONING_EFFORT_LOW", value_name = "TOKENS", value_parser = at_least_one)]
    pub reasoning_effort_low: Option<usize>,
    /// Reasoning tokens at medium effort [default: the model card's].
    #[arg(long, env = "HEARTH_REASONING_EFFORT_MEDIUM", value_name = "TOKENS", value_parser = at_least_one)]
    pub reasoning_effort_medium: Option<usize>,
    /// Reasoning tokens at high effort [default: the model card's].
    #[arg(long, env = "HEARTH_REASONING_EFFORT_HIGH", value_name = "TOKENS", value_parser = at_least_one)]
    pub reasoning_effort_high: Option<usize>,
    /// Reasoning tokens at x-high effort [default: the model card's].
    #[arg(long, env = "HEARTH_REASONING_EFFORT_X_HIGH", value_name = "TOKENS", value_parser = at_least_one)]
    pub reasoning_effort_x_high: Option<usize>,
    /// Reasoning tokens at maximum effort [default: the model card's].
    #[arg(long, env = "HEARTH_REASONING_EFFORT_MAX", value_name = "TOKENS", value_parser = at_least_one)]
    pub reasoning_effort_max: Option<usize>,
}

impl ReasoningArgs {
    /// The reply limit that the flags set.
    pub fn answer_tokens(&self) -> Option<usize> {
        self.default_max_tokens.or(self.max_tokens)
    }

    /// The reasoning limits that the flags set.
    pub fn flags(&self) -> ReasoningFlags {
        ReasoningFlags {
            think_max_tokens: self.think_max_tokens,
            reply_budget: self.hard_limit_reply_budget,
            tiers: [
                self.reasoning_effort_low,
                self.reasoning_effort_medium,
                self.reasoning_effort_high,
                self.reasoning_effort_x_high,
                self.reasoning_effort_max,
            ],
        }
    }
}
