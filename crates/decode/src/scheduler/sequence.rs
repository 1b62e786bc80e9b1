//! A sequence: one continuation of a prompt on the device.

use contract::{AttentionWindow, LogitsRequest, NodeIdx, SeqId, TokenId, Tree};

use crate::constraint::Constraint;
use crate::event::{ChoiceStats, FinishReason, OutputToken};
use crate::job::{GenerationParams, JobId};
use crate::sample::{History, Sampler};
use crate::speculation::{ProposedTree, SourceSet, SurprisalEma};

/// The logits request and the forced token of a tree node.
#[derive(Debug, Clone, Default)]
pub(super) struct NodeRequest {
    /// The logits request.
    pub(super) request: LogitsRequest,
    /// The token that comes whatever the logits are.
    pub(super) forced: Option<TokenId>,
}

/// A sequence's tokens, sampler and limits.
///
/// While it decodes, the last token of its history is the root: sampled, and not in the KV cache.
pub(super) struct Sequence {
    /// Its job.
    pub(super) job: JobId,
    /// Its choice of the job.
    pub(super) choice: usize,
    /// Its id on the device. The scheduler closes it.
    pub(super) seq: SeqId,
    /// Prompt and output.
    pub(super) history: History,
    /// Samples its tokens.
    pub(super) sampler: Sampler,
    /// When it ends.
    pub(super) stop_conditions: StopConditions,
    /// Its constraint, advanced over every generated token.
    pub(super) constraint: Option<Box<dyn Constraint>>,
    /// Whether tokens may be drafted for it.
    pub(super) speculate: bool,
    /// Its attention window while decoding.
    pub(super) window: AttentionWindow,
    /// Surprisal of its last tokens.
    pub(super) surprisal: SurprisalEma,
    /// Its counters.
    pub(super) stats: ChoiceStats,
}

/// What ends a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StopConditions {
    /// End tokens.
    pub(super) end_tokens: Vec<TokenId>,
    /// Maximum number of generated tokens.
    pub(super) max_tokens: usize,
    /// Maximum number of tokens of prompt and output together.
    pub(super) context: usize,
}

impl StopConditions {
    /// The stop conditions of `params`, for a model with these end tokens and this context.
    pub(super) fn new(
        params: &GenerationParams,
        eos: &[TokenId],
        context: usize,
    ) -> StopConditions {
        let mut end_tokens = params.stop_tokens.clone();
        if !params.ignore_eos {
            end_tokens.extend_from_slice(eos);
        }
        StopConditions {
            end_tokens,
            max_tokens: params.max_tokens,
            context,
        }
    }

    /// Maximum number of tokens on the device for a prompt of this length.
    pub(super) fn max_len(&self, prompt: usize) -> usize {
        prompt.saturating_add(self.max_tokens).min(self.context)
    }
}

impl Sequence {
    /// Position of the next token once `ahead` more are sampled.
    pub(super) fn position_after(&self, ahead: usize) -> usize {
        self.history.tokens().len() + ahead
    }

    /// Tokens that may still be generated.
    pub(super) fn remaining(&self) -> usize {
        let by_count = self
            .stop_conditions
            .max_tokens
            .saturating_sub(self.history.generated());
        let by_context = self
            .stop_conditions
            .context
            .saturating_sub(self.history.tokens().len());
        by_count.min(by_context)
    }

    /// Depth of the deepest useful tree node: the sample taken there is the last one allowed.
    pub(super) fn max_depth(&self) -> usize {
        self.remaining().saturating_sub(1)
    }

    /// Why the sequence ends after `ahead` more tokens, the latest being `last`; `None` if it goes
    /// on.
    pub(super) fn finish_reason(&self, ahead: usize, last: TokenId) -> Option<FinishReason> {
        if self.stop_conditions.end_tokens.contains(&last) {
            Some(FinishReason::Eos)
        } else if self.history.generated() + ahead >= self.stop_conditions.max_tokens {
            Some(FinishReason::Length)
        } else if self.history.tokens().len() + ahead >= self.stop_conditions.context {
            Some(FinishReason::ContextFull)
        } else {
            None
        }
    }

    /// Why its constraint failed, if it did.
    pub(super) fn error(&self) -> Option<&str> {
        self.constraint.as_ref()?.error()
    }

    /// The forced tokens that come next, at most `max_tokens`.
    pub(super) fn forced_run(&mut self, max_tokens: usize) -> Vec<TokenId> {
        let mut run = Vec::new();
        let Some(constraint) = &mut self.constraint else {
            return run;
        };
        while run.len() < max_tokens
            && let Some(token) = constraint.forced(&run)
        {
            run.push(token);
            if self.stop_conditions.end_tokens.contains(&token) {
                break;
            }
        }
        run
    }

    /// The request of the node at the end of `path`, the tokens of the nodes below the root.
    pub(super) fn node_request(&mut self, path: &[TokenId]) -> NodeRequest {
        let constraint = self.constraint.as_mut();
        let forced = constraint.and_then(|constraint| constraint.forced(path));
        if let Some(token) = forced {
            return NodeRequest {
                request: self.sampler.request_forced(token),
                forced,
            };
        }
        let (allowed, boost) = match &mut self.constraint {
            None => (None, None),
            Some(constraint) => (constraint.allowed(path), constraint.logit_boost(path)),
        };
        NodeRequest {
            request: self
                .sampler
                .logits_request(&self.history, path, allowed, boost),
            forced,
        }
    }

    /// The part of a tree that acceptance can reach, with a request per node, `[n_nodes]`. Drops
    /// nodes below end tokens, beside forced tokens, outside masks, and too deep to be of use.
    pub(super) fn reachable(
        &mut self,
        proposed: &ProposedTree,
    ) -> (ProposedTree, Vec<NodeRequest>) {
        let tree = &proposed.tree;
        let max_depth = self.max_depth();
        let mut kept = Tree::root(tree.token(NodeIdx::ROOT));
        let mut sources = vec![SourceSet::NONE];
        let mut node_requests = vec![self.node_request(&[])];
        // New index of each kept node.
        let mut new_index = vec![Some(NodeIdx::ROOT)];
        for node in tree.nodes().skip(1) {
            let parent = tree
                .parent(node)
                .and_then(|parent| new_index[parent.index()]);
            let token = tree.token(node);
            let index = parent
                .filter(|_| {
                    tree.depth(node) <= max_depth
                        && !self.stop_conditions.end_tokens.contains(&token)
                })
                .filter(|parent| admits(&node_requests[parent.index()], token))
                .and_then(|parent| kept.push(parent, token).ok());
            if let Some(index) = index {
                let path = kept.path_to(index);
                let below_root = path.nodes()[1..].iter().map(|n| kept.token(*n));
                let below_root: Vec<TokenId> = below_root.collect();
                node_requests.push(self.node_request(&below_root));
                let by = proposed.sources.get(node.index()).copied();
                sources.push(by.unwrap_or_default());
            }
            new_index.push(index);
        }
        let tree = kept.with_window(self.window);
        (ProposedTree { tree, sources }, node_requests)
    }

    /// Appends sampled tokens to the history.
    pub(super) fn push(&mut self, tokens: &[OutputToken]) {
        tokens.iter().for_each(|token| self.history.push(token.id));
        if let Some(constraint) = &mut self.constraint {
            let ids: Vec<TokenId> = tokens.iter().map(|token| token.id).collect();
            constraint.advance(&ids);
        }
        self.stats.generated_tokens = self.history.generated();
    }
}

/// Whether acceptance may go from a node with this request to a child with this token.
fn admits(node: &NodeRequest, token: TokenId) -> bool {
    let processors = node
        .request
        .processors
        .as_ref()
        .filter(|_| node.forced.is_none());
    let mask = processors.and_then(|processors| processors.allowed.as_ref());
    node.forced.is_none_or(|forced| forced == token) && mask.is_none_or(|m| m.contains(token))
}
