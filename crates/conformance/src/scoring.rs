//! Scorers of synthetic models, for the tests of each device's scorer.

use std::ops::ControlFlow;

use contract::{Backend, BlockSparsity, ScoreSettings, Scorer, ScorerConfig, TokenId};

use crate::synthetic_model::SyntheticModel;

/// The longest prompt of [`open`], in tokens.
pub const MAX_TOKENS: usize = 8192;
/// Prompts have tokens below this, which every synthetic model has.
const VOCAB: u32 = 263;

/// Opens a scorer of prompts of up to [`MAX_TOKENS`] tokens.
///
/// # Panics
/// If the device refuses the model.
pub fn open(
    backend: &dyn Backend,
    model: &SyntheticModel,
    exit_layer: Option<usize>,
) -> Box<dyn Scorer> {
    let config = ScorerConfig {
        model: model.spec.clone(),
        weights: model.weights.clone(),
        exit_layer,
        max_tokens: MAX_TOKENS,
    };
    let opened = backend.open_scorer(config, &mut |_| {});
    opened.expect("every device runs the synthetic models")
}

/// A prompt of `n` random tokens.
pub fn prompt(n: usize, seed: u32) -> Vec<TokenId> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
    let mut token = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        TokenId((state >> 8) % VOCAB)
    };
    (0..n).map(|_| token()).collect()
}

/// The scores of a prompt.
///
/// # Panics
/// If the scorer fails.
pub fn score(scorer: &mut dyn Scorer, tokens: &[TokenId], settings: &ScoreSettings) -> Vec<f32> {
    let scores = scorer.score(tokens, settings, &mut |_| ControlFlow::Continue(()));
    let scores = scores.expect("the call is valid");
    scores.expect("nothing stops the call")
}

/// Attention to every key.
pub fn dense() -> ScoreSettings {
    ScoreSettings {
        sparsity: BlockSparsity::DENSE,
        ..ScoreSettings::default()
    }
}

/// Few blocks are kept: no window, one sink, and only the best of the others.
pub fn sparse() -> ScoreSettings {
    ScoreSettings {
        sparsity: BlockSparsity {
            sink_blocks: 1,
            window_blocks: 1,
            dense_last_blocks: 1,
            alpha: 1.0,
        },
        ..ScoreSettings::default()
    }
}
