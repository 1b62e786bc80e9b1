//! Weights of a draft model.

use contract::{Conditioning, DraftLayer, DraftSpec, DraftValues, DynamicConv};

use super::{AttentionWeights, FfnWeights, LayoutBuilder, WeightMatrix};
use crate::launch::embedding::EmbeddingTable;

/// Addresses of a draft's weights.
#[derive(Debug, Clone)]
pub(crate) struct DraftWeights {
    /// Its own table; `None` if it uses the target's.
    pub(crate) embedding: Option<EmbeddingTable>,
    pub(crate) fc: WeightMatrix,
    pub(crate) hidden_norm: u64,
    pub(crate) layers: Vec<DraftLayerWeights>,
    pub(crate) final_norm: u64,
    /// Its own LM head; `None` if it uses the target's.
    pub(crate) head: Option<WeightMatrix>,
    pub(crate) conditioned: Conditioned,
}

/// What makes candidates depend on the token before.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Conditioned {
    /// Nothing.
    Independent,
    /// Scores of pairs.
    Pairwise {
        hidden: WeightMatrix,
        predecessor: EmbeddingTable,
        successor: EmbeddingTable,
    },
    /// A bias on all logits.
    Markov {
        previous: EmbeddingTable,
        next: WeightMatrix,
        /// Weight and bias of a confidence head; a bias of 0 for none.
        confidence: Option<(u64, u64)>,
    },
}

/// One layer of a draft. An absent norm is 0.
#[derive(Debug, Clone)]
pub(crate) struct DraftLayerWeights {
    pub(crate) attention_norm: u64,
    /// With [`DraftValues::Keys`], `v` is `k`.
    pub(crate) attention: AttentionWeights,
    pub(crate) attention_conv: Option<ConvWeights>,
    pub(crate) post_attention_norm: u64,
    pub(crate) ffn: FfnWeights,
    pub(crate) ffn_conv: Option<ConvWeights>,
    pub(crate) post_ffn_norm: u64,
}

/// A dynamic convolution.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConvWeights {
    pub(crate) base: u64,
    pub(crate) projection: WeightMatrix,
    pub(crate) taps: usize,
    pub(crate) group: usize,
}

/// Lays out a draft.
pub(super) fn lay_out(spec: &DraftSpec, plan: &mut LayoutBuilder<'_>) -> DraftWeights {
    let layers = spec.layers.iter().map(|of| layer(of, plan)).collect();
    DraftWeights {
        layers,
        embedding: spec.embedding.as_ref().map(|own| plan.table(own)),
        fc: plan.matrix(&spec.fc),
        hidden_norm: plan.vector(&spec.hidden_norm),
        final_norm: plan.vector(&spec.final_norm),
        head: spec.head.as_ref().map(|own| plan.matrix(&own.weight)),
        conditioned: match &spec.conditioning {
            Conditioning::Independent => Conditioned::Independent,
            Conditioning::Pairwise(selector) => Conditioned::Pairwise {
                hidden: plan.matrix(&selector.hidden),
                predecessor: plan.table(&selector.predecessor),
                successor: plan.table(&selector.successor),
            },
            Conditioning::Markov(markov) => Conditioned::Markov {
                previous: plan.table(&markov.previous),
                next: plan.matrix(&markov.next),
                confidence: markov.confidence.as_ref().map(|head| {
                    let weight = plan.vector(&head.weight);
                    (weight, plan.optional_vector(head.bias.as_ref()))
                }),
            },
        },
    }
}

fn layer(of: &DraftLayer, plan: &mut LayoutBuilder<'_>) -> DraftLayerWeights {
    let a = &of.attention;
    let attention_norm = plan.vector(&of.attention_norm);
    let (q, k) = (plan.matrix(&a.q), plan.matrix(&a.k));
    let v = match of.values {
        DraftValues::Projection => plan.matrix(&a.v),
        DraftValues::Keys => k,
    };
    DraftLayerWeights {
        attention_norm,
        attention: AttentionWeights {
            q_norm: plan.optional_vector(a.q_norm.as_ref()),
            k_norm: plan.optional_vector(a.k_norm.as_ref()),
            sinks: plan.optional_vector(of.sinks.as_ref()),
            q,
            k,
            v,
            o: plan.matrix(&a.o),
            biases: [0; 3],
        },
        attention_conv: conv(of.attention_conv.as_ref(), plan),
        post_attention_norm: plan.optional_vector(of.post_attention_norm.as_ref()),
        ffn: plan.ffn(&of.ffn_norm, &of.ffn),
        ffn_conv: conv(of.ffn_conv.as_ref(), plan),
        post_ffn_norm: plan.optional_vector(of.post_ffn_norm.as_ref()),
    }
}

fn conv(spec: Option<&DynamicConv>, plan: &mut LayoutBuilder<'_>) -> Option<ConvWeights> {
    let spec = spec?;
    Some(ConvWeights {
        base: plan.vector(&spec.base),
        projection: plan.matrix(&spec.projection),
        taps: spec.taps,
        group: spec.group,
    })
}
