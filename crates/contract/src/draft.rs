//! A block-diffusion draft as data (DFlash): a small model that fills a whole block of positions in one pass,
//! reading the target's own features instead of keeping a context of its own.
//!
//! ```text
//! f[p]  = rms(fc · [target residual after layer capture_layers[0] | capture_layers[1] | …], hidden_norm)       [hidden] per token
//! x     = target embedding rows of [root, mask, …, mask]                                  [block, hidden]
//! per layer:
//!   h   = rms(x, attention_norm);   q = rope(rms_head(q · h)),  k, v likewise from h
//!   context k, v = rope(rms_head(k · f[p])), v · f[p]            f goes in as it is, not through attention_norm
//!   x  += o · softmax(q [k_context; k_block] scale) [v_context; v_block]
//!   x  += ffn(rms(x, ffn_norm))
//! logits = target head · rms(x[1 ..], final_norm)                                         [block - 1, vocab]
//! ```
//!
//! LogitsRow `j` of a block stands at position `committed + j` and speaks of the token at that very position, so row
//! 0, the root, says nothing that is not known. Context keys are those of the committed tokens; they never
//! depend on the block, so a device computes them once, when a token is committed, and keeps them.

use std::sync::Arc;

use crate::{AttentionSpec, FeedForward, KvFormat, ModelHash, TokenId, WeightRef, WeightSource};

/// What a device needs to run a draft beside its target. Embedding and head are the target's.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftSpec {
    /// For people: the draft's own name, or the file's stem.
    pub name: String,
    /// Identity of the weights and of what was read or overridden beside them.
    pub hash: ModelHash,
    /// Width of the residual stream: the target's.
    pub hidden: usize,
    /// Epsilon of every RMS norm.
    pub norm_eps: f32,
    /// Rows of one pass, the root included; at least 2.
    pub block: usize,
    /// Stands in for the tokens to be found; below the target's vocabulary.
    pub mask_token: TokenId,
    /// Target layers, counted from 0, whose residual stream *after the whole layer* (no final norm) is read, in
    /// the order of concatenation.
    pub capture_layers: Vec<usize>,
    /// `[hidden, capture_layers * hidden]`.
    pub fc: WeightRef,
    /// `[hidden]`: norm of what `fc` gives.
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
    /// How far back a row sees: a key at position `k` is seen from `q` while `q - k < window`. Layers that the
    /// file calls full have a bound too, [`DraftSpec::FULL_WINDOW`], so that what is kept stays bounded.
    pub window: usize,
    /// Which rows of its own block a row sees.
    pub block_mask: BlockMask,
    /// `[hidden]`.
    pub ffn_norm: WeightRef,
    /// The feed-forward.
    pub ffn: FeedForward,
}

/// Which rows of its own block a row of a draft layer sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockMask {
    /// All of them.
    Full,
    /// Itself and those before it.
    Causal,
}

impl DraftSpec {
    /// The window of layers that have none of their own; drafts are trained on 4,096 tokens.
    pub const FULL_WINDOW: usize = 8192;

    /// Positions that one pass can fill: the root is known.
    pub fn depth(&self) -> usize {
        self.block - 1
    }

    /// The widest window: features of tokens further back are of no use.
    pub fn window(&self) -> usize {
        self.layers
            .iter()
            .map(|layer| layer.window)
            .max()
            .unwrap_or(0)
    }

    /// Every weight the draft reads, each once.
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

/// A draft as it is opened beside a target.
#[derive(Clone)]
pub struct DraftPlan {
    /// What the draft is; checked against the target by whoever read it.
    pub spec: Arc<DraftSpec>,
    /// Where its bytes are.
    pub weights: Arc<dyn WeightSource>,
    /// How its keys and values are stored.
    pub kv: KvFormat,
    /// When its weights are made ready.
    pub load: DraftLoad,
}

/// When a draft's weights are made ready. Their memory is counted and reserved at the start either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DraftLoad {
    /// With the target's.
    #[default]
    AtOpen,
    /// By the first call that needs them.
    AtFirstUse,
}
