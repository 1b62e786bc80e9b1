//! Checks of a draft against its target.

use contract::{
    AttentionSpec, Conditioning, DraftLayer, DraftSpec, DynamicConv, GateActivation, ModelSpec,
    OutputGate, RopePairs, WeightError, WeightRef,
};

use super::{attention, mismatch, shape};
use crate::step;

/// Candidates of a row that the reduction of logits rows gives.
const MAX_TOP_K: usize = 64;
/// Values of a token in a selector or a Markov head, which a warp holds in registers.
const MAX_RANK: usize = 1024;
/// Ranks are read 16 bytes at a time.
const RANK_STEP: usize = 4;

/// Rejects a draft with a part that has no kernels.
pub(super) fn supported(draft: &DraftSpec) -> Result<(), (String, &'static str)> {
    let on_cpu = "it runs on the CPU only (--device cpu)";
    let layers = draft.layers.iter();
    let plain = |a: &AttentionSpec| {
        a.rope.pairs == RopePairs::Halves
            && a.rope.scale == 1.0
            && a.rope_factors.is_none()
            && a.window.is_none()
            && a.biases.iter().next().is_none()
    };
    if !layers.clone().all(|layer| plain(&layer.attention)) {
        let what =
            "a draft with biases, another window or a rotary embedding of another kind".to_owned();
        return Err((what, on_cpu));
    }
    if layers
        .map(|l| &l.ffn)
        .any(|ffn| ffn.activation != GateActivation::Silu)
    {
        return Err(("a draft with GELU".to_owned(), on_cpu));
    }
    let rank = match &draft.conditioning {
        Conditioning::Independent => return Ok(()),
        Conditioning::Pairwise(selector) => {
            if selector.top_k > MAX_TOP_K {
                let what = format!("a draft that selects from {} candidates", selector.top_k);
                return Err((what, "it must be at most 64"));
            }
            selector.hidden.rows
        }
        Conditioning::Markov(markov) => markov.previous.cols,
    };
    if rank > MAX_RANK || !rank.is_multiple_of(RANK_STEP) {
        let what = format!("a draft with {rank} values per token in its selector");
        return Err((what, "it must be a multiple of 4 up to 1024"));
    }
    Ok(())
}

/// Checks the shape of every weight.
pub(super) fn shapes(draft: &DraftSpec, target: &ModelSpec) -> Result<(), WeightError> {
    let hidden = target.hidden;
    let beyond = draft
        .capture_layers
        .iter()
        .any(|tap| *tap >= target.layers.len());
    if draft.hidden != hidden || draft.mask_token.index() >= target.vocab || beyond {
        let detail = "the draft is not one of this target";
        return Err(mismatch(&draft.fc, detail));
    }
    if !(2..=step::ROWS).contains(&draft.block) || draft.layers.is_empty() {
        let detail = "a draft needs a layer and a block of 2 to 64 rows";
        return Err(mismatch(&draft.fc, detail));
    }
    if draft.first_row > 1 {
        return Err(mismatch(&draft.fc, "a draft begins at row 0 or 1"));
    }
    shape(&draft.fc, hidden, draft.capture_layers.len() * hidden)?;
    shape(&draft.hidden_norm, 1, hidden)?;
    shape(&draft.final_norm, 1, hidden)?;
    let mut layers = draft.layers.iter();
    layers.try_for_each(|layer| layer_shapes(layer, hidden))?;
    head_shapes(draft, target)
}

fn layer_shapes(layer: &DraftLayer, hidden: usize) -> Result<(), WeightError> {
    let a: &AttentionSpec = &layer.attention;
    if a.gate != OutputGate::None || layer.window == 0 || a.q_norm.is_some() != a.k_norm.is_some() {
        let detail = "a draft layer has no gate, a window, and both head norms or none";
        return Err(mismatch(&a.q, detail));
    }
    attention(a, hidden)?;
    shape(&layer.attention_norm, 1, hidden)?;
    shape(&layer.ffn_norm, 1, hidden)?;
    layer.ffn.require_shapes(hidden)?;
    for norm in layer.post_attention_norm.iter().chain(&layer.post_ffn_norm) {
        shape(norm, 1, hidden)?;
    }
    if let Some(sinks) = &layer.sinks {
        shape(sinks, 1, a.n_heads)?;
    }
    let mut convs = layer.attention_conv.iter().chain(&layer.ffn_conv);
    convs.try_for_each(|conv| conv_shapes(conv, hidden))
}

fn conv_shapes(conv: &DynamicConv, hidden: usize) -> Result<(), WeightError> {
    if conv.taps == 0 || conv.group == 0 || !hidden.is_multiple_of(conv.group) {
        let detail = "a convolution has taps and whole groups of channels";
        return Err(mismatch(&conv.projection, detail));
    }
    shape(&conv.base, 2 * conv.taps, hidden)?;
    let width = 2 * conv.taps * (hidden / conv.group);
    shape(&conv.projection, width, hidden)
}

/// A draft's embedding, its LM head and what makes its candidates conditional.
fn head_shapes(draft: &DraftSpec, target: &ModelSpec) -> Result<(), WeightError> {
    let (hidden, vocab) = (draft.hidden, target.vocab);
    let values = |weight: &WeightRef, n| shape(weight, 1, n);
    if let Some(embedding) = &draft.embedding {
        shape(embedding, vocab, hidden)?;
    }
    let ids = draft.head.as_ref().and_then(|head| head.ids.as_ref());
    let draft_vocab = ids.map_or(vocab, |ids| ids.len());
    if let Some(head) = &draft.head {
        let beyond = ids.is_some_and(|ids| ids.iter().any(|id| id.index() >= vocab));
        if beyond || draft_vocab > vocab {
            let detail = "its rows are not tokens of the target's vocabulary";
            return Err(mismatch(&head.weight, detail));
        }
        shape(&head.weight, draft_vocab, hidden)?;
    }
    match &draft.conditioning {
        Conditioning::Independent => {
            if draft.head.is_some() || draft.logit_scale != 1.0 || draft.logit_softcap.is_some() {
                let detail = "a draft of independent positions uses the target's logits";
                return Err(mismatch(&draft.fc, detail));
            }
            Ok(())
        }
        Conditioning::Pairwise(selector) => {
            let rank = selector.hidden.rows;
            if ids.is_some() || !(1..=vocab).contains(&selector.top_k) {
                let detail = "a selector scores some tokens of the whole vocabulary";
                return Err(mismatch(&selector.hidden, detail));
            }
            shape(&selector.hidden, rank, hidden)?;
            shape(&selector.predecessor, vocab, rank)?;
            shape(&selector.successor, vocab, rank)
        }
        Conditioning::Markov(markov) => {
            let rank = markov.previous.cols;
            shape(&markov.previous, vocab, rank)?;
            shape(&markov.next, draft_vocab, rank)?;
            let Some(confidence) = &markov.confidence else {
                return Ok(());
            };
            values(&confidence.weight, hidden + rank)?;
            confidence
                .bias
                .as_ref()
                .map_or(Ok(()), |bias| values(bias, 1))
        }
    }
}
