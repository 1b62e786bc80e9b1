//! The names of a draft's tensors by role, in every file format.

use super::DraftFormat;

/// A tensor outside the layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ModelTensor {
    Fc,
    HiddenNorm,
    FinalNorm,
    Embedding,
    Head,
    /// The target's id of each row of the head.
    VocabMap,
    SelectorHidden,
    SelectorPredecessor,
    SelectorSuccessor,
    MarkovPrevious,
    MarkovNext,
    Confidence,
    ConfidenceBias,
}

/// A tensor of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayerTensor {
    AttentionNorm,
    FfnNorm,
    /// The name of [`LayerTensor::FfnNorm`] in layers with a norm behind attention, in safetensors.
    PreFfnNorm,
    Q,
    K,
    V,
    O,
    QNorm,
    KNorm,
    Gate,
    Up,
    Down,
    Sinks,
    PostAttentionNorm,
    PostFfnNorm,
    AttentionConvBase,
    AttentionConvProjection,
    FfnConvBase,
    FfnConvProjection,
}

/// Names of a tensor outside the layers, the usual one first.
pub(super) fn outer_names(format: DraftFormat, tensor: ModelTensor) -> Vec<String> {
    if format == DraftFormat::Safetensors {
        let names: &[&str] = match tensor {
            ModelTensor::Fc => &["fc.weight"],
            ModelTensor::HiddenNorm => &["hidden_norm.weight"],
            ModelTensor::FinalNorm => &["norm.weight"],
            ModelTensor::Embedding => &["embed_tokens.weight"],
            ModelTensor::Head => &["lm_head.weight"],
            ModelTensor::VocabMap => &["d2t"],
            ModelTensor::SelectorHidden => &["candidate_selector.hidden_projection.weight"],
            ModelTensor::SelectorPredecessor => &[
                "candidate_selector.predecessor_codebook",
                "candidate_selector.predecessor_codebook.weight",
            ],
            ModelTensor::SelectorSuccessor => &[
                "candidate_selector.successor_codebook",
                "candidate_selector.successor_codebook.weight",
            ],
            ModelTensor::MarkovPrevious => &["markov_head.markov_w1.weight"],
            ModelTensor::MarkovNext => &["markov_head.markov_w2.weight"],
            ModelTensor::Confidence => &["confidence_head.proj.weight"],
            ModelTensor::ConfidenceBias => &["confidence_head.proj.bias"],
        };
        let plain = names.iter().map(|name| (*name).to_owned());
        let inner = names.iter().map(|name| format!("model.{name}"));
        return plain.chain(inner).collect();
    }
    let names: &[&str] = match (format, tensor) {
        (DraftFormat::GgufC, ModelTensor::Fc) => &["fc.weight"],
        (DraftFormat::GgufC, ModelTensor::HiddenNorm) => &["enc.output_norm.weight"],
        (_, ModelTensor::Fc) => &["dflash.fc.weight", "dflash_fc.weight"],
        (_, ModelTensor::HiddenNorm) => &["dflash.hidden_norm.weight", "dflash_hidden_norm.weight"],
        (_, ModelTensor::FinalNorm) => &["output_norm.weight"],
        (_, ModelTensor::Embedding) => &["token_embd.weight"],
        (_, ModelTensor::Head) => &["output.weight"],
        (_, ModelTensor::VocabMap) => &["d2t"],
        (_, ModelTensor::SelectorHidden) => {
            &["selector_hidden.weight", "selector.hidden_proj.weight"]
        }
        (_, ModelTensor::SelectorPredecessor) => {
            &["selector_predecessor.weight", "selector.pred_codebook"]
        }
        (_, ModelTensor::SelectorSuccessor) => {
            &["selector_successor.weight", "selector.succ_codebook"]
        }
        (_, ModelTensor::MarkovPrevious) => &["markov_w1.weight"],
        (_, ModelTensor::MarkovNext) => &["markov_w2.weight"],
        (_, ModelTensor::Confidence) => &["conf_proj.weight"],
        (_, ModelTensor::ConfidenceBias) => &["conf_proj.bias"],
    };
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Names of a tensor of a layer, the usual one first.
pub(super) fn inner_names(format: DraftFormat, layer: usize, tensor: LayerTensor) -> Vec<String> {
    if format == DraftFormat::Safetensors {
        let names: &[&str] = match tensor {
            LayerTensor::AttentionNorm => &["input_layernorm.weight"],
            LayerTensor::FfnNorm => &["post_attention_layernorm.weight"],
            LayerTensor::PreFfnNorm => &["pre_feedforward_layernorm.weight"],
            LayerTensor::Q => &["self_attn.q_proj.weight"],
            LayerTensor::K => &["self_attn.k_proj.weight"],
            LayerTensor::V => &["self_attn.v_proj.weight"],
            LayerTensor::O => &["self_attn.o_proj.weight"],
            LayerTensor::QNorm => &["self_attn.q_norm.weight"],
            LayerTensor::KNorm => &["self_attn.k_norm.weight"],
            LayerTensor::Gate => &["mlp.gate_proj.weight"],
            LayerTensor::Up => &["mlp.up_proj.weight"],
            LayerTensor::Down => &["mlp.down_proj.weight"],
            LayerTensor::Sinks => &["self_attn.sinks", "self_attn.attention_sink_bias"],
            LayerTensor::PostAttentionNorm => &["post_attention_layernorm.weight"],
            LayerTensor::PostFfnNorm => &["post_feedforward_layernorm.weight"],
            LayerTensor::AttentionConvBase => &["attention_conv.base_kernel"],
            LayerTensor::AttentionConvProjection => &["attention_conv.kernel_projection.weight"],
            LayerTensor::FfnConvBase => &["mlp_conv.base_kernel"],
            LayerTensor::FfnConvProjection => &["mlp_conv.kernel_projection.weight"],
        };
        let plain = names.iter().map(|name| format!("layers.{layer}.{name}"));
        let inner = names
            .iter()
            .map(|name| format!("model.layers.{layer}.{name}"));
        return plain.chain(inner).collect();
    }
    let names: &[&str] = match tensor {
        LayerTensor::AttentionNorm => &["attn_norm.weight"],
        LayerTensor::FfnNorm => &["ffn_norm.weight", "post_attention_norm.weight"],
        LayerTensor::PreFfnNorm => &["ffn_norm.weight"],
        LayerTensor::Q => &["attn_q.weight"],
        LayerTensor::K => &["attn_k.weight"],
        LayerTensor::V => &["attn_v.weight"],
        LayerTensor::O => &["attn_output.weight"],
        LayerTensor::QNorm => &["attn_q_norm.weight"],
        LayerTensor::KNorm => &["attn_k_norm.weight"],
        LayerTensor::Gate => &["ffn_gate.weight"],
        LayerTensor::Up => &["ffn_up.weight"],
        LayerTensor::Down => &["ffn_down.weight"],
        LayerTensor::Sinks => &["attn_sinks.weight", "attn_sinks"],
        LayerTensor::PostAttentionNorm => &["post_attention_norm.weight"],
        LayerTensor::PostFfnNorm => &["post_ffw_norm.weight"],
        LayerTensor::AttentionConvBase => &["attn_conv_base", "attn_conv.base"],
        LayerTensor::AttentionConvProjection => &["attn_conv_proj.weight", "attn_conv.proj.weight"],
        LayerTensor::FfnConvBase => &["ffn_conv_base", "ffn_conv.base"],
        LayerTensor::FfnConvProjection => &["ffn_conv_proj.weight", "ffn_conv.proj.weight"],
    };
    let names = names.iter();
    names.map(|name| format!("blk.{layer}.{name}")).collect()
}
