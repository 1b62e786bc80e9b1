//! A block-diffusion draft model as data (DFlash, DFlash2, DSpark). It fills a block of positions
//! in one pass and reads captured hidden states of the target.
//!
//! ```text
//! f[p]  = rms(fc · [target hidden states after each of capture_layers], hidden_norm)
//!                                                                         [hidden] per token
//! x     = embedding rows of [root, mask, …, mask]                         [block, hidden]
//! per layer:
//!   h   = rms(x, attention_norm);   h' = conv(h, 0);   q = rope(rms_head(q · h')),  k, v likewise
//!   context k, v = rope(rms_head(k · f[p])), v · f[p]    (f[p] without attention_norm and conv)
//!   a   = conv(o · softmax(q [k_context; k_block] scale, sinks) [v_context; v_block], 1)
//!   x  += rms(a, post_attention_norm)
//!   h   = rms(x, ffn_norm);   x += rms(conv(ffn(conv(h, 0)), 1), post_ffn_norm)
//! y     = rms(x, final_norm)                                              [block, hidden]
//! logits = softcap(logit_scale * (head · y[first_row ..]))                [depth, vocab]
//! ```
//!
//! `conv`, the post norms and the sinks are the identity in layers without them. Row `j` of a block
//! predicts the token at position `committed + j` if `first_row` is 1, and the one after it if
//! `first_row` is 0.
//!
//! Context keys belong to committed tokens and do not depend on the block. A device computes them
//! once per committed token and caches them.

use std::sync::Arc;

use crate::{AttentionSpec, DenseSpec, KvFormat, ModelHash, TokenId, WeightRef, WeightSource};

/// A draft model.
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
    /// The row that predicts the token after the root: 1, or 0 if the draft samples at the root.
    pub first_row: usize,
    /// Placeholder token of the positions to predict, within the target's vocabulary.
    pub mask_token: TokenId,
    /// Target layers, from 0, whose output hidden states (before any final norm) are captured, in
    /// concatenation order.
    pub capture_layers: Vec<usize>,
    /// `[vocab, hidden]`, looked up; `None` if the draft uses the target's.
    pub embedding: Option<WeightRef>,
    /// `[hidden, n_captured * hidden]`.
    pub fc: WeightRef,
    /// `[hidden]`: norm of the output of `fc`.
    pub hidden_norm: WeightRef,
    /// Bottom to top.
    pub layers: Vec<DraftLayer>,
    /// `[hidden]`.
    pub final_norm: WeightRef,
    /// The draft's own LM head; `None` if it uses the target's.
    pub head: Option<DraftHead>,
    /// Factor on the logits.
    pub logit_scale: f32,
    /// The bound `c` of `c * tanh(logit / c)`, if logits are capped.
    pub logit_softcap: Option<f32>,
    /// How a row's candidates depend on the token before.
    pub conditioning: Conditioning,
}

/// A draft's own LM head.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftHead {
    /// `[draft_vocab, hidden]`.
    pub weight: WeightRef,
    /// `[draft_vocab]`: the target's id of each row; `None` if they are the same.
    pub ids: Option<Arc<[TokenId]>>,
}

/// How the candidates of a row depend on the token before.
#[derive(Debug, Clone, PartialEq)]
pub enum Conditioning {
    /// They do not.
    Independent,
    /// By scores of pairs.
    Pairwise(PairwiseSelector),
    /// By a bias on all logits.
    Markov(MarkovHead),
}

/// Scores of token pairs (DFlash2). With `g = hidden · y` of a row, candidate `b` behind token `a`
/// scores
/// ```text
/// S(a, b) = logit(b) + Σ_r predecessor[a, r] g[r] successor[b, r]
/// ```
/// over the row's `top_k` best candidates by logit.
#[derive(Debug, Clone, PartialEq)]
pub struct PairwiseSelector {
    /// `[rank, hidden]`.
    pub hidden: WeightRef,
    /// `[vocab, rank]`, looked up.
    pub predecessor: WeightRef,
    /// `[vocab, rank]`, looked up.
    pub successor: WeightRef,
    /// Candidates of a row.
    pub top_k: usize,
}

/// A bias by the token before (DSpark): `logits += next · previous[token]`.
#[derive(Debug, Clone, PartialEq)]
pub struct MarkovHead {
    /// `[vocab, rank]`, looked up.
    pub previous: WeightRef,
    /// `[draft_vocab, rank]`.
    pub next: WeightRef,
    /// Estimates that a row's token is accepted, if the draft has it.
    pub confidence: Option<ConfidenceHead>,
}

/// `sigmoid(weight · [y; previous[token]] + bias)`.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfidenceHead {
    /// `[hidden + rank]`.
    pub weight: WeightRef,
    /// `[1]`.
    pub bias: Option<WeightRef>,
}

/// One draft layer.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftLayer {
    /// `[hidden]`, for block rows only.
    pub attention_norm: WeightRef,
    /// Projections, head norms and rope; without a gate.
    pub attention: AttentionSpec,
    /// Where values come from. With [`DraftValues::Keys`], `attention.v` is `attention.k`.
    pub values: DraftValues,
    /// `[n_heads]`: a score without a value that joins each head's softmax.
    pub sinks: Option<WeightRef>,
    /// Around attention.
    pub attention_conv: Option<DynamicConv>,
    /// `[hidden]`: norm of attention's output before the residual.
    pub post_attention_norm: Option<WeightRef>,
    /// Attention window: a query at `q` sees a key at `k` if `q - k < window`. Layers without a
    /// window in the file use [`DraftSpec::DEFAULT_WINDOW`], so that the draft's KV cache stays
    /// bounded.
    pub window: usize,
    /// Mask within the block.
    pub block_mask: BlockMask,
    /// `[hidden]`.
    pub ffn_norm: WeightRef,
    /// The feed-forward.
    pub ffn: DenseSpec,
    /// Around the feed-forward.
    pub ffn_conv: Option<DynamicConv>,
    /// `[hidden]`: norm of the feed-forward's output before the residual.
    pub post_ffn_norm: Option<WeightRef>,
}

/// Where the values of a draft layer come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DraftValues {
    /// A projection of their own.
    Projection,
    /// The key projection before norm and rope, each head through an RMS norm without weights.
    Keys,
}

/// A short convolution along a block's rows whose weights depend on the row.
///
/// With `h` the normalised input of a sublayer, and side 0 at its input or 1 at its output:
/// ```text
/// d[t]            = projection · h[t]                                    [2, taps, groups]
/// out[t, channel] = Σ_tap (base[side, tap, channel] + d[t, side, tap, channel / group])
///                         * in[t - tap, channel]
/// ```
/// Rows before the block's first are zero. Context rows are not convolved.
#[derive(Debug, Clone, PartialEq)]
pub struct DynamicConv {
    /// `[2 * taps, hidden]`.
    pub base: WeightRef,
    /// `[2 * taps * hidden / group, hidden]`.
    pub projection: WeightRef,
    /// Rows that one output row sums, itself included.
    pub taps: usize,
    /// Consecutive channels that share the dynamic weights.
    pub group: usize,
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

    /// Rows of a narrow pass.
    const NARROW_ROWS: usize = 8;

    /// Positions that one pass predicts.
    pub fn depth(&self) -> usize {
        self.block - self.first_row
    }

    /// The narrow pass of the draft, if it has one: a draft whose rows are independent, trained on
    /// blocks of at least twice as many rows. Candidates of a narrow pass are those of a shorter
    /// block, which are nearly as good (DFlash, arXiv 2602.06036, trains on 16 rows and drafts 8).
    pub fn narrow(&self) -> Option<NarrowDraft> {
        let blocks = self.block / DraftSpec::NARROW_ROWS;
        (self.conditioning == Conditioning::Independent && blocks > 1).then_some(NarrowDraft {
            depth: DraftSpec::NARROW_ROWS - self.first_row,
            per_block: blocks,
        })
    }

    /// Rows of a pass that predicts `depth` positions, root included: those of a narrow pass if it
    /// reaches as far, otherwise those of the block.
    pub fn pass_rows(&self, depth: usize) -> usize {
        match self.narrow() {
            Some(narrow) if depth <= narrow.depth => DraftSpec::NARROW_ROWS,
            _ => self.block,
        }
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
        let mut all = self.multiplied();
        all.extend(self.tables());
        all
    }

    /// The weights that a pass multiplies or adds.
    pub fn multiplied(&self) -> Vec<&WeightRef> {
        let mut all = vec![&self.fc, &self.hidden_norm];
        all.extend(self.layers.iter().flat_map(DraftLayer::weights));
        all.push(&self.final_norm);
        all.extend(self.head.iter().map(|head| &head.weight));
        match &self.conditioning {
            Conditioning::Independent => {}
            Conditioning::Pairwise(selector) => all.push(&selector.hidden),
            Conditioning::Markov(markov) => {
                all.push(&markov.next);
                let confidence = markov.confidence.iter();
                all.extend(
                    confidence.flat_map(|head| [&head.weight].into_iter().chain(&head.bias)),
                );
            }
        }
        all
    }

    /// The tables with a row per token of the target's vocabulary, of which single rows are read.
    pub fn tables(&self) -> Vec<&WeightRef> {
        let mut all: Vec<&WeightRef> = self.embedding.iter().collect();
        match &self.conditioning {
            Conditioning::Independent => {}
            Conditioning::Pairwise(selector) => {
                all.extend([&selector.predecessor, &selector.successor]);
            }
            Conditioning::Markov(markov) => all.push(&markov.previous),
        }
        all
    }
}

impl DraftLayer {
    /// Every weight of the layer, each once.
    pub fn weights(&self) -> Vec<&WeightRef> {
        let a = &self.attention;
        let mut all = vec![&self.attention_norm, &self.ffn_norm, &a.q, &a.k];
        all.extend((self.values == DraftValues::Projection).then_some(&a.v));
        all.push(&a.o);
        all.extend(a.q_norm.iter().chain(&a.k_norm));
        all.extend(self.sinks.iter().chain(&self.post_attention_norm));
        all.extend(&self.post_ffn_norm);
        for conv in self.attention_conv.iter().chain(&self.ffn_conv) {
            all.extend([&conv.base, &conv.projection]);
        }
        all.extend(self.ffn.matrices());
        all
    }
}

/// A pass of a draft model with fewer rows than its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NarrowDraft {
    /// Positions that it predicts.
    pub depth: usize,
    /// Narrow passes that take as many rows as a whole one; at least 2.
    pub per_block: usize,
}

impl NarrowDraft {
    /// Whole passes that take the rows of `n` narrow ones.
    pub fn blocks(self, n: usize) -> usize {
        n.div_ceil(self.per_block)
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
