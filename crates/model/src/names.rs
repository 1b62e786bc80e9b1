//! Names of tensors in GGUF files, as the converters write them.

pub(crate) const EMBEDDING: &str = "token_embd.weight";
pub(crate) const FINAL_NORM: &str = "output_norm.weight";
/// Absent when the embedding is the head too.
pub(crate) const HEAD: &str = "output.weight";

/// Divisors of the rotary frequencies, for all blocks; absent in most models.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

pub(crate) const MIXER_NORM: &str = "attn_norm.weight";
pub(crate) const FFN_NORM: &str = "ffn_norm.weight";
pub(crate) const FFN_GATE: &str = "ffn_gate.weight";
pub(crate) const FFN_UP: &str = "ffn_up.weight";
pub(crate) const FFN_DOWN: &str = "ffn_down.weight";

/// The one row of a DSpark draft's confidence head.
pub(crate) const CONFIDENCE: &str = "conf_proj.weight";
pub(crate) const ROUTER: &str = "ffn_gate_inp.weight";
/// One matrix per expert, in the third dimension.
pub(crate) const EXPERT_GATE: &str = "ffn_gate_exps.weight";
pub(crate) const EXPERT_UP: &str = "ffn_up_exps.weight";
/// Gate rows, then up rows, of each expert.
pub(crate) const EXPERT_GATE_UP: &str = "ffn_gate_up_exps.weight";
pub(crate) const EXPERT_DOWN: &str = "ffn_down_exps.weight";
/// The factor on the shared expert's output.
pub(crate) const SHARED_FACTOR: &str = "ffn_gate_inp_shexp.weight";
pub(crate) const SHARED_GATE: &str = "ffn_gate_shexp.weight";
pub(crate) const SHARED_UP: &str = "ffn_up_shexp.weight";
pub(crate) const SHARED_DOWN: &str = "ffn_down_shexp.weight";

pub(crate) const ATTN_Q: &str = "attn_q.weight";
pub(crate) const ATTN_K: &str = "attn_k.weight";
pub(crate) const ATTN_V: &str = "attn_v.weight";
pub(crate) const ATTN_OUT: &str = "attn_output.weight";
pub(crate) const ATTN_Q_BIAS: &str = "attn_q.bias";
pub(crate) const ATTN_K_BIAS: &str = "attn_k.bias";
pub(crate) const ATTN_V_BIAS: &str = "attn_v.bias";
pub(crate) const ATTN_OUT_BIAS: &str = "attn_output.bias";
pub(crate) const ATTN_Q_NORM: &str = "attn_q_norm.weight";
pub(crate) const ATTN_K_NORM: &str = "attn_k_norm.weight";
/// In a gated-delta block: its q, k and v. In an attention block: a fused variant that is refused.
pub(crate) const ATTN_QKV: &str = "attn_qkv.weight";

pub(crate) const DELTA_Z: &str = "attn_gate.weight";
pub(crate) const DELTA_BETA: &str = "ssm_beta.weight";
pub(crate) const DELTA_ALPHA: &str = "ssm_alpha.weight";
pub(crate) const DELTA_A: &str = "ssm_a";
pub(crate) const DELTA_DT: &str = "ssm_dt.bias";
pub(crate) const DELTA_CONV: &str = "ssm_conv1d.weight";
pub(crate) const DELTA_NORM: &str = "ssm_norm.weight";
pub(crate) const DELTA_OUT: &str = "ssm_out.weight";
/// Beta and alpha in one tensor, in an older family.
pub(crate) const DELTA_BETA_ALPHA: &str = "ssm_ba.weight";

/// Tensors of a multi-token-prediction head, in the block behind the trunk.
pub(crate) const MTP_PREFIX: &str = "nextn.";
pub(crate) const MTP_EH_PROJ: &str = "nextn.eh_proj.weight";
pub(crate) const MTP_EMBEDDING_NORM: &str = "nextn.enorm.weight";
pub(crate) const MTP_HIDDEN_NORM: &str = "nextn.hnorm.weight";
/// Absent if the head uses the model's final norm.
pub(crate) const MTP_FINAL_NORM: &str = "nextn.shared_head_norm.weight";
/// Absent if the head shares the model's embedding.
pub(crate) const MTP_EMBEDDING: &str = "nextn.embed_tokens.weight";
/// Absent if the head shares the model's LM head.
pub(crate) const MTP_HEAD: &str = "nextn.shared_head_head.weight";

/// `blk.3.attn_q.weight` for block 3 and `attn_q.weight`.
pub(crate) fn in_block(block: usize, name: &str) -> String {
    format!("blk.{block}.{name}")
}

/// The block and the rest of a tensor's name, if it belongs to a block.
pub(crate) fn block_of(name: &str) -> Option<(usize, &str)> {
    let (number, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((number.parse().ok()?, rest))
}
