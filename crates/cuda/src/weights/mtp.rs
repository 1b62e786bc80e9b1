//! Weights of a multi-token-prediction head. Those that it shares with the model are the model's.

use contract::{Mixer, ModelSpec, MtpSpec};

use crate::launch::embedding::EmbeddingTable;

use super::{AttentionWeights, FeedForwardWeights, LayoutBuilder, WeightMatrix};

/// Addresses of a head's weights.
#[derive(Debug, Clone)]
pub(crate) struct MtpWeights {
    pub(crate) eh_proj: WeightMatrix,
    pub(crate) embedding_norm: u64,
    pub(crate) hidden_norm: u64,
    /// Its own table, or the model's.
    pub(crate) embedding: EmbeddingTable,
    pub(crate) mixer_norm: u64,
    pub(crate) attention: AttentionWeights,
    pub(crate) ffn: FeedForwardWeights,
    pub(crate) final_norm: u64,
    /// Its own LM head, or the model's.
    pub(crate) head: WeightMatrix,
}

/// Weights of the model that a head may share.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedWeights {
    pub(super) embedding: EmbeddingTable,
    pub(super) final_norm: u64,
    pub(super) head: WeightMatrix,
}

/// Lays out the head of `spec`. Its own embedding goes to `table`, all else to `plan`.
pub(super) fn lay_out(
    (spec, mtp): (&ModelSpec, &MtpSpec),
    shared: SharedWeights,
    plan: &mut LayoutBuilder<'_>,
    table: Option<&mut LayoutBuilder<'_>>,
) -> Option<MtpWeights> {
    let Mixer::Attention(attention) = &mtp.layer.mixer else {
        return None;
    };
    let embedding = match (&mtp.embedding, table) {
        (None, _) => shared.embedding,
        (Some(own), Some(table)) => table.table(own),
        (Some(own), None) => plan.table(own),
    };
    let own_norm = mtp.final_norm.name != spec.final_norm.name;
    Some(MtpWeights {
        eh_proj: plan.matrix(&mtp.eh_proj),
        embedding_norm: plan.vector(&mtp.embedding_norm),
        hidden_norm: plan.vector(&mtp.hidden_norm),
        embedding,
        mixer_norm: plan.vector(&mtp.layer.mixer_norm),
        attention: plan.attention(attention),
        ffn: plan.feed_forward(&mtp.layer.ffn_norm, &mtp.layer.ffn),
        final_norm: if own_norm {
            plan.vector(&mtp.final_norm)
        } else {
            shared.final_norm
        },
        head: match &mtp.head {
            Some(own) => plan.matrix(own),
            None => shared.head,
        },
    })
}
