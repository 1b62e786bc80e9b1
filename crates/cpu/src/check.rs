//! Checks of a configuration, so that forward passes can index without further checks.

use contract::quant::hadamard;
use contract::{
    AttentionSpec, Conditioning, DeviceError, DraftSpec, GatedDeltaSpec, KvFormat, Mixer,
    ModelSpec, OutputGate, Tree, WeightError, WeightRef,
};
use contract::{Limits, LoadConfig};

/// Cached rows are stored in multiples of this many values.
const KV_BLOCK: usize = 32;

/// Refuses a configuration that this device cannot run, with the reason.
pub(crate) fn require_supported(config: &LoadConfig, device: &str) -> Result<(), DeviceError> {
    let unsupported = |what: String, instead: &str| DeviceError::Unsupported {
        what,
        device: device.to_owned(),
        instead: instead.to_owned(),
    };
    limits(config.limits).map_err(|(what, instead)| unsupported(what, instead))?;
    spec(&config.target)?;
    for attention in config.target.kv_layers() {
        if !attention.head_dim.is_multiple_of(KV_BLOCK) {
            return Err(unsupported(
                format!("a head dimension of {}", attention.head_dim),
                "it must be a multiple of 32",
            ));
        }
        for (what, format) in [("keys", config.kv.k), ("values", config.kv.v)] {
            if format == KvFormat::Tq3_0 && !attention.head_dim.is_multiple_of(hadamard::GROUP) {
                return Err(unsupported(
                    format!("storing {what} of {} values as tq3_0", attention.head_dim),
                    "it stores 128 values together; use q4_0",
                ));
            }
        }
    }
    let Some(draft) = &config.draft else {
        return Ok(());
    };
    if draft.kv == KvFormat::Tq3_0 {
        return Err(unsupported(
            format!("storing a draft's rows as {}", draft.kv.name()),
            "use f16 or another format that need not be rotated",
        ));
    }
    Ok(draft_spec(&draft.spec, &config.target)?)
}

/// Checks a draft against its target.
fn draft_spec(draft: &DraftSpec, target: &ModelSpec) -> Result<(), WeightError> {
    let hidden = target.hidden;
    let beyond = draft
        .capture_layers
        .iter()
        .any(|tap| *tap >= target.layers.len());
    if draft.hidden != hidden || draft.mask_token.index() >= target.vocab || beyond {
        let detail = "the draft is not one of this target";
        return Err(mismatch(&draft.fc, detail));
    }
    if !(2..=Tree::MAX_NODES).contains(&draft.block) || draft.layers.is_empty() {
        return Err(mismatch(&draft.fc, "a draft needs a layer and a block"));
    }
    shape(&draft.fc, hidden, draft.capture_layers.len() * hidden)?;
    values(&draft.hidden_norm, hidden)?;
    values(&draft.final_norm, hidden)?;
    for layer in &draft.layers {
        values(&layer.attention_norm, hidden)?;
        attention(&layer.attention, hidden)?;
        let a = &layer.attention;
        if !a.is_basic() {
            let detail = "a draft layer has no biases, and no window or rotary kind of its own";
            return Err(mismatch(&a.q, detail));
        }
        if a.gate != OutputGate::None || !a.head_dim.is_multiple_of(KV_BLOCK) || layer.window == 0 {
            let detail = "a draft layer has no gate, whole blocks in a head and a window";
            return Err(mismatch(&a.q, detail));
        }
        if a.rope.dims == 0 {
            return Err(mismatch(&a.q, "a draft layer rotates its heads"));
        }
        values(&layer.ffn_norm, hidden)?;
        layer.ffn.require_shapes(hidden)?;
        for norm in layer.post_attention_norm.iter().chain(&layer.post_ffn_norm) {
            values(norm, hidden)?;
        }
        if let Some(sinks) = &layer.sinks {
            values(sinks, a.n_heads)?;
        }
        for conv in layer.attention_conv.iter().chain(&layer.ffn_conv) {
            if conv.taps == 0 || conv.group == 0 || !hidden.is_multiple_of(conv.group) {
                let detail = "a convolution has taps and whole groups of channels";
                return Err(mismatch(&conv.projection, detail));
            }
            shape(&conv.base, 2 * conv.taps, hidden)?;
            let width = 2 * conv.taps * (hidden / conv.group);
            shape(&conv.projection, width, hidden)?;
        }
    }
    draft_heads(draft, target)
}

/// Checks a draft's embedding, its LM head and what makes its candidates conditional.
fn draft_heads(draft: &DraftSpec, target: &ModelSpec) -> Result<(), WeightError> {
    let (hidden, vocab) = (draft.hidden, target.vocab);
    if draft.first_row > 1 {
        return Err(mismatch(&draft.fc, "a draft begins at row 0 or 1"));
    }
    if let Some(embedding) = &draft.embedding {
        shape(embedding, vocab, hidden)?;
    }
    let ids = draft.head.as_ref().and_then(|head| head.ids.as_ref());
    let draft_vocab = ids.map_or(vocab, |ids| ids.len());
    if let Some(head) = &draft.head {
        shape(&head.weight, draft_vocab, hidden)?;
        if ids.is_some_and(|ids| ids.iter().any(|id| id.index() >= vocab)) {
            let detail = "a row is a token beyond the target's vocabulary";
            return Err(mismatch(&head.weight, detail));
        }
    }
    match &draft.conditioning {
        Conditioning::Independent => {
            if draft.head.is_some() || draft.logit_scale != 1.0 || draft.logit_softcap.is_some() {
                let detail = "a draft of independent positions uses the target's logits";
                return Err(mismatch(&draft.fc, detail));
            }
        }
        Conditioning::Pairwise(selector) => {
            let rank = selector.hidden.rows;
            shape(&selector.hidden, rank, hidden)?;
            shape(&selector.predecessor, vocab, rank)?;
            shape(&selector.successor, vocab, rank)?;
            if ids.is_some() || !(1..=vocab).contains(&selector.top_k) {
                let detail = "a selector scores some tokens of the whole vocabulary";
                return Err(mismatch(&selector.hidden, detail));
            }
        }
        Conditioning::Markov(markov) => {
            let rank = markov.previous.cols;
            shape(&markov.previous, vocab, rank)?;
            shape(&markov.next, draft_vocab, rank)?;
            if let Some(confidence) = &markov.confidence {
                values(&confidence.weight, hidden + rank)?;
                if let Some(bias) = &confidence.bias {
                    values(bias, 1)?;
                }
            }
        }
    }
    Ok(())
}

fn limits(limits: Limits) -> Result<(), (String, &'static str)> {
    let Limits {
        sequences,
        context,
        tree_nodes,
        prefill_chunk,
        pool_tokens: _,
    } = limits;
    if sequences == 0 || context == 0 || tree_nodes == 0 || prefill_chunk == 0 {
        return Err(("a limit of 0".to_owned(), "every limit is at least 1"));
    }
    if tree_nodes > Tree::MAX_NODES {
        return Err((format!("a tree of {tree_nodes} nodes"), "use at most 64"));
    }
    Ok(())
}

/// Checks the shape of every weight.
pub(crate) fn spec(spec: &ModelSpec) -> Result<(), WeightError> {
    let hidden = spec.hidden;
    shape(&spec.embedding, spec.vocab, hidden)?;
    shape(&spec.head, spec.vocab, hidden)?;
    values(&spec.final_norm, hidden)?;
    if hidden == 0 || spec.vocab == 0 || u32::try_from(spec.vocab).is_err() {
        return Err(mismatch(
            &spec.embedding,
            "the model has no width or no vocabulary",
        ));
    }
    for layer in &spec.layers {
        values(&layer.mixer_norm, hidden)?;
        values(&layer.ffn_norm, hidden)?;
        for norm in layer.post_mixer_norm.iter().chain(&layer.post_ffn_norm) {
            values(norm, hidden)?;
        }
        match &layer.mixer {
            Mixer::Attention(spec) => attention(spec, hidden)?,
            Mixer::GatedDelta(spec) => delta(spec, hidden)?,
        }
        layer.ffn.require_shapes(hidden)?;
    }
    let Some(mtp) = &spec.mtp else {
        return Ok(());
    };
    shape(&mtp.eh_proj, hidden, 2 * hidden)?;
    for norm in [&mtp.embedding_norm, &mtp.hidden_norm, &mtp.final_norm] {
        values(norm, hidden)?;
    }
    for table in mtp.embedding.iter().chain(&mtp.head) {
        shape(table, spec.vocab, hidden)?;
    }
    values(&mtp.layer.mixer_norm, hidden)?;
    values(&mtp.layer.ffn_norm, hidden)?;
    let Some(of_head) = mtp.attention() else {
        let detail = "a multi-token prediction head has attention";
        return Err(mismatch(&mtp.eh_proj, detail));
    };
    attention(of_head, hidden)?;
    let post = mtp
        .layer
        .post_mixer_norm
        .iter()
        .chain(&mtp.layer.post_ffn_norm);
    if !of_head.is_basic() || post.count() > 0 {
        let detail =
            "a multi-token prediction head has full attention without biases and post norms";
        return Err(mismatch(&of_head.q, detail));
    }
    if of_head.rope.dims == 0 {
        return Err(mismatch(
            &of_head.q,
            "the head rotates its queries and keys",
        ));
    }
    mtp.layer.ffn.require_shapes(hidden)
}

fn attention(spec: &AttentionSpec, hidden: usize) -> Result<(), WeightError> {
    let &AttentionSpec {
        n_heads,
        n_kv_heads,
        head_dim,
        rope,
        ..
    } = spec;
    if n_kv_heads == 0 || n_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) || head_dim == 0 {
        let detail = format!("{n_heads} query heads cannot share {n_kv_heads} key heads");
        return Err(mismatch(&spec.q, &detail));
    }
    if !rope.dims.is_multiple_of(2) || rope.dims > head_dim {
        let detail = format!("{} of {head_dim} values cannot be rotated", rope.dims);
        return Err(mismatch(&spec.q, &detail));
    }
    let gated = match spec.gate {
        OutputGate::None => 1,
        OutputGate::SigmoidPerHead => 2,
    };
    shape(&spec.q, n_heads * head_dim * gated, hidden)?;
    shape(&spec.k, n_kv_heads * head_dim, hidden)?;
    shape(&spec.v, n_kv_heads * head_dim, hidden)?;
    shape(&spec.o, hidden, n_heads * head_dim)?;
    for norm in spec.q_norm.iter().chain(&spec.k_norm) {
        values(norm, head_dim)?;
    }
    if let Some(factors) = &spec.rope_factors {
        values(factors, rope.dims / 2)?;
    }
    if spec.window == Some(0) {
        return Err(mismatch(&spec.q, "a window of no positions"));
    }
    let biases = &spec.biases;
    let projections = [&spec.q, &spec.k, &spec.v, &spec.o];
    let biases = [&biases.q, &biases.k, &biases.v, &biases.o];
    for (projection, bias) in projections.into_iter().zip(biases) {
        if let Some(bias) = bias {
            values(bias, projection.rows)?;
        }
    }
    Ok(())
}

fn delta(spec: &GatedDeltaSpec, hidden: usize) -> Result<(), WeightError> {
    let &GatedDeltaSpec {
        n_k_heads,
        n_v_heads,
        k_dim,
        v_dim,
        conv_taps,
        ..
    } = spec;
    if n_k_heads == 0 || n_v_heads == 0 || !n_v_heads.is_multiple_of(n_k_heads) {
        let detail = format!("{n_v_heads} value heads cannot share {n_k_heads} key heads");
        return Err(mismatch(&spec.qkv, &detail));
    }
    if k_dim == 0 || v_dim == 0 || conv_taps < 2 {
        return Err(mismatch(
            &spec.conv,
            "heads need a width and the convolution two taps",
        ));
    }
    shape(&spec.qkv, spec.channels(), hidden)?;
    shape(&spec.z, n_v_heads * v_dim, hidden)?;
    shape(&spec.beta, n_v_heads, hidden)?;
    shape(&spec.alpha, n_v_heads, hidden)?;
    shape(&spec.out, hidden, n_v_heads * v_dim)?;
    shape(&spec.conv, spec.channels(), conv_taps)?;
    values(&spec.a, n_v_heads)?;
    values(&spec.dt, n_v_heads)?;
    values(&spec.norm, v_dim)
}

/// A matrix of exactly these dimensions with whole blocks per row.
fn shape(weight: &WeightRef, rows: usize, cols: usize) -> Result<(), WeightError> {
    weight.require_shape(rows, cols)
}

/// A vector of exactly this length.
fn values(weight: &WeightRef, n: usize) -> Result<(), WeightError> {
    shape(weight, 1, n)
}

fn mismatch(weight: &WeightRef, detail: &str) -> WeightError {
    weight.mismatch(detail)
}
