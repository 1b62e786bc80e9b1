//! A block-diffusion draft model as data (DFlash). It fills a block of positions in one pass and
//! reads captured hidden states of the target.
//!
//! ```text
//! f[p]  = rms(fc · [target hidden states after each of capture_layers], hidden_norm)
//!                                                                         [hidden] per token
//! x     = target embedding rows of [root, mask, …, mask]                  [block, hidden]
//! per layer:
//!   h   = rms(x, attention_norm);   q = rope(rms_head(q · h)),  k, v likewise from h
//!   context k, v = rope(rms_head(k · f[p])), v · f[p]      (f[p] without attention_norm)
//!   x  += o · softmax(q [k_context; k_block] scale) [v_context; v_block]
//!   x  += ffn(rms(x, ffn_norm))
//! logits = target head · rms(x[1 ..], final_norm)                         [block - 1, vocab]
//! ```
//!
//! Row `j` of a block predicts the token at position `committed + j`; row 0 is the root, which is
//! known. Context keys belong to committed tokens and do not depend on the block. A device computes
//! them once per committed token and caches them.

use std::sync::Arc;

use crate::{AttentionSpec, FeedForward, KvFormat, ModelHash, TokenId, WeightRef, WeightSource};

/// A draft model. It uses the embedding and LM head of the target.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftSpec {
    /// Display name: the draft's own name, or the file's stem.
    pub name: String,
    /// Identity of the weights, metadata and overrides.
    pub hash: ModelHash,
    /// Width of the residual stream, equal to the target's.
    pub hidden: usize,
    /// Epsilon of every RMS norm.
    pub norm_eps: f32,
    /// Rows of one pass including the root; at least 2.
    pub block: usize,
    /// Placeholder token of the positions to predict, within the target's vocabulary.
    pub mask_token: TokenId,
    /// Target layers, from 0, whose output hidden states (before any final norm) are captured, in
    /// concatenation order.
    pub capture_layers: Vec<usize>,
    /// `[hidden, n_captured * hidden]`.
    pub fc: WeightRef,
    /// `[hidden]`: norm of the output of `fc`.
    pub hidden_norm: WeightRef,
    /// Bottom to top.
    pub layers: Vec<DraftLayer>,
    /// `[hidden]`.
    pub final_norm: WeightRef,
}

/// One draft layer.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftLayer {
    /// `[hidden]`, for block rows only.
    pub attention_norm: WeightRef,
    /// Projections, head norms and rope; without a gate.
    pub attention: AttentionSpec,
    /// Attention window: a query at `q` sees a key at `k` if `q - k < window`. Layers without a
    /// window in the file use [`DraftSpec::DEFAULT_WINDOW`], so that the draft's KV cache stays
    /// bounded.
    pub window: usize,
    /// Mask within the block.
    pub block_mask: BlockMask,
    /// `[hidden]`.
    pub ffn_norm: WeightRef,
    /// The feed-forward.
    pub ffn: FeedForward,
}

/// Attention mask within a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockMask {
    /// All rows.
    Full,
    /// The row itself and earlier rows.
    Causal,
}

impl DraftSpec {
    /// Window of layers without one of their own, in tokens. Drafts are trained on 4,096 tokens.
    pub const DEFAULT_WINDOW: usize = 8192;

    /// Positions that one pass predicts.
    pub fn depth(&self) -> usize {
        self.block - 1
    }

    /// The largest window. Older hidden states are never used.
    pub fn window(&self) -> usize {
        self.layers
            .iter()
            .map(|layer| layer.window)
            .max()
            .unwrap_or(0)
    }

    /// Every weight of the draft, each once.
    pub fn weights(&self) -> Vec<&WeightRef> {
        let mut all = vec![&self.fc, &self.hidden_norm];
        for layer in &self.layers {
            let a = &layer.attention;
            let FeedForward::Dense { gate, up, down } = &layer.ffn;
            all.extend([&layer.attention_norm, &layer.ffn_norm]);
            all.extend([&a.q, &a.k, &a.v, &a.o]);
            all.extend(a.q_norm.iter().chain(&a.k_norm));
            all.extend([gate, up, down]);
        }
        all.push(&self.final_norm);
        all
    }
}

/// A draft model to open with its target.
#[derive(Clone)]
pub struct DraftLoadConfig {
    /// The draft, already checked against the target.
    pub spec: Arc<DraftSpec>,
    /// Source of its weights.
    pub weights: Arc<dyn WeightSource>,
    /// Its KV cache type.
    pub kv: KvFormat,
    /// When its weights are loaded.
    pub load: DraftLoad,
}

/// When a draft's weights are loaded. Their memory is reserved at open in either case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DraftLoad {
    /// With the target's weights.
    #[default]
    AtOpen,
    /// At the first call that needs them.
    AtFirstUse,
}
