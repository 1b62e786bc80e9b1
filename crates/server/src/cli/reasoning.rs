//! Flags about how long requests may think and answer.

use clap::Args;

use super::{OnOff, at_least_one};
use crate::settings::reasoning::ReasoningFlags;

/// How long requests may think and answer where they do not say.
#[derive(Debug, Clone, Args)]
pub struct ReasoningArgs {
    /// Tokens of an answer when a request does not say [default: the model card's].
    #[arg(long, env = "HEARTH_DEFAULT_MAX_TOKENS", value_name = "TOKENS", value_parser = at_least_one)]
    pub default_max_tokens: Option<usize>,
    /// The same under its older name; `--default-max-tokens` wins.
    #[arg(long, env = "HEARTH_MAX_TOKENS", value_name = "TOKENS", value_parser = at_least_one)]
    pub max_tokens: Option<usize>,
    /// Whether requests think when they do not say; by default the chat template decides.
    #[arg(
        long,
        env = "HEARTH_THINKING_DEFAULT",
        value_enum,
        value_name = "WHETHER"
    )]
    pub thinking_default: Option<OnOff>,
    /// The most tokens of thinking, whatever a request wants [default: none but the answer's].
    #[arg(long, env = "HEARTH_THINK_MAX_TOKENS", value_name = "TOKENS", value_parser = at_least_one)]
    pub think_max_tokens: Option<usize>,
    /// Tokens kept for the answer after thinking; 0 never closes thinking [default: the model card's].
    #[arg(long, env = "HEARTH_HARD_LIMIT_REPLY_BUDGET", value_name = "TOKENS")]
    pub hard_limit_reply_budget: Option<usize>,
    /// Tokens of thinking at low effort [default: the model card's].
    #[arg(long, env = "HEARTH_REASONING_EFFORT_LOW", value_name = "TOKENS", value_parser = at_least_one)]
    pub reasoning_effort_low: Option<usize>,
    /// Tokens of thinking at medium effort [default: the model card's].
    #[arg(long, env = "HEARTH_REASONING_EFFORT_MEDIUM", value_name = "TOKENS", value_parser = at_least_one)]
    pub reasoning_effort_medium: Option<usize>,
    /// Tokens of thinking at high effort [default: the model card's].
    #[arg(long, env = "HEARTH_REASONING_EFFORT_HIGH", value_name = "TOKENS", value_parser = at_least_one)]
    pub reasoning_effort_high: Option<usize>,
    /// Tokens of thinking at x-high effort [default: the model card's].
    #[arg(long, env = "HEARTH_REASONING_EFFORT_X_HIGH", value_name = "TOKENS", value_parser = at_least_one)]
    pub reasoning_effort_x_high: Option<usize>,
    /// Tokens of thinking at the greatest effort [default: the model card's].
    #[arg(long, env = "HEARTH_REASONING_EFFORT_MAX", value_name = "TOKENS", value_parser = at_least_one)]
    pub reasoning_effort_max: Option<usize>,
}

impl ReasoningArgs {
    /// Tokens of an answer that the flags give.
    pub fn answer_tokens(&self) -> Option<usize> {
        self.default_max_tokens.or(self.max_tokens)
    }

    /// What the flags say of thinking.
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
