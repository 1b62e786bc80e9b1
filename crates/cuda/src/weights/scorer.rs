//! Weights of a scorer.

use contract::{Mixer, ModelSpec};

use super::{LayerWeights, LayoutBuilder, MixerWeights, WeightMatrix, WeightSet, Weights};
use crate::memory::BumpAllocator;
use crate::pack::WeightKind;

impl Weights {
    /// Lays out the embedding table and the layers of a scorer, without final norm and LM head. The
    /// table stays on the host: each of its rows is read once per token of a prompt.
    pub(crate) fn of_scorer(
        spec: &ModelSpec,
        arena: &mut BumpAllocator,
        table_arena: &mut BumpAllocator,
    ) -> Weights {
        let mut table = LayoutBuilder::new(WeightSet::HostTable, table_arena);
        let mut plan = LayoutBuilder::new(WeightSet::Target, arena);
        let embedding = table.table(&spec.embedding);
        let layers = spec.layers.iter().map(|layer| LayerWeights {
            mixer_norm: plan.vector(&layer.mixer_norm),
            mixer: match &layer.mixer {
                Mixer::Attention(a) => MixerWeights::Attention(plan.attention(a)),
                Mixer::GatedDelta(d) => MixerWeights::Delta(plan.delta(d)),
            },
            post_mixer_norm: plan.optional_vector(layer.post_mixer_norm.as_ref()),
            ffn: plan.feed_forward(&layer.ffn_norm, &layer.ffn),
            post_ffn_norm: plan.optional_vector(layer.post_ffn_norm.as_ref()),
        });
        let layers = layers.collect();
        let mut items = plan.items;
        items.append(&mut table.items);
        Weights {
            embedding,
            layers,
            final_norm: 0,
            head: WeightMatrix {
                kind: WeightKind::F32,
                rows: 0,
                cols: spec.hidden,
                at: 0,
            },
            above: None,
            mtp: None,
            draft: None,
            experts: None,
            items,
        }
    }
}
