//! Tiny synthetic models: real block kinds and head sizes, random weights, any storage format.
//!
//! A model is built as data, not read from a file, so that layouts no file has can be tried too.

mod layout;
mod mixers;
mod weights;

use std::collections::HashMap;
use std::sync::Arc;

use contract::{
    DenseSpec, ExpertGateUp, ExpertStack, FeedForward, GateActivation, LayerSpec, Mixer, ModelHash,
    ModelSpec, MoeSpec, QuantType, SharedExpertSpec, WeightRef, WeightSource,
};

pub use layout::SyntheticLayout;
use weights::{InMemoryWeight, InMemoryWeights, WeightRng};

/// A model to try a device on.
#[derive(Clone)]
pub struct SyntheticModel {
    /// What it is.
    pub spec: Arc<ModelSpec>,
    /// Its weights, in memory.
    pub weights: Arc<dyn WeightSource>,
    /// How its matrices are stored.
    pub ty: QuantType,
}

/// Width and feed-forward: the narrowest that every block format can store, and an odd number of
/// blocks.
const EVEN: (usize, usize) = (256, 512);
const ODD: (usize, usize) = (288, 352);
/// Not a multiple of anything a device might like.
const VOCAB: usize = 263;
const EXPERTS: usize = 8;
const EXPERTS_USED: usize = 3;
const EXPERT_WIDTH: usize = 256;

impl SyntheticModel {
    /// A model whose matrices are stored as `ty`; vectors and convolutions stay f32, as in files.
    pub fn new(layout: SyntheticLayout, ty: QuantType, seed: u64) -> SyntheticModel {
        let (hidden, ffn) = match layout {
            SyntheticLayout::Odd => ODD,
            _ => EVEN,
        };
        let mut maker = ModelBuilder {
            ty,
            hidden,
            ffn,
            rng: WeightRng(seed ^ 0x5EED),
            weights: HashMap::new(),
        };
        let embedding = maker.matrix("embedding", VOCAB, hidden, 1.0);
        let layers = maker.layers(layout);
        let head = match layout {
            SyntheticLayout::Plain => maker.matrix("head", VOCAB, hidden, 1.0),
            _ => embedding.clone(),
        };
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&seed.to_le_bytes());
        hash[8] = layout as u8;
        hash[9..13].copy_from_slice(&ty.id().to_le_bytes());
        let spec = ModelSpec {
            name: format!("{layout:?} {}", ty.name()),
            hash: ModelHash(hash),
            vocab: VOCAB,
            hidden,
            trained_context: 4096,
            norm_eps: 1e-6,
            embedding,
            embedding_scale: match layout {
                // The square root of the width.
                SyntheticLayout::Windowed => 16.0,
                _ => 1.0,
            },
            layers,
            // Spreads logits over a few units, as trained models do.
            final_norm: maker.vector("final_norm", hidden, |d| 2.0 + 0.2 * d.signed()),
            head,
            mtp: None,
        };
        SyntheticModel {
            spec: Arc::new(spec),
            weights: Arc::new(InMemoryWeights(maker.weights)),
            ty,
        }
    }
}

impl SyntheticModel {
    /// Whether matrices of [`SyntheticLayout::Odd`] are stored as `ty` and not as the format it
    /// falls back to.
    pub fn stores_odd_widths(ty: QuantType) -> bool {
        ODD.0.is_multiple_of(ty.block_values()) && ODD.1.is_multiple_of(ty.block_values())
    }
}

/// Builds a model, matrix by matrix.
struct ModelBuilder {
    ty: QuantType,
    hidden: usize,
    ffn: usize,
    rng: WeightRng,
    weights: HashMap<Arc<str>, InMemoryWeight>,
}

impl ModelBuilder {
    fn layers(&mut self, layout: SyntheticLayout) -> Vec<LayerSpec> {
        let mixers = self.mixers(layout).into_iter().enumerate();
        let layers = mixers.map(|(i, mixer)| {
            let ffn = match layout {
                SyntheticLayout::HybridExperts | SyntheticLayout::DenseExperts => {
                    FeedForward::Experts(Box::new(self.experts(i, layout)))
                }
                _ => FeedForward::Dense(self.dense(&format!("layer {i}"), self.ffn)),
            };
            let mut layer = self.layer(i, mixer, ffn);
            if layout == SyntheticLayout::Windowed {
                self.put_norms_behind(i, &mut layer);
            }
            layer
        });
        layers.collect()
    }

    /// Gives a layer norms behind its blocks, and GELU.
    fn put_norms_behind(&mut self, i: usize, layer: &mut LayerSpec) {
        let mut norm = |part: &str| {
            let name = format!("layer {i} {part}");
            Some(self.vector(&name, self.hidden, |d| 0.8 + 0.1 * d.signed()))
        };
        layer.post_mixer_norm = norm("post_mixer_norm");
        layer.post_ffn_norm = norm("post_ffn_norm");
        if let FeedForward::Dense(dense) = &mut layer.ffn {
            dense.activation = GateActivation::GeluTanh;
        }
    }

    fn dense(&mut self, whose: &str, ffn: usize) -> DenseSpec {
        DenseSpec {
            activation: GateActivation::Silu,
            gate: self.matrix(&format!("{whose} gate"), ffn, self.hidden, 1.0),
            up: self.matrix(&format!("{whose} up"), ffn, self.hidden, 1.0),
            down: self.matrix(&format!("{whose} down"), self.hidden, ffn, 1.0),
        }
    }

    fn experts(&mut self, i: usize, layout: SyntheticLayout) -> MoeSpec {
        let name = |part: &str| format!("layer {i} {part}");
        let (n_experts, width, hidden) = (EXPERTS, EXPERT_WIDTH, self.hidden);
        let mut stack = |part: &str, rows: usize, cols: usize| ExpertStack {
            weight: self.matrix(&name(part), n_experts * rows, cols, 1.0),
            n_experts,
        };
        let gate_up = match layout {
            SyntheticLayout::HybridExperts => {
                ExpertGateUp::Fused(stack("experts gate_up", 2 * width, hidden))
            }
            _ => ExpertGateUp::Separate {
                gate: stack("experts gate", width, hidden),
                up: stack("experts up", width, hidden),
            },
        };
        let down = stack("experts down", hidden, width);
        let router = self.values(n_experts * hidden, |d| 0.3 * d.signed());
        let shared = (layout == SyntheticLayout::HybridExperts).then(|| SharedExpertSpec {
            gate: self.vector(&name("shared factor"), hidden, |d| 0.2 * d.signed()),
            ffn: self.dense(&name("shared"), 2 * width),
        });
        MoeSpec {
            n_experts,
            n_used: EXPERTS_USED,
            weights_scale: if shared.is_some() { 1.0 } else { 2.5 },
            activation: GateActivation::Silu,
            router: self.stored(&name("router"), QuantType::F32, (n_experts, hidden), router),
            gate_up,
            down,
            shared,
        }
    }

    fn layer(&mut self, i: usize, mixer: Mixer, ffn: FeedForward) -> LayerSpec {
        let name = |part: &str| format!("layer {i} {part}");
        LayerSpec {
            mixer_norm: self.vector(&name("mixer_norm"), self.hidden, |d| 1.0 + 0.1 * d.signed()),
            mixer,
            post_mixer_norm: None,
            ffn_norm: self.vector(&name("ffn_norm"), self.hidden, |d| 1.0 + 0.1 * d.signed()),
            ffn,
            post_ffn_norm: None,
        }
    }

    /// Uniform weights of a variance that keeps the scale of what goes through, times `gain`.
    fn matrix(&mut self, name: &str, rows: usize, cols: usize, gain: f32) -> WeightRef {
        let width = gain * (3.0 / cols as f32).sqrt();
        let values = self.values(rows * cols, |d| width * d.signed());
        // Formats in large blocks need inputs in multiples of 256, which a width of heads may not
        // be.
        let ty = if cols.is_multiple_of(self.ty.block_values()) {
            self.ty
        } else {
            QuantType::Q8_0
        };
        self.stored(name, ty, (rows, cols), values)
    }

    fn vector(&mut self, name: &str, n: usize, value: impl Fn(&mut WeightRng) -> f32) -> WeightRef {
        let values = self.values(n, value);
        self.stored(name, QuantType::F32, (1, n), values)
    }

    fn values(&mut self, n: usize, value: impl Fn(&mut WeightRng) -> f32) -> Vec<f32> {
        (0..n).map(|_| value(&mut self.rng)).collect()
    }

    fn stored(
        &mut self,
        name: &str,
        ty: QuantType,
        (rows, cols): (usize, usize),
        values: Vec<f32>,
    ) -> WeightRef {
        let weight = WeightRef {
            name: name.into(),
            ty,
            rows,
            cols,
        };
        let stored = InMemoryWeight::new(weight.clone(), values);
        self.weights.insert(weight.name.clone(), stored);
        weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synthetic_models_have_all_weight_bytes() {
        for layout in SyntheticLayout::ALL
            .into_iter()
            .chain(SyntheticLayout::EXPERTS)
            .chain(SyntheticLayout::OTHER_FAMILIES)
        {
            for ty in [QuantType::F32, QuantType::Q4_0, QuantType::Q6_K] {
                let model = SyntheticModel::new(layout, ty, 1);
                for weight in model.spec.weights() {
                    let bytes = model.weights.bytes(weight).unwrap();
                    assert_eq!(bytes.len(), weight.bytes(), "{layout:?} {}", weight.name);
                }
            }
        }
    }

    #[test]
    fn seeds_give_different_models() {
        let bytes = |seed| {
            let model = SyntheticModel::new(SyntheticLayout::Dense, QuantType::Q4_0, seed);
            let embedding = model.spec.embedding.clone();
            let bytes = model.weights.bytes(&embedding).unwrap().to_vec();
            (model.spec.hash, bytes)
        };
        assert_eq!(bytes(1), bytes(1));
        assert_ne!(bytes(1).0, bytes(2).0);
        assert_ne!(bytes(1).1, bytes(2).1);
    }
}
