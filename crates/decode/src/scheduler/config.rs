//! The settings of a scheduler.

use contract::TokenId;

use crate::prefix::PrefixConfig;
use crate::speculation::{Clock, Speculation};

/// The settings of a scheduler.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Most sequences decoded at once, at least 1. A job takes one per choice. The runner's limit
    /// applies too.
    pub max_sequences: usize,
    /// Most waiting jobs; one more is rejected.
    pub queue_limit: usize,
    /// Expected growth of each sequence, in tokens, or its `max_tokens` if that is less.
    ///
    /// A job is admitted if the pool holds its prompt plus this many tokens, beside as many for
    /// each open sequence. A pool that still runs out costs time and never changes a token.
    pub reserve: usize,
    /// Prompt tokens per prefill call. The runner's limit and alignment apply too.
    pub prefill_chunk: usize,
    /// The model's own end tokens.
    pub eos: Vec<TokenId>,
    /// Largest top-k fetched as such; for more candidates the full row is fetched.
    pub top_limit: usize,
    /// Speculative decoding. Unused without a draft model.
    pub speculation: Speculation,
    /// The prefix cache.
    pub prefix: PrefixConfig,
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
            top_limit: 256,
            speculation: Speculation::default(),
            prefix: PrefixConfig::default(),
            clock: None,
        }
    }
}
