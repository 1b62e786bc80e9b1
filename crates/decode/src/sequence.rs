//! One continuation of one prompt on the device.

use contract::{Ask, SeqId, TokenId, Tree};

use crate::sample::{History, Sampler};
use crate::{ChoiceStats, FinishReason, JobId, OutToken, Settings};

/// One timeline: what has been said, how the next token is chosen, and when it ends.
///
/// While it decodes, the last token of its history is the root: sampled, and not yet in the cache.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// The job it belongs to.
    pub(crate) job: JobId,
    /// Which of the job's choices it is.
    pub(crate) choice: usize,
    /// Its place on the device; closed by whoever takes the sequence out of the scheduler.
    pub(crate) seq: SeqId,
    /// Prompt and output.
    pub(crate) history: History,
    /// Chooses its tokens.
    pub(crate) sampler: Sampler,
    /// When it ends.
    pub(crate) bounds: Bounds,
    /// What it has taken so far.
    pub(crate) stats: ChoiceStats,
}

/// What ends a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Tokens that end it.
    pub(crate) ends: Vec<TokenId>,
    /// The most tokens it may generate.
    pub(crate) max_tokens: usize,
    /// The most tokens of prompt and output together.
    pub(crate) context: usize,
}

impl Bounds {
    /// The bounds that `settings` mean for a model with these ending tokens and this context.
    pub(crate) fn new(settings: &Settings, eos: &[TokenId], context: usize) -> Bounds {
        let mut ends = settings.stop_tokens.clone();
        if !settings.ignore_eos {
            ends.extend_from_slice(eos);
        }
        Bounds {
            ends,
            max_tokens: settings.max_tokens,
            context,
        }
    }

    /// The most tokens a device must hold for a prompt of this length.
    pub(crate) fn max_len(&self, prompt: usize) -> usize {
        prompt.saturating_add(self.max_tokens).min(self.context)
    }
}

impl Sequence {
    /// Position of the next token to be chosen once `ahead` more have been.
    pub(crate) fn position_after(&self, ahead: usize) -> usize {
        self.history.tokens().len() + ahead
    }

    /// How many tokens may still be generated.
    pub(crate) fn remaining(&self) -> usize {
        let by_count = self
            .bounds
            .max_tokens
            .saturating_sub(self.history.generated());
        let by_context = self
            .bounds
            .context
            .saturating_sub(self.history.tokens().len());
        by_count.min(by_context)
    }

    /// The deepest tree node that can still be of use: the sample taken there is the last one allowed.
    pub(crate) fn max_depth(&self) -> usize {
        self.remaining().saturating_sub(1)
    }

    /// Why the sequence ends, if it does, once `ahead` more tokens have been chosen, `last` being the latest.
    pub(crate) fn ending(&self, ahead: usize, last: TokenId) -> Option<FinishReason> {
        if self.bounds.ends.contains(&last) {
            Some(FinishReason::Eos)
        } else if self.history.generated() + ahead >= self.bounds.max_tokens {
            Some(FinishReason::Length)
        } else if self.history.tokens().len() + ahead >= self.bounds.context {
            Some(FinishReason::ContextFull)
        } else {
            None
        }
    }

    /// What to ask at each node of a tree, `[n_nodes]`; nothing where no walk can arrive.
    pub(crate) fn asks(&self, tree: &Tree) -> Vec<Ask> {
        let max_depth = self.max_depth();
        tree.nodes()
            .map(|node| {
                let path = tree.path_to(node);
                let below_root: Vec<TokenId> =
                    path.nodes()[1..].iter().map(|n| tree.token(*n)).collect();
                let ended = below_root
                    .iter()
                    .any(|token| self.bounds.ends.contains(token));
                if ended || tree.depth(node) > max_depth {
                    return Ask::NOTHING;
                }
                self.sampler.ask(&self.history, &below_root)
            })
            .collect()
    }

    /// Takes chosen tokens into the history.
    pub(crate) fn push(&mut self, tokens: &[OutToken]) {
        tokens.iter().for_each(|token| self.history.push(token.id));
        self.stats.generated_tokens = self.history.generated();
    }
}
