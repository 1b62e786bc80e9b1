//! Checks of a configuration before anything is loaded. Every rejection names its reason.

mod draft;
mod experts;
mod peer_access;
mod shard;

use contract::quant::hadamard;
use contract::{
    AttentionSpec, DeviceError, FeedForward, GateActivation, GatedDeltaSpec, KvFormat, Limits,
    LoadConfig, Mixer, ModelSpec, MtpSpec, OutputGate, Tree, WeightError, WeightRef,
};

use crate::gpu_props::GpuProps;
use crate::launch::gemm::small_batch;
use crate::pack::WeightKind;
use crate::step;

pub(crate) use peer_access::Neighbours;
pub(crate) use shard::require_shard;

/// Values per scale in the device's block formats.
const BLOCK: usize = 32;
/// Head dimensions with attention kernels.
const HEAD_DIMS: [usize; 3] = [64, 128, 256];
/// Delta head width of the tree and chunk kernels.
const DELTA_HEAD_DIM: usize = 128;
/// Convolution taps, unrolled in the kernels.
const CONV_TAPS: usize = 4;
/// Longest context. Positions are 32-bit in the step header, with space for trees.
const MAX_CONTEXT: usize = 1 << 30;

/// Rejects a configuration that this device cannot run. Errors name `device`.
pub(crate) fn require_supported(config: &LoadConfig, device: &str) -> Result<(), DeviceError> {
    let unsupported = |(what, instead): (String, &str)| DeviceError::Unsupported {
        what,
        device: device.to_owned(),
        instead: instead.to_owned(),
    };
    limits(config.limits).map_err(unsupported)?;
    spec(&config.target)?;
    if let Some(what) = unsupported_block(&config.target) {
        return Err(unsupported((what.to_owned(), "use --device cpu")));
    }
    blocks(&config.target).map_err(unsupported)?;
    groups(config).map_err(unsupported)?;
    let Some(draft) = &config.draft else {
        return Ok(());
    };
    if draft.kv == KvFormat::Tq3_0 {
        let what = "storing a draft's rows as tq3_0".to_owned();
        let instead = "use f16 or another format that need not be turned";
        return Err(unsupported((what, instead)));
    }
    draft::supported(&draft.spec).map_err(unsupported)?;
    draft::shapes(&draft.spec, &config.target)?;
    let mut heads = draft.spec.layers.iter().map(|layer| &layer.attention);
    heads.try_for_each(head).map_err(unsupported)
}

/// Rejects TQ3_0 for heads that are not multiples of its 128-value groups.
fn groups(config: &LoadConfig) -> Result<(), (String, &'static str)> {
    for (what, format) in [("keys", config.kv.k), ("values", config.kv.v)] {
        let whole = |a: &&AttentionSpec| a.head_dim.is_multiple_of(hadamard::GROUP);
        let mut layers = config.target.kv_layers();
        let narrow = layers.find(|a| format == KvFormat::Tq3_0 && !whole(a));
        if let Some(a) = narrow {
            return Err((
                format!("storing {what} of {} values as tq3_0", a.head_dim),
                "it stores 128 values together; use q4_0",
            ));
        }
    }
    Ok(())
}

/// Rejects weights whose GEMMs need more shared memory than the device has.
pub(crate) fn check_shared_memory(
    config: &LoadConfig,
    gpu: GpuProps,
    device: &str,
) -> Result<(), DeviceError> {
    let target = &config.target;
    // Embeddings are looked up, not multiplied, unless they are also the head.
    let own = target.mtp.as_ref().and_then(|mtp| mtp.embedding.as_ref());
    let tables = own.into_iter().chain([&target.embedding]);
    let looked_up: Vec<_> = tables
        .filter(|table| table.name != target.head.name)
        .map(|table| &table.name)
        .collect();
    let draft = config.draft.iter();
    let draft = draft.flat_map(|draft| draft.spec.multiplied());
    let mut all = target.weights().into_iter().chain(draft);
    let too_large = all.find(|weight| {
        let multiplied = !looked_up.contains(&&weight.name);
        multiplied && !small_batch::fits_shared_memory(gpu, WeightKind::of(weight.ty))
    });
    match too_large {
        None => Ok(()),
        Some(weight) => Err(DeviceError::Unsupported {
            what: format!("multiplying {} weights ({})", weight.ty.name(), weight.name),
            device: device.to_owned(),
            instead: format!(
                "the {} bytes of shared memory of this GPU are too few for them; \
                 use a file of q4_k_m, q8_0 or another type, or --device cpu",
                small_batch::gemm_shared_bytes(gpu)
            ),
        }),
    }
}

/// The name of a part of a model that this device does not compute.
fn unsupported_block(spec: &ModelSpec) -> Option<&'static str> {
    for layer in &spec.layers {
        let experts = layer.ffn.dense().is_none();
        let silu = layer.ffn.activation() == GateActivation::Silu;
        if experts && (layer.post_ffn_norm.is_some() || !silu) {
            return Some("experts with a norm behind them or with GELU");
        }
    }
    spec.kv_layers().find_map(|a| {
        if a.window.is_some_and(|window| window < step::ROWS) {
            Some("a sliding window of fewer than 64 tokens")
        } else if a.biases.o.is_some() {
            Some("attention with a bias of the output projection")
        } else if a.gate != OutputGate::None && a.biases.iter().next().is_some() {
            Some("gated attention with biases")
        } else {
            None
        }
    })
}

/// The name of a part of a model that scoring does not compute.
pub(crate) fn unscored_block(spec: &ModelSpec) -> Option<&'static str> {
    if spec.embedding_scale != 1.0 {
        return Some("scaled embeddings");
    }
    for layer in &spec.layers {
        if layer.post_mixer_norm.is_some() || layer.post_ffn_norm.is_some() {
            return Some("norms behind its blocks");
        }
    }
    spec.kv_layers().find_map(|a| match a {
        _ if a.window.is_some() => Some("sliding windows"),
        _ if a.biases.iter().next().is_some() => Some("biases"),
        _ => None,
    })
}

/// The norms and the feed-forward of a layer.
fn feed_forward(
    first: &WeightRef,
    second: &WeightRef,
    ffn: &FeedForward,
    hidden: usize,
) -> Result<(), WeightError> {
    shape(first, 1, hidden)?;
    shape(second, 1, hidden)?;
    ffn.require_shapes(hidden)
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
    if tree_nodes > Tree::MAX_NODES.min(step::ROWS) {
        return Err((format!("a tree of {tree_nodes} nodes"), "use at most 64"));
    }
    if context > MAX_CONTEXT {
        return Err((
            format!("a context of {context} tokens"),
            "use at most 1073741824",
        ));
    }
    Ok(())
}

fn head(a: &AttentionSpec) -> Result<(), (String, &'static str)> {
    if HEAD_DIMS.contains(&a.head_dim) {
        Ok(())
    } else {
        Err((
            format!("a head dimension of {}", a.head_dim),
            "it must be 64, 128 or 256",
        ))
    }
}

/// Kernel limits that a well-formed spec may exceed.
fn blocks(spec: &ModelSpec) -> Result<(), (String, &'static str)> {
    if !spec.hidden.is_multiple_of(BLOCK) {
        return Err((
            format!("a width of {}", spec.hidden),
            "it must be a multiple of 32",
        ));
    }
    for a in spec.kv_layers() {
        head(a)?;
    }
    for d in spec.delta_layers() {
        if (d.k_dim, d.v_dim) != (DELTA_HEAD_DIM, DELTA_HEAD_DIM) {
            return Err((
                format!("delta heads of {} x {}", d.k_dim, d.v_dim),
                "use --device cpu",
            ));
        }
        if d.conv_taps != CONV_TAPS {
            return Err((
                format!("a convolution of {} taps", d.conv_taps),
                "use --device cpu",
            ));
        }
    }
    let mtp = spec.mtp.iter().map(|mtp| &mtp.layer);
    let layers = spec.layers.iter().chain(mtp);
    for layer in layers {
        match &layer.ffn {
            FeedForward::Dense(dense) if !dense.width().is_multiple_of(BLOCK) => {
                return Err((
                    format!("a feed-forward of {}", dense.width()),
                    "it must be a multiple of 32",
                ));
            }
            FeedForward::Dense(_) => {}
            FeedForward::Experts(spec) => experts::limits(spec)?,
        }
    }
    Ok(())
}

/// Checks the shape of every weight.
fn spec(spec: &ModelSpec) -> Result<(), WeightError> {
    let hidden = spec.hidden;
    shape(&spec.embedding, spec.vocab, hidden)?;
    shape(&spec.head, spec.vocab, hidden)?;
    shape(&spec.final_norm, 1, hidden)?;
    if i32::try_from(spec.vocab).is_err() {
        return Err(mismatch(&spec.embedding, "the vocabulary is too large"));
    }
    for layer in &spec.layers {
        feed_forward(&layer.mixer_norm, &layer.ffn_norm, &layer.ffn, hidden)?;
        let mut behind = layer.post_mixer_norm.iter().chain(&layer.post_ffn_norm);
        behind.try_for_each(|norm| shape(norm, 1, hidden))?;
        match &layer.mixer {
            Mixer::Attention(a) => attention(a, hidden)?,
            Mixer::GatedDelta(d) => delta(d, hidden)?,
        }
    }
    spec.mtp.as_ref().map_or(Ok(()), |head| mtp(head, spec))
}

/// Checks a multi-token-prediction head against its model.
fn mtp(head: &MtpSpec, spec: &ModelSpec) -> Result<(), WeightError> {
    let hidden = spec.hidden;
    shape(&head.eh_proj, hidden, 2 * hidden)?;
    for norm in [&head.embedding_norm, &head.hidden_norm, &head.final_norm] {
        shape(norm, 1, hidden)?;
    }
    for table in head.embedding.iter().chain(&head.head) {
        shape(table, spec.vocab, hidden)?;
    }
    let layer = &head.layer;
    feed_forward(&layer.mixer_norm, &layer.ffn_norm, &layer.ffn, hidden)?;
    match head.attention() {
        Some(a) => attention(a, hidden),
        None => {
            let detail = "a multi-token-prediction head has attention";
            Err(mismatch(&head.eh_proj, detail))
        }
    }
}

fn attention(a: &AttentionSpec, hidden: usize) -> Result<(), WeightError> {
    let (heads, kv_heads, dim) = (a.n_heads, a.n_kv_heads, a.head_dim);
    if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) || dim == 0 {
        let detail = format!("{heads} query heads cannot share {kv_heads} key heads");
        return Err(mismatch(&a.q, &detail));
    }
    if !a.rope.dims.is_multiple_of(2) || a.rope.dims > dim {
        let detail = format!("{} of {dim} values cannot be rotated", a.rope.dims);
        return Err(mismatch(&a.q, &detail));
    }
    let parts = match a.gate {
        OutputGate::None => 1,
        OutputGate::SigmoidPerHead => 2,
    };
    shape(&a.q, heads * dim * parts, hidden)?;
    shape(&a.k, kv_heads * dim, hidden)?;
    shape(&a.v, kv_heads * dim, hidden)?;
    shape(&a.o, hidden, heads * dim)?;
    let mut norms = a.q_norm.iter().chain(&a.k_norm);
    norms.try_for_each(|norm| shape(norm, 1, dim))?;
    let biases = [
        (&a.biases.q, &a.q),
        (&a.biases.k, &a.k),
        (&a.biases.v, &a.v),
    ];
    for (bias, matrix) in biases {
        bias.as_ref()
            .map_or(Ok(()), |bias| shape(bias, 1, matrix.rows))?;
    }
    let factors = a.rope_factors.as_ref();
    factors.map_or(Ok(()), |factors| shape(factors, 1, a.rope.dims / 2))
}

fn delta(d: &GatedDeltaSpec, hidden: usize) -> Result<(), WeightError> {
    let (k_heads, v_heads) = (d.n_k_heads, d.n_v_heads);
    if k_heads == 0 || v_heads == 0 || !v_heads.is_multiple_of(k_heads) {
        let detail = format!("{v_heads} value heads cannot share {k_heads} key heads");
        return Err(mismatch(&d.qkv, &detail));
    }
    shape(&d.qkv, d.channels(), hidden)?;
    shape(&d.z, v_heads * d.v_dim, hidden)?;
    shape(&d.beta, v_heads, hidden)?;
    shape(&d.alpha, v_heads, hidden)?;
    shape(&d.out, hidden, v_heads * d.v_dim)?;
    shape(&d.conv, d.channels(), d.conv_taps)?;
    shape(&d.a, 1, v_heads)?;
    shape(&d.dt, 1, v_heads)?;
    shape(&d.norm, 1, d.v_dim)
}

/// Checks dimensions and whole blocks. A vector has one row.
fn shape(weight: &WeightRef, rows: usize, cols: usize) -> Result<(), WeightError> {
    weight.require_shape(rows, cols)
}

fn mismatch(weight: &WeightRef, detail: &str) -> WeightError {
    weight.mismatch(detail)
}
