//! Random-weight drafts of exact shapes, without files.

use std::sync::Arc;

use contract::{
    AttentionBiases, AttentionSpec, BlockMask, Conditioning, ConfidenceHead, DenseSpec, DraftLayer,
    DraftSpec, DraftValues, DynamicConv, GateActivation, MarkovHead, ModelHash, OutputGate,
    PairwiseSelector, QuantType, RopeSpec, TokenId, WeightRef, WeightSource,
};

use super::in_memory::SynthWeights;
use super::shape::Fill;
use crate::DraftKind;
use crate::load::LoadedModel;

/// A synthetic draft of exact shapes.
#[derive(Clone)]
pub struct SynthDraft {
    /// The draft's spec.
    pub spec: Arc<DraftSpec>,
    /// Source of its weights.
    pub weights: Arc<dyn WeightSource>,
}

/// Sizes of a draft, besides those of its target.
struct SynthDraftShape {
    kind: DraftKind,
    layers: usize,
    /// Query heads, key heads and head dimension.
    heads: (usize, usize, usize),
    block: usize,
    window: usize,
    /// Rank of the selector or the Markov head.
    rank: usize,
    ty: QuantType,
}

/// Taps and channels per group of the convolutions, as in the published draft.
const CONV: (usize, usize) = (2, 16);
/// Candidates of a row, as in the published draft.
const TOP_K: usize = 16;
/// Targets from this width on get a draft of the published shape.
const FULL_WIDTH: usize = 1024;

/// A block-diffusion draft of `target`'s width in the shape of the published ones: 5 layers of 32
/// query and 8 key heads of 128, a feed-forward as wide as the target's first, blocks of 16, 5
/// captured layers spread over the target, all matrices of type `ty`.
pub fn draft_for(target: &LoadedModel, ty: QuantType, seed: u64) -> SynthDraft {
    let shape = SynthDraftShape {
        kind: DraftKind::Dflash,
        layers: 5,
        heads: (32, 8, 128),
        block: 16,
        window: DraftSpec::DEFAULT_WINDOW,
        rank: 0,
        ty,
    };
    shape.draw(target, seed)
}

/// A draft of any kind. For a target at least 1,024 wide it has the shape of the published ones;
/// for a smaller one it has 2 layers of 4 query and 2 key heads of 128, and rank 32.
///
/// A DFlash2 draft has blocks of 8, sliding layers of 2,048 tokens, convolutions of 2 taps in
/// groups of 16 channels, and a selector of the 16 best candidates. A DSpark draft has blocks of 7,
/// a confidence head, and samples at the root. Tables and small vectors stay f32 or F16.
pub fn draft_of(target: &LoadedModel, kind: DraftKind, ty: QuantType, seed: u64) -> SynthDraft {
    let full = target.spec.hidden >= FULL_WIDTH;
    let shape = SynthDraftShape {
        kind,
        layers: if full { 5 } else { 2 },
        heads: if full { (32, 8, 128) } else { (4, 2, 128) },
        block: match kind {
            DraftKind::Dflash => 16,
            DraftKind::Dflash2 => 8,
            DraftKind::Dspark => 7,
        },
        window: match kind {
            DraftKind::Dflash2 => 2048,
            DraftKind::Dflash | DraftKind::Dspark => DraftSpec::DEFAULT_WINDOW,
        },
        rank: if full { 256 } else { 32 },
        ty,
    };
    shape.draw(target, seed)
}

fn weight(name: &str, ty: QuantType, rows: usize, cols: usize) -> WeightRef {
    WeightRef {
        name: format!("draft.{name}").into(),
        ty,
        rows,
        cols,
    }
}

fn vector(name: &str, len: usize) -> WeightRef {
    weight(name, QuantType::F32, 1, len)
}

impl SynthDraftShape {
    fn draw(&self, target: &LoadedModel, seed: u64) -> SynthDraft {
        let spec = Arc::new(self.spec(target, seed));
        let fill = |weight: &WeightRef| match weight.rows {
            1 if weight.name.ends_with("norm") => Fill::Norm,
            _ => Fill::Matrix,
        };
        let drawn = spec.weights().into_iter().map(|w| (w, fill(w)));
        SynthDraft {
            weights: Arc::new(SynthWeights::new(seed, drawn)),
            spec,
        }
    }

    fn spec(&self, target: &LoadedModel, seed: u64) -> DraftSpec {
        let spec = &target.spec;
        let (hidden, layers) = (spec.hidden, spec.layers.len());
        let dense = spec.layers.first().and_then(|layer| layer.ffn.dense());
        let ffn = dense.map_or(hidden, DenseSpec::width);
        let n_captured = layers.min(5);
        let spread = |i: usize| 1 + i * layers.saturating_sub(4) / 4;
        let mut capture_layers: Vec<usize> = (0..n_captured).map(spread).collect();
        if !capture_layers.is_sorted_by(|a, b| a < b) {
            // Few layers: all of them.
            capture_layers = (0..layers).collect();
        }
        DraftSpec {
            name: format!("{} draft of {}", self.kind.name(), spec.name),
            hash: ModelHash([seed as u8; 16]),
            hidden,
            norm_eps: 1e-6,
            block: self.block,
            first_row: usize::from(self.kind != DraftKind::Dspark),
            mask_token: TokenId(u32::try_from(spec.vocab.saturating_sub(1)).unwrap_or(0)),
            fc: weight("fc", self.ty, hidden, capture_layers.len() * hidden),
            capture_layers,
            embedding: None,
            hidden_norm: vector("hidden_norm", hidden),
            layers: (0..self.layers)
                .map(|i| self.layer(i, hidden, ffn))
                .collect(),
            final_norm: vector("final_norm", hidden),
            head: None,
            logit_scale: 1.0,
            logit_softcap: None,
            conditioning: self.conditioning(hidden, spec.vocab),
        }
    }

    fn layer(&self, i: usize, hidden: usize, ffn: usize) -> DraftLayer {
        let (heads, kv_heads, dim) = self.heads;
        let matrix = |part: &str, rows, cols| weight(&format!("{i}.{part}"), self.ty, rows, cols);
        let norm = |part: &str, len| vector(&format!("{i}.{part}"), len);
        let conv = |part: &str| {
            let (taps, group) = CONV;
            let has = self.kind == DraftKind::Dflash2;
            has.then(|| DynamicConv {
                base: weight(
                    &format!("{i}.{part}_base"),
                    QuantType::F32,
                    2 * taps,
                    hidden,
                ),
                projection: matrix(part, 2 * taps * (hidden / group), hidden),
                taps,
                group,
            })
        };
        DraftLayer {
            attention_norm: norm("attention_norm", hidden),
            attention: AttentionSpec {
                n_heads: heads,
                n_kv_heads: kv_heads,
                head_dim: dim,
                rope: RopeSpec::new(dim, 1e7),
                rope_factors: None,
                window: None,
                scale: 1.0 / (dim as f32).sqrt(),
                gate: OutputGate::None,
                q_norm: Some(norm("q_norm", dim)),
                k_norm: Some(norm("k_norm", dim)),
                q: matrix("q", heads * dim, hidden),
                k: matrix("k", kv_heads * dim, hidden),
                v: matrix("v", kv_heads * dim, hidden),
                o: matrix("o", hidden, heads * dim),
                biases: AttentionBiases::default(),
            },
            values: DraftValues::Projection,
            sinks: None,
            attention_conv: conv("attention_conv"),
            post_attention_norm: None,
            window: self.window,
            block_mask: BlockMask::Full,
            ffn_norm: norm("ffn_norm", hidden),
            ffn: DenseSpec {
                activation: GateActivation::Silu,
                gate: matrix("gate", ffn, hidden),
                up: matrix("up", ffn, hidden),
                down: matrix("down", hidden, ffn),
            },
            ffn_conv: conv("ffn_conv"),
            post_ffn_norm: None,
        }
    }

    fn conditioning(&self, hidden: usize, vocab: usize) -> Conditioning {
        let rank = self.rank;
        let table = |name: &str| weight(name, QuantType::F16, vocab, rank);
        match self.kind {
            DraftKind::Dflash => Conditioning::Independent,
            DraftKind::Dflash2 => Conditioning::Pairwise(PairwiseSelector {
                hidden: weight("selector", self.ty, rank, hidden),
                predecessor: table("predecessor"),
                successor: table("successor"),
                top_k: TOP_K,
            }),
            DraftKind::Dspark => Conditioning::Markov(MarkovHead {
                previous: table("previous"),
                next: weight("next", QuantType::Q8_0, vocab, rank),
                confidence: Some(ConfidenceHead {
                    weight: vector("confidence", hidden + rank),
                    bias: Some(vector("confidence_bias", 1)),
                }),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::SynthSpec;

    #[test]
    fn later_kinds_have_the_published_shapes() {
        let target = SynthSpec::parse("qwen3.5-27b:q8_0")
            .unwrap()
            .load()
            .unwrap();
        let made = draft_of(&target, DraftKind::Dflash2, QuantType::Q4_K, 3);
        let spec = &made.spec;
        assert_eq!(
            (spec.depth(), spec.layers.len(), spec.window()),
            (7, 5, 2048)
        );
        let conv = spec.layers[0].attention_conv.as_ref().unwrap();
        assert_eq!((conv.projection.rows, conv.base.rows), (1280, 4));
        for weight in spec.weights() {
            assert_eq!(made.weights.bytes(weight).unwrap().len(), weight.bytes());
        }
        let markov = draft_of(&target, DraftKind::Dspark, QuantType::Q8_0, 3).spec;
        assert_eq!((markov.depth(), markov.first_row), (7, 0));
        assert_eq!(markov.tables().len(), 1);
    }

    #[test]
    fn tiny_targets_get_tiny_drafts_in_quantised_types() {
        let target = SynthSpec::parse("tiny-hybrid:q8_0")
            .unwrap()
            .load()
            .unwrap();
        for kind in [DraftKind::Dflash, DraftKind::Dflash2, DraftKind::Dspark] {
            for ty in [QuantType::F32, QuantType::Q8_0, QuantType::Q4_K] {
                let made = draft_of(&target, kind, ty, 3);
                assert_eq!(made.spec.layers.len(), 2);
                let bytes: usize = made.spec.weights().iter().map(|w| w.bytes()).sum();
                assert!(
                    (500_000..9_000_000).contains(&bytes),
                    "{kind:?} {ty:?}: {bytes}"
                );
                for weight in made.spec.weights() {
                    assert!(made.weights.bytes(weight).is_ok(), "{}", weight.name);
                }
            }
        }
    }
}
