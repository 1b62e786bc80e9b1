//! The settings of a scheduler.

use contract::{StepGroups, TokenId};

use crate::prefix::PrefixConfig;
use crate::speculation::{Clock, SpeculationConfig};

/// The settings of a scheduler.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Maximum number of sequences decoded at once, at least 1. A job takes one per choice. The
    /// runner's limit applies too.
    pub max_sequences: usize,
    /// Maximum number of waiting jobs; one more is rejected.
    pub queue_limit: usize,
    /// Expected growth of each sequence, in tokens, or its `max_tokens` if that is less.
    ///
    /// A job is admitted if the pool holds its prompt plus this many tokens. As many tokens stay
    /// free for each open sequence. If the pool still runs out, that costs time and changes no
    /// token.
    pub reserve: usize,
    /// Prompt tokens per prefill call. The runner's limit and alignment apply too.
    pub prefill_chunk: usize,
    /// The model's own end tokens.
    pub eos: Vec<TokenId>,
    /// Largest k for which only the top k logits are fetched; for more candidates the full row is
    /// fetched.
    pub max_fetched_top_k: usize,
    /// Speculative decoding. Unused without a draft model.
    pub speculation: SpeculationConfig,
    /// The prefix cache.
    pub prefix: PrefixConfig,
    /// How several sequences step on a runner that can begin a verify: together, or in two groups
    /// in turn, by default as is measured to be faster.
    pub groups: StepGroups,
    /// Times decode steps; with `None` their times stay zero.
    pub clock: Option<Clock>,
}

impl Default for SchedulerConfig {
    fn default() -> SchedulerConfig {
        SchedulerConfig {
            max_sequences: 8,
            queue_limit: 64,
            reserve: 1024,
            prefill_chunk: 512,
            eos: Vec::new(),
            max_fetched_top_k: 256,
            speculation: SpeculationConfig::default(),
            prefix: PrefixConfig::default(),
            groups: StepGroups::default(),
            clock: None,
        }
    }
}
