//! Scoring a prompt: how much its last tokens depend on each part of it.
//!
//! A scorer is a small model without LM head, beside the runner and independent of it. Devices open
//! one with [`Backend::open_scorer`](crate::Backend::open_scorer).
//!
//! ```text
//! a[t, j] = max over scored layers and heads of softmax_j(scale * q[t] · k[j]),  j <= t
//! s[j]    = mean over tail queries t of a[t, j]
//! chunk scores = mean per chunk of the centred moving average of s
//! ```

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::{DeviceError, ModelSpec, TokenId, WeightSource};

/// Everything a device needs to open a scorer.
#[derive(Clone)]
pub struct ScorerConfig {
    /// The model.
    pub model: Arc<ModelSpec>,
    /// Source of its weights.
    pub weights: Arc<dyn WeightSource>,
    /// The layer after whose attention scores the model ends; later layers and the LM head are not
    /// loaded. It counts as the last attention layer up to it. `None` for the model's last.
    pub exit_layer: Option<usize>,
    /// The longest prompt, in tokens.
    pub max_tokens: usize,
}

/// Properties of an opened scorer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScorerInfo {
    /// The device's user-visible id, such as `cpu`.
    pub device: String,
    /// The attention layer that is scored last.
    pub exit_layer: usize,
    /// Attention layers up to it, itself included.
    pub attention_layers: usize,
    /// Number of tokens of the vocabulary.
    pub vocab: usize,
    /// The longest prompt, in tokens.
    pub max_tokens: usize,
    /// Bytes of the loaded weights.
    pub weights_bytes: u64,
}

/// How a prompt is scored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoreSettings {
    /// The last tokens, whose queries rate all tokens up to them; at least 1.
    pub tail_tokens: usize,
    /// Whether tail queries and keys are rotated by their positions. Unrotated scores do not fade
    /// with distance.
    pub rotated_tail: bool,
    /// How many attention layers are scored, counted from the exit layer down; `None` for all.
    pub scored_layers: Option<usize>,
    /// Which key blocks the layers below attend to.
    pub sparsity: BlockSparsity,
    /// Width of the moving average in tokens, odd; shorter at the ends.
    pub smoothing: usize,
    /// Tokens of a chunk; at least 1.
    pub chunk: usize,
}

impl Default for ScoreSettings {
    fn default() -> ScoreSettings {
        ScoreSettings {
            tail_tokens: 8,
            rotated_tail: false,
            scored_layers: None,
            sparsity: BlockSparsity::default(),
            smoothing: 13,
            chunk: 8,
        }
    }
}

/// Block-sparse attention (FlashPrefill, arXiv 2603.06199) in blocks of [`BlockSparsity::BLOCK`]
/// positions.
///
/// Query block `m` of a head keeps key block `n <= m` if it is a sink, lies in the window, if `m`
/// is one of the last blocks, or if
///
/// ```text
/// lse[n] >= max over n' of lse[n'] + ln(alpha),
/// lse[n] = ln of the sum over rows q of block m of exp(scale * q · mean key of block n)
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockSparsity {
    /// First blocks that are always kept.
    pub sink_blocks: usize,
    /// Blocks up to the query's own, itself included, that are always kept; at least 1.
    pub window_blocks: usize,
    /// Last query blocks, which keep every key block.
    pub dense_last_blocks: usize,
    /// Share of the best block's weight below which a block is dropped; 0 keeps every block, a
    /// larger value fewer.
    pub alpha: f32,
}

impl BlockSparsity {
    /// Positions of a block.
    pub const BLOCK: usize = 128;

    /// Attention to every key.
    pub const DENSE: BlockSparsity = BlockSparsity {
        sink_blocks: 2,
        window_blocks: 4,
        dense_last_blocks: 2,
        alpha: 0.0,
    };
}

impl Default for BlockSparsity {
    fn default() -> BlockSparsity {
        BlockSparsity {
            alpha: 0.12,
            ..BlockSparsity::DENSE
        }
    }
}

/// Progress of one call of [`Scorer::score`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoreProgress {
    /// Token rows that have passed a layer.
    pub done: usize,
    /// Token rows of all layers.
    pub total: usize,
}

/// An opened scoring model. All calls come from the thread that opened it.
pub trait Scorer {
    /// Its properties.
    fn info(&self) -> &ScorerInfo;

    /// The score of each chunk of `tokens`, `[ceil(n / chunk)]`, in 0 to 1. Equal calls give equal
    /// bits.
    ///
    /// `progress` is called between pieces of work; if it breaks, the result is `None`.
    ///
    /// # Errors
    /// [`DeviceError::InvalidCall`] for settings out of range, for fewer tokens than the tail, for
    /// more than [`ScorerInfo::max_tokens`], and for tokens beyond the vocabulary.
    fn score(
        &mut self,
        tokens: &[TokenId],
        settings: &ScoreSettings,
        progress: &mut dyn FnMut(ScoreProgress) -> ControlFlow<()>,
    ) -> Result<Option<Vec<f32>>, DeviceError>;
}

/// Checks a call of [`Scorer::score`] against its documentation.
///
/// # Errors
/// [`DeviceError::InvalidCall`], as documented there.
pub fn check_score_call(
    info: &ScorerInfo,
    tokens: &[TokenId],
    settings: &ScoreSettings,
) -> Result<(), DeviceError> {
    let ScoreSettings {
        tail_tokens,
        scored_layers,
        sparsity,
        smoothing,
        chunk,
        ..
    } = *settings;
    let invalid = |detail: String| {
        Err(DeviceError::InvalidCall {
            call: "score",
            detail,
        })
    };
    if tail_tokens == 0 || chunk == 0 || scored_layers == Some(0) || sparsity.window_blocks == 0 {
        return invalid(format!("{settings:?} has a count of 0"));
    }
    if smoothing.is_multiple_of(2) || !(0.0..=1.0).contains(&sparsity.alpha) {
        return invalid(format!("{settings:?}: smoothing is odd, alpha in 0 to 1"));
    }
    if tokens.len() < tail_tokens || tokens.len() > info.max_tokens {
        return invalid(format!(
            "{} tokens, {tail_tokens} to {} are possible",
            tokens.len(),
            info.max_tokens
        ));
    }
    match tokens.iter().find(|token| token.index() >= info.vocab) {
        Some(token) => invalid(format!("{token} of a vocabulary of {}", info.vocab)),
        None => Ok(()),
    }
}
