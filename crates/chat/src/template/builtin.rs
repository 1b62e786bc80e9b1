//! Chat templates for model files without one.

use contract::{PreTokenizer, TokenKind, Vocab};

/// Qwen3.5 and Qwen3.6: the prompt opens reasoning, calls are tagged parameters.
pub(super) const QWEN35: &str = include_str!("builtin_qwen35.jinja");
/// Qwen3: the model opens reasoning, calls are JSON.
pub(super) const QWEN3: &str = include_str!("builtin_qwen3.jinja");

/// For models that were never trained on conversations: their completions work.
const NONE: &str = "{{ raise_exception('the model file has no chat template, and its vocabulary has no \
turn markers for the built-in one; use completions, or give a template file') }}";

/// The built-in template of the vocabulary's family; it refuses conversations if there is none.
pub(super) fn source(vocab: &Vocab) -> &'static str {
    let has = |wanted: &str| {
        vocab
            .tokens
            .iter()
            .zip(&vocab.kinds)
            .any(|(token, kind)| *kind == TokenKind::Control && token == wanted)
    };
    if !has("<|im_start|>") || !has("<|im_end|>") {
        return NONE;
    }
    if vocab.pre == PreTokenizer::Qwen35 {
        QWEN35
    } else {
        QWEN3
    }
}
